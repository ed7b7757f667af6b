"""Checkpoints that are either complete and verified or not there at all; safetensors and JSON only.

A checkpoint is written into a hidden folder, described by a manifest of SHA-256 sums, flushed to the disk, renamed into
place and read back; only then may older ones go. A kill at any moment leaves the last complete one untouched.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from hf_scratch_transformer.files import reading, replacing, sha256

from . import recipe, sharding

MANIFEST = "manifest.json"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")  # that every checkpoint has


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used. The message is meant for the terminal, without a traceback."""


class Store:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, spec: recipe.Checkpoints) -> None:
        self.folder, self.spec = folder, spec

    def save(
        self, step: int, files: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], suffix: str = ""
    ) -> Path:
        """Write the checkpoint of a step: one safetensors file per entry of `files`, and `state` as JSON.

        Once a step and suffix: of two checkpoints of a step, that without a suffix is the later one.

        Raises CheckpointError, with nothing left half-written, when the disk is full or cannot be written.
        """
        final = self.folder / f"step-{step:08d}{suffix}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(final) as temporary:
                temporary.mkdir()
                for name, tensors in files.items():
                    save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, temporary / name)
                (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
                sums = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
                (temporary / MANIFEST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
                for path in (*temporary.iterdir(), temporary):
                    _flush(path)
            _flush(self.folder)
            verify(final)
        except OSError as error:
            last = next(iter(self.complete()), None)
            kept = f"the last good one is {last}" if last else "there is none before it"
            reason = error.__cause__ or error
            raise CheckpointError(f"{final}: the checkpoint cannot be saved: {reason}; {kept}") from error
        self._prune()
        return final

    def complete(self) -> list[Path]:
        """Checkpoints that were renamed into place, newest first; not verified. Copies by other names are not ours."""
        found = {path: re.fullmatch(r"step-(\d{8,})(-unmeasured)?", path.name) for path in self.folder.glob("step-*")}
        keys = {path: (int(match[1]), match[2] is None) for path, match in found.items() if match}
        return sorted(keys, key=lambda path: keys[path], reverse=True)

    def scheduled(self) -> list[Path]:
        """The newest, and before it those that a run without interruptions has, too; newest first."""
        by_step: dict[str, Path] = {}
        for path in self.complete():
            by_step.setdefault(path.name.split("-")[1], path)
        return [path for rank, path in enumerate(by_step.values()) if rank == 0 or not _was_by_signal(path)]

    def by_score(self) -> list[Path]:
        """Checkpoints that have an evaluation, best first; one whose state cannot be read is set aside."""
        scores: dict[Path, float] = {}
        for path in self.complete():
            try:
                if (score := read_state(path).get("score")) is not None:
                    scores[path] = score
            except CheckpointError as error:
                self.set_aside({path: str(error)})
        return sorted(scores, key=lambda path: scores[path])

    def sound(self, candidates: Iterable[Path], count: int) -> tuple[list[Path], dict[Path, str]]:
        """The first so many of some checkpoints that verify, and what is wrong with others before them."""
        found: list[Path] = []
        damaged: dict[Path, str] = {}
        for path in candidates:
            if len(found) == count:
                break
            try:
                verify(path)
                found.append(path)
            except CheckpointError as error:
                damaged[path] = str(error)
        return found, damaged

    def set_aside(self, damaged: Mapping[Path, str]) -> None:
        """Rename damaged checkpoints, so that they count no more, and say what is wrong with them."""
        for path, error in damaged.items():
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            print(f"{error}; set aside as {aside.name}", file=sys.stderr)

    def sweep(self) -> None:
        """Clear away what a kill left half-written or half-deleted."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path)

    def _prune(self) -> None:
        kept = {*self.scheduled()[: self.spec.keep_last], *self.by_score()[: self.spec.keep_best]}
        for path in self.complete():
            if path not in kept:
                # Out of sight first: a kill while deleting must not leave something that looks complete.
                path = path.rename(path.with_name(f".{path.name}"))
                shutil.rmtree(path)


def _was_by_signal(folder: Path) -> bool:
    """Whether a checkpoint is there only since the run was stopped; whether it can be used is seen when it is."""
    with suppress(CheckpointError):
        return bool(read_state(folder).get("by_signal"))
    return False


def verify(folder: Path) -> None:
    """Compare every file with the manifest. Raises CheckpointError that names the first that differs."""
    try:
        sums = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: no readable {MANIFEST}") from error
    for name, expected in {**dict.fromkeys(FILES), **sums}.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing")
        if sha256(folder / name) != expected:
            raise CheckpointError(f"{folder}: {name} is damaged, its SHA-256 differs from the manifest")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Within it, a file of a checkpoint is read; one that verifies and is none of ours is a CheckpointError."""
    try:
        with reading(path):
            yield
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_state(folder: Path) -> dict[str, Any]:
    """What was saved as JSON. Raises CheckpointError when it cannot be read."""
    with readable(folder / "state.json"):
        return dict(json.loads((folder / "state.json").read_text(encoding="utf-8")))


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """What was saved under a file name."""
    with readable(folder / name):
        return load_file(folder / name)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each tied one once."""
    seen: set[int] = set()
    result = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            result[name] = tensor.detach()
    return result


@torch.no_grad()
def load_weights(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy weights into a model; both may be sharded. Raises CheckpointError when names or shapes do not fit."""
    own = weights(model)
    differing = sorted(own.keys() ^ tensors.keys()) or [n for n in own if own[n].shape != tensors[n].shape]
    if differing:
        raise CheckpointError(f"the checkpoint does not fit the model: {', '.join(differing[:5])}")
    for name, tensor in own.items():
        tensor.copy_(sharding.like(tensors[name], tensor))


def optimizer_tensors(optimizers: Iterable[Optimizer], model: torch.nn.Module) -> dict[str, Tensor]:
    """The state of optimisers as `number/parameter/entry`: by names, so that nothing is loaded crosswise."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{number}/{names[id(parameter)]}/{entry}": tensor
        for number, optimizer in enumerate(optimizers)
        for parameter, entries in optimizer.state.items()
        for entry, tensor in entries.items()
    }


def load_optimizers(optimizers: Iterable[Optimizer], model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`. Raises CheckpointError when they train other parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    owners = {
        f"{number}/{names[parameter]}": (optimizer.state[parameter], parameter)
        for number, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for key, tensor in tensors.items():
        place, _, entry = key.rpartition("/")
        if place not in owners:
            raise CheckpointError(f"the checkpoint's optimisers do not fit: there is no {place}, a number and a weight")
        state, parameter = owners[place]
        if tensor.ndim:  # else a counter, which stays where it is
            tensor = sharding.like(tensor.to(parameter.device), parameter)
        state[entry] = tensor.clone()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
