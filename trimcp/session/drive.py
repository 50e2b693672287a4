"""Runs a session over a channel: its nursery, its reader and its writer, and their shutdown in order.

Shutdown: stop reading, cancel the jobs, let handlers unwind, fail pending calls, give the writer `drain_timeout`,
close the channel. The writer is shielded until the handlers have ended, so that their last messages are still sent when
an outer scope is cancelled; then it has a deadline. That and the close are shielded and bounded. The only other
shielded wait is that of a cancelled request for the clean-up of its tasks (`scopes.Work.end`).

Two sessions in one process need no channel: `direct_ends`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, Protocol, TypeAlias

import attrs
import trio

from trimcp.budget import Evictable, MemoryAccount
from trimcp.channel import (
    CLIENT_MAX_MESSAGE,
    IN_MEMORY,
    SERVER_MAX_MESSAGE,
    Incoming,
    Link,
    MessageChannel,
    Outgoing,
    PeerProgress,
    Sink,
    stall_text,
)
from trimcp.session.incoming.job import CancelReason
from trimcp.session.incoming.jobs import HandlerTasks
from trimcp.session.queues import Outbox
from trimcp.session.session import Session
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.slotted import slotted
from trimcp.wire.jsonrpc import parse_within

log: logging.Logger = logging.getLogger("trimcp.session")

_NO_ADDRESS: Final = "local"  # the owner where there are no addresses: a pipe, another part of this program


@slotted
class DirectEnd(Sink):
    """One end of a direct connection: the sink of the session that runs over it.

    A message that one session posts is delivered directly to the other, without a reader and a writer task. It is still
    encoded and parsed: the sides share no objects, and a message that a wire would refuse is refused here. A sender
    waits for room while the other session would not read.
    """

    max_message: int = CLIENT_MAX_MESSAGE  # bytes of the largest message that our session accepts
    # counts the memory that the other session uses in ours; see `MessageChannel`
    holding: MemoryAccount | None = attrs.field(init=False, default=None)
    other: DirectEnd = attrs.field(init=False)
    session: Session | None = attrs.field(init=False, default=None)
    closed: bool = attrs.field(init=False, default=False)
    _early: list[Incoming] = attrs.field(init=False, factory=list)

    def attach(self, session: Session) -> None:
        """Deliver to this session from now on, including messages that arrived before."""
        self.session, self.max_message = session, session.max_message
        early, self._early = self._early, []
        session.deliver(early)
        if self.other.closed:
            self._peer_left()

    def close_reason(self) -> str | None:
        """Return why the other side ended, for an error message: it is never known."""
        return None

    # The sink of this end's session

    @property
    def link(self) -> Link:
        return IN_MEMORY

    @property
    def full(self) -> bool:
        peer = self.other.session
        return peer is not None and peer.paused

    async def room(self) -> None:
        peer = self.other.session
        if peer is not None:
            await peer.readable()

    def post(self, outgoing: Outgoing) -> None:
        """Deliver a message. It is dropped if either side has closed."""
        other = self.other
        if self.closed or other.closed:
            return
        data = outgoing.data
        incoming = Incoming(parse_within(data, other.max_message), len(data))
        if other.session is None:
            other._early.append(incoming)
        else:
            other.session.deliver((incoming,))

    def close(self) -> None:
        """Deliver nothing more, and tell the other session that its peer is gone. May be called twice."""
        if not self.closed:
            self.closed = True
            self.other._peer_left()

    def _peer_left(self) -> None:
        session = self.session
        if session is None or session.closed.is_set():
            return
        why = "the peer closed the connection"
        session.lose(why)
        log.debug("the peer is gone: %s", why)
        session.nursery.start_soon(_wind_down, session, session.limits.eof_grace)


def direct_ends() -> tuple[DirectEnd, DirectEnd]:
    """Return the two ends of a direct connection, the first for a server, whose default message limit is smaller."""
    left, right = DirectEnd(SERVER_MAX_MESSAGE), DirectEnd(CLIENT_MAX_MESSAGE)
    left.other, right.other = right, left
    return left, right


class Receiver(Protocol):
    """What a reader delivers to: a session, or whatever carries out a connection's messages in place of one."""

    @property
    def paused(self) -> bool:
        """Whether the reader must not read on."""
        ...

    async def readable(self) -> None:
        """Wait until the reader may read on."""
        ...

    def deliver(self, batch: Sequence[Incoming], /) -> None:
        """Process received messages. Never waits and never raises because of what a peer sent."""
        ...


AnyChannel: TypeAlias = MessageChannel | DirectEnd
"""What a session can run over: a channel that it reads, or a direct end that needs no reader and writer."""


async def drive(session: Session, channel: AnyChannel, receiver: Receiver | None = None) -> None:
    """Run a session over a channel until the peer disconnects or `session.close()` is called, then close the channel.

    What arrives is delivered to `receiver`, if there is one, in place of the session.

    Cancelling this stops every handler, sends only what is already queued, and closes the channel.
    """
    async with driving(session, channel, receiver):
        await session.closed.wait()


