"""Shared by all messages and streams of one channel: a legacy session, sending again, and reopening streams.

The MCP session sends its `initialize` and `notifications/initialized` through here and knows no session ids: those
belong to the transport (2025-11-25 basic/transports, "Session Management"). The modern era has none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import attrs
import orjson
import trio

from trimcp.channel import Incoming, Outgoing
from trimcp.framing.headers import VERSION
from trimcp.framing.sse import Event
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import (
    EVENT_STREAM,
    JSON_TEXT,
    Http,
    NotAuthorized,
    OpenReply,
    TooLarge,
)
from trimcp.transports.http.client.h1 import checked_lines, whole_request
from trimcp.transports.http.client.incoming import Cursor, Inbox, message_in, read_events
from trimcp.transports.http.client.policy import PASSING, AttemptFailure, Backoff, Timeouts
from trimcp.wire.codes import INVALID_REQUEST, METHOD_NOT_FOUND
from trimcp.wire.jsonrpc import ErrorResponse, Lost, Malformed, Message, RequestId, Response, encode, parse
from trimcp.wire.revisions import Revision, find

SESSION: Final = "mcp-session-id"
ACCEPT: Final = {"accept": f"{JSON_TEXT}, {EVENT_STREAM}", "content-type": JSON_TEXT}
"""The headers of every POST."""

LISTEN: Final = {"accept": EVENT_STREAM, "accept-encoding": "identity"}
"""The headers of every GET: compressing servers tend to delay the events of a stream."""

_LONGEST_SESSION_ID: Final = 1024
_TOO_SOON: Final = 5.0

_MOST_HEADS: Final = 64  # sets of names that the headers of messages have

_BRIEF: Final = 1.0  # seconds; a stream that ends sooner counts as cut short, even if it brought events
_MOST_BRIEF: Final = 2  # if it brought events, pauses grow to a second and no further

_log = logging.getLogger("trimcp.http")

FallBack: TypeAlias = Callable[[AttemptFailure, Outgoing], Awaitable[AttemptFailure | None]]


@attrs.define(eq=False)
class LegacySession:
    """The state of one client's legacy session, if there is one."""

    _http: Http
    _inbox: Inbox
    _timeout: float  # seconds for a new handshake
    _renewed: Callable[[], object]  # called when a new session has replaced a forgotten one
    revision: Revision | None = attrs.field(init=False, default=None)  # the agreed revision, None before the handshake
    id: str | None = attrs.field(init=False, default=None, repr=False)  # the session's id, None without one
    # set once the server has accepted `notifications/initialized`; None before that was sent
    confirming: trio.Event | None = attrs.field(init=False, default=None)
    _offer: bytes = attrs.field(init=False, default=b"", repr=False)
    _confirmation: bytes = attrs.field(init=False, default=b"", repr=False)
    _tried_at: float | None = attrs.field(init=False, default=None)
    _failure: AttemptFailure | None = attrs.field(init=False, default=None)
    _tried: int = attrs.field(init=False, default=0)
    _worked: bool = attrs.field(init=False, default=False)  # since it was begun
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    def headers(self) -> dict[str, str]:
        """Return the headers of every request after the handshake."""
        return self._headers(self.id)

    def _headers(self, id: str | None) -> dict[str, str]:
        headers = {}
        if self.revision is not None and self.revision.version_header:
            headers[VERSION] = self.revision.name
        if id is not None:
            headers[SESSION] = id
        return headers

    def offered(self, offer: bytes) -> None:
        """Note the `initialize` that is being sent, which resets what was agreed on before."""
        self.revision = self.id = self.confirming = None
        self._worked = False
        self._offer = offer

    def agreed(self, answer: Message, id: str) -> None:
        """Note the server's answer to `initialize`, and the session id in the head of its reply ("" for none)."""
        if isinstance(answer, Response):
            version = answer.result.get("protocolVersion")
            self.revision = find(version) if isinstance(version, str) else None
            self.id = _checked(id)

    def is_confirmation(self, outgoing: Outgoing) -> bool:
        """Return whether this is `notifications/initialized`, and keep it to send it again."""
        if self.revision is None or self.confirming is not None:
            return False
        if method_of(outgoing.data) != "notifications/initialized":
            return False
        self._confirmation = outgoing.data
        self.confirming = trio.Event()
        return True

    async def confirmed(self) -> None:
        """Wait while `notifications/initialized` is being sent: the server would refuse earlier requests."""
        if self.confirming is not None:
            await self.confirming.wait()

    def alive(self) -> None:
        """Note that the server knows the session."""
        self._tried_at = None
        self._worked = self.id is not None

    def forgotten(
        self, id: str | None, status: int, error: ErrorResponse | None = None, *, answered: bool = False
    ) -> str | None:
        """Return the id of the session of a request if the status of its reply means that the server forgot it.

        404 means that (basic/transports, "Session Management"). Many servers say 400, 401 or 410, which is taken for it
        in a session that had worked, but for a 400 with an error that answers the request itself (`answered`).
        """
        if status == 404:
            return None if error is not None and error.code == METHOD_NOT_FOUND else id
        told = status in (401, 410) or (status == 400 and not answered)
        return id if told and self._worked and self.id == id else None

    async def renew(self, stale: str) -> AttemptFailure | None:
        """Begin a new session in place of `stale`, which the server has forgotten, unless another task has done so.

        However many requests find the session lost, one handshake is made. If the new session is forgotten too before
        any answer in it, no further one is made soon. After a temporary failure, as during a restart of the server, the
        next request may try at once. Returns why there is no new session, or None if there is one.
        """
        tried = self._tried
        async with self._lock:
            if self.id != stale:
                return None if self.id is not None else AttemptFailure("the session has ended")
            if self._failure is not None and self._tried != tried:
                return self._failure  # another task has tried while this one waited for the lock
            if self._tried_at is not None and trio.current_time() - self._tried_at < _TOO_SOON:
                return self._failure or AttemptFailure(
                    "the server forgot the session again, right after it was begun anew"
                )
            self._failure = await self._try()
            self._tried += 1
            # After a temporary refusal, or if no server was found, the next attempt need not wait.
            self._tried_at = None if self._failure is not None and self._failure.passing else trio.current_time()
            if self._failure is None:
                _log.debug("the server forgot the session; a new one was begun")
                self._renewed()
            return self._failure

    async def _try(self) -> AttemptFailure | None:
        """Do the handshake within the timeout; return why it failed, or None."""
        failure = "the server forgot the session, and a new one could not be begun"
        try:
            with trio.fail_after(self._timeout):
                refused = await self._shake_hands()
        except ExchangeBroken as broken:
            return AttemptFailure(f"{failure}: {broken}", untouched=broken.nothing_sent, passing=broken.nothing_sent)
        except TooLarge:
            return AttemptFailure(f"{failure}: the server's answer is too large")
        except trio.TooSlowError:
            return AttemptFailure(f"{failure}: it took too long")
        return None if refused is None else attrs.evolve(refused, why=f"{failure}: {refused.why}")

    async def _shake_hands(self) -> AttemptFailure | None:
        """Begin a new session; return why the server refused it, or None."""
        request = f"again-{self._tried}"  # the session's own ids are integers
        offer = encode({**orjson.loads(self._offer), "id": request})
        async with self._http.open("POST", ACCEPT, offer) as reply:
            if reply.status >= 300:
                return self._refused(reply)
            answer = await self._answer(reply, request)
            id = _checked(reply.header(SESSION))
        if not isinstance(answer, Response):
            return AttemptFailure("initialize was not answered")
        assert self.revision is not None
        if answer.result.get("protocolVersion") != self.revision.name:
            return AttemptFailure(f"the server no longer speaks {self.revision.name}")
        async with self._http.open("POST", {**ACCEPT, **self._headers(id)}, self._confirmation) as reply:
            if reply.status >= 300:
                return self._refused(reply)
        self.id, self._worked = id, False
        return None

    def _refused(self, reply: OpenReply) -> AttemptFailure:
        later = reply.status in PASSING
        return AttemptFailure(reply.refusal(), untouched=later, passing=later, after=reply.retry_after)

    async def _answer(self, reply: OpenReply, id: str) -> Message | None:
        """Return the answer to `initialize`, from JSON or from a stream; other messages of the stream are ignored."""
        if reply.content_type != EVENT_STREAM:
            return parse(await reply.body(self._inbox.max_message))
        found: list[Message] = []
        scope = trio.CancelScope()

        async def take(event: Event) -> None:
            message = message_in(event)
            if isinstance(message, Response | ErrorResponse) and message.id == id:
                found.append(message)
                scope.cancel(reason="the answer is there")

        with scope:
            await read_events(reply, Cursor(), self._inbox, take)
        return found[0] if found else None


