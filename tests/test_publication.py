"""The finished model on the Hub."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, LlamaForCausalLM

from hf_scratch_transformer.files import sha256
from hf_scratch_transformer.insight.trace import count_flops
from tests import tiny_runs
from training import loop, metrics, publication

from .hub_server import TOKEN, USER
from .test_hub import hub, online, stranger  # noqa: F401  (two of them fixtures)

ROOT = Path(__file__).parent.parent

TRANSLATE = """
model = load(job["repo"], "AutoModelForSeq2SeqLM")
tokenizer = transformers.AutoTokenizer.from_pretrained(job["repo"])
assert tokenizer(job["text"]).input_ids == inputs["input_ids"][0].tolist()
save_file({"logits": logits(model, inputs)}, "loaded.safetensors")
"""


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 2}, evaluation={"every_steps": 2})


def test_a_run_pushes_a_model_that_strangers_can_use(recipe, online, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    repo, folder, text = f"{USER}/numbers", tmp_path / "run" / "model", "one two three"
    assert tiny_runs.run(recipe, tmp_path / "run", "--push_to_hub", repo) == 0
    assert f"pushed: {online.url}/{repo}" in capsys.readouterr().out
    published, local = online.tree(repo), {path.name for path in folder.iterdir() if path.is_file()}
    assert local <= published.keys() and {"README.md", "curves.png", "model.safetensors"} <= local
    assert f'"{repo}"' in published["README.md"].decode()
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    inputs = {"input_ids": inputs["input_ids"], "decoder_input_ids": inputs["input_ids"]}
    save_file({name: values.clone() for name, values in inputs.items()}, tmp_path / "inputs.safetensors")
    stranger(online, tmp_path, TRANSLATE, [{"repo": repo, "text": text, "folder": str(tmp_path)}])
    with torch.no_grad():
        expected = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()(**inputs).logits
    torch.testing.assert_close(load_file(tmp_path / "loaded.safetensors")["logits"], expected)
    online.edit(repo, "notes.txt", b"theirs")
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume", "--push_to_hub", repo) == 0, "a push can be made up for"
    assert "notes.txt" in online.tree(repo)


def test_a_push_that_fails_is_one_line_and_the_model_is_there(recipe, online, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert tiny_runs.run(recipe, tmp_path / "run", "--push_to_hub", f"{USER}/refused") == 1
    message = capsys.readouterr().err.strip().split("training: ")[-1]
    assert message.startswith(f"push_to_hub: {USER}/refused was not pushed, but {tmp_path}") and "401" in message
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["model_type"] == "scratch_seq2seq"
    assert f"{USER}/refused" not in online.repositories


@pytest.mark.parametrize("words", [[], ["--license", "mit", "--data.languages", '["no", "nn"]']])
def test_the_card_claims_what_the_recipe_gives(words, recipe, online, tmp_path, monkeypatch):  # noqa: F811
    """By default no licence and no language: whose the weights are is not ours to say. Such a model can be pushed."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    repo = f"{USER}/licensed-{len(words)}"
    assert tiny_runs.run(recipe, tmp_path / "run", "--push_to_hub", repo, *words) == 0
    data = ModelCard(online.tree(repo)["README.md"].decode()).data
    assert (data.license, data.language) == (("mit", ["no", "nn"]) if words else (None, None))


def test_every_recipe_of_the_project_gives_its_licence_and_languages():
    """Those of `training.finetune` too. Whose sentences may not be sold gives its weights away on the same terms."""
    not_for_sale = dict.fromkeys(("coarsewsd20.yaml", "mlm_coarsewsd20.yaml"), "cc-by-nc-4.0")
    paths = [*(ROOT / "training" / "recipes").glob("*.yaml"), ROOT / "demo" / "recipe.yaml"]
    for path in paths:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        about_data = entries["data"] if "objective" in entries else entries
        assert entries["license"] == not_for_sale.get(path.name, "apache-2.0") and about_data["languages"], path


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_a_card_says_what_the_training_took(objective, tmp_path, monkeypatch):
    """About as many operations as the steps themselves, which are counted here, without those of the optimiser."""
    fewer = {"mask_fraction": [0.6, 0.1]} if objective == "masked_lm" else {}  # targets among as many tokens
    recipe = tiny_runs.write_recipe(tmp_path, objective, optimisation={"optimizer": "adamw"} | fewer)
    counted, step = [], loop._step

    def watched(run, *group):
        norms = []
        counted.append(count_flops(lambda: norms.append(step(run, *group)), "cpu"))
        return norms[0]

    monkeypatch.setattr(loop, "_step", watched)
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    flops = float(re.search(r"^\| training FLOPs, about \| (.*) \|$", card, re.MULTILINE)[1])
    assert flops == pytest.approx(sum(counted), rel=0.15)
    memory = [line["memory_mb"] for line in metrics.read(tmp_path / "run/metrics.jsonl") if line["event"] == "train"]
    assert f"| memory of a process while training, MB | {max(memory)} |" in card and min(memory) > 100
    last = metrics.read(tmp_path / "run/metrics.jsonl")[-1]
    assert last["event"] == "finished" and last["flops"] == flops and last["memory_mb"] == max(memory)
    (weights,) = last["weights"].items()
    assert weights == ("model.safetensors", sha256(tmp_path / "run/model/model.safetensors"))
    assert f"| SHA-256 of {weights[0]} | {weights[1]} |" in card
    assert f"| target tokens predicted in training | {last['targets']} |" in card and last["parameters"] > 1000


def test_the_command_that_makes_a_run_again_begins_it():
    words = [
        "python",
        "-m",
        "training",
        "demo/recipe.yaml",
        "--resume",
        "--seed",
        "2",
        "--force",
        "true",
        "--overwrite=true",
    ]
    assert publication.again([*words, "--resume"]) == ["python", "-m", "training", "demo/recipe.yaml", "--seed", "2"]


def test_a_native_model_is_saved_without_a_card(tmp_path, capsys):
    """It was trained to the end, and then the run failed for want of a card."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    tree = yaml.safe_load(recipe.read_text())
    tree["model"] = {"model_type": "llama", "max_position_embeddings": 64, **sizes}
    recipe.write_text(yaml.safe_dump(tree))
    words = ["--optimisation.max_steps", "2"]
    assert tiny_runs.run(recipe, tmp_path / "card", *words, "--model_card", str(tmp_path / "its card")) == 2
    assert "model_card: only models of ours have a card" in capsys.readouterr().err
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 0
    assert "README.md" not in capsys.readouterr().out and not (tmp_path / "run/model/README.md").exists()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "run/model")) is LlamaForCausalLM
