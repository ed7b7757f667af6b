"""The one loop: batches in, updates, measurements and checkpoints out, whatever the objective."""

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_scratch_transformer.insight.pictures import RISING

from . import checkpoints, metrics, sharding
from .arguments import Checkpoints, Evaluation, Recipe
from .data import Batches, Corpus
from .objectives import Batch, Objective, Translation
from .optimisation import rate, set_rate

# First number of each family of random draws, after the seed: families never share a generator.
ORDER, CONTENT, DROPOUT, EVALUATION = range(4)


class TrainingError(RuntimeError):
    """Training that cannot go on. The message is meant for the terminal, without a traceback."""


class Interrupted(Exception):
    """The run was asked to stop by a signal, and has saved itself."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass
class State:
    """How far a run is: everything, beside weights and optimisers, that the next step depends on."""

    step: int = 0  # optimiser steps done
    epoch: int = 0
    part: int = 0  # of the epoch, when the corpus is streamed
    batch: int = 0  # batches of the part that are used up
    seconds: float = 0.0  # of wall clock, over all the processes that worked on the run
    targets: int = 0  # tokens predicted
    window_nats: float = 0.0  # since the last line of the log
    window_targets: int = 0
    window_start: float = 0.0
    score: float | None = None  # best evaluation so far, lower is better
    stale: int = 0  # evaluations since then
    cuts: int = 0  # of the learning rate, by the plateau schedule
    uncut: int = 0  # evaluations without progress since the last cut
    done: dict[str, float] = field(default_factory=dict)  # seconds at the last evaluation and checkpoint
    averaged: int = 0  # steps in the moving average


@dataclass
class Run:
    """A run in progress."""

    recipe: Recipe
    accelerator: Accelerator
    objective: Objective
    model: torch.nn.Module  # as it is trained: compiled, inside DistributedDataParallel
    trained: PreTrainedModel  # the same weights, unwrapped, maybe sharded
    bare: PreTrainedModel  # to measure and to publish: `trained`, or a copy of it where that is sharded
    average: AveragedModel | None  # of the weights, sharded as they are
    optimizers: list[Optimizer]
    parts: Callable[[int, int], Iterator[Corpus]]  # (epoch, first part) -> the corpus, whole or part by part
    rows: int  # of the training split, or of its first part
    validation: Corpus | None
    test: Corpus | None
    store: checkpoints.Store
    log: metrics.Log
    identity: dict[str, Any]
    state: State = field(default_factory=State)
    window: torch.Tensor = field(init=False)  # nats of this process since the last line of the log
    started: float = field(default_factory=time.monotonic)
    drawn: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.window = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)

    @property
    def sharded(self) -> bool:
        """Whether the weights are spread over the processes."""
        return self.bare is not self.trained

    @property
    def main(self) -> bool:
        """Whether this process writes and prints."""
        return self.accelerator.is_main_process

    def clock(self) -> float:
        """Seconds this run has taken, earlier processes included."""
        return time.monotonic() - self.started

    def progress(self) -> float:
        """The share of the run that is over, by steps or by the clock, whichever is further."""
        spec = self.recipe.optimisation
        by_steps = self.state.step / spec.max_steps if spec.max_steps else 0.0
        by_clock = self.state.seconds / (60 * spec.max_minutes) if spec.max_minutes else 0.0
        return max(by_steps, by_clock)


def train(run: Run) -> None:
    """Train until a limit of the recipe is reached, or no progress is made.

    Raises Interrupted after a signal (the run is saved), TrainingError when the loss is not finite.
    """
    recipe, state = run.recipe, run.state
    if run.progress() >= 1:
        return
    last: tuple[str, torch.Tensor] | None = None
    with _Signals() as signals, _Bar(run) as bar:
        for group in _batches(run):
            place = f"epoch {state.epoch}, part {state.part}, batches {state.batch} to {state.batch + len(group) - 1}"
            norm = _step(run, group)
            # The step before is looked at only now: on a GPU, reading a number at once would leave it without work.
            _check_finite(last)
            last = (f"step {state.step}: {place}", norm)
            state.step += 1
            state.batch += len(group)
            stop = _agree(run, signals.number)
            over, score = run.progress() >= 1, None
            if over or state.step % recipe.log_every == 0:
                _report(run, bar, norm)
            if not stop and _due(run, "evaluation", recipe.evaluation, last_chance=over):
                _check_finite(last)
                score, exhausted = _evaluate_and_judge(run, bar)
                over = over or exhausted
            if _due(run, "checkpoint", recipe.checkpoints) or score is not None or over or stop:
                _check_finite(last)
                save(run, score)
            if stop:
                raise Interrupted(stop)
            if over:
                break


def _step(run: Run, group: list[tuple[Batch, int]]) -> torch.Tensor:
    """One optimiser step over the batches of a group; returns the norm of the gradient."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    total = sum(count for _, count in group)
    set_rate(run.optimizers, rate(recipe.optimisation, state.step, run.progress(), state.cuts))
    torch.manual_seed(_number(recipe.seed, DROPOUT, state.step, accelerator.process_index))
    for index, (batch, _) in enumerate(group):
        last = index == len(group) - 1
        if run.sharded:  # of which Accelerate's `no_sync` knows on a GPU only
            run.trained.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last else accelerator.no_sync(run.model):
            batch = {name: values.to(accelerator.device, non_blocking=True) for name, values in batch.items()}
            with accelerator.autocast():
                nats = run.objective.loss(run.model, batch, recipe.optimisation.label_smoothing)
            # Processes average their gradients; what is wanted is the sum over all, divided by all real targets.
            accelerator.backward(nats * (accelerator.num_processes / max(total, 1)))
        run.window += nats.detach()
    norm = accelerator.clip_grad_norm_(run.trained.parameters(), recipe.optimisation.clip_norm or math.inf)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if run.average is not None:
        run.average.update_parameters(run.trained)
    state.targets += total
    state.window_targets += total
    return sharding.whole(norm)


