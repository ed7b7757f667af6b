"""Ideas about a recipe, each measured alone over several seeds, beside the recipe that it changes.

    python -m benchmarks ablations FILE [--only IDEA ...] [--seeds 1 ...] [--processes 2]
        [--senses FOLDER] [--key value ...]

FILE, one of `benchmarks/ablations/*.yaml`, names a recipe, the score that ideas are judged by, what all runs have in
common (a held-out part of the training text as their test: nothing is chosen on a test set), and the ideas: what each
changes in the recipe, or in that of another idea that it is `after`; `variation` is one of `benchmarks/variations.py`,
for what no option of a recipe says. `--data.path FOLDER`, `--data.cache` and `--data.workers` hold for all.

The file's record, the same name as `.json`, receives what came of every run, and the recipe with what all have in
common and the labelled sentences; runs that it has are not repeated, and none is added to those of another recipe.
Several run at once, with an equal share of the cores each. `python -m benchmarks report` makes tables of the records.
"""

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, create_model
from tqdm import tqdm

from hf_scratch_transformer.files import write_text
from hf_scratch_transformer.insight import senses
from training import metrics
from training.cards import outcome
from training.folder import cores
from training.recipe import changes as differences
from training.recipe import parse, scores

from . import variations
from .gpu import terminable
from .luggage import environment_of
from .preparation import ran

FOLDER = "benchmarks/ablations"
OF_A_RUN = ("seed", "output_dir", "resume", "overwrite")  # each run's own
OF_A_MACHINE = ("data.path", "data.cache", "data.workers")  # which are no part of what is measured
UNLIKE = 1.25  # times the FLOPs of what an idea is beside, from which on the table says so
HEAD = ["idea", "changes", "score", "gain", "FLOPs", "parameters", ""]
Title = Annotated[str, Field(pattern=r"^[^|\n]*$")]  # of a row in it


class Run(BaseModel):
    """What a record must have of a run, for a table; beside these, the scores."""

    model_config = ConfigDict(extra="allow", strict=True)

    seed: int
    changes: dict[str, Any]
    flops: FiniteFloat = Field(gt=0)
    parameters: int
    processor: str


class Idea(BaseModel):
    """What is changed, and in what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Title
    after: str = ""  # another idea; by default the recipe itself
    changes: dict[str, Any] = {}
    source: Title = ""  # where it comes from


class Ablations(BaseModel):
    """A file of ideas."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    score: str  # of the test of each run
    times: FiniteFloat = Field(1.0, gt=0)  # in the table: ln 2 for nats of bits
    is_rising: bool = False  # more of it is better
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]]
    common: dict[str, Any] = {}
    ideas: list[Idea] = Field(min_length=1)

    def idea(self, name: str) -> Idea:
        """Raises ValueError where there is none of this name."""
        for idea in self.ideas:
            if idea.name == name:
                return idea
        raise ValueError(f"{name!r} is no idea of the file; it has {', '.join(idea.name for idea in self.ideas)}")

    def changes(self, idea: Idea) -> dict[str, Any]:
        """All that it changes in the recipe, with what those before it do."""
        before = self.changes(self.idea(idea.after)) if idea.after else {}
        return before | idea.changes


