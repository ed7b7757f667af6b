"""The sizes of a model from its configuration alone: parameters, shapes, floating-point operations, memory.

Every number is read off the model itself, built and run on the meta device (`insight.trace`). Beside it stands a
formula, when there is one that gives just this number. Symbols: `d_m` width, `h` heads, `g` key-value heads if they are
fewer, `d_k` and `d_v` widths of a head, `d_ff` feed-forward width, `V` vocabulary, `P` positions, `B` batch, `T`
length; for an encoder-decoder `V_in`, `V_out`, `T_E`, `T_D`.
"""

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..stack_scratch import ScratchPreTrainedModel
from . import trace
from .presets import read_config
from .trace import Shape

# The end of a parameter's name -> the symbol of the heads it holds side by side, and what one of them has.
_FORMULAS = {
    "q_proj.weight": ("h", "d_m·d_k"),
    "k_proj.weight": ("g", "d_m·d_k"),
    "v_proj.weight": ("g", "d_m·d_v"),
    "o_proj.weight": ("", "h·d_v·d_m"),
    "gate_proj.weight": ("", "d_m·d_ff"),
    "up_proj.weight": ("", "d_m·d_ff"),
    "down_proj.weight": ("", "d_ff·d_m"),
    "q_proj.bias": ("h", "d_k"),
    "k_proj.bias": ("g", "d_k"),
    "v_proj.bias": ("g", "d_v"),
}
# What the articles count, by our names: no norms, no biases of attention, nothing that later models added.
_IN_ARTICLE = re.compile(
    r"(attn\.[qkvo]_proj\.weight|mlp\.(up|down)_proj\.(weight|bias)|(word_embeddings|lm_head)\.weight)$"
)
OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Part:
    """One part of the model, as often as it is there in the same shape."""

    path: str  # with * for the number of a layer
    times: int
    formula: str  # of the parameters of one
    parameters: int  # of one; 0 where they are those of another part
    matrices: int  # of one, biases and norms among them, heads counted apart
    in_article: bool  # counted by the articles, which describe the models of our own families
    tied_to: str | None  # the parameter that this one is
    shapes: dict[str, Shape]  # of the parameters of one

    @property
    def total(self) -> int:
        return self.times * self.parameters


@dataclass(frozen=True)
class Sublayer:
    """What goes into a module and comes out of it, as often as that happens in the same shapes."""

    path: str
    kind: str
    times: int
    inputs: dict[str, Shape]
    weights: dict[str, Shape]
    outputs: list[Shape]
    scores: Shape | None  # of the attention weights
    flops: int  # of one, in one forward pass, without those of the modules within it
    flops_formula: str


@dataclass(frozen=True)
class Memory:
    """Bytes. A peak is that of the whole step, with weights, gradients and optimiser states."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept by the forward pass for the backward pass
    training_peak: int
    checkpointed_activations: int | None  # keeping only what goes into each layer
    checkpointed_peak: int | None
    cache: int  # keys and values of a whole batch at the full length
    inference_peak: int


@dataclass(frozen=True)
class Report:
    """All the sizes of a model at one batch size and length."""

    source: str
    model: str
    family: str
    dtype: str
    attention: str
    optimizer: str
    loss_only: bool
    batch: int
    length: int  # of the target, for an encoder-decoder
    source_length: int | None
    symbols: dict[str, int]
    parts: list[Part]
    parameters: int  # as `model.num_parameters()`
    sublayers: list[Sublayer]
    forward_flops: int  # of the batch
    training_flops: int
    checkpointed_flops: int | None
    memory: Memory

    @property
    def tokens(self) -> int:
        """Those that operations a token are counted by, which for an encoder-decoder are the target's."""
        return self.batch * self.length

    @property
    def matrices(self) -> int:
        """How many matrices (and feed-forward biases) the articles count, heads apart; 501 in the base model."""
        return sum(part.times * part.matrices for part in self.parts if part.in_article)

    @property
    def article_parameters(self) -> tuple[int, int]:
        """By the articles' formulas, those in the layers, and those in token tables and head, where what is tied counts
        once."""
        counted = [part for part in self.parts if part.in_article]
        in_layers = sum(part.total for part in counted if "*" in part.path)
        return in_layers, sum(part.total for part in counted) - in_layers

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        in_layers, tables = self.article_parameters
        return dataclasses.asdict(self) | {
            "article": {"matrices": self.matrices, "in_layers": in_layers, "tables": tables},
            "forward_flops_per_token": self.forward_flops / self.tokens,
            "training_flops_per_token": self.training_flops / self.tokens,
        }


