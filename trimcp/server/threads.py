"""Sync functions in threads: a limiter of their own, the context's synchronous face, and honest accounting.

A thread cannot be stopped. A cancelled call is answered at once; its thread is counted until it ends and keeps its
place in the limiter, and its next word to the context raises `trio.Cancelled` in it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import trio

from trimcp.errors import LocalError
from trimcp.protocol.events import Admission, Admitted
from trimcp.session.context import Context, Form, StateT
from trimcp.session.job import CancelReason
from trimcp.session.scopes import open_service_nursery
from trimcp.wire.common import LoggingLevel
from trimcp.wire.elicitation import ElicitResult
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.roots import Root
from trimcp.wire.sampling import CreateMessageParams, CreateMessageResult

if TYPE_CHECKING:
    from trimcp.server.turns import Turns

__all__ = ["Desk", "ThreadContext", "in_thread"]

_T = TypeVar("_T")


@attrs.define(eq=False, repr=False)
class Desk:
    """Where a thread's waits are done for it: by tasks below the handler's, so that they share its cancellation.

    `trio.from_thread.run` would do them in tasks of the whole run, which no cancelled call reaches, and from which no
    handler unwinds to ask its client.
    """

    _token: trio.lowlevel.TrioToken
    nursery: trio.Nursery | None = None

    def wait(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """Run `await function(*args)` for the calling thread, and return or raise what it does.

        Raises:
            trio.Cancelled: the call is over; let it pass.
            LocalError: so it is, and this is another thread than the handler's.
        """
        _check_cancelled()
        outcome: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        context = contextvars.copy_context()

        async def perform() -> None:
            try:
                value = await function(*args)
            except BaseException as error:  # whatever it is, the thread waits for an outcome and would wait for ever
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
        pass  # not the handler's own thread but one that it started


@attrs.define(eq=False, repr=False)
class _Place:
    """A thread's place in the limiter, as `trio.to_thread.run_sync` takes it and gives it back when the thread ends."""

    _ctx: Context[Any]
    _turns: Turns
    _taken: bool = False
    _abandoned: bool = False
    _since: float = 0.0

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        from trimcp.server.gate import whose  # a server that has no sync handler does not load it

        self._since = await self._turns.take(whose(self._ctx), self._ctx.deadline)
        self._taken = True

    def release_on_behalf_of(self, borrower: object) -> None:
        self._turns.give_back(self._since)
        self._taken = False
        if self._abandoned:
            self._count(-1)

    def abandon(self) -> None:
        """Count the thread until it ends, if there is one: the call may have been waiting for its place."""
        if self._taken:
            self._abandoned = True
            self._count(+1)

    def _count(self, change: int) -> None:
        """Count it where its session is asked, and where it is still known once that has ended."""
        self._ctx.count_abandoned_thread(change)
        self._turns.abandoned += change


async def in_thread(ctx: Context[Any], function: Callable[[], _T], turns: Turns, desk: Desk | None = None) -> _T:
    """Run a sync function in a thread. Cancelling it gives up the thread, which is counted until it ends.

    Raises:
        ErrorReply: there was no thread for it, and too many wait for one or it would begin too late.
    """
    place: Any = _Place(ctx, turns)
    if desk is None:  # it needs nothing to be waited for
        return await _run(function, place)
    async with open_service_nursery() as nursery:
        desk.nursery = nursery
        try:
            return await _run(function, place)
        finally:
            desk.nursery = None


async def _run(function: Callable[[], _T], place: Any) -> _T:
    try:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=place)
    except trio.Cancelled:
        place.abandon()
        raise


@attrs.define(eq=False, repr=False)
class ThreadContext(Admitted, Generic[StateT]):
    """The context of a sync handler: the same verbs, synchronous and callable from its thread.

    A sync handler that runs in the event loop itself (`run="inline"`, or tests in virtual time) can use what does not
    wait: facts, `report_progress`, `log`. Asking the client needs a thread or an async handler. One that runs in a
    process of its own (`run="process"`) can use all of it but `state`, which stays in the server's.
    """

    _ctx: Context[StateT]
    _desk: Desk | None

    # Facts of the request: an attribute at a time, so that a type checker knows them and a typo is one

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
        """As `Context.deadline`; in a process of its own on the clock of `time.monotonic`."""
        return self._ctx.deadline

    # Verbs

    def _wait(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        if self._desk is None:
            raise LocalError("a sync handler that runs in the event loop cannot wait; make it async")
        return self._desk.wait(function, *args)

    def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """As `Context.report_progress`; in the event loop it never waits and only the latest is kept."""
        if self._desk is None:
            self._ctx.report_progress_nowait(progress, total, message)
        else:
            self._wait(self._ctx.report_progress, progress, total, message)

    def log(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> None:
        """As `Context.log`; in the event loop it never waits."""
        if self._desk is None:
            self._ctx.log_nowait(level, data, logger=logger)
        else:

            async def log() -> None:
                await self._ctx.log(level, data, logger=logger)

            self._wait(log)

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

    def elicit(self, message: str, schema: Mapping[str, JSON] | Form, *, key: str | None = None) -> ElicitResult:
        """As `Context.elicit`, waiting in this thread."""

        async def ask() -> ElicitResult:
            return await self._ctx.elicit(message, schema, key=key)

        return self._wait(ask)

    def elicit_url(
        self, message: str, url: str, *, elicitation_id: str | None = None, key: str | None = None
    ) -> ElicitResult:
        """As `Context.elicit_url`, waiting in this thread."""

        async def ask() -> ElicitResult:
            return await self._ctx.elicit_url(message, url, elicitation_id=elicitation_id, key=key)

        return self._wait(ask)

    def sample(self, params: CreateMessageParams, *, key: str | None = None) -> CreateMessageResult:
        """As `Context.sample`, waiting in this thread."""

        async def ask() -> CreateMessageResult:
            return await self._ctx.sample(params, key=key)

        return self._wait(ask)

    def list_roots(self, *, key: str | None = None) -> list[Root]:
        """As `Context.list_roots`, waiting in this thread."""

        async def ask() -> list[Root]:
            return await self._ctx.list_roots(key=key)

        return self._wait(ask)
