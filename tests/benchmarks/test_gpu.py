"""The command for a GPU, without one: every step is rehearsed, plans are refused, what travels arrives."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, luggage, steps
from benchmarks.steps import STEPS, Goal, Step
from training import folder, metrics


@pytest.mark.slow
def test_every_step_at_a_tiny_size(tmp_path: Path) -> None:
    """In a process of its own, as somebody would who has yet to get a GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "run", "--rehearse", "--output_dir", str(tmp_path)]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "predicted for an H100, not measured" in done.stdout
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert records.keys() == STEPS.keys()
    for name, record in records.items():
        assert record["is_complete"] and not any("error" in each for each in record["commands"]), name
        for goal in record["goals"]:  # but for what a CPU has no data sheet for, there is a figure
            assert goal["is_reached"] is not None or goal["figure"] == "MFU", (name, goal)
    assert records["tests"]["figures"]["tests"] > 40 and records["tests"]["figures"]["failed"] == 0
    assert records["sharding"]["figures"]["apart"] < 1e-3  # in bf16, in which FSDP2 rounds the weights too
    assert {"README.md", "metrics.jsonl"} < records["multi30k-2"]["commands"][0]["card"].keys()
    lines = map(json.loads, records[gpu.STOPPED]["commands"][0]["card"]["metrics.jsonl"].splitlines())
    trained = [line["step"] for line in lines if line["event"] == "train"]
    assert trained == list(range(1, gpu.STOPPED_STEPS + 1)), "stopped and continued, it is one run"


def test_a_run_is_stopped_when_it_trains(tmp_path: Path) -> None:
    """Not when it has only emptied its log: the signal would end it with nothing to go on from."""
    assert not gpu.has_begun(tmp_path)
    log = metrics.Log(tmp_path / "metrics.jsonl")
    log.truncate(0)
    assert log.path.exists() and not gpu.has_begun(tmp_path)
    log.write("train", step=1)
    assert gpu.has_begun(tmp_path)


def test_no_step_is_predicted_to_outlast_its_limit() -> None:
    minutes = {step.name: steps.predicted_seconds(step) / 60 for step in STEPS.values()}
    assert all(0 < each < 9 for each in minutes.values()), minutes
    assert next(iter(STEPS)) == "tests"


