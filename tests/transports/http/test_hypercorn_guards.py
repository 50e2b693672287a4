"""Hypercorn's known faults: each shows without its guard, and does not with it."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config
from hypercorn.protocol.ws_stream import FrameTooLargeError, WebsocketBuffer
from trio.testing import wait_all_tasks_blocked
from wsproto.events import BytesMessage, TextMessage

from tests.peers.websockets import CONTINUATION, FIN, PING, PONG, RawWebSocket, close, frame, handshake
from tests.peers.websockets import TEXT as TEXT_FRAME
from tests.transports.http.asgi_support import TEXT, DummyFace, DummyHandler, upgrade
from tests.transports.http.hypercorn_support import (
    Served,
    open_websocket,
    over_tls,
    read_until,
    reset_on_close,
    serving,
)
from tests.transports.http.test_hypercorn import Identity, identity
from tests.transports.websocket_support import turns_of
from trimcp.budget import reads_per_turn
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.errors import LocalError
from trimcp.transports.http.asgi import guards
from trimcp.transports.http.asgi import hypercorn as host
from trimcp.transports.http.asgi.app import AsgiApp
from trimcp.transports.http.asgi.guard_protocols import LimitedMessage, install
from trimcp.transports.http.asgi.guards import GuardedConfig, without
from trimcp.transports.http.asgi.hypercorn import serve_hypercorn
from trimcp.transports.http.interfaces import Head, HttpResponse
from trimcp.transports.http.settings import HttpLimits

__all__ = ["identity"]

LARGE = 30_000_000
PAGE = Path(__file__).parents[3] / "docs" / "design" / "hypercorn.md"

Dying = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
"""Without guards a server that dies leaves sockets to the garbage collector."""

Guarded = pytest.mark.parametrize("guarded", [True, False])


async def settle() -> None:
    await wait_all_tasks_blocked(0.02)


def guard(guarded: bool, *names: str) -> contextlib.AbstractContextManager[None]:
    return nullcontext() if guarded else without(*names)


def download(size: int = LARGE) -> tuple[DummyFace, DummyHandler]:
    """A face whose answers are large."""
    face = DummyFace()
    face["/here"] = HttpResponse(200, TEXT, b"hello")
    face["/early"] = HttpResponse(413)
    face["/ws"] = upgrade()
    face["/large"] = handler = DummyHandler(lambda body, reply: reply.send(HttpResponse(200, TEXT, b"x" * size)))
    return face, handler


# messages


@pytest.mark.parametrize(("kind", "guarded"), [(LimitedMessage, True), (WebsocketBuffer, False)])
def test_a_message_that_is_too_large_grows_no_more(kind: type[WebsocketBuffer], guarded: bool) -> None:
    buffer, kept = kind(1000), 0
    buffer.extend(TextMessage("x" * 1000, message_finished=False))
    for _ in range(100):
        with pytest.raises(FrameTooLargeError):
            buffer.extend(TextMessage("x" * 1000, message_finished=False))
        kept = 0 if buffer.value is None else buffer.value.tell()
    assert kept == (0 if guarded else 101_000)


def test_a_message_is_measured_in_bytes() -> None:
    buffer = LimitedMessage(10)
    buffer.extend(TextMessage("ééé", message_finished=False))
    assert buffer.length == 6
    buffer.extend(TextMessage("1234", message_finished=True))
    assert buffer.to_message()["text"] == "ééé1234"
    buffer.clear()
    buffer.extend(BytesMessage(b"1234567890", message_finished=False))
    with pytest.raises(FrameTooLargeError):
        buffer.extend(BytesMessage(b"1", message_finished=True))


@Guarded
async def test_nothing_is_inflated(guarded: bool) -> None:
    face, _ = download()
    with guard(guarded, "messages"):
        async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
            await stream.send_all(handshake("Sec-WebSocket-Extensions: permessage-deflate"))
            answer = await read_until(stream, b"\r\n\r\n")
            assert b" 101 " in answer
            assert (b"permessage-deflate" not in answer.lower()) is guarded


@Dying
@Guarded
async def test_data_before_the_handshake_ends_its_connection(
    guarded: bool, caplog: pytest.LogCaptureFixture, steady_clock: trio.abc.Clock
) -> None:
    face, _ = download()
    with guard(guarded, "messages", "alive"):
        async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
            await stream.send_all(handshake() + frame(FIN | TEXT_FRAME, b"early"))
            if guarded:
                assert await read_until(stream, b"never") == b""
                await settle()
                assert face.ended[0][0] == "/ws"
                assert await served.alive()
                assert not caplog.records
            else:
                with trio.fail_after(2):
                    await served.ended.wait()
    gc.collect()
    assert (served.failure is None) is guarded


@Guarded
async def test_a_close_right_behind_what_is_too_large_is_heard(guarded: bool) -> None:
    face, _ = download()
    app = AsgiApp(face.running)
    with guard(guarded, "messages"):
        async with serving(app, grace=0) as served, await open_websocket(served) as stream:
            await stream.send_all(frame(FIN | TEXT_FRAME, b"x" * 2000) + close(1000))
            assert (await stream.receive_some(4))[2:] == b"\x03\xf1"
            await settle()
            assert bool(face.ended) is guarded


@Guarded
@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(FIN | TEXT_FRAME, b"\xff"), 1007),
        (frame(FIN | CONTINUATION, b"x"), 1002),
        (b"\x81\x01x", 1002),
        (frame(FIN | 0x40 | TEXT_FRAME, b"x"), 1002),
    ],
)
async def test_who_breaks_the_protocol_is_told(guarded: bool, frames: bytes, code: int) -> None:
    face, _ = download()
    with guard(guarded, "messages"):
        async with serving(AsgiApp(face.running)) as served, await open_websocket(served) as stream:
            await stream.send_all(frames)
            said = await read_until(stream, b"never")
            assert said[2:4] == (code.to_bytes(2, "big") if guarded else b"")


@Guarded
async def test_a_message_has_a_time_in_which_it_must_be_whole(guarded: bool, steady_clock: trio.abc.Clock) -> None:
    face, _ = download()
    app, limits = AsgiApp(face.running), HttpLimits(body_timeout=0.2)
    with guard(guarded, "messages"):
        async with serving(app, limits=limits, grace=0) as served, await open_websocket(served) as stream:
            await stream.send_all(frame(TEXT_FRAME, b"x") + frame(FIN | PING, b"alive"))
            assert await read_until(stream, b"alive") == b"\x8a\x05alive"
            with trio.move_on_after(0.4 if not guarded else 5) as scope:
                assert (await read_until(stream, b"never"))[2:4] == (1008).to_bytes(2, "big")
            assert scope.cancelled_caught is not guarded
            if guarded:
                await settle()
                assert face.ended[0][0] == "/ws"


async def test_a_message_that_was_whole_in_time_ends_nothing(steady_clock: trio.abc.Clock) -> None:
    face, _ = download()
    app, limits = AsgiApp(face.running), HttpLimits(body_timeout=0.2)
    text = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
    async with serving(app, limits=limits, grace=0) as served, await open_websocket(served) as stream:
        for _ in range(2):
            await stream.send_all(frame(TEXT_FRAME, text[:9]) + frame(FIN | PING, b"begun"))
            await read_until(stream, b"begun")
            await stream.send_all(frame(FIN | CONTINUATION, text[9:]))
            with trio.move_on_after(0.25):
                await read_until(stream, b"never")
            await stream.send_all(frame(FIN | PING, b"alive"))
            assert (await read_until(stream, b"alive")).endswith(b"alive")


@Guarded
async def test_of_many_tiny_frames_others_have_their_turn_in_between(guarded: bool) -> None:
    face, _ = download()
    with guard(guarded, "messages"):
        async with serving(AsgiApp(face.running)) as served, await open_websocket(served) as stream:

            async def say() -> None:
                await stream.send_all(frame(FIN | PONG, b"") * 10_000 + frame(FIN | PING, b"alive"))
                await read_until(stream, b"alive")

            assert (await turns_of(say) >= 10_000 / 16) is guarded


async def test_a_peer_may_send_before_its_handshake_has_been_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = trio.Event()

    async def access(*_: object) -> None:
        await answered.wait()

    monkeypatch.setattr("hypercorn.logging.Logger.access", access)
    face, _ = download()
    async with serving(AsgiApp(face.running)) as served, await open_websocket(served) as stream:
        await stream.send_all(frame(FIN | PING, b"early"))
        assert await read_until(stream, b"early") == b"\x8a\x05early"
        answered.set()
    assert served.failure is None
    assert not caplog.records


@Guarded
@pytest.mark.parametrize("size", [65_536, 65_537, 200_000])
async def test_a_large_message_leaves_in_pieces(guarded: bool, size: int) -> None:
    text = "\u00e9" * size

    async def serve(channel: MessageChannel) -> None:
        await channel.send([Outgoing(text.encode(), Kind.NOTIFICATION)])

    face = DummyFace()
    face["/ws"] = upgrade(serve)
    with guard(guarded, "messages"):
        async with serving(AsgiApp(face.running)) as served, await open_websocket(served) as stream:
            raw, pieces = RawWebSocket(stream), []
            while (heard := await raw.hear())[0] & 0xF in (TEXT_FRAME, CONTINUATION):
                pieces.append(heard)
    assert b"".join(payload for _, payload in pieces).decode() == text
    assert len(pieces) == (-(-size // 65_536) if guarded else 1)
    assert [first >> 7 for first, _ in pieces] == [0] * (len(pieces) - 1) + [1]


# stuck


@Guarded
async def test_a_client_that_pipelines_and_leaves_unread_is_let_go(guarded: bool) -> None:
    face, handler = download()
    with guard(guarded, "stuck"):
        async with serving(AsgiApp(face.running), limits=HttpLimits(max_connections=1), grace=0) as served:
            stream = await served.connect(receive_buffer=4096)
            await stream.send_all(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
            await settle()
            reset_on_close(stream)
            await stream.aclose()
            await settle()
            assert handler.disconnects == 1
            assert await served.alive() is guarded


@Guarded
async def test_a_websocket_peer_that_leaves_a_full_queue_is_let_go(guarded: bool) -> None:
    over = trio.Event()

    async def serve(channel: MessageChannel) -> None:
        text = b'"' + b"x" * 1_000_000 + b'"'
        with suppress(trio.BrokenResourceError):
            await channel.send([Outgoing(text, Kind.NOTIFICATION)] * 10)  # until somebody reads it
        over.set()

    face = DummyFace()
    face["/ws"] = upgrade(serve)
    with guard(guarded, "stuck"):
        async with serving(AsgiApp(face.running), limits=HttpLimits(max_connections=1), grace=0) as served:
            stream = await open_websocket(served, receive_buffer=4096)
            await stream.send_all(frame(FIN | TEXT_FRAME, b"{}") * 10)
            await settle()
            reset_on_close(stream)
            await stream.aclose()
            await settle()
            assert over.is_set() is guarded
            assert await served.alive() is guarded


@Guarded
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("count", [1, 5, 5_000])  # received, in the application's queue, unread in the system
async def test_a_websocket_peer_that_leaves_unread_is_noticed_by_who_asks(
    guarded: bool, count: int, tls: bool, identity: Identity
) -> None:
    known, scope = trio.Event(), trio.CancelScope()

    async def serve(channel: MessageChannel) -> None:
        with scope:
            await channel.wait_peer_closed()
            known.set()
            await trio.sleep_forever()

    face = DummyFace()
    face["/ws"] = upgrade(serve)
    ours, options = secured(identity, tls)
    with guard(guarded, "stuck"):
        async with serving(AsgiApp(face.running), grace=0, **options) as served:
            stream = await connected(served, ours)
            await stream.send_all(handshake())
            await read_until(stream, b"\r\n\r\n")
            await stream.send_all(frame(FIN | TEXT_FRAME, b"{}") * count)
            await settle()
            assert not known.is_set()
            await trio.aclose_forcefully(stream)
            await settle()
            assert known.is_set() is guarded
            scope.cancel()


# pause


def streaming() -> tuple[DummyFace, DummyHandler]:
    """A face whose answer begins, and may go on whenever the test says so."""
    face = DummyFace()
    face["/stream"] = handler = DummyHandler(lambda body, reply: reply.start(HttpResponse(200, TEXT, b"begun")))
    return face, handler


async def connected(served: Served, identity: Identity | None) -> trio.abc.Stream:
    if identity is None:
        return await served.connect()
    identity.client.set_alpn_protocols(["http/1.1"])
    return await over_tls(served, identity.client)


def secured(identity: Identity, tls: bool) -> tuple[Identity | None, dict[str, Any]]:
    return (identity, {"certfile": identity.certfile, "keyfile": identity.keyfile}) if tls else (None, {})


GET = b"GET /stream HTTP/1.1\r\nHost: localhost\r\n"
OneMore = b"\r\nGET /"
TooMany = b"\r\n" + b"x" * (HttpLimits().max_pipelined + 10_000)


@Guarded
@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("rest", [OneMore, TooMany, b"Upgrade: other\r\n\r\n"], ids=["more", "much", "upgrade"])
async def test_a_client_that_leaves_with_more_behind_its_request_is_noticed(
    guarded: bool, tls: bool, rest: bytes, identity: Identity, steady_clock: trio.abc.Clock
) -> None:
    face, handler = streaming()
    ours, options = secured(identity, tls)
    with guard(guarded, "pause"):
        async with serving(AsgiApp(face.running), grace=0, **options) as served:
            stream = await connected(served, ours)
            await stream.send_all(GET + rest)
            await read_until(stream, b"begun\r\n")  # with nothing left to read its end is no reset
            await settle()
            assert handler.disconnects == 0
            assert handler.reply is not None
            await trio.aclose_forcefully(stream)
            if guarded:
                with trio.fail_after(5):
                    await handler.gone.wait()
            for disconnects in (0, 0, 1):
                await settle()
                assert handler.disconnects == max(disconnects, int(guarded)), "the first thing to be refused tells it"
                handler.reply.write(b"more")
            with trio.fail_after(5):
                while not face.ended:
                    await settle()


@pytest.mark.parametrize("tls", [False, True])
async def test_what_arrives_behind_a_request_is_answered_after_it(
    tls: bool, identity: Identity, steady_clock: trio.abc.Clock
) -> None:
    face, started = DummyFace(), list[DummyHandler]()

    def begin(head: Head) -> DummyHandler:
        started.append(DummyHandler(lambda body, reply: None))
        return started[-1]

    face.routes["/wait"] = begin
    ours, options = secured(identity, tls)
    async with serving(AsgiApp(face.running), **options) as served:
        stream = await connected(served, ours)
        async with stream:
            first, *others = [b"POST /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n%d" % n for n in range(5)]
            await stream.send_all(first + others[0][:9])
            await settle()
            for start in range(9, len(b"".join(others)), 50):  # all while the first is under way
                await stream.send_all(b"".join(others)[start : start + 50])
                await settle()
            for n in range(5):
                with trio.fail_after(5):
                    while len(started) <= n or started[n].reply is None:
                        await settle()
                assert len(started) == n + 1, "one at a time"
                handler = started[n]
                assert handler.body == b"%d" % n
                assert handler.reply is not None
                handler.reply.send(HttpResponse(200, TEXT, b"answer %d" % n))
                assert (await read_until(stream, b"answer %d" % n)).count(b"HTTP/1.1 200") == 1


async def test_no_more_is_read_behind_a_request_than_may_wait(
    monkeypatch: pytest.MonkeyPatch, steady_clock: trio.abc.Clock
) -> None:
    face, handler = streaming()
    sizes: list[int] = []

    async def receive_some(stream: Any, most: int) -> bytes:
        data = bytes(await stream._stream.receive_some(most))
        sizes.append(len(data))
        return data

    monkeypatch.setattr(guards._GuardedStream, "receive_some", receive_some, raising=False)
    most = 3 * guards.PIECE
    async with serving(AsgiApp(face.running), limits=HttpLimits(max_pipelined=most)) as served:
        async with await served.connect() as stream, trio.open_nursery() as nursery:
            await stream.send_all(GET + b"\r\n")
            await read_until(stream, b"begun")
            nursery.start_soon(stream.send_all, b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500_000)
            with trio.fail_after(5):
                while sum(sizes) < most:
                    await settle()
            await settle()
            nursery.cancel_scope.cancel()
            assert most <= sum(sizes) <= most + guards.PIECE + 100
            assert handler.disconnects == 0
            assert handler.reply is not None
        with trio.fail_after(5):
            while not handler.gone.is_set():  # its end is behind what finds no room: what it refuses shows that it left
                handler.reply.write(b"more")
                await settle()


# idle


@Guarded
async def test_a_client_that_closes_an_idle_connection_is_let_go(guarded: bool) -> None:
    face, _ = download()
    with guard(guarded, "idle"):
        async with serving(AsgiApp(face.running), limits=HttpLimits(max_connections=1)) as served:
            async with await served.connect() as stream:
                await stream.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await read_until(stream, b"hello")
                await settle()
            await settle()
            assert await served.alive() is guarded


# stall


@Guarded
@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_does_not_read_does_not_hold_the_end(
    guarded: bool, tls: bool, identity: Identity, steady_clock: trio.abc.Clock
) -> None:
    face, handler = download()
    options = {"certfile": identity.certfile, "keyfile": identity.keyfile} if tls else {}
    with guard(guarded, "stall"):
        async with serving(AsgiApp(face.running), **options) as served:
            stream: trio.abc.Stream = await served.connect()
            if tls:
                identity.client.set_alpn_protocols(["http/1.1"])
                await stream.aclose()
                stream = await over_tls(served, identity.client)
            await stream.send_all(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await settle()
            assert handler.reply is not None
            assert handler.reply.waiting > 1_000_000
            served.scope.cancel()
            with trio.move_on_after(5 if guarded else 0.2):
                await served.ended.wait()
            assert served.ended.is_set() is guarded
            await trio.aclose_forcefully(stream)
            with trio.fail_after(5):
                await served.ended.wait()
    assert handler.disconnects == 1


async def test_a_client_that_does_not_read_is_cut_after_the_grace(steady_clock: trio.abc.Clock) -> None:
    face, handler = download()
    async with serving(AsgiApp(face.running), grace=0.1) as served, await served.connect() as stream:
        await stream.send_all(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await settle()
        served.stop.set()
        with trio.fail_after(2):
            await served.ended.wait()
    assert handler.disconnects == 1
    assert served.failure is None


@Guarded
async def test_a_client_that_does_not_read_is_cut_after_a_while(guarded: bool, steady_clock: trio.abc.Clock) -> None:
    face, handler = download()
    app, limits = AsgiApp(face.running), HttpLimits(stall_timeout=0.2)
    with guard(guarded, "stall"):
        async with serving(app, limits=limits) as served, await served.connect() as stream:
            await stream.send_all(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with trio.move_on_after(5 if guarded else 0.5):
                await handler.gone.wait()
            assert handler.gone.is_set() is guarded
            assert await served.alive()


async def test_a_client_that_reads_slowly_is_not_cut(steady_clock: trio.abc.Clock) -> None:
    """Time is up for a piece, not for everything."""
    face, handler = download(6_000_000)
    app, limits = AsgiApp(face.running), HttpLimits(stall_timeout=0.3)
    async with serving(app, limits=limits) as served, await served.connect(receive_buffer=65536) as stream:
        await stream.send_all(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        size = 0
        began = trio.current_time()
        while size < 6_000_000:
            size += len(await stream.receive_some(200_000))
            await trio.sleep(0.005)  # the client is slow; nobody waits for anything here
        assert trio.current_time() - began > 0.3
    assert handler.disconnects == 0


# alive


async def send_once(scope: Any, receive: Any, send: Any) -> None:
    """An application that sends a lot, once, and returns without a close."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"hello"})
    elif scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "x" * 8_000_000})
    else:
        raise AssertionError


