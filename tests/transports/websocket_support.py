"""Both ends of WebSocket connections for tests: our client and our server, and peers that say anything they like."""

from __future__ import annotations

import base64
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import trio
from trio.testing import memory_stream_pair

from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.framing.frames import FrameGate
from trimcp.transports.http.h1.wires import PrefixedStream
from trimcp.transports.http.seams import Head, Upgrade
from trimcp.transports.websocket.channel import serve_upgraded
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive
from trimcp.wire.jsonrpc import encode_request

KEY = base64.b64encode(bytes(16)).decode()
HANDSHAKE = {"sec-websocket-key": KEY, "sec-websocket-version": "13", "sec-websocket-protocol": "mcp"}

Serve = Callable[[MessageChannel], Awaitable[None]]


def text(n: int, filling: str = "") -> bytes:
    """A request with this id."""
    return encode_request(n, "check", {"text": filling or str(n)})


def outgoing(n: int, filling: str = "") -> Outgoing:
    """A request with this id, on its way out."""
    return Outgoing(text(n, filling), Kind.REQUEST, n)


def ids(arrived: list[Incoming]) -> list[object]:
    """The ids of what arrived, of malformed messages too."""
    return [getattr(each.message, "id", None) for each in arrived]


async def read_head(stream: trio.abc.ReceiveStream) -> tuple[str, dict[str, str], bytes]:
    """Read an HTTP head; returns its first line, headers by lower-case name, and what came behind it."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = await stream.receive_some()
        if not chunk:
            raise trio.BrokenResourceError(f"no whole head in {data!r}")
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return first, {name.lower(): value.strip() for name, _, value in pairs}, rest


async def host(stream: trio.abc.Stream, upgrade: Upgrade, keep_alive: KeepAlive = KEEP_ALIVE) -> None:
    """Serve one connection as a listener does."""
    first, headers, rest = await read_head(stream)
    method, target, _ = first.split(" ")
    head = Head(method, target, headers=headers, peer="test", websocket=True)
    await serve_upgraded(PrefixedStream(rest, stream), head, upgrade, keep_alive=keep_alive)


@asynccontextmanager
async def listening(
    upgrade: Upgrade, keep_alive: KeepAlive = KEEP_ALIVE, *, receive_buffer: int | None = None
) -> AsyncIterator[int]:
    """Accept connections on loopback, and yield the port."""

    async def serve(stream: trio.SocketStream) -> None:
        await host(stream, upgrade, keep_alive)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        if receive_buffer is not None:
            listeners[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class Meeting:
    """Lets a test have the channel a server serves."""

    max_message: int = 4 * 1024 * 1024
    principal: str | None = None
    _channels: tuple[trio.MemorySendChannel[MessageChannel], trio.MemoryReceiveChannel[MessageChannel]] = attrs.field(
        factory=lambda: trio.open_memory_channel[MessageChannel](1)
    )
    done: trio.Event = attrs.field(factory=trio.Event)

    async def serve(self, channel: MessageChannel) -> None:
        """Hand the channel to the test, and wait until that is done."""
        await self._channels[0].send(channel)
        await self.done.wait()

    async def channel(self) -> MessageChannel:
        """The channel of the next connection."""
        return await self._channels[1].receive()

    def upgrade(self, subprotocol: str | None = "mcp") -> Upgrade:
        """What the face would say."""
        return Upgrade(self.serve, subprotocol, self.max_message, self.principal)


@asynccontextmanager
async def connected(meeting: Meeting | None = None) -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    """Yield the client's and the server's channel of a connection over TCP."""
    meeting = meeting or Meeting()
    async with listening(meeting.upgrade()) as port:
        async with WebSocketServer(f"ws://127.0.0.1:{port}/ws").connect() as client:
            yield client, await meeting.channel()
        meeting.done.set()


async def turns_of(wait: Callable[[], Awaitable[object]]) -> int:
    """How often others have their turn until this returns."""
    turns = 0
    done = trio.Event()

    async def run() -> None:
        await wait()
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        while not done.is_set():
            await trio.lowlevel.checkpoint()
            turns += 1
    return turns


# Frames by hand

FIN, TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 0x80, 0x1, 0x2, 0x0, 0x8, 0x9, 0xA


def frame(first: int, payload: bytes = b"", *, masked: bool = True, size: int | None = None) -> bytes:
    """A frame with any first byte; `size` is what its header claims, if not the truth."""
    size = len(payload) if size is None else size
    mask = 0x80 if masked else 0
    if size < 126:
        header = bytes((first, mask | size))
    elif size < 65536:
        header = bytes((first, mask | 126)) + size.to_bytes(2, "big")
    else:
        header = bytes((first, mask | 127)) + size.to_bytes(8, "big")
    if not masked:
        return header + payload
    key = b"\x01\x02\x03\x04"
    keys = (key * (len(payload) // 4 + 1))[: len(payload)]
    return header + key + (int.from_bytes(payload) ^ int.from_bytes(keys)).to_bytes(len(payload))


def message(data: bytes, *, masked: bool = True) -> bytes:
    """A text message in one frame."""
    return frame(FIN | TEXT, data, masked=masked)


def close(code: int, reason: str = "", *, masked: bool = True) -> bytes:
    """A Close frame."""
    return frame(FIN | CLOSE, code.to_bytes(2, "big") + reason.encode(), masked=masked)


@attrs.define(eq=False)
class Raw:
    """One end of a connection, after the handshake, for saying anything."""

    stream: trio.abc.Stream
    _buffer: bytes = b""

    async def say(self, *frames: bytes) -> None:
        """Write frames as they are."""
        await self.stream.send_all(b"".join(frames))

    async def hear(self) -> tuple[int, bytes]:
        """The next frame: its first byte and payload; (0, b"") at the end."""
        while True:
            if len(self._buffer) >= 2:
                size, at = self._buffer[1] & 0x7F, 2
                if size > 125:
                    at = 4 if size == 126 else 10
                    size = int.from_bytes(self._buffer[2:at], "big")
                masked = 4 if self._buffer[1] & 0x80 else 0
                if len(self._buffer) >= at + masked + size:
                    first, key = self._buffer[0], self._buffer[at : at + masked] or bytes(4)
                    payload = self._buffer[at + masked : at + masked + size]
                    self._buffer = self._buffer[at + masked + size :]
                    return first, bytes(byte ^ key[n % 4] for n, byte in enumerate(payload)) if masked else payload
            try:
                chunk = await self.stream.receive_some()
            except trio.BrokenResourceError:
                chunk = b""
            if not chunk:
                return 0, b""
            self._buffer += chunk

    async def close_code(self) -> int | None:
        """The code of the Close frame that comes before the end, or None without one; other frames are skipped."""
        while True:
            first, payload = await self.hear()
            if first == FIN | CLOSE:
                return int.from_bytes(payload[:2], "big")
            if not first:
                return None


@asynccontextmanager
async def raw_client(
    meeting: Meeting, *, tcp: bool = False, keep_alive: KeepAlive = KEEP_ALIVE, receive_buffer: int | None = None
) -> AsyncIterator[tuple[Raw, MessageChannel]]:
    """Yield a raw client and the channel of our server that serves it, over memory or TCP.

    `receive_buffer` is how many bytes the kernel keeps for our server; without it, it changes its mind as it goes.
    """
    async with trio.open_nursery() as nursery:
        if tcp:
            port = await nursery.start(_listening, meeting.upgrade(), keep_alive, receive_buffer)
            ours: trio.abc.Stream = await trio.open_tcp_stream("127.0.0.1", port)
        else:
            ours, theirs = memory_stream_pair()
            nursery.start_soon(host, theirs, meeting.upgrade(), keep_alive)
        lines = ["GET /ws HTTP/1.1", "Host: test", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"{name}: {value}" for name, value in HANDSHAKE.items()]
        await ours.send_all("\r\n".join((*lines, "", "")).encode())
        first, headers, rest = await read_head(ours)
        assert first.startswith("HTTP/1.1 101 ")
        assert headers["sec-websocket-protocol"] == "mcp"
        yield Raw(ours, rest), await meeting.channel()
        meeting.done.set()
        await trio.aclose_forcefully(ours)
        nursery.cancel_scope.cancel()


async def _listening(
    upgrade: Upgrade, keep_alive: KeepAlive, receive_buffer: int | None, *, task_status: trio.TaskStatus[int]
) -> None:
    async with listening(upgrade, keep_alive, receive_buffer=receive_buffer) as port:
        task_status.started(port)
        await trio.sleep_forever()


def feed(gate: FrameGate, data: bytes, step: int) -> bytes:
    """Show data to a gate in chunks, and return all that it lets through."""
    passed = b""
    for start in range(0, len(data), step):
        gate.feed(data[start : start + step])
        while gate.behind:
            gate.feed(b"")
        while piece := gate.take(65536):
            passed += piece
    return passed
