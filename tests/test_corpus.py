"""Corpora: every source gives the same rows, malformed ones are counted, batches keep their budget and their order."""

import contextlib
import csv
import json
import lzma
import threading
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests import tiny_runs
from training import corpus as corpora
from training import sources
from training.corpus import Corpus, Parts, Sequences, load
from training.recipe import parse
from training.sections import RecipeError
from training.sources import check_splits, clean, read

LATIN = "broken UTF-8, as text in Latin-1 or UTF-16 is"


def resolved(folder, *words, objective="translation"):
    return parse([str(tiny_runs.write_recipe(folder, objective)), *words])


def all_rows(chunks):
    joined = {}
    for chunk in chunks:
        for name, values in chunk.items():
            joined.setdefault(name, []).extend(values)
    return joined


def characters(texts, _):
    return [[ord(letter) for letter in text] for text in texts]


def test_every_kind_of_file_gives_the_same_rows(tmp_path):
    recipe = resolved(tmp_path)
    corpus = tmp_path / "corpus"
    expected = all_rows(read(recipe.data, "train"))
    assert len(expected["source"]) == len(expected["target"]) == 60
    table = {"en": expected["source"], "de": expected["target"]}
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    (corpus / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pa.parquet.write_table(pa.table(table), corpus / "b.parquet")
    for name, separator in {"c.csv": ",", "d.tsv": "\t"}.items():
        with open(corpus / name, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(table), delimiter=separator)
            writer.writeheader()
            writer.writerows(rows)
    for name in ("a", "a.jsonl", "b", "c", "d"):
        recipe = resolved(tmp_path, "--data.splits.train", json.dumps(["absent", name]))
        assert all_rows(read(recipe.data, "train")) == expected, name


def test_compressed_text_paragraphs_and_parts(tmp_path):
    words = [
        "--data.sample_by",
        "paragraph",
        "--data.splits.train",
        "x.txt.xz",
        "--data.splits.validation",
        "x.txt.xz[50%:]",
    ]
    recipe = resolved(tmp_path, *words, objective="causal_lm")
    (tmp_path / "corpus" / "x.txt.xz").write_bytes(lzma.compress(b"one\ntwo\n\nthree\n\nfour\n\nfive\n"))
    assert [text.strip() for text in all_rows(read(recipe.data, "train"))["text"]] == [
        "one\ntwo",
        "three",
        "four",
        "five",
    ]
    assert [text.strip() for text in all_rows(read(recipe.data, "validation"))["text"]] == ["four", "five"]


def test_a_part_of_a_single_document_is_a_part_of_its_characters(tmp_path):
    words = [
        "--data.sample_by",
        "document",
        "--data.splits.train",
        "x.txt[:90%]",
        "--data.splits.validation",
        "x.txt[90%:]",
    ]
    recipe = resolved(tmp_path, *words, objective="causal_lm")
    text = "".join(chr(97 + number % 26) for number in range(115))
    (tmp_path / "corpus" / "x.txt").write_text(text, encoding="utf-8")
    assert all_rows(read(recipe.data, "train"))["text"] == [text[:103]]  # int(115 * 0.9)
    assert all_rows(read(recipe.data, "validation"))["text"] == [text[103:]]


def test_malformed_rows_are_counted_and_skipped_or_refused(tmp_path):
    recipe = resolved(tmp_path, "--data.max_length", "20")
    (tmp_path / "corpus" / "train.en").write_bytes(b"one\n\ntwo\nthr\xffee\nfour\n" + 30 * b"x" + b"\n")
    tiny_runs.write_lines(tmp_path / "corpus" / "train.de", ["eins", "leer", " ", "drei", "vier", "lang"])
    corpus = load(recipe, "train", characters, keep_texts=True)
    assert corpus.texts == {"source": ["one", "four"], "target": ["eins", "vier"]}
    assert corpus.refused == Counter({"empty": 2, LATIN: 1, "too long": 1})
    assert corpus.rows == 6 and corpus.bytes == len("oneeinsfourvier")
    assert corpus.columns["source"].tokens.tolist() == [ord(letter) for letter in "onefour"]
    with pytest.raises(RecipeError, match=f"2 empty, 1 {LATIN}, 1 too long"):
        load(
            resolved(tmp_path, "--data.max_length", "20", "--data.malformed", "refuse"), "train", _read_again(tmp_path)
        )


@pytest.mark.parametrize("name", ["text.txt", "text.csv", "text.jsonl"])
def test_only_bytes_that_cannot_be_decoded_are_broken(name, tmp_path):
    """U+FFFD is a character like others, with which many a converted text is strewn."""
    recipe = resolved(tmp_path, "--data.splits.train", name, objective="causal_lm")
    lines = ["a \ufffd b".encode(), b"thr\xffee"]
    match name:
        case "text.csv":
            lines = [b"text", *lines]
        case "text.jsonl":
            lines = [b'{"text": "' + line + b'"}' for line in lines]
    (tmp_path / "corpus" / name).write_bytes(b"\n".join(lines) + b"\n")
    corpus = load(recipe, "train", characters, keep_texts=True)
    assert corpus.texts["text"] == ["a \ufffd b"] and corpus.refused == Counter({LATIN: 1})


def test_text_of_another_encoding_is_not_trained_on(tmp_path, capsys):
    """What UTF-16 has between its letters was learned as text."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    for path in (tmp_path / "corpus").glob("*.en"):
        path.write_text(path.read_text(encoding="utf-8"), encoding="utf-16")
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "with zero bytes, as in UTF-16" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "valid"])
def test_empty_lines_alone_are_no_text(split, tmp_path, capsys):
    """The loss for each byte of none was a division by zero, after a part of the training."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    tiny_runs.write_lines(tmp_path / "corpus" / f"{split}.en", [""] * 20)
    words = ["--tokenizer.algorithm=byte_bpe"]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2
    assert not (tmp_path / "run").exists() and "empty" in capsys.readouterr().err


def test_why_a_corpus_is_empty_is_said(tmp_path, capsys):
    """One broken byte in one long document leaves nothing to train a tokenizer on."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", data={"sample_by": "document"})
    with open(tmp_path / "corpus" / "train.en", "ab") as file:
        file.write(b"thr\xffee\n")
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert f"left out of data.splits.train: 1 {LATIN}" in capsys.readouterr().err


def test_what_is_left_out_of_each_part_of_a_stream_is_said_once(tmp_path):
    words = ["--data.streaming", "--data.part_rows=20"]
    recipe, said = resolved(tmp_path, *words, objective="causal_lm"), []
    path = tmp_path / "corpus" / "train.en"
    path.write_bytes(b"".join(b"on\xffe\n" if row == 30 else b"one\n" for row in range(60)))
    parts = Parts(recipe, characters, lambda part: len(part.columns["text"].tokens), said.append)
    assert [part.number for epoch in range(2) for part in parts(epoch, 0)] == [0, 1, 2, 0, 1, 2]
    assert said == [f"part 1 of the stream: left out 1 {LATIN}"]


@pytest.mark.parametrize("is_hub", [False, True])
def test_the_shards_of_a_stream_come_in_another_order_each_epoch(is_hub, tmp_path, monkeypatch):
    """A pass in the order of the names repeats what is alike in neighbours, and always ends with the same."""
    words = ["--data.streaming", "--data.part_rows=4", "--data.splits.train=shards/*.txt"]
    recipe = resolved(tmp_path, *words, objective="causal_lm")
    (tmp_path / "corpus/shards").mkdir()
    for shard in range(6):
        (tmp_path / f"corpus/shards/{shard}.txt").write_text(f"{shard}\n" * 4)
    if is_hub:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "NAME/CORPUS"})})
        files = [str(file) for file in sorted((tmp_path / "corpus/shards").iterdir())]
        stream = datasets.load_dataset("text", data_files=files, split="train", streaming=True)
        monkeypatch.setattr(sources, "load_dataset", lambda *_, **__: stream)
    parts = Parts(recipe, characters, lambda part: len(part.columns["text"].tokens), print)

    def order(epoch, first=0):
        return ["".join(map(chr, part.corpus.columns["text"].tokens)) for part in parts(epoch, first)]

    passes = [order(epoch) for epoch in range(4)]
    assert all(sorted("".join(each)) == sorted("012345" * 4) for each in passes) and len({*map(tuple, passes)}) == 4
    if not is_hub:  # `datasets` reads several at once
        assert all(sorted(each) == [str(shard) * 4 for shard in range(6)] for each in passes)
    assert order(2) == passes[2] and order(3, 4) == passes[3][4:]


@pytest.mark.parametrize(
    ("path", "validation"),
    [("train.en", "valid.en"), (".", "train.en"), (".", "train.en[50%:]"), (".", "../corpus/train.en[95%:]")],
)
def test_a_run_is_not_measured_on_what_it_is_trained_on(path, validation, tmp_path, capsys):
    """With `--data.path FILE` the names of splits count for nothing but their parts."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", optimisation={"max_steps": 1})
    words = ["--data.path", str(tmp_path / "corpus" / path), "--data.splits.validation", validation]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 2
    message = capsys.readouterr().err
    assert f"data.splits: train and {'test' if path != '.' else 'validation'} are both of " in message
    assert str(tmp_path / "corpus" / "train.en") in message and not (tmp_path / "run").exists()
    name = validation.partition("[")[0]
    words += ["--data.splits", json.dumps({"train": "train.en[:90%]", "validation": f"{name}[90%:]"})]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 0


