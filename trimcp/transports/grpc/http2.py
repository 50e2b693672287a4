"""A client's HTTP/2 connection, over which many gRPC calls run at once. (RFC 9113; "gRPC over HTTP2")

The engine is the server's. A call is written by the task that makes it, at once if the socket takes it; one task reads
for all calls, one pings a silent server. What a call has not taken yet is not granted again to its sender; the
connection's own window is always granted, so that no call can hold up another.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from trimcp.framing.grpc import GrpcStatus, encode_timeout, message_frame
from trimcp.support.deadlines import Deadlines
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.grpc.calls import WINDOW, CallFailed, Carrier, Http2Call
from trimcp.transports.http.h1.wires import Wire, wire_over
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.h2.engine import Engine
from trimcp.transports.http.h2.frames import Code, Http2Error, Setting, name_of
from trimcp.transports.http.h2.heads import BlockReader, ResponseFields, read_response, write_block, write_field
from trimcp.transports.http.settings import HttpLimits
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive

_MAX_HEAD: Final = 64 * 1024
_FRAMES: Final = 64  # looked at in one turn
_UNREAD: Final = 1024 * 1024  # bytes of answers to frames, such as pings, that a server may leave unread
_CLOSING: Final = 1.0  # seconds for the last frames and the server's end of the connection
_LONGEST: Final = 200
_BLOCKS: Final = 64  # heads that are kept as bytes
_LIMITS: Final = HttpLimits()


@attrs.define(eq=False)
class Http2Client(Carrier):
    """A connection to one server. `run` has to run while it is used."""

    _stream: trio.abc.Stream  # the connection, which this takes over; closed when `run` ends
    authority: str  # the server's name, for the header `:authority`
    secure: bool = False  # whether it is under TLS
    keep_alive: KeepAlive = KEEP_ALIVE  # pings and time limits for a silent server
    over: trio.Event = attrs.field(init=False, factory=trio.Event)  # set when it has ended
    _wire: Wire = attrs.field(init=False)
    _blocks: dict[Any, bytes] = attrs.field(init=False, factory=dict)  # heads, as they are sent
    _written: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _served: int | None = attrs.field(init=False, default=None)  # the last call that the server serves, if it said so
    _owed: int = attrs.field(init=False, default=0)  # bytes of answers to frames since nothing waited to be written
    _heard: float = attrs.field(init=False, factory=trio.current_time)
    _closing: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.engine: Engine = Engine(
            self,
            BlockReader[ResponseFields](_MAX_HEAD, read_response),
            client=True,
            settings={
                Setting.ENABLE_PUSH: 0,
                Setting.INITIAL_WINDOW_SIZE: WINDOW,
                Setting.MAX_HEADER_LIST_SIZE: _MAX_HEAD,
            },
        )

    @property
    def usable(self) -> bool:
        """Whether a new call can begin on it."""
        return self.lost is None and not self._closing and self._served is None

    # Calls

    @asynccontextmanager
    async def call(
        self, path: str, metadata: Iterable[tuple[str, str]] = (), *, timeout: float | None = None
    ) -> AsyncIterator[Http2Call]:
        """Begin a call of "/package.Service/Method", and cancel it when the block is left before its end.

        `timeout`: seconds after which the server should give up, sent to it; nothing here ends the call then. Raises
        CallFailed: there is no connection.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._wait_for_room()
        call = Http2Call(self)
        self.engine.open(call, self._head(path, tuple(metadata), timeout), end=False)
        self.flush()
        try:
            yield call
        finally:
            call.cancel()

    async def unary(
        self,
        path: str,
        request: bytes,
        metadata: Iterable[tuple[str, str]] = (),
        *,
        timeout: float | None = None,
        max_message: int = 64 * 1024 * 1024,
    ) -> bytes:
        """Call a method that takes one message and returns one. Cancelling this cancels the call.

        Raises CallFailed: the call has failed; its status says how.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        engine = self.engine
        if len(engine.streams) >= engine.peer_streams or not self.usable:
            await self._wait_for_room()
        call, data = Http2Call(self, max_message), message_frame(request)
        engine.open(call, self._head(path, tuple(metadata), timeout), end=False)
        try:
            sent = engine.send_data(call, data, end=True)
            self.flush()
            if sent < len(data):
                await call.send_rest(data[sent:], end=True)
            return await call.answer()
        finally:
            if not call.ended:
                call.cancel()

    async def _wait_for_room(self) -> None:
        """Wait until one more call may be under way."""
        engine = self.engine
        while self.usable and len(engine.streams) >= engine.peer_streams:
            await self._room.park()
        if not self.usable:
            raise CallFailed(GrpcStatus.UNAVAILABLE, self.lost or "the server takes no more calls", begun=False)

    def _head(self, path: str, metadata: tuple[tuple[str, str], ...], timeout: float | None) -> bytes:
        """Return the head of a call, as it is sent."""
        block = self._blocks.get((path, metadata))
        if block is None:
            if len(self._blocks) >= _BLOCKS:
                self._blocks.clear()
            try:
                block = self._blocks[path, metadata] = write_block(
                    (
                        (":method", "POST"),
                        (":scheme", "https" if self.secure else "http"),
                        (":authority", self.authority),
                        (":path", path),
                        ("te", "trailers"),
                        ("content-type", "application/grpc"),
                        ("user-agent", "trimcp"),
                        *metadata,
                    )
                )
            except ValueError as error:
                raise CallFailed(GrpcStatus.UNAVAILABLE, str(error), begun=False) from error
        if timeout is not None and timeout < math.inf:
            block += write_field("grpc-timeout", encode_timeout(timeout))
        return block

    # Called by the writer

    def drained(self) -> None:
        """Note that everything was written."""
        self._written.unpark_all()

    def wake(self) -> None:
        """Note that nothing can be written any more."""
        if self.writer.broken:
            self._lose("the server has stopped listening")

    # Tasks

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Read and write until the connection has ended. Raises nothing. It has to be started before it is used."""
        self._wire = wire_over(self._stream)
        try:
            async with trio.open_nursery() as nursery:
                deadlines = Deadlines()
                self.writer: H1Writer = H1Writer(self, self._wire, nursery, deadlines, _LIMITS)
                self.writer.stall_timeout = math.inf  # a server that is silent for long is given up, see `_watch`
                nursery.start_soon(deadlines.run)
                nursery.start_soon(self._watch)
                self.flush()
                task_status.started()
                try:
                    await self._read_on()
                finally:
                    self._lose("the connection was closed")  # first, so that nobody writes without the nursery
                nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            self.writer.close()
            self.engine.forget()
            await self._wire.close()

    async def _read_on(self) -> None:
        engine = self.engine
        try:
            while self.lost is None:
                data = await self._wire.read(READ_SIZE)
                if not data:
                    why = "the connection broke" if self._wire.error else "the server has closed the connection"
                    return self._lose(why)
                self._heard = trio.current_time()
                self._ended = 0
                if self._closing:
                    continue  # only its end counts
                engine.feed(data, self._heard)
                while self._advance():
                    await trio.lowlevel.checkpoint()
        except Http2Error as error:
            engine.go_away(error.code)
            self.flush()
            self._lose(f"the server broke the protocol HTTP/2 ({error})"[:_LONGEST])

    def _advance(self) -> bool:
        """Look at a slice of what was received; return whether there is more."""
        self._corked = True
        try:
            return self.engine.advance(_FRAMES)
        finally:
            self._corked = False
            self._owed = len(self.engine.out) + (self._owed if self.writer.waiting else 0)
            self.flush()
            if self._owed > _UNREAD:
                raise Http2Error(Code.ENHANCE_YOUR_CALM, "it does not read the answers to its frames")

    async def _watch(self) -> None:
        """Ping a silent server, and give up one that does not answer."""
        interval, dead_after = self.keep_alive.interval, self.keep_alive.dead_after
        pinged = trio.current_time()
        while True:
            now = trio.current_time()
            if now >= self._heard + dead_after:
                self._lose(f"nothing was heard of the server for {dead_after:g} seconds")
                await self._wire.close(reset=True)
                return
            due = max(pinged, self._heard) + interval
            if now >= due:
                self.engine.ping()
                self.flush()
                pinged, due = now, now + interval
            await trio.sleep_until(min(due, self._heard + dead_after))

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost: str | None = why
            self.over.set()
            self._fail(CallFailed(GrpcStatus.UNAVAILABLE, why))
            self._written.unpark_all()

    def _fail(self, failure: CallFailed, after: int = 0) -> None:
        """Let the calls fail that were begun after one."""
        streams = self.engine.streams
        for id, call in list(streams.items()):
            if id > after and isinstance(call, Http2Call):
                del streams[id]
                call.fail(failure)
        self._room.unpark_all()

    async def aclose(self) -> None:
        """Say goodbye and close the connection, within a second. If cancelled, close it at once."""
        if self._closing:
            await trio.lowlevel.checkpoint()
            return
        self._closing = True
        try:
            if self.lost is None:
                self.engine.go_away()
                self.flush()
                with trio.move_on_after(_CLOSING):
                    while self.writer.waiting and self.lost is None:
                        await self._written.park()
                    if isinstance(self._stream, trio.abc.HalfCloseableStream):
                        # What the server has not read yet would be lost if this side closed with bytes unread.
                        await self._wire.shut_write()
                        await self.over.wait()
            self._lose("the connection was closed")
        finally:
            await self._wire.close()

    # Called by the engine

    def windows_opened(self) -> None:
        """Let the calls go on that wait for windows."""
        for call in list(self.engine.streams.values()):
            call.window_opened()

    def settings_came(self) -> None:
        """Let calls begin: there may be room for more."""
        self._room.unpark_all()

    def went_away(self, last: int, code: int) -> None:
        """Begin no more calls; those under way go on, unless the server says that something is wrong."""
        self._served = last
        if code == Code.NO_ERROR:
            self._fail(CallFailed(GrpcStatus.UNAVAILABLE, "the server takes no more calls", begun=False), last)
            return
        self._lose(f"the server ended the connection ({name_of(code)})")


@asynccontextmanager
async def running_http2(client: Http2Client) -> AsyncIterator[Http2Client]:
    """Run a connection's tasks while the body runs, then close it. The body's exception is raised without a group."""
    async with open_service_nursery() as nursery:
        await nursery.start(client.run)
        try:
            yield client
        finally:
            await client.aclose()
