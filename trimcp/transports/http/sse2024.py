"""HTTP+SSE of 2024-11-05: a stream to listen on, and an endpoint to post to (basic/transports, "HTTP with SSE").

The stream is the session: its first event says where to post, its end ends everything. Deprecated since 2025-03-26, and
still what many clients speak.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, quote

import attrs

from trimcp.channel import Incoming, Outgoing
from trimcp.framing.sse import encode_event
from trimcp.masking import digest
from trimcp.security import security_event
from trimcp.transports.http.accept import is_compressed, is_json
from trimcp.transports.http.exchange import JSON_HEADERS
from trimcp.transports.http.model import Admitted, Head, Reply, Response
from trimcp.transports.http.streams import EventStream
from trimcp.wire.codes import INVALID_REQUEST, OVERLOADED
from trimcp.wire.jsonrpc import RequestId, encode_error, parse, scan_id

if TYPE_CHECKING:
    from trimcp.transports.http.app import HttpFace
    from trimcp.transports.http.service import PushedSession

__all__ = ["LegacyPost", "LegacyStream", "StreamTable"]

_FLOOD: Final = 16
_ID: Final = "session_id="
_ESCAPED: Final = re.compile(r"[%&+]")


@attrs.define(eq=False)
class StreamTable:
    """The open streams of one face, by the id in their endpoint's address."""

    _streams: dict[str, LegacyStream] = attrs.field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, id: str, stream: LegacyStream) -> None:
        """Let it be found."""
        self._streams[id] = stream

    def find(self, id: str, principal: str | None) -> LegacyStream | None:
        """Return a stream of this principal's; there is no other's."""
        stream = self._streams.get(id)
        if stream is not None and stream.principal != principal:
            security_event("foreign_session", session=digest(id), owner=stream.principal, principal=principal)
            return None
        return stream

    def remove(self, id: str) -> None:
        """Let it be found no longer."""
        self._streams.pop(id, None)

    def end(self) -> None:
        """End all of them."""
        for stream in list(self._streams.values()):
            stream.end("the server is shutting down")


@attrs.define(eq=False)
class LegacyStream:
    """A GET: one session for as long as it is read. A `Handler` to the host, a `Sink` to the session."""

    face: HttpFace
    head: Head
    principal: str | None
    headers: tuple[tuple[str, str], ...] = ()
    id: str = attrs.field(init=False, factory=lambda: secrets.token_urlsafe(24))
    session: PushedSession = attrs.field(init=False)
    _stream: EventStream = attrs.field(init=False)

    # For the host

    @property
    def max_body(self) -> int:
        """A GET has no body worth reading."""
        return 0

    def start(self, body: bytes, reply: Reply) -> None:
        """Make the session, and say where to post to it."""
        face = self.face
        self._stream = face.new_stream(event="message")
        self.session = face.service.open(self)
        self._stream.counts = self.session.counts
        face.streams.add(self.id, self)
        place = f"{quote(self.head.root)}{face.settings.messages_path}?{_ID}{self.id}"
        self._stream.open(reply, self.headers, encode_event(place.encode(), event="endpoint"))
        face.ticker.watch(self._stream)

    def too_large(self, beginning: bytes) -> Response:
        """Refuse a body."""
        return Response(413)

    def disconnected(self, slow: str | None = None) -> None:
        """End the session: the stream is all there is of it."""
        self._stream.detach()
        self.session.disconnect(slow or "the client closed its stream", slow=slow is not None)

    def writable(self) -> None:
        """Write what was held back."""
        self._stream.writable()

    def end(self, why: str) -> None:
        """End the session and its stream."""
        self.session.disconnect(why)

    # For the session

    @property
    def flooded(self) -> bool:
        """Whether so much is unread that the client has to read before it may ask for more."""
        reply = self._stream.reply
        return reply is not None and reply.waiting >= _FLOOD * self.face.settings.stream_buffer

    @property
    def full(self) -> bool:
        """Whether the reader is behind."""
        return self._stream.full

    async def room(self) -> None:
        """Wait for the reader."""
        await self._stream.room()

    def post(self, outgoing: Outgoing) -> None:
        """Send a message."""
        self._stream.send(outgoing)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Send a message, or keep the latest while the reader is behind."""
        self._stream.send_latest(key, outgoing)

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:
        """Send what was kept back, or drop it."""
        self._stream.settle_latest(key, keep=keep)

    def withdraw(self, request_id: RequestId) -> bool:
        """Return False: what was posted has left."""
        return False

    def unanswered(self, request_id: RequestId) -> None:
        """Do nothing: the stream stays."""

    def release(self) -> None:
        """Do nothing: the stream is the session."""

    def close(self) -> None:
        """End the stream."""
        self.face.streams.remove(self.id)
        self.face.ticker.unwatch(self._stream)
        self._stream.end()

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return what is held back for the reader, and the bytes that it has not taken."""
        return self._stream.waiting()


@attrs.define(eq=False)
class LegacyPost:
    """A POST of a message to a session; answers come on its stream."""

    stream: LegacyStream
    head: Head
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def find(cls, face: HttpFace, head: Head, principal: str | None) -> Admitted:
        """Return what takes a POST, or why it is refused."""
        if not is_json(head.headers.get("content-type")):
            return _refused(415, "the body must be application/json in UTF-8")
        if is_compressed(head.headers.get("content-encoding")):
            return _refused(415, "the body must not be compressed")
        stream = face.streams.find(_session_id(head.query), principal)
        return _refused(404, "there is no such session") if stream is None else cls(stream, head)

    @property
    def max_body(self) -> int:
        """Bytes of the largest message."""
        return self.stream.face.settings.max_message

    def start(self, body: bytes, reply: Reply) -> None:
        """Deliver the message."""
        stream = self.stream
        if stream.flooded:
            text = "read your stream before you ask for more"
            data = encode_error(scan_id(body), OVERLOADED, text)
            reply.send(Response(503, (*JSON_HEADERS, ("Retry-After", "1"), *self.headers), data))
            return
        message = parse(body, stream.face.settings.limits)
        # First the status, so that a client that reads both in turn has it before the answer.
        reply.send(Response(202, self.headers))
        stream.face.show("<--", message)
        stream.session.deliver((Incoming(message, len(body), None, self.head.headers, stream.principal),))

    def too_large(self, beginning: bytes) -> Response:
        """Refuse a message beyond the limit, by the id of its request if that can be read."""
        security_event("oversize", most=self.max_body, peer=self.head.peer)
        text = f"a message may have {self.max_body} bytes"
        body = encode_error(scan_id(beginning), INVALID_REQUEST, text, {"reason": "size"})
        return Response(413, (*JSON_HEADERS, *self.headers), body)

    def disconnected(self, slow: str | None = None) -> None:
        """Do nothing: the message was taken."""

    def writable(self) -> None:
        """Do nothing: nothing was held back."""


def _session_id(query: str) -> str:
    """Return the id of the session that a POST names, "" if it names none."""
    if query.startswith(_ID) and _ESCAPED.search(query) is None:
        return query[len(_ID) :]  # as we gave it
    return parse_qs(query).get("session_id", [""])[0]


def _refused(status: int, text: str) -> Response:
    return Response(status, JSON_HEADERS, encode_error(None, INVALID_REQUEST, text))
