"""A loss and a cache have one definition, whichever path computes them: cases drawn by hypothesis, each beside texts
that are read one at a time, without padding, packing or cache, in double precision."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

import hf_scratch_transformer as scratch
from hf_scratch_transformer import cache_scratch
from hf_scratch_transformer.configuration_scratch import POSITIONS

from . import tiny

MASKED, CAUSAL, TRANSLATOR = tiny.LANGUAGE_MODELS
TOKEN_HEADS = (
    *tiny.LANGUAGE_MODELS,
    scratch.ScratchEncoderForTokenClassification,
    scratch.ScratchDecoderForTokenClassification,
)
EXAMPLES = [100, pytest.param(2000, marks=pytest.mark.slow)]


def draw(examples: int, cases: st.SearchStrategy, check: Callable[[Any], None], *known: Any) -> None:
    """Those that failed once, then the same ones each time by default, others each time where there are many."""
    test = given(cases)(check)
    for case in known:
        test = example(case)(test)
    options = {"database": None, "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings(max_examples=examples, derandomize=examples == EXAMPLES[0], **options)(test)()


@functools.lru_cache(maxsize=32)
def pair(
    head: type[PreTrainedModel], dtype: torch.dtype, window: int | None, **options: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model, and the same weights in double precision, by the formula written out."""
    model = tiny.model(head, num_labels=5, eos_token_id=None, **options).to(dtype)
    if window is not None:  # in all layers
        model.config.sliding_window = window
        model.config.layer_types = model.model.layer_types = ["sliding_attention"] * 2
    reference = copy.deepcopy(model).double()
    reference.set_attn_implementation("eager")
    return model, reference


