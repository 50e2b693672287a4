"""What becomes of messages while the peer is slow, lane by lane, and of a peer that reads nothing at all.

docs/reference/lanes.md is the table these hold. Over HTTP see tests/transports/http/test_lanes.py.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.session.support import (
    Answers,
    Tools,
    Wire,
    agree,
    call,
    client_engine,
    modern_meta,
    served,
    server_engine,
)
from tests.transports.websocket_support import Meeting, listening
from tests.transports.websocket_support import connected as connected_websocket
from trimcp.channel import LANES, Kind, LaneCounts, MessageChannel, Outgoing, lane_of
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.drive import drive, driving
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.session.session import Session
from trimcp.session.statistics import Lane, Lanes, lanes_of
from trimcp.testing import connected
from trimcp.transports.memory import memory_channels
from trimcp.transports.stdio.streams import FdReceiver, FdSender, ThreadReceiver, ThreadSender
from trimcp.transports.stream import StreamChannel
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.frames import KeepAlive
from trimcp.wire.jsonrpc import encode_notification, encode_request
from trimcp.wire.revisions import LATEST_LEGACY, V2026_07_28, Revision
from trimcp.wire.tools import CallToolParams

SMALL = Limits(outbox_messages=4)
ERAS = pytest.mark.parametrize("revision", [LATEST_LEGACY, V2026_07_28])


def _said(messages: list[Any]) -> list[Any]:
    """What log messages say."""
    return [message["params"]["data"] for message in messages if message.get("method") == "notifications/message"]


def _progress(messages: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for message in messages:
        if message.get("method") == "notifications/progress":
            params = message["params"]
            found.setdefault(params["progressToken"], []).append(params["progress"])
    return found


# Results


async def test_results_wait_and_none_is_lost() -> None:
    async def run(ctx: Any) -> str:
        return "x" * 1_000

    async with served({"run": run}, limits=SMALL) as (wire, session):
        wire.hold()
        wire.feed(*(call(n) for n in range(100)))
        await wait_all_tasks_blocked()
        replies = session.statistics().lanes.replies
        assert 4 <= replies.messages < 100
        assert replies.bytes > 4_000
        assert (replies.merged, replies.dropped) == (0, 0)
        wire.release()
        await wait_all_tasks_blocked()
        assert sorted(message["id"] for message in wire.take()) == list(range(100))


# Progress


@ERAS
async def test_progress_waits_and_without_waiting_the_latest_is_kept(revision: Revision) -> None:
    async def patient(ctx: Any) -> str:
        for n in range(50):
            await ctx.report_progress(n)
        return "x"

    async def hasty(ctx: Any) -> str:
        for n in range(50):
            ctx.report_progress_nowait(n)
        return "x"

    async with served({"patient": patient, "hasty": hasty}, revision, limits=SMALL) as (wire, session):
        wire.hold()
        wire.feed(call(1, "patient", token="a", revision=revision))
        await wait_all_tasks_blocked()
        assert session.statistics().lanes.progress.messages == 4
        wire.feed(call(2, "hasty", token="b", revision=revision))
        await wait_all_tasks_blocked()
        stats = session.statistics()
        assert (stats.lanes.progress.merged, stats.merged) == (49, 49)
        assert (stats.lanes.progress.dropped, stats.dropped) == (0, 0)
        assert stats.outbox == sum(getattr(stats.lanes, name).messages for name in LANES)
        assert stats.outbox_bytes == sum(getattr(stats.lanes, name).bytes for name in LANES)
        wire.release()
        await wait_all_tasks_blocked()
        assert _progress(wire.take()) == {"a": list(range(50)), "b": [49]}


async def test_progress_its_reader_leaves_lying_gives_way_and_is_counted() -> None:
    server: Server[None] = Server("s")

    @server.tool
    async def count(*, ctx: Context) -> str:
        for n in range(20):
            await ctx.report_progress(n)
        return "counted"

    async with connected(server, Client("c", limits=Limits(progress_kept=5))) as session:
        async with session.calling("count") as under_way:
            await under_way.result()
            assert [step.progress async for step in under_way.progress] == list(range(15, 20))
        assert session.statistics().lanes.progress == Lane(dropped=15)


# Logs


@ERAS
async def test_a_log_waits_and_without_waiting_is_dropped_and_told_of(revision: Revision) -> None:
    gate = trio.Event()

    async def patient(ctx: Any) -> str:
        for n in range(10):
            await ctx.log("info", n)
        return "x"

    async def hasty(ctx: Any) -> str:
        for n in range(10):
            ctx.log_nowait("info", n)
        await gate.wait()
        ctx.log_nowait("info", "after")
        return "x"

    def ask(id: int, name: str) -> bytes:
        meta = modern_meta() | {"io.modelcontextprotocol/logLevel": "info"} if revision.modern else {}
        return encode_request(id, "tools/call", {"name": name, "arguments": {}, "_meta": meta})

    async with served({"patient": patient, "hasty": hasty}, revision, limits=SMALL) as (wire, session):
        wire.hold()
        wire.feed(ask(1, "patient"))
        await wait_all_tasks_blocked()
        assert session.statistics().lanes.logs.messages == 4
        wire.release()
        await wait_all_tasks_blocked()
        assert _said(wire.take()) == list(range(10))
        wire.hold()
        wire.feed(ask(2, "hasty"))
        await wait_all_tasks_blocked()
        lanes = session.statistics().lanes
        assert (lanes.logs.dropped, lanes.progress.dropped, lanes.others.dropped) == (6, 0, 0)
        wire.release()
        await wait_all_tasks_blocked()
        gate.set()
        await wait_all_tasks_blocked()
        sent = wire.take()
        assert _said(sent) == [0, 1, 2, 3, {"dropped": 6}, "after"]
        notice = next(m["params"] for m in sent if m.get("method") and m["params"]["data"] == {"dropped": 6})
        assert (notice["level"], notice["logger"]) == ("warning", "trimcp")


@ERAS
async def test_how_many_logs_were_dropped_is_told_before_the_result_at_the_latest(revision: Revision) -> None:
    async def run(ctx: Any) -> str:
        for n in range(10):
            ctx.log_nowait("info", n)
        return "x"

    meta = modern_meta() | {"io.modelcontextprotocol/logLevel": "info"} if revision.modern else {}
    async with served({"run": run}, revision, limits=SMALL) as (wire, session):
        wire.hold()
        wire.feed(encode_request(1, "tools/call", {"name": "run", "arguments": {}, "_meta": meta}))
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        sent = wire.take()
        assert _said(sent) == [0, 1, 2, 3, {"dropped": 6}]
        assert sent[-1]["id"] == 1
        assert session.counts.untold == 0


async def test_who_wants_only_errors_is_told_of_none_and_of_those_that_count_later() -> None:
    async def run(ctx: Any) -> str:
        for n in range(10):
            ctx.log_nowait("error", n)
        return "x"

    async with served({"run": run}, limits=SMALL) as (wire, session):
        session.engine.legacy.log_level = "error"
        wire.hold()
        wire.feed(call(1))
        await wait_all_tasks_blocked()
        wire.release()
        await wait_all_tasks_blocked()
        assert _said(wire.take()) == [0, 1, 2, 3]
        session.engine.legacy.log_level = "debug"
        wire.feed(call(2))
        await wait_all_tasks_blocked()
        assert {"dropped": 6} in _said(wire.take())


async def test_logs_outside_a_request_are_dropped_counted_and_told_of(steady_clock: trio.abc.Clock) -> None:
    server: Server[None] = Server("s", limits=SMALL)
    left, right = memory_channels(framed=True)
    async with server.running() as running, trio.open_nursery() as nursery:
        nursery.start_soon(running.serve, right)
        params = {
            "protocolVersion": LATEST_LEGACY.name,
            "capabilities": {},
            "clientInfo": {"name": "c", "version": "1"},
        }
        await left.send([Outgoing(encode_request(1, "initialize", params), Kind.REQUEST, 1)])
        await left.receive()
        await left.send([Outgoing(encode_notification("notifications/initialized", None), Kind.NOTIFICATION)])
        await wait_all_tasks_blocked()
        (session,) = running.sessions
        running.log_to_all("info", "x" * 100_000)  # more than the pipe holds: the writer is stuck with it
        await wait_all_tasks_blocked()
        for n in range(10):
            running.log_to_all("info", n)
        assert session.statistics().lanes.logs == Lane(4, session.statistics().outbox_bytes, 0, 6)
        assert session.statistics().unread_bytes > 100_000
        heard: list[Any] = []
        while 3 not in heard:
            heard += [incoming.message.params["data"] for incoming in await left.receive()]
        await wait_all_tasks_blocked()
        running.log_to_all("info", "after")
        while "after" not in heard:
            heard += [incoming.message.params["data"] for incoming in await left.receive()]
        assert heard[1:] == [0, 1, 2, 3, {"dropped": 6}, "after"]
        await left.aclose()
        with trio.fail_after(5):
            while running.sessions:
                await trio.lowlevel.checkpoint()
        assert running.counts.dropped == {"logs": 6}, "what a session counted is the server's when it has ended"


async def test_logs_their_handler_leaves_lying_give_way_and_are_counted(steady_clock: trio.abc.Clock) -> None:
    server: Server[None] = Server("s")
    client = Client("c", limits=Limits(logs_kept=5))
    gate = trio.Event()

    @client.logging
    async def log(params: Any) -> None:
        await gate.wait()

    @server.tool
    async def talk(*, ctx: Context) -> str:
        for n in range(20):
            await ctx.info(n)
        return "x"

    async with connected(server, client) as session:
        with trio.move_on_after(5) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call_tool, "talk")
                await wait_all_tasks_blocked()
                assert session.statistics().lanes.logs == Lane(dropped=14), "one is with the handler, five are kept"
                gate.set()
        assert not scope.cancelled_caught


# Changes


async def test_changes_collapse() -> None:
    async with served({}, limits=SMALL) as (wire, session):
        wire.hold()
        wire.feed(encode_request("p", "ping", None))
        await wait_all_tasks_blocked()
        from trimcp.wire.resources import ResourceUpdatedParams

        for n in range(100):
            session.notify_latest("notifications/tools/list_changed")
            session.notify_latest(
                "notifications/resources/updated", ResourceUpdatedParams(uri=f"x:{n % 5}"), key=f"x:{n % 5}"
            )
        lanes = session.statistics().lanes
        assert (lanes.changes.messages, lanes.changes.merged, lanes.changes.dropped) == (6, 194, 0)
        wire.release()
        await wait_all_tasks_blocked()
        uris = [m["params"]["uri"] for m in wire.take() if m.get("method") == "notifications/resources/updated"]
        assert uris == [f"x:{n}" for n in range(5)]


# Requests of ours, and what never waits


async def test_a_request_that_was_not_written_is_withdrawn_and_a_cancel_never_waits() -> None:
    wire = Wire()
    session = Session(client_engine(), Answers(), SMALL)
    agree(server_engine(), session.engine, LATEST_LEGACY)
    async with driving(session, wire):
        wire.hold()
        written = await session.start_call("tools/call", CallToolParams("run", {}))
        await wait_all_tasks_blocked()
        waiting = [await session.start_call("tools/call", CallToolParams("run", {})) for _ in range(4)]
        assert session.statistics().lanes.requests.messages == 4
        session.abandon(waiting[0], "given up")
        session.abandon(written, "given up")
        lanes = session.statistics().lanes
        assert (lanes.requests.messages, lanes.others.messages) == (3, 1)
        for n in range(100):
            session.abandon(waiting[n % 4], "given up")
        assert session.statistics().lanes.others.messages == 1
        wire.release()


# Counting


def test_each_message_has_its_lane() -> None:
    def lane(method: str) -> str:
        return lane_of(Outgoing(encode_notification(method, {"x": 1}), Kind.NOTIFICATION))

    assert lane("notifications/progress") == "progress"
    assert lane("notifications/message") == "logs"
    assert {lane(f"notifications/{what}/list_changed") for what in ("tools", "prompts", "resources")} == {"changes"}
    assert lane("notifications/resources/updated") == "changes"
    assert lane("notifications/elicitation/complete") == "others"
    text = encode_notification("x/y", {"is": "notifications/progress", "and": "notifications/message"})
    assert lane_of(Outgoing(b" " * 90 + text, Kind.NOTIFICATION)) == "others"
    assert [lane_of(Outgoing(b"", kind)) for kind in Kind] == ["requests", "replies", "others", "others"]


def test_lanes_of_two_sessions_are_added() -> None:
    one, other = LaneCounts({"progress": 1}, {"logs": 2}), LaneCounts({"progress": 3}, {"others": 4})
    both = lanes_of(one) + lanes_of(other, [Outgoing(b"12345", Kind.REPLY, 1)])
    assert both == Lanes(replies=Lane(1, 5), progress=Lane(merged=4), logs=Lane(dropped=2), others=Lane(dropped=4))
    assert (both.merged, both.dropped) == (4, 6)
    one.add(other)
    assert (one.merged, one.dropped) == ({"progress": 4}, {"logs": 2, "others": 4})


# A peer that reads nothing


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The security events there were."""
    caplog.set_level(logging.WARNING)
    return lambda: [vars(record) for record in caplog.records if record.levelno >= logging.WARNING]