def _batches(run: Run) -> Iterator[list[tuple[Batch, int]]]:
    """The batches of each step, from where the state stands; the caller counts in the state what it has used."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    size, share = recipe.optimisation.accumulation, (accelerator.process_index, accelerator.num_processes)
    while True:
        for corpus in run.parts(state.epoch, state.part):
            place = (state.epoch, state.part)
            plan = run.objective.plan(corpus, np.random.default_rng((recipe.seed, ORDER, *place)))
            first = state.step - state.batch // size
            batches = Batches(
                plan,
                partial(run.objective.collate, corpus),
                run.objective.targets,
                key=(recipe.seed, CONTENT, *place),
                first_step=first,
                accumulation=size,
                share=share,
            )
            loader = iter(batches.loader(state.batch, recipe.data.workers, accelerator.device.type == "cuda"))
            while group := list(itertools.islice(loader, size)):
                yield group
            state.part, state.batch = state.part + 1, 0
        state.epoch, state.part = state.epoch + 1, 0


def _number(*path: int) -> int:
    """A seed of its own for each sequence of numbers."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])


def _check_finite(last: tuple[str, torch.Tensor] | None) -> None:
    if last is not None and not math.isfinite(float(last[1])):
        raise TrainingError(
            f"{last[0]}: the gradient is {float(last[1])}, so the loss was not finite; lower the learning rate or look "
            "at these batches. The last checkpoint is from before"
        )


def _agree(run: Run, signal_number: int) -> int:
    """Bring the clock up to date and return the signal received, the same in all processes.

    Several processes ask each other every `log_every` steps only, since each time they wait for the slowest.
    """
    accelerator, state = run.accelerator, run.state
    if accelerator.num_processes == 1:
        state.seconds = run.clock()
        return signal_number
    if state.step % run.recipe.log_every:
        return 0
    mine = torch.tensor([signal_number, run.clock()], dtype=torch.float64, device=accelerator.device)
    numbers, seconds = accelerator.gather(mine).view(-1, 2).max(dim=0).values.tolist()
    state.seconds = seconds
    return int(numbers)


