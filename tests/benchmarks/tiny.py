"""What the tests of `benchmarks` share: tiny shapes, options, and a command line whose record is read back."""

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import main
from benchmarks.contenders import Options
from benchmarks.shapes import SHAPES

CPU = torch.device("cpu")
OPTIONS = Options(CPU, rounds=2, steps=1, warmup=1, texts=6, axis=("depth",))
TINY = {shape.family: shape for name, shape in SHAPES.items() if name.startswith("tiny")}


def run(folder: Path, *argv: str) -> list[dict[str, Any]]:
    """The results of a command line, as they are read back."""
    assert main([*argv, "--rounds", "2", "--warmup", "1", "--output_dir", str(folder)]) == 0
    record = json.loads((folder / "benchmark.json").read_text())
    installed = record["environment"]["packages"]["torch"]  # to which some builds of torch add what they are for
    assert torch.__version__.partition("+")[0] == installed.partition("+")[0]
    if "calls" not in argv:
        assert record["roofline"]["matmul"]["fp32"] > 0 and record["roofline"]["bandwidth"] > 0
    assert not list(folder.glob(".*"))
    return record["results"]
