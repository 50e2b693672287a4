"""A client's channel to one server over HTTP: sends each message, receives, and ends the session.

With Streamable HTTP there is no connection: each request is a separate exchange, and a failed one affects no other.
With HTTP+SSE (2024-11-05), which a channel may choose during the handshake, the stream is the connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import attrs
import trio

from trimcp.channel import HttpClientStatistics, Incoming, Kind, MessageChannel, OneTask, Outgoing
from trimcp.support.cleaning import log_crash
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import Http
from trimcp.transports.http.client.incoming import Cursor, Inbox
from trimcp.transports.http.client.policy import AttemptFailure, Backoff, Mode, Timeouts
from trimcp.transports.http.client.posts import Notices, Post, PostQueue
from trimcp.transports.http.client.sse2024 import SseConnection
from trimcp.transports.http.client.state import ClientState, LegacySession
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import ErrorResponse, Lost

_LEAST_PAUSE: Final = 1.0
_BUSY: Final = 409  # some servers have not yet noticed the end of the previous stream
# 2026-07-28 "Backward Compatibility": the status of an HTTP+SSE server's reply to a POST
_OLDER: Final = (400, 404, 405)

_log = logging.getLogger("trimcp.http")


class HttpChannel(MessageChannel):
    """The channel to one server over HTTP.

    A request without an answer is received as `Lost` with its id. `Lost` without an id means that the server forgot the
    session.
    """

    mirrors_headers = True
    sends_now = True
    half_open = False  # when the stream ends, the server accepts no more answers

    def __init__(
        self,
        http: Http,
        nursery: trio.Nursery,
        mode: Mode,
        timeouts: Timeouts,
        backoff: Backoff,
        retry_calls: bool,
        max_posts: int,
    ) -> None:
        self.http = http
        self._mode = mode
        self._inbox = Inbox()
        self._listening: GetStream | None = None
        self._events: SseConnection | None = None
        self._sending = OneTask("sending on")
        self._closed = False
        session = LegacySession(http, self._inbox, timeouts.notice, self._renewed)
        self._state = ClientState(http, self._inbox, session, nursery, timeouts, backoff, retry_calls, self._fall_back)
        self._posts = PostQueue(max_posts)
        self._notices = Notices(self._state, self._listen)
        if mode == "sse":
            self._events = SseConnection(self._state)
            nursery.start_soon(self._read_events, self._events)

    def set_user_interaction(self, person: Callable[[], AbstractContextManager[None]]) -> None:
        if self.http.authorizer is not None:
            self.http.authorizer.person = person

    def set_max_message(self, size: int) -> None:
        self._inbox.max_message = size

    @property
    def speaks_sse(self) -> bool:
        """Whether the HTTP+SSE of 2024-11-05 is spoken, by `mode` or after the fallback."""
        return self._events is not None

    # The MessageChannel

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Begin to send every message of the batch; see `MessageChannel.send`.

        Requests never wait here: they have a bounded queue, and a request that finds it full gets an error at once. The
        server chooses the order in which it handles messages that do not wait for each other's answer, except over
        HTTP+SSE. A message that does not reach the server affects no other.
        """
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            for outgoing in batch:
                await self._send(outgoing)
                self._check_open()
            await trio.lowlevel.cancel_shielded_checkpoint()

    async def _send(self, outgoing: Outgoing) -> None:
        if self._events is not None:
            await self._events.send(outgoing)
        elif outgoing.kind is Kind.REQUEST:
            if not self._posts.submit(Post(outgoing, self._state)):
                refused = ErrorResponse(outgoing.request_id, OVERLOADED, "too many requests wait; nothing was sent")
                self._inbox.post(Incoming(refused))
        elif outgoing.kind is Kind.CANCEL:
            assert outgoing.request_id is not None
            post = self._posts.withdraw(outgoing.request_id)
            if post is not None and post.ends_with_its_stream:
                post.abandon("the request was cancelled")
            elif post is not None:
                self._notices.cancel(outgoing, post)
        else:
            await self._notices.send(outgoing)

    def send_nowait(self, outgoing: Outgoing) -> Outgoing | None:
        """Write a request on an idle connection; all else is left to `send`, whose tasks belong to no caller."""
        h1 = self.http.h1
        if outgoing.kind is not Kind.REQUEST or h1 is None or not h1.pool.begins_at_once:
            return outgoing
        if self._events is not None or self._closed or self._state.over:
            return outgoing
        pushed = self._state.can_push(outgoing) and self._posts.submit(Post(outgoing, self._state))
        return None if pushed else outgoing

    async def receive(self) -> Sequence[Incoming]:
        return await self._inbox.receive()

    async def aclose(self) -> None:
        """Cancel all requests and end the session at the server; see `MessageChannel.aclose`.

        Messages being sent (above all cancellations) and the DELETE of the session get `timeouts.close` seconds, also
        when cancelled: a session that is not ended uses the server's memory, and its calls go on.
        """
        if not self._closed:
            self._closed = True
            self._inbox.close()
            # The bounded last close.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + self._state.timeouts.close):
                await self._notices.idle()
                if self._listening is not None:
                    self._listening.scope.cancel(reason="the channel was closed")
                self._posts.close()
                await self._end_session()
            self._state.nursery.cancel_scope.cancel(reason="the channel was closed")
        await trio.lowlevel.checkpoint()

    async def wait_peer_closed(self) -> None:
        """Wait until the server has ended the stream of HTTP+SSE; see `MessageChannel.wait_peer_closed`."""
        if self._events is None:
            await trio.sleep_forever()
        else:
            await self._events.wait_peer_closed()
            self._state.last_failure = self._events.why or "the server ended its event stream"

    def write_progress(self) -> Hashable:
        """Return a new value: each request has time limits of its own (`Timeouts.write`, `Timeouts.notice`)."""
        return object()

    def http_statistics(self) -> HttpClientStatistics:
        return self.http.statistics()

    def close_reason(self) -> str | None:
        """Return the last failure or the server's last status, for an error message; None if neither is known."""
        if self._state.last_failure is not None or self.http.last_status is None:
            return self._state.last_failure
        return f"the server last answered {self.http.last_status}"

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")
        if self._state.over:
            raise trio.BrokenResourceError("the connection is being ended")

    def end(self) -> None:
        """Send nothing more: the channel's tasks are being ended."""
        self._state.over = True

    def let_go(self) -> None:
        """Break the reference cycles of this channel, so that no garbage collection is needed."""
        del self._notices, self._state.session, self._state.fall_back

    # Called by requests and streams

    def _renewed(self) -> None:
        """Report that a new session replaced a forgotten one, whose state at the server is lost."""
        self._inbox.post(Incoming(Lost(None, "the server forgot the session; a new one was begun")))
        self._start_listening()

    async def _listen(self) -> None:
        """Open the stream for messages that belong to no request, before requests are sent."""
        listener = self._start_listening()
        with trio.move_on_after(self._state.timeouts.connect):
            await listener.written.wait()

    def _start_listening(self) -> GetStream:
        if self._listening is not None:
            self._listening.scope.cancel(reason="another session has taken the place of this one")
        self._listening = GetStream(self._state)
        self._state.nursery.start_soon(self._listening.run)
        return self._listening

    async def _end_session(self) -> None:
        session = self._state.session
        if session.id is None:
            return
        try:
            async with self.http.open("DELETE", session.headers()) as reply:
                _log.debug("the session was ended (status %d)", reply.status)
        except ExchangeBroken as broken:
            _log.debug("the session could not be ended: %s", broken.why)

    # HTTP+SSE

    async def _fall_back(self, failure: AttemptFailure, offer: Outgoing) -> AttemptFailure | None:
        """Try `initialize` over HTTP+SSE after `failure` with Streamable HTTP; return None on success."""
        if self._mode != "auto" or failure.status not in _OLDER:
            return failure
        # 405 means an endpoint without POST, whatever its body
        if failure.answer is not None and failure.status != 405:
            return failure
        events = SseConnection(self._state)
        self._state.nursery.start_soon(self._read_events, events)
        await events.known.wait()
        if not events.open:
            return attrs.evolve(failure, why=f"{failure.why}, and does not speak HTTP+SSE either: {events.why}")
        self._events = events
        try:
            await events.send(offer)
        except trio.BrokenResourceError as error:
            return attrs.evolve(failure, why=str(error))
        return None

    async def _read_events(self, events: SseConnection) -> None:
        await events.run()
        if events is self._events:
            self._state.last_failure = events.why  # the session logs it
            self._inbox.end()


