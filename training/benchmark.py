"""Time and memory of our models beside those of others, at equal shapes and equal numerics, in one process.

    python -m training.benchmark KIND... [--shape NAME...] [--peer NAME...] [--output_dir FOLDER] ...

KIND is train, generate, embed, end-to-end, scaling or roofline. The contenders of a comparison take turns, A B A B, on
the same batches; what is reported is the median of the ratios of the rounds, with its quartiles. The folder receives
`benchmark.json`, with every round, and `benchmark.png`. Exit codes: 0 done, 2 what was asked for cannot be done.
"""

import argparse
import dataclasses
import functools
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.files import replacing, write_text
from hf_scratch_transformer.kernels_scratch import is_mkl_slow, multiply

from .corpus import FAMILIES, Sequences
from .optimisation import multiplies_bfloat16
from .peers import (
    FIRST_WORD,
    NATIVES,
    OURS,
    PEERS,
    SHAPES,
    Contender,
    Embedding,
    Generation,
    ModelContender,
    Options,
    RecipeRun,
    Shape,
    TrainerRun,
    Training,
    batches,
    draw_lengths,
    find_peer,
    find_shapes,
    ours,
    parameters,
    reference,
    sized,
    unknown,
)
from .run import environment

TOLERANCE = 1e-4  # of losses, vectors, and the share of tokens, where all should compute the same
# Dense bf16 products on the data sheet, in FLOP/s; the first name that is part of the device's counts.
SHEETS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
# What time a step takes grows with, to the power of, once the model is large.
LIMITS = {"width": 2, "depth": 1, "length": 2, "vocabulary": 1}


# --- Comparisons ----------------------------------------------------------------------------------------------------


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


# Is it ours, is it native -> {suffix of the name: arguments of its calls}
Variants = Callable[[bool, bool], dict[str, dict[str, Any]]]


def line_up(
    kind: str,
    contender: type[ModelContender],
    given: Sequence[Any],
    shape: Shape,
    names: Sequence[str],
    options: Options,
    variants: Variants = lambda is_ours, is_native: {"": {}},
) -> list[ModelContender]:
    """Ours, and every peer that can do this kind of thing, all with as many parameters."""
    like = options.like if options.like and NATIVES[options.like].family == shape.family else reference(shape.family)
    with torch.device("meta"):
        target = parameters(NATIVES[like].make(shape))
    makes: dict[str, tuple[Callable[[], nn.Module], bool]] = {OURS: (functools.partial(ours, shape, like), False)}
    for name in names:
        peer = find_peer(name)
        if shape.family in peer.families and kind in peer.kinds:
            own = sized(peer.make, shape, target) if peer.is_sized else shape
            makes[name] = functools.partial(peer.make, own), peer.is_native
    return [
        contender(name + suffix, make, given, shape, options, name == OURS, arguments)
        for name, (make, is_native) in makes.items()
        for suffix, arguments in variants(name == OURS, is_native).items()
    ]


def few_rows(shape: Shape) -> Shape:
    """The same for a check of the numbers."""
    return dataclasses.replace(shape, batch=min(shape.batch, 2), precision="fp32", compile=False)


