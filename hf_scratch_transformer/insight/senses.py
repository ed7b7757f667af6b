"""How well a model tells the senses of a word apart: one vector a sense, and the nearest one wins.

The measure of Loureiro et al. (2021), "Analysis and Evaluation of Language Models for Word Sense Disambiguation": a
sense's vector is the mean of the word's contextual vectors over the training sentences of that sense, a test sentence
takes the sense whose vector is nearest by cosine, and the score of a word is the macro-averaged F1 of its senses. A
contextual vector is the last hidden state, averaged over the pieces that the word is split into; there, with BERT, it
is the sum of the last four. An encoder that guesses masked words can read the sentence with the word masked, too: what
stands in its place then is of the context alone. A third vector is the mean of the whole sentence, after those of
contexts in Schütze (1998), "Automatic Word Sense Discrimination".
"""

import argparse
import csv
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ..embedding import BATCH_TOKENS, batches_by_length, check_ids, longest_input, padded
from ..files import reading, weights
from .plot import open_model, open_tokenizer

LAST_LAYERS = 1
READINGS = ("shown", "masked", "context")
ROUNDING = 1e-6  # of a dimension of a vector of length 1, in single precision
RESAMPLED = 1000  # times, for an interval
FIGURES = ("accuracy", "macro_f1", "most_frequent")
COLUMNS = ("word", "split", "sense", "position", "sentence")


@dataclass(frozen=True)
class Occurrence:
    """A word in a sentence: `words[position]`."""

    words: tuple[str, ...]
    position: int

    def __post_init__(self) -> None:
        if not 0 <= self.position < len(self.words):
            raise ValueError(
                f"position={self.position} is not a word of a sentence of {len(self.words)}: {' '.join(self.words)!r}"
            )


@dataclass
class Examples:
    """The sentences of one word, and the sense that it has in each."""

    train: list[tuple[Occurrence, str]]
    test: list[tuple[Occurrence, str]]
    leave_one_out: bool = False  # the test is the training sentences, each told by the other ones

    def leaving_one_out(self) -> "Examples":
        """Of the training sentences alone, so that something can be chosen without a look at the test."""
        return Examples(self.train, self.train, leave_one_out=True)


@dataclass(frozen=True)
class Score:
    """Of one word: sentences and senses, and, in percent, how often the nearest sense is the right one."""

    senses: int
    train: int
    test: int
    accuracy: float
    macro_f1: float
    most_frequent: float  # accuracy of always answering the sense most frequent in training


def read(path: str | Path) -> dict[str, Examples]:
    """Labelled sentences: a folder in the format of CoarseWSD-20, or a tab-separated file.

    The folder holds `train.data.txt`, `train.gold.txt`, `test.data.txt`, `test.gold.txt` and `classes_map.txt`, or one
    such folder for each word. The file's first line names its columns: word, split (train or test), sense, position
    (of the word in the sentence, from 0; may be empty where the word stands in it exactly once), sentence.

    Raises:
        ValueError: naming file and line, when one of them is not so.
    """
    path = Path(path)
    if path.is_file():
        return _read_table(path)
    folders = [path] if (path / "train.data.txt").exists() else sorted(p.parent for p in path.glob("*/train.data.txt"))
    if not folders:
        raise ValueError(f"{path} is no tab-separated file, nor a folder with train.data.txt in it or one level deeper")
    return {folder.name: Examples(_read_folder(folder, "train"), _read_folder(folder, "test")) for folder in folders}


def _read_folder(folder: Path, split: str) -> list[tuple[Occurrence, str]]:
    labels = folder / "classes_map.txt"
    with reading(labels):
        names = json.loads(labels.read_text(encoding="utf-8"))
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f'{labels} must name each sense, {{"0": "river", ...}}')
    with reading(folder):
        lines = (folder / f"{split}.data.txt").read_text(encoding="utf-8").splitlines()
        gold = (folder / f"{split}.gold.txt").read_text(encoding="utf-8").split()
    if len(lines) != len(gold):
        raise ValueError(
            f"{folder}: {len(lines)} sentences in {split}.data.txt, {len(gold)} senses in {split}.gold.txt"
        )
    examples = []
    for number, (line, sense) in enumerate(zip(lines, gold, strict=True), 1):
        position, _, sentence = line.partition("\t")
        place = f"{folder / split}.data.txt, line {number}"
        examples.append(_example(place, names.get(sense, sense), position, sentence))
    return examples


