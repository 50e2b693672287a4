"""The promises' figures stand at the end of a run, whether it was green or not."""

from __future__ import annotations

from typing import Any

from tests.guarantees import report
from tests.hostile.conftest import servers

__all__ = ["servers"]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every figure that was measured."""
    if report.figures:
        terminalreporter.section("what the promises came to")
        for line in report.table():
            terminalreporter.write_line(line)


def pytest_sessionfinish() -> None:
    """Keep the figures for the docs."""
    report.write()
