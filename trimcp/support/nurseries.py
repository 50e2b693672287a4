"""Nurseries for background tasks of a block, closing with a block, and unwrapping exception groups of nurseries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

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
