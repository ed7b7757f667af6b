"""How fast a corpus becomes tokens on disk, beside its tokenizer alone, and what training on them takes.

    python -m benchmarks prepare [--tokens 200_000_000] [--rounds 3] [--output_dir FOLDER]

The text is drawn from a seed: words of a Zipfian vocabulary, in eight files. Preparations of a tenth of it and the bare
tokenizer over the same lines take turns, A B A B; then all of it is prepared, and a small decoder is trained on it, new
and resumed, beside the same one on a corpus of a few lines. The folder receives `preparation.json`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml

from hf_scratch_transformer.files import write_text
from hf_scratch_transformer.tokenization import train_tokenizer
from training import preparation, sources
from training.folder import environment
from training.objectives import OBJECTIVES
from training.recipe import parse

WORDS, LINES, FILES = 60_000, 2_000, 8
PER_WORD = 2.8  # tokens, about
VOCABULARY = 8000
STEPS = 40


def main(argv: Sequence[str]) -> None:
    """Measure, print and write. Raises ValueError for what the command line cannot say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prepare", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=int, default=200_000_000, help="of the corpus, about (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark"), help="(%(default)s)")
    arguments = parser.parse_args(argv)
    for name, least in {"tokens": 100_000, "rounds": 1}.items():
        if (value := getattr(arguments, name)) < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    with tempfile.TemporaryDirectory() as folder:
        record = {"environment": environment_of_this(), **measured(Path(folder), arguments.tokens, arguments.rounds)}
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output_dir / "preparation.json", json.dumps(record, indent=1) + "\n")
    for name, value in record.items():
        if name != "environment":
            print(f"{name:40} {value:,.4g}" if isinstance(value, float) else f"{name:40} {value}")


def environment_of_this() -> dict[str, Any]:
    """Versions, hardware and command."""
    return environment(torch.device("cpu"), 1, "benchmarks")


def ran(
    command: Sequence[str], name: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """What a command prints. Raises ValueError with its name and its last line where it fails."""
    run = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"{name}: {(run.stderr.strip().splitlines() or ['failed'])[-1]}")
    return run.stdout