def _due(run: Run, what: str, spec: Evaluation | Checkpoints, last_chance: bool = False) -> bool:
    """Whether it is time, by steps or by the clock, to do something that is done now and then, and then at the end."""
    state, steps, minutes = run.state, spec.every_steps, spec.every_minutes
    by_steps = steps is not None and (last_chance or state.step % steps == 0)
    by_clock = minutes is not None and (last_chance or state.seconds - state.done.get(what, 0.0) >= 60 * minutes)
    if by_steps or by_clock:
        state.done[what] = state.seconds
        return True
    return False


def _close_window(run: Run) -> None:
    """Bring the loss that has gathered on the devices into the state."""
    run.state.window_nats += float(run.accelerator.reduce(run.window, "sum"))
    run.window.zero_()


def _report(run: Run, bar: "_Bar", norm: torch.Tensor) -> None:
    """One line of training loss and speed, over the steps since the line before."""
    state = run.state
    _close_window(run)
    values = {
        "step": state.step,
        "epoch": state.epoch,
        "seconds": round(state.seconds, 2),
        "targets": state.targets,
        "loss": state.window_nats / max(state.window_targets, 1),
        "tokens_per_second": round(state.window_targets / max(state.seconds - state.window_start, 1e-9), 1),
        "learning_rate": run.optimizers[0].param_groups[0]["lr"],
        "gradient_norm": float(norm),
    }
    if run.main:
        run.log.write("train", **values)
        bar.update(loss=f"{values['loss']:.3f}", tokens=f"{values['tokens_per_second']:,.0f}/s")
    run.accelerator.log({k: v for k, v in values.items() if k not in ("step", "seconds")}, step=state.step)
    state.window_nats, state.window_targets, state.window_start = 0.0, 0, state.seconds


# --- Measuring ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _measuring(run: Run) -> Iterator[torch.nn.Module]:
    """The model to measure: without dropout, and with averaged weights where the run keeps them."""
    model = _measured(run)
    model.eval()
    yield model
    run.trained.train()
    if run.sharded:
        run.bare.cpu()  # the device may not have room for it while training


def _measured(run: Run) -> PreTrainedModel:
    """A plain module with the weights to measure, averaged where the run keeps an average."""
    source = run.trained if run.average is None else run.average.module
    if not run.sharded:
        return source
    run.bare.to(run.accelerator.device)
    checkpoints.load_weights(run.bare, checkpoints.weights(source))
    return run.bare


@torch.no_grad()
def evaluate(run: Run, model: torch.nn.Module, corpus: Corpus) -> dict[str, float]:
    """Loss and the objective's other metrics over a whole corpus, each process taking some of the batches."""
    accelerator, objective = run.accelerator, run.objective
    plan = objective.plan(corpus, None)
    batches = Batches(
        plan,
        partial(objective.collate, corpus),
        objective.targets,
        key=(run.recipe.seed, EVALUATION),
        first_step=run.recipe.optimisation.max_steps or 0,  # where a masking schedule ends
    )
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=accelerator.device))
    targets = 0
    for index in range(len(plan)):
        if index % accelerator.num_processes == accelerator.process_index:
            batch, count = batches[index]
            targets += count
            with accelerator.autocast():
                scores = objective.score(model, {n: v.to(accelerator.device) for n, v in batch.items()})
            for name, value in scores.items():
                sums[name] += value
    sums["targets"] += targets
    totals: dict[str, float] = defaultdict(float)
    # As objects, since a process for which there was no batch does not know the names.
    for part in gather_object([{name: float(value) for name, value in sums.items()}]):
        for name, value in part.items():
            totals[name] += value
    return objective.summary(totals, int(totals.pop("targets")), corpus)


def translate(run: Run, model: torch.nn.Module, corpus: Corpus, rows: np.ndarray, num_beams: int) -> list[str]:
    """Translations of some rows, in order; each process does some of them."""
    assert isinstance(run.objective, Translation)
    process, processes = run.accelerator.process_index, run.accelerator.num_processes
    mine = rows[process::processes]
    with run.accelerator.autocast():
        texts = run.objective.translate(model, corpus, mine, num_beams) if len(mine) else []
    done = dict(gather_object(list(zip(mine.tolist(), texts, strict=True))))
    return [done[row] for row in rows.tolist()]


