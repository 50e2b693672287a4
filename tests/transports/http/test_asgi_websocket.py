"""WebSockets under an ASGI server made by hand: the contract of channels, closes, refusals, and who waits for whom."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.asgi_support import (
    TEXT,
    Call,
    DummyFace,
    DummyHandler,
    app_of,
    calling,
    upgrade,
    websocket_scope,
)
from trimcp.budget import LARGE, Budget
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.testing.contract import check_channel
from trimcp.transports.http.asgi.request import PEER_CLOSED
from trimcp.transports.http.asgi.websocket import AsgiWebSocket
from trimcp.transports.http.interfaces import HttpResponse
from trimcp.wire.jsonrpc import Malformed, Request, encode_request, parse


@asynccontextmanager
async def connected(serve: Any = None, **options: Any) -> AsyncIterator[tuple[Call, DummyFace]]:
    """A server's end of one WebSocket, accepted."""
    face = DummyFace()
    face["/ws"] = upgrade(**options) if serve is None else upgrade(serve, **options)
    async with app_of(face) as app, calling(app, websocket_scope("/ws")) as call:
        call.put.send_nowait({"type": "websocket.connect"})
        await wait_all_tasks_blocked()
        yield call, face


def say(call: Call, text: str) -> None:
    call.put.send_nowait({"type": "websocket.receive", "text": text, "bytes": None})


def request(n: int, text: str = "") -> Outgoing:
    return Outgoing(encode_request(n, "check", {"text": text}), Kind.REQUEST, n)


async def test_messages_are_echoed() -> None:
    async with connected() as (call, face):
        assert call.events == [{"type": "websocket.accept", "subprotocol": "mcp", "headers": []}]
        for n in range(3):
            say(call, request(n).data.decode())
            await wait_all_tasks_blocked()
        call.leave()
    size = len(request(0).data)
    answers = [f'{{"jsonrpc":"2.0","id":{n},"result":{{"size":{size}}}}}' for n in range(3)]
    assert [event["text"] for event in call.events[1:]] == answers
    assert face.ended == [("/ws", 101, sum(map(len, answers)))]
    (head,) = face.heads
    assert (head.websocket, head.method) == (True, "GET")


async def test_messages_say_who_sent_them() -> None:
    arrived: list[Incoming] = []

    async def serve(channel: MessageChannel) -> None:
        assert not channel.half_open
        arrived.extend(await channel.receive())

    async with connected(serve, principal="ada", headers={"x-a": "1"}) as (call, _):
        say(call, '{"jsonrpc":"2.0","id":1,"method":"é"}')
        await wait_all_tasks_blocked()
        call.leave()
    (incoming,) = arrived
    assert incoming.message == Request(1, "é")
    assert (incoming.size, incoming.principal, incoming.headers) == (38, "ada", {"x-a": "1"})


async def test_a_lone_surrogate_is_a_malformed_message() -> None:
    arrived: list[Incoming] = []

    async def serve(channel: MessageChannel) -> None:
        arrived.extend(await channel.receive())

    async with connected(serve) as (call, _):
        say(call, '{"jsonrpc":"2.0","id":7,"method":"\ud800"}')
        await wait_all_tasks_blocked()
        call.leave()
    message = arrived[0].message
    assert isinstance(message, Malformed)
    assert message.id == 7


@pytest.mark.parametrize(
    ("event", "code", "why"),
    [
        ({"bytes": b"{}", "text": None}, 1003, "binary"),
        ({"text": "é" * 501}, 1009, "larger than 1000 bytes"),
    ],
)
async def test_what_is_no_message_ends_the_connection(event: dict[str, Any], code: int, why: str) -> None:
    caught: list[str] = []

    async def serve(channel: MessageChannel) -> None:
        async with channel:
            with pytest.raises(trio.BrokenResourceError, match=why):
                await channel.receive()
            with pytest.raises(trio.BrokenResourceError, match=why):
                await channel.send([request(1)])
            caught.append(why)

    async with connected(serve) as (call, _):
        call.put.send_nowait({"type": "websocket.receive", **event})
        call.put.send_nowait({"type": "websocket.receive", "bytes": b"{}"})
        say(call, "x" * 2000)
        await wait_all_tasks_blocked()
        assert call.events[1:] == [{"type": "websocket.close", "code": code}]
        assert not call.over.is_set(), "the peer has to see the close before the connection ends"
        call.leave()
    assert caught == [why]


