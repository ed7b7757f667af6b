"""Ideas about a recipe, each alone, over seeds."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks import ablations, readme
from benchmarks.__main__ import main

from .. import tiny_runs

IDEAS = {
    "score": "loss",
    "seeds": [1, 2],
    "ideas": [
        {"name": "as it is"},
        {"name": "slower", "changes": {"optimisation.learning_rate": 1e-9, "optimisation.matrix_learning_rate": 1e-9}},
        {"name": "wider", "after": "slower", "changes": {"model.hidden_size": 48}},
    ],
}


def written(folder: Path, **fields: object) -> Path:
    file = folder / "ideas.yaml"
    file.write_text(yaml.safe_dump({"recipe": str(tiny_runs.write_recipe(folder)), **IDEAS, **fields}))
    return file


def run(changes: dict, seed: int, loss: float) -> dict:
    about = {"parameters": 7, "processor": "Abacus (1 GHz)"}
    return {"changes": changes, "seed": seed, "loss": loss, "flops": 1e6, **about}


@pytest.fixture
def here(monkeypatch):
    """What runs does so in this process, not in one that has all to import."""

    def ran(command, name, **_):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert tiny_runs.main(command[3:]) == 0, name
        return printed.getvalue()

    monkeypatch.setattr(ablations, "ran", ran)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which only the first thread of a process may set


def test_a_command_is_run_for_each_of_them(tmp_path):
    file = written(tmp_path)
    assert main(["ablations", str(file), "--only", "as it is", "--processes", "2"]) == 0
    runs = json.loads(file.with_suffix(".json").read_text())["runs"]
    assert {run["seed"] for run in runs} == {1, 2} and runs[0]["loss"] != runs[1]["loss"]


def test_each_idea_is_run_over_the_seeds_and_none_twice(tmp_path, here, monkeypatch, capsys):
    file = written(tmp_path)
    assert main(["ablations", str(file), "--only", "as it is", "slower"]) == 0
    record = json.loads(file.with_suffix(".json").read_text())
    runs = sorted(record["runs"], key=lambda run: (len(run["changes"]), run["seed"]))  # they end in any order
    assert [(run["seed"], *run["changes"]) for run in runs] == [
        (seed, *idea.get("changes", {})) for idea in IDEAS["ideas"][:2] for seed in (1, 2)
    ]
    losses = [run["loss"] for run in runs]
    assert losses[0] != losses[1] and max(losses[:2]) < min(losses[2:]), "a rate of nothing learns nothing"
    assert all(run["flops"] > 0 and run["parameters"] > 0 for run in record["runs"])
    rows = [*ablations.table(ablations.read(file), record)]
    assert [row[-1] for row in rows] == ["", "loses, built on"]
    capsys.readouterr()
    monkeypatch.setattr(ablations, "trained", lambda *_: pytest.fail("it was run before"))
    assert main(["ablations", str(file), "--only", "as it is", "slower"]) == 0
    assert "loses" in capsys.readouterr().out


def test_models_are_asked_for_the_senses_of_words_too(tmp_path, here, capsys):
    file = written(tmp_path, score="macro_f1", is_rising=True)
    tiny_runs.write_recipe(tmp_path, "masked_lm")  # in place of the other
    assert main(["ablations", str(file), "--only", "as it is"]) == 2
    assert "score: macro_f1 is of the senses of words; give --senses FOLDER" in capsys.readouterr().err
    rows = [f"one\ttrain\t{sense}\t\t{sense} one" for sense in ("two", "three") for _ in range(2)]
    table = tmp_path / "senses.tsv"
    table.write_text("\n".join(["word\tsplit\tsense\tposition\tsentence", *rows]))
    assert main(["ablations", str(file), "--only", "as it is", "--seeds", "1", "--senses", str(table)]) == 0
    (run,) = json.loads(file.with_suffix(".json").read_text())["runs"]
    assert run["macro_f1"] == 100 and run["loss"] > 0, "sentences that are the same are of the same sense"


def test_what_gains_less_than_the_spread_does_not_gain(tmp_path):
    file = written(tmp_path)
    (_, first), (_, second) = (({}, IDEAS["ideas"][0]), ({}, IDEAS["ideas"][1]))
    for gain, verdict in ((0.05, "no gain"), (0.2, "gains"), (-0.2, "loses")):
        changes = second["changes"]
        runs = [run({}, 1, 2.0), run({}, 2, 2.1), run(changes, 1, 2.0 - gain), run(changes, 2, 2.1 - gain)]
        rows = [*ablations.table(ablations.read(file), {"runs": runs})]
        assert rows[1][-1] == f"{verdict}, built on", first
        assert rows[1][3] == f"{gain:+.4f}"
    uneven = [run({}, 1, 2.0), run({}, 2, 2.001), run(changes, 1, 1.9), run(changes, 2, 2.0)]
    rows = [*ablations.table(ablations.read(file), {"runs": uneven})]
    assert rows[1][-1] == "no gain, built on", "of the larger spread, not of one between the two"
    assert len(rows) == 2, "what was not run has no row"
    other = [each | {"processor": "Counting Frame (2 GHz)"} for each in runs[2:]]
    rows = [*ablations.table(ablations.read(file), {"runs": runs[:2] + other})]
    assert rows[1][-1] == "loses (on Counting Frame, unlike what it is beside), built on"
    better = [each | {"loss": 1.0} for each in other]
    rows = [*ablations.table(ablations.read(file), {"runs": runs[:2] + better})]
    assert rows[1][-1] == "gains (on Counting Frame, unlike what it is beside), built on"
    rows = [*ablations.table(ablations.read(file), {"runs": runs[:3]})]
    assert rows[1][2:4] == [f"{2.0 - gain:.4f}", ""], "one seed has no spread"
    assert rows[1][-1] == "1 of 2 seeds, built on"


def test_reports_have_the_table(tmp_path):
    folder = tmp_path / ablations.FOLDER
    folder.mkdir(parents=True)
    file = written(folder)
    file.with_suffix(".json").write_text(json.dumps({"runs": [run({}, 1, 2.0), run({}, 2, 2.1)]}))
    text = readme.filled("<!-- ablations: ideas -->\nold\n<!-- end -->\n", tmp_path)
    assert "| as it is |" in text and "2.0500 ± 0.0707" in text and "old" not in text
    written(folder, times=2.0)
    assert "4.1000 ± 0.1414" in readme.filled(text, tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"ideas": [{"name": "a"}, {"name": "a"}]}, "must be new"),
        ({"ideas": [{"name": "a", "after": "b"}]}, "come after 'b'"),
        ({"seeds": [1]}, "have no spread"),
        ({"ideas": [{"name": "a", "change": {}}]}, "change"),
        ({"seeds": [1, 1]}, "have no spread"),
        ({"seeds": [-1, 2]}, "seeds.0: Input should be greater than or equal to 0"),
        ({"times": float("nan")}, "times: Input should be a finite number"),
        ({"ideas": []}, "ideas: List should have at least 1 item"),
        ({"ideas": [{"name": "a|b"}]}, "ideas.0.name: String should match"),
        ({"ideas": [{"name": "a", "changes": {"seed": 5}}]}, "seed: 5 is each run's own"),
    ],
)
def test_what_says_nothing_is_refused(tmp_path, capsys, fields, said):
    assert main(["ablations", str(written(tmp_path, **fields))]) == 2
    assert said in capsys.readouterr().err


def test_an_idea_that_cannot_be_run_is_said(tmp_path, capsys):
    file = written(tmp_path, ideas=[{"name": "wrong", "changes": {"data.path": "nowhere"}}])
    assert main(["ablations", str(file), "--seeds", "1"]) == 2
    assert "data.path: no file or folder 'nowhere'" in capsys.readouterr().err
    assert main(["ablations", str(file), "--only", "right"]) == 2
    assert "'right' is no idea" in capsys.readouterr().err


def test_an_idea_that_cannot_be_run_loses_no_others(tmp_path, monkeypatch, capsys):
    def trained(_, changes, seed, *rest):
        if changes:
            raise ValueError("data.path: nothing is there")
        return {"loss": 2.0 + seed, "flops": 1e6, "parameters": 7}

    monkeypatch.setattr(ablations, "trained", trained)
    wrong = {"name": "wrong", "changes": {"data.path": "nowhere"}}
    file = written(tmp_path, ideas=[wrong, IDEAS["ideas"][0]])
    assert main(["ablations", str(file)]) == 2
    assert "data.path: nothing is there" in capsys.readouterr().err
    runs = json.loads(file.with_suffix(".json").read_text())["runs"]
    assert [(run["changes"], run["seed"], run["loss"]) for run in runs] == [({}, 1, 3.0), ({}, 2, 4.0)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_runs_too(tmp_path, number):
    slow = {"name": "slow", "changes": {"optimisation.max_steps": 10**6}}
    file, folder = written(tmp_path, ideas=[slow]), tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks", "ablations", str(file), "--seeds", "1"]
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        while not [*folder.glob("*/run/metrics.jsonl")]:
            assert process.poll() is None
            time.sleep(0.05)
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert not child.is_running() and not [*folder.glob("*/run")]
    assert not file.with_suffix(".json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "0"], "--processes 0: must be 1 or more"),
        (["--seeds", "1", "7"], "--seeds 7: .*ideas.yaml has 1, 2"),
    ],
)
def test_numbers_that_cannot_be_are_said(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setattr(ablations, "trained", lambda *_: pytest.fail("too late"))
    assert main(["ablations", str(written(tmp_path)), *words]) == 2
    assert re.search(said, capsys.readouterr().err)


GOOD = json.dumps({"runs": [run({}, 1, 2.0)]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[]", "all of it: Input should be"),
        ("{}", "runs: Field required"),
        ('{"runs": {}}', "runs: Input should be a valid list"),
        ('{"runs": [], "recipe": "x"}', "recipe: Input should be a valid dictionary"),
        ('{"runs": ["x"]}', "runs.0: Input should be"),
        ('{"runs": [{"seed": 1}]}', "runs.0.changes: Field required"),
        *((GOOD.replace(f'"{name}"', '"other"'), f"runs.0.{name}: ") for name in ("loss", "flops", "processor")),
        (GOOD.replace("2.0", '"low"'), "runs.0.loss: Input should be a"),
        (GOOD.replace("2.0", "NaN"), "runs.0.loss: Input should be a"),
        (GOOD.replace("2.0", "true"), "runs.0.loss: Input should be a"),
        (GOOD.replace("1000000.0", "Infinity"), "runs.0.flops: "),
        (GOOD.replace("1000000.0", "0.0"), "runs.0.flops: Input should be greater than 0"),
        ("[" * 100_000, "maximum recursion depth"),
    ],
)
def test_a_damaged_record_is_said_and_left_alone(tmp_path, monkeypatch, capsys, text, said):
    monkeypatch.setattr(ablations, "trained", lambda *_: pytest.fail("too late"))
    folder = tmp_path / ablations.FOLDER
    folder.mkdir(parents=True)
    file = written(folder)
    file.with_suffix(".json").write_text(text)
    assert main(["ablations", str(file)]) == 2
    assert f"ideas.json is no record of runs; mend or remove it ({said}" in capsys.readouterr().err
    assert file.with_suffix(".json").read_text() == text
    with pytest.raises(ValueError, match="ideas.json is no record"):
        readme.filled("<!-- ablations: ideas -->\n<!-- end -->\n", tmp_path)


def test_a_record_damaged_meanwhile_loses_no_run(tmp_path, monkeypatch, capsys):
    file = written(tmp_path)

    def trained(_, changes, seed, *rest):
        file.with_suffix(".json").write_text("{")
        return run(changes, seed, 2.0 + seed)

    monkeypatch.setattr(ablations, "trained", trained)
    assert main(["ablations", str(file), "--only", "as it is"]) == 2
    assert "what was run is in" in capsys.readouterr().err
    assert file.with_suffix(".json").read_text() == "{"
    rescued = json.loads(next(tmp_path.glob("ideas.rescued-*.json")).read_text())["runs"]
    assert [each["loss"] for each in rescued] == [3.0, 4.0]


@pytest.fixture
def unrun(monkeypatch):
    monkeypatch.setattr(ablations, "trained", lambda *_: pytest.fail("it was run"))


def test_scores_that_a_test_does_not_give_are_said_before_anything_is_run(tmp_path, unrun, capsys):
    assert main(["ablations", str(written(tmp_path, score="blue")), "--only", "as it is", "--seeds", "1"]) == 2
    assert "score: blue is none of what a test gives: " in capsys.readouterr().err


def test_what_training_would_refuse_of_any_idea_is_said_before_anything_is_run(tmp_path, unrun, capsys):
    ideas = [{"name": "as it is"}, {"name": "thinner", "changes": {"model.hiden_size": 48}}]
    assert main(["ablations", str(written(tmp_path, ideas=ideas))]) == 2
    assert re.search(r"'thinner': .*model\.hiden_size.*hidden_size", capsys.readouterr().err)
    assert main(["ablations", str(written(tmp_path)), "--data.workers", "-1"]) == 2
    assert re.search(r"'as it is': .*data\.workers", capsys.readouterr().err)


@pytest.mark.parametrize("word", ["optimisation.max_steps=12", "seed=5", "data.splits={}", "output_dir=x", "data={}"])
@pytest.mark.parametrize("separator", ["=", " "])
def test_words_that_change_what_is_measured_are_refused(tmp_path, unrun, capsys, word, separator):
    """Their runs would stand in the record, and in the mean, as the file's own."""
    words = f"--{word}".replace("=", separator, 1).split()
    assert main(["ablations", str(written(tmp_path)), *words]) == 2
    said = f"--{word.partition('=')[0]}: is for `common` of a file of its own; here may be data.path, data.cache, "
    assert said in capsys.readouterr().err
    assert not (tmp_path / "ideas.json").exists()


