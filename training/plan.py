"""What a run will take on this machine, measured on its first steps before it begins; nothing is written but the cache.

python -m training plan RECIPE.yaml [--minutes M [--fit]] [--gpus 8xH100] [--key value ...]
"""

import bisect
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list

from hf_scratch_transformer import ScratchConfig
from hf_scratch_transformer.onednn import onednn_products

from . import evaluation, loop
from .base_model import PATH, build_config
from .metrics import used_memory
from .publication import target_flops
from .recipe import Recipe, parse
from .roofline import SHEETS, best_rate
from .run import KEPT_RUNS, Run, open_accelerator, prepare, saved_tensors
from .sections import RecipeError
from .sharding import glibc

WARMUP, MEASURED = 3, 10  # steps: in the first of them much is allocated, and maybe compiled
MINUTES, FIT, GPUS = "--minutes", "--fit", "--gpus"
# Of a model whose training makes most of its operations, for each parameter that a token meets, tables of embeddings
# apart. Of large ones it is 20 (Hoffmann et al. 2022). Of those of minutes, whose matrices Muon trains, it seems to be
# fewer: on programs 6 gave 1.72 bits a byte for 6.7e12 FLOPs, 41 gave 1.84 for 4.8e12, 1.2 gave 1.86 (a seed each).
TOKENS_A_PARAMETER = 8
# For a token of training. A target of a translator has a source beside it, and each of them meets half of the model.
TARGETS: dict[str, Callable[[Recipe], float]] = {
    "causal_lm": lambda recipe: 1.0,
    "masked_lm": lambda recipe: statistics.mean(recipe.optimisation.mask_fraction),
    "translation": lambda recipe: 0.25,
}
LEAST_A_PARAMETER = 4  # where text is seen again and again: a larger model gains more from that than more passes
LARGEST = 64  # times as wide and deep as the recipe's is the largest model that is tried
OF_TOKENS = ("vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings")  # fields that a tokenizer decides
MFU = 0.4  # that is assumed of GPUs, which nobody has measured yet


def plan(words: Sequence[str]) -> None:
    """Print what the run of a command line will take: with `--minutes` the steps that fit into so many, with `--fit`
    beside it of a model whose width and depth fit too, with `--gpus 8xH100` the time on these.

    Raises RecipeError when the recipe or its data cannot be used, or an option is no number or kind of GPU.
    """
    words, options = _options(words)
    minutes, gpus = _minutes(options), _gpus(options.get(GPUS))
    if FIT in options and minutes is None:
        raise RecipeError(f"{FIT}: give {MINUTES} as well, into which the model is to fit")
    for left in reversed(range(3 if FIT in options else 1)):  # a model of another size makes other use of the machine
        model, report, sizes, is_main = _tried(words, minutes, gpus, is_to_fit=FIT in options)
        if not left or all(model.get(name) == size for name, size in sizes.items()):
            break
        words += [f"--model.{name}={size}" for name, size in sizes.items()]
    if sizes:
        fitted = " ".join(f"--model.{name} {model[name]}" for name in sizes)
        report = {f"for {minutes:g} minutes": fitted} | report
    if is_main:
        width = max(map(len, report))
        print(*(f"{name:{width}}  {value}" for name, value in report.items()), sep="\n")


def _tried(
    words: Sequence[str], minutes: float | None, gpus: tuple[int, str] | None, is_to_fit: bool
) -> tuple[dict[str, Any], dict[str, str], dict[str, int], bool]:
    """What a run is of and takes, the sizes that fit better, and whether it is the main process's. It is gone then: its
    memory is not the next one's."""
    run, report, pace = begun(words, minutes, gpus)
    pace = broadcast_object_list([pace])[0]  # all processes try the same size next
    sizes = fitting(run, pace, minutes) if is_to_fit and minutes is not None else {}
    if run.accelerator.num_processes > 1:
        KEPT_RUNS.append(run)
    return run.recipe.model, report, sizes, run.is_main


