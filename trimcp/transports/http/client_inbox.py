"""What has arrived on any number of streams and waits for the one reader. Knows nothing of messages but their size."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs
import trio

from trimcp.channel import Incoming

__all__ = ["Inbox"]


@attrs.define(eq=False)
class Inbox:
    """A bounded queue of incoming messages.

    Args:
        max_messages: how many may wait before streams are read no further.
        max_bytes: what they may weigh. One message may exceed it, or a large one could never arrive.
    """

    max_messages: int = 1_024
    max_bytes: int = 4 * 1024 * 1024
    _queue: deque[Incoming] = attrs.field(init=False, factory=deque)
    _bytes: int = attrs.field(init=False, default=0)
    _ended: bool = attrs.field(init=False, default=False)
    _closed: bool = attrs.field(init=False, default=False)
    _receiving: bool = attrs.field(init=False, default=False)
    _reader: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _streams: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._ended or self._closed

    async def put(self, incoming: Incoming) -> None:
        """Add a message once there is room. Cancelled, it has added nothing."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self.ended and (len(self._queue) >= self.max_messages or self._bytes >= self.max_bytes):
            await self._streams.park()
        self.post(incoming)

    def post(self, incoming: Incoming) -> None:
        """Add a message now: a word about a request of ours, of which there are never more than of those."""
        if self.ended:
            return
        self._queue.append(incoming)
        self._bytes += incoming.size
        self._reader.unpark()

    async def receive(self) -> Sequence[Incoming]:
        """Wait for messages and return all there are; see `MessageChannel.receive`."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this channel")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            waited = False
            while not self._queue and not self.ended:
                waited = True
                await self._reader.park()
            if not waited:
                await trio.lowlevel.cancel_shielded_checkpoint()
            if self._closed:
                raise trio.ClosedResourceError("this channel was closed")
            if not self._queue:
                raise trio.EndOfChannel("the server has ended its stream")
            batch = list(self._queue)
            self._queue.clear()
            self._bytes = 0
            self._streams.unpark_all()
            return batch
        finally:
            self._receiving = False

    def end(self) -> None:
        """Nothing more will come; what has come is still received."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Throw away what waits: nobody will receive it."""
        self._closed = True
        self._queue.clear()
        self._bytes = 0
        self._wake()

    def _wake(self) -> None:
        self._reader.unpark_all()
        self._streams.unpark_all()
