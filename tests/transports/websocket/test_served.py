"""A WebSocket of our own listener is a pushed session: what goes in and out, who waits, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn

import attrs
import orjson
import pytest
import trio
from trio.testing import MockClock, memory_stream_pair, wait_all_tasks_blocked

import trimcp
from tests.peers.http1 import HttpWire
from tests.peers.http2 import FramePeer, request_fields
from tests.peers.tls import client_context, server_context
from tests.peers.websockets import (
    BINARY,
    CLOSE,
    CONTINUATION,
    FIN,
    PING,
    PONG,
    TEXT,
    RawWebSocket,
    close,
    frame,
    handshake,
    message,
    upgrade,
)
from trimcp.channel import Kind, Outgoing
from trimcp.framing.frames import FrameGate
from trimcp.net import http_application
from trimcp.session.limits import Limits
from trimcp.session.push import WrittenOutbox
from trimcp.session.session import Session
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.h1.connection import H1Connection
from trimcp.transports.http.h1.hosting import Hosting
from trimcp.transports.http.h1.wires import SocketWire, StreamWire, Wire
from trimcp.transports.http.h2 import frames as h2
from trimcp.transports.http.settings import HttpLimits, HttpSettings
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive
from trimcp.transports.websocket.served import ServedWebSocket, serve_websocket
from trimcp.wire.codes import CANCELLED_BY_DRAIN

INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}


def request(id: object, method: str = "ping", **params: object) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def call(id: object, tool: str, **arguments: object) -> bytes:
    return request(id, "tools/call", name=tool, arguments=arguments)


@attrs.define(eq=False)
class Site:
    """Our listener's connections to one server, without a port."""

    face: HttpApplication
    hosting: Hosting
    sessions: set[Session]
    connections: list[H1Connection] = attrs.field(factory=list)
    streams: list[trio.abc.Stream] = attrs.field(factory=list)  # of the clients
    gone: trio.Event = attrs.field(factory=trio.Event)

    @property
    def session(self) -> Session:
        (session,) = self.sessions
        return session

    def dial(self, *, tcp: bool = False, tls: bool = False) -> trio.abc.Stream:
        """Connect: in memory, with sockets, or with TLS in memory."""
        wire: Wire
        if tcp:
            listener = socket.create_server(("127.0.0.1", 0))
            near = socket.create_connection(listener.getsockname())
            wire = SocketWire(listener.accept()[0])
            listener.close()
            near.setblocking(False)
            ours: trio.abc.Stream = trio.SocketStream(trio.socket.from_stdlib_socket(near))
        else:
            ours, theirs = memory_stream_pair()
            if tls:
                ours = trio.SSLStream(ours, client_context(), server_hostname="localhost")
                wire = StreamWire(trio.SSLStream(theirs, server_context("localhost"), server_side=True))
            else:
                wire = StreamWire(theirs)
        self.streams.append(ours)
        connection = H1Connection(self.hosting, wire, peer="test")
        self.connections.append(connection)
        self.gone = trio.Event()
        self.hosting.nursery.start_soon(self._run, connection)
        return ours

    async def open(self, *, tcp: bool = False, tls: bool = False) -> RawWebSocket:
        """Open a WebSocket and do the handshake of the protocol."""
        raw = await upgrade(HttpWire(self.dial(tcp=tcp, tls=tls)))
        await raw.say(message(request(0, "initialize", **INITIALIZE)))
        assert b"protocolVersion" in (await raw.hear())[1]
        return raw

    async def _run(self, connection: H1Connection) -> None:
        await connection.run()
        self.connections.remove(connection)
        if not self.connections:
            self.gone.set()


