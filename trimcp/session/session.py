"""The actor without tasks: one engine, its backlog, its jobs under way and its calls pending, under one law.

`deliver` takes what arrived and never waits; whoever reads asks `readable` before it reads again. Handlers run as
jobs in the nursery a driver lends (`start`), within the running slots. Everything that leaves goes through one
sink, room first, then the engine's state, then the queue, with no checkpoint between the last two.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from trimcp.channel import Incoming, Kind, LaneCounts, Outgoing, Sink
from trimcp.errors import ConnectionLost, ErrorReply
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import (
    BatchReceived,
    Cancelled,
    Event,
    Forgotten,
    Notified,
    Progressed,
    Rejected,
    Replied,
    RequestReceived,
    Settled,
)
from trimcp.protocol.request_state import Sealer
from trimcp.session.crew import Crew
from trimcp.session.endpoint import Endpoint, Watcher
from trimcp.session.job import CancelReason, Job
from trimcp.session.limits import Limits
from trimcp.session.mailbox import Mailbox, weight
from trimcp.session.outbox import Outbox
from trimcp.session.pending import Pending
from trimcp.session.replies import Replies
from trimcp.session.runner import Runner
from trimcp.session.scopes import Background
from trimcp.session.speaking import Speaking
from trimcp.session.statistics import Statistics, snapshot
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INTERNAL_ERROR, OVERLOADED
from trimcp.wire.jsonrpc import RequestId, encode_error
from trimcp.wire.revisions import Revision

__all__ = ["Session"]

log: logging.Logger = logging.getLogger("trimcp.session")


@attrs.define(eq=False, repr=False)
class Session(Speaking):
    """One side of one connection.

    Args:
        engine: the protocol's state.
        endpoint: what is served to the peer.
        limits: every bound and grace period.
        sink: where messages go that belong to no request; by default an `Outbox` for a writer task, which takes all.
        handler_errors: "log" answers and logs a handler's crash; "raise" (for tests) answers, then lets it end the
            session.
        force_rerun: ask questions by running handlers again in every era, so that tests find what is not repeatable.
        sealer: seals and opens `requestState`.
        state: what the server's or client's lifespan made, for handlers.

    Attributes:
        counts: what gave way because a reader was slow, by lane.
        arriving: bytes of the message being taken right now.
        refused: requests that were turned away because too much was under way, or it was ending.
        notices: handlers of notifications at work.
        background: where work that belongs to the session is started, once it is driven.
        mirrors_headers: whether its channel carries headers beside our requests.
        pushed: whether messages are pushed into it: then nobody can stop reading, and what is too much is refused.
        brief: whether it ends with the one request it is for.
        when_closed: called by `close`, once, where no driver waits for it.
        on_finished: called once for every request of the peer that was admitted, when its reply is queued (the second
            argument) or it is clear that it gets none (None). It must not wait; what it raises is logged.
    """

    engine: Connection
    endpoint: Endpoint
    limits: Limits = attrs.field(factory=Limits)
    sink: Sink = attrs.field(default=attrs.Factory(lambda session: Outbox.of(session.limits), takes_self=True))
    handler_errors: str = "log"
    force_rerun: bool = False
    sealer: Sealer = attrs.field(factory=Sealer)
    state: Any = None
    jobs: dict[RequestId, Job] = attrs.field(init=False, factory=dict)
    pending: dict[RequestId, Pending] = attrs.field(init=False, factory=dict)
    watchers: set[Watcher] = attrs.field(init=False, factory=set)
    mailbox: Mailbox = attrs.field(init=False)
    runner: Runner | None = attrs.field(init=False, default=None)
    peer_session: Session | None = attrs.field(init=False, default=None)
    draining: trio.Event = attrs.field(init=False, factory=trio.Event)
    closed: trio.Event = attrs.field(init=False, factory=trio.Event)
    lost: ConnectionLost | None = attrs.field(init=False, default=None)
    mirrors_headers: bool = attrs.field(init=False, default=False)
    parked: int = attrs.field(init=False, default=0)
    counts: LaneCounts = attrs.field(init=False)
    abandoned_threads: int = attrs.field(init=False, default=0)
    humans: int = attrs.field(init=False, default=0)
    arriving: int = attrs.field(init=False, default=0)
    notices: int = attrs.field(init=False, default=0)
    refused: int = attrs.field(init=False, default=0)
    background: Background = attrs.field(init=False)
    pushed: bool = attrs.field(init=False, default=False)
    brief: bool = attrs.field(init=False, default=False)
    when_closed: Callable[[], None] | None = attrs.field(init=False, default=None)
    on_finished: Callable[[Job, bytes | None], object] | None = attrs.field(init=False, default=None)
    _replies: Replies = attrs.field(init=False)
    _reading: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _idle: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.mailbox = Mailbox(self.limits.backlog_requests, self.limits.backlog_bytes)
        self._replies = Replies(self.limits.backlog_bytes)
        self.counts = self.sink.counts if isinstance(self.sink, Outbox) else LaneCounts()

    # Facts

    @property
    def revision(self) -> Revision | None:
        """The revision our own messages are spoken in, or None before that is decided."""
        return self.engine.revision

    @property
    def dropped(self) -> int:
        """Messages that nobody will see, because a reader was slow or gone."""
        return sum(self.counts.dropped.values())

    def statistics(self) -> Statistics:
        """Return a snapshot of what is under way."""
        return snapshot(self)

    # What arrives

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Take what arrived. Never waits and never raises because of what a peer sent."""
        receive = self.engine.receive
        for incoming in batch:
            self._apply(receive(incoming.message, incoming.principal), incoming)

    def _apply(self, event: Event, incoming: Incoming) -> None:
        self.arriving = incoming.size
        if isinstance(event, RequestReceived):
            self._take_request(event, incoming)
        elif isinstance(event, Replied):
            self._take_reply(event)
        elif isinstance(event, Progressed):
            self.pending[event.id].progressed(event.params)
        elif isinstance(event, Notified):
            self.endpoint.notified(self, event)
        elif isinstance(event, Settled):
            self._reply(event.id, event.reply, incoming)
        elif isinstance(event, Cancelled):
            self._take_cancel(event)
        elif isinstance(event, Rejected):
            log.debug("refused: %s", event.why)
            if event.reply is not None:
                self._reply(event.id, event.reply, incoming, event.error)
        elif isinstance(event, BatchReceived):
            self._take_batch(event, incoming)
        elif isinstance(event, Forgotten):
            for watcher in list(self.watchers):
                watcher.lost(ConnectionLost(event.why))
        else:
            log.debug("ignored: %s", event.why)

    def _take_request(self, event: RequestReceived, incoming: Incoming) -> None:
        request = self.engine.inbound[event.id]
        size = weight(event.raw, incoming.size)
        origin = incoming.origin
        job = Job(request, event.params, event.raw, self.road(origin), size, origin, incoming.headers)
        runner = self.runner
        if runner is None or self.draining.is_set():
            self._refuse(job, CANCELLED_BY_DRAIN, "shutting down; not started")
        elif (self.pending or self.pushed) and self.mailbox.full(self.parked):
            # Reading must go on, since something here waits for the peer; so this one is turned away instead. Also
            # where a slot is free: those that wait for the peer have none, and there must not be ever more of them.
            self._refuse(job, OVERLOADED, "too much under way; try again later")
        elif not self.mailbox and runner.has_room(job):
            self.jobs[event.id] = job
            runner.start(self, job)
        else:
            self.jobs[event.id] = job
            job.queued = trio.current_time()
            self.mailbox.put(job)

    def _refuse(self, job: Job, code: int, message: str) -> None:
        id = job.request.id
        job.over = True
        job.error = code
        if code == OVERLOADED:
            from trimcp.security import security_event

            security_event("flood_refused", what=job.request.verb.name, principal=job.request.admission.principal)
        self.refused += 1
        reply = encode_error(id, code, message)
        wanted = self.engine.answered(id)
        if self.on_finished is not None:
            self._report(job, reply if wanted else None)
        if wanted:
            self._replies.post(job.sink, id, reply, job.origin, code)
        else:
            self._replies.none(job.sink, id, job.origin)

    def _take_reply(self, event: Replied) -> None:
        if (pending := self.pending.pop(event.id, None)) is not None:
            pending.replied(event)

    def _take_cancel(self, event: Cancelled) -> None:
        job = self.jobs.get(event.id)
        if job is not None:
            job.cancel(CancelReason.PEER, event.reason)
            if not job.started and self.mailbox.remove(job):
                self.finish(job, None)

    def _take_batch(self, event: BatchReceived, incoming: Incoming) -> None:
        self._replies.expect(self.road(incoming.origin), event, incoming.origin)
        # Its members share the weight of the text they came in.
        share = attrs.evolve(incoming, size=incoming.size // len(event.events))
        for member in event.events:
            if not isinstance(member, Settled | Rejected):
                self._apply(member, share)

    async def readable(self) -> None:
        """Wait until it is right to read on: there is room, or something here waits for the peer.

        Pausing while something waits for the peer's answer would wait for ever: the answer stands behind the
        requests that are not being read.
        """
        while self.paused:
            await self._reading.park()

    @property
    def paused(self) -> bool:
        """Whether reading on would be wrong now, see `readable`."""
        sink = self.sink
        outbox = sink if isinstance(sink, Outbox) else None
        if self.closed.is_set():
            return False
        if self.pending:
            # A peer that floods us while it owes us an answer gets to read first: then its answer is read, too.
            return outbox is not None and outbox.flooded
        # Refusals and pongs are posted without waiting; a peer that sends but never reads is paused for them here.
        return self.mailbox.full(self.parked) or (outbox is not None and outbox.full_of_replies)

    # Jobs

    def start(self, crew: Crew, background: Background | None = None) -> None:
        """Begin to have jobs run by `crew`, in whose nursery work of the session lives, too, unless it has its own."""
        self.runner = Runner(crew, self.limits.max_running, self.limits.running_bytes)
        self.background = crew.nursery if background is None else background

    def next_jobs(self) -> None:
        """Start jobs that wait, as far as slots allow."""
        runner = self.runner
        while runner is not None and self.mailbox and runner.has_room(self.mailbox.first()):
            runner.start(self, self.mailbox.take())
        self.nudge()

    def finish(self, job: Job, reply: bytes | None) -> None:
        """End a job: queue its reply, unless the peer gave the request up, and let the next one begin."""
        id = job.request.id
        job.over = True
        self.jobs.pop(id, None)
        wanted = self.engine.answered(id)
        if job.request.admission.progress_token is not None:
            job.sink.settle_latest(("progress", id), keep=wanted)
        if self.on_finished is not None:
            self._report(job, reply if wanted else None)
        if self.counts.untold and wanted:
            self._tell_dropped_logs(job)
        if wanted and reply is not None:
            headers = None if job.retry_after is None else {"retry-after": str(math.ceil(job.retry_after))}
            self._replies.post(job.sink, id, reply, job.origin, job.error, headers)
        else:
            self._replies.none(job.sink, id, job.origin)
        if self.mailbox or self._reading:
            self.next_jobs()
        if not self.jobs:
            self._idle.unpark_all()

    def _tell_dropped_logs(self, job: Job) -> None:
        from trimcp.session.lanes import tell_dropped_logs

        tell_dropped_logs(self, job)

    def _report(self, job: Job, reply: bytes | None) -> None:
        assert self.on_finished is not None
        try:
            self.on_finished(job, reply)
        except Exception:  # whoever keeps books must not cost a reply
            log.exception("what is told of every request that ends crashed")

    def _reply(self, id: RequestId | None, data: bytes, incoming: Incoming, error: int | None = None) -> None:
        self.road(incoming.origin).post(Outgoing(data, Kind.REPLY, id, incoming.origin, None, error))

    def crashed(self, job: Job, error: BaseException) -> ErrorReply:
        """Log a handler's crash whole and return an answer that says nothing of it."""
        log.error("the handler of %s crashed", job.request.verb.name, exc_info=error)
        return ErrorReply(INTERNAL_ERROR, "internal error")

    async def wait_idle(self) -> None:
        """Wait until no request of the peer is under way."""
        await trio.lowlevel.checkpoint()
        while self.jobs:
            await self._idle.park()

    # The end

    def cancel_jobs(self, reason: CancelReason, detail: str | None = None) -> None:
        """Stop every handler, and refuse what waits."""
        for job in list(self.jobs.values()):
            job.cancel(reason, detail)
            if not job.started and self.mailbox.remove(job):
                self.finish(job, job.farewell())

    async def drain(self, grace: float, overdue: Callable[[], object] | None = None) -> None:
        """Stop taking requests, let those under way answer for `grace` seconds, then cancel them with an error reply.

        `overdue` is called just before that. Returns when the last handler has unwound; cancelling it cuts all short.
        """
        self.draining.set()
        try:
            with trio.move_on_after(grace) as patience:
                await self.wait_idle()
            if patience.cancelled_caught and overdue is not None:
                overdue()
        finally:
            self.cancel_jobs(CancelReason.DRAIN)
        await self.wait_idle()

    def close(self) -> None:
        """Ask the driver to end the session; safe to call from anywhere, more than once."""
        self.draining.set()
        self.closed.set()
        self.nudge()
        then, self.when_closed = self.when_closed, None
        if then is not None:
            then()
