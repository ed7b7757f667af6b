"""transformers' `generate`, with the same numbers from less waiting: each step of it has few rows.

Shapes: B batch, T length, D input width, F output width of a matrix, S of a share of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation import GenerationMixin

from .ops_scratch import processor

SHARE_ENTRIES = 2**17  # of a share of a larger one, which then stays in a core's cache (512 KiB)
_torch_linear = F.linear


class Sharing(NamedTuple):
    """What is multiplied faster in shares than by a library on its own."""

    rows: range  # of a step
    min_entries: int  # of a matrix: smaller ones are multiplied before they could be shared out

    @classmethod
    def here(cls) -> "Sharing":
        """MKL is made for Intel's processors. On a Xeon with AMX and two cores, 4 to 12 rows by large matrices are 1.1
        to 2.3 times as fast in shares, fewer and more of them 0.75 to 0.97 times."""
        is_made_for = torch.backends.mkl.is_available() and "GenuineIntel" in processor()
        return cls(range(4, 13), 2**20) if is_made_for else cls(range(1, 65), 2**18)


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
    matrix, where a CPU's library would multiply on one core, or far below what memory gives (`Sharing`).

    A model that is on another device, of another precision or compiled goes on as it does, and so does a matrix that
    somebody has put another `forward` on.
    """
    is_compiled = "forward" in vars(model) or getattr(model, "_compiled_call_impl", None) is not None
    is_plain = F.linear is _torch_linear and not is_compiled and not torch.is_autocast_enabled("cpu")
    few, least = Sharing.here()
    large = [module for module in model.modules() if is_plain and is_shareable(module, least)]
    for linear in large:
        shares, rest = shares_of(linear.weight.detach())
        vars(linear)["forward"] = partial(multiply_few_rows, linear, shares, rest, linear.bias, few)
    try:
        yield
    finally:
        for linear in large:
            vars(linear).pop("forward", None)


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
    linear: nn.Linear, shares: Tensor, rest: Tensor, bias: Tensor | None, few: range, input: Tensor
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
