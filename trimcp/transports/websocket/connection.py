"""A WebSocket connection from its opening handshake on: its tasks, pings, and how it ends.

trio-websocket reads, answers pings and does the closing handshake. Added here: time limits for every wait, pings to
peers that are silent, and a Close frame for those that break the protocol. Nothing here parses messages.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import trio
import trio_websocket
from trio_websocket import ConnectionClosed
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection
from wsproto.frame_protocol import FrameProtocol
from wsproto.utilities import ProtocolError

from trimcp.budget import Holding
from trimcp.framing.frames import FrameFault, FrameGate
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.websocket.frames import KEEP_ALIVE, GatedStream, KeepAlive

__all__ = ["WebSocketConnection"]

_QUEUE: Final = 32_768  # messages: more than can be there, because the gate stops reading before
_PROTOCOL_ERROR: Final = 1002
_NOT_UTF8: Final = 1007
_POLICY: Final = 1008
_CLOSING: Final = 1.0  # seconds for the closing handshake, or for the Close frame of `_send_complaint`
_DRAINED: Final = 16  # reads after that

_log = logging.getLogger("trimcp.websocket")


class WebSocketConnection:
    """One connection, from the end of its opening handshake to the close of its stream.

    Args:
        stream: leads to the peer; closed when the connection has ended.
        client: whether we are the client's side.
        max_message: bytes of the largest message taken in.
        keep_alive: what is done about silence.
        early: bytes that arrived with the handshake.
        holding: counts what is kept of a message whose end has not come.

    Attributes:
        gate: what of the peer's frames is let through.
        gated: `stream` as trio-websocket sees it.
        library: trio-websocket's connection.
    """

    def __init__(
        self,
        stream: trio.abc.Stream,
        max_message: int,
        *,
        client: bool,
        keep_alive: KeepAlive = KEEP_ALIVE,
        early: bytes = b"",
        holding: Holding | None = None,
    ) -> None:
        self.stream = stream
        self.client = client
        self.keep_alive = keep_alive
        self.gate = FrameGate(max_message, masked=not client)
        self.gated = GatedStream(stream, self.gate, keep_alive, early)
        self.gated.amount.holding = holding
        self.library = self.gated.connection = _opened(self.gated, client)
        self._silent = self._late = False
        self._ended = trio.Event()
        self._pinging: trio.CancelScope | None = None

    async def close(self, code: int, reason: str | None = None) -> None:
        """Send a Close frame, wait for the answer for a second, and close the stream.

        If a write is under way no frame can be sent, and the stream is just closed. Cancelling closes at once.
        """
        try:
            with trio.move_on_after(_CLOSING):
                if self.gated.over.is_set() or self._complaint is not None:
                    await self._ended.wait()  # the complaint may not be out
                elif not self.gated.writing:
                    self.gated.read_unlimited()
                    await self.library.aclose(code, reason)
                    await self.stream.aclose()
        finally:
            await trio.aclose_forcefully(self.stream)

    @property
    def peer_close(self) -> tuple[int, str] | None:
        """The code and reason of the peer's Close; None without one."""
        closed = self.library.closed
        if not self.gate.closing or closed is None or self._complaint is not None:
            return None
        return closed.code, closed.reason or ""

    @property
    def trouble(self) -> str:
        """Why the connection broke, in words."""
        complaint = None if self._late else self._complaint
        if complaint is not None:
            return f"the peer broke the WebSocket protocol ({complaint.code}: {complaint.reason})"
        if self._late:
            return "the peer took too long to end a message"
        if self._silent:
            return f"nothing was heard of the peer for {self.keep_alive.dead_after:g} seconds"
        if self.gate.closing:
            return "the peer has closed the connection"
        return "the peer is gone without a closing handshake"

    @property
    def _complaint(self) -> FrameFault | None:
        """What the peer did wrong, if that is the end."""
        if self.gated.sent_close:
            return None  # it came too late
        if self.gate.fault is not None:
            return self.gate.fault
        # trio-websocket reports what it cannot read as if the peer had closed with this code.
        closed = self.library.closed
        if closed is not None and closed.code == _NOT_UTF8:
            return FrameFault(_NOT_UTF8, "text is UTF-8")
        if closed is not None and closed.code == _PROTOCOL_ERROR:
            return FrameFault(_PROTOCOL_ERROR, "a Close frame holds a code and a text, or nothing")
        return None

    async def run(self) -> None:
        """Read, answer pings and watch the peer until the connection has ended. A crash ends this connection only."""
        crash: Exception | None = None
        try:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.library._reader_task)
                    await self._keep_alive(nursery)
                    nursery.cancel_scope.deadline = trio.current_time() + _CLOSING
            except* Exception as group:
                crash = _first(group)
            if crash is not None and not isinstance(crash, ConnectionClosed | ProtocolError):
                _log.error("a WebSocket connection crashed", exc_info=crash)
            self.gated.over.set()
            await self._send_complaint()
        finally:
            crash = self.gated.connection = None  # as above
            self._ended.set()
            await trio.aclose_forcefully(self.stream)

    async def _keep_alive(self, nursery: trio.Nursery) -> None:
        """Ping a silent peer. Return when nothing more will be read, or the peer was found dead or too slow."""
        gated, interval = self.gated, self.keep_alive.interval
        sent = trio.current_time()  # when the last ping or pong was
        try:
            while True:
                now = trio.current_time()
                heard = gated.since if gated.reading else now
                # A peer that reads a large message of ours may send nothing meanwhile, and one that reads nothing
                # answers no ping. The sender's own limit (`Limits.stall_timeout`) decides how long to wait.
                dead = heard + self.keep_alive.dead_after * (2 if gated.writing else 1)
                if now >= dead:
                    self._silent = True
                    await trio.aclose_forcefully(self.stream)
                    return
                if gated.reading and now >= gated.due:
                    self._late = True
                    self.gate.fault = FrameFault(_POLICY, "a message took too long")
                    gated.over.set()
                    nursery.cancel_scope.cancel(reason="the peer took too long to end a message")
                    return
                due = (max(sent, heard) if gated.reading else sent) + interval
                if now >= due:
                    sent, due = now, now + interval
                    self._ask_or_tell(nursery)
                # A message that begins while this waits is due no sooner than that, nor is one that we read no further.
                late = now + self.keep_alive.message_timeout
                if gated.reading:
                    late = min(late, gated.due)
                with trio.move_on_at(min(due, dead, late)):
                    await gated.over.wait()
                    return
        finally:
            if self._pinging is not None:
                self._pinging.cancel(reason="the connection has ended")

    def _ask_or_tell(self, nursery: trio.Nursery) -> None:
        """Ask for a sign of life, or give one where we do not read. What is being written is one already."""
        if self.gated.writing:
            return
        if not self.gated.reading:
            nursery.start_soon(self._send, self.library.pong)
        elif self._pinging is None:
            self._pinging = trio.CancelScope()
            nursery.start_soon(self._ping, self._pinging)

    async def _ping(self, scope: trio.CancelScope) -> None:
        # It waits for the pong. One is enough: if it goes unanswered the next one would, too.
        with scope:
            await self._send(self.library.ping)
        self._pinging = None

    async def _send(self, control: Callable[[], Awaitable[None]]) -> None:
        with suppress(ConnectionClosed):
            await control()

    async def _send_complaint(self) -> None:
        """Send a Close that says what the peer did wrong, which trio-websocket does not do, and close the stream."""
        complaint = self._complaint
        with trio.move_on_after(_CLOSING), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if complaint is not None and not self.gated.writing:
                self.gated.writing = True
                frame = FrameProtocol(self.client, []).close(complaint.code, complaint.reason)
                await self.stream.send_all(bytes(frame))
                # What is not read would come back as a reset, which could overtake the Close.
                for _ in range(_DRAINED):
                    if not await self.stream.receive_some(READ_SIZE):
                        break
            await self.stream.aclose()


def _first(error: BaseException) -> Exception | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else None


def _opened(stream: trio.abc.Stream, client: bool) -> trio_websocket.WebSocketConnection:
    """Return trio-websocket's connection in the state after its opening handshake, which was ours."""
    side = ConnectionType.CLIENT if client else ConnectionType.SERVER
    protocol = WSConnection(side)
    protocol.connection = Connection(side)
    library = trio_websocket.WebSocketConnection(
        stream,
        protocol,
        host="",
        path="",
        message_queue_size=_QUEUE,
        max_message_size=sys.maxsize,  # the gate judges
    )
    library._initial_request = None  # else its reader would begin with the handshake of a client
    return library
