"""Work that ends before its owner: tasks a handler starts for its request, its session or its server."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import trio

__all__ = ["Scope", "Work", "guarded", "sole"]

log = logging.getLogger("trimcp.session")


def sole(error: BaseException) -> BaseException:
    """Return the one exception inside groups that a nursery put around it, or the group where there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def guarded(function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
    """Run background work so that its crash is logged whole and ends nothing else."""
    try:
        await function(*args)
    except Exception:
        log.exception("background work %r crashed", getattr(function, "__qualname__", function))


@attrs.define(eq=False)
class Scope:
    """A place to start work that outlives the request but not this owner (a session, or the server)."""

    _nursery: Callable[[], trio.Nursery]

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the owner ends.

        A crash is logged with its traceback and ends nothing else.
        """
        self._nursery().start_soon(guarded, function, args, name=function)


@attrs.define(eq=False)
class Work:
    """The tasks of one request. Its answer waits for them; cancelling the request cancels them; their crash is its crash.

    Args:
        host: a nursery that outlives the request; nothing is started in it before the first task.
        owner: the scope of the handler, cancelled when a task crashes.
    """

    host: trio.Nursery
    owner: trio.CancelScope
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _waiting: list[tuple[Callable[..., Awaitable[object]], tuple[Any, ...]]] = attrs.field(init=False, factory=list)
    _failure: Exception | None = attrs.field(init=False, default=None)
    _over: trio.Event | None = attrs.field(init=False, default=None)

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that ends before the request's answer leaves."""
        if self._nursery is not None:
            self._nursery.start_soon(function, *args)
            return
        self._waiting.append((function, args))
        if self._over is None:
            self._over = trio.Event()
            self.host.start_soon(self._run)

    async def _run(self) -> None:
        assert self._over is not None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for function, args in self._waiting:
                    nursery.start_soon(function, *args)
                self._waiting.clear()
        except Exception as error:
            self._failure = error
            self.owner.cancel(reason="work started for this request crashed")
        finally:
            self._nursery = None
            self._over.set()
            self._over = None

    def cancel(self) -> None:
        """Stop the tasks."""
        self._waiting.clear()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel(reason="the request is over")

    async def join(self) -> None:
        """Wait for the tasks; raises what one of them raised."""
        if self._over is not None:
            await self._over.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