def texts(document: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(B, T), -1 for padding -> the row of each text, and where in it its tokens are."""
    for row, marks in enumerate(document):
        for mark in marks.unique():
            if mark >= 0:
                yield row, (marks == mark).nonzero()[:, 0]


def padded(lengths: tuple[int, ...], width: int, side: str) -> Tensor:  # -> (B, T), 0 for a text, -1 for padding
    document = (torch.arange(width) < torch.tensor(lengths)[:, None]).int() - 1
    return document if side == "right" else document.flip(1)


def restarting(document: Tensor) -> Tensor:  # -> (B, T): the place of each token in its text
    place = torch.arange(document.shape[1])
    return place - (place * F.pad(document.diff() != 0, (1, 0), value=True)).cummax(1).values


# The loss


@dataclass(frozen=True)
class LossCase:
    head: type[PreTrainedModel]
    lengths: tuple[int, ...] = (7, 4)  # of the text in each row
    extra: int = 0  # more padding than the longest needs
    side: str = "right"
    mask: str = "padding"  # or "none", or one prepared in full: "bool", "float"
    packed: bool = False  # without a mask: several texts in each row, told apart by their positions
    past: int = 0  # tokens of each row that a cache holds already
    static: bool = False  # that cache
    share: float = 0.7  # of the labels that are not -100
    smoothing: float = 0.0
    count: int | None = None  # to divide by
    numbers: str = "float32"
    backend: str = "sdpa"
    positions: str = "rotary"
    window: int | None = None
    bias: bool = False  # of the head
    compiled: bool = False
    seed: int = 0


LOSS_CASES = st.builds(
    LossCase,
    head=st.sampled_from(TOKEN_HEADS),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    extra=st.integers(0, 5),
    side=st.sampled_from(["right", "left"]),
    mask=st.sampled_from(["padding", "none", "bool", "float"]),
    packed=st.booleans(),
    past=st.sampled_from([0, 0, 1, 3]),
    static=st.booleans(),
    share=st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    count=st.sampled_from([None, 7]),
    numbers=st.sampled_from(["float32", "float64", "bfloat16", "autocast"]),
    backend=st.sampled_from(["sdpa", "eager"]),
    positions=st.sampled_from(list(POSITIONS)),
    window=st.sampled_from([None, None, 3]),
    bias=st.booleans(),
    compiled=st.sampled_from([False] * 19 + [True]),
    seed=st.integers(0, 99),
)


def possible(case: LossCase) -> LossCase:
    """The nearest case that there is."""
    task, family = tiny.task(case.head), tiny.family(case.head)
    changes: dict[str, Any] = {}
    if family != "decoder" or case.mask in ("bool", "float"):
        changes["past"] = 0
    if case.mask != "none" or case.past:
        changes["packed"] = False
    if case.numbers == "autocast":  # a mask has the type of the queries, a static cache that of the keys
        changes |= {"static": False, "mask": "bool" if case.mask == "float" else case.mask}
    if family == "seq2seq":  # the positions of its target cannot be given
        changes |= {"packed": False, "window": None, "mask": case.mask if case.mask == "none" else "padding"}
    if task == "TokenClassification":
        changes |= {"smoothing": 0.0, "bias": False}  # of language models
    if case.past:
        changes["compiled"] = False
    return replace(case, **changes)


def options_of(case: LossCase) -> dict[str, Any]:
    options: dict[str, Any] = {"position_embedding_type": case.positions, "attn_implementation": case.backend}
    if case.head in tiny.LANGUAGE_MODELS:
        options["lm_head_bias"] = case.bias
    return options


def loss_batch(case: LossCase) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """What the model is given; for each token that predicts, which text it is in and what it is to predict (B, T)."""
    generator = torch.Generator().manual_seed(case.seed)
    width, rows = max(case.lengths) + case.extra + case.past + 1, len(case.lengths)
    document = padded(case.lengths, width, case.side)
    if case.mask == "none":
        starts = torch.rand(rows, width, generator=generator) < 0.3 if case.packed else torch.zeros(rows, width)
        document = starts.int().cumsum(1)
    real = document >= 0
    classes = 5 if tiny.task(case.head) == "TokenClassification" else 40
    # Labels stand on padding too, as long as a mask tells what that is.
    labels = torch.randint(classes, (rows, width), generator=generator)
    labels[torch.rand(rows, width, generator=generator) >= case.share] = -100
    is_shifted = tiny.task(case.head) == "CausalLM"
    if case.mask in ("bool", "float"):
        labels[~(F.pad(real[:, :-1], (1, 0)) if is_shifted else real)] = -100
    batch = {"input_ids": tiny.tokens(40, rows, width, seed=case.seed), "labels": labels}
    if case.packed:
        batch["position_ids"] = restarting(document)
    elif case.mask == "padding":
        batch["attention_mask"] = real.long()
    elif case.mask != "none":
        batch["attention_mask"] = prepared(case, real)
        batch["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    if case.head is TRANSLATOR:
        if case.mask == "padding":
            batch["decoder_attention_mask"] = batch["attention_mask"]
        source = padded(tuple(length + 1 for length in case.lengths), width, case.side) + 1  # of nothing there is none
        batch |= {"attention_mask": source.long(), "input_ids": batch["input_ids"].flip(1)}
    targets = F.pad(labels[:, 1:], (0, 1), value=-100) if is_shifted else labels
    return batch, document, targets.where(torch.arange(width) >= case.past, -100)


def prepared(case: LossCase, real: Tensor) -> Tensor:  # (B, T) -> (B, 1, T, T)
    """Who sees whom. Padding sees itself, since seeing nothing is NaN to some backends."""
    place = torch.arange(real.shape[1])
    distance = place[:, None] - place
    reach, is_causal = case.window or real.shape[1], tiny.family(case.head) == "decoder"
    seen = (distance >= 0) & (distance < reach) if is_causal else distance.abs() <= reach
    allowed = (seen & real[:, None, None]) | (distance == 0)
    dtype = torch.bool if case.mask == "bool" else getattr(torch, case.numbers)
    return allowed if case.mask == "bool" else torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -1e30)


def loss_by_definition(reference: PreTrainedModel, case: LossCase) -> Tensor:
    """The surprise at each target that a text's token is to predict, each text read by itself."""
    batch, document, targets = loss_batch(case)
    losses = [torch.zeros((), dtype=torch.float64)]
    written = reference.prepare_decoder_input_ids_from_labels(batch["labels"]) if case.head is TRANSLATOR else None
    for row, places in texts(document):
        if case.head is TRANSLATOR:
            source = batch["input_ids"][row, batch["attention_mask"][row] == 1]
            inputs = {"input_ids": source[None], "decoder_input_ids": written[row, places][None]}
        else:
            inputs = {"input_ids": batch["input_ids"][row, places][None]}
        surprises = -reference(**inputs).logits[0].log_softmax(-1)
        for each, target in zip(surprises, targets[row, places].tolist(), strict=True):
            if target != -100:
                losses.append((1 - case.smoothing) * each[target] + case.smoothing * each.mean())
    return torch.stack(losses).sum() / (case.count or max(len(losses) - 1, 1))


def loss_by(model: PreTrainedModel, case: LossCase, **options: Any) -> Tensor:
    batch, _, _ = loss_batch(case)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=case.numbers == "autocast")
    if case.past:
        cache = StaticCache(config=model.config, max_cache_len=20) if case.static else DynamicCache(config=model.config)
        before = {name: value[:, : case.past] for name, value in batch.items() if name != "labels"}
        with torch.no_grad(), autocast:
            model(**before, past_key_values=cache)
        batch = {k: value if k == "attention_mask" else value[:, case.past :] for k, value in batch.items()}
        options["past_key_values"] = cache
    run = torch.compile(model, fullgraph=True, backend="eager") if case.compiled else model
    with autocast:
        return run(**batch, **options, label_smoothing=case.smoothing, num_items_in_batch=case.count).loss


