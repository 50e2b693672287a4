"""The byte stream under a trio-websocket connection: what it may read, how it writes, and when the peer was last heard.

trio-websocket reads as fast as it can, queues messages by their number and writes each frame by itself. Here is what
bounds it: a gate looks at every frame, nothing is read while enough waits to be taken, and the frames of a batch leave
in one write. Knows bytes and frames, and no messages.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.framing.frames import FrameGate
from trimcp.transports.descriptors import PIECE, READ_SIZE, progress_of

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection

__all__ = ["KEEP_ALIVE", "WINDOW", "GatedStream", "HandshakeFailed", "KeepAlive"]

WINDOW: Final = 256 * 1024
"""Bytes of messages, with a little for each, that may lie untaken before no more is read."""

_MAX_HEAD: Final = 128 * 1024
_PIECE: Final = 64 * 1024
_END: Final = b"\r\n\r\n"
_ACCEPTED: Final = b"HTTP/1.1 101 "
_CLOSE: Final = 0x88


@attrs.frozen
class KeepAlive:
    """What is done about a peer that says nothing. Times are seconds; `math.inf` for never.

    A peer that has much to do but lives answers pings. While we read nothing, because enough waits to be handled, its
    silence means nothing, and every `interval` we tell it that we are still there.

    Attributes:
        interval: of silence after which it is asked for a sign of life, and between such questions.
        dead_after: without a single byte it is taken for dead and the connection is given up.
    """

    interval: float = 20.0
    dead_after: float = 60.0


KEEP_ALIVE: Final = KeepAlive()


class HandshakeFailed(Exception):
    """The opening handshake came to nothing.

    Attributes:
        answer: what arrived instead of what had to, as far as it did.
    """

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        self.answer = answer


class GatedStream(trio.abc.Stream):
    """What one trio-websocket connection takes for its stream.

    Args:
        stream: leads to the peer. It is never closed from here: there may be something left to say.
        gate: for all that follows the head of the handshake.
        request: what a server reads in place of the head that arrives; None for a client.

    Attributes:
        over: set once nothing more will be read.
        opened: set once the handshake is behind us.
        writing: a write is under way, or one was cut short.
        said_close: a Close frame was written.
        reading: somebody waits for the peer, so its silence can be heard.
        since: ... and since when, on Trio's clock.
        unlimited: read on however much waits, because it will be dropped.
        held: bytes that wait to be flushed.
        connection: that of which this is the stream, once there is one.
    """

    def __init__(self, stream: trio.abc.Stream, gate: FrameGate, request: bytes | None = None) -> None:
        self.over: trio.Event = trio.Event()
        self.opened: trio.Event = trio.Event()
        self.writing: bool = False
        self.said_close: bool = False
        self.reading: bool = False
        self.since: float = trio.current_time()
        self.unlimited: bool = False
        self._stream = stream
        self._gate = gate
        self._request = request
        self._met = False
        self._room = trio.Event()
        self.held: int = 0
        self.connection: WebSocketConnection | None = None
        self._held: list[bytes] = []
        self._turn = trio.Lock()
        self._pieces = 0

    # What trio-websocket calls

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what the gate lets through, b"" once nothing more will come. Waits while enough waits to be taken.

        Raises:
            HandshakeFailed: instead of a head that opens a WebSocket something else came.
        """
        if not self._met:
            return await self._meet()
        await self.opened.wait()  # a client that is early has to wait
        gate = self._gate
        data = gate.take(_PIECE)
        while not data:
            if gate.fault is not None or gate.closing or self._given_up:
                self.over.set()
                return b""
            while gate.weight >= WINDOW and not self.unlimited:
                self._room = trio.Event()
                await self._room.wait()
            chunk = await self._receive()
            if not chunk:
                return b""
            gate.feed(chunk)
            data = gate.take(_PIECE)
        if gate.closing and gate.empty:
            self.over.set()  # what remains is to answer, and nobody knows whether the peer lets us
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write a frame after those that are held."""
        if not self.opened.is_set():
            if bytes(data[: len(_ACCEPTED)]) == _ACCEPTED:
                self.opened.set()
        elif data[0] == _CLOSE:
            self.said_close = True
        self.hold(bytes(data))
        await self.flush()

    async def wait_send_all_might_not_block(self) -> None:
        """See `trio.abc.SendStream.wait_send_all_might_not_block`."""
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Note that trio-websocket is done.

        Raises:
            HandshakeFailed: before the connection was open.
        """
        self.over.set()
        await trio.lowlevel.checkpoint()
        if not self.opened.is_set():
            raise HandshakeFailed("this is no handshake of a WebSocket")

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

    def let_go(self) -> None:
        """Read on without limit: nothing more will be taken."""
        self.unlimited = True
        self._room.set()

    @property
    def _given_up(self) -> bool:
        """Whether trio-websocket takes nothing more: it could not read what came, and a client of it would go on."""
        closed = self.connection is not None and self.connection.closed is not None
        return closed and not self.said_close and not self.unlimited

    async def _receive(self) -> bytes:
        self.reading = True
        self.since = trio.current_time()
        try:
            chunk = await self._stream.receive_some(READ_SIZE)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()
            raise
        finally:
            self.reading = False
        if not chunk:
            self.over.set()
        return bytes(chunk)

    async def _meet(self) -> bytes:
        """Read the head of the handshake, and return it or what stands for it."""
        head = bytearray()
        while (end := head.find(_END)) < 0:
            chunk = await self._receive()
            if not chunk:
                raise HandshakeFailed("the connection was closed", bytes(head))
            head += chunk
            if len(head) > _MAX_HEAD:
                raise HandshakeFailed("the head of a handshake must have an end", bytes(head))
        end += len(_END)
        self._met = True
        self._gate.feed(bytes(head[end:]))
        if self._request is not None:
            return self._request
        if not head.startswith(_ACCEPTED):
            raise HandshakeFailed("the server opens no WebSocket here", bytes(head))
        self.opened.set()
        return bytes(head[:end])


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