def _evaluate_and_judge(run: Run, bar: "_Bar") -> tuple[float | None, bool]:
    """Measure and write it down.

    Returns the score (lower is better) if this evaluation is to be kept as the best, and whether the run should end for
    want of progress.
    """
    recipe, state, spec = run.recipe, run.state, run.recipe.evaluation
    assert run.validation is not None
    values: dict[str, Any] = {}
    with _measuring(run) as model:
        values |= evaluate(run, model, run.validation)
        rows = min(spec.generate_rows, run.objective.examples(run.validation))
        if rows and isinstance(run.objective, Translation):
            texts = run.validation.texts
            outputs = translate(run, model, run.validation, np.arange(rows), num_beams=1)
            values |= metrics.translation_scores(outputs, texts["target"][:rows])
            values["samples"] = [
                {"source": texts["source"][row], "reference": texts["target"][row], "output": outputs[row]}
                for row in range(min(spec.samples, rows))
            ]
    if spec.best_metric not in values:
        names = ", ".join(name for name, value in values.items() if isinstance(value, float))
        raise TrainingError(f"evaluation.best_metric: {spec.best_metric!r} is not measured; choose from {names}")
    score = values[spec.best_metric] * (-1 if spec.best_metric in RISING else 1)
    better = state.score is None or score < state.score
    state.score = score if better else state.score
    state.stale = 0 if better else state.stale + 1
    state.uncut = 0 if better else state.uncut + 1
    if state.uncut >= recipe.optimisation.plateau_patience:
        state.cuts, state.uncut = state.cuts + 1, 0
    if run.main:
        run.log.write("evaluation", step=state.step, epoch=state.epoch, seconds=round(run.clock(), 2), **values)
        bar.show(state.step, values)
        if time.monotonic() - run.drawn > 60:  # a picture costs as much as many steps of a small model
            draw(run)
    run.accelerator.log({f"evaluation/{k}": v for k, v in values.items() if isinstance(v, float)}, step=state.step)
    exhausted = spec.early_stopping is not None and state.stale >= spec.early_stopping
    return score if better and recipe.checkpoints.keep_best else None, exhausted


def draw(run: Run) -> None:
    """Bring `curves.png` up to date."""
    run.drawn = time.monotonic()
    metrics.draw(metrics.read(run.log.path), run.log.path.with_name("curves.png"))


def test(run: Run) -> dict[str, Any]:
    """Measure the finished model on the test split; translations are also written to `test_outputs.txt`."""
    recipe, corpus = run.recipe, run.test
    if corpus is None:
        return {}
    run.bare.eval()
    values: dict[str, Any] = evaluate(run, run.bare, corpus)
    if isinstance(run.objective, Translation):
        rows = np.arange(run.objective.examples(corpus))
        outputs = translate(run, run.bare, corpus, rows, recipe.evaluation.num_beams)
        references = corpus.texts["target"]
        values |= metrics.translation_scores(outputs, references)
        values["groups"] = {
            column: metrics.grouped_scores(outputs, references, corpus.texts[column])
            for column in recipe.evaluation.group_by
        }
        if run.main:
            text = "".join(" ".join(output.split()) + "\n" for output in outputs)
            checkpoints.write_text(run.log.path.with_name("test_outputs.txt"), text)
    if run.main:
        run.log.write("test", step=run.state.step, seconds=round(run.clock(), 2), **values)
    return values


# --- Saving and going on --------------------------------------------------------------------------------------------


def save(run: Run, score: float | None = None) -> None:
    """Write a checkpoint of the run; all processes call it, the main one writes."""
    _close_window(run)
    state = run.state
    if run.average is not None:
        state.averaged = int(run.average.n_averaged)
    files = {
        "model.safetensors": checkpoints.weights(run.trained),
        "optimizer.safetensors": checkpoints.optimizer_tensors(run.optimizers, run.trained),
    }
    if run.average is not None:
        files["average.safetensors"] = checkpoints.weights(run.average.module)
    files = {name: sharding.gather(tensors, keep=run.main) for name, tensors in files.items()}
    if run.main:
        record = {"state": dataclasses.asdict(state), "identity": run.identity, "score": score}
        run.store.save(state.step, files, record)
    run.accelerator.wait_for_everyone()


