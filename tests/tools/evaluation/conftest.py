"""Quantised models beside our own with the weights that those stand for, and scores from logits."""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests import tiny

SHAPE = {"hidden_size": 64, "intermediate_size": 128}
NEW = 8
LANGUAGE_MODELS = {tiny.family(model): model for model in tiny.LANGUAGE_MODELS}

transformers.logging.disable_progress_bar()


class Quantised(NamedTuple):
    """A model of ours, its folder, and what a tool makes of the folder."""

    model: PreTrainedModel
    folder: Path

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, tiny.auto_class(type(self.model)))

    def load(self, **options: Any) -> PreTrainedModel:
        return self.auto_class.from_pretrained(self.folder, **options)

    def inputs(self) -> dict[str, Tensor]:
        found = tiny.inputs(self.model)
        return found | tiny.labels(self.model, found)

    def dequantised(
        self,
        quantised: PreTrainedModel,
        weight_of: Callable[[nn.Module], Tensor],
        bits: int,
        group: int | None,
        error: float,
    ) -> PreTrainedModel:
        """Our model with the weights of the quantised one: of `2 ** bits` values in each group of a row, or in all of
        it, none of them further from its own than `error`, as a share of the group's largest."""
        plain = deepcopy(self.model)
        count = 0
        for name, linear in plain.named_modules():
            if not isinstance(linear, nn.Linear) or is_plain(quantised.get_submodule(name)):
                assert not hasattr(linear, "is_in_block"), f"{name} is not quantised"
                continue
            weight = weight_of(quantised.get_submodule(name)).detach().float()
            width = linear.weight.numel() if group is None else min(group, linear.in_features)
            before, after = (each.reshape(-1, width) for each in (linear.weight.detach(), weight))
            share = (before - after).abs().amax(1) / before.abs().amax(1).clamp(min=1e-9)
            assert 0 < share.max() <= error * 1.01, (name, share.max())
            assert max(len(row.unique()) for row in after) <= 2**bits
            linear.weight = nn.Parameter(weight)
            linear.is_quantised = True
            count += weight.numel()
        assert count > 2**14
        return plain

    def assert_saved(self, quantised: PreTrainedModel, plain: PreTrainedModel, folder: Path, bits: int) -> None:
        """Saved and loaded it computes the same, and is smaller by what its weights no longer take."""
        quantised.save_pretrained(folder)
        loaded, inputs = self.auto_class.from_pretrained(folder), self.inputs()
        with torch.no_grad():
            assert_close(loaded(**inputs)[1], quantised(**inputs)[1], atol=0, rtol=0)
        count = sum(each.weight.numel() for each in plain.modules() if hasattr(each, "is_quantised"))
        assert size(self.folder) - size(folder) >= 0.8 * count * (4 - bits / 8)


def is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@torch.no_grad()
def assert_same(quantised: PreTrainedModel, plain: PreTrainedModel, inputs: dict[str, Tensor], atol: float) -> None:
    """Outputs, losses with and without logits, and tokens of a language model."""
    theirs, ours = quantised(**inputs), plain(**inputs)
    assert_close(theirs[1].float(), ours[1], atol=atol, rtol=0)
    assert_close(theirs.loss.float(), ours.loss, atol=atol, rtol=0)
    if type(plain) in tiny.LANGUAGE_MODELS:
        assert_close(quantised(**inputs, loss_only=True).loss.float(), ours.loss, atol=atol, rtol=0)
    if plain.can_generate():
        prompt = {"input_ids": inputs["input_ids"][:1]}
        tokens = [model.generate(**prompt, max_new_tokens=NEW, do_sample=False) for model in (quantised, plain)]
        assert_close(*tokens)


@torch.no_grad()
def assert_each_same(
    quantised: PreTrainedModel,
    plain: PreTrainedModel,
    inputs: dict[str, Tensor],
    quantise: Callable[[Tensor], Tensor],
    atol: float,
) -> None:
    """What goes into each quantised matrix and is rounded there, what comes out, and the outputs of all. Our model goes
    on from what the other's layer has found: a number that is rounded to the other side would be seen ever after."""
    calls: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def record(name: str, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        calls[name].append((inputs[0].clone(), output.clone()))

    def replay(name: str, linear: nn.Linear, inputs: tuple[Tensor], _: Tensor) -> Tensor:
        given, found = calls[name].pop(0)
        assert_close(inputs[0], given, atol=1e-5, rtol=1e-5)
        assert_close(found, F.linear(quantise(given), linear.weight, linear.bias), atol=atol, rtol=0)
        return found

    names = [name for name, module in plain.named_modules() if hasattr(module, "is_quantised")]
    for name in names:
        quantised.get_submodule(name).register_forward_hook(partial(record, name))
        plain.get_submodule(name).register_forward_hook(partial(replay, name))
    theirs = quantised(**inputs)
    assert all(calls[name] for name in names)
    ours = plain(**inputs)
    assert not any(calls.values())
    assert_close(theirs[1], ours[1], atol=1e-5, rtol=1e-5)
    assert_close(theirs.loss, ours.loss, atol=1e-5, rtol=1e-5)


def encode(tokenizer: PreTrainedTokenizerFast, text: str, **options: Any) -> list[int]:
    return tokenizer(text, **options)["input_ids"]


def log_probabilities(model: PreTrainedModel, ids: list[int], **inputs: Tensor) -> Tensor:
    """Of every next token, at every position."""
    name = "decoder_input_ids" if inputs else "input_ids"
    with torch.no_grad():
        return model(**{name: torch.tensor([ids])}, **inputs).logits[0].double().log_softmax(-1)


def log_likelihood(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> float:
    """Of an answer, token by token."""
    if model.config.is_encoder_decoder:
        source = torch.tensor([encode(tokenizer, question)])
        ids = encode(tokenizer, answer, add_special_tokens=False)
        start = [model.config.decoder_start_token_id]
        found = log_probabilities(model, start + ids[:-1], input_ids=source)
    else:
        before, whole = encode(tokenizer, question), encode(tokenizer, question + answer)
        ids = whole[len(before) :]
        found = log_probabilities(model, whole[:-1])[len(before) - 1 :]
    return sum(float(found[place, token]) for place, token in enumerate(ids))


@pytest.fixture(params=tiny.HEADS, ids=lambda head: head.__name__)
def head(request, tmp_path) -> Quantised:
    """Every head, a language model's tied."""
    return saved(request.param, tmp_path / "model")


@pytest.fixture(params=tiny.FAMILIES)
def untied(request, tmp_path) -> Quantised:
    return saved(LANGUAGE_MODELS[request.param], tmp_path / "model", tie_word_embeddings=False)


def saved(model_class: type[PreTrainedModel], folder: Path, **shape: Any) -> Quantised:
    model = tiny.model(model_class, **SHAPE, **shape)
    model.save_pretrained(folder)
    return Quantised(model, folder)


@pytest.fixture(scope="session")
def tools() -> Any:
    shared = (assert_same, assert_each_same, log_probabilities, log_likelihood)
    return SimpleNamespace(**{function.__name__: function for function in shared})
