"""Corpora: rows read through `datasets`, cleaned, tokenised once into flat arrays."""

import hashlib
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_scratch_transformer.files import reading
from hf_scratch_transformer.tokenization import Family, check_unknown, join_tokenizers, sides, train_tokenizer

from .base_model import PATH, located
from .batches import SHARDS
from .recipe import Recipe, Source
from .sections import RecipeError
from .sources import AGAIN, Columns, clean, numbered, read, views

FAMILIES: dict[str, Family] = {"translation": "seq2seq", "causal_lm": "decoder", "masked_lm": "encoder"}
Encode = Callable[[list[str], str], list[list[int]]]  # token ids of each text of a column
COUNTS = ("rows", "bytes", "words")  # of a corpus, in their order
BLOCK = 2**22  # entries of an array that are looked at together
TELLING = 8  # tokens, which are hardly the same in two texts by chance


class NothingUsable(RecipeError):
    """Rows of which none can be trained on or measured."""


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
    are_pairs = recipe.objective == "translation"

    def chunks() -> Iterator[Columns]:
        refused.clear()
        return (clean(chunk, columns, refused, not are_pairs) for chunk in read(recipe.data, "train"))

    train = partial(
        train_tokenizer,
        family=FAMILIES[recipe.objective],
        algorithm=spec.algorithm,
        vocab_size=spec.vocab_size,
        min_frequency=spec.min_frequency,
        lowercase=spec.lowercase,
        add_prefix_space=spec.add_prefix_space,
    )
    try:
        if not spec.separate_vocabs:
            return train(text for chunk in chunks() for column in columns for text in chunk[column])
        return join_tokenizers(*(train(text for chunk in chunks() for text in chunk[side]) for side in columns))
    except RecipeError:  # of the corpus
        raise
    except ValueError as error:
        left_out = f"; left out of data.splits.train: {describe(refused)}" if refused else ""
        raise RecipeError(f"tokenizer: {error}{left_out}") from error


def read_tokenizer(path: str | Path, field: str) -> PreTrainedTokenizerFast:
    """A saved tokenizer. Raises RecipeError, naming the field that led there, when there is none, or a slow one."""
    try:
        with reading(f"{field}: {str(path)!r}"):
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            check_unknown(tokenizer)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        name = type(tokenizer).__name__
        raise RecipeError(f"{field}: {str(path)!r}: {name} is not a tokenizer of the `tokenizers` library")
    return tokenizer


