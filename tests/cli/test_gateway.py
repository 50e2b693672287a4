"""`trimcp gateway` as a program, over standard input and output and over HTTP with tokens."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.test_app import SERVER
from trimcp.cli.app import app

TRIMCP = [sys.executable, "-m", "trimcp.cli"]
SECONDS = 60
SUM = "3.0 small None False\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "servers.json"
    one = {"command": sys.executable, "args": ["-m", "trimcp.cli", "run", str(SERVER)]}
    found.write_text(json.dumps({"mcpServers": {"one": one, "two": {**one, "scopes": ["two"], "tools": ["add"]}}}))
    return found


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words, prog_name="trimcp")


def test_for_a_host_it_is_a_program(file: Path) -> None:
    gateway = shlex.join([*TRIMCP, "gateway", str(file)])
    for revision in ("2025-06-18", "2026-07-28"):
        done = run("call", gateway, "one__add", "a=1", "b=2", "--revision", revision)
        assert (done.exit_code, done.stdout) == (0, SUM), done.stderr
    shown = run("inspect", gateway).stdout
    assert "one__add" in shown
    assert "two__add" in shown


def test_over_http_tokens_say_who_sees_what(file: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("ann [two]: secret-of-ann\nbob []: secret-of-bob\n")
    tokens.chmod(0o600)
    for name in ("ann", "bob"):
        (tmp_path / name).write_text(f"secret-of-{name}")
        (tmp_path / name).chmod(0o600)
    command = [*TRIMCP, "gateway", str(file), "--http", "--port", "0", "--token-file", str(tokens)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        try:
            assert gateway.stderr is not None
            url = next(line.split()[2] for line in gateway.stderr if line.startswith("listening on http"))
            assert run("call", url, "one__add", "a=1", "b=2").exit_code == 3
            for name, seen in (("ann", True), ("bob", False)):
                done = run("call", url, "two__add", "a=1", "b=2", "--bearer", f"@{tmp_path / name}")
                assert (done.stdout == SUM) is seen, done.stderr
                assert run("call", url, "one__add", "a=1", "b=2", "--bearer", f"@{tmp_path / name}").stdout == SUM
            gateway.terminate()
            assert gateway.wait(SECONDS) == 0
        finally:
            gateway.kill()


def test_what_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    for text, why in (
        ("{", "is not valid JSON"),
        ('{"mcpServers": {"a": {"command": 1}}}', "must be a string"),
        (None, ""),
    ):
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        done = run("gateway", str(file))
        assert done.exit_code == 2
        assert why in done.stderr
        assert "Traceback" not in done.stderr
    file.write_text("{}")
    assert "is one process" in run("gateway", str(file), "--http", "--workers", "2").stderr
