"""Sync functions in threads: a limiter of their own, the context's synchronous face, and honest accounting.

A thread cannot be stopped. A cancelled call is answered at once; its thread is counted until it ends and keeps its
place in the limiter, and its next word to the context raises `trio.Cancelled` in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import attrs
import trio

from trimcp.errors import LocalError
from trimcp.session.context import Context, Form
from trimcp.wire.common import LoggingLevel
from trimcp.wire.elicitation import ElicitResult
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.roots import Root
from trimcp.wire.sampling import CreateMessageParams, CreateMessageResult

__all__ = ["ThreadContext", "in_thread"]

_T = TypeVar("_T")


async def in_thread(ctx: Context[Any], function: Callable[[], _T], limiter: trio.CapacityLimiter) -> _T:
    """Run a sync function in a thread. Cancelling it gives up the thread, which is counted until it ends."""
    token = trio.lowlevel.current_trio_token()
    running = True
    abandoned = False

    def ended() -> None:
        nonlocal running
        running = False
        if abandoned:
            ctx.count_abandoned_thread(-1)

    def call() -> _T:
        try:
            return function()
        finally:
            try:
                token.run_sync_soon(ended)
            except trio.RunFinishedError:
                pass

    try:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=limiter)
    except trio.Cancelled:
        if running:
            abandoned = True
            ctx.count_abandoned_thread(+1)
        raise


@attrs.define(eq=False)
class ThreadContext:
    """The context of a sync handler: the same verbs, synchronous and callable from its thread.

    A sync handler that runs in the event loop itself (`run="inline"`, or tests in virtual time) can use what does not
    wait: facts, `report_progress`, `log`. Asking the client needs a thread or an async handler.
    """

    _ctx: Context[Any]
    _token: trio.lowlevel.TrioToken | None

    def __getattr__(self, name: str) -> Any:
        """Facts of the request (`revision`, `peer`, `meta`, `cancel_reason`, ...) are those of `Context`."""
        if name.startswith("_") or name in ("request", "session", "server"):
            raise AttributeError(f"a sync handler's context has no {name!r}")
        return getattr(self._ctx, name)

    def _wait(self, function: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        if self._token is None:
            raise LocalError("a sync handler that runs in the event loop cannot wait; make it async")
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """As `Context.report_progress`; in the event loop it never waits and only the latest is kept."""
        if self._token is None:
            self._ctx.report_progress_nowait(progress, total, message)
        else:
            self._wait(self._ctx.report_progress, progress, total, message)

    def log(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> None:
        """As `Context.log`; in the event loop it never waits."""
        if self._token is None:
            self._ctx.log_nowait(level, data, logger=logger)
        else:

            async def log() -> None:
                await self._ctx.log(level, data, logger=logger)

            self._wait(log)

    def debug(self, data: JSON) -> None:
        """`log` at level "debug"."""
        self.log("debug", data)

    def info(self, data: JSON) -> None:
        """`log` at level "info"."""
        self.log("info", data)

    def warning(self, data: JSON) -> None:
        """`log` at level "warning"."""
        self.log("warning", data)

    def error(self, data: JSON) -> None:
        """`log` at level "error"."""
        self.log("error", data)

    def elicit(self, message: str, schema: Mapping[str, JSON] | Form, *, key: str | None = None) -> ElicitResult:
        """As `Context.elicit`, waiting in this thread."""

        async def ask() -> ElicitResult:
            return await self._ctx.elicit(message, schema, key=key)

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
