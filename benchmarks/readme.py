"""The tables of README.md, and the cards of what was trained on a GPU, written from the records.

    python -m benchmarks report            # write them
    python -m benchmarks report --check    # exit code 1 where they are not what the records say

A table stands between `<!-- records: NAME ... -->` and `<!-- end -->`: of each folder NAME of `benchmarks/records`, in
that order, a row for each comparison with its best peer. NAME `processors` is for all records from CPUs but those of
whole runs, comparison by comparison: a folder more there, and they have a row more. NAME `gpu` is for the steps of
`benchmarks.gpu`.

What stands between `<!-- seeds: CARD SCORE -->` and `<!-- end -->` is the test's score of a card, mean and standard
deviation over its seeds: its `metrics.jsonl` and those of other seeds beside it, `seed-2.jsonl` and so on; with the
name of what was `measured` after SCORE, that. A table
between `<!-- tasks -->` and `<!-- end -->` has a row for each task of `model_cards/tasks.yaml`: its budget, what
version 0.1 reached, its card's score and what a run of that took. A task whose score is `measured: NAME` after training
has it from what `evaluate --json` printed of each seed's model, `NAME.json`, `NAME-2.json` and so on beside the card.
Between `<!-- scale: measured NAME -->` or `<!-- scale: gpus NAME -->` and `<!-- end -->` are the tables of
docs/SCALE.md. A table between `<!-- engines: NAME ... -->` and `<!-- end -->` has the engines that ran a model, one
between `<!-- texts: NAME ... -->` and `<!-- end -->` a row for each text, of these folders of records. One between
`<!-- ablations: NAME -->` and `<!-- end -->` has the ideas of `benchmarks/ablations/NAME.yaml`.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, FiniteFloat, TypeAdapter, ValidationError

from hf_scratch_transformer.files import reading, write_text
from training import metrics
from training.cards import logs, outcome, write_spread

from . import ablations, deployment, scale, texts
from .gpu import read_record
from .report import number
from .steps import STEPS

ROOT = Path(__file__).parents[1]
RECORDS = "benchmarks/records"
TABLE = re.compile(r"(<!-- records: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TASKS = re.compile(r"(<!-- tasks -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
SEEDS = re.compile(r"(<!-- seeds: (\w+) (\w+)(?: (\w+))? -->)(?:.*?)(<!-- end -->)", re.DOTALL)
ENGINES = re.compile(r"(<!-- engines: ([\w ]+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
TEXTS = re.compile(r"(<!-- texts: ([\w ]+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
ABLATIONS = re.compile(r"(<!-- ablations: (\w+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
SCALE = re.compile(r"(<!-- scale: (measured|gpus) (\w+) -->\n)(?:.*?)(<!-- end -->)", re.DOTALL)
# Kind and family -> a peer that has a row of its own: the best encoder is not the one that most people take.
ALSO = {("train", "encoder"): "distilbert"}
Kind = TypeVar("Kind")


class Task(BaseModel):
    """A row of the table of tasks, as `model_cards/tasks.yaml` has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    card: str
    task: str
    score: str
    budget: FiniteFloat  # FLOPs
    command: str
    first: str = "-"  # what version 0.1 reached
    aim: str = "-"
    published: str = "-"
    measured: str = ""
    times: FiniteFloat = 1.0


class Word(BaseModel):
    """What `evaluate --json` must say of a word."""

    model_config = ConfigDict(strict=True)

    test: int


class Printed(BaseModel):
    """What may be asked of what `evaluate --json` says; scores stand in `mean`, or else beside these."""

    model_config = ConfigDict(extra="allow", strict=True)

    words: dict[str, Word] = {}
    mean: dict[str, FiniteFloat] = {}
    options: dict[str, Any] = {}
    decoding: dict[str, Any] = {}
    weights: dict[str, str] = {}


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    stale = 0
    for path in pages(ROOT):
        before = path.read_text(encoding="utf-8")
        after = filled(before, ROOT)
        if arguments.check and before != after:
            where = path.relative_to(ROOT)
            print(f"benchmarks: {where} is not what the records say: python -m benchmarks report", file=sys.stderr)
            stale = 1
        elif before != after:
            write_text(path, after)
    if arguments.check:
        return stale
    for name, card in cards(ROOT):
        write_card(ROOT / "model_cards" / name, card)
    return 0