def main(argv: Sequence[str]) -> None:
    """Run what is not in the record yet. Raises ValueError for a file that says nothing of the kind, and where a run
    fails; what is done then is in the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ablations", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", help="these ideas (all)")
    parser.add_argument("--seeds", nargs="+", type=int, help="these seeds of the file (all)")
    parser.add_argument(
        "--senses", help="labelled sentences: macro_f1 of each model on those of training, bare, one left out"
    )
    parser.add_argument("--processes", type=int, default=1, help="at once (%(default)s)")
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.processes < 1:
        raise ValueError(f"--processes {arguments.processes}: must be 1 or more")
    for key in (word[2:].partition("=")[0] for word in overrides if word.startswith("--")):
        if key not in OF_A_MACHINE:  # the record would have it as a run of the file's
            raise ValueError(f"--{key}: is for `common` of a file of its own; here may be {', '.join(OF_A_MACHINE)}")
    ablations = read(arguments.file)
    if others := sorted({*(arguments.seeds or ())} - {*ablations.seeds}):
        raise ValueError(f"--seeds {others[0]}: {arguments.file} has {', '.join(map(str, ablations.seeds))}")
    ideas = [ablations.idea(name) for name in arguments.only] if arguments.only else ablations.ideas
    if ablations.score == "macro_f1" and arguments.senses is None:
        raise ValueError(f"{arguments.file}: score: macro_f1 is of the senses of words; give --senses FOLDER")
    for idea in ideas:  # before the first of them is run for an hour
        check(ablations, idea, overrides)
    path = arguments.file.with_suffix(".json")
    record = read_record(path, ablations.score)
    recipe = unchanged(ablations, overrides, arguments.senses)
    check_recipe(record, recipe, path)
    wanted: list[dict[str, Any]] = [
        {"seed": seed, "changes": changes}
        for idea in ideas
        for changes in [ablations.changes(idea)]
        for seed in ablations.seeds
        if found(record, changes, seed) is None and seed in (arguments.seeds or ablations.seeds)
    ]
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    machine = metrics.public(environment_of(device, "benchmarks"))
    processor = machine["processor"] if device.type == "cpu" else machine["device"]
    about = {name: machine[name] for name in ("commit", "instructions")}
    about |= {"processor": processor, "torch": torch.__version__}
    threads = max(1, cores() // arguments.processes)
    failed: list[ValueError] = []
    rescued: dict[str, Any] = {"runs": []}
    with (
        terminable(),
        ThreadPoolExecutor(arguments.processes) as pool,
        tqdm(total=len(wanted), unit="run") as bar,
    ):
        runs = {
            pool.submit(trained, ablations, run["changes"], run["seed"], overrides, threads, arguments.senses): run
            for run in wanted
        }
        try:
            for done in as_completed(runs):
                bar.update()
                try:
                    result = done.result()
                except ValueError as error:  # which is no reason to lose what the others come to
                    failed.append(error)
                    continue
                run = runs[done] | result | about
                try:
                    kept = read_record(path, ablations.score)  # another process may have written since
                    check_recipe(kept, recipe, path)
                    check_text(kept, run)
                except ValueError as error:  # or a hand: that is left alone, and nothing of this is lost
                    rescued["runs"].append(run)
                    place = path.with_suffix(f".rescued-{os.getpid()}.json")
                    write_text(place, json.dumps(rescued, indent=1) + "\n")
                    failed.append(ValueError(f"{error}; what was run is in {place}"))
                    continue
                record = {"recipe": recipe} | kept
                record["runs"].append(run)
                write_text(path, json.dumps(record, indent=1) + "\n")
                bar.set_postfix({ablations.score: f"{result[ablations.score]:.4g}"})
        except BaseException:  # a signal, for one: what runs ends too, and takes its folder with it
            pool.shutdown(wait=False, cancel_futures=True)
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    child.terminate()
            raise
    if failed:
        raise failed[0]
    for row in table(ablations, record):
        print("  ".join(row))


def read(path: Path) -> Ablations:
    """A file of ideas. Raises ValueError where it is none."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        ablations = Ablations.model_validate(tree)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_of(error)}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    names = [idea.name for idea in ablations.ideas]
    if len({*ablations.seeds}) < max(2, len(ablations.seeds)):
        raise ValueError(f"{path}: seeds: {ablations.seeds} have no spread; give two or more, each once")
    for changes in (ablations.common, *(idea.changes for idea in ablations.ideas)):
        if "variation" in changes:
            variations.check(changes["variation"])
        if own := [name for name in OF_A_RUN if name in changes]:
            raise ValueError(f"{path}: {own[0]}: {changes[own[0]]!r} is each run's own; seeds are those of `seeds`")
    for place, idea in enumerate(ablations.ideas):
        if idea.name in names[:place] or (idea.after and idea.after not in names[:place]):
            raise ValueError(f"{path}: {idea.name!r} must be new, and come after {idea.after!r}")
    return ablations