@asynccontextmanager
async def driving(session: Session, channel: AnyChannel, receiver: Receiver | None = None) -> AsyncIterator[None]:
    """Run a session over a channel while the body runs; `receiver` is as for `drive`.

    The body's exceptions are raised unchanged. If the peer disconnects the body goes on: its calls raise
    `ConnectionLost`.
    """
    session.engine.legacy.reopens = True
    with _counted(session, channel):
        if isinstance(channel, DirectEnd):
            session.sink = channel
            async with _running_jobs(session, lambda jobs: channel.attach(session)):
                yield
        else:
            async with _driving_channel(session, channel, session if receiver is None else receiver):
                yield


@contextmanager
def _counted(session: Session, channel: AnyChannel) -> Iterator[None]:
    """Count the memory that the peer uses while the body runs, if there is a budget."""
    own: MemoryAccount | None = None
    if channel.holding is None and session.memory.budget is not None:
        own = channel.holding = session.memory.budget.holding(_NO_ADDRESS)
    session.memory.belong_to(channel.holding)
    try:
        yield
    finally:
        if own is not None:
            own.close()


@asynccontextmanager
async def _driving_channel(session: Session, channel: MessageChannel, receiver: Receiver) -> AsyncIterator[None]:
    """Run a session over a channel with a reader and a writer task, and end both in order."""
    transport = session.transport
    transport.mirrors_headers, transport.http_statistics = channel.mirrors_headers, channel.http_statistics
    transport.link = channel.link
    channel.set_max_message(session.max_message)
    session.jobs.mailbox.leave_room(*channel.read_ahead)
    async with channel, open_service_nursery() as wire:
        outbox = session.sink
        assert isinstance(outbox, Outbox)
        if channel.sends_now:
            transport.sends_now, outbox.send_nowait = True, channel.send_nowait
        driver = _ChannelDriver(session, channel, outbox, receiver)
        if channel.holding is not None:
            driver.connection, channel.holding.holder = channel.holding.holder, driver
            outbox.weigh = session.weigh
        wire.start_soon(driver.write)
        try:
            async with _running_jobs(session, lambda jobs: jobs.start_soon(driver.read)):
                yield
        finally:
            driver.writer.deadline = trio.current_time() + session.limits.drain_timeout
            transport.http_statistics = None  # the channel may refer to the session


@asynccontextmanager
async def _running_jobs(session: Session, begin: Callable[[trio.Nursery], object]) -> AsyncIterator[None]:
    """Run a session's jobs, starting with `begin`, while the body runs; then end the session in order."""
    try:
        async with open_service_nursery() as jobs:
            session.start(HandlerTasks(jobs))
            begin(jobs)
            try:
                yield
            finally:
                session.close()
                session.jobs.cancel_all(CancelReason.DISCONNECTED if session.lost else CancelReason.DRAIN)
    finally:
        session.sink.close()
        session.lose("the session has ended")
        session.endpoint.closed(session)


_SHORT: Final = 0.02  # seconds without reading after which the session checks whether the peer is still connected


async def readable_or_left(receiver: Receiver, wait_peer_closed: Callable[[], Awaitable[bool]]) -> bool:
    """Wait until the reader may read on or the session is closed, and return whether the peer has left meanwhile.

    Then nobody would read the answers to what is still unread. Most such waits are short; during a long one the peer is
    watched: `wait_peer_closed` returns True once it has left, or False if there is something else to do.
    """
    with trio.move_on_after(_SHORT) as short:
        await receiver.readable()
    if not short.cancelled_caught:
        return False
    left = False

    async def watch() -> None:
        nonlocal left
        left = await wait_peer_closed()
        nursery.cancel_scope.cancel(reason="the peer has left, or the transport has something else to do")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await receiver.readable()
        nursery.cancel_scope.cancel(reason="reading goes on")
    return left


def report_stalled(session: Session) -> None:
    """Log a peer that was dropped because it took nothing, and stop its handlers for that reason."""
    from trimcp.security import security_event

    why, stats = str(session.lost), session.statistics()
    unread = stats.outbox_bytes + stats.unread_bytes
    security_event("peer_stalled", why=why, unread_bytes=unread, requests=len(session.jobs))
    session.jobs.cancel_all(CancelReason.LIMIT, why)


