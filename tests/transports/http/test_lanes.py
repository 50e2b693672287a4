"""What becomes of messages over HTTP while their reader is slow or gone, and of a reader that takes nothing at all.

docs/reference/lanes.md is the table these hold. Other transports: tests/session/test_lanes.py.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from tests.peers.http1 import HttpWire
from tests.peers.messages import initialize, notification
from tests.peers.serving import Place, served
from tests.peers.websockets import message, upgrade
from tests.transports.http.face import Visitor, visiting
from tests.transports.http.test_sse2024 import met, say
from trimcp import security
from trimcp.net import http_application
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.session.statistics import Lane, Statistics
from trimcp.transports.http.h1.connection import H1Connection
from trimcp.transports.http.h1.hosting import Hosting
from trimcp.transports.http.h1.wires import StreamWire
from trimcp.transports.http.settings import HttpLimits, HttpSettings
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, OLDEST, Revision

INFO = "io.modelcontextprotocol/logLevel"


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """The security events there were, and other warnings."""
    monkeypatch.setattr(security, "_bounds", security._EventCounts())  # so many a minute, and this is not the only test
    caplog.set_level(logging.WARNING)
    return lambda: [vars(record) for record in caplog.records if record.levelno >= logging.WARNING]


class Busy:
    """A server whose tools say much, and what they learnt."""

    def __init__(self, **limits: Any) -> None:
        self.server: Server[None] = Server("busy", "1", limits=Limits(**limits))
        self.stopped: list[tuple[CancelReason | None, str | None]] = []
        self.seen: list[Statistics] = []
        self.more = trio.Event()
        self.looked = trio.Event()
        self.ended = trio.Event()

        @self.server.tool
        async def flood(*, ctx: Context) -> str:
            """Say more than any buffer holds, and wait to be stopped."""
            try:
                for number in range(5_000):
                    await ctx.report_progress(number, message="x" * 10_000)
                    await ctx.info("x" * 10_000)
                await trio.sleep_forever()
            finally:
                self.stopped.append((ctx.cancel_reason, ctx.cancel_detail))
                self.ended.set()

        @self.server.tool
        async def hasty(count: int, *, ctx: Context) -> str:
            """Say much without waiting, then look what became of it, and say a little more."""
            await ctx.report_progress(0)
            await wait_all_tasks_blocked()
            for number in range(count):
                ctx.log_nowait("info", f"{number} {'x' * 1_000}")
                ctx.report_progress_nowait(number + 1, message="x" * 1_000)
            self.seen.append(ctx.internals[0].statistics())
            self.looked.set()
            await self.more.wait()
            ctx.log_nowait("info", "more")
            return "done"


def _said(messages: list[Any]) -> list[Any]:
    return [message["params"]["data"] for message in messages if message.get("method") == "notifications/message"]


def _progress(messages: list[Any]) -> list[Any]:
    return [message["params"]["progress"] for message in messages if message.get("method") == "notifications/progress"]


# Counting


@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY])
async def test_what_a_slow_reader_of_an_answer_misses_is_counted_and_told(
    revision: Revision, autojump_clock: MockClock
) -> None:
    busy = Busy()
    async with visiting(busy.server, revision, HttpSettings(stream_buffer=10_000)) as visitor:
        if not revision.modern:
            await visitor.initialize()
        meta = {INFO: "info"} if revision.modern else {}
        params = {"name": "hasty", "arguments": {"count": 50}}
        answer = await visitor.post(visitor.request("tools/call", params, progressToken="t", **meta))
        await answer.begun()
        answer.stalled = True
        await busy.looked.wait()
        (stats,) = busy.seen
        lanes = stats.lanes
        assert lanes.logs.dropped + len(_said(answer.messages)) < 50
        assert lanes.logs.dropped > 30
        assert lanes.progress.merged > 30
        assert (lanes.progress.messages, stats.outbox) == (1, 1)
        assert 1_000 < lanes.progress.bytes == stats.outbox_bytes < 1_300
        assert 10_000 <= stats.unread_bytes == len(answer.held) < 15_000
        assert (stats.merged, stats.dropped) == (lanes.merged, lanes.dropped)
        answer.read_on()
        busy.more.set()
        await answer.done()
        assert _said(answer.messages)[-2:] == [{"dropped": lanes.logs.dropped}, "more"]
        assert len(_said(answer.messages)) == 50 - lanes.logs.dropped + 2
        assert _progress(answer.messages)[-1] == 50
        (running,) = busy.server.runs
        if revision.modern:
            assert running.counts.dropped == {"logs": lanes.logs.dropped}, "the session ended with its answer"
            assert running.counts.merged == {"progress": lanes.progress.merged}


@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY])
async def test_what_a_client_without_streams_cannot_be_told_is_counted(
    revision: Revision, autojump_clock: MockClock
) -> None:
    busy = Busy()
    busy.more.set()
    async with visiting(busy.server, revision) as visitor:
        visitor.headers["accept"] = "application/json"
        if not revision.modern:
            await visitor.initialize()
        meta = {INFO: "info"} if revision.modern else {}
        params = {"name": "hasty", "arguments": {"count": 5}}
        answer = await visitor.post(visitor.request("tools/call", params, progressToken="t", **meta))
        await answer.done()
        assert answer.json["result"]
        lanes = busy.seen[0].lanes
        assert (lanes.logs.dropped, lanes.progress.dropped) == (5, 6)


async def test_notices_without_a_reader_are_kept_or_dropped_and_counted(autojump_clock: MockClock) -> None:
    busy = Busy()
    async with visiting(busy.server, LATEST_LEGACY) as visitor:
        await visitor.initialize()
        (running,) = busy.server.runs
        (session,) = running.sessions
        for number in range(10):
            running.log_to_all("info", number)
            session.notify_latest("notifications/tools/list_changed")
        lanes = session.statistics().lanes
        assert lanes.logs == Lane(dropped=10)
        assert (lanes.changes.messages, lanes.changes.merged, lanes.changes.dropped) == (1, 9, 0)
        stream = await visitor.listen()
        await stream.begun()
        assert [message["method"] for message in stream.messages] == ["notifications/tools/list_changed"]
        stream.stalled = True
        running.log_to_all("info", "x" * 300_000)  # more than may wait
        for number in range(10):
            running.log_to_all("info", number)
            session.notify_latest("notifications/tools/list_changed")
        stats = session.statistics()
        assert stats.lanes.logs.dropped == 20
        assert (stats.lanes.changes.messages, stats.lanes.changes.merged) == (1, 18)
        assert stats.unread_bytes > 300_000
        stream.read_on()
        running.log_to_all("info", "after")
        assert _said(stream.messages)[1:] == [{"dropped": 10}, "after"], "what nobody could read is no drop to tell of"
        stream.leave()
        next(iter(visitor.face.shared.sessions)).end("over")
        assert running.counts.dropped == {"logs": 20}
        assert running.counts.merged == {"changes": 18}


async def test_a_slow_reader_of_http_sse_costs_its_own_lanes(autojump_clock: MockClock) -> None:
    busy = Busy()
    async with visiting(busy.server, OLDEST, HttpSettings(stream_buffer=10_000)) as visitor:
        stream, place = await met(visitor)
        stream.stalled = True
        params = {"name": "hasty", "arguments": {"count": 50}}
        await say(visitor, place, visitor.request("tools/call", params, progressToken="t"))
        await busy.looked.wait()
        lanes = busy.seen[0].lanes
        assert lanes.logs.dropped > 30
        assert lanes.progress.merged > 30
        assert busy.seen[0].unread_bytes == len(stream.held) >= 10_000
        busy.more.set()
        stream.read_on()
        await wait_all_tasks_blocked()
        messages = [orjson.loads(event.data) for event in stream.now() if event.event == "message"]
        assert {"dropped": lanes.logs.dropped} in _said(messages)
        stream.leave()


async def test_what_waits_for_a_client_that_comes_back_is_in_the_store_and_nothing_is_lost(
    autojump_clock: MockClock,
) -> None:
    busy = Busy()
    busy.more.set()
    async with visiting(busy.server, LATEST_LEGACY) as visitor:
        await visitor.initialize()
        params = {"name": "hasty", "arguments": {"count": 20}}
        answer = await visitor.post(visitor.request("tools/call", params, progressToken="t"))
        await answer.begun()
        answer.leave()
        await wait_all_tasks_blocked()
        (last, *_) = [event.id for event in answer.now() if event.id]
        assert last is not None
        rest = await visitor.listen(last)
        await rest.done()
        assert _said(rest.messages) == [*(f"{n} {'x' * 1_000}" for n in range(20)), "more"]
        assert busy.seen[0].lanes.logs.dropped == 0
        assert rest.messages[-1]["result"]


# A reader that takes nothing


@asynccontextmanager
async def _listening(busy: Busy, settings: HttpSettings | None = None) -> AsyncIterator[Callable[[], HttpWire]]:
    """The real face behind the real listener's connections, in memory, where time is virtual."""
    async with http_application(busy.server, settings) as face, trio.open_nursery() as nursery:
        hosting = Hosting(face, HttpLimits(), nursery)

        def connect() -> HttpWire:
            ours, theirs = lockstep_stream_pair()
            nursery.start_soon(H1Connection(hosting, StreamWire(theirs), peer="192.0.2.1:7").run)
            return HttpWire(ours)

        yield connect
        nursery.cancel_scope.cancel()


