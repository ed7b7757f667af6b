"""Every command of README.md is run, in order, in a fresh copy of the tree, or says here why not.

A command that is new in README needs a row in `ROWS`; one that has gone from there must go from here.
"""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from transformers import DistilBertConfig, DistilBertForMaskedLM

import hf_scratch_transformer as scratch
from demo import grammar
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer

from . import tiny, tiny_runs
from .hub_server import TOKEN, USER, Blob, HubServer, Repository
from .test_senses import coarse_wsd

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GPUS = "needs eight GPUs, or several machines; tests/test_sharding.py runs the same with processes of a CPU"
GRADIO = "needs Gradio, which is not in requirements.lock; make test-browser has the page"
A_GPU = "needs a GPU; make gpu-rehearse runs every step without one"
ENGINE = "needs a package that is not in requirements.lock; make test-tools-engines has it"
SMALL = (
    "--optimisation.max_steps 2 --optimisation.warmup_steps 1 --evaluation.every_steps 2 --evaluation.generate_rows 2"
)


@dataclass(frozen=True)
class Row:
    """What is done with a command: run as it stands, unless it says otherwise."""

    why_not: str = ""  # it is not run
    adds: str = ""  # words at its end, that make it short
    means: dict[str, str] = field(default_factory=dict)  # what stands for a word in capitals
    prints: str = ""  # a pattern that is found in what it prints
    leaves: tuple[str, ...] = ()  # files that are there afterwards
    keeps: tuple[str, ...] = ()  # files of the tree that are afterwards as they were


CAPTIONS, SENSES = {"FOLDER": "captions"}, {"FOLDER": "senses"}
MODEL_FILES = ("config.json", "model.safetensors")


def shown_translations() -> str:
    """A pattern of the table of translations as the demonstration prints them: the word in bold is the one that each
    sentence tells, on any machine; other words may differ."""
    found = re.findall(r"^\| (.+?[.?]) \| (.+?[.?]) \|$", README, flags=re.MULTILINE)
    assert len(found) == 4
    pairs = [(re.escape(english.replace("**", "")), german.split("**")[1]) for english, german in found]
    return r"[\s\S]*".join(rf"{english}\n.*\b{word}\b" for english, word in pairs)


def model_in(folder: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in MODEL_FILES)


