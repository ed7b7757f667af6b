"""Everything that only a GPU can show, in steps of at most nine minutes, each with a record of its own.

    python -m benchmarks.gpu prepare [STEP...] --data FOLDER   # what travels, 32 MiB at most
    python -m benchmarks.gpu plan [STEP...]                    # what is outstanding, and the minutes it should take
    python -m benchmarks.gpu run [STEP...] [--left MINUTES]    # run it; the same command goes on where it was stopped
    python -m benchmarks.gpu run STEP... --together            # at once: a small model keeps no GPU busy alone
    python -m benchmarks.gpu run --rehearse                    # every step, tiny, on a CPU, within two minutes

FOLDER holds a folder for each corpus: tinyshakespeare, multi30k, wikitext-2, babymix, coarsewsd20, with the files that
the recipes name. Exit codes: 0 done, 1 a step failed or was stopped, 2 it cannot be done.

To start, no more than torch and transformers are needed, so that what else is missing can be said.
"""

import argparse
import contextlib
import functools
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hf_scratch_transformer.files import write_text

from .luggage import CORPORA, LUGGAGE, environment_of, pack_corpus, pack_packages, unpack, unpack_packages

if TYPE_CHECKING:
    from .steps import Goal, Step

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks/records/gpu"
RUNS = ROOT / "runs/gpu"  # of the steps, and what is unpacked
MOST_BYTES = 32 * 2**20  # that travel
MOST_SECONDS = 9 * 60.0  # of a step
SAVING = 60.0  # seconds to save in, once a step is told to stop
PYTHON = sys.executable
LAUNCH = (
    *(PYTHON, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--quiet"),
)
RUNNERS = {  # who runs the commands of the steps
    "pytest": (PYTHON, "-m", "pytest"),
    "benchmarks": (PYTHON, "-m", "benchmarks"),
    "senses": (PYTHON, "-m", "hf_scratch_transformer.cli", "senses"),
    "training": (*LAUNCH, "-m", "training"),
    "ddp": (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "-m", "training"),
    "fsdp2": (*LAUNCH, "--use_fsdp", "--fsdp_version", "2", "-m", "training"),
}
AGENTS = ("ddp", "fsdp2")  # which pass a signal on; where there is none, it has to reach the process itself


class Parser(argparse.ArgumentParser):
    """Raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(argv: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="python -m benchmarks.gpu", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("what", choices=("prepare", "plan", "run"))
    add("steps", nargs="*", metavar="STEP", help="by default all that have no record yet, in order of worth")
    add("--data", type=Path, help="of prepare: the folder of the corpora")
    add("--left", type=float, metavar="MINUTES", help="of run: refuse a plan that is longer")
    add("--together", action="store_true", help="of run: these steps at once, of which none may measure speed")
    add("--rehearse", action="store_true", help="of run: every step at a size that takes seconds, on small corpora")
    add("--luggage", type=Path, default=LUGGAGE, help="the folder that travels (.gpu)")
    add("--output_dir", "--output-dir", type=Path, help="of the records (benchmarks/records/gpu)")
    try:
        arguments = parser.parse_intermixed_args(argv)
        if arguments.left is not None and not arguments.left > 0:
            raise ValueError(f"--left {arguments.left:g}: must be minutes above 0")
        unpack_packages(arguments.luggage, RUNS)
        if arguments.together:
            check_together(arguments.steps)
        return {"prepare": prepare, "plan": plan, "run": run}[arguments.what](arguments)
    except (ValueError, OSError) as error:
        print(f"benchmarks.gpu: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def chosen(arguments: argparse.Namespace, records: Path) -> "list[Step]":
    """The steps that are named, or all that have no complete record."""
    from .shapes import unknown
    from .steps import STEPS

    for name in arguments.steps:
        if name not in STEPS:
            raise ValueError(unknown("step", name, STEPS))
        if arguments.steps.count(name) > 1:
            raise ValueError(f"step {name}: is named twice, and has one folder and one record")
    if arguments.steps:
        return [STEPS[name] for name in arguments.steps]
    return [step for step in STEPS.values() if not (read_record(records, step.name) or {}).get("is_complete")]


def check_together(names: Sequence[str]) -> None:
    """Raises ValueError for steps that measure speed, which others beside them would spoil."""
    from .steps import STEPS

    if not names:
        raise ValueError("--together: name the steps that are to run at once")
    for name in names:
        if name in STEPS and any(words[0] == "benchmarks" for words in STEPS[name].commands):
            raise ValueError(f"--together: {name} measures speed or memory, and must run alone")


def read_record(folder: Path, name: str) -> dict[str, Any] | None:
    """That of a step, if it has one."""
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no record: {error}; remove it") from error
    if not isinstance(record, dict) or "is_complete" not in record:
        raise ValueError(f"{path} is no record of a step; remove it")
    return record


# --- What travels -----------------------------------------------------------------------------------------------------


def corpora_of(step: "Step") -> set[str]:
    """Those that a step reads."""
    return {name for name in CORPORA for words in step.commands if any(f"{{data}}/{name}" in word for word in words)}


def prepare(arguments: argparse.Namespace, packages: bool = True) -> int:
    """Pack what the steps need, in order of worth, as long as it is not too much."""
    from training.folder import commit

    if arguments.data is None or not arguments.data.is_dir():
        raise ValueError(f"--data {arguments.data}: must be the folder that holds {', '.join(CORPORA)}")
    luggage = arguments.luggage
    luggage.mkdir(parents=True, exist_ok=True)
    write_text(luggage / "commit", f"{commit() or ''}\n")
    if packages and not (luggage / "packages.tar.xz").exists():
        pack_packages(luggage / "packages.tar.xz")
    steps, taken = chosen(arguments, arguments.output_dir or RECORDS), {"packages.tar.xz", "commit"}
    for step in steps:
        names = {f"{name}.tar.xz" for name in corpora_of(step)}
        for name in sorted(names - taken):
            if not (luggage / name).exists():
                pack_corpus(arguments.data / name.removesuffix(".tar.xz"), luggage / name)
        size = sum((luggage / name).stat().st_size for name in taken | names if (luggage / name).exists())
        if size > MOST_BYTES and arguments.steps:
            raise ValueError(
                f"{step.name}: {size / 2**20:.1f} MiB would travel, {MOST_BYTES >> 20} may: name fewer steps"
            )
        if size > MOST_BYTES:
            print(f"left out, since {size / 2**20:.1f} MiB would travel: {step.name}; prepare it another time, by name")
            continue
        taken |= names
    for path in sorted(luggage.iterdir()):
        if path.name not in taken:
            path.unlink()
    files = sorted(luggage.iterdir(), key=lambda path: -path.stat().st_size)
    for path in files:
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    print(f"{sum(path.stat().st_size for path in files) / 2**20:8.2f} MiB  in {luggage}")
    return 0


# --- The plan ---------------------------------------------------------------------------------------------------------


def plan(arguments: argparse.Namespace) -> int:
    """Print what is outstanding."""
    show_plan(chosen(arguments, arguments.output_dir or RECORDS))
    return 0


def show_plan(steps: "Sequence[Step]") -> float:
    """As a table; returns the minutes."""
    from rich.console import Console
    from rich.table import Column, Table

    from .steps import predicted_seconds

    minutes = {step.name: predicted_seconds(step) / 60 for step in steps}
    table = Table("step", "what it shows", "goals", Column("minutes", justify="right"))
    for step in steps:
        table.add_row(step.name, step.shows, ", ".join(map(str, step.goals)), f"{minutes[step.name]:.1f}")
    table.add_section()
    table.add_row("all", "predicted for an H100, not measured", "", f"{sum(minutes.values()):.1f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return sum(minutes.values())


# --- Running ----------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Run the steps one after the other; each has its record as soon as it is over."""
    if arguments.rehearse:
        with terminable():
            return rehearse(arguments)
    import torch

    from .steps import predicted_seconds

    steps = chosen(arguments, arguments.output_dir or RECORDS)
    for step in steps[:]:
        lacking = [name for name in sorted(corpora_of(step)) if not (arguments.luggage / f"{name}.tar.xz").exists()]
        if lacking and arguments.steps:
            raise ValueError(
                f"{step.name}: no {', '.join(lacking)} in {arguments.luggage}; run prepare {step.name} first"
            )
        if lacking:
            print(f"left out: {step.name}, for want of {', '.join(lacking)}: prepare {step.name}")
            steps.remove(step)
    minutes = show_plan(steps)
    if arguments.together:  # the longest of them, at least
        minutes = max(predicted_seconds(step) / 60 for step in steps)
    if arguments.left is not None and minutes > arguments.left:
        fitting: list[str] = []
        rest = arguments.left
        for step in steps:
            if (takes := predicted_seconds(step) / 60) <= rest:
                fitting.append(step.name)
                rest -= takes
        fits = f"run {' '.join(fitting)}" if fitting else "no step is as short"
        raise ValueError(f"the plan takes {minutes:.1f} minutes, --left {arguments.left:g} is less; what fits: {fits}")
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here; --rehearse runs every step on a CPU")
    end = time.monotonic() + 60 * arguments.left if arguments.left is not None else float("inf")
    records = arguments.output_dir or RECORDS
    records.mkdir(parents=True, exist_ok=True)
    for name in sorted({name for step in steps for name in corpora_of(step)}):
        unpack(arguments.luggage / f"{name}.tar.xz", RUNS / "data", name)

    def run_in_time(step: "Step") -> bool:
        seconds = min(MOST_SECONDS, end - time.monotonic()) - SAVING
        if seconds <= 0:
            print(f"{step.name}: not begun, since the time is up", file=sys.stderr)
            return False
        beside = [other.name for other in steps if arguments.together and other is not step]
        return bool(run_step(step, RUNS / "data", RUNS, records, stoppable, seconds, beside)["is_complete"])

    # A signal reaches this thread alone: it is passed on to what the others wait for.
    stopping = threading.Event()
    stoppable = functools.partial(execute, is_enough=stopping.is_set)
    with terminable(), ThreadPoolExecutor(len(steps) if arguments.together else 1) as pool:
        try:
            complete = list(pool.map(run_in_time, steps))
        finally:
            stopping.set()
    return int(not all(complete))


Execute = Callable[[Sequence[str], float], tuple[int, str]]


def run_step(
    step: "Step",
    data: Path,
    runs: Path,
    records: Path,
    execute: Execute,
    seconds: float,
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the commands of a step, no longer than so many seconds in all, beside saving, and write its record, with the
    names of the steps that run `beside` it."""
    import torch

    from .steps import figures, outcome

    place, began = runs / step.name, time.monotonic()
    place.mkdir(parents=True, exist_ok=True)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    about = environment_of(device, "benchmarks.gpu")
    record: dict[str, Any] = {"step": step.name, "shows": step.shows, "environment": about, "commands": []}
    record |= {"is_complete": False, "seconds": 0.0}
    reached: dict[Goal, bool | None] = {}
    if beside:  # what it says of time is then no measure of speed
        record["beside"] = list(beside)
    outcomes: list[dict[str, Any]] = []
    has_failed = False
    for index, template in enumerate(step.commands):
        words = tuple(word.replace("{data}", str(data)).replace("{run}", str(place)) for word in template)
        if words[0] == "benchmarks":
            words = (*words, "--output_dir", str(place / str(index)))
            shutil.rmtree(place / str(index), ignore_errors=True)  # nothing of an earlier try is taken for this one's
        (place / "tests.xml").unlink(missing_ok=True)
        print(f"{step.name}: {' '.join(words)}", file=sys.stderr, flush=True)
        start = time.monotonic()
        if seconds <= start - began:
            break
        code, printed = execute(words, seconds - (start - began))
        entry: dict[str, Any] = {"words": words, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
        try:
            entry |= (found := outcome(words, printed))
            outcomes.append(found)
        except (OSError, ValueError, KeyError, StopIteration) as error:  # it left nothing behind
            entry["error"] = f"{type(error).__name__}: {error}"
        if code:
            entry["printed"] = printed[-4000:]
        has_failed = has_failed or code != 0 and not (words[0] == "pytest" and code == 1)  # then some tests have
        record["commands"].append(entry)
        record["is_complete"] = len(outcomes) == len(step.commands) and not has_failed
        record["seconds"] = round(time.monotonic() - began, 1)
        record["figures"] = values = figures(outcomes)
        reached = {goal: goal.is_reached(values) if record["is_complete"] else None for goal in step.goals}
        record["goals"] = [goal._asdict() | {"is_reached": is_reached} for goal, is_reached in reached.items()]
        records.mkdir(parents=True, exist_ok=True)
        # Already: the next may be cut. Where this tree lies is nobody's concern.
        write_text(records / f"{step.name}.json", json.dumps(record, indent=1).replace(f"{ROOT}/", "") + "\n")
        if has_failed and words[0] != "benchmarks":  # comparisons stand for themselves
            break
    missed = "".join(f"; not reached: {goal}" for goal, is_reached in reached.items() if not is_reached)
    state = "done" if record["is_complete"] else "NOT complete"
    print(f"{step.name}: {state} in {record['seconds']:.0f} s{missed}", file=sys.stderr)
    return record


def execute(words: Sequence[str], seconds: float, is_enough: Callable[[], bool] = lambda: False) -> tuple[int, str]:
    """Run a command in processes of its own; exit code, and what it printed. After so many seconds it is told to stop,
    and has time to save. It is over when nobody holds its output any more: a launcher may end before what it launched.
    """
    command = [*RUNNERS[words[0]], *words[1:]]
    if words[0] == "training" and not has_gpu():
        command.insert(len(LAUNCH), "--cpu")
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "KINETO_LOG_LEVEL": "99"}
    printed: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    ) as process:
        assert process.stdout is not None

        def copy() -> None:
            for line in io.TextIOWrapper(process.stdout, "utf-8", "replace"):  # type: ignore[type-var]
                printed.append(line)
                sys.stderr.write(line)

        reader = threading.Thread(target=copy, daemon=True)
        reader.start()
        try:
            end = time.monotonic() + seconds
            while reader.is_alive() and time.monotonic() < end and not is_enough():
                reader.join(0.2)
        finally:
            if reader.is_alive():
                stop(process, signal.SIGTERM, words[0] in AGENTS)
                reader.join(SAVING)
            if reader.is_alive():
                stop(process, signal.SIGKILL, False)
                reader.join()
        return process.wait(), "".join(printed)


def stop(process: subprocess.Popen, number: signal.Signals, alone: bool) -> None:
    """Signal a command: its first process alone, or all."""
    with contextlib.suppress(ProcessLookupError):
        (os.kill if alone else os.killpg)(process.pid, number)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within it SIGTERM is an exception, so that what was started is stopped too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- Rehearsal --------------------------------------------------------------------------------------------------------

STOPPED = "shakespeare"  # the step that is stopped on its way, and continued
STOPPED_STEPS = 300  # of its training: more than it can do before it is seen to have begun
APART = ("pytest", *AGENTS)  # what needs processes of its own


def rehearse(arguments: argparse.Namespace) -> int:
    """Every step, from the packing of its corpus to its record. What a fresh process would only lose time on is done in
    this one; the first run of a recipe goes the whole way, is stopped, and continued."""
    import torch

    from .steps import rehearsed

    torch.set_num_threads(1)  # models so small are no quicker with more, and much slower where others work too
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpora, luggage, data, runs = (folder / name for name in ("corpora", "luggage", "data", "runs"))
        records = arguments.output_dir or folder / "records"
        write_small_corpora(corpora)
        own = argparse.Namespace(steps=arguments.steps, data=corpora, luggage=luggage, output_dir=records)
        prepare(own, packages=False)
        for name in CORPORA:
            unpack(luggage / f"{name}.tar.xz", data, name)
        steps = chosen(own, records)
        show_plan(steps)

        apart = [step for step in steps if step.name == STOPPED or any(words[0] in APART for words in step.commands)]

        def rehearse_step(step: "Step") -> bool:
            small = step._replace(commands=tuple(map(rehearsed, step.commands)))
            how = execute if step in apart else execute_here
            if step.name == STOPPED:
                rare = [f"--{what}.every_steps={STOPPED_STEPS}" for what in ("evaluation", "checkpoints")]
                long = tuple((*words, f"--optimisation.max_steps={STOPPED_STEPS}", *rare) for words in small.commands)
                small, how = small._replace(commands=long), go_on
                began = functools.partial(execute, is_enough=functools.partial(has_begun, runs / STOPPED))
                if run_step(small, data, runs, records, began, MOST_SECONDS)["is_complete"]:
                    raise ValueError(f"{step.name}: it was to be stopped, and went on to its end")
            return run_step(small, data, runs, records, how, MOST_SECONDS)["is_complete"]

        # What needs processes of its own waits for them beside what is done in this one.
        with ThreadPoolExecutor(1) as beside:
            running = beside.map(rehearse_step, apart)
            complete = [rehearse_step(step) for step in steps if step not in apart]
            complete += running
    print(f"rehearsed: {sum(complete)} of {len(complete)} steps are complete")
    return int(not all(complete))


def has_begun(run: Path) -> bool:
    """Whether it has measured something, and can be stopped by now: before its first step a signal ends it unsaved."""
    log = run / "metrics.jsonl"  # there from the start, and empty
    return log.exists() and log.stat().st_size > 0


def go_on(words: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a command that was stopped. Raises ValueError if it does not go on where that was."""
    code, printed = execute(words, seconds)
    if "resuming" not in printed:
        raise ValueError(f"{' '.join(words)}: began anew where it should have gone on: {printed[-500:]}")
    return code, printed


def execute_here(words: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a command in this process."""
    from hf_scratch_transformer import cli
    from training import __main__ as training

    from . import __main__ as benchmarks

    runners: dict[str, Callable[[list[str]], int]] = {
        "training": training.main,
        "benchmarks": benchmarks.main,
        "senses": lambda words: cli.main(["senses", *words]),
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = runners[words[0]](list(words[1:]))
    return code, printed.getvalue()


def write_small_corpora(folder: Path) -> None:
    """In the form of the real ones, with the text of README.md in them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip()]
    files = {f"wikitext-2/{name}": "\n".join(lines) for name in CORPORA["wikitext-2"]}
    pairs = [" ".join(line.split()[:5]) for line in lines]
    files |= {f"multi30k/{name}": "\n".join(pairs[: 60 if "train" in name else 4]) for name in CORPORA["multi30k"]}
    files["tinyshakespeare/input.txt"] = text
    for part in ("train", "test"):
        files[f"coarsewsd20/bank/{part}.data.txt"] = "".join(f"1\ta bank {line}\n" for line in lines[:6])
        files[f"coarsewsd20/bank/{part}.gold.txt"] = "0\n1\n" * 3
    files["coarsewsd20/bank/classes_map.txt"] = '{"0": "money", "1": "river"}'
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "babymix").mkdir()
    (folder / "babymix/babymix_10M.txt.xz").write_bytes(lzma.compress("\n\n".join(lines * 3).encode()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
