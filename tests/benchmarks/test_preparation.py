"""The benchmark of preparations: what it writes is what it measured."""

import json

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import preparation


def test_the_text_is_drawn_from_the_seed_and_has_the_length_asked_for():
    text = "".join(preparation.lines(30_000, seed=1))
    assert text == "".join(preparation.lines(30_000, seed=1)) != "".join(preparation.lines(30_000, seed=2))
    words = text.split()
    assert len(words) * preparation.PER_WORD >= 30_000 and text.count("\n") % preparation.LINES == 0
    assert 1000 < len(set(words)) < len(words) / 3, "a few words make up most of it"


@pytest.mark.parametrize("words", [["--tokens", "7"], ["--rounds", "0"]])
def test_what_cannot_be_measured_is_refused(words, tmp_path, capsys):
    assert benchmarks.main(["prepare", *words, "--output_dir", str(tmp_path / "record")]) == 2
    assert f"{words[0]} {words[1]} must be at least" in capsys.readouterr().err and not (tmp_path / "record").exists()


@pytest.mark.slow
def test_the_record_holds_what_was_measured(tmp_path, capsys):
    words = ["prepare", "--tokens", "2000000", "--rounds", "2", "--output_dir", str(tmp_path)]
    assert benchmarks.main(words) == 0
    record = json.loads((tmp_path / "preparation.json").read_text())
    assert record["tokens"] > 1e6 and 2 < record["bytes_per_token"] < 2.3
    ratios = zip(record["tenth_tokens_per_second"], record["tokenizer_alone_tokens_per_second"], strict=True)
    low, high = sorted(one / other for one, other in ratios)
    assert record["of_tokenizer_alone"] == pytest.approx((low + high) / 2)
    assert 0 < record["seconds_to_first_step_resumed"] < 60 and record["training_memory_mb_above"] < 400
    assert "of_tokenizer_alone" in capsys.readouterr().out
