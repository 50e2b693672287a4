"""What all messages and streams of one channel share: how something is sent again, and how a stream is reopened."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import attrs
import trio

from trimcp.channel import Outgoing
from trimcp.framing.sse import Event
from trimcp.transports.http.client.exchanges import EVENT_STREAM, ExchangeBroken, Http
from trimcp.transports.http.client.handshake import ACCEPT, LISTEN, LegacySession
from trimcp.transports.http.client.incoming import Cursor, Inbox, read_events
from trimcp.transports.http.client.policy import PASSING, Backoff, Trouble

__all__ = ["ClientState"]

_BRIEF: Final = 1.0  # seconds; a stream that ends sooner counts as cut short, whatever it brought
_MOST_BRIEF: Final = 2  # where it brought something, pauses grow to a second and no further

_log = logging.getLogger("trimcp.http")

FallBack: TypeAlias = Callable[[Trouble, Outgoing], Awaitable[Trouble | None]]


@attrs.define(eq=False)
class ClientState:
    """What requests, notifications and streams of one channel share.

    Attributes:
        http: the exchanges.
        inbox: where what arrives goes.
        session: the legacy session.
        backoff: how often to try, and the pauses in between.
        retry_calls: whether tools may be called twice.
        fall_back: tries `initialize` by the older transport after it met trouble; returns None if that has taken over.
        unreachable: whether the last request could not be sent in all its attempts; then the next make one each.
        last_failure: why something got no answer, None if nothing is known.
        over: whether the channel's tasks are being ended, so that nothing more can be sent.
    """

    http: Http
    inbox: Inbox
    session: LegacySession
    backoff: Backoff
    retry_calls: bool
    fall_back: FallBack
    unreachable: bool = False
    last_failure: str | None = None
    over: bool = False

    def post_headers(self, outgoing: Outgoing) -> dict[str, str]:
        """Return the headers of the POST that carries a message."""
        return {**ACCEPT, **self.session.headers(), **(outgoing.headers or {})}

    async def persist(
        self,
        attempt: Callable[[], Awaitable[Trouble | None]],
        next_pause: Callable[[int, Trouble], float | None],
        renewable: bool = False,
    ) -> Trouble | None:
        """Make attempts until one succeeds; return what the last one came to if there is to be no other.

        Args:
            attempt: sends something once, and returns why it failed or None, or raises `ExchangeBroken`.
            next_pause: returns the seconds before the next attempt, from how many there were and what the last one
                came to; None for no other.
            renewable: whether to begin a new session, once, where the server has forgotten this one.
        """
        attempts = 0
        while True:
            try:
                trouble = await attempt()
            except ExchangeBroken as broken:
                trouble = Trouble(broken.why, untouched=broken.nothing_sent, passing=True)
            if trouble is None:
                return None
            if renewable and trouble.forgotten is not None:
                trouble = await self.session.renew(trouble.forgotten)
                if trouble is None:
                    renewable = False
                    continue
            pause = next_pause(attempts, trouble)
            if pause is None:
                return trouble
            await trio.sleep(pause)
            attempts += 1

    async def read_stream(
        self,
        cursor: Cursor,
        take: Callable[[Event], Awaitable[object]],
        written: Callable[[], object] | None = None,
    ) -> Trouble | None:
        """Open a stream with GET at `cursor`, and pass its events to `take` until it ends; return why there is none."""
        headers = {**LISTEN, **self.session.headers(), **cursor.header}
        async with self.http.open("GET", headers, written=written) as reply:
            if reply.status == 200 and reply.content_type == EVENT_STREAM:
                await read_events(reply, cursor, self.inbox, take)
                return None
            return Trouble(reply.refusal(), passing=reply.status in PASSING, status=reply.status)

    async def read_again(
        self,
        cursor: Cursor,
        read: Callable[[], Awaitable[bool]],
        *,
        ended: bool = False,
        least: float = 0.0,
        most: float = math.inf,
    ) -> None:
        """Open a stream again and again, with pauses in between, until `read` returns False.

        Args:
            cursor: notes whether the stream brought an event, and the pause that the server asks for.
            read: opens the stream and reads it to its end; returns whether to open it again.
            ended: the stream was open before, so a pause comes first.
            least: seconds of the shortest pause.
            most: streams in a row that may bring nothing before this gives up.
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
