"""Recipes: read, overridden, checked as a whole, written down so that they can be run again."""

import dataclasses
import importlib.util
import random
import re
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING, PreTrainedConfig

import hf_scratch_transformer as scratch
from tests import tiny_runs
from training.recipe import OURS, RECIPES, RULES, SYNONYMS, Recipe, dump, parse, reference, shipped
from training.sections import RecipeError, Section, names

ROOT = Path(__file__).parent.parent


def recipes(folder: Path) -> list[Path]:
    """Without those of `training.finetune`."""
    return sorted(path for path in folder.glob("**/*.yaml") if "\nobjective:" in f"\n{path.read_text('utf-8')}")


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(tmp_path)


def problems(recipe, *words):
    """What is wrong, a line each."""
    with pytest.raises(RecipeError) as caught:
        parse([str(recipe), *words])
    first, *lines = str(caught.value).splitlines()
    assert first == f"{recipe}: {len(lines)} problem(s)"
    return [line.removeprefix("  ") for line in lines]


SAVED = recipes(ROOT / "model_cards")


@pytest.mark.parametrize("path", [*recipes(ROOT / "training"), *SAVED], ids=str)
def test_every_recipe_of_the_project_is_valid_and_survives_being_written_down(path, tmp_path):
    resolved = parse([str(path)])
    (tmp_path / path.name).write_text(dump(resolved), encoding="utf-8")
    again = parse([str(tmp_path / path.name)])
    assert again.identity() == resolved.identity() and dump(again) == dump(resolved)


def test_a_recipe_that_comes_with_the_program_has_a_name(tmp_path, monkeypatch):
    """A file of that name is what the user means, all the same."""
    monkeypatch.chdir(tmp_path)
    assert {"shakespeare_char_cpu", "multi30k_en_de"} <= {*shipped()} and "coarsewsd20" not in shipped()
    for name in shipped():
        assert parse([name]) == parse([str(RECIPES / f"{name}.yaml")])
    Path("wikitext2").write_text("objective: nothing", encoding="utf-8")
    with pytest.raises(RecipeError, match="^wikitext2: "):
        parse(["wikitext2"])


def test_a_run_does_not_end_by_the_clock(recipe):
    """As those of version 0.1 could."""
    said = problems(recipe, "--optimisation.max_steps", "null", "--optimisation.max_minutes", "10")
    assert said == ["optimisation.max_steps: must be a whole number, at least 1, got null"]


@pytest.mark.parametrize("path", SAVED, ids=str)
def test_a_recipe_that_a_run_saved_means_what_yaml_says(path):
    """Their numbers and names are those that any reader of YAML finds."""
    saved, resolved = yaml.safe_load(path.read_text(encoding="utf-8")), parse([str(path)])
    understood = resolved.model_dump(mode="json")
    for name, value in saved.items():
        assert understood[name] == (understood[name] | value if isinstance(value, dict) else value)


def test_any_field_is_overridden_on_the_command_line(recipe):
    words = "--model.hidden_size 64 --optimisation.learning_rate=5e-3 --data.streaming --seed 9 --data.splits.test val"
    resolved = parse([str(recipe), *words.split()])
    assert resolved.model["hidden_size"] == 64
    assert resolved.optimisation.learning_rate == 0.005
    assert resolved.data.streaming is True
    assert resolved.seed == 9
    assert resolved.data.splits["test"] == ("val",) and resolved.data.splits["train"] == ("train",)


def test_a_name_keeps_its_characters_and_a_number_its_digits(recipe):
    words = ["--output_dir", "runs/exp #2", "--seed", "010", "--data.languages", '["no", "en"]']
    resolved = parse([str(recipe), *words, "--data.name", "1.10", "--data.revision", "null"])
    assert resolved.output_dir == "runs/exp #2" and resolved.seed == 10
    assert resolved.data.languages == ("no", "en")
    assert resolved.data.name == "1.10" and resolved.data.revision is None