def filled(text: str, root: Path) -> str:
    """A document with its tables brought up to date.

    Raises ValueError for a table of records that are not there.
    """

    def table(match: re.Match[str]) -> str:
        head = ["", "beside", "times as fast", "of its peak memory", "on"]
        if match[2] == "gpu":
            head, rows = ["step", "goal", "result"], list(steps(root))
        elif match[2] == "processors":
            rows = processors(root)
        else:
            rows = [row for name in match[2].split() for row in comparisons(root, name)]
        return match[1] + markdown(head, rows) + match[4]

    def trained(match: re.Match[str]) -> str:
        return match[1] + markdown(TASK_HEAD, [task_row(root, task) for task in read_tasks(root)]) + match[2]

    def spread(match: re.Match[str]) -> str:
        record = read(root, f"{match[3]}/scale.json")
        if match[2] == "gpus":
            return match[1] + markdown(scale.HEAD, scale.on_gpus(scale.writing(record))) + match[4]
        head = [f"on {machine(record)}", "", "measured", "by formula", "ratio"]
        return match[1] + markdown(head, scale.beside(record)) + match[4]

    def deployed(match: re.Match[str]) -> str:
        found = [(name, read(root, f"{name}/{deployment.RECORD}")) for name in match[2].split()]
        rows = [
            [f"[{deployment.title(record)}]({RECORDS}/{name}/{deployment.RECORD})" if place == 0 else "", *row]
            for name, record in found
            for place, row in enumerate(map(deployment.cells, record["results"]))
        ]
        return match[1] + markdown(["model, machine", "engine", *deployment.HEAD[1:]], rows) + match[3]

    def proposed(match: re.Match[str]) -> str:
        found = {f"{RECORDS}/{name}": read(root, f"{name}/{texts.RECORD}") for name in match[2].split()}
        rows = [texts.cells(record, folder, machine(record)) for folder, record in found.items()]
        return match[1] + markdown(texts.HEAD, rows) + match[3]

    def compared(match: re.Match[str]) -> str:
        path = root / ablations.FOLDER / f"{match[2]}.yaml"
        ideas = ablations.read(path)
        record = ablations.read_record(path.with_suffix(".json"), ideas.score)
        return match[1] + markdown(ablations.HEAD, list(ablations.table(ideas, record))) + match[3]

    text = SCALE.sub(spread, text)
    text = ABLATIONS.sub(compared, text)
    text = ENGINES.sub(deployed, text)
    text = TEXTS.sub(proposed, text)
    text = TASKS.sub(trained, text)
    text = SEEDS.sub(
        lambda match: match[1] + over_seeds(root / "model_cards" / match[2], match[3], match[4] or "") + match[5], text
    )
    return TABLE.sub(table, text)


def pages(root: Path) -> list[Path]:
    """What says something that records say: the README, the pages about scale and ablations, and the cards that name
    the scores of several seeds."""
    single = [root / "README.md", root / "docs" / "SCALE.md", root / ablations.FOLDER / "README.md"]
    return [*filter(Path.exists, single), *sorted((root / "model_cards").glob("*/README.md"))]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


TASK_HEAD = ["task", "budget, FLOPs", "version 0.1", "aim", "now", "FLOPs", "parameters", "best published", "command"]


def read_tasks(root: Path) -> list[Task]:
    """Raises ValueError where the file is damaged, or says what no task has."""
    return valid(TypeAdapter(list[Task]), root / "model_cards" / "tasks.yaml", yaml.safe_load)


def valid(kind: TypeAdapter[Kind], file: Path, load: Callable[[str], Any]) -> Kind:
    """What is in a file. Raises ValueError where it cannot be loaded, or is nothing of the kind."""
    with reading(file):
        tree = load(file.read_text(encoding="utf-8"))
    try:
        return kind.validate_python(tree)
    except ValidationError as error:
        raise ValueError(f"README.md: {file}: {ablations.first_of(error)}") from error


def task_row(root: Path, task: Task) -> list[str]:
    """What came of its card, so many `times`, and what its first seed took, as far as it was counted."""
    folder = root / "model_cards" / task.card
    budget = f"{task.budget:.2e}"
    rest = [task.published, f"`{task.command}`"]
    if not folder.exists():
        return [task.task, budget, task.first, task.aim, "not run", "-", "-", *rest]
    lines = metrics.last(folder / "metrics.jsonl")
    flops, parameters = (lines.get("finished", {}).get(name) for name in ("flops", "parameters"))
    found = over_seeds(folder, task.score, task.measured, task.times)
    return [
        f"[{task.task}](model_cards/{task.card}/README.md)",
        budget,
        task.first,
        task.aim,
        f"[{found}](model_cards/{task.card}/{task.measured}.json)" if task.measured else found,
        f"{flops:.2e}" if flops else "-",
        f"{parameters:,}" if parameters else "-",
        *rest,
    ]


