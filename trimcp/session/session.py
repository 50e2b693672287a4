"""The actor without tasks: one engine, its backlog, its jobs under way and its calls pending, under one law.

`deliver` takes what arrived and never waits; whoever reads asks `readable` before it reads again. Handlers run as
jobs in the nursery a driver lends (`start`), within the running slots. Everything that leaves goes through one
sink, room first, then the engine's state, then the queue, with no checkpoint between the last two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from trimcp.channel import Incoming, Kind, Origin, Outgoing, Sink
from trimcp.errors import ConnectionLost, ErrorReply, LocalError
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
from trimcp.protocol.vocabulary import vocabulary
from trimcp.session.crew import Crew
from trimcp.session.endpoint import Endpoint, Watcher
from trimcp.session.job import CancelReason, Job
from trimcp.session.limits import Limits
from trimcp.session.mailbox import Mailbox, weight
from trimcp.session.mirroring import mirrored
from trimcp.session.outbox import Outbox
from trimcp.session.pending import Pending, cancellation_text
from trimcp.session.replies import Replies
from trimcp.session.runner import Runner
from trimcp.session.scopes import Background
from trimcp.session.statistics import Statistics, snapshot
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INTERNAL_ERROR, OVERLOADED
from trimcp.wire.jsonrpc import JSON, RequestId, encode_error
from trimcp.wire.lifecycle import CancelledParams
from trimcp.wire.revisions import Revision

__all__ = ["Session"]

log: logging.Logger = logging.getLogger("trimcp.session")


@attrs.define(eq=False, repr=False)
class Session:
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
        arriving: bytes of the message being taken right now.
        notices: handlers of notifications at work.
        background: where work that belongs to the session is started, once it is driven.
        mirrors_headers: whether its channel carries headers beside our requests.
        pushed: whether messages are pushed into it: then nobody can stop reading, and what is too much is refused.
        brief: whether it ends with the one request it is for.
        when_closed: called by `close`, once, where no driver waits for it.
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
    parked: int = attrs.field(init=False, default=0)
    dropped: int = attrs.field(init=False, default=0)
    abandoned_threads: int = attrs.field(init=False, default=0)
    humans: int = attrs.field(init=False, default=0)
    arriving: int = attrs.field(init=False, default=0)
    notices: int = attrs.field(init=False, default=0)
    background: Background = attrs.field(init=False)
    pushed: bool = attrs.field(init=False, default=False)
    brief: bool = attrs.field(init=False, default=False)
    mirrors_headers: bool = attrs.field(init=False, default=False)
    when_closed: Callable[[], None] | None = attrs.field(init=False, default=None)
    _replies: Replies = attrs.field(init=False)
    _reading: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _idle: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self.mailbox = Mailbox(self.limits.backlog_requests, self.limits.backlog_bytes)
        self._replies = Replies(self.limits.backlog_bytes)

    # Facts

    @property
    def revision(self) -> Revision | None:
        """The revision our own messages are spoken in, or None before that is decided."""
        return self.engine.revision

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
            self.mailbox.put(job)

    def _refuse(self, job: Job, code: int, message: str) -> None:
        id = job.request.id
        job.over = True
        if self.engine.answered(id):
            self._replies.post(job.sink, id, encode_error(id, code, message), job.origin, code)
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

    def nudge(self) -> None:
        """Let the reader look again whether it may go on."""
        self._reading.unpark_all()

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
        if wanted and reply is not None:
            self._replies.post(job.sink, id, reply, job.origin, job.error)
        else:
            self._replies.none(job.sink, id, job.origin)
        if self.mailbox or self._reading:
            self.next_jobs()
        if not self.jobs:
            self._idle.unpark_all()

    def _reply(self, id: RequestId | None, data: bytes, incoming: Incoming, error: int | None = None) -> None:
        self.road(incoming.origin).post(Outgoing(data, Kind.REPLY, id, incoming.origin, None, error))

    def road(self, origin: Origin | None) -> Sink:
        """Return where messages go that belong to what came from there."""
        return self.sink if origin is None or origin.sink is None else origin.sink

    def crashed(self, job: Job, error: BaseException) -> ErrorReply:
        """Log a handler's crash whole and return an answer that says nothing of it."""
        log.error("the handler of %s crashed", job.request.verb.name, exc_info=error)
        return ErrorReply(INTERNAL_ERROR, "internal error")

    async def wait_idle(self) -> None:
        """Wait until no request of the peer is under way."""
        await trio.lowlevel.checkpoint()
        while self.jobs:
            await self._idle.park()

    # Calls

    async def call(
        self,
        name: str,
        params: Any = None,
        *,
        meta: Mapping[str, JSON] | None = None,
        origin: Origin | None = None,
    ) -> Any:
        """Send a request and return the payload of its answer.

        Cancelling it (a deadline included) tells the peer, which stops its handler. What it belongs to, if anything,
        is the request that came from `origin`.

        Raises:
            RemoteError: the peer answered with an error.
            InvalidReply: it answered with what is no answer.
            ConnectionLost: the connection ended meanwhile.
            LocalError: the request may not be sent now; nothing was.
        """
        pending = await self.begin(name, params, meta=meta, origin=origin)
        try:
            return await pending.payload()
        except BaseException as error:
            # Nothing to do where an answer came; a cancellation or an interrupt leaves it under way.
            self.abandon(pending, cancellation_text(error))
            raise

    async def begin(
        self,
        name: str,
        params: Any = None,
        *,
        wants_progress: bool = False,
        meta: Mapping[str, JSON] | None = None,
        headers: Mapping[str, str] | None = None,
        origin: Origin | None = None,
    ) -> Pending:
        """Send a request and return it, to be waited for or abandoned. Cancelled, it has sent nothing."""
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
        engine = self.engine
        verb = engine.verb(name)
        engine.may_call(verb)
        id = engine.new_id()
        data = engine.encode_request(id, verb, params, wants_progress=wants_progress, meta=meta)
        pending = Pending(self, id, verb, origin)
        if self.mirrors_headers:
            headers = mirrored(engine.revision, verb, params, headers)
        return await self.send_request(pending, data, wants_progress=wants_progress, headers=headers)

    async def send_request(
        self,
        pending: Pending,
        data: bytes,
        *,
        wants_progress: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Pending:
        """Send an encoded request: room, then state, then queue."""
        origin = pending.origin
        sink = self.road(origin)
        if sink.full:
            await sink.room()
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
        self.engine.sent(pending.id, pending.verb, wants_progress=wants_progress)
        self.pending[pending.id] = pending
        try:
            sink.post(Outgoing(data, Kind.REQUEST, pending.id, origin, headers))
        except LocalError:
            del self.pending[pending.id]
            self.engine.give_up(pending.id)
            raise
        self.nudge()
        return pending

    def abandon(self, pending: Pending, why: str) -> None:
        """Give a request up and tell the peer, unless it was never written. Never blocks."""
        if self.pending.pop(pending.id, None) is None:
            return
        self.engine.give_up(pending.id)
        sink = self.road(pending.origin)
        if sink.withdraw(pending.id) or pending.verb.name in ("initialize", "server/discover"):
            return
        verb = self.engine.verb("notifications/cancelled")
        data = self.engine.encode_notification(verb, CancelledParams(request_id=pending.id, reason=why))
        sink.post(Outgoing(data, Kind.CANCEL, pending.id, pending.origin))

    # Notifications

    def encode_related(self, job: Job, name: str, params: Any, *, subscription: RequestId | None = None) -> bytes:
        """Return a notification that belongs to a request of the peer's, in the words of that request's revision."""
        verb = vocabulary(job.request.admission.revision)[name]
        return self.engine.encode_notification(verb, params, subscription=subscription)

    def encode_notification(self, name: str, params: Any, *, subscription: RequestId | None = None) -> bytes:
        """Return a notification of ours as bytes.

        Raises:
            LocalError: this revision has no such notification in this direction, or it cannot be encoded.
        """
        return self.engine.encode_notification(self.engine.verb(name), params, subscription=subscription)

    async def notify(self, name: str, params: Any = None) -> None:
        """Send a notification that belongs to no request; waits for room."""
        data = self.encode_notification(name, params)
        await self.room()
        self.sink.post(Outgoing(data, Kind.NOTIFICATION))

    async def room(self) -> None:
        """Wait for room in the outbox; always a checkpoint."""
        if self.sink.full:
            await self.sink.room()
        else:
            await trio.lowlevel.checkpoint()

    def notify_latest(self, name: str, params: Any = None, *, key: object = None) -> None:
        """Send a notification of which only the latest of its `key` (by default its name) counts; never blocks."""
        data = self.encode_notification(name, params)
        self.sink.post_latest((name, key), Outgoing(data, Kind.NOTIFICATION))

    # The end

    def lose(self, why: str) -> None:
        """Note that the peer is gone: every call under way fails now, and later ones at once."""
        if self.lost is not None:
            return
        self.lost = ConnectionLost(why)
        self.engine.lose_all()
        pending, self.pending = self.pending, {}
        for call in pending.values():
            call.replied(Replied(call.id, None, ConnectionLost(why)))
        for watcher in list(self.watchers):
            watcher.lost(self.lost)
        self.nudge()

    def cancel_jobs(self, reason: CancelReason) -> None:
        """Stop every handler, and refuse what waits."""
        for job in list(self.jobs.values()):
            job.cancel(reason)
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
