"""HTTP+SSE of 2024-11-05: a stream to listen on, and an endpoint to post to (basic/transports, "HTTP with SSE").

The stream is the session: its first event names the URL to post to, and the session ends with it. Deprecated since
2025-03-26, but many clients still use it.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Final
from urllib.parse import parse_qs, quote

import attrs

from trimcp.budget import owner_of
from trimcp.channel import Incoming, Link
from trimcp.framing.sse import encode_event
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.support.nurseries import server_ends
from trimcp.support.shares import Table
from trimcp.transports.http.endpoint.accept import accepts, is_compressed, is_json
from trimcp.transports.http.interfaces import Admitted, Handler, Head, HttpReply, HttpResponse, PushedSession, refusal
from trimcp.transports.http.state.sessions import Shared, new_session_id
from trimcp.transports.http.state.streams import EventStream, StreamSink
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import Request, parse, scan_id

_FLOOD: Final = 16
_ID: Final = "session_id="
_OF: Final = "."  # between the name of a process and a session of it
_ESCAPED: Final = re.compile(r"[%&+]")


@attrs.define(eq=False)
class Sse2024:
    """Admits requests to the two paths of HTTP+SSE, and keeps the open streams."""

    shared: Shared
    streams: Table[LegacyStream] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.streams = Table(what="event stream", most=self.shared.settings.max_sessions)

    def admit(self, head: Head) -> Admitted:
        """Return the handler of a request to one of the paths, or its refusal."""
        wanted = "GET" if head.path == self.shared.settings.sse_path else "POST"
        if head.method != wanted:
            return refusal(405, f"{head.method[:20]!r} is no method of this endpoint", ("Allow", wanted))
        if wanted == "POST":
            return self._post(head)
        if not accepts(head.headers.get("accept"))[1]:
            return refusal(406, "a GET is answered with text/event-stream")
        owner, draining = owner_of(head.principal, head.peer), self.shared.draining
        if draining or not self.streams.has_room(owner):
            if not draining:
                security_event("flood_refused", what="sessions", peer=head.peer, owner=owner, most=self.streams.most)
            return refusal(503, "too many sessions; try again later")
        return LegacyStream(self.shared, self.streams, head, head.principal, owner)

    def _post(self, head: Head) -> Admitted:
        if not is_json(head.headers.get("content-type")):
            return refusal(415, "the body must be application/json in UTF-8")
        if is_compressed(head.headers.get("content-encoding")):
            return refusal(415, "the body must not be compressed")
        post = self._find(head)
        if post is None:
            holder, letters = _session_id(head.query).rpartition(_OF)[0], self.shared.letters
            if letters is not None and holder and holder != letters.store.name and self.shared.forward is not None:
                return self.shared.forward(head, holder)
            return refusal(404, "there is no such session")
        if self.shared.judged_by_head:
            head.again = self._find
        return post

    def _find(self, head: Head) -> LegacyPost | None:
        stream = self.streams.find(_session_id(head.query), head.principal)
        return None if stream is None else LegacyPost(stream, head)


@attrs.define(eq=False)
class LegacyStream(Handler, StreamSink):
    """A GET: one session for as long as its stream is read, and the session's `Sink`."""

    shared: Shared
    table: Table[LegacyStream]
    head: Head
    principal: Principal | None
    owner: str
    fresh: bool = attrs.field(init=False, default=True)
    id: str = attrs.field(init=False, factory=new_session_id)  # part of the URL to post to; secret
    session: PushedSession = attrs.field(init=False)
    _stream: EventStream = attrs.field(init=False)

    @property
    def link(self) -> Link:
        return Link("HTTP+SSE", self.head.peer)

    # Called by the host

    @property
    def at_rest(self) -> bool:
        return self.session.at_rest

    @property
    def idle(self) -> bool:
        return not self.session.busy

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Make the session, and send the URL to post to."""
        shared = self.shared
        self.session = session = shared.service.open(self, self.head.holding, shared.sessions)
        self._stream = EventStream(shared.open_streams, event="message", counts=session.counts)
        if shared.letters is not None:
            self.id = f"{shared.letters.store.name}{_OF}{self.id}"
        self.table.add(self)
        place = (
            f"{quote(self.head.root or shared.settings.root.rstrip('/'))}{shared.settings.messages_path}?{_ID}{self.id}"
        )
        self._stream.open(reply, self.head.reply_headers, encode_event(place.encode(), event="endpoint"))
        self._stream.until = self.head.until
        self._stream.on_lapse = partial(self.end, "the access token has expired")

    def disconnected(self, slow: str | None = None) -> None:
        """End the session together with its stream."""
        self._stream.detach()
        self.session.disconnect(slow or "the client closed its stream", slow=slow is not None, ending=server_ends())

    def end(self, why: str, *, ending: bool = False) -> None:
        self.session.disconnect(why, ending=ending)

    def evict(self, why: str) -> None:
        self.end("there are too many sessions")

    # Called by the session

    @property
    def flooded(self) -> bool:
        """Whether so much is unread that the client has to read before it may send more requests."""
        reply = self._stream.reply
        return reply is not None and reply.waiting >= _FLOOD * self._stream.open_streams.bound

    def close(self) -> None:
        self.table.remove(self)
        self._stream.end()


@attrs.define(eq=False)
class LegacyPost(Handler):
    """A POST of a message to a session; answers are sent on its stream."""

    stream: LegacyStream
    head: Head

    @property
    def max_body(self) -> int:
        return self.stream.shared.service.max_message

    def start(self, body: bytes, reply: HttpReply) -> None:
        stream = self.stream
        if stream.flooded:
            text = "read your stream before you ask for more"
            reply.send(refusal(503, text, *self.head.reply_headers, id=scan_id(body), code=OVERLOADED))
            return
        shared = stream.shared
        message = parse(body, shared.settings.limits)
        if stream.fresh and type(message) is Request and message.method != "initialize":
            stream.table.use(stream)
        # The status first, so that a client that reads both in turn has it before the answer.
        reply.send(HttpResponse(202, self.head.reply_headers))
        shared.show("<--", message)
        stream.session.deliver((Incoming(message, len(body), None, self.head.headers, stream.principal),))

    def too_large(self, beginning: bytes) -> HttpResponse:
        return self.stream.shared.too_large(self.head, beginning)


def _session_id(query: str) -> str:
    """Return the session id in a POST's query, "" if there is none."""
    if query.startswith(_ID) and _ESCAPED.search(query) is None:
        return query[len(_ID) :]  # in the form that we sent
    return parse_qs(query).get("session_id", [""])[0]
