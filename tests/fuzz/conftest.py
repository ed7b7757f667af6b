"""The table that `make fuzz` ends with, and what every kind of case needs."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import json
import resource

import pytest
from hypothesis import HealthCheck, settings

from .tally import COLUMNS, Tally

settings.register_profile("fuzz", deadline=None, database=None, suppress_health_check=[*HealthCheck])
settings.load_profile("fuzz")


@pytest.fixture(scope="session", autouse=True)
def limited():
    """What asks for more memory than there is fails, and does not bring the machine down."""
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.fixture
def tally(request, tmp_path, record_property):
    """Counts the cases of a test, and fails it in the end if any of them had a fault."""
    tally = Tally(request.node.name.removeprefix("test_"), tmp_path)
    yield tally
    record_property("fuzz", json.dumps(tally.summary()))
    if tally.faults:
        pytest.fail(f"{len(tally.faults)} kinds of fault\n\n" + "\n\n".join(tally.faults.values()), pytrace=False)


def pytest_terminal_summary(terminalreporter):
    reports = [report for some in terminalreporter.stats.values() for report in some]
    found = [json.loads(value) for r in reports for name, value in getattr(r, "user_properties", ()) if name == "fuzz"]
    if not found:
        return
    rows = [["kind", *COLUMNS], *([row["kind"], *(f"{row[name]:,}" for name in COLUMNS)] for row in found)]
    rows.append(["all", *(f"{sum(row[name] for row in found):,.0f}" for name in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("fuzz")
    for name, *cells in rows:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        terminalreporter.write_line("  ".join([name.ljust(widths[0]), *cells]))
