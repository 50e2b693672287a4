"""Runs a session into which a transport pushes messages: no reader, no writer, no task while idle.

Its jobs run in a nursery shared with other sessions, and it has ended when they have. Tasks that its handlers start
for the session get a nursery of its own, opened at first use. Over HTTP nobody can stop reading, so what is too much is
refused (`Pushed`); a WebSocket is paused (`PushedConnection`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any

import attrs
import trio

from trimcp.budget import STEP
from trimcp.channel import NOWHERE, Incoming, LaneCounts, MessageWriter, Outgoing, stall_text
from trimcp.errors import LocalError
from trimcp.session.drive import Receiver, readable_or_left, report_stalled
from trimcp.session.incoming.job import CancelReason
from trimcp.session.incoming.jobs import HandlerTasks
from trimcp.session.limits import Limits
from trimcp.session.queues import Outbox
from trimcp.session.scopes import Work
from trimcp.session.session import Session
from trimcp.support.slotted import slotted
from trimcp.wire.revisions import Revision


class WrittenOutbox(Outbox):
    """An outbox without a writer task: whoever posts a message writes it at once, as long as the peer reads.

    What the peer does not read waits here, in place of being written, and `leave` goes on. Messages of which the latest
    counts wait for the end of the turn, as for a writer task.
    """

    __slots__ = ("session", "writer")

    def __init__(self, limits: Limits, writer: MessageWriter) -> None:
        super().__init__(limits.outbox_messages, limits.outbox_bytes)
        self.writer: MessageWriter = writer
        self.session: Session | None = None

    def post(self, outgoing: Outgoing) -> None:
        if self._closed:
            return
        writer = self.writer
        if not (writer.blocked or self._queue):
            writer.write(outgoing)
            session = self.session
            if session is not None and session.memory.counted:
                session.weigh()
            return
        super().post(outgoing)
        if not writer.blocked:
            self.leave()

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        if not self._closed:
            super().post_latest(key, outgoing)
            self.writer.write_later()

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        outgoing = self._latest.pop(key, None)
        if outgoing is not None and keep and not self._closed:
            super().post(outgoing)  # and is written with what is posted next

    def leave(self) -> None:
        """Write what waits, until the peer does not read."""
        writer = self.writer
        while not writer.blocked and (outgoing := self.take_next()) is not None:
            writer.write(outgoing)
        self._weigh_at = self.bytes_queued + STEP
        session = self.session
        if session is not None:
            if session.readers.lot:
                session.readers.unpark_all()
            if session.memory.counted:
                session.weigh()

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        return super().waiting()[0], self.writer.waiting


class _Ended:
    """A `Background` of an ended session: it starts no tasks."""

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        raise LocalError("the session has ended; nothing can be started for it")


@slotted
class Pushed:
    """One pushed session."""

    # the session, to which nothing was delivered yet. Its sink gets messages that belong to no request.
    session: Session
    _handler_tasks: HandlerTasks  # runs its jobs, beside those of others
    # called when it is closed and as good as new. Returns whether it is kept for another request, which is cheaper than
    # a new session. None if it serves more than one request.
    _recycle: Callable[[Pushed], bool] | None = None
    _work: Work | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        session = self.session
        session.transport.pushed = True
        session.transport.when_closed = self._end
        session.transport.single_request = self._recycle is not None
        session.start(self._handler_tasks, self)

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
    def is_pristine(self) -> bool:
        """Whether it is as good as new, as after one answered request, and may be used again."""
        session = self.session
        engine = session.engine
        return not (
            self._work is not None
            or session.draining.is_set()  # or closed
            or session.lost is not None
            or session.jobs.by_id
            or session.pending
            or session.watchers
            or engine.inbound
            or engine.outbound
            or session.jobs.parked
            or session.jobs.abandoned_threads
            or session.jobs.notices
            or session.counts.dropped
            or session.counts.merged
        )

    def assume(self, revision: Revision) -> None:
        """Skip the handshake, for clients of a server that keeps no sessions: they did it on another session."""
        self.session.engine.legacy.assume(revision)

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Process received messages. Never waits and never raises because of what a peer sent."""
        self.session.deliver(batch)

    def disconnect(self, why: str, *, slow: bool = False, ending: bool = False) -> None:
        """End the session because its peer is gone, was dropped since it read nothing (`slow`), or the server ends.

        Handlers are cancelled, and calls raise `ConnectionLost`.
        """
        session = self.session
        session.lose(why)
        if slow:
            session.jobs.cancel_all(CancelReason.LIMIT, why)
        else:
            session.jobs.cancel_all(CancelReason.DRAIN if ending else CancelReason.DISCONNECTED)
        session.close()

    def close(self) -> None:
        """End the session and cancel what still runs. The caller must not use it any more."""
        session = self.session
        if self._recycle is not None and self.is_pristine and self._recycle(self):
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
            work = self._work = Work(self._handler_tasks.nursery, trio.CancelScope())
        work.start_soon(function, *args)

    def _end(self) -> None:
        self._end_work()
        session = self.session
        sink, session.sink = session.sink, NOWHERE  # the sink may refer to the session: break the reference cycle
        sink.close()
        if not session.jobs:  # else the last job updates the count
            session.memory.belong_to(None)
        session.endpoint.closed(session)

    def _end_work(self) -> None:
        self.session.background = _ENDED
        if self._work is not None:
            self._work.scope.cancel(reason="the session has ended")


