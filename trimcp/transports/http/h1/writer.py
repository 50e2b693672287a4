"""The writing side of a connection: bytes that are sent at once or wait, and responses of HTTP/1.1 (RFC 9112).

A write sends at once what the socket accepts; a task sends the rest. A burst of events is sent in one write, because a
system call for each event would cost more than the event. Nothing here bounds the bytes that wait: callers that write
much check `waiting` and wait for `room`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final, Protocol

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.channel import PeerProgress
from trimcp.support.cleaning import log_crash
from trimcp.support.deadlines import Deadlines
from trimcp.support.nurseries import own_clock
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.http.h1.parser import H1Request
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.interfaces import BODILESS, Handler, HttpResponse
from trimcp.transports.http.settings import HttpLimits

log: logging.Logger = logging.getLogger("trimcp.http")

_BURST: Final = 0.001  # seconds after an immediate write in which later pieces are gathered
_COUNTED: Final = 256 * 1024  # bytes written after which the budget's count is updated
_GATHERED: Final = 64 * 1024  # bytes; this much is neither held back to be gathered nor copied into one write
_STATUS_LINES: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class WriterOwner(Protocol):
    """The connection that a writer belongs to."""

    def drained(self) -> None:
        """Note that all waiting bytes were written."""

    def wake(self) -> None:
        """Check `H1Writer.broken`: nothing can be written any more."""


class _ReplyOwner(WriterOwner, Protocol):
    """The connection that a reply belongs to."""

    writer: H1Writer

    def will_close(self, request: H1Request) -> bool:
        """Decide whether this response is the last one; the decision is final."""
        ...

    def finishing(self) -> None:
        """Note that the last bytes of a streamed response come next."""

    def finished(self) -> None:
        """Note that the response is complete, though bytes of it may still wait."""


@attrs.define(eq=False)
class H1Writer:
    """Writes to one wire."""

    owner: WriterOwner | None  # told when bytes were written, or cannot be any more; None after `close`
    _wire: Wire
    _nursery: trio.Nursery  # outlives the connection; a task runs in it while bytes wait
    _deadlines: Deadlines  # for a peer that does not read
    _limits: HttpLimits
    _amount: MemoryCharge = attrs.field(factory=MemoryCharge)  # counts the bytes that wait
    stalled: bool = attrs.field(init=False, default=False)  # whether it broke because the peer did not read
    broken: bool = attrs.field(init=False, default=False)  # whether further writes are dropped
    undelivered: int = attrs.field(init=False, default=0)  # bytes that waited when it broke
    # seconds after which a peer that takes nothing is given up
    stall_timeout: float = attrs.field(
        init=False, default=attrs.Factory(lambda self: self._limits.stall_timeout, takes_self=True)
    )
    _pending: bytearray = attrs.field(init=False, factory=bytearray)
    _scope: trio.CancelScope | None = attrs.field(init=False, default=None)
    _room: trio.lowlevel.ParkingLot | None = attrs.field(init=False, default=None)
    _now: Callable[[], float] = attrs.field(init=False, factory=own_clock)
    _began: float = attrs.field(init=False, default=-math.inf)  # when the burst began, on Trio's clock
    _scheduled: bool = attrs.field(init=False, default=False)  # whether a task is going to write the waiting bytes
    blocked: bool = attrs.field(init=False, default=False)  # the wire accepted less than all: only that task writes

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Write at once what the wire accepts, and queue the rest. Never blocks, never raises."""
        pending = self._pending
        if not pending:
            if data and not self.broken:
                self._send(data)
            return
        if not self.blocked:
            if len(data) < _GATHERED:
                pending += data
                self._flush()
                return
            self._flush()
        if pending:
            pending += data
            self._amount.set(len(pending))
        elif data and not self.broken:
            self._send(data)

    def gather(self, data: bytes) -> None:
        """Write data that may soon be followed by more, together with what is gathered in this turn of Trio's loop.

        The first piece of a burst is written at once. Later pieces are written when the turn ends. If the caller does
        not yield, they are written after a millisecond, with the next piece.
        """
        if self.blocked or self.broken or not data or len(data) >= _GATHERED:
            self.write(data)
            return
        pending, now = self._pending, self._now()
        begins = now - self._began >= _BURST
        if begins and not pending:
            self._began = now
            self._send(data)
            return
        pending += data
        if begins or len(pending) >= _GATHERED:
            self._began = now
            self._flush()
        elif not self._scheduled:
            self._schedule()

    def write_later(self) -> None:
        """Call the owner's `drained` when this turn of Trio's loop ends, or once no bytes wait any more."""
        if not self.broken:
            self._schedule()

    async def room(self) -> None:
        """Wait until at most `low_water` bytes wait, or nothing can be written any more."""
        while len(self._pending) > self._limits.low_water:
            if self._room is None:
                self._room = trio.lowlevel.ParkingLot()
            await self._room.park()

    async def linger(self, parked: trio.lowlevel.ParkingLot) -> bool:
        """Wait until the peer has read what was written last, and has closed; return whether it has read it.

        Closing with unread input would reset the connection. `parked` is woken when bytes were written, or cannot be.
        """
        with trio.move_on_after(self._limits.linger_timeout):
            while self._pending and not self.broken:
                await parked.park()
            if not self.broken:
                await self._wire.shut_write()
                left = self._limits.linger_bytes
                while left > 0 and (data := await self._wire.read(READ_SIZE)) != b"":
                    left -= len(data or b"")
        return not (self._pending or self.broken)

    def give_up(self) -> None:
        """Drop the waiting bytes and all further writes."""
        if self.broken:
            return
        self.broken = True
        self.undelivered = len(self._pending)
        self._pending.clear()
        self._amount.set(0)
        if self._scope is not None:
            self._scope.cancel(reason="the connection has ended")
        if self._room is not None:
            self._room.unpark_all()
        if self.owner is not None:
            self.owner.wake()

    def close(self) -> None:
        """Give up without notifying the owner, and forget it."""
        self.owner = None
        self.give_up()

    def _try(self, data: bytes | bytearray) -> int:
        """Return how many bytes the wire accepted; 0 if it is broken."""
        try:
            return self._wire.try_write(data)
        except trio.BrokenResourceError:
            self.give_up()
            return 0

    def _send(self, data: bytes) -> None:
        """Write data while nothing waits, and queue what the wire does not accept."""
        taken = self._try(data)
        if taken < len(data) and not self.broken:
            self._pending += memoryview(data)[taken:]
            self.blocked = True
            self._schedule()
            self._amount.set(len(self._pending))

    def _flush(self) -> None:
        """Write what was gathered."""
        self._taken(self._try(self._pending))
        if self._pending:
            self.blocked = True
            self._schedule()

    def _taken(self, size: int) -> None:
        del self._pending[:size]
        if (counted := self._amount.counted) and (not self._pending or counted - len(self._pending) >= _COUNTED):
            self._amount.set(len(self._pending))
        if self._room is not None and len(self._pending) <= self._limits.low_water:
            self._room.unpark_all()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        """Write what was gathered before this task ran, then wait for the wire to accept the rest."""
        try:
            if self._pending and not self.blocked:
                self._flush()
            if self._pending:
                with trio.CancelScope() as self._scope:
                    await self._write_pending()
                self._scope = None
            self._scheduled = self.blocked = False  # first, because `drained` may write again
            if not self.broken and self.owner is not None:
                self.owner.drained()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.give_up()
        except Exception as error:  # a bug here or in a library, which must not end other connections
            log_crash(log, error, "writing a response crashed")
            self.give_up()

    async def _write_pending(self) -> None:
        """Write until no bytes wait, or the peer stalls.

        The system may accept more long after the peer stopped reading. So the peer's progress is checked, not the
        write's.
        """
        progress, pending = PeerProgress(self.stall_timeout), self._pending

        def look() -> None:
            wait = progress.look(self._wire.progress())
            if wait:
                stall.set(wait)
            else:
                self.stalled = True
                self.give_up()

        stall = self._deadlines.new(look)
        try:
            while pending:
                stall.set(progress.begin(self._wire.progress()))
                self._taken(await self._wire.write_some(pending))
        finally:
            stall.close()


