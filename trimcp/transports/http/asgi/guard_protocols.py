"""Guards for Hypercorn's HTTP/2 and WebSocket, and the function that installs these and those of `guards`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Final

import attrs
import h2.errors
import h2.events
import h2.exceptions
import trio
import wsproto.connection
import wsproto.events
from h2.stream import StreamState
from hypercorn.events import Closed
from hypercorn.protocol import events
from hypercorn.protocol.h2 import BUFFER_LOW_WATER, H2Protocol, StreamBuffer
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.protocol.ws_stream import FrameTooLargeError, WebsocketBuffer, WSStream

from trimcp.budget import Amount
from trimcp.transports.http.asgi.guards import GUARDS, PIECE, Method, replaces
from trimcp.transports.http.asgi.request import FLOW, FLOW_WINDOW
from trimcp.transports.http.settings import HttpLimits
from trimcp.transports.websocket.frames import KEEP_ALIVE

_log = logging.getLogger("trimcp.http")


@cache
def install() -> None:
    """Install all guards, once; `hypercorn.check_version` checks that they support the installed version."""
    for guard in GUARDS:
        guard.install()


# window


@replaces(StreamBuffer, "pop", "window")
async def _pop(original: Method, buffer: StreamBuffer, max_length: int) -> bytes:
    """Wake the writer when little is left. Hypercorn does when little was taken: always, if the window is empty."""
    data = bytes(buffer.buffer[:max_length])
    del buffer.buffer[:max_length]
    if len(buffer.buffer) < BUFFER_LOW_WATER:
        await buffer._paused.set()
    if not buffer.buffer:
        await buffer._is_empty.set()
    return data


@replaces(H2Protocol, "handle", "window")
async def _handle(original: Method, protocol: H2Protocol, event: Any) -> None:
    watch: SilenceWatch | None = getattr(protocol, "silence", None)
    if watch is not None:
        watch.heard = trio.current_time()
        if isinstance(event, Closed):
            watch.over.set()
    await original(protocol, event)
    if isinstance(event, Closed):
        for buffer in list(protocol.stream_buffers.values()):
            await buffer.close()


# streams


@replaces(H2Protocol, "_handle_events", "streams")
async def _handle_events(original: Method, protocol: H2Protocol, happened: list[h2.events.Event]) -> None:
    """Handle events that Hypercorn does not expect; they end the stream, not the server."""
    connection = protocol.connection
    for event in happened:
        if isinstance(event, h2.events.RequestReceived) and not _is_request(event):
            connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
        elif isinstance(event, h2.events.PriorityUpdated):
            pass  # ignored: they cost more than they are worth (RFC 9113 section 5.3)
        elif isinstance(event, h2.events.DataReceived) and event.stream_id not in protocol.streams:
            connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if event.stream_id not in protocol.stream_buffers:  # answered completely (RFC 9113 section 8.1)
                with suppress(h2.exceptions.ProtocolError):
                    connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.NO_ERROR)
        elif isinstance(event, h2.events.DataReceived) and await _take_data(protocol, event):
            pass
        else:
            await original(protocol, [event])
    await protocol._flush()


async def _take_data(protocol: H2Protocol, event: h2.events.DataReceived) -> bool:
    """Pass on data of a stream whose application opens the window; return False for another stream (guard `flow`).

    The connection's own window is opened in any case: no stream can hold up the others with what it leaves unread.
    """
    stream: Any = protocol.streams[event.stream_id]
    flow: StreamFlow | None = getattr(stream, "flow", None)
    size = event.flow_controlled_length
    if flow is None or not flow.taken_over:
        if flow is not None:
            flow.early += size
        return False
    await stream.handle(events.Body(stream_id=event.stream_id, data=event.data))
    if padding := size - len(event.data):
        flow.credit(padding)
    state: Any = protocol
    state.owed = getattr(protocol, "owed", 0) + size
    if state.owed >= _CONNECTION_STEP:  # not for each frame: it may be of a byte
        with suppress(h2.exceptions.ProtocolError):
            protocol.connection.increment_flow_control_window(state.owed)
        state.owed = 0
    return True


def _is_request(event: h2.events.RequestReceived) -> bool:
    """Whether a request has a method and path that Hypercorn can read, and uses CONNECT only for WebSocket."""
    pseudo = {bytes(name): bytes(value) for name, value in event.headers or () if name[:1] == b":"}
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if method == b"CONNECT" and pseudo.get(b":protocol") != b"websocket":
        return False
    return bool(method and path) and method.isascii() and path.isascii()


@replaces(H2Protocol, "stream_send", "streams")
async def _stream_send(original: Method, protocol: H2Protocol, event: events.Event) -> None:
    """Reset the stream of a response that was cut short, so that the client notices."""
    if isinstance(event, events.StreamClosed):
        buffer = protocol.stream_buffers.get(event.stream_id)
        if buffer is not None and not buffer._complete:
            with suppress(h2.exceptions.ProtocolError):
                protocol.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            await protocol._flush()
            await protocol._window_updated(event.stream_id)  # so that its buffer is checked and removed
    await original(protocol, event)


# ended


_SENDING: Final = (StreamState.OPEN, StreamState.HALF_CLOSED_REMOTE)


@replaces(H2Protocol, "stream_send", "ended")
async def _end_stream(original: Method, protocol: H2Protocol, event: events.Event) -> None:
    """Forget a stream whose response has left. Hypercorn leaves that to its sending task, which prefers new streams."""
    if isinstance(event, events.StreamClosed):
        buffer = protocol.stream_buffers.get(event.stream_id)
        if buffer is not None and buffer.complete:
            del protocol.stream_buffers[event.stream_id]
            with suppress(KeyError):
                protocol.priority.remove_stream(event.stream_id)
            stream = protocol.connection.streams.get(event.stream_id)
            # Trailers have ended it, or the sending task has, which may be about to forget it. To end it again would
            # close it for the client, too.
            if stream is not None and stream.state_machine.state in _SENDING:
                protocol.connection.end_stream(event.stream_id)
                await protocol._flush()
    await original(protocol, event)


@replaces(H2Protocol, "_send_data", "ended")
async def _send_data(original: Method, protocol: H2Protocol, stream_id: int) -> None:
    """Send data of a stream, which may be forgotten meanwhile."""
    with suppress(KeyError):
        await original(protocol, stream_id)


# flow

_STEP: Final = FLOW_WINDOW // 4  # bytes by which a window is opened
_INITIAL_WINDOW: Final = 65_535
_CONNECTION_STEP: Final = _INITIAL_WINDOW // 4


@attrs.define(eq=False)
class StreamFlow:
    """The window of a stream of HTTP/2, which its application may open as it uses what has arrived.

    Hypercorn opens it when the application's queue has taken the data, and reads nothing of the whole connection while
    that is full: not even that the client has room for what the application waits to send.
    """

    protocol: H2Protocol
    id: int
    taken_over: bool = attrs.field(init=False, default=False)
    early: int = attrs.field(init=False, default=0)  # bytes for which Hypercorn has opened the window
    _owed: int = attrs.field(init=False, default=0)

    def take_over(self) -> Callable[[int], None]:
        self.taken_over = True
        self.protocol_watch()
        self._open(FLOW_WINDOW - _INITIAL_WINDOW)
        return self.credit

    def credit(self, size: int) -> None:
        """Note that received bytes have been used."""
        before, self.early = self.early, max(0, self.early - size)
        self._owed += size - (before - self.early)
        if self._owed >= _STEP:
            self._open(self._owed)
            self._owed = 0

    def protocol_watch(self) -> None:
        """Have the connection's client pinged while it is silent, as long as such a stream is open."""
        protocol: Any = self.protocol
        if getattr(protocol, "silence", None) is None:
            protocol.silence = SilenceWatch(protocol)
            protocol.task_group.spawn(protocol.silence.run)

    def _open(self, size: int) -> None:
        with suppress(h2.exceptions.ProtocolError, KeyError):  # the stream has ended, and h2 may have forgotten it
            self.protocol.connection.increment_flow_control_window(size, self.id)
            self.protocol.task_group.spawn(self.protocol._flush)


