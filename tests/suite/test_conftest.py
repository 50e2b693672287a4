"""What the tests have in common: what becomes of a run without tests, and of a report that cannot be sent."""

from __future__ import annotations

import json
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
    settings = {"PYTHONPATH": str(ROOT), "TRIMCP_REQUIRE": ""}
    if folder != ROOT:  # what tests of their own need no plugin for: half of what such a run takes is loading them
        command += ["-p", "xdist"]
        settings["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
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
    words = ["-n", "0", "tests/support/test_values.py", "-k", chosen]
    done = pytest_on(ROOT, *words, TRIMCP_NOTES=str(tmp_path), TRIMCP_ALONE=alone)
    assert done.returncode == code, done.stdout
    assert (tmp_path / "ran").exists() is (code == 0)


READ = """
import os
from pathlib import Path

with Path(os.environ["PYTEST_XDIST_WORKER"]).open("a") as file:
    file.write(Path(__file__).stem[-1])

def test_passes():
    pass
"""


@pytest.mark.slow
def test_processes_of_xdist_begin_a_folder_at_different_files_and_find_the_same_tests(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "there").mkdir()
    for name in "abcd":
        (tmp_path / "there" / f"test_{name}.py").write_text(READ)
    done = pytest_on(tmp_path, "-n", "2", "there")
    assert "4 passed" in done.stdout, done.stdout  # xdist refuses processes that did not find the same
    assert [(tmp_path / name).read_text() for name in ("gw0", "gw1")] == ["abcd", "cdab"]


SOME = """
import pytest

@pytest.mark.alone
def test_alone(): ...

@pytest.mark.needs("curl")
def test_typed(): ...

def test_other(): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.parametrize(
    ("chosen", "left", "said"),
    [("test_", "1", "1 skipped, 1 deselected"), ("alone", "1", "deselected"), ("other", "", "1 passed")],
)
def test_a_second_run_is_asked_for_only_if_it_has_tests(
    chosen: str, left: str, said: str, processes: str, tmp_path: Path
) -> None:
    """And the first says that it left some out, also where it has none itself."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n needs\n")
    (tmp_path / "test_it.py").write_text(SOME)
    done = pytest_on(tmp_path, "-n", processes, "-k", chosen, PATH="", TRIMCP_NOTES=str(tmp_path), TRIMCP_ALONE="no")
    assert said in done.stdout.splitlines()[-1]
    assert "no tests ran" not in done.stdout
    alone = tmp_path / "alone"
    assert (alone.read_text() if alone.exists() else "") == left


@pytest.mark.slow
def test_what_was_left_out_is_noted_and_what_is_required_fails(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n needs\n")
    (tmp_path / "test_it.py").write_text(SOME)
    done = pytest_on(tmp_path, "-n", "1", PATH="", TRIMCP_NOTES=str(tmp_path))
    assert done.returncode == 0, done.stdout
    reason, count = json.loads((tmp_path / "left-out").read_text())
    assert count == 1
    assert reason.endswith(": apt-get install curl")
    done = pytest_on(tmp_path, "-n", "1", PATH="", TRIMCP_REQUIRE="ps,curl")
    assert done.returncode == 1
    assert "curl is required and missing: apt-get install curl" in done.stdout


@pytest.mark.slow
def test_a_required_program_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_it.py").write_text("def test_passes():\n    pass\n")
    done = pytest_on(tmp_path, "-n", "0", TRIMCP_REQUIRE="ps,gril")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TRIMCP_REQUIRE names gril, and knows only bwrap, " in done.stderr
