"""Handlers of requests to sessions that this process holds and another one can take over; replies to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import trio

from trimcp.channel import Outgoing
from trimcp.framing.sse import encode_event
from trimcp.principal import Principal
from trimcp.store.events import event_id, parse_event_id
from trimcp.store.letters import PostBox
from trimcp.store.shared import KeptSession, SharedStore
from trimcp.transports.http.endpoint.exchange import Exchange, SessionGet
from trimcp.transports.http.endpoint.routing import PostPlan, id_of
from trimcp.transports.http.interfaces import (
    Admitted,
    Handler,
    Head,
    HttpReply,
    HttpResponse,
    PushedSession,
    Tunnel,
    Upgrade,
    refusal,
)
from trimcp.transports.http.state.held import GatedReply, HeldSession, principal_of, read_state
from trimcp.transports.http.state.streams import SSE_HEADERS, EventStream
from trimcp.wire.codes import CANCELLED_BY_DRAIN, ERRORS, OVERLOADED
from trimcp.wire.jsonrpc import JSON, Batch, ErrorResponse, Message, Notification, Request, RequestId, Response, parse

_CHANGING: Final = frozenset(
    ("initialize", "notifications/initialized", "logging/setLevel", "resources/subscribe", "resources/unsubscribe")
)
"""The messages that change what is kept of a session."""

WINDOW: Final = 64 * 1024
"""Bytes of a response that may be under way between two processes."""


@attrs.define(eq=False)
class ToldExchange(Exchange):
    """A POST whose answer waits until the changes that this process has told of are kept for the others to read.

    So who has an answer knows that its changes reach everybody who watches, even if this process is killed now.
    """

    _late: list[tuple[int, Outgoing]] = attrs.field(init=False, factory=list)  # answers, with what each waits for

    def _answer(self, outgoing: Outgoing) -> None:
        assert self.shared.letters is not None
        queue = self.shared.letters.queue
        if queue.before_answers > queue.done:
            self._late.append((queue.before_answers, outgoing))
            queue.wait(self)
        else:
            super()._answer(outgoing)

    def go_on(self, done: int) -> bool:
        """See `QueueGate`."""
        assert self.shared.letters is not None
        late = self._late
        while late and (late[0][0] <= done or not self.shared.letters.queue.before_answers):
            super()._answer(late.pop(0)[1])
        return bool(late)


@attrs.define(eq=False)
class SharedExchange(ToldExchange):
    """A POST to a session that this process holds, or that begins here."""

    _gate: GatedReply | None = attrs.field(init=False, default=None)
    _ids: list[RequestId] = attrs.field(init=False, factory=list)
    _changes: bool = attrs.field(init=False, default=False)

    def start(self, body: bytes, reply: HttpReply) -> None:
        self._gate = gate = GatedReply(reply)
        super().start(body, gate)

    def _find_session(self, plan: PostPlan, message: Message) -> PushedSession | HttpResponse:
        found = super()._find_session(plan, message)
        session = self.session
        if isinstance(session, HeldSession) and self._gate is not None:
            self._gate.session = session
            if plan.place == "new":
                self._gate.refusal = later(id_of(message), *self.head.reply_headers)
            if type(message) is Request:  # nearly always
                self._ids, self._changes = [message.id], message.method in _CHANGING
                return found
            members = message.members if isinstance(message, Batch) else (message,)
            self._ids = [member.id for member in members if isinstance(member, Request)]
            self._changes = any(
                isinstance(member, Request | Notification) and member.method in _CHANGING for member in members
            )
        elif plan.place == "known" and not self.shared.sessions.has(self.head.headers["mcp-session-id"]):
            return later(id_of(message), ending=self.shared.draining)  # it was here when the head was read
        return found

    def become_stream(self) -> EventStream | None:
        if self._stream is not None or not isinstance(self.session, HeldSession):
            return super().become_stream()
        self.session.beginning = self._ids
        try:
            return super().become_stream()
        finally:
            self.session.beginning = None

    def _answer(self, outgoing: Outgoing) -> None:
        if self._changes and self.plan.place == "known" and isinstance(self.session, HeldSession):
            self.session.save(changed=True)
        super()._answer(outgoing)

    def _open(self, error: int | None) -> None:
        super()._open(error)
        if error is None and isinstance(self.session, HeldSession):
            self.session.save(changed=True)

    def _accept(self, message: Message, own: PushedSession | None) -> None:
        if self._changes and isinstance(self.session, HeldSession):
            self.session.save(changed=True)
        super()._accept(message, own)


@attrs.define(eq=False)
class SharedGet(SessionGet):
    """A GET of a session that this process holds."""

    def start(self, body: bytes, reply: HttpReply) -> None:
        assert isinstance(self.session, HeldSession)
        super().start(body, GatedReply(reply, self.session))


@attrs.define(eq=False)
class RemoteReply(HttpReply):
    """A response to a request that came from another process."""

    letters: PostBox
    replies: dict[tuple[str, int], RemoteReply]  # those that others wait for, by process and number
    to: str
    number: int
    handler: Handler | None = None
    gone: bool = attrs.field(init=False, default=False)
    _unread: int = attrs.field(init=False, default=0)
    _room: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def send(self, response: HttpResponse) -> None:
        self._say("send", response.body, status=response.status, headers=_listed(response.headers))
        self.end()

    def start(self, response: HttpResponse) -> None:
        self._say("start", response.body, status=response.status, headers=_listed(response.headers))

    def write(self, data: bytes) -> None:
        self._say("write", data)

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        self._say("finish", data)
        self.end()

    def abort(self) -> None:
        self._say("abort")
        self.end()

    def _say(self, kind: str, data: bytes = b"", **said: JSON) -> None:
        if self.gone:
            return
        self._unread += len(data)
        if self.letters.say(self.to, kind, data, n=self.number, **said) is None:
            self.leave("the other process takes nothing")

    @property
    def waiting(self) -> int:
        return max(0, self._unread - WINDOW)

    async def room(self) -> None:
        while self.waiting and not self.gone:
            await self._room.park()

    def taken(self, size: int) -> None:
        """Note that the client has read so much."""
        self._unread = max(0, self._unread - size)
        self._room.unpark_all()
        if not self.waiting and self.handler is not None and not self.gone:
            self.handler.writable()

    def leave(self, slow: str | None) -> None:
        """Note that the client has left, or its process has ended."""
        if not self.gone:
            self.end()
            if self.handler is not None:
                self.handler.disconnected(slow)

    def end(self) -> None:
        self.gone = True
        self.replies.pop((self.to, self.number), None)
        self._room.unpark_all()


def unread(letters: PostBox) -> HttpReply:
    """Return a reply that says nothing: its client has left, or was told already to try later."""
    reply = RemoteReply(letters, {}, "", 0)
    reply.end()
    return reply


def later(id: RequestId | None, *headers: tuple[str, str], ending: bool = False) -> HttpResponse:
    """Return the refusal of a request whose session cannot be found just now; `ending`: because this process ends."""
    if not ending:
        return refusal(503, "the session is not reachable now; try again later", *headers, id=id, code=OVERLOADED)
    data: JSON = {"reason": ERRORS[CANCELLED_BY_DRAIN].reason, "started": False}
    return refusal(503, "shutting down; not started", *headers, id=id, code=CANCELLED_BY_DRAIN, data=data)


_PARTS: Final = ("method", "path", "query", "peer", "loopback", "secure", "certificate", "root")


def written(head: Head) -> JSON:
    """Return a request's head for the process that holds its session."""
    principal = head.principal
    return {
        **{name: getattr(head, name) for name in _PARTS},
        "headers": dict(head.headers),
        "principal": None if principal is None else {**principal.facts(), "claims": dict(principal.claims)},
    }


