"""What is measured, and what follows from it: the best checkpoint, a lower learning rate, the end of the run."""

import json
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests import tiny_runs
from training import evaluation, metrics
from training.objectives import Translation
from training.recipe import SCORES, Checkpoints, Evaluation, Optimisation
from training.run import Run, State


def judged(losses, patience=2, keep_best=1, early_stopping=3, metric="loss"):
    """What `judge` returns for each of these values of a metric in turn, and the state after them."""
    recipe = SimpleNamespace(
        evaluation=Evaluation(best_metric=metric, early_stopping=early_stopping),
        optimisation=Optimisation(max_steps=9, plateau_patience=patience),
        checkpoints=Checkpoints(keep_best=keep_best),
    )
    run = SimpleNamespace(recipe=recipe, state=State())
    run.finished = MethodType(Run.finished, run)
    run.limit = MethodType(Run.limit, run)
    return [(evaluation.judge(run, {metric: loss}), bool(run.finished())) for loss in losses], run.state


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


def test_a_score_that_is_no_number_is_never_the_best():
    results, state = judged([float("nan"), 3.0, float("nan"), 2.0], early_stopping=None)
    assert results == [(None, False), (3.0, False), (None, False), (2.0, False)] and state.best_score == 2.0


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_what_may_be_the_best_metric_is_what_is_measured(objective, tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, objective, optimisation={"max_steps": 1}, evaluation={"every_steps": 1})
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    (line,) = [line for line in metrics.read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "evaluation"]
    numbers = {name for name, value in line.items() if isinstance(value, float)} - {"seconds"}
    assert numbers == {"loss", "perplexity", *SCORES[objective]}
    assert tiny_runs.run(recipe, tmp_path / "other", "--evaluation.best_metric", "blue") == 2
    assert "evaluation.best_metric: must be one of loss, perplexity, " in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_scores_that_are_not_measured_and_groups_that_are_not_there_are_refused_before_training(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path)
    for words, message in {
        ("--evaluation.best_metric", "bleu", "--evaluation.generate_rows", "0"): "bleu is not measured with evaluation",
        ("--evaluation.group_by", "kind"): "evaluation.group_by: test has no kind; its columns are ",
    }.items():
        assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    recipe = tiny_runs.write_recipe(
        tmp_path, data={"splits": {"train": "train", "validation": "valid"}}, evaluation={"group_by": ["kind"]}
    )
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "evaluation.group_by: groups of test rows need data.splits.test" in capsys.readouterr().err
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", evaluation={"group_by": ["kind"]})
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "evaluation.group_by: an option of translation, not of causal_lm" in capsys.readouterr().err
    recipe = tiny_runs.write_recipe(tmp_path, "masked_lm", evaluation={"minimum_bayes_risk": 4})
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "evaluation.minimum_bayes_risk: an option of translation, not of masked_lm" in capsys.readouterr().err


def test_the_test_takes_translations_of_least_risk_and_the_model_is_saved_with_its_own_beams(tmp_path, monkeypatch):
    asked = []

    def last(texts, log_probabilities):
        asked.append(len(texts))
        assert len(log_probabilities) == len(texts)
        return f"{texts[-1]} as heard"

    monkeypatch.setattr("training.objectives.least_risk", last)
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 1}, evaluation={"num_beams": 2})
    assert tiny_runs.run(recipe, tmp_path / "run", "--evaluation.minimum_bayes_risk", "3") == 0
    outputs = (tmp_path / "run" / "test_outputs.txt").read_text(encoding="utf-8").splitlines()
    assert asked == [3] * len(outputs) and all(output.endswith("as heard") for output in outputs)
    assert json.loads((tmp_path / "run" / "model" / "generation_config.json").read_text())["num_beams"] == 2


