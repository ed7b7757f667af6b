"""A run, measured before it begins."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_runs
from training import checkpoints, plan
from training.__main__ import main

ROOT = Path(__file__).parent.parent


def planned(capsys, recipe, *words):
    assert main(["plan", str(recipe), *words]) == 0
    return dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("objective", tiny_runs.OBJECTIVES)
def test_it_says_what_the_run_then_takes(objective, tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, objective)
    found = {name: value.strip() for name, value in planned(capsys, recipe).items()}
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "recipe.yaml"}, "nothing is written"
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    lines = tiny_runs.metrics.read(tmp_path / "run" / "metrics.jsonl")
    targets = [line["targets"] for line in lines if line["event"] == "train"][-1]
    assert int(found["steps"].split()[-2].replace(",", "")) == pytest.approx(targets, abs=12)
    evaluations = sum(line["event"] == "evaluation" for line in lines)
    assert int(found["evaluations"].split()[0]) == evaluations == 3
    (last,) = (tmp_path / "run" / "checkpoints").glob("step-00000012")
    size = sum((last / name).stat().st_size for name in checkpoints.FILES[:2])
    assert float(found["a checkpoint"].split()[0]) == pytest.approx(size / 1e6, abs=0.06)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    flops = float(card.split("training FLOPs, about | ")[1].split()[0])
    assert found["operations"].endswith("% of what large matrices reach")
    assert float(found["operations"].split()[0]) == pytest.approx(flops, rel=0.02)


def test_the_steps_that_fit_into_some_minutes(tmp_path, monkeypatch, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, evaluation={"every_steps": None})
    monkeypatch.setattr(plan.loop, "timed", lambda run, count: iter([(0.5, 40)] * count))
    for words in (["--minutes", "2"], ["--minutes=2"]):
        found = planned(capsys, recipe, *words)
        assert found["in 2 minutes"].strip() == "--optimisation.max_steps 240"
        assert found["steps"].strip() == "12 in 6 s, for 480 targets"


@pytest.mark.parametrize("given", ["0", "-1", "nan", "soon", ""])
def test_minutes_that_cannot_be_are_named(given, tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path)
    assert main(["plan", str(recipe), "--minutes", given]) == 2
    assert f"--minutes: must be a number above 0, got {given!r}" in capsys.readouterr().err


def test_a_plan_of_two_processes_is_said_once(tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "-m", "training", "plan", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.count("parameters") == 1 and "in each of 2 process(es)" in done.stdout


def test_durations_read_as_people_say_them():
    said = {12.3: "12 s", 100: "2 min", 3599: "1 h 0 min", 12_000: "3 h 20 min"}
    assert {seconds: plan._duration(seconds) for seconds in said} == said