@dataclass(frozen=True)
class Sequences:
    """Many token sequences, one after the other in one array, in memory or mapped from a file."""

    tokens: np.ndarray  # [all tokens] uint16, or uint32 where a vocabulary is larger
    lengths: np.ndarray  # [sequences] unsigned

    @classmethod
    def of(cls, lists: Iterable[list[int]], dtype: Any = np.uint32) -> "Sequences":
        """From one list of token ids a sequence."""
        lists = list(lists)
        lengths = np.fromiter(map(len, lists), np.uint32, len(lists))
        return cls(np.fromiter(chain.from_iterable(lists), dtype, int(lengths.sum())), lengths)

    @classmethod
    def join(cls, many: "list[Sequences]") -> "Sequences":
        """All sequences of several sets, in order."""
        return cls(np.concatenate([each.tokens for each in many]), np.concatenate([each.lengths for each in many]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _sequences, (_sent(self.tokens), _sent(self.lengths))

    @cached_property
    def offsets(self) -> np.ndarray:
        """[sequences + 1] int64: sequence i is `tokens[offsets[i] : offsets[i + 1]]`."""
        offsets = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return offsets

    def take(self, rows: np.ndarray) -> "Sequences":
        """The sequences of `rows`, in that order."""
        parts = [self.tokens[self.offsets[row] : self.offsets[row + 1]] for row in rows]
        return Sequences(np.concatenate([self.tokens[:0], *parts]), self.lengths[rows])

    def padded(self, rows: np.ndarray, fill: int, multiple: int = 1) -> np.ndarray:
        """[rows, longest of them] int64, filled up on the right; the width is rounded up to a multiple."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        columns = np.arange(-(-int(lengths.max()) // multiple) * multiple)
        is_token = columns < lengths[:, None]
        out = np.full(is_token.shape, fill, np.int64)
        out[is_token] = self.tokens[(starts[:, None] + columns)[is_token]]
        return out

    def beginnings(self, rows: np.ndarray) -> np.ndarray:
        """[rows] uint64: digests of lengths and first tokens, which few sequences share that are not the same."""
        starts, lengths = self.offsets[rows], self.lengths[rows]
        digests = lengths.astype(np.uint64)
        for place in range(TELLING):
            is_token = place < lengths
            digests *= np.uint64(0x9E3779B97F4A7C15)  # odd, its bits without a pattern
            digests[is_token] += self.tokens[starts[is_token] + place].astype(np.uint64) + np.uint64(1)
        return digests

    def let_go(self) -> None:
        """Free the memory that what was read of a file takes."""
        if isinstance(self.tokens, np.memmap) and hasattr(mmap, "MADV_DONTNEED"):
            self.tokens._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def count(self, token: int) -> int:
        """How often a token occurs."""
        return sum(int(np.count_nonzero(block == token)) for block in blocks(self.tokens))


def _sent(array: np.ndarray) -> np.ndarray | tuple[Any, ...]:
    """What another process is sent of an array: where it is mapped from, rather than its content."""
    return (array.filename, array.dtype, "r", array.offset) if isinstance(array, np.memmap) else array


def _sequences(*sent: np.ndarray | tuple[Any, ...]) -> Sequences:
    return Sequences(*(np.memmap(*each) if isinstance(each, tuple) else each for each in sent))


def blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array piece by piece, which may be mapped from a file larger than the memory."""
    for start in range(0, len(array), BLOCK):
        yield array[start : start + BLOCK]


class Stretch(NamedTuple):
    """What a corpus holds of one source."""

    rows: int  # that are usable
    tokens: int  # in all columns


@dataclass(frozen=True)
class Corpus:
    """A tokenised split, or one part of a streamed one."""

    columns: dict[str, Sequences]  # what the objective reads
    texts: Columns = field(default_factory=dict)  # the raw rows, kept where they are scored against
    refused: Counter = field(default_factory=Counter)  # rows left out, by reason
    rows: int = 0  # read, usable or not
    bytes: int = 0  # of the usable text, in UTF-8
    words: int = 0  # of the usable text, each row's end counted as one
    stretches: Sequence[Stretch] = ()  # of its sources, in their order

    def added_to(self, stretch: Stretch) -> Stretch:
        """A stretch that goes on with this corpus."""
        columns = list(self.columns.values())
        tokens = sum(len(sequences.tokens) for sequences in columns)
        return Stretch(stretch.rows + len(columns[0].lengths), stretch.tokens + tokens)

    def shared(self, other: "Corpus") -> int:
        """How many rows another corpus has as well; those of fewer than `TELLING` tokens, as `yes`, are not counted."""
        mine = self._telling()
        digests, theirs = self._beginnings(mine), set[tuple[Any, ...]]()
        count = len(next(iter(other.columns.values())).lengths)
        for start in range(0, count, BLOCK):
            rows = np.arange(start, min(start + BLOCK, count))
            theirs |= {other._row(row) for row in rows[np.isin(other._beginnings(rows), digests)]}
        for sequences in other.columns.values():
            sequences.let_go()
        return sum(self._row(row) in theirs for row in mine)

    def _telling(self) -> np.ndarray:
        return np.flatnonzero(sum(each.lengths.astype(np.int64) for each in self.columns.values()) >= TELLING)

    def _beginnings(self, rows: np.ndarray) -> np.ndarray:
        digests = np.zeros(len(rows), np.uint64)
        for place, name in enumerate(sorted(self.columns)):
            digests += self.columns[name].beginnings(rows) << np.uint64(place)
        return digests

    def _row(self, row: int) -> tuple[Any, ...]:
        texts = [self.columns[name].take(np.array([row])).tokens for name in sorted(self.columns)]
        return tuple(tokens.astype(np.uint32).tobytes() for tokens in texts)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all tokens and boundaries: two corpora that train alike have the same."""
        digest = hashlib.sha256()
        for name, sequences in sorted(self.columns.items()):
            # As version 0.1 kept them, whose runs are resumed.
            for array, dtype in ((sequences.tokens, np.int32), (sequences.offsets, np.int64)):
                digest.update(name.encode())
                for block in blocks(array):
                    digest.update(block.astype(dtype, copy=False).tobytes())
        return digest.hexdigest()


def load(recipe: Recipe, role: str, encode: Encode, keep_texts: bool = False) -> Corpus:
    """A whole split in memory, tokenised."""
    chunks = numbered(recipe.data, role, recipe.evaluation.group_by if role == "test" else ())
    return tokenised(recipe, role, chunks, encode, keep_texts)


def tokenised(
    recipe: Recipe, role: str, chunks: Iterable[tuple[int, Columns]], encode: Encode, keep_texts: bool
) -> Corpus:
    """Clean and tokenise rows; malformed ones are counted and skipped, or refused, as the recipe says.

    Raises RecipeError when rows are malformed and the recipe refuses that, or when none is left.
    """
    stretches, parts = [Stretch(0, 0)] * len(views(recipe.data, role)), []
    for number, chunk in chunks:
        parts.append(tokenise(recipe, chunk, encode, keep_texts))
        stretches[number] = parts[-1].added_to(stretches[number])
    rows, size, words = (sum(getattr(part, name) for part in parts) for name in COUNTS)
    joined = Corpus(
        {name: Sequences.join([part.columns[name] for part in parts]) for name in recipe.data.columns if parts},
        {name: [text for part in parts for text in part.texts[name]] for name in parts[0].texts} if parts else {},
        sum((part.refused for part in parts), Counter()),
        rows,
        size,
        words,
        stretches,
    )
    check_rows(joined, recipe, role)
    return joined


def check_rows(split: Corpus, recipe: Recipe, role: str) -> None:
    """Raises RecipeError when rows are malformed and the recipe refuses that, or when no text is left."""
    wrong = Counter({reason: count for reason, count in split.refused.items() if reason != AGAIN})
    if wrong and recipe.data.malformed == "refuse":
        said = describe(wrong)
        raise RecipeError(f"data.splits.{role}: malformed rows ({said}) and data.malformed is refuse")
    if not split.bytes:
        raise NothingUsable(f"data.splits.{role}: no usable row ({describe(split.refused) or 'it is empty'})")
    for number, (source, stretch) in enumerate(mixed(split, recipe) if role == "train" else ()):
        if stretch.tokens < 2:
            said = f"nothing to predict in {source.path or recipe.data.path}: {stretch.tokens} token(s)"
            raise NothingUsable(f"data.sources.{number}: {said}")


def tokenise(recipe: Recipe, chunk: Columns, encode: Encode, keep_texts: bool = False) -> Corpus:
    """Some rows, clean and tokenised; none of them may be usable."""
    pairs = recipe.objective == "translation"
    names = tuple(recipe.data.columns)
    refused: Counter = Counter()
    rows = len(chunk[names[0]])
    chunk = clean(chunk, names, refused, empty_allowed=not pairs)
    encoded = {name: Sequences.of(encode(chunk[name], name)) for name in names}
    if pairs:
        longest = np.max([sequences.lengths for sequences in encoded.values()], axis=0)
        kept = np.flatnonzero(longest <= recipe.data.max_length)
        if len(kept) < len(longest):
            refused["too long"] += len(longest) - len(kept)
            encoded = {name: sequences.take(kept) for name, sequences in encoded.items()}
            chunk = {name: [values[row] for row in kept] for name, values in chunk.items()}
    usable = [text for name in names for text in chunk[name]]
    size, words = sum(len(text.encode()) for text in usable), sum(len(text.split()) + 1 for text in usable)
    return Corpus(encoded, chunk if keep_texts else {}, refused, rows, size, words)


class Part(NamedTuple):
    """What is put in order by itself: a part of a stream, or a pool of the rows of a whole split."""

    number: int
    corpus: Corpus
    pool: int = 0  # of the corpus


class Parts:
    """The training split as `parts(epoch, first)` gives it: pool by pool, or a stream part by part in its order."""

    def __init__(
        self,
        recipe: Recipe,
        encode: Encode,
        end: Callable[[Corpus], int],
        say: Callable[[str], object],
        whole: Callable[[], Corpus] | None = None,
        pools: Callable[[Corpus], int] = lambda _: 1,
    ) -> None:
        """`end` is how much there is to predict in a part: those with nothing are passed over. Which these are is said
        once, as is what is left out of others. `whole` reads a split that is not streamed, otherwise into memory;
        `pools` is how many its rows are put in order in.

        Raises RecipeError when no part has anything.
        """
        self.recipe, self.encode, self.end, self.say, self.pools = recipe, encode, end, say, pools
        self.told: set[int] = set()  # parts
        if recipe.data.streaming:
            self.first = next((part.corpus for part in self._stream(0, 0)), Corpus({}))
        else:
            self.first = load(recipe, "train", encode) if whole is None else whole()
        if not self.first.columns or end(self.first) < 1:
            raise RecipeError("data.splits.train: there is nothing to predict")

    def __call__(self, epoch: int, first: int) -> Iterator[Part]:
        """The parts of an epoch from number `first` on."""
        if self.recipe.data.streaming:
            return _ahead(self._stream(epoch, first))
        return (Part(pool, self.first, pool) for pool in range(first, self.pools(self.first)))

    def _stream(self, epoch: int, first: int) -> Iterator[Part]:
        """Shards in an order that is drawn for each epoch; what is in a part changes places when batches are made."""
        size, key = self.recipe.data.part_rows, (self.recipe.seed, SHARDS, epoch)
        chunks = _regrouped(read(self.recipe.data, "train", skip=first * size, key=key), size)
        for number, rows in enumerate(chunks, start=first):
            try:
                part = tokenised(self.recipe, "train", [(0, rows)], self.encode, keep_texts=False)
                if self.end(part) < 1:
                    raise NothingUsable("too short for a single prediction")
                if part.refused:
                    self._tell(number, f": left out {describe(part.refused)}")
                yield Part(number, part)
            except NothingUsable as error:
                self._tell(number, f" is skipped: {error}")

    def _tell(self, number: int, what: str) -> None:
        if number not in self.told:
            self.say(f"part {number} of the stream{what}")
        self.told.add(number)


def _ahead(parts: Iterator[Part]) -> Iterator[Part]:
    """The same, each made in a thread while the one before it is used."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, parts, None)
        while (part := coming.result()) is not None:
            coming = pool.submit(next, parts, None)
            yield part


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


def vocabularies(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 over what decides the tokens of texts, on both sides where each has its own."""
    every = {id(side): side.backend_tokenizer.to_str() for side in sides(tokenizer)}
    return digest("".join(every.values()).encode())


def account(role: str, split: Corpus, usable: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """How much of a split is used, why not all of it, and how many of its tokens the tokenizer does not know."""
    left_out = f", left out {describe(split.refused)}" if split.refused else ""
    # Tokenizers that know every byte may have given its place to another token.
    known = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    unknown_id = None if tokenizer.unk_token_id in known else tokenizer.unk_token_id
    columns = split.columns.values()
    unknown = 0 if unknown_id is None else sum(sequences.count(unknown_id) for sequences in columns)
    total = sum(len(sequences.tokens) for sequences in columns)
    unread = f"; {unknown:,} of {total:,} tokens unknown to the tokenizer" if unknown else ""
    return f"{role}: {usable:,} rows of {split.rows:,}{left_out}{unread}"


def mixed(split: Corpus, recipe: Recipe) -> list[tuple[Source, Stretch]]:
    """The sources that the training split is mixed of, and what it holds of each; none where it is not mixed."""
    return list(zip(recipe.data.sources, split.stretches, strict=True)) if recipe.data.sources else []


def describe(refused: Counter) -> str:
    """`12 empty, 3 too long`"""
    return ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
