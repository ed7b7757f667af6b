"""Our models as ONNX, by torch's exporter: for ONNX Runtime and what is built on it.

Files, inputs and outputs have the names that Optimum gives them; sizes that change from call to call are free.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from ..files import reading
from ..stack_scratch import ScratchPreTrainedModel
from .comparison import Comparison, Writer, follow, furthest, greedily, tokens_for, worse
from .folders import Saved, write_rest

BATCH, TEXT, PAST, SOURCE = "batch_size", "sequence_length", "past_sequence_length", "encoder_sequence_length"
HELD = 4  # tokens in the caches that are traced and compared

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Graph:
    """What one file computes: named tensors of named tensors."""

    name: str
    compute: Callable[[Tensors], Tensors]
    inputs: Tensors  # to be traced with
    lengths: dict[str, str]  # what the dimension of each input is called that changes beside the batch

    def axes(self, name: str) -> dict[int, str]:
        each = self.inputs[name]
        is_choice = each.ndim == 3 and not each.is_floating_point()
        length = 2 if name.endswith((".key", ".value")) else 1 + is_choice
        return {0: BATCH, length: self.lengths[name]} | ({1: "num_choices"} if is_choice else {})


@torch.no_grad()
def write(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> None:
    """Write a folder with `model.onnx`, or `encoder_model.onnx`, `decoder_model.onnx` for a target's first tokens and
    `decoder_with_past_model.onnx` for those after them; with configuration and tokenizer.

    Raises:
        ValueError: if torch cannot export the model.
    """
    new.mkdir()
    for graph in graphs(model):
        with reading(f"{saved.folder}, which torch cannot export"):
            _write_graph(graph, model, new)
    write_rest(saved, model, new)


@torch.no_grad()
def run(saved: Saved, model: ScratchPreTrainedModel, new: Path) -> Comparison:
    """What ONNX Runtime computes by these files, and writes, beside the model."""
    run = {graph.name: _runner(graph, new) for graph in graphs(model)}
    computed = [_compared(graph, run[graph.name]) for graph in graphs(model)]
    return worse(*computed, *([follow(model, _writer(model, run))] if model.can_generate() else []))


def graphs(model: ScratchPreTrainedModel) -> list[Graph]:
    """The files that a model becomes."""
    task = type(model).__name__.partition("For")[2]
    given = tokens_for(model)
    ids = given["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if task == "CausalLM":
        return [_with_cache(model, inputs)]
    if task == "ConditionalGeneration":
        return _translator(model, inputs, given["decoder_input_ids"])
    if model.config.type_vocab_size:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    inputs |= {name: each for name, each in given.items() if name not in inputs}

    def compute(inputs: Tensors) -> Tensors:
        return {name: each for name, each in model(**inputs).items() if isinstance(each, Tensor)}

    lengths = {name: TEXT if name != "decoder_input_ids" else f"decoder_{TEXT}" for name in inputs}
    return [Graph("model", compute, inputs, lengths)]


def _with_cache(model: ScratchPreTrainedModel, inputs: Tensors) -> Graph:
    def compute(inputs: Tensors) -> Tensors:
        cache = DynamicCache(_pairs(inputs, ""))
        outputs = model(inputs["input_ids"], inputs["attention_mask"], past_key_values=cache, use_cache=True)
        return {"logits": outputs.logits, **_named(outputs.past_key_values, "present", "")}

    ids, mask = inputs.values()
    cache = model(ids[:, :HELD], use_cache=True).past_key_values
    inputs = {"input_ids": ids[:, HELD:], "attention_mask": mask, **_named(cache, "past_key_values", "")}
    lengths = {**dict.fromkeys(inputs, PAST), "input_ids": TEXT, "attention_mask": f"{PAST} + {TEXT}"}
    return Graph("model", compute, inputs, lengths)


def _translator(model: Any, inputs: Tensors, target: Tensor) -> list[Graph]:
    def encode(inputs: Tensors) -> Tensors:
        return {"last_hidden_state": model.get_encoder()(**inputs).last_hidden_state}

    def decode(inputs: Tensors) -> Tensors:
        own, source = (DynamicCache(_pairs(inputs, side)) for side in (".decoder", ".encoder"))
        cache, states = EncoderDecoderCache(own, source), inputs.get("encoder_hidden_states")
        if is_next := states is None:  # nothing is read but its shape
            key = source.layers[0].keys
            states = key.new_zeros(()).expand(len(key), key.shape[2], model.config.hidden_size)
        cache.is_updated = dict.fromkeys(range(model.config.decoder_layers), is_next)
        outputs = model(
            attention_mask=inputs["encoder_attention_mask"],
            decoder_input_ids=inputs["input_ids"],
            encoder_outputs=(states,),
            past_key_values=cache,
            use_cache=True,
        )
        # What is held of the source is what it was.
        sides = {".decoder": own} if is_next else {".decoder": own, ".encoder": source}
        return {"logits": outputs.logits} | {
            name: each for side, part in sides.items() for name, each in _named(part, "present", side).items()
        }

    mask = {"encoder_attention_mask": inputs["attention_mask"]}
    states = {"encoder_hidden_states": encode(inputs)["last_hidden_state"]}
    first = {"input_ids": target[:, :HELD], **states, **mask}
    held = {
        name.replace("present", "past_key_values"): each for name, each in decode(first).items() if name != "logits"
    }
    after = {"input_ids": target[:, HELD:], **mask, **held}
    lengths = dict.fromkeys(mask | states, SOURCE) | {"input_ids": TEXT}
    lengths |= {name: SOURCE if ".encoder." in name else PAST for name in held}
    return [
        Graph("encoder_model", encode, inputs, dict.fromkeys(inputs, TEXT)),
        Graph("decoder_model", decode, first, lengths),
        Graph("decoder_with_past_model", decode, after, lengths),
    ]


def _named(cache: Cache, when: str, side: str) -> Tensors:
    return {
        f"{when}.{index}{side}.{part}": each
        for index, layer in enumerate(cache.layers)
        for part, each in (("key", layer.keys), ("value", layer.values))
    }


def _pairs(inputs: Tensors, side: str) -> list[tuple[Tensor, Tensor]] | None:
    keys = [each for name, each in inputs.items() if name.endswith(f"{side}.key")]
    values = [each for name, each in inputs.items() if name.endswith(f"{side}.value")]
    return list(zip(keys, values, strict=True)) or None


class _Traced(nn.Module):
    def __init__(self, graph: Graph, model: ScratchPreTrainedModel):
        super().__init__()
        self.graph, self.model = graph, model

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return list(self.graph.compute(dict(zip(self.graph.inputs, tensors, strict=True))).values())


def _write_graph(graph: Graph, model: ScratchPreTrainedModel, folder: Path) -> None:
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    with _quiet():
        program = torch.onnx.export(
            _Traced(graph, model).eval(),
            tuple(graph.inputs.values()),
            dynamic_shapes=(tuple(graph.axes(name) for name in graph.inputs),),
            input_names=list(graph.inputs),
            output_names=list(graph.compute(graph.inputs)),
            dynamo=True,
            verbose=False,
        )
        assert program is not None  # which it is for the old exporter only
        # Without the lines of source, and their places on this machine, that each operation came from.
        ClearMetadataAndDocStringPass()(program.model)
        program.save(folder / f"{graph.name}.onnx")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of packages that are not needed, and of names that two dimensions have."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _runner(graph: Graph, folder: Path) -> Callable[[Tensors], Tensors]:
    from onnxruntime import InferenceSession

    path, names = folder / f"{graph.name}.onnx", list(graph.compute(graph.inputs))
    with reading(path):
        session = InferenceSession(path, providers=["CPUExecutionProvider"])
        read = {each.name for each in session.get_inputs()}

    def run(inputs: Tensors) -> Tensors:
        with reading(path):
            outputs = session.run(names, {name: each.numpy() for name, each in inputs.items() if name in read})
        return {name: torch.from_numpy(each) for name, each in zip(names, outputs, strict=True)}

    return run


def _compared(graph: Graph, run: Callable[[Tensors], Tensors]) -> Comparison:
    """Of inputs of other sizes, with padding."""
    inputs = {name: each[:1] for name, each in graph.inputs.items()}
    for name in inputs:
        if graph.lengths[name].removeprefix(f"{PAST} + ") == TEXT:
            inputs[name] = inputs[name][..., :-1]
        if name.endswith("attention_mask"):
            inputs[name] = inputs[name].clone()
            inputs[name][..., -2:] = 0
    actual = run(inputs)
    return furthest((name, each, actual[name]) for name, each in graph.compute(inputs).items())


def _writer(model: ScratchPreTrainedModel, run: Mapping[str, Callable[[Tensors], Tensors]]) -> Writer:
    """Language models and translators, with the caches passed on from call to call."""

    def write(source: Tensor | None, text: Tensor, count: int) -> tuple[Tensor, Tensor]:
        held: Tensors = {}
        if source is None:
            first = after = "model"
            empty = model(text[:, :1], use_cache=True).past_key_values
            held = {name: each[:, :, :0] for name, each in _named(empty, "past_key_values", "").items()}
            seen = text[:, :0]
        else:
            first, after = "decoder_model", "decoder_with_past_model"
            seen = torch.ones_like(source)
            states = run["encoder_model"]({"input_ids": source, "attention_mask": seen})["last_hidden_state"]
            held = {"encoder_attention_mask": seen, "encoder_hidden_states": states}

        def step(new: Tensor) -> Tensor:
            nonlocal seen, first
            inputs = {"input_ids": new, **held}
            if source is None:
                seen = torch.cat([seen, new], 1)
                inputs["attention_mask"] = torch.ones_like(seen)
            outputs = run[first](inputs)
            first = after
            held.update({name.replace("present", "past_key_values"): each for name, each in outputs.items()})
            return outputs["logits"]

        return greedily(step, text, count)

    return write
