"""Programs that cannot be started, and what a served file prints: a sentence each, and nothing for the client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import trimcp

SERVER = """
import subprocess, sys, trimcp
subprocess.run([sys.executable, "-c", "print('a child speaks')"], check=True)
print("imported \\u2713")
server = trimcp.Server("prints")

@server.tool
def tick() -> str:
    print("\\u2713")
    return "ticked"

@server.tool(run="inline")
def tock() -> str:
    print("\\u2713")
    return "tocked"

if __name__ == "__main__":
    trimcp.run_stdio(server)
"""


async def why(target: Any) -> str:
    with pytest.raises(trimcp.LocalError) as caught:
        async with trimcp.Client("c").connect(target):
            pytest.fail("it cannot be started")
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (b"#!/no/such/interpreter -x\n", "names the interpreter '/no/such/interpreter -x', which is not there"),
        (b"#!/bin/sh\r\n", "ends as on Windows (CRLF)"),
        (b"print('hello')\n", "its first line names no interpreter"),
        (b"\0\1\2", "its first line names no interpreter"),
    ],
)
@pytest.mark.parametrize("by_path", [False, True])
async def test_a_script_that_the_system_does_not_run(first: bytes, told: str, by_path: bool, tmp_path: Path) -> None:
    script = tmp_path / "serve-it"
    script.write_bytes(first + b"exit 1\n")
    script.chmod(0o755)
    target = trimcp.stdio("serve-it" if by_path else str(script), env={"PATH": str(tmp_path)})
    assert told in await why(target)


async def test_what_is_no_text_is_told() -> None:
    assert "must name a program" in await why(trimcp.stdio(""))
    wrong: Any = {"PORT": 8080}
    assert "the env of a stdio server holds texts, and 8080 is none; write '8080'" in await why(
        trimcp.stdio(sys.executable, env=wrong)
    )
    assert "null character" in await why(trimcp.stdio(sys.executable, "a\0b"))
    assert "there is no such file" in await why(trimcp.stdio("/no/such/program"))


@pytest.mark.parametrize("how", ["run", "alone"])
async def test_what_a_file_and_its_children_print_never_reaches_the_client(how: str, tmp_path: Path) -> None:
    file, said = tmp_path / "prints.py", list[str]()
    file.write_text(SERVER, "utf-8")
    words = ["-m", "trimcp.cli", "run", str(file)] if how == "run" else [str(file)]
    env = {"PYTHONPATH": str(Path(trimcp.__file__).parent.parent), "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    heard: list[str] = []
    target = trimcp.stdio(sys.executable, *words, env=env, on_stderr=said.append, trace=heard.append)
    if how == "alone":  # what it prints before it serves is its own affair, but for the characters
        file.write_text(SERVER.replace("subprocess.run", "#").replace('print("imported', '#"'), "utf-8")
    async with trimcp.Client("c").connect(target) as session:
        assert (await session.call_tool("tick")).text == "ticked"
        assert (await session.call_tool("tock")).text == "tocked"
    assert not [line for line in heard if "malformed" in line]
    assert said.count("\\u2713") == 2
    if how == "run":
        assert {"a child speaks", "imported \\u2713"} <= set(said)
