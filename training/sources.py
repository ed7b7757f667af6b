"""Sources: where the rows of a split are, read through `datasets` chunk by chunk, and which of them can be used."""

import codecs
import glob
import hashlib
import itertools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from datasets import Dataset, IterableDataset, load_dataset

from hf_scratch_transformer.files import is_repository_id

from .batches import Key
from .recipe import Data
from .sections import RecipeError, reason

# Or its readers of files report to a server that they were used, and wait seconds for it where there is no network.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False

# How a file is read, by its ending; anything else is plain text.
BUILDERS = {"txt": "text", "json": "json", "jsonl": "json", "csv": "csv", "tsv": "csv"} | {
    each: each for each in ("parquet", "arrow")
}
PACKED = ("", ".gz", ".bz2", ".xz", ".zst", ".lz4")
CHUNK = 2_500  # rows handled at once: more of them leave the processor's caches
GROUP = "evaluation.group_by: "  # before the name of a column that rows are grouped by: it may be that of a text too
# What a byte that is not UTF-8 is read as: no text holds these, but some hold U+FFFD.
UNDECODABLE = "\ufdd0\ufdef\ufdd0"
REPEATED = "\ufdd0\ufdee\ufdd0"  # in the place of a row that is there already
AGAIN = "repeated"  # why it is left out, which is not that it is malformed
codecs.register_error(__name__, lambda error: (UNDECODABLE, error.end))  # type: ignore[attr-defined]

Columns = dict[str, list[Any]]


def read(
    data: Data, role: str, group_by: Iterable[str] = (), skip: int = 0, key: Key | None = None
) -> Iterator[Columns]:
    """Chunks of rows of one split, as {name the objective uses: values}; columns to group by come with `GROUP` before.

    Args:
        skip: so many rows at the beginning.
        key: of the order of its shards; none for that of their names.

    Raises RecipeError when the split, a file or a column is not there.
    """
    return (chunk for _, chunk in numbered(data, role, group_by, skip, key))


def numbered(
    data: Data, role: str, group_by: Iterable[str] = (), skip: int = 0, key: Key | None = None
) -> Iterator[tuple[int, Columns]]:
    """The same, each chunk with the number of its source."""
    seen = _Seen()
    for number, each in enumerate(views(data, role)):
        for chunk in _read(each, role, group_by, skip, key):
            if data.deduplicate and role == "train":
                seen.mark(chunk)
            yield number, chunk


def views(data: Data, role: str = "train") -> list[Data]:
    """The data of each source of a split, whose split of that role it is."""
    found = []
    for source in data.sources if role == "train" else ():
        where = {name: getattr(source, name) for name in ("path", "name", "revision")} if source.path else {}
        rest = {"splits": {"train": source.split}, "columns": data.columns | source.columns, "sources": ()}
        found.append(data.model_copy(update=where | rest))
    return found or [data]


def _read(data: Data, role: str, group_by: Iterable[str], skip: int, key: Key | None) -> Iterator[Columns]:
    source = _find(data, role)
    if source.is_cut:
        chunks = source.rows(skip, key)
    elif data.streaming and role == "train":
        raise RecipeError(f"data.splits.{role}: a part of a split needs its length, which a stream does not know")
    else:
        chunks = _part(source.rows(0, None), source.part, role)
    wanted = data.columns | {GROUP + column: (column,) for column in group_by}
    for chunk in chunks:
        found = {name: next((c for c in names if c in chunk), None) for name, names in wanted.items()}
        for name in (name for name, column in found.items() if column is None):
            field = "evaluation.group_by" if name.startswith(GROUP) else "data.columns"
            raise RecipeError(f"{field}: {role} has no {' or '.join(wanted[name])}; its columns are {', '.join(chunk)}")
        yield {name: chunk[column] for name, column in found.items() if column is not None}


