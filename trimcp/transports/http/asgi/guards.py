"""Guards against faults of Hypercorn's Trio worker: without them one client can end the server, or fill its memory.

Each has a name. docs/design/hypercorn.md describes the faults with figures; for each a test shows the fault without its
guard. `guard_protocols.install` installs them. They affect only servers that have a `GuardedConfig`, not others in the
process. They replace private parts of Hypercorn, so `SERVED` bounds its version.

    messages                    WebSocket, in `guard_protocols`
    lines                       input that h11 accepts and a proxy's parser may read differently; h2c
    stuck                       connections and applications that wait for each other
    pause                       a client that leaves while its request is answered
    idle                        connections without requests
    stall                       writes that never end
    alive                       exceptions of one connection that end the server
    turns                       many that send large bodies and messages at once
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias

import attrs
import h11
import hypercorn.trio.run
import trio
import wsproto.utilities
from h11._receivebuffer import ReceiveBuffer
from hypercorn.config import Config
from hypercorn.events import Closed
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.task_group import _handle as handle_app
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper, TrioSingleTask

from trimcp.budget import NOWHERE_KNOWN, MemoryAccount, TurnBound, owner_of, reads_per_turn
from trimcp.channel import PeerProgress
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import unwrap_single
from trimcp.support.shares import BoundedShares
from trimcp.transports.descriptors import PIECE, over_or_peer_closed, wait_peer_closed
from trimcp.transports.http.asgi.request import CUT, MESSAGES, PEER_CLOSED
from trimcp.transports.http.h1.sockets import peer_name
from trimcp.transports.http.h1.wires import RESET
from trimcp.transports.http.settings import HttpLimits

_log = logging.getLogger("trimcp.http")

_MUCH: Final = 16 * 1024  # bytes of one read that is looked at in turn: a whole record of TLS

_ORDINARY: Final = (
    OSError,
    trio.BrokenResourceError,
    trio.BusyResourceError,
    trio.ClosedResourceError,
    h11.ProtocolError,
    wsproto.utilities.ProtocolError,
)
"""Exceptions that Hypercorn raises when a client misbehaves or leaves at an unexpected time."""


class GuardedConfig(Config):
    """The configuration of a guarded server, and the state of the guards."""

    def __init__(self, limits: HttpLimits, ssl_context: ssl.SSLContext | None = None) -> None:
        self.limits = limits  # of connections
        self.ssl_context = ssl_context  # for TLS, instead of one made from files
        self.connections: set[_GuardedStream] = set()  # those that are open,
        # and whose they are
        self.shares: BoundedShares[_GuardedStream] = BoundedShares(2, what="connection", most=limits.max_connections)
        self.reads: TurnBound = reads_per_turn()  # at which those that send something large wait for their turn

    @property
    def ssl_enabled(self) -> bool:
        return self.ssl_context is not None or super().ssl_enabled

    def create_ssl_context(self) -> ssl.SSLContext | None:
        if self.ssl_context is None:
            return super().create_ssl_context()
        self.ssl_context.set_alpn_protocols(self.alpn_protocols)
        return self.ssl_context

    def cut(self) -> None:
        """Close every connection, even during a write."""
        if "stall" not in _off:
            for connection in list(self.connections):
                connection.cut()


Method: TypeAlias = Callable[..., Awaitable[Any]]
"""An async method of Hypercorn, or its replacement."""

_off: set[str] = set()


@attrs.frozen
class _Guard:
    """One attribute to replace: `body` gets the original, and then the arguments."""

    names: frozenset[str]
    owner: Any
    attribute: str
    body: Method

    def install(self) -> None:
        """Replace it, for servers that have a `GuardedConfig`."""
        original = getattr(self.owner, self.attribute)

        async def method(*args: Any) -> Any:
            config = next((arg for arg in args if isinstance(arg, Config)), getattr(args[0], "config", None))
            if self.names <= _off or (config is not None and not isinstance(config, GuardedConfig)):
                return await original(*args)
            return await self.body(original, *args)

        setattr(self.owner, self.attribute, method)


GUARDS: list[_Guard] = []
"""All replacements, once both modules are imported."""


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Disable the guards with these names while the block runs: for tests."""
    _off.update(names)
    try:
        yield
    finally:
        _off.difference_update(names)


def replaces(owner: Any, attribute: str, *names: str) -> Callable[[Method], Method]:
    """Register a replacement of an attribute: it gets the original, and then the arguments."""

    def register(body: Method) -> Method:
        GUARDS.append(_Guard(frozenset(names), owner, attribute, body))
        return body

    return register


# lines


