"""transformers' `generate`, with the same numbers from less waiting: each step of it has few rows.

Shapes: B batch, T length, D input width, F output width of a matrix.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.generation import GenerationMixin

MAX_ROWS = 64  # more are multiplied as well by a library on its own
MIN_ENTRIES = 2**18  # of a matrix: smaller ones are multiplied before they could be shared out
_torch_linear = F.linear


class ScratchGenerationMixin(GenerationMixin):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `GenerationMixin.generate`."""
        with few_row_products(self):
            return super().generate(*args, **kwargs)


@contextmanager
def few_row_products(model: Any) -> Iterator[None]:
    """Within it, the few rows of a decoding step, which a CPU's library multiplies on one core, or far below what its
    memory gives, are multiplied by all cores: each is given its share of a matrix.

    A model that is on another device, of another precision or compiled goes on as it does, and so does a matrix that
    somebody has put another `forward` on.
    """
    is_plain = F.linear is _torch_linear and not torch.is_autocast_enabled("cpu")
    large = [module for module in model.modules() if is_plain and is_shareable(module)]
    for linear in large:
        shares = linear.weight.detach().view(shares_of(linear), -1, linear.in_features).mT
        vars(linear)["forward"] = partial(multiply_few_rows, linear, shares, linear.bias)
    try:
        yield
    finally:
        for linear in large:
            vars(linear).pop("forward", None)


def is_shareable(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or "forward" in vars(module):
        return False
    weight = module.weight
    is_large = weight.is_cpu and weight.dtype == torch.float32 and weight.numel() >= MIN_ENTRIES
    return is_large and weight.is_contiguous() and shares_of(module) > 1


def shares_of(linear: nn.Linear) -> int:
    """How many equal shares of its outputs the cores can be given, one each."""
    return math.gcd(linear.out_features, torch.get_num_threads())


def multiply_few_rows(linear: nn.Linear, shares: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """`linear(input)` by shares of its weight, (parts, D, F/parts): (B, T, D) -> (B, T, F)."""
    width = shares.shape[1]
    is_few = input.ndim == 3 and input.shape[-1] == width and 0 < input.shape[0] * input.shape[1] <= MAX_ROWS
    if not is_few or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return nn.Linear.forward(linear, input)
    output = input.reshape(1, -1, width) @ shares  # (parts, B · T, F/parts)
    output = output.transpose(0, 1).reshape(*input.shape[:-1], -1)
    if bias is not None:
        output += bias
    return output
