"""Requests of HTTP/2 whose two directions go their own ways: gRPC's streams, and WebSockets (RFC 8441).

A task serves each. What has arrived and was not used yet is bounded by the stream's window, and weighed.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Final

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.support.cleaning import log_crash
from trimcp.support.slotted import slotted
from trimcp.transports.http.h1.hosting import Hosting
from trimcp.transports.http.h1.wires import StreamWire
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.h2.frames import DEFAULT_WINDOW, Code
from trimcp.transports.http.h2.replies import ReplyStream, StreamOwner
from trimcp.transports.http.interfaces import Head, HttpResponse, Tunnel, Upgrade

log: logging.Logger = logging.getLogger("trimcp.http")

_VERSION: Final = "13"


async def serve_tunnel(tunnel: TunnelStream, hosting: Hosting, head: Head, found: Tunnel | Upgrade) -> None:
    """Serve a request that was admitted as a tunnel or a WebSocket, until it has ended."""
    try:
        if isinstance(found, Tunnel):
            await found.serve(tunnel)
            return
        serve = hosting.serve_websocket
        version = head.headers.get("sec-websocket-version", _VERSION)
        if serve is None or found.open is None or version != _VERSION:
            tunnel.refuse(HttpResponse(400, (("Sec-WebSocket-Version", _VERSION),)))
            return
        agreed = found.subprotocol
        tunnel.start(() if agreed is None else (("Sec-WebSocket-Protocol", agreed),))
        wire, deadlines = StreamWire(TunnelAsStream(tunnel)), hosting.application.deadlines
        amount = MemoryCharge(head.holding)
        writer = H1Writer(None, wire, hosting.nursery, deadlines, hosting.limits, amount)
        await serve(b"", wire, writer, deadlines, head, found)
    except Exception as error:  # a bug here or in a library, which must not end other connections
        log_crash(log, error, "serving a stream of %s crashed", head.peer)
    finally:
        tunnel.reset("it was not finished")


@slotted
class TunnelStream:
    """The bytes of one request in both directions: a `ByteStream`."""

    _stream: ReplyStream | None
    _connection: StreamOwner
    window: int = attrs.field(init=False, default=DEFAULT_WINDOW)
    message_timeout: float = attrs.field(init=False)
    message_rate: float = attrs.field(init=False)
    gone: trio.Event = attrs.field(init=False, factory=trio.Event)
    too_slow: bool = attrs.field(init=False, default=False)
    pieces: int = attrs.field(init=False, default=0)
    _arrived: bytearray = attrs.field(init=False, factory=bytearray)  # not a list: pieces may be tiny
    _arrival: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _ended: bool = attrs.field(init=False, default=False)  # whether the peer has said everything
    _finished: bool = attrs.field(init=False, default=False)  # whether this side has
    _why: str = attrs.field(init=False, default="the peer is gone")
    _amount: MemoryCharge = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        limits = self._connection.hosting.limits
        self.message_timeout, self.message_rate = limits.body_timeout, limits.body_rate
        self._amount = MemoryCharge(self._connection.holding)

    @property
    def half_closed(self) -> bool:
        return self._ended and not self.gone.is_set()

    def start(self, headers: tuple[tuple[str, str], ...]) -> None:
        if self._stream is not None:
            self._stream.start(HttpResponse(200, headers))

    def refuse(self, response: HttpResponse) -> None:
        """Answer with something else than a stream."""
        if self._stream is not None:
            self._finished = True
            self._stream.send(response)

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        stream = self._check()
        stream.write(data)
        self.pieces += 1
        if stream.waiting <= self._connection.hosting.limits.low_water:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        await stream.room()
        self._check()

    async def receive(self) -> bytes:
        if self._arrived:
            await trio.lowlevel.checkpoint()
        while not self._arrived:
            if self._finished:
                raise trio.ClosedResourceError("this stream was finished")
            if self._ended:
                await trio.lowlevel.checkpoint()
                return b""
            if self.gone.is_set():
                raise trio.BrokenResourceError(self._why)
            await self._arrival.park()
        arrived = bytes(self._arrived)
        self._arrived = bytearray()
        self._amount.set(0)
        return arrived

    def credit(self, size: int) -> None:
        stream = self._stream
        if stream is not None:
            self._connection.engine.credit(stream, size)
            self._connection.flush()

    def finish(self, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        stream = self._stream
        if stream is not None and not self._finished:
            self._finished = True
            stream.finish(b"", trailers)
            self._arrival.unpark_all()

    def reset(self, why: str) -> None:
        stream = self._stream
        if stream is None or self._finished:
            return
        self._why = why
        self._connection.engine.reset(stream, Code.CANCEL)
        self._connection.flush()
        stream.give_up("was given up")

    def _check(self) -> ReplyStream:
        stream = self._stream
        if self._finished:
            raise trio.ClosedResourceError("this stream was finished")
        if stream is None or self.gone.is_set():
            raise trio.BrokenResourceError(self._why)
        return stream

    # Called by the stream

    def arrived(self, data: bytes) -> None:
        self._arrived += data
        self._amount.set(len(self._arrived))
        self._arrival.unpark_all()

    def peer_ended(self) -> None:
        self._ended = True
        self._arrival.unpark_all()

    def lost(self, why: str, *, slow: bool) -> None:
        """Note that the peer is gone, or that it was dropped because it did not read."""
        if self._why == "the peer is gone":
            self._why = why
        self.too_slow = slow
        self._end()

    def finished(self) -> None:
        """Note that everything was given to the connection."""
        self._end()

    def _end(self) -> None:
        self._stream = None
        self.gone.set()
        self._arrival.unpark_all()

    def progress(self) -> Hashable:
        """Return a value that changes when the peer takes more."""
        stream = self._stream
        return self.pieces, 0 if stream is None else stream.waiting


class TunnelAsStream(trio.abc.Stream):
    """A `TunnelStream` as a stream of Trio, for a WebSocket. Closing it ends the request in order."""

    def __init__(self, tunnel: TunnelStream) -> None:
        self._tunnel = tunnel

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._tunnel.send(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        data = await self._tunnel.receive()
        self._tunnel.credit(len(data))
        return data

    def write_progress(self) -> Hashable:
        """Return a value that changes while the peer reads what was written."""
        return self._tunnel.progress()

    async def aclose(self) -> None:
        self._tunnel.finish()
        await trio.lowlevel.checkpoint()
