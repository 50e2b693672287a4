"""The road back of one request under an ASGI server: what the face wrote, until the server took it.

The face's side is `Reply` and never blocks; the host's side is a pump that takes what waits, piece by piece.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs
import trio

from trimcp.transports.http.model import Response

__all__ = ["AsgiReply"]

_PIECE: Final = 64 * 1024


@attrs.define(eq=False)
class AsgiReply:
    """A `Reply` whose bytes are taken by a pump.

    Args:
        low_water: bytes that may still wait when whoever waits for room goes on.

    Attributes:
        head: the response as the face began it, or None until then.
        length: bytes of the whole body if it is known, else None.
        finished: whether the face has said everything.
        aborted: whether the face wants the connection cut.
        lost: whether the client left before the end.
        waiting: bytes written that the server has not taken yet.
    """

    low_water: int
    head: Response | None = attrs.field(init=False, default=None)
    length: int | None = attrs.field(init=False, default=None)
    finished: bool = attrs.field(init=False, default=False)
    aborted: bool = attrs.field(init=False, default=False)
    lost: bool = attrs.field(init=False, default=False)
    waiting: int = attrs.field(init=False, default=0)
    _chunks: deque[bytes] = attrs.field(init=False, factory=deque)
    _offset: int = attrs.field(init=False, default=0)
    _pump: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _writers: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    # For the face

    def send(self, response: Response) -> None:
        """Send a whole response."""
        self.length = len(response.body)
        self.start(response)
        self.finish()

    def start(self, response: Response) -> None:
        """Send the head of a response of unknown length, and the beginning of its body."""
        self.head = response
        self.write(response.body)
        self._pump.unpark_all()

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        if data and not self.gone:
            self._chunks.append(data)
            self.waiting += len(data)
            self._pump.unpark_all()

    def finish(self, data: bytes = b"") -> None:
        """Send the rest of the body and end the response."""
        self.write(data)
        self.finished = True
        self._pump.unpark_all()

    def abort(self) -> None:
        """Cut the connection, as far as the server does that for a response without an end."""
        self.aborted = True
        self._forget()

    @property
    def gone(self) -> bool:
        """Whether the client has left, or the response is finished."""
        return self.finished or self.lost or self.aborted

    async def room(self) -> None:
        """Wait until little waits, or the client is gone."""
        await trio.lowlevel.checkpoint()
        while self.waiting > self.low_water and not self.lost and not self.aborted:
            await self._writers.park()

    # For the pump

    async def begin(self) -> Response | None:
        """Wait for the head of the response, and return it; None if there will be none."""
        while self.head is None and not self.aborted:
            await self._pump.park()
        return None if self.aborted else self.head

    async def news(self) -> None:
        """Wait for something to do: bytes to take, the end, or an abort."""
        while not (self._chunks or self.finished or self.aborted):
            await self._pump.park()

    def take(self) -> bytes:
        """Return what to hand over next, of bounded size and b"" if nothing waits. It counts until `taken`."""
        if not self._chunks:
            return b""
        first, offset = self._chunks[0], self._offset
        if len(first) - offset > _PIECE:
            self._offset += _PIECE
            return first[offset : offset + _PIECE]
        self._chunks.popleft()
        self._offset = 0
        parts, size = [first[offset:]], len(first) - offset
        while self._chunks and size + len(self._chunks[0]) <= _PIECE:
            parts.append(self._chunks.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    def taken(self, size: int) -> None:
        """Note that the server has taken this much."""
        self.waiting = max(0, self.waiting - size)
        if self.waiting <= self.low_water:
            self._writers.unpark_all()

    def lose(self) -> None:
        """Note that the client left: what waits goes nowhere."""
        self.lost = True
        self._forget()

    def _forget(self) -> None:
        self._chunks.clear()
        self.waiting = 0
        self._pump.unpark_all()
        self._writers.unpark_all()
