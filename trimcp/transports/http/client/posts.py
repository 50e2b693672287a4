"""POSTs of Streamable HTTP: requests, each until its answer, and messages that get no answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import attrs
import trio

from trimcp.channel import Incoming, Kind, Outgoing
from trimcp.framing.gathering import Gathered
from trimcp.framing.headers import VERSION
from trimcp.framing.sse import Event
from trimcp.security import security_event
from trimcp.support.cleaning import log_crash
from trimcp.transports.http.client.engine import ExchangeBroken, RawReply
from trimcp.transports.http.client.exchanges import EVENT_STREAM, JSON_TEXT, OpenReply, TooLarge
from trimcp.transports.http.client.incoming import Cursor, EventReader, message_in, read_events
from trimcp.transports.http.client.policy import PASSING, AttemptFailure, answers, error_in, in_reply_to
from trimcp.transports.http.client.pool import LINGER, PooledConnection
from trimcp.transports.http.client.state import SESSION, ClientState, method_of
from trimcp.transports.http.h1.replies import ReplyParser
from trimcp.transports.targets import status_text
from trimcp.wire.codes import CANCELLED_BY_DRAIN, FORBIDDEN, INVALID_REQUEST, OVERLOADED
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Malformed, Message, RequestId, parse
from trimcp.wire.methods import OPENING
from trimcp.wire.revisions import find

_MAX_ERROR: Final = 1024 * 1024
_WAITING: Final = 20_000
_WAITING_BYTES: Final = 64 * 1024 * 1024
_MAX_NOTICES: Final = 64
_MAX_BODY: Final = 64 * 1024

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class Post:
    """One request: its attempts, its streams and their resumption.

    It ends when the answer is in the inbox, or when no answer can come, which is then reported in the inbox.

    Usually it has no task: it is pushed (`push`), a `ClientExchange` whose reply the connection's task puts into the
    inbox. What else may happen, such as a refusal, a new attempt or a resumption, is done in a task (`run`), which goes
    on from there. It has more than 300 lines because both ways end in the same answer and each may become the other.
    """

    outgoing: Outgoing  # the request
    _state: ClientState
    request: bytes = attrs.field(init=False, default=b"", repr=False)  # its bytes, if it was pushed
    # the connection that carries it, while it is pushed
    connection: PooledConnection | None = attrs.field(init=False, default=None)
    _queue: PostQueue | None = attrs.field(init=False, default=None)
    _scope: trio.CancelScope | None = attrs.field(init=False, default=None)  # of its task
    _next: Callable[[], Awaitable[AttemptFailure | None]] | None = attrs.field(init=False, default=None)
    _written: trio.Event | None = attrs.field(init=False, default=None)
    _is_written: bool = attrs.field(init=False, default=False)
    _answered: bool = attrs.field(init=False, default=False)
    _begins: str | None = attrs.field(init=False, default=None)  # the session's id, from the reply to `initialize`
    # While its reply is pushed:
    _form: str | None = attrs.field(init=False, default=None)  # the reply's media type, once the head is known
    _session_id: str | None = attrs.field(init=False, default=None)
    _body: Gathered | None = attrs.field(init=False, default=None)
    _events: EventReader | None = attrs.field(init=False, default=None)
    _begun: RawReply | None = attrs.field(init=False, default=None)  # handed over to a task that has not taken it yet

    @property
    def _headers(self) -> Mapping[str, str]:
        return self.outgoing.headers or {}

    @property
    def _method(self) -> str:
        return self._headers.get("mcp-method") or method_of(self.outgoing.data)

    @property
    def listens(self) -> bool:
        """Whether the request lasts as long as the subscription (subscriptions/listen)."""
        return self._headers.get("mcp-method") == "subscriptions/listen"

    @property
    def ends_with_its_stream(self) -> bool:
        """Whether closing its stream cancels the request at the server, so that no cancellation is sent."""
        version = self._headers.get(VERSION)
        revision = None if version is None else find(version)
        return revision is not None and revision.disconnect_cancels

    @property
    def written(self) -> trio.Event:
        """An event that is set once the request was written, or has ended."""
        if self._written is None:
            self._written = trio.Event()
            if self._is_written:
                self._written.set()
        return self._written

    def begin(self, queue: PostQueue) -> None:
        """Send the request. `queue` is told when it has ended."""
        self._queue = queue
        try:
            pushed = self._push()
        except Exception as error:  # a bug here or in a library; `run` says what becomes of it
            self._carry_on(partial(_raised, error))
        else:
            if not pushed:
                self._carry_on(None)

    def abandon(self, reason: str) -> None:
        """End it: its stream is closed and nothing is reported."""
        if self._scope is not None:
            self._scope.cancel(reason=reason)
        elif (h1 := self._state.http.h1) is not None:
            h1.pool.withdraw(self)
            self._end()

    def _carry_on(self, following: Callable[[], Awaitable[AttemptFailure | None]] | None) -> None:
        """Go on in a task, whose first attempt is `following`; None for a whole one."""
        if self._state.over:
            self._end()
            return
        self._next, self._scope = following, trio.CancelScope()
        self._state.nursery.start_soon(self.run)

    def _end(self) -> None:
        self.sent()
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.ended(self, over=self._state.over)

    async def run(self) -> None:
        """Send the request and put its outcome into the inbox. Cancelling it closes the stream."""
        state = self._state
        assert self._scope is not None
        try:
            with self._scope:
                try:
                    await state.session.confirmed()
                    failure = await state.persist(self._attempt, self._next_pause, renewable=True)
                except Exception as error:  # a bug here or in a library, which must not end the other requests
                    log_crash(_log, error, "a request over HTTP crashed")
                    failure = AttemptFailure("the request could not be sent; the log has the details")
                if failure is not None and not self._answered:
                    state.unreachable = failure.untouched
                    state.give_up(self.outgoing.request_id, failure)
        finally:
            if self._begun is not None:
                await self._begun.abandon()
            self._end()

    def _next_pause(self, attempts: int, failure: AttemptFailure) -> float | None:
        state = self._state
        if failure.untouched and state.unreachable:
            return None
        method = self._method
        pause = state.backoff.before_next(attempts, failure, method, state.retry_calls and method == "tools/call")
        if pause is not None:
            _log.debug("%s is sent again in %.2f s: %s", method, pause, failure.why)
        return pause

    # The usual way: pushed

    def _push(self) -> bool:
        """Write the request at once; return False if something has to be done before."""
        state = self._state
        if not state.can_push(self.outgoing):
            return False
        try:
            self.request = state.post_bytes(self.outgoing)
        except ExchangeBroken:
            return False  # the attempt in the task reports it
        self._session_id = state.session.id
        assert state.http.h1 is not None
        state.http.h1.pool.begin(self)
        return True

    def sent(self) -> None:
        self._is_written = True
        if self._written is not None:
            self._written.set()

    async def arrived(self, reply: ReplyParser) -> None:
        """See `ClientExchange.arrived`: put what can be understood into the inbox."""
        if self._form is None:
            if not reply.status:
                return
            self._form = self._form_of(reply)
            if self._form == EVENT_STREAM:
                self._events = EventReader(Cursor(), self._state.inbox, self._take_event)
        if self._events is not None:
            if reply.pieces:
                chunk = b"".join(reply.pieces)
                reply.pieces.clear()
                await self._events.read(chunk)
            if self._answered and not reply.complete and self.connection is not None:
                # The server should end the stream now; an exchange that ends in order leaves its connection usable.
                self.connection.linger()
        elif self._form != JSON_TEXT:
            await self._hand_over(reply)
        else:
            body: bytes | None
            if reply.complete and self._body is None and reply.size <= self._state.inbox.max_message:
                body = b"".join(reply.pieces)
            else:
                body = await self._gather(reply)
            if body is not None and (failure := await self._read_json(body)) is not None:
                self._next = partial(_returned, failure)

    def _form_of(self, reply: ReplyParser) -> str:
        """Return the media type of a reply that can be read as it arrives, else ""."""
        state = self._state
        http = state.http
        state.unreachable = False
        http.last_code = reply.status
        if reply.cookies and http.h1 is not None:
            http.h1.note_cookies(http.place, reply.cookies)
        if reply.status != 200 or "content-encoding" in reply.headers:
            return ""
        state.session.alive()
        form = reply.content_type or JSON_TEXT
        return form if form in (JSON_TEXT, EVENT_STREAM) else ""

    async def _gather(self, reply: ReplyParser) -> bytes | None:
        """Keep a part of a JSON text; return the text once it is complete."""
        if self._body is None:
            self._body = Gathered()
        for piece in reply.pieces:
            self._body.add(piece)
        reply.pieces.clear()
        if self._body.size > self._state.inbox.max_message:
            connection = self.connection
            await self._take_too_large()
            if connection is not None:
                connection.leave(self)
                self._end()
            return None
        return self._body.take() if reply.complete else None

    async def _hand_over(self, reply: ReplyParser) -> None:
        """Let a task read a reply that needs more than to be taken."""
        http = self._state.http
        assert http.h1 is not None
        self._begun = raw = http.h1.adopt(self, http.place)
        self._carry_on(self._exchange)
        await raw.arrived(reply)

    def finished(self) -> None:
        if self._answered:
            self._end()
        else:
            cursor = Cursor() if self._events is None else self._events.cursor
            self._carry_on(self._next or partial(self._resume, cursor, self._session_id))

    def broken(self, why: str, nothing_sent: bool) -> None:
        if self._answered:
            self._end()
        elif self._events is not None:
            self._carry_on(partial(self._resume, self._events.cursor, self._session_id))
        else:
            self._carry_on(partial(_raised, ExchangeBroken(why, nothing_sent)))

    # One attempt in a task

    async def _attempt(self) -> AttemptFailure | None:
        following, self._next = self._next, None
        return await (self._exchange() if following is None else following())

    async def _exchange(self) -> AttemptFailure | None:
        """Send the request, unless its reply has begun; read the reply, and its stream again where it ends early."""
        begun, self._begun = self._begun, None
        state, session, outgoing = self._state, self._state.session, self.outgoing
        first = not outgoing.headers and session.revision is None and self._method == "initialize"
        if first:
            session.offered(outgoing.data)
        session_id = session.id if begun is None else self._session_id
        cursor = Cursor()
        headers = state.post_headers(outgoing)
        # Only a cancellation message has to wait until its request was written.
        written = None if self.ends_with_its_stream else self.sent
        async with state.http.open("POST", headers, outgoing.data, written=written, begun=begun) as reply:
            state.unreachable = False
            failure: AttemptFailure | None
            if reply.status >= 300:
                failure = await self._refused(reply, session_id)
            else:
                session.alive()
                self._begins = reply.header(SESSION) if first else None
                failure = await self._read(reply, cursor)
        if failure is not None:
            return await state.fall_back(failure, outgoing) if first else failure
        return None if self._answered else await self._resume(cursor, session_id)

    async def _read(self, reply: OpenReply, cursor: Cursor) -> AttemptFailure | None:
        """Read a successful reply. If its stream ends without the answer, return None: it may be resumed."""
        if reply.content_type == EVENT_STREAM:
            scope, take = self._taking()
            with scope:
                await read_events(reply, cursor, self._state.inbox, take)
            return None
        if reply.content_type not in (JSON_TEXT, ""):
            what = f"{reply.refusal()} with the content type {reply.content_type!r:.100}, not JSON or events"
            return AttemptFailure(what, nonsense=True, status=reply.status)
        try:
            body = await reply.body(self._state.inbox.max_message)
        except TooLarge:
            await self._take_too_large()
            return None
        return await self._read_json(body, reply.status)

    async def _read_json(self, body: bytes, status: int = 200) -> AttemptFailure | None:
        """Take a JSON text; return why it is no answer, or None."""
        if not body.strip():
            return AttemptFailure(f"the server answered {status_text(status)} and no result", nonsense=True)
        message = parse(body)
        if isinstance(message, Malformed):
            # The reply belongs to this request, even if its id is unreadable.
            id, named, marked = self.outgoing.request_id, message.request_id, message.marked
            message = Malformed(
                message.code, message.message, id, message.reason, True, request_id=named, marked=marked
            )
        await self._take(message, len(body))
        return (
            None if self._answered else AttemptFailure("the server answered something else than asked", nonsense=True)
        )

    async def _take_too_large(self) -> None:
        why = f"message larger than {self._state.inbox.max_message:,} bytes"
        await self._take(Malformed(INVALID_REQUEST, why, self.outgoing.request_id, "size", True), 0)

    def _taking(self) -> tuple[trio.CancelScope, Callable[[Event], Awaitable[None]]]:
        """Return a scope to read a stream in, which ends soon after the answer, and a function to take its events."""
        scope = trio.CancelScope()

        async def take(event: Event) -> None:
            await self._take_event(event)
            if self._answered:
                # As for a reply that is pushed.
                scope.deadline = min(scope.deadline, trio.current_time() + LINGER)

        return scope, take

    async def _take_event(self, event: Event) -> None:
        message = message_in(event)
        if message is not None:
            await self._take(message, len(event.data))

    async def _take(self, message: Message, size: int) -> None:
        inbox = self._state.inbox
        answer = answers(message, self.outgoing.request_id)
        if not answer or isinstance(message, Batch):
            kept = in_reply_to(message, self.outgoing.request_id)
            if kept is not message:
                security_event("server_garbage", why="an answer to another request than the one that was sent")
            if kept is None:
                return
            message = kept
        if answer and self._begins is not None:
            self._state.session.agreed(message, self._begins)
        if self._scope is None and not inbox.full:
            inbox.post(Incoming(message, size))
        else:
            await inbox.put(Incoming(message, size))
        self._answered = self._answered or answer

    async def _refused(self, reply: OpenReply, session_id: str | None) -> AttemptFailure:
        """Return the failure for a status above 299."""
        state, status = self._state, reply.status
        body = await reply.small_body(_MAX_ERROR)
        error = error_in(body, self.outgoing.request_id)
        after = reply.retry_after
        why = reply.refusal(error, body)
        answered = answers(parse(body), self.outgoing.request_id) and b"session" not in body.lower()
        forgotten = state.session.forgotten(session_id, status, error, answered=answered)
        if forgotten is not None:
            return AttemptFailure(why, status=status, forgotten=forgotten)
        code = None if error is None else error.code
        by_another = (status == 403 and code != FORBIDDEN) or (status in (404, 405) and code == INVALID_REQUEST)
        if by_another or status in (401, 426):
            return AttemptFailure(why, status=status)  # not refused by the endpoint, which would know the request
        # An error without a Retry-After is final.
        passing = status in PASSING and (error is None or after is not None)
        busy = status in (429, 503)
        if error is None and busy and self._method not in OPENING:
            data = {"reason": "overloaded", **({} if after is None else {"retryAfter": after})}
            error = ErrorResponse(self.outgoing.request_id, OVERLOADED, why, data)
        # A server that was too busy for the handshake has begun nothing; one that ends says what it has not begun.
        said = None if error is None else error.data
        unbegun = code == CANCELLED_BY_DRAIN and isinstance(said, dict) and said.get("started") is False
        untouched = passing and busy and (unbegun or self._method == "initialize")
        return AttemptFailure(why, untouched=untouched, passing=passing, after=after, answer=error, status=status)

    async def _resume(self, cursor: Cursor, session_id: str | None) -> AttemptFailure | None:
        """Reopen a stream that ended before the answer, as long as that brings new events."""
        state = self._state
        revision = state.session.revision
        lost = AttemptFailure("the server's reply ended before the answer to the request", passing=True)
        if self._headers or revision is None or not revision.resumable or not cursor.header:
            return lost

        async def read() -> bool:
            nonlocal lost
            if state.session.id != session_id:
                return False  # the new session does not have this stream
            scope, take = self._taking()
            with scope:
                refused = await state.read_stream(cursor, take)
                if refused is not None and not refused.passing:
                    lost = attrs.evolve(lost, why=f"{lost.why}, and {refused.why}")
                    return False
            return not self._answered and bool(cursor.header)

        await state.read_again(cursor, read, ended=True, most=state.backoff.retries)
        return None if self._answered else lost


async def _returned(failure: AttemptFailure) -> AttemptFailure:
    return failure


async def _raised(error: Exception) -> AttemptFailure:
    raise error


@attrs.define(eq=False)
class PostQueue:
    """The requests in progress, and those that wait for their turn.

    A waiting request costs no task, and one under way usually none either. Requests are refused once 20,000 or 64 MiB
    of them wait. The sender never waits here, since its next message may be the cancellation or the answer that lets a
    request begin.
    """

    _most: int
    _running: dict[RequestId, Post] = attrs.field(init=False, factory=dict)
    _waiting: dict[RequestId, Post] = attrs.field(init=False, factory=dict)
    _waiting_bytes: int = attrs.field(init=False, default=0)
    _listening: int = attrs.field(init=False, default=0)

    def submit(self, post: Post) -> bool:
        """Run a request now or in its turn; return False if too many wait already."""
        id = post.outgoing.request_id
        assert id is not None
        if post.listens:
            self._listening += 1  # it lasts long, so it must not use up the turn of another request
            self._start(id, post)
        elif len(self._running) - self._listening < self._most:
            self._start(id, post)
        elif len(self._waiting) < _WAITING and self._waiting_bytes < _WAITING_BYTES:
            self._waiting[id] = post
            self._waiting_bytes += len(post.outgoing.data)
        else:
            return False
        return True

    def _start(self, id: RequestId, post: Post) -> None:
        self._running[id] = post
        post.begin(self)

    def ended(self, post: Post, *, over: bool) -> None:
        """Begin the next request in place of one that has ended, unless everything is over."""
        id = post.outgoing.request_id
        assert id is not None
        if self._running.get(id) is post:  # else the id was used again
            del self._running[id]
        if post.listens:
            self._listening -= 1
        elif self._waiting and not over:
            following = next(iter(self._waiting))
            self._start(following, self._take(following))

    def _take(self, id: RequestId) -> Post:
        post = self._waiting.pop(id)
        self._waiting_bytes -= len(post.outgoing.data)
        return post

    def withdraw(self, id: RequestId) -> Post | None:
        """Drop a waiting request; return it instead if it is in progress; None otherwise."""
        if id in self._waiting:
            self._take(id)
            return None
        return self._running.get(id)

    def close(self) -> None:
        """Abandon all requests."""
        self._waiting.clear()
        for post in list(self._running.values()):
            post.abandon("the channel was closed")


@attrs.define(eq=False)
class Notices:
    """Sends messages without an answer, at most 64 at a time, each in a task.

    `confirmed` is called once the server has accepted `notifications/initialized`.
    """

    _state: ClientState
    _confirmed: Callable[[], Awaitable[object]]
    _under_way: int = attrs.field(init=False, default=0)
    _last: dict[RequestId | None, trio.Event] = attrs.field(init=False, factory=dict)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def send(self, outgoing: Outgoing) -> None:
        """Begin to send a notification or an answer, once fewer than 64 are being sent.

        This waits only for the server to accept messages, not for calls.
        """
        while self._under_way >= _MAX_NOTICES:
            await self._changed.park()
        if self._state.over:
            raise trio.BrokenResourceError("the connection is being ended")
        self._start(outgoing, None)

    def cancel(self, outgoing: Outgoing, post: Post) -> None:
        """Begin to send the cancellation of a request, after the request itself; then its stream is closed."""
        self._start(outgoing, post)

    async def idle(self) -> None:
        """Wait until none is being sent."""
        while self._under_way:
            await self._changed.park()

    def _start(self, outgoing: Outgoing, post: Post | None) -> None:
        key, over = outgoing.request_id, trio.Event()
        first = [] if post is None else [post.written]
        if key in self._last:
            first.append(self._last[key])
        self._last[key] = over
        self._under_way += 1
        session = self._state.session
        confirms = outgoing.kind is Kind.NOTIFICATION and session.is_confirmation(outgoing)
        confirming = session.confirming if confirms else None
        self._state.nursery.start_soon(self._run, outgoing, post, first, over, confirming)

    async def _run(
        self,
        outgoing: Outgoing,
        post: Post | None,
        first: list[trio.Event],
        over: trio.Event,
        confirming: trio.Event | None,
    ) -> None:
        """Send a message once all of `first` are set. Then set `over`, and abandon the request it cancels, if any."""
        state, timeout = self._state, self._state.timeouts.notice
        what = "an answer of ours" if outgoing.kind is Kind.REPLY else f"a {outgoing.kind.value} of ours"
        try:
            for event in first:
                await event.wait()
            with trio.move_on_after(timeout) as scope:
                # An answer or a cancellation means nothing in another session.
                renewable = outgoing.kind is Kind.NOTIFICATION
                # An answer counts once, however often it arrives.
                pause = partial(state.backoff.before_next, repeatable=outgoing.kind is Kind.REPLY)
                failure = await state.persist(lambda: self._attempt(outgoing), pause, renewable)
                if failure is not None:
                    level = logging.WARNING if outgoing.kind is Kind.REPLY else logging.DEBUG
                    _log.log(level, "%s did not reach the server: %s", what, failure.why)
            if scope.cancelled_caught:
                _log.warning("the server did not accept %s in %g s", what, timeout)
            if confirming is not None:
                await self._confirmed()
        except Exception as error:  # a bug here or in a library; no caller waits for a notification
            log_crash(_log, error, "%s could not be sent", what)
        finally:
            if post is not None:
                post.abandon("the request was cancelled")
            over.set()
            if self._last.get(outgoing.request_id) is over:
                del self._last[outgoing.request_id]
            self._under_way -= 1
            self._changed.unpark_all()
            if confirming is not None:
                confirming.set()

    async def _attempt(self, outgoing: Outgoing) -> AttemptFailure | None:
        http, session = self._state.http, self._state.session
        session_id = session.id
        async with http.open("POST", self._state.post_headers(outgoing), outgoing.data) as reply:
            status = reply.status
            if status >= 300:
                forgotten = self._state.session.forgotten(session_id, status)
                if forgotten is not None:
                    return AttemptFailure(reply.refusal(), status=status, forgotten=forgotten)
                # A server that refuses temporarily has not acted on the message.
                untouched, passing = status in (429, 503), status in PASSING
                return AttemptFailure(reply.refusal(), untouched=untouched, passing=passing, after=reply.retry_after)
            session.alive()
            if reply.content_type != EVENT_STREAM:
                await reply.small_body(_MAX_BODY)  # so that its connection can be used again
            return None
