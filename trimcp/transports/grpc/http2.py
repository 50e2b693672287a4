"""A client's HTTP/2 connection, over which many gRPC calls run at once. (RFC 9113; "gRPC over HTTP2")

The library h2 knows the frames. Here are the tasks: one reads, one writes everything that h2 has to send, so that a
cancelled call never leaves half a frame behind, and one pings a silent server. What a call has not taken yet is not
granted again to its sender; the connection's own window is always granted, so that no call can hold up another.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import attrs
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import trio

from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, encode_timeout, message_frame
from trimcp.nurseries import open_service_nursery
from trimcp.transports.descriptors import PIECE, READ_SIZE, progress_of
from trimcp.transports.grpc.calls import WINDOW, CallFailed, Http2Call
from trimcp.transports.quiet import quiet_headers
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive

_CONNECTION_WINDOW: Final = 1024 * 1024
_DEFAULT_WINDOW: Final = 65_535
_TURN: Final = 8 * 1024  # bytes of frames looked at in one turn: a frame of nothing costs as much as another one
_CLOSING: Final = 1.0  # seconds for the last frames and the server's end of the connection
_FRAMES: Final = 4  # that are handed to the writer at once
_LONGEST: Final = 200

_Code = h2.errors.ErrorCodes
_BY_RESET: Final = {
    _Code.CANCEL: GrpcStatus.CANCELLED,
    _Code.REFUSED_STREAM: GrpcStatus.UNAVAILABLE,
    _Code.ENHANCE_YOUR_CALM: GrpcStatus.RESOURCE_EXHAUSTED,
    _Code.INADEQUATE_SECURITY: GrpcStatus.PERMISSION_DENIED,
}


class _Frames(h2.connection.H2Connection):
    """h2's connection, on which calls go on after the server has said that it takes no new ones."""

    last_call: int | None = None  # the last stream that the server will serve, once it has said so

    def _receive_goaway_frame(self, frame: Any) -> Any:
        if frame.error_code != _Code.NO_ERROR:
            return super()._receive_goaway_frame(frame)
        self.last_call = frame.last_stream_id
        return [], []


def _frames() -> _Frames:
    frames = _Frames(h2.config.H2Configuration(client_side=True, header_encoding=None))
    code = h2.settings.SettingCodes
    values = {code.ENABLE_PUSH: 0, code.INITIAL_WINDOW_SIZE: WINDOW, code.MAX_HEADER_LIST_SIZE: 64 * 1024}
    frames.local_settings = h2.settings.Settings(client=True, initial_values=values)
    frames.initiate_connection()
    frames.increment_flow_control_window(_CONNECTION_WINDOW - _DEFAULT_WINDOW)
    return frames


