"""Messages sent without waiting, over anything that tells how much of them it takes at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import attrs
import trio

from trimcp.bench.tally import Tally


@attrs.define(eq=False)
class Writer:
    """Sends without waiting as much as the system takes, and the rest in `run`, so that the reader never waits.

    Its buffer is bounded by the number of concurrent calls.
    """

    # sends without waiting and returns how many bytes the system took; None if not supported
    _send_nowait: Callable[[bytes], int] | None
    _send_all: Callable[[bytes], Awaitable[object]]  # sends everything
    _tally: Tally  # counts the bytes
    _waiting: list[bytes] = attrs.field(init=False, factory=list)
    _is_busy: bool = attrs.field(init=False, default=False)
    _more: trio.Event = attrs.field(init=False, factory=trio.Event)

    def write(self, data: bytes) -> None:
        """Send without waiting, and buffer the rest. Does not raise: if the connection broke, `run` does."""
        self._tally.bytes_out += len(data)
        if not self._is_busy and self._send_nowait is not None:
            sent = 0
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                sent = self._send_nowait(data)
            if sent == len(data):
                return
            data = data[sent:]
        self._is_busy = True
        self._waiting.append(data)
        self._more.set()

    async def run(self) -> None:
        """Send what `write` has buffered, until cancelled. Raises as `send_all` does."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._send_all(b"".join(waiting))
            self._is_busy = False