def test_operations_are_those_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where arithmetic is what takes the time, twice the steps take twice as long."""
    monkeypatch.setattr(steps, "LAYER_STEP", 0.0)
    words = steps.recipe_run("shakespeare_char", "some")
    base, double = (
        steps.predicted_seconds(Step("", "", ((*words, f"--optimisation.max_steps={count}"),))) - steps.START
        for count in (3000, 6000)
    )
    assert double == pytest.approx(2 * base)
    # 10.6 million parameters, 3000 steps of 16,384 characters; attention is a tenth of it.
    assert base * steps.SHEET * steps.EAGER_MFU == pytest.approx(1.1 * 6 * 10.65e6 * 3000 * 16384, rel=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run tets", "did you mean tests?"),
        ("go", "invalid choice"),
        ("run tests --left soon", "invalid float value"),
        ("run tests --left nan", "--left nan: must be minutes above 0"),
        ("run --left 9 tests", "there is no GPU here"),  # options may come first
        ("run tests train-decoder shakespeare --luggage {} --left 1", "no tinyshakespeare in"),
        ("run tests train-encoder --luggage {} --left 4", "what fits: run tests"),
        ("run tests --luggage {} --left 9", "there is no GPU here"),
        ("run --together", "name the steps that are to run at once"),
        ("run tests train-decoder --together", "train-decoder measures speed"),
        ("run tests wikitext2 tests --together", "step tests: is named twice"),
        ("prepare --data nowhere", "must be the folder that holds tinyshakespeare"),
        ("prepare shakespeare --data {} --luggage {}", "must hold input.txt"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpu, "pack_packages", lambda target: target.write_bytes(b""))
    assert gpu.main([*words.format(tmp_path, tmp_path).split(), "--output_dir", str(tmp_path / "records")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "records").exists()


def test_what_does_not_fit_is_left_for_another_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.write_small_corpora(tmp_path / "corpora")
    (tmp_path / "corpora/tinyshakespeare/input.txt").write_bytes(bytes(range(256)) * 4)
    monkeypatch.setattr(gpu, "MOST_BYTES", 3000)
    arguments = ["prepare", "--data", str(tmp_path / "corpora"), "--luggage", str(tmp_path / "luggage")]
    monkeypatch.setattr(gpu, "pack_packages", lambda target: target.write_bytes(b"packages"))
    assert gpu.main(arguments) == 0
    printed = capsys.readouterr().out
    there = {path.name for path in (tmp_path / "luggage").iterdir()}
    assert {"packages.tar.xz", "commit", "tinyshakespeare.tar.xz"} <= there and "wikitext-2.tar.xz" not in there
    assert "left out" in printed and "wikitext2" in printed and "MiB  in " in printed
    assert gpu.main([*arguments, "wikitext2"]) == 2
    luggage.unpack(tmp_path / "luggage/tinyshakespeare.tar.xz", tmp_path / "data", "tinyshakespeare")
    assert (tmp_path / "data/tinyshakespeare/input.txt").read_bytes() == bytes(range(256)) * 4


@pytest.mark.parametrize(("here", "said"), [("1" * 40, "1" * 40), ("1" * 40 + "-dirty", "2" * 40), (None, "2" * 40)])
def test_sources_that_have_travelled_are_of_the_commit_they_were_packed_at(
    here: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(luggage, "LUGGAGE", tmp_path)
    monkeypatch.setattr(folder, "commit", lambda: here)
    (tmp_path / "commit").write_text("2" * 40 + "\n")
    assert luggage.environment_of(torch.device("cpu"), "benchmarks.gpu")["commit"] == said


def test_sources_that_were_changed_are_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "__file__", str(tmp_path / "folder.py"))
    assert folder.commit() is None
    (tmp_path / "code").write_text("as committed")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (["init", "-q"], ["add", "code"], ["commit", "-qm", "a"], ["tag", "-am", "a", "v1"]):
        subprocess.run([*git, *words], check=True)
    clean = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert folder.commit() == clean
    (tmp_path / "code").write_text("as it is now")
    assert folder.commit() == f"{clean}-dirty"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(luggage, "NEEDED", ("torch", "not_here"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ValueError, match="not installed: not_here"):
        luggage.unpack_packages(tmp_path, tmp_path)
    luggage.pack(tmp_path / "packages.tar.xz", {"packages/not_here.py": b"brought = True\n"})
    luggage.unpack_packages(tmp_path, tmp_path)
    assert str(tmp_path / "packages") in sys.path


def test_a_command_is_told_to_stop_and_its_record_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends at once; what it launched saves first, and that is waited for."""
    saving = (
        "import signal, sys, time\n"
        "def stop(*_): time.sleep(0.5); print('saved', flush=True); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(60)"
    )
    launcher = "import subprocess, sys; subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()"
    monkeypatch.setitem(gpu.RUNNERS, "senses", (sys.executable, "-c", launcher, "-c", saving))
    step = Step("some", "nothing", (("senses",), ("senses",)), (Goal("macro_f1", 1),))
    record = gpu.run_step(step, tmp_path, tmp_path, tmp_path / "records", gpu.execute, 3.0)
    (command,) = record["commands"]  # after it was stopped, nothing else was begun
    assert "saved" in command["printed"] and command["exit_code"] and not record["is_complete"]
    assert record["goals"] == [{"figure": "macro_f1", "value": 1, "is_least": True, "is_reached": None}]
    assert json.loads((tmp_path / "records/some.json").read_text()) == json.loads(json.dumps(record))


def test_a_step_without_any_time_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Step("some", "nothing", (("senses",),), (Goal("macro_f1", 1),))
    record = gpu.run_step(step, tmp_path, tmp_path, tmp_path / "records", lambda *_: pytest.fail("begun"), 0.0)
    assert not record["is_complete"] and not record["commands"] and not (tmp_path / "records").exists()
    assert "some: NOT complete in 0 s" in capsys.readouterr().err


def test_steps_at_once_take_as_long_as_the_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(steps, "predicted_seconds", lambda step: 120.0)
    monkeypatch.setattr(gpu, "corpora_of", lambda step: set())
    words = ["run", "tests", "wikitext2", "--output_dir", str(tmp_path), "--left", "3"]
    for more, message in (([], "--left 3 is less"), (["--together"], "there is no GPU here")):
        assert gpu.main([*words, *more]) == 2
        assert message in capsys.readouterr().err


