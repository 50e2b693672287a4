"""Runs the jobs of one session, within its running slots, as tasks of a crew.

Whoever delivered a request starts its job at once while a slot is free; only beyond the slots does it wait in the
mailbox, and the job that ends starts the next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimcp.errors import CannotAsk, ConnectionLost, ErrorReply, RemoteError
from trimcp.session.asking import after_unwinding
from trimcp.session.crew import Crew
from trimcp.session.job import Job
from trimcp.session.scopes import parted, sole
from trimcp.wire.codes import (
    CANCELLED_BY_DRAIN,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    MISSING_CAPABILITY,
    OVERLOADED,
)

if TYPE_CHECKING:
    from trimcp.session.session import Session

__all__ = ["Runner"]

log: logging.Logger = logging.getLogger("trimcp.session")


@attrs.define(eq=False, repr=False)
class Runner:
    """Runs the jobs of one session.

    Args:
        crew: who runs them; it may work for other sessions as well.
        slots: how many may run at once, those that wait for the peer not counted.
        max_bytes: what those under way may weigh, all counted. One job alone may exceed it.
    """

    crew: Crew
    slots: int
    max_bytes: int = 32 * 1024 * 1024
    running: int = attrs.field(init=False, default=0)
    bytes_running: int = attrs.field(init=False, default=0)

    @property
    def nursery(self) -> trio.Nursery:
        """Where the jobs live."""
        return self.crew.nursery

    def has_room(self, job: Job) -> bool:
        """Return whether this job may start now."""
        held = self.bytes_running
        return self.running < self.slots and (not held or held + job.size <= self.max_bytes)

    def start(self, session: Session, job: Job) -> None:
        """Start a job."""
        self.running += 1
        self.bytes_running += job.size
        job.started = True
        job.since = trio.current_time()
        self.crew.take(self, session, job)

    # For the crew

    async def attempt(self, session: Session, job: Job) -> None:
        """Run the handler once, to the job's reply. Its work has ended, too.

        Raises:
            trio.Cancelled: its scope was cancelled; there may be a reply all the same.
        """
        try:
            await _perform(session, job)
            if job.sink.full:
                await job.sink.room()
        except trio.Cancelled:
            raise
        except BaseException as error:
            # What a cancelled handler's nursery held besides the cancellation.
            crash, cancelled = parted(error)
            try:
                if crash is not None and not isinstance(crash, Exception):
                    raise
                if crash is not None:
                    self.blame(session, job, crash)
                if cancelled is not None:
                    raise cancelled from None
            finally:
                del crash, cancelled  # a frame and what was raised from it would keep each other alive
        finally:
            work = job.work
            if work is not None:
                await work.end()
                if work.failure is not None:
                    self.blame(session, job, work.failure)

    async def settle(self, session: Session, job: Job) -> None:
        """End a job whose scope was cancelled; one that unwound to ask a question may run again before."""
        try:
            while job.reply is None and job.reason is None and job.questions is not None and job.questions.asked:
                job.scope, job.work = trio.CancelScope(), None
                with job.scope:
                    try:
                        job.reply = await after_unwinding(session, job)
                    except Exception as error:  # the handler's, as in `_perform`; it has unwound and cannot answer
                        self.blame(session, job, error)
                    if job.reply is not None and job.sink.full:
                        await job.sink.room()
                if job.reply is None and job.reason is None:
                    job.scope = trio.CancelScope()
                    with job.scope:
                        await self.attempt(session, job)
        finally:
            self.end(session, job)
        self.check(job)

    def blame(self, session: Session, job: Job, error: Exception) -> None:
        """Take for the job's reply what says that it failed."""
        job.reply = _failed(session, job, error)

    def end(self, session: Session, job: Job) -> None:
        """End a job: with its reply, or with the one that is owed to who was cancelled."""
        job.scope = job.task = None
        if not job.parked:
            self.running -= 1
        self.bytes_running -= job.size
        session.finish(job, job.farewell() if job.reply is None else job.reply)

    @staticmethod
    def check(job: Job) -> None:
        """Raise what the handler raised, where that is to end the session."""
        if job.crash is not None:
            raise job.crash

    @contextmanager
    def parked(self, session: Session, job: Job) -> Iterator[None]:
        """Give the job's slot back while it waits for the peer, and take one again after, waiting for none.

        A job has one slot, however many questions it asks at once.
        """
        job.parked += 1
        if job.parked == 1:
            self.running -= 1
            session.parked += 1
            if job.clock is not None:
                job.clock.pause()
            session.next_jobs()
        try:
            yield
        finally:
            job.parked -= 1
            if not job.parked:
                if job.clock is not None:
                    job.clock.resume()
                session.parked -= 1
                if not job.over:
                    self.running += 1


async def _perform(session: Session, job: Job) -> None:
    """Run the handler to its end, and its work, and take its result for the reply, or what it raises."""
    try:
        result = await session.endpoint.handle(session, job)
        if job.work is not None:
            await job.work.join()
        reply = session.engine.encode_result(job.request, result)
        if len(reply) > session.limits.max_result:
            reply = _too_large(session, job, len(reply))
        elif session.on_finished is not None:
            job.failed = getattr(result, "is_error", False) is True
        job.reply = reply
    except Exception as error:  # whatever a handler raises becomes its answer
        job.reply = _failed(session, job, error)


def _too_large(session: Session, job: Job, size: int) -> bytes:
    """Return the error in place of a result that is larger than the peer should have to take."""
    most = session.limits.max_result
    log.error("the result of %s has %d bytes; at most %d are sent", job.request.verb.name, size, most)
    answer = ErrorReply(INTERNAL_ERROR, f"the result is larger than {most} bytes", {"reason": "result_size"})
    job.error = answer.code
    return session.engine.encode_error(job.request.id, answer)


def _failed(session: Session, job: Job, error: Exception) -> bytes:
    """Return the reply for what a handler raised: the error it asked for, or one that says nothing of its crash."""
    cause = sole(error)
    if isinstance(cause, CannotAsk):
        cause = _refusal(cause)
    if isinstance(cause, ErrorReply):
        answer = cause
    elif _peer_left(session, cause):
        log.debug("the handler of %s lost its peer", job.request.verb.name)
        answer = ErrorReply(INTERNAL_ERROR, "the connection was lost")
    else:
        if session.handler_errors == "raise":
            job.crash = error
        answer = session.crashed(job, error)
    job.error = answer.code
    if answer.code == OVERLOADED and isinstance(answer.data, dict):
        seconds: Any = answer.data.get("retryAfter")
        if type(seconds) in (int, float) and 0 <= seconds < math.inf:
            job.retry_after = seconds
    return session.engine.encode_error(job.request.id, answer)


def _refusal(cause: CannotAsk) -> ErrorReply:
    if cause.required is None:
        return ErrorReply(INVALID_REQUEST, str(cause))
    return ErrorReply(MISSING_CAPABILITY, str(cause), {"requiredCapabilities": cause.required})


def _peer_left(session: Session, cause: BaseException) -> bool:
    """Return whether a handler failed because it was talking to a peer that left: an ordinary disconnect, no crash."""
    if isinstance(cause, RemoteError):
        return cause.code == CANCELLED_BY_DRAIN
    return isinstance(cause, ConnectionLost) and session.lost is not None
