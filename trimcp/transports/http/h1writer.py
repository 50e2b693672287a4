"""The writing side of a connection: at once if the socket takes it, else by a task that lives while it refuses.

Knows bytes and no HTTP. Nothing here bounds what waits: whoever writes much looks at `waiting` and waits for `room`.
"""

from __future__ import annotations

import logging
from typing import Protocol

import trio

from trimcp.transports.http.deadlines import Deadline, Deadlines
from trimcp.transports.http.limits import HttpLimits
from trimcp.transports.http.wires import Wire

__all__ = ["Writer", "WriterOwner"]

log: logging.Logger = logging.getLogger("trimcp.http")


class WriterOwner(Protocol):
    """Whose writer it is."""

    def drained(self) -> None:
        """Note that what waited was taken."""

    def broke(self) -> None:
        """Note that nothing can be written any more."""


class Writer:
    """Writes to one wire.

    Args:
        owner: told what happens. Forgotten by `close`.
        wire: where to.
        nursery: outlives the connection; a task runs in it while the wire refuses.
        deadlines: watch over a peer that reads nothing.
        limits: `stall_timeout` and `low_water`.

    Attributes:
        broken: whether what is written goes nowhere: the peer is gone, reads nothing, or this was closed.
        undelivered: bytes that waited when it broke.
    """

    __slots__ = (
        *("_deadlines", "_limits", "_nursery", "_owner", "_pending", "_room", "_scope", "_wire"),
        *("broken", "undelivered"),
    )

    def __init__(
        self, owner: WriterOwner, wire: Wire, nursery: trio.Nursery, deadlines: Deadlines, limits: HttpLimits
    ) -> None:
        self._owner: WriterOwner | None = owner
        self._wire = wire
        self._nursery = nursery
        self._deadlines = deadlines
        self._limits = limits
        self._pending = bytearray()
        self._scope: trio.CancelScope | None = None
        self._room: trio.lowlevel.ParkingLot | None = None
        self.broken: bool = False
        self.undelivered: int = 0

    @property
    def waiting(self) -> int:
        """Bytes the system has not taken yet."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Write at once what the wire takes, and let the rest wait. Never blocks, and raises nothing."""
        if self._pending:
            self._pending += data
            return
        if self.broken:
            return
        try:
            taken = self._wire.try_write(data)
        except trio.BrokenResourceError:
            self.give_up()
            return
        if taken < len(data):
            self._pending += memoryview(data)[taken:]
            self._nursery.start_soon(self._drain)

    async def room(self) -> None:
        """Wait until little enough waits, or nothing can be written any more."""
        while len(self._pending) > self._limits.low_water:
            if self._room is None:
                self._room = trio.lowlevel.ParkingLot()
            await self._room.park()

    def give_up(self) -> None:
        """Write nothing any more, not even what waits."""
        if self.broken:
            return
        self.broken = True
        self.undelivered = len(self._pending)
        self._pending.clear()
        if self._scope is not None:
            self._scope.cancel(reason="the connection has ended")
        if self._room is not None:
            self._room.unpark_all()
        if self._owner is not None:
            self._owner.broke()

    def close(self) -> None:
        """Give up without telling the owner, and forget it."""
        self._owner = None
        self.give_up()

    async def _drain(self) -> None:
        stall = self._deadlines.new(self.give_up)
        try:
            with trio.CancelScope() as self._scope:
                await self._write_pending(stall)
            self._scope = None  # for `drained` may write again
            if not self.broken and self._owner is not None:
                self._owner.drained()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.give_up()
        except Exception:
            log.exception("writing a response crashed")
            self.give_up()
        finally:
            stall.close()

    async def _write_pending(self, stall: Deadline) -> None:
        pending = self._pending
        while pending:
            stall.set(self._limits.stall_timeout)
            taken = await self._wire.write_some(pending)
            del pending[:taken]
            if self._room is not None and len(pending) <= self._limits.low_water:
                self._room.unpark_all()
