"""A recipe for a text: what is chosen, and that the run it describes is the one that was foretold."""

import random
import shlex

import pytest
import yaml

from tests import tiny_runs
from training import plan, proposal
from training.__main__ import main
from training.recipe import parse

WORDS = [f"{first}{second}" for first in ("river", "bank", "trout", "money") for second in ("", "s", "er", "ing")]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A machine of which the speed is known: a millisecond for a thousand parameters and a token."""

    def timed(run, count):
        tokens = run.recipe.data.batch_tokens
        return iter([(run.unwrapped_model.num_parameters() * tokens * 1e-9, tokens)] * count)

    monkeypatch.setattr(plan.loop, "timed", timed)


@pytest.fixture
def corpus(tmp_path):
    draw = random.Random(0)
    for role, count in {"train": 400, "dev": 40, "test": 40}.items():
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) for _ in range(count)]
        (tmp_path / f"{role}.en").write_text("\n".join(texts) + "\n")
        (tmp_path / f"{role}.xx").write_text("\n".join(text[::-1] for text in texts) + "\n")
        (tmp_path / f"{role}.txt").write_text("\n".join(texts) + "\n")
    return tmp_path


def proposed(objective, corpus, minutes="1"):
    recipe = corpus.parent / f"{corpus.name}-{objective}-{minutes}.yaml"
    words = ["new", objective, "--data", str(corpus), "--minutes", minutes, "--output", str(recipe)]
    assert main(words) == 0
    return recipe


@pytest.mark.parametrize(
    "objective",
    [pytest.param(each, marks=() if each == "translation" else pytest.mark.slow) for each in tiny_runs.OBJECTIVES],
)
def test_the_recipe_trains_and_says_why(objective, corpus, capsys):
    recipe = proposed(objective, corpus)
    said = capsys.readouterr().out
    assert f"scratch-transformer train {recipe}" in said and "evaluate runs/" in said
    text = recipe.read_text()
    assert text.startswith("# Written by `scratch-transformer new ") and "rows, " in text
    assert all(f"{name}:" in text for name in ("max_steps", "vocab_size", "hidden_size")) and text.count("#") > 8
    tree = yaml.safe_load(text)
    assert tree["data"]["splits"] == {"train": ["train"], "validation": ["dev"], "test": ["test"]}
    found = parse([str(recipe)])
    assert found.objective == objective and found.model["dropout"] == 0.2, "a text so short is seen again and again"
    steps = ["--optimisation.max_steps", "3", "--evaluation.every_steps", "2", "--evaluation.num_beams", "1"]
    assert main([str(recipe), "--output_dir", str(corpus / "run"), *steps]) == 0
    assert (corpus / "run/model/model.safetensors").is_file()
    _, evaluate, _, *words = shlex.split(said.splitlines()[-1])
    assert f"--data.batch_tokens={found.data.batch_tokens}" in words, "of which an interval is told"
    assert main([evaluate, str(corpus / "run/model"), *words]) == 0
    assert "test loss: " in (scores := capsys.readouterr().out)
    assert "(95%: " in scores or objective != "translation", "a text so short may be a single batch"


@pytest.mark.slow
def test_a_longer_time_makes_a_larger_model_as_far_as_the_text_goes(corpus):
    draw, train = random.Random(1), corpus / "train.txt"
    train.write_text("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(4000)))
    short, long, longer = (parse([str(proposed("causal_lm", corpus, m))]) for m in ("0.5", "5", "500"))
    assert short.model["hidden_size"] < long.model["hidden_size"]
    assert long.optimisation.max_steps == longer.optimisation.max_steps, "the text is what there is too little of"
    assert long.model["hidden_size"] == longer.model["hidden_size"]


def test_letters_without_words_are_tokens(tmp_path):
    draw = random.Random(0)
    (tmp_path / "dna.txt").write_text("\n".join("".join(draw.choices("ACGT", k=200)) for _ in range(400)))
    assert parse([str(proposed("masked_lm", tmp_path))]).tokenizer.algorithm == "char"


def test_no_pair_is_too_long_for_a_small_vocabulary(corpus):
    """Whose tokens have two letters."""
    draw = random.Random(2)
    signs = [chr(sign) for sign in range(0x4E00, 0x4E00 + 300)]  # of which a few hundred tokens are taken already
    texts = ["".join(draw.choices(signs, k=8)) + " " + " ".join(draw.choices(WORDS, k=30)) for _ in range(200)]
    for side in ("en", "xx"):
        (corpus / f"train.{side}").write_text("\n".join(texts) + "\n", encoding="utf-8")
    run, _, _ = plan.begun([str(proposed("translation", corpus))])
    assert run.rows == 200


def test_repeated_rows_are_left_out(corpus):
    train = corpus / "train.txt"
    train.write_text(train.read_text() * 2)
    assert parse([str(proposed("masked_lm", corpus))]).data.deduplicate


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["poetry"], "invalid choice: 'poetry'"),
        (["causal_lm"], "the following arguments are required: --data"),
        (["causal_lm", "--data", "x", "--minutes", "0"], "--minutes: must be a number above 0, got 0"),
        (["causal_lm", "--data", "x", "--minutes", "soon"], "invalid float value: 'soon'"),
        (["causal_lm", "--data", "x", "--layers", "3"], "unrecognized arguments: --layers 3"),
        (["causal_lm", "--data", "nowhere"], "--data: nowhere is not there"),
        (["causal_lm", "--data", ".", "--output", "no/new.yaml"], "--output: there is no folder no"),
    ],
)
def test_words_that_cannot_be_are_named(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_nothing_is_overwritten(corpus, capsys):
    recipe = proposed("causal_lm", corpus)
    before = recipe.read_text()
    assert main(["new", "causal_lm", "--data", str(corpus), "--output", str(recipe)]) == 2
    assert f"--output: {recipe} is there already" in capsys.readouterr().err and recipe.read_text() == before


def test_minutes_that_are_too_few_leave_nothing(corpus, capsys):
    recipe = corpus / "new.yaml"
    words = ["--data", str(corpus), "--minutes", "0.0001", "--output", str(recipe)]
    assert main(["new", "translation", *words]) in (0, 2)
    assert not list(corpus.glob(".new.yaml*"))


def test_values_are_read_as_they_were_written():
    choices = [
        proposal.Choice("objective", "causal_lm"),
        proposal.Choice("data.path", "a: b # c"),
        proposal.Choice("data.splits", {"train": ["**/*.py[:90%]"]}, "because"),
        proposal.Choice("model.tie_word_embeddings", True, "so " * 60),
    ]
    found = yaml.safe_load(proposal.rendered(["head"], choices))
    assert found == {
        "objective": "causal_lm",
        "data": {"path": "a: b # c", "splits": {"train": ["**/*.py[:90%]"]}},
        "model": {"tie_word_embeddings": True},
    }