def test_runs_on_another_text_stay_out_of_the_record(tmp_path, here, capsys):
    file, common = written(tmp_path), ["ablations", str(tmp_path / "ideas.yaml"), "--only", "as it is", "--seeds"]
    assert main([*common, "1"]) == 0
    kept = file.with_suffix(".json").read_text()
    tiny_runs.write_corpus(tmp_path / "other", seed=1)
    assert main([*common, "2", "--data.path", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert re.search(r"data\.path: its training tokens are \w{8}… .* seed 1 of the recipe in the record has", error)
    assert file.with_suffix(".json").read_text() == kept
    (rescued,) = tmp_path.glob("ideas.rescued-*.json")
    assert [run["seed"] for run in json.loads(rescued.read_text())["runs"]] == [2] and str(rescued) in error
    (tmp_path / "corpus").rename(tmp_path / "elsewhere")
    assert main([*common, "2", "--data.path", str(tmp_path / "elsewhere")]) == 0, "the same text in another place"
    assert len(json.loads(file.with_suffix(".json").read_text())["runs"]) == 2


def test_runs_of_another_recipe_stay_out_of_the_record(tmp_path, monkeypatch, capsys):
    """A recipe that has moved on since: what is run then would stand in the table beside what it was before."""
    monkeypatch.setattr(ablations, "trained", lambda _, changes, seed, *rest: run(changes, seed, 2.0))
    file, common = written(tmp_path), ["ablations", str(tmp_path / "ideas.yaml"), "--only", "as it is", "--seeds"]
    assert main([*common, "1"]) == 0
    record = file.with_suffix(".json")
    kept = record.read_text()
    recipe = tmp_path / "recipe.yaml"
    was = yaml.safe_load(recipe.read_text())
    recipe.write_text(yaml.safe_dump(was | {"seed": 7, "log_every": 3, "output_dir": "x"}))
    tree = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(tree | {"common": {"log_every": was.get("log_every", 10)}}))
    assert main([*common, "1"]) == 0, "it is as it was where that is kept in common"
    for changed, said in (
        ({"common": {"log_every": 4}}, "log_every was "),
        ({"common": {"log_every": was.get("log_every", 10), "variation": "short_first"}}, "variation was None, now "),
        ({"common": {"log_every": was.get("log_every", 10), "data.splits.test": "train"}}, "data.splits.test was ['te"),
    ):
        file.write_text(yaml.safe_dump(tree | changed))
        assert main([*common, "2"]) == 2
        assert f"ideas.json has runs of another recipe ({said}" in capsys.readouterr().err
        assert record.read_text() == kept
    file.write_text(yaml.safe_dump(tree))
    record.write_text(json.dumps({"runs": json.loads(kept)["runs"]}))
    assert main([*common, "2"]) == 2, "nor does what does not say which recipe it is of gain any"
    assert "ideas.json has runs, and no recipe that they are of" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(Path(ablations.FOLDER).glob("*.yaml")), ids=lambda path: path.stem)
