"""Load on a server that is a child process: lines over its pipes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trimcp.bench.mux import LoadCaller, LoadChannel, Opener, Writer
from trimcp.bench.supply import Load
from trimcp.bench.tally import Tally
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.stdio.child import ChildChannel, StdioServer
from trimcp.transports.stdio.streams import FdReceiver, FdSender

_REAPED: Final = 0.2


@attrs.define(eq=False)
class LineChannel:
    """Messages as lines over two byte streams. A line may exceed `max_message` by the size of one read."""

    _receiver: trio.abc.ReceiveStream
    _sender: trio.abc.SendStream
    _tally: Tally
    _max_message: int
    _child: ChildChannel | None = None
    _pieces: list[bytes] = attrs.field(init=False, factory=list)
    _held: int = attrs.field(init=False, default=0)
    _writer: Writer = attrs.field(init=False)
    _receive: Callable[[int], Awaitable[bytes | bytearray]] = attrs.field(init=False)
    _why: str | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        sender = self._sender
        now = sender.send_nowait if isinstance(sender, FdSender) else None
        self._writer = Writer(now, sender.send_all, self._tally)
        receiver = self._receiver
        self._receive = receiver.receive_later if isinstance(receiver, FdReceiver) else receiver.receive_some

    def send(self, messages: Sequence[bytes]) -> None:
        """Write without waiting what the pipe takes; see `LoadChannel.send`."""
        self._writer.write(b"\n".join((*messages, b"")))

    async def run(self) -> None:
        """Write what the pipe did not take; see `LoadChannel.run`."""
        await self._writer.run()

    async def receive(self) -> Sequence[bytes]:
        """Return the lines that one read completes; see `LoadChannel.receive`."""
        chunk = bytes(await self._receive(READ_SIZE))
        if not chunk:
            raise trio.EndOfChannel("the server closed its output")
        self._tally.bytes_in += len(chunk)
        lines = chunk.split(b"\n")
        if self._pieces:
            # Joined only once: a message of megabytes arrives in many pieces.
            self._pieces.append(lines[0])
            if len(lines) == 1:
                self._held += len(chunk)
                if self._held > self._max_message:
                    self._why = f"the server sent a message larger than {self._max_message:,} bytes"
                    raise trio.BrokenResourceError(self._why)
                return ()
            lines[0] = b"".join(self._pieces)
            self._pieces.clear()
        rest = lines.pop()
        if rest:
            self._pieces.append(rest)
            self._held = len(rest)
        return [line for line in lines if line and not line.isspace()]

    async def close_reason(self) -> str:
        """Return how the connection ended; see `LoadChannel.close_reason`."""
        if self._why is not None:
            return self._why
        if self._child is None:
            return "the server closed the connection"
        # A process closes its pipes shortly before its exit code is known.
        with trio.move_on_after(_REAPED):
            await self._child.process.wait()
        return self._child.close_reason()


def stdio_opener(server: StdioServer) -> Opener:
    """Return an opener that starts a new server process for each session."""

    @asynccontextmanager
    async def opened(load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
        async with server.connect() as child:
            load.pids.add(child.process.pid)
            receiver, sender = child.streams
            yield LineChannel(receiver, sender, load.tally, CLIENT_MAX_MESSAGE, child)

    return opened
