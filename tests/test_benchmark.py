"""The benchmark: that it is fair, that it counts right, and that every kind runs. Never how fast anything is."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import tiny_runs
from training import benchmark, peers
from training.benchmark import Comparison, Round, main
from training.peers import IGNORED, NATIVES, OURS, PEERS, SHAPES, Options, Shape, Training

CPU = torch.device("cpu")
OPTIONS = Options(CPU, 2, 1, 1, None, 6, ("depth",), (), "fused", None, None, ())
TINY = {shape.family: shape for name, shape in SHAPES.items() if name.startswith("tiny")}


def run(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The results of a command line, as they are read back."""
    assert main([*words, "--rounds", "2", "--warmup", "1", "--output_dir", str(folder)]) == 0
    record = json.loads((folder / "benchmark.json").read_text())
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert record["roofline"]["matmul"]["fp32"] > 0 and record["roofline"]["bandwidth"] > 0
    assert not list(folder.glob(".*"))
    return record["results"]


# --- Turns ----------------------------------------------------------------------------------------------------------


class Fake(peers.Contender):
    """Takes `cost` seconds a step, and `once` more that are not to count, by the clock that it shares."""

    def __init__(self, name: str, cost: float, world: SimpleNamespace, batches: Any = (3, 5, 7), once: float = 0.0):
        self.name, self.cost, self.world, self.batches, self.once = name, cost, world, batches, once

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
        self.world.now += self.once / 2  # so that it is seen where the clock is read

    def tokens(self, batch: int) -> int:
        return batch


def world() -> SimpleNamespace:
    return SimpleNamespace(now=0.0, log=[])


def test_contenders_take_turns_on_the_same_batches() -> None:
    it = world()
    results = benchmark.interleave([Fake("a", 1, it), Fake("b", 4, it)], rounds=2, steps=2, clock=lambda: it.now)
    steps = [entry for entry in it.log if entry[1] != "wait"]
    assert steps == [(name, batch) for pair in ((3, 5), (7, 3)) for name in "ab" for batch in pair]
    assert results == {"a": [Round(2, 8), Round(2, 10)], "b": [Round(8, 8), Round(8, 10)]}


def test_the_clock_waits_for_the_device_and_leaves_out_what_is_done_once() -> None:
    it = world()
    results = benchmark.interleave([Fake("a", 1, it, once=0.5)], rounds=1, steps=3, clock=lambda: it.now)
    assert [entry for _, entry in it.log] == ["wait", 3, 5, 7, "wait"]
    assert results["a"][0].seconds == pytest.approx(3 + 0.25 - 0.5)  # of two waits the second is inside


def test_what_does_not_fit_into_memory_is_left_out() -> None:
    it, notes = world(), []
    ready, graphs = benchmark.warm_up([Fake("large", math.inf, it), Fake("small", 1, it)], 2, notes)
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
    ratios = benchmark.ratios(rows)
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
    grown = benchmark.exponents("length", {f"length {size}": size for size in shapes}, ready, rows)
    assert grown["seconds"]["median"] == pytest.approx(2) and grown["in_the_limit"] == 2
    assert grown["operations"] == pytest.approx(1) and grown["peak_bytes"] == pytest.approx(0, abs=1e-9)


