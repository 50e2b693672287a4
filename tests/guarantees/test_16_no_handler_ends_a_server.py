"""Promise 16: whatever a handler raises is its request's error and one ERROR of the log; everybody else goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.report import figure
from tests.interaction import crashing_server
from tests.interaction.crashing_server import LEFT, RAISED, STRANGE
from tests.interaction.everything_server import Journal
from tests.peers.messages import text_of
from tests.peers.serving import IN_MEMORY, NETWORK, served

pytestmark = pytest.mark.slow

_NO_CRASH = ("ToolError", "ErrorReply", "trio.TooSlowError")
_CRASHES = [*(what for what in RAISED if what not in _NO_CRASH), *LEFT, *STRANGE]
_EACH = 20


@asynccontextmanager
async def _two_sessions(way: str, tmp_path: Path, said: list[str]) -> AsyncIterator[list[trimcp.ClientSession]]:
    """Sessions with one server, or one session twice where a server has but one client."""
    client = trimcp.Client("tester")
    journal = tmp_path / "journal"
    if way == "stdio":
        options = json.dumps({"journal": str(journal), "grace": 1})
        root = str(Path(trimcp.__file__).parents[1])
        program = crashing_server.__file__
        target: Any = trimcp.stdio(sys.executable, program, options, env={"PYTHONPATH": root}, on_stderr=said.append)
        async with client.connect(target) as session:
            yield [session, session]
        return
    server = crashing_server.make_server(Journal(journal))
    if way in ("memory", "framed"):
        async with client.connect(trimcp.in_process(server, framed=way == "framed")) as session:
            yield [session, session]
        return
    async with (
        served(server, way) as place,
        client.connect(place.target()) as one,
        client.connect(place.target()) as other,
    ):
        yield [one, other]


@pytest.mark.parametrize("way", [*IN_MEMORY, *NETWORK, "stdio"])
async def test_no_handler_ends_a_server(way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    wrong: list[str] = []
    lost: list[str] = []
    most_lines = 0
    async with _two_sessions(way, tmp_path, said) as (one, other):

        async def be_served() -> None:
            """Call as ever, beside handlers that crash."""
            for _ in range(_EACH):
                try:
                    assert text_of(await other.call_tool("echo", {"text": "as ever"})) == "as ever"
                except (trimcp.McpError, AssertionError) as error:
                    lost.append(repr(error))

        async def crash(tool: str, what: str) -> None:
            try:
                wrong.append(repr(await one.call_tool(tool, {"what": what})))
            except trimcp.McpError as error:
                if str(error) != "internal error (code -32603)":
                    wrong.append(repr(error))

        with trio.fail_after(PATIENCE):
            for what in _CRASHES:
                caplog.clear()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(be_served)
                    nursery.start_soon(crash, "in_tool", what)
                    nursery.start_soon(crash, "in_work", what)
                for tool in ("in_tool", "in_work"):
                    lines = [each for each in caplog.records if f"crashed: '{tool}' (" in each.getMessage()]
                    most_lines = max(most_lines, len(lines))
            assert text_of(await one.call_tool("echo", {"text": "as ever"})) == "as ever"
    calls = _EACH * len(_CRASHES)
    if way == "stdio":
        crashed = sum("the handler of tools/call crashed: '" in line for line in said)
        most_lines = crashed // (2 * len(_CRASHES)) if crashed % (2 * len(_CRASHES)) == 0 else crashed
    figure(16, f"of {calls} calls beside {2 * len(_CRASHES)} crashes, lost", len(lost), 0, "", way)
    figure(16, f"of {2 * len(_CRASHES)} crashes, answered with more than an internal error", len(wrong), 0, "", way)
    figure(16, "errors logged of a crash, with its tool", most_lines, 1, "", way)
    assert (lost, wrong, most_lines) == ([], [], 1)
