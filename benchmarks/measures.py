"""What contenders take: time, memory, operations, Python calls; and how these compare."""

import dataclasses
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.insight import trace
from training.roofline import matmul_precision, roofline

from .comparisons import LIMITS, Comparison
from .contenders import Contender, Generation, ModelContender, Options, Training
from .peers import NATIVES, OURS, count_parameters, ours, reference
from .shapes import Shape, draw_batches

TOLERANCE = 1e-4  # of losses, vectors, and the share of tokens, where all should compute the same


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
            seconds = clock() - start - contender.setup_seconds
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
        converted = None
        if isinstance(peer.model, PreTrainedModel):
            try:
                make = functools.partial(convert_from, peer.model)
                converted = dataclasses.replace(contenders[0], name=f"{OURS} as {peer.name}", make=make)
                converted.build()
            except ValueError:
                converted = None
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
            if converted is not None:
                change = converted.step(batch).double() - theirs.double()
                # Of tokens the share that differs, of numbers how much the most different does.
                worst = (change != 0).double().mean() if isinstance(peer, Generation) else change.abs().max()
                difference = max(difference, float(worst))
        if converted is not None:
            found.setdefault(peer.name, {})["difference"] = difference
            if difference > TOLERANCE:
                notes.append(f"{peer.name}: NOT the same numbers with its weights, {difference:.2g} apart")
        del peer.model, converted
    return found


def peak_bytes(contender: ModelContender) -> int:
    """The most memory that a step takes beyond what is held before it: activations, gradients, temporaries."""
    return memory_of(functools.partial(contender.step, contender.batches[0]), contender.options.device)[0]