async def close_against_writer(served: Served) -> None:
    """Let Hypercorn's answer to our close wait behind a write, which ends as the application does."""
    async with await open_websocket(served, receive_buffer=8192) as stream:
        await settle()
        await stream.send_all(close(1000))
        await settle()
        while await stream.receive_some(1_000_000):
            pass


@Dying
@Guarded
async def test_two_writers_of_a_websocket_do_not_end_the_server(guarded: bool) -> None:
    """Which of two tasks runs first decides, so it takes a few tries: BusyResourceError out of serve()."""
    with guard(guarded, "stall", "alive"):
        async with serving(send_once) as served:
            for _ in range(3 if guarded else 60):
                with suppress(OSError, trio.BrokenResourceError):
                    await close_against_writer(served)
                if served.ended.is_set():
                    break
            else:
                assert guarded
                assert await served.alive()
    gc.collect()
    if not guarded:
        assert isinstance(served.failure, trio.BusyResourceError)


async def test_websocket_peers_that_vanish_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(7)
    flooding = 0

    async def flood(channel: Any) -> None:
        nonlocal flooding
        flooding += 1
        try:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while True:
                    await channel.send([Outgoing(b'"' + b"x" * 50_000 + b'"', Kind.NOTIFICATION)])
        finally:
            flooding -= 1

    async def vanish(served: Served) -> None:
        with suppress(trio.BrokenResourceError, AssertionError):
            async with await open_websocket(served, receive_buffer=8192) as stream:
                await trio.sleep(chance.random() * 0.05)
                for _ in range(chance.randrange(3)):
                    await stream.send_all(frame(FIN | PING, b"ping"))
                if chance.random() < 0.7:
                    await stream.send_all(close(1000))
                if chance.random() < 0.3:
                    await stream.send_eof()
                await trio.sleep(chance.random() * 0.05)
                if chance.random() < 0.5:
                    reset_on_close(stream)

    face, _ = download()
    face["/ws"] = upgrade(flood)
    async with serving(AsgiApp(face.running)) as served:
        await settle()
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(vanish, served)
        assert await served.alive()
        await settle()
        assert flooding == 0
        assert trio.lowlevel.current_statistics().tasks_living == tasks
    assert len([entry for entry in face.ended if entry[0] == "/ws"]) == 60
    assert served.failure is None
    assert not caplog.records


