"""Messages over WebSocket: one text message is one JSON-RPC message. docs/design/websocket.md describes the binding.

The channel of clients; what a server has is a `served.ServedWebSocket`. Both take messages from a `FrameGate`.
trio-websocket reads, answers pings and does the closing handshake. This module adds time limits for every wait, pings
to silent peers, and a Close frame for peers that break the protocol.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import trio
import trio_websocket
from trio_websocket import ConnectionClosed
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.frame_protocol import FrameProtocol
from wsproto.utilities import ProtocolError

from trimcp.channel import Incoming, MessageChannel, OneTask, Outgoing
from trimcp.framing.frames import FrameFault, FrameGate, text_frame
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.descriptors import READ_SIZE, over_or_peer_closed, socket_under
from trimcp.transports.websocket.frames import (
    CLOSED,
    GONE,
    KEEP_ALIVE,
    LATE,
    LATE_MESSAGE,
    NOT_UTF8,
    PROTOCOL_ERROR,
    WINDOW,
    GatedStream,
    KeepAlive,
    LifeSign,
    close_text,
    fault_of,
    fault_text,
    silence_text,
)
from trimcp.wire.jsonrpc import Message, parse

_BATCH: Final = 256  # messages that one `receive` returns at most
_WRITE: Final = 64 * 1024  # bytes that are gathered for one write
_CLOSING: Final = 1.0  # seconds for the closing handshake, or for the Close frame of `_send_fault`
_DRAINED: Final = 16  # reads after that Close frame

_log = logging.getLogger("trimcp.websocket")


class WebSocketChannel(MessageChannel):
    """Messages as text messages of a WebSocket connection, after its opening handshake.

    One `receive` returns all messages that have arrived; a batch is sent in one write. A message over the limit is
    received as `Malformed` and is not kept in memory. Some input closes the connection with the matching close code:
    binary messages, text that is not UTF-8, frames that break the protocol, and messages of sixteen times the limit.

    `client` is False for a server's side, with which the tests compare our own. `early` arrived with the handshake.
    `read` returns a message from its text, and must not raise. The stream is closed when the connection has ended.
    """

    half_open = False

    def __init__(
        self,
        stream: trio.abc.Stream,
        max_message: int,
        *,
        client: bool,
        keep_alive: KeepAlive = KEEP_ALIVE,
        early: bytes = b"",
        read: Callable[[bytes], Any] = parse,
    ) -> None:
        # Upper bound of unread input: one batch and two windows. Each window may be exceeded by one read and by the
        # beginning of a message that this read completes.
        self.read_ahead: tuple[int, int] = (_BATCH + 1, 2 * (WINDOW + 2 * READ_SIZE))
        self._stream = stream
        self._client = client
        self._keep_alive = keep_alive
        self._read = read
        self._gate = FrameGate(max_message, masked=not client)
        self._gated = GatedStream(stream, self._gate, keep_alive, early)
        self._library = self._gated.connection = _opened(self._gated, client)
        self._sending, self._receiving = OneTask("sending on"), OneTask("receiving from")
        self._broken = self._closed = self._silent = self._late = False
        self._read_all = False  # whether no more messages come
        self._ended = trio.Event()
        self._pinging: trio.CancelScope | None = None

    async def send(self, batch: Sequence[Outgoing]) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            if self._broken:
                raise trio.BrokenResourceError("an earlier send failed or was cut short")
            if batch:
                self._broken = True  # until all bytes are written
                await self._send(batch)
                self._broken = False
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()

    async def _send(self, batch: Sequence[Outgoing]) -> None:
        """Write the batch without trio-websocket, which copies each message five times and writes it separately."""
        gated, library = self._gated, self._library
        try:
            for message in batch:
                if library.closed is not None:
                    raise ConnectionClosed(library.closed)
                gated.hold(*text_frame(message.data, masked=self._client))
                if gated.held > _WRITE:
                    await gated.flush()
            await gated.flush()
        except (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            # While this waited, the peer may have left, or the watcher may have closed the stream.
            self._check_open()
            raise trio.BrokenResourceError(self._failure_text) from None

    def set_max_message(self, size: int) -> None:
        self._gate.max_message = size

    def write_progress(self) -> Hashable:
        return self._gated.progress()

    async def receive(self) -> Sequence[Incoming]:
        with self._receiving:
            self._check_open()
            await trio.lowlevel.checkpoint()
            gate = self._gate
            while not gate.texts:
                self._check_open()
                if self._read_all and self._peer_close is None:
                    raise trio.BrokenResourceError(self._failure_text)
                if self._read_all:
                    raise trio.EndOfChannel("the peer has closed the connection")
                await self._gated.arrival.park()
            self._check_open()
            batch = []
            for data in gate.take_texts(_BATCH):
                message: Message = gate.oversized.pop(0) if not data and gate.oversized else self._read(data)
                batch.append(Incoming(message, len(data)))
            self._gated.consumed()
        return batch

    async def wait_peer_closed(self) -> None:
        await over_or_peer_closed(self._gated.over, socket_under(self._stream))

    async def aclose(self) -> None:
        """Close the connection with a closing handshake, within a second; see `MessageChannel.aclose`.

        A client sends the code 1000; a server 1001, or 1011 while an exception is being raised. While a write is in
        progress no frame can be sent, so the stream is closed without a handshake. Cancelling closes at once.
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        self._gated.arrival.unpark_all()
        code = 1000 if self._client else 1011 if isinstance(sys.exception(), Exception) else 1001
        try:
            with trio.move_on_after(_CLOSING):
                if self._gated.over.is_set() or self._peer_fault is not None:
                    await self._ended.wait()  # `_send_fault` may still be writing
                elif not self._gated.writing:
                    self._gated.read_unlimited()
                    await self._library.aclose(code)
                    await self._stream.aclose()
        finally:
            await trio.aclose_forcefully(self._stream)

    def close_reason(self) -> str | None:
        """Return the code and reason of the peer's Close frame, or how else the connection ended."""
        if not self._gated.over.is_set():
            return None
        if self._peer_close is None:
            return self._failure_text
        code, reason = self._peer_close
        return close_text(code, reason)

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")

    # Close codes and reasons

    @property
    def _peer_close(self) -> tuple[int, str] | None:
        """The code and reason of the peer's Close; None without one."""
        closed = self._library.closed
        if not self._gate.closing or closed is None or self._peer_fault is not None:
            return None
        return closed.code, closed.reason or ""

    @property
    def _failure_text(self) -> str:
        """Why the connection broke, as text."""
        fault = None if self._late else self._peer_fault
        if fault is not None:
            return fault_text(fault)
        if self._late:
            return LATE
        if self._silent:
            return silence_text(self._keep_alive.dead_after)
        if self._gate.closing:
            return CLOSED
        return GONE

    @property
    def _peer_fault(self) -> FrameFault | None:
        """The fault of the peer that ended the connection; None if the end had another reason."""
        if self._gated.sent_close:
            return None  # the connection was already closing
        if self._gate.fault is not None:
            return self._gate.fault
        # trio-websocket reports input that it cannot read as a close by the peer with this code.
        closed = self._library.closed
        if closed is not None and closed.code in (NOT_UTF8, PROTOCOL_ERROR):
            return fault_of(closed.code)
        return None

    # Background tasks

    async def run(self) -> None:
        """Read, answer pings and watch the peer until the connection has ended. A crash ends this connection only."""
        crash: Exception | None = None
        try:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read_frames)
                    await self._watch(nursery)
                    nursery.cancel_scope.deadline = trio.current_time() + _CLOSING
            except* Exception as group:
                crash = _first(group)
            if crash is not None and not isinstance(crash, ConnectionClosed | ProtocolError):
                log_crash(_log, crash, "a WebSocket connection crashed")
            self._gated.over.set()
            await self._send_fault()
        finally:
            crash = self._gated.connection = None  # breaks the reference cycle between this frame and the exception
            self._ended.set()
            await trio.aclose_forcefully(self._stream)

    async def _read_frames(self) -> None:
        try:
            await self._library._reader_task()
        finally:
            self._read_all = True
            self._gated.arrival.unpark_all()

    async def _watch(self, nursery: trio.Nursery) -> None:
        """Ping a silent peer. Return when reading has ended, or the peer did not answer or was too slow."""
        gated = self._gated
        try:
            while True:
                sign, until = gated.signs.look(writing=gated.writing)
                if sign is LifeSign.SILENT:
                    self._silent = True
                    await trio.aclose_forcefully(self._stream)
                    return
                if sign is LifeSign.LATE:
                    self._late = True
                    self._gate.fault = LATE_MESSAGE
                    gated.over.set()
                    nursery.cancel_scope.cancel(reason=LATE)
                    return
                if sign is LifeSign.PONG:
                    nursery.start_soon(self._send_control, self._library.pong)
                elif sign is LifeSign.PING and self._pinging is None:
                    self._pinging = trio.CancelScope()
                    nursery.start_soon(self._ping, self._pinging)
                with trio.move_on_at(until):
                    await gated.over.wait()
                    return
        finally:
            if self._pinging is not None:
                self._pinging.cancel(reason="the connection has ended")

    async def _ping(self, scope: trio.CancelScope) -> None:
        # Waits for the pong. One ping at a time is enough: if it is not answered, the next one would not be either.
        with scope:
            await self._send_control(self._library.ping)
        self._pinging = None

    async def _send_control(self, control: Callable[[], Awaitable[None]]) -> None:
        with suppress(ConnectionClosed):
            await control()

    async def _send_fault(self) -> None:
        """Send a Close frame that names the peer's fault, which trio-websocket does not do, and close the stream."""
        fault = self._peer_fault
        with trio.move_on_after(_CLOSING), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if fault is not None and not self._gated.writing:
                self._gated.writing = True
                frame = FrameProtocol(self._client, []).close(fault.code, fault.reason)
                await self._stream.send_all(bytes(frame))
                # Closing with unread input would send a reset, which could overtake the Close frame.
                for _ in range(_DRAINED):
                    if not await self._stream.receive_some(READ_SIZE):
                        break
            await self._stream.aclose()


@asynccontextmanager
async def running(channel: WebSocketChannel) -> AsyncIterator[WebSocketChannel]:
    """Run the tasks of a channel while the body runs, then close it. The body's exception is raised without a group."""
    async with open_service_nursery() as nursery:
        nursery.start_soon(channel.run)
        async with channel:
            yield channel


def _first(error: BaseException) -> Exception | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else None


def _opened(stream: trio.abc.Stream, client: bool) -> trio_websocket.WebSocketConnection:
    """Return trio-websocket's connection in the state after the opening handshake, which this package has done."""
    side = ConnectionType.CLIENT if client else ConnectionType.SERVER
    protocol = WSConnection(side)
    protocol.connection = Connection(side)
    library = trio_websocket.WebSocketConnection(stream, protocol, host="", path="")
    library._initial_request = None  # otherwise its reader would begin with a client's handshake
    return library
