"""torch's own dynamic quantisation, which is of the whole model's linear layers."""

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

PACKAGE = "torch"


def weight_of(linear: nn.Module) -> Tensor:
    return linear.weight().dequantize()


def round_all(x: Tensor) -> Tensor:
    """To the 128 values that its products on a CPU leave room for."""
    lowest, highest = x.min().clamp(max=0), x.max().clamp(min=0)
    scale = (highest - lowest) / 127
    zero = (-lowest / scale).round()
    return (((x / scale).round() + zero).clamp(0, 127) - zero) * scale


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_dynamic(head, tools):
    """quantize_dynamic, every head: weights within half a step; each layer, outputs, loss = ours with both rounded"""
    quantised = quantize_dynamic(head.load(), {nn.Linear}, dtype=torch.qint8)
    plain = head.dequantised(quantised, weight_of, bits=8, group=None, error=1 / 254)
    tools.assert_each_same(quantised, plain, head.inputs(), round_all, atol=1e-4)
