"""Turns of the event loop for large messages, so that other tasks run between them."""

from __future__ import annotations

from typing import Final

import trio

_READS: Final = 8  # reads of messages larger than one read, in one turn of the event loop


class ReadTurns:
    """Lets only a few reads of large messages happen per turn of the event loop, so that other tasks wait for few."""

    __slots__ = ("_left", "_readers")

    def __init__(self) -> None:
        self._left = _READS
        self._readers = trio.lowlevel.ParkingLot()

    async def wait(self) -> None:
        """Wait before reading more of a large message."""
        while not self._left:
            await self._readers.park()
        self._left -= 1
        if not self._left:
            trio.lowlevel.current_trio_token().run_sync_soon(self._refill, idempotent=True)

    def _refill(self) -> None:
        """Allow the next reads, in the next turn of the event loop."""
        self._left = _READS
        self._readers.unpark(count=_READS)
