"""Checkpoints that are either complete and verified or not there at all; safetensors and JSON only.

A checkpoint is written into a hidden folder, by all processes where the weights are spread over them, described by a
manifest of SHA-256 sums, flushed to the disk, renamed into place and read back; only then may older ones go. A kill at
any moment leaves the last complete one untouched. Meanwhile training goes on, since what is written is a copy.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from hf_scratch_transformer.files import reading, replacing, sha256

from . import recipe, sharding

MANIFEST = "manifest.json"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")  # that every checkpoint has, maybe in parts
OFFSETS = "offsets"  # of parts in the whole, as JSON in the header of their file
PART = r"(.+)-\d{5}-of-\d{5}(\.\w+)"  # the name of such a part
Result = TypeVar("Result")
Files = Mapping[str, Mapping[str, sharding.Part]]  # tensors, or parts of them, by the file that they are saved in


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used. The message is meant for the terminal, without a traceback."""


class Store:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, spec: recipe.Checkpoints) -> None:
        self.folder, self.spec = folder, spec
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.saving: Future[Path] | None = None
        # Of its own, since meanwhile the processes have other things to tell each other.
        several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        self.group = torch.distributed.new_group(backend="gloo") if several else None

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        """Until what was begun is saved; raises CheckpointError when it could not be."""
        begun, self.saving = self.saving, None
        if begun is not None:
            begun.result()

    def start(self, step: int, files: Files, state: Mapping[str, Any], suffix: str = "") -> None:
        """`save` what the tensors hold now, while training goes on, if that is wanted; one at a time.

        Raises CheckpointError when this one or the one before cannot be saved.
        """
        self.wait()
        if not self.spec.background:
            self.save(step, files, state, suffix)
            return
        copies = {name: {key: part.copied() for key, part in parts.items()} for name, parts in files.items()}
        self.saving = self.thread.submit(self.save, step, copies, state, suffix)

    def save(self, step: int, files: Files, state: Mapping[str, Any], suffix: str = "") -> Path:
        """Write the checkpoint of a step: one safetensors file per entry of `files`, and `state` as JSON.

        All processes call it, each with the files that it writes, which may be none; the main one does the rest.

        Once a step and suffix: of two checkpoints of a step, that without a suffix is the later one.

        Raises CheckpointError, with nothing left half-written, when the disk is full or cannot be written.
        """
        final, is_main, together = self.folder / f"step-{step:08d}{suffix}", _rank() == 0, self._together
        try:
            with ExitStack() as stack:
                temporary = next(filter(None, together(lambda: self._begin(stack, final) if is_main else None)))
                sums = together(lambda: _write(temporary, files))
                together(lambda: _describe(temporary, state, sums) if is_main else None)
                together(stack.close)  # the folder takes its name
            together(lambda: _flush(self.folder) if is_main else None)
            together(lambda: verify(final, [*files, "state.json"]))
        except OSError as error:
            last = next(iter(self.complete()), None)
            kept = f"the last good one is {last}" if last else "there is none before it"
            reason = error.__cause__ or error
            raise CheckpointError(f"{final}: the checkpoint cannot be saved: {reason}; {kept}") from error
        if is_main:
            self._prune()
        return final

    def _begin(self, stack: ExitStack, final: Path) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = stack.enter_context(replacing(final))
        temporary.mkdir()
        return temporary

    def _together(self, work: Callable[[], Result]) -> list[Result]:
        """What each process does, at once. Raises in all of them the OSError or CheckpointError of the first that
        fails."""
        result: Result | None = None
        error: Exception | None = None
        try:
            result = work()
        except SafetensorError as caught:  # which is no OSError, though that is what it tells of
            error = OSError(str(caught))
        except (OSError, CheckpointError) as caught:
            error = caught
        every: list[Any] = [(result, error)]
        if self.group is not None:
            every = every * self.group.size()
            torch.distributed.all_gather_object(every, (result, error), self.group)
        if error := next((error for _, error in every if error is not None), None):
            raise error
        return [result for result, _ in every]

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


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compare files with the manifest, by default every one. Raises CheckpointError that names the first that
    differs."""
    try:
        sums = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: no readable {MANIFEST}") from error
    if names is None:
        in_parts = {_whole_name(name) for name in sums}
        names = {**dict.fromkeys(name for name in FILES if name not in in_parts), **sums}
    for name in names:
        expected = sums.get(name)
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


class Tensors(Mapping[str, Tensor]):
    """What was saved under a file name, by one process or in parts by several: read when it is asked for, tensor by
    tensor, and put together."""

    def __init__(self, path: Path) -> None:
        parts = sorted(each for each in path.parent.iterdir() if _whole_name(each.name) == path.name)
        self.files = [safe_open(each, "pt") for each in parts or [path]]
        self.where: dict[str, list[tuple[Any, tuple[slice, ...]]]] = {}
        for file in self.files:
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                shape = file.get_slice(name).get_shape()
                starts = offsets.get(name, [0] * len(shape))
                extent = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
                self.where.setdefault(name, []).append((file, extent))

    def __getitem__(self, name: str) -> Tensor:
        (file, extent), *others = self.where[name]
        first = file.get_tensor(name)
        if not others:
            return first
        whole = first.new_full(self.shape(name), torch.nan if first.is_floating_point() else 0)
        whole[extent] = first
        for file, extent in others:
            whole[extent] = file.get_tensor(name)
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor, which is not read for it."""
        extents = zip(*(extent for _, extent in self.where[name]), strict=True)
        return tuple(max(each.stop for each in dimension) for dimension in extents)


