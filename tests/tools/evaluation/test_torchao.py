"""TorchAO, through the configuration that transformers takes and by itself."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchao.quantization import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import QATConfig
from transformers import TorchAoConfig

GROUP = 32
SCHEMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (Int8WeightOnlyConfig(), {"bits": 8, "group": 1024, "error": 1 / 255}),
    "int4": (
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
        {"bits": 4, "group": GROUP, "error": 1 / 15},
    ),
}


def weight_of(linear: nn.Module) -> Tensor:
    return linear.weight.dequantize()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights(scheme, head, tools):
    """int8 and int4 weights, every head: each within half a step; outputs, losses, tokens = ours with these weights"""
    config, bounds = SCHEMES[scheme]
    quantised = head.load(quantization_config=TorchAoConfig(config))
    plain = head.dequantised(quantised, weight_of, **bounds)
    tools.assert_same(quantised, plain, head.inputs(), atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_saved(scheme, untied, tmp_path):
    """int8 and int4 weights, three families: outputs saved and loaded = before, the file smaller by three quarters"""
    config, bounds = SCHEMES[scheme]
    quantised = untied.load(quantization_config=TorchAoConfig(config))
    plain = untied.dequantised(quantised, weight_of, **bounds)
    untied.assert_saved(quantised, plain, tmp_path / "saved", bits=8)  # also of int4, whose weights it does not pack


@pytest.mark.parametrize("scheme", SCHEMES)
def test_in_place(scheme, untied, tools):
    """quantize_, three families with a head of their own: outputs, losses, tokens = ours with these weights"""
    config, bounds = SCHEMES[scheme]
    quantised = untied.load()
    quantize_(quantised, config)
    plain = untied.dequantised(quantised, weight_of, **bounds)
    assert hasattr(plain.lm_head, "is_quantised")
    tools.assert_same(quantised, plain, untied.inputs(), atol=1e-4)


def round_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127.5
    return (x * (1 / scale)).round().clamp(-128, 127) * scale


def test_dynamic(head, tools):
    """int8 weights and activations, every head: each layer, outputs and loss = ours with both rounded"""
    quantised = head.load(quantization_config=TorchAoConfig(Int8DynamicActivationInt8WeightConfig()))
    plain = head.dequantised(quantised, weight_of, **SCHEMES["int8"][1])
    tools.assert_each_same(quantised, plain, head.inputs(), round_rows, atol=1e-4)


def test_packed(untied, tools):
    """int4 weights, packed, three families: outputs = ours with these weights"""
    try:
        quantised = untied.load()
        quantize_(quantised, Int4WeightOnlyConfig(group_size=GROUP))
    except ImportError as error:
        pytest.skip(str(error))
    plain = untied.dequantised(quantised, weight_of, **SCHEMES["int4"][1])
    tools.assert_same(quantised, plain, untied.inputs(), atol=1e-2)


@torch.enable_grad()  # which lighteval switches off for all when it is imported
def test_qat(untied):
    """QAT to int4, a step of SGD, three families: loss and gradients = ours at the rounded weights; then converted"""
    config, bounds = SCHEMES["int4"]
    inputs, trained = untied.inputs(), untied.load()
    rounded = deepcopy(trained)
    quantize_(rounded, config)
    plain = untied.dequantised(rounded, weight_of, **bounds)
    quantize_(trained, QATConfig(config, step="prepare"))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    losses = [model(**inputs).loss for model in (trained, plain)]
    assert_close(*losses, atol=1e-5, rtol=1e-5)
    for loss in losses:
        loss.backward()
    ours = dict(plain.named_parameters())
    for name, value in trained.named_parameters():
        grad = ours[name].grad
        if hasattr(plain.get_submodule(name.rpartition(".")[0]), "is_quantised"):
            groups = value.detach().abs().unflatten(1, (-1, GROUP))
            is_largest = (groups == groups.amax(-1, keepdim=True)).flatten(1)
            grad = grad.masked_fill(is_largest & (value.grad == 0), 0)  # of its group, half a step beyond the range
        assert_close(value.grad, grad, atol=1e-5, rtol=1e-4)
    optimizer.step()
    with torch.no_grad():
        prepared = trained(**inputs)
    assert prepared.loss < losses[0]
    quantize_(trained, QATConfig(config, step="convert"))
    with torch.no_grad():
        assert_close(trained(**inputs).logits, prepared.logits, atol=1e-4, rtol=0)
