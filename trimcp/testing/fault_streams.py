"""Byte streams that misbehave on purpose: cut, stalled, garbled, a few bytes at a time. They know no messages."""

from __future__ import annotations

import random

import attrs
import trio

__all__ = ["CutStream", "FaultyStream"]

_ANY = 65536  # bytes


@attrs.define(eq=False)
class CutStream(trio.abc.SendStream):
    """A byte stream that breaks after so many bytes, in the middle of a line if need be.

    Args:
        stream: the one that does the work.
        after: bytes that still go through.
    """

    stream: trio.abc.SendStream
    after: int

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send what may still go through, then close the stream and raise `trio.BrokenResourceError`."""
        allowed = bytes(data)[: self.after]
        self.after -= len(allowed)
        await self.stream.send_all(allowed)
        if len(allowed) < len(data):
            await self.stream.aclose()
            raise trio.BrokenResourceError("cut on purpose")

    async def wait_send_all_might_not_block(self) -> None:
        """Ask the stream underneath."""
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Close the stream underneath."""
        await self.stream.aclose()


@attrs.define(eq=False)
class FaultyStream(trio.abc.HalfCloseableStream):
    """A two-way byte stream that spoils pieces of what goes through it, both ways.

    Args:
        stream: the one that does the work.
        seed: the same seed does the same to the same pieces.
        small: bytes of the largest piece that is read or written at once; 0 for any.
        stall: chance that a piece waits `stall_seconds` of Trio's clock.
        garble: chance that a byte of the piece is another one.
        cut: chance that the connection breaks in place of this piece.
    """

    stream: trio.abc.Stream
    seed: int = attrs.field(default=0, kw_only=True)
    small: int = attrs.field(default=0, kw_only=True)
    stall: float = attrs.field(default=0, kw_only=True)
    stall_seconds: float = attrs.field(default=1, kw_only=True)
    garble: float = attrs.field(default=0, kw_only=True)
    cut: float = attrs.field(default=0, kw_only=True)
    _sending: random.Random = attrs.field(init=False)
    _receiving: random.Random = attrs.field(init=False)
    _broken: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._sending = random.Random(f"{self.seed}/send")
        self._receiving = random.Random(f"{self.seed}/receive")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send piece by piece what the faults leave of it; see `trio.abc.SendStream.send_all`."""
        rest = bytes(data)
        while rest:
            size = self._size(self._sending, len(rest))
            garble = await self._hold_up(self._sending)
            await self.stream.send_all(_garbled(self._sending, rest[:size]) if garble else rest[:size])
            rest = rest[size:]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return a piece as the faults leave it; see `trio.abc.ReceiveStream.receive_some`. Cancelling loses none."""
        size = self._size(self._receiving, _ANY if max_bytes is None else max_bytes)
        garble = await self._hold_up(self._receiving)
        piece = bytes(await self.stream.receive_some(size))
        return _garbled(self._receiving, piece) if garble else piece

    def _size(self, draw: random.Random, most: int) -> int:
        return min(most, draw.randint(1, self.small)) if self.small else most

    async def _hold_up(self, draw: random.Random) -> bool:
        """Do what the faults do before a piece, and return whether it is to be garbled."""
        stall, garble, cut = (draw.random() < chance for chance in (self.stall, self.garble, self.cut))
        if stall:
            await trio.sleep(self.stall_seconds)
        if cut or self._broken:
            self._broken = True
            await self.stream.aclose()
            raise trio.BrokenResourceError("cut on purpose")
        return garble

    async def wait_send_all_might_not_block(self) -> None:
        """Ask the stream underneath."""
        await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        """End what we send, where the stream underneath can."""
        if not isinstance(self.stream, trio.abc.HalfCloseableStream):
            raise NotImplementedError("this stream cannot be closed in one direction")
        await self.stream.send_eof()

    async def aclose(self) -> None:
        """Close the stream underneath."""
        await self.stream.aclose()


def _garbled(draw: random.Random, piece: bytes) -> bytes:
    if not piece:
        return piece
    at = draw.randrange(len(piece))
    return piece[:at] + bytes([piece[at] ^ draw.randrange(1, 256)]) + piece[at + 1 :]
