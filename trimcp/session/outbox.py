"""The only road from a session to its wire: bounded, in order, with one reader (the session's writer).

It is a class of its own and no memory channel because of what the lanes need: room counted in bytes, a request
withdrawn before it was written, a control message that never waits, and messages of which only the latest counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

import attrs
import trio

from trimcp.channel import Kind, LaneCounts, Outgoing, lane_of
from trimcp.session.limits import Limits
from trimcp.wire.jsonrpc import RequestId

__all__ = ["Outbox"]

_FLOOD = 16


@attrs.define(eq=False, repr=False)
class Outbox:
    """A bounded queue of outgoing messages for a writer task.

    Args:
        max_messages: how many may wait.
        max_bytes: what they may weigh. One message may exceed it, or a large result could never leave.
        counts: where messages are counted that gave way to a later one.

    Attributes:
        bytes_queued: what waits, without what only the latest counts of.
        steps: odd while the writer waits for messages, even while it writes those it took; never the same again.
    """

    max_messages: int
    max_bytes: int
    counts: LaneCounts = attrs.field(factory=LaneCounts)
    bytes_queued: int = attrs.field(init=False, default=0)
    steps: int = attrs.field(init=False, default=0)
    _leaving: int = attrs.field(init=False, default=0)
    _queue: deque[Outgoing] = attrs.field(init=False, factory=deque)
    _latest: dict[Hashable, Outgoing] = attrs.field(init=False, factory=dict)
    _waiting_writer: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _waiting_senders: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _closed: bool = attrs.field(init=False, default=False)
    _replies: int = attrs.field(init=False, default=0)
    _reply_bytes: int = attrs.field(init=False, default=0)

    @classmethod
    def of(cls, limits: Limits) -> Outbox:
        """Return an empty one with the bounds of a session."""
        return cls(limits.outbox_messages, limits.outbox_bytes)

    def __len__(self) -> int:
        return len(self._queue) + len(self._latest)

    @property
    def writing(self) -> bool:
        """Whether the writer has taken messages and is not back."""
        return self.steps > 0 and not self.steps % 2

    @property
    def full(self) -> bool:
        """Whether a sender has to wait for room first."""
        return len(self._queue) >= self.max_messages or self.bytes_queued >= self.max_bytes

    @property
    def full_of_replies(self) -> bool:
        """Whether answers alone fill it: the peer asks more than it reads.

        Requests and cancels of ours do not count. If they kept us from reading, two peers that both have much to
        say could wait for each other.
        """
        return self._replies >= self.max_messages or self._reply_bytes >= self.max_bytes

    @property
    def flooded(self) -> bool:
        """Whether the answers are so many that not even an answer to us is worth reading on for."""
        return self._replies >= _FLOOD * self.max_messages or self._reply_bytes >= _FLOOD * self.max_bytes

    async def room(self) -> None:
        """Wait until there is room, or until the outbox is closed and room no longer matters."""
        while self.full and not self._closed:
            await self._waiting_senders.park()

    def post(self, outgoing: Outgoing) -> None:
        """Enqueue without waiting. After `close` the message is dropped: nobody is listening."""
        if self._closed:
            return
        self._queue.append(outgoing)
        size = len(outgoing.data)
        self.bytes_queued += size
        if outgoing.kind is Kind.REPLY:
            self._replies += 1
            self._reply_bytes += size
        if self._waiting_writer:
            self._waiting_writer.unpark()

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Enqueue, in place of an earlier message of the same key that has not left yet."""
        if self._closed:
            return
        if key in self._latest:
            self.counts.merge(lane_of(outgoing))
        self._latest[key] = outgoing
        if self._waiting_writer:
            self._waiting_writer.unpark()

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:
        """Put the latest message of `key` in order before what is posted next, or drop it."""
        outgoing = self._latest.pop(key, None)
        if outgoing is not None and keep:
            self.post(outgoing)

    def withdraw(self, request_id: RequestId) -> bool:
        """Take back a request of ours that the writer has not taken yet; False if it has."""
        for outgoing in self._queue:
            if outgoing.request_id == request_id and outgoing.kind is Kind.REQUEST:
                self._queue.remove(outgoing)
                self.bytes_queued -= len(outgoing.data)
                self._free_room()
                return True
        return False

    def unanswered(self, request_id: RequestId) -> None:
        """Do nothing: no road waits for the answer."""

    def release(self) -> None:
        """Do nothing: there is one road, and it stays."""

    async def receive(self) -> Sequence[Outgoing]:
        """Wait for messages and return all there are: what one write should carry.

        Raises:
            trio.EndOfChannel: the outbox is closed and empty.
        """
        self.steps += 1
        while not self._queue and not self._latest:
            if self._closed:
                raise trio.EndOfChannel
            await self._waiting_writer.park()
        batch = list(self._queue)
        self._queue.clear()
        self._leaving = self.bytes_queued
        if self._latest:
            self._leaving += sum(len(outgoing.data) for outgoing in self._latest.values())
            batch.extend(self._latest.values())
            self._latest.clear()
        self.bytes_queued = self._replies = self._reply_bytes = 0
        self.steps += 1
        self._free_room()
        return batch

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return what is queued, and the bytes in the writer's hands."""
        return [*self._queue, *self._latest.values()], self._leaving if self.writing else 0

    def _free_room(self) -> None:
        if self._waiting_senders:
            self._waiting_senders.unpark_all()

    def close(self) -> None:
        """Let what is queued leave, and nothing after it. Waiting senders go on and find nobody listening."""
        self._closed = True
        self._waiting_writer.unpark_all()
        self._waiting_senders.unpark_all()

    def abandon(self) -> None:
        """Close and throw away what is queued: the wire is gone."""
        self._queue.clear()
        self._latest.clear()
        self.bytes_queued = self._replies = self._reply_bytes = 0
        self.close()