def check_loss(case: LossCase) -> None:
    case = possible(case)
    dtype = torch.float32 if case.numbers == "autocast" else getattr(torch, case.numbers)
    model, reference = pair(case.head, dtype, case.window, **options_of(case))
    if case.compiled:
        torch._dynamo.reset()
    expected = loss_by_definition(reference, case)
    is_exact = case.numbers in ("float32", "float64")
    has_gradients = is_exact and expected.requires_grad and not case.past  # which is read without
    tolerance = 1e-5 if is_exact else 0.05
    if has_gradients:
        (gradient,) = torch.autograd.grad(expected, reference.get_input_embeddings().weight)
    for options in ({}, {"loss_only": True}, {"unpad_inputs": True}):
        loss = loss_by(model, case, **options)
        message = functools.partial("{}: {}".format, options)
        assert_close(loss.double(), expected.detach(), atol=tolerance, rtol=tolerance, msg=message)
        if has_gradients:
            (own,) = torch.autograd.grad(loss, model.get_input_embeddings().weight)
            assert_close(own.double(), gradient, atol=1e-5, rtol=1e-4, msg=message)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_the_loss_is_that_of_each_text_alone(examples: int) -> None:
    known = (
        LossCase(MASKED, (7, 4), side="left", share=1.0),  # labels on padding counted where it was not skipped
        LossCase(CAUSAL, (7, 4), side="left", share=1.0),  # the first token was predicted from padding
        LossCase(CAUSAL, (7, 4), side="left", share=1.0, past=3, static=True),
    )
    draw(examples, LOSS_CASES, check_loss, *known)


# Caches


