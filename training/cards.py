"""Cards of runs, which hold what they said of themselves and no weights; and whether their recipes give that again.

    python -m training verify CARD_FOLDER [--key value ...]

A card's folder, as `--model_card` leaves it, holds `recipe.yaml`, `environment.json`, `README.md`, `curves.png` and
`metrics.jsonl` of a run, and the metrics of its other seeds as `seed-2.jsonl` and so on. Of each score they have a mean
and a spread, from which follows where a further seed should end: of three, within 4.97 standard deviations, so few tell
little of how far seeds lie apart, and those of one kind of processor less of another's. What `evaluate` gives of
finished models, as the senses of words, it does not measure. `--overwrite` lets it begin anew in the folder of an
earlier try.
"""

import json
import math
import os
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, count
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from hf_scratch_transformer.files import write_text

from .metrics import last, public, student
from .recipe import Recipe, changes, read_yaml, resolved
from .sections import RecipeError

COPIED = ("model/README.md", "curves.png", "metrics.jsonl")  # of a run
FILES = (*(Path(name).name for name in COPIED), "recipe.yaml", "environment.json")
SEEDS = "seed-[0-9]*.jsonl"
OF_A_RUN = ("seed", "output_dir", "overwrite", "resume", "model_card", "push_to_hub", "trackers")  # not of its result
SPREAD = re.compile(r"<!-- seeds -->\n.*?<!-- end -->\n\n", re.DOTALL)
# Of the scores those that tasks are about; the others follow from them, and each more is outside once in twenty times.
JUDGED = ("loss", "bleu", "exact_match", "masked_accuracy", "flops", "corpus")
FLOPS = 0.02  # by how much the training of seeds may differ: batches by length are no two alike


def check(folder: Path, source: Path, run: Path) -> None:
    """Whether the card of a run, whose recipe is in the file `source`, may be written into a folder: a new one, or that
    of an earlier card. Raises RecipeError otherwise."""
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"model_card: {folder} is a file; give a folder")
    if folder.resolve() == run.resolve():
        raise RecipeError(f"model_card: {folder} is output_dir; give another folder")
    present = [name for name in FILES if os.path.lexists(folder / name)]
    if present and (
        "metrics.jsonl" not in present or source.resolve() in {(folder / name).resolve() for name in FILES}
    ):
        raise RecipeError(f"model_card: {folder} holds {', '.join(present)} of no card, which it would replace")


