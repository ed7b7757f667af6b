"""Engines side by side: what is measured of them, and what is said of those that cannot be run."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import deployment, engines
from benchmarks.__main__ import main
from hf_scratch_transformer import ScratchDecoderForCausalLM, ScratchSeq2SeqForConditionalGeneration
from hf_scratch_transformer.tokenization import config_fields, train_tokenizer
from tests import tiny

TEXTS = [
    f"the {word} sat on the {place} and looked at me" for word in ("cat", "dog") for place in ("mat", "hat", "cot")
]
CLASSES = {"decoder": ScratchDecoderForCausalLM, "seq2seq": ScratchSeq2SeqForConditionalGeneration}


@pytest.fixture(params=["seq2seq", pytest.param("decoder", marks=pytest.mark.slow)])
def folder(request, tmp_path):
    tokenizer = train_tokenizer(TEXTS, family=request.param, vocab_size=300, min_frequency=1)
    model = tiny.model(CLASSES[request.param], **config_fields(tokenizer, request.param))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / request.param)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    return tmp_path / request.param


def words(folder: Path, **options: object) -> list[str]:
    given = {"texts": folder.parent / "texts.txt", "rows": 3, "prompt": 4, "new-tokens": 8, "rounds": 2, "threads": 1}
    given |= {"output_dir": folder.parent / "record"} | options
    return ["engines", str(folder), *(f"--{name}={value}" for name, value in given.items())]


def test_what_is_not_installed_says_so_and_the_rest_is_compared(folder, monkeypatch):
    """The same engine twice stands for two."""
    base, *_, other = engines.CONTENDERS
    known = deployment.find_spec
    monkeypatch.setattr(deployment, "find_spec", lambda name: None if name == other.module else known(name))
    monkeypatch.setattr(deployment, "CONTENDERS", [base, dataclasses.replace(base, engine="again"), other])
    assert main(words(folder)) == 0
    record = json.loads((folder.parent / "record/engines.json").read_text())
    first, again, missing = record["results"]
    assert missing["refused"] == "not installed: pip install llama-cpp-python"
    assert again["equal"] == again["texts"] == 3 and "written" not in again
    assert len(again["rounds"]) == 2 and first["speed"]["median"] == 1
    assert 1e8 < again["memory_bytes"] < 1e10 and again["disk_bytes"] > 4 * record["model"]["parameters"]
    assert 0 < again["first_token_seconds"]["median"] < 8 / again["tokens_per_second"]["median"]
    assert ("bleu" in again) == (folder.name == "seq2seq")
    assert [len(deployment.cells(row)) for row in record["results"]] == [len(deployment.HEAD)] * 3


@pytest.mark.parametrize("folder", ["decoder"], indirect=True)
def test_an_engine_that_fails_says_its_last_word(folder):
    with pytest.raises(ValueError, match="Error: .*nothing"):
        engines.Running(engines.CONTENDERS[0], folder / "nothing", engines.Settings(False, None, [], 1))


def test_tokens_that_differ_are_counted():
    class Words:
        def decode(self, tokens, skip_special_tokens):
            return " ".join("abcdefghij"[token] * 3 for token in tokens)

    rows = [{"written": [[1, 2, 3, 4, 5]] * 2}, {"written": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]}, {"refused": "no"}]
    deployment.judge(rows, engines.Settings(True, 0, [9], 1), Words(), None)
    assert [row.get("equal") for row in rows] == [2, 1, None]
    assert rows[0]["bleu"] == pytest.approx(100) and 30 < rows[1]["bleu"] < 100
    assert deployment.until_end([1, 9], engines.Settings(True, 0, [9], 1)) == [1]


@pytest.mark.parametrize(
    "options, message",
    [({"rows": 0}, "--rows 0 must be at least 1"), ({"rows": 9}, "has 6 lines that are not empty")],
    ids=str,
)
def test_words_that_cannot_be(folder, options, message, capsys):
    assert main(words(folder, **options)) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_is_not_there(tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("a\nb\nc")
    assert main(words(tmp_path / "none")) == 2
    assert "none" in capsys.readouterr().err
