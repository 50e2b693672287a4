"""One request of the peer, from its admission until its reply is queued.

A worker task of the crew calls `Job.attempt`, which runs the handler once. What has failed, was cancelled or unwound to
ask goes on to `settle`. Both end in `finish`, which queues the reply. What a job needs of its session is its `Owner`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Protocol, TypeVar

import attrs
import trio

from trimcp.budget import Amount
from trimcp.channel import Kind, LaneCounts, Origin, Outgoing, Sink
from trimcp.errors import CannotAsk, ConnectionLost, ErrorReply, RemoteError
from trimcp.nurseries import sole
from trimcp.protocol.connection import Connection, InboundRequest
from trimcp.protocol.events import Notified
from trimcp.session.clock import WorkClock
from trimcp.session.limits import Limits
from trimcp.session.scopes import Work, abandon_left_open, blamed, contained, has_left_open, innermost_scope, log_crash
from trimcp.wire.codes import (
    CANCELLED_BY_DRAIN,
    FORBIDDEN,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    MISSING_CAPABILITY,
    OVERLOADED,
    TIMED_OUT,
)
from trimcp.wire.converter import NotInRevision
from trimcp.wire.fields import ABSENT
from trimcp.wire.jsonrpc import RequestId, encode_error

SessionT_contra = TypeVar("SessionT_contra", contravariant=True)

log: logging.Logger = logging.getLogger("trimcp.session")


class CancelReason(Enum):
    """Why a handler is being stopped; its value is the text of `trio.CancelScope.cancel(reason=)`.

    Attributes:
        PEER: whoever asked cancelled the request, or gave it up at its own deadline.
        DISCONNECTED: whoever asked is gone.
        DEADLINE: the caller's time was over and no cancellation came, or the tool's own time was.
        DRAIN: the server or the session ends.
        LIMIT: the peer took nothing for too long and was dropped (`Limits.stall_timeout`).

    Idleness is none: a session in which anything is at work is not idle.
    """

    PEER = "cancelled by peer"
    DISCONNECTED = "disconnected"
    DEADLINE = "deadline"
    DRAIN = "drain"
    LIMIT = "limit"


# Who is told that it was cancelled, and with which code; the others have left or know.
_CANCELLED_CODES = {
    CancelReason.DEADLINE: TIMED_OUT,
    CancelReason.DRAIN: CANCELLED_BY_DRAIN,
    CancelReason.LIMIT: OVERLOADED,
}


class Endpoint(Protocol[SessionT_contra]):
    """What a session serves: a server's registries, or a client's handlers."""

    async def handle(self, session: SessionT_contra, job: Job, /) -> Any:
        """Work on one request and return its result payload; cancelled when the request is."""

    async def failure(self, session: SessionT_contra, job: Job, error: BaseException, /) -> Any:
        """Return the result payload that tells the peer of what a handler raised, or None where an error answers."""

    def whereabouts(self, job: Job) -> str | None:
        """Return where the function that handles a request was written, for the log, or None where there is none."""

    def notified(self, session: SessionT_contra, event: Notified, /) -> None:
        """Take note of a notification. Synchronous and quick: the reader calls it."""

    def closed(self, session: SessionT_contra, /) -> None:
        """Forget the session: it has ended."""


class _Slots(Protocol):
    """The part of `jobs.Jobs` that one job asks for."""

    by_id: dict[RequestId, Job]
    running: int
    bytes_running: int
    bytes_unread: int

    def too_much_unread(self, amount: Amount) -> bool: ...
    async def until_read(self, job: Job) -> None: ...
    async def wait_for_reader(self, job: Job) -> None: ...


class Owner(Protocol):
    """What a job needs of the session it belongs to."""

    engine: Connection
    limits: Limits
    amount: Amount
    sink: Sink
    counts: LaneCounts
    handler_errors: str
    lost: ConnectionLost | None
    refused: int
    on_finished: Callable[[Job, bytes | None], object] | None

    @property
    def endpoint(self) -> Endpoint[Any]: ...
    @property
    def jobs(self) -> _Slots: ...

    def weigh(self) -> None: ...
    def next_jobs(self) -> None: ...
    def job_ended(self, job: Job) -> None: ...
    def tell_dropped_logs(self, job: Job) -> None: ...


class Asked(Protocol):
    """What a handler asked in the re-run style, as far as its job has to know; see `asking.Questions`."""

    asked: dict[str, Any]
    unwound: bool

    async def settle(self, job: Job) -> bytes | None:
        """Return the reply of a request whose handler unwound to ask, or None if it is to run again."""


@attrs.define(eq=False, repr=False)
class Job:
    """One request of the peer being worked on.

    Attributes:
        request: the engine's record of it.
        params: its payload, as its revision has it; `raw` is that as it came.
        sink: where its answer goes, and whatever belongs to it.
        size: roughly the bytes it occupies.
        origin, headers: where it came in and with which transport headers; both may be None.
        scope: cancelling it stops the handler; None while there is none to stop.
        task: what runs it, or None.
        reply: its answer, once there is one.
        error: the code of the error that answers it, or None.
        required: scopes that a token needs for it, if that is what the error says.
        retry_after: seconds after which it makes sense to try again, if that is what the error says.
        failed: whether its result says `isError`; looked at only where `Session.on_finished` is told.
        reason: why it was cancelled, or None; `detail` is the text that the canceller gave.
        queued: when it began to wait for a slot, on Trio's clock; None if it never did.
        started, since: whether its handler has begun, and when, on Trio's clock.
        over: whether its answer is queued.
        waited: seconds its handler waited for its turn, where a quota made it.
        failure: what its handler or its work raised, until it is answered.
        crash: the same, where its crash is to end the session.
        parked: how many questions it waits for in place.
        deadline: when its caller's time is over, on Trio's clock.
        clock: the time its handler has for its work, if that is limited; it stands still while the peer is asked.
        work: the tasks started for it with `ctx.request.start_soon`, if any.
        questions: what it asked in the re-run style, if anything.
    """

    session: Owner
    request: InboundRequest
    params: Any
    raw: Mapping[str, Any]
    sink: Sink
    size: int = 0
    origin: Origin | None = None
    headers: Mapping[str, str] | None = None
    scope: trio.CancelScope | None = attrs.field(init=False, default=None)
    task: trio.lowlevel.Task | None = attrs.field(init=False, default=None)
    reply: bytes | None = attrs.field(init=False, default=None)
    error: int | None = attrs.field(init=False, default=None)
    retry_after: float | None = attrs.field(init=False, default=None)
    required: tuple[str, ...] = attrs.field(init=False, default=())
    failed: bool = attrs.field(init=False, default=False)
    reason: CancelReason | None = attrs.field(init=False, default=None)
    detail: str | None = attrs.field(init=False, default=None)
    queued: float | None = attrs.field(init=False, default=None)
    waited: float = attrs.field(init=False, default=0.0)
    started: bool = attrs.field(init=False, default=False)
    since: float = attrs.field(init=False, default=0.0)
    over: bool = attrs.field(init=False, default=False)
    failure: BaseException | None = attrs.field(init=False, default=None)
    crash: BaseException | None = attrs.field(init=False, default=None)
    parked: int = attrs.field(init=False, default=0)
    deadline: float = attrs.field(init=False, default=math.inf)
    clock: WorkClock | None = attrs.field(init=False, default=None)
    work: Work | None = attrs.field(init=False, default=None)
    questions: Asked | None = attrs.field(init=False, default=None)

    @property
    def arrived(self) -> float:
        """When it came in, on Trio's clock; 0 if it was refused before anything was noted."""
        return self.since if self.queued is None else self.queued

    @property
    def target(self) -> str | None:
        """The name of the tool or prompt or the address of the resource that it is for, as the peer wrote it."""
        about = getattr(self.params, "ref", self.params)  # of a completion
        name = getattr(about, "name", ABSENT) or getattr(about, "uri", ABSENT)
        return name if isinstance(name, str) else None

    # Cancelled

    def cancel(self, reason: CancelReason, detail: str | None = None) -> None:
        """Stop the handler; the first reason given is the one it can read, and what the log says."""
        if self.reason is None:
            self.note_cancelled(reason, detail)
        if self.scope is not None:
            self.scope.cancel(reason=reason.value if detail is None else f"{reason.value}: {detail}")

    def note_cancelled(self, reason: CancelReason, detail: str | None) -> None:
        """Keep and log why the handler is cancelled."""
        self.reason, self.detail = reason, detail
        said = "" if detail is None else f" ({detail!r})"  # the peer's text: escaped
        log.debug("%s %r is cancelled: %s%s", self.request.verb.name, self.request.id, reason.value, said)

    def cancelled_reply(self) -> bytes | None:
        """Return the answer to a request whose handler was cancelled here, or None if none is owed."""
        # Without a reason it is a scope around the whole session that was cancelled.
        reason = self.reason or CancelReason.DRAIN
        self.error = _CANCELLED_CODES.get(reason)
        return None if self.error is None else encode_error(self.request.id, self.error, f"stopped: {reason.value}")

    # Run

    async def attempt(self, task: trio.lowlevel.Task, around: object) -> bool:
        """Run the handler once: to the job's reply, or to its `failure`. Its work has ended, too.

        Args:
            task: the current one.
            around: its innermost scope, which is the job's.

        Returns:
            Whether the handler has left a scope open. Then the job has failed, and leaving its scope is an error.

        Raises:
            trio.Cancelled: its scope was cancelled; there may be a reply or a failure all the same.
            KeyboardInterrupt: as it came.
        """
        session = self.session
        left: RuntimeError | None = None
        try:
            if session.jobs.bytes_unread and session.jobs.too_much_unread(session.amount):
                await session.jobs.until_read(self)
            result = await session.endpoint.handle(session, self)
            if self.work is not None:
                await self.work.join()
            self._take_result(result)
            del result  # it is not kept while its reply waits
            if self.sink.full:
                await session.jobs.wait_for_reader(self)
        except BaseException as error:
            left = abandon_left_open(task, around)
            crash, cancelled = blamed(error, around)
            try:
                self.failure = crash
                if left is None and cancelled is not None:
                    # The plain one is raised as it came, else its frames and what is raised from it would keep each
                    # other alive.
                    if cancelled is error:
                        raise
                    raise cancelled from None
            finally:
                del crash, cancelled
        else:
            if has_left_open(task, around):
                left = abandon_left_open(task, around)
        finally:
            work = self.work
            if work is not None:
                await work.end()
                if self.failure is None:
                    self.failure = work.failure
                elif work.failure is not None:
                    self.failure = BaseExceptionGroup(
                        "the handler and what it started for its request both failed", [self.failure, work.failure]
                    )
        if left is None:
            return False
        if left.__cause__ is None:
            left.__cause__ = self.failure
        self.failure, left = left, None
        return True

    async def settle(self, task: trio.lowlevel.Task) -> bool:
        """End a job that has failed, or whose scope was cancelled; one that unwound to ask may run again before.

        Returns:
            Whether a handler has left a scope open.
        """
        left_open = False
        try:
            while (
                self.reply is None
                and self.failure is None
                and self.reason is None
                and self.questions is not None
                and self.questions.asked
            ):
                self.scope, self.work = trio.CancelScope(), None
                with self.scope:
                    try:
                        self.reply = await self.questions.settle(self)
                    except Exception as error:  # as a handler's; it has unwound and cannot answer
                        self.failure = error
                    if self.reply is not None and self.sink.full:
                        await self.session.jobs.wait_for_reader(self)
                if self.reply is None and self.failure is None and self.reason is None:
                    self.scope = trio.CancelScope()
                    try:
                        with self.scope:
                            left_open = await self.attempt(task, innermost_scope(task))
                    except RuntimeError:
                        if not left_open:  # which Trio has noticed, too
                            raise
            if self.failure is not None:
                await self._explain()
        finally:
            self.end()
        if self.crash is not None:
            raise self.crash
        return left_open

    async def _explain(self) -> None:
        """Take for a failed job's reply what says that it failed: a result that tells why, or an error."""
        if self.reason is not None:
            return  # it was told to stop, and nobody reads why it failed; `end` logs it
        self.scope = trio.CancelScope()
        with self.scope:
            try:
                result = await contained(self.session.endpoint.failure, self.session, self, self.failure)
                if result is not None:
                    self._take_result(result)
                    self.failure = None
            except Exception as worse:  # a filter of the result's, or what cannot be encoded
                self.failure = worse
            self._take_failure()
            if self.sink.full:
                await self.session.jobs.wait_for_reader(self)

    # Answer

    def _take_result(self, result: Any) -> None:
        """Take a result for the reply."""
        session = self.session
        try:
            reply = session.engine.encode_result(self.request, result)
        except NotInRevision as error:
            log.warning("the result of %s cannot be sent: %s", self.request.verb.name, error)
            result = session.engine.refusal(self.request, error)
            reply = session.engine.encode_result(self.request, result)
        size, most = len(reply), session.limits.max_result
        if size > most:
            log.error("the result of %s has %d bytes; at most %d are sent", self.request.verb.name, size, most)
            text = f"the result is larger than {most} bytes"
            reply = self._error(ErrorReply(INTERNAL_ERROR, text, {"reason": "result_size"}))
        elif session.on_finished is not None:
            self.failed = getattr(result, "is_error", False) is True
        self.reply = reply

    def drop_result(self) -> bytes:
        """Put an error in place of a result for which there is no room behind those that the peer has not read.

        It is not `OVERLOADED`, which says that nothing was done.
        """
        from trimcp.security import security_event

        principal = self.request.admission.principal
        security_event("flood_refused", what="results", verb=self.request.verb.name, principal=principal)
        text = "the call was carried out, but its result was dropped: those that wait to be read are too large together"
        reply = self.reply = self._error(ErrorReply(INTERNAL_ERROR, text, {"reason": "results_unread"}))
        return reply

    def _take_failure(self) -> None:
        """Take for the reply of a job that has failed, and still has no other, the error that says so."""
        error, self.failure = self.failure, None
        if error is not None:
            self.reply = self._failed(error)
            error = None  # a frame and what was raised through it would keep each other alive

    def _failed(self, error: BaseException) -> bytes:
        """Return the reply for what a handler raised: the error it asked for, or one that says nothing of its crash."""
        cause = sole(error)
        if isinstance(cause, CannotAsk) and cause.required is not None:
            answer = ErrorReply(MISSING_CAPABILITY, str(cause), {"requiredCapabilities": cause.required})
        elif isinstance(cause, CannotAsk):
            answer = ErrorReply(INVALID_REQUEST, str(cause))
        elif isinstance(cause, ErrorReply):
            answer = cause
        elif self._peer_left(cause):
            log.debug("the handler of %s lost its peer", self.request.verb.name)
            answer = ErrorReply(INTERNAL_ERROR, "the connection was lost")
        else:
            if self.session.handler_errors == "raise":
                self.crash = error
            answer = self.log_crash(error)
        if answer.code == OVERLOADED and isinstance(answer.data, dict):
            seconds: Any = answer.data.get("retryAfter")
            if type(seconds) in (int, float) and 0 <= seconds < math.inf:
                self.retry_after = seconds
        elif answer.code == FORBIDDEN and isinstance(answer.data, dict):
            self.required = tuple(answer.data.get("requiredScopes", ()))
        return self._error(answer)

    def _error(self, answer: ErrorReply) -> bytes:
        self.error = answer.code
        return self.session.engine.encode_error(self.request.id, answer)

    def _peer_left(self, cause: BaseException) -> bool:
        """Return whether the handler was talking to a peer that left: an ordinary disconnect, no crash."""
        if isinstance(cause, RemoteError):
            return cause.code == CANCELLED_BY_DRAIN
        return isinstance(cause, ConnectionLost) and self.session.lost is not None

    def log_crash(self, error: BaseException) -> ErrorReply:
        """Log a handler's crash whole and return an answer that says nothing of it."""
        from trimcp.cleaning import in_quotes

        where = self.session.endpoint.whereabouts(self)
        about = "" if self.target is None else f": {in_quotes(self.target)}"
        about += "" if where is None else f" ({where})"
        log_crash(log, error, "the handler of %s crashed%s", self.request.verb.name, about)
        return ErrorReply(INTERNAL_ERROR, "internal error")

    # End

    def refuse(self, code: int, message: str) -> None:
        """Answer a request that was not begun with an error."""
        if code == OVERLOADED:
            from trimcp.security import security_event

            security_event("flood_refused", what=self.request.verb.name, principal=self.request.admission.principal)
        self.session.refused += 1
        self.error = code
        self.finish(encode_error(self.request.id, code, message))

    def end(self) -> None:
        """End a job that has a slot: with its reply, its failure, or what is owed to who was cancelled."""
        self.scope = self.task = None
        if self.failure is not None:
            self._take_failure()
        jobs = self.session.jobs
        if not self.parked:
            jobs.running -= 1
        jobs.bytes_running -= self.size
        self.finish(self.cancelled_reply() if self.reply is None else self.reply)

    def finish(self, reply: bytes | None) -> None:
        """Queue the reply, unless the peer gave the request up, and let the next request begin."""
        session, sink, id = self.session, self.sink, self.request.id
        self.over = True
        admitted = session.jobs.by_id.pop(id, None) is not None  # else it was refused
        wanted = session.engine.answered(id)
        if self.request.admission.progress_token is not None:
            sink.settle_latest(("progress", id), keep=wanted)
        if session.on_finished is not None:
            self._report(reply if wanted else None)
        if session.counts.untold and wanted and admitted:
            session.tell_dropped_logs(self)
        if wanted and reply is not None:
            headers = None
            if self.retry_after is not None:
                headers = {"retry-after": str(math.ceil(self.retry_after))}
            elif self.required:
                headers = {"scope": " ".join(self.required)}
            sink.post(Outgoing(reply, Kind.REPLY, id, self.origin, headers, self.error))
        else:
            sink.unanswered(id)
        if admitted:
            session.job_ended(self)

    def _report(self, reply: bytes | None) -> None:
        assert self.session.on_finished is not None
        try:
            self.session.on_finished(self, reply)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the reply leaves all the same
            log_crash(log, error, "what is told of every request that ends crashed")