# By the command without its comment, or the last line of a Python block; in the order of README.
ROWS = {
    "make demo": Row(
        prints=r"from runs/demo/model, 1,840,064 parameters[\s\S]*" + shown_translations(),
        leaves=(*model_in("runs/demo/model"), "runs/demo/curves.png", "runs/demo/metrics.jsonl"),
    ),
    "make test": Row("the tests, of which this is one"),
    "print(tokenizer.batch_decode(model.generate(**inputs, num_beams=3), skip_special_tokens=True))": Row(
        prints=r"^\['.*\bUfer\b.*'\]$"  # as README shows, in whatever words
    ),
    'model.save_pretrained("my-model"), tokenizer.save_pretrained("my-model")': Row(leaves=model_in("my-model")),
    "contextual = model(**tokens).last_hidden_state": Row(),
    'vectors = sentence_embeddings(model, tokenizer, ["A river bank.", "A bank that lends money."], normalize=True)': (
        Row()
    ),
    "scratch-transformer new causal_lm --data notes.txt --minutes 30": Row(leaves=("notes.yaml",)),
    "scratch-transformer train notes.yaml": Row(adds=SMALL, leaves=model_in("runs/notes/model")),
    "scratch-transformer evaluate runs/notes/model --data notes.txt --data.splits "
    """'{"test": ["text[95%:]"]}' --data.batch_tokens 1024""": Row(prints=r"loss"),
    "python -m benchmarks text causal_lm --data FOLDER --minutes 2": Row(
        means={"FOLDER": "notes.txt"},
        adds="--minutes 0.2",
        prints=r"llama, by Trainer +.*bits_per_byte",
        leaves=("runs/benchmark/text.json",),
    ),  # fmt: skip
    "accelerate launch -m training training/recipes/multi30k_en_de.yaml": Row("its corpus comes from the Hub"),
    "accelerate launch -m training training/recipes/multi30k_en_de.yaml --data.path FOLDER": Row(
        means=CAPTIONS, adds=f"{SMALL} --data.batch_tokens 256", leaves=model_in("runs/multi30k_en_de/model")
    ),
    "python -m training plan RECIPE.yaml --minutes 30": Row(prints=r"steps"),
    "python -m training plan RECIPE.yaml --minutes 30 --fit": Row(prints=r"hidden_size"),
    "python -m training evaluate MODEL --data FILE": Row(
        means={"MODEL": "runs/shakespeare_char_cpu/model", "FILE": "corpus.txt"}, prints=r"loss"
    ),
    "python -m training evaluate MODEL --senses FOLDER": Row(
        means={"MODEL": "runs/shakespeare_char_cpu/model", **SENSES}, prints=r"macro_f1"
    ),
    "python -m training evaluate MODEL --task arc_easy": Row("needs lm_eval and a corpus of the Hub; make test-tools"),
    "python -m training verify CARD --data.path FOLDER": Row("a whole run; tests/test_cards.py does small ones"),
    "accelerate launch --multi_gpu --num_processes 8 -m training RECIPE.yaml": Row(GPUS),
    "accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 -m training RECIPE.yaml": Row(GPUS),
    "accelerate launch --use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_tp_size 8 "
    "--num_processes 8 -m training RECIPE.yaml": Row(GPUS),
    "accelerate launch --use_fsdp --fsdp_version 2 --num_machines 2 --num_processes 16 --machine_rank 0 "
    "--main_process_ip 10.0.0.1 --main_process_port 29500 -m training RECIPE.yaml --output_dir /shared/run": Row(GPUS),
    "python -m training.finetune training/recipes/coarsewsd20.yaml --model runs/mlm_babymix/model --data FOLDER": Row(
        means=SENSES, adds="--max_steps 2", prints=r"test accuracy", leaves=model_in("runs/coarsewsd20/model")
    ),
    "python -m benchmarks train generate embed --no-onednn": Row(
        adds="--shape tiny --rounds 1", leaves=("runs/benchmark/benchmark.json", "runs/benchmark/benchmark.png")
    ),
    "python -m benchmarks calls": Row(adds="--shape tiny", leaves=("runs/benchmark/benchmark.json",)),
    "python -m benchmarks generate --shape decoder --peer llama --batch 1 --compile": Row(
        adds="--layers 1 --width 32 --heads 2 --feed-forward 64 --vocabulary 100 --length 16 --rounds 1 "
        "--compiler eager",
        prints=r"llama",
    ),
    "python -m benchmarks end-to-end --recipe training/recipes/multi30k_en_de.yaml --data.path FOLDER": Row(
        means=CAPTIONS, adds="--rounds 1 --steps 2 --data.batch_tokens 256", prints=r"Trainer, marian"
    ),
    "python -m benchmarks train generate --shape gpt2-124m bert-110m transformer-63m": Row(A_GPU),
    "python -m benchmarks engines MODEL --texts FILE --references FILE": Row(ENGINE),
    "decode.greedy(model, **inputs, max_new_tokens=20)": Row(),
    "make gpu-prepare DATA=FOLDER": Row("downloads packages, and packs the corpora of every recipe for a GPU"),
    'make gpu GPU="tests train-decoder --left 9.5"': Row(A_GPU),
    "make gpu": Row(A_GPU),
    "python -m benchmarks report": Row(keeps=("README.md", "docs/SCALE.md")),
    "scratch-transformer convert distilbert/distilbert-base-uncased my-encoder": Row(
        prints=r"DistilBertForMaskedLM as ScratchEncoderForMaskedLM", leaves=model_in("my-encoder")
    ),
    "scratch-transformer export my-decoder my-llama --to llama": Row(
        prints=r"ScratchDecoderForCausalLM as LlamaForCausalLM", leaves=model_in("my-llama")
    ),
    "scratch-transformer export my-decoder --to gguf": Row(leaves=("my-decoder.gguf",)),
    "scratch-transformer export my-translator --to ctranslate2": Row(ENGINE),
    "scratch-transformer export my-model --to onnx": Row(ENGINE),
    "scratch-transformer export my-model --to executorch": Row(ENGINE),
    "scratch-transformer push my-model NAME/REPO": Row(means={"NAME": USER}, prints=rf"{USER}/REPO"),
    "scratch-transformer layers my-llama my-small --keep 0 2 4 6": Row(leaves=model_in("my-small")),
    "scratch-transformer average run/a run/b run/c --output my-mean": Row(leaves=model_in("my-mean")),
    "scratch-transformer vocabulary my-small my-tokenizer my-fitted": Row(leaves=model_in("my-fitted")),
    "scratch-transformer inspect attention-is-all-you-need-base --source-length 30 --length 20": Row(prints=r"501"),
    "scratch-transformer plot attention runs/demo/model "
    '"She swam in the river before she dreamt of a bank." --layer 2': Row(leaves=("attention.png",)),
    "scratch-transformer plot embedding-shift runs/demo/model bank "
    '"She swam in the river before she dreamt of a bank." "The guest who paid the bill is looking for a bank."': Row(
        leaves=("embedding-shift.png",)
    ),
    "scratch-transformer plot curves runs/demo runs/multi30k_en_de --output curves.svg": Row(leaves=("curves.svg",)),
    "scratch-transformer senses my-encoder FOLDER": Row(means=SENSES, prints=r"bank"),
    "scratch-transformer serve runs/demo/model runs/shakespeare_char_cpu/model": Row(GRADIO),
    'build(["NAME/MODEL"]).launch()': Row(GRADIO),
}