@attrs.define(eq=False)
class _Sleeper:
    """A tool that answers with much or sleeps, and what it was told when it was stopped."""

    size: int = 10_000_000
    stopped: list[tuple[CancelReason | None, str | None, float]] = attrs.field(factory=list)

    @property
    def tools(self) -> dict[str, Any]:
        return {"large": self.large, "sleep": self.sleep}

    async def large(self, ctx: Any) -> str:
        return "x" * self.size

    async def sleep(self, ctx: Any) -> str:
        try:
            await trio.sleep_forever()
        finally:
            self.stopped.append((ctx.cancel_reason, ctx.cancel_detail, trio.current_time()))
        raise AssertionError


async def test_a_peer_that_reads_nothing_is_dropped_with_the_reason(
    autojump_clock: MockClock, events: Callable[[], list[dict[str, Any]]]
) -> None:
    sleeper = _Sleeper()
    wire = Wire()
    session = Session(server_engine(), Tools(sleeper.tools), Limits())
    agree(session.engine, client_engine(), LATEST_LEGACY)
    wire.hold()
    wire.feed(call(1, "large"), call(2, "sleep"))
    with trio.fail_after(61):
        await drive(session, wire)
    why = "the peer read nothing for 60 seconds"
    assert sleeper.stopped == [(CancelReason.LIMIT, why, 60.0)]
    assert str(session.lost) == why
    assert wire.closed
    assert trio.current_time() == 60.0, "nobody waits for what nobody reads"
    (event,) = events()
    assert (event["event"], event["why"], event["requests"]) == ("peer_stalled", why, 1)
    assert event["unread_bytes"] > 10_000_000


