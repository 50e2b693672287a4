"""What was sent on the streams of a session, kept for a client that comes back (specification, "Resumability").

It knows sessions, streams and numbers. It does not know what an event says or who may read it: whoever asks has made
sure that the session is the asker's.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

import attrs

from trimcp.bounds import checked
from trimcp.transports.http.events.ledger import (
    MAX_BYTES,
    MAX_EVENTS,
    MAX_REPLY_BYTES,
    MAX_TOTAL_BYTES,
    OVERHEAD,
    Entry,
    EventStatistics,
    Ledger,
)

__all__ = ["EventStatistics", "EventStore", "MemoryEvents", "event_id", "parse_event_id"]

# Bounded, and what it costs does not depend on what it is shown.
_EVENT_ID = re.compile(r"(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})")


def event_id(stream: int, seq: int) -> str:
    """Return the id of an event as it stands in an `id:` line: "3-17". Unique in its session; it names its stream."""
    return f"{stream}-{seq}"


def parse_event_id(text: str) -> tuple[int, int] | None:
    """Return the stream and number that a `Last-Event-ID` names, or None if `event_id` never wrote such a text."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]))


class EventStore(ABC):
    """Where a legacy session's events wait for a client that reconnects.

    Synchronous on purpose: it is called in the middle of writing, from the event loop, and must return at once. A
    store on another machine is none; it would hold up every stream. No method raises for want of room or disk:
    what cannot be kept is counted and cannot be resumed, and the session lives on. Bounded by its implementation, for
    the face above appends whatever is sent.
    """

    @abstractmethod
    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        """Keep an event, giving up others if there is no room.

        Args:
            session: the session's id.
            stream: the stream's number in its session.
            seq: the event's number in its stream, used once.
            data: the event as it was or would have been written.
            reply: whether it answers a request, which a client misses more than anything else.
        """

    @abstractmethod
    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Return the number and data of each kept event of a stream with a larger number than `seq`, in order.

        Nothing if there is no such session or stream. What was evicted is missing.
        """

    @abstractmethod
    def drop_stream(self, session: str, stream: int) -> None:
        """Forget a stream's events: nobody will come back for them."""

    @abstractmethod
    def drop_session(self, session: str) -> None:
        """Forget all of a session's events."""

    def held(self, session: str) -> int:
        """Return how many bytes of this process's memory a session's events take; 0 where they are elsewhere."""
        return 0

    @abstractmethod
    def statistics(self) -> EventStatistics:
        """Return what is held now."""

    def close(self) -> None:  # noqa: B027 - a store without resources has nothing to do
        """Give back what the store holds. Afterwards it keeps nothing and finds nothing; closing again is harmless."""


@attrs.define(
    eq=False, field_transformer=checked(zero=("max_events", "max_bytes", "max_reply_bytes", "max_total_bytes"))
)
class MemoryEvents(EventStore):
    """Events in this process's memory.

    Args:
        max_events: events per session that are no replies; beyond it the oldest go.
        max_bytes: bytes of a session's events that are no replies.
        max_reply_bytes: bytes of a session's replies. They are bounded by themselves, so that no flood of notifications
            costs a client the result it came back for.
        max_total_bytes: bytes of all sessions together; beyond it the oldest events of a session that holds most go,
            replies last.

    An event that alone exceeds its bound is not kept. All bytes as in `EventStatistics`.
    """

    max_events: int = attrs.field(default=MAX_EVENTS, kw_only=True)
    max_bytes: int = attrs.field(default=MAX_BYTES, kw_only=True)
    max_reply_bytes: int = attrs.field(default=MAX_REPLY_BYTES, kw_only=True)
    max_total_bytes: int = attrs.field(default=MAX_TOTAL_BYTES, kw_only=True)
    _ledger: Ledger[bytes] = attrs.field(init=False)
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._ledger = Ledger(self.max_events, self.max_bytes, self.max_reply_bytes, self.max_total_bytes)

    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        """Keep an event; see `EventStore.append`."""
        if not self._closed:
            self._ledger.add(session, Entry(stream, seq, len(data) + OVERHEAD, reply, data))

    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Return what follows an event; see `EventStore.after`."""
        return [(entry.seq, entry.kept) for entry in self._ledger.after(session, stream, seq)]

    def drop_stream(self, session: str, stream: int) -> None:
        """Forget a stream's events."""
        self._ledger.drop_stream(session, stream)

    def drop_session(self, session: str) -> None:
        """Forget all of a session's events."""
        self._ledger.drop_session(session)

    def held(self, session: str) -> int:
        """Return how many bytes a session's events take; see `EventStore.held`."""
        return self._ledger.weight(session)

    def statistics(self) -> EventStatistics:
        """Return what is held now."""
        return self._ledger.statistics()

    def close(self) -> None:
        """Forget everything; see `EventStore.close`."""
        self._closed = True
        self._ledger.clear()
