"""One gRPC call of a client: its headers, its bytes in both directions, its status."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final

import attrs
import trio

from trimcp.framing.grpc import PREFIX, GrpcDecoder, GrpcFault, GrpcStatus, decode_text, status_of_http, whole_message
from trimcp.support.cleaning import one_line
from trimcp.transports.descriptors import PIECE
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.h2.engine import Engine
from trimcp.transports.http.h2.frames import Code, name_of
from trimcp.transports.http.h2.heads import ResponseFields
from trimcp.transports.http.h2.interface import EngineUser, Http2Stream

WINDOW: Final = 256 * 1024
"""Bytes of one call that may wait here unread."""

_LONGEST: Final = 200
_UNTOLD: Final = WINDOW // 4  # bytes of an answer that are not granted again before more arrive
_MESSAGES: Final = 16  # that are returned in one turn: a window may hold fifty thousand
_WAITING: Final = 64 * 1024  # bytes that wait for the socket, from which on a sender waits

_BY_RESET: Final = {
    Code.CANCEL: GrpcStatus.CANCELLED,
    Code.REFUSED_STREAM: GrpcStatus.UNAVAILABLE,
    Code.ENHANCE_YOUR_CALM: GrpcStatus.RESOURCE_EXHAUSTED,
    Code.INADEQUATE_SECURITY: GrpcStatus.PERMISSION_DENIED,
}


class CallFailed(trio.BrokenResourceError):
    """A gRPC call has not ended well."""

    def __init__(
        self, status: GrpcStatus, message: str, trailers: Mapping[str, str] | None = None, *, begun: bool = True
    ) -> None:
        super().__init__(f"{status.name}: {message}" if message else status.name)
        self.status: GrpcStatus = status  # its status
        self.message: str = message  # what the server said about it, or what happened to it here. Untrusted text.
        self.trailers: Mapping[str, str] = trailers or {}  # the server's metadata after the answer, by lower-case name
        # whether the server may have begun it: if not, it can be repeated on another connection
        self.begun: bool = begun


@attrs.define(eq=False)
class Carrier(EngineUser):
    """The connection of calls: what they say is written here."""

    engine: Engine = attrs.field(init=False)
    writer: H1Writer = attrs.field(init=False)
    lost: str | None = attrs.field(init=False, default=None)  # why it has ended, or None
    _room: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _corked: bool = attrs.field(init=False, default=False)  # whether what is said is gathered
    _ended: int = attrs.field(init=False, default=0)  # calls that have ended in this turn

    def flush(self) -> None:
        """Write what the engine has to say, unless more is gathered first."""
        out = self.engine.out
        if out and not self._corked and self.lost is None:
            data = bytes(out)
            out.clear()
            if self._ended == 1:  # the only one who goes on in this turn
                self._ended = 0
                self.writer.write(data)
            else:
                self.writer.gather(data)

    def call_ended(self) -> None:
        """Note that there is room for another call."""
        self._ended += 1
        if self._room:
            self._room.unpark_all()


class Http2Call(Http2Stream):
    """One call: a `ByteStream` to a channel. Made by `Http2Client`.

    It has more than 300 lines because what is sent, what arrives and who waits for it decide about the same end.
    """

    __slots__ = (
        *("_arrived", "_closed", "_connection", "_gone", "_http", "_most", "_news", "_pieces", "_size", "_waiter"),
        *("ended", "failure", "headers", "last_headers"),
    )

    window: int = WINDOW
    message_timeout: float = 30.0
    message_rate: float = 64 * 1024
    too_slow: bool = False
    half_closed: bool = False  # a server that has ended the call reads nothing more

    def __init__(self, connection: Carrier, most: int = -1) -> None:
        super().__init__()
        self._connection = connection
        self._most = most  # bytes of the answer that are granted to the server at once; -1 where the caller says it
        self._arrived = bytearray()  # not a list: pieces may be tiny
        self._size = 0  # bytes that have arrived
        self._closed = False
        self._gone: trio.Event | None = None
        self._http = 0  # the HTTP status
        self._news: trio.lowlevel.ParkingLot | None = None  # made when the first task waits
        self._waiter: trio.lowlevel.Task | None = None  # it waits for the end of a call with one answer
        self._pieces = 0  # counts what was sent
        self.headers: dict[str, str] | None = None  # the server's first headers by lower-case name, once they are there
        self.last_headers: dict[str, str] = {}  # its last ones
        self.failure: CallFailed | None = None  # why it has failed, or None
        self.ended: bool = False  # whether the server has said everything

    # The caller

    @property
    def gone(self) -> trio.Event:
        if self._gone is None:
            self._gone = trio.Event()
            if self._over:
                self._gone.set()
        return self._gone

    @property
    def _over(self) -> bool:
        return self.ended or self._closed or self.failure is not None

    async def begun(self) -> None:
        """Wait for the server's first headers.

        Raises CallFailed: it refused the call, or there was none that it understands.
        """
        while not self._over:
            if self.headers is not None and "grpc-status" not in self.headers:
                break
            await self._wait_for_news()
        if self.failure is not None:
            raise self.failure
        if self.ended and self.status is not GrpcStatus.OK:
            raise self._outcome()
        if self._http != 200 or not (self.headers or {}).get("content-type", "").startswith("application/grpc"):
            raise self._outcome()

    async def answer(self) -> bytes:
        """Wait for the end of a call that is answered with one message, and return that.

        Raises CallFailed: the call has failed.
        """
        while not self.ended:
            if self.failure is not None:
                raise self.failure
            if self._closed:
                raise trio.ClosedResourceError("this call was closed")
            self._waiter = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._wait_no_more)
        if self.status is not GrpcStatus.OK:
            raise self._outcome()
        found = whole_message(bytes(self._arrived), self._most)
        if isinstance(found, GrpcFault):
            raise CallFailed(GrpcStatus.INTERNAL, "the server sent no answer, or several")
        return found

    def _wait_no_more(self, _: object) -> trio.lowlevel.Abort:
        self._waiter = None
        return trio.lowlevel.Abort.SUCCEEDED

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Send bytes; with `end`, nothing more follows. If cancelled, a part of them may have been sent."""
        await trio.lowlevel.checkpoint_if_cancelled()
        await self.send_rest(data, end=end)
        await trio.lowlevel.cancel_shielded_checkpoint()

    async def send_rest(self, data: bytes, *, end: bool) -> None:
        """Send as `send` does, without a checkpoint if nothing has to be waited for."""
        connection, at, size = self._connection, 0, len(data)
        with memoryview(data) as view:
            while True:
                self.check()
                with view[at : at + PIECE] as piece:
                    at += connection.engine.send_data(self, piece, end=end and at + len(piece) == size)
                self._pieces += 1
                connection.flush()
                if at == size:
                    break
                if connection.writer.waiting >= _WAITING:
                    await connection.writer.room()
                elif self.send_window <= 0 or connection.engine.send_window <= 0:
                    await self._wait_for_news()
        if connection.writer.waiting >= _WAITING:
            await connection.writer.room()
        if self.failure is not None:
            raise self.failure

    async def receive(self) -> bytes:
        waited = False
        while not self._arrived:
            if self._closed:
                raise trio.ClosedResourceError("this call was closed")
            if self.failure is not None:
                raise self.failure
            if self.ended:
                await trio.lowlevel.checkpoint()
                if self.status is not GrpcStatus.OK:
                    raise self._outcome()
                return b""
            waited = True
            await self._wait_for_news()
        if not waited:
            await trio.lowlevel.checkpoint()
        arrived = bytes(self._arrived)
        self._arrived = bytearray()
        return arrived

    def credit(self, size: int) -> None:
        if not self._over:
            self._connection.engine.credit(self, size)
            self._connection.flush()

    async def next_message(self, decoder: GrpcDecoder) -> bytes | None:
        """Return the next message of the answer; None at the end. Cancelling this loses nothing.

        `decoder`: what keeps the rest of what has arrived, the same one for the whole call. Raises CallFailed: the call
        has failed, or a message is larger than the decoder takes.
        """
        if decoder.behind and not decoder.rounds % _MESSAGES:
            await trio.lowlevel.checkpoint()
        while True:
            before = decoder.taken
            found = decoder.take(1)
            self.credit(decoder.taken - before)
            if decoder.fault is not None:
                raise CallFailed(decoder.fault.status, decoder.fault.reason)
            if found:
                assert isinstance(found[0], bytes)
                return found[0]
            data = await self.receive()
            if not data:
                if decoder.unfinished:
                    raise CallFailed(GrpcStatus.INTERNAL, "the server stopped within a message")
                return None
            decoder.feed(data)

    def start(self, headers: tuple[tuple[str, str], ...]) -> None:
        """Do nothing: the head of the request has been sent."""

    def finish(self, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        """Say that nothing more follows, and give the call up. The server sees an end, and no failure."""
        if self.sends and not self._over:
            self._connection.engine.send_data(self, b"", end=True)
        self.cancel()

    def reset(self, why: str) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the call now: the server is told, unless it has ended already. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        self._arrived = bytearray()
        if not self.ended and self.failure is None:
            self._connection.engine.reset(self, Code.CANCEL)
            self._connection.flush()
        self._wake()

    def progress(self) -> Hashable:
        return self._pieces, self._connection.writer.waiting

    @property
    def status(self) -> GrpcStatus:
        """The status that the server ended it with."""
        said = self.last_headers.get("grpc-status")
        if said == "0":
            return GrpcStatus.OK
        if said is None:
            return status_of_http(self._http)
        try:
            return GrpcStatus(int(said))
        except ValueError:
            return GrpcStatus.UNKNOWN

    def _outcome(self) -> CallFailed:
        message = self.last_headers.get("grpc-message")
        text = f"the server answered with HTTP status {self._http or ''}" if message is None else decode_text(message)
        status = self.status
        if status is GrpcStatus.OK:
            status = GrpcStatus.UNKNOWN
        return CallFailed(status, one_line(text, _LONGEST), self.last_headers)

    async def _wait_for_news(self) -> None:
        if self._news is None:
            self._news = trio.lowlevel.ParkingLot()
        await self._news.park()

    def check(self) -> None:
        """Raise if nothing can be sent any more."""
        if self.failure is not None:
            raise self.failure
        if self._closed:
            raise trio.ClosedResourceError("this call was closed")
        if self.ended:
            raise (
                self._outcome()
                if self.status is not GrpcStatus.OK
                else CallFailed(GrpcStatus.CANCELLED, "the call has ended")
            )

    # The engine

    def response(self, head: ResponseFields) -> bool:
        if 100 <= head.status < 200:
            return True
        self._http, self.headers = head.status, head.headers
        if "grpc-status" in head.headers:
            self.last_headers = head.headers
        if self._most < 0 and self._news:  # whoever waits for the only message waits for the end
            self._news.unpark_all()
        return False

    def trailers(self, headers: dict[str, str]) -> None:
        self.last_headers = headers

    def arrived(self, data: bytes) -> None:
        size = len(data)
        self._size += size
        if not self._closed:
            self._arrived += data
        if self._most >= 0:
            if self._size > self._most + PREFIX:
                self.fail(CallFailed(GrpcStatus.RESOURCE_EXHAUSTED, f"a message may have {self._most:,} bytes"))
                self._connection.engine.reset(self, Code.CANCEL)
            elif self._size > _UNTOLD:  # else the answer ends before the server has to be allowed more
                self._connection.engine.credit(self, size)
            else:
                self.owed: int = self.owed + size
        elif self._news:
            self._news.unpark_all()

    def peer_ended(self) -> None:
        self.ended = True
        if self.sends:  # our side may be open still
            self._connection.engine.reset(self, Code.CANCEL)
        self._wake()

    def was_reset(self, code: int, reason: str) -> None:
        status = _BY_RESET.get(code, GrpcStatus.INTERNAL)  # type: ignore[call-overload]  # any number
        why = f"the server reset the call ({name_of(code)})"
        self.fail(CallFailed(status, why, begun=code != Code.REFUSED_STREAM))

    def window_opened(self) -> None:
        if self._news:
            self._news.unpark_all()

    def fail(self, failure: CallFailed) -> None:
        """Note that the call has failed."""
        if not self.ended and self.failure is None:
            self.failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._gone is not None:
            self._gone.set()
        if self._news:
            self._news.unpark_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            trio.lowlevel.reschedule(waiter)
        self._connection.call_ended()
