"""Fine-tuning with the plain Trainer: what it is fed, what it leaves behind, what it refuses."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, AutoTokenizer, EvalPrediction

from hf_scratch_transformer import ScratchEncoderForMaskedLM
from hf_scratch_transformer.hub import check_complete
from hf_scratch_transformer.insight import senses
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny
from training import finetune
from training.folder import claimed

ROWS = [
    ("bank", "shore", "we sat on the bank of the river"),
    ("bank", "money", "she asked the bank for a loan"),
    ("bat", "animal", "a bat slept in the cave"),
    ("bat", "club", "he swung the bat at the ball"),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe beside its data and a tiny encoder."""
    tokenizer = train_tokenizer([text for _, _, text in ROWS], family="encoder", vocab_size=90, min_frequency=1)
    tiny.model(ScratchEncoderForMaskedLM, **config_fields(tokenizer, "encoder")).save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    lines = [
        f"{word}\t{split}\t{sense}\t\t{text}"
        for split, times in (("train", 10), ("test", 1))
        for word, sense, text in ROWS * times
    ]
    (tmp_path / "senses.tsv").write_text("word\tsplit\tsense\tposition\tsentence\n" + "\n".join(lines) + "\n")
    entries = {
        "model": str(tmp_path / "encoder"),
        "data": str(tmp_path / "senses.tsv"),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 40,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "logging_steps": 10,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(entries))
    return path


