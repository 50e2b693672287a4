"""The queues of a session that are not memory channels: waiting requests, outgoing messages, changes, arrays.

Each has the interface of a Trio channel, and does what a memory channel cannot: bound the bytes of its items, remove or
replace an item before it is received, accept a reply without waiting, keep equal items once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import attrs
import trio

from trimcp.budget import LARGE, STEP
from trimcp.channel import Kind, LaneCounts, Origin, Outgoing, Sink, lane_of
from trimcp.protocol.events import AnsweredByEngine, BatchReceived, Rejected, RequestReceived
from trimcp.session.facts import SessionMemory
from trimcp.session.incoming.job import Job
from trimcp.session.limits import Limits
from trimcp.support.slotted import slotted
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import RequestId, encode_error

if TYPE_CHECKING:
    from trimcp.session.statistics import QueueStatistics

# Memory that a waiting request takes beside its text: its params as objects, its record in the engine, its entries in
# tables and queues. Measured as resident memory of 4,500 to 6,000 calls on CPython 3.11: 1,420 to 1,650 bytes in the
# session era, 1,730 to 1,820 with the envelope of 2026-07-28, and up to 2,090 with texts of 500 to 600 bytes, which
# fragment the heap. Without counting it, a window of 16 MiB held up to 32 MiB of small requests.
EACH: Final = 2100
_HEADER: Final = 100  # bytes that a header takes beside its text
_CONTAINER: Final = 64  # bytes that an array or object takes beside its members

SMALL: Final = 1024
"""Bytes on the wire above which the memory of a request's params is computed, see `weight`."""

_MOST_CHANGES: Final = 10_000

ChangeT = TypeVar("ChangeT", bound=Hashable)


def weight(raw: Mapping[str, Any], size: int) -> int:
    """Return the approximate memory, in bytes, of a request's params, which took `size` bytes on the wire.

    Larger requests are examined in detail: an empty array is three bytes of text and about seventy of memory, and one
    emoji makes a long text four times as large.
    """
    more = 0
    rest: list[Any] = [raw]
    while rest:
        item = rest.pop()
        more += _CONTAINER
        for child in item if type(item) is list else item.values():
            kind = type(child)
            if kind is str:
                if not child.isascii():
                    more += child.__sizeof__() - len(child)
            elif kind is dict or kind is list:
                rest.append(child)
    return size + more


class LazyParkingLot:
    """A parking lot of Trio that is made when the first task waits.

    For what each session has and few ever use: it takes 40 bytes until then, a parking lot 240.
    """

    __slots__ = ("lot",)

    def __init__(self) -> None:
        # the parking lot, or None. Where every message passes, it is asked before anything is called.
        self.lot: trio.lowlevel.ParkingLot | None = None

    def __len__(self) -> int:
        return 0 if self.lot is None else len(self.lot)

    async def park(self) -> None:
        """Wait until woken."""
        if self.lot is None:
            self.lot = trio.lowlevel.ParkingLot()
        await self.lot.park()

    def unpark(self) -> None:
        """Wake the task that has waited longest, if any does."""
        if self.lot:
            self.lot.unpark()

    def unpark_all(self) -> None:
        """Wake all that wait."""
        if self.lot:
            self.lot.unpark_all()


