"""Calls as programs: each is run as it was written, and makes the same call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.peers.serving import served
from trimcp.cli.targets import find_target
from trimcp.cli.web.exports import exported
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05, Revision

ARGUMENTS = {"text": 'it\'s "quoted" & größer\n$HOME'}
PROGRAM = """
import trimcp

server = trimcp.Server("echo")

@server.tool
def echo(text: str) -> str:
    return text + "!"
"""


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("echo")

    @server.tool
    def echo(text: str) -> str:
        return text + "!"

    return server


def programs(url: str, revision: Revision = LATEST, **headers: str) -> dict[str, str]:
    target = find_target(url, headers=headers)
    return exported(target, url, revision, "echo", ARGUMENTS, ARGUMENTS["text"] + "!")


async def run(words: list[str], **options: Any) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = await trio.run_process(words, capture_stdout=True, env=environment, **options)
    return done.stdout.decode()


@pytest.mark.slow
@pytest.mark.needs("curl", "bash")
@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY])
async def test_curl_makes_the_call(revision: Revision) -> None:
    async with served(make_server(), "http") as place:
        told = await run(["bash", "-euc", programs(place.url, revision)["curl"]])
    assert '"text":"it\'s \\"quoted\\" & größer\\n$HOME!"' in told


@pytest.mark.slow
async def test_the_command_makes_the_call(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(PROGRAM, "utf-8")
    text = programs(str(tmp_path / "echo.py"))["trimcp"]
    assert await run(["sh", "-euc", text]) == 'it\'s "quoted" & größer\n$HOME!\n'


@pytest.mark.slow
async def test_the_program_makes_the_call(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(PROGRAM, "utf-8")
    text = programs(str(tmp_path / "echo.py"))["python"]
    assert await run([sys.executable, "-c", text]) == 'it\'s "quoted" & größer\n$HOME!\n'


@pytest.mark.slow
async def test_the_test_passes_and_fails_with_the_answer(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(PROGRAM, "utf-8")
    text = programs(str(tmp_path / "echo.py"))["pytest"]
    for name, expected in (("test_same.py", 0), ("test_other.py", 1)):
        (tmp_path / name).write_text(text if expected == 0 else text.replace("größer", "kleiner", 1), "utf-8")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:anyio", str(tmp_path / name)]
        done = await trio.run_process(words, check=False, capture_stdout=True, stderr=subprocess.STDOUT, cwd=tmp_path)
        assert done.returncode == expected, done.stdout.decode()


def test_what_a_header_holds_is_in_no_program() -> None:
    for url in ("https://mcp.example/mcp", "wss://mcp.example/ws", "grpcs://mcp.example:443"):
        told = programs(url, Authorization="Bearer hunter2")
        assert "hunter2" not in str(told)
        assert "os.environ['AUTHORIZATION']" in told["python"]
        assert ("curl" in told) == url.startswith("http")
        assert compile(told["python"], "program", "exec")
        assert compile(told["pytest"], "program", "exec")


def test_the_oldest_transport_is_beyond_curl() -> None:
    assert "curl" not in programs("http://127.0.0.1:1/sse", V2024_11_05)
