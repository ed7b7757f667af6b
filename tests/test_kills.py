"""Runs killed at any moment, whoever is killed: `--resume` gives the run that never stopped, bit for bit.

python -m pytest -m slow -s tests/test_kills.py
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests import tiny_runs

ROOT = Path(__file__).parent.parent
KILLS = 20
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate launch": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    + ["--mixed_precision", "no", "--dynamo_backend", "no"],
}  # without a GPU over gloo
LAUNCHERS["torchrun, FSDP2"] = LAUNCHERS["torchrun"]
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what `accelerate launch --use_fsdp` sets

# Runs in forks of a process that has imported everything. Each phase begins where its function is called; how long it
# takes is measured in a first, whole run.
PROGRAM = """
import hashlib, json, os, random, signal, sys, threading, time
from pathlib import Path
from training import __main__ as command, checkpoints, evaluation, loop

recipe, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
PHASES = {
    "start": (command, "open_run"),
    "training": (loop, "_step"),
    "evaluation": (evaluation, "validate"),
    "checkpoint": (checkpoints.Store, "save"),
    "finishing": (command, "finish"),
}
draw = random.Random(0)

def in_a_fork(output, prepare, *words):
    if not (child := os.fork()):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        prepare()
        os._exit(command.main([recipe, "--output_dir", str(output), *words]))
    return os.waitpid(child, 0)[1]

def watch(phase, act):
    place, name = PHASES[phase]
    honest = getattr(place, name)
    def watched(*arguments, **options):
        return act(phase, lambda: honest(*arguments, **options))
    setattr(place, name, watched)

def measure():
    def timed(phase, work):
        before = time.monotonic()
        try:
            return work()
        finally:
            took = time.monotonic() - before
            with open(folder / "times.jsonl", "a") as file:
                file.write(json.dumps([phase, took]) + chr(10))
    for phase in PHASES:
        watch(phase, timed)

def kill(phase, call, delay):
    calls = iter(range(1, 1000))
    def killed(_, work):
        if next(calls) == call:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return work()
    return lambda: watch(phase, killed)

def model(output):
    return hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest()

assert in_a_fork(folder / "whole", measure) == 0
times = [json.loads(line) for line in open(folder / "times.jsonl")]
for phase in PHASES:
    took = [seconds for name, seconds in times if name == phase]
    if phase == "finishing":
        took = [1.0]  # until the card is written
    done = missed = 0
    while done < kills:
        output = folder / f"{phase} {done} {missed}"
        call = draw.randrange(len(took))
        status = in_a_fork(output, kill(phase, call + 1, draw.uniform(0, took[call])))
        if not os.WIFSIGNALED(status):
            missed += 1  # the end came first
            assert status == 0 and missed < 10 * kills
            continue
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert in_a_fork(output, lambda: None, "--resume") == 0, (phase, output)
        assert model(output) == model(folder / "whole"), (phase, output)
        done += 1
    print(phase, done, "kills,", missed, "too late", flush=True)
