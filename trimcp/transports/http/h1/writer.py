"""The writing side of a connection: writes at once what the socket takes, and the rest from a task.

A burst of events leaves in one write: a system call for each of a thousand would cost more than the events. Knows no
HTTP. Nothing here bounds what waits: whoever writes much looks at `waiting` and waits for `room`.
"""

from __future__ import annotations

import logging
import math
from typing import Final, Protocol

import trio

from trimcp.budget import Amount
from trimcp.channel import PeerProgress
from trimcp.transports.http.deadlines import Deadline, Deadlines
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.settings import HttpLimits

__all__ = ["H1Writer", "WriterOwner"]

log: logging.Logger = logging.getLogger("trimcp.http")

_BURST: Final = 0.001  # seconds after a piece that left at once in which others are gathered
_COUNTED: Final = 256 * 1024  # bytes taken by the peer after which the budget is told
_GATHERED: Final = 64 * 1024  # bytes that are not held back any longer to be gathered


class WriterOwner(Protocol):
    """Whose writer it is."""

    def drained(self) -> None:
        """Note that what waited was taken."""

    def broke(self) -> None:
        """Note that nothing can be written any more."""


class H1Writer:
    """Writes to one wire.

    Args:
        owner: told what happens. Forgotten by `close`.
        wire: where to.
        nursery: outlives the connection; a task runs in it while something waits.
        deadlines: watch over a peer that reads nothing.
        limits: `stall_timeout` and `low_water`.
        amount: counts what waits for the peer.

    Attributes:
        stalled: whether it broke because the peer read nothing for too long.
        broken: whether what is written goes nowhere: the peer is gone, reads nothing, or this was closed.
        undelivered: bytes that waited when it broke.
    """

    __slots__ = (
        *("_amount", "_deadlines", "_limits", "_nursery", "_owner", "_pending", "_room", "_scope", "_wire"),
        *("_began", "_followed", "_refused", "broken", "undelivered"),
        *("_progress", "_stall", "stalled"),
    )

    def __init__(
        self,
        owner: WriterOwner,
        wire: Wire,
        nursery: trio.Nursery,
        deadlines: Deadlines,
        limits: HttpLimits,
        amount: Amount | None = None,
    ) -> None:
        self._amount = Amount() if amount is None else amount
        self._owner: WriterOwner | None = owner
        self._wire = wire
        self._nursery = nursery
        self._deadlines = deadlines
        self._limits = limits
        self._pending = bytearray()
        self._scope: trio.CancelScope | None = None
        self._room: trio.lowlevel.ParkingLot | None = None
        self._began = -math.inf  # when the burst did, on Trio's clock
        self._followed = False  # whether a task will look after what waits
        self._refused = False  # whether the wire did: only that task writes now
        self._stall: Deadline | None = None  # while the wire refuses
        self._progress: PeerProgress | None = None  # likewise
        self.stalled: bool = False
        self.broken: bool = False
        self.undelivered: int = 0

    @property
    def waiting(self) -> int:
        """Bytes the system has not taken yet."""
        return len(self._pending)

    def write(self, data: bytes) -> None:
        """Write at once what the wire takes, and let the rest wait. Never blocks, and raises nothing."""
        if self._pending and not self._refused:
            if len(data) < _GATHERED:
                self._pending += data
                self._flush()
                return
            self._flush()
        if self._pending:
            self._pending += data
            self._amount.set(len(self._pending))
        elif data and not self.broken:
            taken = self._try(data)
            if taken < len(data) and not self.broken:
                self._pending += memoryview(data)[taken:]
                self._refused = True
                self._follow()
                self._amount.set(len(self._pending))

    def gather(self, data: bytes) -> None:
        """Write what more may follow soon: in one write with what else comes in this turn of Trio's loop.

        What comes alone leaves at once, and nothing waits for time to pass: it leaves when the turn ends, or, from
        somebody who does not let it end, with what is gathered a millisecond later.
        """
        if self._refused or len(data) >= _GATHERED:
            self.write(data)
        elif data and not self.broken:
            self._pending += data
            now = trio.current_time()
            if now - self._began >= _BURST or len(self._pending) >= _GATHERED:
                self._began = now
                self._flush()
            else:
                self._follow()

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
        self._amount.set(0)
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

    def _try(self, data: bytes | bytearray) -> int:
        """Return how much of it the wire took: everything, less, or nothing if it is broken."""
        try:
            return self._wire.try_write(data)
        except trio.BrokenResourceError:
            self.give_up()
            return 0

    def _flush(self) -> None:
        """Write what was gathered."""
        self._taken(self._try(self._pending))
        if self._pending:
            self._refused = True
            self._follow()

    def _taken(self, size: int) -> None:
        del self._pending[:size]
        if (counted := self._amount.counted) and (not self._pending or counted - len(self._pending) >= _COUNTED):
            self._amount.set(len(self._pending))
        if self._room is not None and len(self._pending) <= self._limits.low_water:
            self._room.unpark_all()

    def _follow(self) -> None:
        if not self._followed:
            self._followed = True
            self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        """Write what was gathered before this task had its turn, and what the wire refuses, as it takes it."""
        try:
            if self._pending and not self._refused:
                self._flush()
            if self._pending:
                with trio.CancelScope() as self._scope:
                    await self._write_pending()
                self._scope = None
            self._followed = self._refused = False  # first, for `drained` may write again
            if not self.broken and self._owner is not None:
                self._owner.drained()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.give_up()
        except Exception:
            log.exception("writing a response crashed")
            self.give_up()

    async def _write_pending(self) -> None:
        pending = self._pending
        self._stall = stall = self._deadlines.new(self._look)
        self._progress = progress = PeerProgress(self._limits.stall_timeout)
        try:
            while pending:
                stall.set(progress.begin(self._wire.progress()))
                self._taken(await self._wire.write_some(pending))
        finally:
            self._stall = self._progress = None
            stall.close()

    def _look(self) -> None:
        """Give up if the peer has taken nothing for too long; the system may have room again long after it began to."""
        if self._stall is None or self._progress is None:
            return
        wait = self._progress.look(self._wire.progress())
        if wait:
            self._stall.set(wait)
        else:
            self.stalled = True
            self.give_up()