def test_rows_are_grouped_by_a_column_that_is_called_like_a_text(tmp_path, capsys):
    """`source` is what the objective reads, here from `en`; the column `source` says where a row is from. On the
    terminal groups take a line, in the card a table."""
    recipe = tiny_runs.write_recipe(
        tmp_path,
        data={"splits": {"train": "train", "test": "test.jsonl"}},
        optimisation={"max_steps": 1},
        evaluation={"every_steps": None, "group_by": ["source"]},
    )
    rows = [{"en": "one", "de": "eins", "source": "books"}, {"en": "two", "de": "zwei", "source": "news"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "corpus" / "test.jsonl").write_text(lines, encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    line = next(line for line in metrics.read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "test")
    groups = {group: scores["rows"] for group, scores in line["groups"]["source"].items()}
    assert groups == {"any group": 2, "books": 1, "news": 1}
    assert "test by source: 2 groups, exact_match 0 (books) or better\n" in capsys.readouterr().out
    assert "| books |" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")


def test_the_weights_that_are_measured_are_those_the_run_would_end_with(tmp_path):
    """With a moving average, the evaluation at the last step is the test, where both read the same rows."""
    recipe = tiny_runs.write_recipe(
        tmp_path,
        data={"splits": {"train": "train", "validation": "test", "test": "test"}},
        optimisation={"final_weights": "ema", "ema_decay": 0.5, "max_steps": 4},
        evaluation={"every_steps": 4, "generate_rows": 8},
    )
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    last = metrics.last(tmp_path / "run" / "metrics.jsonl")
    for name in ("bleu", "chrf"):
        assert last["evaluation"][name] == last["test"][name]
    for name, near in {"loss": 1e-6, "perplexity": 1e-5}.items():  # added up in other batches
        assert last["evaluation"][name] == pytest.approx(last["test"][name], rel=near)


def test_early_stopping_ends_a_run_without_progress(tmp_path):
    recipe = tiny_runs.write_recipe(
        tmp_path,
        optimisation={"max_steps": 1000, "learning_rate": 1e-12, "matrix_learning_rate": 1e-12},
        evaluation={"every_steps": 2, "early_stopping": 2, "best_metric": "bleu", "generate_rows": 2},
    )
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    assert max(tiny_runs.losses(tmp_path / "run")) == 6  # the first evaluation is the best, two more are in vain


def test_samples_keep_documents_apart(tmp_path, capsys):
    """They lie one after the other in the stream, with nothing between them that is shown."""
    recipe = tiny_runs.write_recipe(
        tmp_path, "causal_lm", data={"window": 32}, optimisation={"max_steps": 1}, evaluation={"every_steps": 1}
    )
    for split in ("train", "valid"):
        tiny_runs.write_lines(tmp_path / "corpus" / f"{split}.en", 20 * ["one two", "three", "four"])
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    line = next(line for line in metrics.read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "evaluation")
    assert "one two\nthree\nfour" in line["samples"][0]["text"]
    assert "one two ↵ three ↵ four" in capsys.readouterr().err


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_evaluations_show_what_the_model_writes_and_change_nothing_by_it(objective, tmp_path, capsys):
    recipe = tiny_runs.write_recipe(
        tmp_path, objective, data={"window": 8}, optimisation={"max_steps": 4}, evaluation={"every_steps": 2}
    )
    losses = []
    for count in (2, 0):
        output = tmp_path / f"{count}"
        assert tiny_runs.run(recipe, output, "--evaluation.samples", str(count)) == 0
        said = capsys.readouterr().err
        losses.append(tiny_runs.losses(output))
        for line in metrics.read(output / "metrics.jsonl"):
            if line["event"] == "evaluation":
                assert len(line["samples"]) == count
                for sample in line["samples"]:
                    assert sample.keys() <= {"source", "text", "reference", "output"} and (
                        sample.get("text") or sample.get("source")
                    )
                    output = " ".join(sample["output"].strip().replace("\n", " ↵ ").split())
                    assert f"    output    {output}\n" in said
                if objective == "masked_lm":
                    assert any("[MASK]" in sample["text"] for sample in line["samples"]) == bool(count)
                    assert not any("[MASK]" in sample["reference"] for sample in line["samples"])
    assert losses[0] == losses[1]


def test_intervals_of_a_translators_loss_are_those_of_its_rows(tmp_path, monkeypatch):
    """Though batches are of like length, on which the loss of a token depends."""
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 1}, evaluation={"num_beams": 1})
    for language, word in {"en": "two", "de": "zwei"}.items():
        lines = [" ".join([word] * length) for length in [1, 9] * 200]
        tiny_runs.write_lines(tmp_path / "corpus" / f"test.{language}", lines)
    rows = []  # tokens and loss of each

    def score(self, model, batch):
        counts = (batch["labels"] >= 0).sum(1)
        losses = counts * torch.where(counts > 6, 3.0, 1.0)
        rows.extend(zip(counts.tolist(), losses.tolist(), strict=True))
        return {"loss_sum": losses.sum()}

    monkeypatch.setattr(Translation, "score", score)
    monkeypatch.setattr(Translation, "translate", lambda self, model, corpus, rows, *_: ["zwei"] * len(rows))
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    found = next(line for line in metrics.read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "test")
    tokens, losses = np.array(rows[-400:]).T
    assert found["loss"] == pytest.approx(losses.sum() / tokens.sum())
    drawn = np.random.default_rng(1).integers(0, 400, (2000, 400))
    low, high = np.quantile(losses[drawn].sum(1) / tokens[drawn].sum(1), (0.025, 0.975))
    least, most = found["loss_interval"]
    assert (most - least) / (high - low) == pytest.approx(1, abs=0.3)
