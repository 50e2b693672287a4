"""A server's connection of HTTP/2, in virtual time: requests, bodies, windows, what takes too long, and how it ends."""

from __future__ import annotations

import gc
import logging
import tracemalloc
import weakref
from collections.abc import Iterable
from functools import partial

import hpack
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.peers.http2 import FramePeer, preface, request_fields
from tests.transports.http import support
from tests.transports.http.support import JSON, DummyFace, OfferingWire
from trimcp.budget import LITTLE, Budget
from trimcp.principal import Principal
from trimcp.support.deadlines import Deadlines
from trimcp.transports.http.h1.wires import StreamWire, Wire
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.h2 import frames as h2
from trimcp.transports.http.h2.frames import Code, Setting
from trimcp.transports.http.interfaces import Admitted, ByteStream, Head, HttpResponse, Upgrade
from trimcp.transports.http.settings import HttpLimits
from trimcp.transports.websocket.frames import KEEP_ALIVE

LIMITS = HttpLimits()
LARGE = 1024 * 1024


@pytest.fixture(
    autouse=True, params=[pytest.param(StreamWire, id="reads"), pytest.param(OfferingWire, id="is offered")]
)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections read, or be offered what came for as long as they wait."""
    monkeypatch.setitem(globals(), "memory", partial(support.memory, wire=request.param))


memory = support.memory


def handler_of(site: support.Memory, path: str) -> support.DummyHandler:
    """The handler of a request, as tasks that judge heads may run in any order."""
    [found] = [handler for handler in site.face.handlers if handler.head.path == path]
    return found


# Requests and responses


async def test_requests_are_answered_over_one_connection(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        for n in (0, 1, 200, 20_000):
            answer = await peer.fetch("/echo", b"x" * n, headers=[("content-length", str(n))])
            assert (answer.status, answer.body, answer.reset) == (200, b"x" * n, None)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["date"].endswith("GMT")
            assert answer.headers.get("content-length") == (str(n) if n else None)
        assert site.face.ended == [("/echo", 200, n) for n in (0, 1, 200, 20_000)]
        head = site.face.handlers[0].head
        assert (head.method, head.path, head.peer, head.headers["host"], head.http2) == (
            *("POST", "/echo", "test", "test"),
            True,
        )
        assert site.connections[0].idle


async def test_many_are_under_way_and_answered_in_any_order(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        ids = [await peer.ask("/wait", b"%d" % n) for n in range(50)]
        await wait_all_tasks_blocked()
        handlers = sorted(site.face.handlers, key=lambda handler: int(handler.body or b""), reverse=True)
        for handler in handlers:
            handler.reply.send(HttpResponse(200, JSON, b"for " + (handler.body or b"")))
        for n, id in enumerate(ids):
            assert (await peer.answer(id)).body == b"for %d" % n


@pytest.mark.parametrize("again", [True, False])
async def test_a_head_like_one_before_is_judged_once_if_the_face_allows(again: bool, autojump_clock: MockClock) -> None:
    async with memory(DummyFace(again=again)) as site:
        peer = await site.connect_http2()
        headers = [("x-token", "abc")]
        for n in range(6):
            assert (await peer.fetch("/echo", b"%d" % n, headers=headers)).body == b"%d" % n
        assert site.face.judged == (1 if again else 6)
        other = await peer.fetch("/echo", b"", headers=[("x-token", "abd")])
        assert other.status == 200
        assert site.face.handlers[-1].head.headers["x-token"] == "abd"


@pytest.mark.parametrize("index", [False, True], ids=["plain", "in the table"])
async def test_calls_that_differ_in_their_time_limit_are_judged_once(index: bool, autojump_clock: MockClock) -> None:
    async with memory(DummyFace(again=True)) as site:
        peer = await site.connect_http2()
        for limit in ("1S", "2S", None, "3S", "2S", None):
            fields = [(":method", "POST"), (":scheme", "http"), (":authority", "test"), (":path", "/echo")]
            if limit is not None:
                fields.append(("grpc-timeout", limit))
            await peer.send(peer.head(fields, end=True, plain=not index))
            assert (await peer.answer(peer.last)).status == 200
            assert site.face.handlers[-1].head.headers.get("grpc-timeout") == limit
        assert site.face.judged == 1


async def test_equal_blocks_are_read_again_when_the_table_has_changed(autojump_clock: MockClock) -> None:
    """The same index means another header then."""
    async with memory() as site:
        peer = await site.connect_http2()
        for token in ("one", "two", "one", "two"):
            for _ in range(3):
                await peer.fetch("/echo", headers=[("x-token", token)])
                assert site.face.handlers[-1].head.headers["x-token"] == token


async def test_a_response_in_parts(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        reply = site.face.handlers[0].reply
        reply.start(HttpResponse(200, JSON, b"a"))
        await peer.receive()
        reply.write(b"b")
        assert not reply.gone
        reply.finish(b"c", (("x-sum", "1"),))
        answer = await peer.answer(id)
        assert (answer.body, answer.trailers) == (b"abc", {"x-sum": "1"})
        assert reply.gone
        assert reply.waiting == 0


@pytest.mark.parametrize("body", [b"", b"all"])
async def test_trailers_of_a_whole_response(body: bytes, autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        site.face.handlers[0].reply.send(HttpResponse(200, (), body, (("grpc-status", "0"),)))
        answer = await peer.answer(id)
        assert (answer.body, answer.trailers) == (body, {"grpc-status": "0"})


async def test_a_head_is_answered_without_a_body(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait", method="HEAD")
        await wait_all_tasks_blocked()
        site.face.handlers[0].reply.send(HttpResponse(200, JSON, b"12345"))
        answer = await peer.answer(id)
        assert (answer.body, answer.headers["content-length"]) == (b"", "5")


@pytest.mark.parametrize(
    ("path", "status"), [("/no", 403), ("/bug", 500), ("/crash", 500), ("/%zz", 400), ("/" + "a" * 20_000, 414)]
)
async def test_refusals_and_crashes_end_their_request_alone(
    path: str, status: int, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        assert (await peer.fetch(path)).status == status
        assert (await peer.fetch("/echo", b"on")).body == b"on"
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == (path in ("/bug", "/crash"))


async def test_a_response_that_breaks_off_is_a_reset(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        answer = await peer.fetch("/half")
        assert (answer.body, answer.reset) == (b"", Code.INTERNAL_ERROR) or answer.reset is Code.INTERNAL_ERROR
        assert (await peer.fetch("/echo", b"on")).body == b"on"


@pytest.mark.parametrize("method", ["CONNECT", "BREW"])
async def test_methods_that_nobody_knows(method: str, autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        fields = [(":method", method), (":authority", "test")]
        if method == "BREW":
            fields += [(":scheme", "http"), (":path", "/")]
        await peer.send(peer.head(fields, end=True))
        assert (await peer.answer(peer.last)).status == 501


async def test_a_head_of_too_many_fields_is_refused(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        many = [(f"x-{n}", "1") for n in range(LIMITS.max_headers)]
        assert (await peer.fetch("/echo", headers=many)).status == 431
        assert (await peer.fetch("/echo", b"on")).body == b"on"


async def test_a_response_with_an_impossible_header_loses_its_headers(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        site.face.handlers[0].reply.send(HttpResponse(200, (("X-A", "1\r\nX-B: 2"),), b"body"))
        answer = await peer.answer(id)
        assert (answer.body, "x-a" in answer.headers) == (b"body", False)
    assert "cannot be sent" in caplog.text


# Bodies


async def test_a_body_of_many_frames_and_windows(autojump_clock: MockClock) -> None:
    """It is granted again as it is taken, so that it can be larger than the window."""
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/echo", None)
        window, left = h2.DEFAULT_WINDOW, LARGE
        while left:
            size = min(left, h2.MAX_FRAME, window)
            if not size:
                frame = await peer.receive()
                assert frame is not None
                if frame.kind == h2.WINDOW_UPDATE and frame.stream == id:
                    window += h2.word_at(frame.payload, 0)
                continue
            left -= size
            window -= size
            await peer.send(h2.frame(h2.DATA, 0 if left else h2.END_STREAM, id, b"x" * size))
        assert len((await peer.answer(id)).body) == LARGE


async def test_a_body_that_comes_while_the_head_is_judged_is_bounded_by_the_window(autojump_clock: MockClock) -> None:
    face = DummyFace(held=trio.Event())
    async with memory(face) as site:
        peer = await site.connect_http2()
        id = await peer.ask("/echo", b"x" * h2.DEFAULT_WINDOW)
        await wait_all_tasks_blocked()
        assert face.held is not None
        face.held.set()
        assert len((await peer.answer(id)).body) == h2.DEFAULT_WINDOW
        assert not [f for f in peer.frames if f.kind == h2.WINDOW_UPDATE and f.stream == id]


@pytest.mark.parametrize("said", [True, False])
async def test_a_body_that_is_too_large_is_refused_and_the_connection_lives(
    said: bool, autojump_clock: MockClock
) -> None:
    async with memory(DummyFace(max_body=1_000)) as site:
        peer = await site.connect_http2()
        headers = [("content-length", "60000")] if said else []
        answer = await peer.fetch("/echo", b"x" * 60_000, headers=headers)
        assert (answer.status, answer.body) == (413, b'"too large"')
        assert (await peer.fetch("/echo", b"on")).body == b"on"
        assert [handler.body for handler in site.face.handlers if handler.body is not None] == [b"on"]


@pytest.mark.parametrize("again", [True, False])
async def test_what_is_too_large_is_refused_by_its_beginning_also_if_that_comes_behind_its_head(
    again: bool, autojump_clock: MockClock
) -> None:
    async with memory(DummyFace(max_body=1_000, again=again)) as site:
        peer = await site.connect_http2()
        for n in (1, 2):
            id = await peer.ask("/echo", None, headers=[("content-length", "60000")])
            await wait_all_tasks_blocked()
            await peer.send(h2.frame(h2.DATA, 0, id, b"its id"))
            while not (answer := peer.streams.get(id)) or not answer.ended:
                await peer.receive()
            assert (answer.status, answer.body) == (413, b'"too large"')
            assert [handler.beginning for handler in site.face.handlers] == [b"its id"] * n


async def test_of_a_body_that_is_too_large_little_is_copied(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(max_body=LARGE)) as site:
        peer = await site.connect_http2()
        id, piece = await peer.ask("/echo", None), b"x" * h2.MAX_FRAME
        for _ in range(LARGE // len(piece)):
            await peer.send(h2.frame(h2.DATA, 0, id, piece))
            await wait_all_tasks_blocked()
        gc.collect()
        tracemalloc.start()
        try:
            await peer.send(h2.frame(h2.DATA, 0, id, piece))
            await wait_all_tasks_blocked()
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(site.face.handlers[0].beginning) == 64 * 1024
        assert most < LARGE / 2


async def test_who_waits_for_leave_to_send_what_is_too_large_is_refused_at_once(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(max_body=1_000)) as site:
        peer = await site.connect_http2()
        began = trio.current_time()
        id = await peer.ask("/echo", None, headers=[("content-length", "60000"), ("expect", "100-continue")])
        while not (answer := peer.streams.get(id)) or not answer.ended:
            await peer.receive()
        assert (answer.status, trio.current_time()) == (413, began)


async def test_a_body_that_goes_on_after_its_answer_is_dropped_for_a_while(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/no", None)
        while not (answer := peer.streams.get(id)) or not answer.ended:
            await peer.receive()
        assert (answer.status, answer.reset) == (403, None)
        await peer.send(h2.frame(h2.DATA, 0, id, b"x" * 1_000))
        await trio.sleep(LIMITS.head_timeout + LIMITS.linger_timeout)
        while answer.reset is None:
            await peer.receive()
        assert answer.reset is Code.NO_ERROR
        assert (await peer.fetch("/echo", b"on")).body == b"on"


async def test_who_waits_for_leave_to_send_a_body_gets_it(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/echo", None, headers=[("expect", "100-continue")])
        while id not in peer.streams or peer.streams[id].headers.get(":status") != "100":
            await peer.receive()
        await peer.send(h2.frame(h2.DATA, h2.END_STREAM, id, b"now"))
        assert (await peer.answer(id)).body == b"now"


# What takes too long


async def test_a_body_that_takes_too_long_is_refused(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/echo", None)
        began = trio.current_time()
        assert (await peer.answer(id)).status == 408
        assert LIMITS.body_timeout <= trio.current_time() - began <= LIMITS.body_timeout + LIMITS.head_timeout
        assert (await peer.fetch("/echo", b"on")).body == b"on"


@pytest.mark.parametrize("said", [b"", h2.PREFACE[:10], h2.PREFACE, preface() + h2.frame(h2.HEADERS, 0, 1, b"\x82")])
async def test_who_does_not_finish_a_head_is_dropped(said: bytes, autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        began = trio.current_time()
        if said:
            await client.send(said)
        peer = FramePeer(client.stream, acknowledges=False)
        while await peer.receive() is not None:
            pass
        assert trio.current_time() - began <= 2 * LIMITS.head_timeout + LIMITS.linger_timeout


async def test_an_idle_connection_is_closed(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        await peer.fetch("/echo")
        began = trio.current_time()
        goaway = await peer.until_closed()
        assert goaway is not None
        assert goaway.code is Code.NO_ERROR
        assert LIMITS.idle_timeout <= trio.current_time() - began <= LIMITS.idle_timeout + LIMITS.head_timeout


async def test_a_silent_peer_is_pinged_while_it_is_answered_and_dropped_if_it_is_dead(
    autojump_clock: MockClock,
) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        await peer.ask("/wait")
        began = trio.current_time()
        pings = []
        while (frame := await peer.receive()) is not None:
            if frame.kind == h2.PING:
                pings.append(trio.current_time() - began)
                if len(pings) < 3:
                    await peer.send(h2.frame(h2.PING, h2.ACK, 0, frame.payload))
        assert len(pings) == 3
        assert pings[0] <= KEEP_ALIVE.interval + LIMITS.head_timeout
        assert trio.current_time() - began >= pings[1] + KEEP_ALIVE.dead_after
        assert site.face.handlers[0].gone == 1


async def test_a_stream_whose_window_stays_closed_is_given_up_alone(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: 10})
        peer.grants = False
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        handler.reply.start(HttpResponse(200, (), b"x" * 11))
        began = trio.current_time()
        answer = await peer.answer(id)
        assert (answer.body, answer.reset) == (b"x" * 10, Code.CANCEL)
        assert trio.current_time() - began >= LIMITS.stall_timeout
        assert handler.gone == 1
        assert (await peer.fetch("/echo", b"on")).body == b"on"


# Windows and turns


async def test_what_is_sent_stays_within_the_windows(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: 1_000})
        peer.grants = False
        id = await peer.ask("/echo", b"x" * 5_000)
        await wait_all_tasks_blocked()
        seen, allowed = 0, 1_000
        for grant in (0, 1, 999, 3_000):
            if grant:
                await peer.send(h2.window_update(id, grant))
            allowed += grant
            while seen < allowed:
                await peer.receive()
                seen = len(peer.streams[id].body) if id in peer.streams else 0
            await wait_all_tasks_blocked()
        assert peer.streams[id].ended
        assert peer.streams[id].body == b"x" * 5_000


async def test_the_window_of_the_connection_holds_everything_back_and_then_lets_it_go(
    autojump_clock: MockClock,
) -> None:
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW})
        peer.grants = False
        ids = [await peer.ask("/echo", b"x" * 30_000) for _ in range(4)]
        await wait_all_tasks_blocked()
        with trio.move_on_after(1):
            while True:
                await peer.receive()
        assert sum(len(peer.streams[id].body) for id in ids if id in peer.streams) == h2.DEFAULT_WINDOW
        await peer.send(h2.window_update(0, 1_000_000))
        for id in ids:
            assert len((await peer.answer(id)).body) == 30_000


async def test_windows_that_shrink_and_grow_by_settings(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: 100})
        peer.grants = False
        id = await peer.ask("/echo", b"x" * 300)
        await wait_all_tasks_blocked()
        await peer.send(h2.settings_frame({Setting.INITIAL_WINDOW_SIZE: 50}))  # now it is -50
        await peer.send(h2.settings_frame({Setting.INITIAL_WINDOW_SIZE: 250}))
        with trio.move_on_after(1):
            while True:
                await peer.receive()
        assert len(peer.streams[id].body) == 250
        await peer.send(h2.window_update(id, 50))
        assert (await peer.answer(id)).body == b"x" * 300


async def test_a_large_answer_does_not_hold_up_a_small_one(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: h2.MAX_WINDOW})
        await peer.send(h2.window_update(0, h2.MAX_WINDOW - h2.DEFAULT_WINDOW))
        large, small = await peer.ask("/large"), await peer.ask("/small")
        await wait_all_tasks_blocked()
        first, second = handler_of(site, "/large"), handler_of(site, "/small")
        first.reply.send(HttpResponse(200, (), b"x" * 8 * LARGE))
        second.reply.send(HttpResponse(200, (), b"small"))
        await peer.answer(small)
        assert len(peer.streams[large].body) < LARGE
        assert len((await peer.answer(large)).body) == 8 * LARGE


async def test_handlers_wait_for_room_and_learn_when_they_may_write(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: 100})
        peer.grants = False
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        reply = handler.reply
        reply.start(HttpResponse(200))
        reply.write(b"x" * (100 + LIMITS.low_water + 1))
        waited = trio.Event()

        async def wait_for_room() -> None:
            await reply.room()
            waited.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_room)
            await wait_all_tasks_blocked()
            assert not waited.is_set()
            assert reply.waiting == LIMITS.low_water + 1
            await peer.send(h2.window_update(id, 1))
            with trio.fail_after(5):
                await waited.wait()
        before = handler.drained
        await peer.send(h2.window_update(id, LARGE) + h2.window_update(0, LARGE))
        while id not in peer.streams or len(peer.streams[id].body) < 100 + LIMITS.low_water + 1:
            await peer.receive()
        await wait_all_tasks_blocked()
        assert handler.drained > before


# How streams end


async def test_a_stream_that_is_reset_ends_its_handler_alone(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        first, second = await peer.ask("/one"), await peer.ask("/two")
        await wait_all_tasks_blocked()
        await peer.send(h2.rst_stream(first, Code.CANCEL))
        await wait_all_tasks_blocked()
        one, two = handler_of(site, "/one"), handler_of(site, "/two")
        assert (one.gone, two.gone) == (1, 0)
        assert one.reply.gone
        one.reply.send(HttpResponse(200))  # nobody hears it
        two.reply.send(HttpResponse(200))
        assert (await peer.answer(second)).status == 200
        assert site.face.ended == [("/one", 0, 0), ("/two", 200, 0)]


async def test_a_stream_that_is_reset_before_it_was_judged_never_starts(autojump_clock: MockClock) -> None:
    face = DummyFace(held=trio.Event())
    async with memory(face) as site:
        peer = await site.connect_http2()
        id = await peer.ask("/echo")
        await wait_all_tasks_blocked()
        await peer.send(h2.rst_stream(id, Code.CANCEL))
        await wait_all_tasks_blocked()
        assert face.held is not None
        face.held.set()
        await wait_all_tasks_blocked()
        assert [handler.body for handler in face.handlers] == [None]
        assert site.connections[0].idle


@pytest.mark.parametrize("how", ["leaves", "half closes", "gives way"])
async def test_everything_ends_with_the_connection(how: str, autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        for _ in range(5):
            await peer.ask("/wait")
        await peer.ask("/wait", None)
        await wait_all_tasks_blocked()
        if how == "leaves":
            await peer.stream.aclose()
        elif how == "half closes":
            assert isinstance(peer.stream, trio.StapledStream)
            await peer.stream.send_eof()
        else:
            site.connections[0].evict("for the test")
        await site.over.wait()
        assert [handler.gone for handler in site.face.handlers] == [1] * 5 + [0]
        assert site.face.budget.held == 0


async def test_more_streams_than_there_may_be_are_refused(autojump_clock: MockClock) -> None:
    async with memory(limits=HttpLimits(max_streams=3)) as site:
        peer = await site.connect_http2()
        ids = [await peer.ask(f"/wait/{n}") for n in range(4)]
        assert (await peer.answer(ids[-1])).reset is Code.REFUSED_STREAM
        await wait_all_tasks_blocked()
        handler_of(site, "/wait/0").reply.send(HttpResponse(200))
        await peer.answer(ids[0])
        await peer.ask("/wait")
        await wait_all_tasks_blocked()
        assert len(site.face.handlers) == 4


async def test_streams_are_bounded_by_their_owner_over_all_connections(autojump_clock: MockClock) -> None:
    """Half of what there may be, for one address."""
    async with memory(limits=HttpLimits(max_connections=20, max_streams=8)) as site:
        peers = [await site.connect_http2() for _ in range(3)]
        refused = 0
        for peer in peers:
            for _ in range(6):
                await peer.ask("/wait")
        await wait_all_tasks_blocked()
        assert len(site.face.handlers) == 10
        for peer in peers:
            with trio.move_on_after(1):
                while await peer.receive() is not None:
                    pass
            refused += sum(answer.reset is Code.REFUSED_STREAM for answer in peer.streams.values())
        assert refused == 8
        for handler in list(site.face.handlers):
            handler.reply.send(HttpResponse(200))
        await peers[-1].ask("/wait")
        await wait_all_tasks_blocked()
        assert len(site.face.handlers) == 11


async def test_a_stream_weighs_from_its_head_on(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(budget=Budget(4 * 1024 * 1024))) as site:
        peer = await site.connect_http2()
        for _ in range(100):
            await peer.ask("/wait", None)
        await wait_all_tasks_blocked()
        assert site.face.budget.held > 100 * 3_000 * 0.9
        await peer.stream.aclose()
        await site.over.wait()
        assert site.face.budget.held == 0


async def test_what_is_remembered_of_heads_is_weighed_and_bounded(autojump_clock: MockClock) -> None:
    """Requests that differ, of many small headers, which take several times their text."""
    async with memory(DummyFace(budget=Budget(LARGE // 4))) as site:
        peer = await site.connect_http2()
        for n in range(20):
            fields = [(f"x-{n}-{k}", "1") for k in range(60)]
            head = peer.head(request_fields("/echo", headers=fields), plain=True)
            await peer.send(head + peer.head(fields, stream=peer.last, end=True, plain=True))
            assert (await peer.answer(peer.last)).status == 200
        await wait_all_tasks_blocked()
        assert LITTLE // 2 < site.face.budget.held <= LITTLE
        await peer.stream.aclose()
        await site.over.wait()
        assert site.face.budget.held == 0


async def test_an_unread_answer_is_weighed_and_gone_with_its_connection_without_a_collector(
    autojump_clock: MockClock,
) -> None:
    class Data(bytes):
        pass

    async with memory() as site:
        peer = await site.connect_http2()
        await peer.ask("/wait")
        await wait_all_tasks_blocked()
        data = Data(4 * LARGE)
        gone = weakref.ref(site.face.handlers[0])
        site.face.handlers[0].reply.send(HttpResponse(200, (), data))
        del data
        await wait_all_tasks_blocked()
        assert site.face.budget.held > 3.5 * LARGE
        gc.collect()
        gc.disable()
        try:
            await peer.stream.aclose()
            await site.over.wait()
            assert site.face.budget.held == 0
            site.face.handlers.clear()
            assert gone() is None
        finally:
            gc.enable()


async def test_who_holds_most_gives_way_as_one_stream(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(budget=Budget(LARGE))) as site:
        peer = await site.connect_http2()
        large, small = await peer.ask("/large"), await peer.ask("/small")
        await wait_all_tasks_blocked()
        first, second = handler_of(site, "/large"), handler_of(site, "/small")
        first.reply.send(HttpResponse(200, (), bytes(2 * LARGE)))
        assert (await peer.answer(large)).reset is Code.ENHANCE_YOUR_CALM
        second.reply.send(HttpResponse(200, (), b"small"))
        assert (await peer.answer(small)).body == b"small"


async def test_what_is_kept_of_large_bodies_counts_for_their_streams_though_their_heads_are_equal(
    autojump_clock: MockClock,
) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        ids = []
        for body in (b"", bytes(LARGE), bytes(LARGE), b""):
            ids.append(await peer.ask("/wait", body))
            await wait_all_tasks_blocked()
        small, one, other, last = [handler for handler in site.face.handlers if handler.body is not None]
        accounts = [handler.head.holding for handler in (small, one, other)]
        assert small.head.holding is last.head.holding
        assert len(set(map(id, accounts))) == 3
        assert accounts[1] is not None
        accounts[1].add(2 * site.face.budget.bound)
        assert (await peer.answer(ids[1])).reset is Code.ENHANCE_YOUR_CALM
        assert [handler.gone for handler in (small, one, other, last)] == [0, 1, 0, 0]


async def test_many_small_requests_are_served_on_one_connection_while_their_address_holds_much(
    autojump_clock: MockClock,
) -> None:
    budget = Budget(4 * LARGE)
    holding = budget.holding("address unknown")
    holding.add(2 * LARGE)
    async with memory(DummyFace(budget=budget)) as site:
        peer = await site.connect_http2()
        for _ in range(90):
            await peer.ask("/wait", b"x")
        assert (await peer.fetch("/echo", b"y")).body == b"y"
        assert len(site.face.handlers) == 91
    holding.close()


async def test_a_connection_that_holds_too_much_gives_way_as_a_whole(autojump_clock: MockClock) -> None:
    """Of many small things: no stream of it has an account of its own."""
    async with memory(DummyFace(budget=Budget(LARGE // 4))) as site:
        peer = await site.connect_http2()
        for _ in range(60):
            await peer.ask("/wait", b"x" * 20_000)
        await wait_all_tasks_blocked()
        holding = site.face.budget.holding("somebody else")
        holding.add(LARGE // 4)
        await site.over.wait()
        holding.close()
        assert all(handler.gone == 1 for handler in site.face.handlers if handler.body is not None)
        assert site.face.budget.held == 0
        assert site.hosting.streams.admit("address unknown")


class FaceWithTokens(DummyFace):
    """Believes what a request says about who makes it."""

    async def admit(self, head: Head) -> Admitted:
        name = head.headers.get("authorization")
        head.principal = None if name is None else Principal(name)
        return await super().admit(head)


async def test_streams_count_for_their_callers_and_not_for_the_address_that_all_have(
    autojump_clock: MockClock,
) -> None:
    """Behind a proxy all come from one address: one who takes its half of all streams leaves the others theirs."""
    async with memory(FaceWithTokens(), limits=HttpLimits(max_connections=8, max_streams=100)) as site:
        eve, ada = await site.connect_http2(), await site.connect_http2()
        taken = []
        for _ in range(4):  # with equal heads: the face is asked about the first
            taken.append(await eve.ask("/wait", b"x", headers=[("authorization", "eve")]))
            await wait_all_tasks_blocked()
        refused = await eve.fetch("/wait", b"x", headers=[("authorization", "eve")])
        assert refused.reset is Code.REFUSED_STREAM
        assert not any(id in eve.streams for id in taken)
        assert (await ada.answer(await ada.ask("/echo", b"y", headers=[("authorization", "ada")]))).body == b"y"
        for peer in (eve, ada):
            await peer.stream.aclose()
        await wait_all_tasks_blocked()
        streams = site.hosting.streams
        assert [streams.admit("address unknown") for _ in range(5)] == [True] * 4 + [False]  # as nobody has any


# How the connection ends


async def test_a_drained_connection_serves_what_it_has_begun(autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        site.hosting.stopping = site.hosting.draining = True
        site.connections[0].wake()
        while peer.goaway is None:
            await peer.receive()
        assert (peer.goaway.code, h2.word_at(peer.goaway.payload, 0)) == (Code.NO_ERROR, id)
        late = await peer.ask("/wait")
        assert (await peer.answer(late)).reset is Code.REFUSED_STREAM
        site.face.handlers[0].reply.send(HttpResponse(200, (), b"last"))
        assert (await peer.answer(id)).body == b"last"
        await peer.until_closed()
        await peer.stream.aclose()
        await site.over.wait()


async def test_while_only_idle_connections_end_a_busy_one_is_told_after_its_last_answer(
    autojump_clock: MockClock,
) -> None:
    """To clients on the library h2 a GOAWAY is the end of what is under way."""
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        site.hosting.draining = True
        site.connections[0].wake()
        await wait_all_tasks_blocked()
        site.face.handlers[0].reply.send(HttpResponse(200, (), b"last"))
        assert (await peer.answer(id)).body == b"last"
        assert peer.goaway is None
        await peer.until_closed()
        assert peer.goaway is not None
        await peer.stream.aclose()
        await site.over.wait()


async def test_a_fault_of_the_peer_is_one_line_for_the_curious(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trimcp")
    async with memory() as site:
        peer = await site.connect_http2()
        id = await peer.ask("/wait")
        await wait_all_tasks_blocked()
        await peer.send(h2.frame(h2.DATA, 0, id + 100, b"") + h2.frame(h2.PING, 0, 3, b"12345678") * 100)
        goaway = await peer.until_closed()
        assert goaway is not None
        assert goaway.code is Code.PROTOCOL_ERROR
        assert site.face.handlers[0].gone == 1
    said = [record for record in caplog.records if "broke the protocol of HTTP/2" in record.getMessage()]
    assert len(said) == 1
    assert max(record.levelno for record in caplog.records) == logging.DEBUG


@pytest.mark.parametrize("window", ["closed", "open"])
async def test_a_fault_behind_a_closed_window_is_no_crash(
    window: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it made 255 tracebacks for each connection."""
    async with memory() as site:
        peer = await site.connect_http2({Setting.INITIAL_WINDOW_SIZE: 0 if window == "closed" else 100})
        for _ in range(20):
            await peer.ask("/echo", b"x" * 1_000)
        await wait_all_tasks_blocked()
        await peer.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 2, b"\x82"))
        assert (await peer.until_closed()) is not None
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def flood(peer: FramePeer, pieces: Iterable[bytes]) -> None:
    """Send as much as is taken, and read until the connection has ended."""
    peer.acknowledges = peer.grants = False  # nobody else sends
    with trio.fail_after(1_000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.until_closed)
            for piece in pieces:
                try:
                    await peer.send(piece)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    break
                await trio.lowlevel.checkpoint()


