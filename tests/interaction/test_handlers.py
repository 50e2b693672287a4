"""Whatever a handler raises or leaves open is its request's error: logged with its name, and nobody else notices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction import crashing_server
from tests.interaction.crashing_server import LEFT, RAISED, SECRET, STRANGE
from tests.interaction.links import Links, speaks
from tests.peers.messages import text_of
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.errors import RemoteError
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, OLDEST, Revision

ROADS = [
    (road, revision)
    for road in ("memory", "framed", "stdio", "http", "http+sse", "websocket")
    for revision in ((OLDEST,) if road == "http+sse" else (LATEST_LEGACY, LATEST))
]
ERRORS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
_ANSWERED = ("ToolError", "ErrorReply", "trio.TooSlowError")
CRASHES = [*(what for what in RAISED if what not in _ANSWERED), *STRANGE]
assert CRASHES[1] == "SystemExit"


@pytest.mark.parametrize(
    ("over", "spoken"),
    [
        pytest.param(road, revision, id=f"{road}-{revision.name}", marks=[pytest.mark.slow] if road == "stdio" else [])
        for road, revision in ROADS
    ],
)
async def test_no_handler_ends_the_server(over: str, spoken: Revision, tmp_path: Path, caplog: Any) -> None:
    assert speaks(over, spoken)
    links = Links(over, spoken, tmp_path / "journal", caplog, module=crashing_server)
    beside: list[str] = []
    stop = trio.Event()

    async def be_served() -> None:
        """Be somebody who has nothing to do with any of it."""
        await session.call_tool("hold", {"name": "beside", "until": "all is over"})
        beside.append("served")
        stop.set()

    with trio.fail_after(PATIENCE):
        async with links(Client("tester")) as session, trio.open_nursery() as nursery:
            nursery.start_soon(be_served)
            # Where calls take longer every row is tried in one place, and every place with one row.
            crashed = await check_tools(session, CRASHES if links.local else CRASHES[1:2])
            crashed += await check_others(session, (*CRASHES, *LEFT) if links.local else CRASHES[1:2])
            background = await check_background(session, (*CRASHES, *LEFT) if links.local else CRASHES[1:2])
            await session.call_tool("note", {"line": "all is over"})
            await stop.wait()
    assert beside == ["served"]
    log = links.log()
    for name in {*crashed}:
        assert log.count(f"crashed: {name!r} (") == crashed.count(name), name
    assert log.count("the handler of ") == len(crashed)
    assert log.count("background work ") == background
    assert log.count("crashing_server.py") > len(crashed), "the user's frames are shown"


async def refused(call: Any) -> None:
    with pytest.raises(RemoteError) as error:
        await call
    assert (error.value.code, error.value.message, error.value.data) == (INTERNAL_ERROR, "internal error", None)


async def check_tools(session: ClientSession, elsewhere: Sequence[str]) -> list[str]:
    crashed = []
    for tool in ("in_tool", "in_nursery", "in_thread_of_tool", "in_work", "in_middleware"):
        result = await session.call_tool(tool, {"what": "ToolError"})
        assert (result.is_error, text_of(result)) == (True, "there is no such city"), tool
        result = await session.call_tool(tool, {"what": "trio.TooSlowError"})
        told = f"{tool} gave up: a time limit in its own code has passed"
        assert (result.is_error, text_of(result)) == (True, told)
        with pytest.raises(RemoteError) as own:
            await session.call_tool(tool, {"what": "ErrorReply"})
        assert (own.value.code, own.value.message) == (4711, "the disk is full")
        left = LEFT if tool in ("in_tool", "in_work", "in_middleware") else ()
        for what in (*CRASHES, *left) if tool == "in_tool" else (*elsewhere, *left):
            if tool == "in_nursery" and "Cancelled" in what:
                continue  # a nursery takes it for its own
            await refused(session.call_tool(tool, {"what": what}))
            crashed.append(tool)
        assert text_of(await session.call_tool("echo", {"text": "still here"})) == "still here"
    await refused(session.call_tool("exit_in_process"))
    return [*crashed, "exit_in_process"]


async def check_others(session: ClientSession, rows: Sequence[str]) -> list[str]:
    crashed = []
    for what in rows:
        uri = f"crash://{what.replace(' ', '%20')}"
        await refused(session.read_resource(uri))
        await refused(session.get_prompt("in_prompt", {"what": what}))
        with pytest.raises(RemoteError, match="internal error"):
            await session.complete_prompt("in_prompt", "what", what)
        crashed += [uri, "in_prompt", "in_prompt"]
    return crashed


async def check_background(session: ClientSession, rows: Sequence[str]) -> int:
    """Return how many tasks crashed of which no request is told."""
    count = 0
    for owner in ("session", "server"):
        for what in rows:
            assert text_of(await session.call_tool("in_task", {"what": what, "of": owner})) == "done"
            count += 1
    if not session.revision.modern:
        session.roots_changed()
        await session.call_tool("wait_for", {"line": "notified"})
        count += 1
    assert text_of(await session.call_tool("echo", {"text": "still here"})) == "still here"
    return count


def test_the_page_has_the_rows_that_are_tested() -> None:
    table = ERRORS_PAGE.read_text("utf-8").partition("## What a handler may raise")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[2:]
    named = [row.replace("`", "") for row in rows]
    expected = {*RAISED, "KeyboardInterrupt", "a cancel scope or a nursery left open"}
    assert set(named) == expected
    assert SECRET not in table
