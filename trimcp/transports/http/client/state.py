"""What all messages and streams of one channel share, and the one way in which something is sent again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs
import trio

from trimcp.channel import Outgoing
from trimcp.framing.sse import Event
from trimcp.transports.http.client.exchanges import EVENT_STREAM, ExchangeBroken, Http
from trimcp.transports.http.client.handshake import LISTEN, LegacySession
from trimcp.transports.http.client.incoming import Cursor, Inbox, read_events
from trimcp.transports.http.client.policy import PASSING, Backoff, Trouble

__all__ = ["ClientState"]

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
    """

    http: Http
    inbox: Inbox
    session: LegacySession
    backoff: Backoff
    retry_calls: bool
    fall_back: FallBack
    unreachable: bool = False
    last_failure: str | None = None

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
            return Trouble(self.http.refusal(reply), passing=reply.status in PASSING, status=reply.status)