# --- Shapes, batches, peers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("decoder", "encoder", "seq2seq", "gpt2-124m"))
def test_all_have_as_many_parameters(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        target = peers.parameters(NATIVES[peers.reference(shape.family)].make(shape))
        for peer in PEERS.values():
            if shape.family in peer.families:
                own = peers.sized(peer.make, shape, target)
                assert peers.parameters(peer.make(own)) == pytest.approx(target, rel=0.02)


def test_ours_has_the_size_of_the_peer_it_is_like() -> None:
    for family, shape in TINY.items():
        like = peers.reference(family)
        ours = peers.ours(shape, like)
        assert ours.config.model_type == f"scratch_{family}"
        # A bias that Marian keeps as a constant is a parameter of ours.
        assert peers.parameters(ours) - peers.parameters(NATIVES[like].make(shape)) in (0, shape.vocabulary)


def test_batches_are_padded_like_text() -> None:
    shape = dataclasses.replace(TINY["encoder"], batch=200, length=100)
    (batch,) = peers.batches(shape, 1, CPU)
    lengths = batch["attention_mask"].sum(1)
    assert lengths[0] == lengths.max() == 100 and 0.3 < float(lengths.float().mean()) / 100 < 0.5
    assert (batch["attention_mask"].diff() <= 0).all()  # on the right
    hidden = batch["labels"] != IGNORED
    assert (batch["input_ids"][hidden] == peers.MASK).all() and not hidden[batch["attention_mask"] == 0].any()
    assert float(hidden.sum()) / float(lengths.sum()) == pytest.approx(0.15, abs=0.02)
    (pairs,) = peers.batches(dataclasses.replace(shape, family="seq2seq"), 1, CPU)
    targets = (pairs["labels"] != IGNORED).sum(1)
    assert (
        not torch.equal(targets, pairs["attention_mask"].sum(1))
        and (pairs["labels"][pairs["labels"] < 0] == IGNORED).all()
    )
    (rows,) = peers.batches(dataclasses.replace(shape, family="decoder"), 1, CPU)
    assert rows.keys() == {"input_ids", "labels"} and torch.equal(rows["input_ids"], rows["labels"])


CHECKOUT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.table = nn.Linear(config.vocab_size, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        logits = self.table(F.one_hot(idx, self.config.vocab_size).float())
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


def test_a_checkout_and_a_function_are_called_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(CHECKOUT)
    (tmp_path / "some_peer.py").write_text("from training.peers import NATIVES\nbuild = NATIVES['llama'].make\n")
    monkeypatch.syspath_prepend(tmp_path)
    shape = TINY["decoder"]
    (batch,) = peers.batches(shape, 1, CPU)
    model: Any = peers.find_peer(f"nanogpt={tmp_path}").make(shape)
    assert model.gpt.config.block_size == shape.length and model.gpt.config.n_embd == shape.width
    logits = model.gpt.table.weight.T[batch["input_ids"][:, :-1]]
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    torch.testing.assert_close(model(**batch).loss, expected)
    (result,) = run(
        tmp_path / "out", "train", "--shape", "tiny-decoder", "--peer", "some_peer:build", f"nanogpt={tmp_path}"
    )
    assert result["contenders"]["some_peer:build"]["difference"] < benchmark.TOLERANCE
    assert result["ratios"].keys() == {"some_peer:build", f"nanogpt={tmp_path}"}


# --- Counting -------------------------------------------------------------------------------------------------------


def training(shape: Shape, name: str) -> Training:
    """A contender, built."""
    (ours, *others) = next(benchmark.compare_training(shape, [name] if name != OURS else [], OPTIONS)).contenders
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
    assert benchmark.operations(training(shape, "llama")) == pytest.approx(6 * tokens * weights + attention, rel=1e-4)
    # Ours has no logits where there is nothing to predict: at the last token of each row.
    last = 6 * shape.batch * width * shape.vocabulary
    assert benchmark.operations(training(shape, OURS)) == 6 * tokens * weights + attention - last


def test_peak_memory_is_what_a_step_takes_and_gives_back() -> None:
    def step(batch: int) -> None:
        torch.empty(batch).fill_(1.0).exp().sum()  # two of them at once

    peak = benchmark.peak_bytes(SimpleNamespace(options=OPTIONS, batches=[10**6], step=step))
    assert peak == pytest.approx(8 * 10**6, rel=0.01)


def test_peak_memory_sees_the_logits_of_others() -> None:
    shape = dataclasses.replace(TINY["decoder"], vocabulary=20_000)
    logits = 4 * shape.batch * shape.length * shape.vocabulary
    assert benchmark.peak_bytes(training(shape, "llama")) > 3 * logits


def test_different_numbers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_from = benchmark.convert_from

    def wrong(model: Any) -> Any:
        copied = convert_from(model)
        copied.model.norm.weight.data *= 1.5
        return copied

    comparison = next(benchmark.compare_training(TINY["decoder"], ["llama"], OPTIONS))
    notes: list[str] = []
    found = benchmark.verify(comparison.check(), notes)
    assert not notes and all(each["difference"] < benchmark.TOLERANCE for each in found.values())
    monkeypatch.setattr(benchmark, "convert_from", wrong)
    found = benchmark.verify(comparison.check(), notes)
    assert found["llama"]["difference"] > benchmark.TOLERANCE and "llama: NOT the same numbers" in notes[0]


def test_a_loss_that_is_not_finite_ends_it() -> None:
    class Broken(nn.Linear):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=self.weight.sum() * math.nan)

    comparison = next(benchmark.compare_training(TINY["decoder"], [], OPTIONS))
    ours = comparison.check()[0]
    broken = dataclasses.replace(ours, name="broken", make=lambda: Broken(2, 2), is_ours=False, arguments={})
    with pytest.raises(ValueError, match="peer broken: its loss is nan"):
        benchmark.verify([ours, broken], [])


# --- Every kind -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            "train --shape tiny-decoder --peer llama torch --peer-optimizer foreach",
            ["llama", "llama, mask given", "torch"],
        ),
        ("train --shape tiny-encoder --peer modernbert-sparse distilbert", ["modernbert-sparse", "distilbert"]),
        ("train --shape tiny-seq2seq --peer marian torch", ["marian", "torch"]),
        ("generate --shape tiny-decoder --peer gpt2 --new-tokens 3", ["gpt2"]),
        ("generate --shape tiny-seq2seq --peer bart --new-tokens 3", ["bart"]),
        ("embed --shape tiny-encoder --peer bert --texts 7", ["bert"]),
    ],
)
def test_every_comparison_has_ratios(
    words: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run(tmp_path, *words.split())
    assert len(results) == (1 if not words.startswith("generate") else 3 if "seq2seq" in words else 2)
    for result in results:
        assert set(result["ratios"]) == set(expected) == result["contenders"].keys() - {OURS}
        for name, row in result["contenders"].items():
            assert len(row["rounds"]) == 2 and all(seconds > 0 and tokens > 0 for seconds, tokens in row["rounds"])
            assert row["flops"] > 0 and row["peak_bytes"] > 0 and row["times_roofline"] > 0
            if name.split(",")[0] in ("llama", "gpt2", "distilbert", "bert", "marian", "bart"):
                assert row["difference"] < benchmark.TOLERANCE
        for ratio in result["ratios"].values():
            assert ratio["memory"] > 0 and 0 < ratio["speed"]["q1"] <= ratio["speed"]["median"] <= ratio["speed"]["q3"]
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(name in printed for name in expected) and "NOT the same" not in printed


def test_scaling(tmp_path: Path) -> None:
    words = "scaling --shape tiny-decoder --axis length --values 8 16"
    (result,) = run(tmp_path, *words.split())
    assert list(result["contenders"]) == ["length 8", "length 16"]
    assert 1 < result["exponents"]["operations"] < 2
    tokens = [row["rounds"][0][1] for row in result["contenders"].values()]
    assert tokens[0] == tokens[1]  # in shorter rows, but more of them
    assert not (tmp_path / "benchmark.png").exists()


def test_roofline_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "roofline") == []
    assert "GFLOP/s" in capsys.readouterr().out


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
    for tokens in others:  # two steps of two batches, which hold about as many real tokens
        assert 0.5 < tokens / ours < 2