@attrs.define(eq=False)
class Http2Client:
    """A connection to one server. `run` has to run while it is used.

    Args:
        stream: the connection; closed by `aclose` and when `run` ends.
        authority: the server's name, for the header `:authority`.
        secure: whether it is under TLS.
        keep_alive: pings and time limits for a silent server.

    Attributes:
        lost: why it has ended, or None.
        over: set when it has.
    """

    _stream: trio.abc.HalfCloseableStream | trio.abc.Stream
    authority: str
    secure: bool = False
    keep_alive: KeepAlive = KEEP_ALIVE
    lost: str | None = attrs.field(init=False, default=None)
    over: trio.Event = attrs.field(init=False, factory=trio.Event)
    _frames: _Frames = attrs.field(init=False, factory=_frames)
    _calls: dict[int, Http2Call] = attrs.field(init=False, factory=dict)
    _news: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)  # the writer waits here
    _written: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _room: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)  # windows and slots
    _begun: int = attrs.field(init=False, default=0)  # writes begun
    _done: int = attrs.field(init=False, default=0)  # writes finished
    _pieces: int = attrs.field(init=False, default=0)
    _granted: int = attrs.field(init=False, default=0)  # bytes that the connection's window has to be opened by
    _heard: float = attrs.field(init=False, factory=trio.current_time)
    _closing: bool = attrs.field(init=False, default=False)

    @property
    def usable(self) -> bool:
        """Whether a new call can begin on it."""
        return self.lost is None and not self._closing and self._frames.last_call is None

    # Calls

    @asynccontextmanager
    async def call(
        self, path: str, metadata: Iterable[tuple[str, str]] = (), *, timeout: float | None = None
    ) -> AsyncIterator[Http2Call]:
        """Begin a call, and cancel it when the block is left before its end.

        Args:
            path: "/package.Service/Method".
            metadata: headers to send.
            timeout: seconds after which the server should give up, sent to it; nothing here ends the call then.

        Raises:
            CallFailed: there is no connection.
        """
        call = await self._open(path, metadata, timeout)
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

        Raises:
            CallFailed: the call has failed; its status says how.
        """
        async with self.call(path, metadata, timeout=timeout) as call:
            await call.send(message_frame(request), end=True)
            decoder = GrpcDecoder(max_message)
            answer = await call.next_message(decoder)
            if answer is None or await call.next_message(decoder) is not None:
                raise CallFailed(GrpcStatus.INTERNAL, "the server sent no answer, or several")
            return answer

    async def _open(self, path: str, metadata: Iterable[tuple[str, str]], timeout: float | None) -> Http2Call:
        await trio.lowlevel.checkpoint_if_cancelled()
        frames = self._frames
        while self.usable and frames.open_outbound_streams >= frames.remote_settings.max_concurrent_streams:
            await self._room.park()
        if not self.usable:
            raise CallFailed(GrpcStatus.UNAVAILABLE, self.lost or "the server takes no more calls", begun=False)
        headers = [
            (":method", "POST"),
            (":scheme", "https" if self.secure else "http"),
            (":authority", self.authority),
            (":path", path),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "trimcp"),
        ]
        if timeout is not None and timeout < math.inf:
            headers.append(("grpc-timeout", encode_timeout(timeout)))
        try:
            id = frames.get_next_available_stream_id()
            with quiet_headers():
                frames.send_headers(id, [*headers, *metadata])
        except h2.exceptions.ProtocolError as error:
            raise CallFailed(GrpcStatus.UNAVAILABLE, str(error), begun=False) from error
        call = self._calls[id] = Http2Call(self, id)
        self._news.unpark()
        return call

    # Tasks

    async def run(self) -> None:
        """Read and write until the connection has ended. Raises nothing."""
        try:
            with quiet_headers():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_on)
                    nursery.start_soon(self._watch)
                    await self._read_on()
                    nursery.cancel_scope.cancel(reason="the connection has ended")
        finally:
            self._lose("the connection was closed")
            await trio.aclose_forcefully(self._stream)

    async def _read_on(self) -> None:
        frames = self._frames
        try:
            while chunk := await self._stream.receive_some(READ_SIZE):
                self._heard = trio.current_time()
                if self._closing:
                    continue  # only its end counts
                for start in range(0, len(chunk), _TURN):
                    if start:
                        await trio.lowlevel.checkpoint()
                    for event in frames.receive_data(bytes(chunk[start : start + _TURN])):
                        self._take(event)
                    if frames.last_call is not None:
                        self._end_unserved(frames.last_call)
                self._news.unpark()
        except h2.exceptions.ProtocolError as error:
            with trio.move_on_after(_CLOSING):
                await self._flushed()  # h2 says why
            self._lose(f"the server broke the protocol HTTP/2 ({error})"[:_LONGEST])
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose("the connection broke")
        else:
            self._lose("the server has closed the connection")

    async def _write_on(self) -> None:
        try:
            while True:
                if data := self._frames.data_to_send():
                    self._begun += 1
                    with memoryview(data) as view:
                        for start in range(0, len(data), PIECE):
                            with view[start : start + PIECE] as piece:
                                await self._stream.send_all(piece)
                            self._pieces += 1
                    self._done = self._begun
                    self._written.unpark_all()
                elif not self._closing:
                    await self._news.park()
                elif isinstance(self._stream, trio.abc.HalfCloseableStream):
                    # What the server has not read yet would be lost if this side closed with bytes unread.
                    return await self._stream.send_eof()
                else:
                    await self._stream.aclose()
                    return self._lose("the connection was closed")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._lose("the server has stopped listening")
        return None

    async def _watch(self) -> None:
        """Ping a silent server, and give up one that does not answer."""
        interval, dead_after = self.keep_alive.interval, self.keep_alive.dead_after
        pinged = trio.current_time()
        while True:
            now = trio.current_time()
            if now >= self._heard + dead_after:
                self._lose(f"nothing was heard of the server for {dead_after:g} seconds")
                await trio.aclose_forcefully(self._stream)
                return
            due = max(pinged, self._heard) + interval
            if now >= due:
                self._frames.ping(b"trimcp\0\0")
                self._news.unpark()
                pinged, due = now, now + interval
            await trio.sleep_until(min(due, self._heard + dead_after))

    async def _flushed(self) -> None:
        """Wait until what was just given to h2 has been passed to the system."""
        due = self._begun + 1
        self._news.unpark()
        while self._done < due and not self.over.is_set():
            await self._written.park()

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self.over.set()
            for call in list(self._calls.values()):
                call.fail(CallFailed(GrpcStatus.UNAVAILABLE, why))
            self._calls.clear()
            self._room.unpark_all()
            self._written.unpark_all()

    async def aclose(self) -> None:
        """Say goodbye and close the connection, within a second. If cancelled, close it at once."""
        if self._closing:
            await trio.lowlevel.checkpoint()
            return
        self._closing = True
        try:
            if self.lost is None:
                self._frames.close_connection()
                self._news.unpark()
                with trio.move_on_after(_CLOSING):
                    await self.over.wait()
            self._lose("the connection was closed")
        finally:
            await trio.aclose_forcefully(self._stream)

    # Events

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.DataReceived):
            self._grant(event.flow_controlled_length)
            call = self._calls.get(event.stream_id or 0)
            if call is not None:
                call.take_data(bytes(event.data), event.flow_controlled_length)
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            if (call := self._calls.get(event.stream_id or 0)) is not None:
                headers = {
                    bytes(name).decode("latin-1"): bytes(value).decode("latin-1") for name, value in event.headers or ()
                }
                call.take_headers(headers, last=isinstance(event, h2.events.TrailersReceived))
        elif isinstance(event, h2.events.StreamEnded):
            if (call := self._calls.get(event.stream_id or 0)) is not None:
                call.take_end()
        elif isinstance(event, h2.events.StreamReset):
            if (call := self._calls.get(event.stream_id or 0)) is not None:
                code: Any = event.error_code
                name = getattr(code, "name", str(code))
                status = _BY_RESET.get(code, GrpcStatus.INTERNAL)
                began = code != _Code.REFUSED_STREAM
                call.fail(CallFailed(status, f"the server reset the call ({name})", begun=began))
            self._room.unpark_all()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self._room.unpark_all()
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._lose(f"the server ended the connection ({getattr(event.error_code, 'name', event.error_code)})")

    def _grant(self, size: int) -> None:
        self._granted += size
        if self._granted >= _CONNECTION_WINDOW // 4:
            self._frames.increment_flow_control_window(self._granted)
            self._granted = 0

    def _end_unserved(self, last: int) -> None:
        for id in [id for id in self._calls if id > last]:
            why = CallFailed(GrpcStatus.UNAVAILABLE, "the server takes no more calls", begun=False)
            self._calls.pop(id).fail(why)
        self._room.unpark_all()

    def grant_call(self, id: int, size: int) -> None:
        """Let the server send so many bytes more on a call."""
        with suppress(h2.exceptions.ProtocolError, KeyError):  # it has ended, and h2 may have forgotten it
            self._frames.increment_flow_control_window(size, id)
            self._news.unpark()

    async def send_data(self, call: Http2Call, data: bytes, end: bool) -> None:
        """Send bytes on a call as its window lets them; returns when the system has them.

        Raises:
            CallFailed: the call has ended.
        """
        frames, id = self._frames, call.id
        with memoryview(data) as view:
            start, last = 0, False
            while start < len(data) or (end and not last):
                call.check()
                try:
                    most = min(frames.local_flow_control_window(id), frames.max_outbound_frame_size)
                    left = len(data) - start
                    if most <= 0 and left:
                        await self._room.park()
                        continue
                    with view[start : start + most] as piece:
                        start += len(piece)
                        last = end and start >= len(data)
                        frames.send_data(id, bytes(piece), end_stream=last)
                except h2.exceptions.ProtocolError as error:
                    call.check()
                    raise CallFailed(GrpcStatus.CANCELLED, f"the call has ended ({error})") from None
                call.pieces += 1
                if start >= len(data) or call.pieces % _FRAMES == 0:
                    await self._flushed()
        call.check_broken()

    def end_call(self, call: Http2Call) -> None:
        """Tell the server that nothing more follows on a call."""
        if self.lost is None:
            with suppress(h2.exceptions.ProtocolError):  # it has ended already
                self._frames.end_stream(call.id)
            self._news.unpark()

    def forget(self, call: Http2Call, *, reset: bool) -> None:
        """Note that a call is over for its caller."""
        if self._calls.pop(call.id, None) is not None and reset and self.lost is None:
            with suppress(h2.exceptions.ProtocolError):
                self._frames.reset_stream(call.id, _Code.CANCEL)
        self._news.unpark()
        self._room.unpark_all()

    def progress(self) -> Hashable:
        """Return a value that changes when the server takes more of what is being written."""
        return self._pieces, progress_of(self._stream)


@asynccontextmanager
async def running_http2(client: Http2Client) -> AsyncIterator[Http2Client]:
    """Run a connection's tasks while the body runs, then close it. The body's exception is raised without a group."""
    async with open_service_nursery() as nursery:
        nursery.start_soon(client.run)
        try:
            yield client
        finally:
            await client.aclose()
