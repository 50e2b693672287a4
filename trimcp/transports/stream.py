"""A message channel over any pair of Trio byte streams: JSON texts, one per line."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.channel import SERVER_MAX_MESSAGE, Incoming, MessageChannel, Outgoing
from trimcp.framing.lines import LINES, LineDecoder, encode_lines
from trimcp.support.slotted import slotted
from trimcp.transports.descriptors import PIECE, READ_SIZE, progress_of, wait_peer_stops_reading
from trimcp.transports.stdio.streams import FdSender
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, PATIENCE, ParseLimits

_SMALLEST: Final = 64  # bytes of a short request line, approximately


@slotted
class StreamChannel(MessageChannel):
    """Messages as lines over a receiving and a sending byte stream (specification, "Transports", stdio).

    The specification asks custom transports over byte streams to use this framing. So a channel around a
    `trio.SocketStream` is a complete TCP transport.

    One `receive` returns the messages that one read completes, at most 128. A batch is sent in one write. A send that
    fails or is cancelled may leave half a line behind, so the channel is then broken.

    A message may have 4 MiB unless a session sets another limit. A larger one is received as `Malformed` as soon as its
    id is known, and is not kept in memory. A message of sixteen times the limit ends the connection.

    Args:
        receiver, sender: the byte streams, which may be one object; closed with the channel.
        limits: other bounds for one message.
    """

    _receiver: trio.abc.ReceiveStream
    _sender: trio.abc.SendStream
    limits: ParseLimits = attrs.field(default=DEFAULT_LIMITS, kw_only=True)
    _decoder: LineDecoder = attrs.field(init=False)
    _unfinished: MemoryCharge = attrs.field(init=False, factory=MemoryCharge)
    _pieces: int = attrs.field(default=0, init=False)
    # Flags instead of `OneTask`: its context manager costs two calls, here for each batch.
    _sending: bool = attrs.field(default=False, init=False)
    _receiving: bool = attrs.field(default=False, init=False)
    _broken: bool = attrs.field(default=False, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = LineDecoder(SERVER_MAX_MESSAGE, self.limits, LINES)
        self.sends_now: bool = isinstance(self._sender, FdSender)
        self.read_ahead: tuple[int, int] = (READ_SIZE // _SMALLEST, READ_SIZE)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this channel")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._closed:
                raise trio.ClosedResourceError("this channel was closed")
            if self._broken:
                raise trio.BrokenResourceError("an earlier send failed or was cut short")
            if not batch:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return
            data = encode_lines([message.data for message in batch])
            self._broken = True  # until all bytes are written
            if len(data) <= PIECE:
                await self._sender.send_all(data)
            else:
                await self._send_large(data)
            self._broken = False
        finally:
            self._sending = False

    def send_nowait(self, outgoing: Outgoing) -> Outgoing | None:
        sender, data = self._sender, outgoing.data
        assert isinstance(sender, FdSender)
        if self._sending or self._closed or self._broken or len(data) > PIECE:
            return outgoing
        try:
            sent = sender.send_nowait(data + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return outgoing  # `send` raises it again
        if sent > len(data):
            return None
        # What has begun belongs to no request any more: it cannot be withdrawn.
        return Outgoing(data[sent:], outgoing.kind) if sent else outgoing

    def set_max_message(self, size: int) -> None:
        self._decoder.max_size = size

    async def _send_large(self, data: bytes) -> None:
        """Write in pieces, so that `write_progress` shows progress during the write."""
        if hasattr(self._sender, "write_progress"):
            await self._sender.send_all(data)
            return
        with memoryview(data) as view:
            for start in range(0, len(data), PIECE):
                with view[start : start + PIECE] as piece:
                    await self._sender.send_all(piece)
                self._pieces += 1

    async def wait_peer_closed(self) -> None:
        """Wait until the peer no longer reads; a peer that has only closed its sending side may still read."""
        await wait_peer_stops_reading(self._sender)

    def write_progress(self) -> Hashable:
        return self._pieces, progress_of(self._sender)

    async def receive(self) -> Sequence[Incoming]:
        """Return messages that have arrived; see `MessageChannel.receive`.

        A last line without a newline counts as a message. After a bounded number of lines, the rest waits for the next
        call.

        Raises:
            trio.BrokenResourceError: a message is longer than `PATIENCE` times its limit.
        """
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this channel")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self.count_received()
            decoder = self._decoder
            while True:
                if self._closed:
                    raise trio.ClosedResourceError("this channel was closed")
                if decoder.behind:
                    await trio.lowlevel.checkpoint()
                    if arrived := decoder.feed(b""):
                        return [Incoming(message, size) for message, size in arrived]
                    continue
                if decoder.endless:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    raise trio.BrokenResourceError(f"a message goes on after {PATIENCE} times the bytes it may have")
                if self._ended:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    raise trio.EndOfChannel("the peer has closed its side")
                chunk = await self._receiver.receive_some(READ_SIZE)
                if chunk:
                    arrived = decoder.feed(bytes(chunk))
                else:
                    self._ended = True
                    arrived = decoder.eof()
                if arrived:
                    return [Incoming(message, size) for message, size in arrived]
                # Count an incomplete message, and read more of it only when the budget has room.
                if (size := decoder.held) and (holding := self.holding) is not None:
                    self._unfinished.holding = holding
                    self._unfinished.set(size)
                    if not holding.may_grow:
                        await holding.room()
        finally:
            self._receiving = False

    def count_received(self) -> None:
        if self._unfinished.counted:
            self._unfinished.set(self._decoder.held)

    async def aclose(self) -> None:
        self._closed = True
        try:
            await self._sender.aclose()
        finally:
            await self._receiver.aclose()
