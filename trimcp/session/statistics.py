"""A snapshot of one session, for tests, dashboards and whoever wonders what it is doing."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable

import attrs

from trimcp.channel import LANES, LaneCounts, Outgoing, lane_of
from trimcp.values import valued


@attrs.frozen
@valued
class QueueStatistics:
    """How full a queue of a session is, in the words of Trio's memory channels.

    Attributes:
        current_buffer_used, max_buffer_size: items in it, and how many there may be; bytes are bounded, too.
        tasks_waiting_send, tasks_waiting_receive: who waits for room, or for an item.
    """

    current_buffer_used: int
    max_buffer_size: int
    tasks_waiting_send: int
    tasks_waiting_receive: int


@attrs.frozen
@valued
class Lane:
    """Messages of one kind, while the peer is slow.

    Attributes:
        messages, bytes: what is held for the peer, not yet handed to its connection.
        merged: messages that gave way to a later one of their kind.
        dropped: messages that nobody will see.
    """

    messages: int = 0
    bytes: int = 0
    merged: int = 0
    dropped: int = 0

    def __add__(self, other: Lane) -> Lane:
        return Lane(*map(operator.add, attrs.astuple(self), attrs.astuple(other)))


@attrs.frozen
@valued
class Lanes:
    """All lanes; docs/reference/lanes.md says what becomes of each. `one + other` adds those of two sessions.

    Attributes:
        replies: results and errors. None is ever merged or dropped while the peer is there.
        requests: questions of ours.
        progress, logs: of requests under way; on the receiving side what was kept for a slow reader or handler.
        changes: lists that changed, resources that were updated.
        others: cancellations, and notifications of other kinds.
    """

    replies: Lane = Lane()
    requests: Lane = Lane()
    progress: Lane = Lane()
    logs: Lane = Lane()
    changes: Lane = Lane()
    others: Lane = Lane()

    def __add__(self, other: Lanes) -> Lanes:
        return Lanes(**{name: getattr(self, name) + getattr(other, name) for name in LANES})

    @property
    def merged(self) -> int:
        """Messages of any lane that gave way to a later one."""
        return sum(getattr(self, name).merged for name in LANES)

    @property
    def dropped(self) -> int:
        """Messages of any lane that nobody will see."""
        return sum(getattr(self, name).dropped for name in LANES)


@attrs.frozen
@valued
class Statistics:
    """A snapshot of one session.

    Attributes:
        running: handlers at work, those that wait for the peer not counted.
        parked: handlers that wait for the peer's answer to a question.
        waiting: requests waiting for a running slot; `waiting_bytes` is what they weigh, beside their text too.
        pending: calls of ours the peer has not answered.
        outbox, outbox_bytes: messages waiting for the writer; over HTTP those held back for a slow reader.
        merged: messages that gave way to a later one of their kind.
        dropped: messages dropped because their reader was slow or gone.
        abandoned_threads: threads whose call is over but which cannot be stopped.
        unread_bytes: what was handed to the writer, or to the connections of requests under way, and is not taken yet.
        lanes: what waits, was merged and was dropped, by lane.
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


def lanes_of(counts: LaneCounts, held: Iterable[Outgoing] = ()) -> Lanes:
    """Return what was counted, and what is held, by lane."""
    messages, sizes = Counter[str](), Counter[str]()
    for outgoing in held:
        lane = lane_of(outgoing)
        messages[lane] += 1
        sizes[lane] += len(outgoing.data)
    merged, dropped = counts.merged, counts.dropped
    return Lanes(
        **{name: Lane(messages[name], sizes[name], merged.get(name, 0), dropped.get(name, 0)) for name in LANES}
    )
