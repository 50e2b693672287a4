"""A server under Hypercorn on a port of its own, and clients that behave as told: HTTP/1.1, HTTP/2, WebSocket."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import h2.config
import h2.connection
import h2.events
import h2.settings
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


@attrs.define(eq=False)
class H2Client:
    """One connection of HTTP/2, over which even what is wrong can be sent.

    Args:
        stream: to the server.
        window: bytes that each stream may send us before we allow more.
    """

    stream: trio.abc.Stream
    window: int = 65535
    connection: h2.connection.H2Connection = attrs.field(init=False)
    seen: list[h2.events.Event] = attrs.field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.connection = h2.connection.H2Connection(config)
        settings = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self.window}
        self.connection.local_settings = h2.settings.Settings(client=True, initial_values=settings)
        self.connection.initiate_connection()

    async def flush(self) -> None:
        await self.stream.send_all(self.connection.data_to_send())

    async def request(
        self,
        path: bytes = b"/",
        method: bytes = b"POST",
        body: bytes | None = b"",
        extra: Sequence[tuple[bytes, bytes]] = (),
    ) -> int:
        """Send a request, and leave its body open if that is None."""
        number = self.connection.get_next_available_stream_id()
        scheme = b"http" if path else b""  # a plain CONNECT has neither
        head = [(b":method", method), (b":path", path), (b":scheme", scheme), (b":authority", b"localhost"), *extra]
        self.connection.send_headers(number, [pair for pair in head if pair[1]], end_stream=body == b"")
        await self.flush()
        if body:
            await self.send_body(number, body)
        return number

    async def send_body(self, number: int, body: bytes) -> None:
        """Send a body, as far as one window lets us."""
        for start in range(0, len(body), 16384):
            piece = body[start : start + 16384]
            self.connection.send_data(number, piece, end_stream=start + 16384 >= len(body))
        await self.flush()

    async def event(self, kind: type[Any], number: int | None = None) -> Any:
        """Wait for an event of a kind, on that stream; every event is returned once. None if the connection ends."""
        while True:
            for event in self.seen:
                if isinstance(event, kind) and number in (None, getattr(event, "stream_id", None)):
                    self.seen.remove(event)
                    return event
            try:
                data = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                return None
            for event in self.connection.receive_data(bytes(data)):
                if isinstance(event, h2.events.DataReceived) and self.window:
                    self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self.seen.append(event)
            await self.flush()

    async def response(self, number: int) -> tuple[int, bytes]:
        """Wait for a whole response; its status and body."""
        head = await self.event(h2.events.ResponseReceived, number)
        await self.event(h2.events.StreamEnded, number)
        data = [event for event in self.seen if isinstance(event, h2.events.DataReceived) and event.stream_id == number]
        self.seen = [event for event in self.seen if event not in data]
        return int(dict(head.headers)[b":status"]), b"".join(event.data for event in data)


async def h2_client(served: Served, **options: Any) -> H2Client:
    """Connect with prior knowledge."""
    return H2Client(await served.connect(), **options)


async def h2_over_tls(served: Served, context: ssl.SSLContext) -> tuple[H2Client, str | None]:
    """Connect, and return what was agreed to by ALPN too."""
    stream = trio.SSLStream(await served.connect(), context, server_hostname="localhost", https_compatible=True)
    await stream.do_handshake()
    return H2Client(stream), stream.selected_alpn_protocol()


__all__ = [
    "H2Client",
    "Served",
    "h2_client",
    "h2_over_tls",
    "open_websocket",
    "read_until",
    "reset_on_close",
    "serving",
]