def scored(file: Path, score: str) -> float:
    """A score of the test, or else of the last evaluation, by the log of a run, or a mean over words or such as
    `evaluate --json` gives it. Raises ValueError where there is none."""
    if file.suffix == ".json":
        told = printed(file)
        found = told.mean or told.model_extra or {}
    else:
        found = outcome(file)
    value = found.get(score)
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"README.md: {file} has no {score}" + (f": {value!r}" if score in found else ""))
    return value


def printed(file: Path) -> Printed:
    """What `evaluate --json` said. Raises ValueError where the file is damaged, or says no such thing."""
    return valid(TypeAdapter(Printed), file, json.loads)


def over_seeds(card: Path, score: str, measured: str = "", times: float = 1.0) -> str:
    """`97.5 ± 0.3 over 3 seeds`, of what the runs themselves measured, or else of what `evaluate --json` said of each
    model, in files of that name. Raises ValueError where there is no such score, or it is not of each of these models,
    measured alike."""
    runs = files = logs(card)
    if measured:
        files = [card / f"{measured}.json", *sorted(card.glob(f"{measured}-[0-9]*.json"))]
        if not files[0].exists():
            raise ValueError(f"README.md: there is no {files[0]}")
        if len(files) != len(runs):
            raise ValueError(f"README.md: {card} has logs of {len(runs)} seeds, and {len(files)} of {measured}*.json")
        check_alike(files)
        check_models(files, runs)
    values = [times * scored(file, score) for file in files]
    if len(values) == 1 or not (spread := statistics.stdev(values)):
        return f"{statistics.mean(values):.4g}, " + ("one seed" if len(values) == 1 else f"{len(values)} seeds alike")
    decimals = max(0, 1 - math.floor(math.log10(spread)))  # two digits of the spread
    return f"{statistics.mean(values):.{decimals}f} ± {spread:.{decimals}f} over {len(values)} seeds"


def check_alike(files: list[Path]) -> None:
    """Raises ValueError where scores were not measured in one way, or not on the same sentences of each word. What a
    file does not say was off: there was no such option yet."""
    ways: list[dict[str, Any]] = []
    for file in files:
        told = printed(file)
        sentences = {word: each.test for word, each in told.words.items()}
        ways.append({**(told.options or told.decoding), "test sentences": sentences})
        for name in sorted(ways[0].keys() | ways[-1].keys()):
            expected, given = (way.get(name) or None for way in (ways[0], ways[-1]))
            if given != expected:
                raise ValueError(f"README.md: {file} has {name}: {given}, where {files[0].name} has {expected}")


def check_models(files: list[Path], runs: list[Path]) -> None:
    """Whether scores are of the models of these logs, each of another; older ones of both do not say of which weights.

    Raises ValueError where they cannot be, or a run has not finished.
    """
    lines = {log: metrics.last(log) for log in runs}
    if unfinished := [log for log, events in lines.items() if "finished" not in events]:
        raise ValueError(f"README.md: {unfinished[0]}: a run that has not finished")
    known = [events["finished"]["weights"] for events in lines.values() if "weights" in events["finished"]]
    silent = len(runs) - len(known)
    for file in files:
        weights = printed(file).weights
        if weights in known:
            known.remove(weights)
        elif silent:
            silent -= 1
        else:
            raise ValueError(f"README.md: {file} is of no model, or of no further one, that a log beside it is of")