def test_steps_that_measure_no_speed_run_at_once_and_stop_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other to have begun; then the program is told to stop, and passes that on."""
    wait = (
        "import os, pathlib, sys, time\n"
        "mine, other = (pathlib.Path(path) for path in sys.argv[1:3])\n"
        "mine.touch()\nwhile not other.exists(): time.sleep(0.01)\n"
        "if mine < other: os.kill(os.getppid(), 15)\ntime.sleep(60)"
    )
    places = [str(tmp_path / name) for name in ("a", "b")]
    words = [("senses", *places), ("senses", *places[::-1])]
    both = {name: Step(name, "nothing", (each,)) for name, each in zip("ab", words, strict=True)}
    monkeypatch.setattr(steps, "STEPS", both)
    monkeypatch.setattr(steps, "predicted_seconds", lambda step: 60.0)
    monkeypatch.setattr(gpu, "RUNS", tmp_path / "runs")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setitem(gpu.RUNNERS, "senses", (sys.executable, "-c", wait))
    with pytest.raises(SystemExit):
        gpu.main(["run", "a", "b", "--together", "--output_dir", str(tmp_path / "records")])
    for name, other in ("ab", "ba"):
        record = json.loads((tmp_path / f"records/{name}.json").read_text())
        assert record["beside"] == [other] and record["commands"][0]["exit_code"] == -15


@pytest.mark.parametrize("runner", ["training", "pytest"])
def test_a_command_that_fails_at_once_has_a_record(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves the next steps their turn; what an earlier try has left is not taken for its own."""
    monkeypatch.setitem(gpu.RUNNERS, runner, (sys.executable, "-c", "raise SystemExit('no such recipe')"))
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    (tmp_path / "some").mkdir()
    (tmp_path / "some/tests.xml").write_text('<t><s tests="1" failures="0" errors="0" skipped="0"/></t>')
    words = (runner, "--output_dir", "{run}", "--junitxml", "{run}/tests.xml")
    record = gpu.run_step(
        Step("some", "nothing", (words,), (Goal("loss", 1),)), tmp_path, tmp_path, tmp_path / "out", gpu.execute, 60.0
    )
    assert not record["is_complete"] and record["goals"][0]["is_reached"] is None
    assert "error" in record["commands"][0] and (tmp_path / "out/some.json").exists()


@pytest.mark.parametrize("text", ['{"is_complete": tr', "[1]", "{}"])
def test_a_damaged_record_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests.json").write_text(text)
    assert gpu.main(["plan", "--output_dir", str(tmp_path)]) == 2
    assert "tests.json is no record" in capsys.readouterr().err


def test_figures_are_those_of_ours_at_its_best_beside_the_fastest_peer() -> None:
    def row(speed: float, peak: int) -> dict[str, Any]:
        return {"tokens_per_second": {"median": speed}, "peak_bytes": peak, "of_sheet": speed / 100}

    def result(compile: bool, **rows: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "train", "shape": {"compile": compile}, "contenders": rows}

    results = [
        result(True, ours=row(30, 5), llama=row(40, 10), **{"llama, mask given": row(90, 9)}),
        result(False, ours=row(60, 4), llama=row(20, 10)),
    ]
    figures = steps.figures([{"figures": {}, "results": [each]} for each in results])
    assert figures["fastest of ours"] == "ours" and figures["fastest peer"] == "llama, compiled"
    assert figures["speed"] == 1.5 and figures["memory"] == 0.4 and figures["MFU"] == 0.6
    assert Goal("speed", 1.5).is_reached(figures) and not Goal("memory", 0.3, False).is_reached(figures)


def test_steps_with_a_record_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "tests.json").write_text(json.dumps({"is_complete": True}))
    (tmp_path / "memory.json").write_text(json.dumps({"is_complete": False}))
    names = [step.name for step in gpu.chosen(argparse.Namespace(steps=[]), tmp_path)]
    assert "tests" not in names and "memory" in names
    assert [step.name for step in gpu.chosen(argparse.Namespace(steps=["tests"]), tmp_path)] == ["tests"]
