"""Which events a store may keep: by session and stream, bounded in number and bytes.

It decides and counts. Where the data is, in memory or on a disk, is the store's business.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

import attrs

__all__ = [
    "MAX_BYTES",
    "MAX_EVENTS",
    "MAX_REPLY_BYTES",
    "MAX_TOTAL_BYTES",
    "OVERHEAD",
    "Entry",
    "EventStatistics",
    "Ledger",
]

K = TypeVar("K")

MAX_EVENTS: Final = 1_000
"""Events per session that are no replies."""

MAX_BYTES: Final = 1024 * 1024
"""Bytes of a session's events that are no replies."""

MAX_REPLY_BYTES: Final = 16 * 1024 * 1024
"""Bytes of a session's replies."""

MAX_TOTAL_BYTES: Final = 256 * 1024 * 1024
"""Bytes of all sessions together."""

OVERHEAD: Final = 500
"""Bytes that keeping an event costs beside its data (measured: 340 to 560), for a flood of empty ones is no gift."""


@attrs.frozen
class EventStatistics:
    """What an event store holds.

    Attributes:
        events: how many events are kept now.
        bytes: what they cost, each with `OVERHEAD` bytes beside its data. This is what the bounds count.
        evicted: how many were given up while their stream could still be asked for: for want of room, or because the
            disk did not take them.
    """

    events: int
    bytes: int
    evicted: int


@attrs.define(eq=False)
class Entry(Generic[K]):
    """One event in the ledger; `kept` is its data, or where its data is."""

    stream: int
    seq: int
    weight: int
    reply: bool
    kept: K


@attrs.define(eq=False)
class _Held(Generic[K]):
    """What one session holds: its events by stream, and in the order in which they go."""

    streams: dict[int, dict[int, Entry[K]]] = attrs.field(init=False, factory=dict)
    replies: OrderedDict[Entry[K], None] = attrs.field(init=False, factory=OrderedDict)
    others: OrderedDict[Entry[K], None] = attrs.field(init=False, factory=OrderedDict)
    reply_weight: int = attrs.field(init=False, default=0)
    other_weight: int = attrs.field(init=False, default=0)

    def put(self, entry: Entry[K]) -> None:
        if entry.stream not in self.streams:
            self.streams[entry.stream] = {}
        self.streams[entry.stream][entry.seq] = entry
        if entry.reply:
            self.replies[entry] = None
            self.reply_weight += entry.weight
        else:
            self.others[entry] = None
            self.other_weight += entry.weight

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
class Ledger(Generic[K]):
    """Who holds what, and what goes when there is no room. Each event is put and taken once, at constant cost."""

    max_events: int
    max_bytes: int
    max_reply_bytes: int
    max_total_bytes: int
    _sessions: dict[str, _Held[K]] = attrs.field(init=False, factory=dict)
    # Sessions by the number of bits of what they hold. To know the largest exactly would take a heap with an entry
    # per event; for fairness a factor of two is exact enough.
    _by_size: dict[int, OrderedDict[str, None]] = attrs.field(init=False, factory=dict)
    _events: int = attrs.field(init=False, default=0)
    _weight: int = attrs.field(init=False, default=0)
    _evicted: int = attrs.field(init=False, default=0)

    def add(self, session: str, entry: Entry[K]) -> list[Entry[K]]:
        """Add an entry; return those that had to go for it, which may include itself."""
        bound = self.max_reply_bytes if entry.reply else self.max_bytes
        weight = entry.weight
        if weight > bound or weight > self.max_total_bytes or (not entry.reply and self.max_events < 1):
            self._evicted += 1
            return [entry]
        held = self._sessions.get(session)
        if held is None:
            held = self._sessions[session] = _Held()
        if entry.seq in held.streams.get(entry.stream, ()):
            raise ValueError(f"event {entry.seq} of stream {entry.stream} is there already")
        self._change(session, held, entry, put=True)
        gone: list[Entry[K]] = []
        while held.reply_weight > self.max_reply_bytes:
            gone.append(self._evict(session, held, next(iter(held.replies))))
        while len(held.others) > self.max_events or held.other_weight > self.max_bytes:
            gone.append(self._evict(session, held, next(iter(held.others))))
        while self._weight > self.max_total_bytes:
            largest = next(iter(self._by_size[max(self._by_size)]))
            held = self._sessions[largest]
            gone.append(self._evict(largest, held, next(iter(held.others or held.replies))))
        return gone

    def after(self, session: str, stream: int, seq: int) -> list[Entry[K]]:
        """Return the entries of a stream beyond a number, in order."""
        if (held := self._sessions.get(session)) is None:
            return []
        found = [entry for entry in held.streams.get(stream, {}).values() if entry.seq > seq]
        found.sort(key=lambda entry: entry.seq)
        return found

    def give_up(self, session: str, entry: Entry[K]) -> None:
        """Take out an entry that could not be stored."""
        self._evict(session, self._sessions[session], entry)

    def drop_stream(self, session: str, stream: int) -> list[Entry[K]]:
        """Take out a stream; return what it held."""
        if (held := self._sessions.get(session)) is None:
            return []
        gone = list(held.streams.get(stream, {}).values())
        for entry in gone:
            self._change(session, held, entry, put=False)
        return gone

    def drop_session(self, session: str) -> list[Entry[K]]:
        """Take out a session; return what it held."""
        if (held := self._sessions.get(session)) is None:
            return []
        return [entry for stream in list(held.streams) for entry in self.drop_stream(session, stream)]

    def weight(self, session: str) -> int:
        """Return what a session's events weigh."""
        held = self._sessions.get(session)
        return 0 if held is None else held.reply_weight + held.other_weight

    def clear(self) -> None:
        """Take out everything."""
        for session in list(self._sessions):
            self.drop_session(session)

    def statistics(self) -> EventStatistics:
        """Return what is held now."""
        return EventStatistics(self._events, self._weight, self._evicted)

    def _evict(self, session: str, held: _Held[K], entry: Entry[K]) -> Entry[K]:
        self._evicted += 1
        self._change(session, held, entry, put=False)
        return entry

    def _change(self, session: str, held: _Held[K], entry: Entry[K], *, put: bool) -> None:
        """Put an entry or take it, and keep the sums. A session that holds nothing costs nothing."""
        weight = held.reply_weight + held.other_weight
        before = weight.bit_length()
        if put:
            held.put(entry)
            self._events += 1
            change = entry.weight
        else:
            held.take(entry)
            self._events -= 1
            change = -entry.weight
        self._weight += change
        now = (weight + change).bit_length()
        if now == before:
            return
        if before:
            same = self._by_size[before]
            del same[session]
            if not same:
                del self._by_size[before]
        if now:
            self._by_size.setdefault(now, OrderedDict())[session] = None
        else:
            del self._sessions[session]