def check_splits(data: Data) -> None:
    """Raises RecipeError when what is trained on would be evaluated on, and when a split is not there."""
    trained = [_find(each, "train") for each in views(data)]
    held_out = {role: _find(data, role) for role in sorted(data.splits.keys() - {"train"})}
    for one, (role, other) in itertools.product(trained, held_out.items()):
        starts, ends = zip(one.part, other.part, strict=True)
        # Parts of the same files are of the same rows; of files that are shared in part, who knows.
        are_apart = one.texts == other.texts and max(starts) >= min(ends)
        if (shared := one.texts & other.texts) and not are_apart:
            raise RecipeError(
                f"data.splits: train and {role} are both of {', '.join(sorted(shared))}: name parts of it that do not "
                "overlap, name[:90%] and name[90%:]"
            )


def local_files(data: Data) -> list[Path]:
    """The files that the splits are read from, as far as they are there and not of the Hub."""
    found: list[Path] = []
    every = [(each, role) for role in dict.fromkeys(("train", *data.splits)) for each in views(data, role)]
    for each, role in every:
        if Path(each.path).exists():
            with suppress(RecipeError):  # of a split that is not there: `check_splits` says so
                found += map(Path, _find(each, role).texts)
    return found


def first_rows(data: Data, role: str) -> Columns:
    """The first rows of a split with every column that its files have; none of parallel text, which has no names."""
    source = _find(data, role)
    return next(source.rows(0, None), {}) if source.files.keys() == {""} else {}


def is_plain_text(file: Path) -> bool:
    """Whether a file is read as text, with no columns."""
    return _kind(file)[0] == "text"


def named(data: Data, role: str) -> Iterator[str]:
    """The files that a split is read from, where there are several or some are left out; for people."""
    for each in views(data, role):
        source = _find(each, role)
        files = [str(file) for some in source.files.values() for file in some]
        if len(files) > len(data.columns) or source.left_out:
            left_out = f"; left out, for no ending of a text: {_listed(source.left_out)}" if source.left_out else ""
            yield f"{len(files)} files, {files[0]} to {files[-1]}{left_out}"


def _listed(files: Sequence[Path], most: int = 3) -> str:
    more = f" and {len(files) - most:,} more" if len(files) > most else ""
    return ", ".join(file.name for file in files[:most]) + more


def content(data: Data, role: str, digest: Callable[[Path], str]) -> list[str] | None:
    """What the rows of a split are made of: its files, by their digests, or those that `datasets` keeps of the Hub, by
    names that hold their revision; None where it keeps none."""
    found: list[str] = []
    for each in views(data, role):
        source, found = _find(each, role), [*found, f"split {each.splits[role]}"]
        if source.dataset is None:
            found += [
                f"{column} {_suffix(file)} {digest(file)}" for column, some in source.files.items() for file in some
            ]
            continue
        dataset = None if data.streaming else source.dataset()
        if not isinstance(dataset, Dataset) or not dataset.cache_files:
            return None
        found += [file["filename"] for file in dataset.cache_files]
    return found


class _Source(NamedTuple):
    """Where the rows of a split are: those from a number on, with its shards in some order, and which files or splits
    of the Hub hold them."""

    rows: Callable[[int, Key | None], Iterator[Columns]]
    texts: frozenset[str]
    part: tuple[float, float] = (0, math.inf)  # of them
    is_cut: bool = True  # whether `rows` are those of the part already
    files: Mapping[str, Sequence[Path]] = {}  # {column: files}, or {"": files} with all columns
    dataset: Callable[[], Dataset | IterableDataset] | None = None  # where it is of the Hub
    left_out: Sequence[Path] = ()  # files of its folder that are not read