async def test_a_handler_that_waits_for_room_learns_why(autojump_clock: MockClock) -> None:
    reasons: list[Any] = []

    async def report(ctx: Any) -> str:
        try:
            for n in range(100):
                await ctx.report_progress(n)
        finally:
            reasons.append(ctx.cancel_reason)
        return "x"

    async with served({"run": report}, limits=SMALL) as (wire, session):
        wire.hold()
        wire.feed(call(1, token="t"))
        await session.closed.wait()
        await wait_all_tasks_blocked()
        assert reasons == [CancelReason.LIMIT]


async def test_a_client_drops_a_server_that_reads_nothing(autojump_clock: MockClock) -> None:
    wire = Wire()
    session = Session(client_engine(), Answers(), Limits(stall_timeout=5))
    agree(server_engine(), session.engine, LATEST_LEGACY)
    async with driving(session, wire):
        wire.hold()
        with pytest.raises(ConnectionLost, match="the peer read nothing for 5 seconds"):
            await session.call("tools/call", CallToolParams("run", {}))
        assert trio.current_time() == 5
        with pytest.raises(ConnectionLost, match="read nothing"):
            await session.call("tools/call", CallToolParams("run", {}))
        assert session.closed.is_set()


async def test_who_reads_a_little_is_kept_and_who_stops_is_not(autojump_clock: MockClock) -> None:
    """64 KiB are in the pipe; a chunk of 8 KiB every 50 seconds is slow, but it is not nothing."""
    ours, theirs = memory_channels(framed=True)
    sleeper = _Sleeper(size=200_000)
    session = Session(server_engine(), Tools(sleeper.tools), Limits())
    agree(session.engine, client_engine(), LATEST_LEGACY)
    chunks = theirs._receiver._chunks
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, ours)
        await theirs.send([Outgoing(call(1, "large"), Kind.REQUEST, 1), Outgoing(call(2, "sleep"), Kind.REQUEST, 2)])
        await wait_all_tasks_blocked()
        for _ in range(8):
            await trio.sleep(50)
            assert len(await chunks.receive()) == 8192
            assert not session.closed.is_set()
        stopped_at = trio.current_time()
        await session.closed.wait()
        assert 60 <= trio.current_time() - stopped_at <= 75
        await theirs.aclose()