def test_a_run_learns_and_leaves_a_complete_repository(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = recipe.with_name("card")
    assert finetune.main([str(recipe), "--logging_steps", "5", "--model_card", str(card)]) == 0
    run = recipe.with_name("run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {
        event: [line["step"] for line in lines if line["event"] == event] for event in ("train", "evaluation", "test")
    }
    assert steps == {"train": list(range(5, 41, 5)), "evaluation": [20, 40], "test": [40]}
    assert lines[-1]["accuracy"] == lines[-1]["f1"] == 100
    assert f"test accuracy: {lines[-1]['accuracy']:.4g}" in capsys.readouterr().out
    check_complete(run / "model")
    assert "training.finetune" in (run / "model" / "README.md").read_text()
    for published in (*card.iterdir(), *(run / "model").iterdir()):
        assert str(recipe.parent).encode() not in published.read_bytes(), published
    assert {path.name for path in card.iterdir()} == {
        "README.md",
        "curves.png",
        "environment.json",
        "metrics.jsonl",
        "recipe.yaml",
    }
    assert yaml.safe_load((run / "recipe.yaml").read_text())["logging_steps"] == 5
    model = AutoModelForTokenClassification.from_pretrained(run / "model")
    assert set(model.config.id2label.values()) == {f"{word}/{sense}" for word, sense, _ in ROWS}
    assert finetune.main([str(recipe)]) == 2
    assert "holds a finished run" in capsys.readouterr().err


def test_only_the_first_piece_of_the_word_has_a_label(recipe: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(recipe.with_name("encoder"))
    words = senses.read(recipe.with_name("senses.tsv"))
    dataset = finetune.rows(
        words, "test", {"bank/shore": 0, "bank/money": 1, "bat/animal": 2, "bat/club": 3}, tokenizer, 32
    )
    for row, label in zip(dataset, range(4), strict=True):
        (place,) = [index for index, value in enumerate(row["labels"]) if value != finetune.IGNORED]
        assert row["labels"][place] == label
        assert tokenizer.decode(row["input_ids"][place]).startswith("ba")
        assert not tokenizer.decode(row["input_ids"][place - 1]).startswith("ba")


def test_scores_are_means_over_words() -> None:
    names = ["bank/a", "bank/b", "bat/a"]
    labels = np.array([[-100, 0], [1, -100], [-100, 2], [2, -100]])
    predictions = np.array([[9, 0], [0, 9], [9, 2], [2, 9]])
    found = finetune.scores(EvalPrediction(predictions, labels), names)
    assert found["accuracy"] == 75
    assert found["f1"] == pytest.approx((100 * (2 / 3 + 0) / 2 + 100) / 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--validation", "1"], "validation: 1.0 must be above 0 and below 1"),
        (["--learning_rates", "1"], "unknown: --learning_rates 1"),
        (["--output_dir", "x" * 300], f"output_dir: '{'x' * 60}'... is no path: of 300 characters"),
        (["--data", "a\0b/c"], r"data: 'a\x00b/c' is no path"),
        (["--data", "nowhere"], "nowhere is no tab-separated file"),
        (["--model", "no model!"], "model: no model!: "),
        (["--push_to_hub", "True"], "push_to_hub: Trainer uploads all of output_dir"),
    ],
)
def test_what_is_wrong_is_one_line(
    recipe: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune.main([str(recipe), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not recipe.with_name("run").exists()


def test_a_value_that_begins_with_a_dash_is_of_its_field(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(recipe.read_text() + "bf16: -x=y\n")
    with pytest.raises(SystemExit):
        finetune.main([str(recipe)])
    assert "--bf16" in capsys.readouterr().err


def test_several_values_where_one_is_wanted_are_of_a_field(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_text(f"{recipe.read_text()}\nseed: [1, 2]\n")
    assert finetune.main([str(recipe)]) == 2
    assert "unknown: 2; seed: takes one value" in capsys.readouterr().err


def test_an_encoder_with_weights_missing_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They would be drawn at random; the new head alone may be."""
    path = recipe.with_name("encoder") / "model.safetensors"
    weights = load_file(path)
    lost = sorted(name for name in weights if ".layers.1." in name)
    save_file({name: weights[name] for name in weights if name not in lost}, path, {"format": "pt"})
    assert finetune.main([str(recipe)]) == 2
    assert f"{len(lost)} weights of its backbone are missing, {lost[0]} first" in capsys.readouterr().err
    assert not recipe.with_name("run").exists()


def test_a_sense_without_training_sentences_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recipe.with_name("senses.tsv").open("a") as file:
        file.write("bat\ttest\tblink\t\twithout batting an eye he bat\n")
    assert finetune.main([str(recipe)]) == 2
    assert "the sense 'blink' of 'bat' is tested" in capsys.readouterr().err


def test_a_seed_that_numpy_does_not_take_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune.main([str(recipe), "--seed", str(2**32)]) == 2
    message = "training.finetune: seed: must be a whole number, at least 0 and below 4294967296, got 4294967296\n"
    assert capsys.readouterr().err == message


def test_nothing_that_is_named_is_overwritten_and_a_second_run_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recipe.with_name("run")
    run.mkdir()
    kept = run / "recipe.yaml"
    kept.write_text("# by hand\n" + recipe.read_text())
    assert finetune.main([str(kept)]) == 2
    assert "the recipe: " in (error := capsys.readouterr().err) and "keep it elsewhere" in error
    assert kept.read_text().startswith("# by hand")
    with claimed(run):
        assert finetune.main([str(recipe)]) == 2
    assert f"in use, a run of process {os.getpid()}" in capsys.readouterr().err


def test_weights_that_are_not_finite_are_not_published(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = finetune.Trainer.train

    def poisoned(trainer: finetune.Trainer) -> None:
        honest(trainer)
        next(trainer.model.parameters()).data[0, 0] = float("nan")

    monkeypatch.setattr(finetune.Trainer, "train", poisoned)
    assert finetune.main([str(recipe), "--max_steps", "1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("training.finetune: step 1: the norm of the weights is nan")
    assert not (recipe.with_name("run") / "model").exists()


def test_an_interrupt_is_one_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune.senses, "read", lambda _: signal.raise_signal(signal.SIGINT))
    assert finetune.main([str(recipe)]) == 130
    assert capsys.readouterr().err == "training.finetune: stopped by SIGINT\n"
    assert not recipe.with_name("run").exists()