class _StrictLines(ReceiveBuffer):
    """The received bytes, for a parser that must accept only lines as RFC 9112 requires (sections 2.2, 5.2)."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        held = len(self)
        lines = super().maybe_extract_lines()
        if lines is not None:
            if lines and lines[0].endswith(b"HTTP/2.0"):
                raise h11.RemoteProtocolError("HTTP/2 is not served here", error_status_hint=505)
            if held - len(self) != sum(len(line) + 2 for line in lines) + 2:
                raise h11.RemoteProtocolError("a line ends without CR LF")
            if any(line.startswith((b" ", b"\t")) for line in lines):
                raise h11.RemoteProtocolError("a line is folded")
            lengths = [line for line in lines if line[:15].lower() == b"content-length:"]
            if len(lengths) > 1 or (lengths and b"," in lengths[0]):
                raise h11.RemoteProtocolError("there are two lengths")
            chunked = any(line[:18].lower() == b"transfer-encoding:" for line in lines)
            if chunked and lines[0].endswith(b"HTTP/1.0"):
                raise h11.RemoteProtocolError("there are no chunks in HTTP/1.0")
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()
        if line is not None and line.endswith((b" \r\n", b"\t\r\n")):
            raise h11.RemoteProtocolError("white space behind the size of a chunk")
        return line


@replaces(H11Protocol, "initiate", "lines")
async def _initiate_http1(original: Method, protocol: H11Protocol) -> None:
    protocol.connection._receive_buffer.__class__ = _StrictLines  # type: ignore[union-attr]  # no WebSocket yet
    await original(protocol)


@replaces(H11Protocol, "_check_protocol", "lines")
async def _check_protocol(original: Method, protocol: H11Protocol, request: h11.Request) -> None:
    """Ignore upgrades to HTTP/2, like upgrades to unknown protocols."""


# stuck

_STREAM: Final = "_trimcp_stream"  # the stream of a task group's connection


class _ClosedParser:
    """Replaces the parser of a closed connection: it returns no events and drops what is sent."""

    our_state = their_state = None
    they_are_waiting_for_100_continue = False
    trailing_data = (b"", False)

    def receive_data(self, data: bytes) -> None: ...

    def next_event(self) -> type[h11.NEED_DATA]:
        return h11.NEED_DATA

    def send(self, event: object) -> bytes:
        return b""


@replaces(H11Protocol, "handle", "stuck")
async def _handle_http1(original: Method, protocol: H11Protocol, event: Any) -> None:
    await original(protocol, event)
    if isinstance(event, Closed):
        protocol.connection = _ClosedParser()  # type: ignore[assignment]
        await protocol.can_read.set()


@replaces(TCPServer, "_read_data", "stuck")
async def _know_socket(original: Method, server: TCPServer) -> None:
    setattr(server._task_group, _STREAM, server.stream)
    await original(server)


def _bound_messages(stream: Any, most: int, holding: MemoryAccount | None) -> None:
    stream.buffer.max_length = most
    amount = getattr(stream.buffer, "amount", None)  # absent without the guard `messages`
    if amount is not None:
        amount.holding = holding


@replaces(TaskGroup, "spawn_app", "stuck")
async def _spawn_app(
    original: Method, group: TaskGroup, app: Any, config: Config, scope: Any, send: Callable[..., Awaitable[None]]
) -> Callable[[Any], Awaitable[None]]:
    """Like Hypercorn's, but do not wait for an application that has ended, nor to report that the client is gone.

    An application can also ask whether the client is gone before it has received all earlier events.
    """
    arriving, arrived = trio.open_memory_channel[Any](config.max_app_queue_size)
    gone = trio.Event()
    if scope["type"] == "websocket":
        connection = getattr(group, _STREAM, None)
        stream = getattr(send, "__self__", None)
        if isinstance(stream, WSStream):
            scope["extensions"][MESSAGES] = partial(_bound_messages, stream)
        sock = None if connection is None else _socket_of(connection)
        scope["extensions"][PEER_CLOSED] = lambda: over_or_peer_closed(gone, sock)
        if isinstance(connection, _GuardedStream):
            scope["extensions"][CUT] = connection.cut

    async def run() -> None:
        with arrived:
            threads = (trio.to_thread.run_sync, trio.from_thread.run)
            await handle_app(app, config, scope, arrived.receive, send, *threads)

    async def put(event: Any) -> None:
        with suppress(trio.BrokenResourceError):
            await arriving.send(event)

    async def take(event: Any) -> None:
        left = event["type"].endswith(".disconnect")
        if left:
            gone.set()
        try:
            arriving.send_nowait(event)
            await trio.lowlevel.cancel_shielded_checkpoint()
        except trio.BrokenResourceError:
            pass
        except trio.WouldBlock:
            if left:
                group.spawn(put, event)
            else:
                await put(event)

    group.spawn(run)
    return take


# pause


class _Pause(EventWrapper):
    """Set when the next request may be parsed. While waiting, it reads on, so that a client that leaves is noticed.

    It reads at most `max_pipelined` bytes. Like our own listener, it takes the end of input before the answer as the
    client's leaving.
    """

    def __init__(self, server: TCPServer, protocol: H11Protocol, most: int) -> None:
        super().__init__()
        self._server = server
        self._protocol = protocol
        self._most = most
        self._reading: trio.CancelScope | None = None

    async def wait(self) -> None:
        gone = False
        while not self.is_set():
            if gone:
                await super().wait()
            elif data := await self._read():
                self._protocol.connection.receive_data(data)
            elif data is not None:
                gone = True
                await self._server.protocol.handle(Closed())

    async def set(self) -> None:
        await super().set()
        if self._reading is not None:
            self._reading.cancel(reason="the next request may be looked at")

    async def _read(self) -> bytes | None:
        """Return what has arrived, b"" once the client is gone, None once this is set."""
        stream: Any = self._server.stream
        with trio.CancelScope() as self._reading:
            try:
                if len(self._protocol.connection.trailing_data[0]) < self._most:
                    return bytes(await stream.receive_some(PIECE))
                await wait_peer_closed(_socket_of(stream))
                return b""
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return b""
            finally:
                self._reading = None
        return None


@replaces(TCPServer, "_read_data", "pause")
async def _read_on(original: Method, server: TCPServer) -> None:
    protocol, config = server.protocol.protocol, server.config
    if isinstance(protocol, H11Protocol) and isinstance(config, GuardedConfig):
        pause: Any = _Pause(server, protocol, config.limits.max_pipelined)  # Hypercorn makes its own without arguments
        protocol.can_read = pause
    await original(server)


# idle, stall, alive, turns


@replaces(TCPServer, "_read_data", "idle")
async def _read_data(original: Method, server: TCPServer) -> None:
    await original(server)
    timer: Any = server.idle_task
    server.idle_task = _NoTimer()  # a response in progress would start it again
    await timer.stop()


class _NoTimer(TrioSingleTask):
    async def restart(self, task_group: Any, action: Any) -> None: ...


@attrs.define(eq=False)
class _GuardedStream:
    """A connection whose writes are bounded in time, and whose reads in number where much arrives.

    It offers what Hypercorn needs of a stream. Hypercorn detects TLS by missing attributes, which this supports.
    """

    _stream: Any
    _progress: PeerProgress = attrs.field(converter=PeerProgress)  # from its seconds
    _reads: TurnBound = attrs.field(factory=reads_per_turn)
    owner: str = NOWHERE_KNOWN  # whose share of all connections it counts into
    server: Any = None  # Hypercorn's object for the connection
    _kept: bytes | bytearray = attrs.field(init=False, default=b"")  # was read, and waits for its turn

    @property
    def idle(self) -> bool:
        """Whether no request is in progress: Hypercorn has set the timer after which it closes an idle connection."""
        timer = getattr(self.server, "idle_task", None)
        return getattr(timer, "_handle", None) is not None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Read, in turn with others where much has arrived. Cancelling this loses nothing."""
        data = self._kept or await self._stream.receive_some(max_bytes)
        if len(data) >= _MUCH and "turns" not in _off:
            self._kept = data
            await self._reads.wait(1)
            self._kept = b""
        return data

    async def send_all(self, data: bytes) -> None:
        """Write, and drop a client that does not read for too long.

        Raises trio.BrokenResourceError: the client is gone, or was dropped.
        """
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE):
                with self._progress.step() as scope:
                    await self._stream.send_all(view[start : start + PIECE])
                if scope.cancelled_caught:
                    _log.debug("a client was cut off: it has read nothing for %g s", self._progress.patience)
                    self.cut()
                    raise trio.BrokenResourceError("the client does not read")
        except trio.BusyResourceError as error:
            raise trio.BrokenResourceError("the connection is being closed") from error

    def evict(self, why: str) -> None:
        self.cut()

    def cut(self) -> None:
        sock = _socket_of(self._stream)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        sock.close()


