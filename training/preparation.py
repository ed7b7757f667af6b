"""The training split as tokens on disk: made once, kept under the name of its content, and mapped into memory by every
process of every later start.

What is there under its name is complete. A preparation that is killed goes on where it last wrote down how far it was.
"""

import gc
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from pydantic import TypeAdapter
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from hf_scratch_transformer.files import remove, replacing, sha256, write_text
from hf_scratch_transformer.tokenization import sides

from . import corpus, sources
from .base_model import PATH
from .corpus import COUNTS, Corpus, Sequences, Stretch
from .objectives import OBJECTIVES, Objective
from .recipe import Recipe
from .sections import RecipeError
from .sources import Columns

FORM = 1  # of the files; another one has other names
RECORDED = 10.0  # seconds between the places at which a killed preparation goes on
YOUNG = 2.0  # seconds in which a file may change again within the grain of its time stamp
ABOUT, PROGRESS = "corpus.json", "progress.json"


def prepared(recipe: Recipe, objective: Objective, say: Callable[[str], object]) -> Corpus:
    """The training split, its tokens mapped from the cache, into which they are written if they are not there.

    Several processes may ask at once: one writes.

    Raises RecipeError as `corpus.check_rows`, and when the split cannot be read or the cache not written.
    """
    kind = {"tokenizer": corpus.vocabularies(objective.tokenizer), "end": objective.tokenizer.eos_token_id}
    if recipe.objective == "translation":
        kind["max_length"] = recipe.data.max_length
    with _kept(recipe, "tokens", kind) as folder:
        if folder is None:
            return corpus.load(recipe, "train", objective.encode)
        if folder.exists() and not _is_whole(folder):
            say(f"{folder} is damaged: it is made again")
            remove(folder)
        if not folder.exists():
            _write(folder, recipe, objective)
        split = _opened(folder)
    corpus.check_rows(split, recipe, "train")
    return split


def prepare(recipe: Recipe) -> None:
    """Put the tokens of the training split into the cache, ahead of a run, and say how many there are.

    Raises RecipeError as `prepared`, and when the recipe reads a stream.
    """
    if recipe.data.streaming:
        raise RecipeError("data.streaming: a stream is read as it comes, there is nothing to prepare")
    sources.check_splits(recipe.data)
    objective = OBJECTIVES[recipe.objective](recipe, tokenizer(recipe))
    split = prepared(recipe, objective, partial(print, file=sys.stderr))
    print(corpus.account("train", split, objective.examples(split), objective.tokenizer))
    total = sum(len(sequences.tokens) for sequences in split.columns.values())
    print(f"{total:,} tokens of {len(objective.tokenizer):,} kinds in {_cache(recipe)}")


def tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """The tokenizer of the recipe; one that is trained on the training split is kept with its tokens."""
    if recipe.tokenizer.path is not None or PATH in recipe.model:
        return corpus.make_tokenizer(recipe)
    with _kept(recipe, "tokenizer", recipe.tokenizer.model_dump()) as folder:
        if folder is None:
            return corpus.make_tokenizer(recipe)
        if not folder.exists():
            made = corpus.make_tokenizer(recipe)
            with replacing(folder) as temporary:
                made.save_pretrained(temporary)
        return corpus.read_tokenizer(folder, "data.cache")


# --- The cache ------------------------------------------------------------------------------------------------------


def _cache(recipe: Recipe) -> Path:
    return Path(recipe.data.cache or Path(HF_HOME, "scratch_transformer"))


@contextmanager
def _kept(recipe: Recipe, what: str, kind: Mapping[str, Any]) -> Iterator[Path | None]:
    """The place in the cache for what is made, in some way, of the training split, which this process alone may fill;
    none for what nothing is kept of.

    Raises RecipeError when the cache cannot be written.
    """
    cache, data = _cache(recipe), recipe.data
    try:
        files = sources.content(data, "train", partial(_digest, cache))
    except OSError as error:
        raise RecipeError(f"data.splits.train: cannot be read: {error}") from error
    if files is None:
        yield None
        return
    columns = [each.columns for each in sources.views(data)]
    read = {"files": files, "columns": columns, "sample_by": data.sample_by, "deduplicate": data.deduplicate}
    about = {"form": FORM, "objective": recipe.objective, **read, **kind}
    folder = cache / f"{what}-{corpus.digest(json.dumps(about, sort_keys=True).encode())[:32]}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            yield folder
    except OSError as error:
        raise RecipeError(f"data.cache: {cache} cannot be written: {error}") from error


def _digest(cache: Path, file: Path) -> str:
    """SHA-256 of a file, which is not read again as long as its size and time stamp are the same."""
    memory, path, stat = cache / "files.json", str(file.resolve()), file.stat()
    known: dict[str, tuple[int, int, str]] = {}
    with suppress(OSError, ValueError):
        known = TypeAdapter(dict[str, tuple[int, int, str]]).validate_json(memory.read_bytes())
    stamp = (stat.st_size, stat.st_mtime_ns)
    if path in known and known[path][:2] == stamp:
        return known[path][2]
    digest = sha256(file)
    if time.time() - stat.st_mtime > YOUNG:
        with suppress(OSError):  # the cache is asked for in earnest later on
            cache.mkdir(parents=True, exist_ok=True)
            write_text(memory, json.dumps(known | {path: (*stamp, digest)}, indent=1))
    return digest


