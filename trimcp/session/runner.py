"""Runs jobs inside a nursery, within the running slots. The seam for how: this one gives each job a task.

Whoever delivered a request starts its job at once while a slot is free; only beyond the slots does it wait in the
mailbox, and the job that ends starts the next.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from trimcp.errors import CannotAsk, ConnectionLost, ErrorReply, RemoteError
from trimcp.session.asking import after_unwinding
from trimcp.session.job import Job
from trimcp.session.scopes import parted, sole
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INTERNAL_ERROR, INVALID_REQUEST, MISSING_CAPABILITY

if TYPE_CHECKING:
    from trimcp.session.session import Session

__all__ = ["Runner"]

log: logging.Logger = logging.getLogger("trimcp.session")


@attrs.define(eq=False)
class Runner:
    """Runs jobs as tasks of one nursery.

    Args:
        nursery: where the jobs live; they end before it does.
        slots: how many may run at once, those that wait for the peer not counted.
        max_bytes: what those under way may weigh, all counted. One job alone may exceed it.
    """

    nursery: trio.Nursery
    slots: int
    max_bytes: int = 32 * 1024 * 1024
    running: int = attrs.field(init=False, default=0)
    bytes_running: int = attrs.field(init=False, default=0)
    _context: contextvars.Context = attrs.field(init=False, factory=contextvars.copy_context)

    def has_room(self, job: Job) -> bool:
        """Return whether this job may start now."""
        held = self.bytes_running
        return self.running < self.slots and (not held or held + job.size <= self.max_bytes)

    def start(self, session: Session, job: Job) -> None:
        """Start a job in a task of its own."""
        self.running += 1
        self.bytes_running += job.size
        job.started = True
        job.since = trio.current_time()
        # Whoever delivers may be a task of the peer's, in the same process; its context is none of the handler's.
        self._context.run(self._spawn, session, job)

    def _spawn(self, session: Session, job: Job) -> None:
        self.nursery.start_soon(self._run, session, job, name=job.request.verb.name)

    async def _run(self, session: Session, job: Job) -> None:
        reply: bytes | None = None
        try:
            reply = await _until_settled(session, job)
        finally:
            if not job.parked:
                self.running -= 1
            self.bytes_running -= job.size
            session.finish(job, job.farewell() if reply is None else reply)
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
            session.next_jobs()
        try:
            yield
        finally:
            job.parked -= 1
            if not job.parked:
                session.parked -= 1
                if not job.over:
                    self.running += 1


async def _until_settled(session: Session, job: Job) -> bytes | None:
    """Run the handler, again where it was unwound to ask a question, and return its reply; None if it was cancelled."""
    while True:
        reply = await _attempt(session, job)
        questions = job.questions
        if reply is not None or job.reason is not None or questions is None or not questions.asked:
            return reply
        job.scope, job.work = trio.CancelScope(), None
        with job.scope:
            try:
                reply = await after_unwinding(session, job)
            except Exception as error:
                reply = _failed(session, job, error)
            await _room(job)
        if reply is not None or job.reason is not None:
            return reply
        job.scope = trio.CancelScope()


async def _attempt(session: Session, job: Job) -> bytes | None:
    """Run the handler once and return its reply, or None if it was cancelled. Its work has ended, too."""
    reply: bytes | None = None
    try:
        with job.scope:
            reply = await _perform(session, job)
            await _room(job)
    except trio.Cancelled:
        raise
    except BaseException as error:
        # What a cancelled handler's nursery held besides the cancellation.
        crash, cancelled = parted(error)
        try:
            if crash is not None and not isinstance(crash, Exception):
                raise
            if crash is not None:
                reply = _failed(session, job, crash)
            if cancelled is not None:
                raise cancelled from None
        finally:
            del crash, cancelled  # a frame and what was raised from it would keep each other alive
    finally:
        if job.work is not None:
            await job.work.end()
    if job.work is not None and job.work.failure is not None:
        return _failed(session, job, job.work.failure)
    return reply


async def _room(job: Job) -> None:
    if job.sink.full:
        await job.sink.room()


async def _perform(session: Session, job: Job) -> bytes:
    """Run the handler to its end, and its work, and return its reply as bytes, whatever it raises."""
    try:
        result = await session.endpoint.handle(session, job)
        if job.work is not None:
            await job.work.join()
        return session.engine.encode_result(job.request, result)
    except Exception as error:
        return _failed(session, job, error)


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
