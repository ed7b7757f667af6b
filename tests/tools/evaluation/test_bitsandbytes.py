"""bitsandbytes on a CPU, through the configuration that transformers takes.

Where a processor has AVX512-BF16, its kernels of 4 bits compute in bfloat16, and take no head whose outputs are not a
multiple of 32; here are those that it has for any processor.
"""

from typing import Any

import bitsandbytes.functional
import pytest
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig

SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"bits": 4, "group": 64, "error": 0.3039 / 2}),
    "fp4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, {"bits": 4, "group": 64, "error": 1 / 6}),
}
INT8 = {"bits": 8, "group": 1024, "error": 1 / 254 + 2**-11}  # of weights in half precision
ALL = {"llm_int8_skip_modules": ["none"]}  # nothing is left out, the head included


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)


def weight_of(linear: nn.Module) -> Tensor:
    if hasattr(linear.weight, "quant_state"):
        return bitsandbytes.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    return linear.weight.data.float() * linear.weight.SCB[:, None] / 127


def four_bits(scheme: str, double: bool = False) -> tuple[BitsAndBytesConfig, dict[str, Any]]:
    options, bounds = SCHEMES[scheme]
    single = {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": double}
    return BitsAndBytesConfig(**options, **single, **ALL), bounds


@pytest.mark.parametrize("scheme", SCHEMES)
def test_four_bits(scheme, untied, tools):
    """NF4 and FP4, three families with a head of their own: within half a step; outputs, tokens = ours with these"""
    config, bounds = four_bits(scheme)
    quantised = untied.load(quantization_config=config)
    plain = untied.dequantised(quantised, weight_of, **bounds)
    assert hasattr(plain.lm_head, "is_quantised")
    tools.assert_same(quantised, plain, untied.inputs(), atol=1e-4)


def test_heads(head, tools):
    """NF4 with scales quantised too, every head: outputs, losses, tokens = ours with these weights"""
    options, bounds = SCHEMES["nf4"]
    config = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_use_double_quant=True)
    quantised = head.load(quantization_config=config)
    plain = head.dequantised(quantised, weight_of, **bounds | {"error": 0.2})
    tools.assert_same(quantised, plain, head.inputs(), atol=1e-4)


def round_rows(x: Tensor) -> Tensor:
    scale = x.half().float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x.half().float() / scale).round() * scale


def test_eight_bits(head, tools):
    """LLM.int8, every head: weights within half a step; each layer = ours within 0.03, outputs, loss"""
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    quantised = head.load(quantization_config=config)
    plain = head.dequantised(quantised, weight_of, **INT8)
    tools.assert_each_same(quantised, plain, head.inputs(), round_rows, atol=3e-2)


@pytest.mark.parametrize("bits", [4, 8])
def test_saved(bits, untied, tmp_path):
    """4 and 8 bits, three families: outputs saved and loaded = before, the file smaller by as much as weights are"""
    config, bounds = four_bits("nf4") if bits == 4 else (BitsAndBytesConfig(load_in_8bit=True), INT8)
    quantised = untied.load(quantization_config=config)
    untied.assert_saved(quantised, untied.dequantised(quantised, weight_of, **bounds), tmp_path / "saved", bits)
