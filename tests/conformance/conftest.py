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
FAMILIES = {"test_encoder.py": "encoder", "test_decoder.py": "decoder", "test_seq2seq.py": "encoder-decoder"}
OUTCOMES = ("passed", "failed", "skipped")
IS_NATIVE = "native yardstick"


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
        if item.cls.is_native:
            item.add_marker(pytest.mark.xfail(reason=IS_NATIVE, strict=False))
        for pattern in (pattern for pattern in known if fnmatchcase(name, pattern)):
            item.add_marker(pytest.mark.xfail(reason=known[pattern], strict=True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print passed, failed and skipped of each model, ours above its yardstick."""
    counts: dict[tuple[str, str], Counter] = {}
    native_failures = []
    for category, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport) or category not in OUTCOMES + ("xfailed", "xpassed"):
                continue
            path, model, test = report.nodeid.split("::")
            is_expected = category == "xfailed" and report.wasxfail != f"reason: {IS_NATIVE}"
            outcome = {"xfailed": "known" if is_expected else "failed", "xpassed": "passed"}.get(category, category)
            counts.setdefault((FAMILIES[Path(path).name], model), Counter())[outcome] += 1
            if category == "xfailed" and not is_expected:
                native_failures.append(f"{model}::{test}")
    if not counts:
        return
    line = "{:<16} {:<20} {:>8} {:>8} {:>8} {:>8}"
    write = terminalreporter.write_line
    terminalreporter.section(f"conformance with transformers {transformers.__version__}")
    write(line.format("family", "model", "passed", "failed", "known", "skipped"))
    for (family, model), count in sorted(counts.items(), key=lambda row: (list(FAMILIES.values()).index(row[0][0]), -ord(row[0][1][0]))):
        write(line.format(family, model.removesuffix("Test"), *(count[o] for o in ("passed", "failed", "known", "skipped"))))
    write("known: failures that tests/conformance/README.md lists with a reason")
    for name in sorted(native_failures):
        write(f"fails natively: {name}")