class Tools:
    """A server with tools that do what a test tells them."""

    def __init__(self, **limits: Any) -> None:
        self.server = trimcp.Server("s", limits=Limits(**limits))
        self.began: list[str] = []
        self.ended: list[str] = []
        self.go_on = trio.Event()

        @self.server.tool
        async def echo(text: str) -> str:
            return text

        @self.server.tool
        async def large(size: int) -> str:
            return "x" * size

        @self.server.tool
        async def wait(name: str, *, ctx: trimcp.Context[Any]) -> str:
            self.began.append(name)
            try:
                await self.go_on.wait()
            except trio.Cancelled:
                assert ctx.cancel_reason is not None
                self.ended.append(ctx.cancel_reason.name)
                raise
            return name


@asynccontextmanager
async def site(
    tools: Tools | None = None, keep_alive: KeepAlive = KEEP_ALIVE, settings: HttpSettings | None = None
) -> AsyncIterator[Site]:
    tools = tools or Tools()
    async with (
        tools.server.running() as running,
        http_application(running, settings) as face,
        trio.open_nursery() as nursery,
    ):
        hosting = Hosting(face, HttpLimits(), nursery, partial(serve_websocket, keep_alive))
        yielded = Site(face, hosting, running.sessions)
        yield yielded
        nursery.cancel_scope.cancel()
        for stream in yielded.streams:
            await trio.aclose_forcefully(stream)


@pytest.fixture(params=[False, True], ids=["memory", "sockets"])
def tcp(request: pytest.FixtureRequest) -> bool:
    over_sockets: bool = request.param
    return over_sockets


async def heard(raw: RawWebSocket) -> Any:
    """The next message."""
    first, payload = await raw.hear()
    assert first == FIN | TEXT, (first, payload)
    return orjson.loads(payload)


async def until_gone(site: Site) -> None:
    """Wait until no connection is left."""
    await site.gone.wait()


# Messages


async def test_calls_are_answered_and_the_head_was_read_once(tcp: bool, autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await at.open(tcp=tcp)
        await raw.say(*(message(call(n, "echo", text=str(n))) for n in range(1, 200)))
        answers = [await heard(raw) for _ in range(1, 200)]
        assert [(each["id"], each["result"]["content"][0]["text"]) for each in answers] == [
            (n, str(n)) for n in range(1, 200)
        ]


async def test_calls_and_the_end_under_tls(autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await at.open(tls=True)
        await raw.say(*(message(call(n, "large", size=100_000)) for n in range(1, 20)), frame(FIN | PING))
        answers = [await raw.hear() for _ in range(20)]
        assert [first for first, _ in answers].count(FIN | PONG) == 1
        assert sum(len(payload) for _, payload in answers) > 19 * 100_000
        at.session.close()
        assert await raw.close_code() == 1001
        await raw.say(close(1001))
        assert await raw.hear() == (0, b"")
        await until_gone(at)


async def test_what_came_with_the_handshake_is_not_lost(autojump_clock: MockClock) -> None:
    async with site() as at:
        wire = HttpWire(at.dial())
        await wire.send(handshake() + message(request(0, "initialize", **INITIALIZE)) + frame(FIN | PING, b"you"))
        assert (await wire.head()).status == 101
        raw = RawWebSocket(wire.stream, bytes(wire.buffer))
        assert sorted([(await raw.hear())[0], (await raw.hear())[0]]) == [FIN | TEXT, FIN | PONG]


@pytest.mark.parametrize("step", [1, 3, 70_000])
async def test_fragments_pieces_and_characters_that_were_cut(step: int, autojump_clock: MockClock) -> None:
    text = "häß€𝄞" * 200
    whole = call(1, "echo", text=text)
    parts = [whole[at : at + 7] for at in range(0, len(whole), 7)]
    first, last = frame(TEXT, parts[0]), frame(FIN | CONTINUATION, parts[-1])
    frames = [first, *(frame(CONTINUATION, part) for part in parts[1:-1]), frame(FIN | PING, b"me"), last]
    data = b"".join(frames) + message(call(2, "echo", text=text)) + frame(FIN | PONG)
    async with site() as at:
        raw = await at.open()
        for start in range(0, len(data), step):
            await raw.say(data[start : start + step])
        assert await raw.hear() == (FIN | PONG, b"me")
        for id in (1, 2):
            answer = await heard(raw)
            assert (answer["id"], answer["result"]["content"][0]["text"]) == (id, text)


async def test_a_message_that_is_too_large_is_answered_alone(autojump_clock: MockClock) -> None:
    async with site(Tools(max_message=10_000)) as at:
        raw = await at.open()
        await raw.say(message(call("a", "echo", text="x" * 20_000)), message(b""), message(call(2, "echo", text="b")))
        answers = [await heard(raw) for _ in range(3)]
        assert answers[0]["id"] == "a"
        assert answers[0]["error"]["data"] == {"reason": "size"}
        assert answers[1]["error"]["code"] == -32700
        assert answers[2]["id"] == 2


async def test_messages_are_traced(autojump_clock: MockClock) -> None:
    lines: list[str] = []
    async with site(settings=HttpSettings(trace=lines.append)) as at:
        raw = await at.open()
        await raw.say(message(call(1, "echo", text="a")))
        await heard(raw)
        assert [line.split(" ")[1] for line in lines] == ["<--", "-->", "<--", "-->"]


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        (b"sec-websocket-version: 12\r\n", (426, "13")),
        (b"", (400, "13")),
    ],
)
async def test_a_handshake_that_is_none(version: bytes, answer: object, autojump_clock: MockClock) -> None:
    async with site() as at:
        wire = HttpWire(at.dial())
        await wire.send(handshake().replace(b"sec-websocket-version: 13\r\n", version))
        head = await wire.head()
        assert (head.status, head.headers.get("sec-websocket-version")) == answer
        assert not await wire.stream.receive_some()
        assert not at.sessions