"""


def test_a_run_is_killed_in_each_of_its_phases(tmp_path):
    recipe = tiny_runs.write_recipe(
        tmp_path,
        optimisation={"max_steps": 12, "final_weights": "best"},
        evaluation={"every_steps": 3},
        checkpoints={"every_steps": 2},
    )
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    words = [sys.executable, str(tmp_path / "program.py"), str(recipe), str(tmp_path), str(KILLS)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    assert done.returncode == 0 and done.stdout.count(f"{KILLS} kills") == 5


def start(launcher: str, recipe: Path, output: Path, *words: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A run of two processes."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], *options, "-m", "training"]
    command += [str(recipe), "--output_dir", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= SHARDED if launcher.endswith("FSDP2") else {}
    log = open(output.with_suffix(".log"), "a", encoding="utf-8")  # noqa: SIM115
    return subprocess.Popen([*command, *words], cwd=ROOT, env=environment, stdout=log, stderr=log, text=True)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_of_two_is_killed_and_the_launcher_starts_them_again(launcher, recipe, tmp_path):
    """Told once, by a command that replaces what is there: the run comes back by itself, every time."""
    draw, whole, output = random.Random(1), tmp_path / "whole", tmp_path / "run"
    assert start(launcher, recipe, whole).wait() == 0
    dashes = (lambda name: name) if launcher.startswith("torchrun") else (lambda name: name.replace("-", "_"))
    options = [f"--{dashes('max-restarts')}", str(KILLS), f"--{dashes('monitor-interval')}", "0.1"]
    assert start(launcher, recipe, output, "--optimisation.max_steps", "5").wait() == 0  # to be replaced
    process = start(launcher, recipe, output, "--overwrite", options=options)
    killed: set[int] = set()
    for number in range(KILLS):
        while len(workers := [each for each in family(process)[1:] if each.pid not in killed]) < 2:
            assert process.poll() is None, output.with_suffix(".log").read_text(encoding="utf-8")[-4000:]
            time.sleep(0.05)
        killed |= {each.pid for each in workers}
        if number % 4 != 3:  # the fourth dies while it starts
            wait_until_it_trains(process, output)
        time.sleep(draw.uniform(0, 0.4 if number % 4 != 3 else 6))
        workers[number % 2].kill()
        gone, left = psutil.wait_procs(workers, timeout=120)
        assert not left, "the other one stayed"
    assert process.wait() == 0, output.with_suffix(".log").read_text(encoding="utf-8")[-4000:]
    one, other = (
        hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest() for folder in (whole, output)
    )
    assert one == other and tiny_runs.losses(whole) == tiny_runs.losses(output)
    assert output.with_suffix(".log").read_text(encoding="utf-8").count("resuming ") >= KILLS * 3 // 4


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """A launcher, then its workers."""
    launcher = psutil.Process(process.pid)
    return [launcher, *launcher.children(recursive=True)]


def wait_until_it_trains(process: subprocess.Popen[str], output: Path) -> None:
    log = output / "metrics.jsonl"
    size = log.stat().st_size if log.exists() else 0
    while process.poll() is None and (not log.exists() or log.stat().st_size <= size):
        time.sleep(0.01)
    assert process.poll() is None, output.with_suffix(".log").read_text(encoding="utf-8")[-4000:]


@pytest.fixture
def recipe(tmp_path):
    return tiny_runs.write_recipe(
        tmp_path,
        optimisation={"max_steps": 600},
        evaluation={"every_steps": 25},
        checkpoints={"every_steps": 5},
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_under_a_launcher_are_killed(launcher, recipe, tmp_path):
    """All of them, the launcher alone, or one worker: what is left ends by itself, and the next one goes on."""
    draw, whole, output = random.Random(0), tmp_path / "whole", tmp_path / "run"
    assert start(launcher, recipe, whole).wait() == 0
    for number in range(KILLS):
        process = start(launcher, recipe, output, *(["--resume"] if number else []))
        if number % 5 == 4:
            time.sleep(draw.uniform(1, 8))  # while it starts
        else:
            wait_until_it_trains(process, output)
            time.sleep(draw.uniform(0, 0.4))
        them = family(process)
        for victim in (them, them[:1], them[-1:])[number % 3]:
            victim.kill()
        process.wait()
        gone, left = psutil.wait_procs(them, timeout=120)
        assert not left, "an orphan"
    assert start(launcher, recipe, output, "--resume").wait() == 0
    one, other = (
        hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest() for folder in (whole, output)
    )
    assert one == other and tiny_runs.losses(whole) == tiny_runs.losses(output)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_to_a_launcher_leaves_a_checkpoint_within_its_grace(launcher, name, recipe, tmp_path):
    """Lines of the log, and with them what processes once agreed on, are rarer than its 30 seconds allow."""
    output = tmp_path / "run"
    words = ["--log_every", "100000", "--checkpoints.every_steps", "100000", "--evaluation.every_steps", "100000"]
    process = start(launcher, recipe, output, *words, "--optimisation.max_steps", "100000")
    while not (output / "tokenizer").exists():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(5)
    before, them = time.monotonic(), family(process)
    process.send_signal(signal.Signals[name])
    process.wait()
    assert not psutil.wait_procs(them, timeout=60)[1]
    assert time.monotonic() - before < 30
    (saved,) = (output / "checkpoints").iterdir()
    assert json.loads((saved / "state.json").read_text())["state"]["step"] > 0


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_worker_that_gets_a_signal_tells_the_others(launcher, recipe, tmp_path):
    output = tmp_path / "run"
    process = start(launcher, recipe, output, "--log_every", "1", "--optimisation.max_steps", "100000")
    wait_until_it_trains(process, output)
    them = family(process)
    them[-1].send_signal(signal.SIGTERM)
    process.wait()
    assert not psutil.wait_procs(them, timeout=60)[1]
    last = max(line["step"] for line in tiny_runs.metrics.read(output / "metrics.jsonl"))
    assert max((output / "checkpoints").iterdir()).name.startswith(f"step-{last:08d}")


pytestmark = pytest.mark.slow
