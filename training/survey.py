"""A survey of somebody's text, before anything is decided: its splits, rows, signs, repetitions."""

import codecs
import glob
import mimetypes
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_scratch_transformer.files import possible_path

from . import sources
from .corpus import describe
from .recipe import COLUMNS, Data
from .sections import RecipeError
from .sources import AGAIN, PACKED, Columns, clean, read

ROLES = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"), "test": ("test", "eval")}
# Parts of what is not parted yet, by the roles that are there.
PARTS: dict[frozenset[str], dict[str, tuple[str, str]]] = {
    frozenset(): {"train": ("", "[:90%]"), "validation": ("", "[90%:95%]"), "test": ("", "[95%:]")},
    frozenset({"train"}): {
        "train": ("train", "[:90%]"),
        "validation": ("train", "[90%:95%]"),
        "test": ("train", "[95%:]"),
    },
    frozenset({"train", "test"}): {"train": ("train", "[:95%]"), "validation": ("train", "[95%:]")},
    frozenset({"train", "validation"}): {"validation": ("validation", "[:50%]"), "test": ("validation", "[50%:]")},
}
ENOUGH = 100_000_000  # characters, after which a survey ends
OFTEN = 0.05  # of the lines of a text are empty, where paragraphs are
MANY = 20  # files, of which each may be a row: of fewer, a twentieth is none
BEGINNING = 2**16  # bytes of a file, by which it is seen whether it is text
LARGE = 200_000_000  # bytes of a file, which is not read as one row


@dataclass
class Survey:
    """What a text is like: of the training split, or of as much of it as was read."""

    data: dict[str, Any]  # path, splits, columns, sample_by of a recipe
    notes: dict[str, str] = field(default_factory=dict)  # why, by the names of these
    rows: int = 0
    refused: Counter = field(default_factory=Counter)  # rows that cannot be used, by what is wrong with them
    characters: Counter = field(default_factory=Counter)  # by column
    bytes: int = 0
    words: int = 0
    longest: int = 0  # words of a row
    signs: Counter = field(default_factory=Counter)
    is_whole: bool = True

    @property
    def size(self) -> int:
        """Characters of all columns."""
        return sum(self.characters.values())

    def scripts(self) -> str:
        """The alphabets of its letters, most frequent first: `Latin 98%, Greek 2%`."""
        letters: Counter = Counter()
        for sign, count in self.signs.items():
            if sign.isalpha():
                letters[unicodedata.name(sign, "unnamed").split()[0].split("-")[0].capitalize()] += count
        total = sum(letters.values())
        shown = [f"{name} {count / total:.0%}" for name, count in letters.most_common(3) if count >= 0.005 * total]
        return ", ".join(shown) or "no letters"

    def lines(self) -> Iterator[str]:
        """What a person would want to know."""
        yield f"read: {', '.join(self.data['splits']['train'])}"
        yield f"{self.rows:,} rows, {self.words:,} words, {self.size:,} characters, {self.bytes / 1e6:,.1f} MB"
        if not self.is_whole:
            yield f"read as far as that; there is more of it than {ENOUGH / 1e6:,.0f} million characters"
        if len(self.characters) > 1:
            yield "characters by column: " + ", ".join(f"{name} {n:,}" for name, n in self.characters.items())
        yield f"{len(self.signs):,} different signs; letters: {self.scripts()}"
        if self.refused:
            yield f"left out: {describe(self.refused)}"


