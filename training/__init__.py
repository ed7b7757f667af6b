"""Train a model of any of the three families from a recipe: `accelerate launch -m training RECIPE.yaml --key value`."""

import contextlib
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil

# libgomp's threads wait for each other by spinning, which on a machine that is busy keeps from work what they wait for.
# The Shakespeare recipe with two threads on two cores, alternated in one run. An AMD EPYC (AVX2): beside three others
# that never wait, its default of 300,000 turns makes 0.06 of the speed of 3,000, 30,000 make 0.24 of it; alone, 3,000
# make 0.90 of the speed of the first version, 20,000 make 0.97, as 300,000 do. An Intel Xeon (AMX), whose turns take
# longer: alone, 6,000 are as fast as 20,000, and 3,000 make 0.87 of it; beside three others, 3,000 make 0.79 of the
# speed of 1,000; beside another such run, 20,000 make 0.28 of it, and 6,000, 0.60. It is read when torch is loaded.
# What is asked is how busy it is now: a load average still has what has just ended.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() and os.environ.get("OMP_NUM_THREADS") != "1":
    busy, idle = "3000", "20000"
    with contextlib.suppress(OSError):  # no Linux, or one that hides it; what reads it elsewhere loads torch
        if b"GenuineIntel" in Path("/proc/cpuinfo").read_bytes():
            busy, idle = "1000", "6000"
    os.environ["GOMP_SPINCOUNT"] = busy if psutil.cpu_percent(interval=0.1) > 50 else idle

# Of the process that started this one, asked before the imports that take seconds: a launcher may die in between.
PARENT = os.getppid()


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """SIGINT ends the process, in one line; a KeyboardInterrupt is often lost in the modules that are imported."""

    def leave(number: int, _: object) -> None:
        os.write(2, b"training: stopped by SIGINT\n")
        os._exit(128 + number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # a shell's background, or a program that has its own way
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What is imported stays: looking for garbage among it takes a fifth of the time that importing takes. All that
    there is afterwards is taken for such (`gc.freeze`)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
