"""Gives a session over a pulled channel its nursery, its reader and its writer, and takes them down in order.

Order of the end: stop reading, cancel the jobs, let handlers unwind, fail what is pending, give the writer
`drain_timeout`, close the channel. The writer is shielded just until its users are gone, so that their last words go
out even when everything around is being cancelled; then it has a deadline. That and the close are shielded and bounded;
besides them only a cancelled request waits, shielded, for the clean-up of the work it started (`scopes.Work.end`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import trio

from trimcp.channel import MessageChannel
from trimcp.session.crew import Crew
from trimcp.session.direct import DirectEnd, wind_down
from trimcp.session.job import CancelReason
from trimcp.session.outbox import Outbox
from trimcp.session.scopes import open_service_nursery
from trimcp.session.session import Session

__all__ = ["Road", "drive", "driving"]

log: logging.Logger = logging.getLogger("trimcp.session")


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
    if isinstance(channel, DirectEnd):
        async with _driving_directly(session, channel):
            yield
        return
    session.mirrors_headers = channel.mirrors_headers
    async with _closing(channel), open_service_nursery() as wire:
        outbox = session.sink
        assert isinstance(outbox, Outbox)
        # Shielded, so that the last words of whoever is cancelled still leave; below it gets its deadline.
        writer = trio.CancelScope(shield=True)
        wire.start_soon(_write, session, channel, outbox, writer)
        try:
            async with open_service_nursery() as jobs:
                session.start(Crew(jobs))
                jobs.start_soon(_read, session, channel)
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
async def _closing(channel: MessageChannel) -> AsyncIterator[None]:
    """Close the channel when the body ends. Its own exception tells more than a cancellation of the close."""
    try:
        yield
    except BaseException:
        try:
            await channel.aclose()
        except trio.Cancelled:
            pass
        raise
    await channel.aclose()


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


async def _read(session: Session, channel: MessageChannel) -> None:
    """Deliver what arrives, until the peer leaves; then end the session, with grace for handlers it may still read."""
    try:
        while True:
            session.deliver(await channel.receive())
            await session.readable()
    except trio.EndOfChannel:
        session.lose(channel.obituary() or "the peer closed the connection")
    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
        session.lose(f"the connection broke: {error}" if str(error) else "the connection broke")
    log.debug("the peer is gone: %s", session.lost)
    await wind_down(session, session.limits.eof_grace if channel.half_open else 0)


async def _write(session: Session, channel: MessageChannel, outbox: Outbox, scope: trio.CancelScope) -> None:
    """Write what is ready, all of it in one batch, until the outbox is closed and empty."""
    with scope:
        try:
            while True:
                batch = await outbox.receive()
                session.nudge()
                await channel.send(batch)
                del batch  # a large result must not stay until there is something else to say
        except trio.EndOfChannel:
            pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            # The reader may never notice, where the peer closed only this direction. Nobody is listening all the same.
            session.lose("the peer stopped listening")
            session.cancel_jobs(CancelReason.DISCONNECTED)
            session.close()
    outbox.abandon()