def _call(visitor: Visitor, name: str, **arguments: Any) -> bytes:
    params = {"name": name, "arguments": arguments}
    return orjson.dumps(visitor.request("tools/call", params, progressToken="t"))


def _headers(revision: Revision, name: str, session: str | None = None) -> list[str]:
    lines = ["Accept: application/json, text/event-stream", "Content-Type: application/json"]
    if revision.version_header:
        lines.append(f"MCP-Protocol-Version: {revision.name}")
    if revision.modern:
        lines += ["Mcp-Method: tools/call", f"Mcp-Name: {name}"]
    return lines if session is None else [*lines, f"Mcp-Session-Id: {session}"]


class _NoFace:
    """A visitor needs one only to be visited."""


async def _begin_flood(client: HttpWire) -> None:
    """Call a tool of the modern era that says much, and read nothing."""
    await client.request("POST", "/mcp", *_headers(LATEST, "flood"), body=_flood())


def _flood(revision: Revision = LATEST) -> bytes:
    return _call(Visitor(_NoFace(), revision), "flood")


async def test_a_reader_that_takes_nothing_is_dropped_and_its_handler_learns_why(
    autojump_clock: MockClock, events: Callable[[], list[dict[str, Any]]]
) -> None:
    busy = Busy()
    async with _listening(busy) as connect:
        client = connect()
        await _begin_flood(client)
        await busy.ended.wait()
        assert busy.stopped == [(CancelReason.LIMIT, "the peer read nothing for 60 seconds")]
        assert 60 <= trio.current_time() <= 61
        (event,) = events()
        assert (event["event"], event["peer"], event["seconds"]) == ("peer_stalled", "192.0.2.1:7", 60)
        assert event["unread_bytes"] > 200_000