@slotted
class Mailbox(trio.abc.SendChannel[Job], trio.abc.ReceiveChannel[Job]):
    """A channel of requests that wait for a slot: first in, first out, bounded by count and memory.

    A session uses it without waiting: `put` may exceed the bounds by the requests of one read, and the reader checks
    `full` before it reads again.
    """

    max_requests: int
    max_bytes: int
    bytes_queued: int = attrs.field(init=False, default=0)  # memory of the queued requests; 0 only if there are none
    _queue: OrderedDict[Job, int] = attrs.field(init=False, factory=OrderedDict)  # with their memory
    _closed: bool = attrs.field(init=False, default=False)
    _senders: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)
    _receivers: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)

    def __len__(self) -> int:
        return len(self._queue)

    def full(self, parked: int = 0) -> bool:
        """Return whether there is no room, counting `parked` jobs that wait for the peer as well."""
        return len(self._queue) + parked >= self.max_requests or self.bytes_queued >= self.max_bytes

    def leave_room(self, requests: int, size: int) -> None:
        """Lower the bound so that these requests, with `size` bytes of text, still fit; at most by half.

        They are what the last read may bring, and what the channel holds unread meanwhile.
        """
        self.max_bytes -= min(size + EACH * requests, self.max_bytes // 2)

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        weight = job.size + EACH
        headers = job.headers
        # On a WebSocket, or from a client that repeats its headers, the newest job shares the same headers object.
        if headers is not None and not (self._queue and next(reversed(self._queue)).headers is headers):
            weight += _HEADER * len(headers) + sum(map(len, headers.values()))
        self._queue[job] = weight
        self.bytes_queued += weight
        if self._receivers.lot:
            self._receivers.unpark()

    def first(self) -> Job:
        """Return the oldest job without removing it."""
        return next(iter(self._queue))

    def take(self) -> Job:
        """Remove and return the oldest job."""
        job, weight = self._queue.popitem(last=False)
        self._free(weight)
        return job

    def remove(self, job: Job) -> bool:
        """Remove a job at any position; return False if it is not here."""
        weight = self._queue.pop(job, None)
        if weight is None:
            return False
        self._free(weight)
        return True

    def _free(self, weight: int) -> None:
        self.bytes_queued -= weight
        if self._senders.lot:
            self._senders.unpark()

    # The channel interface

    async def send(self, value: Job) -> None:
        await trio.lowlevel.checkpoint()
        while self.full() and not self._closed:
            await self._senders.park()
        if self._closed:
            raise trio.ClosedResourceError
        self.put(value)

    async def receive(self) -> Job:
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._closed:
                raise trio.EndOfChannel
            await self._receivers.park()
        return self.take()

    async def aclose(self) -> None:
        self._closed = True
        self._senders.unpark_all()
        self._receivers.unpark_all()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> QueueStatistics:
        from trimcp.session.statistics import QueueStatistics

        return QueueStatistics(len(self), self.max_requests, len(self._senders), len(self._receivers))


@slotted
class Outbox(Sink, trio.abc.SendChannel[Outgoing], trio.abc.ReceiveChannel[Sequence[Outgoing]]):
    """A bounded channel of outgoing messages for a writer task, which receives all that are queued at once."""

    queues: ClassVar[bool] = True
    max_messages: int  # the most messages that may wait
    max_bytes: int  # the most bytes that may wait. A single message may exceed it, so that a large result can be sent.
    counts: LaneCounts = attrs.field(factory=LaneCounts)  # counts the messages replaced by a later one
    bytes_queued: int = attrs.field(init=False, default=0)  # bytes that wait, without those of `post_latest`
    batches: int = attrs.field(init=False, default=0)  # number of batches that the writer has received
    # whether the writer has received a batch and not yet written it
    writing: bool = attrs.field(init=False, default=False)
    leaving: int = attrs.field(init=False, default=0)  # bytes that the writer has received and not yet written
    # sends a message while the writer sends nothing, and returns the rest; None if only the writer can
    send_nowait: Callable[[Outgoing], Outgoing | None] | None = attrs.field(init=False, default=None)
    _queue: list[Outgoing] = attrs.field(init=False, factory=list)  # an empty deque takes ten times as much memory
    _latest: dict[Hashable, Outgoing] = attrs.field(init=False, factory=dict)
    # called each time that what waits has grown by `STEP`, to count it as memory of the peer; None where nobody does
    weigh: Callable[[], object] | None = attrs.field(init=False, default=None)
    _weigh_at: int = attrs.field(init=False, default=STEP)  # bytes queued at which it is called
    _waiting_writer: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)
    _waiting_senders: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)
    _closed: bool = attrs.field(init=False, default=False)

    @classmethod
    def of(cls, limits: Limits) -> Outbox:
        """Return an empty outbox with the bounds of a session."""
        return cls(limits.outbox_messages, limits.outbox_bytes)

    def __len__(self) -> int:
        return len(self._queue) + len(self._latest)

    @property
    def full(self) -> bool:
        return len(self._queue) >= self.max_messages or self.bytes_queued >= self.max_bytes

    @property
    def bytes_held(self) -> int:
        return self.bytes_queued + self.leaving

    def full_of_replies(self, times: int = 1) -> bool:
        """Return whether answers alone fill it `times` times: the peer sends more requests than it reads answers.

        Our requests and cancels do not count. If they stopped us from reading, two peers that both have much to send
        could wait for each other.
        """
        most, most_bytes = times * self.max_messages, times * self.max_bytes
        if len(self._queue) < most and self.bytes_queued < most_bytes:
            return False
        replies = [len(outgoing.data) for outgoing in self._queue if outgoing.kind is Kind.REPLY]
        return len(replies) >= most or sum(replies) >= most_bytes

    async def room(self) -> None:
        """Wait until there is room, or until the outbox is closed."""
        while self.full and not self._closed:
            await self._waiting_senders.park()

    async def send(self, value: Outgoing) -> None:
        await trio.lowlevel.checkpoint()
        await self.room()
        if self._closed:
            raise trio.ClosedResourceError
        self.post(value)

    def post(self, outgoing: Outgoing) -> None:
        """Enqueue without waiting. After `close` the message is dropped."""
        if self._closed:
            return
        queue = self._queue
        if not queue:  # the writer waits only while there is nothing
            self._waiting_writer.unpark()
        queue.append(outgoing)
        self.bytes_queued += len(outgoing.data)
        if self.bytes_queued >= self._weigh_at and self.weigh is not None:
            self._weigh_at = self.bytes_queued + STEP
            self.weigh()

    def post_alone(self, outgoing: Outgoing) -> None:
        """Send at once what `send_nowait` takes, if nothing is before it; the writer saves its turns then.

        A large message is left to the writer: a pipe would not take the whole.
        """
        now = self.send_nowait
        if now is None or len(outgoing.data) > LARGE or self.writing or self._queue or self._latest or self._closed:
            self.post(outgoing)
        elif (rest := now(outgoing)) is not None:
            self.post(rest)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        if self._closed:
            return
        if key in self._latest:
            self.counts.merge(lane_of(outgoing))
        self._latest[key] = outgoing
        if self._waiting_writer.lot:
            self._waiting_writer.unpark()

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        outgoing = self._latest.pop(key, None)
        if outgoing is not None and keep:
            self.post(outgoing)

    def withdraw(self, request_id: RequestId) -> bool:
        """Remove a request of ours that the writer has not received yet; return False if it has."""
        for outgoing in self._queue:
            if outgoing.request_id == request_id and outgoing.kind is Kind.REQUEST:
                self._queue.remove(outgoing)
                self.bytes_queued -= len(outgoing.data)
                self._waiting_senders.unpark_all()
                return True
        return False

    async def receive(self) -> Sequence[Outgoing]:
        """Wait for messages and return all that are queued, to be sent in one write.

        Raises trio.EndOfChannel: the outbox is closed and empty.
        """
        self.writing = False
        self.leaving = 0
        while not self._queue and not self._latest:
            if self._closed:
                raise trio.EndOfChannel
            await self._waiting_writer.park()
        batch, self._queue = self._queue, []
        self.leaving = self.bytes_queued
        if self._latest:
            self.leaving += sum(len(outgoing.data) for outgoing in self._latest.values())
            batch.extend(self._latest.values())
            self._latest.clear()
        self.bytes_queued = 0
        self._weigh_at = STEP
        self.writing = True
        self.batches += 1
        if self._waiting_senders.lot:
            self._waiting_senders.unpark_all()
        return batch

    def take_next(self) -> Outgoing | None:
        """Remove and return the next message, or None if none waits."""
        if self._queue:
            outgoing = self._queue.pop(0)  # of few: who takes one by one takes each at once
            self.bytes_queued -= len(outgoing.data)
            if self._waiting_senders.lot and not self.full:
                self._waiting_senders.unpark_all()
            return outgoing
        if self._latest:
            return self._latest.pop(next(iter(self._latest)))
        return None

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        return [*self._queue, *self._latest.values()], self.leaving

    def close(self) -> None:
        """Send what is queued, and accept nothing more. Waiting senders continue, and their messages are dropped."""
        self._closed = True
        self._waiting_writer.unpark_all()
        self._waiting_senders.unpark_all()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> QueueStatistics:
        from trimcp.session.statistics import QueueStatistics

        senders, writers = len(self._waiting_senders), len(self._waiting_writer)
        return QueueStatistics(len(self), self.max_messages, senders, writers)

    def abandon(self) -> None:
        """Close, and drop what is queued: the connection is gone."""
        self._queue.clear()
        self._latest.clear()
        self.bytes_queued = 0
        self.weigh = None  # which refers to this
        self.close()


