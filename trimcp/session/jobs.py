"""Requests of the peer under way and waiting: slots, backlog and parking, each counted once.

A request starts at once while a slot is free. Beyond the slots it waits in the mailbox, and the job that ends starts
the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.budget import STEP, Amount
from trimcp.session.crew import Crew
from trimcp.session.job import CancelReason, Job
from trimcp.session.limits import Limits
from trimcp.wire.jsonrpc import RequestId

if TYPE_CHECKING:
    from trimcp.session.statistics import QueueStatistics

__all__ = ["EACH", "Jobs", "Mailbox", "weight"]

# What a request takes beside its text while it waits: its params as objects, its record with the engine, its places in
# tables and queues. Measured as resident memory of 4,500 to 6,000 calls on CPython 3.11: 1,420 to 1,650 bytes in the
# session era, 1,730 to 1,820 with the envelope of 2026-07-28, and up to 2,090 with texts of 500 to 600 bytes, which
# leave holes in the heap. Not weighed, a window of 16 MiB held up to 32 MiB of small requests.
EACH: Final = 2100
_HEADER: Final = 100  # what a header takes beside its text
_SMALL: Final = 1024
_CONTAINER: Final = 64
_RUNNING: Final = 4096  # bytes that a request under way takes beside its text: its records, and a task once it waits


def weight(raw: Mapping[str, Any], size: int) -> int:
    """Return roughly what a request's params occupy, which took `size` bytes on the wire.

    An empty array is three bytes there and some seventy here, and one emoji makes a long text four times as large, so
    larger requests are looked through.
    """
    if size < _SMALL:
        return size
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


@attrs.define(eq=False, repr=False)
class Mailbox(trio.abc.SendChannel[Job], trio.abc.ReceiveChannel[Job]):
    """A channel of requests that wait for a running slot: first in, first out, bounded by count and weight.

    A session uses it without waiting: `put` may overfill it by what one read brought, and `full` is what the reader
    asks before it reads again. It is no memory channel because of the weights, and since a request may be cancelled
    while it waits.

    Attributes:
        bytes_queued: what waits here, as memory and not as text: each job weighs something by itself.
    """

    max_requests: int
    max_bytes: int
    bytes_queued: int = attrs.field(init=False, default=0)
    _queue: OrderedDict[Job, int] = attrs.field(init=False, factory=OrderedDict)  # with their weights
    _closed: bool = attrs.field(init=False, default=False)
    _senders: trio.lowlevel.ParkingLot | None = attrs.field(init=False, default=None)  # made by the first that waits
    _receivers: trio.lowlevel.ParkingLot | None = attrs.field(init=False, default=None)

    def __len__(self) -> int:
        return len(self._queue)

    def full(self, parked: int = 0) -> bool:
        """Return whether there is no room, counting `parked` jobs that wait for the peer as well."""
        return len(self._queue) + parked >= self.max_requests or self.bytes_queued >= self.max_bytes

    def leave_room(self, requests: int, size: int) -> None:
        """Be full so much earlier that these still fit, with so many bytes of text; but not before it is half full.

        They are what arrives with the last read, and what lies unread in the channel meanwhile.
        """
        self.max_bytes -= min(size + EACH * requests, self.max_bytes // 2)

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        weight = job.size + EACH
        headers = job.headers
        if headers is not None and not self._shared(headers):
            weight += _HEADER * len(headers) + sum(map(len, headers.values()))
        self._queue[job] = weight
        self.bytes_queued += weight
        if self._receivers is not None:
            self._receivers.unpark()

    def _shared(self, headers: Mapping[str, str]) -> bool:
        """Return whether the newest job has the same ones, as on a WebSocket, and from a client that repeats itself."""
        return bool(self._queue) and next(reversed(self._queue)).headers is headers

    def first(self) -> Job:
        """Return the oldest job, which stays."""
        return next(iter(self._queue))

    def take(self) -> Job:
        """Remove and return the oldest job."""
        job, weight = self._queue.popitem(last=False)
        self._free(weight)
        return job

    def remove(self, job: Job) -> bool:
        """Remove a job wherever it stands; False if it is not here."""
        weight = self._queue.pop(job, None)
        if weight is None:
            return False
        self._free(weight)
        return True

    def _free(self, weight: int) -> None:
        self.bytes_queued -= weight
        if self._senders is not None:
            self._senders.unpark()

    # As a channel

    async def send(self, value: Job) -> None:
        """Wait for room, then add a job at the end.

        Raises:
            trio.ClosedResourceError: the mailbox is closed.
        """
        await trio.lowlevel.checkpoint()
        while self.full() and not self._closed:
            if self._senders is None:
                self._senders = trio.lowlevel.ParkingLot()
            await self._senders.park()
        if self._closed:
            raise trio.ClosedResourceError
        self.put(value)

    async def receive(self) -> Job:
        """Wait for a job, and remove and return the oldest.

        Raises:
            trio.EndOfChannel: the mailbox is closed and empty.
        """
        await trio.lowlevel.checkpoint()
        while not self._queue:
            if self._closed:
                raise trio.EndOfChannel
            if self._receivers is None:
                self._receivers = trio.lowlevel.ParkingLot()
            await self._receivers.park()
        return self.take()

    async def aclose(self) -> None:
        """Take no more; what waits can still be received."""
        self._closed = True
        for waiting in (self._senders, self._receivers):
            if waiting is not None:
                waiting.unpark_all()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> QueueStatistics:
        """Return how full it is and who waits."""
        from trimcp.session.statistics import QueueStatistics

        senders, receivers = (0 if lot is None else len(lot) for lot in (self._senders, self._receivers))
        return QueueStatistics(len(self), self.max_requests, senders, receivers)


@attrs.define(eq=False, repr=False)
class Jobs:
    """The requests of one session's peer that were admitted and are not answered.

    Args:
        limits: how many may run and wait, and what they may weigh. One job alone may exceed it.

    Attributes:
        crew: who runs them, for this session and perhaps for others; None until the session is driven.
        by_id: all of them.
        mailbox: those that wait for a slot.
        running: those in slots; the ones that wait for the peer's answer to a question are not among them.
        parked: those that wait for such an answer.
        bytes_running: what those under way weigh, their results counted while they wait for the reader.
        bytes_unread: results among it.
    """

    limits: Limits
    crew: Crew | None = None
    by_id: dict[RequestId, Job] = attrs.field(init=False, factory=dict)
    mailbox: Mailbox = attrs.field(init=False)
    running: int = attrs.field(init=False, default=0)
    parked: int = attrs.field(init=False, default=0)
    bytes_running: int = attrs.field(init=False, default=0)
    bytes_unread: int = attrs.field(init=False, default=0)
    _unread: trio.lowlevel.ParkingLot | None = attrs.field(init=False, default=None)  # who waits for less of it
    _idle: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.mailbox = Mailbox(self.limits.backlog_requests, self.limits.backlog_bytes)

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.by_id.values())

    # Start

    @property
    def full(self) -> bool:
        """Whether so many wait that no more should be read."""
        return self.mailbox.full(self.parked)

    def has_room(self, job: Job) -> bool:
        """Return whether this job may start now."""
        held = self.bytes_running
        return self.running < self.limits.max_running and (not held or held + job.size <= self.limits.running_bytes)

    def start(self, job: Job) -> None:
        """Give a job a slot and have it run."""
        assert self.crew is not None
        self.running += 1
        self.bytes_running += job.size
        job.started = True
        job.since = trio.current_time()
        self.crew.take(job)

    def start_waiting(self) -> None:
        """Start jobs that wait, as far as slots allow."""
        while self.mailbox and self.has_room(self.mailbox.first()):
            self.start(self.mailbox.take())

    # Wait for the peer

    @contextmanager
    def waiting_for_peer(self, job: Job) -> Iterator[None]:
        """Give the job's slot back while it waits for the peer, and take one again after, waiting for none.

        A job has one slot, however many questions it asks at once.
        """
        job.parked += 1
        if job.parked == 1:
            self.running -= 1
            self.parked += 1
            if job.clock is not None:
                job.clock.pause()
            job.session.next_jobs()
        try:
            yield
        finally:
            job.parked -= 1
            if not job.parked:
                if job.clock is not None:
                    job.clock.resume()
                self.parked -= 1
                if not job.over:
                    self.running += 1

    def too_much_unread(self, amount: Amount) -> bool:
        """Return whether results wait for the reader, and there is no room for more: here, or beside all others."""
        holding = amount.holding
        return self.bytes_unread > self.limits.running_bytes or (holding is not None and not holding.fits(0))

    async def until_read(self, job: Job) -> None:
        """Wait until less is unread, before the handler begins: what it made now would only be kept, too."""
        job.started = False
        if self._unread is None:
            self._unread = trio.lowlevel.ParkingLot()
        while self.bytes_unread and self.too_much_unread(job.session.amount):
            await self._unread.park()
        self._unread.unpark()  # the next one looks for itself
        job.started = True

    async def wait_for_reader(self, job: Job) -> None:
        """Wait until there is room for the job's result, which weighs like the job itself meanwhile.

        Of results that weigh more than twice as much as may be under way, the newest are dropped.
        """
        assert job.reply is not None
        size = len(job.reply)
        if self.bytes_running + size > 2 * self.limits.running_bytes and self.bytes_unread:
            size = len(job.drop_result())
        job.size += size
        self.bytes_running += size
        self.bytes_unread += size
        if size >= STEP:
            job.session.weigh()
        try:
            await job.sink.room()
        finally:
            self.bytes_unread -= size
            if self._unread is not None:
                self._unread.unpark()

    # End

    def cancel(self, job: Job, reason: CancelReason, detail: str | None = None) -> None:
        """Stop a job's handler; one that waits is answered at once, where an answer is owed."""
        job.cancel(reason, detail)
        if not job.started and self.mailbox.remove(job):
            job.finish(job.cancelled_reply())

    def cancel_all(self, reason: CancelReason, detail: str | None = None) -> None:
        """Stop every handler, and refuse what waits."""
        for job in list(self):
            self.cancel(job, reason, detail)

    async def wait_idle(self) -> None:
        """Wait until none is left; always a checkpoint."""
        await trio.lowlevel.checkpoint()
        while self.by_id:
            await self._idle.park()

    def tell_idle(self) -> None:
        """Wake who waits for the last one's end."""
        self._idle.unpark_all()

    # Books

    @property
    def bytes_held(self) -> int:
        """What those under way and those that wait take, roughly."""
        held = self.mailbox.bytes_queued
        if self.crew is not None:
            held += self.bytes_running + _RUNNING * (self.running + self.parked & ~3)
        return held

    @property
    def at_rest(self) -> bool:
        """Whether no handler is at work: what there is waits for the peer to read."""
        return all(not job.started or job.reply is not None for job in self)
