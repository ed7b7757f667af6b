"""Comparisons: which contenders meet, at what shape, on what work."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import CompileConfig

from .contenders import Contender, Embedding, Generation, ModelContender, Options, Training
from .peers import NATIVE_OF, NATIVES, OURS, count_parameters, find_peer, match_parameters, ours, reference
from .runs import RecipeRun, TrainerRun
from .shapes import Shape, draw_batches, draw_texts

# What time a step takes grows with, to the power of, once the model is large.
LIMITS = {"width": 2, "depth": 1, "length": 2, "vocabulary": 1}


@dataclass
class Comparison:
    """Contenders that do the same, ours first."""

    kind: str
    title: str
    contenders: Sequence[Contender]
    shape: Shape | None = None
    # The same in fp32 for few rows, to see that all compute the same.
    check: Callable[[], Sequence[ModelContender]] = tuple
    axis: str = ""  # in which the contenders of a scaling differ, all of them ours
    values: tuple[int, ...] = ()
    is_timed: bool = True


# Is it ours, is it native -> {suffix of the name: arguments of its calls}
Variants = Callable[[bool, bool], dict[str, dict[str, Any]]]


def line_up(
    kind: str,
    contender: type[ModelContender],
    batches: Sequence[Any],
    shape: Shape,
    names: Sequence[str],
    options: Options,
    variants: Variants = lambda is_ours, is_native: {"": {}},
) -> list[ModelContender]:
    """Ours, and every peer that can do this kind of thing, all with as many parameters."""
    like = options.like if options.like and NATIVES[options.like].family == shape.family else reference(shape.family)
    with torch.device("meta"):
        target = count_parameters(NATIVES[like].make(shape))
    makes: dict[str, tuple[Callable[[], nn.Module], bool]] = {OURS: (functools.partial(ours, shape, like), False)}
    for name in names:
        peer = find_peer(name)
        if shape.family in peer.families and kind in peer.kinds:
            own = match_parameters(peer.make, shape, target) if peer.is_sized else shape
            makes[name] = functools.partial(peer.make, own), peer.is_native
    return [
        contender(name + suffix, make, batches, shape, options, name == OURS, arguments)
        for name, (make, is_native) in makes.items()
        for suffix, arguments in variants(name == OURS, is_native).items()
    ]


def few_rows(shape: Shape) -> Shape:
    """The same for a check of the numbers."""
    return dataclasses.replace(shape, batch=min(shape.batch, 2), precision="fp32", compile=False)


def training_contenders(shape: Shape, names: Sequence[str], options: Options) -> list[ModelContender]:
    """A step. Of rows without padding, native models are timed without a mask and with one that masks nothing."""
    batches = draw_batches(shape, 4, options.device)

    def variants(is_ours: bool, is_native: bool) -> dict[str, dict[str, Any]]:
        if is_ours:
            return {"": {"loss_only": True}}
        if is_native and "attention_mask" not in batches[0]:
            return {"": {}, ", mask given": {"attention_mask": torch.ones_like(batches[0]["input_ids"])}}
        return {"": {}}

    return line_up("train", Training, batches, shape, names, options, variants)


def compare_training(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """A step of training."""
    check = functools.partial(training_contenders, few_rows(shape), names, options)
    yield Comparison("train", "training step", training_contenders(shape, names, options), shape, check)


def generation_contenders(
    kind: str, shape: Shape, names: Sequence[str], options: Options, num_beams: int
) -> list[ModelContender]:
    """Greedy decoding or beam search of the shape's batch. Half the length is prompt, unless `new_tokens` are given.

    A shape that is compiled has ours decode with a static cache, for which `generate` compiles the model, on a CPU too,
    and others with either kind of cache. Raises ValueError when so many new tokens do not fit into the length.
    """
    new = options.new_tokens or shape.length // 2
    if new >= shape.length and shape.family == "decoder":
        raise ValueError(f"new-tokens: {new} leave no room for a prompt in a length of {shape.length}")
    if new > shape.length:
        raise ValueError(f"new-tokens: {new} are more than the length of {shape.length}")
    (batch,) = draw_batches(shape, 1, options.device)
    del batch["labels"]
    if shape.family == "decoder":
        batch = {"input_ids": batch["input_ids"][:, : shape.length - new]}
    arguments = {"max_new_tokens": new, "min_new_tokens": new, "num_beams": num_beams}
    on_every_device = CompileConfig(backend=options.compiler)
    on_every_device._compile_all_devices = True  # by default `generate` compiles on a GPU alone
    static = arguments | {"cache_implementation": "static", "compile_config": on_every_device}

    def variants(is_ours: bool, is_native: bool) -> dict[str, dict[str, Any]]:
        if not shape.compile:
            return {"": arguments}
        return {"": static} if is_ours else {"": arguments, ", static cache": static}

    return line_up(kind, Generation, [batch], shape, names, options, variants)


def compare_generation(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Greedy decoding of one row and of sixteen, and beam search by translators; or as many rows and beams as given."""
    usual = ((1, 1), (16, 1), (16, 4)) if shape.family == "seq2seq" else ((1, 1), (16, 1))
    for rows, num_beams in dict.fromkeys((options.batch or rows, options.num_beams or beams) for rows, beams in usual):
        own = dataclasses.replace(shape, batch=rows)
        title = f"{f'beam {num_beams}' if num_beams > 1 else 'greedy'}, {rows} row{'s' * (rows > 1)}"
        check = functools.partial(generation_contenders, "generate", few_rows(own), names, options, num_beams)
        contenders = generation_contenders("generate", own, names, options, num_beams)
        yield Comparison("generate", title, contenders, own, check)


