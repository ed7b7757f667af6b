"""Processes whose launcher dies while they wait for each other."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

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