async def test_who_leaves_is_no_slow_reader(
    autojump_clock: MockClock, events: Callable[[], list[dict[str, Any]]]
) -> None:
    busy = Busy()
    async with _listening(busy) as connect:
        client = connect()
        await _begin_flood(client)
        await trio.sleep(10)
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert busy.stopped == [(CancelReason.DISCONNECTED, None)]
        assert not events()


async def test_before_2026_the_call_goes_on_without_its_reader(
    autojump_clock: MockClock, events: Callable[[], list[dict[str, Any]]]
) -> None:
    busy = Busy()
    async with _listening(busy) as connect:
        client = connect()
        visitor = Visitor(_NoFace(), LATEST_LEGACY)
        params = {
            "protocolVersion": LATEST_LEGACY.name,
            "capabilities": {},
            "clientInfo": {"name": "v", "version": "1"},
        }
        body = orjson.dumps(visitor.request("initialize", params))
        lines = _headers(LATEST_LEGACY, "")
        await client.request("POST", "/mcp", *lines[:2], body=body)
        answer = await client.answer("POST")
        assert answer.status == 200
        headers = _headers(LATEST_LEGACY, "", answer.headers["mcp-session-id"])
        await client.request("POST", "/mcp", *headers, body=_flood(LATEST_LEGACY))
        await trio.sleep(30)
        (running,) = busy.server.runs
        (session,) = running.sessions
        assert session.statistics().unread_bytes > 200_000
        await trio.sleep(31)
        assert len(events()) == 1
        assert not busy.stopped
        assert session.statistics().running == 1, "another connection may take its stream up"
        session.jobs.cancel_all(CancelReason.DRAIN)