async def run_connection(error: BaseException) -> None:
    """Let a connection fail."""

    async def original(*args: Any) -> None:
        async with trio.open_nursery():
            raise error

    config = GuardedConfig(HttpLimits())
    left, right = trio.socket.socketpair()
    with right:
        try:
            await guards._serve_connection(original, None, config, None, None, trio.SocketStream(left))
        finally:
            left.close()
            assert not config.connections
            assert not config.shares._shares


async def test_ordinary_failures_of_a_connection_are_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for error in (trio.BusyResourceError("x"), ConnectionResetError(104, "y")):
            await run_connection(error)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.DEBUG]
    assert "BusyResourceError('x')" in caplog.messages[0]


async def test_strange_failures_of_a_connection_are_errors(caplog: pytest.LogCaptureFixture) -> None:
    await run_connection(KeyError(17))
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


async def test_what_is_no_failure_of_a_connection_passes() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        await run_connection(BaseExceptionGroup("", [KeyError(1), KeyboardInterrupt()]))
    assert caught.group_contains(KeyboardInterrupt)
    assert not caught.group_contains(KeyError)
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught


# turns


class Uploads:
    """A connection on which there is always more."""

    def __init__(self) -> None:
        self.read = 0

    async def receive_some(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self.read += 1
        return b"%d" % self.read + bytes(most - len(b"%d" % self.read))


@Guarded
async def test_of_many_who_send_much_a_few_are_looked_at_in_each_turn(guarded: bool) -> None:
    looked = 0
    config = GuardedConfig(HttpLimits())

    async def read(stream: Any) -> None:
        nonlocal looked
        while True:
            assert await stream.receive_some(guards.PIECE)
            looked += 1

    most = 0
    with guard(guarded, "turns"):
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(read, guards._GuardedStream(Uploads(), 1, config.reads))
            for _ in range(40):
                before = looked
                await trio.lowlevel.checkpoint()
                most = max(most, looked - before)
            nursery.cancel_scope.cancel()
    assert looked >= 100, "they go on"
    assert most <= 16 if guarded else most >= 50


async def test_what_was_read_and_waits_for_its_turn_is_not_lost() -> None:
    turns = reads_per_turn()
    for _ in range(8):
        await turns.wait(1)
    stream = guards._GuardedStream(Uploads(), 1, turns)
    with trio.CancelScope() as scope:
        scope.cancel()
        await stream.receive_some(guards.PIECE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.receive_some, guards.PIECE)
        await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            await turns.wait(1)
        nursery.start_soon(trio.lowlevel.checkpoint)
    found = [(await stream.receive_some(guards.PIECE))[:2] for _ in range(2)]
    assert found == [b"1\0", b"2\0"]


async def test_a_busy_stream_is_a_broken_one() -> None:
    class Busy:
        async def send_all(self, data: bytes) -> None:
            raise trio.BusyResourceError

    with pytest.raises(trio.BrokenResourceError):
        await guards._GuardedStream(Busy(), 1).send_all(b"x")


# lines

_CHUNKED = b"POST /mcp HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"
AMBIGUOUS = [
    b"GET /here HTTP/1.1\r\nHost: h\r\nX: a\r\n folded\r\n\r\n",
    b"GET /here HTTP/1.1\r\nHost: h\r\nX: a\r\n\tTransfer-Encoding: chunked\r\n\r\n",
    b"GET /here HTTP/1.1\nHost: h\n\n",
    b"GET /here HTTP/1.1\r\nHost: h\r\n\n",
    b"GET /here HTTP/1.1\r\nHost: h\nX: y\r\n\r\n",
    b"POST /mcp HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\ncontent-length: 1\r\n\r\nx",
    b"POST /mcp HTTP/1.1\r\nHost: h\r\nContent-Length: 1, 1\r\n\r\nx",
    b"POST /mcp HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"\r\n1 \r\nx\r\n0\r\n\r\n",
    _CHUNKED + b"\r\n1\r\nx\r\n0\r\nX: y\n\n",
]


@Guarded
async def test_what_two_parsers_read_differently_is_refused(guarded: bool, steady_clock: trio.abc.Clock) -> None:
    face, _ = download()
    face["/mcp"] = DummyHandler()
    with guard(guarded, "lines"):
        async with serving(AsgiApp(face.running, limits=HttpLimits(linger_timeout=0.1))) as served:
            for data in AMBIGUOUS:
                async with await served.connect() as stream:
                    await stream.send_all(data)
                    with trio.fail_after(5):
                        answer = await read_until(stream, b"\r\n\r\n")
                    assert answer.startswith(b"HTTP/1.1 400 " if guarded else b"HTTP/1.1 200 "), data
    assert len(face.heads) == (2 if guarded else len(AMBIGUOUS)), "the head is judged before the chunks come"


@pytest.mark.parametrize("version", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /here HTTP/2.0\r\nHost: h\r\n\r\n"])
async def test_http_2_is_not_served(version: bytes) -> None:
    """Our own listener has it."""
    face, _ = download()
    async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
        await stream.send_all(version)
        assert (await read_until(stream, b"\r\n\r\n")).startswith(b"HTTP/1.1 505 ")
    assert not face.heads


@Guarded
async def test_no_request_turns_its_connection_into_http_2(guarded: bool) -> None:
    """It is answered as our own listener does: in HTTP/1.1, whatever else it offers to speak."""
    face, _ = download()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with guard(guarded, "lines"):
        async with serving(AsgiApp(face.running)) as served, await served.connect() as stream:
            await stream.send_all(b"GET /here HTTP/1.1\r\nHost: h\r\n" + offer + b"\r\n")
            answer = await read_until(stream, b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 " if guarded else b"HTTP/1.1 101 ")


def test_the_guards_are_for_the_version_at_hand() -> None:
    """When this fails: read the new source for each fault, run these tests, and raise the end of `SERVED`."""
    host.check_version()


@pytest.mark.parametrize("version", ["0.16.0", "0.19.1", "0.19b1", "1.0", "1", "unknown"])
async def test_other_versions_are_not_served(
    version: str, monkeypatch: pytest.MonkeyPatch, steady_clock: trio.abc.Clock
) -> None:
    monkeypatch.setattr(host, "version", lambda name: version)
    for _ in range(2):
        expected = rf"Hypercorn {version} .* install 'hypercorn>=0\.17,<0\.19'"
        with pytest.raises(LocalError, match=expected), trio.fail_after(5):
            await serve_hypercorn(AsgiApp(DummyFace().running), bind="127.0.0.1:0")


@pytest.mark.parametrize("version", ["0.17.0", "0.18", "0.18.1.dev3", "0.17rc1"])
def test_versions_between_are_taken_in_whatever_form_they_are_written(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "version", lambda name: version)
    host.check_version()


def test_pip_installs_no_other_version() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert host.SERVED in project["dependencies"]


@pytest.fixture
def quiet() -> Iterator[None]:
    logger = logging.getLogger("hypercorn.error")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.mark.usefixtures("quiet")
async def test_other_servers_of_the_process_are_left_alone() -> None:
    install()
    config = Config()
    config.bind = ["127.0.0.1:0"]
    face, _ = download()
    async with trio.open_nursery() as nursery:
        serve = partial(hypercorn.trio.serve, AsgiApp(face.running), config)
        (address,) = await nursery.start(serve)
        served = Served(address)
        async with await served.connect() as stream:
            await stream.send_all(handshake("Sec-WebSocket-Extensions: permessage-deflate"))
            assert b"permessage-deflate" in (await read_until(stream, b"\r\n\r\n")).lower()
        nursery.cancel_scope.cancel()


# Where they are in force


def test_whoever_serves_has_every_guard_of_the_page() -> None:
    """In a process of its own: here the tests import what a server has to import by itself."""
    rows = [row.split("|")[1].strip() for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    program = (
        "from trimcp.transports.http.asgi import hypercorn\n"
        "from trimcp.transports.http.settings import HttpLimits\n"
        "hypercorn._configure(HttpLimits())\n"
        "from trimcp.transports.http.asgi.guards import GUARDS\n"
        "assert all(getattr(guard.owner, guard.attribute).__module__.startswith('trimcp') for guard in GUARDS)\n"
        "print(*sorted({name for guard in GUARDS for name in guard.names}))\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == sorted({*rows} - {"guard", "---"})
