"""A WebSocket server as a target: where it is, what it refuses and why, TLS, Unix sockets, bad servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.peers.serving import answering
from tests.peers.tls import client_context, server_context
from tests.peers.websockets import (
    CONTINUATION,
    FIN,
    PING,
    PONG,
    TEXT,
    accept,
    close,
    frame,
    message,
    read_head,
)
from tests.transports.websocket_support import Meeting, host, ids, listening, outgoing, text, turns_of
from trimcp.channel import MessageChannel
from trimcp.errors import ConnectionLost, LocalError
from trimcp.transports.websocket import client as websocket_client
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.transports.websocket.frames import KeepAlive
from trimcp.wire.jsonrpc import Malformed

Answer = Callable[[trio.SocketStream], Awaitable[None]]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://localhost/ws", "begins with ws://"),
        ("localhost:8000/ws", "begins with ws://"),
        ("ws:///ws", "names a host"),
        ("ws://localhost:0/ws", "names a host"),
        ("ws://localhost:99999/ws", "no URL"),
        ("ws://[::1/ws", "no URL"),
        ("ws://localhost/ä", "ASCII"),
        ("ws://localhost/a b", "ASCII"),
        ("ws://localhost/a\r\nX: y", "ASCII"),
        ("ws://me:secret@localhost/ws", "credentials"),
    ],
)
def test_what_is_no_address(url: str, why: str) -> None:
    with pytest.raises(LocalError, match=why) as caught:
        WebSocketServer(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "headers",
    [{"X\r\n": "y"}, {"": "y"}, {"X": "secret\r\nY: z"}, {"X": "secretä"}, {"host": "x"}, {"Sec-WebSocket-Key": "x"}],
)
def test_what_is_no_header(headers: dict[str, str]) -> None:
    with pytest.raises(LocalError) as caught:
        WebSocketServer("ws://localhost/ws", headers)
    assert "secret" not in str(caught.value)


def test_secrets_are_not_shown() -> None:
    server = WebSocketServer("ws://localhost:80/key-in-path?token=key", {"Authorization": "Bearer key"})
    assert "key" not in repr(server)
    assert "ws://localhost:80/..." in repr(server)
    assert server.key == WebSocketServer("ws://localhost:80/key-in-path?token=key").key


async def test_what_the_server_sees(autojump_clock: MockClock) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        first, headers, _ = await read_head(stream)
        assert first == "GET /a/b?c=%20d HTTP/1.1"
        assert headers["host"] == f"127.0.0.1:{port}"
        assert headers["x-trace"] == "7"
        assert headers["sec-websocket-protocol"] == "mcp"
        assert "sec-websocket-extensions" not in headers
        assert "origin" not in headers
        await stream.send_all(b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 0\r\n\r\n")

    async with answering(answer) as port:
        with pytest.raises(ConnectionLost, match="418 I'm a Teapot; check the URL"):
            async with WebSocketServer(f"ws://127.0.0.1:{port}/a/b?c=%20d#e", {"X-Trace": "7"}).connect():
                raise AssertionError


JSON_ERROR = b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"the \\n Origin is not allowed"}}'


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "400 Bad Request; .*have their WebSocket at /ws"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "401 Unauthorized; it wants credentials"),
        (
            b"HTTP/1.1 403 Forbidden\r\nContent-Length: 99\r\n\r\n" + JSON_ERROR,
            r"403 .*\('the \\n Origin is not allowed'",
        ),
        (b"HTTP/1.1 404 Not Found\r\n\r\nno such page", "404 Not Found; there is nothing at this path.*/ws"),
        (b"HTTP/1.1 426 Upgrade Required\r\nUpgrade: h2c\r\n\r\n", "426 Upgrade Required; .* check the URL"),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "503 .* try again later"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "200 OK; check the URL"),
        (
            b"HTTP/1.1 301 Moved\r\nLocation: wss://x.test/\x1b[2J\r\n\r\n",
            r"points to 'wss://x.test/\\x1b\[2J'; connect",
        ),
        (b"HTTP/1.1 302 Found\r\n\r\n", "points to 'nowhere'"),
        (b"HTTP/1.1 999 What\r\n\r\n", "answered 999; check the URL"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", "103 Early Hints"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "no handshake of a WebSocket"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: bm9uc2Vuc2U=\r\n\r\n",
            "no handshake of a WebSocket",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "the server opens no WebSocket here"),
        (b"HTTP/1.1 4", "the connection was closed"),
        (b"", "the connection was closed"),
        (b"X: y\r\n" * 50_000, "must have an end"),
    ],
)
async def test_a_refusal_says_why_and_what_to_do(autojump_clock: MockClock, reply: bytes, why: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await read_head(stream)
        try:
            await stream.send_all(reply)
        except trio.BrokenResourceError:
            pass

    async with answering(answer) as port:
        url = f"ws://127.0.0.1:{port}/ws"
        with pytest.raises(ConnectionLost, match=rf"no WebSocket at {url}/\.\.\.: .*{why}") as caught:
            async with WebSocketServer(f"{url}/secret0123456789ab?key=secret").connect():
                raise AssertionError
    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("drip", [False, True])
async def test_a_server_that_does_not_answer(autojump_clock: MockClock, drip: bool) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        try:
            while drip:
                await trio.sleep(1)
                await stream.send_all(b"X")
        except trio.BrokenResourceError:
            return
        await trio.sleep_forever()

    async with answering(answer) as port:
        with pytest.raises(ConnectionLost, match="the handshake took more than 30 seconds"):
            async with WebSocketServer(f"ws://127.0.0.1:{port}").connect():
                raise AssertionError
        assert trio.current_time() == pytest.approx(30, abs=0.1)


async def test_nobody_is_there() -> None:
    with pytest.raises(ConnectionLost, match=r"cannot connect to ws://127\.0\.0\.1:1/ws: .*; is the server running"):
        async with WebSocketServer("ws://127.0.0.1:1/ws").connect():
            raise AssertionError
    with pytest.raises(ConnectionLost, match="no address is known"):
        async with WebSocketServer("ws://host.invalid/ws").connect():
            raise AssertionError
    with pytest.raises(ConnectionLost, match=r"cannot connect to ws\+unix"):
        async with WebSocketServer("ws+unix://%2Fno%2Fsuch.sock/ws").connect():
            raise AssertionError


# TLS and Unix sockets


@asynccontextmanager
async def listening_with_tls(meeting: Meeting) -> AsyncIterator[int]:
    tls = server_context("localhost")

    async def serve(stream: trio.SocketStream) -> None:
        try:
            await host(trio.SSLStream(stream, tls, server_side=True, https_compatible=True), meeting.upgrade())
        except trio.BrokenResourceError:
            await trio.aclose_forcefully(stream)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def exchange(client: MessageChannel, server: MessageChannel) -> None:
    """Send something both ways, and let the client leave."""
    await client.send([outgoing(1, "x" * 100_000)])
    assert ids(list(await server.receive())) == [1]
    await server.send([outgoing(2), outgoing(3)])
    assert ids(list(await client.receive())) == [2, 3]
    await client.aclose()
    with pytest.raises(trio.EndOfChannel):
        await server.receive()


async def test_tls() -> None:
    context, meeting = client_context(), Meeting()
    async with listening_with_tls(meeting) as port:
        async with WebSocketServer(f"wss://localhost:{port}/ws", ssl_context=context).connect() as client:
            await exchange(client, await meeting.channel())
        with pytest.raises(ConnectionLost, match=r"its certificate is not trusted .*; pass ssl_context="):
            async with WebSocketServer(f"wss://localhost:{port}/ws").connect():
                raise AssertionError
        with pytest.raises(ConnectionLost, match=r"its certificate is not trusted .*127.0.0.1"):
            async with WebSocketServer(f"wss://127.0.0.1:{port}/ws", ssl_context=context).connect():
                raise AssertionError
        meeting.done.set()

    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with answering(answer) as port:
        with pytest.raises(ConnectionLost, match="does the server speak TLS on this port"):
            async with WebSocketServer(f"wss://localhost:{port}/ws").connect():
                raise AssertionError


@pytest.mark.parametrize("in_url", [True, False])
async def test_unix_sockets(tmp_path: Path, in_url: bool) -> None:
    path = tmp_path / "s.sock"
    meeting = Meeting()
    sock = trio.socket.socket(trio.socket.AF_UNIX)
    await sock.bind(str(path))
    sock.listen()

    async def serve(stream: trio.SocketStream) -> None:
        await host(stream, meeting.upgrade())

    if in_url:
        target = WebSocketServer(f"ws+unix://{str(path).replace('/', '%2F')}/ws")
    else:
        target = WebSocketServer("ws://name/ws", uds=str(path))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(sock)])
        async with target.connect() as client:
            await exchange(client, await meeting.channel())
        meeting.done.set()
        nursery.cancel_scope.cancel()


async def test_a_trace_shows_what_passes() -> None:
    lines: list[str] = []
    meeting = Meeting()
    async with listening(meeting.upgrade()) as port:
        async with WebSocketServer(f"ws://127.0.0.1:{port}", trace=lines.append).connect() as client:
            await exchange(client, await meeting.channel())
        meeting.done.set()
    assert [line.split()[1] for line in lines] == ["-->", "<--", "<--"]


# Servers that misbehave after the handshake


@pytest.mark.parametrize("extra", ["Sec-WebSocket-Protocol: other", "Sec-WebSocket-Extensions: permessage-deflate"])
async def test_a_server_that_agrees_to_what_was_not_offered(autojump_clock: MockClock, extra: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await accept(stream, lines=[extra])
        assert await stream.receive_some() == b""

    async with answering(answer) as port:
        with pytest.raises(ConnectionLost, match="no handshake of a WebSocket"):
            async with WebSocketServer(f"ws://127.0.0.1:{port}").connect():
                raise AssertionError


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([frame(FIN | 0x2, b"x", masked=False)], 1003),
        ([message(b"\xff", masked=False)], 1007),
        ([message(b"{}")], 1002),
        ([frame(FIN | 0x40 | TEXT, b"{}", masked=False)], 1002),
        ([frame(FIN | CONTINUATION, b"{}", masked=False)], 1002),
        ([close(1006, masked=False)], 1002),
        ([frame(FIN | TEXT, size=10**6, masked=False)], 1009),
    ],
)
async def test_a_server_that_breaks_the_protocol(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, frames: list[bytes], code: int
) -> None:
    monkeypatch.setattr(websocket_client, "CLIENT_MAX_MESSAGE", 10_000)
    codes: list[int | None] = []

    async def answer(stream: trio.SocketStream) -> None:
        raw = await accept(stream, message(text(1), masked=False), *frames)
        codes.append(await raw.close_code())
        # Whatever else it sends is not kept.
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await stream.send_all(message(text(2), masked=False) * 1000)

    async with answering(answer) as port:
        async with WebSocketServer(f"ws://127.0.0.1:{port}").connect() as client:
            assert ids(list(await client.receive())) == [1]
            with pytest.raises(trio.BrokenResourceError, match=f"broke the WebSocket protocol .{code}"):
                await client.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert codes == [code]


@pytest.mark.parametrize("tiny", [frame(FIN | PONG, masked=False), frame(CONTINUATION, b" ", masked=False)])
async def test_a_server_that_sends_tiny_frames_lets_others_in_between(tiny: bytes) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        frames = [frame(TEXT, b"{", masked=False), tiny * 10_000, frame(FIN | CONTINUATION, b"}", masked=False)]
        await accept(stream, *frames)
        await trio.sleep_forever()

    async with answering(answer) as port, WebSocketServer(f"ws://127.0.0.1:{port}").connect() as client:
        assert await turns_of(client.receive) >= 10_000 / 16


async def test_a_server_that_takes_too_long_for_a_message(autojump_clock: MockClock) -> None:
    codes: list[int | None] = []

    async def answer(stream: trio.SocketStream) -> None:
        raw = await accept(stream, frame(TEXT, b"{", masked=False))
        codes.append(await raw.close_code())

    quick = KeepAlive(message_timeout=7)
    async with (
        answering(answer) as port,
        WebSocketServer(f"ws://127.0.0.1:{port}", keep_alive=quick).connect() as client,
    ):
        with pytest.raises(trio.BrokenResourceError, match="took too long to end a message"):
            await client.receive()
        await trio.testing.wait_all_tasks_blocked()
        assert codes == [1008]


async def test_an_answer_too_large_is_told_by_its_id(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_client, "CLIENT_MAX_MESSAGE", 10_000)

    async def answer(stream: trio.SocketStream) -> None:
        large = b'{"jsonrpc":"2.0","result":{"a":"%s"},"id":5}' % (b"x" * 20_000)
        pieces = [large[:9_000], large[9_000:18_000], large[18_000:]]
        frames = [frame(first, each, masked=False) for first, each in zip((TEXT, 0, FIN), pieces, strict=True)]
        frames.insert(1, frame(FIN | PING, b"?", masked=False))
        await accept(stream, *frames, message(text(6), masked=False))
        await trio.sleep_forever()

    async with (
        answering(answer) as port,
        WebSocketServer(f"ws://127.0.0.1:{port}").connect() as client,
    ):
        first, second = await client.receive()
    assert isinstance(first.message, Malformed)
    assert (first.message.id, first.message.is_response) == (5, True)
    assert ids([second]) == [6]


async def test_a_server_that_leaves_says_why(autojump_clock: MockClock) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await accept(stream, close(1013, "busy", masked=False))
        assert await stream.receive_some() != b""

    async with answering(answer) as port, WebSocketServer(f"ws://127.0.0.1:{port}").connect() as client:
        with pytest.raises(trio.EndOfChannel):
            await client.receive()
        assert client.close_reason() == "the peer closed the WebSocket with code 1013 (try again later): 'busy'"
