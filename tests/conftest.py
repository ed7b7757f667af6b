"""What a shell starts in the background ignores SIGINT, and so would every process that tests start and interrupt.
Nothing is kept in the caches of whoever runs the tests. A process has one thread: the models are small, and what pytest
runs side by side uses every core (with a thread for each core in each of them it takes a hundred times as long).
Nothing asks for the address of another machine. What is imported is no garbage, and not looked through for any."""

import atexit
import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf-home-")  # before anything reads it
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
# Or else the first request of a process to a test's own Hub has huggingface_hub fetch this from the real one.
Path(os.environ["HF_HOME"], ".agent_harnesses.json").write_text('{"standardEnvVars": [], "harnesses": {}}')

gc.disable()  # until all tests are imported


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    """Names of other machines that were looked up, none of which is found."""
    names, lookup, here = [], socket.getaddrinfo, {None, "", "localhost", socket.gethostname()}

    def watched(name, *rest, **options):
        name = name.decode() if isinstance(name, bytes) else name
        if name not in here and not (name[0].isdigit() or ":" in name):
            names.append(name)
            raise socket.gaierror(socket.EAI_NONAME, "no network in tests")
        return lookup(name, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    yield names
    assert not names


@pytest.fixture
def forget(monkeypatch):
    """Has the modules whose names begin so imported again, within this test only. Afterwards those of before are back,
    as attributes of their packages too, where `monkeypatch.setattr("package.module.name", ...)` looks for them."""

    before, begun = {*sys.modules}, set()

    def forget_modules(*beginnings):
        begun.update(beginnings)
        for name in sorted((name for name in sys.modules if name.startswith(beginnings)), reverse=True):
            package, _, module = name.rpartition(".")
            if package in sys.modules:
                monkeypatch.delattr(sys.modules[package], module, raising=False)
            monkeypatch.delitem(sys.modules, name)

    yield forget_modules
    # What was not imported before goes with those that it has imported.
    for name in [name for name in sys.modules if name.startswith((*begun,)) and name not in before]:
        del sys.modules[name]
