"""Corpora: rows read through `datasets`, cleaned, tokenised once into flat arrays, and cut into batches.

The order of batches is a pure function of the seed and the place in the run (epoch, part): no generator carries state
from one batch to the next, so a resumed run sees exactly the batches it would have seen.
"""

import codecs
import glob
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import IterableDataset, load_dataset
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_scratch_transformer.files import reading
from hf_scratch_transformer.tokenization import Family, train_tokenizer

from .base_model import PATH, located
from .recipe import Data, Recipe
from .sections import RecipeError, reason

FAMILIES: dict[str, Family] = {"translation": "seq2seq", "causal_lm": "decoder", "masked_lm": "encoder"}
# How a file is read, by its ending; anything else is plain text.
BUILDERS = {"txt": "text", "json": "json", "jsonl": "json", "csv": "csv", "tsv": "csv", "parquet": "parquet"}
CHUNK = 10_000  # rows handled at once
GROUP = "evaluation.group_by: "  # before the name of a column that rows are grouped by: it may be that of a text too
# What a byte that is not UTF-8 is read as: no text holds these, but some hold U+FFFD.
UNDECODABLE = "\ufdd0\ufdef\ufdd0"
codecs.register_error(__name__, lambda error: (UNDECODABLE, error.end))  # type: ignore[attr-defined]

Columns = dict[str, list[Any]]
Encode = Callable[[list[str]], list[list[int]]]  # token ids of each text


class NothingUsable(RecipeError):
    """Rows of which none can be trained on or measured."""


# --- Rows -----------------------------------------------------------------------------------------------------------


def read(data: Data, role: str, group_by: Iterable[str] = (), skip: int = 0) -> Iterator[Columns]:
    """Chunks of rows of one split, as {name the objective uses: values}; columns to group by come with `GROUP` before.

    Raises RecipeError when the split, a file or a column is not there.
    """
    source = _find(data, role)
    if source.is_cut:
        chunks = source.rows(skip)
    elif data.streaming and role == "train":
        raise RecipeError(f"data.splits.{role}: a part of a split needs its length, which a stream does not know")
    else:
        chunks = _part(source.rows(0), source.part, role)
    wanted = data.columns | {GROUP + column: (column,) for column in group_by}
    for chunk in chunks:
        found = {name: next((c for c in names if c in chunk), None) for name, names in wanted.items()}
        for name in (name for name, column in found.items() if column is None):
            field = "evaluation.group_by" if name.startswith(GROUP) else "data.columns"
            raise RecipeError(f"{field}: {role} has no {' or '.join(wanted[name])}; its columns are {', '.join(chunk)}")
        yield {name: chunk[column] for name, column in found.items() if column is not None}


def check_splits(data: Data) -> None:
    """Raises RecipeError when what is trained on would be evaluated on, and when a split is not there."""
    sources = {role: _find(data, role) for role in data.splits}
    for role in sorted(sources.keys() - {"train"}):
        one, other = sources["train"], sources[role]
        starts, ends = zip(one.part, other.part, strict=True)
        if (shared := one.texts & other.texts) and max(starts) < min(ends):
            raise RecipeError(
                f"data.splits: train and {role} are both of {', '.join(sorted(shared))}: name parts of it that do not "
                "overlap, name[:90%] and name[90%:]"
            )


def local_files(data: Data) -> list[Path]:
    """The files that the splits are read from, as far as they are there and not of the Hub."""
    found: list[Path] = []
    for role in data.splits if Path(data.path).exists() else ():
        with suppress(RecipeError):  # of a split that is not there: `check_splits` says so
            found += map(Path, _find(data, role).texts)
    return found


class _Source(NamedTuple):
    """Where the rows of a split are: those from a number on, and which files or splits of the Hub hold them."""

    rows: Callable[[int], Iterator[Columns]]
    texts: frozenset[str]
    part: tuple[float, float] = (0, math.inf)  # of them
    is_cut: bool = True  # whether `rows` are those of the part already


