"""One case after the other: a command is run as a user would run it, and what must never happen is written down."""

import contextlib
import io
import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import settings

ROOT = Path(__file__).parents[2]
SECONDS = 60  # of the processor that a case may take
WAITING = 600  # seconds by the clock, on a machine that may be busy with something else
COLUMNS = ("cases", "refused", "accepted", "tracebacks", "other faults", "seconds", "of processor")


class TooLong(BaseException):
    """Not an `Exception`, which the command might take for its own."""


class Tally:
    """Counts of one kind of case, and the first case of each fault."""

    def __init__(self, kind: str, base: Path) -> None:
        self.kind, self.base = kind, base
        self.counts: Counter[str] = Counter()
        self.faults: dict[str, str] = {}
        self.started = time.monotonic(), time.process_time()

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder for a case, three levels deep, and the current one."""
        top = Path(tempfile.mkdtemp(dir=self.base))
        place, previous = top / "one" / "two", Path.cwd()
        place.mkdir(parents=True)
        os.chdir(place)
        try:
            yield place
        finally:
            os.chdir(previous)
            shutil.rmtree(top)

    def run(
        self, main: Callable[[list[str]], int], words: Iterable[str], names: Iterable[str], owned: str | None = None
    ) -> None:
        """A case: a command line, in the folder that is current.

        A refusal (2) or a failure (1) has to name one of `names`; no file may change but those in the folder `owned`.
        """
        words, names = list(words), [*names, *words]
        before = _files(owned)
        out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", how) for how in ("strict", "backslashreplace"))
        self.counts["cases"] += 1
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, _stop)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAITING)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code: Any = main(words)
        except SystemExit as end:
            code = end.code
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            self._fault("tracebacks", _place(error), words, names, traceback.format_exc())
            return
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
        err.seek(0)
        said = err.read()
        if "Traceback (most recent call last)" in said:
            self._fault("tracebacks", "printed: " + said.strip().splitlines()[-1][:60], words, names, said)
        elif code not in (0, 1, 2):
            self._fault("other faults", f"code {code}", words, names, said)
        elif _files(owned) | before != _files(owned):
            lost = sorted(str(p) for p, content in before.items() if _files(owned).get(p) != content)
            self._fault("other faults", f"lost or changed {Path(lost[0]).name}", words, names, f"{lost}\n{said}")
        elif code and not said.strip():
            self._fault("other faults", f"code {code} without a word", words, names, said)
        elif code and names and not any(_plain(name) in _plain(said) for name in names):
            self._fault("other faults", f"names nothing: {said.strip()[-150:]}", words, names, said)
        self.counts["refused" if code else "accepted"] += 1

    def _fault(self, kind: str, place: str, words: list[str], names: list[str], text: str) -> None:
        self.counts[kind] += 1
        files = {
            str(path): path.read_bytes()[:1500].decode("utf-8", "replace")
            for path in Path.cwd().rglob("*")
            if path.is_file() and path.suffix in (".yaml", ".json", ".tsv") and path.name in names
        }
        self.faults.setdefault(
            place, f"{kind}: {place}\n  {json.dumps(words)[:600]}\n  {names}\n  {files}\n{text[-3000:]}"
        )

    def summary(self) -> dict[str, Any]:
        ended = time.monotonic(), time.process_time()
        seconds = [round(end - start, 1) for start, end in zip(self.started, ended, strict=True)]
        counts = {name: self.counts[name] for name in COLUMNS[:-2]}
        return {"kind": self.kind, **counts, **dict(zip(COLUMNS[-2:], seconds, strict=True))}


def _plain(text: str) -> str:
    return text.lower().replace("-", "_")


def _stop(*_: Any) -> None:
    raise TooLong(f"more than {SECONDS} s of the processor, or {WAITING} s")


def _files(owned: str | None) -> dict[Path, bytes]:
    """Everything in and around the current folder, but for one folder's content."""
    top = Path.cwd().parents[1]
    left_out = Path(owned).resolve() if owned else None
    files = (path for path in top.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if left_out is None or left_out not in path.parents}


def _place(error: BaseException) -> str:
    """The kind of error, and the last line of ours that it came through."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if str(ROOT) in f.filename and "fuzz" not in f.filename
    ]
    frame = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} ({str(error)[:80]})"


def cases(count: int) -> Any:
    """How many a test is to draw, of `make fuzz SHARE=1`."""
    return settings(max_examples=max(1, round(count * float(os.environ.get("SHARE", "1")))))