def inspect(
    source: str | os.PathLike[str] | PreTrainedConfig,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    optimizer: str = "adamw",
    checkpointing: bool = False,
    loss_only: bool = False,
) -> Report:
    """Everything that can be said of a model's size without its weights.

    Args:
        source: a configuration, or what `read_config` takes.
        batch, length, source_length: shape of the input; `length` is that of the target for an encoder-decoder, whose
            `source_length` is the same if not given. Default: the model's longest, at most 1,024.
        dtype: of weights and activations, "float32", "bfloat16" or "float16". Default: the configuration's.
        attention: "eager" or "sdpa". Default: what transformers takes.
        optimizer: "adamw", or "muon" for the matrices in the layers with AdamW for the rest.
        checkpointing: also run the step that keeps only what goes into each layer.
        loss_only: see `trace.forward_backward`.

    Raises:
        ValueError: for lengths that this model cannot have, an unknown source, dtype or optimiser.
    """
    config = source if isinstance(source, PreTrainedConfig) else read_config(source)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} must be one of {', '.join(OPTIMIZERS)}")
    dtype = dtype or str(config.dtype or "float32").removeprefix("torch.")
    if not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise ValueError(f"dtype={dtype!r} must be a floating-point type of torch: float32, bfloat16, float16")
    length, source_length = _lengths(config, batch, length, source_length)
    model = trace.build(config, getattr(torch, dtype), attention)
    inputs = trace.make_inputs(model, batch, length, source_length)
    symbols = _symbols(config, batch, length, source_length)
    with trace.explained(config, lambda other: trace.forward_backward(trace.instantiate(other), inputs)):
        training = trace.forward_backward(model, inputs, loss_only=loss_only)
        checkpointed = trace.forward_backward(model, inputs, True, loss_only) if checkpointing else None
        inference = trace.prefill(model, inputs)
    return Report(
        source=os.fspath(source) if isinstance(source, str | os.PathLike) else config.model_type,
        model=type(model).__name__,
        family=config.model_type,
        dtype=dtype,
        attention=model.config._attn_implementation,
        optimizer=optimizer,
        loss_only=loss_only,
        batch=batch,
        length=length,
        source_length=source_length,
        symbols=symbols,
        parts=parts(model, symbols),
        parameters=model.num_parameters(),
        sublayers=sublayers(training.calls, symbols),
        forward_flops=training.forward_flops,
        training_flops=training.flops,
        checkpointed_flops=checkpointed.flops if checkpointed else None,
        memory=_memory(model, optimizer, training, checkpointed, inference),
    )


def _lengths(
    config: PreTrainedConfig, batch: int, length: int | None, source_length: int | None
) -> tuple[int, int | None]:
    if source_length is not None and not config.is_encoder_decoder:
        raise ValueError(f"source_length={source_length}: {config.model_type} has no source; give length alone")
    limit = getattr(config, "max_position_embeddings", None)
    length = length if length is not None else min(limit or 1024, 1024)
    if config.is_encoder_decoder and source_length is None:
        source_length = length
    # Positions that are computed and not looked up have no end.
    endless = getattr(config, "rope_parameters", None) or config.to_dict().get("position_embedding_type") in (
        "sinusoidal",
        "none",
    )
    for name, value in {"batch": batch, "length": length, "source_length": source_length}.items():
        if value is not None and not 1 <= value < 2**31:
            raise ValueError(f"{name}={value} must be at least 1 and below 2**31")
        if value is not None and name != "batch" and limit and value > limit and not endless:
            raise ValueError(f"{name}={value} is longer than max_position_embeddings={limit} of this model")
    return length, source_length


