"""Whether a missing program is noticed, installed only where that may be done, and said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

SCRIPT = str(Path(programs.__file__))


def printed(path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), **environment}
    return subprocess.run([sys.executable, SCRIPT, *words], env=environment, capture_output=True, text=True)


def test_only_what_works_is_named(tmp_path: Path) -> None:
    assert printed(tmp_path).stdout == "\n"
    for name in ("curl", "bwrap"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    assert printed(tmp_path).stdout == "curl\n", "bwrap is there, but makes no sandbox"


def test_what_is_required_and_missing_is_told_at_once(tmp_path: Path) -> None:
    done = printed(tmp_path, TRIMCP_REQUIRE="bwrap,gril,")
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert told[0] == "bwrap is required and missing: apt-get install bubblewrap, and let users make namespaces"
    assert told[1].startswith("gril is required and missing: TRIMCP_REQUIRE does not know it, only bwrap, ")


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize("fails", ["", "update", "install"])
def test_packages_are_installed_by_root_alone(
    user: int, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "apt-get").write_text(f'#!/bin/sh\necho "$@"\n[ "$2" != "{fails}" ]\n')
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    programs.install()
    out, told = capfd.readouterr()
    ran = [line for line in told.splitlines() if line.startswith("-qq ")]
    assert out == "", "which is for the names"
    assert len(ran) == (0 if user else 1 if fails == "update" else 2)
    assert ("could not: " in told) is (user == 0 and fails != "")
    if len(ran) == 2:
        assert {"bubblewrap", "curl"} <= set(ran[1].split())