def _read_table(path: Path) -> dict[str, Examples]:
    words: dict[str, Examples] = {}
    with reading(path), path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        columns, lines = rows.fieldnames or (), [(rows.line_num, row) for row in rows]
    if missing := set(COLUMNS) - set(columns):
        raise ValueError(
            f"{path}: no column {', '.join(sorted(missing))}; the first line must name {', '.join(COLUMNS)}"
        )
    for number, row in lines:
        place = f"{path}, line {number}"
        if row["split"] not in ("train", "test"):
            raise ValueError(f"{place}: split={row['split']!r} must be train or test")
        examples = words.setdefault(row["word"], Examples([], []))
        position = row["position"] or _only_position(place, row["word"], row["sentence"] or "")
        getattr(examples, row["split"]).append(_example(place, row["sense"], position, row["sentence"] or ""))
    if not words:
        raise ValueError(f"{path}: no sentence follows its first line")
    return words


def _only_position(place: str, word: str, sentence: str) -> str:
    places = [index for index, other in enumerate(sentence.split()) if other.lower() == word.lower()]
    if len(places) != 1:
        raise ValueError(f"{place}: {word!r} stands {len(places)} times in {sentence!r}; give its position")
    return str(places[0])


def _example(place: str, sense: str, position: str, sentence: str) -> tuple[Occurrence, str]:
    try:
        return Occurrence(tuple(sentence.split()), int(position)), sense
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


@torch.inference_mode()
def contextual_vectors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    occurrences: Sequence[Occurrence],
    last_layers: int = LAST_LAYERS,
    special_tokens: bool = True,
    batch_tokens: int = BATCH_TOKENS,
    readings: Sequence[str] = READINGS[:1],
) -> Tensor:
    """The vector of each word in its sentence, (occurrences, readings · D) in single precision on the CPU.

    Args:
        model: an encoder or a decoder without head; a long sentence is cut, around the word, to what it can take.
        last_layers: how many layers are summed, from 1 to as many as the model has.
        special_tokens: put those of the tokenizer around the sentence. A model trained on windows cut out of running
            text, as ours are, has mostly seen none.
        batch_tokens: padded tokens at a time.
        readings: "shown", the word in the sentence as it is; "masked", with each piece of it a mask token; "context",
            the mean of all pieces of the sentence as it is. Of several, the vectors stand side by side, each of length
            1, so that the cosine of two such is the mean of theirs.

    Raises:
        ValueError: of a word too long for the model, no layers or more than it has, readings of other names or one
            twice, a tokenizer without a mask token, or a vector that is not finite.
    """
    check_readings(readings)
    if "masked" in readings and tokenizer.mask_token_id is None:
        raise ValueError("readings: masked is for a tokenizer with a mask token, and this one has none")
    near = [cut(tokenizer, occurrence, longest_input(model, tokenizer)) for occurrence in occurrences]
    encoded = tokenizer(
        [list(one.words) for one in near], is_split_into_words=True, add_special_tokens=special_tokens, verbose=False
    )
    batches = list(batches_by_length([len(ids) for ids in encoded["input_ids"]], batch_tokens))
    words = [encoded.word_ids(row) for row in range(len(near))]
    pieces = [
        [place for place, word in enumerate(row) if word == one.position] for row, one in zip(words, near, strict=True)
    ]
    averaged = dict.fromkeys(("shown", "masked"), pieces)
    averaged["context"] = [[place for place, word in enumerate(row) if word is not None] for row in words]
    vectors = {how: [torch.empty(0)] * len(near) for how in readings}
    turns = [(masking, rows) for masking in sorted({how == "masked" for how in vectors}) for rows in batches]
    for masking, rows in tqdm(turns, unit="batch", leave=False, disable=len(turns) < 2):
        ids = [list(encoded["input_ids"][row]) for row in rows]
        if masking:
            for row, tokens in zip(rows, ids, strict=True):
                for place in pieces[row]:
                    tokens[place] = tokenizer.mask_token_id
        check_ids(model, ids)
        outputs = model(**padded(model, ids)[0], output_hidden_states=True)
        layers = outputs.hidden_states[1:]  # the first is the embedding
        if not 1 <= last_layers <= len(layers):
            raise ValueError(f"last_layers={last_layers} must be 1 to {len(layers)}, which the model has")
        layers = layers[-last_layers:]
        states = torch.stack([layer.float() for layer in layers]).sum(0).cpu()  # (B, T, D)
        for how in vectors:
            if (how == "masked") == masking:
                for place, row in enumerate(rows):
                    vectors[how][row] = states[place, averaged[how][row]].mean(0)
    found = [torch.stack(each) for each in vectors.values()]
    if not all(each.isfinite().all() for each in found):
        raise ValueError("a vector is not finite: the weights of the model are not, or its numbers do not hold them")
    return found[0] if len(found) == 1 else torch.cat([F.normalize(each, dim=-1) for each in found], dim=-1)


def check_readings(readings: Sequence[str]) -> None:
    """Raises ValueError unless they are some of `READINGS`, each once."""
    if isinstance(readings, str) or not readings or set(readings) - set(READINGS) or len(set(readings)) < len(readings):
        raise ValueError(f"readings={readings!r} must be a list of some of {', '.join(READINGS)}, each once")


