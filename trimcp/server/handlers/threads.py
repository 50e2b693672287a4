"""Sync handlers in threads: their limiter, their synchronous context, and a count of abandoned threads.

A thread cannot be stopped. A cancelled call is answered at once; its thread keeps its place in the limiter and is
counted until it ends. Its next use of the context raises `trio.Cancelled`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import trio

from trimcp.errors import LocalError
from trimcp.protocol.events import Admission, Admitted
from trimcp.session.context import Context, StateT, client_key
from trimcp.session.incoming.job import CancelReason
from trimcp.support.nurseries import innermost_scope, is_cancelled, named, open_service_nursery
from trimcp.support.slotted import slotted
from trimcp.wire.common import LoggingLevel
from trimcp.wire.input_requests import CreateMessageParams, CreateMessageResult, ElicitResult, Root
from trimcp.wire.jsonrpc import JSON, RequestId

if TYPE_CHECKING:
    from trimcp.schema.forms import Answer, Form
    from trimcp.session.incoming.turns import Turns

_T = TypeVar("_T")


@slotted
class ThreadPortal:
    """Runs async functions for a thread, in child tasks of the handler, so that cancelling the call cancels them.

    `trio.from_thread.run` is no substitute: it uses system tasks, which are not cancelled with the call, and in which
    an exception that ends the handler to ask the client does not reach the handler.
    """

    _token: trio.lowlevel.TrioToken
    nursery: trio.Nursery | None = None

    def wait(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run `await function(*args)` in Trio's thread, while the calling thread waits; return or raise its outcome.

        If the call has ended, raises trio.Cancelled, which must not be caught; in another thread than the handler's own
        LocalError.
        """
        _check_cancelled()
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        context = contextvars.copy_context()

        async def perform() -> None:
            try:
                value = await function(*args)
            except BaseException as error:  # otherwise the thread would wait forever
                outcome.put((None, error))
                if not isinstance(error, Exception):
                    raise
            else:
                outcome.put((value, None))

        def start() -> None:
            if self.nursery is None:
                outcome.put((None, LocalError("the request is over; its context can no longer be used")))
            else:
                context.run(self.nursery.start_soon, perform)

        self._token.run_sync_soon(start)
        value, error = outcome.get()
        if error is not None:
            _check_cancelled()
            raise error
        found: _T = value
        return found


def _check_cancelled() -> None:
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        pass  # not a thread of Trio: the handler's thread started it


@slotted
class _ThreadPlace:
    """The limiter of one `trio.to_thread.run_sync`: takes a turn before the thread begins, returns it when it ends."""

    _ctx: Context[Any]
    _turns: Turns
    _taken: bool = False
    _abandoned: bool = False
    _since: float = 0.0

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        self._since = await self._turns.acquire(client_key(self._ctx), self._ctx.deadline)
        self._taken = True

    def release_on_behalf_of(self, borrower: object) -> None:
        self._turns.give_back(self._since)
        self._taken = False
        if self._abandoned:
            self._count(-1)

    def abandon(self) -> None:
        """Count the thread as abandoned until it ends, if it has begun."""
        if self._taken:
            self._abandoned = True
            self._count(+1)

    def _count(self, change: int) -> None:
        """Count it in its session, and in the run, which may outlive the session."""
        self._ctx.internals[0].jobs.abandoned_threads += change
        self._turns.abandoned += change


async def in_thread(
    ctx: Context[Any], function: Callable[[], _T], turns: Turns, portal: ThreadPortal | None = None
) -> _T:
    """Run a sync function in a thread. Cancelling abandons the thread, which is counted until it ends.

    Raises ErrorReply if no thread is free and too many calls wait, or this one would begin after its deadline.
    """
    place: Any = _ThreadPlace(ctx, turns)
    if portal is None:
        return await _run(function, place)
    async with open_service_nursery() as nursery:
        portal.nursery = nursery
        try:
            return await _run(function, place)
        finally:
            portal.nursery = None


async def _run(function: Callable[[], _T], place: Any) -> _T:
    try:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=place)
    except trio.Cancelled as error:
        if not is_cancelled(innermost_scope(trio.lowlevel.current_task())):
            # The call is not cancelled: the function kept a `Cancelled` of another one. A nursery would swallow it.
            raise RuntimeError(f"{named(function)} raised a trio.Cancelled that is not its own") from error
        place.abandon()
        raise


