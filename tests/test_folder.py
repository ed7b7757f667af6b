"""The folder of a run: one process has it, and nothing that somebody else put there or named is lost."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import tiny_runs
from training.__main__ import main
from training.folder import claimed, instructions
from training.sections import RecipeError

ROOT = Path(__file__).parent.parent
HOLD = "import sys, time; from pathlib import Path; from training.folder import claimed\n"
HOLD += "with claimed(Path(sys.argv[1])): print(flush=True); time.sleep(600)"


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 1})


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder `run`."""
    words = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_a_second_run_is_refused_and_the_first_is_named(recipe, holder, tmp_path, capsys):
    for way in ("--resume", "--overwrite"):
        assert tiny_runs.run(recipe, tmp_path / "run", way) == 2
        message = capsys.readouterr().err
        assert f"{tmp_path / 'run'} is in use, a run of process {holder.pid} on {os.uname().nodename}" in message
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert tiny_runs.run(recipe, tmp_path / "run") == 0, "the claim of a process that was killed has ended"
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_claim_ends_with_its_block_and_leaves_no_folder_behind(tmp_path):
    folder = tmp_path / "one" / "two"
    with claimed(folder), pytest.raises(RecipeError, match=f"in use, a run of process {os.getpid()}"), claimed(folder):
        pass
    assert not (tmp_path / "one").exists()
    with claimed(folder):
        (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]


@pytest.mark.slow
def test_what_forked_workers_inherit_is_no_claim(tmp_path):
    """Loader processes outlive for seconds the run that was killed."""
    script = "import os, sys, time; from pathlib import Path; from training.folder import claimed\n"
    script += "with claimed(Path(sys.argv[1])):\n    if not os.fork(): time.sleep(5); os._exit(0)\n"
    script += "    print(flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "run"], cwd=ROOT, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        time.sleep(0.2)  # the child's turn to let go
        process.kill()
        process.wait()
        with claimed(tmp_path / "run"):
            pass


@pytest.mark.parametrize("way", [[], ["--overwrite"]])
def test_what_the_recipe_names_is_not_in_the_way_of_its_run(way, recipe, tmp_path, capsys):
    """The recipe, the tokenizer and the corpus were deleted where they lay in the folder of the run."""
    output = tmp_path / "run"
    assert tiny_runs.run(recipe, output) == 0
    shutil.copy(recipe, output / "recipe.yaml")
    shutil.copytree(tmp_path / "corpus", output / "model" / "corpus")
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for file, words, named in (
        (output / "recipe.yaml", [], "the recipe: "),
        (recipe, ["--tokenizer.path", output / "tokenizer"], "tokenizer.path: "),
        (recipe, ["--tokenizer.path", os.path.relpath(output / "model")], "tokenizer.path: "),
        (recipe, ["--data.path", output / "model" / "corpus"], "data: "),
        (recipe, ["--data.path", output, "--data.splits.validation", "metrics.jsonl"], "data: "),
    ):
        assert tiny_runs.run(file, output, *map(str, words), *way) == 2
        assert f"training: {named}" in (message := capsys.readouterr().err) and "keep it elsewhere" in message
        assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("named", ["the recipe", "data", "tokenizer.path", "model.path", "through a link"])
def test_what_a_link_or_a_stem_leads_to_is_not_replaced_either(named, recipe, tmp_path, capsys):
    output = tmp_path / "run"
    assert tiny_runs.run(recipe, output) == 0
    (tmp_path / "link").symlink_to(output / {"tokenizer.path": "tokenizer", "model.path": "model"}.get(named, "."))
    where, words = output, []
    match named:
        case "the recipe":
            recipe = tmp_path / "link" / "recipe.yaml"
        case "data":  # by its stem
            (output / "test_outputs.txt").write_text("one two\n", encoding="utf-8")
            words = ["--objective", "causal_lm", "--data.columns", '{"text": "text"}', "--data.path", output]
            words += ["--data.splits", '{"train": "test_outputs[:50%]", "validation": "test_outputs[50%:]"}']
            words += ["--data.sample_by=document", "--data.window=16", "--model", '{"model_type": "scratch_decoder"}']
        case "through a link":
            named, where, recipe = "the recipe", tmp_path / "link", output / "recipe.yaml"
        case _:
            words = [f"--{named}", tmp_path / "link"]
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert tiny_runs.run(recipe, where, *map(str, words), "--overwrite") == 2
    assert f"training: {named}: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_a_card_replaces_a_card_and_nothing_else(recipe, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "README.md").write_text("mine", encoding="utf-8")
    for folder, said in (
        (theirs, "holds README.md of no card"),
        (tmp_path, "holds recipe.yaml of no card"),
        (recipe, "is a file"),
        (tmp_path / "run", "is output_dir"),
    ):
        assert tiny_runs.run(recipe, tmp_path / "run", "--model_card", str(folder)) == 2
        assert f"training: model_card: {folder} {said}" in capsys.readouterr().err
    assert (theirs / "README.md").read_text(encoding="utf-8") == "mine" and not (tmp_path / "run").exists()
    for _ in range(2):
        assert tiny_runs.run(recipe, tmp_path / "run", "--model_card", str(tmp_path / "card"), "--overwrite") == 0


