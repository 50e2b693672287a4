"""Guards against faults of Hypercorn's Trio worker: without them one client can end the server, or fill its memory.

Each was seen in the versions named in `FAULTY`, whose source was read for it, and has a test that shows the fault
without its guard. `install` puts them in place; but for one line about HTTP/2 buffers they act only on servers that
have a `GuardedConfig`: others in the process stay as they are. What they replace is private, hence the end of `FAULTY`.

    window      HTTP/2 sends do not wait for the client's window: the writer is woken by a drain that moved nothing. And
                one that does wait is not woken by the connection's end.
    streams     A body that goes on after its answer, a path that is no ASCII, a CONNECT and a thousand priorities over
                HTTP/2 each end the server. A response that is cut off leaves its stream open for ever.
    messages    A message goes on growing after it was refused as too large; one that is compressed is inflated before
                anybody looks at its size (58 KB to 60 MB); data before the handshake's end ends the server. Who breaks
                the protocol is not told so. A large message to a slow reader is there six times.
    idle        A connection that its client closed while it was idle stays open until it would have been too long idle,
                and one that begins with HTTP/2 and then says nothing for ever.
    stall       Writes are shielded from cancellation and have no time limit: a client that does not read holds its
                task, and the server's shutdown, for ever.
    alive       Any exception on a connection ends the server, such as BusyResourceError when a WebSocket peer stops
                reading, closes and vanishes.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import attrs
import h2.errors
import h2.events
import h2.exceptions
import h11
import hypercorn.trio.run
import trio
import wsproto.connection
import wsproto.events
import wsproto.utilities
from hypercorn.config import Config
from hypercorn.events import Closed, Updated
from hypercorn.protocol import events
from hypercorn.protocol.h2 import BUFFER_LOW_WATER, H2Protocol, StreamBuffer
from hypercorn.protocol.ws_stream import FrameTooLargeError, WebsocketBuffer, WSStream
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import TrioSingleTask

from trimcp.transports.http.limits import HttpLimits

__all__ = ["FAULTY", "GuardedConfig", "install", "without"]

_log = logging.getLogger("trimcp.http")

FAULTY: Final = ((0, 17), (0, 19))
"""The versions of Hypercorn for which the guards are meant: from the first, below the second."""

_PIECE: Final = 64 * 1024
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, for no time

_ORDINARY: Final = (
    OSError,
    trio.BrokenResourceError,
    trio.BusyResourceError,
    trio.ClosedResourceError,
    h11.ProtocolError,
    h2.exceptions.ProtocolError,
    wsproto.utilities.ProtocolError,
)
"""What Hypercorn lets out where a client misbehaves or leaves at a bad moment."""


class GuardedConfig(Config):
    """The configuration of a server to be guarded, and what the guards know of it.

    Attributes:
        limits: of connections.
        connections: those that are open.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.connections: set[_GuardedStream] = set()

    def cut(self) -> None:
        """Close every connection, whatever is being written to it."""
        if "stall" not in _off:
            for connection in list(self.connections):
                connection.cut()


_Method: TypeAlias = Callable[..., Awaitable[Any]]


@attrs.frozen
class _Guard:
    """One replaced attribute: `body` gets what stood there before, and then the arguments."""

    names: frozenset[str]
    owner: Any
    attribute: str
    body: _Method


_guards: list[_Guard] = []
_off: set[str] = set()
_installed = False