def copy(run: Path, folder: Path) -> None:
    """What a run says of its model, for a place that holds no weights: `model_cards/` of this project. The card of the
    same recipe from another seed stays, and gains this one; that of another recipe goes."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        name: public(yaml.safe_load((run / name).read_text(encoding="utf-8")))
        for name in ("recipe.yaml", "environment.json")
    }
    recipe, card = entries["recipe.yaml"], folder / "recipe.yaml"
    before = yaml.safe_load(card.read_text(encoding="utf-8")) if card.exists() else {}
    is_known = bool(before) and not any(changes(_of_result(before), _of_result(recipe), "recipe"))
    if is_known and before.get("seed") != recipe.get("seed"):
        shutil.copy(run / "metrics.jsonl", folder / f"seed-{recipe.get('seed')}.jsonl")
    else:
        for file in () if is_known else folder.glob(SEEDS):
            file.unlink()
        for name in COPIED:
            shutil.copy(run / name, folder)
        write_text(card, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True))
        write_text(folder / "environment.json", json.dumps(entries["environment.json"], indent=1) + "\n")
    write_spread(folder)


def verify(words: Sequence[str], train: Callable[[Recipe, Path], None]) -> list[str]:
    """Train the recipe of the card in the folder `words[0]` by `train`, with the overrides after it, and compare.

    Returns:
        What is not as the card says, of `JUDGED`, the score that the recipe chooses weights by among them.

    Raises:
        RecipeError: there is no card with a spread, one of its seeds is there twice, they are of different corpora, or
            its recipe or data cannot be used.
    """
    if not words or words[0].startswith("-"):
        raise RecipeError("verify: name the folder of a model card, which holds recipe.yaml and metrics.jsonl")
    folder, source = Path(words[0]), Path(words[0], "recipe.yaml")
    for file in (folder, *(folder / name for name in ("recipe.yaml", "metrics.jsonl"))):
        if not file.exists():
            raise RecipeError(f"verify: there is no {file}; a model card's folder has recipe.yaml and metrics.jsonl")
    before = outcomes(folder)
    if len(before) < 2:
        raise RecipeError(
            f"{folder} has metrics of {len(before)} run(s), which have no spread: train its recipe from other seeds "
            f"with --model_card {folder}"
        )
    if any(one == other for one, other in combinations(before, 2)):
        raise RecipeError(f"{folder}: the metrics of two of its seeds are the same: one is a copy, and has no spread")
    if wrong := [name for each in before for name, v in each.items() if isinstance(v, float) and not math.isfinite(v)]:
        raise RecipeError(f"{folder}: {wrong[0]} of one of its seeds is not finite: that run has diverged")
    if len({each["corpus"] for each in before if "corpus" in each}) > 1:
        raise RecipeError(f"{folder}: its seeds were trained on different corpora, by the SHA-256 in their metrics")
    tree, problems = read_yaml(source)
    tree |= {"output_dir": f"runs/verify_{folder.resolve().name}", "model_card": None, "push_to_hub": None}
    recipe = resolved(str(source), tree, words[1:], problems)
    if not any(word.partition("=")[0] == "--seed" for word in words):
        taken = {file.name for file in folder.glob(SEEDS)}
        seed = next(n for n in count(recipe.seed + 1) if f"seed-{n}.jsonl" not in taken)
        recipe = recipe.model_copy(update={"seed": seed})
    train(recipe, source)
    after = outcome(Path(recipe.output_dir) / "metrics.jsonl")
    rows = list(compared(before, after))
    table = Table("", f"card, {len(before)} seeds", "expected", f"seed {recipe.seed}", "", title=str(folder))
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    judged = {recipe.evaluation.best_metric, *JUDGED}
    wrong = [name for name, *_, verdict in rows if name in judged and verdict in ("outside", "another")]
    if not wrong:
        known = ", ".join(name for name, *_, verdict in rows if name in judged and not verdict)
        print(f"{folder}: as the card says, of {known}")
    elif (there := _machine(folder)) != (here := _machine(Path(recipe.output_dir))):
        print(f"{folder} was trained on {there}, this on {here}, where other numbers may come of it", file=sys.stderr)
    return wrong


def logs(folder: Path) -> list[Path]:
    """Metrics of the seeds of a card, of that which its other files are about first."""
    return [folder / "metrics.jsonl", *sorted(folder.glob(SEEDS))]


def outcomes(folder: Path) -> list[dict[str, Any]]:
    """What came of each seed of a card."""
    return [outcome(file) for file in logs(folder)]


def outcome(file: Path) -> dict[str, Any]:
    """Scores of the test, or else of the last evaluation, and what the training took. Raises RecipeError where a run
    has not finished, or its log is damaged."""
    try:
        events = last(file)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    scores = events.get(_judge(file))
    if scores is None or not events.keys() & {"test", "finished"}:
        raise RecipeError(f"{file}: a run that has not {'been measured' if scores is None else 'finished'}")
    took = events.get("finished", {})  # which fine-tuning has not counted
    named = {name: value for name, value in scores.items() if isinstance(value, float) and name != "seconds"}
    found = {name: took[name] for name in ("flops", "corpus") if took.get(name)}
    for name, kind in {"flops": int | float, "corpus": str}.items():
        if name in found and not isinstance(found[name], kind):
            raise RecipeError(f"{file}: finished: {name}: {found[name]!r} is none")
    return named | found


def _judge(file: Path) -> str:
    """The event whose scores are those of a run: its test, or else its last evaluation."""
    return "test" if "test" in last(file) else "evaluation"


def compared(before: Sequence[Mapping[str, Any]], after: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """For each number: its name, that of the card, where it was expected, what it is, and what is wrong with that."""
    for name, value in after.items():
        known = [each[name] for each in before if name in each]
        if name == "corpus":
            verdict = "unknown" if not known else "" if value in known else "another"
            yield name, known[0][:8] if known else "-", "the same", value[:8], verdict
        elif len(known) < 2:
            yield name, "-", "-", f"{value:.4g}", "unknown"
        else:
            mean, spread = statistics.mean(known), statistics.stdev(known)
            reach = FLOPS * mean if name == "flops" else expected(spread, len(known))
            is_inside = math.isclose(value, mean, rel_tol=1e-9) or abs(value - mean) <= reach
            bounds = f"{mean - reach:.4g} to {mean + reach:.4g}"
            yield name, f"{mean:.4g} ± {spread:.2g}", bounds, f"{value:.4g}", "" if is_inside else "outside"


def expected(spread: float, seeds: int) -> float:
    """How far from the mean of so many seeds, of this standard deviation, another is in 95 of 100 cases."""
    return student(seeds) * spread * math.sqrt(1 + 1 / seeds)


def _machine(folder: Path) -> str:
    """On what a run was trained, as far as it is written down."""
    with suppress(OSError, ValueError):
        about = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return ", ".join(str(about[name]) for name in ("device", "processor", "instructions") if about.get(name))
    return "what is not written down"


def _of_result(recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in OF_A_RUN}


def write_spread(folder: Path) -> None:
    """Of a card: the scores of all seeds, into README.md before the section on training."""
    path = folder / "README.md"
    card = SPREAD.sub("", path.read_text(encoding="utf-8"))
    if len(logs(folder)) > 1:
        found = outcomes(folder)
        names = [name for name in found[0] if all(name in each for each in found) and name != "corpus"]
        rows = [(name, [each[name] for each in found]) for name in names]
        lines = [f"| {name} | {statistics.mean(v):.5g} | {statistics.stdev(v):.2g} |" for name, v in rows]
        split = {"test": "the test", "evaluation": "validation"}[_judge(logs(folder)[0])]
        head = [f"| on {split} | mean | standard deviation |", "| --- | --- | --- |"]
        section = "\n".join(["<!-- seeds -->", f"## {len(found)} seeds", "", *head, *lines, "<!-- end -->", "", ""])
        start = re.search(r"^## (Training|Recipe)$|\Z", card, re.MULTILINE)
        card = card[: start.start()] + section + card[start.start() :] if start else card
    write_text(path, card)