def check(ablations: Ablations, idea: Idea, overrides: Sequence[str]) -> None:
    """Raises ValueError where training refuses its recipe, or measures no such score of it."""
    try:
        recipe = parse([ablations.recipe, *words(ablations.common | ablations.changes(idea)), *overrides])
    except ValueError as error:
        raise ValueError(f"{idea.name!r}: {error}") from error
    measured = ("macro_f1", *scores(recipe.objective))
    if ablations.score not in measured:
        raise ValueError(f"score: {ablations.score} is none of what a test gives: {', '.join(measured)}")


def words(changes: Mapping[str, Any]) -> list[str]:
    """Of a command line that changes a recipe so; a variation is part of the command itself."""
    return [word for key, value in changes.items() if key != "variation" for word in (f"--{key}", said(value))]


def read_record(path: Path, score: str) -> dict[str, Any]:
    """The runs so far, by the same name. Raises ValueError for something else, or a run without its score."""
    if not path.exists():
        return {"runs": []}
    scored: Any = create_model("Scored", __base__=Run, **{score: (FiniteFloat, ...)})  # type: ignore[call-overload]
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        create_model("Record", runs=(list[scored], ...), recipe=(dict[str, Any], {})).model_validate(record)
    except ValidationError as error:
        raise ValueError(f"{path} is no record of runs; mend or remove it ({first_of(error)})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no record of runs; mend or remove it ({error})") from error
    return record


def first_of(error: ValidationError) -> str:
    """What is wrong, and where."""
    wrong = error.errors()[0]
    return f"{'.'.join(map(str, wrong['loc'])) or 'all of it'}: {wrong['msg']}"


def unchanged(ablations: Ablations, overrides: Sequence[str], labelled: str | None = None) -> dict[str, Any]:
    """What all runs have in common, the test and the labelled sentences, too.

    Raises ValueError where training refuses it without any idea, or there are no such sentences.
    """
    recipe = parse([ablations.recipe, *words(ablations.common), *overrides])
    common = recipe.identity() | {"variation": ablations.common.get("variation"), "senses": digest(labelled)}
    del common["seed"]  # the file has its own
    data = common["data"] | recipe.data.model_dump(mode="json", include={"splits": True})  # of which identity has none
    return common | {"data": data, "parts": [list(source.split) for source in recipe.data.sources]}


def digest(labelled: str | None) -> str | None:
    """SHA-256 of the labelled sentences of training in a folder. Raises ValueError where there are none."""
    if labelled is None:
        return None
    training = {word: examples.train for word, examples in senses.read(labelled).items()}
    return hashlib.sha256(repr(sorted(training.items())).encode()).hexdigest()


def check_recipe(record: Mapping[str, Any], recipe: dict[str, Any], path: Path) -> None:
    """Raises ValueError where the runs in the record are of another recipe, or of one that it does not say."""
    if record["runs"] and "recipe" not in record:
        raise ValueError(f"{path} has runs, and no recipe that they are of; move it away")
    known = record.get("recipe", recipe)
    if other := [line for _, line in differences({"recipe": known}, {"recipe": recipe})]:
        raise ValueError(f"{path} has runs of another recipe ({'; '.join(other[:5])}): keep what it was in `common`")