def measured(folder: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """The figures, from files that are written into a folder."""
    whole, tenth, few = folder / "whole", folder / "tenth", folder / "few"
    for place, share, files in ((whole, 1.0, FILES), (tenth, 0.1, FILES), (few, 1e-4, 1)):
        write_corpus(place, int(tokens * share), files)
    recipe = write_recipe(folder, whole)
    bare, prepared = [], []
    for number in range(rounds):
        bare.append(tokenizer_alone(recipe, tenth))
        prepared.append(preparation_alone(recipe, tenth, folder / f"cache{number}"))
    ratio = [ours / alone for ours, alone in zip(prepared, bare, strict=True)]
    speed, made, size, memory = prepare(recipe, whole, folder / "cache")
    new = train(recipe, folder, whole)
    resumed = train(recipe, folder, whole, "--resume")
    alone = train(recipe, folder, few)
    return {
        "tokens": made,
        "tokens_per_second": speed,
        "bytes_per_token": size / made,
        "preparation_memory_mb": memory,
        "tenth_tokens_per_second": prepared,
        "tokenizer_alone_tokens_per_second": bare,
        "of_tokenizer_alone": statistics.median(ratio),
        "seconds_to_first_step": new["seconds"],
        "seconds_to_first_step_resumed": resumed["seconds"],
        "seconds_to_first_step_few_lines": alone["seconds"],
        "training_memory_mb": max(new["memory"], resumed["memory"]),
        "training_memory_mb_few_lines": alone["memory"],
        "training_memory_mb_above": max(new["memory"], resumed["memory"]) - alone["memory"],
    }


def lines(tokens: int, seed: int) -> Iterator[str]:
    """Some thousand lines at a time, of about so many tokens in all."""
    draw = np.random.default_rng(seed)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    kinds = ["".join(draw.choice(letters[: 6 + length], length)) for length in draw.integers(2, 11, WORDS)]
    shares = 1 / np.arange(1, WORDS + 1)
    edges, words = np.cumsum(shares / shares.sum()), 0
    while words * PER_WORD < tokens:
        lengths = draw.integers(5, 31, LINES)
        numbers = np.searchsorted(edges, draw.random(lengths.sum())).clip(max=WORDS - 1)
        text = iter(map(kinds.__getitem__, numbers))
        yield "".join(" ".join(islice(text, length)) + ".\n" for length in lengths)
        words += int(lengths.sum())


def write_corpus(folder: Path, tokens: int, files: int) -> None:
    """`train-00000-of-00008.txt` and so on."""
    folder.mkdir()
    for number in range(files):
        with open(folder / f"train-{number:05d}-of-{files:05d}.txt", "w", encoding="utf-8") as file:
            file.writelines(lines(tokens // files, number))


def write_recipe(folder: Path, whole: Path) -> Path:
    """A small decoder with a tokenizer of its own, trained on the first lines."""
    with open(next(iter(sorted(whole.iterdir()))), encoding="utf-8") as file:
        tokenizer = train_tokenizer(list(islice(file, 50_000)), family="decoder", vocab_size=VOCABULARY)
    tokenizer.save_pretrained(folder / "tokenizer")
    recipe = {
        "objective": "causal_lm",
        "data": {"path": str(whole), "window": 256, "batch_tokens": 1024},
        "tokenizer": {"path": str(folder / "tokenizer")},
        "model": {"model_type": "scratch_decoder", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        "optimisation": {"max_steps": STEPS, "schedule": "constant"},
        "log_every": 1,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def tokenizer_alone(recipe: Path, corpus: Path) -> float:
    """Tokens a second of the tokenizer over lines read from files, as many at a time, with all its threads."""
    parsed = parse([str(recipe)])
    encode = OBJECTIVES[parsed.objective](parsed, preparation.tokenizer(parsed)).tokenizer.backend_tokenizer
    count, began = 0, time.perf_counter()
    for path in sorted(corpus.iterdir()):
        with open(path, encoding="utf-8") as file:
            while texts := [line.rstrip("\n") for line in islice(file, sources.CHUNK)]:
                count += sum(len(each.ids) + 1 for each in encode.encode_batch_fast(texts))
    return count / (time.perf_counter() - began)


def preparation_alone(recipe: Path, corpus: Path, cache: Path) -> float:
    """Tokens a second of a preparation in this process, its digests of the files and the check at its end included."""
    parsed = parse([str(recipe), "--data.path", str(corpus), "--data.cache", str(cache)])
    objective = OBJECTIVES[parsed.objective](parsed, preparation.tokenizer(parsed))
    began = time.perf_counter()
    split = preparation.prepared(parsed, objective, print)
    return len(split.columns["text"].tokens) / (time.perf_counter() - began)


def prepare(recipe: Path, corpus: Path, cache: Path) -> tuple[float, int, int, float]:
    """Tokens a second of a preparation in a process of its own, start and all; tokens, bytes on disk, MB at most."""
    words = ["--data.path", str(corpus), "--data.cache", str(cache)]
    began = time.perf_counter()
    memory = watched(["prepare", str(recipe), *words])
    seconds = time.perf_counter() - began
    (folder,) = (path for path in cache.glob("tokens-*") if path.is_dir())
    size = sum(path.stat().st_size for path in folder.iterdir())
    tokens = (folder / "text.tokens").stat().st_size // 2
    return tokens / seconds, tokens, size, memory


def train(recipe: Path, folder: Path, corpus: Path, *words: str) -> dict[str, float]:
    """Seconds from the start of the process to the end of its first step, and MB at its peak."""
    output = folder / f"run-{corpus.name}"
    log = output / "metrics.jsonl"
    steps = ["--optimisation.max_steps", str(STEPS + 10 * len(words)), "--data.cache", str(folder / "cache")]
    before = len(trained(log))
    began = time.time()
    options = ["--data.path", str(corpus), "--output_dir", str(output), *steps, *words]
    first: list[float] = []

    def look() -> None:
        if not first and len(trained(log)) > before:
            first.append(time.time() - began)

    memory = watched([str(recipe), *options], look)
    return {"seconds": first[0], "memory": memory}


def trained(log: Path) -> list[str]:
    """The lines of a log that are of training."""
    return [line for line in log.read_text().splitlines() if '"train"' in line] if log.exists() else []


def watched(words: Sequence[str], look: Any = lambda: None) -> float:
    """Run `python -m training` to its end; the most MB that it held at once, pages of mapped files left out."""
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads would fill up, and stop who writes
        process = subprocess.Popen([sys.executable, "-m", "training", *words], stdout=said, stderr=subprocess.STDOUT)
        most, about = 0.0, psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(0.05)
            look()
            try:
                memory = about.memory_info()
                most = max(most, (memory.rss - memory.shared) / 1e6)
            except psutil.NoSuchProcess:
                break
        if process.wait():
            said.seek(0)
            last = said.read().decode()[-500:]
            raise ValueError(f"python -m training {' '.join(words)} ended with {process.returncode}: {last}")
    return most
