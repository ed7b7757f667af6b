"""Recipes: read, overridden, checked as a whole, written down so that they can be run again."""

import importlib.util
from pathlib import Path

import pytest

from tests import tiny_runs
from training.__main__ import main
from training.arguments import RecipeError, dump, parse

FOLDER = Path(__file__).parent.parent / "training" / "recipes"
# The others are those of `training.finetune`.
RECIPES = sorted(path for path in FOLDER.glob("*.yaml") if "\nobjective:" in f"\n{path.read_text(encoding='utf-8')}")


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(tmp_path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid_and_survives_being_written_down(path, tmp_path):
    resolved = parse([str(path)])
    (tmp_path / path.name).write_text(dump(resolved), encoding="utf-8")
    again = parse([str(tmp_path / path.name)])
    assert again.identity() == resolved.identity() and dump(again) == dump(resolved)


def test_any_field_is_overridden_on_the_command_line(recipe):
    words = "--model.hidden_size 64 --optimisation.learning_rate=5e-3 --data.streaming --seed 9 --data.splits.test val"
    resolved = parse([str(recipe), *words.split()])
    assert resolved.model["hidden_size"] == 64
    assert resolved.optimisation.learning_rate == 0.005
    assert resolved.data.streaming is True
    assert resolved.seed == 9
    assert resolved.data.splits["test"] == ("val",) and resolved.data.splits["train"] == ("train",)


def test_numbers_in_scientific_notation_are_numbers(recipe):
    resolved = parse([str(recipe), "--optimisation.learning_rate", "1e-4", "--optimisation.max_steps", "2e3"])
    assert resolved.optimisation.learning_rate == 1e-4
    assert resolved.optimisation.max_steps == 2000 and isinstance(resolved.optimisation.max_steps, int)


def test_all_problems_come_in_one_message(recipe):
    words = [
        "--optimisation.lerning_rate=1",
        "--optimisation.label_smoothing=1.5",
        "--optimisation.max_steps=0",
        "--data.batch_tokens=many",
        "--evaluation.num_beams=-1",
        "--optimisation.schedule=linaer",
        "--nonsense=1",
    ]
    with pytest.raises(RecipeError) as caught:
        parse([str(recipe), *words])
    message = str(caught.value)
    assert "7 problem" in message
    for expected in (
        "optimisation.lerning_rate: unknown key; did you mean learning_rate?",
        "optimisation.label_smoothing: 1.5 must be at least 0 and below 1",
        "optimisation.max_steps: 0 must be at least 1",
        "data.batch_tokens: expected int, got 'many'",
        "evaluation.num_beams: -1 must be at least 1",
        "did you mean linear?",
        "nonsense: unknown key",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.hiden_size=8"], "model.hiden_size: scratch_seq2seq has no such field; did you mean hidden_size?"),
        (["--model.num_attention_heads=3"], "num_attention_heads"),
        (["--model.model_type=nothing"], "model.model_type: 'nothing'"),
        (["--data.columns={text: en}"], "data.columns: translation needs exactly source, target"),
        (["--data.batch_tokens=8"], "data.batch_tokens: 8 cannot hold one row of 32"),
        (["--optimisation.max_steps=null"], "optimisation: give max_steps, max_minutes or both"),
        (["--objective=causal_lm", "--optimisation.r_drop=1"], "optimisation.r_drop"),
        (["--optimisation.final_weights=mean"], "checkpoints.keep_last"),
        (["--optimisation.mask_fraction=[0.3, 0.1, 0.2]"], "optimisation.mask_fraction"),
        (["--evaluation.stride=4"], "evaluation.stride: 4 must be at most data.window 256, of a causal_lm"),
        (["--data=3"], "data: expected a section, got 3"),
        (["word"], "'word': not of the form --key value"),
    ],
)
def test_impossible_values_are_named(words, expected, recipe):
    with pytest.raises(RecipeError) as caught:
        parse([str(recipe), *words])
    assert expected in str(caught.value)


def test_a_tracker_that_is_not_installed_is_named(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"trackers: trackio is not installed"):
        parse([str(recipe), "--trackers", "trackio"])
    with pytest.raises(RecipeError, match=r"trackers: 'wandb' is not one of tensorboard, trackio"):
        parse([str(recipe), "--trackers", "wandb"])


def test_a_bad_recipe_ends_with_code_2_before_anything_is_written(recipe, tmp_path, capsys):
    output = tmp_path / "run"
    assert main([str(recipe), "--output_dir", str(output), "--optimisation.max_steps", "-3"]) == 2
    assert main([]) == 2
    assert main([str(tmp_path / "absent.yaml")]) == 2
    recipe.write_text("objective: [", encoding="utf-8")
    assert main([str(recipe)]) == 2
    assert not output.exists()
    lines = capsys.readouterr().err
    assert "max_steps: -3" in lines and "usage" in lines and "absent.yaml" in lines and "Traceback" not in lines


def test_a_run_is_not_overwritten_unasked(recipe, tmp_path, capsys):
    output = tmp_path / "run"
    (output / "corpus").mkdir(parents=True)
    (output / "metrics.jsonl").write_text("", encoding="utf-8")
    assert tiny_runs.run(recipe, output) == 2
    assert "--resume goes on, --overwrite replaces it" in capsys.readouterr().err
    assert tiny_runs.run(recipe, output, "--overwrite", "--optimisation.max_steps", "1") == 0
    assert (output / "corpus").is_dir(), "what the run did not write stays"


def test_a_run_that_never_started_is_not_in_the_way(recipe, tmp_path):
    output = tmp_path / "run"
    assert tiny_runs.run(recipe, output, "--tokenizer.path", str(tmp_path / "nowhere")) == 2
    assert (output / "recipe.yaml").exists()
    assert tiny_runs.run(recipe, output, "--optimisation.max_steps", "1") == 0


def test_a_folder_that_holds_no_run_loses_nothing(recipe, tmp_path, capsys):
    theirs = tmp_path / "run" / "tokenizer" / "notes.txt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("not of a run", encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "output_dir: " in capsys.readouterr().err
    assert theirs.exists()


def test_a_folder_that_cannot_be_written_is_one_line(recipe, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "file" / "run") == 2
    assert "output_dir" in capsys.readouterr().err
