"""`.ci/run`, which checks each change: what it says of parts that pass, fail and have nothing here to run on."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.programs import PROGRAMS

pytestmark = pytest.mark.needs("bash", "coreutils", "grep", "sed")

PYTHON = """#!/bin/sh
case "$*" in
    *print*) echo 3.11 ;;
    *programs.py*) echo bwrap,go ;;
esac
"""
NOX = r"""#!/bin/sh
while [ "$#" -gt 0 ]; do
    if [ "$1" = -s ]; then name=$2; fi
    shift
done
echo "nox > Running session $name"
case " $FAILING " in *" $name "*) echo "nox > Session $name failed."; exit 1 ;; esac
case " $SKIPPED " in *" $name "*) echo "nox > Session $name skipped: there is no \`go\`."; exit 0 ;; esac
case "$name" in tests*) echo "nox > left out: 2 tests, for want of curl: $TRIMCP_REQUIRE" ;; esac
echo "nox > Session $name was successful."
"""
SESSIONS = {"tests", "guarantees", "lint", "types", "bench-check", "docs", "h2spec", "browser", "conformance"}


def run(
    folder: Path, *, python: str = PYTHON, newest: str = "3.11", **environment: str
) -> tuple[int, dict[str, str], str]:
    """Run it with a nox that does nothing. Returns its exit code, what it says of each part, and all it says."""
    programs = {"nox": NOX, "uv": "#!/bin/sh\ncat > /dev/null\n", "python": python}
    programs["../../.ci/newest-python"] = "#!/bin/sh\nexit 77\n"  # as where it is not to be had
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    path = folder / "path"
    path.mkdir()
    for name in ("bash", "cat", "dirname", "env", "grep", "mktemp", "rm", "sed", "sh", "tee"):
        (path / name).symlink_to(shutil.which(name) or name)
    for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python3"):
        programs[f"../../path/{name}"] = PYTHON.replace("3.11", newest if name == f"python{newest}" else "3.11")
        if name not in ("python3", "python3.11", f"python{newest}"):
            programs[f"../../path/{name}"] = "#!/bin/sh\nexit 1\n"
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in programs.items():
        (folder / ".venv" / "bin" / name).write_text(text)
        (folder / ".venv" / "bin" / name).chmod(0o755)
    environment = {"PATH": str(path), "FAILING": "", "SKIPPED": "", **environment}
    done = subprocess.run(["bash", ".ci/run"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    said = re.findall(r"^== ([\w-]+): (ok|left out|FAILED) in \d+ s$", done.stdout, re.MULTILINE)
    return done.returncode, dict(said), done.stdout


def test_what_passes_is_ok_and_what_was_left_out_of_it_is_told(tmp_path: Path) -> None:
    code, said, text = run(tmp_path, newest="3.13")
    assert code == 0, text
    assert said.keys() >= SESSIONS | {"setup", "programs", "newest"}
    assert set(said.values()) == {"ok"}
    *_, first, second = text.splitlines()
    assert first == second == "== left out: 2 tests, for want of curl: bwrap,go"  # of this Python, and of the newest


def test_a_part_that_has_nothing_here_to_run_on_is_not_ok(tmp_path: Path) -> None:
    code, said, text = run(tmp_path, SKIPPED="h2spec")
    assert code == 0, text
    assert {name for name, how in said.items() if how == "left out"} == {"h2spec", "newest"}
    assert text.splitlines()[-1] == "== left out: newest h2spec"


@pytest.mark.parametrize("name", sorted(SESSIONS))
def test_a_part_that_fails_fails_the_whole_and_stops_no_other(tmp_path: Path, name: str) -> None:
    code, said, text = run(tmp_path, FAILING=name)
    assert code == 1
    assert {part for part, how in said.items() if how == "FAILED"} == {name}
    assert said.keys() >= SESSIONS
    assert text.splitlines()[-1] == f"== failed: {name}"


def test_what_is_here_is_required_and_what_the_caller_requires_too(tmp_path: Path) -> None:
    _, _, text = run(tmp_path, TRIMCP_REQUIRE="curl")
    assert "required: bwrap,go,curl\n" in text


def test_a_program_that_is_required_and_missing_fails_it(tmp_path: Path) -> None:
    """As `tests/programs.py` ends where `TRIMCP_REQUIRE` names what is not here."""
    assert "go" in PROGRAMS
    missing = PYTHON.replace("echo bwrap,go", "echo bwrap; exit 1")
    code, said, _ = run(tmp_path, python=missing, TRIMCP_REQUIRE="go")
    assert (code, said["programs"]) == (1, "FAILED")
