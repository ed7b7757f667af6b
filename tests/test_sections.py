"""Typed sections: text is read by the type of its field, mistakes are said at once, nothing becomes another value."""

import random
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field

from training.sections import Section, names, nearest, override, read_yaml, reference, validated


class Inner(Section):
    """What lies inside."""

    text: str = Field("", description="some text")
    count: int = Field(3, ge=0, lt=2**32, description="how many")
    share: float | None = Field(None, gt=0, description="how much")
    flag: bool = Field(False, description="whether")
    choice: Literal["one", "two"] = Field("one", description="which")
    words: tuple[str, ...] = Field((), description="some words")
    pair: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field((0.5, 0.5))
    table: dict[str, tuple[str, ...]] = Field({}, description="some lists")


class Outer(Section):
    """What lies around it."""

    name: str = Field(examples=["a name"], description="what it is called")
    inner: Inner = Inner()
    anything: dict[str, Any] = Field({}, description="entries of any type")
    maybe: str | None = Field("something", description="text or none")


def read(tmp_path, text="name: x\n", *words):
    """The instance, and what is wrong with a file of this text and these words of a command line."""
    (tmp_path / "file.yaml").write_text(text, encoding="utf-8")
    tree, problems = read_yaml(tmp_path / "file.yaml")
    problems += override(tree, words, Outer)
    outer, mistakes = validated(Outer, tree, lambda key: nearest(key, names(Outer)))
    return outer, problems + mistakes


TEXTS = [
    "runs/exp #2",
    "no",
    "010",
    "1.10",
    "null and void",
    "[a, b]",
    "{x}",
    "a: b",
    " spaces ",
    "",
    "true",
    "1e3",
    "ü 🙂",
]


@pytest.mark.parametrize("text", [*TEXTS, "null"])
def test_text_keeps_its_characters_wherever_it_is_written(text, tmp_path):
    for words in (["--inner.text", text], [f"--inner.text={text}"]):
        outer, problems = read(tmp_path, "name: x\n", *words)
        assert not problems and outer.inner.text == text
    outer, problems = read(tmp_path, yaml.safe_dump({"name": text, "inner": {"words": [text]}, "maybe": text}))
    assert not problems and outer.name == outer.inner.words[0] == outer.maybe == text


def test_any_text_keeps_its_characters(tmp_path):
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choice("ab01 #:'\"[]{},&*!|>%@`-=.~\\/") for _ in range(draw.randint(0, 12)))
        assert read(tmp_path, "name: x\n", f"--name={text}")[0].name == text


@pytest.mark.parametrize(
    ("written", "wanted"), [("010", 10), ("7", 7), ("+7", 7), ("2e3", 2000), ("1_000", 1000), ("5.0", 5)]
)
def test_a_whole_number_is_the_one_that_is_written(written, wanted, tmp_path):
    outer, problems = read(tmp_path, f"name: x\ninner: {{count: {written}}}")
    again, more = read(tmp_path, "name: x\n", "--inner.count", written)
    assert not problems + more and outer.inner.count == again.inner.count == wanted
    assert type(outer.inner.count) is int


@pytest.mark.parametrize(
    "written", ["0x10", "0o10", "1:30", "1.5", "no", "true", "nan", "-1", "4294967296", "1e99", "null", "''"]
)
def test_what_is_no_such_number_is_refused_and_not_another_one(written, tmp_path):
    _, problems = read(tmp_path, f"name: x\ninner: {{count: {written}}}")
    assert len(problems) == 1
    assert problems[0].startswith("inner.count: must be a whole number, at least 0 and below 4294967296, got ")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--inner.share", "1e-4"], {"share": 1e-4}),
        (["--inner.share", ".5"], {"share": 0.5}),
        (["--inner.share", "3"], {"share": 3.0}),
        (["--inner.share", "null"], {"share": None}),
        (["--inner.flag"], {"flag": True}),
        (["--inner.flag", "False"], {"flag": False}),
        (["--inner.flag", "--inner.count", "4"], {"flag": True, "count": 4}),
        (["--inner.choice=two", "--inner.choice=one"], {"choice": "one"}),
        (["--inner.words", "alone"], {"words": ("alone",)}),
        (["--inner.words", '["a", "b c"]'], {"words": ("a", "b c")}),
        (["--inner.pair", "[0, 0.25]"], {"pair": (0.0, 0.25)}),
        (["--inner.table", '{"a": "b", "c": ["d", "e"]}'], {"table": {"a": ("b",), "c": ("d", "e")}}),
        (["--inner.table.a", "b", "--inner.table.c", '["d"]'], {"table": {"a": ("b",), "c": ("d",)}}),
        (["--inner", '{"count": "5", "flag": true}'], {"count": 5, "flag": True}),
    ],
)
def test_the_command_line_is_read_by_the_type_of_the_field(words, wanted, tmp_path):
    outer, problems = read(tmp_path, "name: x\n", *words)
    assert not problems
    assert {name: getattr(outer.inner, name) for name in wanted} == wanted
    assert [type(getattr(outer.inner, name)) for name in wanted] == [type(value) for value in wanted.values()]


