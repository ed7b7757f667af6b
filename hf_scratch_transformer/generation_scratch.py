"""transformers' `generate`, with the same numbers from less waiting: each step of it has few rows.

Shapes: B batch, T length, D input width, F output width of a matrix, S of a share of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation import GenerationMixin

SHARE_ENTRIES = 2**17  # of a share of a larger one, which then stays in a core's cache (512 KiB)
_torch_linear = F.linear


class ScratchGenerationMixin(GenerationMixin):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `GenerationMixin.generate`."""
        settings = kwargs.get("generation_config") or self.generation_config
        is_compiled = kwargs.get("compile_config") or getattr(settings, "compile_config", None)
        with nullcontext() if is_compiled or torch.compiler.is_compiling() else few_row_products(self):
            return super().generate(*args, **kwargs)


@contextmanager
def few_row_products(model: Any) -> Iterator[None]:
    """Within it, the few rows of a decoding step are multiplied by all cores, each of which is given shares of a
    matrix, where a CPU's library would multiply on one core, or far below what memory gives (`sharing`).

    A model that is on another device, of another precision or compiled goes on as it does, and so does a matrix that
    somebody has put another `forward` on.
    """
    is_compiled = "forward" in vars(model) or getattr(model, "_compiled_call_impl", None) is not None
    is_plain = F.linear is _torch_linear and not is_compiled and not torch.is_autocast_enabled("cpu")
    few, least = sharing()
    large = [module for module in model.modules() if is_plain and is_shareable(module, least)]
    for linear in large:
        shares = shares_of(linear.weight.detach())
        vars(linear)["forward"] = partial(multiply_few_rows, linear, few, *shares, linear.bias)
    try:
        yield
    finally:
        for linear in large:
            vars(linear).pop("forward", None)


def sharing() -> tuple[range, int]:
    """How many rows, and entries of a matrix at least, are multiplied faster in shares than by a library. MKL is made
    for Intel's processors: on a Xeon with AMX, shares take 0.4 to 0.9 of the time for 4 to 12 rows, more for others."""
    known: Any = getattr(torch.cpu, "get_capabilities", dict)()  # which not all versions have
    is_made_for = torch.backends.mkl.is_available() and "Intel" in known.get("cpu_name", "")
    return (range(4, 13), 2**20) if is_made_for else (range(1, 65), 2**18)


def is_shareable(module: nn.Module, min_entries: int) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or "forward" in vars(module):
        return False
    weight = module.weight
    is_large = weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= min_entries
    return is_large and weight.is_contiguous() and 1 < torch.get_num_threads() <= module.out_features


def shares_of(weight: Tensor) -> tuple[Tensor, Tensor]:  # (F, D) -> (shares, D, S), (F - shares · S, D)
    """Equal shares of the outputs, as many for each core as for the others, and what is left over."""
    cores = torch.get_num_threads()
    most = min(weight.numel() // SHARE_ENTRIES, len(weight)) // cores * cores or cores
    count = next((count for count in range(most, 0, -cores) if len(weight) % count == 0), most)
    shared = len(weight) // count * count
    return weight[:shared].unflatten(0, (count, -1)).mT, weight[shared:]


def multiply_few_rows(
    linear: nn.Linear, few: range, shares: Tensor, rest: Tensor, bias: Tensor | None, input: Tensor
) -> Tensor:  # (B, T, D) -> (B, T, F)
    """`linear(input)`, of which `shares` and `rest` are the weight, of a `few` rows."""
    width = shares.shape[1]
    is_few = input.ndim == 3 and input.shape[-1] == width and few.start <= input.shape[0] * input.shape[1] < few.stop
    if not is_few or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nn.Linear.forward(linear, input)
    rows = input.reshape(-1, width)
    output = (rows[None] @ shares).transpose(0, 1).reshape(rows.shape[0], -1)
    if rest.shape[0]:
        output = torch.cat([output, rows @ rest.T], dim=1)
    if bias is not None:
        output += bias
    return output.view(*input.shape[:-1], -1)