@slotted
class Changes(trio.abc.ReceiveChannel[ChangeT]):
    """A receive channel of changes: each change once, in the order of arrival."""

    # the exception raised once all were received, or None while more may arrive
    end: BaseException | None = attrs.field(init=False, default=None)
    _kept: dict[ChangeT, None] = attrs.field(init=False, factory=dict)
    _waiting: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)

    async def receive(self) -> ChangeT:
        """Wait for the next one, or raise the end. Cancelling this loses nothing."""
        await self._wait()
        change = next(iter(self._kept))
        del self._kept[change]
        await trio.lowlevel.cancel_shielded_checkpoint()
        return change

    async def receive_all(self) -> list[ChangeT]:
        """Wait for one, and return all that are queued; else as `receive`."""
        await self._wait()
        changes = list(self._kept)
        self._kept.clear()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return changes

    async def _wait(self) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._kept:
            if self.end is not None:
                raise self.end
            await self._waiting.park()

    def add(self, change: ChangeT) -> None:
        """Add a change, unless the channel has ended."""
        if self.end is None:
            self._kept[change] = None
            self._waiting.unpark_all()

    def keep(self, change: ChangeT, size: int, limits: Limits, counts: LaneCounts) -> None:
        """Add a change from a message of `size` bytes. If there are too many already, drop and count it."""
        if len(self._kept) < limits.kept_of(_MOST_CHANGES, size) or change in self._kept:
            self.add(change)
        elif self.end is None:
            counts.drop("changes")

    def finish(self, end: BaseException) -> None:
        """Accept no more changes. Only the first end is kept."""
        if self.end is None:
            self.end = end
        self._waiting.unpark_all()

    async def aclose(self) -> None:
        self._kept.clear()
        self.end = trio.ClosedResourceError()
        self._waiting.unpark_all()
        await trio.lowlevel.checkpoint()


