"""What a run will take on this machine, measured on its first steps before it begins; nothing is written but the cache.

python -m training plan RECIPE.yaml [--minutes M] [--key value ...]
"""

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hf_scratch_transformer.onednn import onednn_products

from . import evaluation, loop
from .metrics import used_memory
from .publication import target_flops
from .recipe import parse
from .roofline import best_rate
from .run import Run, open_accelerator, prepare, saved_tensors
from .sections import RecipeError

WARMUP, MEASURED = 3, 10  # steps: in the first of them much is allocated, and maybe compiled
LIMIT = "--minutes"


def plan(words: Sequence[str]) -> None:
    """Print what the run of a command line will take, and with `--minutes` the steps that fit into so many.

    Raises RecipeError when the recipe or its data cannot be used, or the minutes are no number above 0.
    """
    words, minutes = _limited(words)
    with tempfile.TemporaryDirectory() as folder:
        recipe = parse([*words, "--output_dir", folder]).model_copy(update={"resume": False, "trackers": ()})
        accelerator = open_accelerator(recipe)
        with onednn_products():
            report = measured(prepare(recipe, accelerator, Path(folder), time.monotonic()), minutes)
    if accelerator.is_main_process:
        width = max(map(len, report))
        print(*(f"{name:{width}}  {value}" for name, value in report.items()), sep="\n")


def measured(run: Run, minutes: float | None = None) -> dict[str, str]:
    """What a run of which no step is done will take, by names; it is no longer fit to be trained."""
    spec, every = run.recipe.optimisation, run.recipe.evaluation.every_steps
    times = list(loop.timed(run, min(WARMUP + MEASURED, spec.max_steps)))
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
        "steps": f"{spec.max_steps:,} in {_duration(steps)}, for {targets * spec.max_steps:,.0f} targets",
        "evaluations": f"{evaluations} of {each:.3g} s; the test at the end is not counted",
        "in all": _duration(steps + evaluations * each),
        "memory": f"{memory:,.0f} MB in each of {run.accelerator.num_processes} process(es)",
        "a checkpoint": f"{saved / 1e6:,.1f} MB",
    }
    if flops is not None:
        total = flops * targets * spec.max_steps
        rate = flops * targets / step
        best = best_rate(run.accelerator.device, spec.precision, run.accelerator.mixed_precision)
        share = f"{rate / best / run.accelerator.num_processes:.0%} of what large matrices reach"
        report["operations"] = f"{total:.2e} in all, {rate / 1e9:,.1f} billion a second, {share}"
    if minutes is not None:
        fitting = int(60 * minutes / (step + (each / every if every else 0.0)))
        report[f"in {minutes:g} minutes"] = f"--optimisation.max_steps {fitting}"
    return report


def _limited(words: Sequence[str]) -> tuple[list[str], float | None]:
    """The words of the recipe, and the minutes among them."""
    rest, given = [], None
    iterator = iter(words)
    for word in iterator:
        name, _, text = word.partition("=")
        if name != LIMIT:
            rest.append(word)
            continue
        given = text or next(iterator, "")
    if given is None:
        return rest, None
    try:
        minutes = float(given)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise RecipeError(f"{LIMIT}: must be a number above 0, got {given!r}")
    return rest, minutes


def _duration(seconds: float) -> str:
    """`3 h 20 min`, `7 min`, `12 s`"""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest} min" if hours else f"{rest} min"