def test_all_problems_of_all_sections_come_in_one_message_with_the_contradictions_between_them(recipe):
    """A mistake in one field hides no other, in its section or elsewhere: to mend them all takes one run."""
    recipe.write_text(recipe.read_text() + "\nlog_every: 5\n", encoding="utf-8")
    words = [
        "--optimisation.lerning_rate=1",
        "--optimisation.label_smoothing=1.5",
        "--optimisation.max_steps=0",
        "--optimisation.schedule=linaer",
        "--optimisation.betas=[0.9, 1]",
        "--optimisation.final_weights=mean",
        "--optimisation.r_drop=1",
        "--objective=causal_lm",
        "--data.batch_tokens=200",
        "--data.workers=some",
        "--data.splits.vald=valid",
        "--evaluation.num_beams=-1",
        "--evaluation.stride=300",
        "--checkpoints.keep_last=0",
        "--tokenizer=null",
        "--model.hidden_size=-16",
        "--model.dropout=a bit",
        "--model.norm_position=pre-norm",
        "--model.num_layers=3",
        "--trackers=wandb",
        "--seed=-1",
        "--lr=0.1",
        "stray",
    ]
    found = sorted(problems(recipe, *words))
    expected = [
        "checkpoints.keep_last: must be a whole number, at least 1, got 0",
        "data.batch_tokens: 200 cannot hold one row of 257 tokens",
        "data.columns: causal_lm needs exactly text, got source, target",
        "data.splits.vald: must be one of train, validation, test",
        "data.workers: must be a whole number, at least 0, got some",
        "evaluation.num_beams: must be a whole number, at least 1, got -1",
        "evaluation.stride: 300 must be at most data.window 256",
        f"line {len(recipe.read_text().splitlines())}: log_every is given a second time",
        "lr: unknown key; did you mean optimisation.learning_rate?",
        "model.dropout: must be float | int, got 'a bit'",
        "model.num_layers: scratch_seq2seq has no such field; did you mean model.num_hidden_layers?",
        "model: ScratchSeq2SeqConfig cannot work: norm_position='pre-norm' must be one of 'pre'",
        "optimisation.betas.1: must be a number, at least 0 and below 1, got 1",
        "optimisation.label_smoothing: must be a number, at least 0 and below 1, got 1.5",
        "optimisation.lerning_rate: unknown key; did you mean optimisation.learning_rate?",
        "optimisation.max_steps: must be a whole number, at least 1, got 0",
        "optimisation.r_drop: an option of translation, not of causal_lm",
        "optimisation.schedule: must be one of constant, linear, cosine, inverse_sqrt, warmup_stable_decay, plateau, "
        "got linaer; did you mean linear?",
        "seed: must be a whole number, at least 0 and below 4294967296, got -1",
        "stray: not of the form --key value",
        "tokenizer: must be a section of fields, got null",
        "trackers.0: must be one of tensorboard, trackio, got wandb",
    ]
    assert [line.startswith(start) for line, start in zip(found, expected, strict=True)] == [True] * len(expected), (
        found
    )


