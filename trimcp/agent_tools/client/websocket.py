"""The agent-tools protocol over WebSocket, for clients: `channel` on a connection that is opened here.

trio-websocket is imported with this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from trimcp.agent_tools.client import wire
from trimcp.agent_tools.client.channel import ChannelWire, open_channel_wire
from trimcp.agent_tools.messages import errors, messages
from trimcp.errors import ConnectionLost
from trimcp.transports.websocket.channel import WebSocketChannel, running
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.handshake import HandshakeFailed
from trimcp.wire.jsonrpc import parse_value

PATH: Final = "/agent"
"""Where a service has its WebSocket, for a URL without a path."""

_REFUSALS: Final = (errors.Unauthenticated, errors.NotAllowed, errors.TooMuch, errors.Draining)
"""What a service answers to a handshake; any other status may be that of a proxy while it is away."""


@asynccontextmanager
async def open_agent_channel(
    target: wire.AgentTarget, read: Callable[[bytes], Any] = parse_value
) -> AsyncIterator[WebSocketChannel]:
    """Connect, and yield a channel of JSON values to the service; leaving closes the connection.

    Raises ConnectionLost, with why, or the AgentToolsError with which the service refused the connection.
    """
    target.check_no_auth()
    parts = urlsplit(target.url)
    path = PATH if parts.path in ("", "/") else parts.path
    server = WebSocketServer(
        parts._replace(path=path).geturl(),
        target.all_headers(),
        target.uds,
        target.ssl_context,
        timeout=target.timeout,
    )
    try:
        stream, early = await server.open(messages.SUBPROTOCOL)
    except ConnectionLost as error:
        raise _refused(error) from error.__cause__
    channel = WebSocketChannel(stream, target.max_message, client=True, early=early, read=read)
    async with running(channel):
        yield channel


@asynccontextmanager
async def open_websocket_wire(target: wire.AgentTarget) -> AsyncIterator[ChannelWire]:
    """Connect, and yield a wire to the service; leaving closes the connection. Raises as `open_agent_channel`."""
    async with open_agent_channel(target) as channel, open_channel_wire(channel) as opened:
        yield opened


def _refused(error: ConnectionLost) -> Exception:
    """Return the service's own error for a handshake that it refused; else the error as it is."""
    failure = error.__cause__
    if not isinstance(failure, HandshakeFailed):
        return error
    head, _, body = failure.answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1] if head.startswith(b"HTTP/1.1 ") else b""
    cls = next((each for each in _REFUSALS if b"%d" % each.http_status == status), None)
    try:
        value = orjson.loads(body)
    except ValueError:
        value = None
    if type(value) is dict and value.get("type") == messages.ErrorMessage.type:
        return errors.error_from(value.get("error"))
    return error if cls is None else cls(str(error))
