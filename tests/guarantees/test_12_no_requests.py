"""Promise 12: requests that two might read differently, heads beyond measure and frames of no protocol do no harm."""

from __future__ import annotations

import sys

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.guarantees.places import Places, raw, serving
from tests.peers.clients import on
from tests.peers.http1 import http_request, post
from tests.peers.messages import initialize
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import SOFTWARE
from tests.peers.websockets import BINARY, CLOSE, CONTINUATION, FIN, PING, TEXT, close, frame, message

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the server is looked into by way of /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)


def _variants() -> dict[str, bytes]:
    text = b"{}"
    plain = post(text)
    length = b"Content-Length: 2\r\n"

    def head(lines: bytes, body: bytes = b"0\r\n\r\n") -> bytes:
        return plain.replace(length, lines).removesuffix(text) + body

    chunked = b"Transfer-Encoding: chunked\r\n"
    return {
        "both lengths": head(length + chunked),
        "two lengths": head(b"Content-Length: 2\r\nContent-Length: 3\r\n", text),
        "a signed length": head(b"Content-Length: +2\r\n", text),
        "a length in hex": head(b"Content-Length: 0x2\r\n", text),
        "no length": head(b"Content-Length: \r\n", text),
        "an endless length": head(b"Content-Length: " + b"9" * 40 + b"\r\n", text),
        "another coding": head(b"Transfer-Encoding: xchunked\r\n"),
        "two codings": head(b"Transfer-Encoding: chunked, identity\r\n"),
        "a coding twice": head(chunked * 2),
        "a blank before the colon": head(b"Transfer-Encoding : chunked\r\n"),
        "a vertical tab": head(b"Transfer-Encoding: \x0bchunked\r\n"),
        "a signed chunk": head(chunked, b"-1\r\n{}\r\n0\r\n\r\n"),
        "a chunk in hex": head(chunked, b"0x2\r\n{}\r\n0\r\n\r\n"),
        "a chunk too long": head(chunked, b"5\r\n{}\r\n0\r\n\r\n"),
        "a chunk too short": head(chunked, b"1\r\n{}\r\n0\r\n\r\n"),
        "no Host": plain.replace(b"Host: localhost\r\n", b""),
        "two Hosts": plain.replace(b"Host: localhost\r\n", b"Host: localhost\r\nHost: localhost\r\n"),
        "a bare carriage return": plain.replace(b"Host: localhost\r\n", b"Host: localhost\rX: y\r\n"),
        "a NUL": plain.replace(b"Host: localhost\r\n", b"Host: localhost\r\nX: a\0b\r\n"),
        "a blank before a name": plain.replace(b"Host: localhost\r\n", b" Host: localhost\r\n"),
        "HTTP/0.9": b"POST /mcp\r\n\r\n",
    }


@OnBoth
async def test_no_request_is_smuggled_behind_another(servers: ServerPool, host: str) -> None:
    victim = http_request("GET", "/healthz")
    async with servers(host, limits={"body_timeout": 0.5, "linger_timeout": 0.1}) as server:
        for name, attack in _variants().items():
            async with server.wire() as wire:
                await wire.send(attack, victim)
                said = await wire.everything()
            if host == "own" or said:  # Hypercorn's answer can be lost to a reset
                assert said[9:12] in (b"400", b"408", b"413", b"501"), name
            assert said.count(b"HTTP/1.1 ") <= 1, f"{name}: what came behind was answered"


@OnBoth
async def test_heads_and_codings_beyond_measure_are_refused(servers: ServerPool, host: str) -> None:
    plain, host_line = post(b"{}"), b"Host: localhost\r\n"
    attacks = {
        "a long header": plain.replace(host_line, host_line + b"X: " + b"y" * 200_000 + b"\r\n"),
        "many headers": plain.replace(host_line, host_line + b"X: y\r\n" * 50_000),
        "a long line": plain.replace(b"/mcp", b"/" + b"x" * 200_000),
        "compressed": plain.replace(host_line, host_line + b"Content-Encoding: gzip\r\n"),
    }
    async with servers(host) as server:
        for name, attack in attacks.items():
            async with server.wire() as wire:
                status = (await wire.ask(attack)).status
                assert status == 415 if name == "compressed" else status in (400, 414, 431), name


async def alive(server: ServerProcess) -> bool:
    async with on(server, "websocket") as lane:
        return (await lane.ask(1, "echo", text="alive"))["id"] == 1


_BROKEN = {
    "no mask": (frame(FIN | TEXT, b"{}", masked=False), 1002),
    "an extension": (frame(FIN | TEXT | 0x40, b"{}"), 1002),
    "no such frame": (frame(FIN | 0x3, b"{}"), 1002),
    "no such control frame": (frame(FIN | 0xB, b""), 1002),
    "a ping in pieces": (frame(PING, b"x"), 1002),
    "a ping too long": (frame(FIN | PING, b"x" * 126), 1002),
    "a piece of nothing": (frame(FIN | CONTINUATION, b"{}"), 1002),
    "a message within another": (frame(TEXT, b"{") + frame(FIN | TEXT, b"{}"), 1002),
    "half a code": (frame(FIN | CLOSE, b"\x03"), 1002),
    "a code of nobody's": (close(1005), 1002),
    "a length in two bytes too many": (bytes((TEXT, 0x80 | 126, 0, 1, *bytes(4))) + b"{", 1002),
    "a piece with a length in eight bytes too many": (
        frame(TEXT, b"{") + bytes((FIN | CONTINUATION, 0x80 | 127, *bytes(7), 1, *bytes(4))) + b"}",
        1002,
    ),
    "no UTF-8": (message(b'"\xff"'), 1007),
    "binary": (frame(FIN | BINARY, b"{}"), 1003),
}


@Places
async def test_who_breaks_the_protocol_is_told_and_nobody_else_notices(servers: ServerPool, place: str) -> None:
    async with serving(servers, place) as server, on(server, "websocket") as beside:
        for name, (frames, code) in _BROKEN.items():
            async with raw(server) as peer:
                await peer.say(message(initialize("2025-11-25")), frames)
                found = await peer.close_code()
            # Hypercorn's parser tells some faults apart less well, and its last words can be lost to a reset.
            assert found == code or (place == "hypercorn" and found in (1002, 1003, None)), (name, found)
            assert (await beside.ask(name, "echo"))["id"] == name


@Places
async def test_handshakes_that_are_none_are_refused(servers: ServerPool, place: str) -> None:
    right = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    async with serving(servers, place) as server:
        for lines in (
            right,
            (*right[:2], "Sec-WebSocket-Version: 8", key),
            (*right[:2], key),
            (*right, "Sec-WebSocket-Key: x"),
            (right[0], right[2], key),
            (right[1], right[2], key),
            (*right, key, "Transfer-Encoding: chunked"),
            (*right, key, "Content-Length: 5"),
        ):
            async with server.wire() as wire:
                await wire.send(http_request("GET", "/ws", *lines))
                with_body = any("Length" in line or "chunked" in line for line in lines)
                with trio.move_on_after(0.5 if with_body else PATIENCE) as scope:
                    status = (await wire.head()).status
                if scope.cancelled_caught:
                    assert with_body, "it waits for the body"
                else:
                    assert status != 101 or lines[-1].startswith(("Content", "Transfer")), (lines, status)
        async with server.wire() as wire:
            await wire.send(http_request("GET", "/ws", *right, key, "Sec-WebSocket-Extensions: permessage-deflate"))
            head = await wire.head()
            assert head.status == 101
            assert "sec-websocket-extensions" not in head.headers
        assert await alive(server)
