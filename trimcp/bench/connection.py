"""Connections of our own HTTP client as the load uses them: one request after another, counted.

The client's pool is left out, because it would cost each call a tenth more, and twice as much over TLS
(docs/design/http.md): there a connection has a task of its own, is asked whether it has ended before each request, and
is put down and picked up again after each reply. Here the task that calls also reads, and keeps its connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.bench.supply import Load
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.framing.sse import Event, EventDecoder
from trimcp.transports.http.client.connection import ClientConnection, Dial, dialing
from trimcp.transports.http.client.h1 import request_head, whole_request
from trimcp.transports.http.h1.replies import UnreadableReply
from trimcp.transports.targets import basic_authorization, credentials, normal_url

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer

_IDLE: Final = 0.5  # seconds after which a kept connection is checked before it is used
_TRUSTING: Final = "name what to trust in SSL_CERT_FILE"


@attrs.frozen
class LoadSite:
    """What the requests to a server have in common."""

    url: str  # the endpoint, in the form of `normal_url`
    headers: Mapping[str, str] = attrs.field(repr=False)  # the user's
    dial: Dial = attrs.field(repr=False)  # opens a connection

    @staticmethod
    def of(server: HttpServer, load: Load) -> LoadSite:
        """Return the site of a target."""
        url = normal_url(server.address)
        assert url is not None  # a client has connected to it
        auth = credentials(server.address)
        headers = server.headers if auth is None else {**server.headers, "authorization": basic_authorization(*auth)}
        return LoadSite(url, headers, dialing(url, server.socket, load.plan.opening, _TRUSTING, load.ssl_context))

    def head(self, method: str, headers: Mapping[str, str] | None = None, *, url: str | None = None) -> bytes:
        """Return the head of a request without its last lines, which differ between requests."""
        return request_head(method, url or self.url, {**self.headers, **(headers or {})})


@attrs.define(eq=False)
class LoadConnection(ClientConnection):
    """One connection to a site, opened when it is first used, and again if the server has closed it."""

    # Turns would cost a tenth of a call with twenty progress notifications, and only the load waits for each other.
    in_turns = False

    site: LoadSite
    load: Load
    max_size: int = CLIENT_MAX_MESSAGE
    _used: float = attrs.field(init=False, default=0.0)

    async def ready(self) -> None:
        """Connect, unless an open connection exists. Raises ConnectionLost: connecting failed."""
        if self._wire is not None and trio.current_time() - self._used > _IDLE and not self._wire.is_quiet():
            await self.close()  # servers close idle connections; a request sent then would be lost
        if self._wire is None:
            await self.open(self.site.dial)
            self._used = trio.current_time()

    async def request(self, data: bytes) -> None:
        """Send a request; then read the response with `more`. Raises as `ready`, and BrokenResourceError."""
        await self.ready()
        wire = self._wire
        assert wire is not None
        self.reply.reset()
        self.load.tally.bytes_out += len(data)
        try:
            sent = wire.try_write(data)
            if sent < len(data):
                await wire.write_all(data[sent:])
        except trio.BrokenResourceError:
            raise self._broken("sending") from None

    async def more(self) -> list[bytes]:
        """Return the next received pieces of the response's body, perhaps none.

        Raises UnreadableReply: it is not HTTP, or too large. Raises BrokenResourceError: it ended too early.
        """
        reply = self.reply
        try:
            received = await self.receive()
        except UnreadableReply as error:
            raise UnreadableReply(f"{error}: {error.data[:80]!r}") from None
        self.load.tally.bytes_in += received
        if reply.size > self.max_size and reply.content_type != "text/event-stream":
            raise UnreadableReply(f"a reply larger than {self.max_size:,} bytes")
        if reply.complete:
            self._used = trio.current_time()
            if not reply.keeps:
                await self.close()
        elif not received:
            raise self._broken("receiving")
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
        await self.request(whole_request(head, message))
        return await self.body()

    def _broken(self, doing: str) -> trio.BrokenResourceError:
        number = None if self._wire is None else self._wire.error
        if number is None:
            return trio.BrokenResourceError("the server closed the connection before it had answered")
        return trio.BrokenResourceError(f"{doing} failed: {OSError(number, os.strerror(number))}")


def events_in(pieces: Iterable[bytes], decoder: EventDecoder) -> list[Event]:
    """Return the events completed by these pieces of a body. Raises `UnreadableReply` for one that is too large."""
    events = [event for piece in pieces for event in decoder.feed(piece)]
    for event in events:
        if event.oversize is not None:
            raise UnreadableReply(event.oversize.message)
    return events
