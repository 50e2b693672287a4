"""Reads a stream of events to its end, and remembers where it could be taken up again. Knows no request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs

from trimcp.framing.sse import Decoder, Event
from trimcp.transports.http.client_http import Cut, Reply
from trimcp.wire.jsonrpc import Message, parse

__all__ = ["Cursor", "message_in", "read_events"]

_LONGEST_PAUSE = 300.0
_SHORTEST_PAUSE = 0.01
_LONGEST_ID = 1024


@attrs.define(eq=False)
class Cursor:
    """Where a stream that ended is taken up again (WHATWG HTML, "Server-sent events", "Last-Event-ID").

    Attributes:
        last_event_id: of the newest event, or None if none had one.
        retry: seconds the server wants to be left alone before, or None.
        moved: whether an event came since this was last set to False.
    """

    last_event_id: str | None = None
    retry: float | None = None
    moved: bool = False

    @property
    def header(self) -> dict[str, str]:
        """The header that asks for what came after the newest event."""
        id = self.last_event_id
        # What cannot stand in a header cannot be asked for. No server that means it makes such ids.
        usable = id and id.isascii() and id.isprintable() and len(id) <= _LONGEST_ID
        return {"last-event-id": id} if id and usable else {}


async def read_events(
    reply: Reply, cursor: Cursor, max_event: int, take: Callable[[Event], Awaitable[object]]
) -> Cut | None:
    """Hand every event of a reply to `take` until the stream ends; return how it broke, None if it ended in order."""
    decoder = Decoder(max_event, last_event_id=cursor.last_event_id)
    try:
        async with reply.chunks() as chunks:
            async for chunk in chunks:
                events = decoder.feed(chunk)
                cursor.last_event_id = decoder.last_event_id
                if decoder.retry is not None:
                    cursor.retry = min(max(decoder.retry / 1000, _SHORTEST_PAUSE), _LONGEST_PAUSE)
                for event in events:
                    cursor.moved = True
                    await take(event)
    except Cut as cut:
        return cut
    return None


def message_in(event: Event) -> Message | None:
    """Return the message that an event carries; None if it carries none."""
    if event.oversize is not None:
        return event.oversize
    if event.event != "message" or not event.data.strip():
        return None
    return parse(event.data)
