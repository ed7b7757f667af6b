"""Cards, completeness and pushing; the whole loop over HTTP against the small Hub of `hub_server`."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import hf_scratch_transformer as scratch
from hf_scratch_transformer import cli
from hf_scratch_transformer.hub import RunRecords, check_complete, push, record_check, write_model_card
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer

from . import tiny
from .hub_server import TOKEN, USER, HubServer, card_errors

CORPUS = ["The dog sees the cat, and the cat sees the dog.", "A small bird sings in the old tree.", "We sing."] * 20
AUTO_CLASSES = {
    "encoder": "AutoModelForMaskedLM",
    "decoder": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
}
MODELS = {tiny.family(model): model for model in tiny.LANGUAGE_MODELS}
RECORDS = RunRecords(
    name="tiny test model",
    command="accelerate launch -m training training/recipes/tiny.yaml --seed 3",
    dataset="Bird songs",
    base_model="birds/base",
    dataset_id="birds/songs",
    dataset_revision="0123456789abcdef0123456789abcdef01234567",
    data={"rows": {"train": 60, "test": 3}, "malformed": None},
    languages=("en", "de"),
    license="apache-2.0",
    example="The cat sees the dog.",
    recipe={"seed": 3, "model": {"hidden_size": 32}, "optimisation": {"betas": [0.9, 0.95], "ema": None}},
    environment={"python": "3.11.9", "packages": {"torch": "2.13.0"}},
    metrics=[{"event": "train", "step": 1, "loss": 9.75}]
    + [{"event": "evaluation", "step": step, "loss": 4 - step / 1000} for step in range(1, 26)],
    results={
        "validation": {"loss": 1.625, "note": "greedy"},
        "test": {
            "loss": 1.8125,
            "bleu": 37.21875,
            "bleu_signature": "nrefs:1|13a",
            "groups": {"length": {"long": {"rows": 7, "bleu": 12.5}}},
        },
    },
)

# Around every program that plays a stranger, whose environment does not have the package; it runs once for each job.
STRANGER = """
import importlib.abc, json, os, re, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_scratch_transformer", "training", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch, transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

def load(repo, auto_class, **options):
    model = getattr(transformers, auto_class).from_pretrained(repo, trust_remote_code=True, **options)
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    return model

@torch.no_grad()
def logits(model, inputs):
    return model.eval()(**inputs).logits

for job in json.loads(sys.argv[1]):
    print("job", job, file=sys.stderr)
    os.chdir(job["folder"])
    inputs = load_file("inputs.safetensors")
"""

FINE_TUNE = """
model = load(job["first"], job["auto_class"])
old = load(job["first"], job["auto_class"], revision=job["revision"])
assert job["revision"] in type(old).__module__ and job["revision"] not in type(model).__module__
save_file({"new": logits(model, inputs), "old": logits(old, inputs)}, "loaded.safetensors")

torch.manual_seed(0)
for code in re.findall(r"```python\\n(.*?)```", ModelCard.load(job["first"]).content, re.DOTALL):
    exec(code, {})

trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        "tuned", max_steps=3, learning_rate=1e-2, hub_model_id=job["second"], report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    ),
    train_dataset=[dict(zip(inputs, row)) for row in zip(*inputs.values())],
    processing_class=transformers.AutoTokenizer.from_pretrained(job["first"]),
)
trainer.train()
trainer.push_to_hub()
model.push_to_hub(job["third"])
save_file({"tuned": logits(model, inputs)}, "tuned.safetensors")
"""

OPEN_WITH_EVERYTHING = """
for name in ("second", "third"):
    transformers.AutoConfig.from_pretrained(job[name], trust_remote_code=True)
    for auto_class, class_name in job["heads"].items():
        assert type(load(job[name], auto_class)).__name__ == class_name
    save_file({"tuned": logits(load(job[name], job["auto_class"]), inputs)}, name + ".safetensors")
assert transformers.AutoTokenizer.from_pretrained(job["second"])("The dog").input_ids == job["ids"]
"""


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def online(hub, monkeypatch):
    """This process talks to the small Hub."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return hub


def build(family, seed=0):
    """A model of a family, with a tokenizer that fits it."""
    tokenizer = train_tokenizer(CORPUS, family=family, vocab_size=300)
    return tiny.model(MODELS[family], seed, **config_fields(tokenizer, family)), tokenizer


