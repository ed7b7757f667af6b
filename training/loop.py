"""The one loop: batches in, updates, measurements and checkpoints out, whatever the objective."""

import contextlib
import functools
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from . import evaluation, launcher, sharding
from .batches import CONTENT, DROPOUT, ORDER, Batches
from .metrics import ProgressBar, used_memory
from .objectives import Batch
from .optimisation import lr_factor, set_lr
from .publication import target_flops
from .recipe import Checkpoints, Evaluation
from .roofline import best_rate
from .run import Interrupted, Run, TrainingError, check_weights, save

TIMED = 10  # steps, from which the time of all is told
LONG = 10  # minutes


def train(run: Run) -> None:
    """Train until a limit of the recipe is reached, or no progress is made.

    Raises Interrupted after a signal (the run is saved), TrainingError when weights are not finite, or the gradients of
    too many steps in a row.
    """
    recipe, state = run.recipe, run.state
    if run.finished():
        return
    first, began = state.step + 1, 0.0  # the step from which on time is taken: it may have to compile
    with _Signals() as signals, _Exchange(run) as exchange, _progress_bar(run) as bar, run.store:
        run.signal = signals.received
        over = state.unmeasured and _settle(run, bar, stop=0)
        for group in () if over else _batches(run):
            norm = _step(run, group, exchange)
            _count_skipped(run, bar, group, norm)
            state.step += 1
            state.batch += len(group)
            stop, state.seconds = exchange(run.signal(), run.clock())
            began = run.clock() if state.step == first else began
            if state.step == first + TIMED:
                _announce_time(run, bar, (run.clock() - began) / TIMED)
            if run.limit() or state.step % recipe.log_every == 0:
                check_weights(run.unwrapped_model, state.step)
                if math.isfinite(norm):
                    _log_training(run, bar, norm)
            if _settle(run, bar, stop):
                break
    if run.is_main and state.step < recipe.optimisation.max_steps:
        print(f"ended early: {run.finished()}", file=sys.stderr)


def timed(run: Run, count: int) -> Iterator[tuple[float, int]]:
    """The first steps of a run, done for their time alone: the seconds and the targets of each."""
    groups = _batches(run)
    with _Exchange(run) as exchange:
        for _ in range(count):
            before, targets = time.monotonic(), run.state.targets
            group = next(groups)
            _step(run, group, exchange)
            run.state.step += 1
            run.state.batch += len(group)
            yield time.monotonic() - before, run.state.targets - targets


def _settle(run: Run, bar: ProgressBar, stop: int) -> bool:
    """Measure and save what is due after a step, and whatever there is if a signal says stop; whether the run is over.

    A signal puts an evaluation off until the run is resumed: there is not always the time for it.
    """
    recipe, state = run.recipe, run.state
    over, score = bool(run.limit()), None
    state.unmeasured = _is_due(run, "evaluation", recipe.evaluation, last_chance=over) or state.unmeasured
    if state.unmeasured and not stop:
        check_weights(run.unwrapped_model, state.step)
        try:
            values = evaluation.validate(run)
        except Interrupted as interruption:
            stop = interruption.number
        else:
            state.unmeasured = False
            score = evaluation.judge(run, values)
            _log_evaluation(run, bar, values)
            over = bool(run.finished())
    is_due = _is_due(run, "checkpoint", recipe.checkpoints) or score is not None or over
    if is_due or stop:
        save(run, score, by_signal=not is_due)
    if stop:
        raise Interrupted(stop, f"; step {state.step} is saved, --resume goes on")
    return over


