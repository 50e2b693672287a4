"""The streams of a face: which are kept alive, and that those that ended are let go of."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.transports.http.face import LEGACY, Answer, visiting
from tests.transports.http.test_exchange import make_server
from tests.transports.http.test_sse2024 import met, say, spoken
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.wire.revisions import LATEST, OLDEST, V2025_03_26, Revision


async def test_streams_that_ended_are_watched_no_longer(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        for _ in range(3):
            visitor.session = None
            await visitor.initialize()
            stream = await visitor.listen()
            await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
            assert stream.finished
        visitor.session = None
        await visitor.initialize()
        stream = await visitor.listen()
        await trio.sleep(visitor.face.settings.keep_alive)
        assert len(visitor.face.shared.open_streams._read) == 1
        stream.leave()
        assert visitor.face.shared.open_streams._read == {}


ODD = "a\u2028b\u2029c\x85d – é"


def odd_server() -> Server[Any]:
    server: Server[Any] = Server("tester", "1")

    @server.tool
    async def odd(told: bool, *, ctx: Context) -> str:
        if told:
            await ctx.report_progress(1, message=ODD)
        return ODD

    return server


def check(answer: Answer) -> None:
    """No line ends but at a line feed, for any reader, and the text has arrived."""
    body = bytes(answer.body).decode()
    assert len(body.splitlines()) == body.count("\n")
    assert spoken(answer)[-1]["result"]["content"][0]["text"] == ODD


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("revision", [V2025_03_26, LEGACY, LATEST], ids=str)
async def test_an_event_has_no_line_end_that_only_some_readers_know(
    revision: Revision, told: bool, autojump_clock: Any
) -> None:
    """Some split events at U+2028 too, such as the official Java SDK 1.x."""
    async with visiting(odd_server(), revision) as visitor:
        if not revision.modern:
            await visitor.initialize()
        answer = await visitor.call("odd", {"accept": "text/event-stream"}, token=7, told=told)
        check(await answer.done())
        first, *rest = answer.now()
        if rest and first.id is not None:
            check(await (await visitor.listen(first.id)).done())


async def test_nor_has_one_of_the_older_transport(autojump_clock: Any) -> None:
    async with visiting(odd_server(), OLDEST) as visitor:
        stream, place = await met(visitor)
        call = visitor.request("tools/call", {"name": "odd", "arguments": {"told": True}}, progressToken=5)
        await say(visitor, place, call)
        await stream.events(4)
        check(stream)
        stream.leave()
