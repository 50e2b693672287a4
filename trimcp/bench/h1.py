"""A minimal HTTP/1.1 client for load: sequential requests over a kept connection, response bodies in pieces.

It reads replies as our own client does. It follows no redirects and requests no compression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import attrs
import trio

from trimcp.bench.link import Address, LoadLink
from trimcp.bench.supply import Load
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.framing.sse import Event, EventDecoder
from trimcp.transports.http.h1.replies import ReplyParser, UnreadableReply

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer

_IDLE: Final = 0.5  # seconds after which a kept connection is checked before it is used


@attrs.frozen
class Site:
    """The fixed parts of a request: the path of the request line, the header Host, and the user's headers as lines."""

    address: Address
    path: bytes
    host: bytes
    headers: bytes = attrs.field(repr=False)

    @staticmethod
    def of(server: HttpServer) -> Site:
        """Return the site of a target."""
        parts = urlsplit(server.address)
        tls = parts.scheme == "https"
        address = Address(parts.hostname or "", parts.port or (443 if tls else 80), tls, server.socket)
        path = parts._replace(scheme="", netloc="").geturl()
        lines = "".join(f"{name}: {value}\r\n" for name, value in server.headers.items() if name != "host")
        host = server.headers.get("host", parts.netloc.rpartition("@")[2])
        return Site(address, path.encode(), host.encode(), lines.encode())

    def head(self, method: bytes, headers: Mapping[str, str] | None = None, *, path: bytes | None = None) -> bytes:
        """Return the head of a request without its last lines, which differ between requests."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
        start = b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method, path or self.path, self.host)
        return b"%b%b%b" % (start, self.headers, lines)


@attrs.define(eq=False)
class LoadConnection:
    """One connection to a site, opened when it is first used, and again if the server has closed it.

    Attributes:
        reply: the response to the last request.
    """

    site: Site
    load: Load
    max_size: int = CLIENT_MAX_MESSAGE
    reply: ReplyParser = attrs.field(init=False, factory=ReplyParser)
    _link: LoadLink | None = attrs.field(init=False, default=None)
    _used: float = attrs.field(init=False, default=0.0)

    async def open(self) -> LoadLink:
        """Connect, unless an open connection exists.

        Raises:
            ConnectionLost: connecting failed.
        """
        link = self._link
        if link is not None and trio.current_time() - self._used > _IDLE and link.ended():
            # Servers close idle connections; a request sent then would be lost.
            self.close()
            link = None
        if link is None:
            link = self._link = await self.site.address.dial(self.load.plan.opening, self.load.ssl_context)
            self._used = trio.current_time()
            self.reply = ReplyParser()
        return link

    async def request(self, data: bytes) -> None:
        """Send a request; then read the response with `more`.

        Raises:
            ConnectionLost: connecting failed.
            trio.BrokenResourceError: the connection broke before all was sent.
        """
        link = await self.open()
        self.reply.reset()
        self.load.tally.bytes_out += len(data)
        sent = link.send_nowait(data)
        if sent < len(data):
            await link.send_all(data[sent:])

    async def more(self) -> list[bytes]:
        """Return the next received pieces of the response's body, perhaps none.

        Raises:
            UnreadableReply: it is not HTTP, or too large.
            trio.BrokenResourceError: the connection ended before the response did.
        """
        assert self._link is not None
        reply = self.reply
        data = await self._link.receive()
        self.load.tally.bytes_in += len(data)
        if data:
            try:
                reply.feed(data)
            except UnreadableReply as error:
                raise UnreadableReply(f"{error}: {data[:80]!r}") from None
        elif reply.end():
            self.close()
        else:
            raise trio.BrokenResourceError("the server closed the connection before it had answered")
        if reply.size > self.max_size and reply.content_type != "text/event-stream":
            raise UnreadableReply(f"a reply larger than {self.max_size:,} bytes")
        if reply.complete:
            self._used = trio.current_time()
            if not reply.keeps:
                self.close()
        pieces, reply.pieces = reply.pieces, []
        return pieces

    async def body(self) -> bytes:
        """Return the whole body of the response. Raises as `more` does."""
        pieces: list[bytes] = []
        while not self.reply.complete:
            pieces += await self.more()
        return b"".join(pieces)

    async def post(self, head: bytes, message: bytes) -> bytes:
        """Send a message, and return the whole body of the response. Raises as `request` and `more` do."""
        await self.request(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(message), message))
        return await self.body()

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._link is not None:
            self._link.close()
            self._link = None


def events_in(pieces: Iterable[bytes], decoder: EventDecoder) -> list[Event]:
    """Return the events completed by these pieces of a body. Raises `UnreadableReply` for one that is too large."""
    events = [event for piece in pieces for event in decoder.feed(piece)]
    for event in events:
        if event.oversize is not None:
            raise UnreadableReply(event.oversize.message)
    return events
