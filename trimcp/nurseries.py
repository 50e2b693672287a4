"""Nurseries for tasks that serve a body of code, what is closed after it, and the exceptions of nurseries."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import trio


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
    """Merge the body's failure with the nursery's, and return what should leave the block; None for a cancellation.

    One failure leaves as itself, without the groups that nurseries put around it; two leave as a group called `text`.
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


@asynccontextmanager
async def closing_with(close: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await `close()` when the body ends. The body's own exception tells more than a cancellation of the close."""
    try:
        yield
    except BaseException:  # the close is due whatever it was
        with suppress(trio.Cancelled):
            await close()
        raise
    await close()
