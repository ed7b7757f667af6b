"""What is seen of a text before anything is decided about it."""

import gzip
import json

import pytest

from training.recipe import resolved
from training.sections import RecipeError
from training.survey import repeated, survey

LINES = [f"line {number} of a text, says nobody" for number in range(40)]


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        (folder / name.replace("__", ".")).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder)


def test_a_file_is_parted(tmp_path):
    found = survey(write(tmp_path, notes__txt=LINES) + "/notes.txt", "masked_lm")
    assert found.data["splits"] == {"train": ["text[:90%]"], "validation": ["text[90%:95%]"], "test": ["text[95%:]"]}
    assert (found.rows, found.data["sample_by"], found.words) == (36, "line", 36 * 7)
    assert found.size == sum(map(len, LINES[:36])) + 35


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        (["train.txt", "dev.txt", "test.txt"], {"train": ["train"], "validation": ["dev"], "test": ["test"]}),
        (
            ["training.txt", "valid.txt"],
            {"train": ["training"], "validation": ["valid[:50%]"], "test": ["valid[50%:]"]},
        ),
        (["train.txt", "test.txt"], {"train": ["train[:95%]"], "validation": ["train[95%:]"], "test": ["test"]}),
        (
            ["wiki.train.raw", "wiki.test.raw", "wiki.valid.raw"],
            {"train": ["wiki.train.raw"], "validation": ["wiki.valid.raw"], "test": ["wiki.test.raw"]},
        ),
        (["a.py", "b/c.py", "README"], None),
        (["train.py", "test_a.py", "a.py", "b/c.py", "d.py", "e.py"], None),
        (["one.txt", "LICENSE.md"], None),
    ],
)
def test_splits_are_found_by_their_names_or_parted(files, splits, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("\n".join(LINES * (1 + ("." in name and "LICENSE" not in name))))
    found = survey(str(tmp_path), "masked_lm").data["splits"]
    stem = "**/*.py" if "a.py" in files else "one.txt"
    assert found == (
        splits or {"train": [f"{stem}[:90%]"], "validation": [f"{stem}[90%:95%]"], "test": [f"{stem}[95%:]"]}
    )


def test_parallel_text_packed_or_not(tmp_path):
    write(tmp_path, **{"train__de": LINES[:30], "dev__en": LINES, "dev__de": LINES})
    with gzip.open(tmp_path / "train.en.gz", "wt") as file:
        file.write("\n".join([*LINES[:29], ""]) + "\n")
    found = survey(str(tmp_path), "translation")
    assert found.data["columns"] == {"source": "en", "target": "de"}
    assert found.rows == 29 and found.refused == {"empty": 1}
    turned = survey(str(tmp_path), "translation", ["de", "en"])
    assert turned.data["columns"] == {"source": "de", "target": "en"}


def test_columns_of_a_table(tmp_path):
    rows = [{"id": number, "title": "short", "said": line} for number, line in enumerate(LINES)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = survey(str(tmp_path), "causal_lm")
    assert found.data["columns"] == {"text": "said"} and found.data["sample_by"] == "line"
    pairs = survey(str(tmp_path), "translation", ["said", "title"])
    assert pairs.data["columns"] == {"source": "said", "target": "title"}
    resolved("recipe", {"objective": "causal_lm", "data": found.data, "model": {"model_type": "scratch_decoder"},
                        "optimisation": {"max_steps": 1}, "output_dir": "x"}, [])  # fmt: skip


def test_repetitions_letters_and_what_cannot_be_read(tmp_path):
    lines = ["один и тот же", "один и тот же", "another one", "\0", "", *LINES]
    found = survey(write(tmp_path, all__txt=lines), "masked_lm")
    assert found.refused["repeated"] == 1 and found.refused["with zero bytes, as in UTF-16"] == 1
    assert repeated(found) == pytest.approx(1 / (found.rows + 1))
    assert found.scripts().startswith("Latin 9") and "Cyrillic" in found.scripts()


def test_paragraphs_and_documents(tmp_path):
    text = [line for pair in zip(LINES, [""] * 40, strict=True) for line in pair]
    write(tmp_path, all__txt=text)
    assert survey(str(tmp_path), "masked_lm").data["sample_by"] == "paragraph"
    found = survey(str(tmp_path), "causal_lm")
    assert found.data["sample_by"] == "document" and found.rows == 1


def test_of_few_files_none_is_a_row(tmp_path):
    """A twentieth of three files is none."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("\n".join(LINES))
    found = survey(str(tmp_path), "causal_lm")
    assert found.data["sample_by"] == "line" and found.rows > 3


def test_a_split_by_name_holds_much_of_the_text(tmp_path):
    """Else it is one of many files, whose name says something else."""
    (tmp_path / "src").mkdir()
    for number in range(30):
        (tmp_path / f"src/{number}.py").write_text("\n".join([*LINES, str(number)]))
    (tmp_path / "training").mkdir()
    (tmp_path / "training/requirements.txt").write_text("torch\nnumpy\n")
    found = survey(str(tmp_path), "causal_lm")
    assert found.data["splits"]["train"] == ["**/*.py[:90%]"] and found.rows > 20


def test_all_shards_of_a_split_are_read(tmp_path):
    for number in range(4):
        (tmp_path / f"train_{number}.txt").write_text("\n".join(f"{line} {number}" for line in LINES))
        (tmp_path / f"train_{number}.raw").write_text("\n".join(LINES))  # the same in another form
    found = survey(str(tmp_path), "masked_lm")
    shards = [f"train_{number}.txt" for number in range(4)]
    if found.data["splits"]["train"][0].startswith("train_0.raw"):
        shards = [shard.replace(".txt", ".raw") for shard in shards]
    assert found.data["splits"]["train"] == [f"{shard}[:90%]" for shard in shards]
    assert found.data["splits"]["test"] == [f"{shard}[95%:]" for shard in shards]


def test_a_row_without_text_is_left_out_and_its_column_stays(tmp_path):
    rows = [{"url": f"https://example.org/{number}", "text": line * 3} for number, line in enumerate(LINES)]
    rows[3]["text"] = None
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for columns in ((), ("text",)):
        found = survey(str(tmp_path), "causal_lm", columns)
        assert found.data["columns"] == {"text": "text"}


def test_what_is_no_text_is_passed_over(tmp_path):
    (tmp_path / "notes.txt").write_text("\n".join(LINES))
    (tmp_path / "paper.pdf").write_text("%PDF-1.4 " + "0" * 10**5)
    (tmp_path / "photo.jpg").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "code.pyc").write_bytes(b"\xa7\r\r\n" + bytes(10**5))
    (tmp_path / "blob").write_bytes(b"\xff\xfe" * 10**5)
    assert survey(str(tmp_path), "causal_lm").data["splits"]["train"] == ["notes.txt[:90%]"]
    (tmp_path / "notes.txt").unlink()
    with pytest.raises(RecipeError, match="holds no file of text"):
        survey(str(tmp_path), "causal_lm")


def test_of_several_parallel_texts_the_largest_is_taken(tmp_path):
    for stem, count in (("a", 1), ("b", 30)):
        for ending in ("en", "de"):
            (tmp_path / f"{stem}.{ending}").write_text("\n".join(LINES * count))
    assert survey(str(tmp_path), "translation").data["splits"]["train"] == ["b[:90%]"]


@pytest.mark.parametrize(
    ("files", "objective", "columns", "said"),
    [
        ({}, "causal_lm", (), "--data: .* holds no file"),
        ({"all__txt": ["", ""]}, "masked_lm", (), "(empty|no row that can be used)"),
        ({"t__en": LINES, "t__de": LINES, "t__fr": LINES}, "translation", (), "--columns: text in de, en, fr is there"),
        ({"t__en": LINES, "t__de": LINES}, "translation", ("en",), "--columns: translation needs 2, source and target"),
        (
            {"t__txt": LINES},
            "translation",
            (),
            "--columns: name what holds source and target; there is text in text",
        ),
        ({"t__txt": LINES}, "causal_lm", ("body",), "--columns: no text in body; there is in text"),
        ({"t__en": LINES, "t__de": LINES}, "translation", ("en", "en"), "--columns: en en: name another column"),
        ({"t__csv": ["text"]}, "causal_lm", (), "--data: it is empty"),
        (
            {"t__txt": ["word"]},
            "causal_lm",
            (),
            "gives no text for validation: give more, or a file called validation .*the part asked for is empty",
        ),
    ],
)
def test_what_cannot_be_is_named(files, objective, columns, said, tmp_path):
    with pytest.raises(RecipeError, match=said):
        survey(write(tmp_path / "data", **files), objective, columns)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(RecipeError, match="--data: .*nowhere is not there"):
        survey(str(tmp_path / "nowhere"), "causal_lm")
    for name, said in (("", "nothing is not there"), ("x" * 5000, "is no path")):
        with pytest.raises(RecipeError, match=f"--data: .*{said}"):
            survey(name, "causal_lm")


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    (tmp_path / "text.txt").touch()
    with pytest.raises(RecipeError, match="--data: it is empty"):
        survey(str(tmp_path / "text.txt"), "causal_lm")
