"""Guards for Hypercorn's WebSocket, and the function that installs these and those of `guards`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Final

import trio
import wsproto.connection
import wsproto.events
from hypercorn.protocol import events
from hypercorn.protocol.ws_stream import FrameTooLargeError, WebsocketBuffer, WSStream

from trimcp.budget import MemoryCharge
from trimcp.transports.descriptors import PIECE
from trimcp.transports.http.asgi.guards import GUARDS, Method, replaces
from trimcp.transports.http.settings import HttpLimits

_log = logging.getLogger("trimcp.http")


@cache
def install() -> None:
    """Install all guards, once; `hypercorn.check_version` checks that they support the installed version."""
    for guard in GUARDS:
        guard.install()


# messages


_FRAMES: Final = 16  # frames per turn of the event loop, as in our own listener
_POLICY: Final = 1008


class LimitedMessage(WebsocketBuffer):
    """The received part of a message, bounded in size. Counts bytes, not characters."""

    refusals: int = 0  # how often a message was refused for its size
    length: int
    value: Any
    due: float = math.inf  # when it has to be complete; infinity without a message
    watch: trio.CancelScope | None = None  # cancelled when there is no message to wait for

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self.amount: MemoryCharge = MemoryCharge()

    def clear(self) -> None:
        super().clear()
        self.amount.set(0)
        self.due = math.inf
        if self.watch is not None:
            self.watch.cancel(reason="the message is whole, or nobody waits for it")
            self.watch = None

    def extend(self, event: Any) -> None:
        data = event.data
        size = len(data) if not isinstance(data, str) or data.isascii() else len(data.encode())
        holding = self.amount.holding
        crowded = self.amount.counted > 0 and holding is not None and not holding.fits(0)
        if self.length + size > self.max_length or crowded:
            if crowded and holding is not None:
                holding.refuse("messages")
            self.value, self.length = None, self.max_length  # no more is accepted
            self.amount.set(0)
            self.refusals += 1
            raise FrameTooLargeError
        super().extend(event)
        self.length += size - len(data)
        self.amount.set(self.length)


class _ReportingConnection(wsproto.connection.Connection):
    """Reports unreadable input as a Close of the peer that needs a reply, so that Hypercorn sends the reason."""

    behind: bool = False  # whether more frames may be buffered

    def events(self) -> Iterator[wsproto.events.Event]:  # type: ignore[override]  # the original yields the same types
        self.behind = False
        for count, event in enumerate(super().events(), 1):
            broken = isinstance(event, wsproto.events.CloseConnection) and self.state is _OPEN
            if broken:
                self._state = wsproto.connection.ConnectionState.REMOTE_CLOSING
            self.behind = count == _FRAMES
            yield event
            if self.behind:
                return


_OPEN: Final = wsproto.connection.ConnectionState.OPEN


_ASCII: Final = (b"connection", b"sec-websocket-protocol")


@replaces(WSStream, "handle", "messages")
async def _handle_websocket(original: Method, stream: WSStream, event: events.Event) -> None:
    if isinstance(event, events.Request):
        stream.buffer = LimitedMessage(stream.config.websocket_max_message_size)
        # wsproto reads these as ASCII, and raises for other bytes; without them the handshake says too little.
        plain = [
            (name, value)
            for name, value in event.headers
            if name.lower() != b"sec-websocket-extensions" and (value.isascii() or name.lower() not in _ASCII)
        ]
        event = replace(event, headers=plain)
    elif isinstance(event, events.EndBody) or (
        isinstance(event, events.Body | events.Data) and not stream.handshake.accepted
    ):
        # What comes before the handshake is over is no frame.
        await stream.send(events.StreamClosed(stream_id=stream.stream_id))
        return
    elif isinstance(event, events.Body | events.Data):
        # Hypercorn makes the connection while it accepts, and the peer may send before that returns.
        stream.connection.__class__ = _ReportingConnection
    message: Any = stream.buffer
    refusals = message.refusals
    await original(stream, event)
    if isinstance(event, events.StreamClosed):
        message.clear()
    elif isinstance(event, events.Body | events.Data):
        # After a refusal Hypercorn leaves later frames unread, such as the peer's close.
        connection: Any = stream.connection
        while (message.refusals != refusals or connection.behind) and not stream.closed:
            refusals = message.refusals
            await trio.lowlevel.checkpoint()
            await stream._handle_events()
        if message.value is not None and not stream.closed:
            _note_time(stream, message, len(event.data))


def _note_time(stream: WSStream, message: LimitedMessage, size: int) -> None:
    """Set the deadline of a message that has begun, and extend it for the bytes that have arrived."""
    limits: HttpLimits = stream.config.limits  # type: ignore[attr-defined]  # guards run only with a GuardedConfig
    credit = size / limits.body_rate
    if message.due < math.inf:
        message.due += credit
    else:
        message.due = trio.current_time() + limits.body_timeout + credit
        message.watch = trio.CancelScope()
        stream.task_group.spawn(_end_late, stream, message, message.watch)


async def _end_late(stream: WSStream, message: LimitedMessage, scope: trio.CancelScope) -> None:
    """End the connection if its message is not complete in time."""
    with scope:
        while trio.current_time() < message.due:  # noqa: ASYNC110  # the deadline may be moved meanwhile
            await trio.sleep_until(message.due)
    if not scope.cancelled_caught and not stream.closed and message.watch is scope:
        close = wsproto.events.CloseConnection(code=_POLICY, reason="a message took too long")
        await stream._send_wsproto_event(close)
        await stream.send(events.StreamClosed(stream_id=stream.stream_id))


@replaces(WSStream, "_send_wsproto_event", "messages")
async def _send_message(original: Method, stream: WSStream, event: wsproto.events.Event) -> None:
    """Send a large message in fragments, so that only one of them is copied at a time."""
    if not isinstance(event, wsproto.events.TextMessage) or len(event.data) <= PIECE:
        await original(stream, event)
        return
    text = event.data
    for start in range(0, len(text), PIECE):
        end = start + PIECE
        await original(stream, wsproto.events.TextMessage(text[start:end], message_finished=end >= len(text)))