async def test_nobody_is_dropped_for_having_nothing_to_read(autojump_clock: MockClock) -> None:
    async def run(ctx: Any) -> str:
        return "x"

    async with served({"run": run}) as (wire, session):
        for n in range(20):
            wire.feed(call(n))
            await trio.sleep(7 * n)
        await trio.sleep(10_000)
        assert not session.closed.is_set()
        assert len(wire.take()) == 20


async def test_many_writes_that_each_take_their_time_are_no_stall(autojump_clock: MockClock) -> None:
    class Slow(Wire):
        async def send(self, batch: Sequence[Outgoing]) -> None:
            await trio.sleep(40)
            await super().send(batch)

    async def run(ctx: Any) -> str:
        return "x"

    wire = Slow()
    session = Session(server_engine(), Tools({"run": run}), Limits())
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        for n in range(20):
            wire.feed(call(n))
            await trio.sleep(39)
        await trio.sleep(200)
        assert not session.closed.is_set()
        assert len(wire.take()) == 20
        session.close()


async def test_without_a_limit_nobody_is_dropped(autojump_clock: MockClock) -> None:
    sleeper = _Sleeper()
    async with served(sleeper.tools, limits=Limits(stall_timeout=math.inf)) as (wire, session):
        wire.hold()
        wire.feed(call(1, "large"))
        await trio.sleep(80_000)
        assert not session.closed.is_set()


