"""Products of matrices by oneDNN, for processors on which torch's `linear` leaves half of the work undone.

`linear` calls MKL, which on AMD's processors with AVX-512 is less than half as fast in single precision as oneDNN, by
which torch computes other things. The models know nothing of it: whoever runs them on a CPU, as `training` and
`embedding` do, switches it on from outside.
"""

import functools
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from .ops_scratch import compute_dtype, is_compiling_or_tracing

MIN_ENTRIES = 2**16  # of a matrix; below, it makes no difference how it is multiplied
_torch_linear = F.linear


@contextmanager
def onednn_products() -> Iterator[None]:
    """Within it, `torch.nn.functional.linear`, which every `nn.Linear` calls, multiplies by oneDNN where that is
    faster, in all threads. Does nothing on other processors.

    Where it is entered, the backward pass of a checkpointed layer, which runs the layer again, must be too.
    """
    if is_mkl_slow():
        with mock.patch.object(F, "linear", linear):
            yield
    else:
        yield


@torch.compiler.assume_constant_result  # a compiler that looked inside would warn of the cache
def is_mkl_slow() -> bool:
    """Whether this is a processor of AMD with AVX-512, and torch has both libraries."""
    return _probe()


@functools.cache
def _probe() -> bool:
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    return "AuthenticAMD" in cpuinfo() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def cpuinfo() -> str:
    """What Linux says of the processor, and elsewhere what Python does."""
    described = Path("/proc/cpuinfo")
    return described.read_text(encoding="utf-8") if described.exists() else platform.processor()


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # (..., D), (F, D), (F,) -> (..., F)
    """As `torch.nn.functional.linear`, whose place it takes."""
    if not can_multiply(input, weight):
        return _torch_linear(input, weight, bias)
    if not torch.is_grad_enabled():
        return multiply(input, weight, bias)
    return LinearFunction.apply(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


def can_multiply(*matrices: Tensor) -> bool:
    """Whether `multiply` may: single precision on a CPU, and nobody but autograd follows the operations."""
    return (
        matrices[-1].numel() >= MIN_ENTRIES
        and matrices[0].dim() > 1
        and matrices[0].device.type == "cpu"
        and bool(torch.backends.mkldnn.enabled)
        and not is_compiling_or_tracing()
        and all(type(x) in (Tensor, nn.Parameter) and compute_dtype(x) == x.dtype == torch.float32 for x in matrices)
        and min(x.numel() for x in matrices) > 0
    )


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:  # (..., K), (N, K), (N,) -> (..., N)
    """`a @ b.T + bias`. Compiled models multiply so too; no public name of torch reaches it for dense tensors."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class LinearFunction(torch.autograd.Function):
    """`multiply`, and so its gradients: (M, K), (N, K), (N,) -> (M, N)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return multiply(a, b, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (a, b) = grads, ctx.saved_tensors
        grad_a = LinearFunction.apply(grad, b.T, None) if ctx.needs_input_grad[0] else None
        grad_b = LinearFunction.apply(grad.T, a.T, None) if ctx.needs_input_grad[1] else None
        return grad_a, grad_b, grad.sum(0) if ctx.needs_input_grad[2] else None


def _flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(a) * b[0]


if hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.ops.mkldnn._linear_pointwise not in flop_registry:
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_flops)  # for `FlopCounterMode`
