"""One WebSocket under an ASGI server: a `MessageChannel` over its events. (ASGI specification, "WebSocket".)

Two tasks of the call connect the channel and the server. One always waits in `receive`, because only that reports that
the peer left. One calls `send`, because servers shield it from cancellation. So users of the channel can be cancelled
at once, whatever the peer does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.budget import LARGE, MemoryCharge
from trimcp.channel import Incoming, MessageChannel, OneTask, Outgoing, stall_text
from trimcp.principal import Principal
from trimcp.transports.http.asgi.request import (
    CUT,
    MESSAGES,
    PEER_CLOSED,
    AsgiEvent,
    Receive,
    Scope,
    Send,
    SendTimer,
    plain,
    response_start,
)
from trimcp.transports.http.interfaces import Application, Head, HttpResponse, Upgrade
from trimcp.wire.jsonrpc import parse

# RFC 6455 section 7.4.1.
_NORMAL: Final = 1000
_UNSUPPORTED_DATA: Final = 1003
_TOO_BIG: Final = 1009

_COPIES: Final = 1  # of a message that the server makes, beside ours

_CLOSING: Final = 2.0  # seconds a peer has to answer our close; without this wait the server resets the connection


@attrs.define(eq=False)
class WebSocketCall:
    """One `websocket` call of an ASGI server."""

    application: Application
    head: Head
    scope: Scope
    _receive: Receive
    _send: Send
    _stall_timeout: float = 60.0

    async def run(self) -> None:
        """Serve the connection, or refuse it. Returns once the peer is gone."""
        status = sent = 0
        try:
            found = await self.application.admit(self.head)
            if (await self._receive())["type"] != "websocket.connect":
                return
            if isinstance(found, Upgrade):
                extensions = self.scope.get("extensions") or {}
                if MESSAGES in extensions:
                    extensions[MESSAGES](found.max_message, self.head.holding)
                channel = AsgiWebSocket(
                    found.max_message,
                    found.principal,
                    found.headers,
                    read=found.read,
                    stall_timeout=self._stall_timeout,
                    wait_closed=extensions.get(PEER_CLOSED),
                    cut=extensions.get(CUT),
                )
                if self.head.holding is not None:
                    self.head.holding.holder = channel
                status = 101
                try:
                    await self._serve(found, channel)
                finally:
                    sent = channel.sent
            else:
                response = found if isinstance(found, HttpResponse) else plain(404, "there is no WebSocket here")
                status, sent = await self._refuse(response)
        finally:
            self.application.done(self.head, status, sent)

    async def _refuse(self, response: HttpResponse) -> tuple[int, int]:
        """Refuse the upgrade with this response, or 403 if the server cannot send it; return status and bytes sent."""
        if "websocket.http.response" not in (self.scope.get("extensions") or {}):
            await self._send({"type": "websocket.close", "code": _NORMAL})
            return 403, 0
        await self._send(response_start("websocket.http.response.start", response, len(response.body)))
        await self._send({"type": "websocket.http.response.body", "body": response.body, "more_body": False})
        return response.status, len(response.body)

    async def _serve(self, upgrade: Upgrade, channel: AsgiWebSocket) -> None:
        await self._send({"type": "websocket.accept", "subprotocol": upgrade.subprotocol, "headers": []})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(channel.pump_in, self._receive)
            nursery.start_soon(channel.pump_out, self._send)
            await upgrade.serve(channel)
            await channel.aclose()
            with trio.move_on_after(_CLOSING):
                await channel.over.wait()
            nursery.cancel_scope.cancel(reason="the connection has ended")


@attrs.define(eq=False)
class AsgiWebSocket(MessageChannel):
    """One JSON-RPC message per text message. (docs/design/websocket.md)

    A cancelled send has sent whole messages only, in an unknown number, and the channel stays usable.

    It has more than 20 fields because both directions of one connection keep what they have begun.
    """

    half_open = False

    max_message: int  # bytes; a larger one ends the connection with 1009
    principal: Principal | None = None  # of every `Incoming`
    headers: Mapping[str, str] | None = None  # likewise
    stall_timeout: float = attrs.field(default=60.0, kw_only=True)  # seconds: for a peer that does not read
    # Waits until the server knows that the peer is gone, even with unread events; None if it cannot.
    wait_closed: Callable[[], Awaitable[object]] | None = attrs.field(default=None, kw_only=True)
    cut: Callable[[], object] | None = attrs.field(default=None, kw_only=True)  # closes the connection at once
    read: Callable[[bytes], Any] = attrs.field(default=parse, kw_only=True)  # returns a message from its text
    over: trio.Event = attrs.field(init=False, factory=trio.Event)  # set once the peer is gone
    sent: int = attrs.field(init=False, default=0)  # bytes of messages passed to the server
    # Without buffers: a value that was sent has been received.
    _arriving: trio.MemorySendChannel[Incoming] = attrs.field(init=False)
    _arrived: trio.MemoryReceiveChannel[Incoming] = attrs.field(init=False)
    _leaving: trio.MemorySendChannel[str | None] = attrs.field(init=False)
    _left: trio.MemoryReceiveChannel[str | None] = attrs.field(init=False)
    _code: int = attrs.field(init=False, default=_NORMAL)
    _failure: str | None = attrs.field(init=False, default=None)
    _close_reason: str | None = attrs.field(init=False, default=None)
    too_slow: bool = attrs.field(init=False, default=False)
    _timer: SendTimer = attrs.field(init=False)
    _sending: OneTask = attrs.field(init=False, factory=partial(OneTask, "sending on"))
    _receiving: OneTask = attrs.field(init=False, factory=partial(OneTask, "receiving from"))
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._arriving, self._arrived = trio.open_memory_channel(0)
        self._leaving, self._left = trio.open_memory_channel(0)
        self._timer = SendTimer(self.stall_timeout)

    # Called by sessions

    async def send(self, batch: Sequence[Outgoing]) -> None:
        with self._sending:
            try:
                await trio.lowlevel.checkpoint_if_cancelled()
                for message in batch:
                    await self._leaving.send(message.data.decode())
                    self.sent += len(message.data)
                await self._leaving.send(None)  # received once the server has the previous messages
            except trio.ClosedResourceError:
                if self._closed:
                    raise trio.ClosedResourceError("this channel was closed") from None
                raise trio.BrokenResourceError(self._failure) from None

    def write_progress(self) -> Hashable:
        """Return a new value: only the server sees a message's progress, and it drops peers that do not read."""
        return object()

    async def receive(self) -> Sequence[Incoming]:
        with self._receiving:
            try:
                return [await self._arrived.receive()]
            except trio.EndOfChannel:
                if self._failure is not None:
                    raise trio.BrokenResourceError(self._failure) from None
                raise

    async def wait_peer_closed(self) -> None:
        await (self.over.wait if self.wait_closed is None else self.wait_closed)()

    def set_max_message(self, size: int) -> None:
        self.max_message = size

    async def aclose(self) -> None:
        """Close once the server has all sent messages."""
        self._closed = True
        self._leaving.close()
        self._arrived.close()
        await trio.lowlevel.checkpoint()

    def close_reason(self) -> str | None:
        return self._close_reason

    # For the budget, through the session

    @property
    def at_rest(self) -> bool:
        return True  # its session knows whether a handler is running

    def evict(self, why: str) -> None:
        """Close the connection at once, as far as the server can: what it is still to send is memory, too."""
        self._close_reason = why
        if self.cut is not None:
            self.cut()

    # Run by the call

    async def pump_in(self, receive: Receive) -> None:
        """Pass on received messages until the peer is gone. Only a slow session delays its reading."""
        with self._arriving, self._left:
            while (event := await receive())["type"] == "websocket.receive":
                try:
                    await self._take(event)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass  # closed here, or after a failure: later messages are dropped
                del event  # the next one may not arrive for hours
            self.over.set()
            if self._timer.cut:  # a message was not accepted for too long
                self.too_slow = True
                self._close_reason = stall_text(self.stall_timeout)
            # Servers report a clean close by the peer like a broken connection (Hypercorn: 1006), so the code is not
            # used.
            if self._close_reason is None:
                self._close_reason = f"the WebSocket was closed ({event.get('code', _NORMAL)})"

    async def _take(self, event: AsgiEvent) -> None:
        text = event.get("text")
        if text is None:
            return self._fail(_UNSUPPORTED_DATA, "the peer sent a binary message")
        data = text.encode("utf-8", "surrogatepass")  # the parser refuses lone surrogates, with the message's id
        if len(data) > self.max_message:
            return self._fail(_TOO_BIG, f"the peer sent a message larger than {self.max_message} bytes")
        large, holding = len(data) >= LARGE, self.holding
        if large and holding is not None and not holding.budget.take_turn():
            await holding.wait_for_turn(len(data))
        incoming = Incoming(self.read(data), len(data), None, self.headers, self.principal)
        if large and holding is not None:
            holding.budget.parsed()
        del data
        await self._arriving.send(incoming)
        return None

    def _fail(self, code: int, why: str) -> None:
        """End the connection from our side, with this code."""
        if self._failure is None and not self._closed:
            self._code, self._failure = code, why
            self._arriving.close()
            self._leaving.close()

    async def pump_out(self, send: Send) -> None:
        """Pass sent messages to the server, then the close."""
        copies = MemoryCharge(self.holding)  # the session counts a message once
        with self._left:
            try:
                async for text in self._left:
                    if text is not None:
                        copies.set(_COPIES * len(text))
                        self._timer.begin()
                        await send({"type": "websocket.send", "text": text})
                        self._timer.end()
                        copies.set(0)
                    del text  # the next one may not be sent for hours
                await send({"type": "websocket.close", "code": self._code})
            except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the peer is gone: some servers raise this, or `pump_in` has noticed it
