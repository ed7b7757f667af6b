"""From somebody's text to a scored model, by the three commands that a user types, beside what they would try instead.

    python -m benchmarks text OBJECTIVE --data FOLDER [--minutes 3] [--output_dir FOLDER]

`scratch-transformer new` writes a recipe, `train` trains it, `evaluate` scores it on the test split, each in a process
of its own. Beside it, on the same rows: a native model of equal size, trained by `Trainer` for as many seconds on the
same tokens; of a causal LM an n-gram model of the bytes, of a masked LM the most frequent token. The output folder
receives `text.json`: the recipe, the seconds foretold and taken, the scores.
"""

import argparse
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_scratch_transformer import hub
from hf_scratch_transformer.files import write_text
from training import corpus, metrics
from training.objectives import OBJECTIVES
from training.proposal import PREDICTED
from training.recipe import COLUMNS, Recipe, parse

from .contenders import Options
from .peers import NATIVE_OF, count_parameters
from .preparation import environment_of_this, ran
from .runs import RecipeRun, TrainerRun

RECORD = "text.json"
HEAD = ["text", "recipe", "seconds foretold, taken", "score", "ours", "beside", "on"]
HEADLINES = {"causal_lm": "bits_per_byte", "masked_lm": "masked_accuracy", "translation": "bleu"}
LONGEST_CONTEXT = 12  # bytes before the next one
LEARNING_RATE, WARMUP = 1e-3, 0.05  # of AdamW, usual at these sizes; the share of the steps
TRIED = 20  # steps of Trainer, of which it is told how many fit into the time
SCORE = re.compile(r"^test (\w+): (\S+)(?: \(95%: (\S+) to (\S+)\))?", re.MULTILINE)


def main(argv: Sequence[str]) -> None:
    """Measure, print and write. Raises ValueError for what the command line cannot say, and where a command fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks text", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("objective", choices=list(COLUMNS))
    parser.add_argument("--data", type=Path, required=True, help="a file or folder of text")
    parser.add_argument("--minutes", type=float, default=3.0, help="for the training (%(default)s)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/benchmark"), help="(%(default)s)")
    arguments = parser.parse_args(argv)
    if not arguments.data.exists():
        raise ValueError(f"--data {arguments.data} is not there")
    with tempfile.TemporaryDirectory() as folder:
        result = measured(arguments.objective, arguments.data.resolve(), arguments.minutes, Path(folder))
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    record = {"environment": metrics.public(environment_of_this()), **result}
    write_text(arguments.output_dir / RECORD, json.dumps(record, indent=1) + "\n")
    print(f"foretold {result['predicted_seconds']:,.0f} s, taken {result['train_seconds']:,.0f} s")
    for name, scores in result["scores"].items():
        print(f"{name:40} " + ", ".join(f"{key} {value:.4g}" for key, value in scores.items() if key != "interval"))


def measured(objective: str, data: Path, minutes: float, folder: Path) -> dict[str, Any]:
    """The three commands in a folder, and the baselines."""
    name = data.stem
    proposed, new_seconds = command(["new", objective, "--data", str(data), "--minutes", f"{minutes:g}"], folder)
    recipe_file = folder / f"{name}.yaml"
    text = recipe_file.read_text(encoding="utf-8")
    predicted = re.search(PREDICTED.format("([0-9,]+)"), text)
    if predicted is None:
        raise ValueError(f"{recipe_file.name} does not say how long it will take")
    _, train_seconds = command(["train", str(recipe_file)], folder)
    (last,) = re.findall(r"^  scratch-transformer (evaluate .*)$", proposed, re.MULTILINE)
    words = shlex.split(last)
    scores = {"ours": scored(words, folder)}
    recipe = parse([str(recipe_file)])
    finished = next(
        line for line in metrics.read(folder / "runs" / name / "metrics.jsonl") if line["event"] == "finished"
    )
    native, about = trained_natively(recipe_file, finished["seconds"], folder)
    scores[f"{about['name']}, by Trainer"] = scored(["evaluate", str(native), *words[2:]], folder)
    scores |= simple(recipe, folder / "runs" / name / "model")
    where = str(data.parent)
    return {
        "objective": objective,
        "text": name,
        "minutes": minutes,
        "recipe": text.replace(f"{where}/", ""),
        "parameters": finished["parameters"],
        "steps": finished["step"],
        "new_seconds": new_seconds,
        "predicted_seconds": float(predicted[1].replace(",", "")),
        "train_seconds": train_seconds,
        "loop_seconds": finished["seconds"],
        "native": about,
        "headline": HEADLINES[objective],
        "scores": scores,
    }


def cells(record: dict[str, Any], folder: str, machine: str) -> list[str]:
    """What a table says of a record, in the order of `HEAD`."""
    name, ours = record["headline"], record["scores"]["ours"]
    likely = " ({:.4g} to {:.4g})".format(*ours["interval"]) if "interval" in ours else ""
    others = {title: each[name] for title, each in record["scores"].items() if title != "ours"}
    return [
        f"[{record['text']}]({folder}/{RECORD})",
        f"{record['objective']}, {record['parameters']:,} parameters, {record['steps']:,} steps",
        f"{record['predicted_seconds']:,.0f}, {record['train_seconds']:,.0f}",
        hub.SCORES[name][1],
        f"{ours[name]:.4g}{likely}",
        ", ".join(f"{title}: {value:.4g}" for title, value in others.items()),
        machine,
    ]


def command(words: Sequence[str], folder: Path) -> tuple[str, float]:
    """What a command of ours prints, and its seconds. Raises ValueError with its last line where it fails."""
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    print("scratch-transformer", shlex.join(words), flush=True)
    before = time.monotonic()
    whole = [sys.executable, "-m", "hf_scratch_transformer.cli", *words]
    printed = ran(whole, words[0], cwd=folder, environment=environment)
    return printed, time.monotonic() - before


def scored(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """What `evaluate` prints."""
    printed, _ = command(words, folder)
    scores: dict[str, Any] = {}
    for name, value, low, high in SCORE.findall(printed):
        scores[name] = float(value)
        if low and name in HEADLINES.values():
            scores["interval"] = [float(low), float(high)]
    return scores


def trained_natively(recipe: Path, seconds: float, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with a native model of equal size, trained on the same tokens by Trainer for so many seconds."""
    ours = RecipeRun(Options(torch.device("cpu"), recipe=str(recipe)), TRIED, folder / "prepared")
    ours.build()
    name = NATIVE_OF[ours.family]
    tried = TrainerRun(name, name, ours)
    tried.build()
    tried.step(None)
    ours.steps = max(TRIED, int(seconds / (tried.timer.seconds / TRIED)))
    warmup = max(1, round(WARMUP * ours.steps))
    whole = TrainerRun(name, name, ours, learning_rate=LEARNING_RATE, warmup_steps=warmup)
    whole.build()
    print(f"Trainer, {name}: {ours.steps:,} steps", flush=True)
    whole.step(None)
    place = folder / "native"
    whole.model.save_pretrained(place)
    ours.run.objective.tokenizer.save_pretrained(place)
    about = {"name": name, "parameters": count_parameters(whole.model), "steps": ours.steps}
    return place, about | {"seconds": whole.timer.seconds, "learning_rate": LEARNING_RATE}


