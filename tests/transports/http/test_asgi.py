"""The ASGI application, called by a server made by hand: HTTP requests, the lifespan, prefixes. Time is virtual."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.asgi_support import (
    QUICK,
    TEXT,
    Call,
    DummyFace,
    DummyHandler,
    app_of,
    call_once,
    calling,
    failing,
    http_scope,
    upgrade,
    websocket_scope,
)
from trimcp.budget import Budget, MemoryCharge
from trimcp.transports.http.asgi.app import AsgiApp
from trimcp.transports.http.asgi.request import AsgiReply
from trimcp.transports.http.interfaces import Head, HttpReply, HttpResponse
from trimcp.transports.http.settings import HttpLimits


def open_stream(body: bytes, reply: HttpReply) -> None:
    reply.start(HttpResponse(200, TEXT))


@asynccontextmanager
async def streaming(**options: Any) -> AsyncIterator[tuple[DummyFace, DummyHandler, Call]]:
    """A call whose response is a stream that has begun."""
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    async with app_of(face, **options) as app, calling(app, http_scope()) as call:
        call.body()
        await wait_all_tasks_blocked()
        yield face, handler, call


# Requests and responses


async def test_a_request_is_answered() -> None:
    face = DummyFace()
    face["/mcp"] = handler = DummyHandler()
    async with app_of(face) as app:
        call = await call_once(app, http_scope("/mcp", query_string=b"a=b"), b"hello")
    assert call.status == 200
    assert call.headers == {b"content-type": b"text/plain", b"content-length": b"5"}
    assert call.data == handler.body == b"hello"
    assert handler.disconnects == 0
    assert face.ended == [("/mcp", 200, 5)]
    (head,) = face.heads
    assert (head.method, head.path, head.query, head.peer) == ("POST", "/mcp", "a=b", "127.0.0.1:40312")
    assert (head.loopback, head.secure, head.websocket, head.root) == (True, False, False, "")


async def test_a_body_may_come_in_pieces() -> None:
    face = DummyFace()
    face["/"] = DummyHandler()
    async with app_of(face) as app, calling(app, http_scope()) as call:
        for piece in (b"one ", b"", b"two "):
            call.body(piece, more=True)
        await wait_all_tasks_blocked()
        assert not call.events
        call.body(b"three")
    assert call.data == b"one two three"


async def test_a_body_too_large_is_answered_with_its_beginning_read() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler()
    async with app_of(face, limits=QUICK) as app, calling(app, http_scope()) as call:
        call.body(b"x" * 990, more=True)
        call.body(b"x" * 20, more=True)
        await wait_all_tasks_blocked()
        assert call.status == 413
        assert call.data == b"1000"
        assert not call.finished, "a client that still sends would lose the answer to a reset"
        call.body(b"x", more=True)
        await wait_all_tasks_blocked()
        assert not call.finished
        call.body(b"x")
    assert call.finished
    assert handler.reply is None


async def test_of_a_body_that_is_known_to_be_too_large_only_the_beginning_is_kept() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler(max_body=1_000_000)
    scope = http_scope(headers=[(b"host", b"localhost"), (b"content-length", b"1000001")])
    face.budget = Budget(450_000)
    async with app_of(face) as app, calling(app, scope) as call:
        for _ in range(10):
            call.body(b"x" * 65_536, more=True)
        await wait_all_tasks_blocked()
        assert not call.events
        call.body(b"x" * 344_640, more=True)
        call.body(b"x")
    assert (call.status, call.data) == (413, b"65536")
    assert handler.reply is None


async def test_of_a_body_that_is_too_large_little_is_copied() -> None:
    face = DummyFace()
    face["/"] = DummyHandler(max_body=1_000_000)
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body(b"x" * 2_000_000)
    assert (call.status, call.data) == (413, b"65536")


async def test_all_unfinished_bodies_together_are_bounded() -> None:
    face = DummyFace()
    face.budget = Budget(1_000_000)
    face["/"] = DummyHandler(max_body=1_000_000)
    async with app_of(face) as app, calling(app, http_scope()) as first:
        first.body(b"x" * 300_000, more=True)
        await wait_all_tasks_blocked()
        assert face.budget.held == 300_000
        async with calling(app, http_scope()) as second:
            second.body(b"x" * 140_000, more=True)
            second.body()
        assert second.status == 503
        assert second.headers[b"retry-after"] == b"1"
        assert (await call_once(app, http_scope(), b"x" * 60_000)).status == 200, "small ones are no trouble"
        first.leave()
        await first.over.wait()
        assert face.budget.held == 0
        for _ in range(2):
            assert (await call_once(app, http_scope(), b"x" * 300_000)).status == 200


async def test_a_body_counts_while_it_waits_for_its_turn(steady_clock: trio.abc.Clock) -> None:
    face = DummyFace()
    face["/"] = DummyHandler(max_body=1_000_000)
    async with app_of(face) as app, calling(app, http_scope()) as call:
        face.budget._next_turn = trio.current_time() + 60  # a large one was parsed just now
        async with face.budget._turn:
            call.body(b"x" * 300_000)
            await wait_all_tasks_blocked()
            assert face.budget.held == 300_000
    assert (call.status, face.budget.held) == (200, 0)


async def test_a_client_that_keeps_sending_after_its_answer_is_not_heard_for_long(autojump_clock: object) -> None:
    face = DummyFace()
    async with app_of(face, limits=QUICK) as app:
        async with calling(app, http_scope("/nowhere")) as call:
            began = trio.current_time()
            call.body(b"x", more=True)
        assert call.status == 404
        assert call.finished
        assert trio.current_time() - began == pytest.approx(1, abs=0.01)
        async with calling(app, http_scope("/nowhere")) as call:
            began = trio.current_time()
            for _ in range(11):
                call.body(b"x" * 10_000, more=True)
        assert call.finished
        assert trio.current_time() - began < 0.01
    assert face.ended == [("/nowhere", 404, 12)] * 2


async def test_a_body_that_takes_too_long_is_answered(autojump_clock: object) -> None:
    face = DummyFace()
    face["/"] = DummyHandler()
    async with app_of(face, limits=QUICK) as app, calling(app, http_scope()) as call:
        began = trio.current_time()
        for _ in range(31):
            call.body(b"x", more=True)
            await trio.sleep(1)
        await call.over.wait()
        assert trio.current_time() - began == pytest.approx(31, abs=0.1)
    assert call.status == 408
    assert call.finished


async def test_a_client_that_leaves_within_its_body_was_never_there() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler()
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body(b"x", more=True)
        call.leave()
    assert not call.events
    assert handler.reply is None
    assert handler.disconnects == 0
    assert face.ended == [("/", 0, 0)]


async def test_the_head_of_a_stream_leaves_before_its_body() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body()
        await wait_all_tasks_blocked()
        assert call.status == 200
        assert b"content-length" not in call.headers
        assert handler.reply is not None
        for n in range(3):
            handler.reply.write(b"event %d\n" % n)
            await wait_all_tasks_blocked()
            assert call.data.endswith(b"event %d\n" % n)
        handler.reply.finish(b"end")
        assert handler.reply.gone
    assert call.data == b"event 0\nevent 1\nevent 2\nend"
    assert call.finished
    assert handler.disconnects == 0


async def test_what_is_written_together_leaves_together_in_bounded_pieces() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    large = bytes(range(256)) * 1000
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body()
        await wait_all_tasks_blocked()
        assert handler.reply is not None
        for data in (b"a", b"b", large, b"c"):
            handler.reply.write(data)
        handler.reply.finish(b"d")
    sizes = [len(event["body"]) for event in call.events[1:]]
    assert call.data == b"ab" + large + b"cd"
    assert max(sizes) <= 65536
    assert len(sizes) <= 7


async def test_what_the_server_has_not_taken_waits() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    woken = trio.Event()
    async with app_of(face, limits=QUICK) as app, calling(app, http_scope()) as call, trio.open_nursery() as nursery:
        call.body()
        await wait_all_tasks_blocked()
        reply, writables = handler.reply, handler.writables
        assert reply is not None
        call.stalled = True
        reply.write(b"x" * 800)
        await wait_all_tasks_blocked()
        assert reply.waiting == 800, "the server has it, but did not return"
        await reply.room()
        reply.write(b"x" * 800)

        async def wait() -> None:
            await reply.room()
            woken.set()

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        assert reply.waiting == 1600
        assert not woken.is_set()
        assert handler.writables == writables
        call.read_on()
        await wait_all_tasks_blocked()
        assert reply.waiting == 0
        assert woken.is_set()
        assert handler.writables == writables + 1
        reply.finish(b"x")
    assert handler.writables == writables + 1


async def test_room_comes_before_everything_was_taken() -> None:
    reply = AsgiReply(1000)
    reply.start(HttpResponse(200, TEXT, b"x" * 65536))
    reply.write(b"y" * 900)
    woken = trio.Event()

    async def wait() -> None:
        await reply.room()
        woken.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        reply.consumed(len(reply.take()) - 101)
        await wait_all_tasks_blocked()
        assert not woken.is_set()
        reply.consumed(1)
        await woken.wait()
    assert reply.waiting == 1000


async def test_what_waits_counts_until_it_is_free_again_and_nothing_of_it_stays_once_it_is_cut() -> None:
    budget = Budget()
    holding = budget.holding("a")
    body = b"x" * 1_000_000
    references = sys.getrefcount(body)
    reply = AsgiReply(1000, MemoryCharge(holding))
    reply.send(HttpResponse(200, TEXT, body))
    for _ in range(15):
        reply.consumed(len(reply.take()))
    assert holding.held == 1_000_000, "it is one piece of memory, whatever was taken of it"
    reply.evict("somebody had to")
    assert sys.getrefcount(body) == references
    assert holding.held == 0


@pytest.mark.parametrize("stalled", [False, True])
async def test_a_client_that_leaves_is_noticed_whatever_the_server_does(
    stalled: bool, steady_clock: trio.abc.Clock
) -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body()
        await wait_all_tasks_blocked()
        reply = handler.reply
        assert reply is not None
        call.stalled = stalled
        reply.write(b"x" * 100_000)
        await wait_all_tasks_blocked()
        call.leave()
        with trio.fail_after(1):
            if not stalled:
                await call.over.wait()
        call.read_on()
        await call.over.wait()
        assert handler.disconnects == 1
        assert reply.gone
        assert reply.waiting == 0
        reply.write(b"into the void")
        reply.finish()
        assert reply.waiting == 0
        with trio.fail_after(1):
            await reply.room()
    assert not call.finished
    assert face.ended == [("/", 200, len(call.data))]


async def test_nobody_waits_for_a_client_whose_server_shields_its_writes() -> None:
    """The call is held by `send`; the handler and whoever waits for room are not."""
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body()
        await wait_all_tasks_blocked()
        call.stalled = True
        assert handler.reply is not None
        handler.reply.write(b"x" * 100_000)
        await wait_all_tasks_blocked()
        call.leave()
        await handler.gone.wait()
        await handler.reply.room()
        assert not call.over.is_set()
        call.read_on()


async def test_a_response_its_client_did_not_wait_for_gets_no_end() -> None:
    """Else Hypercorn would be told that a response of known length is over which is not."""
    face = DummyFace()
    face["/"] = handler = DummyHandler(lambda body, reply: reply.send(HttpResponse(200, TEXT, b"x" * 200_000)))
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body()
        while not call.events:
            await trio.lowlevel.checkpoint()
        call.stalled = True
        await wait_all_tasks_blocked()
        call.leave()
        await wait_all_tasks_blocked()
        assert handler.disconnects == 1
        call.read_on()
    assert len(call.data) < 200_000
    assert all(event.get("more_body", True) for event in call.events)


async def test_the_disconnect_after_the_last_event_is_none() -> None:
    """Hypercorn reports one at the end of every response, while `send` still prepares the next request."""
    async with streaming() as (_, handler, call):
        assert handler.reply is not None
        handler.reply.write(b"all")
        await wait_all_tasks_blocked()
        call.stalled = True
        handler.reply.finish()
        await wait_all_tasks_blocked()
        call.leave()
        await wait_all_tasks_blocked()
        call.read_on()
    assert call.finished, "the last send was cancelled"
    assert handler.disconnects == 0


async def test_a_last_event_nobody_takes_is_not_waited_for_long(autojump_clock: object) -> None:
    async with streaming(limits=QUICK) as (_, handler, call):
        assert handler.reply is not None
        call.shielded, call.stalled = False, True
        handler.reply.finish()
        await wait_all_tasks_blocked()
        began = trio.current_time()
        call.leave()
        await call.over.wait()
        assert trio.current_time() - began == pytest.approx(1, abs=0.01)
    assert not call.finished
    assert handler.disconnects == 0


@pytest.mark.parametrize("last", [False, True])
async def test_a_client_that_takes_nothing_is_given_up(autojump_clock: object, last: bool) -> None:
    async with streaming() as (face, handler, call):
        assert handler.reply is not None
        call.shielded, call.stalled = False, True
        began = trio.current_time()
        if last:
            handler.reply.finish()
        else:
            handler.reply.write(b"x")
        await call.over.wait()
        assert trio.current_time() - began == pytest.approx(HttpLimits().stall_timeout, abs=0.1)
    assert handler.disconnects == int(not last)
    assert face.ended == [("/", 200, 0)]


async def test_an_abort_leaves_the_response_without_an_end() -> None:
    async with streaming() as (_, handler, call):
        assert handler.reply is not None
        handler.reply.write(b"half")
        await wait_all_tasks_blocked()
        handler.reply.abort()
        assert handler.reply.gone
    assert call.data == b"half"
    assert not call.finished
    assert handler.disconnects == 0


async def test_an_abort_before_the_head_leaves_nothing() -> None:
    face = DummyFace()
    face["/"] = DummyHandler(lambda body, reply: reply.abort())
    async with app_of(face) as app, calling(app, http_scope()) as call:
        call.body()
    assert not call.events


async def test_a_cancelled_call_is_a_client_that_left() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler(open_stream)
    async with app_of(face) as app:
        call = Call(app, http_scope())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call.run)
            call.body()
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert handler.disconnects == 1
    assert face.ended == [("/", 200, 0)]


@pytest.mark.parametrize("error", [OSError("gone"), trio.BrokenResourceError()])
async def test_a_server_that_tells_a_disconnect_by_raising_is_understood(error: Exception) -> None:
    async with streaming() as (_, handler, call):
        call.error = error
        assert handler.reply is not None
        handler.reply.write(b"x")
    assert handler.disconnects == 1


async def test_a_head_request_gets_no_body() -> None:
    face = DummyFace()
    face["/"] = HttpResponse(200, TEXT, b"hello")
    async with app_of(face) as app:
        call = await call_once(app, http_scope(method="HEAD"))
    assert call.headers[b"content-length"] == b"5"
    assert call.data == b""
    assert face.ended == [("/", 200, 0)]


@pytest.mark.parametrize(("status", "length"), [(202, b"0"), (204, None), (304, None)])
async def test_a_response_without_a_body(status: int, length: bytes | None) -> None:
    face = DummyFace()
    face["/"] = HttpResponse(status)
    async with app_of(face) as app:
        call = await call_once(app, http_scope())
    assert call.status == status
    assert call.headers.get(b"content-length") == length


async def test_what_is_no_websocket_here_is_told_so() -> None:
    face = DummyFace()
    face["/ws"] = upgrade()
    async with app_of(face) as app:
        assert (await call_once(app, http_scope("/ws", "GET"))).status == 426


# Heads


async def head_of(scope: dict[str, Any], **options: Any) -> Head:
    face = DummyFace()
    async with app_of(face, **options) as app:
        await call_once(app, scope)
    (head,) = face.heads
    return head


@pytest.mark.parametrize(
    ("changes", "path", "root"),
    [
        ({"path": "/mcp"}, "/mcp", ""),
        ({"path": ""}, "/", ""),
        ({"path": "/api/mcp", "root_path": "/api"}, "/mcp", "/api"),  # Starlette, Hypercorn's dispatcher
        ({"path": "/api/mcp", "root_path": "/api/"}, "/mcp", "/api"),
        ({"path": "/mcp", "root_path": "/api", "raw_path": b"/api/mcp"}, "/mcp", "/api"),  # older Starlette
        ({"path": "/mcp", "root_path": "/api", "raw_path": b"/mcp"}, "/mcp", "/api"),  # a proxy cut it off
        ({"path": "/api", "root_path": "/api"}, "/", "/api"),
        ({"path": "/apis", "root_path": "/api"}, "/apis", "/api"),
        ({"path": "/mcp", "root_path": "/mcp", "raw_path": b"/mcp/mcp?x"}, "/mcp", "/mcp"),
        ({"path": "/mcp/mcp", "root_path": "/mcp", "raw_path": b"/mcp/mcp"}, "/mcp", "/mcp"),
        ({"path": "/ä/ö", "root_path": "/ä", "raw_path": b"/%C3%A4/%C3%B6"}, "/ö", "/ä"),
    ],
)
async def test_the_path_is_below_the_prefix(changes: dict[str, Any], path: str, root: str) -> None:
    head = await head_of(http_scope(**{"raw_path": changes["path"].encode(), **changes}))
    assert (head.path, head.root) == (path, root)


async def test_a_prefix_the_server_does_not_tell_can_be_given() -> None:
    head = await head_of(http_scope("/api/mcp"), root="/api")
    assert (head.path, head.root) == ("/mcp", "/api")


async def test_headers_that_come_twice_are_joined() -> None:
    pairs = [(b"Host", b"a"), (b"x-a", b" 1"), (b"X-A", b"2\t"), (b"x-b", b"\xe4"), (b":method", b"GET")]
    head = await head_of(http_scope(headers=pairs))
    assert head.headers == {"host": "a", "x-a": "1, 2", "x-b": "ä"}


@pytest.mark.parametrize(
    "headers",
    [[], [(b"host", b"")], [(b"host", b"a"), (b"host", b"a")], [(b"host", b"a, b")], [(b":authority", b"")]],
)
async def test_a_request_needs_exactly_one_host(headers: list[tuple[bytes, bytes]]) -> None:
    face = DummyFace()
    async with app_of(face) as app:
        call = await call_once(app, http_scope(headers=headers))
        assert call.status == 400
        call = Call(app, websocket_scope(headers=headers))
        call.put.send_nowait({"type": "websocket.connect"})
        await call.run()
        assert call.status == 400
    assert not face.heads


async def test_a_body_with_two_lengths_is_refused_and_nothing_follows() -> None:
    face = DummyFace()
    face["/"] = handler = DummyHandler()
    lines = [(b"host", b"localhost"), (b"content-length", b"5"), (b"transfer-encoding", b"chunked")]
    async with app_of(face) as app:
        call = await call_once(app, http_scope(headers=lines), b"hello")
        assert (call.status, call.headers[b"connection"]) == (400, b"close")
        assert handler.reply is None
        for line in lines[1:]:
            assert (await call_once(app, http_scope(headers=[lines[0], line]), b"hello")).status == 200


async def test_an_authority_is_a_host() -> None:
    assert (await head_of(http_scope(headers=[(b":authority", b"a:1")]))).headers == {"host": "a:1"}
    both = await head_of(http_scope(headers=[(b":authority", b"a:1"), (b"host", b"a:1")]))
    assert both.headers == {"host": "a:1"}


@pytest.mark.parametrize(
    ("server", "loopback"),
    [
        (("127.0.0.1", 80), True),
        (("127.3.2.1", 80), True),
        (("::1", 80), True),
        (("::ffff:127.0.0.1", 80), True),
        (("192.0.2.1", 80), False),
        (("fe80::1%eth0", 80), False),
        (("::ffff:192.0.2.1", 80), False),
        (("/run/mcp.sock", None), True),
        (None, True),
        (("somewhere", 80), True),
    ],
)
async def test_where_a_request_came_in(server: tuple[str, int | None] | None, loopback: bool) -> None:
    assert (await head_of(http_scope(server=server))).loopback is loopback


@pytest.mark.parametrize(
    ("client", "peer"), [(None, "unix"), (("", None), "unix"), (("::1", 9), "[::1]:9"), (("10.0.0.1", 9), "10.0.0.1:9")]
)
async def test_who_asks(client: tuple[str, int | None] | None, peer: str) -> None:
    assert (await head_of(http_scope(client=client))).peer == peer


async def test_https_is_secure() -> None:
    assert (await head_of(http_scope(scheme="https"))).secure


# The lifespan


@asynccontextmanager
async def lifespan(app: AsgiApp) -> AsyncIterator[Call]:
    async with calling(app, {"type": "lifespan"}) as call:
        call.put.send_nowait({"type": "lifespan.startup"})
        await wait_all_tasks_blocked()
        yield call
        call.put.send_nowait({"type": "lifespan.shutdown"})


async def test_the_lifespan_owns_the_face() -> None:
    face = DummyFace()
    face["/"] = HttpResponse(200)
    app = AsgiApp(face.running)
    async with lifespan(app) as call:
        assert call.events == [{"type": "lifespan.startup.complete"}]
        assert (await call_once(app, http_scope())).status == 200
    assert call.events[1:] == [{"type": "lifespan.shutdown.complete"}]
    async with lifespan(app) as call:  # and it may begin anew
        assert call.events == [{"type": "lifespan.startup.complete"}]


async def test_a_face_that_cannot_start_is_told_to_the_server() -> None:
    @asynccontextmanager
    async def running() -> AsyncIterator[DummyFace]:
        raise OSError("no such file: events.db" + "x" * 1000)
        yield DummyFace()

    async with lifespan(AsgiApp(running)) as call:
        (event,) = call.events
    assert event["type"] == "lifespan.startup.failed"
    assert event["message"].startswith("OSError: no such file: events.db")
    assert len(event["message"]) <= 500


async def test_a_face_that_cannot_stop_is_told_to_the_server() -> None:
    @asynccontextmanager
    async def running() -> AsyncIterator[DummyFace]:
        yield DummyFace()
        raise OSError("the disk is full")

    async with lifespan(AsgiApp(running)) as call:
        pass
    assert call.events[-1] == {"type": "lifespan.shutdown.failed", "message": "OSError: the disk is full"}


async def test_a_face_that_fails_fails_the_call() -> None:
    trouble = trio.Event()
    app = AsgiApp(partial(failing, DummyFace(), trouble))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with lifespan(app):
            trouble.set()
            await wait_all_tasks_blocked()
    assert caught.group_contains(OSError, match="the disk is full")
    assert (await call_once(app, http_scope())).status == 500


async def test_without_its_lifespan_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    face = DummyFace()
    face["/"] = HttpResponse(200)
    app = AsgiApp(face.running)
    for _ in range(2):
        call = await call_once(app, http_scope())
        assert call.status == 500
        assert b"lifespan" not in call.data
    call = Call(app, websocket_scope())
    call.put.send_nowait({"type": "websocket.connect"})
    await call.run()
    assert call.status == 500
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "async with app.lifespan()" in record.getMessage()
    async with app.lifespan():
        assert (await call_once(app, http_scope())).status == 200
    assert (await call_once(app, http_scope())).status == 500


async def test_a_lifespan_is_entered_once_at_a_time() -> None:
    app = AsgiApp(DummyFace().running)
    async with app.lifespan():
        with pytest.raises(RuntimeError, match="already"):
            async with app.lifespan():
                pass


def test_asyncio_is_told_what_to_do() -> None:
    app = AsgiApp(DummyFace().running)
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(event: Any) -> None:
        sent.append(event)

    asyncio.run(app({"type": "lifespan"}, receive, send))
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "--worker-class trio" in sent[0]["message"]
    with pytest.raises(RuntimeError, match="only on Trio"):
        asyncio.run(app(http_scope(), receive, send))


async def test_another_kind_of_scope_is_refused() -> None:
    async with app_of(DummyFace()) as app:
        with pytest.raises(ValueError, match="'telnet'"):
            await Call(app, {"type": "telnet"}).run()
