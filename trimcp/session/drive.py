"""Gives a session over a pulled channel its nursery, its reader and its writer, and takes them down in order.

Order of the end: stop reading, cancel the jobs, let handlers unwind, fail what is pending, give the writer
`drain_timeout`, close the channel. The writer is shielded just until its users are gone, so that their last words go
out even when everything around is being cancelled; then it has a deadline. That and the close are shielded and bounded;
besides them only a cancelled request waits, shielded, for the clean-up of the work it started (`scopes.Work.end`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final, TypeAlias

import attrs
import trio

from trimcp.budget import Holder
from trimcp.channel import MessageChannel
from trimcp.session.crew import Crew
from trimcp.session.direct import DirectEnd, wind_down
from trimcp.session.job import CancelReason
from trimcp.session.outgoing import Outbox
from trimcp.session.scopes import open_service_nursery
from trimcp.session.session import Session
from trimcp.session.stall import StallWatch

__all__ = ["Road", "drive", "driving"]

log: logging.Logger = logging.getLogger("trimcp.session")

_SHORT: Final = 0.02  # seconds of not reading before it is watched whether the peer is still there

_NO_ADDRESS: Final = "local"  # whose it is where there are no addresses: a pipe, another part of this program

Road: TypeAlias = MessageChannel | DirectEnd
"""What a session can be driven over: a channel that is pulled, or a direct end that needs no reader and writer."""


async def drive(session: Session, channel: Road) -> None:
    """Run a session over a channel until the peer leaves or `session.close()` is called, then close the channel.

    Cancelling it stops every handler, tells the peer nothing more than what is queued, and closes the channel.
    """
    async with driving(session, channel):
        await session.closed.wait()


@asynccontextmanager
async def driving(session: Session, channel: Road) -> AsyncIterator[None]:
    """Run a session over a channel for as long as the body runs.

    What the body raises leaves as itself. The peer's leaving ends no body: it fails calls with `ConnectionLost`.
    """
    with _counted(session, channel):
        if isinstance(channel, DirectEnd):
            async with _driving_directly(session, channel):
                yield
        else:
            async with _driving_channel(session, channel):
                yield


@contextmanager
def _counted(session: Session, channel: Road) -> Iterator[None]:
    """Count what the peer makes us keep for as long as the body runs, where there is a budget for it."""
    holding = None if isinstance(channel, DirectEnd) else channel.holding
    if session.budget is None or holding is not None:
        session.amount.belong_to(holding)
        yield
        return
    holding = session.budget.holding(_NO_ADDRESS)
    session.amount.belong_to(holding)
    if not isinstance(channel, DirectEnd):
        channel.holding = holding
    try:
        yield
    finally:
        holding.close()


@asynccontextmanager
async def _driving_channel(session: Session, channel: MessageChannel) -> AsyncIterator[None]:
    """Run a session over a channel with a reader and a writer, and end both in order."""
    session.mirrors_headers = channel.mirrors_headers
    channel.set_max_message(session.max_message)
    session.jobs.mailbox.leave_room(*channel.read_ahead)
    async with channel, open_service_nursery() as wire:
        outbox = session.sink
        assert isinstance(outbox, Outbox)
        # Shielded, so that the last words of whoever is cancelled still leave; below it gets its deadline.
        writer = trio.CancelScope(shield=True)
        watch = StallWatch(outbox, channel, session.limits.stall_timeout)
        if channel.holding is not None:
            channel.holding.holder = _Driven(session, writer, channel.holding.holder)
        wire.start_soon(_write, session, watch, writer)
        try:
            async with open_service_nursery() as jobs:
                session.start(Crew(jobs))
                jobs.start_soon(_read, session, watch, writer)
                try:
                    yield
                finally:
                    _stop(session)
        finally:
            writer.deadline = trio.current_time() + session.limits.drain_timeout
            outbox.close()
            session.lose("the session has ended")
            session.endpoint.closed(session)


def _stop(session: Session) -> None:
    """Stop reading and cancel the jobs, which still unwind."""
    session.close()
    session.cancel_jobs(CancelReason.DISCONNECTED if session.lost else CancelReason.DRAIN)


@asynccontextmanager
async def _driving_directly(session: Session, end: DirectEnd) -> AsyncIterator[None]:
    """Run a session over a direct end. The order of the end is the same; there is no writer to wait for."""
    session.sink = end
    try:
        async with open_service_nursery() as jobs:
            session.start(Crew(jobs))
            end.attach(session)
            try:
                yield
            finally:
                _stop(session)
    finally:
        end.close()
        session.lose("the session has ended")
        session.endpoint.closed(session)


async def _read(session: Session, watch: StallWatch, writer: trio.CancelScope) -> None:
    """Deliver what arrives, until the peer leaves; then end the session, with grace for handlers it may still read.

    Looks whether the peer reads, too, when the watch wants it: a task for that alone would be one more per connection.
    """
    channel = watch.channel
    until: float | None = None
    while True:
        with watch.alarm():
            if until is None:
                await _deliver(session, channel)
                until = trio.current_time() + (session.limits.eof_grace if channel.half_open else 0)
            await wind_down(session, max(0.0, until - trio.current_time()))
            return
        if watch.stalled():
            why = f"the peer read nothing for {watch.patience:g} seconds"
            session.lose(why)
            _report(session)
            _drop(session, writer, why)
            return


async def _deliver(session: Session, channel: MessageChannel) -> None:
    """Deliver what arrives until the peer leaves."""
    try:
        while True:
            if session.paused:
                await _readable(session, channel)
            session.deliver(await channel.receive())
    except trio.EndOfChannel:
        _lose(session, channel, channel.close_reason() or "the peer closed the connection")
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        _lose(session, channel, f"the connection broke: {error}" if str(error) else "the connection broke")
    log.debug("the peer is gone: %s", session.lost)


async def _readable(session: Session, channel: MessageChannel) -> None:
    """Wait until it is right to read on. Most such waits are short; in a long one the peer is watched.

    Raises:
        trio.EndOfChannel: it has left meanwhile. Nobody would read what comes of all that it sent and we have not read.
    """
    with trio.move_on_after(_SHORT) as short:
        await session.readable()
    if not short.cancelled_caught:
        return
    hung_up = False

    async def watch() -> None:
        nonlocal hung_up
        await channel.hung_up()
        hung_up = True
        nursery.cancel_scope.cancel(reason="the peer has left")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await session.readable()
        nursery.cancel_scope.cancel(reason="the session reads on")
    if hung_up:
        raise trio.EndOfChannel("the peer has left")


def _lose(session: Session, channel: MessageChannel, why: str) -> None:
    """Note that the peer is gone, and whether it was its channel that dropped it for taking nothing."""
    first = session.lost is None
    slow = first and channel.too_slow
    session.lose((slow and channel.close_reason()) or why)
    if slow:
        _report(session)


@attrs.frozen(eq=False, repr=False)
class _Driven:
    """A session that can be ended when too much is held; see `Holder`."""

    session: Session
    writer: trio.CancelScope
    connection: Holder | None

    @property
    def at_rest(self) -> bool:
        """Whether no handler is at work."""
        return self.session.at_rest

    def give_way(self, why: str) -> None:
        """Drop the peer, and cut its connection: to say goodbye would take time, in which all of it is kept."""
        _drop(self.session, self.writer, why)
        if self.connection is not None:
            self.connection.give_way(why)


def _drop(session: Session, writer: trio.CancelScope, why: str) -> None:
    """Drop a peer, with what is queued for it."""
    session.lose(why)
    session.cancel_jobs(CancelReason.LIMIT, why)
    writer.cancel(reason=why)
    session.close()


def _report(session: Session) -> None:
    """Report a peer that was dropped because it took nothing, and stop its handlers for that reason."""
    from trimcp.security import security_event

    why, stats = str(session.lost), session.statistics()
    unread = stats.outbox_bytes + stats.unread_bytes
    security_event("peer_stalled", why=why, unread_bytes=unread, requests=len(session.jobs))
    session.cancel_jobs(CancelReason.LIMIT, why)


async def _write(session: Session, watch: StallWatch, scope: trio.CancelScope) -> None:
    """Write what is ready, all of it in one batch, until the outbox is closed and empty."""
    channel, outbox = watch.channel, watch.outbox
    with scope:
        try:
            while True:
                batch = await outbox.receive()
                session.nudge()
                if watch.asleep:
                    watch.wake()
                await channel.send(batch)
                del batch  # a large result must not stay until there is something else to say
                if session.amount.counted:
                    outbox.leaving = 0
                    session.weigh()
        except trio.EndOfChannel:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # The reader may never notice, where the peer closed only this direction. Nobody is listening all the same.
            _lose(session, channel, "the peer stopped listening")
            session.cancel_jobs(CancelReason.DISCONNECTED)
            session.close()
    outbox.abandon()
