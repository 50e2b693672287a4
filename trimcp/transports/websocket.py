"""Messages over WebSocket: one text message is one JSON-RPC message. docs/design/websocket.md describes the binding.

The channel of either side, and a server's side of the handshake. `websocket_link` knows how a connection lives and
ends, `websocket_stream` what it may read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream

from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.framing.frames import FrameGate, text_frame
from trimcp.transports.descriptors import READ_SIZE, over_or_hung_up, socket_under
from trimcp.transports.http.model import Head, Upgrade
from trimcp.transports.websocket_link import Link
from trimcp.transports.websocket_stream import KEEP_ALIVE, WINDOW, GatedStream, HandshakeFailed, KeepAlive
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, Limits, Message, parse

__all__ = ["QUEUE", "SUBPROTOCOL", "WebSocketChannel", "opened", "serve_upgraded"]

SUBPROTOCOL: Final = "mcp"
"""What clients offer in Sec-WebSocket-Protocol, and servers agree to where it is offered."""

QUEUE: Final = 32_768
"""Messages that trio-websocket may queue: more than can be there, because the gate stops reading before."""

_BATCH: Final = 256  # messages a receive returns at most
_WRITE: Final = 64 * 1024  # bytes that are gathered for one write
_HANDSHAKE: Final = 10.0

# RFC 6455, section 7.4.1, in words for people.
_CODES: Final = {
    1000: "normal",
    1001: "going away",
    1002: "protocol error",
    1003: "unsupported data",
    1005: "no code",
    1007: "text that is not UTF-8",
    1008: "policy violation",
    1009: "message too big",
    1010: "missing extension",
    1011: "internal error",
    1012: "restarting",
    1013: "try again later",
}

_log = logging.getLogger("trimcp.websocket")


@attrs.define(eq=False)
class WebSocketChannel(MessageChannel):
    """Messages as text messages of a WebSocket connection.

    All that has arrived is returned together, a batch leaves in one write. A message over the limit arrives as
    `Malformed` and costs no memory. Binary messages, text that is not UTF-8 and frames that break the protocol end the
    connection with the close code for it, and so does a message of sixteen times the limit.

    Args:
        link: the connection.
        limits: what one message may cost beside its size.
        principal: put on every message.
        headers: put on every message.
    """

    half_open = False

    _link: Link
    _limits: Limits = attrs.field(default=DEFAULT_LIMITS, kw_only=True, alias="limits")
    _principal: str | None = attrs.field(default=None, kw_only=True, alias="principal")
    _headers: Mapping[str, str] | None = attrs.field(default=None, kw_only=True, alias="headers")
    _arrived: list[Incoming] = attrs.field(factory=list, init=False)
    _sending: bool = attrs.field(default=False, init=False)
    _receiving: bool = attrs.field(default=False, init=False)
    _broken: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        # A batch, whose place others take while nobody receives them; either may pass the window by what one read
        # brings, and by the beginning of a message that it ends, which counts from then on.
        self.read_ahead: tuple[int, int] = (_BATCH + 1, 2 * (WINDOW + 2 * READ_SIZE))

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send each message as a text message, all in one write; see `MessageChannel.send`."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this channel")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            if self._broken:
                raise trio.BrokenResourceError("an earlier send failed or was cut short")
            if batch:
                self._broken = True  # until the last byte is out
                await self._send(batch)
                self._broken = False
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()
        finally:
            self._sending = False

    async def _send(self, batch: Sequence[Outgoing]) -> None:
        """Write the batch beside trio-websocket, which would copy each message five times and write it by itself."""
        gated, connection = self._link.gated, self._link.connection
        try:
            for message in batch:
                if connection.closed is not None:
                    raise ConnectionClosed(connection.closed)
                gated.hold(*text_frame(message.data, masked=self._link.client))
                if gated.held > _WRITE:
                    await gated.flush()
            await gated.flush()
        except (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            # The stream is also closed here when the peer has left, or has been silent for too long.
            self._check_open()
            raise trio.BrokenResourceError(self._link.trouble) from None

    def taken(self) -> Hashable:
        """Return what changes whenever the peer takes more of the send under way; see `MessageChannel.taken`."""
        return self._link.gated.progress()

    async def receive(self) -> Sequence[Incoming]:
        """Return every message that has arrived; see `MessageChannel.receive`."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this channel")
        self._receiving = True
        try:
            self._check_open()
            if self._arrived:
                await trio.lowlevel.checkpoint()
            else:
                self._arrived.append(await self._next())
            await self._gather()
        except ConnectionClosed:
            self._check_open()
            if self._link.farewell is None:
                raise trio.BrokenResourceError(self._link.trouble) from None
            raise trio.EndOfChannel("the peer has closed the connection") from None
        finally:
            self._receiving = False
        batch, self._arrived = self._arrived, []
        return batch

    async def _gather(self) -> None:
        """Take what is there already beside the first message. What ends the connection is for the next call."""
        try:
            for _ in range(min(self._link.gate.messages, _BATCH)):
                self._arrived.append(await self._next())
        except ConnectionClosed:
            self._check_open()

    async def _next(self) -> Incoming:
        data = _encoded(await self._link.connection.get_message())
        self._link.gated.taken(len(data))
        message: Message
        if not data and self._link.gate.oversized:
            message = self._link.gate.oversized.pop(0)
        else:
            message = parse(data, self._limits)
        return Incoming(message, len(data), None, self._headers, self._principal)

    async def hung_up(self) -> None:
        """Wait until the peer has said Close, or is gone; see `MessageChannel.hung_up`."""
        await over_or_hung_up(self._link.gated.over, socket_under(self._link.stream))

    async def aclose(self) -> None:
        """Close the connection with a closing handshake, within a second; see `MessageChannel.aclose`.

        A client says that it is done (1000), a server that it is going away (1001), or, while an exception is on its
        way, that something went wrong (1011).
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        if self._link.client:
            await self._link.close(1000)
        else:
            await self._link.close(1011 if isinstance(sys.exception(), Exception) else 1001)

    def obituary(self) -> str | None:
        """Say with which code and reason the other side closed, or how else it ended."""
        if not self._link.gated.over.is_set():
            return None
        if self._link.farewell is None:
            return self._link.trouble
        code, reason = self._link.farewell
        name = f" ({_CODES[code]})" if code in _CODES else ""
        return f"the peer closed the WebSocket with code {code}{name}" + (f": {reason[:200]!r}" if reason else "")

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")


def _encoded(text: str | bytes) -> bytes:
    # A function, so that the text, which may be four times as large, is gone before the message is parsed.
    return text.encode() if isinstance(text, str) else text


@asynccontextmanager
async def opened(
    link: Link,
    timeout: float,
    *,
    limits: Limits = DEFAULT_LIMITS,
    principal: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[WebSocketChannel]:
    """Open a connection and yield its channel; leaving closes it.

    Raises:
        HandshakeFailed: there is no connection.
    """
    async with link.opened(timeout):
        channel = WebSocketChannel(link, limits=limits, principal=principal, headers=headers)
        try:
            yield channel
        except BaseException:  # the close is due whatever it was
            try:
                await channel.aclose()
            except trio.Cancelled:
                pass  # what the body raised tells more
            raise
        await channel.aclose()


async def serve_upgraded(
    stream: trio.abc.Stream, head: Head, upgrade: Upgrade, *, keep_alive: KeepAlive = KEEP_ALIVE
) -> None:
    """Make a request a WebSocket and serve it, until either side has had enough. The stream is closed in the end.

    A request that is no WebSocket handshake after all (no key, another version) is answered and that is all.

    Args:
        stream: begins with the head of the request, of which nothing is believed but its end.
        head: what was asked for; its Sec-WebSocket headers count.
        upgrade: what was decided about it.
        keep_alive: what is done about a silent client.
    """
    gate = FrameGate(upgrade.max_message, masked=True)

    async def accept(nursery: trio.Nursery, gated: GatedStream) -> WebSocketConnection:
        request = await wrap_server_stream(nursery, gated, QUEUE, upgrade.max_message)
        return await request.accept(subprotocol=upgrade.subprotocol)

    link = Link(stream, gate, GatedStream(stream, gate, _request(head)), accept, False, keep_alive)
    try:
        async with opened(link, _HANDSHAKE, principal=upgrade.principal, headers=upgrade.headers) as channel:
            await upgrade.serve(channel)
    except HandshakeFailed as failure:
        _log.debug("no WebSocket for %s: %s", head.peer, failure)


def _request(head: Head) -> bytes:
    """Return what trio-websocket needs of a request: it reads heads of 16 KiB only, and takes a Host for a domain."""
    lines = [f"{head.method} / HTTP/1.1", "Host: localhost", "Upgrade: websocket", "Connection: Upgrade"]
    for name in ("sec-websocket-key", "sec-websocket-version", "sec-websocket-protocol"):
        lines += [f"{name}: {head.headers[name]}"] if name in head.headers else []
    return "\r\n".join((*lines, "", "")).encode("latin-1")