async def test_compression_is_not_agreed_to(autojump_clock: MockClock) -> None:
    async with site() as at:
        wire = HttpWire(at.dial())
        await wire.send(handshake("Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"))
        head = await wire.head()
        assert (head.status, head.headers["sec-websocket-protocol"]) == (101, "mcp")
        assert "sec-websocket-extensions" not in head.headers


# Over HTTP/2 (RFC 8441)


@attrs.define(eq=False)
class OneStream(trio.abc.Stream):
    """The bytes of one request of HTTP/2, as a client has them."""

    peer: FramePeer
    id: int
    read: int = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self.peer.send(h2.frame(h2.DATA, 0, self.id, bytes(data)))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        while not (answer := self.peer.streams.get(self.id)) or len(answer.body) == self.read:
            if answer is not None and (answer.ended or answer.reset):
                return b""
            assert await self.peer.receive() is not None
        data = bytes(answer.body[self.read :])
        self.read += len(data)
        return data

    async def aclose(self) -> None:
        await self.peer.send(h2.frame(h2.DATA, h2.END_STREAM, self.id))


async def open_over_http2(site: Site, *lines: tuple[str, str]) -> RawWebSocket:
    peer = FramePeer(site.dial())
    await peer.start()
    method, *fields = request_fields("/ws", "CONNECT", [("sec-websocket-protocol", "mcp"), *lines])
    await peer.send(peer.head([method, (":protocol", "websocket"), *fields]))
    return RawWebSocket(OneStream(peer, peer.last))


