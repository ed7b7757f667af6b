"""The command line of `python -m training`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_runs
from training.__main__ import main
from training.recipe import Recipe
from training.sections import names

ROOT = Path(__file__).parent.parent


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(tmp_path)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_lists_every_field_and_fits_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    sections = {name.partition(".")[0] for name in names(Recipe) if "." in name}
    assert {f"  --{name}" for name in names(Recipe) if name not in sections} <= set(lines)
    assert columns < 80 or max(map(len, lines)) <= columns


@pytest.mark.parametrize("command", ["evaluate", "prepare", "plan", "recipe.yaml"])
def test_help_of_a_command_is_the_help(command, capsys):
    assert main([command, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ") and "  --optimisation.max_steps\n" in printed


@pytest.mark.slow
def test_help_ends_quietly_when_nobody_reads_on():
    """As `--help | head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as pipe:
        command = [sys.executable, "-m", "training", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_bad_recipe_ends_with_code_2_before_anything_is_written(recipe, tmp_path, capsys):
    output = tmp_path / "run"
    assert main([str(recipe), "--output_dir", str(output), "--optimisation.max_steps", "-3"]) == 2
    assert main([]) == 2
    assert main([str(tmp_path / "absent.yaml")]) == 2
    recipe.write_text("objective: [", encoding="utf-8")
    assert main([str(recipe)]) == 2
    assert not output.exists()
    lines = capsys.readouterr().err
    assert "max_steps: must be a whole number, at least 1, got -3" in lines
    assert "usage" in lines and "absent.yaml" in lines and "Traceback" not in lines


def test_the_process_ends_with_the_code_and_no_traceback(recipe):
    words = ["--seed", "08x", "--output_dir", "runs/exp #2", "--overwrite"]
    done = subprocess.run([sys.executable, "-m", "training", recipe, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    # A torch built for CUDA says so where it finds its compiler and no GPU.
    said = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert said[0] == f"training: {recipe}: 1 problem(s)" and "Traceback" not in done.stderr


def test_an_interrupt_while_importing_is_one_line(recipe, tmp_path):
    """Even one that comes where whatever is raised is caught, as it was once within `numpy.__getattr__`."""
    swallowing = "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\n"
    (tmp_path / "torch.py").write_text(swallowing)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "training", recipe]
    done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (130, "training: stopped by SIGINT\n")


@pytest.mark.parametrize("moment", ["run.open_tokenizer", "run.prepare", "evaluation.test", "publication.save_model"])
def test_an_interrupt_before_and_after_training_is_one_line(moment, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"training.{moment}", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    words = ["--optimisation.max_steps", "1"]
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "training: stopped by SIGINT"
    monkeypatch.undo()
    assert tiny_runs.run(recipe, tmp_path / "run", *words, "--resume") == 0


def test_overwrite_replaces_the_folder_that_is_named_and_no_other(recipe, tmp_path):
    """A name with a comment sign was once read as YAML: what was overwritten was `exp`."""
    for name in ("exp", "exp #2", "exp #2"):
        words = ["--optimisation.max_steps", "1", "--seed", "010"]
        assert tiny_runs.run(recipe, tmp_path / name, *words, *(["--overwrite"] if name != "exp" else [])) == 0
        assert "seed: 10\n" in (tmp_path / name / "recipe.yaml").read_text()
    (tmp_path / "exp" / "model" / "README.md").stat()