def survey(path: str, objective: str, columns: Sequence[str] = ()) -> Survey:
    """Look at the text in a file or a folder; `columns` are those that are meant, in the order of the objective's.

    Raises RecipeError when there is none, or it cannot be seen which of the columns are meant.
    """
    try:
        where = Path(path := os.path.expanduser(possible_path(path)))
    except ValueError as error:
        raise RecipeError(f"--data: {error}") from error
    found = Survey({"path": path})
    if not path or not where.exists():
        raise RecipeError(f"--data: {path or 'nothing'} is not there; give a file or a folder of text")
    names = COLUMNS[objective]
    if columns and len(columns) != len(names):
        raise RecipeError(f"--columns: {objective} needs {len(names)}, {' and '.join(names)}; got {' '.join(columns)}")
    if len({*columns}) < len(columns):
        raise RecipeError(f"--columns: {' '.join(columns)}: name another column for each of {' and '.join(names)}")
    parallel = _parallel(where) if len(names) > 1 else {}
    languages = columns or sorted(parallel, key=lambda ending: (ending != "en", ending))
    if len(names) > 1 and not columns and len(parallel) > 2:
        raise RecipeError(f"--columns: text in {', '.join(parallel)} is there; name two of them, the source first")
    found.data["columns"] = dict(zip(names, languages or names, strict=True))
    stem, there = _stem(where, parallel.values()), _roles(found.data)
    if not parallel or columns and not set(columns) <= parallel.keys():
        found.data["columns"] = _columns(_first(found.data, there, stem), names, columns)
    found.data["splits"], found.notes["splits"] = _splits(there, stem)
    found.data["sample_by"], found.notes["sample_by"] = _unit(found.data, objective)
    _read(found)
    if not found.rows:
        raise RecipeError(f"--data: {path} holds no row that can be used: {describe(found.refused) or 'it is empty'}")
    for role, names in found.data["splits"].items():
        try:
            next(read(_data(found.data, splits={"train": names}), "train"), None)
        except RecipeError as error:
            said = str(error).replace("data.splits.train", role)
            advice = f"give more, or a file called {role} ({', '.join(names)}: {said})"
            raise RecipeError(f"--data: {path} gives no text for {role}: {advice}") from error
    return found


def _data(given: Mapping[str, Any], **others: Any) -> Data:
    tree = {"splits": {"train": ["train"]}, "deduplicate": True, **given, **others}
    return Data(**tree | {"columns": {name: (column,) for name, column in tree["columns"].items()}})


def _split(data: Mapping[str, Any], name: str) -> Data:
    return _data(data, splits={"train": [name]})


def _parallel(where: Path) -> dict[str, set[str]]:
    """Parallel text in a folder: {ending: stems}, of stems that every ending has."""
    found: dict[str, set[str]] = {}
    for file in where.glob("*") if where.is_dir() else ():
        name = next((file.name.removesuffix(end) for end in PACKED[1:] if file.name.endswith(end)), file.name)
        stem, _, ending = name.rpartition(".")
        if stem and not file.name.startswith(".") and file.is_file() and ending not in sources.BUILDERS:
            found.setdefault(ending, set()).add(stem)
    shared = [
        ending for ending, stems in found.items() if any(stems & other for e, other in found.items() if e != ending)
    ]
    return {ending: found[ending] for ending in sorted(shared)}


def _stem(where: Path, parallel: Any) -> str:
    """What the text goes by that is not parted yet: any name for a file; of a folder the files of that kind of which
    there is most, or the first that are parallel."""
    if where.is_file():
        return "text"
    if stems := sorted(set.intersection(*parallel)) if parallel else []:
        return max(stems, key=lambda stem: sum(file.stat().st_size for file in where.glob(f"{glob.escape(stem)}.*")))
    sizes: Counter = Counter()
    kinds: dict[str, list[Path]] = {}
    for file in where.rglob("*"):
        inside = file.relative_to(where)
        if file.is_file() and not any(part.startswith(".") for part in inside.parts) and may_be_text(file):
            packed = file.suffix if file.suffix in PACKED else ""
            ending = Path(file.name.removesuffix(packed)).suffix + packed
            sizes[ending] += file.stat().st_size
            kinds.setdefault(ending, []).append(inside)
    if not sizes:
        raise RecipeError(f"--data: {where} holds no file of text")
    (ending, _), *_ = sizes.most_common(1)
    return str(kinds[ending][0]) if len(kinds[ending]) == 1 else f"**/*{ending}"


def may_be_text(file: Path) -> bool:
    """Whether a file is not plainly something else: neither one that a builder reads, nor UTF-8 from its beginning."""
    if file.suffix in PACKED[1:] or file.suffix.removeprefix(".") in sources.BUILDERS:
        return True
    kind = mimetypes.guess_type(file.name)[0] or ""
    with file.open("rb") as opened:
        start = opened.read(BEGINNING)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start and not kind.startswith(("image/", "audio/", "video/", "font/", "application/pdf"))


