"""Messages of ours that get no answer: notifications, cancellations, and answers to what the server asked.

Each is a POST of its own that the server accepts or not. They do not wait for requests: a call may wait for the very
answer that is sent here. What belongs to one request goes out one after another, progress before the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from trimcp.channel import Kind, Outgoing
from trimcp.transports.http.client.exchanges import EVENT_STREAM
from trimcp.transports.http.client.handshake import ACCEPT
from trimcp.transports.http.client.policy import PASSING, Trouble
from trimcp.transports.http.client.request import Post
from trimcp.transports.http.client.state import ClientState
from trimcp.wire.jsonrpc import RequestId

__all__ = ["Notices"]

_MOST: Final = 64
_MAX_BODY: Final = 64 * 1024

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class Notices:
    """Sends messages without an answer, at most 64 at a time, each in a task.

    The server may take `timeout` seconds to accept one; `confirmed` is called once it has taken
    `notifications/initialized`.
    """

    _state: ClientState
    _nursery: trio.Nursery
    _timeout: float
    _confirmed: Callable[[], Awaitable[object]]
    _under_way: int = attrs.field(init=False, default=0)
    _last: dict[RequestId | None, trio.Event] = attrs.field(init=False, factory=dict)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def send(self, outgoing: Outgoing) -> None:
        """Begin to send a notification or an answer, once fewer than 64 are on their way.

        This waits for nothing but the server: it accepts them one by one, whatever becomes of calls.
        """
        while self._under_way >= _MOST:
            await self._changed.park()
        self._start(outgoing, None)

    def cancel(self, outgoing: Outgoing, post: Post) -> None:
        """Begin to send the cancellation of a request, after the request itself; then its stream is closed."""
        self._start(outgoing, post)

    async def idle(self) -> None:
        """Wait until none is on its way."""
        while self._under_way:
            await self._changed.park()

    def _start(self, outgoing: Outgoing, post: Post | None) -> None:
        key = outgoing.request_id
        before, over = self._last.get(key), trio.Event()
        self._last[key] = over
        self._under_way += 1
        session = self._state.session
        confirms = outgoing.kind is Kind.NOTIFICATION and session.is_confirmation(outgoing)
        self._nursery.start_soon(self._run, outgoing, post, before, over, session.confirming if confirms else None)

    async def _run(
        self,
        outgoing: Outgoing,
        post: Post | None,
        before: trio.Event | None,
        over: trio.Event,
        confirming: trio.Event | None,
    ) -> None:
        try:
            if before is not None:
                await before.wait()
            if post is not None:
                await post.written.wait()
            with trio.move_on_after(self._timeout) as scope:
                await self._deliver(outgoing)
            if scope.cancelled_caught:
                _log.warning("the server did not accept %s in %g s", _called(outgoing), self._timeout)
            if confirming is not None:
                await self._confirmed()
        except Exception:  # a bug here or in the library below; nobody waits for a notification who could be told
            _log.exception("%s could not be sent", _called(outgoing))
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

    async def _deliver(self, outgoing: Outgoing) -> None:
        state = self._state
        # An answer or a cancellation means nothing in another session.
        renewable = outgoing.kind is Kind.NOTIFICATION
        trouble = await state.persist(lambda: self._attempt(outgoing), state.backoff.before_next, renewable)
        if trouble is not None:
            level = logging.WARNING if outgoing.kind is Kind.REPLY else logging.DEBUG
            _log.log(level, "%s did not reach the server: %s", _called(outgoing), trouble.why)

    async def _attempt(self, outgoing: Outgoing) -> Trouble | None:
        http, session = self._state.http, self._state.session
        session_id = session.id
        headers = {**ACCEPT, **session.headers(), **(outgoing.headers or {})}
        async with http.open("POST", headers, outgoing.data) as reply:
            status = reply.status
            if status >= 300:
                if status == 404 and session_id is not None:
                    return Trouble(http.refusal(reply), status=status, forgotten=session_id)
                # What a server turned away for now it has not taken.
                untouched, passing = status in (429, 503), status in PASSING
                return Trouble(http.refusal(reply), untouched=untouched, passing=passing, after=reply.retry_after)
            session.alive()
            if reply.content_type != EVENT_STREAM:
                await reply.small_body(_MAX_BODY)  # so that its connection can be used again
            return None


def _called(outgoing: Outgoing) -> str:
    return "an answer of ours" if outgoing.kind is Kind.REPLY else f"a {outgoing.kind.value} of ours"