@slotted
class ThreadContext(Admitted, Generic[StateT]):
    """The context of a sync handler: the methods of `Context`, synchronous and callable from its thread.

    In the event loop (`run="inline"`, or tests in virtual time) only members that do not wait can be used: attributes,
    `report_progress`, `log`. Asking the client needs a thread or an async handler. In a worker process
    (`run="process"`) all but `state` can be used; the state stays in the server's process.
    """

    _ctx: Context[StateT]
    _portal: ThreadPortal | None

    # Attributes of the request, each written out for type checkers

    @property
    def admission(self) -> Admission:
        """As `Context.admission`."""
        return self._ctx.admission

    @property
    def state(self) -> StateT:
        """As `Context.state`."""
        return self._ctx.state

    @property
    def request_id(self) -> RequestId:
        """As `Context.request_id`."""
        return self._ctx.request_id

    @property
    def method(self) -> str:
        """As `Context.method`."""
        return self._ctx.method

    @property
    def headers(self) -> Mapping[str, str]:
        """As `Context.headers`."""
        return self._ctx.headers

    @property
    def cancel_reason(self) -> CancelReason | None:
        """As `Context.cancel_reason`."""
        return self._ctx.cancel_reason

    @property
    def cancel_detail(self) -> str | None:
        """As `Context.cancel_detail`."""
        return self._ctx.cancel_detail

    @property
    def deadline(self) -> float:
        """As `Context.deadline`; in a worker process on the clock of `time.monotonic`."""
        return self._ctx.deadline

    @property
    def task(self) -> ThreadTask:
        """As `Context.task`, whose checkpoints wait in this thread."""
        return ThreadTask(self)

    # Methods

    def _wait(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        if self._portal is None:
            raise LocalError("a sync handler that runs in the event loop cannot wait; make it async")
        return self._portal.wait(function, *args)

    def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """As `Context.report_progress`; in the event loop it never waits, and only the latest report is kept."""
        if self._portal is None:
            self._ctx.report_progress_nowait(progress, total, message)
        else:
            self._wait(self._ctx.report_progress, progress, total, message)

    def notify(self, name: str, params: Mapping[str, JSON] | None = None) -> None:
        """As `Context.notify`, waiting in this thread."""
        self._wait(self._ctx.notify, name, params)

    def log(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> None:
        """As `Context.log`; in the event loop it never waits."""
        if self._portal is None:
            self._ctx.log_nowait(level, data, logger=logger)
        else:
            self._wait(partial(self._ctx.log, level, data, logger=logger))

    def debug(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "debug"."""
        self.log("debug", data, logger=logger)

    def info(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "info"."""
        self.log("info", data, logger=logger)

    def warning(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "warning"."""
        self.log("warning", data, logger=logger)

    def error(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "error"."""
        self.log("error", data, logger=logger)

    @overload
    def elicit(self, message: str, schema: type[_T], *, key: str | None = None) -> Answer[_T]: ...
    @overload
    def elicit(
        self, message: str, schema: Mapping[str, JSON] | Form[Any], *, key: str | None = None
    ) -> ElicitResult: ...
    def elicit(self, message: str, schema: Any, *, key: str | None = None) -> Any:
        """As `Context.elicit`, waiting in this thread."""
        return self._wait(partial(self._ctx.elicit, message, schema, key=key))

    def elicit_url(
        self, message: str, url: str, *, elicitation_id: str | None = None, key: str | None = None
    ) -> ElicitResult:
        """As `Context.elicit_url`, waiting in this thread."""
        return self._wait(partial(self._ctx.elicit_url, message, url, elicitation_id=elicitation_id, key=key))

    def sample(self, params: CreateMessageParams, *, key: str | None = None) -> CreateMessageResult:
        """As `Context.sample`, waiting in this thread."""
        return self._wait(partial(self._ctx.sample, params, key=key))

    def list_roots(self, *, key: str | None = None) -> list[Root]:
        """As `Context.list_roots`, waiting in this thread."""
        return self._wait(partial(self._ctx.list_roots, key=key))


@slotted
class ThreadTask:
    """The task of a call, for a sync handler: as `Context.task`, with checkpoints that wait in the handler's thread."""

    _ctx: ThreadContext[Any]

    @property
    def id(self) -> str | None:
        """Its id; None if the call is no task."""
        return self._ctx._ctx.task.id

    @property
    def saved(self) -> Any:
        """The value of the last checkpoint, if the handler begins again; else None."""
        return self._ctx._ctx.task.saved

    def checkpoint(self, value: JSON) -> None:
        """Save how far the handler is, as `CallTask.checkpoint`."""
        self._ctx._wait(self._ctx._ctx.task.checkpoint, value)