def test_parts_of_a_split_of_the_hub_may_not_overlap_either(tmp_path):
    for train, other, is_refused in [
        ("train", "test", False),
        ("train+extra", "test+train", True),
        ("train[:90%]", "train[90%:]", False),
        ("train[:91%]", "train[90%:]", True),
        ("train", "train[90%:]", True),
        ("train[:5000]", "train[1000:]", True),
        ("train[:1000]", "train[1000:]", False),
    ]:
        splits = json.dumps({"train": train, "validation": other})
        recipe = resolved(tmp_path, "--data.path=owner/name", f"--data.splits={splits}")
        with pytest.raises(RecipeError, match="train and validation") if is_refused else contextlib.nullcontext():
            check_splits(recipe.data)


def test_splits_of_the_same_text_are_said_to_be_the_same(tmp_path, capsys):
    """As a corpus without a test split has them, or one whose files were copied."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", optimisation={"max_steps": 1})
    corpus = tmp_path / "corpus"
    (corpus / "test.en").write_bytes((corpus / "valid.en").read_bytes())
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    assert "test: the same text as validation" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["translation", "causal_lm"])
def test_rows_that_two_splits_share_are_counted(objective, tmp_path, capsys):
    """Of a dozen tokens; those of a few are in many texts."""
    recipe = tiny_runs.write_recipe(
        tmp_path, objective, optimisation={"max_steps": 1}, evaluation={"every_steps": None}
    )
    folder = tmp_path / "corpus"
    for column, words in {"en": tiny_runs.NUMBERS, "de": [*tiny_runs.NUMBERS.values()]}.items():
        lines = (folder / f"train.{column}").read_text().splitlines()
        long = [" ".join([word, *words, *words]) for word in words][:3]
        tiny_runs.write_lines(folder / f"train.{column}", [*lines, *long, "one"])
        tiny_runs.write_lines(folder / f"test.{column}", [*long[:2], f"{long[2]} one", "one"])
        tiny_runs.write_lines(folder / f"valid.{column}", [f"seven {long[0]}"])
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    said = capsys.readouterr().err
    assert "test: 2 of its rows are in train as well\n" in said and said.count(" as well") == 1


def test_shared_rows_are_found_wherever_they_stand(monkeypatch):
    """In a corpus of more rows than are looked at together, with rows that only begin alike, and with empty ones."""
    monkeypatch.setattr(corpora, "BLOCK", 7)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, length).tolist() for length in rng.integers(0, 14, 500)]
    mine = [*rows[::50], [0, 1, 2, 1, 0, 1, 2, 1, 9], *(row[:-1] + [8] for row in rows[:40] if row)]
    for dtype in (np.uint16, np.uint32):
        one = Corpus({"text": Sequences.of(mine)})
        other = Corpus({"text": Sequences.of(rows, dtype)})
        assert one.shared(other) == sum(len(row) >= corpora.TELLING and row in rows for row in mine) > 0


def _read_again(folder):
    """`write_recipe` writes the corpus anew; put the malformed one back."""
    (folder / "corpus" / "train.en").write_bytes(b"one\n\ntwo\nthr\xffee\nfour\n" + 30 * b"x" + b"\n")
    tiny_runs.write_lines(folder / "corpus" / "train.de", ["eins", "leer", " ", "drei", "vier", "lang"])
    return characters


@pytest.mark.parametrize("name", ["a[1].txt", "a[1]", "a[:1]"])
def test_a_file_may_be_called_as_a_part_is(name, tmp_path):
    recipe = resolved(tmp_path, f"--data.splits.train={name}", '--data.columns={"text": "text"}', objective="causal_lm")
    (tmp_path / "corpus" / name).write_text("one\ntwo\n", encoding="utf-8")
    assert all_rows(read(recipe.data, "train"))["text"] == ["one", "two"]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match="data.splits.train: .* holds no absent or gone"):
        next(read(resolved(tmp_path, "--data.splits.train", '["absent", "gone"]').data, "train"))
    recipe = resolved(tmp_path)
    (tmp_path / "corpus" / "train.de").write_text("eins\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="not parallel"):
        list(read(recipe.data, "train"))
    recipe = resolved(tmp_path, "--data.splits.train", "rows")
    (tmp_path / "corpus" / "rows.jsonl").write_text('{"en": "one", "fr": "un"}\n', encoding="utf-8")
    with pytest.raises(RecipeError, match="train has no de; its columns are en, fr"):
        next(read(recipe.data, "train"))
    (tmp_path / "corpus" / "rows.jsonl").write_text('{"en": "one"\n', encoding="utf-8")
    with pytest.raises(RecipeError, match="rows.jsonl: cannot be read as json"):
        list(read(recipe.data, "train"))


def test_a_corpus_that_changes_has_another_fingerprint(tmp_path):
    recipe = resolved(tmp_path, "--data.max_length", "64")
    before = load(recipe, "train", characters).fingerprint
    assert before == load(recipe, "train", characters).fingerprint
    path = tmp_path / "corpus" / "train.en"
    path.write_text(path.read_text(encoding="utf-8").replace("one", "eno", 1), encoding="utf-8")
    assert load(recipe, "train", characters).fingerprint != before


def test_padding_keeps_every_token_and_nothing_else():
    sequences = Sequences.of([[1, 2, 3], [4], [], [5, 6]])
    assert sequences.padded(np.array([0, 3, 1]), -100).tolist() == [[1, 2, 3], [5, 6, -100], [4, -100, -100]]
    assert sequences.padded(np.array([1]), 0, multiple=4).tolist() == [[4, 0, 0, 0]]
    taken = sequences.take(np.array([3, 0]))
    assert taken.tokens.tolist() == [5, 6, 1, 2, 3] and taken.offsets.tolist() == [0, 2, 5]


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_a_tokenizer_that_does_not_fit_is_refused(objective, tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, objective, model={"vocab_size": 5, "pad_token_id": 0, "bos_token_id": 1})
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert "vocab_size" in capsys.readouterr().err


def test_a_missing_corpus_is_one_line_with_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = tiny_runs.write_recipe(tmp_path)
    assert tiny_runs.run(recipe, tmp_path / "run", "--data.path", str(tmp_path / "nowhere")) == 2
    assert "nowhere" in capsys.readouterr().err


def test_characters_that_the_tokenizer_does_not_know_are_counted(tmp_path, capsys):
    """A vocabulary of characters has those of the training text; others are there as one unknown token."""
    recipe = tiny_runs.write_recipe(
        tmp_path, "causal_lm", tokenizer={"algorithm": "char"}, optimisation={"max_steps": 1}
    )
    tiny_runs.write_lines(tmp_path / "corpus" / "valid.en", ["one two", "three é five é"] * 6)
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    said = capsys.readouterr().err
    assert "train: 60 rows of 60\n" in said
    assert "validation: 12 rows of 12; 12 of " in said and "tokens unknown to the tokenizer\n" in said


@pytest.mark.parametrize("objective", ["causal_lm", "translation"])
def test_rows_that_are_there_already_are_left_out_once_asked_for(objective, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "CHUNK", 7)
    recipe = tiny_runs.write_recipe(tmp_path, objective)
    refuse = ["--data.malformed", "refuse"] if objective == "causal_lm" else []  # which is not for them
    path = tmp_path / "corpus" / "train"
    lines = [
        f"one {'two ' * (row % 11)}" if row % 4 else "" if objective == "causal_lm" else "six" for row in range(60)
    ]
    tiny_runs.write_lines(Path(f"{path}.en"), lines)
    other = [f"eins {row % 3}" for row in range(60)]
    tiny_runs.write_lines(Path(f"{path}.de"), other)
    rows = list(zip(lines, other, strict=True)) if objective == "translation" else lines
    kept = [row for place, row in enumerate(rows) if not row or row not in rows[:place]]
    parsed = parse([str(recipe), "--data.deduplicate", *refuse])
    found = load(parsed, "train", characters)
    assert found.refused["repeated"] == len(rows) - len(kept) > 20 and found.rows == 60
    texts = all_rows(clean(chunk, chunk, Counter(), True) for chunk in read(parsed.data, "train"))
    assert [row if len(row) > 1 else row[0] for row in zip(*texts.values(), strict=True)] == kept
    assert not load(parse([str(recipe)]), "train", characters).refused["repeated"]
    assert tiny_runs.run(recipe, tmp_path / "run", "--data.deduplicate", "--optimisation.max_steps", "1") == 0
    assert f"train: {len(kept)} rows of 60, left out {60 - len(kept)} repeated" in capsys.readouterr().err
    assert tiny_runs.run(recipe, tmp_path / "run", "--resume") == 2, "another corpus"


def test_repeated_rows_are_found_among_many():
    seen, draw = sources._Seen(), np.random.default_rng(0)
    numbers = draw.integers(0, 20_000, 50_000)
    marked = []
    for start in range(0, len(numbers), 1000):
        chunk = {"text": [str(number) for number in numbers[start : start + 1000]]}
        seen.mark(chunk)
        marked += [text == sources.REPEATED for text in chunk["text"]]
    first = set(np.unique(numbers, return_index=True)[1].tolist())
    assert [place for place, is_marked in enumerate(marked) if not is_marked] == sorted(first)
    assert sum(map(len, seen.digests)) == len(first) and len(seen.digests) < 12
    odd = {"text": [None, 3, "\ud800", "\ud800", "", ""]}
    seen.mark(odd)
    assert odd["text"] == [None, 3, "\ud800", sources.REPEATED, "", ""]


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm")
    folder = tmp_path / "corpus" / "texts"
    (folder / "more").mkdir(parents=True)
    for name in ("a.txt", "more/b.txt"):
        (folder / name).write_text("one two three four five six seven\n" * 9)
    for name in ("README", "cover.png", "more/notes.md", "more/x.pdf", ".hidden"):
        (folder / name).write_text("no text\n")
    words = ["--data.splits", '{"train": "texts", "validation": "valid.en"}', "--optimisation.max_steps", "1"]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 0
    said = capsys.readouterr().err
    assert f"train: 2 files, {folder}/a.txt to {folder}/more/b.txt; left out" in said
    assert "left out, for no ending of a text: README, cover.png, notes.md and 1 more" in said and "hidden" not in said


def test_what_lies_beside_a_split_that_is_not_there_is_named(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path)
    (tmp_path / "corpus/train.de").rename(tmp_path / "corpus/train.fr")
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert f"{tmp_path}/corpus holds no train, though train.en, train.fr" in capsys.readouterr().err
    assert tiny_runs.run(recipe, tmp_path / "run", "--data.path", "/dev/null") == 2  # neither a file nor a folder
    assert "/dev/null holds no train\n" in capsys.readouterr().err
    # A column is the corpus's matter, not the tokenizer's.
    causal = tiny_runs.write_recipe(tmp_path, "causal_lm", data={"columns": {"text": "verse"}})
    assert tiny_runs.run(causal, tmp_path / "run") == 2
    assert "training: data.columns: train has no verse; its columns are text" in capsys.readouterr().err


def test_the_next_part_of_a_stream_is_made_while_one_is_used(tmp_path):
    recipe = resolved(tmp_path, "--data.streaming", "--data.part_rows=20", objective="causal_lm")
    made = threading.Semaphore(0)

    def noted(texts, column):
        made.release()
        return characters(texts, column)

    parts = Parts(recipe, noted, lambda part: len(part.columns["text"].tokens), print)
    assert made.acquire(timeout=20), "the first, to see that there is something"
    coming = parts(0, 0)
    assert not made.acquire(blocking=False), "nothing is made that nobody asks for"
    assert next(coming).number == 0
    for _ in range(2):
        assert made.acquire(timeout=20), "the one that was asked for, and the one after it"
    assert [part.number for part in coming] == [1, 2]
    (tmp_path / "corpus" / "train.en").unlink()
    with pytest.raises(RecipeError, match="holds no train"):
        next(parts(1, 0))