def _find(data: Data, role: str) -> _Source:
    """The first name of the role that exists, and the part of it that is asked for."""
    path = Path(data.path)
    tried = []
    for candidate in data.splits[role]:
        if "[" in candidate and (path / candidate).is_file():  # a name, though it looks like a part of a split
            return _local_source({"": path / candidate}, data)
        match = re.fullmatch(r"(?P<name>[^\[\]]*)(\[(?P<first>\d*)%?:(?P<last>\d*)%?\])?", candidate)
        if match is None:
            raise RecipeError(f"data.splits.{role}: {candidate!r} is not of the form name or name[10%:90%]")
        part = (int(match["first"] or 0) / 100, int(match["last"]) / 100 if match["last"] else math.inf)
        if not path.exists():
            return _Source(_hub(data, candidate, role), frozenset(match["name"].split("+")), part)
        files = _files(path, match["name"], data)
        if files:
            return _local_source(files, data)._replace(part=part, is_cut=not candidate.endswith("]"))
        tried.append(match["name"])
    raise RecipeError(f"data.splits.{role}: {path} holds no {' or '.join(tried)}")


def _local_source(files: dict[str, Path], data: Data) -> _Source:
    return _Source(partial(_local, files, data), frozenset(str(file.resolve()) for file in files.values()))


def _files(path: Path, name: str, data: Data) -> dict[str, Path]:
    """The files of a split: {column: file} for parallel text, {"": file} for one file with all columns."""
    if path.is_file():
        return {"": path}
    if (path / name).is_file():
        return {"": path / name}
    endings = [
        [column for column in columns if (path / f"{name}.{column}").is_file()] for columns in data.columns.values()
    ]
    if all(endings):
        return {column: path / f"{name}.{column}" for column, *_ in endings}
    for file in (path / f"{name}.{suffix}" for suffix in BUILDERS):
        if file.is_file():
            return {"": file}
    return {}


def _local(files: Mapping[str, Path], data: Data, skip: int) -> Iterator[Columns]:
    """Rows of one file, or of parallel text files read line by line."""
    if "" in files:
        file = files[""]
        suffixes = [suffix.lstrip(".") for suffix in file.suffixes]
        builder = next((BUILDERS[suffix] for suffix in reversed(suffixes) if suffix in BUILDERS), "text")
        yield from _stream(builder, file, data.sample_by, skip)
        return
    streams = {column: _stream("text", file, "line", skip) for column, file in files.items()}
    while True:
        chunks = {column: next(stream, {"text": []})["text"] for column, stream in streams.items()}
        lengths = {column: len(chunk) for column, chunk in chunks.items()}
        if len(set(lengths.values())) > 1:
            raise RecipeError(f"{', '.join(map(str, files.values()))}: not parallel, one has fewer lines")
        if not any(lengths.values()):
            return
        yield chunks


def _stream(builder: str, file: Path, sample_by: str, skip: int) -> Iterator[Columns]:
    options: dict[str, Any] = {} if builder == "parquet" else {"encoding_errors": __name__}
    if builder == "json":
        options["encoding"] = "utf8"  # what is called "utf-8" it does not decode, and so finds nothing broken
    if builder == "text":
        options["sample_by"] = sample_by
    if file.suffix == ".tsv":
        options["sep"] = "\t"
    try:
        rows = load_dataset(builder, data_files=glob.escape(str(file)), split="train", streaming=True, **options)
        yield from rows.skip(skip).iter(CHUNK)
    except RecipeError:
        raise
    except Exception as error:  # each reader raises its own kind
        raise RecipeError(f"{file}: cannot be read as {builder}: {reason(error)}") from error


def _hub(data: Data, split: str, role: str) -> Callable[[int], Iterator[Columns]]:
    streaming = data.streaming and role == "train"

    def rows(skip: int) -> Iterator[Columns]:
        try:
            dataset = load_dataset(data.path, data.name, split=split, revision=data.revision, streaming=streaming)
        except Exception as error:  # no network, no such dataset, no such split: each has its own kind
            raise RecipeError(
                f"data.path: no file {data.path!r} here, and not to be had from the Hub: {reason(error)}"
            ) from error
        rest = dataset.skip(skip) if isinstance(dataset, IterableDataset) else dataset.select(range(skip, len(dataset)))
        yield from rest.iter(CHUNK)

    return rows


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


def clean(
    chunks: Iterable[Columns], columns: Iterable[str], refused: Counter, empty_allowed: bool
) -> Iterator[Columns]:
    """Only the usable rows; the others are counted in `refused` by what is wrong with them."""
    columns = tuple(columns)
    for chunk in chunks:
        keep = []
        for row, texts in enumerate(zip(*(chunk[column] for column in columns), strict=True)):
            if not all(isinstance(text, str) for text in texts):
                refused["not text"] += 1
            elif not empty_allowed and not all(text.strip() for text in texts):
                refused["empty"] += 1
            elif any(UNDECODABLE in text for text in texts):
                refused["broken UTF-8"] += 1
            elif any("\0" in text for text in texts):
                refused["with zero bytes, as in UTF-16"] += 1
            else:
                keep.append(row)
        if len(keep) == len(chunk[columns[0]]):
            yield chunk
        elif keep:
            yield {column: [values[row] for row in keep] for column, values in chunk.items()}