def _find(data: Data, role: str) -> _Source:
    """The first name of the role that exists, and the part of it that is asked for."""
    path = Path(data.path)
    tried = []
    for candidate in data.splits[role]:
        if "[" in candidate and (path / candidate).is_file():  # a name, though it looks like a part of a split
            return _local_source({"": [path / candidate]}, data, role)
        match = re.fullmatch(r"(?P<name>.*?)(\[(?P<first>\d*)%?:(?P<last>\d*)%?\])?", candidate)
        if match is None or (match["name"].endswith("]") and ":" in match["name"]):
            raise RecipeError(f"data.splits.{role}: {candidate!r} is not of the form name or name[10%:90%]")
        part = (int(match["first"] or 0) / 100, int(match["last"]) / 100 if match["last"] else math.inf)
        if not path.exists():
            dataset = partial(_hub, data, candidate, role)
            return _Source(partial(_hub_rows, dataset), frozenset(match["name"].split("+")), part, dataset=dataset)
        files = _files(path, match["name"], data)
        if files:
            folder, read = path / match["name"], [file for some in files.values() for file in some]
            inside = _visible(folder) if any(file.is_relative_to(folder) and file != folder for file in read) else []
            source = _local_source(files, data, role)
            left_out = [file for file in inside if file not in read]
            return source._replace(part=part, is_cut=match[2] is None, left_out=left_out)
        tried.append(match["name"])
    starts = tuple(f"{Path(name).name}." for name in tried if name)
    near = sorted(file for file in path.glob("*") if starts and file.name.startswith(starts))
    beside = f", though {_listed(near)}" if near else ""
    raise RecipeError(f"data.splits.{role}: {path} holds no {' or '.join(tried)}{beside}")


def _local_source(files: Mapping[str, Sequence[Path]], data: Data, role: str) -> _Source:
    """Raises RecipeError when the files are not of one kind, or not as many for each column."""
    every = [file for some in files.values() for file in some]
    kinds = {_kind(file): file for file in every} if "" in files else {}
    if len(kinds) > 1:
        raise RecipeError(f"data.splits.{role}: {' and '.join(map(str, kinds.values()))} are not of one kind")
    if len({len(some) for some in files.values()}) > 1:
        counts = ", ".join(f"{len(some)} of {column}" for column, some in files.items())
        raise RecipeError(f"data.splits.{role}: not parallel, there are files for {counts}")
    for shards in zip(*files.values(), strict=True):  # in order of their names, which may not be those of one another
        stems = {str(file).rpartition(f".{column}")[0] for column, file in zip(files, shards, strict=True)}
        if len(stems) > 1 and len(every) > len(files):
            raise RecipeError(f"data.splits.{role}: not parallel, {' stands beside '.join(map(str, shards))}")
    return _Source(partial(_local, files, data), frozenset(str(file.resolve()) for file in every), files=files)


def _files(path: Path, name: str, data: Data) -> dict[str, list[Path]]:
    """The files of a split, in their order: a file; parallel text, {column: files}; files of one kind with all columns,
    {"": files}, by their stem, by a pattern, or in a folder."""
    if path.is_file():
        return {"": [path]}
    if (path / name).is_file():
        return {"": [path / name]}
    sides = [
        [(column, files) for column in columns for end in PACKED if (files := _shards(path, name, f".{column}{end}"))]
        for columns in data.columns.values()
    ]
    if all(sides):
        return dict(first for first, *_ in sides)
    endings = [f".{suffix}{packed}" for packed in PACKED for suffix in BUILDERS]
    endings.insert(0 if glob.has_magic(name) else len(endings), "")  # a pattern means all that it matches
    for ending in endings:
        if files := _shards(path, name, ending):
            return {"": files}
    inside = [file for file in _visible(path / name) if _suffix(file)] if (path / name).is_dir() else []
    return {"": inside} if inside else {}


def _shards(folder: Path, name: str, ending: str = "") -> list[Path]:
    """The file of that name, or the files that a pattern matches or that it is split into (`name-00000-of-00003`)."""
    if (folder / f"{name}{ending}").is_file():
        return [folder / f"{name}{ending}"]
    numbered = f"{glob.escape(name)}-[0-9]*-of-[0-9]*{ending}"
    found: list[str] = []
    for pattern in (numbered, f"{name}{ending}") if glob.has_magic(name) else (numbered,):
        if "\0" not in pattern:
            found = found or glob.glob(os.path.join(glob.escape(str(folder)), pattern), recursive=True)
    return sorted(file for file in map(Path, found) if file.is_file())