@attrs.define(eq=False)
class SilenceWatch:
    """Pings the client of a connection of HTTP/2 that is silent, and ends the connection of one that does not answer.

    For streams that last: over those of HTTP a response is bounded by other limits.
    """

    protocol: H2Protocol
    heard: float = attrs.field(init=False, factory=trio.current_time)
    over: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def run(self) -> None:
        protocol: Any = self.protocol
        pinged = self.heard
        while any(flow.taken_over for stream in protocol.streams.values() if (flow := getattr(stream, "flow", None))):
            now, dead = trio.current_time(), self.heard + KEEP_ALIVE.dead_after
            if now >= dead:
                _log.debug("nothing was heard of a client for %g seconds", KEEP_ALIVE.dead_after)
                await protocol.send(Closed())
                return
            due = max(pinged, self.heard) + KEEP_ALIVE.interval
            if now >= due:
                pinged, due = now, now + KEEP_ALIVE.interval
                with suppress(h2.exceptions.ProtocolError):
                    protocol.connection.ping(b"trimcp\0\0")
                await protocol._flush()
            with trio.move_on_at(min(due, dead)):
                await self.over.wait()
                return
        protocol.silence = None


@replaces(HTTPStream, "handle", "flow")
async def _handle_http(original: Method, stream: Any, event: events.Event) -> None:
    """Let the application of a stream of HTTP/2 open its window. It has not begun to run when this returns."""
    await original(stream, event)
    if isinstance(event, events.Request):
        protocol = getattr(stream.send, "__self__", None)
        if isinstance(protocol, H2Protocol):
            stream.flow = StreamFlow(protocol, stream.stream_id)
            stream.scope["extensions"][FLOW] = stream.flow.take_over


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
        self.amount: Amount = Amount()

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
        # The end of an HTTP/2 stream has the meaning of the end of a connection in HTTP/1.1.
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