@slotted
class _ChannelDriver:
    """The reader and the writer of one session, and the `Evictable` that ends it when too much is held.

    It also detects a peer that takes nothing of what is written to it. Most writes complete at once, and a timer for
    each would cost more than the write. So the first write after a pause sets an alarm, which interrupts the reader. If
    no write is then in progress the alarm is switched off; else the reader checks whether the peer has taken anything
    since.
    """

    session: Session
    channel: MessageChannel
    outbox: Outbox
    receiver: Receiver
    # the holder of the channel's memory before, which is ended with the session
    connection: Evictable | None = attrs.field(init=False, default=None)
    # the cancel scope of the writer. Shielded, so that the last messages of cancelled tasks are still sent.
    writer: trio.CancelScope = attrs.field(init=False, factory=lambda: trio.CancelScope(shield=True))
    _progress: PeerProgress = attrs.field(init=False)
    _reader: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)  # expires when the alarm is due
    _alarm: float = attrs.field(init=False, default=math.inf)
    _asleep: bool = attrs.field(init=False)  # whether the alarm is off and the next write has to set it

    def __attrs_post_init__(self) -> None:
        patience = self.session.limits.stall_timeout
        self._progress = PeerProgress(patience)
        self._asleep = patience < math.inf

    @property
    def at_rest(self) -> bool:
        return self.session.jobs.at_rest

    def evict(self, why: str) -> None:
        """Drop the peer and its connection at once: an orderly shutdown would keep the memory for its duration."""
        self._drop(why)
        if self.connection is not None:
            self.connection.evict(why)

    def _drop(self, why: str) -> None:
        """Drop the peer, with what is queued for it."""
        self.session.lose(why)
        self.session.jobs.cancel_all(CancelReason.LIMIT, why)
        self.writer.cancel(reason=why)
        self.session.close()

    # Reading

    async def read(self) -> None:
        """Deliver messages until the peer disconnects; then end the session, gracefully if the peer still reads.

        It also checks, when the alarm is due, whether the peer reads: a task for that would be one more per connection.
        """
        session = self.session
        until: float | None = None
        while True:
            self._reader = trio.CancelScope(deadline=self._alarm)
            with self._reader:
                if until is None:
                    await self._deliver()
                    until = trio.current_time() + (session.limits.eof_grace if self.channel.half_open else 0)
                if self.channel.half_open:
                    await self._answer_last(until)
                await _wind_down(session, 0)
                return
            if self._stalled():
                why = stall_text(session.limits.stall_timeout)
                session.lose(why)
                report_stalled(session)
                self._drop(why)
                return

    async def _answer_last(self, until: float) -> None:
        """Let handlers answer a peer that has said everything, until then at most, or until it no longer reads."""
        session = self.session

        async def watch() -> None:
            await self.channel.wait_peer_closed()
            nursery.cancel_scope.cancel(reason="the peer no longer reads")

        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = until
            nursery.start_soon(watch)
            await session.jobs.wait_idle()
            nursery.cancel_scope.cancel(reason="everything is answered")

    async def _deliver(self) -> None:
        """Deliver messages until the peer disconnects."""
        receiver, channel = self.receiver, self.channel
        try:
            while True:
                if receiver.paused:
                    channel.count_received()
                    if await readable_or_left(receiver, self._peer_closed):
                        raise trio.EndOfChannel  # nobody would read the answers to what is still unread
                receiver.deliver(await channel.receive())
        except trio.EndOfChannel:
            self._lose(channel.close_reason() or "the peer closed the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._lose(f"the connection broke: {error}" if str(error) else "the connection broke")
        log.debug("the peer is gone: %s", self.session.lost)

    async def _peer_closed(self) -> bool:
        await self.channel.wait_peer_closed()
        return True

    def _lose(self, why: str) -> None:
        """Note that the peer is gone, and whether its channel dropped it because it took nothing."""
        first = self.session.lost is None
        slow = first and self.channel.too_slow
        self.session.lose((slow and self.channel.close_reason()) or why)
        if slow:
            report_stalled(self.session)

    # Writing

    async def write(self) -> None:
        """Write everything that is queued, in one batch each time, until the outbox is closed and empty."""
        session, channel, outbox = self.session, self.channel, self.outbox
        with self.writer:
            try:
                while True:
                    batch = await outbox.receive()
                    if session.readers.lot:
                        session.readers.unpark_all()
                    if self._asleep:
                        self._wake()
                    await channel.send(batch)
                    del batch  # a large result must not be kept until the next message
                    if session.memory.counted:
                        outbox.leaving = 0
                        session.weigh()
            except trio.EndOfChannel:
                pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                # The reader may never notice this if the peer closed only this direction.
                known = channel.close_reason()
                self._lose("the peer stopped listening" + (f": {known}" if known else ""))
                session.jobs.cancel_all(CancelReason.DISCONNECTED)
                session.close()
        outbox.abandon()

    # Detecting a peer that takes nothing

    def _wake(self) -> None:
        """Set the alarm, because a write begins."""
        self._asleep = False
        self._alarm = trio.current_time() + self._progress.begin(self._taken())
        self._reader.deadline = self._alarm

    def _stalled(self) -> bool:
        """Return whether the peer has taken nothing for too long; if not, set the alarm again or switch it off."""
        if not self.outbox.writing:
            self._asleep, self._alarm = True, math.inf
            return False
        wait = self._progress.look(self._taken())
        self._alarm = trio.current_time() + wait
        return not wait

    def _taken(self) -> Hashable:
        return self.outbox.batches, self.channel.write_progress()


async def _wind_down(session: Session, grace: float) -> None:
    """End a session whose peer is gone: its handlers get `grace` seconds, then they are cancelled."""
    with trio.move_on_after(grace):
        await session.jobs.wait_idle()
    session.jobs.cancel_all(CancelReason.DISCONNECTED)
    await session.jobs.wait_idle()
    session.close()
