"""Runs a session into which a transport pushes messages, as HTTP does: no reader, no writer, no task while idle.

Its jobs run in a nursery shared with other sessions, and it has ended when they have. Tasks that its handlers start
for the session get a nursery of its own, opened at first use.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from trimcp.channel import NOWHERE, Incoming, LaneCounts
from trimcp.errors import LocalError
from trimcp.session.job import CancelReason
from trimcp.session.jobs import Crew
from trimcp.session.scopes import Work
from trimcp.session.session import Session
from trimcp.wire.revisions import Revision


class _Ended:
    """A `Background` of an ended session: it starts no tasks."""

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        raise LocalError("the session has ended; nothing can be started for it")


@attrs.define(eq=False, repr=False)
class Pushed:
    """One pushed session.

    Args:
        session: the session, to which nothing was delivered yet. Its sink gets messages that belong to no request.
        crew: runs its jobs, beside those of others.
        take_back: called when it is closed and as good as new. Returns whether it is kept for another request, which is
            cheaper than a new session. None if it serves more than one request.
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
        """The revision agreed on in the handshake, or None before it."""
        return self.session.revision

    @property
    def busy(self) -> bool:
        """Whether handlers run or wait for a slot, or their tasks run. Handlers that wait for the peer do not count."""
        jobs = self.session.jobs
        return bool(jobs.running or jobs.mailbox or self._work is not None)

    @property
    def at_rest(self) -> bool:
        """Whether no handler runs: all jobs wait for the client to read."""
        return self.session.jobs.at_rest

    @property
    def counts(self) -> LaneCounts:
        """The counts of messages merged or dropped because a reader was slow."""
        return self.session.counts

    @property
    def unused(self) -> bool:
        """Whether it is as good as new, as after one answered request, and may be used again."""
        session = self.session
        engine = session.engine
        return not (
            self._work is not None
            or session.draining.is_set()  # or closed
            or session.lost is not None
            or session.jobs
            or session.pending
            or session.watchers
            or engine.inbound
            or engine.outbound
            or session.jobs.parked
            or session.abandoned_threads
            or session.notices
            or session.counts.dropped
            or session.counts.merged
        )

    def assume(self, revision: Revision) -> None:
        """Skip the handshake, for clients of a server that keeps no sessions: they did it on another session."""
        self.session.engine.legacy.assume(revision)

    def require_envelope(self) -> None:
        """Treat every request as one of the modern era, even if its envelope is missing."""
        self.session.engine.modern.required = True

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Process received messages. Never waits and never raises because of what a peer sent."""
        self.session.deliver(batch)

    def disconnect(self, why: str, *, slow: bool = False) -> None:
        """End the session because its peer is gone, or was dropped by us because it read nothing (`slow`).

        Handlers are cancelled, and calls raise `ConnectionLost`.
        """
        session = self.session
        session.lose(why)
        if slow:
            session.jobs.cancel_all(CancelReason.LIMIT, why)
        else:
            session.jobs.cancel_all(CancelReason.DISCONNECTED)
        session.close()

    def close(self) -> None:
        """End the session and cancel what still runs. The caller must not use it any more."""
        session = self.session
        if self._take_back is not None and self.unused and self._take_back(self):
            return
        if session.jobs or session.pending or session.watchers:
            session.lose("the session has ended")
            session.jobs.cancel_all(CancelReason.DISCONNECTED)
        session.close()

    def leave(self) -> None:
        """End the session once the tasks started for it have ended."""
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
        sink, session.sink = session.sink, NOWHERE  # the sink may refer to the session: break the reference cycle
        sink.close()
        if not session.jobs:  # else the last job updates the count
            session.amount.belong_to(None)
        session.endpoint.closed(session)


_ENDED = _Ended()
