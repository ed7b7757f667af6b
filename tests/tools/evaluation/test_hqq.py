"""HQQ, through the configuration that transformers takes and by its own layer."""

import pytest
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from hqq.models.hf.base import AutoHQQHFModel
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import HqqConfig, PreTrainedModel

GROUP = 64
SCHEMES = {8: {"bits": 8, "group": GROUP, "error": 2 / 255}, 4: {"bits": 4, "group": GROUP, "error": 2 / 15}}


def weight_of(layer: HQQLinear) -> Tensor:
    return layer.dequantize()


def replace_linear(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    config = BaseQuantizeConfig(nbits=bits, group_size=GROUP)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            layer = HQQLinear(module, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
            model.set_submodule(name, layer)
    return model


@pytest.mark.parametrize("bits", SCHEMES)
def test_weights(bits, untied, tools):
    """HQQLinear of 8 and 4 bits, three families: each within a step; outputs, losses, tokens = ours with these"""
    quantised = replace_linear(untied.load(), bits)
    plain = untied.dequantised(quantised, weight_of, **SCHEMES[bits])
    assert hasattr(plain.lm_head, "is_quantised")
    tools.assert_same(quantised, plain, untied.inputs(), atol=1e-4)


def test_configuration(untied, tools):
    """HqqConfig, three families: outputs = ours with these weights"""
    try:
        quantised = untied.load(quantization_config=HqqConfig(nbits=4, group_size=GROUP))
    except NotImplementedError as error:
        pytest.skip(str(error))
    plain = untied.dequantised(quantised, weight_of, **SCHEMES[4])
    tools.assert_same(quantised, plain, untied.inputs(), atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("untied", ["decoder"], indirect=True)
def test_saved(untied, tmp_path):
    """AutoHQQHFModel, a decoder: outputs saved and loaded = before"""
    options = {"compute_dtype": torch.float32, "device": "cpu"}
    quantised, inputs = untied.load(), untied.inputs()
    AutoHQQHFModel.quantize_model(quantised, BaseQuantizeConfig(nbits=4, group_size=GROUP), **options)
    assert all(type(each.self_attn.q_proj) is HQQLinear for each in quantised.model.layers)
    AutoHQQHFModel.save_quantized(quantised, str(tmp_path / "saved"))
    loaded = AutoHQQHFModel.from_quantized(str(tmp_path / "saved"), **options)
    assert_close(loaded(**inputs).logits, quantised(**inputs).logits, atol=0, rtol=0)
