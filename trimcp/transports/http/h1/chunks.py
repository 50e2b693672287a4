"""Decodes a chunked body (RFC 9112 section 7.1), strictly. Extensions and trailers are bounded, and ignored.

Sans I/O. `httptools` does not say where a body ended, and bounds neither extensions nor trailers.
"""

from __future__ import annotations

import enum
import re
from typing import Final

__all__ = ["ChunkDecoder", "RequestRefused"]

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})([ \t]*;[\t -~\x80-\xff]*)?\r\n")
_TRAILER: Final = re.compile(rb"[!-9;-~]+:[\t -~\x80-\xff]*\r\n")

_MAX_SIZE_LINE: Final = 256
_MAX_EXTENSIONS: Final = 16 * 1024  # of all chunks of a body, as Node has it since CVE-2024-22019
_MAX_TRAILERS: Final = 8 * 1024
_LINES: Final = 64  # read in one call: ten thousand chunks of a byte must not keep others waiting


class RequestRefused(Exception):
    """These bytes are no request we take. Answer with the status, and close: what follows them means nothing.

    Attributes:
        status: the HTTP status.
        reason: one line that may be sent to the client; it repeats nothing of the client's.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


class _Next(enum.Enum):
    """What the next byte belongs to."""

    SIZE = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()
    NOTHING = enum.auto()


class ChunkDecoder:
    """Reads one chunked body."""

    __slots__ = ("_left", "_next", "_spent")

    def __init__(self) -> None:
        self._next = _Next.SIZE
        self._left = 0  # bytes of the chunk that are still to come
        self._spent = 0  # bytes of extensions, then of trailers

    @property
    def done(self) -> bool:
        """Whether the body has ended."""
        return self._next is _Next.NOTHING

    def take(self, buffer: bytes) -> tuple[bytes, int]:
        """Return the data of the chunks in `buffer` together, and how much of it was used.

        Of chunks of a few bytes some are left for the next time.

        Raises:
            RequestRefused: what follows is no chunk. What came before that is returned first.
        """
        pieces: list[bytes] = []
        at = lines = 0
        try:
            while self._next is not _Next.NOTHING and (lines < _LINES or not pieces):
                if self._next is _Next.DATA:
                    piece = buffer[at : at + self._left]
                    pieces.append(piece)
                    at += len(piece)
                    self._left -= len(piece)
                    if self._left:
                        break
                    self._next = _Next.DATA_END
                else:
                    line = self._find_line(buffer, at)
                    if not line:
                        break
                    self._take_line(line)
                    at += len(line)
                    lines += 1
        except RequestRefused:
            if not pieces:
                raise
            # Else next time: the bad line is not used up.
        return b"".join(pieces), at

    def _find_line(self, buffer: bytes, at: int) -> bytes:
        longest = _MAX_TRAILERS if self._next is _Next.TRAILER else _MAX_SIZE_LINE
        end = buffer.find(b"\n", at, at + longest)
        if end < 0 and len(buffer) - at >= longest:
            raise RequestRefused(400, "a line in a chunked body is too long")
        return buffer[at : end + 1]

    def _take_line(self, line: bytes) -> None:
        if self._next is _Next.SIZE:
            found = _SIZE_LINE.fullmatch(line)
            if found is None:
                raise RequestRefused(400, "the size of a chunk is malformed")
            self._spend(len(found[2] or b""), _MAX_EXTENSIONS)
            self._left = int(found[1], 16)
            self._next = _Next.DATA
            if not self._left:
                self._next = _Next.TRAILER
                self._spent = 0
        elif line == b"\r\n":
            self._next = _Next.SIZE if self._next is _Next.DATA_END else _Next.NOTHING
        elif self._next is _Next.DATA_END:
            raise RequestRefused(400, "a chunk does not end where its size says")
        else:
            if _TRAILER.fullmatch(line) is None:
                raise RequestRefused(400, "a trailer is malformed")
            self._spend(len(line), _MAX_TRAILERS)

    def _spend(self, size: int, most: int) -> None:
        if self._spent + size > most:
            raise RequestRefused(400, "a chunked body has too much beside its data")
        self._spent += size
