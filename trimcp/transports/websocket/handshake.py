"""The opening handshake of WebSocket (RFC 6455, section 4), of client and server.

No extension is offered or accepted, so nothing is ever decompressed.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping
from typing import Final

import trio

from trimcp.transports.descriptors import READ_SIZE

SUBPROTOCOL: Final = "mcp"
"""The subprotocol of MCP, which clients offer in Sec-WebSocket-Protocol and servers accept if it is offered."""

_VERSION: Final = "13"
_GUID: Final = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_HEAD: Final = 128 * 1024
_END: Final = b"\r\n\r\n"
_PROTOCOL: Final = "Sec-WebSocket-Protocol"
_UPGRADE: Final = {"Upgrade": "websocket", "Connection": "Upgrade"}


class HandshakeFailed(Exception):
    """The opening handshake failed."""

    def __init__(self, why: str, answer: bytes = b"") -> None:
        super().__init__(why)
        # for a client, the bytes that were received instead of an acceptance; for a server, the response to send
        self.answer = answer


def accept(headers: Mapping[str, str], subprotocol: str | None) -> bytes:
    """Return a server's answer to a request for a WebSocket. `headers` are by lower-case name.

    Raises HandshakeFailed: the request is no valid handshake.
    """
    version, key = headers.get("sec-websocket-version"), headers.get("sec-websocket-key")
    refused = {"Sec-WebSocket-Version": _VERSION, "Content-Length": "0", "Connection": "close"}
    if version is not None and version != _VERSION:
        raise HandshakeFailed("the client speaks another version", _head("HTTP/1.1 426 Upgrade Required", refused))
    if version is None or key is None:
        raise HandshakeFailed("the client sent no version or no key", _head("HTTP/1.1 400 Bad Request", refused))
    answer = {**_UPGRADE, "Sec-WebSocket-Accept": _token(key)}
    if subprotocol is not None:
        answer[_PROTOCOL] = subprotocol
    return _head("HTTP/1.1 101 Switching Protocols", answer)


async def open_websocket(
    stream: trio.abc.Stream, host: str, resource: str, headers: Mapping[str, str], subprotocol: str = SUBPROTOCOL
) -> bytes:
    """Request a WebSocket at `resource` (path and query), and return the bytes that followed the server's answer.

    Raises HandshakeFailed: the server did not accept.
    """
    key = base64.b64encode(os.urandom(16)).decode()
    asked = {"Host": host, **_UPGRADE, "Sec-WebSocket-Key": key, "Sec-WebSocket-Version": _VERSION}
    head = bytearray()
    try:
        await stream.send_all(_head(f"GET {resource} HTTP/1.1", {**asked, _PROTOCOL: subprotocol, **headers}))
        while (end := head.find(_END)) < 0:
            chunk = await stream.receive_some(READ_SIZE)
            head += chunk
            if not chunk:
                raise HandshakeFailed("the connection was closed", bytes(head))
            if len(head) > _MAX_HEAD:
                raise HandshakeFailed("the head of a handshake must have an end", bytes(head))
    except trio.BrokenResourceError:
        raise HandshakeFailed("the connection broke", bytes(head)) from None
    if not head.startswith(b"HTTP/1.1 101 "):
        raise HandshakeFailed("the server opens no WebSocket here", bytes(head))
    if not _accepted(bytes(head[:end]), key, subprotocol):
        raise HandshakeFailed("the answer is no handshake of a WebSocket", bytes(head))
    return bytes(head[end + len(_END) :])


def _accepted(head: bytes, key: str, subprotocol: str) -> bool:
    """Whether a server's answer accepts this WebSocket, without anything that was not offered."""
    _, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            return False
        joined = headers.get(name.lower())
        headers[name.lower()] = value.strip(" \t") if joined is None else f"{joined}, {value.strip()}"
    return (
        headers.get("upgrade", "").lower() == "websocket"
        and "upgrade" in [each.strip().lower() for each in headers.get("connection", "").split(",")]
        and headers.get("sec-websocket-accept") == _token(key)
        and headers.get("sec-websocket-protocol") in (None, subprotocol)
        and "sec-websocket-extensions" not in headers
    )


def _token(key: str) -> str:
    return base64.b64encode(hashlib.sha1((key + _GUID).encode("latin-1"), usedforsecurity=False).digest()).decode()


def _head(first: str, headers: Mapping[str, str]) -> bytes:
    return "\r\n".join((first, *(f"{name}: {value}" for name, value in headers.items()), "", "")).encode("latin-1")