def test_null_is_none_where_there_may_be_none(tmp_path):
    assert read(tmp_path, "name: x\nmaybe: null")[0].maybe is None
    assert read(tmp_path, "name: x\nmaybe:")[0].maybe is None
    assert read(tmp_path, "name: x\n", "--maybe", "null")[0].maybe is None
    assert read(tmp_path, "name: x\nmaybe: 'null'")[0].maybe == "null"


def test_entries_without_a_type_are_literals(tmp_path):
    text = "name: x\nanything: {a: 010, b: .5, c: true, d: no, e: [1, {f: 2}], g: null, h: relu, i: 1.5.2}"
    outer, problems = read(tmp_path, text, "--anything.j", '{"k": [1, "2"]}', "--anything.l", "--anything.m=null")
    assert not problems
    wanted = {"a": 10, "b": 0.5, "c": True, "d": "no", "e": [1, {"f": 2}], "g": None, "h": "relu", "i": "1.5.2"}
    assert outer.anything == wanted | {"j": {"k": [1, 2]}, "l": True, "m": None}


def test_every_mistake_is_said_at_once_and_what_is_right_stays(tmp_path):
    text = (
        "inner: {text: [a], count: many, share: -1, flag: yes, choice: on, words: {a: b}, pair: [0.5], table: 3,\n"
        "  cuont: 1}\nanything: 4\nmaybe: 5\nmaybe: right\nnmae: x"
    )
    outer, problems = read(tmp_path, text, "stray", "--maybe.deeper", "6", "--inner.words.0=x")
    assert problems == [
        "line 5: maybe is given a second time",
        "stray: not of the form --key value",
        "--maybe.deeper: maybe holds one value, not a section",
        "name: missing, must be text",
        'inner.text: must be text, got ["a"]',
        "inner.count: must be a whole number, at least 0 and below 4294967296, got many",
        "inner.share: must be a number, above 0, or null, got -1",
        "inner.flag: must be true or false, got yes",
        "inner.choice: must be one of one, two, got on; did you mean one?",
        'inner.words.0: must be text, got {"a": "b", "0": "x"}',
        "inner.pair.1: missing, must be a number, at least 0 and below 1",
        "inner.table: must be a mapping, got 3",
        "inner.cuont: unknown key; did you mean inner.count?",
        "anything: must be a mapping, got 4",
        "nmae: unknown key; did you mean name?",
    ]
    assert outer.maybe == "right"
    for section, name in ((outer, "name"), (outer.inner, "count"), (outer, "anything")):
        with pytest.raises(AttributeError, match=name):
            getattr(section, name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name"], "name: must be text, got true"),
        (["--inner.count"], "inner.count: must be a whole number, at least 0 and below 4294967296, got true"),
        (["--inner", "3"], "inner: must be a section of fields, got 3"),
        (["--inner.words", "[a, b]"], "inner.words: '[a, b]' is not JSON: "),
        (["--inner.pair", "[0, 1]"], "inner.pair.1: must be a number, at least 0 and below 1, got 1"),
        (["--inner.pair", "[0, 0, 0]"], "inner.pair: must be a list of 2 (a number, at least 0 and below 1), got "),
        (["--inner.share", "inf"], "inner.share: must be a number, above 0, or null, got inf"),
        (["--inner.share", "1e999"], "inner.share: must be a number, above 0, or null, got Infinity"),
        (["--anything.x", "18446744073709551616"], "anything: must be below 2**63, got 18446744073709551616"),
        (["--count", "1"], "count: unknown key; did you mean inner.count?"),
        (["--", "1"], "unknown key"),
    ],
)
def test_one_mistake_on_the_command_line_is_one_line(words, message, tmp_path):
    _, problems = read(tmp_path, "name: x\n", *words)
    assert len(problems) == 1 and message in problems[0] and "\n" not in problems[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[1]",
        "a: [",
        "a: &x [*x]",
        "? [1]\n: 2",
        "{{a}: 1}",
        "\x00",
        "a: !!python/object:os.system x",
        "[" * 5000,
    ],
)
def test_what_is_no_mapping_is_one_line(text, tmp_path):
    with pytest.raises(ValueError, match=r"file\.yaml: ") as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_reference_lists_every_field_and_fits(width):
    text = reference(Outer, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width and not any(line != line.rstrip() for line in lines)
    for name in names(Outer):
        assert f"  --{name}" in lines or name == "inner"
    flat = " ".join(text.split())
    assert "inner: What lies inside." in flat and "outer: What lies around it." in flat
    assert "--name text; required what it is called" in flat
    assert "--inner.count a whole number, at least 0 and below 4294967296; default 3 how many" in flat
    assert "--inner.choice one of one, two; default one which" in flat
    assert "--maybe text, or null; default something text or none" in flat
