"""WebSocket frames as bytes, and a peer on either side that sends any of them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

import attrs
import trio

from tests.peers.http1 import HttpWire, http_request

__all__ = [
    "BINARY",
    "CLOSE",
    "CONTINUATION",
    "FIN",
    "HANDSHAKE",
    "PING",
    "PONG",
    "TEXT",
    "RawWebSocket",
    "accept",
    "close",
    "frame",
    "handshake",
    "message",
    "read_head",
    "token",
    "upgrade",
]

KEY = base64.b64encode(bytes(16)).decode()
HANDSHAKE = {"sec-websocket-key": KEY, "sec-websocket-version": "13", "sec-websocket-protocol": "mcp"}

FIN, TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 0x80, 0x1, 0x2, 0x0, 0x8, 0x9, 0xA


def frame(first: int, payload: bytes = b"", *, masked: bool = True, size: int | None = None) -> bytes:
    """A frame with any first byte; `size` is what its header claims, if not the truth."""
    size = len(payload) if size is None else size
    mask = 0x80 if masked else 0
    if size < 126:
        header = bytes((first, mask | size))
    elif size < 65536:
        header = bytes((first, mask | 126)) + size.to_bytes(2, "big")
    else:
        header = bytes((first, mask | 127)) + size.to_bytes(8, "big")
    if not masked:
        return header + payload
    key = b"\x01\x02\x03\x04"
    keys = (key * (len(payload) // 4 + 1))[: len(payload)]
    return header + key + (int.from_bytes(payload) ^ int.from_bytes(keys)).to_bytes(len(payload))


def message(data: bytes, *, masked: bool = True) -> bytes:
    """A text message in one frame."""
    return frame(FIN | TEXT, data, masked=masked)


def close(code: int, reason: str = "", *, masked: bool = True) -> bytes:
    """A Close frame."""
    return frame(FIN | CLOSE, code.to_bytes(2, "big") + reason.encode(), masked=masked)


@attrs.define(eq=False)
class RawWebSocket:
    """One end of a connection, after the handshake, that writes any bytes."""

    stream: trio.abc.Stream
    _buffer: bytes = b""

    async def say(self, *frames: bytes) -> None:
        """Write frames as they are."""
        await self.stream.send_all(b"".join(frames))

    async def hear(self) -> tuple[int, bytes]:
        """The next frame: its first byte and payload; (0, b"") at the end."""
        while True:
            if len(self._buffer) >= 2:
                size, at = self._buffer[1] & 0x7F, 2
                if size > 125:
                    at = 4 if size == 126 else 10
                    size = int.from_bytes(self._buffer[2:at], "big")
                masked = 4 if self._buffer[1] & 0x80 else 0
                if len(self._buffer) >= at + masked + size:
                    first, key = self._buffer[0], self._buffer[at : at + masked] or bytes(4)
                    payload = self._buffer[at + masked : at + masked + size]
                    self._buffer = self._buffer[at + masked + size :]
                    return first, bytes(byte ^ key[n % 4] for n, byte in enumerate(payload)) if masked else payload
            try:
                chunk = await self.stream.receive_some()
            except trio.BrokenResourceError:
                chunk = b""
            if not chunk:
                return 0, b""
            self._buffer += chunk

    async def close_code(self) -> int | None:
        """The code of the Close frame that comes before the end, or None without one; other frames are skipped."""
        while True:
            first, payload = await self.hear()
            if first == FIN | CLOSE:
                return int.from_bytes(payload[:2], "big")
            if not first:
                return None


def handshake(*lines: str, path: str = "/ws", host: str = "localhost") -> bytes:
    """A client's opening handshake, with more header lines."""
    ours = (f"{name}: {value}" for name, value in HANDSHAKE.items())
    return http_request("GET", path, "Connection: Upgrade", "Upgrade: websocket", *ours, *lines, host=host)


async def upgrade(wire: HttpWire, *lines: str, path: str = "/ws") -> RawWebSocket:
    """Do a client's opening handshake."""
    await wire.send(handshake(*lines, path=path))
    head = await wire.head()
    assert head.status == 101, head
    assert head.headers.get("sec-websocket-protocol") == ("mcp" if path == "/ws" else None)
    return RawWebSocket(wire.stream, bytes(wire.buffer))


async def accept(
    stream: trio.abc.Stream, *frames: bytes, lines: Sequence[str] = (), answer: bytes | None = None
) -> RawWebSocket:
    """Do a server's opening handshake, agreeing to no subprotocol; frames leave in the same write.

    Args:
        stream: leads to the client, who has sent nothing else yet.
        frames: what follows the answer.
        lines: more header lines of the answer.
        answer: what is said in place of the answer.
    """
    _, headers, rest = await read_head(stream)
    accepted = f"Sec-WebSocket-Accept: {token(headers['sec-websocket-key'])}"
    head = ["HTTP/1.1 101 X", "Upgrade: websocket", "Connection: Upgrade", accepted]
    right = "\r\n".join([*head, *lines, "", ""]).encode()
    await stream.send_all((right if answer is None else answer) + b"".join(frames))
    return RawWebSocket(stream, rest)


def token(key: str) -> str:
    """The Sec-WebSocket-Accept that answers a key (RFC 6455, section 4.2.2)."""
    return base64.b64encode(hashlib.sha1(f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()).digest()).decode()


async def read_head(stream: trio.abc.ReceiveStream) -> tuple[str, dict[str, str], bytes]:
    """Read an HTTP head; returns its first line, headers by lower-case name, and what came behind it."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = await stream.receive_some()
        if not chunk:
            raise trio.BrokenResourceError(f"no whole head in {data!r}")
        data += chunk
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return first, {name.lower(): value.strip() for name, _, value in pairs}, rest