def simple(recipe: Recipe, model: Path) -> dict[str, dict[str, float]]:
    """The scores of what needs no training."""
    if recipe.objective == "translation":
        return {}
    encode = OBJECTIVES[recipe.objective](recipe, corpus.read_tokenizer(str(model), "MODEL")).encode
    splits = {role: corpus.load(recipe, role, encode, keep_texts=True) for role in recipe.data.splits}
    if recipe.objective == "masked_lm":
        tokens = {role: split.columns["text"].tokens for role, split in splits.items()}
        best = np.bincount(tokens["train"]).argmax()
        return {"the most frequent token": {"masked_accuracy": float((tokens["test"] == best).mean())}}
    rows = {role: [text.encode() for text in split.texts["text"]] for role, split in splits.items()}
    grams = NGrams(rows["train"])
    length = int(np.argmin(grams.bits_per_byte(rows["validation"])))
    return {f"{length + 1}-grams of bytes": {"bits_per_byte": grams.bits_per_byte(rows["test"])[length]}}


class NGrams:
    """Bytes told by those before them, interpolated over lengths of context as Witten and Bell (1991) do: the counts
    after a context, beside as many of a shorter one's guesses as it has been followed by different bytes. The end of a
    row is told as well."""

    def __init__(self, rows: Sequence[bytes]) -> None:
        used = np.unique(np.frombuffer(b"".join(rows), np.uint8))
        self.codes = np.ones(256, np.int64)  # 0 is outside of rows, 1 a byte that was never seen
        self.codes[used] = np.arange(2, len(used) + 2)
        self.base = len(used) + 2
        most = int(63 * math.log(2) / math.log(self.base))  # signs that one number can hold
        self.longest = min(LONGEST_CONTEXT, most - 1)
        self.seen = []
        for contexts, pairs in self.counted(rows):
            pairs, counts = np.unique(pairs, return_counts=True)
            contexts, first, followers = np.unique(pairs // self.base, return_index=True, return_counts=True)
            self.seen.append((pairs, counts, contexts, np.add.reduceat(counts, first), followers))

    def counted(self, rows: Sequence[bytes]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The context of every byte and end as a number, and both together; for each length of context."""
        between, parts, places, start = max(self.longest, 1), [np.zeros(max(self.longest, 1), np.int64)], [], 0
        for row in rows:
            parts += [self.codes[np.frombuffer(row, np.uint8)], np.zeros(between, np.int64)]
            start += between
            places.append(np.arange(start, start + len(row) + 1))
            start += len(row)
        signs, told = np.concatenate(parts), np.concatenate(places)
        contexts = np.zeros(len(told), np.int64)
        for length in range(self.longest + 1):
            if length:
                contexts = contexts + signs[told - length] * self.base ** (length - 1)
            yield contexts, contexts * self.base + signs[told]

    def bits_per_byte(self, rows: Sequence[bytes]) -> list[float]:
        """Of other rows, by the longest context that is heeded."""
        chances, found, size = np.array(1 / self.base), [], sum(map(len, rows))
        for (contexts, pairs), (known, counts, before, totals, followers) in zip(
            self.counted(rows), self.seen, strict=True
        ):
            times = looked_up(pairs, known, counts)
            total, different = looked_up(contexts, before, totals), looked_up(contexts, before, followers)
            chances = (times + different * chances) / np.maximum(total + different, 1) + (total == 0) * chances
            found.append(float(-np.log2(chances).sum() / size))
        return found


def looked_up(keys: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The value of each key, 0 of those that are not known."""
    places = np.searchsorted(known, keys).clip(max=len(known) - 1)
    return np.where(known[places] == keys, values[places], 0)
