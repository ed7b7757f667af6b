"""A run, measured before it begins."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from tests import tiny_runs
from training import checkpoints, plan
from training.__main__ import main

ROOT = Path(__file__).parent.parent


def test_a_model_that_was_tried_is_gone_before_the_next(tmp_path, monkeypatch, capsys):
    """Or the memory that is told of the last is that of them all."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", evaluation={"every_steps": None})
    tried, released, measured = [], [], plan.measured

    def noted(run, *rest):
        tried.append(weakref.ref(run.unwrapped_model))
        return measured(run, *rest)

    def looked(*_):
        released.append([model() is None for model in tried])

    monkeypatch.setattr(plan, "measured", noted)
    monkeypatch.setattr(plan, "glibc", looked)
    planned(capsys, recipe, "--minutes", "2", "--fit")
    assert len(released) > 1 and all(all(gone) for gone in released)


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


def test_masks_that_get_fewer_are_counted_over_all_steps(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, "masked_lm", optimisation={"mask_fraction": [0.9, 0.1], "max_steps": 80})
    found = planned(capsys, recipe)
    assert tiny_runs.run(recipe, tmp_path / "run") == 0
    (last,) = (
        line for line in tiny_runs.metrics.read(tmp_path / "run" / "metrics.jsonl") if line["event"] == "finished"
    )
    assert int(found["steps"].split()[-2].replace(",", "")) == pytest.approx(last["targets"], rel=0.15)
    assert float(found["operations"].split()[0]) == pytest.approx(last["flops"], rel=0.15)


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


@pytest.mark.parametrize(
    "objective",
    [pytest.param(each, marks=() if each == "causal_lm" else pytest.mark.slow) for each in tiny_runs.OBJECTIVES],
)
def test_the_model_that_fits_into_some_minutes(objective, tmp_path, monkeypatch, capsys):
    """Larger for more of them, in the recipe's proportions, and about as many tokens for each parameter that they meet
    as it makes most of; tied tables are counted once."""
    recipe = tiny_runs.write_recipe(tmp_path, objective, evaluation={"every_steps": None})
    monkeypatch.setattr(
        plan.loop, "timed", lambda run, count: iter([(run.unwrapped_model.num_parameters() / 1e6, 40)] * count)
    )
    sizes = []
    for minutes in (40, 1000):
        found = planned(capsys, recipe, "--minutes", str(minutes), "--fit")
        words = found[f"for {minutes} minutes"].split()
        fields = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        assert fields["--model.hidden_size"] == 8 * fields["--model.num_attention_heads"]
        parameters = int(found["parameters"].split()[0].replace(",", ""))
        steps = int(found[f"in {minutes} minutes"].split()[1])
        sizes.append(parameters)
        run, again, _ = plan.begun([str(recipe), *words])
        assert again["parameters"].split() == found["parameters"].split()
        met = run.unwrapped_model.num_parameters(exclude_embeddings=True)
        tokens = 40 * steps / plan.TARGETS[objective](run.recipe)
        assert 6**-0.5 < tokens / (plan.TOKENS_A_PARAMETER * met) < 6**0.5, "a layer is too much, or lacks"
    assert sizes[0] < sizes[1]
    assert main(["plan", str(recipe), "--minutes", "0.001", "--fit"]) == 2
    assert "--minutes: 0.001 are too few for a model of one layer" in capsys.readouterr().err


def test_the_time_on_gpus(tmp_path, capsys):
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 10**9})
    one, eight = (planned(capsys, recipe, f"--gpus={number}xH100") for number in (1, 8))
    total = float(one["operations"].split()[0])
    assert one["on 1 H100"].split(" in bf16")[0].strip() == plan.duration(total / (plan.MFU * 989e12))
    assert "GB each in DDP" in eight["on 8 H100"]


def test_options_that_cannot_be_are_named(tmp_path, capsys):
    recipe, native = tiny_runs.write_recipe(tmp_path), tmp_path / "native.yaml"
    native.write_text(recipe.read_text().replace("scratch_seq2seq", "marian"), encoding="utf-8")
    for words, said in [
        ([recipe, "--fit"], "--fit: give --minutes as well"),
        ([recipe, "--gpus", "8"], "--gpus: must be a number of GPUs and their kind, as 8xH100, one of B200"),
        ([recipe, "--gpus", "8xRadeon"], "got '8xRadeon'"),
        ([recipe, "--gpus=0xH100"], "got '0xH100'"),
    ]:
        assert main(["plan", *map(str, words)]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--minutes", "20", "--fit"]])
def test_a_plan_of_two_processes_is_said_once(words, tmp_path):
    recipe = tiny_runs.write_recipe(tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, "-m", "training", "plan", str(recipe), *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.count("parameters") == 1 and "in each of 2 process(es)" in done.stdout


def test_durations_read_as_people_say_them():
    said = {12.3: "12 s", 100: "2 min", 3599: "1 h 0 min", 12_000: "3 h 20 min"}
    assert {seconds: plan.duration(seconds) for seconds in said} == said