def check_text(record: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raises ValueError where a run in the record was trained on other tokens, though neither what is read, nor how it
    is tokenised, nor the variation was changed between them."""

    def reading(changes: Mapping[str, Any]) -> dict[str, Any]:
        return {key: v for key, v in changes.items() if key.startswith(("data.", "tokenizer.", "variation"))}

    for other in record["runs"]:
        read_alike = reading(other["changes"]) == reading(run["changes"])
        if read_alike and "corpus" in other.keys() & run.keys() and other["corpus"] != run["corpus"]:
            raise ValueError(
                f"data.path: its training tokens are {run['corpus'][:8]}… (SHA-256), where seed {other['seed']} of "
                f"{other['changes'] or 'the recipe'} in the record has {other['corpus'][:8]}…: give the same text"
            )


def trained(
    ablations: Ablations,
    changes: dict[str, Any],
    seed: int,
    overrides: Sequence[str],
    threads: int,
    senses: str | None = None,
) -> Any:
    """What came of a run of the recipe, and how its model tells senses apart in the bare training sentences of that
    folder. Raises ValueError with its last line where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        name = f"{', '.join(f'{key}: {said(value)}' for key, value in changes.items()) or 'the recipe'}, seed {seed}"
        named = ablations.common | changes | {"seed": seed, "output_dir": folder + "/run"}
        program = ["benchmarks", "variation", named["variation"]] if "variation" in named else ["training"]
        whole = [sys.executable, "-m", *program, ablations.recipe, *words(named), *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        ran(whole, name, environment=environment)
        log = Path(folder, "run", "metrics.jsonl")
        last = metrics.last(log)["finished"]
        results = outcome(log)
        if senses is not None:
            how = ["--senses", senses, "--leave-one-out", "--no-special-tokens", "--json"]
            evaluate = [sys.executable, "-m", "training", "evaluate", folder + "/run/model", *how]
            told = ran(evaluate, name, environment=environment)
            results |= json.loads(told)["mean"]
        if ablations.score not in results:  # where the recipe leaves out what its kind has
            raise ValueError(f"{name}: score: {ablations.score} is none of what it gave: {', '.join(results)}")
        return results | {name: last[name] for name in ("parameters", "targets", "step", "seconds")}


def said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def found(record: dict[str, Any], changes: dict[str, Any], seed: int) -> dict[str, Any] | None:
    """The run of these changes that a record has."""
    runs: list[dict[str, Any]] = record["runs"]
    return next((run for run in runs if run["changes"] == changes and run["seed"] == seed), None)


def table(ablations: Ablations, record: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each idea that was run, in the order of `HEAD`.

    What gains less than the spread of seeds, the larger standard deviation of both, is said not to, and what takes many
    more FLOPs or far fewer, how many times as many; of what not all seeds were run of, how many were.
    """
    followed = {idea.after for idea in ablations.ideas}

    def runs_of(changes: dict[str, Any]) -> list[dict[str, Any]]:
        return [run for seed in ablations.seeds if (run := found(record, changes, seed))]

    for idea in ablations.ideas:
        done = runs_of(ablations.changes(idea))
        if not done:
            continue
        known = runs_of(ablations.changes(ablations.idea(idea.after)) if idea.after else {})
        mean, spread = spread_of(done, ablations.score, ablations.times)
        fewer, of = (done, "") if len(done) < len(ablations.seeds) else (known, " of what it is beside")
        gain, verdict = "", f"{len(fewer)} of {len(ablations.seeds)} seeds{of}"
        if len(done) == len(known) == len(ablations.seeds):
            old, old_spread = spread_of(known, ablations.score, ablations.times)
            gained = (mean - old) * (1 if ablations.is_rising else -1)
            within = max(spread, old_spread)
            verdict = "gains" if gained > within else "loses" if gained < -within else "no gain"
            gain, verdict = (f"{gained:+z.4f}", verdict) if idea.changes else ("", "")
            if not 1 / UNLIKE < (ratio := spread_of(done, "flops")[0] / spread_of(known, "flops")[0]) < UNLIKE:
                verdict += f", at {ratio:.2g} times the FLOPs"
            if {run["processor"] for run in known} != {run["processor"] for run in done}:
                processors = " and ".join(sorted({run["processor"].split("(")[0].strip() for run in done}))
                verdict += f" (on {processors}, unlike what it is beside)"
        role = "built on" if idea.name in followed else ""
        yield [
            idea.name + (f" ({idea.source})" if idea.source else ""),
            ", ".join(f"`{key}: {said(value)}`" for key, value in idea.changes.items())
            + (f", after *{idea.after}*" if idea.after else ""),
            f"{mean:.4f}" + (f" ± {spread:.4f}" if len(done) > 1 else ""),
            gain,
            f"{spread_of(done, 'flops')[0]:.2e}",
            f"{done[0]['parameters']:,}",
            ", ".join(filter(None, (verdict, role))),
        ]


def spread_of(runs: Sequence[dict[str, Any]], name: str, times: float = 1.0) -> tuple[float, float]:
    """Mean and standard deviation of a score over seeds."""
    values = [times * run[name] for run in runs]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
