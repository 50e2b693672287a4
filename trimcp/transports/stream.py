"""A message channel over any pair of Trio byte streams: JSON texts, one per line.

It knows framing and batching. It does not know what the bytes travel through: a pipe, a socket or a list.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, SERVER_MAX_MESSAGE, Incoming, MessageChannel, Outgoing
from trimcp.framing.lines import Decoder, encode_lines
from trimcp.transports.descriptors import PIECE, READ_SIZE, FdSender, progress_of, socket_under, unheard
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, Limits

__all__ = ["CLIENT_MAX_MESSAGE", "SERVER_MAX_MESSAGE", "StreamChannel"]

_SMALLEST: Final = 64  # bytes of a line that asks for something, give or take a few


@attrs.define(eq=False, repr=False)
class StreamChannel(MessageChannel):
    """Messages as lines over a receiving and a sending byte stream (specification, "Transports", stdio).

    The specification asks custom transports over byte streams to use this framing, so a channel around a
    `trio.SocketStream` is a whole TCP transport. Every message that one read completes is returned together;
    a batch is sent in one write. A send that was cut short leaves half a line behind, so afterwards the
    channel is broken.

    Args:
        receiver: where bytes come from; closed with the channel.
        sender: where bytes go; closed with the channel. May be the same object.
        max_message: bytes of the largest message taken in; a larger one arrives as `Malformed` and costs no
            memory.
        limits: what else one message may cost.
    """

    _receiver: trio.abc.ReceiveStream
    _sender: trio.abc.SendStream
    max_message: int = attrs.field(default=SERVER_MAX_MESSAGE, kw_only=True)
    limits: Limits = attrs.field(default=DEFAULT_LIMITS, kw_only=True)
    _decoder: Decoder = attrs.field(init=False)
    _pieces: int = attrs.field(default=0, init=False)
    _sending: bool = attrs.field(default=False, init=False)
    _receiving: bool = attrs.field(default=False, init=False)
    _broken: bool = attrs.field(default=False, init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = Decoder(self.max_message, self.limits)
        self.read_ahead: tuple[int, int] = (READ_SIZE // _SMALLEST, READ_SIZE)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send the whole batch in one write; see `MessageChannel.send`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this channel")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            if self._broken:
                raise trio.BrokenResourceError("an earlier send failed or was cut short")
            if not batch:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return
            data = encode_lines([message.data for message in batch])
            self._broken = True  # until the last byte is out
            if len(data) <= PIECE:
                await self._sender.send_all(data)
            else:
                await self._send_large(data)
            self._broken = False
        finally:
            self._sending = False

    async def _send_large(self, data: bytes) -> None:
        """Write what may take its time, so that it can be seen how far it is."""
        if hasattr(self._sender, "taken"):
            await self._sender.send_all(data)
            return
        with memoryview(data) as view:
            for start in range(0, len(data), PIECE):
                with view[start : start + PIECE] as piece:
                    await self._sender.send_all(piece)
                self._pieces += 1

    async def hung_up(self) -> None:
        """Wait until nobody reads what is sent; who has only ended what it says may. See `MessageChannel.hung_up`."""
        sender = self._sender
        if isinstance(sender, FdSender):
            await sender.unheard()
        else:
            sock = socket_under(sender)
            await unheard(-1 if sock is None else sock.fileno())

    def taken(self) -> Hashable:
        """Return what changes whenever the peer takes more of the send under way; see `MessageChannel.taken`."""
        return self._pieces, progress_of(self._sender)

    async def receive(self) -> Sequence[Incoming]:
        """Return every message that has arrived; see `MessageChannel.receive`.

        A last line without its newline counts as a message.
        """
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this channel")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while True:
                self._check_open()
                if self._ended:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    raise trio.EndOfChannel("the peer has closed its side")
                chunk = await self._receiver.receive_some(READ_SIZE)
                if chunk:
                    arrived = self._decoder.feed(bytes(chunk))
                else:
                    self._ended = True
                    arrived = self._decoder.eof()
                if arrived:
                    return [Incoming(message, size) for message, size in arrived]
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Close both streams; see `MessageChannel.aclose`."""
        self._closed = True
        try:
            await self._sender.aclose()
        finally:
            await self._receiver.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")