@pytest.mark.parametrize(
    ("flags", "has_tiles"), [("flags\t: avx512f amx_bf16 amx_tile\n", True), ("flags : avx2", False)]
)
def test_processors_with_tiles_are_told_from_those_without(flags, has_tiles, monkeypatch):
    monkeypatch.setattr("training.folder.cpuinfo", lambda: flags)
    assert instructions().endswith(" AMX") == has_tiles


def test_a_home_folder_is_that_of_the_user(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert main([str(recipe), "--output_dir=~/run"]) == 0
    assert (tmp_path / "home" / "run" / "model").is_dir()


@pytest.mark.parametrize("path", ["a\0b", "~nobody-of-this-name/x", "x" * 300])
@pytest.mark.parametrize("field", ["data.path", "tokenizer.path", "model.path", "output_dir"])
def test_what_cannot_be_a_path_is_named(field, path, recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [recipe.name, "--output_dir", "run", f"--{field}={path}"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert field.partition(".")[0] in said and path.replace("\0", "\\x00")[:20] in said.replace("\0", "\\x00")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["corpus", "recipe.yaml"]


def test_a_folder_that_is_no_run_is_neither_replaced_nor_resumed(recipe, tmp_path, capsys):
    theirs = tmp_path / "run" / "checkpoints" / "theirs.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("not of a run", encoding="utf-8")
    for way in ([], ["--overwrite"], ["--resume"]):
        assert tiny_runs.run(recipe, tmp_path / "run", *way) == 2
        assert "holds checkpoints and no recipe.yaml, so it is not a run's" in capsys.readouterr().err
    shutil.rmtree(theirs.parent)
    (tmp_path / "run" / "recipe.yaml").write_text("# by hand", encoding="utf-8")
    assert tiny_runs.run(recipe, tmp_path / "run") == 2
    assert (tmp_path / "run" / "recipe.yaml").read_text(encoding="utf-8") == "# by hand"


def test_overwriting_follows_no_links(recipe, tmp_path):
    output, elsewhere = tmp_path / "run", tmp_path / "big disk"
    assert tiny_runs.run(recipe, output) == 0
    (output / "checkpoints").rename(elsewhere)
    (output / "checkpoints").symlink_to(elsewhere)
    kept = sorted(elsewhere.iterdir())
    assert tiny_runs.run(recipe, output, "--overwrite") == 0
    assert sorted(elsewhere.iterdir()) == kept and not (output / "checkpoints").is_symlink()


@pytest.mark.parametrize("name", ["c[12]", "a*b"])
def test_a_path_that_exists_is_not_a_pattern(name, tmp_path):
    """`c[12]` was read as a pattern, and trained on `c1`."""
    recipe = tiny_runs.write_recipe(tmp_path, "causal_lm", optimisation={"max_steps": 1})
    corpus = tiny_runs.write_corpus(tmp_path / name)
    for other in ("c1", "axb"):
        tiny_runs.write_corpus(tmp_path / other, seed=1)
    assert tiny_runs.run(recipe, tmp_path / "run", "--data.path", str(corpus)) == 0
    assert tiny_runs.run(recipe, tmp_path / "plain") == 0
    assert tiny_runs.losses(tmp_path / "run") == tiny_runs.losses(tmp_path / "plain")


def test_cards_name_no_folder_of_this_machine(tmp_path, monkeypatch):
    recipe = tiny_runs.write_recipe(tmp_path, optimisation={"max_steps": 1})
    card, words = tmp_path / "card", ["--trackers=[]", f"--data.splits.test={tmp_path}/corpus/test"]
    words = ["--model_card", str(card), "--data.splits.train", f'["absent", "{tmp_path}/corpus/train"]', words[0]]
    monkeypatch.setattr(sys, "argv", ["training", str(recipe), "--output_dir", str(tmp_path / "run"), *words])
    assert tiny_runs.run(recipe, tmp_path / "run", *words) == 0
    published = [path for folder in (card, tmp_path / "run" / "model") for path in folder.iterdir()]
    assert len(published) > 10
    for path in published:
        assert str(tmp_path).encode() not in path.read_bytes(), path
    assert yaml.safe_load((card / "recipe.yaml").read_text())["data"]["path"] == "corpus"
    assert "--output_dir run" in (card / "README.md").read_text()