def read_head(said: Mapping[str, Any]) -> Head:
    """Return the head that `written` wrote."""
    facts = said["principal"]
    head = Head(**{name: said[name] for name in _PARTS}, headers=said["headers"])
    head.principal = None if facts is None else Principal(**facts)
    return head


async def rest_of(store: SharedStore, kept: KeptSession, head: Head, last: str) -> HttpResponse | None:
    """Return what follows an event in a stream that has ended; None if only the session's holder can.

    The holder may have been killed a moment ago, after it ended the calls of another one that was: who waited for that
    one does not wait for a second lease.
    """
    found = parse_event_id(last)
    try:
        state = read_state(kept.data)
    except ValueError:  # of a later release
        return None
    if found is None or principal_of(state) != head.principal:
        return None
    stream, seq = found
    if stream == state["listening"] or any(stream == number for number, _ in state["calls"]):
        return None
    events = await store.after(head.headers["mcp-session-id"], stream, seq)
    body = b"".join([encode_event(data, id=event_id(stream, number)) for number, data in events])
    return HttpResponse(200, (*SSE_HEADERS, *head.reply_headers), body) if events else None


def answer(found: Admitted, body: bytes, reply: HttpReply) -> None:
    """Answer a request as its host would. What needs a connection of its own is never handed over."""
    if isinstance(found, HttpResponse):
        reply.send(found)
    elif not isinstance(found, Upgrade | Tunnel):
        reply.handler = found
        found.start(body, reply)


def is_said_once(body: bytes) -> bool:
    """Return whether a body has only what no client says again when it was refused: answers and notifications."""
    message = parse(body)
    members = message.members if isinstance(message, Batch) else (message,)
    return all(isinstance(member, Response | ErrorResponse | Notification) for member in members)


def _listed(headers: tuple[tuple[str, str], ...]) -> JSON:
    return [list(each) for each in headers]
