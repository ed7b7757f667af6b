"""The three commands beside what a user would try instead."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import texts
from benchmarks.__main__ import main


def told(rows: list[bytes], longest: int, row: bytes, alphabet: int) -> float:
    """Bits of a row and its end by Witten and Bell's recursion, from counts of everything."""
    after: dict[bytes, Counter] = {}
    for each in rows:
        signs = [*(bytes([sign]) for sign in each), b""]
        for place, sign in enumerate(signs):
            before = b"\0" * longest + each[:place]
            for length in range(longest + 1):
                after.setdefault(before[len(before) - length :] + b"|%d" % length, Counter())[sign] += 1
    bits = 0.0
    for place, sign in enumerate([*(bytes([sign]) for sign in row), b""]):
        chance, before = 1 / alphabet, b"\0" * longest + row[:place]
        for length in range(longest + 1):
            counts = after.get(before[len(before) - length :] + b"|%d" % length)
            if counts is not None:
                chance = (counts[sign] + len(counts) * chance) / (counts.total() + len(counts))
        bits -= math.log2(chance)
    return bits


def test_n_grams_are_those_of_the_recursion(monkeypatch):
    monkeypatch.setattr(texts, "LONGEST_CONTEXT", 3)
    rows, others = [b"abracadabra", b"barbarabar", b""], [b"cadabra", b"abba", b"xa"]
    grams = texts.NGrams(rows)
    for length, found in enumerate(grams.bits_per_byte(others)):
        expected = sum(told(rows, length, row, grams.base) for row in others) / sum(map(len, others))
        assert found == pytest.approx(expected), length


def test_chances_of_all_signs_are_one_together(monkeypatch):
    monkeypatch.setattr(texts, "LONGEST_CONTEXT", 2)
    rows = [bytes(row) for row in itertools.product(b"ab", repeat=3)]
    grams = texts.NGrams(rows)
    bits = {next_one: grams.bits_per_byte([b"aa" + next_one])[2] * (2 + len(next_one)) for next_one in (b"a", b"b")}
    ends = grams.bits_per_byte([b"aa"])[2] * 2
    common = told(rows, 2, b"aa", grams.base) - ends
    assert common == pytest.approx(0)
    assert all(value > ends for value in bits.values())


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["text", "causal_lm", "--data", str(tmp_path / "none")]) == 2
    assert "none is not there" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["text", "causal_lm", "--data", str(tmp_path / "empty")]) == 2
    assert "holds no file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["causal_lm", "masked_lm"])
def test_a_text_from_beginning_to_end(objective: str, tmp_path: Path) -> None:
    lines = [f"the {a} {b} sees a {c}." for a in ("old", "new") for b in ("cat", "dog", "owl") for c in ("fox", "bee")]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/all.txt").write_text("\n".join(lines * 200))
    words = ["text", objective, "--data", str(tmp_path / "lines"), "--minutes", "0.5"]
    assert main([*words, "--output_dir", str(tmp_path / "record")]) == 0
    record = json.loads((tmp_path / "record/text.json").read_text())
    assert str(tmp_path) not in json.dumps(record)
    name = record["headline"]
    ours, *others = (scores[name] for scores in record["scores"].values())
    low, high = record["scores"]["ours"].get("interval", (ours, ours))
    assert low <= ours <= high and len(others) == 2
    assert (low < high) == (objective == "causal_lm")
    assert record["steps"] > 0 and record["native"]["steps"] >= texts.TRIED
    assert (
        texts.cells(record, "here", "Abacus")[2] == f"{record['predicted_seconds']:.0f}, {record['train_seconds']:.0f}"
    )