@pytest.mark.parametrize(
    "words, message",
    [
        ("trian", "did you mean train?"),
        ("train --shape decodr", "did you mean decoder?"),
        ("train --peer lama", "did you mean llama?"),
        ("train --peer nothing.here:build", "No module named"),
        ("train --peer nanogpt=nowhere", "give nanogpt=PATH"),
        ("train --shape tiny-decoder --peer bert", "is for encoder shapes"),
        ("embed --shape tiny-decoder", "embed is for encoder shapes"),
        ("train --shape tiny --width 15", "heads=2 must divide width=15"),
        ("train --shape tiny --batch 0 --precision fp8", "batch=0 must be at least 1; precision='fp8' must be one of"),
        ("train --bogus 3", "unrecognized arguments: --bogus"),
        ("train --rounds many", "invalid int value"),
        ("train --rounds 0", "--rounds 0 must be at least 1"),
        ("scaling --values 3 4", "along one --axis"),
        ("generate --shape tiny-decoder --new-tokens 16", "leave no room for a prompt"),
        ("end-to-end", "needs --recipe"),
        ("end-to-end --recipe nowhere.yaml", "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--output_dir", str(tmp_path / "out")]) == 2
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_comparison_without_ours_has_no_ratios() -> None:
    """When ours does not fit into memory, what the others do is still told."""
    it = world()
    comparison = Comparison("train", "step", [Fake(OURS, math.inf, it), Fake("peer", 1, it)])
    result = benchmark.run(comparison, OPTIONS)
    assert list(result["contenders"]) == ["peer"] and "ratios" not in result
    assert result["notes"] == [f"{OURS}: out of memory"]


def test_the_readme_says_what_the_records_say() -> None:
    root = Path(__file__).parents[1]
    records = {path.parent.name: json.loads(path.read_text()) for path in root.glob("benchmarks/*/benchmark.json")}
    rows = re.findall(
        r"^\| \[(.+?)\]\(benchmarks/(\w+)/benchmark\.json\) \| (.+?) \| ([\d.]+)× \| (?:([\d.]+)×)? *\|$",
        (root / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 10
    for label, folder, peer, speed, memory in rows:
        (ratio,) = (
            result["ratios"][peer]
            for result in records[folder]["results"]
            if f"{result['name'] or result['kind']}, {result['title']}" == label
        )
        assert f"{ratio['speed']['median']:.2f}" == speed, label
        assert memory == (f"{ratio['memory']:.2f}" if "memory" in ratio else ""), label
