"""Load over WebSocket: the handshake and the frames, no more of RFC 6455 than a client needs that is in a hurry.

trio-websocket takes some 100 microseconds per message, several times what servers are to be measured by.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import attrs
import trio

from trimcp.bench.caller import LoadCaller
from trimcp.bench.link import Address, LoadLink
from trimcp.bench.load import Load
from trimcp.bench.mux import Opener, Road
from trimcp.bench.tally import Tally
from trimcp.bench.writer import Writer
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.errors import ConnectionLost
from trimcp.framing.frames import text_frame
from trimcp.framing.gathering import Gathered

if TYPE_CHECKING:
    from trimcp.transports.websocket.client import WebSocketServer

__all__ = ["FrameReader", "websocket_opener"]

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_LONGEST_HEAD: Final = 64 * 1024
_CONTINUATION, _TEXT, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x8, 0x9, 0xA
_FIN: Final = 0x80
_CLOSE_FRAME: Final = b"\x88\x82\0\0\0\0\x03\xe8"  # Close, masked with nothing, 1000


@attrs.define(eq=False)
class FrameReader:
    """Messages and pings out of the bytes that a server sends.

    Attributes:
        pings: the payloads of pings to be answered.
        fault: why nothing more can be read, or None.
    """

    max_message: int
    pings: list[bytes] = attrs.field(init=False, factory=list)
    fault: str | None = attrs.field(init=False, default=None)
    _pieces: list[bytes] = attrs.field(init=False, factory=list)
    _held: int = attrs.field(init=False, default=0)
    _needed: int = attrs.field(init=False, default=2)
    _message: Gathered | None = attrs.field(init=False, default=None)  # the one in fragments that is under way

    def feed(self, data: bytes) -> list[bytes]:
        """Return the texts of the messages that these bytes complete."""
        if self._pieces:
            self._pieces.append(data)
            self._held += len(data)
            if self._held < self._needed:
                return []
            data = b"".join(self._pieces)  # once for a large message, however many pieces it came in
            self._pieces.clear()
        messages: list[bytes] = []
        at, end = 0, len(data)
        while self.fault is None:
            self._needed = 2
            if end - at < 2:
                break
            first, size = data[at], data[at + 1]
            start = at + 2
            if size > 125:
                start += 2 if size == 126 else 8
                if end < start:
                    self._needed = start - at
                    break
                # A frame that is masked comes out longer than any may be, and so does a length beyond 63 bits.
                size = int.from_bytes(data[at + 2 : start], "big") if size in (126, 127) else 1 << 64
            if size > self.max_message:
                self.fault = f"a frame that is masked, or larger than {self.max_message:,} bytes"
                break
            if end - start < size:
                self._needed = start - at + size
                break
            at = start + size
            self._take(first, data[start:at], messages)
        if at < end:
            self._pieces.append(data[at:])
            self._held = end - at
        return messages

    def _take(self, first: int, payload: bytes, messages: list[bytes]) -> None:
        if first == _FIN | _TEXT and self._message is None:
            messages.append(payload)
        elif first == _FIN | _PING:
            self.pings.append(payload)
        elif first == _FIN | _CLOSE:
            code = int.from_bytes(payload[:2], "big") if payload else 1005
            self.fault = f"the server closed it (code {code}) {payload[2:].decode(errors='replace')}".rstrip()
        elif first in (_TEXT, _CONTINUATION, _FIN) and (first == _TEXT) is (self._message is None):
            if self._message is None:
                self._message = Gathered()
            self._message.add(payload)
            if self._message.size > self.max_message:
                self.fault = f"a message larger than {self.max_message:,} bytes"
            elif first == _FIN:
                messages.append(self._message.take())
                self._message = None
        elif first != _FIN | _PONG:
            self.fault = f"a frame that begins with {first:#04x}, which no MCP server sends"


@attrs.define(eq=False)
class _FrameRoad:
    """Messages as text frames over one connection."""

    _link: LoadLink
    _tally: Tally
    _reader: FrameReader
    _first: bytes
    _writer: Writer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._writer = Writer(self._link.send_nowait, self._link.send_all, self._tally)

    def send(self, messages: Sequence[bytes]) -> None:
        pieces: list[bytes] = []
        for message in messages:
            pieces += text_frame(message, masked=True)
        self._writer.write(b"".join(pieces))

    async def run(self) -> None:
        await self._writer.run()

    async def receive(self) -> Sequence[bytes]:
        reader = self._reader
        if reader.fault is not None:
            raise trio.BrokenResourceError(reader.fault)
        data, self._first = self._first or await self._link.receive(), b""
        if not data:
            raise trio.EndOfChannel("the server closed the connection")
        self._tally.bytes_in += len(data)
        messages = reader.feed(data)
        for payload in reader.pings:
            self._writer.write(bytes((_FIN | _PONG, 0x80 | len(payload))) + b"\0\0\0\0" + payload)
        reader.pings.clear()
        return messages

    async def close_reason(self) -> str:
        return self._reader.fault or "the server closed the connection"


def websocket_opener(server: WebSocketServer) -> Opener:
    """Return what connects to the server anew for each session."""
    parts = urlsplit(server.url)
    tls = parts.scheme == "wss"
    address = Address(parts.hostname or "", parts.port or (443 if tls else 80), tls, server.socket)
    target = parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="").geturl()
    host = "localhost" if parts.scheme == "ws+unix" else parts.netloc

    @asynccontextmanager
    async def opened(load: Load, caller: LoadCaller) -> AsyncIterator[Road]:
        link = await address.dial(load.plan.opening, load.ssl_context or server.ssl_context)
        try:
            lines = "".join(f"{name}: {value}\r\n" for name, value in server.headers.items())
            rest = await _shake(link, f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{lines}", load.plan.opening)
            yield _FrameRoad(link, load.tally, FrameReader(CLIENT_MAX_MESSAGE), rest)
            _part(link)
        finally:
            link.close()

    return opened


def _part(link: LoadLink) -> None:
    """Say goodbye, if that can be done at once."""
    try:
        link.send_nowait(_CLOSE_FRAME)
    except trio.BrokenResourceError:
        return


async def _shake(link: LoadLink, head: str, patience: float) -> bytes:
    """Ask for WebSocket (RFC 6455, section 4.1); return what came behind the answer."""
    key = base64.b64encode(os.urandom(16))
    wanted = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
    head += "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mcp\r\n"
    answer = b""
    try:
        with trio.fail_after(patience):
            await link.send_all(head.encode() + b"Sec-WebSocket-Key: %b\r\n\r\n" % key)
            while b"\r\n\r\n" not in answer:
                piece = await link.receive()
                answer += piece
                if not piece or len(answer) > _LONGEST_HEAD:
                    raise ConnectionLost(f"no answer to the handshake of WebSocket but {answer[:200]!r}")
    except trio.TooSlowError:
        raise ConnectionLost(f"the handshake of WebSocket was not answered within {patience:g} seconds") from None
    except trio.BrokenResourceError as error:
        raise ConnectionLost(f"the connection broke in the handshake of WebSocket: {error}") from None
    found, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = found.split(b"\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if status.split(b" ")[1:2] != [b"101"] or headers.get(b"sec-websocket-accept") != wanted:
        raise ConnectionLost(f"the server does not speak WebSocket here: {answer[:200]!r}")
    return rest
