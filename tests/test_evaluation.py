"""What is measured, and what follows from it: the best checkpoint, a lower learning rate, the end of the run."""

from types import SimpleNamespace

import pytest

from tests import tiny_runs
from training import evaluation, metrics
from training.recipe import Checkpoints, Evaluation, Optimisation
from training.run import State, TrainingError


def judged(losses, patience=2, keep_best=1, early_stopping=3, metric="loss"):
    """What `judge` returns for each of these values of a metric in turn, and the state after them."""
    recipe = SimpleNamespace(
        evaluation=Evaluation(best_metric=metric, early_stopping=early_stopping),
        optimisation=Optimisation(plateau_patience=patience),
        checkpoints=Checkpoints(keep_best=keep_best),
    )
    run = SimpleNamespace(recipe=recipe, state=State())
    return [evaluation.judge(run, {metric: loss}) for loss in losses], run.state


def test_only_progress_is_kept_as_the_best():
    results, state = judged([3.0, 2.0, 2.5, 1.0], early_stopping=None)
    assert results == [(3.0, False), (2.0, False), (None, False), (1.0, False)]
    assert (state.best_score, state.bad_evals) == (1.0, 0)
    assert judged([3.0, 2.0], keep_best=0)[0] == [(None, False)] * 2


def test_of_a_score_more_is_better():
    results, state = judged([3.0, 2.0, 4.0], metric="bleu")
    assert results == [(-3.0, False), (None, False), (-4.0, False)] and state.best_score == -4.0


def test_patience_ends_the_run_or_reduces_the_learning_rate():
    results, state = judged([1.0] * 6)
    assert [is_exhausted for _, is_exhausted in results] == [False] * 3 + [True] * 3
    assert (state.bad_evals, state.lr_reductions, state.plateau_evals) == (5, 2, 1)
    _, state = judged([1.0, 1.0, 1.0, 0.5, 1.0])
    assert (state.bad_evals, state.lr_reductions, state.plateau_evals) == (1, 1, 1)


def test_a_metric_that_is_not_measured_is_named_with_those_that_are(tmp_path, capsys):
    with pytest.raises(TrainingError, match="best_metric: 'bleu' is not measured; choose from loss"):
        evaluation.judge(
            SimpleNamespace(recipe=SimpleNamespace(evaluation=Evaluation(best_metric="bleu")), state=State()),
            {"loss": 1.0},
        )
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", evaluation={"best_metric": "bleu"})
    assert tiny_runs.run(recipe, tmp_path / "run") == 1
    assert "choose from loss, perplexity, bits_per_byte, word_perplexity" in capsys.readouterr().err


def test_the_weights_that_are_measured_are_those_the_run_would_end_with(tmp_path):
    """With a moving average, the evaluation at the last step is the test, where both read the same rows."""
    recipe = tiny_runs.write_recipe(
        tmp_path,
        data={"splits": {"train": "train", "validation": "test", "test": "test"}},
        optimisation={"final_weights": "ema", "ema_decay": 0.5, "max_steps": 4},
        evaluation={"every_steps": 4, "generate_rows": 8},
    )
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    last = {line["event"]: line for line in metrics.read(tmp_path / "run" / "metrics.jsonl")}
    for name in ("loss", "perplexity", "bleu", "chrf"):
        assert last["evaluation"][name] == last["test"][name]


def test_early_stopping_ends_a_run_without_progress(tmp_path):
    recipe = tiny_runs.write_recipe(
        tmp_path,
        optimisation={"max_steps": 1000, "learning_rate": 1e-12, "matrix_learning_rate": 1e-12},
        evaluation={"every_steps": 2, "early_stopping": 2, "best_metric": "bleu", "generate_rows": 2},
    )
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    assert max(tiny_runs.losses(tmp_path / "run")) == 6  # the first evaluation is the best, two more are in vain
