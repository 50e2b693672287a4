"""Sent events of a session's streams, kept for a client that reconnects (specification, "Resumability").

This module knows sessions, streams and numbers. It neither parses events nor checks access: the caller makes sure that
the client owns the session.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, Generic, TypeVar

import attrs

from trimcp.support.bounds import checked

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
class _EvictionQueue(Generic[K]):
    """The replies of one session, or its other events, in the order of eviction, and their bounds."""

    max_weight: int
    max_entries: float
    largest: int  # bytes of the largest event that is kept at all
    entries: OrderedDict[Entry[K], None] = attrs.field(init=False, factory=OrderedDict)
    weight: int = attrs.field(init=False, default=0)


@attrs.define(eq=False)
class _Held(Generic[K]):
    """The events of one session."""

    replies: _EvictionQueue[K]
    others: _EvictionQueue[K]
    streams: dict[int, dict[int, Entry[K]]] = attrs.field(init=False, factory=dict)
    weight: int = attrs.field(init=False, default=0)
    bits: int = attrs.field(init=False, default=0)  # of the weight when it was last sorted in


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
        held = self._sessions.get(session)
        if held is not None and (entries := held.streams.pop(stream, None)) is not None:
            self._drop(session, held, entries.values())

    def drop_session(self, session: str) -> None:
        held = self._sessions.get(session)
        if held is not None:
            gone = [entry for entries in held.streams.values() for entry in entries.values()]
            held.streams.clear()
            self._drop(session, held, gone)

    def close(self) -> None:
        self._closed = True
        for session in list(self._sessions):
            BoundedEvents.drop_session(self, session)

    def statistics(self) -> EventStatistics:
        return EventStatistics(self._total.events, self._total.weight, self._total.evicted)

    def _add(self, session: str, entry: Entry[K]) -> list[Entry[K]]:
        """Add an entry; return the evicted entries, which may include it."""
        held, total = self._sessions.get(session), self._total
        if held is None:
            held = _Held(
                self._queue(self.max_reply_bytes, math.inf),
                self._queue(self.max_bytes, self.max_events),
            )
        lane, weight = held.replies if entry.reply else held.others, entry.weight
        if weight > lane.largest:
            total.evicted += 1
            return [entry]
        stream = held.streams.get(entry.stream)
        if stream is None:
            held.streams[entry.stream] = {entry.seq: entry}
        elif entry.seq in stream:
            raise ValueError(f"event {entry.seq} of stream {entry.stream} is there already")
        else:
            stream[entry.seq] = entry
        entries = lane.entries
        entries[entry] = None
        if len(entries) > lane.max_entries:  # as usual in a long stream: one comes, one of the same size goes
            oldest = next(iter(entries))
            self._unlink(held, lane, oldest)
            total.evicted += 1
            gone = [oldest]
            weight -= oldest.weight
            if not weight:
                return gone
        else:
            total.events += 1
            gone = []
        # As `_weigh`, which would be a call for each event
        lane.weight += weight
        total.weight += weight
        held.weight = now = held.weight + weight
        if now.bit_length() != held.bits:
            self._sort_in(session, held)
        while lane.weight > lane.max_weight:
            gone.append(self._evict(session, held, lane))
        while total.weight > self.max_total_bytes:
            largest = next(iter(self._by_size[max(self._by_size)]))
            held = self._sessions[largest]
            gone.append(self._evict(largest, held, held.others if held.others.entries else held.replies))
        return gone

    def _queue(self, max_weight: int, max_entries: float) -> _EvictionQueue[K]:
        """Return a new queue of a session."""
        return _EvictionQueue(max_weight, max_entries, min(max_weight, self.max_total_bytes) if max_entries else -1)

    def _entries_after(self, session: str, stream: int, seq: int) -> list[Entry[K]]:
        """Return the entries of a stream after a number, in order."""
        if (held := self._sessions.get(session)) is None:
            return []
        found = [entry for entry in held.streams.get(stream, {}).values() if entry.seq > seq]
        found.sort(key=lambda entry: entry.seq)
        return found

    def _drop(self, session: str, held: _Held[K], gone: Collection[Entry[K]]) -> None:
        """Remove entries, of streams that were removed."""
        total = self._total
        for entry in gone:
            lane = held.replies if entry.reply else held.others
            del lane.entries[entry]
            lane.weight -= entry.weight
            held.weight -= entry.weight
            total.weight -= entry.weight
        total.events -= len(gone)
        if held.weight.bit_length() != held.bits:
            self._sort_in(session, held)
        self._remove(gone)

    def _remove(self, gone: Collection[Entry[K]]) -> None:
        """Remove the data of entries that were dropped."""

    def _forget(self, session: str, entry: Entry[K]) -> None:
        """Remove an entry that was added but cannot be stored."""
        held = self._sessions[session]
        self._take(session, held, held.replies if entry.reply else held.others, entry)

    def _evict(self, session: str, held: _Held[K], lane: _EvictionQueue[K]) -> Entry[K]:
        """Remove the oldest entry of a lane and return it."""
        entry = next(iter(lane.entries))
        self._take(session, held, lane, entry)
        return entry

    def _take(self, session: str, held: _Held[K], lane: _EvictionQueue[K], entry: Entry[K]) -> None:
        """Remove an entry that could still be resumed."""
        self._total.evicted += 1
        self._total.events -= 1
        self._unlink(held, lane, entry)
        self._weigh(session, held, lane, -entry.weight)

    @staticmethod
    def _unlink(held: _Held[K], lane: _EvictionQueue[K], entry: Entry[K]) -> None:
        """Remove an entry from its lane and its stream."""
        del lane.entries[entry]
        stream = held.streams[entry.stream]
        del stream[entry.seq]
        if not stream:
            del held.streams[entry.stream]

    def _weigh(self, session: str, held: _Held[K], lane: _EvictionQueue[K], change: int) -> None:
        """Count that a lane has grown by so many bytes."""
        lane.weight += change
        held.weight += change
        self._total.weight += change
        if held.weight.bit_length() != held.bits:
            self._sort_in(session, held)

    def _sort_in(self, session: str, held: _Held[K]) -> None:
        """Note how large a session's events are now. A session without entries uses no memory."""
        was, held.bits = held.bits, held.weight.bit_length()
        if was:
            same = self._by_size[was]
            del same[session]
            if not same:
                del self._by_size[was]
        if held.bits:
            self._sessions[session] = held
            self._by_size.setdefault(held.bits, OrderedDict())[session] = None
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
        return 0 if held is None else held.weight
