"""Runs that go on from a model that exists: one of ours, or a native one that converts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification, MambaConfig

from hf_scratch_transformer import ScratchDecoderConfig
from hf_scratch_transformer.conversion import convert_from
from hf_scratch_transformer.hub import push
from tests import tiny_runs
from tests.hub_server import TOKEN, USER
from tests.test_hub import environment_of_a_stranger, hub, online  # noqa: F401  (two of them fixtures)
from tests.test_loop import Killed, assert_same, kill_at
from tests.test_score import native  # noqa: F401  (a fixture)
from training import base_model, metrics

ROOT = Path(__file__).parent.parent
STILL = ("--optimisation.learning_rate", "1e-30", "--optimisation.matrix_learning_rate", "1e-30")


def recipe_from(tmp_path, objective, **model):
    """One with no model but that which it goes on from, and no tokenizer."""
    recipe = tiny_runs.write_recipe(tmp_path, objective)
    tree = yaml.safe_load(recipe.read_text())
    tree["model"] = model
    del tree["tokenizer"]
    tree["optimisation"] |= {"max_steps": 4, "final_weights": "last"}
    recipe.write_text(yaml.safe_dump(tree))
    return recipe


def final_loss(run):
    return next(line["loss"] for line in metrics.read(run / "metrics.jsonl") if line["event"] == "test")


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A finished run, of a causal language model; nobody changes it."""
    folder = tmp_path_factory.mktemp("base")
    recipe = tiny_runs.write_recipe(folder, "causal_lm", optimisation={"max_steps": 4})
    assert tiny_runs.run(recipe, folder / "first") == 0
    return folder / "first"


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_a_run_goes_on_from_a_finished_one(objective, tmp_path):
    """It begins with the weights, the tokenizer and the configuration of the other, but for what it says itself."""
    assert tiny_runs.run(tiny_runs.write_recipe(tmp_path, objective), tmp_path / "first") == 0
    model = tmp_path / "first" / "model"
    recipe = recipe_from(tmp_path, objective, path=str(model), dropout=0.3)
    assert tiny_runs.run(recipe, tmp_path / "second", *STILL) == 0
    assert final_loss(tmp_path / "second") == pytest.approx(final_loss(tmp_path / "first"), rel=1e-6)
    one, other = (yaml.safe_load((folder / "config.json").read_text()) for folder in (model, tmp_path / "second/model"))
    assert {name for name in one | other if one.get(name) != other.get(name)} == {"dropout"}
    assert (tmp_path / "second/tokenizer/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_a_run_goes_on_from_a_native_model(native, tmp_path):  # noqa: F811
    """As ours, of the same parameters, which can be handed back."""
    objective, model, _ = native
    recipe = recipe_from(tmp_path, objective, path=str(tmp_path / "native"))
    assert tiny_runs.run(recipe, tmp_path / "run", *STILL) == 0
    begun, expected = tiny_runs.load_file(tmp_path / "run/model/model.safetensors"), convert_from(model).state_dict()
    for name, tensor in begun.items():
        assert_close(tensor, expected[name], atol=1e-20, rtol=0)
    config = yaml.safe_load((tmp_path / "run/model/config.json").read_text())
    assert config["converted_from"]["model_type"] == model.config.model_type
    assert tiny_runs.run(recipe, tmp_path / "learns") == 0
    assert final_loss(tmp_path / "learns") < final_loss(tmp_path / "run")


def test_a_run_goes_on_from_a_model_of_the_hub(first, online, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push(first / "model", f"{USER}/base")
    recipe = recipe_from(tmp_path, "causal_lm", path=f"{USER}/base")
    command = [sys.executable, "-m", "training", str(recipe), "--output_dir", str(tmp_path / "run"), *STILL]
    environment = environment_of_a_stranger(online, tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert final_loss(tmp_path / "run") == pytest.approx(final_loss(first), rel=1e-6)
    assert ModelCard.load(tmp_path / "run" / "model" / "README.md").data.base_model == f"{USER}/base"


def test_rows_are_added_for_tokens_that_the_model_has_not(first, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(first / "model")
    known = len(tokenizer)
    tokenizer.add_tokens(["eight", "nine"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe = recipe_from(tmp_path, "causal_lm", path=str(first / "model"))
    assert tiny_runs.run(recipe, tmp_path / "run", *STILL, "--tokenizer.path", str(tmp_path / "tokenizer")) == 0
    before, after = (AutoModelForCausalLM.from_pretrained(run / "model") for run in (first, tmp_path / "run"))
    assert after.config.vocab_size == known + 2
    one, other = before.get_input_embeddings().weight, after.get_input_embeddings().weight
    assert torch.equal(one[:known], other[:known]) and len(other) == known + 2
    assert tiny_runs.run(recipe, tmp_path / "again", *STILL, "--tokenizer.path", str(tmp_path / "tokenizer")) == 0
    assert tiny_runs.losses(tmp_path / "run") == tiny_runs.losses(tmp_path / "again")


def test_what_a_saved_configuration_says_stays(tmp_path):
    """Also that there is no padding; a default of the class took its place, an ordinary token."""
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1}
    ScratchDecoderConfig(vocab_size=99, **sizes, **ids).save_pretrained(tmp_path / "model")
    section = {"path": str(tmp_path / "model")}
    config = base_model.build_config(section, {"vocab_size": 50, "eos_token_id": 7})
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.vocab_size) == (None, None, 7, 99)


def test_special_tokens_that_change_change_for_generation_too(first, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(first / "model")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(20)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe = recipe_from(tmp_path, "causal_lm", path=str(first / "model"), eos_token_id=20)
    assert tiny_runs.run(recipe, tmp_path / "run", "--tokenizer.path", str(tmp_path / "tokenizer")) == 0
    for name in ("config.json", "generation_config.json"):
        assert yaml.safe_load((tmp_path / "run/model" / name).read_text())["eos_token_id"] == 20


def test_two_matrices_are_not_made_one_in_silence(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", optimisation={"max_steps": 2})
    assert tiny_runs.run(recipe, tmp_path / "first", "--model.tie_word_embeddings", "false") == 0
    capsys.readouterr()
    recipe = recipe_from(tmp_path, "causal_lm", path=str(tmp_path / "first/model"))
    assert tiny_runs.run(recipe, tmp_path / "run", "--model.tie_word_embeddings", "true") == 2
    assert "do not fit the fields given" in capsys.readouterr().err


def test_it_is_resumed_by_the_model_it_began_with(first, tmp_path, monkeypatch, capsys):
    recipe = recipe_from(tmp_path, "causal_lm", path=str(first / "model"))
    assert tiny_runs.run(recipe, tmp_path / "whole") == 0
    words = ["--checkpoints.every_steps", "1"]
    with monkeypatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            tiny_runs.run(recipe, tmp_path / "cut", *words)
    shutil.copytree(first / "model", tmp_path / "moved")
    moved = ("--model.path", str(tmp_path / "moved"))
    assert tiny_runs.run(recipe, tmp_path / "cut", *words, *moved, "--resume") == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")
    capsys.readouterr()
    shutil.rmtree(tmp_path / "moved")
    shutil.copytree(tmp_path / "whole" / "model", tmp_path / "moved")
    assert tiny_runs.run(recipe, tmp_path / "cut", *words, *moved, "--resume") == 2
    assert "this is another run (base_model is another)" in capsys.readouterr().err


def damage_index(model):
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    for file, names in {"a.safetensors": list(weights)[:3], "b.safetensors": list(weights)[3:]}.items():
        save_file({name: weights[name] for name in names}, model / file, {"format": "pt"})
    index = {"weight_map": {name: "ab"[place > 0] + ".safetensors" for place, name in enumerate(weights)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def damage_weights(change):
    def damage(model):
        weights = load_file(model / "model.safetensors")
        save_file({name: change(tensor) for name, tensor in weights.items()}, model / "model.safetensors")

    return damage


def damage_settings(model):
    (model / "generation_config.json").write_text('{"num_beams": "x"}')


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (damage_index, "is in a.safetensors, not where model.safetensors.index.json says"),
        (damage_weights(lambda tensor: tensor * torch.nan), "the norm of its weights is nan"),
        (damage_weights(lambda tensor: tensor.int()), "of the wrong type: "),
        (damage_settings, "generation_config.json: num_beams='x' must be a number"),
    ],
)
def test_a_damaged_model_is_not_gone_on_from(damage, expected, first, tmp_path, capsys):
    shutil.copytree(first / "model", tmp_path / "model")
    damage(tmp_path / "model")
    capsys.readouterr()
    assert tiny_runs.run(recipe_from(tmp_path, "causal_lm", path=str(tmp_path / "model")), tmp_path / "run") == 2
    assert expected in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("objective", "words", "expected"),
    [
        (
            "causal_lm",
            ["--model.path", "absent/folder/model"],
            "model.path: absent/folder/model: there is no such file",
        ),
        ("causal_lm", ["--model.path", "{mamba}"], "unknown architecture 'mamba'; known are arcee"),
        ("causal_lm", ["--model.path", "{classifier}"], "has another head: it is a ScratchDecoderForSequenceClass"),
        (
            "causal_lm",
            ["--model.path", ""],
            "model.path: '': must be the folder of a saved model, or its id on the Hub",
        ),
        ("causal_lm", ["--model.path", "gpt-2"], "'gpt-2': must be the folder of a saved model"),
        ("causal_lm", ["--model.path", "{first}/model/config.json"], "must be the folder of a saved model"),
        ("causal_lm", ["--model.path", "{mamba}/../bare"], "no tokenizer.path is given, and model.path"),
        ("causal_lm", ["--model.dropuot", "0.1"], "did you mean model.dropout?"),
        ("causal_lm", ["--model.hidden_size", "32"], "its weights do not fit the fields given: model."),
        ("causal_lm", ["--model.dropout", "much"], "model.dropout: must be float"),
        ("causal_lm", ["--model.model_type", "scratch_encoder"], "is trained on as scratch_decoder"),
        ("causal_lm", ["--data.window", "65"], "data.window: 65 must be at most model.max_position_embeddings 64"),
        ("causal_lm", ["--output_dir", "{first}"], "lies where a new run in"),
        ("translation", [], "is a scratch_decoder, of which there is no AutoModelForSeq2SeqLM"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_line(objective, words, expected, first, tmp_path, capsys):
    recipe = recipe_from(tmp_path, objective, path=str(first / "model"))
    MambaConfig().save_pretrained(tmp_path / "mamba")
    shutil.copytree(first / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    LlamaForSequenceClassification(LlamaConfig(**small, pad_token_id=0)).save_pretrained(tmp_path / "classifier")
    AutoTokenizer.from_pretrained(first / "model").save_pretrained(tmp_path / "classifier")
    capsys.readouterr()
    given = [word.format(first=first, mamba=tmp_path / "mamba", classifier=tmp_path / "classifier") for word in words]
    assert tiny_runs.run(recipe, tmp_path / "run", *given, "--overwrite") == 2
    message = capsys.readouterr().err
    assert expected in message and "Traceback" not in message
    assert (first / "model" / "config.json").exists() and not (tmp_path / "run").exists()
