"""One request of the peer, from its admission until its reply is queued.

A worker task (`jobs.HandlerTasks`) calls `Job.attempt`, which runs the handler once. If it failed, was cancelled or
unwound to ask a question, `unwind` follows. Both end in `finish`, which queues the reply. `Owner` is what a job needs
of its session.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import attrs
import orjson
import trio

from trimcp.budget import LARGE, MemoryCharge, TurnBound
from trimcp.channel import Kind, LaneCounts, Origin, Outgoing, Sink
from trimcp.errors import ConnectionLost, ErrorReply
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Notified, RequestReceived
from trimcp.session.clock import WorkClock
from trimcp.session.facts import SessionMemory, TransportFacts
from trimcp.session.incoming.error_answers import ErrorAnswer, error_for, own_error_data
from trimcp.session.limits import Limits
from trimcp.session.scopes import Work
from trimcp.support.nurseries import abandon_left_open, contained, has_left_open, innermost_scope, split_own_failures
from trimcp.support.slotted import slotted
from trimcp.wire.codes import CANCELLED_BY_DRAIN, CANCELLED_BY_OPERATOR, INTERNAL_ERROR, OVERLOADED, TIMED_OUT
from trimcp.wire.converter import NotInRevision
from trimcp.wire.jsonrpc import RequestId, encode_error

Finished: TypeAlias = Callable[["Job", bytes | None], object]
"""What is told of a request that has ended, with its reply; None if it gets none."""

SessionT_contra = TypeVar("SessionT_contra", contravariant=True)

log: logging.Logger = logging.getLogger("trimcp.session")


class CancelReason(Enum):
    """Why a handler is cancelled; the value is the text of `trio.CancelScope.cancel(reason=)`.

    Attributes:
        PEER: the peer cancelled the request, also because its own deadline expired.
        DISCONNECTED: the peer is gone.
        DEADLINE: the caller's deadline passed without a cancellation, or the tool's own timeout expired.
        DRAIN: the server or the session ends.
        LIMIT: the peer took nothing for too long and was dropped (`Limits.stall_timeout`).
        OPERATOR: whoever runs the server cancelled it (`Observation.cancel`).

    There is no reason for idleness: a session with a running handler is not idle.
    """

    PEER = "cancelled by peer"
    DISCONNECTED = "disconnected"
    DEADLINE = "deadline"
    DRAIN = "drain"
    LIMIT = "limit"
    OPERATOR = "cancelled by the operator"


_TRACE: Final = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-")  # of `traceparent`, W3C Trace Context
_LONGEST_ID: Final = 100  # characters; a peer chooses some of them

# Reasons for which an error is sent, with its code. In the other cases the peer is gone or knows.
_CANCELLED_CODES = {
    CancelReason.DEADLINE: TIMED_OUT,
    CancelReason.DRAIN: CANCELLED_BY_DRAIN,
    CancelReason.LIMIT: OVERLOADED,
    CancelReason.OPERATOR: CANCELLED_BY_OPERATOR,
}


@slotted
class Cancellation:
    """Why a request was cancelled, and the text that the canceller gave, if any."""

    reason: CancelReason
    detail: str | None = None


NUMBERS: Final = (int, float)  # no bool, and no number of another library


@slotted
class Reports:
    """What one request has reported of its progress."""

    last: float = -math.inf  # the last value
    count: int = 0  # how many reports waited for room
    head: bytes | None = None  # a report's text up to its first number, the same for all; None before the first
    # `total`, `tail`: the total of the last report, and the text that follows the first number
    total: float | None = None
    tail: bytes = b"}}"
    latest_queued: bool = False  # whether one of which only the latest counts may wait in the sink
    # Total and message of the last report that was no plain numbers, or was sent to nobody
    told: tuple[float | None, str | None] = (None, None)

    def drop(self, progress: float) -> None:
        """Say that a report is not sent because its value did not increase (basic/utilities/progress)."""
        log.debug("progress %r after %r is not sent: it must increase", progress, self.last)

    @property
    def kept(self) -> float | None:
        """The last value, for the next run of the handler; None if there is none that JSON has."""
        last = self.last
        return last if type(last) in NUMBERS and -math.inf < last < math.inf and abs(last) < 2**63 else None

    def text(self, progress: float, total: float | None) -> bytes | None:
        """Return a report of which only the numbers are new; None if JSON cannot carry one of them."""
        assert self.head is not None
        try:
            if total is not self.total:
                self.tail = b"}}" if total is None else b',"total":%b}}' % orjson.dumps(total)
                self.total = total
            data = b"".join((self.head, orjson.dumps(progress), self.tail))
        except TypeError:  # an integer beyond 64 bits
            return None
        return data if data.find(b":null") < 0 else None  # of NaN and Infinity


def session_key(session: object) -> str:
    """Return what names a session while it lives."""
    return f"{id(session):x}"


class Endpoint(Protocol[SessionT_contra]):
    """What a session serves: a server's registries, or a client's handlers."""

    async def handle(self, session: SessionT_contra, job: Job, /) -> Any:
        """Process one request and return its result payload; cancelled when the request is."""

    async def failure(self, session: SessionT_contra, job: Job, error: BaseException, /) -> Any:
        """Return a result payload that reports what a handler raised, or None to answer with an error."""

    def source_location(self, job: Job) -> str | None:
        """Return the source location of the function that handles a request, for the log, or None if there is none."""

    def notified(self, session: SessionT_contra, event: Notified, /) -> None:
        """Process a notification. Synchronous and quick: the reader calls it."""

    def closed(self, session: SessionT_contra, /) -> None:
        """Forget the session: it has ended."""


class _Tasks(Protocol):
    """The part of `jobs.HandlerTasks` that one job needs."""

    results: TurnBound


class _Slots(Protocol):
    """The part of `jobs.Jobs` that one job needs."""

    by_id: dict[RequestId, Job]
    running: int
    bytes_running: int
    bytes_unread: int
    refused: int

    @property
    def tasks(self) -> _Tasks | None: ...
    def too_much_unread(self, amount: MemoryCharge) -> bool: ...
    async def until_read(self, job: Job) -> None: ...
    async def until_turn(self, job: Job, result: object) -> bool: ...
    async def wait_for_reader(self, job: Job) -> None: ...


class Owner(Protocol):
    """What a job needs of its session."""

    engine: Connection
    limits: Limits
    memory: SessionMemory
    transport: TransportFacts
    sink: Sink
    counts: LaneCounts
    handler_errors: str
    lost: ConnectionLost | None
    on_finished: Sequence[Finished]

    @property
    def endpoint(self) -> Endpoint[Any]: ...
    @property
    def jobs(self) -> _Slots: ...

    def weigh(self) -> None: ...
    def next_jobs(self) -> None: ...
    def job_ended(self, job: Job) -> None: ...
    def tell_dropped_logs(self, job: Job) -> None: ...


class Asked(Protocol):
    """What a handler asked when re-running, as far as its job needs it; see `asking.Questions`."""

    asked: dict[str, Any]
    unwound: bool

    async def resolve(self, job: Job) -> bytes | None:
        """Return the reply of a request whose handler unwound to ask, or None if it is to run again."""


@slotted
class Extras:
    """What few requests have: a time limit, tasks beside their handler, questions, a wait for their turn, a crash."""

    clock: WorkClock | None = None  # the time limit of its handler; it pauses while the peer is asked
    work: Work | None = None  # the tasks started for it with `ctx.request.start_soon`
    questions: Asked | None = None  # what it asked when re-running
    parked: int = 0  # questions whose answers it waits for
    waited: float = 0.0  # seconds for which its handler waited for its turn under a quota
    crash: BaseException | None = None  # what its handler raised, if that ends the session
    failed: bool = False  # whether its result has `isError`; computed only if `Session.on_finished` has one to tell


@slotted
class Job:
    """One request of the peer in progress.

    It has more than 300 lines because running, failing, cancelling and answering decide about the same reply.
    """

    session: Owner
    request: RequestReceived  # the engine's record of it
    sink: Sink  # the destination of its answer and of everything that belongs to it
    size: int = 0  # approximate memory in bytes
    origin: Origin | None = None  # where it was received
    headers: Mapping[str, str] | None = None  # of the transport
    scope: trio.CancelScope | None = attrs.field(init=False, default=None)  # stops the handler; None without one
    task: trio.lowlevel.Task | None = attrs.field(init=False, default=None)  # that runs it
    reply: bytes | None = attrs.field(init=False, default=None)  # its answer, once there is one
    error: ErrorAnswer | None = attrs.field(init=False, default=None)  # the error that answers it
    cancelled: Cancellation | None = attrs.field(init=False, default=None)
    queued: float | None = attrs.field(init=False, default=None)  # when it began to wait for a slot, on Trio's clock
    started: bool = attrs.field(init=False, default=False)  # whether its handler has begun,
    since: float = attrs.field(init=False, default=math.inf)  # and when, on Trio's clock
    over: bool = attrs.field(init=False, default=False)  # whether its answer is queued
    # What its handler or one of its tasks raised, until it is answered
    failure: BaseException | None = attrs.field(init=False, default=None)
    deadline: float = attrs.field(init=False, default=math.inf)  # the caller's, on Trio's clock
    reports: Reports | None = attrs.field(init=False, default=None)  # of its progress
    extras: Extras | None = attrs.field(init=False, default=None)

    def with_extras(self) -> Extras:
        """Return its extras, made when the first of them is needed."""
        if self.extras is None:
            self.extras = Extras()
        return self.extras

    @property
    def arrived(self) -> float:
        """When it was received, on Trio's clock; infinite if it was refused at once."""
        return self.since if self.queued is None else self.queued

    @property
    def target(self) -> str | None:
        """The name of the tool or prompt, or the URI of the resource, that it is for, as received."""
        params = self.request.params
        about = getattr(params, "ref", params)  # `ref` is a completion's
        name = getattr(about, "name", None) or getattr(about, "uri", None)
        return name if isinstance(name, str) else None

    def log_ids(self) -> dict[str, str]:
        """Return what names it in a log: attributes of the records about it."""
        from trimcp.support.cleaning import one_line

        ids = {"mcp_session": session_key(self.session), "mcp_request": f"{self.request.method.name} {self.request.id}"}
        sent = (self.request.admission.meta or {}).get("traceparent")
        if isinstance(sent, str) and (trace := _TRACE.match(sent)):
            ids["trace_id"] = trace[1]
        return {name: one_line(text, _LONGEST_ID) for name, text in ids.items()}

    @property
    def client(self) -> str | None:
        """What its origin says of the client, such as its address; None if nothing."""
        return None if self.origin is None else self.origin.client

    @property
    def questions(self) -> Asked | None:
        """What it asked when re-running, if anything."""
        return None if self.extras is None else self.extras.questions

    # Cancelling

    @property
    def reason(self) -> CancelReason | None:
        """Why it was cancelled, or None."""
        return None if self.cancelled is None else self.cancelled.reason

    def cancel(self, reason: CancelReason, detail: str | None = None) -> None:
        """Stop the handler. The first reason given is kept for the handler and the log."""
        if self.cancelled is None:
            self.note_cancelled(reason, detail)
        if self.scope is not None:
            self.scope.cancel(reason=reason.value if detail is None else f"{reason.value}: {detail}")

    def note_cancelled(self, reason: CancelReason, detail: str | None) -> None:
        """Store and log why the handler is cancelled."""
        self.cancelled = Cancellation(reason, detail)
        said = "" if detail is None else f" ({detail!r})"  # the peer's text: escaped
        log.debug("%s %r is cancelled: %s%s", self.request.method.name, self.request.id, reason.value, said)

    def cancelled_reply(self) -> bytes | None:
        """Return the answer to a request whose handler was cancelled here, or None if none is due."""
        # Without a reason, a scope around the whole session was cancelled.
        reason = self.reason or CancelReason.DRAIN
        code = _CANCELLED_CODES.get(reason)
        if code is None:
            return None
        why = reason.value
        if reason is CancelReason.OPERATOR and self.cancelled is not None and self.cancelled.detail is not None:
            why = f"{why}: {self.cancelled.detail}"  # an operator means it for the caller, too
        return self._own_error(code, f"stopped: {why}" if self.started else f"{why}; not started")

    # Running

    async def attempt(self, task: trio.lowlevel.Task, around: object) -> bool:
        """Run the handler once, which sets the job's reply or its `failure`. The tasks that it started have ended, too.

        Returns whether the handler has left a scope open: then the job has failed, and closing its scope raises an
        error. `around` is the task's innermost scope, which is the job's. When that is cancelled, a reply or a failure
        may still be set.
        """
        session = self.session
        left: RuntimeError | None = None
        try:
            if session.jobs.bytes_unread and session.jobs.too_much_unread(session.memory):
                await session.jobs.until_read(self)
            result = await session.endpoint.handle(session, self)
            if self.extras is not None and self.extras.work is not None:
                await self.extras.work.join()
            tasks = session.jobs.tasks
            assert tasks is not None
            if tasks.results.left > 0 or await session.jobs.until_turn(self, result):
                self._take_result(result)
            del result  # so that it is not kept while its reply waits
            if self.sink.full:
                await session.jobs.wait_for_reader(self)
        except BaseException as error:
            left = abandon_left_open(task, around)
            crash, cancelled = split_own_failures(error, around)
            try:
                self.failure = crash
                if left is None and cancelled is not None:
                    # The plain exception is raised as received; otherwise its frames and the exception raised from it
                    # would keep each other alive.
                    if cancelled is error:
                        raise
                    raise cancelled from None
            finally:
                del crash, cancelled
        else:
            if has_left_open(task, around):
                left = abandon_left_open(task, around)
        finally:
            if self.extras is not None and self.extras.work is not None:
                await self._end_work(self.extras.work)
        if left is None:
            return False
        if left.__cause__ is None:
            left.__cause__ = self.failure
        self.failure, left = left, None
        return True

    async def _end_work(self, work: Work) -> None:
        await work.end()
        if self.failure is None:
            self.failure = work.failure
        elif work.failure is not None:
            both = [self.failure, work.failure]
            self.failure = BaseExceptionGroup("the handler and what it started for its request both failed", both)

    async def unwind(self, task: trio.lowlevel.Task) -> bool:
        """End a job that has failed or whose scope was cancelled. One that unwound to ask may run again first.

        Returns whether a handler has left a scope open.
        """
        left_open = False
        try:
            while (
                self.reply is None
                and self.failure is None
                and self.cancelled is None
                and (questions := self.questions) is not None
                and questions.asked
            ):
                self.scope, self.with_extras().work = trio.CancelScope(), None
                with self.scope:
                    try:
                        self.reply = await questions.resolve(self)
                    except Exception as error:  # treated like the handler's, which has unwound and cannot answer
                        self.failure = error
                    if self.reply is not None and self.sink.full:
                        await self.session.jobs.wait_for_reader(self)
                if self.reply is None and self.failure is None and self.cancelled is None:
                    self.scope = trio.CancelScope()
                    try:
                        with self.scope:
                            left_open = await self.attempt(task, innermost_scope(task))
                    except RuntimeError:
                        if not left_open:  # Trio has noticed it, too
                            raise
            if self.failure is not None:
                await self._explain()
        finally:
            self.end()
        if self.extras is not None and self.extras.crash is not None:
            raise self.extras.crash
        return left_open

    async def _explain(self) -> None:
        """Set a failed job's reply: a result that reports the failure, or an error."""
        if self.cancelled is not None:
            return  # it was cancelled, so no answer reports its failure; `end` logs it
        self.scope = trio.CancelScope()
        with self.scope:
            try:
                result = await contained(self.session.endpoint.failure, self.session, self, self.failure)
                if result is not None:
                    self._take_result(result)
                    self.failure = None
            except Exception as worse:  # raised by a filter of the result, or the payload cannot be encoded
                self.failure = worse
            self._take_failure()
            if self.sink.full:
                await self.session.jobs.wait_for_reader(self)

    # Answering

    def _take_result(self, result: Any) -> None:
        """Make a result the reply."""
        session = self.session
        try:
            reply = session.engine.encode_result(self.request, result)
        except NotInRevision as error:
            log.warning("the result of %s cannot be sent: %s", self.request.method.name, error)
            result = session.engine.refusal(self.request, error)
            reply = session.engine.encode_result(self.request, result)
        size, most = len(reply), session.limits.max_result
        if size > most:
            log.error("the result of %s has %d bytes; at most %d are sent", self.request.method.name, size, most)
            text = f"the result is larger than {most} bytes"
            reply = self._error(ErrorReply(INTERNAL_ERROR, text, {"reason": "result_size"}))
        elif session.on_finished and getattr(result, "is_error", False) is True:
            self.with_extras().failed = True
        self.reply = reply
        if size >= LARGE and session.jobs.tasks is not None:
            session.jobs.tasks.results.left -= size

    def drop_result(self) -> bytes:
        """Replace a result by an error, because too many results before it are still unread.

        The error is not `OVERLOADED`, which would mean that nothing was done.
        """
        from trimcp.security import security_event

        principal = self.request.admission.principal
        security_event("flood_refused", what="results", method=self.request.method.name, principal=principal)
        text = "the call was carried out, but its result was dropped: those that wait to be read are too large together"
        reply = self.reply = self._error(ErrorReply(INTERNAL_ERROR, text, {"reason": "results_unread"}))
        return reply

    def _take_failure(self) -> None:
        """Make an error the reply of a failed job that has no other reply."""
        error, self.failure = self.failure, None
        if error is not None:
            self.reply = self._failed(error)
            error = None  # a frame and the exception raised through it would keep each other alive

    def _failed(self, error: BaseException) -> bytes:
        """Return the reply for a handler's exception: the error that it raised, or one without details of a crash."""
        session = self.session
        answer = error_for(error, self.request.method.name, peer_lost=session.lost is not None)
        if answer is None:
            if session.handler_errors == "raise":
                self.with_extras().crash = error
            answer = self.log_crash(error)
        return self._error(answer)

    def _error(self, answer: ErrorReply) -> bytes:
        self.error = ErrorAnswer.of(answer)
        return self.session.engine.encode_error(self.request.id, answer)

    def _own_error(self, code: int, message: str) -> bytes:
        """Return an error that the session answers with by itself."""
        self.error = ErrorAnswer(code, message)
        return encode_error(self.request.id, code, message, own_error_data(code, started=self.started))

    def log_crash(self, error: BaseException) -> ErrorReply:
        """Log a handler's crash with its traceback, and return an error without details."""
        from trimcp.support.cleaning import in_quotes, log_crash

        where = self.session.endpoint.source_location(self)
        about = "" if self.target is None else f": {in_quotes(self.target)}"
        about += "" if where is None else f" ({where})"
        data = None
        if getattr(self.origin, "explicit_errors", False):
            import secrets

            data = {"incident": secrets.token_hex(6)}
            about += f"; incident {data['incident']}"
        log_crash(log, error, "the handler of %s crashed%s", self.request.method.name, about, extra=self.log_ids())
        return ErrorReply(INTERNAL_ERROR, "internal error", data)

    # Ending

    def refuse(self, code: int, message: str) -> None:
        """Answer a request that was not started with an error."""
        if code == OVERLOADED:
            from trimcp.security import security_event

            security_event("flood_refused", what=self.request.method.name, principal=self.request.admission.principal)
        self.session.jobs.refused += 1
        self.finish(self._own_error(code, message))

    def end(self) -> None:
        """End a job that has a slot: with its reply, its failure, or the answer due after a cancellation."""
        self.scope = self.task = None
        if self.failure is not None:
            self._take_failure()
        jobs = self.session.jobs
        if self.extras is None or not self.extras.parked:
            jobs.running -= 1
        jobs.bytes_running -= self.size
        self.finish(self.cancelled_reply() if self.reply is None else self.reply)

    def finish(self, reply: bytes | None) -> None:
        """Queue the reply, unless the peer cancelled the request, and let the next request begin."""
        session, sink, id = self.session, self.sink, self.request.id
        self.over = True
        admitted = session.jobs.by_id.pop(id, None) is not None  # else it was refused
        wanted = session.engine.answered(id)
        if self.reports is not None and self.reports.latest_queued:
            sink.finish_latest(("progress", id), keep=wanted)
        for tell in tuple(session.on_finished):  # one may leave as it is told
            try:
                tell(self, reply if wanted else None)
            except KeyboardInterrupt:
                raise
            except BaseException as crash:  # the reply is sent anyway
                from trimcp.support.cleaning import log_crash

                log_crash(log, crash, "what is told of every request that ends crashed")
        if session.counts.untold and wanted and admitted:
            session.tell_dropped_logs(self)
        if wanted and reply is not None:
            post = sink.post_alone if session.transport.alone and not session.jobs.by_id else sink.post
            error = self.error
            if error is None:
                post(Outgoing(reply, Kind.REPLY, id, self.origin))
            else:
                post(Outgoing(reply, Kind.REPLY, id, self.origin, error.headers, error.code))
        else:
            sink.unanswered(id)
        if admitted:
            session.job_ended(self)