def cut(tokenizer: PreTrainedTokenizerBase, occurrence: Occurrence, limit: int) -> Occurrence:
    """The words around the one in question, as many on either side, that fit into `limit` tokens, with specials."""
    encoded = tokenizer(list(occurrence.words), is_split_into_words=True, add_special_tokens=False, verbose=False)
    sizes = Counter(encoded.word_ids())
    if not sizes[occurrence.position]:
        raise ValueError(f"the tokenizer leaves nothing of {occurrence.words[occurrence.position]!r}")
    first = last = occurrence.position
    room = limit - tokenizer.num_special_tokens_to_add() - sizes[occurrence.position]
    if room < 0:
        word = occurrence.words[occurrence.position]
        raise ValueError(f"{word!r} is {sizes[occurrence.position]} pieces long; the model takes {limit} tokens")
    growing = True
    while growing:
        growing = False
        if first > 0 and sizes[first - 1] <= room:
            first, room, growing = first - 1, room - sizes[first - 1], True
        if last + 1 < len(occurrence.words) and sizes[last + 1] <= room:
            last, room, growing = last + 1, room - sizes[last + 1], True
    return Occurrence(occurrence.words[first : last + 1], occurrence.position - first)


def score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Examples, **options: Any) -> Score:
    """Sense vectors from the training sentences of one word, tried on its test sentences.

    Args:
        options: as `answers`.
    """
    return scored(examples, answers(model, tokenizer, examples, **options))


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    unit_variance: bool = False,
    **options: Any,
) -> list[str]:
    """The sense whose vector is nearest to that of each test sentence.

    Args:
        unit_variance: each dimension, of vectors of length 1, over its standard deviation in the training sentences,
            whatever their senses, so that a few dimensions do not outweigh all others (Timkey & van Schijndel 2021).
            They subtract the mean, too, which loses in CoarseWSD-20 (benchmarks/ablations). One or two sentences of
            each sense are too few to tell deviations by.
        options: as `contextual_vectors`.
    """
    if not examples.train or not examples.test:
        raise ValueError(f"{len(examples.train)} training and {len(examples.test)} test sentences: both are needed")

    def vectors(part: Sequence[tuple[Occurrence, str]]) -> Tensor:
        found = contextual_vectors(model, tokenizer, [occurrence for occurrence, _ in part], **options)
        return F.normalize(found, dim=-1) if unit_variance else found

    train = vectors(examples.train)
    deviation = train.std(0, correction=0) if unit_variance else torch.ones(train.shape[1])
    deviation[deviation < ROUNDING] = 1  # what does not vary
    train = train / deviation
    known = [sense for _, sense in examples.train]
    senses = sorted(set(known))
    own = torch.tensor([senses.index(sense) for sense in known])
    sums = torch.zeros(len(senses), train.shape[1]).index_add_(0, own, train)  # as good as means, by cosine
    if examples.leave_one_out:
        nearness = torch.cosine_similarity(train[:, None], sums[None], dim=-1)  # (sentences, senses)
        others = torch.cosine_similarity(train, sums[own] - train, dim=-1)
        is_alone = own.bincount()[own] == 1
        nearness[torch.arange(len(own)), own] = others.masked_fill(is_alone, -math.inf)
    else:
        test = vectors(examples.test) / deviation
        nearness = torch.cosine_similarity(test[:, None], sums[None], dim=-1)
    return [senses[index] for index in nearness.argmax(-1).tolist()]


def scored(examples: Examples, predicted: Sequence[str]) -> Score:
    """These answers to the test sentences, beside the right ones."""
    known, gold = ([sense for _, sense in part] for part in (examples.train, examples.test))
    frequent = Counter(known).most_common(1)[0][0]
    return Score(
        senses=len(set(known)),
        train=len(known),
        test=len(gold),
        accuracy=100 * sum(map(str.__eq__, predicted, gold)) / len(gold),
        macro_f1=100 * macro_f1(predicted, gold),
        most_frequent=100 * gold.count(frequent) / len(gold),
    )


def macro_f1(predicted: Sequence[str], gold: Sequence[str]) -> float:
    """The mean, over all classes that occur, of the harmonic mean of precision and recall."""
    guessed, wanted = Counter(predicted), Counter(gold)
    right = Counter(one for one, other in zip(predicted, gold, strict=True) if one == other)
    classes = guessed.keys() | wanted.keys()
    return sum(2 * right[name] / (guessed[name] + wanted[name]) for name in classes) / len(classes)


