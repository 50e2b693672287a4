"""The byte stream under a trio-websocket connection: bounded reads, joined writes, the time of the last sign of life.

trio-websocket reads as fast as it can, queues messages by their number and writes each frame by itself. Under it a gate
checks every frame, nothing is read while enough messages wait to be taken, and the frames of a batch leave in one
write. Nothing here parses messages.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.bounds import checked
from trimcp.budget import Amount
from trimcp.framing.frames import FrameGate
from trimcp.transports.descriptors import PIECE, READ_SIZE, progress_of

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection

WINDOW: Final = 256 * 1024
"""Bytes of messages, with a little for each, that may lie untaken before no more is read."""

_PIECE: Final = 64 * 1024
_CLOSE: Final = 0x88


@attrs.frozen(field_transformer=checked())
class KeepAlive:
    """What is done about a peer that says nothing. Times are seconds; `math.inf` for never.

    A peer that has much to do but lives answers pings. While we read nothing, because enough waits to be handled, its
    silence means nothing, and every `interval` we tell it that we are still there.

    A sign of life is a whole message or control frame. A part of one counts for as long as it takes at `message_rate`:
    else a byte now and then would keep a connection, and what has arrived of its message, for ever.

    Attributes:
        interval: of silence after which it is asked for a sign of life, and between such questions.
        dead_after: without a sign of life it is taken for dead and the connection is given up.
        message_timeout: in which a message, once begun, has to be whole. Then the connection ends with 1008.
        message_rate: for each so many bytes of it that arrive it has a second more.
    """

    interval: float = 20.0
    dead_after: float = 60.0
    message_timeout: float = 30.0
    message_rate: float = 64 * 1024


KEEP_ALIVE: Final = KeepAlive()


class GatedStream(trio.abc.Stream):
    """What one trio-websocket connection takes for its stream.

    `stream`, which leads to the peer, is never closed from here: a Close frame may be left to send. `early` are bytes
    that arrived with the handshake.

    Attributes:
        over: set once nothing more will be read.
        writing: a write is under way, or one was cut short.
        sent_close: a Close frame was written.
        reading: a read is under way, so the peer's silence means something.
        since: when the peer gave the last sign of life, on Trio's clock, later by as long as we did not read.
        due: when the message under way has to be whole; infinity without one.
        unlimited: read on however much waits, because it will be dropped.
        amount: counts what is kept of a message whose end has not come. No more is read where there is no room for it.
        held: bytes that wait to be flushed.
        connection: trio-websocket's, once there is one.
    """

    def __init__(
        self, stream: trio.abc.Stream, gate: FrameGate, keep_alive: KeepAlive = KEEP_ALIVE, early: bytes = b""
    ) -> None:
        self.over: trio.Event = trio.Event()
        self.writing: bool = False
        self.sent_close: bool = False
        self.reading: bool = False
        self.unlimited: bool = False
        self.since: float = trio.current_time()
        self.due: float = math.inf
        self.amount: Amount = Amount()
        self.held: int = 0
        self.connection: WebSocketConnection | None = None
        self._stream = stream
        self._gate = gate
        self._keep_alive = keep_alive
        self._signs = self._rounds = 0  # of the gate when it was last looked at
        self._stopped = self.since  # when the last read ended
        self._room = trio.Event()
        self._held: list[bytes] = []
        self._turn = trio.Lock()
        self._pieces = 0
        self._feed(early)

    # What trio-websocket calls

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what the gate lets through, b"" once nothing more will come. Waits while enough waits to be taken."""
        gate = self._gate
        data = gate.take(_PIECE)
        while not data:
            if gate.fault is not None or gate.closing or self._given_up:
                self.over.set()
                return b""
            while gate.weight >= WINDOW and not self.unlimited:
                self._room = trio.Event()
                await self._room.wait()
            if gate.behind:
                await trio.lowlevel.checkpoint()
                self._feed(b"")
            elif self.amount.counted and self.amount.holding is not None and not self.amount.holding.may_grow:
                await self.amount.holding.room()
            elif chunk := await self._receive():
                self._feed(chunk)
            else:
                return b""
            data = gate.take(_PIECE)
        if gate.closing and gate.empty:
            self.over.set()  # what remains is to answer, which the peer may never read
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write a frame after those that are held."""
        if data[0] == _CLOSE:
            self.sent_close = True
        self.hold(bytes(data))
        await self.flush()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Note that trio-websocket is done."""
        self.over.set()
        await trio.lowlevel.checkpoint()

    # What the channel calls

    def hold(self, *pieces: bytes) -> None:
        """Hold a frame; it leaves with the next flush, in the order in which frames were held."""
        self._held += pieces
        self.held += sum(map(len, pieces))

    async def flush(self) -> None:
        """Write what is held, in as few writes as possible.

        Raises:
            trio.BrokenResourceError: the peer is gone, or an earlier write was cut short.
        """
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            await self._turn.acquire()
        try:
            if self.writing:
                raise trio.BrokenResourceError("an earlier write was cut short")
            while self._held:
                held, self._held, self.held = self._held, [], 0
                self.writing = True  # until the last byte is out
                for piece in _gathered(held):
                    await self._stream.send_all(piece)
                    self._pieces += 1
                self.writing = False
        finally:
            self._turn.release()

    def progress(self) -> Hashable:
        """Return what changes whenever the peer takes more of the write under way."""
        return self._pieces, progress_of(self._stream)

    def taken(self, size: int) -> None:
        """Note that a message of so many bytes was taken."""
        self._gate.taken(size)
        if self._gate.weight < WINDOW:
            self._room.set()

    def read_unlimited(self) -> None:
        """Read on without limit: nothing more will be taken."""
        self.unlimited = True
        self._room.set()

    @property
    def _given_up(self) -> bool:
        """Whether trio-websocket takes nothing more: it could not read what came, and a client of it would go on."""
        closed = self.connection is not None and self.connection.closed is not None
        return closed and not self.sent_close and not self.unlimited

    def _feed(self, chunk: bytes) -> None:
        """Show the gate what has arrived, and note what it says of the peer's life and speed."""
        gate, now = self._gate, self._stopped
        gate.feed(chunk)
        if gate.unfinished or self.amount.counted:
            self.amount.set(gate.begun)
        credit = len(chunk) / self._keep_alive.message_rate
        if gate.signs != self._signs:
            self._signs, self.since = gate.signs, now
        else:
            self.since = min(now, self.since + credit)
        if gate.rounds != self._rounds:
            self._rounds, self.due = gate.rounds, math.inf
        if self.due < math.inf:
            self.due += credit
        elif gate.unfinished and not gate.behind:
            self.due = now + self._keep_alive.message_timeout + credit

    async def _receive(self) -> bytes:
        if self.amount.counted and self.amount.holding is not None:
            await self.amount.holding.budget.read_in_turn()
        self.reading = True
        # While nothing is read, silence means nothing.
        paused = trio.current_time() - self._stopped
        self.since += paused
        self.due += paused
        try:
            chunk = await self._stream.receive_some(READ_SIZE)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()
            raise
        finally:
            self.reading = False
            self._stopped = trio.current_time()
        if not chunk:
            self.over.set()
        return bytes(chunk)


def _gathered(pieces: list[bytes]) -> Iterator[bytes | memoryview]:
    """Join small pieces; a large one is not copied, and leaves bit by bit so that it can be seen how far it is."""
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < _PIECE:
            small.append(piece)
            continue
        if small:
            yield b"".join(small)
            small.clear()
        with memoryview(piece) as view:
            for start in range(0, len(piece), PIECE):
                with view[start : start + PIECE] as part:
                    yield part
    if small:
        yield b"".join(small)
