"""What cannot be installed beside these versions, by pip's own words."""

import subprocess
import sys
from importlib.metadata import version

import pytest

PACKAGE = "pip"
PINNED = {"axolotl": "0.19.0", "llamafactory": "0.9.5", "sglang": "0.5.23", "vllm": "0.33.0"}


def installed(tool: str) -> None:
    """Skip with what pip says, unless the tool goes with our transformers."""
    pinned = f"{tool}=={PINNED[tool]}" if tool in PINNED else tool
    wanted = [pinned, f"transformers=={version('transformers')}"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--disable-pip-version-check", *wanted]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    if found.returncode == 0:
        pytest.fail(f"{tool} can be installed: it wants a test of its own")
    words = [line.strip() for line in (found.stderr + found.stdout).splitlines()]
    reasons = [line for line in words if line.startswith(tool) and "depends on transformers" in line]
    reasons += [line for line in words if "No matching distribution" in line and line.endswith(tool)]
    assert reasons, found.stderr[-2000:]
    pytest.skip(reasons[0])


def test_axolotl():
    """axolotl 0.19.0, installed beside our transformers: losses of a model of ours"""
    installed("axolotl")


def test_llamafactory():
    """LLaMA-Factory 0.9.5, installed beside our transformers: losses of a model of ours"""
    installed("llamafactory")


def test_sglang():
    """SGLang 0.5.23, installed beside our transformers: texts of a model of ours"""
    installed("sglang")


def test_tei():
    """Text Embeddings Inference, a server that is no package: vectors of a model of ours"""
    installed("text-embeddings-inference")


def test_vllm():
    """vLLM 0.33.0, installed beside our transformers: texts of a model of ours"""
    installed("vllm")