def save(folder, family, seed=0, repo_id=None, records=RECORDS, **options):
    model, tokenizer = build(family, seed)
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    write_model_card(folder, records, repo_id)
    return model


def stranger(hub, cwd, program, jobs):
    """Run a program in a process of its own, with neither the package nor anything in its caches."""
    run = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER + textwrap.indent(program, "    "), json.dumps(jobs)],
        cwd=cwd,
        env=environment_of_a_stranger(hub, cwd),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-4000:]


def environment_of_a_stranger(hub, cwd):
    """Nothing of this process's, and empty caches."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(cwd / f"home{len(list(cwd.glob('home*')))}"),
        "HF_TOKEN": TOKEN,
        "HOME": str(cwd),
        "OMP_NUM_THREADS": "1",
    }


def publish(hub, family, folder):
    """Push a model of a family twice, and write down beside it what a stranger has to know.

    Returns:
        The job, and the logits (B, T, V) of the older and of the newer model.
    """
    job = {name: f"{USER}/{family}-{name}" for name in ("first", "second", "third")} | {"folder": str(folder)}
    older, newer = (save(folder / name, family, seed, job["first"]) for seed, name in enumerate(("older", "newer")))
    job["revision"] = push(folder / "older", job["first"], token=TOKEN).oid
    push(folder / "newer", job["first"], token=TOKEN)
    # Older versions of transformers wrote where the code had come from into the map; a copy must not inherit that.
    config = json.loads((folder / "newer" / "config.json").read_text())
    config["auto_map"] = {name: f"{job['first']}--{reference}" for name, reference in config["auto_map"].items()}
    hub.edit(job["first"], "config.json", json.dumps(config).encode())
    inputs = tiny.inputs(newer)
    inputs |= tiny.labels(newer, inputs)
    save_file({name: values.contiguous() for name, values in inputs.items()}, folder / "inputs.safetensors")
    heads = {name: reference.split(".")[1] for name, reference in newer.config.auto_map.items() if name != "AutoConfig"}
    ids = AutoTokenizer.from_pretrained(folder / "newer")("The dog").input_ids
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (older, newer)]
    return job | {"auto_class": type(newer)._auto_class, "heads": heads, "ids": ids}, *logits


def test_push_load_fine_tune_push_load(online, tmp_path):
    published = [publish(online, family, tmp_path / family) for family in tiny.FAMILIES]
    jobs = [job for job, *_ in published]
    stranger(online, tmp_path, FINE_TUNE, jobs)
    for job, old, new in published:
        loaded = load_file(Path(job["folder"], "loaded.safetensors"))
        torch.testing.assert_close(loaded["old"], old)
        torch.testing.assert_close(loaded["new"], new)
        # What the fine-tuned copies need, they carry: the repository they come from may go.
        del online.repositories[job["first"]]
        auto_map = getattr(scratch, job["heads"]["AutoModel"]).config_class._auto_map
        for name in ("second", "third"):
            assert json.loads(online.tree(job[name])["config.json"])["auto_map"] == auto_map
    stranger(online, tmp_path, OPEN_WITH_EVERYTHING, jobs)
    for job, _, new in published:
        tuned, second, third = (
            load_file(Path(job["folder"], f"{name}.safetensors"))["tuned"] for name in ("tuned", "second", "third")
        )
        assert not torch.allclose(tuned, new)
        torch.testing.assert_close(second, tuned)
        torch.testing.assert_close(third, tuned)


def save_into(folder, family, **options):
    save(folder, family, **options)
    return folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A complete folder; tests that change it copy it first."""
    return save_into(tmp_path_factory.mktemp("hub") / "decoder", "decoder")


