"""The life of one trio-websocket connection: its handshake, its tasks, pings, and how it ends.

trio-websocket reads, answers pings and does the closing handshake. Here is what it leaves to others: an end to every
wait, a look after peers that have fallen silent, a word to those that broke the protocol. Knows no messages.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeAlias

import attrs
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection
from wsproto.frame_protocol import FrameProtocol
from wsproto.utilities import ProtocolError

from trimcp.framing.frames import Fault, FrameGate
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.websocket_stream import GatedStream, HandshakeFailed, KeepAlive

__all__ = ["Link", "Shake"]

Shake: TypeAlias = Callable[[trio.Nursery, GatedStream], Awaitable[WebSocketConnection]]
"""Does the opening handshake and returns the connection, whose reader runs in the nursery."""

_PROTOCOL_ERROR: Final = 1002
_NOT_UTF8: Final = 1007
_GOODBYE: Final = 1.0  # seconds for the closing handshake, or for what is said in its place
_DRAINED: Final = 16  # reads after that

_log = logging.getLogger("trimcp.websocket")


@attrs.define(eq=False)
class Link:
    """One connection, from the opening handshake to the close of its stream.

    Args:
        stream: leads to the peer; closed when the connection has ended.
        gate: what of the peer's frames is let through.
        gated: `stream` as trio-websocket sees it.
        shake: does the handshake.
        client: whether we are the client's side.
        keep_alive: what is done about silence.

    Attributes:
        connection: once `opened` yields.
    """

    stream: trio.abc.Stream
    gate: FrameGate
    gated: GatedStream
    shake: Shake
    client: bool
    keep_alive: KeepAlive
    connection: WebSocketConnection = attrs.field(init=False)
    _silent: bool = attrs.field(default=False, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    _pinging: trio.CancelScope | None = attrs.field(default=None, init=False)

    @asynccontextmanager
    async def opened(self, timeout: float) -> AsyncIterator[None]:
        """Do the handshake and keep the connection alive while the body runs; what that raises comes out as itself.

        Raises:
            HandshakeFailed: there is no connection.
        """
        failure: BaseException | None = None
        try:
            try:
                async with trio.open_nursery() as nursery:
                    try:
                        with trio.move_on_after(timeout) as scope:
                            await nursery.start(self._run)
                        if scope.cancelled_caught:
                            raise HandshakeFailed(f"the handshake took more than {timeout:g} seconds")
                        yield
                    except BaseException as exc:  # the body's: raised below, without the nursery's group around it
                        failure = exc
                    nursery.cancel_scope.cancel(reason="whoever used the connection is done")
            except trio.Cancelled:
                if failure is None:
                    raise
            if failure is not None:
                raise failure
        finally:
            failure = None  # a frame and what was raised from it would keep each other alive

    async def close(self, code: int, reason: str | None = None) -> None:
        """Say Close, wait a moment for the answer, and close the stream.

        If a write is under way nothing more can be said, and the stream is closed under it. Cancelling closes at once.
        """
        try:
            with trio.move_on_after(_GOODBYE):
                if self.gated.over.is_set() or self._complaint is not None:
                    await self._ended.wait()  # the last words may not be out
                elif not self.gated.writing:
                    self.gated.let_go()
                    await self.connection.aclose(code, reason)
                    await self.stream.aclose()
        finally:
            await trio.aclose_forcefully(self.stream)

    @property
    def farewell(self) -> tuple[int, str] | None:
        """The code and reason of the peer's Close; None without one."""
        closed = self.connection.closed
        if not self.gate.closing or closed is None or self._complaint is not None:
            return None
        return closed.code, closed.reason or ""

    @property
    def trouble(self) -> str:
        """Why the connection broke, in words."""
        complaint = self._complaint
        if complaint is not None:
            return f"the peer broke the WebSocket protocol ({complaint.code}: {complaint.reason})"
        if self._silent:
            return f"nothing was heard of the peer for {self.keep_alive.dead_after:g} seconds"
        if self.gate.closing:
            return "the peer has closed the connection"
        return "the peer is gone without a closing handshake"

    @property
    def _complaint(self) -> Fault | None:
        """What the peer did wrong, if that is the end."""
        if self.gated.said_close:
            return None  # it came too late
        if self.gate.fault is not None:
            return self.gate.fault
        # trio-websocket reports what it cannot read as if the peer had closed with this code.
        closed = self.connection.closed
        if closed is not None and closed.code == _NOT_UTF8:
            return Fault(_NOT_UTF8, "text is UTF-8")
        if closed is not None and closed.code == _PROTOCOL_ERROR:
            return Fault(_PROTOCOL_ERROR, "a Close frame holds a code and a text, or nothing")
        return None

    async def _run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own trio-websocket's reader. What that crashes with ends this connection and nothing else."""
        started = False
        crash: Exception | None = None
        try:
            try:
                async with trio.open_nursery() as nursery:
                    self.connection = self.gated.connection = await self.shake(nursery, self.gated)
                    started = True
                    task_status.started()
                    await self._keep_alive(nursery)
                    nursery.cancel_scope.deadline = trio.current_time() + _GOODBYE
            except* Exception as group:
                crash = _first(group)
            if isinstance(crash, HandshakeFailed):
                raise crash
            if not started:
                raise HandshakeFailed("the answer is no handshake of a WebSocket") from crash
            if crash is not None and not isinstance(crash, ConnectionClosed | ProtocolError):
                _log.error("a WebSocket connection crashed", exc_info=crash)
            self.gated.over.set()
            await self._last_words()
        finally:
            crash = self.gated.connection = None  # as above
            self._ended.set()
            await trio.aclose_forcefully(self.stream)

    async def _keep_alive(self, nursery: trio.Nursery) -> None:
        """Return when the end has begun: nothing more will be read, or the peer was found dead."""
        gated, interval = self.gated, self.keep_alive.interval
        spoken = trio.current_time()
        try:
            while True:
                now = trio.current_time()
                heard = gated.since if gated.reading else now
                # A peer that is busy with a large message of ours says nothing meanwhile, and who does not read answers
                # no ping. Whoever sends that message knows better how long to wait (`Limits.stall_timeout`).
                dead = heard + self.keep_alive.dead_after * (2 if gated.writing else 1)
                if now >= dead:
                    self._silent = True
                    await trio.aclose_forcefully(self.stream)
                    return
                due = max(spoken, heard) + interval if gated.reading else spoken + interval
                if now >= due:
                    spoken, due = now, now + interval
                    self._speak(nursery)
                with trio.move_on_at(min(due, dead)):
                    await gated.over.wait()
                    return
        finally:
            if self._pinging is not None:
                self._pinging.cancel(reason="the connection has ended")

    def _speak(self, nursery: trio.Nursery) -> None:
        if self.gated.writing:
            return  # there is something on its way already
        if not self.gated.reading:
            nursery.start_soon(self._say, self.connection.pong)
        elif self._pinging is None:
            self._pinging = trio.CancelScope()
            nursery.start_soon(self._ping, self._pinging)

    async def _ping(self, scope: trio.CancelScope) -> None:
        # It waits for the pong. One is enough: if it goes unanswered the next one would, too.
        with scope:
            await self._say(self.connection.ping)
        self._pinging = None

    async def _say(self, what: Callable[[], Awaitable[None]]) -> None:
        with suppress(ConnectionClosed):
            await what()

    async def _last_words(self) -> None:
        """Tell a peer what it did wrong, which trio-websocket does not do, and close the stream."""
        complaint = self._complaint
        with trio.move_on_after(_GOODBYE), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if complaint is not None and not self.gated.writing:
                self.gated.writing = True
                frame = FrameProtocol(self.client, []).close(complaint.code, complaint.reason)
                await self.stream.send_all(bytes(frame))
                # What is not read would come back as a reset, which could overtake the words.
                for _ in range(_DRAINED):
                    if not await self.stream.receive_some(READ_SIZE):
                        break
            await self.stream.aclose()


def _first(error: BaseException) -> Exception | None:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else None
