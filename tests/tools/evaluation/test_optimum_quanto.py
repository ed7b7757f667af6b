"""optimum-quanto, through the configuration that transformers takes and by itself."""

from typing import Any

import pytest
import torch
from optimum import quanto
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import QuantoConfig

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8, "group": 1024, "error": 1 / 254},
    "int4": {"bits": 4, "group": 128, "error": 1 / 15},
}


def weight_of(linear: nn.Module) -> Tensor:
    return linear.weight.dequantize()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights(scheme, head, tools):
    """QuantoConfig, int8 and int4, every head: each within half a step; outputs, losses, tokens = ours with these"""
    kept = (
        ["choice_scorer"] if hasattr(head.model, "choice_scorer") else None
    )  # whose only row would have a scale for each number
    quantised = head.load(quantization_config=QuantoConfig(weights=scheme, modules_to_not_convert=kept))
    plain = head.dequantised(quantised, weight_of, **SCHEMES[scheme])
    tools.assert_same(quantised, plain, head.inputs(), atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_place(scheme, untied, tools):
    """quantize and freeze, three families with a head of their own: outputs, losses, tokens = ours with these"""
    quantised = untied.load()
    quanto.quantize(quantised, weights=f"q{scheme}")
    quanto.freeze(quantised)
    plain = untied.dequantised(quantised, weight_of, **SCHEMES[scheme])
    assert hasattr(plain.lm_head, "is_quantised")
    tools.assert_same(quantised, plain, untied.inputs(), atol=1e-4)


@torch.no_grad()
def test_state(untied):
    """quantised weights put into a new model by requantize, three families: outputs = before"""
    quantised, loaded = untied.load(), untied.load()
    for parameter in loaded.parameters():
        parameter.zero_()
    quanto.quantize(quantised, weights="qint8")
    quanto.freeze(quantised)
    quanto.requantize(loaded, quantised.state_dict(), quanto.quantization_map(quantised))
    inputs = untied.inputs()
    assert_close(loaded(**inputs).logits, quantised(**inputs).logits, atol=0, rtol=0)


def test_saved(untied, tmp_path):
    """QuantoConfig, three families: outputs saved and loaded = before"""
    quantised = untied.load(quantization_config=QuantoConfig(weights="int8"))
    plain = untied.dequantised(quantised, weight_of, **SCHEMES["int8"])
    try:
        untied.assert_saved(quantised, plain, tmp_path / "saved", bits=8)
    except ValueError as error:
        pytest.skip(str(error))
