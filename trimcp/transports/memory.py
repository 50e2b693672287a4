"""Two linked channels inside one process: for tests, or for a server and its client in one process."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

import attrs
import trio

from trimcp.channel import (
    CLIENT_MAX_MESSAGE,
    IN_MEMORY,
    SERVER_MAX_MESSAGE,
    Incoming,
    MessageChannel,
    OneTask,
    Outgoing,
)
from trimcp.transports.stream import StreamChannel
from trimcp.wire.jsonrpc import parse_within

_BATCHES = 16
_CHUNKS = 8
_CHUNK_SIZE = 8192


def memory_channels(*, framed: bool = False) -> tuple[MessageChannel, MessageChannel]:
    """Return the two ends of an in-process connection; each receives what the other sends.

    Both directions are bounded: a send waits while the peer does not read. Unless a session sets another limit, the
    first end accepts messages of 4 MiB, as a server does, and the second of 64 MiB, as a client does.

    Args:
        framed: use line framing and a pipe of 64 KiB, as stdio does. Otherwise each message is parsed directly from its
            bytes.
    """
    left: MessageChannel
    right: MessageChannel
    if framed:
        left_sender, right_receiver = _byte_pipe()
        right_sender, left_receiver = _byte_pipe()
        left, right = StreamChannel(left_receiver, left_sender), StreamChannel(right_receiver, right_sender)
        right.set_max_message(CLIENT_MAX_MESSAGE)
        left.link = right.link = IN_MEMORY
        return left, right
    to_right, from_left = trio.open_memory_channel[tuple[bytes, ...]](_BATCHES)
    to_left, from_right = trio.open_memory_channel[tuple[bytes, ...]](_BATCHES)
    left, right = MemoryChannel(to_right, from_right), MemoryChannel(to_left, from_left)
    left.link = right.link = IN_MEMORY
    right.set_max_message(CLIENT_MAX_MESSAGE)
    return left, right


@attrs.define(eq=False, repr=False)
class MemoryChannel(MessageChannel):
    """One end of an unframed in-process connection. A cancelled send has sent nothing; the channel stays usable."""

    _outgoing: trio.MemorySendChannel[tuple[bytes, ...]]
    _incoming: trio.MemoryReceiveChannel[tuple[bytes, ...]]
    _max_message: int = attrs.field(default=SERVER_MAX_MESSAGE, init=False)
    _sending: OneTask = attrs.field(factory=partial(OneTask, "sending on"), init=False)
    _receiving: OneTask = attrs.field(factory=partial(OneTask, "receiving from"), init=False)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        with self._sending:
            await self._outgoing.send(tuple(message.data for message in batch))

    async def receive(self) -> Sequence[Incoming]:
        texts: list[bytes] = []
        with self._receiving:
            while not texts:
                texts.extend(await self._incoming.receive())
            try:
                while True:
                    texts.extend(self._incoming.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel):
                pass
        most = self._max_message
        return [Incoming(parse_within(text, most), len(text)) for text in texts]

    def set_max_message(self, size: int) -> None:
        self._max_message = size

    async def aclose(self) -> None:
        self._outgoing.close()
        self._incoming.close()
        await trio.lowlevel.checkpoint()


def _byte_pipe() -> tuple[_PipeSender, _PipeReceiver]:
    chunks_in, chunks_out = trio.open_memory_channel[bytes](_CHUNKS)
    return _PipeSender(chunks_in), _PipeReceiver(chunks_out)


@attrs.define(eq=False, repr=False)
class _PipeSender(trio.abc.SendStream):
    _chunks: trio.MemorySendChannel[bytes]
    _sent: int = attrs.field(init=False, default=0)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        whole = bytes(data)
        for start in range(0, len(whole), _CHUNK_SIZE):
            await self._chunks.send(whole[start : start + _CHUNK_SIZE])
            self._sent += 1

    def write_progress(self) -> Hashable:
        return self._sent

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self._chunks.close()
        await trio.lowlevel.checkpoint()


@attrs.define(eq=False, repr=False)
class _PipeReceiver(trio.abc.ReceiveStream):
    """Reads whole chunks and ignores `max_bytes`: its one user asks for more than the pipe holds."""

    _chunks: trio.MemoryReceiveChannel[bytes]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            found = [await self._chunks.receive()]
        except trio.EndOfChannel:
            return b""
        try:
            while len(found) < _CHUNKS:
                found.append(self._chunks.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            pass
        return b"".join(found)

    async def aclose(self) -> None:
        self._chunks.close()
        await trio.lowlevel.checkpoint()
