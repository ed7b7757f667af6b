"""Reports: the README says what the records say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import readme
from benchmarks.__main__ import main
from benchmarks.steps import STEPS

ROOT = Path(__file__).parents[2]
TABLE = "Before.\n\n<!-- records: {} -->\n<!-- end -->\n\nAfter.\n"


def test_the_readme_says_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--check"]) == 0, capsys.readouterr().err
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in ROOT.glob("benchmarks/records/*/benchmark.json"):
        assert str(path.relative_to(ROOT)) in text
    assert "<!-- records: gpu -->" in text


def test_the_best_peer_of_each_comparison_has_a_row(tmp_path: Path) -> None:
    def ratio(speed: float) -> dict[str, Any]:
        return {"speed": {"median": speed, "q1": speed, "q3": speed}, "memory": 0.5}

    best_first = {"modernbert": ratio(1.1), "bert": ratio(1.5), "distilbert": ratio(2)}
    shape = {"family": "encoder"}
    results = [
        {"kind": "train", "name": "encoder", "title": "training step", "shape": shape, "ratios": best_first},
        {"kind": "embed", "name": "encoder", "title": "9 texts", "shape": shape, "ratios": best_first},
        {"kind": "scaling", "name": "encoder", "title": "width", "shape": shape},
    ]
    about = {"device": "cpu", "threads": 3, "processor": "Abacus", "instructions": "AVX3", "command": ["benchmarks"]}
    record: dict[str, Any] = {"environment": about, "onednn": True, "results": results}
    folder = tmp_path / "benchmarks/records/some"
    folder.mkdir(parents=True)
    (folder / "benchmark.json").write_text(json.dumps(record))
    filled = readme.filled(TABLE.format("some"), tmp_path)
    rows = [line.split(" | ") for line in filled.splitlines() if "](benchmarks" in line]
    assert [row[1] for row in rows] == ["modernbert", "distilbert", "modernbert"]
    assert (
        rows[0][2:] == ["1.10×", "0.50×", "Abacus, AVX3, 3 CPU cores, oneDNN |"]
        and "[encoder, training step](" in rows[0][0]
    )
    assert readme.filled(filled, tmp_path) == filled and filled.endswith("After.\n")
    with pytest.raises(ValueError, match=r"no benchmarks/records/other/benchmark\.json"):
        readme.filled(TABLE.format("other"), tmp_path)


def test_every_kind_of_processor_has_a_row(tmp_path: Path) -> None:
    """Those of one comparison together, whichever record they are from, but for whole runs and other devices."""
    ratios = {"llama": {"speed": {"median": 1.5}}}

    def record(
        folder: str, kind: str = "train", shapes: tuple[str, ...] = ("decoder", "encoder"), **about: Any
    ) -> None:
        results = [
            {"kind": kind, "name": name, "title": "training step", "shape": None, "ratios": ratios} for name in shapes
        ]
        about = {"device": "cpu", "threads": 2, "command": ["training.benchmark", "--no-onednn"]} | about
        path = tmp_path / "benchmarks/records" / folder
        path.mkdir(parents=True)
        (path / "benchmark.json").write_text(json.dumps({"environment": about, "results": results}))

    record("first")
    record("second", shapes=("encoder",), processor="Abacus", command=["benchmarks"])
    record("whole", kind="end-to-end")
    record("card", device="a card")
    assert [(row[0].partition("]")[0][1:], row[4]) for row in readme.processors(tmp_path)] == [
        ("encoder, training step", "Abacus, 2 CPU cores, oneDNN"),
        ("encoder, training step", "2 CPU cores, MKL, version 0.1"),
        ("decoder, training step", "2 CPU cores, MKL, version 0.1"),
    ]


def test_a_score_is_the_mean_over_seeds(tmp_path: Path) -> None:
    card = tmp_path / "model_cards/it"
    card.mkdir(parents=True)
    text = "It has <!-- seeds: it bleu -->?<!-- end --> BLEU."
    with pytest.raises(ValueError, match="a run that has not been measured"):
        readme.filled(text, tmp_path)
    for name, value in {"metrics": 30.0, "seed-2": 31.0, "seed-3": 35.0}.items():
        lines = [
            {"event": event, "step": 1, "bleu": value + extra} for event, extra in (("evaluation", 9), ("test", 0))
        ]
        (card / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert readme.filled(text, tmp_path) == "It has <!-- seeds: it bleu -->32.0 ± 2.6 over 3 seeds<!-- end --> BLEU."
    for path in card.glob("seed-*"):
        path.unlink()
    assert "-->30, one seed<!--" in readme.filled(text, tmp_path)
    ended = [{"event": "evaluation", "step": 1, "bleu": 28.0}, {"event": "finished", "step": 1}]
    (card / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ended))
    assert "-->28, one seed<!--" in readme.filled(text, tmp_path)  # of a recipe without a test
    with pytest.raises(ValueError, match="metrics.jsonl has no chrf"):
        readme.filled(text.replace("bleu", "chrf"), tmp_path)
    text = text.replace("it bleu -->", "it bleu other -->")
    with pytest.raises(ValueError, match=r"there is no .*it.other\.json"):
        readme.filled(text, tmp_path)
    (card / "seed-2.jsonl").write_text((card / "metrics.jsonl").read_text())
    # What `evaluate --json` said of other texts, and what is another thing whose name begins alike.
    for name, bleu in (("other", 20.0), ("other-2", 22.0), ("other_thing", 90.0)):
        (card / f"{name}.json").write_text(json.dumps({"bleu": bleu}))
    assert "bleu other -->21.0 ± 1.4 over 2 seeds<!--" in readme.filled(text, tmp_path)
    (card / "other-2.json").rename(card / "other-3.json")
    assert "over 2 seeds" in readme.filled(text, tmp_path), "these are no numbers of seeds"
    (card / "other-3.json").unlink()
    with pytest.raises(ValueError, match=r"it has logs of 2 seeds, and 1 of other\*.json"):
        readme.filled(text, tmp_path)


@pytest.mark.parametrize("name", ["options", "decoding"])
def test_scores_over_seeds_were_measured_alike(tmp_path: Path, name: str) -> None:
    def check(*ways: dict[str, object]) -> None:
        files = [tmp_path / f"{place}.json" for place in range(len(ways))]
        for file, way in zip(files, ways, strict=True):
            file.write_text(json.dumps({"bleu": 1.0} | ({name: way} if way else {})))
        readme.check_alike(files)

    check(), check({}), check({}, {})
    check({"beams": 5}, {"beams": 5, "sampled": False}, {"beams": 5, "sampled": None})
    for ways in ([{"beams": 5}, {"beams": 4}], [{"beams": 5}] * 2 + [{}], [{}, {"beams": 5}]):
        with pytest.raises(ValueError, match=r"\d.json has beams: (4|None|5), where 0.json has (5|None)"):
            check(*ways)
    words = [{"bank": {"test": 7}, "bow": {"test": 8}}, {"bank": {"test": 7}}]
    for file, each in zip((tmp_path / "0.json", tmp_path / "1.json"), words, strict=True):
        file.write_text(json.dumps({"words": each}))
    with pytest.raises(ValueError, match=r"1.json has test sentences: {'bank': 7}, where"):
        readme.check_alike([tmp_path / "0.json", tmp_path / "1.json"])
    file.write_text("")
    with pytest.raises(ValueError, match=r"1.json: Expecting value"):
        readme.check_alike([file])


def test_scores_are_of_models_whose_logs_are_there(tmp_path: Path) -> None:
    def check(scores: str, runs: str) -> None:
        """Each letter a model, `-` a file that does not say which."""
        for name, models in (("score", scores), ("run", runs)):
            for place, model in enumerate(models):
                line = {"event": "finished", "step": 1} | (
                    {} if model == "-" else {"weights": {"model.safetensors": model}}
                )
                (tmp_path / f"{name}-{place}").write_text(json.dumps(line) + "\n")
        paths = [[tmp_path / f"{name}-{i}" for i in range(len(of))] for name, of in (("score", scores), ("run", runs))]
        readme.check_models(*paths)

    for scores, runs in (("ab", "ab"), ("b", "ab"), ("--", "--"), ("bc", "-b"), ("a-", "-a"), ("ab", "--")):
        check(scores, runs)
    for scores, runs in (("ac", "ab"), ("aa", "ab"), ("-", "a"), ("cd", "-b"), ("a-", "a"), ("---", "--")):
        with pytest.raises(ValueError, match="is of no model, or of no further one, that a log beside it is of"):
            check(scores, runs)


def test_a_task_has_its_budget_what_came_of_it_and_what_that_took(tmp_path: Path) -> None:
    card, empty = tmp_path / "model_cards/it", "<!-- tasks -->\n<!-- end -->"
    card.mkdir(parents=True)
    tasks = [
        {"card": "it", "task": "captions", "score": "bleu", "budget": 9.7e13, "first": "29", "command": "make it"}
        | {"aim": "40", "times": 2},
        {"card": "other", "task": "senses", "score": "macro_f1", "budget": 1e15, "published": "90", "command": "make"}
        | {"measured": "senses"},
    ]
    (card.parent / "tasks.yaml").write_text(yaml.safe_dump(tasks))
    test = {"event": "test", "step": 1440, "bleu": 30.0}
    finished = {"event": "finished", "step": 1440, "parameters": 2_900_000, "targets": 5_500_000, "flops": 4.1e14}
    (card / "metrics.jsonl").write_text(json.dumps(test) + "\n" + json.dumps(finished) + "\n")
    text = readme.filled(empty, tmp_path)
    it = "[captions](model_cards/it/README.md)"
    one = f"| {it} | 9.70e+13 | 29 | 40 | 60, one seed | 4.10e+14 | 2,900,000 | - | `make it` |"
    assert {one, "| senses | 1.00e+15 | - | - | not run | - | - | 90 | `make` |"} <= {*text.splitlines()}
    assert readme.filled(text, tmp_path) == text
    (card.parent / "other").mkdir()
    done = json.dumps({"event": "finished", "step": 1})
    (card.parent / "other" / "metrics.jsonl").write_text(done + "\n")
    with pytest.raises(ValueError, match="there is no .*other.senses"):
        readme.filled(empty, tmp_path)
    (card.parent / "other" / "seed-2.jsonl").write_text(done + "\n")
    for name, score in (("senses.json", 80.0), ("senses-2.json", 82.0)):
        (card.parent / "other" / name).write_text(json.dumps({"mean": {"macro_f1": score}}))
    assert "| [81.0 ± 1.4 over 2 seeds](model_cards/other/senses.json) | - |" in readme.filled(empty, tmp_path)
    (card.parent / "other" / "seed-2.jsonl").write_text("")
    with pytest.raises(ValueError, match="seed-2.jsonl: a run that has not finished"):
        readme.filled(empty, tmp_path)
    (card / "metrics.jsonl").write_text(json.dumps(finished) + "\n")
    with pytest.raises(ValueError, match="metrics.jsonl: a run that has not been measured"):
        readme.filled(empty, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Input should be a valid list"),
        ("- x", "0: Input should be"),
        ("- {card: it", "tasks.yaml: ParserError"),
        ("- {card: it, task: t, score: bleu, budget: many, command: make}", "0.budget: Input should be"),
        ("- {card: it, task: t, budget: 1, command: make}", "0.score: Field required"),
        ("- {card: it, task: t, score: bleu, budget: 1, command: make, goal: 7}", "0.goal: Extra inputs"),
    ],
)
def test_what_is_no_list_of_tasks_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "model_cards").mkdir()
    (tmp_path / "model_cards/tasks.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"tasks.yaml: (all of it: )?.*{re.escape(said.removeprefix('tasks.yaml: '))}"):
        readme.filled("<!-- tasks -->\n<!-- end -->", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "all of it: Input should be a valid dictionary"),
        ('{"mean": []}', "mean: Input should be a valid dictionary"),
        ('{"mean": {"bleu": NaN}}', "mean.bleu: Input should be a finite number"),
        ('{"mean": {"bleu": "86.1"}}', "mean.bleu: Input should be a valid number"),
        ('{"words": {"bank": 3}, "bleu": 1.0}', "words.bank: Input should be"),
        ('{"options": [], "bleu": 1.0}', "options: Input should be a valid dictionary"),
        ('{"bleu": "86.1"}', "has no bleu: '86.1'"),
        ('{"bleu": Infinity}', "has no bleu: inf"),
    ],
)
def test_what_is_no_score_is_said(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "senses.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        readme.scored(file, "bleu")


def test_what_was_not_run_on_a_gpu_is_said(tmp_path: Path) -> None:
    step = STEPS["shakespeare"]
    card = {"README.md": "# it\n\nIts name is it.\n", "metrics.jsonl": ""}
    record: dict[str, Any] = {
        "environment": {"device": "a card"},
        "is_complete": True,
        "figures": {"loss": 1.23456, "step": 7},
        "commands": [{"words": ["training", "some/recipe.yaml"], "name": "it", "card": card}],
    }
    folder = tmp_path / "benchmarks/records/gpu"
    folder.mkdir(parents=True)
    (folder / f"{step.name}.json").write_text(json.dumps(record))
    filled = readme.filled(TABLE.format("gpu"), tmp_path)
    assert filled.count("| not run |") == len(STEPS) - 1
    result = "loss ≤ 1.42 | loss 1.235<br>(a card) |"  # no more than a test says; the rest is in the card
    assert f"[{step.shows}](benchmarks/records/gpu/shakespeare.json) | {result}" in filled
    assert [*readme.cards(tmp_path)] == [("recipe", card | {"README.md": "# recipe\n\nIts name is it.\n"})]


def test_seeds_that_were_run_on_a_gpu_share_a_card(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks/records/gpu"
    folder.mkdir(parents=True)
    said = "# it\n\n| dataset | split | score | value |\n| --- | --- | --- | --- |\n| it | test | bleu | {} |\n"
    for seed, bleu in ((1, 30.0), (2, 32.0)):
        lines = [{"event": "train", "step": 1, "loss": 3.0}, {"event": "test", "step": 1, "bleu": bleu}]
        log = "".join(json.dumps(line) + "\n" for line in lines)
        card = {"README.md": said.format(bleu), "metrics.jsonl": log, "recipe.yaml": f"seed: {seed}\n"}
        command = {"words": ["training", "some/recipe.yaml"], "name": "it", "card": card}
        record = {"environment": {"device": "a card"}, "is_complete": True, "figures": {}, "commands": [command]}
        (folder / f"multi30k-{seed}.json").write_text(json.dumps(record))
    (name, card), (other, logs) = readme.cards(tmp_path)
    assert name == other == "recipe" and [*logs] == ["seed-2.jsonl"] and card["recipe.yaml"] == "seed: 1\n"
    readme.write_card(tmp_path / name, card)
    readme.write_card(tmp_path / name, logs)
    assert (tmp_path / "recipe/curves.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "recipe/README.md").read_text()
    assert "| bleu | 30.0 |" in text and "| bleu | 31 | 1.4 |" in text
