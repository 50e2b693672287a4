"""What leaves a session: the outbox for its writer, and a sink for each array of messages (2025-03-26).

The outbox is a class of its own and no memory channel because of what the lanes need: room counted in bytes, a request
withdrawn before it was written, a control message that never waits, and messages of which only the latest counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.channel import Kind, LaneCounts, Origin, Outgoing, Sink, lane_of
from trimcp.protocol.events import BatchReceived, Rejected, RequestReceived, Settled
from trimcp.session.limits import Limits
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import RequestId, encode_error

if TYPE_CHECKING:
    from trimcp.session.statistics import QueueStatistics

__all__ = ["BatchSink", "HeldReplies", "Outbox"]

_FLOOD: Final = 16


@attrs.define(eq=False, repr=False)
class Outbox(Sink, trio.abc.SendChannel[Outgoing], trio.abc.ReceiveChannel[Sequence[Outgoing]]):
    """A bounded channel of outgoing messages for a writer task, which receives all there are at once.

    Args:
        max_messages: how many may wait.
        max_bytes: what they may weigh. One message may exceed it, or a large result could never leave.
        counts: where messages are counted that gave way to a later one.

    Attributes:
        bytes_queued: what waits, without what only the latest counts of.
        leaving: bytes that the writer has taken and not yet written.
        steps: even while a write is in progress, odd while the writer waits for messages. It only grows.
    """

    max_messages: int
    max_bytes: int
    counts: LaneCounts = attrs.field(factory=LaneCounts)
    bytes_queued: int = attrs.field(init=False, default=0)
    steps: int = attrs.field(init=False, default=0)
    leaving: int = attrs.field(init=False, default=0)
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

    async def send(self, value: Outgoing) -> None:
        """Wait for room, then enqueue a message.

        Raises:
            trio.ClosedResourceError: the outbox is closed.
        """
        await trio.lowlevel.checkpoint()
        await self.room()
        if self._closed:
            raise trio.ClosedResourceError
        self.post(value)

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

    async def receive(self) -> Sequence[Outgoing]:
        """Wait for messages and return all there are: what one write should carry.

        Raises:
            trio.EndOfChannel: the outbox is closed and empty.
        """
        self.steps += 1
        self.leaving = 0
        while not self._queue and not self._latest:
            if self._closed:
                raise trio.EndOfChannel
            await self._waiting_writer.park()
        batch = list(self._queue)
        self._queue.clear()
        self.leaving = self.bytes_queued
        if self._latest:
            self.leaving += sum(len(outgoing.data) for outgoing in self._latest.values())
            batch.extend(self._latest.values())
            self._latest.clear()
        self.bytes_queued = self._replies = self._reply_bytes = 0
        self.steps += 1
        self._free_room()
        return batch

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        """Return what is queued, and the bytes that the writer has taken and not yet written."""
        return [*self._queue, *self._latest.values()], self.leaving

    def _free_room(self) -> None:
        if self._waiting_senders:
            self._waiting_senders.unpark_all()

    def close(self) -> None:
        """Let what is queued leave, and nothing after it. Waiting senders go on and find nobody listening."""
        self._closed = True
        self._waiting_writer.unpark_all()
        self._waiting_senders.unpark_all()

    async def aclose(self) -> None:
        """As `close`, with a checkpoint."""
        self.close()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> QueueStatistics:
        """Return how full it is and who waits."""
        from trimcp.session.statistics import QueueStatistics

        senders, writers = len(self._waiting_senders), len(self._waiting_writer)
        return QueueStatistics(len(self), self.max_messages, senders, writers)

    def abandon(self) -> None:
        """Close, and drop what is queued: the connection is gone."""
        self._queue.clear()
        self._latest.clear()
        self.bytes_queued = self._replies = self._reply_bytes = 0
        self.close()


@attrs.define(eq=False, repr=False)
class HeldReplies:
    """How many bytes of replies wait for others of their arrays, in one session, and how many may."""

    most: int
    bytes: int = 0


@attrs.define(eq=False, repr=False)
class BatchSink(Sink):
    """Where what belongs to one array goes: its replies leave together as one array, once all are there.

    Everything else goes straight on. An array of notifications is never answered.

    Args:
        below: the sink that the array came by.
        origin: where it came in.
        held: what waits in all arrays of the session.
    """

    below: Sink
    origin: Origin | None
    held: HeldReplies
    _waiting: set[RequestId] = attrs.field(init=False, factory=set)
    _replies: list[bytes] = attrs.field(init=False, factory=list)

    def expect(self, event: BatchReceived) -> None:
        """Wait for the replies to an array's requests. Those that are known already count; all of them leave now."""
        for member in event.events:
            if isinstance(member, RequestReceived):
                self._waiting.add(member.id)
            elif isinstance(member, Settled | Rejected) and member.reply is not None:
                self._keep(member.reply)
        self._send_if_whole()

    def _keep(self, reply: bytes) -> None:
        self._replies.append(reply)
        self.held.bytes += len(reply)

    def _send_if_whole(self) -> None:
        if self._replies and not self._waiting:
            self.held.bytes -= sum(map(len, self._replies))
            array, self._replies = b"[" + b",".join(self._replies) + b"]", []
            self.below.post(Outgoing(array, Kind.REPLY, None, self.origin))

    @property
    def full(self) -> bool:
        """Whether a sender has to wait for room first."""
        return self.below.full

    async def room(self) -> None:
        """Wait until there is room."""
        await self.below.room()

    def post(self, outgoing: Outgoing) -> None:
        """Keep the reply to a request of the array; the last one sends the array. Send anything else now."""
        id, data = outgoing.request_id, outgoing.data
        if outgoing.kind is not Kind.REPLY or id not in self._waiting:
            self.below.post(outgoing)
            return
        if self.held.bytes and self.held.bytes + len(data) > self.held.most:
            # An array whose last reply never comes must not collect without bounds what nobody can read.
            data = encode_error(id, OVERLOADED, "too many replies wait for others of their arrays")
        self._waiting.discard(id)
        self._keep(data)
        self._send_if_whole()

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        """Send it in place of an earlier message of the same key that has not left yet."""
        self.below.post_latest(key, outgoing)

    def settle_latest(self, key: Hashable, *, keep: bool) -> None:
        """Put the latest message of `key` in order before what is posted next, or drop it."""
        self.below.settle_latest(key, keep=keep)

    def withdraw(self, request_id: RequestId) -> bool:
        """Take back a request that has not left yet; False if it has."""
        return self.below.withdraw(request_id)

    def unanswered(self, request_id: RequestId) -> None:
        """Wait no longer for the reply to a request that gets none."""
        self._waiting.discard(request_id)
        if self._waiting or not self._replies:
            self.below.unanswered(request_id)
        else:
            self._send_if_whole()

    def release(self) -> None:
        """Let the peer's connection go, where the transport lets it come back for the rest."""
        self.below.release()