def read_tensors(folder: Path, name: str) -> Tensors:
    """What was saved under a file name."""
    with readable(folder / name):
        return Tensors(folder / name)


def part_name(name: str, index: int, count: int) -> str:
    """Of the file with one of several processes' part of what is saved under a name."""
    stem, dot, suffix = name.rpartition(".")
    return name if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}{dot}{suffix}"


def _whole_name(name: str) -> str | None:
    match = re.fullmatch(PART, name)
    return f"{match[1]}{match[2]}" if match else None


@torch.no_grad()
def load_weights(model: torch.nn.Module, *many: Mapping[str, Tensor]) -> None:
    """Copy weights into a model, or the mean of several; all may be sharded.

    Raises CheckpointError when names or shapes do not fit.
    """
    own = sharding.weights(model)
    for tensors in many:
        shape = getattr(tensors, "shape", lambda name, tensors=tensors: tensors[name].shape)
        if differing := sorted(own.keys() ^ tensors.keys()) or [n for n in own if own[n].shape != shape(n)]:
            raise CheckpointError(f"the checkpoint does not fit the model: {', '.join(differing[:5])}")
    for name, tensor in own.items():
        one, *others = (sharding.like(tensors[name], tensor) for tensors in many)
        tensor.copy_(sum((each.double() / len(many) for each in others), one.double() / len(many)) if others else one)


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
        tensor = tensor.to(parameter.device)  # counters of steps, too: fused updates have them there
        state[entry] = (sharding.like(tensor, parameter) if tensor.ndim else tensor).clone()


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _write(folder: Path, files: Files) -> dict[str, str]:
    """Write files to the disk; returns their sums as they are read back."""
    for name, parts in files.items():
        offsets = {OFFSETS: json.dumps({key: part.offset for key, part in parts.items() if any(part.offset)})}
        save_file({key: part.values.detach().contiguous() for key, part in parts.items()}, folder / name, offsets)
        _flush(folder / name)
    return {name: sha256(folder / name) for name in files}


def _describe(folder: Path, state: Mapping[str, Any], sums: Iterable[Mapping[str, str]]) -> None:
    """Write the state, and the manifest of all that is in a checkpoint."""
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    every = {name: each for some in sums for name, each in some.items()} | {"state.json": sha256(folder / "state.json")}
    (folder / MANIFEST).write_text(json.dumps(dict(sorted(every.items())), indent=1), encoding="utf-8")
    for path in (folder / "state.json", folder / MANIFEST, folder):
        _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
