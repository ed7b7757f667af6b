"""Processes whose launcher dies while they wait for each other, and those that it starts again."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests import tiny_runs

ROOT = Path(__file__).parent.parent
# Starts the run and is gone.
LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(1.5)
"""


def test_a_process_that_waits_for_others_ends_with_its_launcher(tmp_path):
    """It stayed for half an hour, and those of the next run, at the same address, met it in each other's place."""
    recipe = tiny_runs.write_recipe(tmp_path)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    environment = os.environ | place | {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    command = [sys.executable, "-m", "training", str(recipe), "--output_dir", str(tmp_path / "run")]
    launched = [sys.executable, "-c", LAUNCHER, *command]
    with open(tmp_path / "log", "wb") as log:
        done = subprocess.run(launched, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, check=True)
    orphan = psutil.Process(int(done.stdout))
    try:
        orphan.wait(timeout=90)
    finally:
        if orphan.is_running():
            orphan.kill()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow  # as are the many kills of test_kills
def test_what_a_launcher_starts_again_goes_on(tmp_path):
    """It was refused, as a run that was there already, or with --overwrite began anew."""
    recipe = tiny_runs.write_recipe(tmp_path, checkpoints={"every_steps": 2}, evaluation={"every_steps": 100})
    program = tmp_path / "program.py"
    # The second process of two is killed at its sixth step, by nobody the second time.
    program.write_text(
        "import os, signal, sys\n"
        "from training import __main__ as command, loop\n"
        "step, steps = loop._step, iter(range(100))\n"
        "def watched(*arguments):\n"
        "    if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and next(steps) == 5:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return step(*arguments)\n"
        "loop._step = watched\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(command.main(sys.argv[1:]))\n"
    )
    assert tiny_runs.run(recipe, tmp_path / "killed", "--optimisation.max_steps", "4") == 0  # to be replaced
    for name, words in {"whole": ["-m", "training"], "killed": [program]}.items():
        told = [str(recipe), "--output_dir", str(tmp_path / name), "--overwrite"]
        said = tiny_runs.launch(*["--max-restarts", "1", "--monitor-interval", "0.1"], *words, *told)
        assert ("resuming" in said) == (name == "killed")
    assert tiny_runs.losses(tmp_path / "killed") == tiny_runs.losses(tmp_path / "whole")
    one, other = (tiny_runs.weights(tmp_path / name) for name in ("killed", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in other)