class Pace(NamedTuple):
    """What a run takes: seconds of a step and of an evaluation, and the targets of a step."""

    step: float
    evaluation: float
    targets: float


def begun(
    words: Sequence[str], minutes: float | None = None, gpus: tuple[int, str] | None = None
) -> tuple[Run, dict[str, str], Pace]:
    """The run of a command line, in a folder that is gone already, and what it will take."""
    gc.collect()
    glibc("malloc_trim", 0)  # what this process has freed goes back to the system
    with tempfile.TemporaryDirectory() as folder:
        recipe = parse([*words, "--output_dir", folder]).model_copy(update={"resume": False, "trackers": ()})
        accelerator = open_accelerator(recipe)
        with onednn_products():
            run = prepare(recipe, accelerator, Path(folder), time.monotonic())
            return run, *measured(run, minutes, gpus)


def measured(run: Run, minutes: float | None, gpus: tuple[int, str] | None) -> tuple[dict[str, str], Pace]:
    """What a run of which no step is done will take, by names and in numbers; it is no longer fit to be trained."""
    spec, every = run.recipe.optimisation, run.recipe.evaluation.every_steps
    count = min(WARMUP + MEASURED, spec.max_steps)
    run.state.step = (spec.max_steps - count) // 2  # where a schedule of the masks is at its mean
    times = list(loop.timed(run, count))
    run.state.step = spec.max_steps  # operations are counted over all steps
    warm = times[WARMUP:] or times
    step, targets = statistics.median(taken for taken, _ in warm), statistics.mean(number for _, number in times)
    saved = sum(tensor.nbytes for tensors in saved_tensors(run).values() for tensor in tensors.values())
    memory, flops = used_memory(run.accelerator.device), target_flops(run)
    evaluations, each = 0, 0.0
    if run.validation is not None and every:
        before = time.monotonic()
        evaluation.validate(run)
        evaluations, each = math.ceil(spec.max_steps / every), time.monotonic() - before
    steps = spec.max_steps * step
    report = {
        "parameters": f"{run.unwrapped_model.num_parameters():,}, for {len(run.objective.tokenizer):,} tokens",
        "a step": f"{step:.3g} s, median of {len(warm)}, for {targets:,.0f} targets: {targets / step:,.0f} a second",
        "steps": f"{spec.max_steps:,} in {duration(steps)}, for {targets * spec.max_steps:,.0f} targets",
        "evaluations": f"{evaluations} of {each:.3g} s; the test at the end is not counted",
        "in all": duration(steps + evaluations * each),
        "memory": f"{memory:,.0f} MB in each of {run.accelerator.num_processes} process(es)",
        "a checkpoint": f"{saved / 1e6:,.1f} MB",
    }
    if flops is not None:
        total = flops * targets * spec.max_steps
        rate = flops * targets / step
        best = best_rate(run.accelerator.device, spec.precision, run.accelerator.mixed_precision)
        share = f"{rate / best / run.accelerator.num_processes:.0%} of what large matrices reach"
        report["operations"] = f"{total:.2e} in all, {rate / 1e9:,.1f} billion a second, {share}"
        if gpus is not None:
            number, kind = gpus
            model = run.unwrapped_model
            gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
            taken = duration(total / (number * MFU * SHEETS[kind]))
            report[f"on {number} {kind}"] = (
                f"{taken} in bf16 at an assumed MFU of {MFU:.0%}; for weights, gradients and optimiser "
                f"{(saved + gradients) / 1e9:,.2f} GB each in DDP, {(saved + gradients) / number / 1e9:,.2f} in FSDP2"
            )
    elif gpus is not None:
        said = "needs data.splits.validation, in whose text operations are counted, and a model that is not sharded"
        raise RecipeError(f"{GPUS}: {said}")
    if minutes is not None:
        fitting = int(60 * minutes / (step + (each / every if every else 0.0)))
        report[f"in {minutes:g} minutes"] = f"--optimisation.max_steps {fitting}"
    return report, Pace(step, each, targets)


