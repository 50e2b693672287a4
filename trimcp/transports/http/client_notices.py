"""Messages of ours that get no answer: notifications, cancellations, and answers to what the server asked.

Each is a POST of its own that the server accepts or not. They have a lane beside the requests: a call may wait for
the very answer that is sent here. What belongs to one request goes out one after another, progress before the answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import attrs
import trio

from trimcp.channel import Kind, Outgoing
from trimcp.transports.http.client_handshake import ACCEPT, Handshake
from trimcp.transports.http.client_http import EVENT_STREAM, Cut, Http, Reply, TooLarge
from trimcp.transports.http.client_policy import PASSING, Patience, Trouble, refusal, seconds_to_wait
from trimcp.transports.http.client_post import Post
from trimcp.wire.jsonrpc import RequestId

__all__ = ["Notices"]

_MOST: Final = 64
_MAX_BODY: Final = 64 * 1024

_log = logging.getLogger("trimcp.http")


class _Road(Protocol):
    http: Http
    handshake: Handshake
    patience: Patience


@attrs.define(eq=False)
class Notices:
    """The lane of messages without an answer.

    Args:
        road: what they are sent with.
        nursery: where each is a task.
        timeout: seconds the server may take to accept one.
        confirmed: called when `notifications/initialized` was taken.
    """

    _road: _Road
    _nursery: trio.Nursery
    _timeout: float
    _confirmed: Callable[[], Awaitable[object]]
    _under_way: int = attrs.field(init=False, default=0)
    _last: dict[RequestId | None, trio.Event] = attrs.field(init=False, factory=dict)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def send(self, outgoing: Outgoing) -> None:
        """Begin to send a notification or an answer, once not too many are on their way.

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
        handshake = self._road.handshake
        confirms = outgoing.kind is Kind.NOTIFICATION and handshake.is_confirmation(outgoing)
        self._nursery.start_soon(self._run, outgoing, post, before, over, handshake.confirming if confirms else None)

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
        handshake, patience = self._road.handshake, self._road.patience
        attempt = 0
        renewed = False
        while True:
            trouble = await self._attempt(outgoing)
            if trouble is None:
                return
            # An answer or a cancellation means nothing in another session.
            if trouble.forgotten is not None and outgoing.kind is Kind.NOTIFICATION and not renewed:
                trouble = await handshake.renew(trouble.forgotten)
                if trouble is None:
                    renewed = True
                    continue
            pause = patience.before_next(attempt, trouble, "", False)
            if pause is None:
                level = logging.WARNING if outgoing.kind is Kind.REPLY else logging.DEBUG
                _log.log(level, "%s did not reach the server: %s", _called(outgoing), trouble.why)
                return
            await trio.sleep(pause)
            attempt += 1

    async def _attempt(self, outgoing: Outgoing) -> Trouble | None:
        handshake = self._road.handshake
        session_id = handshake.session_id
        headers = {**ACCEPT, **handshake.headers(), **(outgoing.headers or {})}
        try:
            async with self._road.http.open("POST", headers, outgoing.data) as reply:
                status = reply.status
                if status < 300:
                    handshake.alive()
                    await _discard(reply)
                    return None
                after = seconds_to_wait(reply.header("retry-after") or None, time.time)
                why = refusal(status, None, reply.elsewhere)
                if status == 404 and session_id is not None:
                    return Trouble(why, status=status, forgotten=session_id)
                # What a server turned away for now it has not taken.
                return Trouble(why, untouched=status in (429, 503), passing=status in PASSING, after=after)
        except Cut as cut:
            return Trouble(cut.why, untouched=cut.nothing_sent, passing=True)


async def _discard(reply: Reply) -> None:
    """Read what little a server says to what wants no answer, so that its connection can be used again."""
    if reply.content_type != EVENT_STREAM:
        try:
            await reply.body(_MAX_BODY)
        except (TooLarge, Cut):
            pass


def _called(outgoing: Outgoing) -> str:
    return "an answer of ours" if outgoing.kind is Kind.REPLY else f"a {outgoing.kind.value} of ours"