async def test_a_websocket_over_http2_is_served_as_any_other(autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await open_over_http2(at)
        await raw.say(message(request(0, "initialize", **INITIALIZE)))
        assert b"protocolVersion" in (await raw.hear())[1]
        await raw.say(message(call(1, "large", size=200_000)), frame(FIN | PING, b"me"))
        answers = [await raw.hear() for _ in range(2)]
        assert (FIN | PONG, b"me") in answers
        assert max(len(payload) for _, payload in answers) > 200_000
        at.session.close()
        assert await raw.close_code() == 1001
        await raw.say(close(1001))
        assert await raw.hear() == (0, b"")
        await wait_all_tasks_blocked()
        assert not at.sessions
        assert len(at.connections) == 1, "others may use the connection"
        assert at.face.budget.held == 0


async def test_whoever_resets_its_websocket_over_http2_is_gone(autojump_clock: MockClock) -> None:
    tools = Tools()
    async with site(tools) as at:
        raw = await open_over_http2(at)
        stream = raw.stream
        assert isinstance(stream, OneStream)
        await raw.say(message(request(0, "initialize", **INITIALIZE)), message(call(1, "wait", name="a")))
        assert b"protocolVersion" in (await raw.hear())[1]
        await wait_all_tasks_blocked()
        assert tools.began == ["a"]
        await stream.peer.send(h2.frame(h2.RST_STREAM, 0, stream.id, (8).to_bytes(4, "big")))
        await wait_all_tasks_blocked()
        assert tools.ended == ["DISCONNECTED"]
        assert not at.sessions


async def test_another_version_is_refused_over_http2(autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await open_over_http2(at, ("sec-websocket-version", "12"))
        stream = raw.stream
        assert isinstance(stream, OneStream)
        answer = await stream.peer.answer(stream.id)
        assert (answer.status, dict(answer.headers)["sec-websocket-version"]) == (400, "13")
        assert not at.sessions


# Who waits


async def test_a_session_that_has_enough_is_not_read(autojump_clock: MockClock) -> None:
    tools = Tools(max_running=1, backlog_requests=20)
    async with site(tools) as at:
        raw = await at.open()
        with trio.move_on_after(1) as scope:
            while True:
                await raw.say(*(message(call(n, "wait", name=str(n))) for n in itertools.islice(NUMBERS, 100)))
                if at.session.paused:
                    break
        assert not scope.cancelled_caught
        await wait_all_tasks_blocked()
        waiting = len(at.session.jobs.mailbox)
        assert 20 <= waiting <= 20 + 16
        await raw.say(*(message(call(n, "wait", name=str(n))) for n in itertools.islice(NUMBERS, 100)))
        await wait_all_tasks_blocked()
        assert len(at.session.jobs.mailbox) == waiting
        tools.go_on.set()
        for _ in range(200):
            assert "result" in await heard(raw)


NUMBERS: Iterator[int] = itertools.count(1)


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell")
async def test_whoever_leaves_unread_is_noticed(steady_clock: trio.abc.Clock) -> None:
    tools = Tools(max_running=1, backlog_requests=1)
    async with site(tools) as at:
        raw = await at.open(tcp=True)
        await raw.say(*(message(call(n, "wait", name="a")) for n in range(1, 5)))
        await wait_all_tasks_blocked(0.05)
        await raw.stream.aclose()
        with trio.fail_after(5):
            await until_gone(at)
        assert tools.ended == ["DISCONNECTED"]


async def test_a_peer_that_does_not_read_holds_what_is_bounded_and_goes_on(
    tcp: bool, autojump_clock: MockClock
) -> None:
    tools = Tools(outbox_bytes=100_000, running_bytes=1_000_000)
    async with site(tools) as at:
        raw = await at.open(tcp=tcp)
        size = 1_000_000 if tcp else 50_000
        let_go = None if tcp else stuck(at)
        await raw.say(*(message(call(n, "large", size=size)) for n in range(1, 40)))
        await wait_all_tasks_blocked(0.05)
        statistics = at.session.statistics()
        assert statistics.unread_bytes > 0
        assert statistics.outbox_bytes <= 100_000 + size + 1_000
        if let_go is not None:
            let_go()
        answers = [await heard(raw) for _ in range(1, 40)]
        assert sorted(each["id"] for each in answers) == list(range(1, 40))
        await wait_all_tasks_blocked(0.05)
        assert at.session.statistics().unread_bytes == 0


def stuck(at: Site) -> Callable[[], None]:
    """Let what the server writes stay where it is, until the result is called."""
    wire: Any = at.connections[0]._wire
    sending: trio.testing.MemorySendStream = wire._stream.send_stream
    go_on = trio.Event()
    pump = sending.send_all_hook
    assert pump is not None

    async def hook() -> None:
        await go_on.wait()
        await pump()

    def let_go() -> None:
        sending.send_all_hook = pump
        go_on.set()

    sending.send_all_hook = hook
    return let_go


async def test_a_peer_that_never_reads_is_dropped(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    tools = Tools(stall_timeout=30.0)
    async with site(tools, KeepAlive(math.inf, math.inf)) as at:
        raw = await at.open()
        stuck(at)
        began = trio.current_time()
        await raw.say(message(call(1, "wait", name="a")), message(call(2, "echo", text="b")))
        await until_gone(at)
        assert 30 <= trio.current_time() - began <= 40
        assert tools.ended == ["LIMIT"]
        (event,) = [vars(record) for record in caplog.records if record.name == "trimcp.security"]
        assert (event["event"], event["why"]) == ("peer_stalled", "the peer read nothing for 30 seconds")
        assert event["unread_bytes"] > 0


async def test_a_peer_that_pings_and_does_not_read_is_not_read(autojump_clock: MockClock) -> None:
    async with site(Tools(stall_timeout=math.inf)) as at:
        raw = await at.open()
        let_go = stuck(at)
        await raw.say(frame(FIN | PING, b"x" * 100) * 10)
        await wait_all_tasks_blocked()
        await raw.say(message(call(1, "echo", text="b")))
        await wait_all_tasks_blocked()
        assert at.session.statistics().outbox == 0
        assert not at.session.jobs
        let_go()
        assert [(await raw.hear())[0] for _ in range(10)] == [FIN | PONG] * 10
        assert (await heard(raw))["id"] == 1


# Signs of life


async def test_a_silent_peer_is_pinged_once_and_given_up(autojump_clock: MockClock) -> None:
    tools = Tools()
    async with site(tools) as at:
        raw = await at.open()
        await raw.say(message(call(1, "wait", name="a")))
        began = trio.current_time()
        assert await raw.hear() == (FIN | PING, b"")
        assert trio.current_time() - began == pytest.approx(20)
        session = at.session
        assert await raw.hear() == (0, b"")
        assert trio.current_time() - began == pytest.approx(60)
        assert str(session.lost) == "the connection broke: nothing was heard of the peer for 60 seconds"
        assert tools.ended == ["DISCONNECTED"]


async def test_a_peer_that_answers_pings_may_be_silent(autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await at.open()
        heard_at = []
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(50):
            assert (await raw.hear())[0] == FIN | PING
            heard_at.append(trio.current_time())
            await raw.say(frame(FIN | PONG))
        assert {round(later - earlier, 3) for earlier, later in itertools.pairwise(heard_at)} == {20}
        assert trio.lowlevel.current_statistics().tasks_living == tasks, "a ping needs none"


async def test_while_a_session_is_not_read_it_says_that_it_lives(autojump_clock: MockClock) -> None:
    tools = Tools(max_running=1, backlog_requests=1)
    async with site(tools) as at:
        raw = await at.open()
        await raw.say(*(message(call(n, "wait", name="a")) for n in range(1, 5)))
        await wait_all_tasks_blocked()
        frames: list[int] = []

        async def hear() -> None:
            while True:
                frames.append((await raw.hear())[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            await trio.sleep(610)
            nursery.cancel_scope.cancel()
        assert frames == [FIN | PONG] * 30
        tools.go_on.set()
        assert [(await heard(raw))["id"] for _ in range(4)] == [1, 2, 3, 4]


async def test_a_message_has_its_time(autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await at.open()
        session, began = at.session, trio.current_time()
        await raw.say(frame(TEXT, b"x" * 65_000))
        assert (await raw.hear())[0] == FIN | PING
        assert await raw.close_code() == 1008
        assert trio.current_time() - began == pytest.approx(31, abs=0.01), "30 seconds, and one for 64 KiB"
        assert str(session.lost) == "the connection broke: the peer took too long to end a message"


async def _say_in_vain(raw: RawWebSocket, data: bytes) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await raw.say(data)


async def test_waiting_for_memory_is_the_messages_time(autojump_clock: MockClock) -> None:
    """Else a hundred that send a byte now and then would hold what they have for as long as they like."""
    async with site() as at:
        raw = await at.open()
        session, began = at.session, trio.current_time()
        holding = session.memory.holding
        assert holding is not None
        other = holding.budget.holding(holding.owner.name)
        other.add(holding.budget.bound // 2)
        assert not other.when_it_may_grow(lambda: None), "it is the one that goes on"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_say_in_vain, raw, frame(TEXT, b"x" * 400_000))
            while (found := await raw.hear())[0] in (FIN | PING, FIN | PONG):
                pass
            assert (found[0], int.from_bytes(found[1][:2])) == (FIN | CLOSE, 1008)
            assert 30 <= trio.current_time() - began <= 37
            nursery.cancel_scope.cancel()
        other.close()


# Ends

FAULTS: dict[str, tuple[bytes, int, str]] = {
    "binary": (frame(FIN | BINARY, b"x"), 1003, "messages are text"),
    "unmasked": (message(b"{}", masked=False), 1002, "clients mask their frames, servers do not"),
    "no text": (message(b'{"a": "\xff"}'), 1007, "text is UTF-8"),
    "cut text": (frame(TEXT, b"\xe2\x82") + frame(FIN | CONTINUATION, b"x"), 1007, "text is UTF-8"),
    "huge": (frame(FIN | TEXT, b"x", size=1 << 40), 1009, "a message may have 4,194,304 bytes"),
    "extension": (frame(FIN | 0x40 | TEXT, b"{}"), 1002, "no extension was agreed to"),
    "close of one byte": (frame(FIN | CLOSE, b"x"), 1002, "a Close frame holds a code and a text, or nothing"),
    "close for us": (close(1006), 1002, "a Close frame holds a code and a text, or nothing"),
    "close without text": (frame(FIN | CLOSE, b"\x03\xe8\xff"), 1007, "text is UTF-8"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_has_its_code(fault: str, tcp: bool, autojump_clock: MockClock) -> None:
    frames, code, reason = FAULTS[fault]
    tools = Tools()
    async with site(tools) as at:
        raw = await at.open(tcp=tcp)
        session = at.session
        await raw.say(message(call(1, "wait", name="a")))
        await wait_all_tasks_blocked(0.05)
        await raw.say(frames, message(call(2, "echo", text="b")) * 3)
        first, payload = await raw.hear()
        assert (first, payload) == (FIN | CLOSE, code.to_bytes(2, "big") + reason.encode())
        assert await raw.hear() == (0, b"")
        await raw.stream.aclose()
        await until_gone(at)
        assert str(session.lost) == f"the connection broke: the peer broke the WebSocket protocol ({code}: {reason})"
        assert tools.ended == ["DISCONNECTED"]
        assert not at.sessions


@pytest.mark.parametrize(
    ("said", "answer", "why"),
    [
        (close(1000), close(1000, masked=False), "the peer closed the WebSocket with code 1000 (normal)"),
        (
            close(3000, "tired"),
            close(3000, "tired", masked=False),
            "the peer closed the WebSocket with code 3000: 'tired'",
        ),
        (
            frame(FIN | CLOSE),
            frame(FIN | CLOSE, masked=False),
            "the peer closed the WebSocket with code 1005 (no code)",
        ),
    ],
)
async def test_a_close_is_answered(said: bytes, answer: bytes, why: str, tcp: bool, autojump_clock: MockClock) -> None:
    tools = Tools()
    async with site(tools) as at:
        raw = await at.open(tcp=tcp)
        session = at.session
        await raw.say(message(call(1, "wait", name="a")))
        await wait_all_tasks_blocked(0.05)
        await raw.say(said)
        first, payload = await raw.hear()
        assert frame(first, payload, masked=False) == answer
        assert await raw.hear() == (0, b"")
        await until_gone(at)
        assert str(session.lost) == why
        assert tools.ended == ["DISCONNECTED"]


@pytest.mark.parametrize("reads_on", [False, True])
async def test_an_end_without_a_close(tcp: bool, reads_on: bool, autojump_clock: MockClock) -> None:
    """Whoever only says nothing more has left, too: nothing tells it apart."""
    tools = Tools()
    async with site(tools) as at:
        raw = await at.open(tcp=tcp)
        session = at.session
        await raw.say(message(call(1, "wait", name="a")))
        await wait_all_tasks_blocked(0.05)
        if reads_on:
            assert isinstance(raw.stream, trio.SocketStream | trio.StapledStream)
            await raw.stream.send_eof()
        else:
            await raw.stream.aclose()
        await until_gone(at)
        assert str(session.lost) == "the connection broke: the peer is gone without a closing handshake"
        assert tools.ended == ["DISCONNECTED"]


async def test_a_drained_session_answers_and_says_1001(tcp: bool, autojump_clock: MockClock) -> None:
    tools = Tools()
    async with site(tools) as at, trio.open_nursery() as nursery:
        raw = await at.open(tcp=tcp)
        await raw.say(message(call(1, "wait", name="a")))
        await wait_all_tasks_blocked(0.05)
        nursery.start_soon(at.face.drain, 5.0)
        await wait_all_tasks_blocked(0.05)
        await raw.say(message(call(2, "echo", text="b")))
        assert (await heard(raw))["error"]["code"] == CANCELLED_BY_DRAIN
        tools.go_on.set()
        assert (await heard(raw))["id"] == 1
        assert await raw.close_code() == 1001
        assert at.connections, "the peer has a second to answer"
        await raw.say(message(call(3, "echo", text="c")), close(1001))
        assert await raw.hear() == (0, b"")
        await until_gone(at)


async def test_a_peer_that_does_not_answer_our_close_has_a_second(autojump_clock: MockClock) -> None:
    async with site() as at:
        raw = await at.open()
        began = trio.current_time()
        at.session.close()
        assert await raw.close_code() == 1001
        assert await raw.hear() == (0, b"")
        assert trio.current_time() - began == pytest.approx(1)


async def test_whoever_does_not_read_the_last_words_has_the_time_of_draining(autojump_clock: MockClock) -> None:
    async with site(Tools(drain_timeout=3.0)) as at:
        raw = await at.open()
        stuck(at)
        await raw.say(message(call(1, "echo", text="a")))
        await wait_all_tasks_blocked()
        began = trio.current_time()
        at.session.close()
        await until_gone(at)
        assert trio.current_time() - began == pytest.approx(3, abs=0.1)


async def test_a_connection_that_is_cut_still_tells_its_calls(autojump_clock: MockClock) -> None:
    tools = Tools()
    async with site(tools) as at:
        raw = await at.open()
        await raw.say(message(call(1, "wait", name="a")))
        await wait_all_tasks_blocked()
        at.connections[0].evict("there are too many connections")
        answer = await heard(raw)
        assert (answer["id"], answer["error"]["code"]) == (1, CANCELLED_BY_DRAIN)
        assert (await raw.hear())[0] == 0
        assert tools.ended == ["DRAIN"]


async def test_whoever_holds_too_much_is_dropped_at_once(autojump_clock: MockClock) -> None:
    tools = Tools()
    async with site(tools) as at:
        raw = await at.open()
        await raw.say(message(call(1, "wait", name="a")))
        await wait_all_tasks_blocked()
        holding = at.session.memory.holding
        assert holding is not None
        assert isinstance(holding.holder, ServedWebSocket)
        assert not holding.holder.at_rest
        holding.holder.evict("it held too much")
        assert await raw.hear() == (0, b"")
        assert tools.ended == ["LIMIT"]
        await until_gone(at)


async def test_a_crash_ends_this_connection_with_1011(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(self: FrameGate, data: bytes) -> NoReturn:
        raise ZeroDivisionError("on purpose")

    async with site() as at:
        raw, other = await at.open(), await at.open()
        with monkeypatch.context() as patched:
            patched.setattr(FrameGate, "feed", crash)
            await raw.say(message(call(1, "echo", text="a")))
            assert await raw.close_code() == 1011
            await raw.stream.aclose()
            await wait_all_tasks_blocked()
        await other.say(message(call(1, "echo", text="a")))
        assert (await heard(other))["id"] == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.exc_info is not None


async def test_nothing_is_left_of_a_connection(tcp: bool, autojump_clock: MockClock) -> None:
    def left() -> int:
        return sum(isinstance(each, ServedWebSocket | FrameGate | Session) for each in gc.get_objects())

    async with site() as at:
        gc.collect()
        gc.disable()
        before = left()  # of other tests
        try:
            for said in (close(1000), b"", frame(FIN | BINARY, b"x")):
                raw = await at.open(tcp=tcp)
                await raw.say(message(call(1, "echo", text="a")), said)
                await wait_all_tasks_blocked(0.05)
                await raw.stream.aclose()
                await until_gone(at)
            await wait_all_tasks_blocked(0.05)
            assert left() == before, "a cycle of references keeps what is closed"
        finally:
            gc.enable()


# The outbox


@attrs.define(eq=False)
class Line:
    """What is written, and whether it is taken."""

    blocked: bool = False
    waiting: int = 0
    later: int = 0
    read_ahead: tuple[int, int] = (0, 0)
    written: list[bytes] = attrs.field(factory=list)
    on_write: Callable[[], object] = attrs.field(default=lambda: None)

    def write(self, outgoing: Outgoing) -> None:
        self.written.append(outgoing.data)
        self.on_write()

    def write_later(self) -> None:
        self.later += 1

    def session_ended(self) -> None:
        raise AssertionError


def said(text: str, kind: Kind = Kind.NOTIFICATION, id: int | None = None) -> Outgoing:
    return Outgoing(text.encode(), kind, id)


async def test_an_outbox_without_a_writer_task() -> None:
    line = Line()
    outbox = WrittenOutbox(Limits(outbox_bytes=4), line)
    outbox.post(said("a"))
    assert line.written == [b"a"]
    outbox.post_latest("k", said("1"))
    outbox.post_latest("k", said("2"))
    assert (line.written, line.later) == ([b"a"], 2)
    outbox.finish_latest("k", keep=True)
    assert line.written == [b"a"], "it leaves with what comes next"
    outbox.post(said("reply", Kind.REPLY, 1))
    assert line.written == [b"a", b"2", b"reply"]
    line.blocked = True
    for text in "bcde":
        outbox.post(said(text, Kind.REQUEST, ord(text)))
    outbox.post_latest("k", said("3"))
    full = [outbox.full]
    assert len(line.written) == 3
    assert outbox.withdraw(ord("c"))
    assert not outbox.withdraw(1)
    await outbox.room()
    full.append(outbox.full)
    assert full == [True, False]
    line.blocked = False
    line.on_write = lambda: setattr(line, "blocked", line.written[-1] == b"d")
    outbox.leave()
    assert line.written[3:] == [b"b", b"d"]
    line.blocked = False
    outbox.leave()
    assert line.written[5:] == [b"e", b"3"]
    assert (outbox.bytes_queued, len(outbox)) == (0, 0)
    assert outbox.counts.merged == {"others": 1}
    outbox.close()
    outbox.post(said("late"))
    assert len(line.written) == 7
