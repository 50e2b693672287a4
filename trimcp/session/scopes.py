"""Work that ends before its owner: tasks a handler starts for its request, its session or its server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import trio

from trimcp.errors import LocalError

if TYPE_CHECKING:
    from trimcp.session.job import Job
    from trimcp.session.session import Session

__all__ = [
    "Background",
    "RequestScope",
    "Scope",
    "Work",
    "cancelled_around",
    "deadline_around",
    "guarded",
    "open_service_nursery",
    "parted",
    "reconciled",
    "sole",
]

log: logging.Logger = logging.getLogger("trimcp.session")


def deadline_around() -> float:
    """Return the earliest deadline of the scopes around the current task, as `trio.current_effective_deadline` does.

    That takes two calls for each scope, a tenth of a whole request. So the scopes are looked at here, as far as Trio
    lets its own be seen.
    """
    try:
        status: Any = trio.lowlevel.current_task()._cancel_status
        if status.effectively_cancelled:
            return -inf
        until: float = inf
        while status is not None:
            scope = status._scope
            if scope._deadline < until:
                until = scope._deadline
            if scope._shield:
                break
            status = status._parent
        return until
    except AttributeError:  # another Trio
        return trio.current_effective_deadline()


def cancelled_around(scope: trio.CancelScope) -> bool:
    """Return whether the current task, which runs in `scope`, is being cancelled from outside of it.

    Trio has no question for it. With a shield for a moment, a cancellation that does not show any more is from outside.
    """
    if trio.current_effective_deadline() != -inf:
        return False
    scope.shield = True
    around = trio.current_effective_deadline() != -inf
    scope.shield = False
    return around


def sole(error: BaseException) -> BaseException:
    """Return the one exception inside groups that a nursery put around it, or the group where there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def parted(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Return what a body raised by itself, and the cancellation in it, which belongs to a scope around us."""
    if isinstance(error, trio.Cancelled):
        return None, error
    if isinstance(error, BaseExceptionGroup):
        cancelled, rest = error.split(trio.Cancelled)
        if cancelled is not None:  # else `rest` is a copy, and the body's own group should stay itself
            return rest, cancelled
    return error, None


def reconciled(text: str, failure: BaseException | None, error: BaseException) -> BaseException | None:
    """Return what should leave a block whose body failed with `failure` and around which `error` came up.

    One real failure leaves as itself, without the groups that nurseries put around it; two leave as a group called
    `text`. None stands for nothing but a cancellation.
    """
    crash, _ = parted(error)
    if crash is None:
        return failure
    return sole(crash) if failure is None else BaseExceptionGroup(text, [failure, sole(crash)])


@asynccontextmanager
async def open_service_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for tasks that serve the body: they are cancelled when it ends, and what it raises stays itself.

    A plain nursery would wrap the body's exception in a group. A group appears only where the body and a task failed.
    """
    failure: BaseException | None = None
    cancelled: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except trio.Cancelled:
                raise
            except BaseException as error:  # the body's: raised below, without the nursery's group around it
                failure, cancelled = parted(error)
                if cancelled is not None:
                    raise cancelled from None
            finally:
                nursery.cancel_scope.cancel(reason="whoever these tasks served has ended")
    except BaseException as error:  # a task's, or what the nursery made of a cancellation
        cancelled = None  # for the reason given below
        failure = reconciled("the body and a task that served it both failed", failure, error)
        if failure is None:
            raise
    try:
        if failure is not None:
            raise failure
    finally:
        failure = None  # a frame and what was raised from it would keep each other alive


async def guarded(function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
    """Run background work so that its crash is logged whole and ends nothing else."""
    try:
        await function(*args)
    except trio.Cancelled:
        raise  # not named: a frame and what was raised from it would keep each other alive
    except BaseException as error:  # a crash, and the cancellation that may have come with it
        crash, cancelled = parted(error)
        try:
            if crash is not None and not isinstance(crash, Exception):
                raise
            if crash is not None:
                log.error("background work %r crashed", getattr(function, "__qualname__", function), exc_info=crash)
            if cancelled is not None:
                raise cancelled from None
        finally:
            del crash, cancelled  # as above


class Background(Protocol):
    """Where tasks can be started: a nursery, or what opens one on first use."""

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        """Run `await function(*args)` in a task."""


@attrs.define(eq=False, repr=False)
class Scope:
    """A place to start work that outlives the request but not this owner (a session, or the server)."""

    _nursery: Callable[[], Background]

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the owner ends.

        A crash is logged with its traceback and ends nothing else.
        """
        self._nursery().start_soon(guarded, function, args)


@attrs.define(eq=False, repr=False)
class Work:
    """The tasks of one request. Its answer waits for them, its end is theirs, and their crash is its crash.

    Args:
        host: a nursery that outlives the request; nothing is started in it before the first task.
        owner: the scope of the handler, cancelled when a task crashes.
    """

    host: trio.Nursery
    owner: trio.CancelScope
    failure: Exception | None = attrs.field(init=False, default=None)
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _waiting: list[tuple[Callable[..., Awaitable[object]], tuple[Any, ...]]] = attrs.field(init=False, factory=list)
    _started: bool = attrs.field(init=False, default=False)
    _joined: trio.Event = attrs.field(init=False, factory=trio.Event)
    _over: trio.Event = attrs.field(init=False, factory=trio.Event)

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        """Run `await function(*args)` in a task that ends before the request's answer leaves.

        Raises:
            LocalError: the request is over.
        """
        if self._over.is_set():
            raise LocalError("the request is over; nothing can be started for it")
        if self._nursery is not None:
            self._nursery.start_soon(function, *args)
            return
        self._waiting.append((function, args))
        if not self._started:
            self._started = True
            self.host.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    for function, args in self._waiting:
                        nursery.start_soon(function, *args)
                    self._waiting.clear()
                    # Kept open until the handler is done: a nursery whose last task has ended takes no new ones.
                    await self._joined.wait()
        except trio.Cancelled:
            raise
        except BaseException as error:  # a crash, and the cancellation that may have come with it
            crash, cancelled = parted(error)
            try:
                if crash is not None and not isinstance(crash, Exception):
                    raise
                self.failure = crash
                self.owner.cancel(reason="work started for this request crashed")
                if cancelled is not None:
                    raise cancelled from None
            finally:
                del crash, cancelled  # as above
        finally:
            self._nursery = None
            self._over.set()

    def finish(self) -> None:
        """Let it end with its last task."""
        self._joined.set()

    async def join(self) -> None:
        """Wait for the tasks. If one of them crashed the owner is cancelled, and `failure` says why."""
        self.finish()
        await self._over.wait()

    async def end(self) -> None:
        """Stop the tasks and wait until they have unwound, also when everything around is being cancelled."""
        self.scope.cancel(reason="the request is over")
        with trio.CancelScope(shield=True):
            await self.join()


@attrs.define(eq=False, repr=False)
class RequestScope:
    """Work that ends before the request's answer leaves."""

    _session: Session
    _job: Job

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` beside the handler. The answer waits for it, a cancel cancels it, and its
        crash is the request's.

        Raises:
            LocalError: the request is over.
        """
        job, runner = self._job, self._session.runner
        assert runner is not None
        if job.work is None:
            if job.scope is None:
                raise LocalError("the request is over; nothing can be started for it")
            job.work = Work(runner.nursery, job.scope)
        job.work.start_soon(function, *args)
