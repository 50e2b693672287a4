"""Sent events of a session's streams, kept for a client that reconnects (specification, "Resumability").

This module knows sessions, streams and numbers. It neither parses events nor checks access: the caller makes sure that
the client owns the session.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Final, Generic, TypeVar

import attrs

from trimcp.bounds import checked

K = TypeVar("K")

OVERHEAD: Final = 500
"""Bytes counted for each kept event besides its data (measured: 340 to 560). So empty events cost something, too."""

# The number of digits is bounded, so the cost of a match is, too.
_EVENT_ID: Final = re.compile(r"(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})")


def event_id(stream: int, seq: int) -> str:
    """Return the id of an event for its `id:` line: "3-17", stream and number. Unique in its session."""
    return f"{stream}-{seq}"


def parse_event_id(text: str) -> tuple[int, int] | None:
    """Return the stream and number of a `Last-Event-ID`, or None if it is no id of `event_id`."""
    found = _EVENT_ID.fullmatch(text)
    return None if found is None else (int(found[1]), int(found[2]))


@attrs.frozen
class EventStatistics:
    """The contents of an event store.

    Attributes:
        events: the number of kept events.
        bytes: their size, each with `OVERHEAD` bytes besides its data. The bounds count these bytes.
        evicted: events dropped while their stream could still be resumed: for lack of room, or because a write to disk
            failed.
    """

    events: int
    bytes: int
    evicted: int


class EventStore(ABC):
    """Keeps a legacy session's events for a client that reconnects.

    Synchronous on purpose: it is called from the event loop during writes, and must return at once. A store on another
    machine is not suitable, because it would block every stream. No method raises for lack of room or disk errors: an
    event that cannot be kept is counted and cannot be resumed, and the session goes on. The implementation must be
    bounded, since the server appends every sent event.
    """

    @abstractmethod
    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        """Keep an event, and evict others if there is no room.

        Args:
            session: the session's id.
            stream: the stream's number in its session.
            seq: the event's number in its stream, used once.
            data: the event's bytes, as sent.
            reply: whether it answers a request; such events are evicted last.
        """

    @abstractmethod
    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        """Return the number and data of each kept event of a stream after number `seq`, in order.

        Empty if the session or stream is unknown. Evicted events are missing.
        """

    @abstractmethod
    def drop_stream(self, session: str, stream: int) -> None:
        """Forget a stream's events: the stream can no longer be resumed."""

    @abstractmethod
    def drop_session(self, session: str) -> None:
        """Forget all of a session's events."""

    def held(self, session: str) -> int:
        """Return how many bytes of this process's memory a session's events use; 0 if they are stored elsewhere."""
        return 0

    @abstractmethod
    def statistics(self) -> EventStatistics:
        """Return the current counts."""

    def close(self) -> None:  # noqa: B027 - a store without resources has nothing to do
        """Release the store's resources. Afterwards it keeps nothing and finds nothing; safe to call twice."""


@attrs.define(eq=False)
class Entry(Generic[K]):
    """One event; `kept` is its data, or where its data is stored."""

    stream: int
    seq: int
    weight: int
    reply: bool
    kept: K


@attrs.define(eq=False)
class _Held(Generic[K]):
    """The events of one session, by stream and in the order of eviction."""

    streams: dict[int, dict[int, Entry[K]]] = attrs.field(init=False, factory=dict)
    replies: OrderedDict[Entry[K], None] = attrs.field(init=False, factory=OrderedDict)
    others: OrderedDict[Entry[K], None] = attrs.field(init=False, factory=OrderedDict)
    reply_weight: int = attrs.field(init=False, default=0)
    other_weight: int = attrs.field(init=False, default=0)

    def take(self, entry: Entry[K]) -> None:
        stream = self.streams[entry.stream]
        del stream[entry.seq]
        if not stream:
            del self.streams[entry.stream]
        if entry.reply:
            del self.replies[entry]
            self.reply_weight -= entry.weight
        else:
            del self.others[entry]
            self.other_weight -= entry.weight


@attrs.define(eq=False)
class _Total:
    """The counts over all sessions of a store."""

    events: int = 0
    weight: int = 0
    evicted: int = 0