def _batches(run: Run) -> Iterator[list[tuple[Batch, int]]]:
    """The batches of each step, from where the state stands; the caller counts in the state what it has used."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    size = recipe.optimisation.accumulation
    while True:
        for part, corpus, pool in run.parts(state.epoch, state.part):
            state.part, place = part, (state.epoch, part)
            # Pools of one corpus are parts of one pass over it.
            plan = run.objective.plan(corpus, (recipe.seed, ORDER, state.epoch, part - pool), pool)
            batches = Batches(
                plan,
                partial(run.objective.collate, corpus),
                run.objective.targets,
                key=(recipe.seed, CONTENT, *place),
                first_step=state.step - state.batch // size,
                accumulation=size,
                share=run.share,
            )
            loader = iter(batches.loader(state.batch, recipe.data.workers, accelerator.device.type == "cuda"))
            while group := _drawn(run, loader, size):
                yield group
            state.part, state.batch = state.part + 1, 0
        state.epoch, state.part = state.epoch + 1, 0


def _drawn(run: Run, loader: Iterator[tuple[Batch, int]], size: int) -> list[tuple[Batch, int]]:
    before = time.monotonic()
    group = list(itertools.islice(loader, size))
    run.data_seconds += time.monotonic() - before
    return group


def _step(run: Run, group: list[tuple[Batch, int]], exchange: "_Exchange") -> float:
    """One optimiser step over the batches of a group, left out if the gradient is not finite; returns its norm."""
    recipe, state, accelerator = run.recipe, run.state, run.accelerator
    targets, step_loss_sum = exchange.sum(sum(count for _, count in group)), torch.zeros_like(run.loss_sum)
    set_lr(run.optimizers, lr_factor(recipe.optimisation, state.step, run.progress(), state.lr_reductions))
    torch.manual_seed(_seed(recipe.seed, DROPOUT, state.step, run.share[0]))
    for index, (batch, _) in enumerate(group):
        last = index == len(group) - 1
        if run.is_sharded:  # of which Accelerate's `no_sync` knows on a GPU only
            run.unwrapped_model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last else accelerator.no_sync(run.model):
            batch = {name: values.to(accelerator.device, non_blocking=True) for name, values in batch.items()}
            with accelerator.autocast():
                loss_sum = run.objective.loss(run.model, batch, recipe.optimisation.label_smoothing)
            # Processes average their gradients; what is wanted is the sum over all, divided by the number of targets.
            accelerator.backward(loss_sum * (run.share[1] / max(targets(), 1)))
        step_loss_sum += loss_sum.detach()
    before = sharding.clip_norm(run.unwrapped_model, recipe.optimisation.clip_norm or math.inf)
    norm = float(before)  # for which a GPU's work is waited for: what follows depends on it
    if math.isfinite(norm):
        for optimizer in run.optimizers:
            optimizer.step()
        if run.ema_model is not None:
            run.ema_model.update_parameters(run.unwrapped_model)
        run.loss_sum += step_loss_sum
        state.targets += targets()
        state.window_targets += targets()
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    return norm


def _seed(*path: int) -> int:
    """A seed of its own for each sequence of numbers."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])


def _count_skipped(run: Run, bar: ProgressBar, group: list[tuple[Batch, int]], norm: float) -> None:
    """Say and log of a step that was left out where its batches are.

    Raises TrainingError when it was one too many in a row, or the weights were not finite before it.
    """
    state, most = run.state, run.recipe.optimisation.max_skipped_steps
    if math.isfinite(norm):
        state.skipped_in_row = 0
        return
    state.skipped_steps += 1
    state.skipped_in_row += 1
    check_weights(run.unwrapped_model, state.step)
    batches = f"{state.batch} to {state.batch + len(group) - 1}"
    what = f"step {state.step + 1}: epoch {state.epoch}, part {state.part}, batches {batches}: the gradient is {norm}"
    if state.skipped_in_row > most:
        raise TrainingError(
            f"{what}, and optimisation.max_skipped_steps lets {most} in a row be left out; lower the learning rate or "
            "look at these batches. What is saved is from before"
        )
    if run.is_main:
        bar.say(f"{what}; the step is left out")
        run.log.write("skipped", step=state.step + 1, epoch=state.epoch, part=state.part, batches=batches)


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


def _log_training(run: Run, bar: ProgressBar, norm: float) -> None:
    """One line of training loss and speed, over the steps since the line before."""
    state, now = run.state, run.clock()  # which processes have told each other only as it was a step ago
    run.collect_loss()
    seconds = max(now - state.window_start, 1e-9)
    values = {
        "step": state.step,
        "epoch": state.epoch,
        "seconds": round(now, 2),
        "targets": state.targets,
        "loss": state.window_loss_sum / max(state.window_targets, 1),
        "tokens_per_second": round(state.window_targets / seconds, 1),
        "data_wait": round(min(run.data_seconds / seconds, 1.0), 4),  # of the time
        "learning_rate": run.optimizers[0].param_groups[0]["lr"],
        "gradient_norm": norm,
        "memory_mb": round(used_memory(run.accelerator.device)),
    }
    if run.mfu:
        values["mfu"] = float(f"{run.mfu * values['tokens_per_second']:.3g}")
    if smoothing := run.recipe.optimisation.label_smoothing:  # of which evaluations have none
        values["label_smoothing"] = smoothing
    if run.is_main:
        run.log.write("train", **values)
        bar.update(state.step, loss=f"{values['loss']:.3f}", tokens=f"{values['tokens_per_second']:,.0f}/s")
    run.accelerator.log({k: v for k, v in values.items() if k not in ("step", "seconds")}, step=state.step)
    state.window_loss_sum, state.window_targets, state.window_start, run.data_seconds = 0.0, 0, now, 0.0


