"""A receive channel that keeps each item once: what has changed is state, and a slow reader costs no more than that."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, TypeVar

import attrs
import trio

from trimcp.session.session import Session

__all__ = ["Changes"]

_MOST_CHANGES: Final = 10_000

ChangeT = TypeVar("ChangeT", bound=Hashable)


@attrs.define(eq=False, repr=False)
class Changes(trio.abc.ReceiveChannel[ChangeT]):
    """A receive channel of what has changed: each change once, in the order in which they came.

    Attributes:
        end: what is raised once all were received, or None while more may come.
    """

    end: BaseException | None = attrs.field(init=False, default=None)
    _kept: dict[ChangeT, None] = attrs.field(init=False, factory=dict)
    _waiting: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def receive(self) -> ChangeT:
        """Wait for the next one, or raise the end. Cancelling it loses nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._wait()
        change = next(iter(self._kept))
        del self._kept[change]
        await trio.lowlevel.cancel_shielded_checkpoint()
        return change

    async def receive_all(self) -> list[ChangeT]:
        """Wait for one, and return all there are; else as `receive`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._wait()
        changes = list(self._kept)
        self._kept.clear()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return changes

    async def _wait(self) -> None:
        while not self._kept:
            if self.end is not None:
                raise self.end
            await self._waiting.park()

    def add(self, change: ChangeT) -> None:
        """Keep a change, unless it is over."""
        if self.end is None:
            self._kept[change] = None
            self._waiting.unpark_all()

    def keep(self, change: ChangeT, size: int, session: Session) -> None:
        """Keep a change, or drop and count it as the session's.

        Args:
            change: what has changed.
            size: bytes of the message that said so, as far as they are its own.
            session: which it came over.
        """
        if len(self._kept) < session.limits.kept_of(_MOST_CHANGES, size) or change in self._kept:
            self.add(change)
        elif self.end is None:
            session.counts.drop("changes")

    def finish(self, end: BaseException) -> None:
        """Keep no more. Of several ends the first counts."""
        if self.end is None:
            self.end = end
        self._waiting.unpark_all()

    async def aclose(self) -> None:
        """Keep no more, and forget what there is."""
        self._kept.clear()
        self.end = trio.ClosedResourceError()
        self._waiting.unpark_all()
        await trio.lowlevel.checkpoint()
