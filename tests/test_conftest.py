"""What the tests have in common: what becomes of a run without tests, and of a report that cannot be sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

REPORTS = """
import logging, sys

def test_fails():
    logging.getLogger().error("logged \\ud800")
    assert "\\ud800" == "\\udfff", "said \\ud800"

def test_raises():
    raise ValueError("raised \\ud800")

def test_passes():
    pass
"""


def pytest_on(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True
    )


@pytest.mark.slow
def test_a_report_with_a_lone_surrogate_ends_no_process_of_xdist(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_report_to_serializable")
    (tmp_path / "test_it.py").write_text(REPORTS)
    done = pytest_on(tmp_path, "-n", "1", "test_it.py")
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert r"raised \ud800" in done.stdout
    assert r"logged \ud800" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("alone", ["no", "only"])
@pytest.mark.parametrize(("chosen", "code"), [("frozen", 0), ("no_such_test", 5)])
def test_whether_there_were_tests_is_noted(chosen: str, code: int, alone: str, tmp_path: Path) -> None:
    if alone == "only":
        code = 5  # none of that file
    note = tmp_path / "ran"
    done = pytest_on(ROOT, "-n", "0", "tests/test_values.py", "-k", chosen, TRIMCP_RAN=str(note), TRIMCP_ALONE=alone)
    assert done.returncode == code, done.stdout
    assert note.exists() is (code == 0)
