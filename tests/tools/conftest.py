"""The table that `make test-tools` ends with, kept in `record.json` of each folder, from which `docs/TOOLS.md` is made.

A test's docstring says what was run: what was compared. What cannot be run here is skipped, with the words of the
refusal as its reason. A file whose tool is no package here says which it is, PACKAGE and VERSION.
"""

import json
import os
import platform
import warnings
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from datasets import disable_progress_bars

from hf_scratch_transformer.tokenization import train_tokenizer

disable_progress_bars()

PACKAGES = {"trainer": "transformers"}  # by test file, where the names differ; else what a file calls PACKAGE
COLUMNS = ("tool", "version", "run", "compared")
TEXTS = [
    *("a bank by the river", "we sat on the bank of the river and slept", "she asked a bank", "the bank was wet"),
    *("trout swim upstream", "an old account in the north", "money slept on the account", "we asked the river"),
]


@pytest.fixture(scope="session", params=["encoder", "decoder"])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def tokenizer(family):
    return train_tokenizer(TEXTS, family=family, vocab_size=320, min_frequency=1)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def pytest_collection_modifyitems(items):
    for item in items:
        name = item.path.stem.removeprefix("test_")
        package = getattr(item.module, "PACKAGE", PACKAGES.get(name, name.replace("_", "-")))
        run, _, compared = " ".join(item.function.__doc__.split()).partition(": ")
        number = getattr(item.module, "VERSION", None) or version_of(package)
        item.user_properties.append(("tools", (package, number, run, compared)))


def pytest_terminal_summary(terminalreporter, config):
    outcomes, reasons = defaultdict(Counter), defaultdict(dict)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            for name, row in getattr(report, "user_properties", ()):
                if name == "tools" and outcome:
                    outcomes[row][outcome] += 1
                    if outcome == "skipped":
                        reasons[row][" ".join(report.longrepr[2].removeprefix("Skipped: ").split())] = None
    rows = [
        dict(zip(COLUMNS, row, strict=True))
        | {"result": dict(counts)}
        | ({"refusal": "; ".join(reasons[row])} if row in reasons else {})
        for row, counts in sorted(outcomes.items())
    ]
    cells = [[*COLUMNS, "result"]]
    cells += [[*list(row.values())[:4], ", ".join(f"{n} {what}" for what, n in row["result"].items())] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    terminalreporter.section("tools")
    for line in cells:
        terminalreporter.write_line("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip())
    if (folder := whole_folder(config)) is not None:
        at = {name: version(name) for name in ("torch", "transformers")}
        record = {"python": platform.python_version(), "machine": platform.machine(), **at, "rows": rows}
        (folder / "record.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def version_of(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def whole_folder(config):
    """The folder whose tests were run, all of them; else none has a record of it."""
    folder = Path(config.args[0]) if config.args else None
    is_group = folder is not None and folder.resolve().parent == Path(__file__).resolve().parent
    is_whole = not (config.option.keyword or config.option.collectonly or getattr(config.option, "lf", False))
    return folder if is_group and is_whole else None