def install() -> None:
    """Put the guards in place, once, if this version of Hypercorn needs them."""
    global _installed
    if _installed:
        return
    _installed = True
    found = version("hypercorn")
    major, minor = (int(part) for part in found.split(".")[:2])
    if not FAULTY[0] <= (major, minor) < FAULTY[1]:
        _log.warning("Hypercorn %s is not a version whose faults are known here: it is served without guards", found)
        return
    for guard in _guards:
        setattr(guard.owner, guard.attribute, _guarded(guard, getattr(guard.owner, guard.attribute)))


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Let the faults of these names show while the block runs: for tests."""
    _off.update(names)
    try:
        yield
    finally:
        _off.difference_update(names)


def _guarded(guard: _Guard, original: Any) -> _Method:
    async def method(*args: Any) -> Any:
        config = next((arg for arg in args if isinstance(arg, Config)), getattr(args[0], "config", None))
        if guard.names <= _off or (config is not None and not isinstance(config, GuardedConfig)):
            return await original(*args)
        return await guard.body(original, *args)

    return method


def _replaces(owner: Any, attribute: str, *names: str) -> Callable[[_Method], _Method]:
    def register(body: _Method) -> _Method:
        _guards.append(_Guard(frozenset(names), owner, attribute, body))
        return body

    return register


# window


@_replaces(StreamBuffer, "pop", "window")
async def _pop(original: _Method, buffer: StreamBuffer, max_length: int) -> bytes:
    """Wake the writer once little is left. Hypercorn does once little was taken, which with no window is nothing."""
    data = bytes(buffer.buffer[:max_length])
    del buffer.buffer[:max_length]
    if len(buffer.buffer) < BUFFER_LOW_WATER:
        await buffer._paused.set()
    if not buffer.buffer:
        await buffer._is_empty.set()
    return data


@_replaces(H2Protocol, "handle", "window")
async def _handle(original: _Method, protocol: H2Protocol, event: Any) -> None:
    await original(protocol, event)
    if isinstance(event, Closed):
        for buffer in list(protocol.stream_buffers.values()):
            await buffer.close()


# streams


@_replaces(H2Protocol, "_handle_events", "streams")
async def _handle_events(original: _Method, protocol: H2Protocol, happened: list[h2.events.Event]) -> None:
    """Keep from Hypercorn what it does not expect; it costs the stream, not the server."""
    connection = protocol.connection
    for event in happened:
        if isinstance(event, h2.events.RequestReceived) and not _is_request(event):
            connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.PROTOCOL_ERROR)
        elif isinstance(event, h2.events.PriorityUpdated):
            pass  # they cost us more than they gain anybody (RFC 9113 section 5.3)
        elif isinstance(event, h2.events.DataReceived) and event.stream_id not in protocol.streams:
            connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if event.stream_id not in protocol.stream_buffers:  # answered to the end (RFC 9113 section 8.1)
                with suppress(h2.exceptions.ProtocolError):
                    connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.NO_ERROR)
        else:
            await original(protocol, [event])
    await protocol._flush()


def _is_request(event: h2.events.RequestReceived) -> bool:
    """Whether it has a method and a path that Hypercorn can read, and asks for nothing but WebSocket by CONNECT."""
    pseudo = {bytes(name): bytes(value) for name, value in event.headers or () if name[:1] == b":"}
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if method == b"CONNECT" and pseudo.get(b":protocol") != b"websocket":
        return False
    return bool(method and path) and method.isascii() and path.isascii()


@_replaces(H2Protocol, "stream_send", "streams")
async def _stream_send(original: _Method, protocol: H2Protocol, event: events.Event) -> None:
    """Tell the client of a response that will have no end."""
    if isinstance(event, events.StreamClosed):
        buffer = protocol.stream_buffers.get(event.stream_id)
        if buffer is not None and not buffer._complete:
            with suppress(h2.exceptions.ProtocolError):
                protocol.connection.reset_stream(event.stream_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
            await protocol._flush()
            await protocol._window_updated(event.stream_id)  # so that its buffer is looked at, and forgotten
    await original(protocol, event)


# messages


class _Message(WebsocketBuffer):
    """A message as far as it arrived, which stops growing once it is too large. Counts bytes, not characters."""

    refusals = 0

    def extend(self, event: Any) -> None:
        data = event.data
        size = len(data) if not isinstance(data, str) or data.isascii() else len(data.encode())
        if self.length + size > self.max_length:
            self.value, self.length = None, self.max_length  # nothing more fits
            self.refusals += 1
            raise FrameTooLargeError
        super().extend(event)
        self.length += size - len(data)


class _Telling(wsproto.connection.Connection):
    """Reports what cannot be read as a Close of the peer's that wants an answer: then Hypercorn says what was wrong."""

    def events(self) -> Iterator[wsproto.events.Event]:  # type: ignore[override]  # theirs is no wider in fact
        for event in super().events():
            broken = isinstance(event, wsproto.events.CloseConnection) and self.state is _OPEN
            if broken:
                self._state = wsproto.connection.ConnectionState.REMOTE_CLOSING
            yield event


_OPEN: Final = wsproto.connection.ConnectionState.OPEN


@_replaces(WSStream, "_accept", "messages")
async def _accept(original: _Method, stream: WSStream, message: Any) -> None:
    await original(stream, message)
    stream.connection.__class__ = _Telling


