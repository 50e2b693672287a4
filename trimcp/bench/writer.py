"""Writing what the system takes at once, and the rest as soon as it takes more, without ever making the reader wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import attrs
import trio

from trimcp.bench.tally import Tally

__all__ = ["Writer"]


@attrs.define(eq=False)
class Writer:
    """The write end of a connection.

    What waits in it is bounded by the calls that may be under way.

    Args:
        send_nowait: sends what the system takes now and returns how many bytes that were; None where that cannot be.
        send_all: sends everything.
        tally: where bytes are counted.
    """

    _send_nowait: Callable[[bytes], int] | None
    _send_all: Callable[[bytes], Awaitable[object]]
    _tally: Tally
    _waiting: list[bytes] = attrs.field(init=False, factory=list)
    _is_busy: bool = attrs.field(init=False, default=False)
    _more: trio.Event = attrs.field(init=False, factory=trio.Event)

    def write(self, data: bytes) -> None:
        """Send now what can be sent now. Does not raise: `run` meets the same."""
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
        """Send what `write` left over, until it is cancelled. Raises what `send_all` does."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._send_all(b"".join(waiting))
            self._is_busy = False
