"""Sizes of models and of the batches they are given, and such batches."""

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_scratch_transformer.tokenization import Family
from training.objectives import IGNORED, Batch

PAD, BOS, EOS, MASK, FIRST_WORD = range(5)
PRECISIONS = ("fp32", "tf32", "bf16")  # bf16: autocast in training, weights of that type elsewhere


@dataclass(frozen=True)
class Shape:
    """The size of a model and of the batches it is given. The tokens are drawn at random."""

    family: Family
    layers: int  # of each stack
    width: int
    heads: int
    feed_forward: int  # of the family's first peer; the others' makes up for what they have more or less elsewhere
    vocabulary: int
    length: int  # of the rows of a batch, padding included; of each side of a pair
    batch: int  # rows
    precision: str = "fp32"
    compile: bool = False
    padded: bool = True  # whether rows have the lengths of sentences, padded to `length`; else all are full

    def __post_init__(self) -> None:
        minima = {"vocabulary": FIRST_WORD + 1, "length": 4}
        errors = [
            f"{spec.name}={value!r} must be at least {minima.get(spec.name, 1)}"
            for spec in dataclasses.fields(self)
            if spec.type is int and (value := getattr(self, spec.name)) < minima.get(spec.name, 1)
        ]
        if not errors and self.width % self.heads:
            errors.append(f"heads={self.heads} must divide width={self.width}")
        if self.precision not in PRECISIONS:
            errors.append(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if errors:
            raise ValueError("; ".join(errors))


SHAPES = {
    "decoder": Shape("decoder", 6, 384, 6, 1024, 32000, 256, 8, padded=False),
    "encoder": Shape("encoder", 6, 384, 6, 1536, 32000, 128, 16),
    "seq2seq": Shape("seq2seq", 4, 256, 4, 1024, 32000, 64, 32),
    "gpt2-124m": Shape("decoder", 12, 768, 12, 2048, 50304, 1024, 32, "bf16", True, padded=False),
    "bert-110m": Shape("encoder", 12, 768, 12, 3072, 30528, 512, 32, "bf16", True),
    "transformer-63m": Shape("seq2seq", 6, 512, 8, 2048, 37056, 128, 128, "bf16", True),
    # So narrow that the interpreter, not the arithmetic, is what generating a token takes.
    "narrow-decoder": Shape("decoder", 6, 256, 4, 688, 8000, 256, 1, padded=False),
    "narrow-seq2seq": Shape("seq2seq", 6, 256, 4, 1024, 8000, 256, 1),
    "tiny-decoder": Shape("decoder", 2, 16, 2, 32, 64, 16, 4, padded=False),
    "tiny-encoder": Shape("encoder", 2, 16, 2, 32, 64, 16, 4),
    "tiny-seq2seq": Shape("seq2seq", 1, 16, 2, 32, 64, 16, 4),
}


def find_shapes(names: Iterable[str], **overrides: Any) -> dict[str, Shape]:
    """Shapes by name, with some fields replaced; `tiny` stands for all whose name starts with `tiny-`.

    Raises ValueError for an unknown name, with the nearest, or a field that cannot be.
    """
    found: dict[str, Shape] = {}
    for name in names:
        matches = [key for key in SHAPES if key == name or key.startswith(f"{name}-")]
        if not matches:
            raise ValueError(unknown("shape", name, SHAPES))
        found |= {key: dataclasses.replace(SHAPES[key], **overrides) for key in matches}
    return found


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A message for a name that is not known, with the one that was meant, perhaps."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1)
    return f"{what} {name!r} is not known: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def draw_lengths(rng: np.random.Generator, rows: int, max_length: int) -> np.ndarray:
    """Lengths of sentences [rows]: log-normal, as in real text, some 0.4 `max_length`, which is the first of them."""
    lengths = np.exp(rng.normal(np.log(0.35 * max_length), 0.6, rows)).round().clip(2, max_length).astype(np.int64)
    lengths[0] = max_length
    return lengths


def draw_texts(shape: Shape, count: int) -> list[list[int]]:
    """Token ids of texts of different lengths, in no order."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(draw_lengths(rng, count, shape.length))
    return [rng.integers(FIRST_WORD, shape.vocabulary, length).tolist() for length in lengths]


def draw_batches(shape: Shape, count: int, device: torch.device) -> list[Batch]:
    """Batches for training, in the terms of transformers: all tokens are predicted by a decoder, 15% are masked for an
    encoder, sources have targets for a seq2seq. Of a padded shape, padding is on the right, of both sides of a pair."""
    rng = np.random.default_rng(0)
    size = (shape.batch, shape.length)

    def draw_mask() -> np.ndarray:
        lengths = draw_lengths(rng, *size) if shape.padded else np.full(shape.batch, shape.length)
        return np.arange(shape.length) < lengths[:, None]

    batches = []
    for _ in range(count):
        ids = rng.integers(FIRST_WORD, shape.vocabulary, size)
        mask = draw_mask()
        labels = np.where(mask, ids, IGNORED)
        if shape.family == "encoder":
            masked = mask & (rng.random(size) < 0.15)
            masked[0, 0] = True
            labels, ids = np.where(masked, ids, IGNORED), np.where(masked, MASK, ids)
        elif shape.family == "seq2seq":
            labels = np.where(draw_mask(), rng.integers(FIRST_WORD, shape.vocabulary, size), IGNORED)
        batch = {"attention_mask": mask.astype(np.int64)} if shape.padded else {}
        batch |= {"input_ids": np.where(mask, ids, PAD), "labels": labels}
        batches.append({name: torch.from_numpy(values).to(device) for name, values in batch.items()})
    return batches