def fitting(run: Run, pace: Pace, minutes: float, most: float = math.inf) -> dict[str, int]:
    """The sizes, in the proportions of the recipe's, of the model that makes most of so many minutes: that which gets
    nearest to `TOKENS_A_PARAMETER` tokens for each of its parameters. Where there is text for `most` targets only, a
    larger one makes more of them, down to `LEAST_A_PARAMETER` tokens for each.

    Raises RecipeError for a native model, and for minutes that are too few for a single layer.
    """
    given, config = run.recipe.model, run.unwrapped_model.config
    if not isinstance(config, ScratchConfig) or PATH in given:
        raise RecipeError(f"{FIT}: only for new models of ours, whose sizes go by the same names")
    depths = [name for name in ("num_hidden_layers", "encoder_layers", "decoder_layers") if name in vars(config)]
    deepest = max(getattr(config, name) for name in depths)
    tokens = {name: value for name, value in vars(config).items() if name in OF_TOKENS}
    shared = config.num_key_value_heads or config.num_attention_heads
    groups = config.num_attention_heads // shared

    whole = max(deepest, shared)  # the size as it is, of which others are so many parts

    def scaled(size: int) -> dict[str, int]:
        heads = groups * max(1, round(shared * size / whole))
        width = config.hidden_size * heads // config.num_attention_heads
        sizes = {"hidden_size": width, "num_attention_heads": heads}
        sizes["intermediate_size"] = 8 * max(1, round(config.intermediate_size * width / config.hidden_size / 8))
        if groups > 1:
            sizes["num_key_value_heads"] = heads // groups
        return sizes | {name: max(1, round(getattr(config, name) * size / whole)) for name in depths}

    def seconds(size: int) -> float:
        with torch.device("meta"):
            model = type(run.unwrapped_model)(build_config(given | scaled(size), tokens))
        parameters, before = model.num_parameters(), run.unwrapped_model.num_parameters()
        targets = TARGETS[run.recipe.objective](run.recipe) * model.num_parameters(exclude_embeddings=True)
        if size > 1 and LEAST_A_PARAMETER * targets > most:
            return math.inf
        return pace.step / pace.targets * parameters / before * min(TOKENS_A_PARAMETER * targets, most)

    size = bisect.bisect_right(range(1, LARGEST * whole + 1), 60 * minutes, key=seconds)
    if 0 < size < LARGEST * whole and seconds(size) * seconds(size + 1) < (60 * minutes) ** 2:
        size += 1  # the next one lacks less than this one has too much
    if not size:
        least = math.ceil(seconds(1) / 60)
        raise RecipeError(f"{MINUTES}: {minutes:.2g} are too few for a model of one layer, which takes {least}")
    return scaled(size)


def _options(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of the recipe, and what is asked for among them."""
    rest: list[str] = []
    options: dict[str, str] = {}
    iterator = iter(words)
    for word in iterator:
        name, _, text = word.partition("=")
        if name == FIT:
            options[name] = text
        elif name in (MINUTES, GPUS):
            options[name] = text or next(iterator, "")
        else:
            rest.append(word)
    return rest, options


def _minutes(options: Mapping[str, str]) -> float | None:
    if MINUTES not in options:
        return None
    try:
        minutes = float(options[MINUTES])
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise RecipeError(f"{MINUTES}: must be a number above 0, got {options[MINUTES]!r}")
    return minutes


def _gpus(given: str | None) -> tuple[int, str] | None:
    """`8xH100`: how many, and of which kind on the data sheets."""
    if given is None:
        return None
    number, _, kind = given.partition("x")
    if not number.isdecimal() or int(number) < 1 or kind not in SHEETS:
        kinds = ", ".join(SHEETS)
        raise RecipeError(f"{GPUS}: must be a number of GPUs and their kind, as 8xH100, one of {kinds}; got {given!r}")
    return int(number), kind


def duration(seconds: float) -> str:
    """`3 h 20 min`, `7 min`, `12 s`"""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"
