"""Load over WebSocket: on this package's listener, on servers that go wrong, and the frames one by one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.support import ECHO, greeting, reply
from tests.bench.test_http import counts, serving
from tests.peers import websockets
from tests.peers.tls import client_context, server_context
from tests.peers.websockets import FIN, TEXT
from tests.yardsticks import assert_costs
from trimcp.bench.channels import FrameReader
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Report
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.wire.revisions import LATEST, LATEST_LEGACY


def ws(url: str) -> str:
    return f"ws{url.removeprefix('http').removesuffix('/mcp')}/ws"


@pytest.mark.parametrize("revision", [LATEST.name, LATEST_LEGACY.name])
async def test_a_right_server_answers_rightly(revision: str) -> None:
    async with serving() as url:
        plan = Plan(ECHO, count=300, under_way=16, sessions=2, revision=revision)
        report = await measure(WebSocketServer(ws(url)), plan)
    assert (report.calls, report.errors) == (300, {})
    assert (report.transport, report.revision, report.reply) == ("websocket", revision, None)
    assert report.server_name == "right"


async def test_large_messages_and_progress_come_through() -> None:
    big = MixEntry.tool("echo", {"text": "x{n}" * 100_000}, expect="x{n}" * 100_000)
    stream = MixEntry.tool("stream", {"n": 20}, expect="done")
    async with serving() as url:
        report = await measure(WebSocketServer(ws(url)), Plan(big, count=6, under_way=3))
        assert (report.calls, report.errors) == (6, {})
        report = await measure(WebSocketServer(ws(url)), Plan(stream, count=6, under_way=3, progress=True))
        assert (report.calls, report.progress, report.errors) == (6, 120, {})


async def test_what_is_given_up_leaves_the_session_usable() -> None:
    slow = MixEntry.tool("slow", {"seconds": 60})
    async with serving() as url:
        plan = Plan([slow, ECHO], count=40, under_way=4, timeout=0.1)
        report = await measure(WebSocketServer(ws(url)), plan)
    assert report.timed_out + report.calls == 40
    assert (report.timed_out > 5, report.calls > 5, report.errors) == (True, True, {})


async def test_tls_is_spoken_with_whom_is_trusted() -> None:
    ours = client_context()
    async with serving(ssl_context=server_context("127.0.0.1")) as url:
        report = await measure(WebSocketServer(ws(url), ssl_context=ours), Plan(ECHO, count=50, under_way=8))
    assert (report.calls, report.errors) == (50, {})


# A server without library


def frame(payload: bytes, first: int = FIN | TEXT) -> bytes:
    """A frame as servers send it."""
    return websockets.frame(first, payload, masked=False)


async def of_wrong(answer: Callable[[dict[str, Any]], bytes], *, head: bytes = b"", **options: Any) -> Report:
    """Measure a server whose frames in answer to a call are what a function says; b"" closes."""
    connections = 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        looked = connections == 1  # the client that looks before the load
        raw = await websockets.accept(stream, answer=None if looked or not head else head)
        while True:
            first, text = await raw.hear()
            if not first:
                return
            if text.startswith(b"{"):
                said = said_to(orjson.loads(text), answer)
                if said is None:
                    return
                await raw.say(said)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        url = f"ws://127.0.0.1:{listeners[0].socket.getsockname()[1]}/"
        with trio.fail_after(30):
            options = {"count": 5, "reopen": 0, "revision": LATEST_LEGACY.name, **options}
            report = await measure(WebSocketServer(url), Plan(ECHO, **options))
        nursery.cancel_scope.cancel()
    return report


def said_to(message: dict[str, Any], answer: Callable[[dict[str, Any]], bytes]) -> bytes | None:
    if message.get("method") == "initialize":
        return frame(greeting(message))
    if message.get("method") == "tools/list":
        tools = [{"name": "echo", "inputSchema": {"type": "object"}}]
        return frame(orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools}}))
    if message.get("method") == "tools/call":
        return answer(message) or None
    return b""


@pytest.mark.parametrize(
    "form",
    [
        frame,
        lambda text: frame(b"are you there?", 0x89) + frame(text) + frame(b"", 0x8A),
        lambda text: frame(text[:3], 0x01) + frame(b"", 0x89) + frame(text[3:9], 0x00) + frame(text[9:], 0x80),
    ],
)
async def test_every_form_of_a_right_answer_is_right(form: Any) -> None:
    report = await of_wrong(lambda message: form(reply(message)))
    assert (report.calls, report.errors) == (5, {})


@pytest.mark.parametrize(
    ("answer", "kinds", "example"),
    [
        (lambda m: frame(reply(m, "no")), {"wrong text": 5}, "no"),
        (lambda m: frame(b"no"), {"not JSON": 1, "no answer": 1}, "no"),
        (
            lambda m: frame(b"\x03\xf3gone mad", 0x88),
            {"connection lost": 1},
            "the server closed it (code 1011) gone mad",
        ),
        (lambda m: frame(b"", 0x88), {"connection lost": 1}, "the server closed it (code 1005)"),
        (lambda m: frame(reply(m), 0x82), {"connection lost": 1}, "a frame that begins with 0x82"),
        (lambda m: frame(reply(m), 0xC1), {"connection lost": 1}, "a frame that begins with 0xc1"),
        (lambda m: frame(reply(m), 0x80), {"connection lost": 1}, "a frame that begins with 0x80"),
        (lambda m: b"\x81\x85abcdefghi", {"connection lost": 1}, "a frame that is masked, or larger than"),
        (lambda m: b"\x81\x7f" + b"\x7f" * 8, {"connection lost": 1}, "a frame that is masked, or larger than"),
        (lambda m: b"", {"connection lost": 1}, "the server closed the connection"),
    ],
)
async def test_wrong_answers_are_counted_by_kind(answer: Any, kinds: dict[str, int], example: str) -> None:
    report = await of_wrong(answer, patience=0.5)
    assert (report.calls, counts(report)) == (0, kinds)
    assert report.errors[next(iter(kinds))].example.startswith(example)


@pytest.mark.parametrize(
    ("head", "example"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "the server answered 403 Forbidden; it knows who asks"),
        (b"HTTP/1.1 101 X\r\nsec-websocket-accept: x\r\n\r\n", "the answer is no handshake of a WebSocket"),
        (b"x" * (128 * 1024 + 1), "the head of a handshake must have an end"),
    ],
)
async def test_a_handshake_that_fails_is_no_connection(head: bytes, example: str) -> None:
    report = await of_wrong(lambda message: frame(reply(message)), head=head)
    assert (report.calls, counts(report)) == (0, {"no connection": 1})
    assert re.match(rf"no WebSocket at ws://127.0.0.1:\d+/: {example}", report.errors["no connection"].example)


# Frames

SMALL = st.tuples(st.lists(st.binary(max_size=300), max_size=6), st.lists(st.integers(1, 400), min_size=1))
LARGE = st.tuples(
    st.lists(st.binary(min_size=65_530, max_size=65_540), max_size=3), st.lists(st.integers(1000, 70_000), min_size=1)
)


@given(SMALL | LARGE)
def test_messages_are_cut_out_wherever_the_chunks_are(case: tuple[list[bytes], list[int]]) -> None:
    texts, sizes = case
    stream = b"".join(map(frame, texts))
    reader = FrameReader(1_000_000)
    found: list[bytes] = []
    turn = 0
    while stream:
        size = sizes[turn % len(sizes)]
        found += reader.feed(stream[:size])
        stream, turn = stream[size:], turn + 1
    assert (found, reader.fault) == (texts, None)


def test_fragments_are_joined_in_linear_time() -> None:
    def read(count: int) -> None:
        reader = FrameReader(1_000_000)
        assert reader.feed(frame(b"", 0x01) + frame(b"x", 0x00) * count) == []
        [text] = reader.feed(frame(b"", 0x80))
        assert len(text) == count

    # Eight times the fragments; to count all of them for each would take sixty-four times as long.
    assert_costs(lambda: read(16_000), at_most=24, times=lambda: read(2_000))


def test_a_message_in_endless_fragments_is_refused() -> None:
    reader = FrameReader(1_000)
    reader.feed(frame(b"x" * 600, 0x01))
    assert reader.fault is None
    assert reader.feed(frame(b"x" * 600, 0x00)) == []
    assert reader.fault is not None
    assert reader.fault.startswith("a message larger than 1,000 bytes")
