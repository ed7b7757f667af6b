"""Batches: which rows of a corpus, in what order, and what is drawn at random for each.

All of it is a pure function of the seed and the place in the run (epoch, part, batch, row): nothing carries state from
one batch to the next. A resumed run sees exactly the batches it would have seen, and any number of processes the same.
"""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

Key = tuple[int, ...]  # what random numbers depend on
# First number of each family of random draws, after the seed: families never share a generator.
ORDER, CONTENT, DROPOUT, EVALUATION, SHARDS = range(5)
IGNORED = -100  # label of a position without a target
POOL = 2**20  # rows of a pass, windows or pairs, that are put in order together
ROUNDS = 6  # of the network that numbers more of them


def permuted(numbers: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """What numbers below `count` become under a permutation of them all, which `rng` draws: it is computed, not stored.

    A Feistel network on numbers of an even number of bits, gone through again by those that leave the range (cycle
    walking; Black and Rogaway 2002).
    """
    half = -(-max(count - 1, 1).bit_length() // 2)
    keys = rng.integers(2**32, size=ROUNDS, dtype=np.uint64)
    numbers = numbers.astype(np.uint64)
    outside = np.ones(len(numbers), bool)
    while outside.any():
        numbers[outside] = _network(numbers[outside], keys, np.uint64(half))
        outside = numbers >= count
    return numbers.astype(np.int64)


def pool_rows(count: int, pool: int = 0, rng: np.random.Generator | None = None) -> np.ndarray:
    """The numbers of the rows that a pool of a pass over `count` rows holds.

    They are all of them, in order, where they are few or nothing is to be shuffled (no `rng`). Of more, they are a
    stretch of a permutation, so that the order of any number of rows takes no memory, and no time where a run goes on.
    A pool beyond the last is empty. Afterwards `rng` draws other numbers for each pool.
    """
    if rng is None or count <= POOL:
        return np.arange(count if pool == 0 else 0)
    rows = permuted(np.arange(pool * POOL, min((pool + 1) * POOL, count)), count, rng)
    generator: Any = rng.bit_generator
    generator.advance(pool << 64)
    return rows


def mixed_rows(
    counts: Sequence[int], rates: Sequence[float], key: Key, pool: int
) -> Iterator[tuple[int, np.ndarray, np.random.Generator]]:
    """What a pool of a pass over several sources at once holds of each.

    Args:
        counts: rows of each source. A pass has as many rows as all of them.
        rates: how many rows come from each, relative to one another. Of the first rows of a run, however many they are,
            it is that share but for less than a row a source; one that is used up begins again, in another order.
        key: (seed, purpose, epoch, ...)

    Yields a source, the numbers of rows of it, and a generator that draws the same for all rows of one pass over it.
    """
    seed, purpose, epoch, *_ = key
    total = sum(counts)
    begins, ends = (_shared(epoch * total + min(place * POOL, total), rates) for place in (pool, pool + 1))
    for source, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        while begin < end:
            number, first = divmod(begin, counts[source])
            taken = min(end - begin, counts[source] - first)
            yield source, np.arange(first, first + taken), np.random.default_rng((seed, purpose, number, source, 1))
            begin += taken


def _shared(rows: int, rates: Sequence[float]) -> Iterator[int]:
    """How many of the first rows come from each source: with each row one of the numbers is one more."""
    for place, rate in enumerate(rates):
        taken = math.floor(rows * (rate / sum(rates[place:])))
        rows -= taken
        yield taken


def _network(numbers: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    """A permutation of the numbers of `2 * half` bits."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64; its upper bits depend on all of a number
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(0xD6E8FEB86659FD93)
        left, right = right, left ^ (mixed >> np.uint64(32)) & mask
    return (left << half) | right


def bucket(lengths: np.ndarray, budget: int, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Cut rows into batches of like length within a budget of padded tokens.

    Args:
        lengths: [rows, sides] tokens of each side of each row.
        budget: the most that rows × longest side of a batch may be; no row may be longer.
        rng: which of the rows of equal lengths come together, and the order of the batches; without it both are fixed.

    Returns row numbers, one array a batch; every row is in exactly one.
    """
    longest = lengths.max(axis=1).astype(np.int64)  # of which a smaller type has no products
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


@dataclass(frozen=True)
class Draws:
    """Random numbers for rows of a batch: they depend on the key of the batch and on a row's number in it alone."""

    key: Key
    rows: np.ndarray  # [rows] their numbers

    def random(self, *shape: int) -> np.ndarray:
        """[rows, *shape] float64, uniform in [0, 1)"""
        key = np.random.SeedSequence(self.key).generate_state(2, np.uint64)
        generators = (np.random.Generator(np.random.Philox(key=key, counter=[0, row, 0, 0])) for row in self.rows)
        return np.stack([generator.random(shape) for generator in generators])


class Batches(Dataset):
    """The batches of one part of an epoch: item i is built when asked for, in whichever process asks, which builds the
    rows alone that are its share."""

    def __init__(
        self,
        plan: list[np.ndarray],
        collate: Callable[[np.ndarray, Draws, int], dict[str, torch.Tensor]],
        targets: str,
        key: Key = (0,),
        first_step: int = 0,
        accumulation: int = 1,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """
        Args:
            plan: [rows, ...] of each batch, what its rows are made of.
            collate: builds a batch from such rows, random draws, and the step it belongs to.
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
        """This process's rows of a batch, and the number of targets in them."""
        process, processes = self.share
        mine = np.arange(len(self.plan[index]))[process::processes]
        # Fewer rows than processes: take part, with nothing to predict.
        rows = mine if len(mine) else np.zeros(1, np.int64)
        step = self.first_step + index // self.accumulation
        batch = self.collate(self.plan[index][rows], Draws((*self.key, index), rows), step)
        if not len(mine):
            batch[self.targets].fill_(IGNORED)
        return batch, int((batch[self.targets] != IGNORED).sum())

    def loader(self, start: int, workers: int, pin: bool) -> DataLoader:
        """From batch `start` to the end, in order."""
        order = range(start, len(self))
        return DataLoader(
            self, batch_size=None, sampler=order, num_workers=workers, pin_memory=pin, worker_init_fn=_go_on
        )


def _go_on(worker: int) -> None:
    """Leave signals to the process that trains, and saves: it tells its workers to end, and they see it if it is gone.
    Launchers, schedulers and terminals signal all of them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
