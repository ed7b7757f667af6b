"""Measures are fair and count right."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import measures
from benchmarks.comparisons import Comparison, compare_calls, compare_training
from benchmarks.contenders import Contender, Generation, Training
from benchmarks.measures import TOLERANCE, Round, measure
from benchmarks.peers import OURS
from benchmarks.shapes import Shape
from tests.benchmarks.tiny import OPTIONS, TINY

# --- Turns ----------------------------------------------------------------------------------------------------------


class Fake(Contender):
    """Takes `cost` seconds a step, and `setup` more that are not to count, by the clock that it shares."""

    def __init__(self, name: str, cost: float, world: SimpleNamespace, batches: Any = (3, 5, 7), setup: float = 0.0):
        self.name, self.cost, self.world, self.batches, self.setup_seconds = name, cost, world, batches, setup

    def build(self) -> None:
        self.world.log.append((self.name, "build"))
        if self.cost == math.inf:
            raise torch.OutOfMemoryError("too large")

    def step(self, batch: int) -> torch.Tensor:
        self.world.log.append((self.name, batch))
        self.world.now += self.cost
        return torch.zeros(())

    def wait(self) -> None:
        self.world.log.append((self.name, "wait"))
        self.world.now += self.setup_seconds / 2  # so that it is seen where the clock is read

    def tokens(self, batch: int) -> int:
        return batch


def world() -> SimpleNamespace:
    return SimpleNamespace(now=0.0, log=[])


def test_contenders_take_turns_on_the_same_batches() -> None:
    it = world()
    results = measures.interleave([Fake("a", 1, it), Fake("b", 4, it)], rounds=2, steps=2, clock=lambda: it.now)
    steps = [entry for entry in it.log if entry[1] != "wait"]
    assert steps == [(name, batch) for pair in ((3, 5), (7, 3)) for name in "ab" for batch in pair]
    assert results == {"a": [Round(2, 8), Round(2, 10)], "b": [Round(8, 8), Round(8, 10)]}


def test_the_clock_waits_for_the_device_and_leaves_out_what_is_done_once() -> None:
    it = world()
    results = measures.interleave([Fake("a", 1, it, setup=0.5)], rounds=1, steps=3, clock=lambda: it.now)
    assert [entry for _, entry in it.log] == ["wait", 3, 5, 7, "wait"]
    assert results["a"][0].seconds == pytest.approx(3 + 0.25 - 0.5)  # of two waits the second is inside


def test_what_does_not_fit_into_memory_is_left_out() -> None:
    it, notes = world(), []
    ready, graphs = measures.warm_up([Fake("large", math.inf, it), Fake("small", 1, it)], 2, notes)
    assert [contender.name for contender in ready] == ["small"] and graphs == {"small": 0}
    assert notes == ["large: out of memory"]
    assert [entry for entry in it.log if entry[0] == "small"][:3] == [("small", "build"), ("small", 3), ("small", 5)]


def test_ratios_are_of_rounds_and_the_best_peer_comes_first() -> None:
    # Both slow down fivefold in the second round, as when the machine is busy: ratios of rounds do not see it.
    rounds = {
        OURS: [(1, 10), (5, 10), (1, 10)],
        "a slow one": [(4, 10), (20, 10), (4, 10)],
        "b fast one": [(2, 10), (10, 10), (3, 10)],
    }
    rows = {name: {"rounds": [Round(*each) for each in some], "peak_bytes": 8} for name, some in rounds.items()}
    rows[OURS]["peak_bytes"] = 2
    ratios = measures.ratios(rows)
    assert list(ratios) == ["b fast one", "a slow one"]
    assert ratios["a slow one"] == {"speed": {"median": 4, "q1": 4, "q3": 4}, "memory": 0.25}
    assert ratios["b fast one"]["speed"] == {"median": 2, "q1": 2, "q3": 2.5}


def test_exponents_are_slopes_for_a_row_of_the_batch() -> None:
    shapes = {size: dataclasses.replace(TINY["decoder"], batch=64 // size) for size in (4, 8, 16)}
    ready = [Training(f"length {size}", nn.Identity, (), shape, OPTIONS, True) for size, shape in shapes.items()]
    # Of a row: time grows with the square, operations in proportion, memory not at all.
    rows = {
        f"length {size}": {
            "rounds": [Round(seconds * size**2 * shape.batch, 1) for seconds in (1.0, 3.0)],
            "flops": size * shape.batch,
            "peak_bytes": shape.batch,
        }
        for size, shape in shapes.items()
    }
    grown = measures.exponents("length", {f"length {size}": size for size in shapes}, ready, rows)
    assert grown["seconds"]["median"] == pytest.approx(2) and grown["in_the_limit"] == 2
    assert grown["operations"] == pytest.approx(1) and grown["peak_bytes"] == pytest.approx(0, abs=1e-9)


# --- Counting -------------------------------------------------------------------------------------------------------


def training(shape: Shape, name: str) -> Training:
    """A contender, built."""
    (ours, *others) = next(compare_training(shape, [name] if name != OURS else [], OPTIONS)).contenders
    contender = others[0] if others else ours
    assert isinstance(contender, Training)
    contender.build()
    return contender


def test_operations_are_those_of_the_formula() -> None:
    shape = dataclasses.replace(TINY["decoder"], feed_forward=48)
    tokens, width = shape.batch * shape.length, shape.width
    weights = shape.layers * (4 * width**2 + 3 * width * shape.feed_forward) + width * shape.vocabulary
    attention = 12 * shape.layers * tokens * shape.length * width  # two products, and twice that backward
    # Older versions multiply positions by frequencies as matrices.
    assert measures.operations(training(shape, "llama")) == pytest.approx(6 * tokens * weights + attention, rel=1e-4)
    # Ours has no logits where there is nothing to predict: at the last token of each row.
    last = 6 * shape.batch * width * shape.vocabulary
    assert measures.operations(training(shape, OURS)) == 6 * tokens * weights + attention - last


def test_peak_memory_is_what_a_step_takes_and_gives_back() -> None:
    def step(batch: int) -> None:
        torch.empty(batch).fill_(1.0).exp().sum()  # two of them at once

    peak = measures.peak_bytes(SimpleNamespace(options=OPTIONS, batches=[10**6], step=step))
    assert peak == pytest.approx(8 * 10**6, rel=0.01)


def test_peak_memory_sees_the_logits_of_others() -> None:
    shape = dataclasses.replace(TINY["decoder"], vocabulary=20_000)
    logits = 4 * shape.batch * shape.length * shape.vocabulary
    assert measures.peak_bytes(training(shape, "llama")) > 3 * logits


def test_calls_are_those_of_the_interpreter_and_the_same_again() -> None:
    class Counted(Generation):
        def step(self, batch: int) -> torch.Tensor:
            for _ in range(batch):
                max(batch, len("ab"))
            return torch.zeros(())

    def counted(times: int) -> float:
        arguments = {"max_new_tokens": 4}
        return measures.calls_per_token(Counted("", nn.Identity, [times], TINY["decoder"], OPTIONS, True, arguments))

    assert counted(8) - counted(0) == 8 * 2 / 4  # of two built-in functions, for each of four tokens
    for contender in next(compare_calls(TINY["decoder"], ["llama"], OPTIONS)).contenders:
        contender.build()
        contender.step(contender.batches[0])
        assert isinstance(contender, Generation)
        assert measures.calls_per_token(contender) == measures.calls_per_token(contender)


def test_different_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_from = measures.convert_from

    def wrong(model: Any) -> Any:
        copied = convert_from(model)
        copied.model.norm.weight.data *= 1.5
        return copied

    comparison = next(compare_training(TINY["decoder"], ["llama"], OPTIONS))
    notes: list[str] = []
    found = measures.verify(comparison.check(), notes)
    assert not notes and all(each["difference"] < TOLERANCE for each in found.values())
    monkeypatch.setattr(measures, "convert_from", wrong)
    found = measures.verify(comparison.check(), notes)
    assert found["llama"]["difference"] > TOLERANCE and "llama: NOT the same numbers" in notes[0]


def test_a_loss_that_is_not_finite_ends_it() -> None:
    class Broken(nn.Linear):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.weight.sum() * math.nan)

    comparison = next(compare_training(TINY["decoder"], [], OPTIONS))
    ours = comparison.check()[0]
    broken = dataclasses.replace(ours, name="broken", make=lambda: Broken(2, 2), is_ours=False, arguments={})
    with pytest.raises(ValueError, match="peer broken: its loss is nan"):
        measures.verify([ours, broken], [])


def test_a_comparison_without_ours_has_no_ratios() -> None:
    """When ours does not fit into memory, what the others do is still told."""
    it = world()
    comparison = Comparison("train", "step", [Fake(OURS, math.inf, it), Fake("peer", 1, it)])
    result = measure(comparison, OPTIONS)
    assert list(result["contenders"]) == ["peer"] and "ratios" not in result
    assert result["notes"] == [f"{OURS}: out of memory"]
