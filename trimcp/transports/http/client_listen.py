"""The stream a legacy server may use to speak unasked: one GET per session, opened again whenever it ends.

Servers that offer none say so with 405, or otherwise; that is no trouble and not worth a word.
"""

from __future__ import annotations

import logging
from typing import Final, Protocol

import attrs
import trio

from trimcp.channel import Incoming
from trimcp.framing.sse import Event
from trimcp.transports.http.client_events import Cursor, message_in, read_events
from trimcp.transports.http.client_handshake import LISTEN, Handshake
from trimcp.transports.http.client_http import EVENT_STREAM, Cut, Http
from trimcp.transports.http.client_inbox import Inbox
from trimcp.transports.http.client_policy import PASSING, Patience

__all__ = ["Listener"]

_AT_LEAST: Final = 1.0
_BUSY: Final = 409  # some servers have not noticed yet that the stream before has ended

_log = logging.getLogger("trimcp.http")


class _Road(Protocol):
    http: Http
    inbox: Inbox
    handshake: Handshake
    patience: Patience
    max_message: int


@attrs.define(eq=False)
class Listener:
    """One session's stream for what belongs to no request.

    Attributes:
        scope: cancel it to close the stream for good.
        written: set once the first GET is with the operating system, or has failed.
    """

    _road: _Road
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    written: trio.Event = attrs.field(init=False, factory=trio.Event)
    _opened: bool = attrs.field(init=False, default=False)

    async def run(self) -> None:
        """Listen until the session ends or the server turns out to offer no stream. Cancelling it closes the stream."""
        with self.scope:
            try:
                await self._listen()
            except Exception:  # a bug here or in the library below; requests go on without the stream
                _log.exception("listening over HTTP crashed")
        self.written.set()

    async def _listen(self) -> None:
        road = self._road
        cursor = Cursor()
        failures = 0
        while True:
            cursor.moved = False
            try:
                if not await self._once(cursor):
                    return
            except Cut as cut:
                _log.debug("the stream for what is unasked could not be opened: %s", cut.why)
            self.written.set()
            failures = 0 if cursor.moved else failures + 1
            pause = max(_AT_LEAST, road.patience.pause(failures))
            await trio.sleep(pause if cursor.retry is None else max(cursor.retry, road.patience.pause(failures)))

    async def _once(self, cursor: Cursor) -> bool:
        """Open the stream and read it to its end; whether to open it again."""
        road = self._road
        session_id = road.handshake.session_id
        headers = {**LISTEN, **road.handshake.headers(), **cursor.header}
        async with road.http.open("GET", headers, written=self.written.set) as reply:
            if reply.status == 200 and reply.content_type == EVENT_STREAM:
                self._opened = True
                await read_events(reply, cursor, road.max_message, self._take)
                return True
            status = reply.status
        if status == 404 and self._opened and session_id is not None:
            # Until now there was a stream, so it is the session that is gone. The new one brings its own listener.
            trouble = await road.handshake.renew(session_id)
            why = "" if trouble is None else f": {trouble.why}"
            _log.debug("the stream for what is unasked is gone with its session%s", why)
            return trouble is not None and trouble.passing
        if status in PASSING or (status == _BUSY and self._opened):
            return True
        _log.debug("the server offers no stream for what is unasked (status %d)", status)
        return False

    async def _take(self, event: Event) -> None:
        message = message_in(event)
        if message is not None:
            await self._road.inbox.put(Incoming(message, len(event.data)))