# --- Tokens ---------------------------------------------------------------------------------------------------------


def make_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """The tokenizer of the recipe: loaded when it names one, or a model that has one, else trained on the training
    split."""
    spec = recipe.tokenizer
    if spec.path is not None:
        return read_tokenizer(spec.path, "tokenizer.path")
    if PATH in recipe.model:
        return read_tokenizer(located(recipe.model[PATH]), f"no tokenizer.path is given, and model.{PATH}")
    columns, refused = tuple(recipe.data.columns), Counter[str]()
    chunks = clean(read(recipe.data, "train"), columns, refused, recipe.objective != "translation")
    texts = (text for chunk in chunks for column in columns for text in chunk[column])
    try:
        return train_tokenizer(
            texts,
            family=FAMILIES[recipe.objective],
            algorithm=spec.algorithm,
            vocab_size=spec.vocab_size,
            min_frequency=spec.min_frequency,
            lowercase=spec.lowercase,
        )
    except ValueError as error:
        left_out = f"; left out of data.splits.train: {describe(refused)}" if refused else ""
        raise RecipeError(f"tokenizer: {error}{left_out}") from error


def read_tokenizer(path: str | Path, field: str) -> PreTrainedTokenizerFast:
    """A saved tokenizer. Raises RecipeError, naming the field that led there, when there is none, or a slow one."""
    try:
        with reading(f"{field}: {str(path)!r}"):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        name = type(tokenizer).__name__
        raise RecipeError(f"{field}: {str(path)!r}: {name} is not a tokenizer of the `tokenizers` library")
    return tokenizer


