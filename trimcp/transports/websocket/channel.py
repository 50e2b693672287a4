"""Messages over WebSocket: one text message is one JSON-RPC message. docs/design/websocket.md describes the binding.

The channel of either side, and how a server begins one.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import attrs
import trio
from trio_websocket import ConnectionClosed

from trimcp.channel import Incoming, MessageChannel, OneTask, Outgoing
from trimcp.framing.frames import text_frame
from trimcp.nurseries import open_service_nursery
from trimcp.transports.descriptors import READ_SIZE, over_or_hung_up, socket_under
from trimcp.transports.http.seams import Head, Upgrade
from trimcp.transports.websocket.connection import WebSocketConnection
from trimcp.transports.websocket.frames import KEEP_ALIVE, WINDOW, KeepAlive
from trimcp.transports.websocket.handshake import HandshakeFailed, accept
from trimcp.wire.jsonrpc import Message, parse

__all__ = ["WebSocketChannel", "opened", "serve_upgraded"]

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
        connection: what carries the messages.
        principal, headers: put on every message that arrives.
    """

    half_open = False

    _connection: WebSocketConnection
    _principal: str | None
    _headers: Mapping[str, str] | None
    _arrived: list[Incoming] = attrs.field(factory=list, init=False)
    _sending: OneTask = attrs.field(factory=partial(OneTask, "sending on"), init=False)
    _receiving: OneTask = attrs.field(factory=partial(OneTask, "receiving from"), init=False)
    _broken: bool = attrs.field(default=False, init=False)
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        # Upper bound of unread input: one batch and two windows, each with what one read may bring beyond it and the
        # beginning of a message that it ends.
        self.read_ahead: tuple[int, int] = (_BATCH + 1, 2 * (WINDOW + 2 * READ_SIZE))

    async def send(self, batch: Sequence[Outgoing]) -> None:
        with self._sending:
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

    async def _send(self, batch: Sequence[Outgoing]) -> None:
        """Write the batch beside trio-websocket, which would copy each message five times and write it by itself."""
        gated, library = self._connection.gated, self._connection.library
        try:
            for message in batch:
                if library.closed is not None:
                    raise ConnectionClosed(library.closed)
                gated.hold(*text_frame(message.data, masked=self._connection.client))
                if gated.held > _WRITE:
                    await gated.flush()
            await gated.flush()
        except (ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            # The stream is also closed here when the peer has left, or has been silent for too long.
            self._check_open()
            raise trio.BrokenResourceError(self._connection.trouble) from None

    def set_max_message(self, size: int) -> None:
        self._connection.gate.max_message = size

    def taken(self) -> Hashable:
        return self._connection.gated.progress()

    async def receive(self) -> Sequence[Incoming]:
        with self._receiving:
            self._check_open()
            try:
                if self._arrived:
                    await trio.lowlevel.checkpoint()
                else:
                    self._arrived.append(await self._next())
                await self._gather()
            except ConnectionClosed:
                self._check_open()
                if self._connection.peer_close is None:
                    raise trio.BrokenResourceError(self._connection.trouble) from None
                raise trio.EndOfChannel("the peer has closed the connection") from None
        batch, self._arrived = self._arrived, []
        return batch

    async def _gather(self) -> None:
        """Take what is there already beside the first message. What ends the connection is for the next call."""
        try:
            for _ in range(min(self._connection.gate.messages, _BATCH)):
                self._arrived.append(await self._next())
        except ConnectionClosed:
            self._check_open()

    async def _next(self) -> Incoming:
        data = _encoded(await self._connection.library.get_message())
        self._connection.gated.taken(len(data))
        message: Message
        if not data and self._connection.gate.oversized:
            message = self._connection.gate.oversized.pop(0)
        else:
            message = parse(data)
        return Incoming(message, len(data), None, self._headers, self._principal)

    async def hung_up(self) -> None:
        await over_or_hung_up(self._connection.gated.over, socket_under(self._connection.stream))

    async def aclose(self) -> None:
        """Close the connection with a closing handshake, within a second; see `MessageChannel.aclose`.

        A client says that it is done (1000), a server that it is going away (1001), or, while an exception is on its
        way, that something went wrong (1011).
        """
        if self._closed:
            await trio.lowlevel.checkpoint()
            return
        self._closed = True
        if self._connection.client:
            await self._connection.close(1000)
        else:
            await self._connection.close(1011 if isinstance(sys.exception(), Exception) else 1001)

    def close_reason(self) -> str | None:
        """Return with which code and reason the other side closed, or how else the connection ended."""
        if not self._connection.gated.over.is_set():
            return None
        if self._connection.peer_close is None:
            return self._connection.trouble
        code, reason = self._connection.peer_close
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
    connection: WebSocketConnection, principal: str | None = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[WebSocketChannel]:
    """Run a connection and yield its channel; leaving closes it. What the body raises comes out as itself."""
    async with open_service_nursery() as nursery:
        nursery.start_soon(connection.run)
        async with WebSocketChannel(connection, principal, headers) as channel:
            yield channel


async def serve_upgraded(
    stream: trio.abc.Stream, head: Head, upgrade: Upgrade, *, keep_alive: KeepAlive = KEEP_ALIVE
) -> None:
    """Answer a request for a WebSocket and serve it, until either side has had enough. The stream is closed in the end.

    A request that is no handshake after all (no key, another version) is refused, and that is all.

    Args:
        stream: begins behind the head of the request.
        head: what was asked for; its Sec-WebSocket headers count.
        upgrade: what was decided about it.
        keep_alive: what is done about a client that is silent, or takes too long to say a message.
    """
    try:
        if await _answered(stream, head, upgrade):
            connection = WebSocketConnection(
                stream, upgrade.max_message, client=False, keep_alive=keep_alive, holding=head.holding
            )
            async with opened(connection, upgrade.principal, upgrade.headers) as channel:
                await upgrade.serve(channel)
    finally:
        await trio.aclose_forcefully(stream)


async def _answered(stream: trio.abc.Stream, head: Head, upgrade: Upgrade) -> bool:
    """Answer the handshake; False if there is no WebSocket."""
    try:
        answer, refused = accept(head.headers, upgrade.subprotocol), None
    except HandshakeFailed as failure:
        answer, refused = failure.answer, str(failure)
    try:
        with trio.fail_after(_HANDSHAKE):
            await stream.send_all(answer)
    except (trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
        refused = refused or "the client is gone"
    if refused is not None:
        _log.debug("no WebSocket for %s: %s", head.peer, refused)
    return refused is None
