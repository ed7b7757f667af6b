"""Tokens of byte-level BPE taken apart, in training, into what they were merged from: words are read and written in
several ways, which a small corpus has too few of.

As StochasTok (Sims et al. 2025) does it, after the tokenizer has run, so that tokens can be kept on disk; BPE-dropout
(Provilkov et al. 2020) leaves merges out instead while the tokenizer runs.
"""

import json

import numpy as np
from transformers import PreTrainedTokenizerFast

from .corpus import Sequences

LEVELS = 3  # how often a token can come apart: into eight at most


def merged_from(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """[vocabulary, 2] int64: the two tokens that each was merged from, -1 where there are none."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ids, parts = model["vocab"], np.full((len(tokenizer), 2), -1)
    for left, right in reversed(model.get("merges", [])):  # of several ways to one token the first counts
        parts[ids[left + right]] = ids[left], ids[right]
    return parts


def split(sequences: Sequences, parts: np.ndarray, wanted: np.ndarray) -> Sequences:
    """Some tokens of each sequence replaced by the two that they were merged from.

    Args:
        parts: [vocabulary, 2], of `merged_from`.
        wanted: [levels, sequences, most] whether the token at a place is to come apart, if it can; of each level but
            the first, among what the one before has made. A sequence that would be longer than `most` stays as it is.
    """
    most = wanted.shape[-1]
    for level in wanted:
        starts, lengths = sequences.offsets[:-1], sequences.lengths.astype(np.int64)
        row = np.repeat(np.arange(len(lengths)), lengths)
        apart = level[row, np.arange(len(row)) - starts[row]] & (parts[sequences.tokens, 0] >= 0)
        longer = lengths + np.bincount(row[apart], minlength=len(lengths))
        apart &= longer[row] <= most
        tokens = np.repeat(sequences.tokens, 1 + apart)
        first = (np.arange(len(row)) + np.cumsum(apart) - apart)[apart]
        tokens[first], tokens[first + 1] = parts[sequences.tokens[apart]].T
        sequences = Sequences(tokens, np.where(longer <= most, longer, lengths))
    return sequences