@pytest.mark.parametrize("extension", [False, True])
async def test_that_the_peer_is_gone_is_known_before_all_was_received_where_the_server_says_so(extension: bool) -> None:
    told, known, scope = trio.Event(), trio.Event(), trio.CancelScope()

    async def serve(channel: MessageChannel) -> None:
        with scope:
            await channel.wait_peer_closed()
            known.set()
            await trio.sleep_forever()

    face = DummyFace()
    face["/ws"] = upgrade(serve)
    extensions: dict[str, Any] = {PEER_CLOSED: told.wait} if extension else {}
    async with app_of(face) as app, calling(app, websocket_scope("/ws", extensions=extensions)) as call:
        call.put.send_nowait({"type": "websocket.connect"})
        say(call, "1")
        await wait_all_tasks_blocked()
        told.set()
        await wait_all_tasks_blocked()
        assert known.is_set() is extension
        scope.cancel()
        call.leave()


async def test_that_the_peer_is_gone_is_known_once_it_is_received() -> None:
    known = trio.Event()

    async def serve(channel: MessageChannel) -> None:
        await channel.wait_peer_closed()
        known.set()

    async with connected(serve) as (call, _):
        assert not known.is_set()
        call.leave()
        await known.wait()


async def test_a_message_of_the_largest_size_is_taken() -> None:
    async with connected() as (call, _):
        text = request(1).data.decode()
        say(call, text + " " * (1000 - len(text)))
        await wait_all_tasks_blocked()
        assert call.events[1:] == [
            {"type": "websocket.send", "text": '{"jsonrpc":"2.0","id":1,"result":{"size":1000}}'}
        ]
        call.leave()


async def test_our_close_comes_after_what_was_sent(steady_clock: trio.abc.Clock) -> None:
    async def serve(channel: MessageChannel) -> None:
        async with channel:
            await channel.send([request(1), request(2)])

    async with connected(serve) as (call, _):
        kinds = [event["type"] for event in call.events]
        assert kinds == ["websocket.accept", "websocket.send", "websocket.send", "websocket.close"]
        assert call.events[-1]["code"] == 1000
        call.leave()
        with trio.fail_after(1):
            await call.over.wait()


async def test_a_session_that_forgets_to_close_is_closed() -> None:
    async def serve(channel: MessageChannel) -> None:
        await channel.send([request(1)])

    async with connected(serve) as (call, _):
        assert call.events[-1] == {"type": "websocket.close", "code": 1000}
        call.leave()


async def test_a_peer_that_does_not_answer_our_close_is_not_waited_for(autojump_clock: object) -> None:
    async def serve(channel: MessageChannel) -> None:
        await channel.aclose()

    async with connected(serve) as (call, _):
        began = trio.current_time()
        await call.over.wait()
        assert trio.current_time() - began == pytest.approx(2, abs=0.01)


@asynccontextmanager
async def stuck(serve: Any) -> AsyncIterator[Call]:
    """A WebSocket on which the server sends, and whose peer has stopped reading."""
    face = DummyFace()
    face["/ws"] = upgrade(serve)
    async with app_of(face) as app, calling(app, websocket_scope("/ws")) as call:
        call.put.send_nowait({"type": "websocket.connect"})
        while len(call.events) < 5:
            await trio.lowlevel.checkpoint()
        call.stalled = True
        await wait_all_tasks_blocked()
        yield call


async def test_a_session_can_be_cancelled_whatever_the_server_holds(steady_clock: trio.abc.Clock) -> None:
    """Its writer is stuck with a peer that does not read; the call stays until the server lets go."""
    cancelled, scope = trio.Event(), trio.CancelScope()

    async def serve(channel: MessageChannel) -> None:
        with scope:
            while True:
                await channel.send([request(1)])
        cancelled.set()

    async with stuck(serve) as call:
        scope.cancel()
        with trio.fail_after(1):
            await cancelled.wait()
        assert not call.over.is_set()
        call.leave()
        call.read_on()


