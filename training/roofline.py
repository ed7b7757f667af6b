"""What the device does at best, by measurement and by its data sheet."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from hf_scratch_transformer import onednn
from hf_scratch_transformer.onednn import is_mkl_slow

from .optimisation import multiplies_bfloat16

# Dense bf16 products on the data sheet, in FLOP/s; the first name that is part of the device's counts.
SHEETS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def uses_onednn() -> bool:
    """Whether ours multiplies by oneDNN on a CPU here."""
    return is_mkl_slow() and bool(torch.backends.mkldnn.enabled)


@functools.cache
def roofline(device: torch.device) -> dict[str, Any]:
    """What the device does at best: products of large matrices in FLOP/s, by precision, by oneDNN where that is faster;
    bytes/s to and from memory; and bf16 products by its data sheet, where that is known."""
    on_cpu = device.type == "cpu"

    def seconds(statement: str, **names: Any) -> float:
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median

    rates = {}
    for precision in ("fp32", "bf16") if on_cpu else ("fp32", "tf32", "bf16"):
        slow = on_cpu and precision == "bf16" and not multiplies_bfloat16("cpu")
        size = 256 if slow else 1024 if on_cpu else 8192
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        libraries: list[Callable[..., Tensor]] = [F.linear]
        if on_cpu and precision == "fp32" and uses_onednn():
            libraries.append(onednn.multiply)
        with matmul_precision(precision):
            matrix = torch.randn(size, size, device=device, dtype=dtype)
            fastest = min(seconds("multiply(a, a)", a=matrix, multiply=multiply) for multiply in libraries)
            rates[precision] = 2 * size**3 / fastest
    source = torch.empty((1 if on_cpu else 16) * 2**24, device=device).fill_(1.0)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * source.element_size() / seconds("b.copy_(a)", a=source, b=target)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = next((rate for part, rate in SHEETS.items() if part in name), None)
    return {"matmul": rates, "bandwidth": bandwidth, "sheet_bf16": sheet}


def best_rate(device: torch.device, precision: str, mixed_precision: str) -> float:
    """FLOP/s of products of large matrices in a run's precision, measured; of a GPU's bf16 by its data sheet."""
    best = roofline(device)
    rates: dict[str, float] = best["matmul"]
    if mixed_precision == "bf16":
        return float(best["sheet_bf16"] or rates["bf16"])
    return rates.get(precision, rates["fp32"])


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Within it, single-precision matrices are multiplied in TF32 units, or are not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    yield
    torch.set_float32_matmul_precision(before)