def compare_calls(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Python calls of greedy decoding of one row, without the clock."""
    own = dataclasses.replace(shape, batch=1)
    contenders = generation_contenders("calls", own, names, options, 1)
    new = contenders[0].arguments["max_new_tokens"]
    yield Comparison("calls", f"{new} tokens, greedy, 1 row", contenders, own, is_timed=False)


def compare_embedding(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Vectors of many texts."""

    def contenders(shape: Shape, texts: int) -> list[ModelContender]:
        return line_up("embed", Embedding, [draw_texts(shape, texts)], shape, names, options)

    check = functools.partial(contenders, few_rows(shape), min(options.texts, 8))
    yield Comparison("embed", f"{options.texts} texts", contenders(shape, options.texts), shape, check)


def compare_scaling(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Our training step at several widths, depths, lengths and vocabularies. With the width goes the number of heads,
    and the feed-forward layer; rows are taken away as they get longer, so that a batch holds as many tokens."""
    for axis in options.axis:
        base = shape.layers if axis == "depth" else getattr(shape, axis)
        factors = (0.5, 1, 2, 4) if axis == "length" else (0.5, 1, 2)
        values = tuple(options.values) or tuple(max(1, int(base * factor)) for factor in factors)
        contenders: list[Contender] = []
        for value in values:
            changes: dict[str, Any] = {
                "width": {
                    "width": value,
                    "heads": max(1, value * shape.heads // shape.width),
                    "feed_forward": max(1, value * shape.feed_forward // shape.width),
                },
                "depth": {"layers": value},
                "length": {"length": value, "batch": max(1, shape.batch * shape.length // value)},
                "vocabulary": {"vocabulary": value},
            }[axis]
            (contender,) = training_contenders(dataclasses.replace(shape, **changes), (), options)
            contender.name = f"{axis} {value}"
            contenders.append(contender)
        yield Comparison("scaling", axis, contenders, shape, axis=axis, values=values)


def compare_end_to_end(folder: Path, names: Sequence[str], options: Options) -> Comparison:
    """A recipe of ours, and Trainer on the same corpus."""
    if options.recipe is None:
        raise ValueError("end-to-end needs --recipe, and --data.path for its corpus")
    run = RecipeRun(options, options.steps or 50, folder)
    natives = [
        name for name in names or [NATIVE_OF[run.family]] if name in NATIVES and NATIVES[name].family == run.family
    ]
    if not natives:
        raise ValueError(f"end-to-end: none of {', '.join(names)} is a native {run.family}")
    contenders: list[Contender] = [run]
    for name in natives:
        contenders.append(TrainerRun(f"Trainer, {name}", name, run))
        if run.family == "encoder":
            contenders.append(TrainerRun(f"Trainer, {name}, line by line", name, run, by_line=True))
    return Comparison("end-to-end", f"{Path(run.recipe.data.path).name}, turns of {run.steps} steps", contenders)


class Kind(NamedTuple):
    """What is done at a shape, for which families, and at which shapes unless others are asked for."""

    compare: Callable[[Shape, Sequence[str], Options], Iterator[Comparison]]
    families: tuple[str, ...]
    shapes: tuple[str, ...]


FAMILIES = ("decoder", "encoder", "seq2seq")
GENERATORS = ("decoder", "seq2seq")
KINDS = {
    "train": Kind(compare_training, FAMILIES, FAMILIES),
    "generate": Kind(compare_generation, GENERATORS, GENERATORS),
    "calls": Kind(compare_calls, GENERATORS, ("narrow",)),
    "embed": Kind(compare_embedding, ("encoder",), ("encoder",)),
    "scaling": Kind(compare_scaling, FAMILIES, FAMILIES),
}
