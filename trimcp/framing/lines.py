"""Newline-delimited JSON, as stdio and every other byte stream carry it (MCP specification, "stdio").

Takes chunks as they come and gives messages; a line beyond the limit costs no more than the limit and ends
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from trimcp.framing.gathering import Gathered
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, IdScanner, Limits, Message, oversize, parse

__all__ = ["Decoder", "encode_lines"]


class Decoder:
    """Cuts a stream into lines and parses them.

    Args:
        max_size: bytes one message may have, without its line ending.
        limits: what else one message may cost.

    Each message comes with the bytes of its line. A line that is no message is a `Malformed` like any
    other, a line beyond `max_size` is one with the reason "size" and its id if that could be read on the way;
    then the stream goes on. Blank lines are ignored, and a carriage return before the line ending does no
    harm.
    """

    __slots__ = ("_limits", "_max_size", "_scanner", "_skipped", "_tail")

    def __init__(self, max_size: int, limits: Limits = DEFAULT_LIMITS) -> None:
        self._max_size = max_size
        self._limits = limits
        self._tail = Gathered()  # the beginning of the line under way
        self._scanner: IdScanner | None = None  # set while the line under way is beyond the limit
        self._skipped = 0

    @property
    def held(self) -> int:
        """Bytes of an unfinished line kept in memory, at most `max_size` and a carriage return."""
        return self._tail.size

    def feed(self, chunk: bytes) -> list[tuple[Message, int]]:
        """The messages that these bytes complete, in order, each with its size."""
        lines = chunk.split(b"\n")
        rest = lines.pop()
        messages: list[tuple[Message, int]] = []
        if lines and (self._tail.size or self._scanner is not None):
            self._finish(lines.pop(0), messages)
        for line in lines:
            self._line(line, messages)
        if rest:
            self._begin(rest)
        return messages

    def eof(self) -> list[tuple[Message, int]]:
        """The message that the end of the stream completes, if its last line had no line ending."""
        messages: list[tuple[Message, int]] = []
        if self._tail.size or self._scanner is not None:
            self._finish(b"", messages)
        return messages

    def _begin(self, piece: bytes) -> None:
        """Keep a piece of a line whose end has not come; beyond the limit show it to the scanner instead."""
        if self._scanner is None and self._tail.size + len(piece) <= self._max_size + 1:
            self._tail.add(piece)
            return
        if self._scanner is None:
            self._scanner = self._scan_tail()
        self._scanner.feed(piece)
        self._skipped += len(piece)

    def _scan_tail(self) -> IdScanner:
        """Show what was kept of the line under way to a scanner, and let go of it."""
        scanner = IdScanner()
        self._skipped = self._tail.size
        for block in self._tail.drain():
            scanner.feed(block)
        return scanner

    def _finish(self, piece: bytes, messages: list[tuple[Message, int]]) -> None:
        """The line under way ends with this piece."""
        self._begin(piece)
        if self._scanner is None:
            if self._tail.size <= self._max_size or self._tail.endswith(b"\r"):
                self._line(self._tail.take(), messages)
                return
            # By one byte. A copy of what is thrown away would cost as much again.
            self._scanner = self._scan_tail()
        messages.append((oversize(self._scanner, self._max_size), self._skipped))
        self._scanner = None

    def _line(self, line: bytes, messages: list[tuple[Message, int]]) -> None:
        size = len(line)
        if size > self._max_size and size - line.endswith(b"\r") > self._max_size:
            messages.append(self._oversize(line))
        elif line and not line.isspace():
            messages.append((parse(line, self._limits), size))

    def _oversize(self, line: bytes) -> tuple[Message, int]:
        scanner = IdScanner()
        scanner.feed(line)
        return oversize(scanner, self._max_size), len(line)


def encode_lines(messages: Sequence[bytes]) -> bytes:
    """Encoded messages as lines, ready for one write."""
    return b"\n".join((*messages, b""))
