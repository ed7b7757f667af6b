"""The one loop: batches in, updates, measurements and checkpoints out, whatever the objective."""

import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from . import evaluation, sharding
from .corpus import Batches
from .metrics import ProgressBar
from .objectives import Batch
from .optimisation import lr_factor, set_lr
from .recipe import Checkpoints, Evaluation
from .run import CONTENT, DROPOUT, ORDER, Run, TrainingError, save


class Interrupted(Exception):
    """The run was asked to stop by a signal, and has saved itself."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def train(run: Run) -> None:
    """Train until a limit of the recipe is reached, or no progress is made.

    Raises Interrupted after a signal (the run is saved), TrainingError when the loss is not finite.
    """
    recipe, state = run.recipe, run.state
    if run.progress() >= 1:
        return
    last: tuple[str, torch.Tensor] | None = None
    with _Signals() as signals, _progress_bar(run) as bar:
        for group in _batches(run):
            place = f"epoch {state.epoch}, part {state.part}, batches {state.batch} to {state.batch + len(group) - 1}"
            norm = _step(run, group)
            # The step before is looked at only now: on a GPU, reading a number at once would leave it without work.
            _check_finite(last)
            last = (f"step {state.step}: {place}", norm)
            state.step += 1
            state.batch += len(group)
            stop = _synchronize(run, signals.number)
            over, score = run.progress() >= 1, None
            if over or state.step % recipe.log_every == 0:
                _log_training(run, bar, norm)
            if not stop and _is_due(run, "evaluation", recipe.evaluation, last_chance=over):
                _check_finite(last)
                values = evaluation.validate(run)
                score, exhausted = evaluation.judge(run, values)
                _log_evaluation(run, bar, values)
                over = over or exhausted
            if _is_due(run, "checkpoint", recipe.checkpoints) or score is not None or over or stop:
                _check_finite(last)
                save(run, score)
            if stop:
                raise Interrupted(stop)
            if over:
                break


def _batches(run: Run) -> Iterator[list[tuple[Batch, int]]]:
    """The batches of each step, from where the state stands; the caller counts in the state what it has used."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    size, share = recipe.optimisation.accumulation, (accelerator.process_index, accelerator.num_processes)
    while True:
        for corpus in run.parts(state.epoch, state.part):
            place = (state.epoch, state.part)
            plan = run.objective.plan(corpus, np.random.default_rng((recipe.seed, ORDER, *place)))
            batches = Batches(
                plan,
                partial(run.objective.collate, corpus),
                run.objective.targets,
                key=(recipe.seed, CONTENT, *place),
                first_step=state.step - state.batch // size,
                accumulation=size,
                share=share,
            )
            loader = iter(batches.loader(state.batch, recipe.data.workers, accelerator.device.type == "cuda"))
            while group := list(itertools.islice(loader, size)):
                yield group
            state.part, state.batch = state.part + 1, 0
        state.epoch, state.part = state.epoch + 1, 0


def _step(run: Run, group: list[tuple[Batch, int]]) -> torch.Tensor:
    """One optimiser step over the batches of a group; returns the norm of the gradient."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    total = sum(count for _, count in group)
    set_lr(run.optimizers, lr_factor(recipe.optimisation, state.step, run.progress(), state.lr_reductions))
    torch.manual_seed(_seed(recipe.seed, DROPOUT, state.step, accelerator.process_index))
    for index, (batch, _) in enumerate(group):
        last = index == len(group) - 1
        if run.is_sharded:  # of which Accelerate's `no_sync` knows on a GPU only
            run.unwrapped_model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last else accelerator.no_sync(run.model):
            batch = {name: values.to(accelerator.device, non_blocking=True) for name, values in batch.items()}
            with accelerator.autocast():
                loss_sum = run.objective.loss(run.model, batch, recipe.optimisation.label_smoothing)
            # Processes average their gradients; what is wanted is the sum over all, divided by the number of targets.
            accelerator.backward(loss_sum * (accelerator.num_processes / max(total, 1)))
        run.loss_sum += loss_sum.detach()
    norm = accelerator.clip_grad_norm_(run.unwrapped_model.parameters(), recipe.optimisation.clip_norm or math.inf)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if run.ema_model is not None:
        run.ema_model.update_parameters(run.unwrapped_model)
    state.targets += total
    state.window_targets += total
    return sharding.full_tensor(norm)


def _seed(*path: int) -> int:
    """A seed of its own for each sequence of numbers."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])


def _check_finite(last: tuple[str, torch.Tensor] | None) -> None:
    if last is not None and not math.isfinite(float(last[1])):
        raise TrainingError(
            f"{last[0]}: the gradient is {float(last[1])}, so the loss was not finite; lower the learning rate or look "
            "at these batches. The last checkpoint is from before"
        )


def _synchronize(run: Run, signal_number: int) -> int:
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


def _is_due(run: Run, what: str, spec: Evaluation | Checkpoints, last_chance: bool = False) -> bool:
    """Whether it is time, by steps or by the clock, to do something that is done now and then, and then at the end."""
    state, steps, minutes = run.state, spec.every_steps, spec.every_minutes
    by_steps = steps is not None and (last_chance or state.step % steps == 0)
    by_clock = minutes is not None and (last_chance or state.seconds - state.last_done.get(what, 0.0) >= 60 * minutes)
    if by_steps or by_clock:
        state.last_done[what] = state.seconds
        return True
    return False


# --- Reporting ------------------------------------------------------------------------------------------------------


def _log_training(run: Run, bar: ProgressBar, norm: torch.Tensor) -> None:
    """One line of training loss and speed, over the steps since the line before."""
    state = run.state
    run.collect_loss()
    values = {
        "step": state.step,
        "epoch": state.epoch,
        "seconds": round(state.seconds, 2),
        "targets": state.targets,
        "loss": state.window_loss_sum / max(state.window_targets, 1),
        "tokens_per_second": round(state.window_targets / max(state.seconds - state.window_start, 1e-9), 1),
        "learning_rate": run.optimizers[0].param_groups[0]["lr"],
        "gradient_norm": float(norm),
    }
    if run.is_main:
        run.log.write("train", **values)
        bar.update(_position(run), loss=f"{values['loss']:.3f}", tokens=f"{values['tokens_per_second']:,.0f}/s")
    run.accelerator.log({k: v for k, v in values.items() if k not in ("step", "seconds")}, step=state.step)
    state.window_loss_sum, state.window_targets, state.window_start = 0.0, 0, state.seconds


def _log_evaluation(run: Run, bar: ProgressBar, values: dict[str, Any]) -> None:
    state = run.state
    if run.is_main:
        run.log.write("evaluation", step=state.step, epoch=state.epoch, seconds=round(run.clock(), 2), **values)
        bar.show(f"step {state.step}", values)
        if time.monotonic() - run.last_drawn > 60:  # a picture costs as much as many steps of a small model
            run.draw()
    run.accelerator.log({f"evaluation/{k}": v for k, v in values.items() if isinstance(v, float)}, step=state.step)


def _progress_bar(run: Run) -> ProgressBar:
    spec = run.recipe.optimisation
    total, unit = (60 * (spec.max_minutes or 0), "s") if spec.max_steps is None else (spec.max_steps, "steps")
    return ProgressBar(round(total), unit, _position(run), is_shown=run.is_main)


def _position(run: Run) -> int:
    """How far the progress bar is: in seconds where only the clock ends the run, else in steps."""
    return int(run.state.seconds) if run.recipe.optimisation.max_steps is None else run.state.step


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