# --- What README says -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """By what it is looked up, and what is typed: a line for bash, or a program for Python; what README shows of it."""

    name: str
    text: str
    is_python: bool
    shows: str = ""


def commands(text: str) -> Iterator[Command]:
    """All fenced blocks in their order. A Python block goes on where the one before it ended, unless bash was between:
    its names are still there. A block of text after it is what it prints."""
    before = ""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    for (language, block), (kind, shown) in itertools.pairwise([*blocks, ("", "")]):
        if language == "python":
            before += block
            yield Command(block.rstrip().splitlines()[-1], before, True, shown if kind == "text" else "")
        elif language == "text":
            assert before, f"it is not said what prints this:\n{block}"
        else:
            assert language == "bash", f"a block is of no language that is run: {language!r}\n{block}"
            before = ""
            for line in block.replace("\\\n", " ").splitlines():
                typed = re.sub(r"\s+", " ", re.sub(r"\s+# .*", "", line)).strip()
                yield Command(typed, typed, False)


def test_every_command_of_readme_has_its_row_and_every_row_its_command():
    """In the same order, which is that in which they are run."""
    assert [command.name for command in commands(README)] == [*ROWS]


def test_what_readme_shows_is_what_is_looked_for():
    """In what its commands print, in a fresh folder; in the words of any machine."""
    shown = {command.name: command.shows for command in commands(README) if command.shows}
    assert shown
    for name, text in shown.items():
        assert re.search(ROWS[name].prints, text, flags=re.MULTILINE) and ROWS[name].prints, name


def test_a_row_says_one_thing():
    for name, row in ROWS.items():
        assert not row.why_not or row == Row(row.why_not), f"{name}: it is not run, so nothing can be said of it"
        for word in row.means:
            assert word in name, f"{name}: no {word} in it"


def test_commands_are_found_as_they_are_typed():
    bash = "make  it   # a comment\nlong \\\n    one '# no comment'\n"
    text = f"```bash\n{bash}```\n\n```python\na = 1\n```\n```text\n1\n```\n```python\nb = a\n```\n"
    assert [(each.name, each.text, each.shows) for each in commands(text)] == [
        ("make it", "make it", ""),
        ("long one '# no comment'", "long one '# no comment'", ""),
        ("a = 1", "a = 1\n", "1\n"),
        ("b = a", "a = 1\nb = a\n", ""),
    ]


# --- A fresh folder ---------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """What git knows, with the changes that are not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in listed.rstrip("\0").split("\0"):
        if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def copy_environment(target: Path) -> None:
    """The environment of this process as the `.venv` that make has made, with the command, which a checkout has as
    `python -m hf_scratch_transformer.cli`, at the front of its path."""
    venv, commands = target / ".venv", target / ".venv" / "commands"
    commands.mkdir(parents=True)
    for path in Path(sys.prefix).iterdir():
        if path.name != ".made-from-lock":
            (venv / path.name).symlink_to(path)
    (venv / ".made-from-lock").touch()
    command = commands / "scratch-transformer"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hf_scratch_transformer.cli "$@"\n')
    command.chmod(0o755)


def save(folder: Path, model: object, tokenizer: object) -> None:
    for part in (model, tokenizer):
        part.save_pretrained(folder)