@pytest.fixture
def copy(decoder, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in decoder.rglob("*"):
        target = folder / path.relative_to(decoder)
        target.mkdir() if path.is_dir() else target.write_bytes(path.read_bytes())
    return folder


# ---- the card


def test_every_figure_on_the_card_comes_from_the_records(decoder):
    card = ModelCard.load(decoder / "README.md")
    assert card_errors(str(card)) == []
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", "apache-2.0")
    assert (data.language, data.datasets) == (["en", "de"], ["birds/songs"])
    assert data.metrics == ["loss", "bleu"] and set(data.tags) == {"custom_code", "scratch_decoder"}
    assert (data.model_name, data.base_model) == (RECORDS.name, "birds/base")
    found = {(result.dataset_split, result.metric_type): result for result in data.eval_results}
    values = {key: result.metric_value for key, result in found.items()}
    assert values == {("validation", "loss"): 1.625, ("test", "loss"): 1.8125, ("test", "bleu"): 37.21875}
    assert found["test", "bleu"].metric_args == {"signature": "nrefs:1|13a"}
    assert {(r.dataset_type, r.dataset_name, r.task_type) for r in data.eval_results} == {
        ("birds/songs", "Bird songs", "text-generation")
    }
    rows = card.text.splitlines()
    for row in (
        "| score | validation | test |",
        "| BLEU |  | 37.219 |",
        "| loss, nats a token | 1.625 | 1.8125 |",
        "| test, by length | BLEU | rows |",
        "| long | 12.5 | 7 |",
        "- BLEU: `nrefs:1|13a`",
        "| model.hidden_size | 32 |",
        "| optimisation.betas | 0.9, 0.95 |",
        "| packages.torch | 2.13.0 |",
        "| rows.train | 60 |",
        RECORDS.command,
    ):
        assert row in rows, row
    parameters = build("decoder")[0].num_parameters()
    assert f"{parameters:,} parameters" in card.text
    # At most ten of the 25 evaluations, the last among them.
    shown = [row for row in rows if row.endswith(" |") and row.startswith("| ") and row.split()[1].isdigit()]
    assert 5 <= len(shown) <= 10 and shown[-1] == "| 25 | 3.975 |"


def test_eval_results_are_in_the_format_of_the_hub(decoder):
    (path,) = (decoder / ".eval_results").glob("*")
    assert path.name == "birds_songs.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    assert (entry.dataset_id, entry.task_id, entry.value) == ("birds/songs", "default", 37.21875)
    assert entry.dataset_revision == RECORDS.dataset_revision and entry.notes == "BLEU, split test"


@pytest.mark.parametrize(
    ("family", "head", "tag"),
    [
        ("encoder", scratch.ScratchEncoderForSequenceClassification, "text-classification"),
        ("encoder", scratch.ScratchEncoderForTokenClassification, "token-classification"),
        ("seq2seq", scratch.ScratchSeq2SeqForConditionalGeneration, "translation"),
    ],
)
def test_code_on_a_card_without_a_repository_opens_its_own_folder(tmp_path, monkeypatch, capsys, family, head, tag):
    tokenizer = train_tokenizer(CORPUS, family=family, vocab_size=300)
    tiny.model(head, **config_fields(tokenizer, family)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    card = ModelCard.load(write_model_card(tmp_path, RunRecords(name="n", command="c", dataset="a folder | of mine")))
    assert card.data.pipeline_tag == tag
    assert card.data.datasets is None and card.data.eval_results is None and "No test was run." in card.text
    assert not (tmp_path / ".eval_results").exists() and "curves.png" not in card.text
    assert "| corpus | a folder \\| of mine |" in card.text.splitlines()
    monkeypatch.chdir(tmp_path)
    exec(card.text.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out.strip()
    check_complete(tmp_path)


def test_corpus_that_is_not_on_the_hub_still_gives_valid_metadata(copy):
    (copy / "curves.png").write_bytes(b"\x89PNG")
    records = RunRecords(name="n", command="c", dataset="Größe, à la carte", results={"test": {"loss": 2.5}})
    card = ModelCard.load(write_model_card(copy, records))
    assert card_errors(str(card)) == []
    assert card.data.eval_results[0].dataset_name == "Größe, à la carte"
    assert "(curves.png)" in card.text


def test_card_of_what_has_none_is_refused(tmp_path):
    records = RunRecords(name="n", command="c", dataset="d")
    with pytest.raises(ValueError, match="config.json cannot be read"):
        write_model_card(tmp_path, records)
    model = tiny.model(scratch.ScratchEncoderModel)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="architectures=.*ScratchEncoderModel.*must end in one of ForMaskedLM"):
        write_model_card(tmp_path, records)
    assert not (tmp_path / "README.md").exists()


# ---- what is complete


@pytest.mark.parametrize(
    "name",
    [
        *(f"{part}_scratch.py" for part in ("configuration", "ops", "layers", "stack", "heads")),
        "modeling_scratch_decoder.py",
        *("tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors", "README.md"),
    ],
)
def test_missing_file_is_named(copy, name):
    check_complete(copy)
    (copy / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        check_complete(copy)


def test_everything_wrong_is_named_at_once_and_nothing_is_sent(online, copy):
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "someone/else--modeling_scratch_decoder.ScratchDecoderModel"
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "README.md").write_text("# A card without metadata")
    (copy / "training_args.bin").write_bytes(b"\x80\x04")
    (copy / "layers_scratch.py").unlink()
    asked = len(online.requests)
    with pytest.raises(ValueError) as refusal:
        push(copy, f"{USER}/incomplete", token=TOKEN)
    for complaint in (
        "auto_map['AutoModel']='someone/else--modeling_scratch_decoder.ScratchDecoderModel' must be 'modeling_scratch",
        "layers_scratch.py is missing",
        "README.md: its metadata has no library_name",
        "training_args.bin is no part of a model's repository",
    ):
        assert complaint in str(refusal.value)
    assert len(online.requests) == asked and f"{USER}/incomplete" not in online.repositories


@pytest.mark.parametrize("metadata", ["tags: [custom_code", "- a list", "model-index:\n- name: n"])
def test_card_that_cannot_be_read_is_named(copy, metadata):
    (copy / "README.md").write_text(f"---\n{metadata}\n---\n\n# A card")
    with pytest.raises(ValueError, match="not a complete repository: README.md: "):
        check_complete(copy)


def test_model_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(ValueError, match="model_type='bert' must be one of scratch_encoder, scratch_decoder"):
        check_complete(tmp_path)


# ---- pushing


@pytest.mark.parametrize(
    "name",
    [
        *(".env", "id_rsa", ".netrc", "train.log", "optimizer.pt", "notes/README.md", "model-old.safetensors", "x.py"),
        *(".cache/huggingface.txt", "tokenizer.json.bak", ".eval_results/token.txt"),
    ],
)
def test_what_is_no_part_of_a_model_is_named_and_nothing_is_sent(online, copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("password")
    asked = len(online.requests)
    with pytest.raises(ValueError, match=f"{name} is no part of a model's repository: move it out of the folder"):
        push(copy, f"{USER}/secrets", token=TOKEN)
    assert len(online.requests) == asked and (copy / name).read_text() == "password"


@pytest.mark.parametrize("name", [".env", "../other.safetensors"])
def test_an_index_names_weights_and_nothing_else(online, copy, name):
    (copy / ".env").write_text("password")
    (copy / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": name}})
    )
    with pytest.raises(ValueError, match=f"names {name}, which is no file of weights"):
        push(copy, f"{USER}/secrets", token=TOKEN)


def test_what_lies_there_by_the_work_of_git_and_of_downloads_stays_and_is_not_sent(online, copy):
    kept = [".git/config", ".git/hooks/push.py", ".cache/huggingface/download/config.json.metadata"]
    for name in kept:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("password")
    for name in ("LICENSE", "chat_template.jinja", "curves.png"):
        (copy / name).write_text("public")
    push(copy, f"{USER}/clone", token=TOKEN)
    files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert set(online.tree(f"{USER}/clone")) == files - set(kept) | {".gitattributes"}


def test_push_again_replaces_weights_and_keeps_what_others_added(online, tmp_path):
    repo_id = f"{USER}/shards"
    push(save_into(tmp_path / "sharded", "decoder", max_shard_size="20KB"), repo_id, token=TOKEN)
    tree = online.tree(repo_id)
    shards = {path for path in tree if path.endswith(".safetensors")}
    assert len(shards) > 1 and "model.safetensors.index.json" in tree and ".eval_results/birds_songs.yaml" in tree
    online.edit(repo_id, "LICENSE", b"Do what you want.")
    records = RunRecords(name="n", command="c", dataset="d")
    whole = save_into(tmp_path / "whole", "decoder", records=records)
    push(whole, repo_id, token=TOKEN)
    tree = online.tree(repo_id)
    assert {path for path in tree if "safetensors" in path} == {"model.safetensors"}
    assert "LICENSE" in tree and ".gitattributes" in tree and not any(path.startswith(".eval") for path in tree)
    for path in whole.iterdir():
        assert tree[path.name] == path.read_bytes()
    next((tmp_path / "sharded").glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="model-00002-of-.*safetensors is missing"):
        check_complete(tmp_path / "sharded")


def test_push_to_a_branch_leaves_main_alone(online, decoder):
    repo_id = f"{USER}/branches"
    push(decoder, repo_id, revision="experiment", token=TOKEN)
    assert set(online.tree(repo_id)) == {".gitattributes"}
    assert "model.safetensors" in online.tree(repo_id, "experiment")
    push(decoder, repo_id, revision="experiment", token=TOKEN)  # the branch is there already


def test_private_repository_and_no_token(online, decoder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HfHubHTTPError, match="401"):
        push(decoder, f"{USER}/private", private=True)
    push(decoder, f"{USER}/private", private=True, token=TOKEN)
    assert online.repositories[f"{USER}/private"].private
    with pytest.raises(HfHubHTTPError):
        huggingface_hub.HfApi(token=False).model_info(f"{USER}/private")
    push(decoder, f"{USER}/public", token=TOKEN)
    assert huggingface_hub.HfApi(token=False).model_info(f"{USER}/public").sha


def test_metadata_that_the_hub_refuses_stops_the_push(online, copy):
    text = (copy / "README.md").read_text()
    (copy / "README.md").write_text(text.replace("type: birds/songs", "type: birds and songs"))
    with pytest.raises(ValueError, match="fails to match"):
        push(copy, f"{USER}/refused", token=TOKEN)
    assert set(online.tree(f"{USER}/refused")) == {".gitattributes"}


# The command


def test_the_command_uploads_a_folder_and_writes_the_card_that_it_lacks(online, copy, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (copy / "README.md").unlink()
    assert cli.main(["push", str(copy), f"{USER}/by-command", "--private"]) == 0
    said = capsys.readouterr().out
    assert f"pushed: {online.url}/{USER}/by-command/commit/" in said and "wrote " in said
    tree, card = online.tree(f"{USER}/by-command"), (copy / "README.md").read_text()
    assert tree["README.md"].decode() == card and tree.keys() >= {"model.safetensors", "tokenizer.json"}
    assert online.repositories[f"{USER}/by-command"].private
    # It knows what the configuration says, and nothing else.
    assert re.findall(r"^##? (.*)$", card, re.MULTILINE) == ["by-command", "How to use", "Limits"]
    assert "trained on Bird" not in card and not re.search(r"\bNone\b|trained on \.|of \.", card)
    assert card_errors(card) == []
    assert cli.main(["push", str(copy), f"{USER}/by-command", "--revision", "second"]) == 0
    assert capsys.readouterr().out.count("\n") == 1  # the card is there
    assert online.tree(f"{USER}/by-command", "second")["README.md"].decode() == card


@pytest.mark.parametrize(
    ("repo", "name", "message"),
    [
        (f"{USER}/x", "tokenizer.json", "is not a complete repository: tokenizer.json is missing"),
        ("by-command", None, "'by-command' is no id of a repository: NAME/REPO"),
        (f"{USER}/a b", None, "is no id of a repository"),
        (f"{USER}/-a", None, "was not pushed to"),
    ],
)
def test_the_command_refuses_in_a_line(online, copy, capsys, monkeypatch, repo, name, message):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    before = len(online.repositories)
    if name is not None:
        (copy / name).unlink()
        (copy / "README.md").unlink()
    files = sorted(copy.iterdir())
    assert cli.main(["push", str(copy), repo]) == 2
    error = capsys.readouterr().err
    assert sorted(copy.iterdir()) == files
    assert message in error and error.count("\n") == 1 and len(online.repositories) == before


def test_the_command_says_that_nobody_answers(copy, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert cli.main(["push", str(copy), f"{USER}/x"]) == 2
    assert "was not pushed to tester/x" in capsys.readouterr().err


def test_what_engines_made_of_other_weights_is_not_pushed(online, copy):
    cells = ("onnx", "onnxruntime 1.32.0", "logits reach 2", "1e-06", "0.002")
    record_check(copy, cells)
    push(copy, f"{USER}/checked", token=TOKEN)
    assert f"| {' | '.join(cells)} |".encode() in online.tree(f"{USER}/checked")["README.md"]
    weights = load_file(copy / "model.safetensors")
    save_file({name: each + 1 for name, each in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    push(copy, f"{USER}/checked", token=TOKEN)
    card = online.tree(f"{USER}/checked")["README.md"].decode()
    assert "onnx" not in card and "## Checked" not in card and "## Limits" in card