@attrs.define(eq=False)
class GetStream:
    """One session's stream for messages that belong to no request."""

    _state: ClientState
    # cancel it to close the stream for good
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    # set once the first GET was written, or has failed
    written: trio.Event = attrs.field(init=False, factory=trio.Event)
    _cursor: Cursor = attrs.field(init=False, factory=Cursor)
    _opened: bool = attrs.field(init=False, default=False)

    async def run(self) -> None:
        """Listen until the session ends or the server refuses a stream. Cancelling it closes the stream."""
        with self.scope:
            try:
                await self._state.read_again(self._cursor, self._read, least=_LEAST_PAUSE)
            except Exception as error:  # a bug here or in a library; requests go on without the stream
                log_crash(_log, error, "listening over HTTP crashed")
        self.written.set()

    async def _read(self) -> bool:
        """Open the stream and read it to its end; return whether to open it again."""
        state = self._state
        session_id = state.session.id
        try:
            refused = await state.read_stream(self._cursor, state.inbox.take, self.written.set)
        finally:
            self.written.set()
        if refused is None:
            self._opened = True
            return True
        forgotten = state.session.forgotten(session_id, refused.status) if self._opened else None
        if forgotten is not None:
            # The server had a stream before, so this means that the session is gone. The new session opens its own
            # stream.
            failure = await state.session.renew(forgotten)
            why = "" if failure is None else f": {failure.why}"
            _log.debug("the stream for unasked messages is gone with its session%s", why)
            return failure is not None and failure.passing
        if refused.passing or (refused.status == _BUSY and self._opened):
            return True
        _log.debug("the server offers no stream for unasked messages (status %d)", refused.status)
        return False