def test_mending_what_is_said_is_enough(recipe):
    """Whatever is wrong together: without what the message names nothing is wrong, and each mistake is named."""
    mistakes = {
        "optimisation.max_steps": "0",
        "optimisation.betas": "[2, 2]",
        "data.batch_tokens": "8",
        "data.window": "few",
        "data.columns": '{"text": "en"}',
        "data.splits": '{"validation": "valid"}',
        "evaluation.stride": "4",
        "evaluation.best_metirc": "bleu",
        "checkpoints": "often",
        "model.hidden_size": "3",
        "model.dropout": "none",
        "optimisation.mask_fraction": "[]",
        "seed": str(2**32),
    }
    draw = random.Random(0)
    for _ in range(60):
        chosen = draw.sample(sorted(mistakes), draw.randint(1, len(mistakes)))
        lines = problems(recipe, *(f"--{key}={mistakes[key]}" for key in chosen))
        for key in chosen:
            assert any(line.startswith((key, "model: ") if key.startswith("model.") else key) for line in lines), key
        for line in lines:
            named = line.split(":")[0]
            assert any(key.startswith(named) or named.startswith(key) for key in chosen), line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--model.hiden_size=8"],
            "model.hiden_size: scratch_seq2seq has no such field; did you mean model.hidden_size?",
        ),
        (["--model.num_attention_heads=3"], "num_attention_heads"),
        (
            ["--model.model_type=bertt"],
            "model.model_type: bertt is unknown, must be one of transformers' or scratch_enc",
        ),
        (['--model={"hidden_size": 8}'], "model.model_type: missing"),
        (["--model.hidden_size=0x10"], "model.hidden_size: must be int, got 0x10"),
        (["--model.num_hidden_layers=two"], "model.num_hidden_layers: two: "),  # an alias: the error names another
        (["--model.id2label=x"], "model.id2label: x: AttributeError: 'str' object has no attribute 'items'"),
        (['--model.id2label={"a": "b"}'], 'model.id2label: {"a": "b"}: invalid literal for int()'),
        (["--\ud800=1"], r"'\ud800': unknown key, which holds what is no character"),
        (["--data.x\udc80.y=1"], r"data.'x\udc80': unknown key, which holds what is no character"),
        (["--data.path=\ud800"], "data.path: "),
        (["--model.return_dict=false"], "model.return_dict: must be true"),
        (
            ['--model.rope_parameters={"rope_type": "linear", "factor": "x", "rope_theta": 1e4}'],
            'model.rope_parameters: {"rope_type": "linear", "factor": "x", "rope_theta": 10000.0} gives no frequencies',
        ),
        (
            ['--model.rope_parameters={"rope_type": "llama3"}'],
            'model: KeyError: "Missing required keys in `rope_parameters`',
        ),
        (["--model.model_type=[1]"], "model.model_type: [1] is unknown"),
        (["--output_dir="], "output_dir: must be text, at least 1 long, got ''"),
        (["--data.columns={}"], "data.columns: translation needs exactly source, target, got none"),
        (["--data.batch_tokens=8"], "data.batch_tokens: 8 cannot hold one row of 32"),
        (['--data.splits={"train": "train"}'], "evaluation: evaluating while training needs data.splits.validation"),
        (['--data.splits={"validation": "train"}'], "data.splits.train: missing"),
        (["--data.splits.tset=x"], "data.splits.tset: must be one of train, validation, test; did you mean test?"),
        (["--optimisation.max_steps=null"], "optimisation.max_steps: must be a whole number, at least 1, got null"),
        (["--optimisation.final_weights=mean"], "checkpoints.keep_last: 2 is too few, the mean of 5 checkpoints"),
        (["--optimisation.final_weights=best", "--checkpoints.keep_best=0"], "optimisation.final_weights: best needs"),
        (["--optimisation.mask_fraction=[0.3, 0.1, 0.2]"], "optimisation.mask_fraction"),
        (["--evaluation.stride=4"], "evaluation.stride: an option of causal_lm, not of translation"),
        (["--evaluation.minimum_bayes_risk=1"], "evaluation.minimum_bayes_risk: must be a whole number, at least 2"),
        (["--data.languages=[en, english]"], "data.languages"),
        (["--data.languages=english"], "data.languages: english is not an ISO 639 code of two or three small letters"),
        (["--license="], "license: must be text, at least 1 long, or null, got ''"),
        (["--data.max_length=65", "--data.batch_tokens=65"], "data.max_length: 65 must be at most model.max_pos"),
        (["--data=3"], "data: must be a section of fields, got 3"),
        (["word"], "word: not of the form --key value"),
        (["--seed=4294967296"], "seed: must be a whole number, at least 0 and below 4294967296, got 4294967296"),
        (["--trackers", "wandb"], "trackers.0: must be one of tensorboard, trackio, got wandb"),
        (["--batch_size=8"], "batch_size: unknown key; did you mean data.batch_tokens?"),
        (["--model.d_model=8"], "model.d_model: scratch_seq2seq has no such field; did you mean model.hidden_size?"),
        (["--learning_rate=8"], "learning_rate: unknown key; did you mean optimisation.learning_rate?"),
    ],
)
def test_impossible_values_are_named(words, expected, recipe):
    assert any(
        line.startswith(expected) or expected == "num_attention_heads" in line for line in problems(recipe, *words)
    )