def test_the_runs_that_are_kept_are_of_the_recipe_as_it_is(path):
    """So that what a record lacks can be run beside them."""
    ideas = ablations.read(path)
    known = ablations.read_record(path.with_suffix(".json"), ideas.score)
    sentences = known["recipe"]["senses"]  # which are not here
    assert (sentences is not None) == (ideas.score == "macro_f1")
    ablations.check_recipe(known, ablations.unchanged(ideas, []) | {"senses": sentences}, path)


def test_runs_told_by_other_sentences_stay_out_of_the_record(tmp_path, monkeypatch, capsys):
    tiny_runs.write_recipe(tmp_path, "masked_lm")
    told = {"macro_f1": 50.0}
    monkeypatch.setattr(ablations, "trained", lambda _, changes, seed, *rest: run(changes, seed, 2.0) | told)
    file = written(tmp_path, score="macro_f1")
    tiny_runs.write_recipe(tmp_path, "masked_lm")  # in place of the other
    common = ["ablations", str(file), "--only", "as it is", "--senses", str(tmp_path / "senses.tsv"), "--seeds"]
    assert main([*common, "1"]) == 2, "before an hour of training"
    assert "senses.tsv is no tab-separated file" in capsys.readouterr().err
    rows = [f"one\t{split}\t{sense}\t\t{sense} one" for sense in ("two", "three") for split in ("train", "test")]
    (tmp_path / "senses.tsv").write_text("\n".join(["word\tsplit\tsense\tposition\tsentence", *rows]))
    assert main([*common, "1"]) == 0
    (tmp_path / "senses.tsv").write_text("\n".join(["word\tsplit\tsense\tposition\tsentence", *rows, rows[0]]))
    assert main([*common, "2"]) == 2
    assert "ideas.json has runs of another recipe (senses is another)" in capsys.readouterr().err