def _roles(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """The splits that are there under one of their usual names, or have it within their own, as `wiki.train.tokens`."""
    where = Path(data["path"])
    if not where.is_dir():
        return {}
    found = {
        role: [name for name in names if sources.local_files(_split(data, name))][:1] for role, names in ROLES.items()
    }
    sizes = {file: file.stat().st_size for file in sorted(where.rglob("*")) if file.is_file()}
    whole = sum(sizes.values())
    named = {file for names in found.values() for name in names for file in sources.local_files(_split(data, name))}
    # Beside a folder of programs, a file called train is one of many. (The same text may be there in other forms, too.)
    if 10 * sum(file.stat().st_size for file in named if file.is_file()) <= whole:
        found = {}
    if not any(found.values()):
        parts = {role: [file for file in sizes if {*re.split("[._-]", file.name)} & {*ROLES[role]}] for role in ROLES}
        # Of a folder of programs, train.py is one of many.
        if 2 * sum(sizes[file] for files in parts.values() for file in files) > whole:
            # Shards have one ending; another is the same text in another form.
            found = {
                role: [str(file.relative_to(where)) for file in files if file.suffix == files[0].suffix]
                for role, files in parts.items()
            }
    return {role: names for role, names in found.items() if names}


def _splits(there: dict[str, list[str]], stem: str) -> tuple[dict[str, list[str]], str]:
    if "train" not in there:
        there = {}
    missing = [role for role in ROLES if role not in there]
    cut = {
        role: [f"{each}{part}" for each in (there[name] if name else [stem])]
        for role, (name, part) in PARTS.get(frozenset(there), {}).items()
    }
    why = f"parts, since nothing there is called {' or '.join(missing)}" if missing else "as they are named there"
    return {**there, **cut}, why


def _first(data: Mapping[str, Any], there: Mapping[str, list[str]], stem: str) -> Columns:
    """The first rows, with all their columns."""
    return sources.first_rows(_data(data, splits={"train": there.get("train", [stem])}), "train")


def _columns(rows: Columns, names: Sequence[str], asked: Sequence[str]) -> dict[str, str]:
    """The columns that hold the text: those asked for, or those named as the objective names them, or the longest."""
    if not any(rows.values()):
        raise RecipeError("--data: it is empty: there is no row of text")
    lengths = {
        name: sum(map(len, texts)) / len(texts)
        for name, values in rows.items()
        # Nothing in a row is no text; the row is left out later.
        if (texts := [value for value in values if value is not None]) and all(isinstance(text, str) for text in texts)
    }
    if missing := [name for name in asked if name not in lengths]:
        raise RecipeError(f"--columns: no text in {' or '.join(missing)}; there is in {', '.join(lengths) or 'none'}")
    if asked or set(names) <= lengths.keys():
        return dict(zip(names, asked or names, strict=True))
    if len(lengths) < len(names) or (len(names) > 1 and len(lengths) > len(names)):
        there = ", ".join(lengths) or "none"
        raise RecipeError(f"--columns: name what holds {' and '.join(names)}; there is text in {there}")
    chosen = sorted(lengths, key=lambda name: -lengths[name])[: len(names)]
    return dict(zip(names, sorted(chosen, key=list(rows).index), strict=True))


def _unit(data: Mapping[str, Any], objective: str) -> tuple[str, str]:
    """What a row of plain text is."""
    files = [file for file in sources.local_files(_data(data)) if file.is_file()]
    if objective == "translation" or not sources.is_plain_text(files[0]):
        return "line", "rows are those of the file"
    is_few = 1 < len(set(files)) < MANY
    if objective == "causal_lm" and not is_few and max(file.stat().st_size for file in files) < LARGE:
        return "document", "a file is one row: its line breaks are learnt as well"
    lines = [line for chunk in islice(read(_data(data), "train"), 10) for line in chunk["text"]]
    if sum(not line.strip() for line in lines) > OFTEN * len(lines):
        return "paragraph", "empty lines are between paragraphs"
    return "line", "no empty lines are between paragraphs"


def _read(found: Survey) -> None:
    with tqdm(unit=" characters", unit_scale=True, desc="reading", leave=False, disable=None) as bar:
        for chunk in read(_data(found.data), "train"):
            for column, texts in clean(chunk, chunk, found.refused, empty_allowed=False).items():
                joined = "\n".join(texts)
                found.characters[column] += len(joined)
                found.bytes += len(joined.encode(errors="replace"))
                found.signs.update(joined)
                counts = [len(text.split()) for text in texts]
                found.words += sum(counts)
                found.longest = max(found.longest, *counts, 0)
                found.rows += len(texts) if column == next(iter(chunk)) else 0
                bar.update(len(joined))
            if found.size > ENOUGH:
                found.is_whole = False
                break


def repeated(found: Survey) -> float:
    """The share of the rows that are there already."""
    return found.refused[AGAIN] / max(found.rows + found.refused[AGAIN], 1)
