"""That the load on sessions does what a client does, and finds out when a server does not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import pytest
import trio
from http_sessions import Connection, Session, SseSession, StreamableSession, WebSocketSession, call, each, echo

import trimcp
from tests.peers.serving import served


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Serve a tool that returns what it is given, and yield the URL without a path."""
    server = trimcp.Server("bench", version="1.0")

    @server.tool(name="echo")
    async def repeat(text: str) -> str:
        return text

    async with served(server) as place:
        yield place.url.removesuffix("/mcp")


Kind: TypeAlias = type[StreamableSession | SseSession | WebSocketSession]
KINDS: list[tuple[Kind, str]] = [(StreamableSession, "/mcp"), (SseSession, "/sse"), (WebSocketSession, "/ws")]


@pytest.mark.parametrize(("kind", "path"), KINDS)
async def test_sessions_are_opened_called_and_closed(kind: Kind, path: str) -> None:
    async with serving() as url:
        sessions: list[Session] = [kind(Connection(url + path)) for _ in range(5)]

        async def open_(session: Session, connection: Connection) -> None:
            await session.open(connection)

        async def close(session: Session, connection: Connection) -> None:
            await session.close(connection)

        await each(sessions, open_, 2)
        await each(sessions, echo, 2)
        await each(sessions, close, 2)


@pytest.mark.parametrize(("kind", "path"), KINDS)
async def test_the_right_text_comes_back(kind: Kind, path: str) -> None:
    async with serving() as url:
        session, connection = kind(Connection(url + path)), Connection(url + path)
        await session.open(connection)
        assert await call(session, connection, "echo", {"text": "line\r\n\r\nline é"}) == "line\r\n\r\nline é"
        with pytest.raises(AssertionError, match="nobody"):
            await call(session, connection, "nobody", {})
        await session.close(connection)
        await connection.close()


async def test_a_closed_session_is_gone() -> None:
    async with serving() as url:
        session, connection = StreamableSession(Connection(f"{url}/mcp")), Connection(f"{url}/mcp")
        await session.open(connection)
        await session.close(connection)
        with pytest.raises(AssertionError, match="404"):
            await echo(session, connection)
        await connection.close()


async def test_a_wrong_text_is_found_out() -> None:
    async with served_wrongly() as connection:
        with pytest.raises(AssertionError, match="wanted 'hello"):
            await echo(StreamableSession(Connection(connection.url)), connection)


async def test_an_answer_to_somebody_else_is_found_out() -> None:
    async with served_wrongly(id=0) as connection:
        with pytest.raises(AssertionError, match="tools/call"):
            await echo(StreamableSession(Connection(connection.url)), connection)


@asynccontextmanager
async def served_wrongly(id: int | None = None) -> AsyncIterator[Connection]:
    """Yield a connection to a server that answers each request with a wrong text, or to another id."""

    async def answer(stream: trio.SocketStream) -> None:
        request = b""
        async with stream:
            while b"}}}" not in request:
                request += await stream.receive_some()
            asked = json.loads(request.partition(b"\r\n\r\n")[2])["id"] if id is None else id
            result = {"content": [{"type": "text", "text": "wrong"}]}
            body = json.dumps({"jsonrpc": "2.0", "id": asked, "result": result}).encode()
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await stream.send_all(head.encode() + body)

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        connection = Connection(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/mcp")
        yield connection
        await connection.close()
        nursery.cancel_scope.cancel()
