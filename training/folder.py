"""A run's folder: held by one process, checked before anything in it is touched, opened once all checks have passed."""

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from hf_scratch_transformer.files import remove, sweep
from hf_scratch_transformer.onednn import cpuinfo

from .sections import RecipeError

# What a run writes. The recipe comes first and goes last: a folder that holds others of them and no recipe is not ours.
CONTENTS = (
    "recipe.yaml",
    "environment.json",
    "tokenizer",
    "metrics.jsonl",
    "curves.png",
    "tensorboard",
    "test_outputs.txt",
    "checkpoints",
    "model",
)
RESULTS = {"metrics.jsonl", "checkpoints", "model"}  # of a run that has begun
LOCK = ".lock"


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep a folder, made where it is missing, from other runs; the system ends the claim if it kills the process.

    Raises RecipeError when another run has it, naming its process, or when it cannot be written.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            (folder / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        except Timeout:
            owner = (folder / LOCK).read_text(encoding="utf-8") or "another process"
            raise RecipeError(f"output_dir: {folder} is in use, a run of {owner} writes there") from None
        except OSError as error:
            raise RecipeError(f"output_dir: {folder} cannot be written: {error}") from error
        yield
    finally:
        if lock.is_locked:
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        for each in made:
            with suppress(OSError):  # which says that something is in it
                each.rmdir()


def check(folder: Path, named: Iterable[tuple[str, Path]], *, resume: bool, overwrite: bool) -> None:
    """Whether a run may begin in a folder, or go on there; touches nothing.

    Args:
        named: fields of the recipe, and what it reads by them, which a new run must not replace.

    Raises RecipeError when the folder holds a run that is neither resumed nor to be replaced, or what is no run's.
    """
    present = [name for name in CONTENTS if os.path.lexists(folder / name)]
    if present and present[0] != CONTENTS[0]:
        raise RecipeError(f"output_dir: {folder} holds {', '.join(present)} and no {CONTENTS[0]}, so it is not a run's")
    if resume:
        return
    ours = [place / name for place in _spellings(folder) for name in CONTENTS]
    for field, path in named:
        if any(each.is_relative_to(place) for each in _spellings(path.expanduser()) for place in ours):
            raise RecipeError(f"{field}: {path} lies where a new run in {folder} writes; keep it elsewhere")
    if not overwrite and present and (RESULTS & set(present) or "environment.json" not in present):
        raise RecipeError(f"output_dir: {folder} holds a run; --resume goes on, --overwrite replaces it")


def clear(folder: Path, *, resume: bool) -> None:
    """Make room for a run: what a kill left half-written goes, and unless it is resumed, the run that is there."""
    for name in reversed(CONTENTS):
        sweep(folder / name)
        if not resume:
            remove(folder / name)


def environment(device: torch.device, processes: int, module: str = __package__) -> dict[str, Any]:
    """Versions, hardware and command line of this process, which runs `module`, for the record of the run."""
    packages = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "sacrebleu")
    launcher = ("accelerate", "launch") if "ACCELERATE_MIXED_PRECISION" in os.environ else ("python",)
    return {
        "command": [*launcher, "-m", module, *sys.argv[1:]],
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "instructions": instructions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


def processor() -> str | None:
    """What kind it is, where Linux says so."""
    lines = cpuinfo().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def instructions() -> str:
    """The widest vectors that torch uses, and whether there are tiles for products of matrices in bf16, `AVX512 AMX`:
    by their names alone Intel's processors with and without them are not told apart."""
    return torch.backends.cpu.get_cpu_capability() + " AMX" * (" amx_bf16" in cpuinfo())


def cores() -> int:
    """How many this process may use: a batch system gives it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """That of the sources, where git knows it; with "-dirty" if they have been changed since."""
    try:
        words = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        return subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip() or None
    except FileNotFoundError:
        return None


def _spellings(path: Path) -> set[Path]:
    """Where a path leads: as it is written, with the links before its last part followed, and with that one too."""
    return {Path(os.path.abspath(path)), path.parent.resolve() / path.name, path.resolve()}