def _visible(folder: Path) -> list[Path]:
    """The files in a folder, and in those within it."""
    return sorted(file for file in folder.rglob("*") if not file.name.startswith(".") and file.is_file())


def _suffix(file: Path) -> str:
    """What says how a file is read, behind which it may be compressed; empty: nothing does."""
    suffixes = [suffix.lstrip(".") for suffix in reversed(file.suffixes)]
    return next((suffix for suffix in suffixes if suffix in BUILDERS), "")


def _kind(file: Path) -> tuple[str, bool]:
    """The builder that reads a file, and whether tabs are between its columns."""
    return BUILDERS.get(_suffix(file), "text"), _suffix(file) == "tsv"


def _local(files: Mapping[str, Sequence[Path]], data: Data, skip: int, key: Key | None) -> Iterator[Columns]:
    """Rows of files with all columns, or of parallel text files read line by line."""
    if key is not None:
        order = np.random.default_rng(key).permutation(len(next(iter(files.values()))))
        files = {column: [some[number] for number in order] for column, some in files.items()}
    if "" in files:
        yield from _stream(_kind(files[""][0]), files[""], data.sample_by, skip)
        return
    for shards in zip(*files.values(), strict=True):
        for chunk in _parallel(dict(zip(files, shards, strict=True))):
            rows = len(next(iter(chunk.values())))
            if skip < rows:
                yield {column: values[skip:] for column, values in chunk.items()}
            skip = max(0, skip - rows)


def _parallel(files: Mapping[str, Path]) -> Iterator[Columns]:
    streams = {column: _stream(("text", False), [file], "line", 0) for column, file in files.items()}
    while True:
        chunks = {column: next(stream, {"text": []})["text"] for column, stream in streams.items()}
        lengths = {column: len(chunk) for column, chunk in chunks.items()}
        if len(set(lengths.values())) > 1:
            raise RecipeError(f"{', '.join(map(str, files.values()))}: not parallel, one has fewer lines")
        if not any(lengths.values()):
            return
        yield chunks


def _stream(kind: tuple[str, bool], files: Sequence[Path], sample_by: str, skip: int) -> Iterator[Columns]:
    builder, is_by_tabs = kind
    options: dict[str, Any] = {} if builder in ("parquet", "arrow") else {"encoding_errors": __name__}
    if builder == "json":
        options["encoding"] = "utf8"  # what is called "utf-8" it does not decode, and so finds nothing broken
    if builder == "text":
        options["sample_by"] = sample_by
    if is_by_tabs:
        options["sep"] = "\t"
    names = [glob.escape(str(file)) for file in files]
    try:
        rows = load_dataset(builder, data_files=names, split="train", streaming=True, **options)
        yield from _chunks(rows.skip(skip))
    except RecipeError:
        raise
    except Exception as error:  # each reader raises its own kind
        which = f"{files[0]}{f' or one of {len(files) - 1} more' if len(files) > 1 else ''}"
        raise RecipeError(f"{which}: cannot be read as {builder}: {reason(error)}") from error


def _hub(data: Data, split: str, role: str) -> Dataset | IterableDataset:
    streaming = data.streaming and role == "train"
    if not is_repository_id(data.path):
        raise RecipeError(f"data.path: no file or folder {data.path!r} here; a dataset on the Hub is owner/name")
    try:
        return load_dataset(data.path, data.name, split=split, revision=data.revision, streaming=streaming)
    except Exception as error:  # no network, no such dataset, no such split: each has its own kind
        said = f"no file {data.path!r} here, and not to be had from the Hub: {reason(error)}"
        raise RecipeError(f"data.path: {said}") from error


def _hub_rows(dataset: Callable[[], Dataset | IterableDataset], skip: int, key: Key | None) -> Iterator[Columns]:
    whole = dataset()
    if key is not None and isinstance(whole, IterableDataset):  # its shards; the rows of a part change places later
        whole = whole.shuffle(seed=int(np.random.default_rng(key).integers(2**31)), buffer_size=1)
    rest = whole.skip(skip) if isinstance(whole, IterableDataset) else whole.select(range(skip, len(whole)))
    yield from _chunks(rest)


