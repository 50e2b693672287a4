"""Tasks that end before their owner, a request, a session or a server; and containment of what users' code does.

Whatever that code raises or leaves open is its own failure and ends nothing else. `KeyboardInterrupt` and a
cancellation in force pass; all else is a crash: `SystemExit`, `GeneratorExit`, exceptions of other event loops, and a
`trio.Cancelled` that was kept from somewhere else.
"""

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
from trimcp.nurseries import parted, sole

log: logging.Logger = logging.getLogger("trimcp.session")

_LONGEST_REASON: Final = 500  # characters of it that the peer is told


def cancelled_around(scope: trio.CancelScope) -> bool:
    """Return whether the current task, which runs in `scope`, is being cancelled from outside of it."""
    if trio.current_effective_deadline() != -math.inf:
        return False
    scope.shield = True  # Trio cannot be asked; what this hides came from outside
    around = trio.current_effective_deadline() != -math.inf
    scope.shield = False
    return around


def cancellation_text(cancelled: BaseException) -> str:
    """Return why a wait was cancelled, as a line for the peer.

    Only a reason somebody gave on purpose is told: Trio's own name tasks and quote the exceptions they crashed with.
    """
    source = getattr(cancelled, "source", "unknown")
    reason = getattr(cancelled, "reason", None)
    if source == "deadline":
        return "deadline exceeded"
    if source != "explicit" or not reason:
        return "cancelled by the caller"
    # Never a reason for a cancellation to fail: what UTF-8 cannot carry is replaced.
    return str(reason)[:_LONGEST_REASON].encode("utf-8", "replace").decode("utf-8")


# What users' code may raise, and leave open


def innermost_scope(task: trio.lowlevel.Task) -> object:
    """Return an object that stands for the task's innermost cancel scope. Trio has no public name for it."""
    return getattr(task, "_cancel_status", None)


def is_cancelled(scope: object) -> bool:
    """Return whether what an `innermost_scope` stands for is being cancelled, itself or from around it."""
    known: bool | None = getattr(scope, "effectively_cancelled", None)
    return trio.current_effective_deadline() == -math.inf if known is None else known


def blamed(error: BaseException, around: object) -> tuple[BaseException | None, BaseException | None]:
    """Return what code did wrong by raising this, and the cancellation in it that is in force around the code.

    Args:
        error: what was raised; raised again if it is or holds a `KeyboardInterrupt`, or if the code's coroutine was
            closed outside of Trio, where nothing can be waited for.
        around: the `innermost_scope` the code was called in.
    """
    crash, cancelled = parted(error)
    if isinstance(crash, KeyboardInterrupt) or (
        isinstance(crash, BaseExceptionGroup) and crash.subgroup(KeyboardInterrupt) is not None
    ):
        raise error
    if isinstance(crash, GeneratorExit) and not trio.lowlevel.in_trio_task():
        raise error
    if cancelled is not None and not is_cancelled(around):
        return error, None
    return crash, cancelled


def has_left_open(task: trio.lowlevel.Task, around: object, nurseries: int = 0) -> bool:
    """Return whether code has left a cancel scope or a nursery open in this task; the arguments of `abandon_left_open`.

    A scope between may have been left already, with an error. Then only the nursery shows.
    """
    seen: Any = task  # what Trio has in public makes a list each time, and this is asked after each request
    try:
        return seen._cancel_status is not around or seen._child_nurseries[nurseries:] != []
    except AttributeError:  # another Trio
        return False


