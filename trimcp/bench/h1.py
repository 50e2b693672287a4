"""A minimal HTTP/1.1 client for load: sequential requests over a kept connection, response bodies in pieces.

It accepts whatever `httptools` parses. It does not follow redirects and does not request compression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import attrs
import httptools
import trio

from trimcp.bench.link import Address, LoadLink
from trimcp.bench.supply import Load
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.framing.sse import Event, EventDecoder
from trimcp.transports.http.h1.replies import UnreadableReply

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer

_IDLE: Final = 0.5  # seconds after which a kept connection is checked before it is used
_CONTENT_TYPE: Final = b"content-type"
_SESSION: Final = b"mcp-session-id"


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


class Reply:
    """One response, as far as it was received; the parser calls its methods.

    Attributes:
        status: the status code, 0 before it is known.
        content_type: the media type without parameters, in lower case.
        session_id: the header `Mcp-Session-Id`, or None.
        pieces: received pieces of the body that were not taken yet.
        size: bytes of the body so far.
        has_length: whether it has a length or is chunked; otherwise it ends with the connection.
        complete: whether it was received to its end.
        keeps: whether the connection can be used again; known when complete.
    """

    __slots__ = ("_parser", "complete", "content_type", "has_length", "keeps", "pieces", "session_id", "size", "status")

    def __init__(self) -> None:
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next response."""
        self.status: int = 0
        self.content_type: bytes = b""
        self.session_id: str | None = None
        self.pieces: list[bytes] = []
        self.size: int = 0
        self.has_length: bool = False
        self.complete: bool = False
        self.keeps: bool = False

    def feed(self, data: bytes) -> None:
        """Parse received bytes. Raises `UnreadableReply`."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise UnreadableReply(f"{error}: {data[:80]!r}") from None
        except httptools.HttpParserUpgrade:
            raise UnreadableReply("the server switches to another protocol") from None

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep the headers that are used."""
        if len(name) == 12 and name.lower() == _CONTENT_TYPE:
            self.content_type = value.partition(b";")[0].strip().lower()
        elif len(name) == 14:
            lower = name.lower()
            if lower == b"content-length":
                self.has_length = True
            elif lower == _SESSION:
                self.session_id = value.decode("latin-1")
        elif len(name) == 17 and name.lower() == b"transfer-encoding":
            self.has_length = True

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        """A piece of the body was received."""
        self.size += len(piece)
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        """The response is complete, unless its status was informational (1xx)."""
        if self.status >= 200:
            self.complete = True
            self.keeps = bool(self._parser.should_keep_alive())  # not known any more after this callback
        else:
            self.reset()


@attrs.define(eq=False)
class LoadConnection:
    """One connection to a site, opened when it is first used, and again if the server has closed it.

    Attributes:
        reply: the response to the last request.
    """

    site: Site
    load: Load
    max_size: int = CLIENT_MAX_MESSAGE
    reply: Reply = attrs.field(init=False, factory=Reply)
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
            self.reply = Reply()
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
            reply.feed(data)
        elif reply.status >= 200 and not reply.has_length:
            reply.complete = True
            self.close()
        else:
            raise trio.BrokenResourceError("the server closed the connection before it had answered")
        if reply.size > self.max_size and reply.content_type != b"text/event-stream":
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