@attrs.define(eq=False)
class H1Reply:
    """Sends the response to one request; see `HttpReply`."""

    _owner: _ReplyOwner | None  # None after `detach`
    request: H1Request
    handler: Handler | None  # the request's handler; None if the connection responds itself
    status: int = 0  # of the response, once it has begun
    sent: int = 0  # bytes of its body that were written
    ended: bool = False  # whether it is complete
    aborted: bool = False  # whether the connection is to be closed at once
    _chunked: bool = False
    _streams: bool = False  # whether it has begun, in chunks of a body, and has not ended
    _bodiless: bool = False

    def send(self, response: HttpResponse) -> None:
        owner, body = self._owner, response.body
        if owner is None or self.status:
            return
        head = self._begin(owner, response, "" if response.status in BODILESS else f"Content-Length: {len(body)}\r\n")
        self.ended = True
        if self._bodiless:
            body = b""
        self.sent = len(body)
        if len(body) <= _GATHERED:
            owner.writer.write(head + body)
        else:
            owner.writer.write(head)
            owner.writer.write(body)
        owner.finished()

    def start(self, response: HttpResponse) -> None:
        owner = self._owner
        if owner is None or self.status:
            return
        self._chunked = not self.request.http10 and response.status not in BODILESS
        head = self._begin(owner, response, "Transfer-Encoding: chunked\r\n" if self._chunked else "")
        self._streams = self._chunked and not self._bodiless
        for piece in self._framed(head, response.body, b""):
            owner.writer.gather(piece)

    def write(self, data: bytes) -> None:
        """Send more of the body: at once, or with other pieces in this turn of Trio's loop."""
        owner, size = self._owner, len(data)
        if owner is None or not size:
            return
        if self._streams and size <= _GATHERED:  # nearly always: an event
            self.sent += size
            owner.writer.gather(b"%x\r\n%b\r\n" % (size, data))
            return
        if not self.status or self.ended or self._bodiless:
            return
        for piece in self._framed(b"", data, b""):
            owner.writer.gather(piece)

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        owner = self._owner
        if owner is None or not self.status or self.ended:
            return
        self.ended, self._streams = True, False
        owner.finishing()
        end = b"0\r\n\r\n" if self._chunked and not self._bodiless else b""
        for piece in self._framed(b"", data, end):
            owner.writer.write(piece)
        owner.finished()

    def abort(self) -> None:
        if self._owner is not None and not self.ended:
            self.aborted = True
            self._owner.writer.give_up()

    @property
    def waiting(self) -> int:
        owner = self._owner
        return 0 if owner is None else len(owner.writer._pending)  # each event asks

    @property
    def gone(self) -> bool:
        return self.ended or self._owner is None or self._owner.writer.broken

    async def room(self) -> None:
        if self._owner is not None:
            await self._owner.writer.room()

    def detach(self) -> None:
        """Drop all further writes."""
        self._owner = None
        self.handler = None

    def _begin(self, owner: _ReplyOwner, response: HttpResponse, framing: str) -> bytes:
        request = self.request
        self.status = status = response.status
        self._bodiless = status in BODILESS or request.head.method == "HEAD"
        if not framing and not self._bodiless:
            request.keep_alive = False  # only the end of the connection ends the body
        if owner.will_close(request):
            framing += "Connection: close\r\n"
        elif request.http10:
            framing += "Connection: keep-alive\r\n"
        try:
            return _head(int(time.time()), status, response.headers, framing)
        except ValueError as error:
            # A header with a line break could split the response in two. The body is sent without these headers.
            log_crash(log, error, "the headers of a response with status %d cannot be sent", status)
            return encode_head(status, (), framing)

    def _framed(self, before: bytes, data: bytes, after: bytes) -> Sequence[bytes]:
        """Return the bytes of a piece of a body of unknown length, with `before` and `after` around it."""
        if self._bodiless or not data:
            return _gathered(before, b"", after)
        self.sent += len(data)
        if self._chunked:
            before, after = b"%b%x\r\n" % (before, len(data)), b"\r\n" + after
        return _gathered(before, data, after)


def encode_head(status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
    """Return the head of a response.

    `framing`: whole lines about the body and the connection. Raises ValueError: a name or a value contains a character
    that a header line cannot have.
    """
    return _head(int(time.time()), status, tuple(headers), framing)


@lru_cache(maxsize=64)  # within one second most responses begin alike, except for the length of the body
def _head(now: int, status: int, headers: tuple[tuple[str, str], ...], framing: str) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers]
    text = "".join(lines)
    if text.count("\n") != len(lines) or text.count("\r") != len(lines) or "\0" in text:
        raise ValueError("a header of a response contains a line break")
    status_line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{status_line}Date: {http_date(now)}\r\n{text}{framing}\r\n".encode("latin-1")


@lru_cache(maxsize=1)
def http_date(now: int) -> str:
    """Return seconds since 1970 as headers have them."""
    return formatdate(now, usegmt=True)


def _gathered(before: bytes, data: bytes, after: bytes) -> Sequence[bytes]:
    """Return the pieces joined, or as three pieces where joining would copy much."""
    if len(data) <= _GATHERED:
        return (b"%b%b%b" % (before, data, after),)
    return (before, data, after)
