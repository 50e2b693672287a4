"""A client that insists on the newest revision and gets no connection is told what happened, on each transport."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable

import pytest
import trio

import trimcp
from tests.peers.serving import answering
from tests.peers.websockets import accept, close, read_head
from trimcp.wire.revisions import LATEST

Answer = Callable[[trio.SocketStream], Awaitable[object]]
BODY = '{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"not here"}}'


async def told(target: trimcp.Target) -> str:
    with pytest.raises(trimcp.ConnectionLost) as caught:
        async with trimcp.Client("c").connect(target, revision=LATEST):
            pytest.fail("there is nobody")
    assert "legacy" not in str(caught.value)
    return str(caught.value)


async def told_by(answer: Answer, url: str) -> str:
    """What a client is told of a server that does this with each connection."""
    async with answering(answer) as port:
        return await told(url.replace("PORT", str(port)))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/mcp", "ws://127.0.0.1:1/ws", "grpc://127.0.0.1:1"])
async def test_a_connection_that_is_refused(url: str) -> None:
    assert "is the server running, and is this its address?" in await told(url)


@pytest.mark.parametrize("reads", [True, False])
async def test_a_program_that_dies(reads: bool) -> None:
    program = f"{'input(); ' if reads else ''}raise SystemExit('Missing API key')"
    text = await told(trimcp.stdio(sys.executable, "-c", program))
    assert "exited with status 1" in text
    assert "Missing API key" in text


async def test_a_websocket_that_is_closed() -> None:
    text = await told_by(lambda stream: accept(stream, close(1011, "no disk", masked=False)), "ws://127.0.0.1:PORT/ws")
    assert "with code 1011 (internal error): 'no disk'" in text


@pytest.mark.parametrize("status", [401, 403, 404, 405, 426, 500])
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_status_that_refuses(scheme: str, status: int) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await read_head(stream)
        body = "" if status == 500 else BODY
        await stream.send_all(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())

    text = await told_by(answer, f"{scheme}://127.0.0.1:PORT/v1/mcp?key=secret")
    assert f"the server answered {status}" in text
    assert "/v1/mcp" in text
    assert "secret" not in text