def _symbols(config: PreTrainedConfig, batch: int, length: int, source_length: int | None) -> dict[str, int]:
    """What the letters of the formulas stand for, as far as this configuration says."""

    def first(*names: str) -> Any:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)

    width, heads = first("hidden_size"), first("num_attention_heads")
    head_dim = first("head_dim", "d_kv") or (width // heads if width and heads else None)
    groups, vocab, target_vocab = first("num_key_value_heads"), first("vocab_size"), first("decoder_vocab_size")
    found = {
        "d_m": width,
        "h": heads,
        "g": groups if groups != heads else None,
        "d_k": head_dim,
        "d_v": first("value_head_dim") or head_dim,
        "d_ff": first("intermediate_size", "n_inner", "encoder_ffn_dim", "d_ff") or 4 * (width or 0),
        "P": first("max_position_embeddings"),
        **({"V": vocab} if target_vocab in (None, vocab) else {"V_in": vocab, "V_out": target_vocab}),
        "B": batch,
        **({"T": length} if source_length is None else {"T_E": source_length, "T_D": length}),
    }
    return {name: value for name, value in found.items() if value}


def evaluate(formula: str, symbols: dict[str, int]) -> int:
    """The value of a sum of products such as `d_m·d_ff + d_ff`; 0 if it has a symbol that this model has not."""
    total = 0
    for term in formula.split(" + "):
        factors = [symbols.get(factor, factor) for factor in term.split("·")]
        if not all(str(factor).isdigit() for factor in factors):
            return 0
        total += math.prod(map(int, factors))
    return total


def _formula(name: str, shape: Shape, symbols: dict[str, int]) -> tuple[str, int]:
    """What a parameter has in symbols, as far as it can be said, and into how many matrices its heads divide it."""
    heads, one = _FORMULAS.get(".".join(name.split(".")[-2:]), ("", ""))
    if heads == "g" and "g" not in symbols:
        heads = "h"
    formula = f"{heads}·{one}" if heads else one
    if formula and evaluate(formula, symbols) == math.prod(shape):
        return formula, symbols.get(heads, 1)
    widths = {
        symbols[symbol]: symbol for symbol in ("V", "V_out", "V_in", "P", "d_k", "d_ff", "d_m") if symbol in symbols
    }
    return "·".join(widths.get(width, str(width)) for width in shape) or "1", 1


def _star(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _part_of(name: str) -> str:
    """The path of the part that a parameter is in: the sub-layer, or outside of layers the module."""
    path = name.split(".")
    index = next((i for i, step in enumerate(path[:-2]) if step.isdigit()), None)
    return ".".join(path[:-1] if index is None else path[: index + 2])


def parts(model: PreTrainedModel, symbols: dict[str, int]) -> list[Part]:
    """Where the parameters are. Their totals add up to `model.num_parameters()`, for any model."""
    ours = isinstance(model, ScratchPreTrainedModel)
    owners: dict[int, str] = {}
    entries: dict[tuple[str, bool, str | None], list[tuple[str, Shape]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = owners.setdefault(id(parameter), name)
        in_article = ours and _IN_ARTICLE.search(name) is not None
        key = (_part_of(name), in_article, owner if owner != name else None)
        entries.setdefault(key, []).append((name, tuple(parameter.shape)))
    groups: dict[Any, list[list[tuple[str, Shape]]]] = {}
    for (path, in_article, tied_to), members in entries.items():
        pattern = tuple((_star(name), shape) for name, shape in members)
        groups.setdefault((_star(path), in_article, tied_to and _star(tied_to), pattern), []).append(members)
    result = []
    for (path, in_article, tied_to, pattern), copies in groups.items():
        formulas = [_formula(name, shape, symbols) for name, shape in pattern]
        terms = Counter(formula for formula, _ in formulas)
        result.append(
            Part(
                path=path,
                times=len(copies),
                formula=" + ".join(term if count == 1 else f"{count}·{term}" for term, count in terms.items()),
                parameters=0 if tied_to else sum(math.prod(shape) for _, shape in pattern),
                matrices=sum(count for _, count in formulas),
                in_article=in_article,
                tied_to=tied_to,
                shapes={name.removeprefix(f"{path}."): shape for name, shape in pattern},
            )
        )
    return result


def sublayers(calls: Iterable[trace.Call], symbols: dict[str, int]) -> list[Sublayer]:
    """The calls of a run in order, those of like layers as one, without dropout and other modules that have nothing to
    show: no weights, no modules within, and the same shape out as in."""
    groups: dict[str, tuple[trace.Call, int]] = {}
    for call in calls:
        if call.weights or not call.is_leaf or list(call.inputs.values())[:1] != call.outputs:
            key = repr(dataclasses.replace(call, path=_star(call.path)))
            groups[key] = (call, groups.get(key, (call, 0))[1] + 1)
    return [
        Sublayer(
            path=_star(call.path),
            kind=call.kind,
            times=times,
            inputs=call.inputs,
            weights=call.weights,
            outputs=call.outputs,
            scores=call.scores,
            flops=call.flops,
            flops_formula=_flops_formula(call, symbols),
        )
        for call, times in groups.values()
    ]


def _flops_formula(call: trace.Call, symbols: dict[str, int]) -> str:
    """Of a linear map, or of attention without its linear maps, if one gives this number: each entry of a product of
    matrices is `n` multiplications and `n` additions."""
    of_source = re.search(r"(^|\.)encoder\.|(cross|encoder)_attn\.[kv]_proj$", call.path)
    lengths = [name for name in (("T_E", "T_D", "T") if of_source else ("T_D", "T_E", "T")) if name in symbols]
    if call.scores is not None:
        # Attention to a source is called so; what is tried first matters only where both lengths are the same.
        keys = lengths[::-1] if re.search(r"(cross|encoder)_attn$", call.path) else lengths
        scores = [f"2·B·h·{query}·{key}" for query in lengths for key in keys]
        candidates = [f"{score}·d_k + {score}·d_v" for score in scores]
    elif len(shape := call.weights.get("weight", ())) == 2:
        formula, _ = _formula(f"{call.path}.weight", shape, symbols)
        candidates = [f"2·B·{length}·{formula}" for length in lengths] + [f"2·B·{formula}"]
    else:
        candidates = []
    return next((text for text in candidates if evaluate(text, symbols) == call.flops), "")


def optimizer_bytes(model: PreTrainedModel, optimizer: str) -> int:
    """Bytes of an optimiser's states: two numbers a parameter for AdamW and one step count a tensor, one number a
    parameter for Muon, which takes the matrices other than token tables and the head."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables.append(model.get_output_embeddings())
    rows = {id(parameter) for table in tables if table is not None for parameter in table.parameters()}
    result = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            by_muon = optimizer == "muon" and parameter.ndim == 2 and id(parameter) not in rows
            result += parameter.nbytes if by_muon else 2 * parameter.nbytes + torch.float32.itemsize
    return result


def _memory(
    model: PreTrainedModel, optimizer: str, training: trace.Run, checkpointed: trace.Run | None, inference: trace.Run
) -> Memory:
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    states = optimizer_bytes(model, optimizer)

    def peak(run: trace.Run) -> int:
        return weights + states + max(run.peak, gradients)

    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=states,
        activations=training.kept,
        training_peak=peak(training),
        checkpointed_activations=checkpointed.kept if checkpointed else None,
        checkpointed_peak=peak(checkpointed) if checkpointed else None,
        cache=inference.kept,
        inference_peak=weights + inference.peak,
    )
