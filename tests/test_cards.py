"""Cards gather the seeds of a recipe, and `verify` holds a recipe to them."""

import json
import math
import random
import re
import statistics

import pytest
import yaml

from hf_scratch_transformer.files import sha256
from training import cards, metrics, publication
from training.__main__ import main
from training.recipe import Data

from . import tiny_runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A recipe, its corpus, and a card of three seeds."""
    place = tmp_path_factory.mktemp("cards")
    recipe = tiny_runs.write_recipe(place, "causal_lm", optimisation={"max_steps": 6})
    for seed in (3, 4, 5):
        words = ["--seed", str(seed), "--model_card", str(place / "card")]
        assert tiny_runs.run(recipe, place / f"run{seed}", *words) == 0
    return place


@pytest.fixture
def card(trained, tmp_path):
    """The card, as it was, and a folder for runs."""
    folder = tmp_path / "card"
    folder.mkdir()
    for file in (trained / "card").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def verify(card, trained, tmp_path, *words):
    path = f"--data.path={trained / 'corpus'}"
    return main(["verify", str(card), path, f"--output_dir={tmp_path / 'again'}", *words])


def test_a_card_gathers_the_seeds_of_its_recipe(trained):
    folder = trained / "card"
    assert {file.name for file in folder.iterdir()} == {*cards.FILES, "seed-4.jsonl", "seed-5.jsonl"}
    losses = [each["loss"] for each in cards.outcomes(folder)]
    assert losses == [last(trained / f"run{seed}", "test")["loss"] for seed in (3, 4, 5)] and len(set(losses)) == 3
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "\n# card\n" in text  # the name that it has there, not that of a run
    assert text.count("## 3 seeds") == 1 and text.index("## 3 seeds") < text.index("\n## Recipe")
    assert f"| loss | {statistics.mean(losses):.5g} | {statistics.stdev(losses):.2g} |" in text
    corpus = last(trained / "run3", "finished")["corpus"]
    assert len(corpus) == 64 and f"| SHA-256 of the training tokens | {corpus} |" in text
    weights = sha256(trained / "run3" / "model" / "model.safetensors")
    assert f"| SHA-256 of model.safetensors | {weights} |" in text


def last(run, event):
    return next(line for line in reversed(metrics.read(run / "metrics.jsonl")) if line["event"] == event)


def test_a_card_says_of_which_split_its_scores_are(card):
    assert "| on the test | mean |" in (card / "README.md").read_text(encoding="utf-8")
    for log in cards.logs(card):
        lines = [line for line in log.read_text(encoding="utf-8").splitlines(True) if '"event": "test"' not in line]
        log.write_text("".join(lines), encoding="utf-8")
    cards.write_spread(card)
    assert "| on validation | mean |" in (card / "README.md").read_text(encoding="utf-8")


def test_the_card_of_another_recipe_has_none_of_its_seeds(trained, card):
    recipe = trained / "recipe.yaml"
    words = ["--seed=4", f"--model_card={card}", "--optimisation.max_steps=5"]
    assert tiny_runs.run(recipe, trained / "other", *words) == 0
    assert {file.name for file in card.iterdir()} == {*cards.FILES}
    assert "seeds" not in (card / "README.md").read_text(encoding="utf-8")


def test_a_card_of_an_older_version_gains_a_seed(trained, card):
    """Whose recipe lacks fields that came later, which were as they are by default."""
    (card / "seed-5.jsonl").unlink()
    recipe = yaml.safe_load((card / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["evaluation"].pop("minimum_bayes_risk") is None and recipe["data"].pop("workers") == 0
    (card / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    cards.copy(trained / "run5", card)
    assert {file.name for file in card.glob(cards.SEEDS)} == {"seed-4.jsonl", "seed-5.jsonl"}
    recipe["optimisation"].pop("max_steps")  # which has no default: nobody knows of what the card is
    (card / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    cards.copy(trained / "run5", card)
    assert not [*card.glob(cards.SEEDS)]


def test_a_seed_that_is_trained_again_replaces_the_first(trained, card):
    before = (card / "README.md").read_bytes()
    cards.copy(trained / "run3", card)
    assert (card / "README.md").read_bytes() == before and len(cards.outcomes(card)) == 3


def test_a_recipe_is_held_to_its_card(trained, card, tmp_path, capsys):
    assert verify(card, trained, tmp_path) in (0, 1)  # one of twenty seeds is outside
    told = capsys.readouterr()
    assert "seed 6" in told.out and "card, 3 seeds" in told.out and "the same" in told.out
    # A seed of the card itself is where the card is.
    assert verify(card, trained, tmp_path / "third", "--seed=5") == 0
    told = capsys.readouterr()
    assert f"{card}: as the card says, of loss, " in told.out.replace("\n", " ") and "not as the card" not in told.err


@pytest.mark.parametrize("wrong", ["loss", "flops", "corpus"])
def test_what_is_not_as_the_card_says_is_named(wrong, trained, card, tmp_path, capsys):
    values = {"loss": 1.0, "flops": 1e6, "corpus": "0" * 64}
    for file in (card / "metrics.jsonl", *card.glob(cards.SEEDS)):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for line in lines:
            if line["event"] in ("test", "finished") and wrong in line:
                line[wrong] = values[wrong]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    about = json.loads((card / "environment.json").read_text(encoding="utf-8")) | {"processor": "Abacus"}
    (card / "environment.json").write_text({"loss": json.dumps(about), "flops": "["}.get(wrong, json.dumps({})))
    assert verify(card, trained, tmp_path, "--seed=3") == 1
    error = capsys.readouterr().err
    assert f"{card}: not as the card says: {wrong}" in error
    there = {"loss": "cpu, Abacus, ", "flops": "what is not written down, "}.get(wrong, "")
    assert f"{card} was trained on {there}" in error.replace("\n", " ") and "this on cpu, " in error


@pytest.mark.parametrize("more", [b"", b"\n"])
def test_a_copy_is_no_further_seed(more, trained, card, tmp_path, capsys):
    """Of the same numbers twice there is no spread, and every honest seed would be outside."""
    (card / "seed-5.jsonl").write_bytes((card / "seed-4.jsonl").read_bytes() + more)
    assert verify(card, trained, tmp_path) == 2
    error = capsys.readouterr().err
    assert "metrics of two of its seeds are the same" in error and not (tmp_path / "again").exists()


def test_a_score_that_the_card_does_not_have_is_unknown(trained, card, tmp_path, capsys):
    for log in cards.logs(card):
        rewrite(log, lambda line: line.pop("perplexity", None))
    assert verify(card, trained, tmp_path, "--seed=3") == 0
    assert re.search(r"perplexity.* - .*unknown", capsys.readouterr().out)


def test_any_score_of_a_task_is_judged(monkeypatch, trained, card, tmp_path, capsys):
    """Also one by which the recipe does not choose its weights: of a translator its BLEU."""
    monkeypatch.setattr(cards, "compared", lambda before, after: [("masked_accuracy", "", "", "", "outside")])
    assert verify(card, trained, tmp_path, "--seed=3") == 1
    assert "not as the card says: masked_accuracy" in capsys.readouterr().err
    assert {"bleu", "exact_match", "flops", "corpus"} < {*cards.JUDGED}


def rewrite(file, change):
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_a_card_without_a_hash_says_so(trained, card, tmp_path, capsys):
    for log in cards.logs(card):
        rewrite(log, lambda line: line.pop("corpus", None))
    assert verify(card, trained, tmp_path, "--seed=3") == 0
    assert "unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ('{"event": "te\n', "line 1: not JSON"),
        ('{"event": "test", "step": "six", "loss": 1.0}\n', "step='six' must be a number"),
        (
            '{"event": "test", "step": 6, "loss": 1.0}\n{"event": "finished", "step": 6, "flops": "many"}\n',
            "flops: 'many'",
        ),
        ('{"event": ["test"], "step": 6}\n', "event=['test'] must be a name"),
        ("[" * 100_000 + "\n", "line 1: not JSON"),
        (None, "its seeds were trained on different corpora"),
    ],
)
def test_a_damaged_card_is_refused_before_anything_is_trained(damage, message, trained, card, tmp_path, capsys):
    if damage is None:
        rewrite(card / "seed-4.jsonl", lambda line: line.update(corpus="0" * 64) if "corpus" in line else None)
    else:
        (card / "seed-4.jsonl").write_text(damage, encoding="utf-8")
    assert verify(card, trained, tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"path": "owner/corpus"}, "owner/corpus"),
        ({"path": "owner/pairs", "sources": [{}, {"columns": {"source": ["de"]}}]}, "owner/pairs"),
        ({"path": "data", "sources": [{"split": "one/text.txt[:99%]"}, {"split": "two/*/train.txt"}]}, "one, two"),
        ({"path": "data", "sources": [{"path": "owner/wiki"}, {"path": "owner/code"}]}, "owner/wiki, owner/code"),
    ],
)
def test_a_card_says_what_was_trained_on(data, said):
    assert publication.corpora(Data.model_validate(data)) == said


def test_a_card_without_a_spread_is_refused(trained, card, tmp_path, capsys):
    for file in card.glob(cards.SEEDS):
        file.unlink()
    assert verify(card, trained, tmp_path) == 2
    assert "has metrics of 1 run(s), which have no spread" in capsys.readouterr().err
    assert verify(tmp_path / "nowhere", trained, tmp_path) == 2
    assert f"there is no {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert main(["verify"]) == main(["verify", "--seed=2"]) == 2
    (card / "seed-4.jsonl").write_text('{"event": "train", "step": 1, "loss": 2.0}\n')
    assert verify(card, trained, tmp_path) == 2
    assert "seed-4.jsonl: a run that has not" in capsys.readouterr().err
    log = (card / "metrics.jsonl").read_text()
    (card / "seed-4.jsonl").write_text(re.sub(r'"loss": [\d.]+', '"loss": NaN', log))
    assert verify(card, trained, tmp_path) == 2
    assert "loss of one of its seeds is not finite" in capsys.readouterr().err
    (card / "metrics.jsonl").unlink()  # the other seeds are not all of a card
    assert verify(card, trained, tmp_path) == 2
    assert f"there is no {card / 'metrics.jsonl'}" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_where_a_further_seed_is_expected():
    """In 95 of 100 draws of three seeds and one more."""
    draws = random.Random(0)
    inside = 0
    for _ in range(4000):
        *seeds, another = (draws.gauss(2, 0.5) for _ in range(4))
        inside += abs(another - statistics.mean(seeds)) <= cards.expected(statistics.stdev(seeds), 3)
    assert math.isclose(inside / 4000, 0.95, abs_tol=0.015)