def read(root: Path, name: str) -> dict[str, Any]:
    """A record. Raises ValueError when there is none."""
    path = root / RECORDS / name
    if not path.exists():
        raise ValueError(f"README.md: there is no {RECORDS}/{name}")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def comparisons(root: Path, name: str) -> Iterator[list[str]]:
    """Rows for the comparisons of a record: ours beside the best of the others."""
    link = f"{RECORDS}/{name}/benchmark.json"
    record = read(root, f"{name}/benchmark.json")
    where = machine(record)
    for result in record["results"]:
        ratios = {peer: ratio for peer, ratio in result.get("ratios", {}).items() if "speed" in ratio}
        also = ALSO.get((result["kind"], (result["shape"] or {}).get("family", "")))
        title = f"{result['name'] or result['kind']}, {result['title']}"
        for place, (peer, ratio) in enumerate(ratios.items()):  # the best is the first
            # Of whole runs there are few, each another way to do it.
            if place == 0 or peer == also or result["kind"] == "end-to-end":
                memory = number(ratio.get("memory"), 1, ".2f", "×")
                yield [f"[{title}]({link})", peer, f"{ratio['speed']['median']:.2f}×", memory, where]


def machine(record: dict[str, Any]) -> str:
    """What a record was made on: the device, or the kind of processor as far as it was written down, how ours
    multiplied there, and which version it was if not the present one."""
    about = record["environment"]
    if about["device"] != "cpu":
        return str(about["device"])
    is_first = "training.benchmark" in about["command"]  # where the benchmarks were in version 0.1
    is_onednn = record.get("onednn", "--no-onednn" not in about["command"])
    known = (about.get("processor"), about.get("instructions"), f"{about['threads']} CPU cores")
    return ", ".join([*filter(None, known), "oneDNN" if is_onednn else "MKL", *["version 0.1"] * is_first])


def processors(root: Path) -> list[list[str]]:
    """Rows for the comparisons of all records that were made on CPUs, those of one thing together; which comes first is
    as in the first record."""
    rows: dict[str, list[list[str]]] = {}
    for path in sorted((root / RECORDS).glob("*/benchmark.json"), reverse=True):
        record = read(root, f"{path.parent.name}/benchmark.json")
        if record["environment"]["device"] == "cpu" and record["results"][0]["kind"] in STEP_KINDS:
            for row in comparisons(root, path.parent.name):
                rows.setdefault(row[0].partition("]")[0], []).append(row)
    return [row for group in rows.values() for row in group]


STEP_KINDS = ("train", "generate", "embed")


def steps(root: Path) -> Iterator[list[str]]:
    """Rows for the steps of `benchmarks.gpu`, those that were not run too; of a run what its test says, the rest is in
    its card."""
    for step in STEPS.values():
        goals = "<br>".join(map(str, step.goals))
        record = read_record(root / RECORDS / "gpu", step.name)
        if record is None:
            yield [step.shows, goals, "not run"]
            continue
        figures = record["figures"].items() if record["is_complete"] else ()
        shown = [each for each in figures if each[0] not in LOGGED and isinstance(each[1], str | int | float)]
        values = "<br>".join(f"{name}{':' * isinstance(value, str)} {told(value)}" for name, value in shown)
        about = record["environment"]["device"] + ("" if record["is_complete"] else ", not complete")
        yield [f"[{step.shows}]({RECORDS}/gpu/{step.name}.json)", goals, f"{values or '-'}<br>({about})"]


# What a line of a run's log has beside scores.
LOGGED = {
    *("step", "epoch", "seconds", "targets", "tokens_per_second", "data_wait", "learning_rate", "gradient_norm"),
    *("memory_mb", "label_smoothing", "mfu"),
}


def told(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def cards(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The card of each recipe that was trained to its end on a GPU, and then the logs of its other seeds."""
    done: set[str] = set()
    for step in STEPS.values():
        record = read_record(root / RECORDS / "gpu", step.name)
        if record is None or sum("card" in command for command in record["commands"]) > 1:
            continue  # not run, or short runs beside each other, of a recipe that has a step of its own
        for command in record["commands"]:
            name, card = Path(command["words"][1]).stem, command.get("card", {})
            if not record["is_complete"] or "README.md" not in card:
                continue
            if name in done:
                seed = yaml.safe_load(card["recipe.yaml"])["seed"]
                yield name, {f"seed-{seed}.jsonl": card["metrics.jsonl"]}
                continue
            done.add(name)
            text = re.sub(rf"(?m)^(# |- name: ){re.escape(command['name'])}$", rf"\g<1>{name}", card["README.md"])
            yield name, card | {"README.md": text}


def write_card(folder: Path, card: dict[str, str]) -> None:
    """The files of a card, and its picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in card.items():
        write_text(folder / name, text)
    metrics.draw(metrics.read(folder / "metrics.jsonl"), folder / "curves.png")
    write_spread(folder)
