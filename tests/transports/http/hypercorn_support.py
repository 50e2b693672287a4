"""A server under Hypercorn on a port of its own, and clients that behave as told: HTTP/1.1, WebSocket."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from tests.peers.serving import connect
from tests.peers.websockets import handshake
from trimcp.transports.http.asgi.hypercorn import serve_hypercorn


@attrs.define(eq=False)
class Served:
    """A running server.

    Attributes:
        address: as it was reported.
        stop: ends it when set.
        ended: set once it has.
        failure: what it ended with.
    """

    address: str = ""
    stop: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    failure: Exception | None = None

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def connect(self, **options: Any) -> trio.SocketStream:
        """A connection; options are those of `tests.peers.serving.connect`."""
        return await connect(self.port, **options)

    async def alive(self) -> bool:
        """Whether it still answers."""
        try:
            stream = await self.connect()
        except OSError:
            return False
        async with stream:
            await stream.send_all(b"GET /here HTTP/1.1\r\nHost: localhost\r\n\r\n")
            try:
                return (await stream.receive_some(12)).startswith(b"HTTP/1.1 ")
            except trio.BrokenResourceError:
                return False


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[Served]:
    """Serve the application while the block runs. What it failed with is in `failure`, not raised."""
    served = Served()

    async def serve(task_status: trio.TaskStatus[list[str]]) -> None:
        options.setdefault("bind", "127.0.0.1:0")
        with served.scope:
            try:
                await serve_hypercorn(app, shutdown_trigger=served.stop.wait, task_status=task_status, **options)
            except Exception as error:
                served.failure = error
        served.ended.set()

    async with trio.open_nursery() as nursery:
        (served.address,) = await nursery.start(serve)
        try:
            yield served
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(10):
                served.stop.set()
                await served.ended.wait()
            nursery.cancel_scope.cancel()


def reset_on_close(stream: trio.SocketStream) -> None:
    """Let the peer see a reset when the stream is closed."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def read_until(stream: trio.abc.ReceiveStream, end: bytes) -> bytes:
    """Read until `end` was read, or the stream has ended."""
    data = b""
    while end not in data:
        chunk = await stream.receive_some(65536)
        if not chunk:
            break
        data += chunk
    return data


async def open_websocket(served: Served, path: str = "/ws", *lines: str, **options: Any) -> trio.SocketStream:
    """A connection on which the handshake is done, and nothing after it was read."""
    stream = await served.connect(**options)
    await stream.send_all(handshake(*lines, path=path))
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = await stream.receive_some(1)
        assert byte, head
        head += byte
    assert b" 101 " in head, head
    return stream


async def over_tls(served: Served, context: ssl.SSLContext) -> trio.SSLStream[trio.SocketStream]:
    stream = trio.SSLStream(await served.connect(), context, server_hostname="localhost", https_compatible=True)
    await stream.do_handshake()
    return stream


__all__ = [
    "Served",
    "open_websocket",
    "over_tls",
    "read_until",
    "reset_on_close",
    "serving",
]