# --- A split in it --------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """How far a preparation is."""

    chunks: int = 0  # of rows
    sizes: dict[str, int] = field(default_factory=dict)  # of files, bytes
    refused: Counter = field(default_factory=Counter)
    rows: int = 0
    bytes: int = 0
    words: int = 0
    stretches: list[Stretch] = field(default_factory=list)  # of the sources, in their order


def _opened(folder: Path) -> Corpus:
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    columns = {name: _mapped(folder, name, **dtypes) for name, dtypes in about["columns"].items()}
    stretches = [Stretch(*each) for each in about["stretches"]]
    rows, size, words = (about[name] for name in COUNTS)
    split = Corpus(columns, {}, Counter(about["refused"]), rows, size, words, stretches)
    split.__dict__["fingerprint"] = about["fingerprint"]  # which would read all of it
    return split


def _mapped(folder: Path, column: str, tokens: str, lengths: str) -> Sequences:
    arrays = []
    for path, dtype in ((folder / f"{column}.tokens", tokens), (folder / f"{column}.lengths", lengths)):
        arrays.append(np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype))
    return Sequences(*arrays)


def _is_whole(folder: Path) -> bool:
    """Whether the files have the sizes they were written with; their content is not read."""
    try:
        sizes = json.loads((folder / ABOUT).read_text(encoding="utf-8"))["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _write(folder: Path, recipe: Recipe, objective: Objective) -> None:
    """Read, clean and tokenise the split into a folder that takes its name in the end."""
    unfinished = folder.with_suffix(".partial")
    unfinished.mkdir(exist_ok=True)
    names = [f"{column}.{each}" for column in recipe.data.columns for each in ("tokens", "uint32")]
    most = max(map(len, sides(objective.tokenizer)))
    dtypes = {"tokens": "uint16" if most <= 2**16 else "uint32", "lengths": "uint32"}
    done = _progress(unfinished)
    chunks = islice(sources.numbered(recipe.data, "train"), done.chunks, None)
    done.stretches += [Stretch(0, 0)] * (len(sources.views(recipe.data)) - len(done.stretches))
    with ExitStack() as stack:
        stack.enter_context(_uncollected())
        files = {name: stack.enter_context(open(unfinished / name, "ab")) for name in names}
        for name, file in files.items():
            file.truncate(done.sizes.get(name, 0))
        text = "tokenising the training split"
        bar = stack.enter_context(tqdm(desc=text, initial=done.bytes, unit="B", unit_scale=True, delay=RECORDED))
        recorded = time.monotonic()
        tokenise = partial(corpus.tokenise, recipe, encode=objective.encode)
        for number, part in _ahead(tokenise, chunks):
            done.stretches[number] = part.added_to(done.stretches[number])
            for column, sequences in part.columns.items():
                files[f"{column}.tokens"].write(sequences.tokens.astype(dtypes["tokens"]).tobytes())
                files[f"{column}.uint32"].write(sequences.lengths.astype(dtypes["lengths"]).tobytes())
            done.chunks += 1
            done.refused += part.refused
            for count in COUNTS:
                setattr(done, count, getattr(done, count) + getattr(part, count))
            bar.update(part.bytes)
            if time.monotonic() - recorded > RECORDED:
                _record(unfinished, done, files)
                recorded = time.monotonic()
        _record(unfinished, done, files)
    columns = {}
    for column in recipe.data.columns:
        lengths = np.fromfile(unfinished / f"{column}.uint32", dtypes["lengths"])
        smallest = "uint16" if lengths.max(initial=0) < 2**16 else dtypes["lengths"]
        lengths.astype(smallest).tofile(unfinished / f"{column}.lengths")
        columns[column] = {"tokens": dtypes["tokens"], "lengths": smallest}
    whole = Corpus({column: _mapped(unfinished, column, **each) for column, each in columns.items()})
    sizes = {path.name: path.stat().st_size for path in unfinished.iterdir() if path.suffix in (".tokens", ".lengths")}
    about = vars(done) | {"columns": columns, "sizes": sizes, "fingerprint": whole.fingerprint}
    write_text(unfinished / ABOUT, json.dumps(about, indent=1))
    unfinished.rename(folder)
    for name in (PROGRESS, *(name for name in names if name.endswith(".uint32"))):  # which a later start would go on by
        (folder / name).unlink()


def _progress(folder: Path) -> Progress:
    """Where a preparation goes on: at its beginning, if the files are not what was written down."""
    with suppress(OSError, ValueError):
        done = TypeAdapter(Progress).validate_json((folder / PROGRESS).read_bytes())
        if all((folder / name).stat().st_size >= size for name, size in done.sizes.items()):
            return done
    return Progress()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cycles among the lists of a chunk's tokens, which are many and in none: a tenth of the time."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _ahead(
    work: Callable[[Columns], Corpus], chunks: Iterable[tuple[int, Columns]], count: int = 3
) -> Iterator[tuple[int, Corpus]]:
    """What becomes of each chunk, in order and with its number; a few are worked on at once, in threads."""
    waiting: deque[tuple[int, Future[Corpus]]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for number, chunk in chunks:
            waiting.append((number, pool.submit(work, chunk)))
            if len(waiting) > count:
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()


def _record(folder: Path, done: Progress, files: Mapping[str, BinaryIO]) -> None:
    """Write down how far the files are, once the disk has them."""
    for name, file in files.items():
        file.flush()
        os.fsync(file.fileno())
        done.sizes[name] = file.tell()
    write_text(folder / PROGRESS, json.dumps(vars(done)))
