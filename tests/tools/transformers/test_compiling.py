"""torch's own compilers and exporters, on every family."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim
from torch.testing import assert_close
from transformers import PreTrainedModel

from tests import tiny

PACKAGE = "torch"
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


@pytest.fixture(params=tiny.LANGUAGE_MODELS, ids=tiny.family)
def model(request) -> PreTrainedModel:
    torch._dynamo.reset()
    return tiny.model(request.param)


def inputs(model: PreTrainedModel, batch: int = 3, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """No padding: what stands there means nothing."""
    found = tiny.inputs(model, batch, length, padding=None, seed=seed)
    found["attention_mask"] = torch.ones_like(found["input_ids"])
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = found["input_ids"].flip(-1)
    # A cache is an object, and no output of a graph.
    return found | ({"use_cache": False} if model.can_generate() else {})


@torch.no_grad()
def assert_same(compiled, model: PreTrainedModel, **shape: int) -> None:
    for seed in range(2):
        given = inputs(model, seed=seed, **shape)
        assert_close(compiled(**given).logits, model(**given).logits, **CLOSE)


def test_compile(model):
    """torch.compile(fullgraph=True), inductor: logits = eager's"""
    assert_same(torch.compile(model, fullgraph=True), model)


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_export(strict, model):
    """torch.export, strict and not, any batch and length: logits = eager's at other shapes"""
    given = inputs(model)
    dims = {0: Dim("batch", max=64), 1: Dim("length", max=model.config.max_position_embeddings)}
    shapes = {name: dims if isinstance(value, Tensor) else None for name, value in given.items()}
    program = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=strict).module()
    for batch, length in ((3, 7), (2, 11), (5, 4)):
        assert_same(program, model, batch=batch, length=length)


@torch.no_grad()
def test_library(model, tmp_path):
    """AOTInductor's package, written and loaded: logits = eager's"""
    program = torch.export.export(model, (), inputs(model))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert_same(torch._inductor.aoti_load_package(path), model)


@torch.no_grad()
def test_trace(model, tmp_path):
    """torch.jit.trace, saved and loaded: logits = eager's at other shapes"""

    class Positional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            target = {"decoder_input_ids": ids.flip(-1)} if self.model.config.is_encoder_decoder else {}
            return self.model(input_ids=ids, use_cache=False, return_dict=False, **target)[0]

    path = tmp_path / "model.pt"
    torch.jit.trace(Positional(), inputs(model)["input_ids"], check_trace=False).save(str(path))
    for batch, length in ((3, 7), (2, 11)):
        ids = inputs(model, batch, length)["input_ids"]
        assert_close(torch.jit.load(str(path))(ids), Positional()(ids), **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, model):
    """gradient checkpointing, both kinds: loss and gradients of every weight equal"""

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        given = tiny.inputs(model)
        loss = model(**given, **tiny.labels(model, given)).loss
        loss.backward()
        return {"": loss.detach()} | {name: weight.grad.clone() for name, weight in model.named_parameters()}

    model.train()
    plain = step()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs: list[None] = []
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            module.mlp.register_forward_pre_hook(lambda *_: runs.append(None))
    assert_close(step(), plain, atol=1e-7, rtol=1e-5)
    blocks = sum(type(module).__name__ in model._no_split_modules for module in model.modules())
    assert len(runs) == 2 * blocks > 0