@attrs.define(eq=False)
class ClientState:
    """Shared by the requests, notifications and streams of one channel."""

    http: Http
    inbox: Inbox
    session: LegacySession
    nursery: trio.Nursery
    timeouts: Timeouts
    backoff: Backoff
    retry_calls: bool  # whether tools may be called twice
    # tries `initialize` over the older transport after failure with the newer; returns None on success
    fall_back: FallBack
    # whether the last request could not be sent in all its attempts; then the next ones make one each
    unreachable: bool = False
    last_failure: str | None = None  # why the last unanswered request got no answer; None if nothing is known
    over: bool = False  # whether the channel's tasks are being ended, so that nothing more can be sent
    _heads: dict[tuple[str, ...], bytes] = attrs.field(init=False, factory=dict, repr=False)
    _heads_of: tuple[object, ...] = attrs.field(init=False, default=(), repr=False)

    def post_headers(self, outgoing: Outgoing) -> dict[str, str]:
        """Return the headers of the POST that carries a message."""
        return {**ACCEPT, **self.session.headers(), **(outgoing.headers or {})}

    def can_push(self, outgoing: Outgoing) -> bool:
        """Return whether nothing has to be done before a request is written to a connection of our own."""
        confirming = self.session.confirming
        if self.http.h1 is None or (confirming is not None and not confirming.is_set()):
            return False
        return self.session.revision is not None or bool(outgoing.headers)  # else it is perhaps `initialize`

    def post_bytes(self, outgoing: Outgoing) -> bytes:
        """Return the POST that carries a message, head and body. What its head shares with others is made once.

        Raises ExchangeBroken: a header cannot be sent.
        """
        http, session, own = self.http, self.session, outgoing.headers or {}
        heads_of = (http.place, session.id, session.revision)
        if heads_of != self._heads_of or len(self._heads) > _MOST_HEADS:
            self._heads_of = heads_of
            self._heads.clear()
        names = tuple(own)
        head = self._heads.get(names)
        if head is None:
            shared = {name: value for name, value in {**ACCEPT, **session.headers()}.items() if name not in own}
            head = self._heads[names] = http.head("POST", shared, without=own)
        lines = "".join([f"{name}: {value}\r\n" for name, value in own.items()])
        return whole_request(head + checked_lines(lines, len(names)) + http.cookie_line(), outgoing.data)

    async def persist(
        self,
        attempt: Callable[[], Awaitable[AttemptFailure | None]],
        next_pause: Callable[[int, AttemptFailure], float | None],
        renewable: bool = False,
    ) -> AttemptFailure | None:
        """Make attempts until one succeeds; return the outcome of the last one if no other follows.

        `attempt` returns why it failed or None, or raises `ExchangeBroken`. `next_pause` takes the number of attempts
        and the last outcome, and returns the seconds before the next attempt, None for no other. `renewable`: begin a
        new session, once, if the server has forgotten this one.
        """
        attempts = 0
        while True:
            try:
                failure = await attempt()
            except ExchangeBroken as broken:
                unauthorized = broken.code if isinstance(broken, NotAuthorized) else None
                passing = unauthorized is None
                failure = AttemptFailure(
                    broken.why, untouched=broken.nothing_sent, passing=passing, authorization=unauthorized
                )
            if failure is None:
                return None
            if renewable and failure.forgotten is not None:
                failure = await self.session.renew(failure.forgotten)
                if failure is None:
                    renewable = False
                    continue
            pause = next_pause(attempts, failure)
            if pause is None:
                return failure
            await trio.sleep(pause)
            attempts += 1

    def give_up(self, id: RequestId | None, failure: AttemptFailure) -> None:
        """Put the failure of a request into the inbox, in place of its answer."""
        self.last_failure = failure.why
        message: Message = Lost(id, failure.why, failure.authorization, failure.untouched)
        if failure.answer is not None:
            message = failure.answer
        elif failure.nonsense:
            message = Malformed(INVALID_REQUEST, failure.why, id, "shape", is_response=True)
        self.inbox.post(Incoming(message))

    async def read_stream(
        self,
        cursor: Cursor,
        take: Callable[[Event], Awaitable[object]],
        written: Callable[[], object] | None = None,
    ) -> AttemptFailure | None:
        """Open a stream with GET at `cursor`, and pass its events to `take`; return why it was not opened, or None."""
        headers = {**LISTEN, **self.session.headers(), **cursor.header}
        async with self.http.open("GET", headers, written=written) as reply:
            if reply.status == 200 and reply.content_type == EVENT_STREAM:
                await read_events(reply, cursor, self.inbox, take)
                return None
            return AttemptFailure(reply.refusal(), passing=reply.status in PASSING, status=reply.status)

    async def read_again(
        self,
        cursor: Cursor,
        read: Callable[[], Awaitable[bool]],
        *,
        ended: bool = False,
        least: float = 0.0,
        most: float = math.inf,
    ) -> None:
        """Open a stream and read it to its end, again and again with pauses in between, until `read` returns False.

        `ended`: it was open before, so a pause comes first. `least`: seconds of the shortest pause. `most`: streams in
        a row without an event, after which this ends.
        """
        failures = brief = 0
        while True:
            if ended:
                own = self.backoff.pause(max(failures, brief))
                await trio.sleep(max(least, own, cursor.retry or 0.0))
            cursor.moved = False
            began = trio.current_time()
            try:
                if not await read():
                    return
            except ExchangeBroken as broken:
                _log.debug("a stream could not be opened: %s", broken.why)
            ended = True
            failures = 0 if cursor.moved else failures + 1
            if failures > most:
                return
            brief = 0 if trio.current_time() - began >= _BRIEF else min(brief + 1, _MOST_BRIEF)


def method_of(data: bytes) -> str:
    """Return the method of an encoded message of ours, or "" if it has none."""
    message: dict[str, Any] = orjson.loads(data)
    method = message.get("method", "")
    return method if isinstance(method, str) else ""


def _checked(id: str) -> str | None:
    """Return a valid session id (visible ASCII), else None: no other text may be sent in a header."""
    visible = id.isascii() and id.isprintable() and " " not in id
    return id if id and visible and len(id) <= _LONGEST_SESSION_ID else None
