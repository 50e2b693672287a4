"""Nurseries for background tasks of a block, closing with a block, and what to make of the failures that come out.

Users' code is contained: whatever it raises or leaves open fails only that code. `KeyboardInterrupt` and a cancellation
from outside are raised on. Everything else is a crash: `SystemExit`, `GeneratorExit`, exceptions of other event loops,
and a `trio.Cancelled` that was kept from somewhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio


def unwrap_single(error: BaseException) -> BaseException:
    """Return the only exception inside nested groups, or the group if it holds several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split what a body raised: return its own exceptions, and the cancellation, which belongs to an outer scope."""
    if isinstance(error, trio.Cancelled):
        return None, error
    if isinstance(error, BaseExceptionGroup):
        cancelled: BaseExceptionGroup[BaseException] | None
        rest: BaseException | None
        try:
            cancelled, rest = error.split(trio.Cancelled)
        except Exception:  # a group of the user's, whose `derive` fails
            inside = leaves(error)
            cancelled = _group_of([each for each in inside if isinstance(each, trio.Cancelled)])
            rest = _group_of([each for each in inside if not isinstance(each, trio.Cancelled)])
        if cancelled is not None:  # else `rest` is a copy, and the body's own group should be raised unchanged
            return rest, cancelled
    return error, None


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions in nested groups, without the groups; the exception itself if it is none."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
        else:
            found.append(each)
    return found


def _group_of(errors: list[BaseException]) -> BaseExceptionGroup[BaseException] | None:
    return BaseExceptionGroup("multiple errors", errors) if errors else None


def merge_failures(text: str, failure: BaseException | None, error: BaseException) -> BaseException | None:
    """Merge the body's failure with the nursery's, and return what to raise; None for a cancellation.

    A single failure is raised itself, without the groups of nurseries. Two are raised as a group with the message
    `text`.
    """
    crash, _ = split_cancelled(error)
    if crash is None:
        return failure
    return unwrap_single(crash) if failure is None else BaseExceptionGroup(text, [failure, unwrap_single(crash)])


@asynccontextmanager
async def open_service_nursery() -> AsyncIterator[trio.Nursery]:
    """Open a nursery for background tasks of the body: they are cancelled when it ends.

    A plain nursery would wrap the body's exception in a group. This one raises it unchanged; a group is raised only if
    both the body and a task failed.
    """
    failure: BaseException | None = None
    cancelled: BaseException | None = None
    ended: trio.Cancelled | None = None
    try:
        async with trio.open_nursery() as nursery:
            try:
                yield nursery
            except trio.Cancelled as error:
                ended = error
                raise
            except BaseException as error:  # the body's: raised below, without the nursery's group
                failure, cancelled = split_cancelled(error)
                if cancelled is not None:
                    raise cancelled from None
            finally:
                nursery.cancel_scope.cancel(reason="whoever these tasks served has ended")
    except BaseException as error:  # a task's, or a cancellation that the nursery has wrapped
        cancelled = None  # for the reason given below
        failure = merge_failures("the body and a task that served it both failed", failure, error)
        if failure is None:
            raise
    finally:
        if ended is not None:  # since Python 3.13 its frames and the one that threw it in here keep each other alive
            ended.__traceback__ = ended.__context__ = None
        ended = None
    try:
        if failure is not None:
            raise failure
    finally:
        failure = None  # a frame and the exception raised from it would keep each other alive


@asynccontextmanager
async def closing_with(close: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await `close()` when the body ends. If the body raised, a cancelled close does not replace its error."""
    try:
        yield
    except BaseException:  # close after any exception
        with suppress(trio.Cancelled):
            await close()
        raise
    await close()


def server_ends() -> bool:
    """Return whether this task, which serves a connection, is being cancelled: so ends a server; a client leaves."""
    return trio.current_effective_deadline() == -math.inf


def own_clock() -> Callable[[], float]:
    """Return what tells the time as `trio.current_time` does within this run of Trio, for a third of the price."""
    return trio.lowlevel.current_clock().current_time


def innermost_scope(task: trio.lowlevel.Task) -> object:
    """Return an object that identifies the task's innermost cancel scope. Trio has no public name for it."""
    return getattr(task, "_cancel_status", None)


def is_cancelled(scope: object) -> bool:
    """Return whether an `innermost_scope` is being cancelled, by itself or from outside."""
    known: bool | None = getattr(scope, "effectively_cancelled", None)
    return trio.current_effective_deadline() == -math.inf if known is None else known


def split_own_failures(error: BaseException, around: object) -> tuple[BaseException | None, BaseException | None]:
    """Split what code raised: return its own failure, and the cancellation that came from outside of the code.

    `around` is the `innermost_scope` in which the code was called. The error is raised again if it is or holds a
    `KeyboardInterrupt`, or if the code's coroutine was closed outside of Trio, where it is not possible to wait.
    """
    crash, cancelled = split_cancelled(error)
    if crash is not None and _is_interrupt(crash):
        raise error
    if cancelled is not None and not is_cancelled(around):
        return error, None
    return crash, cancelled


def _is_interrupt(error: BaseException) -> bool:
    """Return whether what users' code raised ends more than that code: an interrupt, or a close outside of Trio."""
    if any(isinstance(each, KeyboardInterrupt) for each in leaves(error)):
        return True
    return isinstance(error, GeneratorExit) and not trio.lowlevel.in_trio_task()


def has_left_open(task: trio.lowlevel.Task, around: object, nurseries: int = 0) -> bool:
    """Return whether code has left a cancel scope or a nursery open in this task; arguments as for `abandon_left_open`.

    An inner scope may have been closed already, with an error. Then only the nursery shows it.
    """
    seen: Any = task  # Trio's public attribute makes a list each time, and this runs after each request
    try:
        return seen._cancel_status is not around or seen._child_nurseries[nurseries:] != []
    except AttributeError:  # another version of Trio
        return False


def abandon_left_open(task: trio.lowlevel.Task, around: object, nurseries: int = 0) -> RuntimeError | None:
    """Return an error if code has left a cancel scope or a nursery open in this task, else None.

    Tasks in such a nursery are cancelled and unwind on their own, as when the task ends. In that case, Trio would also
    raise an error around the task, which would end everything that runs beside it.

    `around` is its `innermost_scope` before: closing that scope raises a RuntimeError now.
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
    """Return what `await function(*args, **options)` returns, for a function of users' code.

    Raises what the function raises, or a RuntimeError if that is no Exception or it left something open. A cancellation
    from outside and KeyboardInterrupt are raised on.
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
                crash = split_own_failures(error, around)[
                    0
                ]  # its other half may be the error, which would keep itself alive
                try:
                    if left is None and crash is None:
                        raise  # only cancelled
                    if left is None and isinstance(crash, Exception):
                        raise crash from crash.__cause__
                    if left is None:
                        left = RuntimeError(f"{named(function)} raised {type(unwrap_single(crash or error)).__name__}")
                    if left.__cause__ is None:
                        left.__cause__ = error
                    raise left from left.__cause__
                finally:
                    del crash  # a frame and the exception raised from it would keep each other alive
            finally:
                if left is None:
                    left = abandon_left_open(task, around, nurseries)
    except RuntimeError:
        if left is None:
            raise
        raise left from left.__cause__  # instead of Trio's error about the scopes
    finally:
        left = None


def named(function: object) -> str:
    """Return the name of a function, for people."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", function))