def compare_training(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """A step. Of rows without padding, native models are timed without a mask and with one that hides nothing."""

    def contenders(shape: Shape) -> list[ModelContender]:
        given = batches(shape, 4, options.device)

        def variants(is_ours: bool, is_native: bool) -> dict[str, dict[str, Any]]:
            if is_ours:
                return {"": {"loss_only": True}}
            if is_native and "attention_mask" not in given[0]:
                return {"": {}, ", mask given": {"attention_mask": torch.ones_like(given[0]["input_ids"])}}
            return {"": {}}

        return line_up("train", Training, given, shape, names, options, variants)

    yield Comparison("train", "training step", contenders(shape), shape, functools.partial(contenders, few_rows(shape)))


def compare_generation(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Greedy decoding of one row and of sixteen, and beam search by translators. Half the length is prompt. A shape
    that is compiled keeps ours in a static cache, which `generate` compiles on a GPU, and others in either kind."""
    new = options.new_tokens or shape.length // 2
    if new >= shape.length and shape.family == "decoder":
        raise ValueError(f"new-tokens: {new} leave no room for a prompt in a length of {shape.length}")
    if new > shape.length:
        raise ValueError(f"new-tokens: {new} are more than the length of {shape.length}")

    def contenders(shape: Shape, num_beams: int) -> list[ModelContender]:
        (given,) = batches(shape, 1, options.device)
        del given["labels"]
        if shape.family == "decoder":
            given = {"input_ids": given["input_ids"][:, : shape.length - new]}
        arguments = {"max_new_tokens": new, "min_new_tokens": new, "num_beams": num_beams}
        static = arguments | {"cache_implementation": "static"}

        def variants(is_ours: bool, is_native: bool) -> dict[str, dict[str, Any]]:
            if not shape.compile:
                return {"": arguments}
            return {"": static} if is_ours else {"": arguments, ", static cache": static}

        return line_up("generate", Generation, [given], shape, names, options, variants)

    for rows, num_beams in ((1, 1), (16, 1), (16, 4)):
        if num_beams == 1 or shape.family == "seq2seq":
            sized_shape = dataclasses.replace(shape, batch=rows)
            title = f"{f'beam {num_beams}' if num_beams > 1 else 'greedy'}, {rows} row{'s' * (rows > 1)}"
            check = functools.partial(contenders, few_rows(sized_shape), num_beams)
            yield Comparison("generate", title, contenders(sized_shape, num_beams), sized_shape, check)


def compare_embedding(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Vectors of many texts."""

    def contenders(shape: Shape, texts: int) -> list[ModelContender]:
        rng = np.random.default_rng(0)
        lengths = rng.permutation(draw_lengths(rng, texts, shape.length))
        given = Sequences.of(rng.integers(FIRST_WORD, shape.vocabulary, length).tolist() for length in lengths)
        return line_up("embed", Embedding, [given], shape, names, options)

    check = functools.partial(contenders, few_rows(shape), min(options.texts, 8))
    yield Comparison("embed", f"{options.texts} texts", contenders(shape, options.texts), shape, check)


def compare_scaling(shape: Shape, names: Sequence[str], options: Options) -> Iterator[Comparison]:
    """Our training step at several widths, depths, lengths and vocabularies. With the width goes the number of heads,
    and the feed-forward layer; rows are taken away as they get longer, so that a batch holds as many tokens."""
    for axis in options.axes:
        base = {"depth": shape.layers}.get(axis) or getattr(shape, axis)
        factors = (0.5, 1, 2, 4) if axis == "length" else (0.5, 1, 2)
        contenders: list[Contender] = []
        values = options.values or tuple(max(1, int(base * factor)) for factor in factors)
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
            own = dataclasses.replace(shape, **changes)
            (contender,) = line_up(
                "train",
                Training,
                batches(own, 4, options.device),
                own,
                (),
                options,
                lambda is_ours, is_native: {"": {"loss_only": True}},
            )
            contender.name = f"{axis} {value}"
            contenders.append(contender)
        yield Comparison("scaling", axis, contenders, shape, axis=axis, values=values)


def compare_end_to_end(folder: Path, names: Sequence[str], options: Options) -> Comparison:
    """A recipe of ours, and Trainer on the same corpus."""
    if options.recipe is None:
        raise ValueError("end-to-end needs --recipe, and --data.path for its corpus")
    run = RecipeRun(options, options.steps or 50, folder)
    objective = run.recipe.objective
    family = FAMILIES[objective]
    usual = {"translation": "marian", "masked_lm": "bert", "causal_lm": "llama"}[objective]
    natives = [name for name in names or [usual] if name in NATIVES and NATIVES[name].family == family]
    if not natives:
        raise ValueError(f"end-to-end: none of {', '.join(names)} is a native {family}")
    contenders: list[Contender] = [run]
    for name in natives:
        contenders.append(TrainerRun(f"Trainer, {name}", name, run))
        if objective == "masked_lm":
            contenders.append(TrainerRun(f"Trainer, {name}, line by line", name, run, by_line=True))
    return Comparison("end-to-end", f"{Path(run.recipe.data.path).name}, turns of {run.steps} steps", contenders)


# --- Measuring ------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What one contender did in one round."""

    seconds: float
    tokens: int


def interleave(
    contenders: Sequence[Contender], rounds: int, steps: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[Round]]:
    """Let the contenders take turns, each `steps` steps at a time, on the same batches."""
    results: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in contenders:
            chosen = [contender.batches[(turn * steps + i) % len(contender.batches)] for i in range(steps)]
            contender.wait()
            start = clock()
            for batch in chosen:
                contender.step(batch)
            contender.wait()
            seconds = clock() - start - contender.once
            results[contender.name].append(Round(seconds, sum(map(contender.tokens, chosen))))
    return results


def warm_up(contenders: Sequence[Contender], steps: int, notes: list[str]) -> tuple[list[Contender], dict[str, int]]:
    """Build each and let it run; returns those that fit into memory, and how many graphs were compiled for each."""
    ready, graphs = [], {}
    for contender in contenders:
        before = counters["stats"]["unique_graphs"]
        try:
            contender.build()
            for index in range(steps):
                contender.step(contender.batches[index % len(contender.batches)])
            contender.wait()
        except torch.OutOfMemoryError:
            notes.append(f"{contender.name}: out of memory")
            vars(contender).clear()
            gc.collect()
            continue
        ready.append(contender)
        graphs[contender.name] = counters["stats"]["unique_graphs"] - before
    return ready, graphs


def verify(contenders: Sequence[ModelContender], notes: list[str]) -> dict[str, dict[str, float]]:
    """How far our results are from each peer's when ours has its weights: of two steps, so that gradients count too.

    Where weights cannot be copied, it is enough that the loss is that of a model which knows nothing.

    Raises ValueError when a loss is not finite.
    """
    found: dict[str, dict[str, float]] = {}
    for peer in contenders[1:]:
        peer.build()
        twin = None
        if isinstance(peer.model, PreTrainedModel):
            try:
                copied = functools.partial(convert_from, peer.model)
                twin = dataclasses.replace(contenders[0], name=f"{OURS} as {peer.name}", make=copied)
                twin.build()
            except ValueError:
                twin = None
                notes.append(f"{peer.name}: its architecture is none of ours, so weights cannot be copied")
        difference = 0.0
        for step, batch in enumerate((*peer.batches, *peer.batches)[:2]):
            theirs = peer.step(batch)
            if isinstance(peer, Training) and step == 0:
                found.setdefault(peer.name, {})["loss"] = loss = float(theirs)
                if not math.isfinite(loss):
                    raise ValueError(f"peer {peer.name}: its loss is {loss}")
                if abs(loss - math.log(peer.shape.vocabulary)) > 1:
                    notes.append(f"{peer.name}: starts with a loss of {loss:.2f}, where not to know is ln V")
            if twin is not None:
                apart = twin.step(batch).double() - theirs.double()
                # Of tokens the share that differs, of numbers how much the most different does.
                change = (apart != 0).double().mean() if isinstance(peer, Generation) else apart.abs().max()
                difference = max(difference, float(change))
        if twin is not None:
            found.setdefault(peer.name, {})["difference"] = difference
            if difference > TOLERANCE:
                notes.append(f"{peer.name}: NOT the same numbers with its weights, {difference:.2g} apart")
        del peer.model, twin
    return found


def peak_bytes(contender: ModelContender) -> int:
    """The most memory that a step takes beyond what is held before it: activations, gradients, temporaries.

    On a CPU from the profiler, which is told of everything that torch's allocator gives and takes back, also inside
    kernels and compiled code; that is slow, so it is a pass by itself.
    """
    batch = contender.batches[0]
    if contender.options.device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        contender.step(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender.step(batch)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(changes.cumsum().max(initial=0))


def operations(contender: ModelContender) -> int:
    """Floating-point operations of a step, not compiled: of attention all T × T products, also where it is causal."""
    counter = FlopCounterMode(display=False)
    # The counter does not know the CPU's fused attention; written out, it has the same products.
    written_out = sdpa_kernel(SDPBackend.MATH) if contender.options.device.type == "cpu" else nullcontext()
    with torch.compiler.set_stance("force_eager"), written_out, counter:
        contender.step(contender.batches[0])
    return counter.get_total_flops()


@functools.cache
def roofline(device: torch.device) -> dict[str, Any]:
    """What the device does at best: products of large matrices in FLOP/s, by precision; bytes/s to and from memory;
    and bf16 products by its data sheet, where that is known."""
    on_cpu = device.type == "cpu"

    def seconds(statement: str, **names: Any) -> float:
        timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=0.2).median

    rates = {}
    for precision in ("fp32", "bf16") if on_cpu else ("fp32", "tf32", "bf16"):
        slow = on_cpu and precision == "bf16" and not multiplies_bfloat16("cpu")
        size = 256 if slow else 1024 if on_cpu else 8192
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        with matmul_precision(precision):
            matrix = torch.randn(size, size, device=device, dtype=dtype)
            rates[precision] = 2 * size**3 / seconds("multiply(a, a)", a=matrix, multiply=multiply)
    source = torch.empty((1 if on_cpu else 16) * 2**24, device=device).fill_(1.0)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * source.element_size() / seconds("b.copy_(a)", a=source, b=target)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    sheet = next((rate for part, rate in SHEETS.items() if part in name), None)
    return {"matmul": rates, "bandwidth": bandwidth, "sheet_bf16": sheet}


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Within it, single-precision matrices are multiplied in TF32 units, or are not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    yield
    torch.set_float32_matmul_precision(before)


# --- Results --------------------------------------------------------------------------------------------------------


def run(comparison: Comparison, options: Options) -> dict[str, Any]:
    """All that is known of a comparison, for JSON. Speed above 1 is in our favour, memory below 1."""
    notes: list[str] = []
    is_long = comparison.kind == "end-to-end"
    # A GPU is kept busy over several steps of training; other steps are long, and launch much by themselves.
    usual = 5 if comparison.kind in ("train", "scaling") and options.device.type != "cpu" else 1
    steps = 1 if is_long else options.steps or usual
    warmup = options.warmup if options.warmup is not None else 1 if is_long else 3
    torch._dynamo.reset()
    checks = verify(comparison.check(), notes)
    with matmul_precision(comparison.shape.precision if comparison.shape else "fp32"):
        ready, graphs = warm_up(comparison.contenders, warmup, notes)
        before = counters["stats"]["unique_graphs"]
        rounds = interleave(ready, options.rounds, steps)
        if again := counters["stats"]["unique_graphs"] - before:
            notes.append(f"{again} graphs were compiled again while the clock ran")
        rows = {}
        for contender in ready:
            row: dict[str, Any] = {
                "seconds": quartiles([each.seconds / steps for each in rounds[contender.name]]),
                "tokens_per_second": quartiles([each.tokens / each.seconds for each in rounds[contender.name]]),
                "graphs": graphs[contender.name],
                "rounds": rounds[contender.name],
                **checks.get(contender.name, {}),
            }
            rows[contender.name] = row
            if (model := getattr(contender, "model", None)) is not None:
                row["parameters"] = parameters(model)
            if isinstance(contender, ModelContender):
                try:
                    row |= costs(contender, row["seconds"]["median"])
                except torch.OutOfMemoryError:  # compiled it was leaner
                    notes.append(f"{contender.name}: no room to count its operations")
    result = {
        "kind": comparison.kind,
        "title": comparison.title,
        "shape": dataclasses.asdict(comparison.shape) if comparison.shape else None,
        "steps_per_round": steps,
        "contenders": rows,
        "notes": notes,
    }
    if comparison.axis:
        sizes = {f"{comparison.axis} {value}": value for value in comparison.values}
        result["exponents"] = exponents(comparison.axis, sizes, ready, rows)
    elif OURS in rows:
        result["ratios"] = ratios(rows)
    return result


def costs(contender: ModelContender, seconds: float) -> dict[str, Any]:
    """What a step costs, and how near it comes to what the device can do."""
    best, precision = roofline(contender.options.device), contender.shape.precision
    flops, traffic = operations(contender), contender.traffic(contender.batches[0])
    floor = max(flops / best["matmul"][precision], traffic / best["bandwidth"])
    return {
        "peak_bytes": peak_bytes(contender),
        "flops": flops,
        "weight_bytes": traffic,
        "flops_per_second": flops / seconds,
        "of_matmul_rate": flops / seconds / best["matmul"][precision],
        "of_sheet": flops / seconds / best["sheet_bf16"] if precision == "bf16" and best["sheet_bf16"] else None,
        "of_bandwidth": traffic / seconds / best["bandwidth"],
        "roofline_seconds": floor,
        "times_roofline": seconds / floor,
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, first and third quartile."""
    q1, median, q3 = np.percentile(values, (25, 50, 75)).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each peer how much faster ours is, round by round, and how much of its memory ours takes."""

    def rates(name: str) -> list[float]:
        return [each.tokens / each.seconds for each in rows[name]["rounds"]]

    found: dict[str, dict[str, Any]] = {}
    for name in rows.keys() - {OURS}:
        found[name] = {"speed": quartiles([a / b for a, b in zip(rates(OURS), rates(name), strict=True)])}
        if rows[name].get("peak_bytes") and "peak_bytes" in rows[OURS]:
            found[name]["memory"] = rows[OURS]["peak_bytes"] / rows[name]["peak_bytes"]
    return dict(sorted(found.items(), key=lambda item: item[1]["speed"]["median"]))  # the best peer first


def exponents(
    axis: str, sizes: dict[str, int], ready: Sequence[Contender], rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """With what power of a size things grow, for a row of the batch: the slope of a line through the logarithms."""
    kept = [each for each in ready if isinstance(each, ModelContender) and "flops" in rows[each.name]]
    if len(kept) < 2:
        return {}
    size = np.log([sizes[contender.name] for contender in kept])
    batch = np.array([contender.shape.batch for contender in kept])

    def slope(values: Sequence[float]) -> float:
        return float(np.polyfit(size, np.log(np.array(values) / batch), 1)[0])

    rounds = zip(*(rows[contender.name]["rounds"] for contender in kept), strict=True)
    return {
        "seconds": quartiles([slope([each.seconds for each in turn]) for turn in rounds]),
        "operations": slope([rows[contender.name]["flops"] for contender in kept]),
        "peak_bytes": slope([rows[contender.name]["peak_bytes"] for contender in kept]),
        "in_the_limit": LIMITS[axis],
    }


def show(result: dict[str, Any], console: Console) -> None:
    """A table of a comparison."""
    shape = result["shape"]
    about = f", {shape['precision']}{', compiled' if shape['compile'] else ''}" if shape else ""
    title = " ".join(filter(None, (result["kind"], result["name"])))
    table = Table(title=f"{title}: {result['title']}{about}", title_justify="left")
    heads: tuple[str, ...] = ("", "parameters", "ms", "tokens/s", "ours faster", "peak MB", "ours takes", "GFLOP/s")
    rows = []
    for name, row in result["contenders"].items():
        ratio = result.get("ratios", {}).get(name, {})
        speed = ratio.get("speed")
        rows.append(
            (
                name,
                f"{row['parameters']:,}",
                f"{1000 * row['seconds']['median']:,.1f}",
                f"{row['tokens_per_second']['median']:,.0f}",
                f"{speed['median']:.2f}× [{speed['q1']:.2f}, {speed['q3']:.2f}]" if speed else "",
                number(row.get("peak_bytes"), 1e-6, ",.1f"),
                number(ratio.get("memory"), 1, ".2f", "×"),
                number(row.get("flops_per_second"), 1e-9, ",.1f"),
                *(number(row.get(key), 100, ".1f", "%") for key in ("of_matmul_rate", "of_sheet", "of_bandwidth")),
                number(row.get("times_roofline"), 1, ".2f"),
                str(row["graphs"] or ""),
            )
        )
    heads += ("of matmul", "of sheet", "of memory", "× roofline", "graphs")
    columns = zip(heads, zip(*rows, strict=True), strict=True)
    filled = {head: cells for head, cells in columns if any(cells)}
    for head in filled:
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for cells in zip(*filled.values(), strict=True):
        table.add_row(*cells)
    console.print(table)
    if grown := result.get("exponents"):
        time = grown["seconds"]
        console.print(
            f"  grows with the power of {result['title']}: time {time['median']:.2f} [{time['q1']:.2f}, "
            f"{time['q3']:.2f}], operations {grown['operations']:.2f}, peak memory {grown['peak_bytes']:.2f}; in the "
            f"limit operations {grown['in_the_limit']}",
            highlight=False,
        )
    same = [name for name, row in result["contenders"].items() if row.get("difference", 1) <= TOLERANCE]
    if same:
        console.print(f"  the same numbers from the same weights: {', '.join(same)}")
    for note in result["notes"]:
        console.print(f"  {note}", highlight=False)


def number(value: float | None, factor: float, form: str, unit: str = "") -> str:
    """Nothing, where nothing was measured."""
    return "" if value is None else f"{value * factor:{form}}{unit}"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """The ratios as a PNG: a bar for each peer, whiskers at the quartiles, a line at equal speed."""
    bars = [
        (f"{result['name'] or result['kind']}, {result['title']}: {name}", each["speed"])
        for result in results
        for name, each in result.get("ratios", {}).items()
    ]
    figure = Figure(figsize=(10, 1.2 + 0.32 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (_, speed) in enumerate(bars):
        whiskers = [[speed["median"] - speed["q1"]], [speed["q3"] - speed["median"]]]
        axes.barh(place, speed["median"], color="tab:blue" if speed["median"] >= 1 else "tab:red", alpha=0.8)
        axes.errorbar(speed["median"], place, xerr=whiskers, color="black", capsize=3)
        axes.annotate(
            f"{speed['median']:.2f}×", (speed["q3"], place), (6, 0), textcoords="offset points", va="center", size=8
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="times as fast as the peer", yticks=range(len(bars)), yticklabels=[label for label, _ in bars])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


# --- Command line ---------------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[Callable[..., Iterator[Comparison]], tuple[str, ...]]] = {
    "train": (compare_training, ("decoder", "encoder", "seq2seq")),
    "generate": (compare_generation, ("decoder", "seq2seq")),
    "embed": (compare_embedding, ("encoder",)),
    "scaling": (compare_scaling, ("decoder", "encoder", "seq2seq")),
}
OTHER_KINDS = ("end-to-end", "roofline")


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises ValueError for what it cannot say."""
    parser = Parser(prog="python -m training.benchmark", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("kinds", nargs="+", metavar="KIND", help=f"any of {', '.join((*KINDS, *OTHER_KINDS))}")
    add("--shape", nargs="+", default=["decoder", "encoder", "seq2seq"], help=f"any of tiny, {', '.join(SHAPES)}")
    known = f"{', '.join(PEERS)}, nanogpt=PATH of a checkout, module:function that is given a Shape"
    add("--peer", nargs="*", help=f"any of {known}; all that fit a shape by default")
    add("--like", choices=NATIVES, help="the peer whose architecture and size ours takes: llama, distilbert or marian")
    for spec in dataclasses.fields(Shape):
        if spec.name == "compile":
            add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile for all contenders")
        elif spec.name != "family":
            kind = int if spec.type is int else str
            add(f"--{spec.name.replace('_', '-')}", type=kind, help=f"in place of the shape's {spec.name}")
    add("--rounds", type=int, default=10, help="turns of each contender (%(default)s)")
    add("--steps", type=int, help="steps of a turn (1; 5 of training on a GPU; 50 of end-to-end)")
    add("--warmup", type=int, help="steps that are not timed (3; one turn of end-to-end)")
    add("--new-tokens", type=int, help="tokens to generate (half the length)")
    add("--texts", type=int, default=256, help="texts to embed (%(default)s)")
    add("--axis", nargs="+", default=list(LIMITS), choices=LIMITS, help="what to scale (all)")
    add("--values", nargs="+", type=int, default=[], help="sizes along that one axis")
    add("--peer-optimizer", choices=("fused", "foreach"), default="fused", help="of AdamW (%(default)s)")
    add("--no-onednn", action="store_true", help="products by MKL alone, as on processors where that is quick")
    add("--recipe", help="what end-to-end trains; entries are overridden by --data.path FOLDER and the like")
    add("--output_dir", "--output-dir", type=Path, default=Path("runs/benchmark"), help="(%(default)s)")
    arguments, rest = parser.parse_known_args(words)
    arguments.overrides = rest
    if rest and "end-to-end" not in arguments.kinds:
        raise ValueError(f"unrecognized arguments: {' '.join(rest)}")
    for kind in arguments.kinds:
        if kind not in KINDS and kind not in OTHER_KINDS:
            raise ValueError(unknown("kind", kind, (*KINDS, *OTHER_KINDS)))
    if arguments.values and len(arguments.axis) > 1:
        raise ValueError("--values are sizes along one --axis")
    for name in ("rounds", "steps", "new_tokens", "texts"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    return arguments


def plan(arguments: argparse.Namespace) -> list[tuple[str, str, Shape | None]]:
    """Kind, name and shape of everything that was asked for.

    Raises ValueError for what is not known or does not fit together.
    """
    changed = {spec.name: getattr(arguments, spec.name, None) for spec in dataclasses.fields(Shape)}
    shapes = find_shapes(arguments.shape, **{name: value for name, value in changed.items() if value is not None})
    compared: set[str] = set()
    planned: list[tuple[str, str, Shape | None]] = []
    for kind in arguments.kinds:
        if kind == "end-to-end":
            planned.append((kind, "", None))
        elif kind in KINDS:
            families = KINDS[kind][1]
            fitting = {name: shape for name, shape in shapes.items() if shape.family in families}
            if not fitting:
                raise ValueError(f"{kind} is for {' and '.join(families)} shapes, not for {', '.join(shapes)}")
            compared |= {shape.family for shape in fitting.values()}
            planned += [(kind, name, shape) for name, shape in fitting.items()]
    for name in arguments.peer or ():
        families = find_peer(name).families
        if compared and compared.isdisjoint(families):
            raise ValueError(f"peer {name!r} is for {' and '.join(families)} shapes, and none of those is compared")
    return planned


def benchmark(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run everything that was asked for; after each comparison the folder holds all results so far."""
    planned, peers = plan(arguments), list(PEERS) if arguments.peer is None else arguments.peer
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    options = Options(
        device=device,
        rounds=arguments.rounds,
        steps=arguments.steps,
        warmup=arguments.warmup,
        new_tokens=arguments.new_tokens,
        texts=arguments.texts,
        axes=tuple(arguments.axis),
        values=tuple(arguments.values),
        optimizer=arguments.peer_optimizer,
        like=arguments.like,
        recipe=arguments.recipe,
        overrides=tuple(arguments.overrides),
    )
    best = roofline(device)
    about = environment(device, 1, "training.benchmark")
    record: dict[str, Any] = {
        "environment": about,
        "roofline": best,
        "onednn": is_mkl_slow() and not arguments.no_onednn,
        "results": [],
    }
    rates = ", ".join(f"{precision} {rate / 1e9:,.1f} GFLOP/s" for precision, rate in best["matmul"].items())
    console.print(f"roofline: matrices {rates}; memory {best['bandwidth'] / 1e9:,.1f} GB/s", highlight=False)
    with tempfile.TemporaryDirectory() as scratch:
        for kind, name, shape in planned:
            if shape is None:
                compared = iter([compare_end_to_end(Path(scratch), arguments.peer or (), options)])
            else:
                compared = KINDS[kind][0](shape, peers, options)
            for comparison in compared:
                print(f"{kind} {name}: {comparison.title} ...", file=sys.stderr)
                result = run(comparison, options) | {"name": name}
                del comparison
                gc.collect()
                record["results"].append(result)
                show(result, console)
                write(record, arguments.output_dir)
    if not planned:
        write(record, arguments.output_dir)
    return record


def write(record: dict[str, Any], folder: Path) -> None:
    """The record as `benchmark.json`, and its ratios as `benchmark.png` where there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "benchmark.json", json.dumps(record, indent=1) + "\n")
    if any(result.get("ratios") for result in record["results"]):
        draw(record["results"], folder / "benchmark.png")


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file has no width to fit into
    try:
        arguments = parse_words(words)
        with torch.backends.mkldnn.flags(enabled=False) if arguments.no_onednn else nullcontext():
            benchmark(arguments, console)
    except (ValueError, OSError) as error:
        print(f"training.benchmark: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces each start and stop
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main(sys.argv[1:]))
