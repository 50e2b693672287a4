"""Servers by hand, for what our client promises: a child, the end of a pipe in memory, and a WebSocket."""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio

import trimcp
from tests.guarantees.client_posts import ASKING, posted_to_by_hand
from tests.transports.websocket_support import FIN, TEXT, Raw, message, read_head
from trimcp.transports.memory import memory_channels
from trimcp.transports.stream import StreamChannel
from trimcp.transports.websocket_client import WebSocketServer
from trimcp.wire.revisions import V2025_11_25

__all__ = ["EVERY_ROAD", "ROADS", "ByHand", "asked_by_hand", "served_by_hand"]

ROADS = ("stdio", "framed", "websocket")
EVERY_ROAD = (*ROADS, *ASKING)

# A child that is nothing but a pipe to whoever listens there.
_PIPE = """
import os, socket, sys, threading
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
def out():
    while data := sock.recv(1 << 16):
        while data:
            data = data[os.write(1, data):]
    os._exit(0)
threading.Thread(target=out, daemon=True).start()
while data := os.read(0, 1 << 16):
    sock.sendall(data)
"""


@attrs.define(eq=False)
class ByHand:
    """A server by hand: it says lines or frames as they are, and hears what the client says."""

    stream: trio.abc.Stream
    raw: Raw | None = None
    _data: bytearray = attrs.field(factory=bytearray)

    async def say(self, *texts: bytes) -> None:
        """Say messages."""
        if self.raw is not None:
            await self.raw.say(*(message(text, masked=False) for text in texts))
            return
        for text in texts:
            await self.pour(text, b"\n")

    async def pour(self, *pieces: bytes) -> None:
        """Write bytes as they are."""
        for piece in pieces:
            await self.stream.send_all(piece)

    async def hear(self) -> Any:
        """The next message."""
        if self.raw is not None:
            first, payload = await self.raw.hear()
            assert first == FIN | TEXT, (first, payload)
            return orjson.loads(payload)
        while (end := self._data.find(b"\n")) < 0:
            chunk = await self.stream.receive_some(1 << 16)
            assert chunk, "the client has left"
            self._data += chunk
        line = bytes(self._data[:end])
        del self._data[: end + 1]
        return orjson.loads(line)

    async def greet(self) -> None:
        """Do a server's part of the handshake."""
        hello = await self.hear()
        assert hello["method"] == "initialize"
        info = {"name": "by hand", "version": "1"}
        offers = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
        await self.say(orjson.dumps({"jsonrpc": "2.0", "id": hello["id"], "result": offers}))
        assert (await self.hear())["method"] == "notifications/initialized"


@asynccontextmanager
async def served_by_hand(
    road: str, client: trimcp.Client, folder: Path
) -> AsyncIterator[tuple[trimcp.ClientSession, ByHand]]:
    """Yield a client's session, and what it is connected to."""
    async with trio.open_nursery() as nursery:
        hands: tuple[Any, Any] = trio.open_memory_channel[ByHand](1)
        if road == "stdio":
            listener = trio.socket.socket(trio.socket.AF_UNIX)
            await listener.bind(str(folder / "by-hand"))
            listener.listen(1)
            target: Any = trimcp.stdio(sys.executable, "-c", _PIPE, str(folder / "by-hand"))

            async def accept() -> None:
                with listener:
                    sock, _ = await listener.accept()
                hands[0].send_nowait(ByHand(trio.SocketStream(sock)))

            nursery.start_soon(accept)
        elif road == "framed":
            end, target = memory_channels(framed=True)
            assert isinstance(end, StreamChannel)
            hands[0].send_nowait(ByHand(trio.StapledStream(end._sender, end._receiver)))
        else:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            target = WebSocketServer(f"ws://127.0.0.1:{listeners[0].socket.getsockname()[1]}/ws")

            async def handshake(stream: trio.SocketStream) -> None:
                await hands[0].send(ByHand(stream, Raw(stream, await _upgraded(stream))))
                await trio.sleep_forever()

            nursery.start_soon(trio.serve_listeners, handshake, listeners)
        greeted = trio.Event()
        found: list[ByHand] = []

        async def greet() -> None:
            hand = await hands[1].receive()
            await hand.greet()
            found.append(hand)
            greeted.set()

        nursery.start_soon(greet)
        async with client.connect(target, revision=V2025_11_25) as session:
            await greeted.wait()
            try:
                yield session, found[0]
            finally:
                if road != "framed":
                    await trio.aclose_forcefully(found[0].stream)
        nursery.cancel_scope.cancel()


def asked_by_hand(
    road: str, client: trimcp.Client, folder: Path
) -> AbstractAsyncContextManager[tuple[trimcp.ClientSession, Any]]:
    """The same on EVERY_ROAD on which a server may ask whenever it likes: `say`, and `hear` what is answered."""
    return posted_to_by_hand(road, client) if road in ASKING else served_by_hand(road, client, folder)


async def _upgraded(stream: trio.SocketStream) -> bytes:
    """Accept a handshake; returns what came behind it."""
    _, headers, rest = await read_head(stream)
    key = headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    lines = ["HTTP/1.1 101 X", "Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept}"]
    await stream.send_all("\r\n".join([*lines, "Sec-WebSocket-Protocol: mcp", "", ""]).encode())
    return rest
