"""GET and DELETE on the endpoint of Streamable HTTP, until 2025-11-25: to listen, to come back, to end a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trimcp.transports.http.exchange import JSON_HEADERS
from trimcp.transports.http.model import Head, Reply, Response
from trimcp.transports.http.streams import EventStream
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import encode_error

if TYPE_CHECKING:
    from trimcp.transports.http.app import HttpFace
    from trimcp.transports.http.sessions import HttpSession

__all__ = ["Deletion", "Listening"]


@attrs.define(eq=False)
class Listening:
    """A GET: the stream of what belongs to no request, or the rest of one the client lost.

    With `Last-Event-ID` it continues the stream that event was on, and no other.
    """

    face: HttpFace
    session: HttpSession
    head: Head
    headers: tuple[tuple[str, str], ...] = ()
    _stream: EventStream | None = attrs.field(init=False, default=None)
    _reply: Reply | None = attrs.field(init=False, default=None)

    @property
    def max_body(self) -> int:
        """A GET has no body worth reading."""
        return 0

    def start(self, body: bytes, reply: Reply) -> None:
        """Begin to send events."""
        session = self.session
        last = self.head.headers.get("last-event-id") if session.resumable else None
        if not last:
            self._follow(session.listen(reply, self.headers), reply)
            return
        found = session.find_stream(last)
        if found is None:
            text = "the events after this Last-Event-ID are not kept (any more)"
            reply.send(Response(400, (*JSON_HEADERS, *self.headers), encode_error(None, INVALID_REQUEST, text)))
            return
        stream, after = found
        was_over = stream.ended
        stream.resume(reply, self.headers, after)
        if was_over:
            session.stream_ended(stream, delivered=True)
        else:
            self._follow(stream, reply)

    def _follow(self, stream: EventStream, reply: Reply) -> None:
        self._stream, self._reply = stream, reply
        self.face.ticker.watch(stream)

    def too_large(self, beginning: bytes) -> Response:
        """Refuse a body."""
        return Response(413)

    def disconnected(self, slow: str | None = None) -> None:
        """Note that nobody reads the stream, unless another connection has taken it over."""
        stream = self._stream
        if stream is not None and stream.reply is self._reply:
            stream.detach()
            self.face.ticker.unwatch(stream)

    def writable(self) -> None:
        """Write what was held back."""
        if self._stream is not None and self._stream.reply is self._reply:
            self._stream.writable()


@attrs.define(eq=False)
class Deletion:
    """A DELETE: the client needs its session no longer."""

    face: HttpFace
    session: HttpSession
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def max_body(self) -> int:
        """A DELETE has no body worth reading."""
        return 0

    def start(self, body: bytes, reply: Reply) -> None:
        """End the session."""
        self.face.sessions.remove(self.session, "the client ended its session")
        reply.send(Response(200, self.headers))

    def too_large(self, beginning: bytes) -> Response:
        """Refuse a body."""
        return Response(413)

    def disconnected(self, slow: str | None = None) -> None:
        """Do nothing: it is done already."""

    def writable(self) -> None:
        """Do nothing: nothing was held back."""