@pytest.mark.parametrize("half_open", [True, False])
async def test_who_closed_its_side_and_reads_nothing_does_not_stay_for_a_long_grace(
    half_open: bool, autojump_clock: MockClock
) -> None:
    sleeper = _Sleeper()
    wire = Wire()
    wire.half_open = half_open
    session = Session(server_engine(), Tools(sleeper.tools), Limits(eof_grace=math.inf))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    wire.hold()
    wire.feed(call(1, "large"), call(2, "sleep"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        await wait_all_tasks_blocked()
        wire.leave()
    ((reason, _, when),) = sleeper.stopped
    assert (reason, when) == ((CancelReason.LIMIT, 60) if half_open else (CancelReason.DISCONNECTED, 0))
    assert trio.current_time() == (60 if half_open else 2), "drain_timeout bounds what the writer has left"


async def test_a_close_meanwhile_is_bounded_as_ever(autojump_clock: MockClock) -> None:
    sleeper = _Sleeper()
    async with served(sleeper.tools) as (wire, session):
        wire.hold()
        wire.feed(call(1, "large"), call(2, "sleep"))
        await trio.sleep(59.5)
        wire.release = lambda: None
        session.close()
    assert trio.current_time() == 61.5
    assert sleeper.stopped[0][0] is CancelReason.DRAIN


async def test_a_channel_that_gave_the_peer_up_itself_says_so(
    autojump_clock: MockClock, events: Callable[[], list[dict[str, Any]]]
) -> None:
    class Judging(Wire):
        def write_progress(self) -> Hashable:
            return object()

        def close_reason(self) -> str:
            return "the peer read nothing for 99 seconds"

    sleeper = _Sleeper()
    wire = Judging()
    session = Session(server_engine(), Tools(sleeper.tools), Limits())
    agree(session.engine, client_engine(), LATEST_LEGACY)
    wire.hold()
    wire.feed(call(1, "large"), call(2, "sleep"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        await trio.sleep(500)
        assert not session.closed.is_set(), "its own judgement counts"
        wire.too_slow, wire.broken = True, True
        wire.leave()
        wire.release()
    assert [stopped[:2] for stopped in sleeper.stopped] == [
        (CancelReason.LIMIT, "the peer read nothing for 99 seconds")
    ]
    assert len(events()) == 1


async def test_a_direct_peer_cannot_read_slowly(autojump_clock: MockClock) -> None:
    """Whoever sends delivers; what a handler leaves lying is bounded where it lies."""
    server: Server[None] = Server("s")

    @server.tool
    async def talk(*, ctx: Context) -> str:
        for n in range(2_000):
            ctx.log_nowait("info", n)
            ctx.report_progress_nowait(n)
        return "x"

    client = Client("c")

    @client.logging
    async def log(params: Any) -> None:
        await trio.sleep(1_000)

    async with connected(server, client) as session:
        await wait_all_tasks_blocked()  # whoever hears logs waits for the first
        await session.call_tool("talk")
        peer = session.peer.statistics()
        assert (peer.outbox, peer.unread_bytes, peer.dropped) == (0, 0, 0)
        assert session.statistics().lanes.logs.dropped == 999, "one is heard, and a thousand wait"


# The same over real descriptors and sockets


@asynccontextmanager
async def _pipes() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    (a, b), (c, d) = os.pipe(), os.pipe()
    yield StreamChannel(FdReceiver(a), FdSender(d)), StreamChannel(FdReceiver(c), FdSender(b))


@asynccontextmanager
async def _threads() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    (a, b), (c, d) = os.pipe(), os.pipe()
    yield StreamChannel(ThreadReceiver(a), ThreadSender(d)), StreamChannel(FdReceiver(c), FdSender(b))


@asynccontextmanager
async def _sockets() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    ends = [trio.SocketStream(trio.socket.from_stdlib_socket(end)) for end in socket.socketpair()]
    left, right = (StreamChannel(end, end) for end in ends)
    yield left, right


@asynccontextmanager
async def _memory() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    yield memory_channels(framed=True)


@asynccontextmanager
async def _tcp() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    near = await trio.open_tcp_stream(*listener.socket.getsockname())
    far = await listener.accept()
    await listener.aclose()
    yield StreamChannel(near, near), StreamChannel(far, far)


@asynccontextmanager
async def _websocket_server() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    async with connected_websocket() as (client, server):
        yield server, client


@asynccontextmanager
async def _websocket_client() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    async with connected_websocket() as (client, server):
        yield client, server


_Pair = Callable[[], AbstractAsyncContextManager[tuple[MessageChannel, MessageChannel]]]
PAIRS = pytest.mark.parametrize(
    "pair", [_memory, _pipes, _threads, _sockets, _tcp, _websocket_server, _websocket_client], ids=lambda f: f.__name__
)


@PAIRS
async def test_who_reads_nothing_is_dropped_over(pair: _Pair, steady_clock: trio.abc.Clock) -> None:
    sleeper = _Sleeper(size=1_000_000)
    session = Session(server_engine(), Tools(sleeper.tools), Limits(stall_timeout=0.4))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with pair() as (ours, theirs):
        await theirs.send([Outgoing(call(n, "large" if n else "sleep"), Kind.REQUEST, n) for n in range(20)])
        with trio.fail_after(60):
            await drive(session, ours)
        assert [stopped[:2] for stopped in sleeper.stopped] == [
            (CancelReason.LIMIT, "the peer read nothing for 0.4 seconds")
        ]
        await trio.aclose_forcefully(theirs)


class _Slow(trio.abc.ReceiveStream):
    """A stream of which little is read at a time."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.sleep(0.02)  # the peer is slow; nobody waits for anything here
        data: bytes = await self._stream.receive_some(max_bytes)
        return data

    async def aclose(self) -> None:
        await self._stream.aclose()


@PAIRS
async def test_who_reads_slowly_is_kept_over(pair: _Pair, steady_clock: trio.abc.Clock) -> None:
    """Whatever the system keeps to itself, it shows that something is taken."""
    many = 1 if pair is _threads else 10  # a thread is in one system call for all of a message, unless told otherwise
    sleeper = _Sleeper(size=(2_500_000 if pair in (_memory, _pipes, _threads) else 8_000_000) // many)
    session = Session(server_engine(), Tools(sleeper.tools), Limits(stall_timeout=0.3))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    async with pair() as (ours, theirs), trio.open_nursery() as nursery:
        end: Any = theirs
        if isinstance(theirs, StreamChannel):
            end._receiver = _Slow(end._receiver)
        else:
            end._gated._stream = _Slow(end._gated._stream)
        nursery.start_soon(drive, session, ours)
        await theirs.send([Outgoing(call(n, "large" if n else "sleep"), Kind.REQUEST, n) for n in range(many + 1)])
        began = trio.current_time()
        answers = 0
        with trio.fail_after(60):
            while answers < many:
                answers += len(await theirs.receive())
        assert trio.current_time() - began > 0.6, "longer than anybody may read nothing"
        assert not session.closed.is_set()
        assert not sleeper.stopped
        session.close()
        await trio.aclose_forcefully(theirs)


async def test_a_websocket_that_reads_nothing_is_no_silent_one(steady_clock: trio.abc.Clock) -> None:
    """It answers no ping either; what it is told for is what the session waits for."""
    sleeper = _Sleeper(size=1_000_000)
    session = Session(server_engine(), Tools(sleeper.tools), Limits(stall_timeout=1.0))
    agree(session.engine, client_engine(), LATEST_LEGACY)
    meeting = Meeting()
    async with listening(meeting.upgrade(), KeepAlive(interval=0.3, dead_after=0.9)) as port:
        async with WebSocketServer(f"ws://127.0.0.1:{port}/ws").connect() as theirs:
            ours = await meeting.channel()
            calls = [Outgoing(call(n, "large" if n else "sleep"), Kind.REQUEST, n) for n in range(20)]
            await theirs.send(calls)
            with trio.fail_after(60):
                await drive(session, ours)
            assert str(session.lost) == "the peer read nothing for 1 seconds"
            await trio.aclose_forcefully(theirs)
        meeting.done.set()
