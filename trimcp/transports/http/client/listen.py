"""The stream a legacy server may use to speak unasked: one GET per session, opened again whenever it ends.

Servers that offer none say so with 405, or otherwise; that is no failure.
"""

from __future__ import annotations

import logging
from typing import Final

import attrs
import trio

from trimcp.channel import Incoming
from trimcp.framing.sse import Event
from trimcp.transports.http.client.exchanges import ExchangeBroken
from trimcp.transports.http.client.incoming import Cursor, message_in
from trimcp.transports.http.client.policy import Reopening
from trimcp.transports.http.client.state import ClientState

__all__ = ["GetStream"]

_LEAST_PAUSE: Final = 1.0
_BUSY: Final = 409  # some servers have not noticed yet that the stream before has ended

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class GetStream:
    """One session's stream for messages that belong to no request.

    Attributes:
        scope: cancel it to close the stream for good.
        written: set once the first GET is with the operating system, or has failed.
    """

    _state: ClientState
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
        cursor = Cursor()
        reopening = Reopening(self._state.backoff, _LEAST_PAUSE)
        while True:
            cursor.moved = False
            began = trio.current_time()
            try:
                if not await self._once(cursor):
                    return
            except ExchangeBroken as broken:
                _log.debug("the stream for unasked messages could not be opened: %s", broken.why)
            self.written.set()
            reopening.ended(cursor.moved, trio.current_time() - began)
            await trio.sleep(reopening.pause(cursor.retry))

    async def _once(self, cursor: Cursor) -> bool:
        """Open the stream and read it to its end; whether to open it again."""
        session = self._state.session
        session_id = session.id
        refused = await self._state.read_stream(cursor, self._take, self.written.set)
        if refused is None:
            self._opened = True
            return True
        if refused.status == 404 and self._opened and session_id is not None:
            # Until now there was a stream, so it is the session that is gone. The new one opens a stream of its own.
            trouble = await session.renew(session_id)
            why = "" if trouble is None else f": {trouble.why}"
            _log.debug("the stream for unasked messages is gone with its session%s", why)
            return trouble is not None and trouble.passing
        if refused.passing or (refused.status == _BUSY and self._opened):
            return True
        _log.debug("the server offers no stream for unasked messages (status %d)", refused.status)
        return False

    async def _take(self, event: Event) -> None:
        message = message_in(event)
        if message is not None:
            await self._state.inbox.put(Incoming(message, len(event.data)))
