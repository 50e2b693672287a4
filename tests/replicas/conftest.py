"""In the end these tests print what their clients went through, as the table of docs/reliability/replicas.md."""

from __future__ import annotations

import pytest

from tests.replicas import test_faults
from tests.replicas.histories import table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if test_faults.JUDGED:
        terminalreporter.write_line("")
        for line in table(test_faults.JUDGED):
            terminalreporter.write_line(line)