@slotted
class BatchSink(Sink):
    """The sink of one array of messages (2025-03-26): its replies are sent together, once all of them are ready.

    Everything else is sent at once. An array of notifications is never answered.
    """

    below: Sink  # the sink of the connection that the array was received on
    origin: Origin | None  # where it was received
    memory: SessionMemory  # of the session, with the bytes that wait in all its arrays,
    most: int  # and the bound on them
    _waiting: set[RequestId] = attrs.field(init=False, factory=set)
    _replies: list[bytes] = attrs.field(init=False, factory=list)

    def expect(self, event: BatchReceived) -> None:
        """Wait for the replies to an array's requests, some of which may be ready. If all are, send them now."""
        for member in event.events:
            if isinstance(member, RequestReceived):
                self._waiting.add(member.id)
            elif isinstance(member, AnsweredByEngine | Rejected) and member.reply is not None:
                self._keep(member.reply)
        self._send_if_whole()

    def _keep(self, reply: bytes) -> None:
        self._replies.append(reply)
        self.memory.in_arrays += len(reply)

    def _send_if_whole(self) -> None:
        if self._replies and not self._waiting:
            self.memory.in_arrays -= sum(map(len, self._replies))
            array, self._replies = b"[" + b",".join(self._replies) + b"]", []
            self.below.post(Outgoing(array, Kind.REPLY, None, self.origin))

    @property
    def full(self) -> bool:
        return self.below.full

    async def room(self) -> None:
        await self.below.room()

    def post(self, outgoing: Outgoing) -> None:
        """Keep the reply to a request of the array; the last one sends the array. Send anything else at once."""
        id, data = outgoing.request_id, outgoing.data
        if outgoing.kind is not Kind.REPLY or id not in self._waiting:
            self.below.post(outgoing)
            return
        if self.memory.in_arrays and self.memory.in_arrays + len(data) > self.most:
            # An array whose last reply never arrives must not collect replies without bounds.
            data = encode_error(id, OVERLOADED, "too many replies wait for others of their arrays")
        self._waiting.discard(id)
        self._keep(data)
        self._send_if_whole()

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        self.below.post_latest(key, outgoing)

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        self.below.finish_latest(key, keep=keep)

    def withdraw(self, request_id: RequestId) -> bool:
        return self.below.withdraw(request_id)

    def unanswered(self, request_id: RequestId) -> None:
        """Stop waiting for the reply to a request that gets none."""
        self._waiting.discard(request_id)
        if self._waiting or not self._replies:
            self.below.unanswered(request_id)
        else:
            self._send_if_whole()

    def release(self) -> None:
        self.below.release()