@dataclass(frozen=True)
class Sequences:
    """Many token sequences, one after the other in one array: sequence i is `tokens[offsets[i] : offsets[i + 1]]`."""

    tokens: np.ndarray  # [all tokens] int32
    offsets: np.ndarray  # [sequences + 1] int64

    @classmethod
    def of(cls, lists: Iterable[list[int]]) -> "Sequences":
        """From one list of token ids a sequence."""
        lists = list(lists)
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        tokens = np.fromiter((token for ids in lists for token in ids), np.int32, offsets[-1])
        return cls(tokens, offsets)

    @classmethod
    def join(cls, many: "list[Sequences]") -> "Sequences":
        """All sequences of several sets, in order."""
        lengths = np.concatenate([each.lengths for each in many])
        return cls(np.concatenate([each.tokens for each in many]), np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def lengths(self) -> np.ndarray:
        """[sequences] int64"""
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> "Sequences":
        """The sequences of `rows`, in that order."""
        return Sequences.join([Sequences(self.tokens[a:b], np.array([0, b - a])) for a, b in self._bounds(rows)])

    def padded(self, rows: np.ndarray, fill: int, multiple: int = 1) -> np.ndarray:
        """[rows, longest of them] int64, filled up on the right; the width is rounded up to a multiple."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        columns = np.arange(-(-int(lengths.max()) // multiple) * multiple)
        is_token = columns < lengths[:, None]
        out = np.full(is_token.shape, fill, np.int64)
        out[is_token] = self.tokens[(starts[:, None] + columns)[is_token]]
        return out

    def _bounds(self, rows: np.ndarray) -> Iterator[tuple[int, int]]:
        return zip(self.offsets[rows].tolist(), self.offsets[rows + 1].tolist(), strict=True)


@dataclass(frozen=True)
class Corpus:
    """A tokenised split, or one part of a streamed one."""

    columns: dict[str, Sequences]  # what the objective reads
    texts: Columns = field(default_factory=dict)  # the raw rows, kept where they are scored against
    refused: Counter = field(default_factory=Counter)  # rows left out, by reason
    rows: int = 0  # read, usable or not
    bytes: int = 0  # of the usable text, in UTF-8
    words: int = 0  # of the usable text, each row's end counted as one

    def fingerprint(self) -> str:
        """SHA-256 over all tokens and boundaries: two corpora that train alike have the same."""
        digest = hashlib.sha256()
        for name, sequences in sorted(self.columns.items()):
            for array in (sequences.tokens, sequences.offsets):
                digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def load(recipe: Recipe, role: str, encode: Encode, keep_texts: bool = False) -> Corpus:
    """A whole split in memory, tokenised."""
    chunks = read(recipe.data, role, recipe.evaluation.group_by if role == "test" else ())
    return tokenised(recipe, role, chunks, encode, keep_texts)


def tokenised(recipe: Recipe, role: str, chunks: Iterable[Columns], encode: Encode, keep_texts: bool) -> Corpus:
    """Clean and tokenise rows; malformed ones are counted and skipped, or refused, as the recipe says.

    Raises RecipeError when rows are malformed and the recipe refuses that, or when none is left.
    """
    pairs = recipe.objective == "translation"
    names = tuple(recipe.data.columns)
    refused: Counter = Counter()
    counts = dict.fromkeys(("rows", "bytes", "words"), 0)
    parts: dict[str, list[Sequences]] = {name: [] for name in names}
    texts: Columns = {}
    for chunk in clean(_counted(chunks, counts), names, refused, empty_allowed=not pairs):
        encoded = {name: Sequences.of(encode(chunk[name])) for name in names}
        if pairs:
            longest = np.max([sequences.lengths for sequences in encoded.values()], axis=0)
            rows = np.flatnonzero(longest <= recipe.data.max_length)
            if len(rows) < len(longest):
                refused["too long"] += len(longest) - len(rows)
                encoded = {name: sequences.take(rows) for name, sequences in encoded.items()} if len(rows) else {}
                chunk = {name: [values[row] for row in rows] for name, values in chunk.items()}
        for name, sequences in encoded.items():
            parts[name].append(sequences)
            counts["bytes"] += sum(len(text.encode()) for text in chunk[name])
            counts["words"] += sum(len(text.split()) + 1 for text in chunk[name])
        if keep_texts:
            for name, values in chunk.items():
                texts.setdefault(name, []).extend(values)
    if refused and recipe.data.malformed == "refuse":
        raise RecipeError(f"data.splits.{role}: malformed rows ({describe(refused)}) and data.malformed is refuse")
    if not any(parts.values()):
        raise NothingUsable(f"data.splits.{role}: no usable row ({describe(refused) or 'it is empty'})")
    return Corpus({name: Sequences.join(parts[name]) for name in names}, texts, refused, **counts)


class Parts:
    """The training split as `parts(epoch, first)` gives it: whole, or part by part in the order of the stream."""

    def __init__(
        self, recipe: Recipe, encode: Encode, end: Callable[[Corpus], int], say: Callable[[str], object]
    ) -> None:
        """`end` is how much there is to predict in a part: those with nothing are passed over. Which these are is said
        once, as is what is left out of others.

        Raises RecipeError when no part has anything.
        """
        self.recipe, self.encode, self.end, self.say = recipe, encode, end, say
        self.told: set[int] = set()  # parts
        if recipe.data.streaming:
            self.first = next((part for _, part in self._stream(0)), Corpus({}))
        else:
            self.first = load(recipe, "train", encode)
        if not self.first.columns or end(self.first) < 1:
            raise RecipeError("data.splits.train: there is nothing to predict")

    def __call__(self, epoch: int, first: int) -> Iterator[tuple[int, Corpus]]:
        """The parts of an epoch from number `first` on, with their numbers."""
        if self.recipe.data.streaming:
            yield from self._stream(first)
        elif first == 0:
            yield 0, self.first

    def _stream(self, first: int) -> Iterator[tuple[int, Corpus]]:
        size = self.recipe.data.part_rows
        chunks = _regrouped(read(self.recipe.data, "train", skip=first * size), size)
        for number, rows in enumerate(chunks, start=first):
            try:
                part = tokenised(self.recipe, "train", [rows], self.encode, keep_texts=False)
                if self.end(part) < 1:
                    raise NothingUsable("too short for a single prediction")
                if part.refused:
                    self._tell(number, f": left out {describe(part.refused)}")
                yield number, part
            except NothingUsable as error:
                self._tell(number, f" is skipped: {error}")

    def _tell(self, number: int, what: str) -> None:
        if number not in self.told:
            self.say(f"part {number} of the stream{what}")
        self.told.add(number)


def _regrouped(chunks: Iterator[Columns], size: int) -> Iterator[Columns]:
    """The same rows, that many at a time."""
    held: Columns = {}
    for chunk in chunks:
        held = {name: held.get(name, []) + values for name, values in chunk.items()}
        while len(held[next(iter(held))]) >= size:
            yield {name: values[:size] for name, values in held.items()}
            held = {name: values[size:] for name, values in held.items()}
    if held and held[next(iter(held))]:
        yield held


def digest(content: bytes) -> str:
    """SHA-256"""
    return hashlib.sha256(content).hexdigest()


def account(role: str, split: Corpus, usable: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """How much of a split is used, why not all of it, and how many of its tokens the tokenizer does not know."""
    left_out = f", left out {describe(split.refused)}" if split.refused else ""
    # Tokenizers that know every byte may have given its place to another token.
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    unknown_id = None if tokenizer.unk_token_id in known else tokenizer.unk_token_id
    tokens = np.concatenate([sequences.tokens for sequences in split.columns.values()])
    unknown = 0 if unknown_id is None else np.count_nonzero(tokens == unknown_id)
    unread = f"; {unknown:,} of {len(tokens):,} tokens unknown to the tokenizer" if unknown else ""
    return f"{role}: {usable:,} rows of {split.rows:,}{left_out}{unread}"


def describe(refused: Counter) -> str:
    """`12 empty, 3 too long`"""
    return ", ".join(f"{count} {reason}" for reason, count in refused.most_common())


def _counted(chunks: Iterable[Columns], counts: dict[str, int]) -> Iterator[Columns]:
    for chunk in chunks:
        counts["rows"] += len(next(iter(chunk.values())))
        yield chunk


# --- Batches --------------------------------------------------------------------------------------------------------


def bucket(lengths: np.ndarray, budget: int, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Cut rows into batches of like length within a budget of padded tokens.

    Args:
        lengths: [rows, sides] tokens of each side of each row.
        budget: the most that rows × longest side of a batch may be; no row may be longer.
        rng: which of the rows of equal lengths come together, and the order of the batches; without it both are fixed.

    Returns row numbers, one array a batch; every row is in exactly one.
    """
    longest = lengths.max(axis=1)
    ties = rng.random(len(lengths)) if rng is not None else np.arange(len(lengths))
    order = np.lexsort((ties, *lengths.T, longest))
    ranked = longest[order]
    batches, start = [], 0
    while start < len(order):
        ahead = ranked[start : start + max(1, budget // ranked[start])]
        size = max(1, int(np.searchsorted(ahead * np.arange(1, len(ahead) + 1), budget, side="right")))
        batches.append(order[start : start + size])
        start += size
    if rng is not None:
        batches = [batches[i] for i in rng.permutation(len(batches))]
    return batches


class Batches(Dataset):
    """The batches of one part of an epoch: item i is built when asked for, in whichever process asks.

    Every process builds the whole batch and keeps its rows, so that a batch, its random draws and its number of targets
    do not depend on how many processes share it.
    """

    def __init__(
        self,
        plan: list[Any],
        collate: Callable[[Any, np.random.Generator, int], dict[str, torch.Tensor]],
        targets: str,
        key: tuple[int, ...] = (0,),
        first_step: int = 0,
        accumulation: int = 1,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """
        Args:
            plan: what each batch is made of.
            collate: builds a batch from an item of the plan, random draws, and the step it belongs to.
            targets: the entry of a batch that holds its labels.
            key: seed of the random draws, together with the number of the batch.
            first_step, accumulation: batch i belongs to the optimiser step `first_step + i // accumulation`.
            share: (process, processes)
        """
        self.plan, self.collate, self.targets = plan, collate, targets
        self.key, self.share = key, share
        self.first_step, self.accumulation = first_step, accumulation

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        """This process's rows of a batch, and the number of targets in the whole of it."""
        rng = np.random.default_rng((*self.key, index))
        batch = self.collate(self.plan[index], rng, self.first_step + index // self.accumulation)
        count = int((batch[self.targets] != -100).sum())
        process, processes = self.share
        if processes > 1:
            rows = {name: values[process::processes] for name, values in batch.items()}
            if not len(rows[self.targets]):  # fewer rows than processes: take part, with nothing to predict
                rows = {name: values[:1].clone() for name, values in batch.items()}
                rows[self.targets].fill_(-100)
            batch = rows
        return batch, count

    def loader(self, start: int, workers: int, pin: bool) -> DataLoader:
        """From batch `start` to the end, in order."""
        return DataLoader(self, batch_size=None, sampler=range(start, len(self)), num_workers=workers, pin_memory=pin)
