"""The tutorials run from the first cell to the last, and at full length learn what they say."""

import json
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

FOLDER = Path(__file__).parents[1] / "examples"
PICTURES = {
    "encoder": {"bank.png", "attention.png"},
    "decoder": {"attention.png", "positions.png"},
    "seq2seq": {"attention.png"},
    "native": {"before.png", "after.png"},
}


def test_every_tutorial_is_tested():
    assert {path.stem for path in FOLDER.glob("*.py")} == PICTURES.keys()


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """What a tutorial prints, whose folder is then there."""

    def run(name: str, *steps: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", str(tmp_path / "folder"), *steps])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        assert [path.name for path in tmp_path.iterdir()] == ["folder"], "it writes elsewhere too"
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("decoder", "seq2seq"))) for name in PICTURES]
)
def test_a_tutorial_runs_to_its_end(name, printed, tmp_path):
    """Two steps of training: every cell, with a model that knows nothing."""
    printed(name, "2")
    folder, saved = tmp_path / "folder", "mistral" if name == "native" else "model"
    assert {path.name for path in folder.glob("*.png")} == PICTURES[name]
    assert all(np.ptp(imread(folder / picture)[..., :3]) > 0.5 for picture in PICTURES[name])
    config = json.loads((folder / saved / "config.json").read_text())
    assert config["model_type"] == ("mistral" if name == "native" else f"scratch_{name}")
    assert any((folder / saved).glob("*.py")) == (name != "native"), "a native model needs no code"


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.slow
def test_the_encoder_guesses_words_and_tells_meanings_apart(printed):
    text = printed("encoder")
    assert re.findall(r" -> (\w+) ", text) == ["fed", "counted", "bat"]
    assert numbers(r"(\d+)% sorted rightly", text)[0] > 90 > numbers(r"(\d+)% by always", text)[0]


@pytest.mark.slow
def test_the_decoder_learns_and_writes_the_same_with_and_without_cache(printed):
    text = printed("decoder")
    losses = numbers(r"step \d+: ([\d.]+)", text)
    assert losses[-1] < losses[0] / 2
    with_cache, without = re.findall(r"use_cache=\w+: (.+)", text)
    assert with_cache == without


@pytest.mark.slow
def test_the_translator_translates_sentences_that_it_has_not_seen(printed):
    greedy, beam = numbers(r"beam\(s\): (\d+) of 200 exactly", printed("seq2seq"))
    assert greedy > 60 and beam > 60


@pytest.mark.slow
def test_the_native_model_loses_by_every_change_and_gets_it_back(printed):
    native, ours, fewer, windowed, trained = numbers(r"loss ([\d.]+)", printed("native"))
    assert native == ours < fewer < windowed and trained < windowed - (windowed - native) / 2
