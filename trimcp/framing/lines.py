"""Newline-delimited JSON, as stdio and every other byte stream carry it (MCP specification, "stdio").

Takes chunks as they come and gives messages; a line beyond the limit costs no more than the limit, and ends nothing
unless it goes on for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from trimcp.framing.gathering import Gathered
from trimcp.wire.jsonrpc import (
    DEFAULT_LIMITS,
    PATIENCE,
    Batch,
    IdScanner,
    Message,
    ParseLimits,
    oversize,
    parse,
    too_large,
)

LINES: Final = 128
"""Lines that may be looked at at once: one read can bring thirty thousand, and others wait meanwhile."""


@attrs.define(eq=False, repr=False)
class LineDecoder:
    """Cuts a stream into lines and parses them.

    Args:
        max_size: bytes one message may have, without its line ending. It may be changed.
        limits: what else one message may cost.
        at_once: lines that `feed` looks at in one call, the others being `behind`; a batch (2025-03-26) counts as many.
            -1 for all of them.

    Each message comes with the bytes of its line. A line that is no message is a `Malformed` like any other. A line
    beyond `max_size` is one with the reason "size", as soon as its id could be read, else without an id at its end;
    then the stream goes on. Blank lines are ignored, and a carriage return before the line ending does no harm.

    Attributes:
        behind: what has arrived and was not looked at: feed nothing to go on, once others have had their turn. Always
            empty where `at_once` is -1.
        endless: a line has sixteen times the bytes it may have. It was reported, and nothing more is read.
    """

    max_size: int
    _limits: ParseLimits = DEFAULT_LIMITS
    _at_once: int = -1
    _tail: Gathered = attrs.field(init=False, factory=Gathered)  # the beginning of the line under way
    _scanner: IdScanner | None = attrs.field(init=False, default=None)  # set while that is beyond the limit
    _skipped: int = attrs.field(init=False, default=0)
    _told: bool = attrs.field(init=False, default=False)  # what it stands for was returned already
    behind: bytes = attrs.field(init=False, default=b"")
    endless: bool = attrs.field(init=False, default=False)

    @property
    def held(self) -> int:
        """Bytes of an unfinished line kept in memory, at most `max_size` and a carriage return."""
        return self._tail.size

    def feed(self, chunk: bytes) -> list[tuple[Message, int]]:
        """The messages that these bytes complete, in order, each with its size."""
        if self.behind:
            chunk, self.behind = self.behind + chunk, b""
        lines = chunk.split(b"\n", self._at_once)
        rest = lines.pop()
        messages: list[tuple[Message, int]] = []
        if len(lines) == self._at_once and b"\n" in rest:
            self.behind, rest = rest, b""
        if lines and (self._tail.size or self._scanner is not None):
            self._finish(lines.pop(0), messages)
        for at, line in enumerate(lines, 1):
            if self._line(line, messages) and at < len(lines) and self._at_once > 0:
                # It may hold a hundred messages, so the lines behind it wait for the next time.
                self.behind = b"\n".join((*lines[at:], self.behind or rest))
                return messages
        if rest:
            self._begin(rest)
            if self._scanner is not None:
                self._tell(messages)
        return messages

    def eof(self) -> list[tuple[Message, int]]:
        """The message that the end of the stream completes, if its last line had no line ending."""
        messages: list[tuple[Message, int]] = []
        if self._tail.size or self._scanner is not None:
            self._finish(b"", messages)
        return messages

    def _begin(self, piece: bytes) -> None:
        """Keep a piece of a line whose end has not come; beyond the limit show it to the scanner instead."""
        if self._scanner is None and self._tail.size + len(piece) <= self.max_size + 1:
            self._tail.add(piece)
            return
        if self._scanner is None:
            self._skipped, self._scanner = self._tail.size, self._tail.scan()
        self._scanner.feed(piece)
        self._skipped += len(piece)

    def _tell(self, messages: list[tuple[Message, int]]) -> None:
        """Report that the line under way is too large once its id is known, or once it has gone on for too long."""
        scanner = self._scanner
        self.endless = self._skipped > PATIENCE * self.max_size
        if scanner is not None and not self._told and (self.endless or scanner.id is not None):
            self._told = True
            messages.append((oversize(scanner, self.max_size), self._skipped))

    def _finish(self, piece: bytes, messages: list[tuple[Message, int]]) -> None:
        """The line under way ends with this piece."""
        self._begin(piece)
        if self._scanner is None:
            if self._tail.size <= self.max_size or self._tail.endswith(b"\r"):
                self._line(self._tail.take(), messages)
                return
            # By one byte. A copy of what is thrown away would cost as much again.
            self._skipped, self._scanner = self._tail.size, self._tail.scan()
        if not self._told:
            messages.append((oversize(self._scanner, self.max_size), self._skipped))
        self._scanner, self._told = None, False

    def _line(self, line: bytes, messages: list[tuple[Message, int]]) -> bool:
        """Add what a whole line holds. Returns whether it is a batch."""
        size = len(line)
        if size > self.max_size and size - line.endswith(b"\r") > self.max_size:
            messages.append((too_large(line, self.max_size), size))
        elif line and not line.isspace():
            message = parse(line, self._limits)
            messages.append((message, size))
            return type(message) is Batch
        return False


def encode_lines(messages: Sequence[bytes]) -> bytes:
    """Encoded messages as lines, ready for one write."""
    return b"\n".join((*messages, b""))