def abandon_left_open(task: trio.lowlevel.Task, around: object, nurseries: int = 0) -> RuntimeError | None:
    """Return what is wrong if code has left a cancel scope or a nursery open in this task, else None.

    Tasks in such a nursery are cancelled and unwind on their own, as Trio does when the task ends; but Trio also raises
    an error around the task, which would end all that runs beside it.

    Args:
        task: the current one.
        around: its `innermost_scope` before; leaving that scope raises a RuntimeError now.
        nurseries: how many it had open before.
    """
    if not has_left_open(task, around, nurseries):
        return None
    left: list[Any] = getattr(task, "_child_nurseries", [])
    crashes: list[BaseException] = []
    for nursery in left[nurseries:]:
        nursery.cancel_scope.cancel(reason="the handler that opened this nursery has ended and left it open")
        nursery._closed = True
        crashes += [each for each in nursery._pending_excs if not isinstance(each, trio.Cancelled)]
    del left[nurseries:]
    error = RuntimeError("the handler left a cancel scope or a nursery open")
    if crashes:
        error.__cause__ = BaseExceptionGroup("raised by tasks in the nursery", crashes)
    return error


async def contained(function: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    """Return what `await function(*args, **options)` returns, where it is anybody's code.

    Raises:
        Exception: the code's own; a RuntimeError in place of anything that is none, or if it left something open.
        trio.Cancelled: a scope around this is cancelled.
        KeyboardInterrupt: as it came.
    """
    task = trio.lowlevel.current_task()
    nurseries = len(task.child_nurseries)
    left: RuntimeError | None = None
    try:
        with trio.CancelScope():
            around = innermost_scope(task)
            try:
                return await function(*args, **options)
            except BaseException as error:
                left = abandon_left_open(task, around, nurseries)
                crash, _ = blamed(error, around)
                try:
                    if left is None and crash is None:
                        raise  # cancelled, and nothing else
                    if left is None and isinstance(crash, Exception):
                        raise crash from crash.__cause__
                    if left is None:
                        left = RuntimeError(f"{named(function)} raised {type(sole(crash or error)).__name__}")
                    if left.__cause__ is None:
                        left.__cause__ = error
                    raise left from left.__cause__
                finally:
                    del crash  # a frame and what was raised from it would keep each other alive
            finally:
                if left is None:
                    left = abandon_left_open(task, around, nurseries)
    except RuntimeError:
        if left is None:
            raise
        raise left from left.__cause__  # instead of what Trio says of the scopes
    finally:
        left = None


def named(function: object) -> str:
    """Return the name of a function, for people."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", function))


def written(function: Any) -> str | None:
    """Return a function's name and where it was written, for a log; None for what is no function of Python."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return None if code is None else f"{named(function)} in {code.co_filename}:{code.co_firstlineno}"


def log_crash(logger: logging.Logger, error: BaseException, message: str, *args: object) -> None:
    """Log one ERROR with the traceback of what anybody's code raised. What it says cannot be taken for other lines."""
    if not logger.isEnabledFor(logging.ERROR):
        return
    from trimcp.cleaning import traceback_text

    file, line, function, _ = logger.findCaller(stacklevel=2)
    told = (type(error), error, error.__traceback__)
    record = logger.makeRecord(logger.name, logging.ERROR, file, line, message, args, told, function)
    record.exc_text = traceback_text(error)  # which formatters take instead of one of their own
    logger.handle(record)


async def guarded(function: Callable[..., Awaitable[object]], args: tuple[Any, ...]) -> None:
    """Run background work so that its crash is logged whole and ends nothing else."""
    try:
        await contained(function, *args)
    except Exception as error:  # whatever it is, it is the work's
        log_crash(log, error, "background work %r crashed", named(function))


class Background(Protocol):
    """Where tasks can be started: a nursery, or what opens one on first use."""

    def start_soon(self, function: Callable[..., Awaitable[object]], /, *args: Any) -> None: ...


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
                    # Kept open until the handler is done: a nursery whose last task has ended takes no new ones.
                    await self._joined.wait()
        except trio.Cancelled:
            raise
        except BaseException as error:  # a crash, and the cancellation that may have come with it
            crash, cancelled = parted(error)
            try:
                if crash is not None and not isinstance(crash, Exception):
                    raise  # an interrupt: all else is an exception by now, see `contained`
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
