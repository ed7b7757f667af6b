"""What is measured: on the validation split while training, on the test split once it is over."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hf_scratch_transformer.files import write_text
from hf_scratch_transformer.insight.records import RISING

from . import metrics, sharding
from .batches import EVALUATION, Batches
from .corpus import Corpus
from .objectives import Translation
from .run import Interrupted, Run, Session
from .sections import RecipeError
from .sources import GROUP


def validate(run: Run) -> dict[str, Any]:
    """Loss and scores on the validation split, with the weights that the run would end with now."""
    corpus, spec = run.validation, run.recipe.evaluation
    assert corpus is not None
    with _evaluating(run) as model:
        values: dict[str, Any] = evaluate(run, model, corpus)
        rows = min(spec.generate_rows, run.objective.examples(corpus))
        if not isinstance(run.objective, Translation):
            with run.accelerator.autocast():
                values["samples"] = run.objective.samples(model, corpus, spec.samples)
        elif rows:
            outputs = translate(run, model, corpus, np.arange(rows), num_beams=1)
            values |= metrics.translation_scores(outputs, corpus.texts["target"][:rows])
            sources, references = corpus.texts["source"], corpus.texts["target"]
            values["samples"] = [
                {"source": sources[row], "reference": references[row], "output": outputs[row]}
                for row in range(min(spec.samples, rows))
            ]
    return values


def judge(run: Run, values: dict[str, Any]) -> float | None:
    """Compare an evaluation with those before it, and note in the state what came of it.

    Returns the score (lower is better) if this evaluation is to be kept as the best.
    """
    spec, state = run.recipe.evaluation, run.state
    score = values[spec.best_metric] * (-1 if spec.best_metric in RISING else 1)
    is_better = math.isfinite(score) and (state.best_score is None or score < state.best_score)
    if is_better:
        state.best_score, state.bad_evals, state.plateau_evals = score, 0, 0
    else:
        state.bad_evals, state.plateau_evals = state.bad_evals + 1, state.plateau_evals + 1
    if state.plateau_evals >= run.recipe.optimisation.plateau_patience:
        state.lr_reductions, state.plateau_evals = state.lr_reductions + 1, 0
    return score if is_better and run.recipe.checkpoints.keep_best else None


def test(run: Run) -> dict[str, Any]:
    """Measure the finished model on the test split; translations are also written to `test_outputs.txt`."""
    if run.test is None:
        return {}
    values, outputs = measure(run, run.unwrapped_model, run.test)
    if run.is_main and outputs:
        lines = "".join(" ".join(output.split()) + "\n" for output in outputs)
        write_text(run.folder / "test_outputs.txt", lines)
    if run.is_main:
        run.log.write("test", step=run.state.step, seconds=round(run.clock(), 2), **values)
    return values


def measure(session: Session, model: PreTrainedModel, corpus: Corpus) -> tuple[dict[str, Any], list[str]]:
    """All that there is to measure of a finished model on a test split, and its translations."""
    model.eval()
    values = evaluate(session, model, corpus, with_interval=True)
    if not isinstance(session.objective, Translation):
        return values, []
    spec, references = session.recipe.evaluation, corpus.texts["target"]
    rows, choices = np.arange(session.objective.examples(corpus)), spec.minimum_bayes_risk or 1
    # A wider search finds better ones, of which more than half add nothing (benchmarks/ablations/minimum_bayes_risk).
    num_beams = spec.num_beams if choices == 1 else 2 * choices
    outputs = translate(session, model, corpus, rows, num_beams, choices)
    values |= metrics.translation_scores(outputs, references) | metrics.translation_intervals(outputs, references)
    values["decoding"] = {"num_beams": num_beams} | spec.model_dump(include={"length_penalty", "minimum_bayes_risk"})
    values["groups"] = {
        column: metrics.grouped_scores(outputs, references, corpus.texts[GROUP + column]) for column in spec.group_by
    }
    return values, outputs


@torch.no_grad()
def evaluate(run: Session, model: torch.nn.Module, corpus: Corpus, with_interval: bool = False) -> dict[str, Any]:
    """Loss and the objective's other metrics over a whole corpus, each process taking some of the batches; with the
    interval that each would be in of other text of that kind, as far as the objective's parts of it tell.

    Raises Interrupted when one of them has received a signal.
    """
    accelerator, objective = run.accelerator, run.objective
    parts = objective.parts(corpus) if with_interval else [objective.plan(corpus, None)]
    plan = [batch for group in parts for batch in group]
    batches = Batches(
        plan,
        partial(objective.collate, corpus),
        objective.targets,
        key=(run.recipe.seed, EVALUATION),
        first_step=run.recipe.optimisation.max_steps,  # where a masking schedule ends
    )
    done: dict[int, dict[str, Any]] = {}
    for index, counts in _turns(run, model, len(plan)):
        batch, count = batches[index]
        with accelerator.autocast():
            scores = objective.score(model, {n: v.to(accelerator.device) for n, v in batch.items()})
        if counts:
            done[index] = scores | {"targets": count}
    mine = [(index, {name: float(value) for name, value in scores.items()}) for index, scores in done.items()]
    counted = sorted((pair for each in _gathered(run, mine) for pair in each), key=itemgetter(0))
    if not (targets := int(sum(each["targets"] for _, each in counted))):
        raise RecipeError(f"data.splits: an evaluation of {corpus.rows} rows has nothing to predict: give more text")
    sums = np.array([list(each.values()) for _, each in counted])  # (batches, names), targets last

    def summary(totals: np.ndarray) -> dict[str, float]:
        scaled = totals * (targets / totals[-1])
        return objective.summary(dict(zip(counted[0][1], scaled, strict=True)), targets, corpus)

    values: dict[str, Any] = summary(sums.sum(0))
    if with_interval:
        firsts = np.cumsum([0, *map(len, parts[:-1])])
        parted = np.add.reduceat(sums, firsts)  # (parts, names)
        drawn = [summary(totals) for totals in metrics.resampled(parted) if totals[-1]]
        for name, value in [*values.items()]:
            least = 1.0 if name.endswith("perplexity") else 0.0
            found = metrics.likely([each[name] for each in drawn], value, len(parts), least)
            values[f"{name}_interval"] = found
    return values


def translate(
    run: Session, model: torch.nn.Module, corpus: Corpus, rows: np.ndarray, num_beams: int, choices: int = 1
) -> list[str]:
    """Translations of some rows, in order, each that of least risk of so many `choices`; each process does some.

    Raises Interrupted when one of them has received a signal.
    """
    assert isinstance(run.objective, Translation)
    batches = run.objective.alike(corpus, rows, num_beams)
    mine: dict[int, str] = {}
    for index, counts in _turns(run, model, len(batches)):
        with run.accelerator.autocast():
            texts = run.objective.translate(model, corpus, batches[index], num_beams, choices)
        if counts:
            mine |= zip(batches[index].tolist(), texts, strict=True)
    done = {row: text for part in _gathered(run, mine) for row, text in part.items()}
    return [done[row] for row in rows.tolist()]


def _turns(run: Session, model: torch.nn.Module, count: int) -> Iterator[tuple[int, bool]]:
    """Which of so many batches this process does, and whether it is to count; until it is told to stop.

    Of a sharded model each process needs the others to go on: all have as many turns, in some of which a batch is done
    that another counts, and all stop at once.
    """
    share, shares = run.share
    is_sharded, is_first = sharding.is_sharded(model), run.accelerator.process_index % run.sharers == 0
    for first in range(0, count, shares):
        if max(gather_object([run.signal()])) if is_sharded else run.signal():
            return
        index = first + share
        if index < count or is_sharded:
            yield min(index, count - 1), index < count and is_first


def _gathered(run: Session, mine: Any) -> list[Any]:
    """What each process has; Interrupted in all of them when one has been told to stop, and broken off."""
    parts, signals = zip(*gather_object([(mine, run.signal())]), strict=True)
    if number := max(signals):
        raise Interrupted(number)
    return list(parts)


@contextlib.contextmanager
def _evaluating(run: Run) -> Iterator[torch.nn.Module]:
    """The model to measure: without dropout, and with averaged weights where the run keeps them."""
    model = run.measured_model()
    model.eval()
    try:
        yield model
    finally:
        if isinstance(model, FSDPModule):
            model.reshard()  # which else waits for a backward pass
        run.unwrapped_model.train()