@slotted
class PushedConnection(Pushed):
    """One pushed session that is one connection: it pauses its reader instead of refusing what is too much.

    It ends with the connection: handlers unwind first and their last messages are still sent, as in `drive`. The
    session's sink is a `WrittenOutbox`.
    """

    receiver: Receiver = attrs.field(init=False)  # what is read is delivered to it; by default the session
    _outbox: WrittenOutbox = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.receiver = session = self.session
        session.transport.pushed = False
        assert isinstance(session.sink, WrittenOutbox)
        self._outbox = session.sink
        self._outbox.session, self._outbox.weigh = session, session.weigh
        session.jobs.mailbox.leave_room(*self._outbox.writer.read_ahead)

    @property
    def stall_timeout(self) -> float:
        return self.session.limits.stall_timeout

    @property
    def drain_timeout(self) -> float:
        return self.session.limits.drain_timeout

    @property
    def paused(self) -> bool:
        return self.receiver.paused

    @property
    def closed(self) -> bool:
        return self.session.closed.is_set()

    @property
    def unsent(self) -> bool:
        return len(self._outbox) > 0

    async def readable(self, wait_peer_closed: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until the reader may read on; see `readable_or_left`."""
        return await readable_or_left(self.receiver, wait_peer_closed)

    def deliver(self, batch: Sequence[Incoming]) -> None:
        self.receiver.deliver(batch)

    def writable(self) -> None:
        """Write what was kept while the peer did not read."""
        self._outbox.leave()

    def close(self) -> None:
        """End the session, and cancel what runs."""
        self.session.close()

    def stalled(self) -> None:
        """End the session because its peer took nothing for too long, and log that."""
        session = self.session
        if session.lost is None:
            session.lose(stall_text(self.stall_timeout))
            report_stalled(session)
            session.close()

    async def finish(self) -> None:
        """Wait, after `close`, until the handlers have unwound. Afterwards no more messages are accepted."""
        await self.session.jobs.wait_idle()
        self._outbox.close()

    def forget(self) -> None:
        """Drop everything, because the connection has ended."""
        session = self.session
        session.lose("the session has ended")
        session.close()
        session.sink, self._outbox.session = NOWHERE, None  # the sink refers to the session
        self._outbox.abandon()
        if not session.jobs:  # else the last job updates the count
            session.memory.belong_to(None)
        session.endpoint.closed(session)

    def _end(self) -> None:
        self._end_work()
        session = self.session
        session.jobs.cancel_all(CancelReason.DISCONNECTED if session.lost else CancelReason.DRAIN)
        self._outbox.writer.session_ended()


_ENDED = _Ended()
