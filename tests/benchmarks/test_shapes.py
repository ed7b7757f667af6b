"""Batches are padded and masked like text."""

import dataclasses

import pytest
import torch

from benchmarks.shapes import MASK, PAD, draw_batches
from tests.benchmarks.tiny import CPU, TINY
from training.objectives import IGNORED


def test_batches_are_padded_like_text() -> None:
    shape = dataclasses.replace(TINY["encoder"], batch=200, length=100)
    (batch,) = draw_batches(shape, 1, CPU)
    lengths = batch["attention_mask"].sum(1)
    assert lengths[0] == lengths.max() == 100 and 0.3 < float(lengths.float().mean()) / 100 < 0.5
    assert (batch["attention_mask"].diff() <= 0).all()  # on the right
    hidden = batch["labels"] != IGNORED
    assert (batch["input_ids"][hidden] == MASK).all() and not hidden[batch["attention_mask"] == 0].any()
    assert float(hidden.sum()) / float(lengths.sum()) == pytest.approx(0.15, abs=0.02)
    (pairs,) = draw_batches(dataclasses.replace(shape, family="seq2seq"), 1, CPU)
    targets = (pairs["labels"] != IGNORED).sum(1)
    assert (
        not torch.equal(targets, pairs["attention_mask"].sum(1))
        and (pairs["labels"][pairs["labels"] < 0] == IGNORED).all()
    )
    (rows,) = draw_batches(dataclasses.replace(shape, family="decoder"), 1, CPU)
    real = rows["attention_mask"] == 1
    assert torch.equal(rows["input_ids"][real], rows["labels"][real]) and (rows["labels"][~real] == IGNORED).all()


@pytest.mark.parametrize("family", TINY)
def test_rows_without_padding_are_full(family: str) -> None:
    (batch,) = draw_batches(dataclasses.replace(TINY[family], padded=False), 1, CPU)
    assert batch.keys() == {"input_ids", "labels"} and (batch["input_ids"] != PAD).all()
    predicted = (batch["labels"] != IGNORED).float().mean()
    assert predicted < 0.5 if family == "encoder" else predicted == 1
