"""Both ends of WebSocket connections for tests: our client and our server, and a peer that sends any frames."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs
import trio
from trio.testing import memory_stream_pair

from tests.peers.http1 import HttpWire
from tests.peers.websockets import RawWebSocket, read_head, upgrade
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.transports.http.interfaces import Upgrade
from trimcp.transports.websocket.channel import WebSocketChannel, running
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive
from trimcp.transports.websocket.handshake import accept
from trimcp.wire.jsonrpc import encode_request

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


async def host(stream: trio.abc.Stream, upgrade: Upgrade, keep_alive: KeepAlive = KEEP_ALIVE) -> None:
    """Serve one connection through the channel of trio-websocket: what our clients and servers are compared with."""
    _, headers, rest = await read_head(stream)
    await stream.send_all(accept(headers, upgrade.subprotocol))
    channel = WebSocketChannel(
        stream, upgrade.max_message, client=False, keep_alive=keep_alive, early=rest, read=upgrade.read
    )
    async with running(channel):
        await upgrade.serve(channel)


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
        return Upgrade(self.serve, subprotocol, self.max_message)


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


@asynccontextmanager
async def raw_client(
    meeting: Meeting, *, tcp: bool = False, keep_alive: KeepAlive = KEEP_ALIVE, receive_buffer: int | None = None
) -> AsyncIterator[tuple[RawWebSocket, MessageChannel]]:
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
        raw = await upgrade(HttpWire(ours))
        yield raw, await meeting.channel()
        meeting.done.set()
        await trio.aclose_forcefully(ours)
        nursery.cancel_scope.cancel()


async def _listening(
    upgrade: Upgrade, keep_alive: KeepAlive, receive_buffer: int | None, *, task_status: trio.TaskStatus[int]
) -> None:
    async with listening(upgrade, keep_alive, receive_buffer=receive_buffer) as port:
        task_status.started(port)
        await trio.sleep_forever()