def test_contradictions_with_another_objective_are_named(tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    assert problems(recipe, "--optimisation.r_drop=1") == [
        "optimisation.r_drop: an option of translation, not of causal_lm"
    ]
    assert problems(recipe, "--objective=translation")[0].startswith("data.columns: translation needs exactly source")


def test_a_rule_is_passed_over_only_where_it_reads_what_is_wrong(recipe):
    """An attribute that is misspelt in a rule would pass it over always."""
    resolved = parse([str(recipe)])
    for rule in RULES:
        assert list(rule(resolved)) == []


@pytest.mark.parametrize("objective", ["causal_lm", "masked_lm"])
def test_plain_text_has_a_column_of_its_own(objective, tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path, objective)
    tree = yaml.safe_load(recipe.read_text())
    del tree["data"]["columns"]
    recipe.write_text(yaml.safe_dump(tree))
    assert parse([str(recipe)]).data.columns == {"text": ("text",)}
    assert problems(recipe, "--objective=translation") == [
        "data.columns: translation needs exactly source, target, got none"
    ]


def test_a_tracker_that_is_not_installed_is_named(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problems(recipe, "--trackers", "trackio") == ["trackers: trackio is not installed"]


def test_other_names_of_a_field_lead_to_it():
    fields = {field.name for field in dataclasses.fields(scratch.ScratchDecoderConfig)}
    known = {*names(Recipe), *(f"model.{field}" for field in fields)}
    assert set(SYNONYMS.values()) <= known and not SYNONYMS.keys() & {name.split(".")[-1] for name in names(Recipe)}


def test_every_field_says_what_it_means():
    for section in (Recipe, *(spec.annotation for spec in Recipe.model_fields.values())):
        if isinstance(section, type) and issubclass(section, Section):
            assert section.__doc__
            for name, spec in section.model_fields.items():
                assert spec.description or name in ("data", "tokenizer", "optimisation", "evaluation", "checkpoints"), (
                    name
                )
                assert not spec.is_required() or spec.examples, f"{name} needs an example, for recipes that lack it"


def test_the_page_of_the_reference_is_the_reference():
    assert reference(100) in (ROOT / "docs" / "RECIPES.md").read_text(encoding="utf-8")


def test_the_recipe_for_a_text_of_ones_own_is_one(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "RECIPES.md").read_text(encoding="utf-8")
    (tmp_path / "notes.yaml").write_text(re.search("```yaml\n(.*?)```", page, re.S)[1], encoding="utf-8")
    tiny_runs.write_lines(
        tmp_path / "notes.txt", [f"Note {number}: the river is {number} feet." for number in range(99)]
    )
    monkeypatch.chdir(tmp_path)
    assert tiny_runs.main(["notes.yaml", "--optimisation.max_steps=2"]) == 0
    assert (tmp_path / "runs" / "notes" / "model" / "config.json").exists()


def test_the_reference_has_every_field_of_our_configurations():
    """Beside those that each configuration of transformers has."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {"is_encoder_decoder"}
    ours = {field.name for kind in OURS for field in dataclasses.fields(CONFIG_MAPPING[kind])} - inherited
    found = re.findall(r"^  --model\.(\w+)\n      (.*)\n      .", reference(1000), re.M)
    assert ours <= {name for name, _ in found} and len(ours) > 40
    assert dict(found)["hidden_act"].startswith("one of swiglu, relu, gelu, silu, gelu_new, gelu_pytorch_tanh, ")
    assert dict(found)["hidden_act"].endswith("; default gelu")
    assert ("num_key_value_heads", "int | None; default null") in found


def test_a_section_cannot_be_changed_behind_the_recipe(recipe):
    with pytest.raises(ValueError, match="frozen"):
        parse([str(recipe)]).optimisation.max_steps = 3