def _log_evaluation(run: Run, bar: ProgressBar, values: dict[str, Any]) -> None:
    state = run.state
    if run.is_main:
        run.log.write("evaluation", step=state.step, epoch=state.epoch, seconds=round(run.clock(), 2), **values)
        bar.show(f"step {state.step}", values)
        if time.monotonic() - run.last_drawn > 60:  # a picture costs as much as many steps of a small model
            run.draw()
    run.accelerator.log({f"evaluation/{k}": v for k, v in values.items() if isinstance(v, float)}, step=state.step)


def _announce_time(run: Run, bar: ProgressBar, seconds: float) -> None:
    """How long the rest will take at so many seconds a step, where that is worth a line; from then on the log says how
    much of the hardware is used (MFU, model FLOPs utilisation: Chowdhery et al. 2022), as far as it is known."""
    spec, accelerator = run.recipe.optimisation, run.accelerator
    left = spec.max_steps - run.state.step
    minutes = seconds * left / 60
    if run.is_main and minutes >= LONG:
        bar.say(f"{left:,} steps to go, about {minutes:,.0f} minutes on this machine; Ctrl-C saves, --resume goes on")
        best = best_rate(accelerator.device, spec.precision, accelerator.mixed_precision)
        run.mfu = (target_flops(run) or 0.0) / best / accelerator.num_processes


def _progress_bar(run: Run) -> ProgressBar:
    return ProgressBar(run.recipe.optimisation.max_steps, run.state.step, is_shown=run.is_main)


class _Signals:
    """SIGTERM, SIGINT and the death of a launcher are noted for the loop to act on after the step.

    A second signal ends the process at once; not so what comes with the first: schedulers signal every process, and
    launchers pass on to theirs what they get themselves.
    """

    def __init__(self) -> None:
        self.number, self.noted = 0, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self.before[number] = signal.signal(number, self._note)
        launcher.attended.set()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        launcher.attended.clear()

    def received(self) -> int:
        """The first signal, or SIGTERM once nobody is left who could send it; 0 before."""
        if not self.number and launcher.is_gone():
            self._note(signal.SIGTERM, None)
        return self.number

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number and time.monotonic() > self.noted + 2:
            os._exit(128 + number)
        elif not self.number:
            self.number, self.noted = number, time.monotonic()
            print(f"\n{signal.Signals(number).name}: saving after this step; once more ends at once", file=sys.stderr)


class _Exchange:
    """What processes tell each other, over gloo whatever the device: after each step the largest signal and the longest
    clock of any of them, before it the number of its targets.

    Nobody waits for the first: what is said after a step travels during the next one, and is heard after that, by all
    processes alike. The number travels while the model goes forward. One process hears itself at once.
    """

    def __init__(self, run: Run) -> None:
        self.heard = (0, run.state.seconds)
        self.sharers = run.sharers
        self.group = torch.distributed.new_group(backend="gloo") if run.accelerator.num_processes > 1 else None
        self.said: tuple[torch.Tensor, torch.distributed.Work] | None = None

    def __enter__(self) -> "_Exchange":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind in (None, Interrupted):  # else others may have said nothing
            self._hear()

    def __call__(self, number: int, seconds: float) -> tuple[int, float]:
        if self.group is None:
            return number, seconds
        self._hear()
        words = torch.tensor([number, seconds], dtype=torch.float64)
        work = torch.distributed.all_reduce(words, torch.distributed.ReduceOp.MAX, self.group, async_op=True)
        self.said = (words, work)
        return self.heard

    def sum(self, mine: int) -> Callable[[], int]:
        """The sum of a number of each share of the batches, when it is asked for."""
        if self.group is None:
            return lambda: mine
        number = torch.tensor(mine)
        work = torch.distributed.all_reduce(number, group=self.group, async_op=True)

        @functools.cache
        def arrived() -> int:
            work.wait()
            return int(number) // self.sharers

        return arrived

    def _hear(self) -> None:
        if self.said is not None:
            words, work = self.said
            work.wait()
            number, seconds = words.tolist()
            self.heard = (int(number), seconds)
            self.said = None