FLOODS = {
    "pings": h2.frame(h2.PING, 0, 0, b"12345678"),
    "answers to pings": h2.frame(h2.PING, h2.ACK, 0, b"12345678"),
    "priorities": h2.frame(h2.PRIORITY, 0, 1, b"\0\0\0\0\x01"),
    "settings": h2.settings_frame({Setting.MAX_HEADER_LIST_SIZE: 1}),
    "answers to settings": h2.frame(h2.SETTINGS, h2.ACK, 0),
    "unknown kinds": h2.frame(0x77, 0, 0, b""),
    "windows of the connection": h2.window_update(0, 1),
    "windows of a stream": h2.window_update(1, 1),
    "windows of a stream that has ended": h2.window_update(3, 1),
    "resets of a stream that has ended": h2.rst_stream(3, 0),
    "GOAWAY frames": h2.goaway(0, 0),
    "frames without data": h2.frame(h2.DATA, 0, 1),
    "padding": h2.frame(h2.DATA, h2.PADDED, 1, b"\x01\0"),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_floods_of_frames_that_are_nobodys_use_end_the_connection(
    kind: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        await peer.ask("/wait", None)
        await peer.fetch("/echo")
        await flood(peer, [FLOODS[kind] * 100] * 100)
        assert peer.goaway is not None
        assert peer.goaway.code is Code.ENHANCE_YOUR_CALM
    assert "flood_refused" in caplog.text
    assert caplog.text.count("\n") < 20


async def test_requests_that_are_given_up_at_once_are_a_flood(autojump_clock: MockClock) -> None:
    """CVE-2023-44487."""
    async with memory() as site:
        peer = await site.connect_http2()
        pieces = []
        for n in range(3_000):
            head = peer.head(request_fields("/wait"), end=True)
            pieces.append(head + h2.rst_stream(2 * n + 1, Code.CANCEL))
        await flood(peer, pieces)
        assert peer.goaway is not None
        assert peer.goaway.code is Code.ENHANCE_YOUR_CALM
        assert len(site.face.handlers) <= 1_010


async def test_calls_that_are_answered_may_be_pinged_and_given_up_for_ever(autojump_clock: MockClock) -> None:
    """As clients do that measure the way, or race two servers."""
    async with memory() as site:
        peer = await site.connect_http2()
        for n in range(2_500):
            assert (await peer.fetch("/echo", b"1")).body == b"1"
            await peer.send(h2.frame(h2.PING, 0, 0, b"12345678") * 2)
            if n % 2:
                await peer.ask("/wait")
                await peer.send(h2.rst_stream(peer.last, Code.CANCEL))
        assert peer.goaway is None


@pytest.mark.parametrize("kind", ["large", "many", "bomb"])
async def test_heads_without_an_end_or_that_inflate(kind: str, autojump_clock: MockClock) -> None:
    async with memory() as site:
        peer = await site.connect_http2()
        if kind == "bomb":
            big = hpack.Encoder().encode([("x-a", "a" * 3_900)], huffman=False)
            data = h2.frame(h2.HEADERS, h2.END_HEADERS, 1, big + b"\xbe" * 10_000)
        else:
            size = 16_000 if kind == "large" else 0
            pieces = [h2.frame(h2.CONTINUATION, 0, 1, bytes(size)) for _ in range(100)]
            data = h2.frame(h2.HEADERS, 0, 1, b"\x82") + b"".join(pieces)
        await flood(peer, [data])
        assert peer.goaway is not None
        assert peer.goaway.code is Code.ENHANCE_YOUR_CALM


async def test_a_peer_that_reads_no_answers_to_its_pings_is_not_read(autojump_clock: MockClock) -> None:
    from trio.testing import lockstep_stream_pair

    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        with trio.move_on_after(1):
            await client.send(preface())
            for _ in range(1_000):
                await client.send(h2.frame(h2.PING, 0, 0, b"12345678") * 50)
        [connection] = site.connections
        assert connection.writer.waiting < 512 * 1024


# Both directions


async def test_a_tunnel_carries_bytes_in_both_directions(autojump_clock: MockClock) -> None:
    async def serve(stream: ByteStream) -> None:
        stream.start((("content-type", "application/grpc"),))
        while data := await stream.receive():
            stream.credit(len(data))
            await stream.send(data.upper())
        assert stream.half_closed
        stream.finish((("grpc-status", "0"),))

    async with memory(DummyFace(serve=serve)) as site:
        peer = await site.connect_http2()
        id = await peer.ask("/tunnel", None)
        for n, data in enumerate((b"a", b"bc", b"d" * 10_000)):
            await peer.send(h2.frame(h2.DATA, 0, id, data))
            while not (id in peer.streams and peer.streams[id].body.endswith(data.upper())):
                await peer.receive()
            assert n < 3
        await peer.send(h2.frame(h2.DATA, h2.END_STREAM, id))
        answer = await peer.answer(id)
        assert (answer.status, answer.trailers) == (200, {"grpc-status": "0"})
        await wait_all_tasks_blocked()
        assert site.connections[0].idle
        assert site.face.ended == [("/tunnel", 200, 10_003)]


async def test_what_a_tunnel_does_not_use_is_not_granted_again(autojump_clock: MockClock) -> None:
    used = trio.Event()

    async def serve(stream: ByteStream) -> None:
        stream.start(())
        await used.wait()
        total = 0
        while data := await stream.receive():
            total += len(data)
            stream.credit(len(data))
        stream.finish((("total", str(total)),))

    async with memory(DummyFace(serve=serve)) as site:
        peer = await site.connect_http2()
        id = await peer.ask("/tunnel", None)
        for _ in range(3):
            await peer.send(h2.frame(h2.DATA, 0, id, bytes(16_000)))
        with trio.move_on_after(1):
            while True:
                await peer.receive()
        assert not [f for f in peer.frames if f.kind == h2.WINDOW_UPDATE and f.stream == id]
        assert (await peer.fetch("/echo", b"others go on")).body == b"others go on"
        used.set()
        await peer.send(h2.frame(h2.DATA, h2.END_STREAM, id, bytes(16_000)))
        assert (await peer.answer(id)).trailers == {"total": "64000"}


@pytest.mark.parametrize("how", ["reset", "leaves", "not finished", "crash"])
async def test_how_a_tunnel_ends(how: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    raised: list[BaseException] = []

    async def serve(stream: ByteStream) -> None:
        stream.start(())
        if how == "not finished":
            return
        if how == "crash":
            raise ValueError("a bug")
        try:
            await stream.receive()
        except trio.BrokenResourceError as error:
            raised.append(error)
            assert stream.gone.is_set()
            with pytest.raises(trio.BrokenResourceError):
                await stream.send(b"x")

    async with memory(DummyFace(serve=serve)) as site:
        peer = await site.connect_http2()
        id = await peer.ask("/tunnel", None)
        await wait_all_tasks_blocked()
        if how == "reset":
            await peer.send(h2.rst_stream(id, Code.CANCEL))
        elif how == "leaves":
            await peer.stream.aclose()
        else:
            assert (await peer.answer(id)).reset is Code.CANCEL
        await wait_all_tasks_blocked()
        assert len(raised) == (how in ("reset", "leaves"))
        assert not site.connections or site.connections[0].idle
    assert ("crashed" in caplog.text) == (how == "crash")


async def test_a_websocket_over_a_stream(autojump_clock: MockClock) -> None:
    """RFC 8441."""

    async def serve(
        early: bytes, wire: Wire, writer: H1Writer, deadlines: Deadlines, head: Head, upgrade: Upgrade
    ) -> bool:
        assert head.websocket
        assert not early
        while data := await wire.read(100):
            writer.write(data + b"!")
        await wire.close()
        return True

    async with memory(serve_websocket=serve) as site:
        peer = await site.connect_http2()
        await peer.receive()
        assert (h2.Setting.ENABLE_CONNECT_PROTOCOL, 1) in h2.settings_in(peer.frames[0].payload)
        fields = request_fields("/ws", "CONNECT", [("sec-websocket-version", "13")])
        await peer.send(peer.head([*fields[:1], (":protocol", "websocket"), *fields[1:]]))
        id = peer.last
        await peer.send(h2.frame(h2.DATA, 0, id, b"hello"))
        while not (id in peer.streams and peer.streams[id].body):
            await peer.receive()
        assert (peer.streams[id].status, peer.streams[id].body) == (200, b"hello!")
        await peer.send(h2.frame(h2.DATA, h2.END_STREAM, id))
        assert (await peer.answer(id)).ended