@replaces(hypercorn.trio.run, "TCPServer", "stall", "alive", "turns")
async def _serve_connection(
    original: Method, app: Any, config: GuardedConfig, context: Any, state: Any, stream: Any
) -> None:
    """Serve a connection; none of its failures is raised."""
    owner = _owner_of(stream)
    if not config.shares.has_room(owner):
        _log.debug("refused a connection: there are %d", len(config.connections))
        await trio.aclose_forcefully(stream)
        return
    guarded = _GuardedStream(stream, config.limits.stall_timeout, config.reads, owner)
    config.connections.add(guarded)
    config.shares.add(guarded, used=True)
    try:
        guarded.server = original(app, config, context, state, stream if "stall" in _off else guarded)
        await guarded.server
    except BaseException as error:  # whatever a connection raises, the others go on; `_report` raises what ends all
        if "alive" in _off:
            raise
        _report(error)
    finally:
        guarded.server = None
        config.connections.discard(guarded)
        config.shares.remove(guarded)


def _owner_of(stream: Any) -> str:
    try:
        return owner_of(None, peer_name(_socket_of(stream).getpeername())[0])
    except OSError:
        return owner_of(None, None)  # it has left already


def _socket_of(stream: Any) -> Any:
    return getattr(stream, "transport_stream", stream).socket


def _report(error: BaseException) -> None:
    """Log a connection's failures; raise others again: cancellation, interrupts."""
    group = error if isinstance(error, BaseExceptionGroup) else BaseExceptionGroup("on a connection", [error])
    failures, rest = group.split(Exception)
    if failures is not None:
        _, strange = failures.split(_ORDINARY)
        if strange is None:
            _log.debug("a connection ended with %r", unwrap_single(failures))
        else:
            log_crash(_log, strange, "Hypercorn failed on a connection")
    if rest is not None:
        raise error if failures is None else rest
