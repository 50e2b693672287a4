"""Newline-delimited JSON, for stdio and other byte streams (MCP specification, "stdio").

It decodes chunks to messages. A line beyond the limit takes no more memory than the limit, and the stream goes on
unless the line is endless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from trimcp.framing.gathering import Gathered
from trimcp.support.slotted import slotted
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
"""Lines processed at once: one read can contain thirty thousand, during which no other task runs."""


@slotted
class LineDecoder:
    """Splits a stream into lines and parses them.

    Each message is returned with the size of its line in bytes. An invalid line becomes a `Malformed`. A line beyond
    `max_size` becomes one with the reason "size", as soon as its id could be read, else without an id at its end; then
    the stream goes on. Blank lines are ignored, and so is a carriage return before the line ending.
    """

    max_size: int  # the most bytes of one message, without its line ending. It may be changed.
    _limits: ParseLimits = DEFAULT_LIMITS  # other bounds on one message
    # the most lines that `feed` processes in one call; the others are in `behind`. A batch (2025-03-26) counts as that
    # many lines. -1 for no bound.
    _at_once: int = -1
    _tail: Gathered = attrs.field(init=False, factory=Gathered)  # the received part of an incomplete line
    _scanner: IdScanner | None = attrs.field(init=False, default=None)  # set while that is beyond the limit
    _skipped: int = attrs.field(init=False, default=0)
    _told: bool = attrs.field(init=False, default=False)  # the `Malformed` for it was returned already
    # received data not processed yet: call `feed` with no data after other tasks have run. Always empty if `at_once` is
    # -1.
    behind: bytes = attrs.field(init=False, default=b"")
    # a line has sixteen times the allowed size. It was reported, and nothing more is read.
    endless: bool = attrs.field(init=False, default=False)

    @property
    def held(self) -> int:
        """Bytes of an incomplete line in memory, at most `max_size` and a carriage return."""
        return self._tail.size

    def feed(self, chunk: bytes) -> list[tuple[Message, int]]:
        """Return the messages that these bytes complete, in order, each with its size."""
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
                # A batch may contain a hundred messages, so the following lines wait for the next call.
                self.behind = b"\n".join((*lines[at:], self.behind or rest))
                return messages
        if rest:
            self._begin(rest)
            if self._scanner is not None:
                self._tell(messages)
        return messages

    def eof(self) -> list[tuple[Message, int]]:
        """Return the message that the end of the stream completes, if its last line had no line ending."""
        messages: list[tuple[Message, int]] = []
        if self._tail.size or self._scanner is not None:
            self._finish(b"", messages)
        return messages

    def _begin(self, piece: bytes) -> None:
        """Keep a piece of an incomplete line; beyond the limit feed it to the scanner instead."""
        if self._scanner is None and self._tail.size + len(piece) <= self.max_size + 1:
            self._tail.add(piece)
            return
        if self._scanner is None:
            self._skipped, self._scanner = self._tail.size, self._tail.scan()
        self._scanner.feed(piece)
        self._skipped += len(piece)

    def _tell(self, messages: list[tuple[Message, int]]) -> None:
        """Report that the present line is too large, once its id is known or it is endless."""
        scanner = self._scanner
        self.endless = self._skipped > PATIENCE * self.max_size
        if scanner is not None and not self._told and (self.endless or scanner.id is not None):
            self._told = True
            messages.append((oversize(scanner, self.max_size), self._skipped))

    def _finish(self, piece: bytes, messages: list[tuple[Message, int]]) -> None:
        """Process the last piece of the present line."""
        self._begin(piece)
        if self._scanner is None:
            if self._tail.size <= self.max_size or self._tail.endswith(b"\r"):
                self._line(self._tail.take(), messages)
                return
            # Too large by one byte only. A copy of what is discarded would need as much memory again.
            self._skipped, self._scanner = self._tail.size, self._tail.scan()
        if not self._told:
            messages.append((oversize(self._scanner, self.max_size), self._skipped))
        self._scanner, self._told = None, False

    def _line(self, line: bytes, messages: list[tuple[Message, int]]) -> bool:
        """Add the messages of a complete line. Returns whether it is a batch."""
        size = len(line)
        if size > self.max_size and size - line.endswith(b"\r") > self.max_size:
            messages.append((too_large(line, self.max_size), size))
        elif line and not line.isspace():
            message = parse(line, self._limits)
            messages.append((message, size))
            return type(message) is Batch
        return False


def encode_lines(messages: Sequence[bytes]) -> bytes:
    """Return encoded messages as lines, for one write."""
    return b"\n".join((*messages, b""))
