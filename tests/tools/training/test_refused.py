"""What cannot be installed beside these versions, by pip's own words."""

import subprocess
import sys
from importlib.metadata import version

import pytest

PACKAGE = "pip"
PINNED = {"axolotl": "0.19.0", "llamafactory": "0.9.5"}


def installed(tool: str) -> None:
    """Skip with what pip says, unless the tool goes with our transformers."""
    wanted = [f"{tool}=={PINNED[tool]}", f"transformers=={version('transformers')}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--disable-pip-version-check", *wanted]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    if found.returncode == 0:
        pytest.fail(f"{tool} can be installed: it wants a test of its own")
    words = [line.strip() for line in (found.stderr + found.stdout).splitlines()]
    reasons = [line for line in words if line.startswith(tool) and "depends on transformers" in line]
    assert reasons, found.stderr[-2000:]
    pytest.skip(reasons[0])


def test_axolotl():
    """axolotl 0.19.0, installed beside our transformers: losses of a model of ours"""
    installed("axolotl")


def test_llamafactory():
    """LLaMA-Factory 0.9.5, installed beside our transformers: losses of a model of ours"""
    installed("llamafactory")