def test_ideas_about_the_tokenizer_have_tokens_of_their_own(tmp_path, here):
    file = written(tmp_path, ideas=[{"name": "as it is"}, {"name": "few", "changes": {"tokenizer.vocab_size": 270}}])
    assert main(["ablations", str(file), "--seeds", "1"]) == 0
    runs = json.loads(file.with_suffix(".json").read_text())["runs"]
    assert len({run["corpus"] for run in runs}) == 2


def test_a_score_that_a_run_leaves_out_is_said_and_not_kept(tmp_path, here, capsys):
    untested = {"data.splits": {"train": "train", "validation": "valid"}, "evaluation.generate_rows": 0}
    file = written(tmp_path, score="bleu", common=untested)
    assert main(["ablations", str(file), "--only", "as it is", "--seeds", "1"]) == 2
    assert "score: bleu is none of what it gave: loss" in capsys.readouterr().err
    assert not file.with_suffix(".json").exists()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="nothing here gives a process fewer cores")
def test_runs_share_the_cores_that_their_process_may_use(tmp_path, monkeypatch):
    given = []

    def trained(_, changes, seed, overrides, threads, senses):
        given.append(threads)
        return run(changes, seed, 2.0 + seed)

    monkeypatch.setattr(ablations, "trained", trained)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert main(["ablations", str(written(tmp_path)), "--only", "as it is", "--processes", "2"]) == 0
    assert given == [3, 3]
