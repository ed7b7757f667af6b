"""Whole runs: Trainer's does as much work as ours."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import OURS
from tests import tiny_runs
from tests.benchmarks.tiny import run


@pytest.mark.parametrize("objective, native", [("translation", "marian"), ("masked_lm", "bert")])
def test_end_to_end(objective: str, native: str, tmp_path: Path) -> None:
    recipe = tiny_runs.write_recipe(tmp_path, objective, optimisation={"accumulation": 2})
    words = ["end-to-end", "--recipe", str(recipe), "--steps", "2", "--optimisation.label_smoothing", "0.1"]
    (result,) = run(tmp_path / "out", *words)
    names = [OURS, f"Trainer, {native}", *([f"Trainer, {native}, line by line"] if objective == "masked_lm" else [])]
    assert list(result["contenders"]) == names and set(result["ratios"]) == set(names[1:])
    sizes = [row["parameters"] for row in result["contenders"].values()]
    assert max(sizes) < 1.5 * min(sizes)  # tables of positions count for much in a model of this size
    ours, *others = (np.mean([tokens for _, tokens in row["rounds"]]) for row in result["contenders"].values())
    for tokens in others:  # two steps of two batches, which hold about as many non-padding tokens
        assert 0.5 < tokens / ours < 2