def interval(told: Sequence[tuple[Sequence[str], Sequence[str]]]) -> list[float]:
    """Where the mean macro-F1 of words, in percent, would lie in 95 of 100 cases if other test sentences had been
    drawn, by the bootstrap (Efron 1979) of the sentences of each, of which what was predicted and what is right is
    given."""
    draw, means = random.Random(0), []
    for _ in range(RESAMPLED):
        again = [draw.choices(list(zip(*pair, strict=True)), k=len(pair[0])) for pair in told]
        means.append(statistics.mean(100 * macro_f1(*zip(*pairs, strict=True)) for pairs in again))
    cuts = statistics.quantiles(means, n=40, method="inclusive")
    return [cuts[0], cuts[-1]]


def add_commands(subparsers: Any) -> None:
    """`scratch-transformer senses`."""
    parser = subparsers.add_parser("senses", help="how well a model tells the senses of a word apart")
    parser.add_argument("model", help="folder or Hub id of an encoder or a decoder with its tokenizer")
    parser.add_argument("data", help="folder in the format of CoarseWSD-20, or a tab-separated file")
    parser.add_argument("--last-layers", type=int, default=LAST_LAYERS, help="how many layers are summed")
    parser.add_argument(
        "--read",
        type=_readings,
        default=READINGS[0],
        metavar="+".join(READINGS),
        help="some of: the word as it is, where it is masked, the mean of the sentence; side by side (%(default)s)",
    )
    parser.add_argument(
        "--unit-variance",
        action="store_true",
        help="each dimension over its standard deviation in the word's training sentences",
    )
    parser.add_argument("--no-special-tokens", action="store_true", help="sentences bare, without [CLS] and the like")
    parser.add_argument(
        "--leave-one-out",
        action="store_true",
        help="of the training sentences, each by the other ones: to choose by, without a look at the test",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that a repository brings along")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=run)


def _readings(text: str) -> list[str]:
    """Those of `--read`."""
    names = text.split("+")
    try:
        check_readings(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, joined by +") from None
    return names


def open_device(name: str) -> torch.device:
    """The device of a name, `cuda:1` for one. Raises ValueError if there is none here."""
    present = {"cpu": 1}
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        present[accelerator.type] = torch.accelerator.device_count()
    with suppress(RuntimeError):  # of a name that torch does not know
        device = torch.device(name)
        if (device.index or 0) < present.get(device.type, 0):
            return device
    raise ValueError(f"--device {name}: not here; there is {', '.join(present)}")


def run(arguments: argparse.Namespace) -> None:
    if arguments.last_layers < 1:
        raise ValueError(f"--last-layers {arguments.last_layers} must be at least 1")
    device = open_device(arguments.device)
    words = read(arguments.data)
    # Before they are read, since a training may replace them meanwhile.
    of = {"weights": weights(Path(arguments.model))} if arguments.json else {}
    trust = {"trust_remote_code": arguments.trust_remote_code}
    tokenizer = open_tokenizer(arguments.model, **trust)
    model = open_model(arguments.model, AutoModel, attention=None, **trust).to(device)
    if model.config.is_encoder_decoder:
        raise ValueError(f"{arguments.model} reads and writes: it is encoders and decoders that have one vector a word")
    options = {
        "last_layers": arguments.last_layers,
        "special_tokens": not arguments.no_special_tokens,
        "readings": arguments.read,
        "unit_variance": arguments.unit_variance,
    }
    scores, told = {}, []
    for word, examples in tqdm(words.items(), unit="word", disable=arguments.json):
        if arguments.leave_one_out:
            examples = examples.leaving_one_out()
        try:
            predicted = answers(model, tokenizer, examples, **options)
        except ValueError as error:
            raise ValueError(f"{arguments.data}, {word}: {error}") from error
        scores[word] = scored(examples, predicted)
        told.append((predicted, [sense for _, sense in examples.test]))
    low, high = interval(told)
    mean = {name: statistics.mean(getattr(one, name) for one in scores.values()) for name in FIGURES}
    if arguments.json:
        whole: dict[str, Any] = {"words": {word: asdict(one) for word, one in scores.items()}, "mean": mean}
        whole |= {"macro_f1_interval": [low, high], "options": options | {"leave_one_out": arguments.leave_one_out}}
        print(json.dumps(whole | of, indent=1))
        return
    table = Table("word", *(Column(name.replace("_", " "), justify="right") for name in Score.__annotations__))
    for word, one in scores.items():
        counts = [str(getattr(one, name)) for name in ("senses", "train", "test")]
        table.add_row(word, *counts, *(f"{getattr(one, name):.1f}" for name in FIGURES))
    table.add_section()
    table.add_row("mean", "", "", "", *(f"{value:.1f}" for value in mean.values()))
    Console().print(table)
    part = "training" if arguments.leave_one_out else "test"
    print(f"{part} macro_f1: {mean['macro_f1']:.4g} (95%: {low:.4g} to {high:.4g})")
