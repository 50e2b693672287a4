"""A cancellation that was kept, as by a cache whose first user was cancelled: it means nobody else."""

from __future__ import annotations

import trio

__all__ = ["kept_cancellation"]


async def kept_cancellation() -> trio.Cancelled:
    """Be cancelled, and return what was raised."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            return error
    raise AssertionError
