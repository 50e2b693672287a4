"""Drives a session into which messages are pushed, as HTTP does: no reader, no writer, and no task while it is idle.

Its jobs run in a nursery that it shares with others; it has ended when they have. What its handlers start for the
session gets a nursery of its own, opened on first use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from trimcp.channel import NOWHERE, Incoming, LaneCounts
from trimcp.errors import LocalError
from trimcp.session.crew import Crew
from trimcp.session.job import CancelReason
from trimcp.session.scopes import Work
from trimcp.session.session import Session
from trimcp.wire.revisions import Revision

__all__ = ["Pushed"]


class _Ended:
    """Where nothing can be started any more."""

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        raise LocalError("the session has ended; nothing can be started for it")


@attrs.define(eq=False, repr=False)
class Pushed:
    """One pushed session.

    Args:
        session: what is driven; nothing was delivered to it yet. Its sink takes what belongs to no request.
        crew: who runs its jobs, beside those of others.
        take_back: is offered it when it is closed as if it had never been used, and returns whether it keeps it: then
            it serves another request, which is cheaper than to make a new one. None where it serves more than one.
    """

    session: Session
    _crew: Crew
    _take_back: Callable[[Pushed], bool] | None = None
    _work: Work | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        session = self.session
        session.pushed = True
        session.when_closed = self._end
        session.brief = self._take_back is not None
        session.start(self._crew, self)

    @property
    def revision(self) -> Revision | None:
        """What the handshake agreed on, or None before it."""
        return self.session.revision

    @property
    def busy(self) -> bool:
        """Whether handlers are at work or wait for a slot, or what they started is. Who waits for the peer is not."""
        session = self.session
        assert session.runner is not None
        return bool(session.runner.running or session.mailbox or self._work is not None)

    @property
    def counts(self) -> LaneCounts:
        """Where it is counted what gave way because its reader was slow."""
        return self.session.counts

    @property
    def unused(self) -> bool:
        """Whether nothing tells that it was ever used, as after one request that was answered and left nothing."""
        session = self.session
        engine = session.engine
        return not (
            self._work is not None
            or session.closed.is_set()
            or session.draining.is_set()
            or session.lost is not None
            or session.jobs
            or session.pending
            or session.watchers
            or engine.inbound
            or engine.outbound
            or session.parked
            or session.abandoned_threads
            or session.notices
            or session.counts.dropped
            or session.counts.merged
        )

    def assume(self, revision: Revision) -> None:
        """Skip the handshake, for clients of a server that keeps no sessions: they did it somewhere else."""
        self.session.engine.legacy.assume(revision)

    def require_envelope(self) -> None:
        """Take every request for one of the modern era, also where its envelope is missing."""
        self.session.engine.modern.required = True

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Take what arrived. Never waits and never raises because of what a peer sent."""
        self.session.deliver(batch)

    def disconnect(self, why: str, *, slow: bool = False) -> None:
        """End the session because its peer is gone: handlers are stopped, calls fail with `ConnectionLost`.

        Args:
            why: in words.
            slow: whether it was we who dropped the peer, because it read nothing.
        """
        session = self.session
        session.lose(why)
        if slow:
            session.cancel_jobs(CancelReason.LIMIT, why)
        else:
            session.cancel_jobs(CancelReason.DISCONNECTED)
        session.close()

    def close(self) -> None:
        """End the session in which nothing is under way any more; what is, is stopped. Whoever calls it forgets it."""
        session = self.session
        if self._take_back is not None and self.unused and self._take_back(self):
            return
        if session.jobs or session.pending or session.watchers:
            session.lose("the session has ended")
            session.cancel_jobs(CancelReason.DISCONNECTED)
        session.close()

    def leave(self) -> None:
        """End the session once what was started for it is done."""
        if self._work is None:
            self.close()
        else:
            self._work.finish()
            self.session.endpoint.closed(self.session)

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the session ends."""
        work = self._work
        if work is None:
            work = self._work = Work(self._crew.nursery, trio.CancelScope())
        work.start_soon(function, *args)

    def _end(self) -> None:
        session = self.session
        session.background = _ENDED
        if self._work is not None:
            self._work.scope.cancel(reason="the session has ended")
        sink, session.sink = session.sink, NOWHERE  # it may hold this session, and they would keep each other alive
        sink.close()
        session.endpoint.closed(session)


_ENDED = _Ended()