class IntegerLayer(QuantizedLayer):
    """A quantised layer of integers so wide that rounding is no excuse."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return (tensor.double() * 2**30).round().long()

    def _dequantize(self, quantized: Tensor) -> Tensor:
        return (quantized.double() / 2**30).to(self.dtype)


def new_cache(kind: str, model: PreTrainedModel) -> Cache:
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
    match kind:
        case "static" | "offloaded static":
            return StaticCache(config=config, max_cache_len=20, offloading=kind != "static")
        case "quantised":
            return Cache(layers=[IntegerLayer(residual_length=4) for _ in range(layers)])
    return DynamicCache(config=config, offloading=kind == "offloaded")


@dataclass(frozen=True)
class CacheCase:
    cuts: tuple[int, ...]  # lengths of the calls that a sequence is cut into
    head: type[PreTrainedModel] = CAUSAL
    kind: str = "dynamic"
    gaps: tuple[int, ...] = (0,)  # padding on the left of each row
    has_mask: bool = True
    slots: bool = False  # the mask covers those of a static cache that are not filled yet
    packed: bool = False  # one call, and texts in each row that are told apart by their positions
    gradients: bool = False
    backend: str = "sdpa"
    positions: str = "rotary"
    window: int | None = None
    seed: int = 0


# Those that hold what is on an accelerator elsewhere need one.
OFFLOADED = ["offloaded", "offloaded static"] if torch.accelerator.is_available() else []
CACHE_CASES = st.builds(
    CacheCase,
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple).filter(lambda cuts: sum(cuts) <= 14),
    head=st.sampled_from([CAUSAL, TRANSLATOR]),
    kind=st.sampled_from(["dynamic", "static", "preallocated", "quantised", *OFFLOADED]),
    gaps=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    has_mask=st.booleans(),
    slots=st.booleans(),
    packed=st.booleans(),
    gradients=st.booleans(),
    backend=st.sampled_from(["sdpa", "eager"]),
    positions=st.sampled_from(list(POSITIONS)),
    window=st.sampled_from([None, None, 3]),
    seed=st.integers(0, 99),
)


def check_cache(case: CacheCase) -> None:
    is_translator = case.head is TRANSLATOR
    window = None if is_translator or case.kind == "quantised" else case.window
    is_packed = case.packed and not is_translator
    has_mask = case.has_mask and not is_packed
    options = {"position_embedding_type": case.positions, "attn_implementation": case.backend}
    model, reference = pair(case.head, torch.float32, window, **options)
    cuts = (sum(case.cuts),) if is_packed else case.cuts
    width, rows = sum(cuts), len(case.gaps)
    ids, prefix = tiny.tokens(40, rows, width, seed=case.seed), "decoder_" if is_translator else ""
    gaps = [min(gap, width - 1) * has_mask for gap in case.gaps]
    document = padded(tuple(width - gap for gap in gaps), width, "left")
    source: dict[str, Any] = {"input_ids": tiny.tokens(40, rows, 4, seed=case.seed + 1)} if is_translator else {}
    positions: dict[str, Tensor] = {}
    if is_packed:
        generator = torch.Generator().manual_seed(case.seed)
        document = (torch.rand(rows, width, generator=generator) < 0.3).int().cumsum(1)
        positions = {"position_ids": restarting(document)}

    cache = new_cache(case.kind, model)
    if is_translator:
        cache = EncoderDecoderCache(cache, DynamicCache())
    logits, end = [], 0
    is_in_place = case.kind in ("static", "offloaded static")
    few = 1 if case.kind == "preallocated" else cache_scratch.FEW
    for length in cuts:
        start, end = end, end + length
        inputs = source | {f"{prefix}input_ids": ids[:, start:end]} | positions
        if has_mask:
            mask = (document >= 0).long()[:, :end]
            inputs[f"{prefix}attention_mask"] = F.pad(mask, (0, 20 - end)) if case.slots and is_in_place else mask
        with (
            mock.patch.object(cache_scratch, "FEW", few),
            torch.set_grad_enabled(case.gradients and not is_in_place),
        ):
            logits.append(model(**inputs, past_key_values=cache, use_cache=True).logits)
    got = torch.cat(logits, dim=1).double()
    for row, places in texts(document):
        alone = {f"{prefix}input_ids": ids[row, places][None]}
        alone |= {name: value[row][None] for name, value in source.items()}
        assert_close(got[row, places], reference(**alone, use_cache=False).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("examples", EXAMPLES)
@torch.no_grad()
def test_every_cut_into_calls_gives_the_logits_of_one_call(examples: int) -> None:
    known = [CacheCase((9,), kind=kind, packed=True) for kind in ("static", "quantised")]  # texts saw each other
    draw(examples, CACHE_CASES, check_cache, *known)
