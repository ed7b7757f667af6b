"""Runs transformers' own model tests on our models, with a native model of each family beside them as the yardstick.

    python -m pytest tests/conformance          all of it, `make conformance`
    python -m pytest tests/conformance -k ...   a part of it

The tests come from transformers' source distribution at the installed version, fetched once from the package index. A
failure of ours passes only when README.md beside this file lists it with a reason; a listed one that passes is an error
too, so that the list stays true. What a native model fails is counted, and fails nothing.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import transformers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "conformance" / f"transformers-{transformers.__version__}"
IS_NATIVE = "a native model, the yardstick"
# pytest's outcomes and the column of the table that each is counted in.
COLUMNS = {
    "passed": "passed",
    "xpassed": "passed",
    "failed": "failed",
    "error": "failed",
    "xfailed": "known",
    "skipped": "skipped",
}


def pytest_configure(config: pytest.Config) -> None:
    if importlib.util.find_spec("parameterized") is None:
        raise pytest.UsageError("the conformance tests need `parameterized`: install requirements.lock")
    if not hasattr(config, "workerinput"):  # the workers of xdist find it unpacked
        fetch_tests()
    sources = [*CACHE.glob("*/*.py"), Path(transformers.__file__).with_name("testing_utils.py")]
    for marker in {name for source in sources for name in re.findall(r"mark\.(\w+)", source.read_text("utf-8"))}:
        config.addinivalue_line("markers", f"{marker}: of transformers")
    config.addinivalue_line("filterwarnings", "ignore")  # they are about code that is not ours
    os.environ["HF_HUB_OFFLINE"] = "1"
    paths = [str(HERE), str(CACHE), str(ROOT)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the processes that the distributed tests start


def fetch_tests() -> None:
    """Unpack the `tests` folder of transformers' source distribution as the package `transformers_tests`.

    Another name than `tests`, which is ours; its modules import each other relatively, so that they do not mind.

    Raises:
        pytest.UsageError: the package index has no source distribution of the installed version.
    """
    if CACHE.is_dir():
        return
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as scratch:
        requirement = f"transformers=={transformers.__version__}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        download = subprocess.run([*pip, "--no-binary", "transformers", "--dest", scratch, requirement])
        archives = list(Path(scratch).glob("*.tar.gz"))
        if download.returncode or len(archives) != 1:
            raise pytest.UsageError(f"no source distribution of {requirement} could be fetched from the package index")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        (root,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        unpacked = Path(scratch) / "unpacked"
        shutil.copytree(root / "tests", unpacked / "transformers_tests")
        unpacked.rename(CACHE)


def known_failures() -> dict[str, str]:
    """{pattern of `Class::test`: reason}, from the table rows of README.md that begin with a pattern in backticks."""
    rows = re.findall(r"^\| `(\S+::\S+)` \| (.+) \|$", (HERE / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = known_failures()
    for item in items:
        name = f"{item.parent.name}::{item.name}"
        if item.cls.is_native:  # counted, but no reason to fail
            item.add_marker(pytest.mark.xfail(reason=IS_NATIVE, strict=False))
        for pattern in (pattern for pattern in known if fnmatchcase(name, pattern)):
            item.add_marker(pytest.mark.xfail(reason=known[pattern], strict=True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what became of the tests of each model, ours above its yardstick."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    native_failures = []
    for outcome, reports in terminalreporter.stats.items():
        for report in (report for report in reports if isinstance(report, pytest.TestReport)):
            path, model, test = report.nodeid.split("::")
            column = COLUMNS.get(outcome)
            if column == "known" and IS_NATIVE in report.wasxfail:
                column = "failed"
                native_failures.append(f"{model}::{test}")
            if column is not None:
                counts.setdefault((Path(path).stem, model), Counter())[column] += 1
    if not counts:
        return
    columns = list(dict.fromkeys(COLUMNS.values()))
    line = "{:<10}{:<16}" + "{:>9}" * len(columns)
    write = terminalreporter.write_line
    terminalreporter.section(f"conformance with transformers {transformers.__version__}")
    write(line.format("family", "model", *columns))
    for file, model in sorted(counts, key=lambda row: (row[0], not row[1].startswith("Scratch"))):
        count = counts[file, model]
        write(line.format(file.removeprefix("test_"), model.removesuffix("Test"), *(count[name] for name in columns)))
    write("known: failures that tests/conformance/README.md lists with a reason")
    for name in sorted(native_failures):
        write(f"fails natively: {name}")