def memory_of(step: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """The most bytes at any time of a call, and those alive at its end with what it returns; beyond what was held.

    On a CPU from the profiler, which is told of everything that torch's allocator gives and takes back, also inside
    kernels and compiled code; that is slow, so it is a pass by itself.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        result = step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held, torch.cuda.memory_allocated() - held
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = step()  # noqa: F841  (alive until all is counted)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(changes.cumsum().max(initial=0)), int(changes.sum())


def operations(contender: ModelContender) -> int:
    """Floating-point operations of a step, not compiled: of attention all T × T products, also where it is causal."""
    step = functools.partial(contender.step, contender.batches[0])
    return trace.count_flops(step, contender.options.device.type)


def calls_per_token(contender: Generation) -> float:
    """Python calls for each new token of a row: what the interpreter does from one operation of torch to the next.

    Counted is every `call` and every `c_call` event that `sys.setprofile` reports in this thread during one step, that
    is, each Python function entered or generator resumed, and each built-in one called, from the prompt to the last
    token, divided by the number of tokens that each row receives; nothing is subtracted. Once everything is warm, as it
    must be before, the number is the same each time, however fast or busy the machine is; it changes with the versions
    of Python and of the libraries, and with the kind of processor where ours multiplies by oneDNN (`uses_onednn`).
    """
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers are called too
    sys.setprofile(count)
    try:
        contender.step(contender.batches[0])
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls / contender.arguments["max_new_tokens"]


def measure_memory(name: str, shape: Shape, device: torch.device) -> dict[str, Any]:
    """Memory of forward and backward of ours and of the native model of its architecture, not compiled, beside what
    `inspect` predicts for full rows; for JSON. Weights have the shape's precision: the prediction knows no autocast."""
    dtype = torch.bfloat16 if shape.precision == "bf16" else torch.float32
    native, rows = reference(shape.family), {}
    for title in (OURS, f"{OURS}, loss_only", native):
        torch.manual_seed(0)
        model = (NATIVES[native].make(shape) if title == native else ours(shape, native)).train()
        model.config.use_cache = False
        traced = trace.build(model.config, dtype)
        loss_only = title.endswith("loss_only")
        predicted = trace.forward_backward(
            traced, trace.make_inputs(traced, shape.batch, shape.length), False, loss_only
        )
        model.to(device, dtype)
        (batch,) = draw_batches(dataclasses.replace(shape, padded=False), 1, device)
        step = functools.partial(model, **batch, **({"loss_only": True} if loss_only else {}))
        _, kept = memory_of(step, device)
        peak, _ = memory_of(lambda step=step: step().loss.backward(), device)  # type: ignore[misc]
        rows[title] = {
            "parameters": count_parameters(model),
            "graphs": 0,
            "kept_bytes": kept,
            "kept_of_predicted": kept / predicted.kept,
            "peak_bytes": peak,
            "peak_of_predicted": peak / predicted.peak,
        }
        del model, step
    about = {"kind": "memory", "name": name, "title": "forward and backward", "shape": dataclasses.asdict(shape)}
    return about | {"steps_per_round": 0, "contenders": rows, "notes": []}


# --- Results --------------------------------------------------------------------------------------------------------


def measure(comparison: Comparison, options: Options) -> dict[str, Any]:
    """All that is known of a comparison, for JSON. Speed above 1 is in our favour, memory and calls below 1."""
    notes: list[str] = []
    is_long = comparison.kind == "end-to-end"
    # A GPU is kept busy over several steps of training; other steps are long, and launch much by themselves.
    usual = 5 if comparison.kind in ("train", "scaling") and options.device.type != "cpu" else 1
    steps = 1 if is_long else options.steps or usual
    warmup = options.warmup if options.warmup is not None else 1 if is_long or not comparison.is_timed else 3
    torch._dynamo.reset()
    checks = verify(comparison.check(), notes)
    with matmul_precision(comparison.shape.precision if comparison.shape else "fp32"):
        ready, graphs = warm_up(comparison.contenders, warmup, notes)
        before = counters["stats"]["unique_graphs"]
        rounds = interleave(ready, options.rounds if comparison.is_timed else 0, steps)
        if again := counters["stats"]["unique_graphs"] - before:
            notes.append(f"{again} graphs were compiled again while the clock ran")
        rows = {}
        for contender in ready:
            row: dict[str, Any] = {"graphs": graphs[contender.name], **checks.get(contender.name, {})}
            rows[contender.name] = row
            if turns := rounds[contender.name]:
                row["seconds"] = quartiles([turn.seconds / steps for turn in turns])
                row["tokens_per_second"] = quartiles([turn.tokens / turn.seconds for turn in turns])
                row["rounds"] = turns
            if (model := getattr(contender, "model", None)) is not None:
                row["parameters"] = count_parameters(model)
            if isinstance(contender, Generation):
                row["calls_per_token"] = calls_per_token(contender)
            if isinstance(contender, ModelContender) and comparison.is_timed:
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
    flops, weight_bytes = operations(contender), contender.weight_bytes(contender.batches[0])
    floor = max(flops / best["matmul"][precision], weight_bytes / best["bandwidth"])
    return {
        "peak_bytes": peak_bytes(contender),
        "flops": flops,
        "weight_bytes": weight_bytes,
        "flops_per_second": flops / seconds,
        "of_matmul_rate": flops / seconds / best["matmul"][precision],
        "of_sheet": flops / seconds / best["sheet_bf16"] if precision == "bf16" and best["sheet_bf16"] else None,
        "of_bandwidth": weight_bytes / seconds / best["bandwidth"],
        "roofline_seconds": floor,
        "times_roofline": seconds / floor,
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, first and third quartile."""
    q1, median, q3 = np.percentile(values, (25, 50, 75)).tolist()
    return {"median": median, "q1": q1, "q3": q3}


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each peer how much faster ours is, round by round, and what part of its memory and calls ours takes."""

    def rates(name: str) -> list[float]:
        return [turn.tokens / turn.seconds for turn in rows[name].get("rounds", ())]

    found: dict[str, dict[str, Any]] = {}
    for name in sorted(rows.keys() - {OURS}):
        found[name] = {}
        if speeds := [a / b for a, b in zip(rates(OURS), rates(name), strict=True)]:
            found[name]["speed"] = quartiles(speeds)
        for ratio, quantity in {"memory": "peak_bytes", "calls": "calls_per_token"}.items():
            if rows[name].get(quantity) and quantity in rows[OURS]:
                found[name][ratio] = rows[OURS][quantity] / rows[name][quantity]
    # The best peer first.
    return dict(sorted(found.items(), key=lambda item: item[1]["speed"]["median"] if "speed" in item[1] else 0))


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
