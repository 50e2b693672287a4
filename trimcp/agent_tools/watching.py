"""The channel of one watcher of a context: every update in order, or the whole state for a watcher that is slow.

It is the same at the service, for its handlers and its peers, and in a client.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar, TypeVar

import attrs
import trio

EventT = TypeVar("EventT")


@attrs.define(eq=False, repr=False)
class WatchChannel(trio.abc.ReceiveChannel[EventT]):
    """Receives the state, then each update, at last "destroyed"; then it ends (`trio.EndOfChannel`).

    A watcher that lags behind is sent the whole state in place of the updates that wait, so none costs more memory than
    a few updates, and each of them sees the last state.
    """

    most: ClassVar[int] = 64  # updates that wait for a watcher,
    most_bytes: ClassVar[int] = 64 * 1024  # and their bytes; beyond either, the whole state takes their place

    _whole: Callable[[], EventT]  # returns the state as it is
    replaced: int = attrs.field(init=False, default=0)  # updates that were replaced by the whole state
    _behind: bool = attrs.field(init=False, default=True)  # whether the next event is the whole state
    _updates: deque[tuple[EventT, int]] | None = attrs.field(init=False, default=None)
    _bytes: int = attrs.field(init=False, default=0)
    _last: EventT | None = attrs.field(init=False, default=None)
    _end: Exception | None = attrs.field(init=False, default=None)
    _waiting: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def add(self, event: EventT, size: int) -> None:
        """Add an update, whose patch has `size` bytes."""
        if self._end is not None:
            return
        if self._behind:
            self.replaced += 1  # the state, once it is received, includes it
            return
        waiting = self._updates
        if waiting is None:
            waiting = self._updates = deque()
        if len(waiting) >= self.most or (waiting and self._bytes + size > self.most_bytes):
            self.replaced += 1
            self.fall_behind()
            return
        waiting.append((event, size))
        self._bytes += size
        self._wake()

    def start_over(self) -> None:
        """Send the whole state next: it did not come of the updates."""
        if self._end is None:
            self.fall_behind()
            self._behind = True
            self._wake()

    def fall_behind(self) -> None:
        """Replace the updates that wait by the whole state."""
        if not self._behind and self._updates:
            self.replaced += len(self._updates)
            self._bytes, self._behind, self._updates = 0, True, None

    def finish(self, last: EventT | None, end: Exception | None = None) -> None:
        """End it, after what waits and after this event; by default in order. A second call has no effect."""
        if self._end is None:
            self._last, self._end = last, end or trio.EndOfChannel()
            self._wake()

    def _wake(self) -> None:
        """Have somebody take what waits."""
        if self._waiting:
            self._waiting.unpark_all()

    async def receive(self) -> EventT:
        """Wait for the next event. Cancelling this loses nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return await self._next()

    async def _next(self) -> EventT:
        while (event := self.next_now()) is None:
            if self._end is not None:
                raise self._end
            await self._waiting.park()
        await trio.lowlevel.cancel_shielded_checkpoint()
        return event

    @property
    def over(self) -> bool:
        """Whether it has ended, and nothing waits any more."""
        return self._end is not None and not (self._behind or self._updates or self._last)

    def next_now(self) -> EventT | None:
        """Return the next event, or None if none waits."""
        if self._behind:
            self._behind = False
            return self._whole()
        if self._updates:
            event, size = self._updates.popleft()
            self._bytes -= size
            if not self._updates:
                self._updates = None  # an empty deque takes 600 bytes
            return event
        last, self._last = self._last, None
        return last

    async def aclose(self) -> None:
        """Receive nothing more."""
        self._behind, self._updates, self._last, self._end = False, None, None, trio.ClosedResourceError()
        self._waiting.unpark_all()
        await trio.lowlevel.checkpoint()
