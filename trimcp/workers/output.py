"""What worker processes write, on its way to our standard error: escaped, marked with its tool, and bounded.

It is text of whoever wrote the tool, or of a stranger's program in a sandbox: it must not move a terminal's cursor,
look like a line of the server, or fill a disk.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Final

import attrs
import trio

from trimcp.support.cleaning import clean, harmless
from trimcp.support.rates import TokenBucket

SHOWN: Final = {False: (256 * 1024, 4 * 2**20), True: (16 * 1024, 256 * 1024)}
"""Bytes a second, and at most at once, that all workers of a server may show: plain ones, and those in sandboxes."""

_CHUNK: Final = 16 * 1024
_TAIL: Final = 64 * 1024  # bytes of a worker's output that are kept for the log
_TAIL_LINES: Final = 40  # lines of that output that are logged
_LONGEST: Final = 2_000  # bytes of a line; a longer one becomes several
_PACE: Final = 0.001  # seconds between two reads of output that is left out, so that reading it is no load
_BAR: Final = "    | "  # as in tracebacks: what follows is quoted


class OutputBound(TokenBucket):
    """How much all workers of one kind may show."""

    __slots__ = ("left_out", "silent")

    def __init__(self, *, sandboxed: bool, now: float) -> None:
        super().__init__(*SHOWN[sandboxed], now)
        self.left_out: int = 0  # bytes that were not shown since this was last said
        self.silent: bool = False  # whether the first of them was told of

    def spend(self, text: str) -> str:
        """Return a text, which is charged; without room for any, "": it is counted as left out."""
        if self.refill(trio.current_time()) <= 0:
            self.left_out += len(text)
            return ""
        self.tokens: float = self.tokens - len(text)
        return text


@attrs.define(eq=False, repr=False)
class WorkerOutput:
    """Copies what one worker writes to our standard error."""

    bound: OutputBound
    mark: str = ""  # what stands before each line: the tool's name and the process
    _tail: bytearray = attrs.field(init=False, factory=bytearray)
    _line: bytearray = attrs.field(init=False, factory=bytearray)

    def begin(self, tool: str, pid: int) -> None:
        """Mark what comes from now on with this tool."""
        self.mark = f"[{harmless(tool, 64)} {pid}] "
        self._tail.clear()

    async def forward(self, stream: trio.lowlevel.FdStream) -> None:
        """Copy until the end, in a thread: the reader of standard error may be slow."""
        limiter = trio.CapacityLimiter(1)
        with suppress(trio.BrokenResourceError):
            while chunk := await stream.receive_some(_CHUNK):
                self._tail += chunk
                del self._tail[:-_TAIL]
                bound = self.bound
                if bound.refill(trio.current_time()) > 0:
                    text = await trio.to_thread.run_sync(self._take, chunk, abandon_on_cancel=True, limiter=limiter)
                    bound.tokens -= len(text)
                else:
                    bound.left_out += len(chunk)
                    if bound.silent:
                        await trio.sleep(_PACE)
                        continue
                    bound.silent, text = True, f"{self.mark}... more than may be shown; what follows is left out\n"
                    self._line.clear()
                await trio.to_thread.run_sync(_write, text, abandon_on_cancel=True, limiter=limiter)
            if self._line:  # it will not end any more
                text = self._take(b"\n")
                await trio.to_thread.run_sync(_write, text, abandon_on_cancel=True, limiter=limiter)

    def _take(self, chunk: bytes | bytearray) -> str:
        """Return the lines that have ended."""
        text = ""
        if self.bound.left_out:
            text = f"{self.mark}... {self.bound.left_out:,} bytes of output were left out\n"
            self.bound.left_out, self.bound.silent = 0, False
        *ended, self._line = (self._line + chunk).split(b"\n")
        if len(self._line) > _LONGEST:
            ended.append(self._line)
            self._line = bytearray()
        return text + "".join(f"{self.mark}{piece}\n" for line in ended for piece in _pieces(line))

    def tail(self) -> str:
        """Return its last lines, such as a traceback, escaped and marked for a log; "" if there are none."""
        return quoted(self._tail.decode(errors="backslashreplace"), self.bound)


def quoted(text: str, bound: OutputBound) -> str:
    """Return the last lines of a text from a worker, which cannot imitate lines of a log; "" beyond the bound."""
    lines = [clean(line[:_LONGEST]) for line in text.rstrip().split("\n")[-_TAIL_LINES:]]
    return bound.spend("".join(f"\n{_BAR}{line}" for line in lines)) if text.strip() else ""


def _pieces(line: bytearray) -> list[str]:
    text = line.removesuffix(b"\r")
    starts = range(0, len(text) or 1, _LONGEST)
    return [clean(text[start : start + _LONGEST].decode(errors="backslashreplace")) for start in starts]


def _write(text: str) -> None:
    data = text.encode(errors="backslashreplace")
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:  # another program made it non-blocking; the lost output is still kept for the log
            return
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EPIPE, errno.EIO):
                return
            raise
