"""Runs of seconds for the tests of `training`: a corpus, a recipe for each objective, and what a run left behind."""

import contextlib
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

from training import metrics
from training.__main__ import main

NUMBERS = {
    "one": "eins",
    "two": "zwei",
    "three": "drei",
    "four": "vier",
    "five": "fünf",
    "six": "sechs",
    "seven": "sieben",
}
ROOT = Path(__file__).parent.parent
MODEL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "position_embedding_type": "rotary",
    "norm_position": "pre",
    "dropout": 0.1,
}
LAYERS = {
    "translation": {"model_type": "scratch_seq2seq", "encoder_layers": 1, "decoder_layers": 1},
    "causal_lm": {"model_type": "scratch_decoder", "num_hidden_layers": 1},
    "masked_lm": {"model_type": "scratch_encoder", "num_hidden_layers": 1},
}
OBJECTIVES = tuple(LAYERS)


def write_corpus(folder: Path, rows: int = 60, seed: int = 0) -> Path:
    """Parallel files train.en, train.de, valid.en, ...: the numbers of a sequence, backwards in German."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for split, count in {"train": rows, "valid": 12, "test": 8}.items():
        sentences = [[draw.choice(list(NUMBERS)) for _ in range(draw.randint(1, 9))] for _ in range(count)]
        write_lines(folder / f"{split}.en", [" ".join(words) for words in sentences])
        write_lines(
            folder / f"{split}.de", [" ".join(NUMBERS[word] for word in reversed(words)) for words in sentences]
        )
    return folder


def write_lines(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def write_recipe(folder: Path, objective: str = "translation", **sections: dict[str, Any] | Any) -> Path:
    """A recipe on the corpus in `folder`; keyword arguments are merged into its sections."""
    tree: dict[str, Any] = {
        "objective": objective,
        "data": {
            "path": str(folder / "corpus"),
            "splits": {"train": "train", "validation": "valid", "test": "test"},
            "columns": {"source": "en", "target": "de"},
            "batch_tokens": 64,
            "max_length": 32,
        },
        "tokenizer": {"vocab_size": 300},
        "model": MODEL | LAYERS[objective],
        "optimisation": {"max_steps": 12, "warmup_steps": 2, "optimizer": "muon", "learning_rate": 0.01},
        "evaluation": {"every_steps": 5, "generate_rows": 2},
        "checkpoints": {"every_steps": 4},
        "log_every": 1,
    }
    if objective != "translation":
        tree["data"] |= {
            "columns": {"text": "text"},
            "splits": {"train": "train.en", "validation": "valid.en", "test": "test.en"},
            "window": 16,
        }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    write_corpus(folder / "corpus")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def run(recipe: Path, output: Path, *words: str) -> int:
    """The exit code of `python -m training RECIPE --output_dir OUTPUT ...`, in this process."""
    return main([str(recipe), "--output_dir", str(output), *words])


def launch(*words: str | Path, processes: int = 2, **environment: str) -> str:
    """What processes on gloo that `torchrun` starts to run `python WORDS` print; they have to succeed."""
    count = ["--nproc_per_node", str(processes)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *count, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def fork(program: Path, *words: str | Path, processes: int = 2, **environment: str) -> str:
    """The same of a program, in processes that begin with everything imported, which takes longer than most of what
    they do: forks of one that has done nothing else, and is there as long as the tests run."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.tiny_runs", "training.loop", "transformers.models.auto.modeling_auto"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    group |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    said = program.with_suffix(".log")
    said.write_bytes(b"")
    members = []
    for rank in map(str, range(processes)):
        whole = os.environ | group | {"RANK": rank, "LOCAL_RANK": rank} | environment
        members.append(forks.Process(target=_member, args=(said, whole, [program, *words])))
    with contextlib.chdir(ROOT):  # where what is imported lies
        for member in members:
            member.start()
    try:
        while alive := [member.sentinel for member in members if member.exitcode is None]:
            if not wait(alive, timeout=600) or any(member.exitcode for member in members):
                break  # the others wait for one that failed
    finally:
        codes = [member.exitcode for member in members]
        for member in members:
            member.kill()
    assert codes == [0] * processes, f"exit codes {codes}: {said.read_text(encoding='utf-8')}"
    return said.read_text(encoding="utf-8")


def _member(said: Path, environment: dict[str, str], words: list[str | Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with said.open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.argv = [*map(str, words)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def losses(output: Path) -> dict[int, float]:
    """Training loss by step."""
    return {line["step"]: line["loss"] for line in metrics.read(output / "metrics.jsonl") if line["event"] == "train"}


def weights(output: Path) -> dict[str, Tensor]:
    """Of the finished model."""
    return load_file(output / "model" / "model.safetensors")