@attrs.define(
    eq=False, field_transformer=checked(zero=("max_events", "max_bytes", "max_reply_bytes", "max_total_bytes"))
)
class BoundedEvents(EventStore, Generic[K]):
    """Decides which events are kept, and counts them; subclasses store the data.

    Each event is added and removed once, at constant cost. The bounds are those of `MemoryEvents`.
    """

    max_events: int = attrs.field(default=1_000, kw_only=True)
    max_bytes: int = attrs.field(default=1024 * 1024, kw_only=True)
    max_reply_bytes: int = attrs.field(default=16 * 1024 * 1024, kw_only=True)
    max_total_bytes: int = attrs.field(default=256 * 1024 * 1024, kw_only=True)
    _closed: bool = attrs.field(init=False, default=False)
    _sessions: dict[str, _Held[K]] = attrs.field(init=False, factory=dict)
    # Sessions by the number of bits of their size. To know the largest exactly would need a heap with an entry per
    # event; within a factor of two is fair enough.
    _by_size: dict[int, OrderedDict[str, None]] = attrs.field(init=False, factory=dict)
    # A separate object, because setting an attribute here runs a validator.
    _total: _Total = attrs.field(init=False, factory=_Total)

    def drop_stream(self, session: str, stream: int) -> None:
        self._drop(session, stream)

    def drop_session(self, session: str) -> None:
        self._drop(session, None)

    def close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            self._drop(session, None)

    def statistics(self) -> EventStatistics:
        return EventStatistics(self._total.events, self._total.weight, self._total.evicted)

    def _add(self, session: str, entry: Entry[K]) -> list[Entry[K]]:
        """Add an entry; return the evicted entries, which may include it."""
        bound = self.max_reply_bytes if entry.reply else self.max_bytes
        weight, total, number = entry.weight, self._total, entry.stream
        if weight > bound or weight > self.max_total_bytes or (not entry.reply and self.max_events < 1):
            total.evicted += 1
            return [entry]
        held = self._sessions.get(session)
        if held is None:
            held = self._sessions[session] = _Held()
        stream = held.streams.get(number)
        if stream is None:
            held.streams[number] = {entry.seq: entry}
        elif entry.seq in stream:
            raise ValueError(f"event {entry.seq} of stream {number} is there already")
        else:
            stream[entry.seq] = entry
        before = held.reply_weight + held.other_weight
        total.events += 1
        total.weight += weight
        if before.bit_length() != (before + weight).bit_length():
            self._resized(session, before, before + weight)
        gone: list[Entry[K]] = []
        if entry.reply:
            held.replies[entry] = None
            held.reply_weight += weight
            while held.reply_weight > bound:
                gone.append(self._evict(session, held, next(iter(held.replies))))
        else:
            held.others[entry] = None
            held.other_weight += weight
            while held.other_weight > bound or len(held.others) > self.max_events:
                gone.append(self._evict(session, held, next(iter(held.others))))
        while total.weight > self.max_total_bytes:
            largest = next(iter(self._by_size[max(self._by_size)]))
            held = self._sessions[largest]
            gone.append(self._evict(largest, held, next(iter(held.others or held.replies))))
        return gone

    def _entries_after(self, session: str, stream: int, seq: int) -> list[Entry[K]]:
        """Return the entries of a stream after a number, in order."""
        if (held := self._sessions.get(session)) is None:
            return []
        found = [entry for entry in held.streams.get(stream, {}).values() if entry.seq > seq]
        found.sort(key=lambda entry: entry.seq)
        return found

    def _drop(self, session: str, stream: int | None) -> None:
        """Remove one stream of a session, or all of them."""
        if (held := self._sessions.get(session)) is None:
            return
        streams = list(held.streams.values()) if stream is None else [held.streams.get(stream, {})]
        gone = [entry for entries in streams for entry in entries.values()]
        for entry in gone:
            self._take(session, held, entry)
        self._remove([entry.kept for entry in gone])

    def _remove(self, kept: list[K]) -> None:
        """Remove the data of evicted entries."""

    def _evict(self, session: str, held: _Held[K], entry: Entry[K]) -> Entry[K]:
        self._total.evicted += 1
        self._take(session, held, entry)
        return entry

    def _take(self, session: str, held: _Held[K], entry: Entry[K]) -> None:
        """Remove an entry. A session without entries uses no memory."""
        before = held.reply_weight + held.other_weight
        held.take(entry)
        self._total.events -= 1
        self._total.weight -= entry.weight
        self._resized(session, before, before - entry.weight)

    def _resized(self, session: str, before: int, now: int) -> None:
        """Note that the bytes of a session's events have changed."""
        bits, was = now.bit_length(), before.bit_length()
        if bits == was:
            return
        if before:
            same = self._by_size[was]
            del same[session]
            if not same:
                del self._by_size[was]
        if now:
            self._by_size.setdefault(bits, OrderedDict())[session] = None
        else:
            del self._sessions[session]


@attrs.define(eq=False)
class MemoryEvents(BoundedEvents[bytes]):
    """Events in this process's memory.

    Args:
        max_events: events per session other than replies; beyond it the oldest are evicted.
        max_bytes: bytes of a session's events other than replies.
        max_reply_bytes: bytes of a session's replies. They have a bound of their own, so that a flood of notifications
            cannot evict the result that a client reconnects for.
        max_total_bytes: bytes of all sessions together; beyond it the oldest events of one of the largest sessions are
            evicted, replies last.

    An event that alone exceeds its bound is not kept. All bytes as in `EventStatistics`.
    """

    def append(self, session: str, stream: int, seq: int, data: bytes, *, reply: bool) -> None:
        if not self._closed:
            self._add(session, Entry(stream, seq, len(data) + OVERHEAD, reply, data))

    def after(self, session: str, stream: int, seq: int) -> list[tuple[int, bytes]]:
        return [(entry.seq, entry.kept) for entry in self._entries_after(session, stream, seq)]

    def held(self, session: str) -> int:
        held = self._sessions.get(session)
        return 0 if held is None else held.reply_weight + held.other_weight
