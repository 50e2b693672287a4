"""A snapshot of one session, for tests, dashboards and debugging."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import attrs

from trimcp.channel import LANES, HttpClientStatistics, LaneCounts, Outgoing, lane_of
from trimcp.support.slotted import valued


@attrs.frozen
@valued
class QueueStatistics:
    """How full a queue of a session is, with the field names of Trio's memory channels."""

    # `current_buffer_used`, `max_buffer_size`: items in it, and the most there may be; bytes are bounded, too
    current_buffer_used: int
    max_buffer_size: int
    # `tasks_waiting_send`, `tasks_waiting_receive`: tasks that wait for room, or for an item
    tasks_waiting_send: int
    tasks_waiting_receive: int


@attrs.frozen
@valued
class Lane:
    """Messages of one kind, while the peer is slow.

    Attributes:
        messages, bytes: held for the peer, not yet passed to its connection.
        merged: messages replaced by a later one of their kind.
        dropped: messages that will not be delivered.
    """

    messages: int = 0
    bytes: int = 0
    merged: int = 0
    dropped: int = 0

    def __add__(self, other: Lane) -> Lane:
        return Lane(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.merged + other.merged,
            self.dropped + other.dropped,
        )


@attrs.frozen
@valued
class Lanes:
    """All lanes; docs/reference/lanes.md describes each. `one + other` adds those of two sessions.

    Attributes:
        replies: results and errors. None is merged or dropped while the peer is connected.
        requests: our requests.
        progress, logs: of requests in progress; on the receiving side, those kept for a slow reader or handler.
        changes: changed lists and updated resources.
        others: cancellations, and notifications of other kinds.
    """

    replies: Lane = Lane()
    requests: Lane = Lane()
    progress: Lane = Lane()
    logs: Lane = Lane()
    changes: Lane = Lane()
    others: Lane = Lane()

    def __add__(self, other: Lanes) -> Lanes:
        if other is _NOTHING:
            return self
        return Lanes(**{name: getattr(self, name) + getattr(other, name) for name in LANES})

    @property
    def merged(self) -> int:
        """Messages of any lane that were replaced by a later one."""
        return sum(getattr(self, name).merged for name in LANES)

    @property
    def dropped(self) -> int:
        """Messages of any lane that will not be delivered."""
        return sum(getattr(self, name).dropped for name in LANES)


_NOTHING = Lanes()  # of a session whose peer has never been slow: nearly each


@attrs.frozen
@valued
class Statistics:
    """A snapshot of one session.

    Attributes:
        running: handlers that run, without those that wait for the peer.
        parked: handlers that wait for the peer's answer to a question.
        waiting: requests that wait for a slot; `waiting_bytes` is their memory, including more than their text.
        pending: our calls that the peer has not answered.
        outbox, outbox_bytes: messages that wait for the writer; over HTTP, those held back for a slow reader.
        merged: messages replaced by a later one of their kind.
        dropped: messages dropped because their reader was slow or gone.
        abandoned_threads: threads that still run after their call ended, because threads cannot be stopped.
        unread_bytes: bytes passed to the writer, or to the connections of requests in progress, but not taken yet.
        lanes: messages held, merged and dropped, by lane.
        http: the connections of a client over HTTP; None for every other session.
    """

    running: int
    parked: int
    waiting: int
    waiting_bytes: int
    pending: int
    outbox: int
    outbox_bytes: int
    merged: int
    dropped: int
    abandoned_threads: int
    unread_bytes: int = 0
    lanes: Lanes = Lanes()
    http: HttpClientStatistics | None = None


def lanes_of(counts: LaneCounts, held: Collection[Outgoing] = ()) -> Lanes:
    """Return the counts and the held messages by lane."""
    if not (held or counts.merged or counts.dropped):
        return _NOTHING
    messages, sizes = Counter[str](), Counter[str]()
    for outgoing in held:
        lane = lane_of(outgoing)
        messages[lane] += 1
        sizes[lane] += len(outgoing.data)
    merged, dropped = counts.merged, counts.dropped
    return Lanes(
        **{name: Lane(messages[name], sizes[name], merged.get(name, 0), dropped.get(name, 0)) for name in LANES}
    )
