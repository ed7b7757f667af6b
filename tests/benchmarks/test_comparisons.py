"""Every kind of comparison runs and has its ratios. Never how fast anything is."""

from pathlib import Path

import pytest

from benchmarks.measures import TOLERANCE
from benchmarks.peers import OURS
from tests.benchmarks.tiny import run


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
                assert row["difference"] < TOLERANCE
        for ratio in result["ratios"].values():
            assert ("calls" in ratio) == words.startswith("generate")
            assert ratio["memory"] > 0 and 0 < ratio["speed"]["q1"] <= ratio["speed"]["median"] <= ratio["speed"]["q3"]
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(name in printed for name in expected) and "NOT the same" not in printed


def test_one_comparison_of_generation_can_be_chosen(tmp_path: Path) -> None:
    words = "generate --shape tiny-seq2seq --peer marian --new-tokens 3 --batch 3 --num-beams 2"
    (result,) = run(tmp_path, *words.split())
    assert result["title"] == "beam 2, 3 rows" and result["shape"]["batch"] == 3


def test_calls_are_counted_without_the_clock(tmp_path: Path) -> None:
    (result,) = run(tmp_path, *["calls", "--shape", "tiny-decoder", "--peer", "llama", "gpt2"])
    counts = {name: row["calls_per_token"] for name, row in result["contenders"].items()}
    assert counts.keys() == {OURS, "llama", "gpt2"} and min(counts.values()) > 100
    assert result["ratios"] == {name: {"calls": counts[OURS] / counts[name]} for name in ("gpt2", "llama")}
    assert not any("seconds" in row for row in result["contenders"].values())
    assert not (tmp_path / "benchmark.png").exists()


@pytest.mark.slow  # the compiler takes most of a minute
def test_compiled_generation_has_a_static_cache(tmp_path: Path) -> None:
    words = "generate --shape tiny-decoder --peer llama --batch 1 --new-tokens 3 --compile"
    (result,) = run(tmp_path, *words.split())
    graphs = {name: row["graphs"] for name, row in result["contenders"].items()}
    assert graphs.keys() == {OURS, "llama", "llama, static cache"} and graphs["llama"] == 0
    assert graphs[OURS] > 0 and graphs["llama, static cache"] > 0


@pytest.mark.parametrize("family", ["decoder", "encoder", "seq2seq"])
def test_padding_is_a_value_of_every_shape(family: str, tmp_path: Path) -> None:
    padded, full = (
        run(tmp_path, "train", "--shape", f"tiny-{family}", "--peer", "torch", switch)[0]["contenders"]
        for switch in ("--padded", "--no-padded")
    )
    for name in (OURS, "torch"):
        assert padded[name]["rounds"][0][1] < full[name]["rounds"][0][1], "tokens that are not padding"


def test_memory_is_that_of_the_prediction(tmp_path: Path) -> None:
    for result in run(tmp_path, "memory", "--shape", "tiny"):
        assert result["contenders"].keys() > {OURS, f"{OURS}, loss_only"}
        for name, row in result["contenders"].items():
            assert 0.9 < row["kept_of_predicted"] < 1.15 and 0.9 < row["peak_of_predicted"] < 1.15, (name, row)


def test_scaling(tmp_path: Path) -> None:
    words = "scaling --shape tiny-decoder --axis length --values 8 16"
    (result,) = run(tmp_path, *words.split())
    assert list(result["contenders"]) == ["length 8", "length 16"]
    assert 1 < result["exponents"]["operations"] < 2
    tokens = [row["rounds"][0][1] for row in result["contenders"].values()]
    assert tokens[0] == tokens[1]  # in shorter rows, but more of them
    assert not (tmp_path / "benchmark.png").exists()
