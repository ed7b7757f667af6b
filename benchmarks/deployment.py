"""Where to run a model: our `generate`, compiled and not, beside other inference engines.

    python -m benchmarks engines MODEL --texts FILE [--references FILE] [--rows 8] [--prompt 16] [--new-tokens 100]
        [--rounds 5] [--threads N] [--output_dir FOLDER]

The model is exported to every engine that is installed (CTranslate2, ONNX Runtime, llama.cpp) and can say what it
computes. Then all write after the first lines of FILE, greedily, a row at a time, taking turns, A B A B: a language
model goes on from the first tokens of each line, a translator translates it. The folder receives `engines.json`: tokens
a second, seconds to the first token, memory of the process, size on disk, in how many rows the tokens are those of
`generate`, and for translators BLEU, against references or else against what `generate` writes. What cannot be run
says why.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerBase

import hf_scratch_transformer  # noqa: F401  (makes our models known to transformers)
from hf_scratch_transformer.files import reading, write_text
from hf_scratch_transformer.insight.presets import read_config
from training import metrics

from .engines import CONTENDERS, OURS, Contender, Running, Settings
from .measures import quartiles
from .preparation import environment_of_this
from .report import number

RECORD = "engines.json"
PAUSE = 0.2  # seconds, in which the threads of the engine before fall asleep
HEAD = ["", "tokens/s", "times `generate`", "first token, ms", "memory, MB", "disk, MB", "rows equal", "BLEU"]


def main(argv: Sequence[str]) -> None:
    """Measure, print and write. Raises ValueError for what the command line cannot say."""
    arguments = parse(argv)
    texts = read_lines(arguments.texts, arguments.rows)
    references = None if arguments.references is None else read_lines(arguments.references, arguments.rows)
    settings, about, tokenizer = opened(arguments.model, arguments.threads)
    prompts = [ids if settings.is_translator else ids[: arguments.prompt] for ids in tokenizer(texts)["input_ids"]]
    with tempfile.TemporaryDirectory() as place:
        rows = measured(arguments, settings, prompts, Path(place))
    judge(rows, settings, tokenizer, references)
    record = {
        "environment": metrics.public(environment_of_this()),
        "model": about,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "new_tokens": arguments.new_tokens,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "results": rows,
    }
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    write_text(arguments.output_dir / RECORD, json.dumps(record, indent=1) + "\n")
    table = Table(*(head.replace("`", "") for head in HEAD), title=title(record))
    for row in rows:
        table.add_row(*cells(row))
    Console(width=160).print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line. Raises ValueError for what it cannot say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engines", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "model", type=Path, metavar="MODEL", help="folder of a language model or translator of ours, with its tokenizer"
    )
    add("--texts", type=Path, required=True, help="a text file, of which each line is one")
    add("--references", type=Path, help="translations of these, line by line")
    add("--rows", type=int, default=8, help="lines of it (%(default)s)")
    add("--prompt", type=int, default=16, help="tokens of a line that a language model goes on from (%(default)s)")
    add("--new-tokens", type=int, default=100, help="tokens to write at most (%(default)s)")
    add("--rounds", type=int, default=5, help="turns of each engine (%(default)s)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of each engine (%(default)s)")
    add("--output_dir", "--output-dir", type=Path, default=Path("runs/benchmark"), help="(%(default)s)")
    arguments = parser.parse_args(argv)
    for name in ("rows", "prompt", "new_tokens", "rounds", "threads"):
        if (value := getattr(arguments, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    return arguments


def read_lines(path: Path, count: int) -> list[str]:
    """The first lines of a file that say something. Raises ValueError where there are not as many."""
    with reading(path):
        found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
    if len(found) < count:
        raise ValueError(f"--rows {count}: {path} has {len(found)} lines that are not empty")
    return found


def opened(folder: Path, threads: int) -> tuple[Settings, dict[str, Any], PreTrainedTokenizerBase]:
    """What engines are told of a model, what the record says of it, and its tokenizer.

    Raises ValueError where there is no model that writes.
    """
    config = read_config(str(folder))
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with reading(folder):
        model, tokenizer = auto_class.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ends = model.generation_config.eos_token_id
    start = getattr(model.generation_config, "decoder_start_token_id", None)
    settings = Settings(config.is_encoder_decoder, start, [ends] if isinstance(ends, int) else ends or [], threads)
    kept = ("hidden_size", "num_hidden_layers", "encoder_layers", "decoder_layers", "vocab_size")
    about = {"name": folder.resolve().parent.name if folder.name == "model" else folder.resolve().name}
    about |= {"class": type(model).__name__, "parameters": model.num_parameters()}
    return settings, about | {name: getattr(config, name) for name in kept if hasattr(config, name)}, tokenizer


def measured(
    arguments: argparse.Namespace, settings: Settings, prompts: list[list[int]], place: Path
) -> list[dict[str, Any]]:
    """A row for each contender: what it wrote, and what that took, or why it could not."""
    rows: list[dict[str, Any]] = []
    running: dict[int, Running] = {}
    with ExitStack() as stack:
        for index, contender in enumerate(CONTENDERS):
            row: dict[str, Any] = {"engine": contender.engine, "precision": contender.precision}
            rows.append(row)
            print(f"{name_of(row)} ...", flush=True)
            try:
                files = written(contender, arguments.model, place / f"{index}-{contender.precision}{contender.suffix}")
                row |= {"version": version(contender.package), "disk_bytes": size(files)}
                running[index] = Running(contender, files, settings)
                stack.callback(running[index].end)
                answer = running[index].ask(prompts, arguments.new_tokens)  # which compiles, and is not timed
                row["ready_seconds"] = running[index].open_seconds + answer["seconds"][0]
                row["written"] = [until_end(tokens, settings) for tokens in answer["written"]]
            except Exception as error:  # whatever an engine, its converter or its package says
                said = " ".join(str(error).split()).replace(f"{arguments.model}", arguments.model.name)
                row["refused"] = said.replace("|", "/")[:300] or type(error).__name__
                running.pop(index, None)
                if not running:  # the others are compared with the first
                    raise ValueError(f"{OURS}: {row['refused']}") from None
        rounds: dict[int, list[dict[str, float]]] = {index: [] for index in running}
        for _ in range(arguments.rounds):
            for index, engine in running.items():
                time.sleep(PAUSE)
                first, whole = engine.ask(prompts, 1), engine.ask(prompts, arguments.new_tokens)
                tokens = sum(max(len(until_end(each, settings)), 1) for each in whole["written"])
                rounds[index].append(
                    {
                        "tokens_per_second": tokens / sum(whole["seconds"]),
                        "first_token_seconds": sum(first["seconds"]) / len(prompts),
                        "bytes": whole["bytes"],
                    }
                )
    for index, turns in rounds.items():
        rows[index]["rounds"] = turns
        rows[index] |= {name: quartiles([turn[name] for turn in turns]) for name in turns[0] if name != "bytes"}
        rows[index]["memory_bytes"] = max(turn["bytes"] for turn in turns)
        pairs = zip(turns, rounds[0], strict=True)
        rows[index]["speed"] = quartiles(
            [ours["tokens_per_second"] / base["tokens_per_second"] for ours, base in pairs]
        )
    return rows


def written(contender: Contender, model: Path, place: Path) -> Path:
    """The files that it runs. Raises ValueError where its package is not there."""
    if find_spec(contender.module) is None:
        raise ValueError(f"not installed: pip install {contender.package}")
    if contender.write is None:
        return model
    contender.write(model, place)
    return place


def size(files: Path) -> int:
    """Bytes of a file, or of the weights of a folder and what else lies there."""
    return sum(each.stat().st_size for each in ([files] if files.is_file() else files.rglob("*")) if each.is_file())


def until_end(tokens: list[int], settings: Settings) -> list[int]:
    """Without the token that ends a text, which some engines give and some do not."""
    return tokens[:-1] if tokens and tokens[-1] in settings.ends else tokens


def judge(
    rows: list[dict[str, Any]],
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    references: list[str] | None,
) -> None:
    """Say of each row in how many texts its tokens are those of `generate`, and of translators BLEU."""
    from sacrebleu.metrics import BLEU

    first = rows[0]["written"]
    told = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in first]
    for row in rows:
        if (tokens := row.pop("written", None)) is not None:
            row["equal"] = sum(one == other for one, other in zip(tokens, first, strict=True))
            row["texts"] = len(first)
            if settings.is_translator:
                texts = [tokenizer.decode(each, skip_special_tokens=True) for each in tokens]
                row["bleu"] = BLEU().corpus_score(texts, [references or told]).score
                row["bleu_beside"] = "references" if references else OURS


def name_of(row: dict[str, Any]) -> str:
    return f"{row['engine']}, {row['precision']}"


def title(record: dict[str, Any]) -> str:
    """What was measured, on what."""
    model, about = record["model"], record["environment"]
    known = (about["processor"], about.get("instructions"), f"{record['threads']} threads")
    return f"{model['name']}, {model['parameters']:,} parameters; {', '.join(filter(None, known))}"


def cells(row: dict[str, Any]) -> list[str]:
    """What a table says of a contender, in the order of `HEAD`."""
    name = name_of(row)
    if "refused" in row:
        return [name, row["refused"], *[""] * (len(HEAD) - 2)]
    return [
        name,
        number(row["tokens_per_second"]["median"], 1, ",.0f"),
        number(row["speed"]["median"], 1, ".2f", "×"),
        number(row["first_token_seconds"]["median"], 1e3, ".1f"),
        number(row["memory_bytes"], 1e-6, ",.0f"),
        number(row["disk_bytes"], 1e-6, ",.1f"),
        f"{row['equal']} of {row['texts']}",
        number(row.get("bleu"), 1, ".1f"),
    ]
