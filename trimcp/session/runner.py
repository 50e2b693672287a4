"""Runs jobs inside a nursery, within the running slots. The seam for how: this one gives each job a task.

Whoever delivered a request starts its job at once while a slot is free; only beyond the slots does it wait in the
mailbox, and the job that ends starts the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from trimcp.errors import ErrorReply
from trimcp.session.asking import after_unwinding
from trimcp.session.job import Job
from trimcp.session.scopes import sole

if TYPE_CHECKING:
    from trimcp.session.session import Session

__all__ = ["Runner"]


@attrs.define(eq=False)
class Runner:
    """Runs jobs as tasks of one nursery.

    Args:
        nursery: where the jobs live; they end before it does.
        slots: how many may run at once, those that wait for the peer not counted.
    """

    nursery: trio.Nursery
    slots: int
    running: int = attrs.field(init=False, default=0)

    @property
    def free(self) -> bool:
        """Whether a job may start now."""
        return self.running < self.slots

    def start(self, session: Session, job: Job) -> None:
        """Start a job in a task of its own."""
        self.running += 1
        job.started = True
        self.nursery.start_soon(self._run, session, job, name=job.request.verb.name)

    async def _run(self, session: Session, job: Job) -> None:
        reply: bytes | None = None
        try:
            reply = await _until_settled(session, job)
        finally:
            self.running -= 1
            session.finish(job, reply)

    @contextmanager
    def parked(self, session: Session, job: Job) -> Iterator[None]:
        """Give the job's slot back while it waits for the peer, and take one again after, waiting for none."""
        self.running -= 1
        session.parked += 1
        session.next_jobs()
        try:
            yield
        finally:
            session.parked -= 1
            self.running += 1


async def _until_settled(session: Session, job: Job) -> bytes | None:
    """Run the handler, again where it was unwound to ask a question, and return its reply."""
    while True:
        reply: bytes | None = None
        try:
            with job.scope:
                reply = await _perform(session, job)
                if session.sink.full:
                    await session.sink.room()
        except Exception as error:
            # What a cancelled handler's nursery still held besides the cancellation.
            reply = _failed(session, job, error)
        finally:
            if job.work is not None:
                job.work.cancel()
                await job.work.join()
        if not job.scope.cancelled_caught:
            return reply
        if job.questions is None or not job.questions.asked or job.reason is not None:
            return session.farewell(job)
        reply = await after_unwinding(session, job)
        if reply is not None:
            return reply


async def _perform(session: Session, job: Job) -> bytes:
    """Run the handler once and return its reply as bytes, whatever it raises."""
    try:
        result = await session.endpoint.handle(session, job)
        if job.work is not None:
            await job.work.join()
        return session.engine.encode_result(job.request, result)
    except Exception as error:
        return _failed(session, job, error)


def _failed(session: Session, job: Job, error: Exception) -> bytes:
    cause = sole(error)
    if isinstance(cause, ErrorReply):
        return session.engine.encode_error(job.request.id, cause)
    reply = session.engine.encode_error(job.request.id, session.crashed(job, error))
    if session.handler_errors == "raise":
        session.finish(job, reply)
        raise error
    return reply