# The same on both hosts, over real sockets


async def _post(place: Place) -> trio.SocketStream:
    wire = await place.connect()
    await wire.request("POST", "/mcp", *_headers(LATEST, "flood"), body=_flood())
    return wire.stream


async def _sse(place: Place) -> trio.SocketStream:
    stream = await place.connect()
    path = await stream.open_events()
    said = (
        initialize(OLDEST.name),
        notification("notifications/initialized"),
        _call(Visitor(_NoFace(), OLDEST), "flood"),
    )
    for body in said:
        async with place.wire() as posting:
            assert (await posting.fetch("POST", path, "Content-Type: application/json", body=body)).status == 202
    return stream.stream


async def _websocket(place: Place) -> trio.SocketStream:
    raw = await upgrade(await place.connect())
    await raw.say(message(_flood()))
    return raw.stream


@pytest.mark.parametrize("road", [_post, _sse, _websocket], ids=lambda road: road.__name__)
@pytest.mark.parametrize("software", ["own", "hypercorn"])
async def test_a_reader_that_takes_nothing_is_dropped_on_both_hosts(
    software: Any, road: Any, events: Callable[[], list[dict[str, Any]]], steady_clock: trio.abc.Clock
) -> None:
    # Under Hypercorn its limit counts for a WebSocket, too: only Hypercorn sees how far a message is.
    busy = Busy(stall_timeout=0.5)
    transport = "http on hypercorn" if software == "hypercorn" else "http"
    async with served(busy.server, transport, limits=HttpLimits(stall_timeout=0.5), grace=0.1) as place:
        stream = await road(place)
        with trio.fail_after(60):
            await busy.ended.wait()
        assert busy.stopped == [(CancelReason.LIMIT, "the peer read nothing for 0.5 seconds")]
        assert [event["event"] for event in events()] == ["peer_stalled"]
        await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("road", [_post, _websocket], ids=lambda road: road.__name__)
async def test_who_reads_slowly_keeps_its_connection(
    road: Any, events: Callable[[], list[dict[str, Any]]], steady_clock: trio.abc.Clock
) -> None:
    """The system reports room only when a third of its buffer is free, which takes such a reader longer than that."""
    busy = Busy(stall_timeout=0.3)
    async with served(busy.server, limits=HttpLimits(stall_timeout=0.3), grace=0.1) as place:
        stream = await road(place)
        began = trio.current_time()
        while trio.current_time() - began < 3:
            await trio.sleep(0.02)  # the peer is slow; nobody waits for anything here
            assert await stream.receive_some(16_384)
        assert not busy.stopped
        assert not events()
        await trio.aclose_forcefully(stream)