def make_own(target: Path) -> None:
    """What README takes to be the reader's own: text, corpora, models of other runs."""
    pairs = grammar.generate(4000)
    texts = [pair.english for pair in pairs]
    for name in ("corpus.txt", "notes.txt"):
        tiny_runs.write_lines(target / name, texts)
    for split, rows in {"train": pairs[:300], "val": pairs[300:350], "test_2016_flickr": pairs[350:360]}.items():
        (target / "captions").mkdir(exist_ok=True)
        for language in ("english", "german"):
            lines = [getattr(pair, language) for pair in rows]
            tiny_runs.write_lines(target / "captions" / f"{split}.{language[:2].replace('ge', 'de')}", lines)
    coarse_wsd(target / "senses" / "bank")
    recipe = yaml.safe_load(tiny_runs.write_recipe(target / "recipe").read_text())
    (target / "RECIPE.yaml").write_text(yaml.safe_dump(recipe))

    vocabularies = {family: train_tokenizer(texts, family=family, vocab_size=400) for family in tiny.FAMILIES}
    own = {
        "runs/mlm_babymix/model": (scratch.ScratchEncoderForMaskedLM, {}),
        "runs/shakespeare_char_cpu/model": (scratch.ScratchDecoderForCausalLM, {}),
        "my-decoder": (scratch.ScratchDecoderForCausalLM, {"num_hidden_layers": 7, "hidden_act": "swiglu"}),
        **{f"run/{name}": (scratch.ScratchDecoderForCausalLM, {"seed": seed}) for seed, name in enumerate("abc")},
    }
    for folder, (model_class, options) in own.items():
        tokenizer = vocabularies[tiny.family(model_class)]
        fields = config_fields(tokenizer, tiny.family(model_class)) | {"max_position_embeddings": 64} | options
        save(target / folder, tiny.model(model_class, **fields), tokenizer)
    train_tokenizer(texts[:200], family="decoder", vocab_size=350).save_pretrained(target / "my-tokenizer")


def fill(hub: HubServer, folder: Path) -> None:
    """The native model that README takes from the Hub."""
    tokenizer = train_tokenizer((pair.english for pair in grammar.generate(200)), family="encoder", vocab_size=300)
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=2, n_heads=4, hidden_dim=48, pad_token_id=0)
    save(folder, DistilBertForMaskedLM(config).eval(), tokenizer)
    files = {path.name: Blob(path.read_bytes(), lfs=path.suffix == ".safetensors") for path in folder.iterdir()}
    repository = hub.repositories["distilbert/distilbert-base-uncased"] = Repository(private=False)
    repository.commit("main", files)


@pytest.mark.slow
def test_the_commands_of_readme_work_in_order(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    copy_tree(tree)
    copy_environment(tree)
    make_own(tree)
    failed = {}
    with HubServer() as hub:
        fill(hub, tmp_path / "distilbert")
        path = os.pathsep.join(map(str, (tree / ".venv/commands", tree / ".venv/bin", os.environ["PATH"])))
        environment = os.environ | {"PATH": path, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HOME": str(tmp_path / "hub"), "VIRTUAL_ENV": str(tree / ".venv"), "COLUMNS": "200"}
        for name in ("HF_HUB_OFFLINE", "PYTHONPATH", "MAKEFLAGS", "MAKELEVEL"):
            environment.pop(name, None)
        for command in commands(README):
            if not ROWS[command.name].why_not and (problem := attempt(command, tree, environment)):
                failed[command.name] = problem
    assert not failed, "\n\n".join(f"{name}\n{problem}" for name, problem in failed.items())


def attempt(command: Command, tree: Path, environment: dict[str, str]) -> str:
    """Run a command as its row says; returns what was wrong with it."""
    row, text = ROWS[command.name], command.text
    for word, meant in row.means.items():
        text = re.sub(rf"\b{word}\b", meant, text)
    words = [sys.executable, "-c", text] if command.is_python else ["bash", "-euc", f"{text} {row.adds}"]
    kept = {name: (tree / name).read_bytes() for name in row.keeps}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, timeout=3600)
    said = f"{shlex.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    if done.returncode:
        return f"ended with {done.returncode}: {said}"
    if not re.search(row.prints, done.stdout + done.stderr, flags=re.MULTILINE):
        return f"did not print {row.prints!r}: {said}"
    changed = [name for name, content in kept.items() if (tree / name).read_bytes() != content]
    lacking = [name for name in row.leaves if not (tree / name).is_file()]
    return f"left no {lacking}, changed {changed}: {said}" if lacking or changed else ""
