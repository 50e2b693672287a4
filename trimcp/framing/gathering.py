"""Collects text that arrives in pieces, without moving it.

A growing buffer is moved from time to time, and in a fragmented heap its former places stay resident: a text of 4 MiB
was measured to take 8. Here full blocks stay where they are, and a new one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import attrs

from trimcp.support.slotted import slotted
from trimcp.wire.jsonrpc import IdScanner

# Bytes of a block: enough for malloc to map it separately and return it at once, little compared with a large text.
_BLOCK: Final = 256 * 1024


@slotted
class Gathered:
    """The received part of an incomplete text. Many tiny pieces take no more memory than their bytes."""

    size: int = attrs.field(init=False, default=0)  # its bytes
    _blocks: list[bytearray] = attrs.field(init=False, factory=list)
    _full: int = attrs.field(init=False, default=_BLOCK)  # the size at which a new block begins
    _tail: bytearray = attrs.field(init=False, factory=bytearray)

    def add(self, piece: bytes) -> None:
        """Append a piece."""
        self._tail += piece
        self.size += len(piece)
        if self.size >= self._full:
            self._blocks.append(self._tail)
            self._tail = bytearray()
            self._full = self.size + _BLOCK

    def endswith(self, end: bytes) -> bool:
        """Return whether the last received byte is `end`."""
        return (self._tail or (self._blocks[-1] if self._blocks else b"")).endswith(end)

    def beginning(self, size: int) -> bytes:
        """Return its first bytes: at most `size`, and only from the first block."""
        return bytes((self._blocks[0] if self._blocks else self._tail)[:size])

    def take(self) -> bytes:
        """Return all of it, and clear it."""
        if self._blocks:
            return b"".join(self.drain())
        text = bytes(self._tail)
        self._tail.clear()
        self.size = 0
        return text

    def drain(self) -> Iterator[bytearray]:
        """Yield it block by block; each block is released when it is taken."""
        blocks, self._blocks = self._blocks, []
        blocks.append(self._tail)
        self._tail, self.size, self._full = bytearray(), 0, _BLOCK
        blocks.reverse()
        while blocks:
            yield blocks.pop()

    def scan(self) -> IdScanner:
        """Feed it to a scanner block by block, and clear it: of too large text only the id is needed."""
        scanner = IdScanner()
        for block in self.drain():
            scanner.feed(block)
        return scanner