@_replaces(WSStream, "handle", "messages")
async def _handle_websocket(original: _Method, stream: WSStream, event: events.Event) -> None:
    if isinstance(event, events.Request):
        stream.buffer = _Message(stream.config.websocket_max_message_size)
        plain = [(name, value) for name, value in event.headers if name.lower() != b"sec-websocket-extensions"]
        event = replace(event, headers=plain)
    elif isinstance(event, events.EndBody) or (
        isinstance(event, events.Body | events.Data) and not stream.handshake.accepted
    ):
        # The end of a stream of HTTP/2 is what the end of a connection is in HTTP/1.1.
        await stream.send(events.StreamClosed(stream_id=stream.stream_id))
        return
    message: Any = stream.buffer
    refusals = message.refusals
    await original(stream, event)
    while message.refusals != refusals and not stream.closed:
        refusals = message.refusals
        await stream._handle_events()  # Hypercorn leaves where it is what arrived behind, such as the peer's close


@_replaces(WSStream, "_send_wsproto_event", "messages")
async def _send_message(original: _Method, stream: WSStream, event: wsproto.events.Event) -> None:
    """Send a large message in fragments: no more than one of them is copied at a time."""
    if not isinstance(event, wsproto.events.TextMessage) or len(event.data) <= _PIECE:
        await original(stream, event)
        return
    text = event.data
    for start in range(0, len(text), _PIECE):
        end = start + _PIECE
        await original(stream, wsproto.events.TextMessage(text[start:end], message_finished=end >= len(text)))


# idle, stall, alive


@_replaces(TCPServer, "_read_data", "idle")
async def _read_data(original: _Method, server: TCPServer) -> None:
    await original(server)
    timer: Any = server.idle_task
    server.idle_task = _NoTimer()  # an answer that is on its way would start it again
    await timer.stop()


@_replaces(H2Protocol, "initiate", "idle")
async def _initiate(original: _Method, protocol: H2Protocol, *upgraded: Any) -> None:
    await original(protocol, *upgraded)
    await protocol.send(Updated(idle=protocol.idle))  # it counted as busy since its first bytes


class _NoTimer(TrioSingleTask):
    async def restart(self, task_group: Any, action: Any) -> None:
        """Do nothing."""


@attrs.define(eq=False)
class _GuardedStream:
    """A connection whose writes come to an end.

    It offers what Hypercorn asks of a stream: also whether it is TLS, which Hypercorn learns from missing attributes.
    """

    _stream: Any
    _stall_timeout: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send_all(self, data: bytes) -> None:
        """Write, and give the client up that takes nothing for too long.

        Raises:
            trio.BrokenResourceError: it is gone, or was cut off.
        """
        view = memoryview(data)
        try:
            for start in range(0, len(view), _PIECE):
                with trio.fail_after(self._stall_timeout):
                    await self._stream.send_all(view[start : start + _PIECE])
        except trio.TooSlowError:
            _log.debug("a client was cut off: it has read nothing for %g s", self._stall_timeout)
            self.cut()
            raise trio.BrokenResourceError("the client does not read") from None
        except trio.BusyResourceError as error:
            raise trio.BrokenResourceError("the connection is being closed") from error

    def cut(self) -> None:
        """Close the socket under whoever uses it."""
        sock = getattr(self._stream, "transport_stream", self._stream).socket
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        sock.close()


@_replaces(hypercorn.trio.run, "TCPServer", "stall", "alive")
async def _serve_connection(
    original: _Method, app: Any, config: GuardedConfig, context: Any, state: Any, stream: Any
) -> None:
    """Serve a connection, and let no failure on it out."""
    if len(config.connections) >= config.limits.max_connections:
        _log.debug("refused a connection: there are %d", len(config.connections))
        await trio.aclose_forcefully(stream)
        return
    guarded = _GuardedStream(stream, config.limits.stall_timeout)
    config.connections.add(guarded)
    try:
        await original(app, config, context, state, stream if "stall" in _off else guarded)
    except BaseException as error:
        if "alive" in _off:
            raise
        _report(error)
    finally:
        config.connections.discard(guarded)


def _report(error: BaseException) -> None:
    """Log failures of a connection, and raise again what is none of its own: cancellation, interrupts."""
    group = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("on a connection", [error])
    failures, rest = group.split(Exception)
    if failures is not None:
        _, strange = failures.split(_ORDINARY)
        if strange is None:
            _log.debug("a connection ended with %r", _first(failures))
        else:
            _log.error("Hypercorn failed on a connection", exc_info=strange)
    if rest is not None:
        raise error if failures is None else rest


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
