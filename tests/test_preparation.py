"""Tokens on disk: made once, the same as in memory, found again by their content, never half-written."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests import tiny_runs
from training import corpus, preparation, sources
from training.__main__ import main
from training.objectives import OBJECTIVES
from training.recipe import parse
from training.sections import RecipeError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def opened(folder, cache, *words, objective="translation"):
    recipe = parse([str(tiny_runs.write_recipe(folder, objective)), "--data.cache", str(cache), *words])
    return recipe, OBJECTIVES[recipe.objective](recipe, preparation.tokenizer(recipe))


def tokens(cache):
    (folder,) = cache.glob("tokens-*[!k]")
    return folder


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_what_is_prepared_is_what_would_lie_in_memory(objective, tmp_path, cache):
    recipe, opener = opened(tmp_path, cache, objective=objective)
    expected = corpus.load(recipe, "train", opener.encode)
    for _ in range(2):
        split = preparation.prepared(recipe, opener, print)
        assert split.fingerprint == expected.fingerprint == corpus.Corpus(split.columns).fingerprint
        for name in (*corpus.COUNTS, "refused"):
            assert getattr(split, name) == getattr(expected, name)
    for name, sequences in split.columns.items():
        assert isinstance(sequences.tokens, np.memmap) and sequences.tokens.dtype == np.uint16
        assert (tokens(cache) / f"{name}.tokens").stat().st_size == 2 * len(sequences.tokens)
        assert (sequences.offsets == expected.columns[name].offsets).all()


def test_a_later_start_reads_no_row_again(tmp_path, cache, monkeypatch):
    recipe, opener = opened(tmp_path, cache)
    before = preparation.prepared(recipe, opener, print)
    monkeypatch.setattr(sources, "numbered", None)
    monkeypatch.setattr(corpus, "read", None)
    again = parse([str(tmp_path / "recipe.yaml"), "--data.cache", str(cache), "--seed=7", "--data.batch_tokens=70"])
    assert preparation.tokenizer(again).get_vocab() == opener.tokenizer.get_vocab()
    assert preparation.prepared(again, opener, print).fingerprint == before.fingerprint
    other = parse([str(tmp_path / "recipe.yaml"), "--data.cache", str(cache), "--data.max_length=5"])
    with pytest.raises(TypeError):
        preparation.prepared(other, opener, print)


def test_a_file_that_changes_is_seen_and_one_that_moves_is_known(tmp_path, cache, monkeypatch):
    recipe, opener = opened(tmp_path, cache)
    before = preparation.prepared(recipe, opener, print).fingerprint
    path = tmp_path / "corpus" / "train.en"
    stamp, text = path.stat(), path.read_text()
    path.write_text(text.replace("one", "two", 1))  # of the same size, and by its stamp as old
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert preparation.prepared(recipe, opener, print).fingerprint != before
    path.write_text(text)
    shutil.copytree(tmp_path / "corpus", tmp_path / "moved")
    monkeypatch.setattr(sources, "numbered", None)
    moved = parse([str(tmp_path / "recipe.yaml"), "--data.cache", str(cache), "--data.path", str(tmp_path / "moved")])
    assert preparation.prepared(moved, opener, print).fingerprint == before


def test_the_digest_of_a_file_that_rests_is_not_computed_again(tmp_path, cache, monkeypatch):
    path = tmp_path / "text"
    path.write_text("text")
    os.utime(path, (1, 1))
    first = preparation._digest(cache, path)
    (cache / "files.json").write_text((cache / "files.json").read_text().replace(first, "remembered"))
    assert preparation._digest(cache, path) == "remembered"
    os.utime(path, (2, 2))
    assert preparation._digest(cache, path) == first
    for broken in ("[]", '{"a": 1}', "{"):
        (cache / "files.json").write_text(broken)
        assert preparation._digest(cache, path) == first


def test_a_preparation_that_is_killed_goes_on(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 7)
    monkeypatch.setattr(preparation, "RECORDED", 0.0)
    recipe, opener = opened(tmp_path, cache)
    expected = corpus.load(recipe, "train", opener.encode)
    honest, seen = preparation._record, []

    def stop(folder, done, files):
        honest(folder, done, files)
        if done.chunks == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "_record", stop)
    with pytest.raises(KeyboardInterrupt):
        preparation.prepared(recipe, opener, print)
    (unfinished,) = cache.glob("*.partial")
    with open(unfinished / "source.tokens", "ab") as file:
        file.write(b"what was written after the last record")
    monkeypatch.setattr(preparation, "_record", honest)
    encode = opener.encode
    monkeypatch.setattr(opener, "encode", lambda texts, column: seen.extend(texts) or encode(texts, column))
    assert preparation.prepared(recipe, opener, print).fingerprint == expected.fingerprint
    assert len(seen) == 2 * (60 - 4 * 7) and not list(cache.glob("*.partial"))


@pytest.mark.parametrize("moment", ["corpus.json", "rename", "shorter"])
def test_a_preparation_that_is_killed_at_its_end_goes_on(moment, tmp_path, cache, monkeypatch):
    recipe, opener = opened(tmp_path, cache)
    expected = corpus.load(recipe, "train", opener.encode).fingerprint

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "rename":
            honest = Path.rename
            patch.setattr(Path, "rename", lambda path, to: stop() if path.suffix == ".partial" else honest(path, to))
        else:
            honest = preparation.write_text
            patch.setattr(
                preparation, "write_text", lambda path, _: stop() if path.name == "corpus.json" else honest(path, _)
            )
        preparation.prepared(recipe, opener, print)
    (unfinished,) = cache.glob("*.partial")
    if moment == "shorter":  # than the disk was asked for
        with open(unfinished / "target.tokens", "r+b") as file:
            file.truncate(9)
    split = preparation.prepared(recipe, opener, print)
    assert split.fingerprint == expected == corpus.Corpus(split.columns).fingerprint
    names = {"corpus.json", *(f"{column}.{each}" for column in recipe.data.columns for each in ("tokens", "lengths"))}
    assert {path.name for path in tokens(cache).iterdir()} == names


def test_what_is_damaged_is_made_again_which_is_said(tmp_path, cache, capsys):
    recipe, opener = opened(tmp_path, cache)
    before = preparation.prepared(recipe, opener, print).fingerprint
    for name in ("source.tokens", "target.lengths", "corpus.json"):
        with open(tokens(cache) / name, "r+b") as file:
            file.truncate(5)
        assert preparation.prepared(recipe, opener, print).fingerprint == before
        assert "is damaged: it is made again" in capsys.readouterr().out


def test_of_several_that_ask_at_once_one_writes(tmp_path, cache, monkeypatch):
    recipe, opener = opened(tmp_path, cache)
    honest, calls, found = preparation._write, [], []
    monkeypatch.setattr(preparation, "_write", lambda *arguments: calls.append(1) or honest(*arguments))
    ask = lambda: found.append(preparation.prepared(recipe, opener, print).fingerprint)  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len({*found}) == 1 and len(found) == 4


def test_a_cache_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    recipe = tiny_runs.write_recipe(tmp_path)
    words = ["--data.cache", str(tmp_path / "file" / "cache")]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2
    assert f"data.cache: {tmp_path / 'file' / 'cache'} cannot be written" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_command_prepares_what_a_run_then_finds(tmp_path, cache, capsys):
    recipe = tiny_runs.write_recipe(tmp_path)
    words = ["prepare", str(recipe), "--data.cache", str(cache)]
    program = [sys.executable, "-m", "training"]
    done = subprocess.run([*program, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "train: 60 rows of 60" in done.stdout and f"kinds in {cache}" in done.stdout
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix in (".tokens", ".json")}
    assert tiny_runs.run(recipe, tmp_path / "run", "--data.cache", str(cache)) == 0
    assert before == {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path in before}
    assert main([*words, "--data.streaming"]) == 2
    assert "data.streaming: a stream is read as it comes" in capsys.readouterr().err


def test_rows_that_are_refused_are_refused_each_time(tmp_path, cache):
    recipe, opener = opened(tmp_path, cache, "--data.malformed=refuse")
    path = tmp_path / "corpus" / "train.en"
    path.write_text("\n" + path.read_text().split("\n", 1)[1])
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"malformed rows \(1 empty\)"):
            preparation.prepared(recipe, opener, print)


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_tokens_are_those_that_transformers_gives(objective, tmp_path, cache):
    """Also of a tokenizer that was saved with a length to cut texts to, and to fill them up to."""
    recipe, opener = opened(tmp_path, cache, objective=objective)
    texts = ["one two three", "", "seven " * 40, "ein Wort [MASK] <pad> it does not know: ß€"]
    tokenizer = opener.tokenizer
    expected = tokenizer(texts)["input_ids"]
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    end = [tokenizer.eos_token_id] if objective == "causal_lm" else []
    assert OBJECTIVES[objective](recipe, tokenizer).encode(texts, "text") == [ids + end for ids in expected]


def test_files_by_patterns_numbers_and_folders_are_the_rows_of_one(tmp_path):
    path = tmp_path / "corpus"
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    lines = (path / "train.en").read_text().splitlines(keepends=True)
    (path / "folder" / "inner").mkdir(parents=True)
    for number in range(3):
        part = "".join(lines[20 * number : 20 * number + 20])
        (path / f"some-{number}.txt").write_text(part)
        (path / f"shards-0000{number}-of-00003.jsonl").write_text(
            "".join(json.dumps({"text": line.strip()}) + "\n" for line in part.splitlines())
        )
        where = path / "folder" / ("inner" if number == 1 else "")
        (where / f"{number}.txt").write_text(part)
    (path / "folder" / "README.md").write_text("no text to train on")

    def rows(name, *words):
        chunks = sources.read(parse([str(recipe), f"--data.splits.train={name}", *words]).data, "train")
        return [text for chunk in chunks for text in chunk["text"]]

    expected = [line.rstrip("\n") for line in lines]
    assert rows("train.en") == rows("some-*") == rows("some-?.txt") == rows("shards") == expected
    assert sorted(rows("folder")) == sorted(expected) == sorted(rows("folder/**/*.txt"))
    assert rows("some-[12].txt") == expected[20:] and rows("some-*[:50%]") == expected[:30]
    (path / "some-*").write_text("itself\n")
    assert rows("some-*") == ["itself"]
    (path / "some-3.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(RecipeError, match="some-3.jsonl are not of one kind|are not of one kind"):
        rows("some-[0-9]*")


def test_parallel_files_in_shards_stay_line_by_line(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path)
    path = tmp_path / "corpus"
    whole = list(sources.read(parse([str(recipe)]).data, "train"))
    for column in ("en", "de"):
        lines = (path / f"train.{column}").read_text().splitlines(keepends=True)
        for number in range(2):
            (path / f"part-{number}.{column}").write_text("".join(lines[25 * number : 25 + 35 * number]))
    words = [str(recipe), "--data.splits.train=part-*"]
    (one,) = whole
    for skip in (0, 10, 25, 40):
        chunks = list(sources.read(parse(words).data, "train", skip=skip))
        for column in ("source", "target"):
            assert [text for chunk in chunks for text in chunk[column]] == one[column][skip:]
    assert tiny_runs.run(recipe, tmp_path / "run", words[1], "--optimisation.max_steps=1") == 0
    assert f"train: 4 files, {path / 'part-0.en'} to {path / 'part-1.de'}" in capsys.readouterr().err
    (path / "part-1.de").rename(path / "part-2.de")
    with pytest.raises(RecipeError, match="not parallel, .*part-1.en stands beside .*part-2.de"):
        next(sources.read(parse(words).data, "train"))
    (path / "part-2.de").rename(path / "part-1.de")
    (path / "part-2.en").write_text("one\n")
    with pytest.raises(RecipeError, match="not parallel, there are files for 3 of en, 2 of de"):
        next(sources.read(parse(words).data, "train"))


def test_parallel_files_may_be_compressed(tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path)
    whole = list(sources.read(parse([str(recipe)]).data, "train"))
    for column in ("en", "de"):
        file = tmp_path / "corpus" / f"train.{column}"
        Path(f"{file}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert list(sources.read(parse([str(recipe)]).data, "train")) == whole
