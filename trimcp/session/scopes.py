"""Tasks that end before their owner: a request, a session or a server."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import attrs
import trio

from trimcp.errors import LocalError
from trimcp.support.nurseries import contained, named, split_cancelled
from trimcp.support.slotted import slotted

log: logging.Logger = logging.getLogger("trimcp.session")

_LONGEST_REASON: Final = 500  # characters of it sent to the peer


def cancelled_around(scope: trio.CancelScope) -> bool:
    """Return whether the current task, which runs in `scope`, is being cancelled from outside of it."""
    if trio.current_effective_deadline() != -math.inf:
        return False
    scope.shield = True  # Trio has no function for this; what the shield hides came from outside
    around = trio.current_effective_deadline() != -math.inf
    scope.shield = False
    return around


def cancellation_text(cancelled: BaseException) -> str:
    """Return why a wait was cancelled, as one line for the peer.

    Only a reason given by a program is sent: Trio's own reasons name tasks and quote the exceptions that they raised.
    """
    source = getattr(cancelled, "source", "unknown")
    reason = getattr(cancelled, "reason", None)
    if source == "deadline":
        return "deadline exceeded"
    if source != "explicit" or not reason:
        return "cancelled by the caller"
    # This must not make a cancellation fail: characters that UTF-8 cannot represent are replaced.
    return str(reason)[:_LONGEST_REASON].encode("utf-8", "replace").decode("utf-8")


@slotted
class WaitingTasks:
    """Tasks that wait for the same, and are all woken at once. Nothing is kept for who comes later, unlike an event.

    For what each call waits for: it takes a quarter of the time of a parking lot, which spends most of it on its order
    and on being able to move tasks between lots.
    """

    tasks: list[trio.lowlevel.Task] = attrs.field(init=False, factory=list)  # those that wait

    def wait(self) -> Awaitable[object]:
        """Wait until `wake` is called, to be awaited at once. Cancelling it loses nothing."""
        task = trio.lowlevel.current_task()
        self.tasks.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self.tasks.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        return trio.lowlevel.wait_task_rescheduled(abort)  # noqa: ASYNC105 - the caller awaits it, a frame less

    def wake(self) -> None:
        """Let the tasks that wait now go on."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            trio.lowlevel.reschedule(task)


def written(function: Any) -> str | None:
    """Return a function's name and source location, for a log; None if it is not a Python function."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else f"{named(function)} in {code.co_filename}:{code.co_firstlineno}"


async def guarded(function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
    """Run background work. A crash is logged with its traceback and ends nothing else."""
    try:
        await contained(function, *args)
    except Exception as error:  # any failure of the work
        from trimcp.support.cleaning import log_crash

        log_crash(log, error, "background work %r crashed", named(function))


class Background(Protocol):
    """Where tasks can be started: a nursery, or an object that opens one at first use."""

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None: ...


@slotted
class Scope:
    """Starts tasks that may outlive the request but not this owner (a session or the server)."""

    _nursery: Callable[[], Background]

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the owner ends.

        A crash is logged with its traceback and ends nothing else.
        """
        self._nursery().start_soon(guarded, function, args)


@slotted
class Work:
    """The tasks of one request. Its answer waits for them, they end with it, and if one crashes the request fails."""

    host: trio.Nursery  # a nursery that outlives the request; it is used from the first task on
    owner: trio.CancelScope  # the cancel scope of the handler, cancelled when a task crashes
    failure: Exception | None = attrs.field(init=False, default=None)
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _waiting: list[tuple[Callable[..., Awaitable[object]], tuple[Any, ...]]] = attrs.field(init=False, factory=list)
    _joined: trio.Event = attrs.field(init=False, factory=trio.Event)
    _over: trio.Event = attrs.field(init=False, factory=trio.Event)

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None:
        """Run `await function(*args)` in a task that ends before the request's answer is sent.

        Raises LocalError: the request has ended.
        """
        if self._over.is_set():
            raise LocalError("the request is over; nothing can be started for it")
        if self._nursery is not None:
            self._nursery.start_soon(contained, function, *args, name=function)
            return
        self._waiting.append((function, args))
        if len(self._waiting) == 1:
            self.host.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    for function, args in self._waiting:
                        nursery.start_soon(contained, function, *args, name=function)
                    self._waiting.clear()
                    # Keeps the nursery open until the handler ends: one without tasks would accept no new ones.
                    await self._joined.wait()
        except trio.Cancelled:
            raise
        except BaseException as error:  # a crash, perhaps together with a cancellation
            crash, cancelled = split_cancelled(error)
            try:
                if crash is not None and not isinstance(crash, Exception):
                    raise  # an interrupt: `contained` has made everything else an exception
                self.failure = crash
                self.owner.cancel(reason="work started for this request failed")
                if cancelled is not None:
                    raise cancelled from None
            finally:
                del crash, cancelled  # as above
        finally:
            self._nursery = None
            self._over.set()

    def finish(self) -> None:
        """Allow it to end after its last task."""
        self._joined.set()

    async def join(self) -> None:
        """Wait for the tasks. If one of them crashed, the owner is cancelled and `failure` says why."""
        self.finish()
        await self._over.wait()

    async def end(self) -> None:
        """Cancel the tasks and wait until they have unwound, even if an outer scope is cancelled."""
        self.scope.cancel(reason="the request is over")
        with trio.CancelScope(shield=True):
            await self.join()