async def test_a_peer_that_leaves_while_the_server_holds_a_message_breaks_the_channel(
    steady_clock: trio.abc.Clock,
) -> None:
    broken = trio.Event()

    async def serve(channel: MessageChannel) -> None:
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await channel.send([request(1)])
        assert channel.close_reason() == "the WebSocket was closed (1006)"
        broken.set()
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()

    async with stuck(serve) as call:
        call.leave()
        with trio.fail_after(1):
            await broken.wait()
        call.read_on()
    assert call.events[-1]["type"] == "websocket.send", "nobody is there for a close"


@pytest.mark.parametrize("found", [HttpResponse(401, (*TEXT, ("WWW-Authenticate", "Bearer")), b"who?"), None])
@pytest.mark.parametrize("extension", [True, False])
async def test_a_refusal(found: HttpResponse | None, extension: bool) -> None:
    face = DummyFace()
    if found is None:
        face["/ws"] = DummyHandler()
    else:
        face["/ws"] = found
    status, body = (404, b"there is no WebSocket here\n") if found is None else (401, b"who?")
    scope = websocket_scope("/ws", **({} if extension else {"extensions": None}))
    async with app_of(face) as app, calling(app, scope) as call:
        call.put.send_nowait({"type": "websocket.connect"})
    if extension:
        start, content = call.events
        assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
        assert (b"content-length", b"%d" % len(body)) in start["headers"]
        assert content == {"type": "websocket.http.response.body", "body": body, "more_body": False}
        assert face.ended == [("/ws", status, len(body))]
    else:
        assert call.events == [{"type": "websocket.close", "code": 1000}]
        assert face.ended == [("/ws", 403, 0)]


async def test_a_peer_that_leaves_before_the_answer() -> None:
    face = DummyFace()
    face["/ws"] = upgrade()
    async with app_of(face) as app, calling(app, websocket_scope("/ws")) as call:
        call.leave()
    assert call.events == []
    assert face.ended == [("/ws", 0, 0)]


# The contract


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    """Two channels, each under a server, and the servers connected by a wire that holds a few messages."""
    ends = [AsgiWebSocket(10_000_000), AsgiWebSocket(10_000_000)]
    wires = [trio.open_memory_channel[dict[str, Any]](4) for _ in ends]

    async def serve(here: int) -> None:
        there = wires[1 - here][0]

        async def send(event: Any) -> None:
            if event["type"] == "websocket.close":
                await there.send({"type": "websocket.disconnect", "code": 1000})
            else:
                await there.send({"type": "websocket.receive", "text": event["text"]})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends[here].pump_in, wires[here][1].receive)
            await ends[here].pump_out(send)
            # A close on which the peer did not agree: its server tells it.
            await wires[here][0].send({"type": "websocket.disconnect", "code": 1000})

    async with trio.open_nursery() as nursery:
        for here in range(2):
            nursery.start_soon(serve, here)
        yield ends[0], ends[1]
        nursery.cancel_scope.cancel()


async def test_whoever_holds_too_much_is_cut_off_where_the_server_can() -> None:
    """Hypercorn keeps what it is still to send, however long the peer does not read it."""
    cut: list[str] = []
    channel = AsgiWebSocket(1_000, cut=lambda: cut.append("cut"))
    assert channel.at_rest
    channel.evict("it held too much")
    assert (cut, channel.close_reason()) == (["cut"], "it held too much")
    AsgiWebSocket(1_000).evict("nobody can")


async def test_large_messages_are_parsed_in_turn(mock_clock: trio.testing.MockClock) -> None:
    """As POSTs are: many that are whole at once must not be one long step of the loop."""
    holding = Budget().holding("a")
    parsed = 0

    def read(data: bytes) -> Any:
        nonlocal parsed
        mock_clock.jump(0.01)
        parsed += 1
        return parse(data)

    channels = [AsgiWebSocket(1 << 20, read=read) for _ in range(4)]
    most = turns = 0
    async with trio.open_nursery() as nursery:
        for channel in channels:
            channel.holding = holding
            nursery.start_soon(channel.receive)
            nursery.start_soon(channel._take, {"text": "x" * LARGE})
        while parsed < len(channels):
            before, turns = parsed, turns + 1
            await trio.lowlevel.checkpoint()
            most = max(most, parsed - before)
    assert most == 1
    assert turns > 2 * len(channels)
    assert not holding.held


async def test_contract() -> None:
    await check_channel(linked)
