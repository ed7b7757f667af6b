"""The table that `make test-tools` ends with. A test's docstring says what was run: what was compared."""

import os
import warnings
from collections import Counter, defaultdict
from importlib.metadata import version

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from datasets import disable_progress_bars

from hf_scratch_transformer.tokenization import train_tokenizer

disable_progress_bars()

PACKAGES = {"trainer": "transformers"}  # by test file, where the names differ
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
        run, _, compared = " ".join(item.function.__doc__.split()).partition(": ")
        item.user_properties.append(("tools", (PACKAGES.get(name, name), run, compared)))


def pytest_terminal_summary(terminalreporter):
    outcomes = defaultdict(Counter)
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            for name, row in getattr(report, "user_properties", ()):
                if name == "tools" and outcome:
                    outcomes[row][outcome] += 1
    rows = [["tool", "version", "run", "compared", "result"]]
    for (package, run, compared), counts in sorted(outcomes.items()):
        result = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        rows.append([package.replace("_", "-"), version(package), run, compared, result])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("tools")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())