def resume(run: Run, folder: Path) -> None:
    """Go on from a checkpoint, as if the run had never stopped.

    Raises CheckpointError when it is another run's (unless the recipe says force).
    """
    record = checkpoints.read_state(folder)
    changes = list(_changes(record["identity"], run.identity))
    if changes and not run.recipe.force:
        raise checkpoints.CheckpointError(
            f"{folder}: not resumed, this is another run ({'; '.join(changes[:5])}); --force does it all the same"
        )
    checkpoints.load_weights(run.trained, checkpoints.read_tensors(folder, "model.safetensors"))
    tensors = checkpoints.read_tensors(folder, "optimizer.safetensors")
    checkpoints.load_optimizers(run.optimizers, run.trained, tensors)
    run.state = State(**record["state"])
    if run.average is not None:
        checkpoints.load_weights(run.average.module, checkpoints.read_tensors(folder, "average.safetensors"))
        run.average.n_averaged.fill_(run.state.averaged)
    run.started = time.monotonic() - run.state.seconds


def _changes(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _changes(old.get(key), new.get(key), f"{where}.{key}" if where else key)
    elif old != new:
        yield f"{where} was {old}, now {new}"


def finish(run: Run) -> None:
    """Put the weights that the recipe asks for into the model: the last, the best, or an average."""
    choice, spec = run.recipe.optimisation.final_weights, run.recipe.optimisation
    if choice == "best" and (best := run.store.best()) is not None:
        checkpoints.load_weights(run.bare, checkpoints.read_tensors(best, "model.safetensors"))
    elif choice == "mean":
        folders = run.store.complete()[: spec.mean_of]
        sums: dict[str, torch.Tensor] = {}
        for folder in folders:
            for name, tensor in checkpoints.read_tensors(folder, "model.safetensors").items():
                sums[name] = sums.get(name, 0) + tensor.double() / len(folders)
        checkpoints.load_weights(run.bare, sums)
    elif (measured := _measured(run)) is not run.bare:
        checkpoints.load_weights(run.bare, checkpoints.weights(measured))
    run.bare.to(run.accelerator.device)


class _Signals:
    """SIGTERM and SIGINT are noted for the loop to act on after the step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.number = 0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        print(f"\n{signal.Signals(number).name}: saving after this step; once more ends at once", file=sys.stderr)


class _Bar:
    """The progress bar: share done, loss, tokens a second, time left; and what evaluations found."""

    def __init__(self, run: Run) -> None:
        self.run = run
        spec = run.recipe.optimisation
        self.by_clock = spec.max_steps is None
        total = spec.max_steps or 60 * (spec.max_minutes or 0)
        self.bar = tqdm(
            total=round(total),
            initial=self._position(),
            disable=not run.main,
            dynamic_ncols=True,
            # Into a file, a line every half minute is enough.
            mininterval=0.1 if sys.stderr.isatty() else 30.0,
            bar_format="{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} "
            + ("s" if self.by_clock else "steps")
            + ", {remaining} left{postfix}",
        )

    def _position(self) -> int:
        return int(self.run.state.seconds) if self.by_clock else self.run.state.step

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, **values: str) -> None:
        """Show these values and how far the run is."""
        self.bar.set_postfix(values, refresh=False)
        self.bar.update(min(self._position(), int(self.bar.total or 0)) - self.bar.n)

    def show(self, step: int, values: dict[str, Any]) -> None:
        """An evaluation above the bar, with sample outputs."""
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if isinstance(value, float))
        lines = [f"step {step}: {numbers}"]
        for sample in values.get("samples", ()):
            lines += [f"    {name:9} {text}" for name, text in sample.items()]
        self.bar.write("\n".join(lines), file=sys.stderr)
