"""One side of one connection: a protocol engine with its jobs, its calls and its outgoing messages. It owns no task.

`deliver` processes received messages and never waits; the reader awaits `readable` before it reads again. Handlers run
as jobs in the nursery of the handler tasks that `start` is given. Everything is sent through one sink in this order:
wait for room, change the engine's state, enqueue, without a checkpoint between the last two. So a call that is
cancelled early was never sent, and the cancellation of one that was sent is announced.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.budget import LITTLE, STEP
from trimcp.channel import Incoming, Kind, LaneCounts, Origin, Outgoing, Sink
from trimcp.errors import ConnectionLost, LocalError
from trimcp.framing.headers import request_headers
from trimcp.protocol.bound_methods import BoundMethod, foreign, methods_of
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import (
    AnsweredByEngine,
    BatchReceived,
    Cancelled,
    Event,
    Forgotten,
    Notified,
    Progressed,
    Rejected,
    Replied,
    RequestReceived,
)
from trimcp.protocol.request_state import Sealer
from trimcp.session.facts import SessionMemory, TransportFacts
from trimcp.session.incoming.job import CancelReason, Endpoint, Finished, Job
from trimcp.session.incoming.jobs import HandlerTasks, Jobs
from trimcp.session.limits import Limits
from trimcp.session.outgoing.pending import Pending
from trimcp.session.queues import SMALL, BatchSink, LazyParkingLot, Outbox, weight
from trimcp.session.scopes import Background, cancellation_text
from trimcp.support.slotted import slotted
from trimcp.wire.codes import CANCELLED_BY_DRAIN, OVERLOADED
from trimcp.wire.common import SEVERITY
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.lifecycle import CancelledParams, LoggingMessageParams, ProgressParams
from trimcp.wire.methods import METHODS, NAMED
from trimcp.wire.revisions import Revision

if TYPE_CHECKING:
    from trimcp.session.statistics import Statistics

log: logging.Logger = logging.getLogger("trimcp.session")

_FLOOD: Final = 16  # reading stops, even if the peer owes us an answer, when its answers fill the outbox so many times


@slotted
class Session:
    """One side of one connection.

    It has more than 300 lines because whatever is received passes it whole: what a message may do depends on the peer's
    requests, on ours and on what its transport can do.
    """

    engine: Connection  # the protocol's state
    endpoint: Endpoint[Session]  # what is served to the peer
    limits: Limits = attrs.field(factory=Limits)  # every bound and timeout
    # the destination of messages that belong to no request; by default an `Outbox` for a writer task
    sink: Sink = attrs.field(default=attrs.Factory(lambda session: Outbox.of(session.limits), takes_self=True))
    # "log" answers and logs a handler's crash; "raise" (for tests) answers, then ends the session with it; "tell"
    # leaves it to the endpoint
    handler_errors: str = "log"
    # in every era, ask questions by re-running handlers, so that tests find what is not repeatable
    force_rerun: bool = False
    sealer: Sealer = attrs.field(factory=Sealer)  # seals and opens `requestState`
    # the memory that the peer uses here, and the budget in which it is counted
    memory: SessionMemory = attrs.field(factory=SessionMemory)
    transport: TransportFacts = attrs.field(init=False, factory=TransportFacts)  # what its transport has told it
    jobs: Jobs = attrs.field(init=False)  # the peer's requests that run or wait
    pending: dict[RequestId, Pending] = attrs.field(init=False, factory=dict)  # our requests that are not answered
    # called, besides the calls in progress, when the peer is gone. They must not block.
    watchers: set[Callable[[ConnectionLost], object]] = attrs.field(init=False, factory=set)
    draining: trio.Event = attrs.field(init=False, factory=trio.Event)  # set once no more requests are accepted
    # set once the session is to end; its driver waits for this
    closed: trio.Event = attrs.field(init=False, factory=trio.Event)
    lost: ConnectionLost | None = attrs.field(init=False, default=None)  # why the peer is gone, or None
    counts: LaneCounts = attrs.field(init=False)  # messages merged or dropped because a reader was slow, by lane
    # tasks that wait until the session may read on
    readers: LazyParkingLot = attrs.field(init=False, factory=LazyParkingLot)
    background: Background = attrs.field(init=False)  # starts tasks that belong to the session, once it is driven
    # each called once for every admitted request of the peer, when its reply (the second argument) is queued, or with
    # None when it is certain that it gets none. None must block; what they raise is logged. All sessions of a server
    # share its list.
    on_finished: Sequence[Finished] = attrs.field(init=False, default=())
    _now: float = attrs.field(init=False, default=0.0)  # when the messages being processed were delivered

    def __attrs_post_init__(self) -> None:
        self.jobs = Jobs(self.limits)
        self.counts = self.sink.counts if isinstance(self.sink, Outbox) else LaneCounts()

    def start(self, tasks: HandlerTasks, background: Background | None = None) -> None:
        """Let `tasks` run the jobs. Background tasks run in its nursery, too, unless `background` is given."""
        self.jobs.tasks = tasks
        self.background = tasks.nursery if background is None else background

    # Facts

    @property
    def driven(self) -> bool:
        """Whether it was started."""
        return self.jobs.tasks is not None

    @property
    def nursery(self) -> trio.Nursery:
        """The nursery of its jobs, once it is driven."""
        assert self.jobs.tasks is not None
        return self.jobs.tasks.nursery

    @property
    def revision(self) -> Revision | None:
        """The revision of our own messages, or None before it is decided."""
        return self.engine.revision

    @property
    def max_message(self) -> int:
        """Bytes of the largest message accepted."""
        return self.limits.largest_into(self.engine.role)

    def unread(self) -> tuple[list[Outgoing], int]:
        """Return the messages that wait for the peer, and the bytes handed on that it has not taken yet."""
        # Over HTTP each request has its own sink, and messages that belong to no request have another.
        sinks = {id(sink): sink for sink in (self.sink, *(self.sink_of(job.origin) for job in self.jobs))}
        held: list[Outgoing] = []
        unread = 0
        for sink in sinks.values():
            messages, handed_on = sink.waiting()
            held += messages
            unread += handed_on
        return held, unread

    def statistics(self) -> Statistics:
        """Return a snapshot of its queues and of the requests in progress."""
        from trimcp.session.statistics import Statistics, lanes_of  # imported only when used

        held, unread = self.unread()
        statistics = self.transport.http_statistics
        return Statistics(
            running=self.jobs.running,
            parked=self.jobs.parked,
            waiting=len(self.jobs.mailbox),
            waiting_bytes=self.jobs.mailbox.bytes_queued,
            pending=len(self.pending),
            outbox=len(held),
            outbox_bytes=sum(len(outgoing.data) for outgoing in held),
            merged=sum(self.counts.merged.values()),
            dropped=sum(self.counts.dropped.values()),
            abandoned_threads=self.jobs.abandoned_threads,
            unread_bytes=unread,
            lanes=lanes_of(self.counts, held),
            http=None if statistics is None else statistics(),
        )

    # Received messages

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Process received messages. Never waits and never raises because of what a peer sent."""
        receive, tasks = self.engine.receive, self.jobs.tasks
        self._now = trio.current_time() if tasks is None else tasks.now()
        if self.transport.sends_now:
            self.transport.alone = len(batch) == 1
        for incoming in batch:
            event = receive(incoming.message, incoming.principal)
            if type(event) is RequestReceived:
                self.memory.arriving = incoming.size
                self._take_request(event, incoming, None)
            else:
                self._apply(event, incoming)

    def _apply(self, event: Event, incoming: Incoming, batch: BatchSink | None = None) -> None:
        self.memory.arriving = incoming.size
        if isinstance(event, RequestReceived):
            self._take_request(event, incoming, batch)
        elif isinstance(event, Replied):
            if (pending := self.pending.pop(event.id, None)) is not None:
                pending.replied(event)
        elif isinstance(event, Progressed):
            if (on_progress := self.pending[event.id].on_progress) is not None:
                on_progress(event.params)
        elif isinstance(event, Notified):
            self.endpoint.notified(self, event)
        elif isinstance(event, AnsweredByEngine):
            self._reply(event.id, event.reply, incoming)
            if event.method == "initialize":
                self.memory.handshake = self.engine.legacy.kept
                if self.memory.handshake >= STEP:
                    self.weigh()
        elif isinstance(event, Cancelled):
            if (job := self.jobs.by_id.get(event.id)) is not None:
                self.jobs.cancel(job, CancelReason.PEER, event.reason)
        elif isinstance(event, Rejected):
            log.debug("refused: %s", event.why)
            if event.reply is not None:
                self._reply(event.id, event.reply, incoming, event.error)
        elif isinstance(event, BatchReceived):
            self._take_batch(event, incoming)
        elif isinstance(event, Forgotten):
            self._tell_watchers(event.why)
        else:
            log.debug("ignored: %s", event.why)

    def _take_request(self, event: RequestReceived, incoming: Incoming, batch: BatchSink | None) -> None:
        jobs, holding, transport = self.jobs, self.memory.holding, self.transport
        size, origin = incoming.size, incoming.origin
        if size >= SMALL:
            size = weight(event.raw, size)
        sink: Sink = self.sink if origin is None else self.sink_of(origin)
        if batch is not None:
            sink = batch
        job = Job(self, event, sink, size, origin, incoming.headers)
        if jobs.tasks is None or self.draining.is_set():
            job.refuse(CANCELLED_BY_DRAIN, "shutting down; not started")
        elif (self.pending or transport.pushed or transport.owed) and self._overloaded(size):
            job.refuse(OVERLOADED, "too much under way; try again later")
        else:
            jobs.by_id[event.id] = job
            if jobs.mailbox.bytes_queued or not jobs.start(job, self._now):
                job.queued = self._now
                jobs.mailbox.put(job)
        if holding is not None and (size >= STEP or not len(jobs.by_id) & 3):  # every fourth of the small calls
            self.weigh()

    def _overloaded(self, size: int) -> bool:
        """Return whether to refuse a request, if reading must go on because a handler waits for the peer.

        This applies even if a slot is free: parked jobs have no slot, and their number must be bounded.
        """
        jobs, holding = self.jobs, self.memory.holding
        if jobs.mailbox.full(jobs.parked):
            return True
        if holding is None or holding.held + size <= LITTLE or holding.fits(size):
            return False
        holding.refuse("requests")
        return True

    def _take_batch(self, event: BatchReceived, incoming: Incoming) -> None:
        sink = BatchSink(self.sink_of(incoming.origin), incoming.origin, self.memory, self.limits.backlog_bytes)
        sink.expect(event)
        # The members share the memory of the array's text.
        share = attrs.evolve(incoming, size=incoming.size // len(event.events))
        for member in event.events:
            if not isinstance(member, AnsweredByEngine | Rejected):
                self._apply(member, share, sink)

    def _reply(self, id: RequestId | None, data: bytes, incoming: Incoming, error: int | None = None) -> None:
        self.sink_of(incoming.origin).post(Outgoing(data, Kind.REPLY, id, incoming.origin, None, error))

    # Pausing the reader

    async def readable(self) -> None:
        """Wait until the reader may read on: there is room, or a handler or call waits for the peer.

        Pausing in the latter case could wait for ever: the answer is behind the requests that would not be read.
        """
        while self.paused:
            holding = self.memory.holding
            if holding is not None and not holding.may_grow and not holding.when_it_may_grow(self.readers.unpark_all):
                continue
            await self.readers.park()

    @property
    def paused(self) -> bool:
        """Whether the reader must not read on, see `readable`."""
        sink = self.sink
        if self.closed.is_set():
            return False
        if self.pending or self.transport.owed:
            # A peer that floods us while it owes us an answer has to read first: then its answer is read, too.
            return sink.queues and sink.full_of_replies(_FLOOD)
        # Refusals and pongs are posted without waiting. So a peer that sends but never reads is paused here.
        jobs = self.jobs
        if (jobs.mailbox.bytes_queued or jobs.parked) and jobs.mailbox.full(jobs.parked):
            return True
        if sink.queues and sink.full_of_replies():
            return True
        holding = self.memory.holding
        return holding is not None and holding.held > LITTLE and not holding.may_grow

    def weigh(self) -> None:
        """Count the memory that the peer uses now: waiting and running requests, and messages that it has not read."""
        memory = self.memory
        held = self.jobs.bytes_held + memory.handshake
        if not self.transport.pushed:  # a pushed session's sink belongs to the transport
            held += self.sink.bytes_held
        memory.set(held)

    # Its jobs

    def next_jobs(self) -> None:
        """Start waiting jobs, as far as there are slots, and let the reader check again."""
        self.jobs.start_waiting()
        if self.readers.lot:
            self.readers.unpark_all()

    def job_ended(self, job: Job) -> None:
        """Continue after a job: start the next one, and wake tasks that wait for the last one's end."""
        jobs = self.jobs
        if jobs.mailbox.bytes_queued or self.readers.lot:
            self.next_jobs()
        if not jobs.by_id:
            if jobs.idle.lot:
                jobs.idle.unpark_all()
            if self.memory.counted and not (self.sink.queues and self.sink.bytes_held):  # else once that is written
                self.weigh()
        elif self.transport.pushed and job.size >= STEP:
            self.weigh()

    def start_notice(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Have a task handle a notification. If as many run as requests may wait, it is dropped and counted."""

        async def run() -> None:
            try:
                await function(*args)
            finally:
                self.jobs.notices -= 1

        if self.jobs.notices >= self.limits.backlog_requests:
            self.counts.drop("others")
            return
        self.jobs.notices += 1
        self.background.start_soon(run)

    def tell_dropped_logs(self, job: Job | None) -> None:
        """Send one log message with the number of messages dropped while the peer was slow, if it wants warnings.

        It is sent before the next message of `job`, whose log level applies; None is for messages that belong to no
        request.
        """
        engine = self.engine
        wanted = engine.legacy.log_level if job is None else engine.log_level(job.request.admission)
        if wanted is None or SEVERITY["warning"] < SEVERITY[wanted]:
            return
        dropped, self.counts.untold = self.counts.untold, 0
        params = LoggingMessageParams(level="warning", data={"dropped": dropped}, logger="trimcp")
        data = self.encode_notification("notifications/message", params, job)
        if job is None:
            self.sink.post(Outgoing(data, Kind.NOTIFICATION))
        else:
            job.sink.post(Outgoing(data, Kind.NOTIFICATION, job.request.id, job.origin))

    # Our calls

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

        Raises RemoteError, InvalidReply (it is no answer), ConnectionLost, or LocalError: nothing was sent.
        """
        pending = await self.start_call(name, params, meta=meta, origin=origin)
        try:
            return await pending.payload()
        except BaseException as error:
            # Nothing to do where an answer came; a cancellation or an interrupt leaves it under way.
            self.abandon(pending, cancellation_text(error))
            raise

    async def start_call(
        self,
        name: str,
        params: Any = None,
        *,
        meta: Mapping[str, JSON] | None = None,
        headers: Mapping[str, str] | None = None,
        origin: Origin | None = None,
        on_progress: Callable[[ProgressParams], object] | None = None,
        on_reply: Callable[[Replied], object] | None = None,
    ) -> Pending:
        """Send a request and return it, to be waited for or abandoned. Cancelled, it has sent nothing.

        In one process the answer may be there when this returns, and the callbacks (see `Pending`) have been called.
        """
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
        engine = self.engine
        method = engine.method(name)
        engine.may_call(method)
        id = engine.new_id()
        data = engine.encode_request(id, method, params, wants_progress=on_progress is not None, meta=meta)
        pending = Pending(engine, id, method, origin, on_progress, on_reply)
        if self.transport.mirrors_headers:
            headers = mirrored(engine.revision, method, params, headers)
        return await self.send_request(pending, data, headers)

    async def send_request(self, pending: Pending, data: bytes, headers: Mapping[str, str] | None = None) -> Pending:
        """Send an encoded request: room, then state, then queue."""
        origin = pending.origin
        sink = self.sink_of(origin)
        if sink.full:
            await sink.room()
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
        self.engine.sent(pending.id, pending.method, wants_progress=pending.on_progress is not None)
        post = sink.post_alone if self.transport.alone and not self.pending else sink.post
        self.pending[pending.id] = pending
        try:
            post(Outgoing(data, Kind.REQUEST, pending.id, origin, headers))
        except LocalError:
            del self.pending[pending.id]
            self.engine.give_up(pending.id)
            raise
        if self.readers.lot:
            self.readers.unpark_all()
        return pending

    def abandon(self, pending: Pending, why: str) -> None:
        """Give a request up and tell the peer, unless it was never written. Never blocks."""
        if self.pending.pop(pending.id, None) is None:
            return
        self.engine.give_up(pending.id)
        sink = self.sink_of(pending.origin)
        if sink.withdraw(pending.id) or pending.method.name in ("initialize", "server/discover"):
            return
        data = self.encode_notification("notifications/cancelled", CancelledParams(request_id=pending.id, reason=why))
        sink.post(Outgoing(data, Kind.CANCEL, pending.id, pending.origin))

    # Its notifications

    def sink_of(self, origin: Origin | None) -> Sink:
        """Return where messages go that belong to what came from there."""
        sink = None if origin is None else origin.sink
        return self.sink if sink is None else sink

    def encode_notification(
        self, name: str, params: Any, job: Job | None = None, *, subscription: RequestId | None = None
    ) -> bytes:
        """Return a notification as bytes, in the revision of the peer's request that it belongs to (`job`), or ours.

        Raises LocalError: the revision has no such notification in this direction, or it cannot be encoded.
        """
        method = self.engine.method(name) if job is None else methods_of(job.request.admission.revision)[name]
        return self.engine.encode_notification(method, params, subscription=subscription)

    def encode_foreign(self, name: str, params: Mapping[str, JSON] | None) -> bytes:
        """Return a notification that only an extension defines as bytes.

        Raises LocalError: the protocol itself defines it, or it cannot be encoded.
        """
        if name in METHODS:
            raise LocalError(f"{name} is of the protocol itself; use its own method")
        return self.engine.encode_notification(foreign(name, notification=True), {} if params is None else params)

    async def notify(self, name: str, params: Any = None) -> None:
        """Send a notification that belongs to no request; waits for room."""
        headers = None
        if name in METHODS:
            data = self.encode_notification(name, params)
        else:
            data = self.encode_foreign(name, params)
            if self.transport.mirrors_headers:
                headers = mirrored(self.engine.revision, foreign(name, notification=True), None)
        if self.sink.full:
            await self.sink.room()
        else:
            await trio.lowlevel.checkpoint()
        self.sink.post(Outgoing(data, Kind.NOTIFICATION, headers=headers))

    def notify_latest(self, name: str, params: Any = None, *, key: object = None) -> None:
        """Send a notification of which only the latest of its `key` (by default its name) counts; never blocks."""
        data = self.encode_notification(name, params)
        self.sink.post_latest((name, key), Outgoing(data, Kind.NOTIFICATION))

    # Its end

    def lose(self, why: str) -> None:
        """Note that the peer is gone: every call under way fails now, and later ones at once."""
        if self.lost is not None:
            return
        self.lost = ConnectionLost(why)
        self.engine.lose_all()
        pending, self.pending = self.pending, {}
        for call in pending.values():
            call.replied(Replied(call.id, None, ConnectionLost(why)))
        self._tell_watchers(why)
        self.readers.unpark_all()

    def _tell_watchers(self, why: str) -> None:
        for tell in list(self.watchers):
            tell(ConnectionLost(why))

    async def drain(self, grace: float, overdue: Callable[[], object] | None = None) -> None:
        """Stop taking requests, let those under way answer for `grace` seconds, then cancel them with an error reply.

        `overdue` is called just before that. Returns when the last handler has unwound; cancelling it cuts all short.
        """
        self.draining.set()
        try:
            with trio.move_on_after(grace) as patience:
                await self.jobs.wait_idle()
                while self.transport.owed and self.lost is None:
                    await self.readers.park()
            if patience.cancelled_caught and overdue is not None:
                overdue()
        finally:
            self.jobs.cancel_all(CancelReason.DRAIN)
        await self.jobs.wait_idle()

    def close(self) -> None:
        """Ask the driver to end the session; safe to call from anywhere, more than once."""
        self.draining.set()
        self.closed.set()
        self.readers.unpark_all()
        then, self.transport.when_closed = self.transport.when_closed, None
        if then is not None:
            then()


def mirrored(
    revision: Revision | None, method: BoundMethod, params: Any, more: Mapping[str, str] | None = None
) -> Mapping[str, str] | None:
    """Return the headers in which a request repeats what it is (2026-07-28 streamable-http), and `more`.

    In a revision that repeats nothing it is `more` alone. Raises LocalError: its name cannot be put in a header.
    """
    if revision is None or not revision.method_headers:
        return more
    name, member = None, method.row.mirrored
    if member is not None:
        name = getattr(params, member)
    elif type(params) is dict:  # of an extension
        name = params.get(NAMED.get(method.name))
    return {**request_headers(revision.name, method.name, name), **(more or {})}
