"""The engine of our own: requests of HTTP/1.1 over a pool of connections, and replies that their readers pull."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.channel import HttpClientStatistics
from trimcp.transports.descriptors import AnySocket
from trimcp.transports.http.client.engine import ClientRequest, ExchangeBroken
from trimcp.transports.http.client.pool import ClientExchange, Pool, PooledConnection
from trimcp.transports.http.h1.replies import ReplyParser
from trimcp.transports.targets import origin, request_target

if TYPE_CHECKING:
    from trimcp.transports.http.client.cookies import BoundedCookieJar

_AHEAD: Final = 64 * 1024  # bytes that are read before their reader takes them


@attrs.define(eq=False)
class H1Engine:
    """An `HttpEngine` over a pool, which must run."""

    pool: Pool  # the connections
    _jar: BoundedCookieJar | None = attrs.field(init=False, default=None, repr=False)

    async def send(self, request: ClientRequest) -> PulledReply:
        head = request_head(request.method, request.url, request.headers) + self.cookie_line(request.url)
        reply = PulledReply(self, request.url, whole_request(head, request.content), request.written)
        self.pool.begin(reply)
        try:
            await reply.begun()
        except BaseException:  # above all if cancelled
            await reply.abandon()
            raise
        return reply

    def adopt(self, exchange: ClientExchange, url: str) -> PulledReply:
        """Return the reply of an exchange that has a connection, from here on for a task that reads it."""
        connection = exchange.connection
        assert connection is not None
        reply = PulledReply(self, url, exchange.request, None)
        connection.hand_over(reply)
        return reply

    def statistics(self) -> HttpClientStatistics:
        return self.pool.statistics()

    def cookie_line(self, url: str) -> bytes:
        """Return the header line with the cookies for a URL; b"" without any, as is usual."""
        cookies = None if self._jar is None else self._jar.header_for(url)
        return b"" if cookies is None else checked_lines(f"cookie: {cookies}\r\n", 1)

    def note_cookies(self, url: str, values: list[str]) -> None:
        """Keep the cookies that a reply sets, if it sets any."""
        if values:
            if self._jar is None:
                from trimcp.transports.http.client.cookies import BoundedCookieJar  # takes as long as all of this

                self._jar = BoundedCookieJar()
            self._jar.note(url, values)


@attrs.define(eq=False)
class PulledReply:
    """The exchange of a task that waits for its reply and reads it. At most 64 KiB and one read are buffered."""

    _engine: H1Engine
    _url: str
    request: bytes = attrs.field(repr=False)
    _written: Callable[[], object] | None = None
    connection: PooledConnection | None = attrs.field(init=False, default=None)
    status: int = attrs.field(init=False, default=0)
    headers: Mapping[str, str] = attrs.field(init=False, factory=dict, repr=False)
    _pieces: deque[bytes] = attrs.field(init=False, factory=deque, repr=False)
    _size: int = attrs.field(init=False, default=0)
    _complete: bool = attrs.field(init=False, default=False)
    _failure: ExchangeBroken | None = attrs.field(init=False, default=None)
    _reader: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _room: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    http2: bool = attrs.field(init=False, default=False)

    @property
    def socket(self) -> AnySocket | None:
        return None if self.connection is None else self.connection.socket

    async def begun(self) -> None:
        """Wait for the head. Raises ExchangeBroken: none will come."""
        while not self.status:
            if self._failure is not None:
                raise self._failure
            await self._reader.park()

    def pieces(self) -> AsyncIterator[bytes]:
        return self

    def __aiter__(self) -> PulledReply:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._pieces:
            if self._complete:
                raise StopAsyncIteration
            if self._failure is not None:
                raise self._failure
            await self._reader.park()
        piece = self._pieces.popleft()
        self._size -= len(piece)
        if self._size < _AHEAD:
            self._room.unpark_all()
        return piece

    async def abandon(self) -> None:
        self._pieces.clear()
        if not self._complete and self._failure is None:
            self._engine.pool.withdraw(self)
            self._failure = ExchangeBroken("the exchange was given up")

    # Called by the connection

    def sent(self) -> None:
        if self._written is not None:
            self._written()

    async def arrived(self, reply: ReplyParser) -> None:
        if not self.status and reply.status:
            self.status, self.headers = reply.status, reply.headers
            self._engine.note_cookies(self._url, reply.cookies)
        if reply.pieces:
            piece = b"".join(reply.pieces)
            reply.pieces.clear()
            self._pieces.append(piece)
            self._size += len(piece)
        self._complete = reply.complete
        self._reader.unpark_all()
        while self._size >= _AHEAD and not self._complete:
            await self._room.park()

    def finished(self) -> None:
        """See `ClientExchange.finished`."""

    def broken(self, why: str, nothing_sent: bool) -> None:
        self._failure = ExchangeBroken(why, nothing_sent)
        self._reader.unpark_all()


# Requests as bytes


def request_head(method: str, url: str, headers: Mapping[str, str]) -> bytes:
    """Return the head of a request, without the lines about its body and its end.

    Raises ExchangeBroken: a header cannot be sent.
    """
    host = headers.get("host") or origin(url).partition("://")[2]
    lines = [f"{method} {request_target(url)} HTTP/1.1\r\nhost: {host}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items() if name != "host"]
    return checked_lines("".join(lines), len(lines) + 1)


def checked_lines(text: str, count: int) -> bytes:
    """Return header lines as bytes.

    Raises ExchangeBroken: they are not so many, so that one has a line end in it, or not ASCII. Values may be secrets,
    so the text does not quote them.
    """
    if text.isascii() and text.count("\r\n") == text.count("\n") == text.count("\r") == count and "\0" not in text:
        return text.encode()
    raise ExchangeBroken("a header of the request cannot be sent", nothing_sent=True)


def whole_request(head: bytes, content: bytes | None) -> bytes:
    """Return a request as bytes, for one write."""
    if content is None:
        return head + b"\r\n"
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(content), content)
