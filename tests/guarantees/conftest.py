"""Every promise is held against servers everywhere, and their figures stand at the end of a run, green or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.guarantees import report
from tests.guarantees.worlds import PROGRAM, Homes, Journal
from tests.hostile.network import Pool

if sys.platform != "linux":  # memory is read from /proc
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    """Servers in every world."""
    journal = Journal(tmp_path_factory.mktemp("promises") / "journal")
    pool = Pool(PROGRAM, {"serve": "network", "journal": str(journal.path)})
    yield Homes(pool, journal)
    pool.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every figure that was measured."""
    if report.figures:
        terminalreporter.section("what the promises came to")
        for line in report.table():
            terminalreporter.write_line(line)


def pytest_sessionfinish() -> None:
    """Keep the figures for the docs."""
    report.write()