def _chunks(rows: Dataset | IterableDataset) -> Iterator[Columns]:
    for table in rows.with_format("arrow").iter(CHUNK):  # four times as fast as row by row
        yield {name: table.column(name).to_pylist() for name in table.column_names}


def _part(chunks: Iterator[Columns], part: tuple[float, float], role: str) -> Iterator[Columns]:
    """Some hundredths of the rows; of the characters, where a single row holds the whole text."""
    whole: Columns = {}
    for chunk in chunks:
        for column, values in chunk.items():
            whole.setdefault(column, []).extend(values)
    for column, values in whole.items():
        rows: Any = values[0] if len(values) == 1 and isinstance(values[0], str) else values
        first, last = (int(len(rows) * min(share, 1)) for share in part)
        whole[column] = [rows[first:last]] if isinstance(rows, str) else rows[first:last]
    if not any(any(values) for values in whole.values()):
        raise RecipeError(f"data.splits.{role}: the part asked for is empty")
    yield whole


class _Seen:
    """Which rows there have been, by digests of 64 bits: of a billion rows, one in a hundred is by mistake."""

    def __init__(self) -> None:
        self.digests: list[np.ndarray] = []  # sorted; each at least twice as long as the next

    def mark(self, chunk: Columns) -> None:
        """Put `REPEATED` in the place of rows that have been there before. Empty ones part what is around them."""
        rows = [
            (number, hashlib.blake2b("\0".join(texts).encode(errors="surrogatepass"), digest_size=8).digest())
            for number, texts in enumerate(zip(*chunk.values(), strict=True))
            if all(isinstance(text, str) for text in texts) and any(texts)
        ]
        digests = np.frombuffer(b"".join(digest for _, digest in rows), np.uint64)
        found, first = np.unique(digests, return_index=True)
        is_new = np.ones(len(found), bool)
        for earlier in self.digests:
            is_new &= earlier[np.searchsorted(earlier, found).clip(max=len(earlier) - 1)] != found
        column = chunk[next(iter(chunk))]
        for place in sorted(set(range(len(rows))) - set(first[is_new].tolist())):
            column[rows[place][0]] = REPEATED
        self.digests.append(found[is_new])
        while len(self.digests) > 1 and len(self.digests[-2]) < 2 * len(self.digests[-1]):
            self.digests[-2:] = [np.sort(np.concatenate(self.digests[-2:]), kind="stable")]
        self.digests = [each for each in self.digests if len(each)]


def clean(chunk: Columns, columns: Iterable[str], refused: Counter, empty_allowed: bool) -> Columns:
    """Only the usable rows; the others are counted in `refused` by what is wrong with them."""
    columns = tuple(columns)
    if all(_is_plain(chunk[column], empty_allowed) for column in columns):
        return chunk
    keep = []
    for row, texts in enumerate(zip(*(chunk[column] for column in columns), strict=True)):
        if not all(isinstance(text, str) for text in texts):
            refused["not text"] += 1
        elif REPEATED in texts:
            refused[AGAIN] += 1
        elif not empty_allowed and not all(text.strip() for text in texts):
            refused["empty"] += 1
        elif any(UNDECODABLE in text for text in texts):
            refused["broken UTF-8, as text in Latin-1 or UTF-16 is"] += 1
        elif any("\0" in text for text in texts):
            refused["with zero bytes, as in UTF-16"] += 1
        else:
            keep.append(row)
    return {column: [values[row] for row in keep] for column, values in chunk.items()}


def _is_plain(texts: Sequence[Any], empty_allowed: bool) -> bool:
    """Whether nothing is to be left out of them; asked of all at once, as of nearly all chunks it is so."""
    if set(map(type, texts)) - {str}:
        return False
    joined = "".join(texts)
    odd = any(each in joined for each in (UNDECODABLE, REPEATED, "\0"))
    return not odd and (empty_allowed or all(map(str.strip, texts)))
