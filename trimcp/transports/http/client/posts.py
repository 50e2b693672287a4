"""POSTs of Streamable HTTP: requests, each until its answer, and messages that get no answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import attrs
import trio

from trimcp.channel import Incoming, Kind, Outgoing
from trimcp.framing.sse import Event
from trimcp.transports.http.client.exchanges import EVENT_STREAM, JSON_TEXT, OpenReply, TooLarge
from trimcp.transports.http.client.incoming import Cursor, message_in, read_events
from trimcp.transports.http.client.policy import PASSING, Trouble, answers, error_in
from trimcp.transports.http.client.state import SESSION, VERSION, ClientState, method_of
from trimcp.transports.targets import status_text
from trimcp.wire.codes import FORBIDDEN, INVALID_REQUEST, METHOD_NOT_FOUND
from trimcp.wire.jsonrpc import Malformed, Message, RequestId, parse
from trimcp.wire.revisions import find

_LINGER: Final = 0.5  # seconds a server has to end a stream after the answer
_MAX_ERROR: Final = 1024 * 1024
_WAITING: Final = 20_000
_WAITING_BYTES: Final = 64 * 1024 * 1024
_MAX_NOTICES: Final = 64
_MAX_BODY: Final = 64 * 1024

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class Post:
    """One request: its attempts, its streams and their resumption.

    It ends when the answer is in the inbox, or when no answer can come, which is then reported in the inbox. Cancelling
    its scope also ends it: the stream is closed and nothing is reported.

    Attributes:
        outgoing: the request.
        scope: cancel it to abandon the request.
        written: set once the request was written, or has ended.
    """

    outgoing: Outgoing
    _state: ClientState
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    written: trio.Event = attrs.field(init=False, factory=trio.Event)
    _answered: bool = attrs.field(init=False, default=False)
    _begins: str | None = attrs.field(init=False, default=None)  # the session's id, from the reply to `initialize`

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

    async def run(self) -> None:
        """Send the request and put its outcome into the inbox. Cancelling it closes the stream."""
        state = self._state
        with self.scope:
            try:
                await state.session.confirmed()
                trouble = await state.persist(self._attempt, self._next_pause, renewable=True)
            except Exception:  # a bug here or in a library, which must not end the other requests
                _log.exception("a request over HTTP crashed")
                trouble = Trouble("the request could not be sent; the log has the details")
            if trouble is not None and not self._answered:
                state.unreachable = trouble.untouched
                state.give_up(self.outgoing.request_id, trouble)
        self.written.set()

    def _next_pause(self, attempts: int, trouble: Trouble) -> float | None:
        state = self._state
        if trouble.untouched and state.unreachable:
            return None
        method = self._method
        pause = state.backoff.before_next(attempts, trouble, method, state.retry_calls and method == "tools/call")
        if pause is not None:
            _log.debug("%s is sent again in %.2f s: %s", method, pause, trouble.why)
        return pause

    # One attempt

    async def _attempt(self) -> Trouble | None:
        state, session, outgoing = self._state, self._state.session, self.outgoing
        first = not outgoing.headers and session.revision is None and self._method == "initialize"
        if first:
            session.offered(outgoing.data)
        session_id = session.id
        cursor = Cursor()
        # Only a cancellation message has to wait until its request was written.
        written = None if self.ends_with_its_stream else self.written.set
        async with state.http.open("POST", state.post_headers(outgoing), outgoing.data, written=written) as reply:
            state.unreachable = False
            trouble: Trouble | None
            if reply.status >= 300:
                trouble = await self._refused(reply, session_id)
            else:
                session.alive()
                self._begins = reply.header(SESSION) if first else None
                trouble = await self._read(reply, cursor)
        if trouble is not None:
            return await state.fall_back(trouble, outgoing) if first else trouble
        return None if self._answered else await self._resume(cursor, session_id)

    async def _read(self, reply: OpenReply, cursor: Cursor) -> Trouble | None:
        """Read a successful reply. If its stream ends without the answer, return None: it may be resumed."""
        if reply.content_type == EVENT_STREAM:
            scope, take = self._taking()
            with scope:
                await read_events(reply, cursor, self._state.inbox, take)
            return None
        if reply.content_type not in (JSON_TEXT, ""):
            what = f"the server answered with the content type {reply.content_type!r:.100}, not JSON or events"
            return Trouble(what, nonsense=True, status=reply.status)
        most = self._state.inbox.max_message
        try:
            body = await reply.body(most)
        except TooLarge:
            too_large = f"message larger than {most:,} bytes"
            await self._take(Malformed(INVALID_REQUEST, too_large, self.outgoing.request_id, "size", True), 0)
            return None
        if not body.strip():
            return Trouble(f"the server answered {status_text(reply.status)} and no result", nonsense=True)
        message = parse(body)
        if isinstance(message, Malformed):
            # The reply belongs to this request, even if its id is unreadable.
            message = attrs.evolve(message, id=self.outgoing.request_id, is_response=True, is_request=False)
        await self._take(message, len(body))
        return None if self._answered else Trouble("the server answered something else than asked", nonsense=True)

    def _taking(self) -> tuple[trio.CancelScope, Callable[[Event], Awaitable[None]]]:
        """Return a scope to read a stream in, which ends soon after the answer, and a function to take its events."""
        scope = trio.CancelScope()

        async def take(event: Event) -> None:
            message = message_in(event)
            if message is not None:
                await self._take(message, len(event.data))
                if self._answered:
                    # The server should end the stream now; an exchange that ends in order leaves its connection usable.
                    scope.deadline = min(scope.deadline, trio.current_time() + _LINGER)

        return scope, take

    async def _take(self, message: Message, size: int) -> None:
        answer = answers(message, self.outgoing.request_id)
        if answer and self._begins is not None:
            self._state.session.agreed(message, self._begins)
        await self._state.inbox.put(Incoming(message, size))
        self._answered = self._answered or answer

    async def _refused(self, reply: OpenReply, session_id: str | None) -> Trouble:
        """Return the trouble for a status above 299."""
        status = reply.status
        error = error_in(await reply.small_body(_MAX_ERROR), self.outgoing.request_id)
        after = reply.retry_after
        why = reply.refusal(error)
        if status == 404 and session_id is not None and (error is None or error.code != METHOD_NOT_FOUND):
            return Trouble(why, status=status, forgotten=session_id)
        code = None if error is None else error.code
        if status == 401 or (status == 403 and code != FORBIDDEN) or (status == 404 and code == INVALID_REQUEST):
            return Trouble(why, status=status)  # not refused by the endpoint, which would know the request
        # An error without a Retry-After is final.
        passing = status in PASSING and (error is None or after is not None)
        return Trouble(why, passing=passing, after=after, answer=error, status=status)

    async def _resume(self, cursor: Cursor, session_id: str | None) -> Trouble | None:
        """Reopen a stream that ended before the answer, as long as that brings new events."""
        state = self._state
        revision = state.session.revision
        lost = Trouble("the server's reply ended before the answer to the request", passing=True)
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


@attrs.define(eq=False)
class PostQueue:
    """The requests in progress, and those that wait for their turn.

    A waiting request costs no task. Requests are refused once 20,000 or 64 MiB of them wait. The sender never waits
    here, since its next message may be the cancellation or the answer that lets a request begin.
    """

    _nursery: trio.Nursery
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
        self._nursery.start_soon(self._run, id, post)

    async def _run(self, id: RequestId, post: Post) -> None:
        try:
            await post.run()
        finally:
            self._running.pop(id, None)  # perhaps gone: a request that is sent twice has one id
            if post.listens:
                self._listening -= 1
            elif self._waiting:
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
        for post in self._running.values():
            post.scope.cancel(reason="the channel was closed")


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
                trouble = await state.persist(lambda: self._attempt(outgoing), state.backoff.before_next, renewable)
                if trouble is not None:
                    level = logging.WARNING if outgoing.kind is Kind.REPLY else logging.DEBUG
                    _log.log(level, "%s did not reach the server: %s", what, trouble.why)
            if scope.cancelled_caught:
                _log.warning("the server did not accept %s in %g s", what, timeout)
            if confirming is not None:
                await self._confirmed()
        except Exception:  # a bug here or in a library; no caller waits for a notification
            _log.exception("%s could not be sent", what)
        finally:
            if post is not None:
                post.scope.cancel(reason="the request was cancelled")
            over.set()
            if self._last.get(outgoing.request_id) is over:
                del self._last[outgoing.request_id]
            self._under_way -= 1
            self._changed.unpark_all()
            if confirming is not None:
                confirming.set()

    async def _attempt(self, outgoing: Outgoing) -> Trouble | None:
        http, session = self._state.http, self._state.session
        session_id = session.id
        async with http.open("POST", self._state.post_headers(outgoing), outgoing.data) as reply:
            status = reply.status
            if status >= 300:
                if status == 404 and session_id is not None:
                    return Trouble(reply.refusal(), status=status, forgotten=session_id)
                # A server that refuses temporarily has not acted on the message.
                untouched, passing = status in (429, 503), status in PASSING
                return Trouble(reply.refusal(), untouched=untouched, passing=passing, after=reply.retry_after)
            session.alive()
            if reply.content_type != EVENT_STREAM:
                await reply.small_body(_MAX_BODY)  # so that its connection can be used again
            return None
