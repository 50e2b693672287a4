"""Text that arrives in pieces, gathered without ever being moved.

A buffer that grows is moved now and then, and where the memory around it is full of holes each place it had stays
resident: a text of 4 MiB was seen to cost 8. Here what is full stays where it is, and another block begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs

from trimcp.wire.jsonrpc import IdScanner

# Bytes of a block: enough that malloc maps it by itself and gives it back at once, little beside a large text.
_BLOCK: Final = 256 * 1024


@attrs.define(eq=False, repr=False)
class Gathered:
    """The beginning of a text whose end has not come. Many tiny pieces cost no more than the bytes in them.

    Attributes:
        size: bytes of it that are here.
    """

    size: int = attrs.field(init=False, default=0)
    _blocks: list[bytearray] = attrs.field(init=False, factory=list)
    _full: int = attrs.field(init=False, default=_BLOCK)  # the size at which a new block begins
    _tail: bytearray = attrs.field(init=False, factory=bytearray)

    def add(self, piece: bytes) -> None:
        """Keep one more piece."""
        self._tail += piece
        self.size += len(piece)
        if self.size >= self._full:
            self._blocks.append(self._tail)
            self._tail = bytearray()
            self._full = self.size + _BLOCK

    def endswith(self, end: bytes) -> bool:
        """Return whether the last byte that has arrived is this."""
        return (self._tail or (self._blocks[-1] if self._blocks else b"")).endswith(end)

    def beginning(self, size: int) -> bytes:
        """Return its first bytes, at most so many, and at most those of its first block."""
        return bytes((self._blocks[0] if self._blocks else self._tail)[:size])

    def take(self) -> bytes:
        """Return all of it, and forget it."""
        if self._blocks:
            return b"".join(self.drain())
        text = bytes(self._tail)
        self._tail.clear()
        self.size = 0
        return text

    def drain(self) -> Iterator[bytearray]:
        """Return it block by block, each of which is forgotten as it is taken."""
        blocks, self._blocks = self._blocks, []
        blocks.append(self._tail)
        self._tail, self.size, self._full = bytearray(), 0, _BLOCK
        blocks.reverse()
        while blocks:
            yield blocks.pop()

    def scan(self) -> IdScanner:
        """Show it to a scanner block by block, and forget it: what is beyond a limit is needed for its id alone."""
        scanner = IdScanner()
        for block in self.drain():
            scanner.feed(block)
        return scanner
