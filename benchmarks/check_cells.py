"""The fixed work that `check.py` counts, one cell for each road a call can take.

Everything runs in one process, over pipes and Unix sockets, and uses public names almost only, to outlive what it
measures. Who is not measured speaks MCP by hand (`check_far_end`), and checks every reply.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import attrs
import orjson
import trio
import trio.testing
from check_far_end import (
    CLOSE,
    INITIALIZED,
    LEGACY,
    MODERN,
    OLDEST,
    Http,
    Http2,
    Peer,
    call_agent,
    cancel,
    check,
    dial,
    echo,
    frame,
    initialize,
    message,
    opened,
    request,
    standard_pipes,
)
from floor.minimal import serve_connection

import trimcp
from trimcp.transports.http.h2.heads import write_block
from trimcp.transports.stdio.streams import FdReceiver, FdSender
from trimcp.transports.stream import StreamChannel

__all__ = ["CELLS", "Cell", "Work"]

_UNDER_WAY = 64
Work: TypeAlias = Callable[[], Awaitable[None]]


@attrs.frozen
class Cell:
    """Some work that can be repeated.

    Attributes:
        count: how many operations one run of the work is.
        open: prepares it, yields it, and takes everything down.
        rests: whether time may pass between two runs of the work; a connection with keep-alives would notice.
    """

    count: int
    open: Callable[[], AbstractAsyncContextManager[Work]]
    rests: bool = True


# The server


def make_server(tools: int = 0) -> trimcp.Server[None]:
    """Return the server of all cells, with so many more tools that do nothing."""
    server = trimcp.Server("check", version="1.0")

    @server.tool
    async def echo(text: str) -> str:
        """Return the text."""
        return text

    @server.tool
    async def stream(n: int, *, ctx: trimcp.Context) -> str:
        """Report every number on the way."""
        for number in range(1, n + 1):
            await ctx.report_progress(number, n)
        return "done"

    @server.tool
    async def wait() -> str:
        """Wait until somebody cancels it."""
        await trio.sleep_forever()
        raise AssertionError("nobody wakes it")

    async def nothing(text: str, number: int = 1) -> str:
        """Do nothing, at some length."""
        return text

    for number in range(tools):
        server.add_tool(nothing, name=f"tool_{number}")
    return server


# Lines over pipes


@asynccontextmanager
async def over_stdio(revision: str, tools: int = 0) -> AsyncIterator[Peer]:
    """Serve over pipes, as `run_stdio` does, and yield a client that has been greeted."""
    with standard_pipes() as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trimcp.serve_stdio, make_server(tools))
            if revision != MODERN:
                await peer.send(initialize(revision)[1] + b"\n")
                assert b'"protocolVersion"' in await peer.until(b"\n")
                await peer.send(INITIALIZED + b"\n")
            yield peer
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def calls_over_stdio(
    revision: str, number: int, under_way: int = _UNDER_WAY, text: str = ""
) -> AsyncIterator[Work]:
    async with over_stdio(revision) as peer:

        async def work() -> None:
            for _ in range(number // under_way):
                calls = [echo(revision, text) for _ in range(under_way)]
                wanted = {id: text for id, text, _ in calls}
                await peer.send(b"".join(data + b"\n" for _, _, data in calls))
                while wanted:
                    for line in await peer.lines():
                        check(line, wanted)

        yield work


@asynccontextmanager
async def progress_over_stdio(revision: str, number: int) -> AsyncIterator[Work]:
    async with over_stdio(revision) as peer:

        async def work() -> None:
            id, data = request(
                revision, "tools/call", {"name": "stream", "arguments": {"n": number}}, progressToken="check"
            )
            await peer.send(data + b"\n")
            wanted = {id: "done"}
            seen = 0
            while wanted:
                for line in await peer.lines():
                    if b'"notifications/progress"' in line:
                        seen += 1
                        assert orjson.loads(line)["params"]["progress"] == seen
                    else:
                        check(line, wanted)
            assert seen == number

        yield work


@asynccontextmanager
async def cancelled_over_stdio(revision: str, number: int) -> AsyncIterator[Work]:
    async with over_stdio(revision) as peer:

        async def work() -> None:
            for _ in range(number // _UNDER_WAY):
                calls = [request(revision, "tools/call", {"name": "wait", "arguments": {}}) for _ in range(_UNDER_WAY)]
                await peer.send(b"".join(data + b"\n" for _, data in calls))
                notes = [cancel(revision, id) for id, _ in calls]
                # A call behind them, whose answer comes when they have been dealt with.
                id, text, data = echo(revision)
                await peer.send(b"".join(line + b"\n" for line in (*notes, data)))
                check(await peer.until(b"\n"), {id: text})

        yield work


@asynccontextmanager
async def list_over_stdio(revision: str, number: int, tools: int) -> AsyncIterator[Work]:
    async with over_stdio(revision, tools) as peer:

        async def work() -> None:
            for _ in range(number):
                id, data = request(revision, "tools/list", {})
                await peer.send(data + b"\n")
                message = orjson.loads(await peer.until(b"\n"))
                assert message["id"] == id
                assert len(message["result"]["tools"]) >= tools

        yield work


# HTTP


@asynccontextmanager
async def listening(tools: int = 0, server: Any = None, **settings: Any) -> AsyncIterator[str]:
    """Serve over HTTP, and yield the path of a Unix socket."""
    server = make_server(tools) if server is None else server
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        async with trio.open_nursery() as nursery:
            serve = partial(trimcp.serve_http, server, uds=path, settings=trimcp.HttpSettings(**settings), grace=0)
            await nursery.start(serve)
            yield path
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def over_http(revision: str, tools: int = 0, **settings: Any) -> AsyncIterator[Http]:
    """Serve over HTTP, and yield a connection, with its session in the legacy era."""
    async with listening(tools, **settings) as path:
        http = Http(dial(path), revision)
        if revision != MODERN:
            http = await opened(http)
        yield http
        http.peer.close()


@asynccontextmanager
async def calls_over_http(revision: str, number: int, text: str = "", **settings: Any) -> AsyncIterator[Work]:
    async with over_http(revision, **settings) as http:

        async def work() -> None:
            for _ in range(number):
                id, wanted, data = echo(revision, text)
                _, [reply] = await http.post(data, method="tools/call", name="echo")
                check(reply, {id: wanted})

        yield work


@asynccontextmanager
async def calls_over_http2(number: int) -> AsyncIterator[Work]:
    fields = [
        *((":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", "/mcp")),
        *(("accept", "application/json, text/event-stream"), ("content-type", "application/json")),
        *(("mcp-protocol-version", MODERN), ("mcp-method", "tools/call"), ("mcp-name", "echo")),
    ]
    async with listening() as path:
        http = Http2(dial(path), write_block(fields))
        await http.start()

        async def work() -> None:
            for _ in range(number):
                id, wanted, data = echo(MODERN)
                check(await http.post(data), {id: wanted})

        yield work
        http.peer.close()


@asynccontextmanager
async def progress_over_http(revision: str, number: int) -> AsyncIterator[Work]:
    async with over_http(revision) as http:

        async def work() -> None:
            id, data = request(
                revision, "tools/call", {"name": "stream", "arguments": {"n": number}}, progressToken="check"
            )
            _, [*reports, reply] = await http.post(data, method="tools/call", name="stream")
            assert [orjson.loads(each)["params"]["progress"] for each in reports] == list(range(1, number + 1))
            check(reply, {id: "done"})

        yield work


@asynccontextmanager
async def list_over_http(revision: str, number: int, tools: int) -> AsyncIterator[Work]:
    async with over_http(revision, tools) as http:

        async def work() -> None:
            for _ in range(number):
                _, data = request(revision, "tools/list", {})
                _, [reply] = await http.post(data, method="tools/list")
                assert len(orjson.loads(reply)["result"]["tools"]) >= tools

        yield work


@asynccontextmanager
async def sessions_over_http(revision: str, number: int) -> AsyncIterator[Work]:
    """Sessions that are opened, listened to, used once and deleted."""
    async with listening() as path:
        connection = Http(dial(path), revision)

        async def work() -> None:
            for _ in range(number):
                http = await opened(connection)
                stream = attrs.evolve(http, peer=dial(path))
                await stream.send("GET", "/mcp", "Accept: text/event-stream\r\n")
                await stream.head()
                id, text, data = echo(revision)
                _, [reply] = await http.post(data)
                check(reply, {id: text})
                await http.send("DELETE", "/mcp", "")
                await connection.peer.exactly(int((await connection.head()).get("content-length", 0)))
                assert not [chunk async for chunk in stream.chunks() if b"data: {" in chunk]
                stream.peer.close()
            await trio.testing.wait_all_tasks_blocked()

        yield work
        connection.peer.close()


@asynccontextmanager
async def told_over_http(revision: str, number: int) -> AsyncIterator[Work]:
    """Sessions that are told, each on its stream, that a resource has changed."""
    server, uri, streams = make_server(), "check://greeting", []

    @server.resource(uri)
    async def greeting() -> str:
        """Return a greeting."""
        return "hello"

    async with listening(server=server) as path:
        connection = Http(dial(path), revision)
        for _ in range(number):
            http = await opened(connection)
            stream = attrs.evolve(http, peer=dial(path))
            await stream.send("GET", "/mcp", "Accept: text/event-stream\r\n")
            await stream.head()
            await http.post(request(revision, "resources/subscribe", {"uri": uri})[1])
            streams.append(stream)

        clock: Any = trio.lowlevel.current_clock()

        async def work() -> None:
            clock.now += 1.0  # the last event was long ago, so this one is written at once
            server.resource_updated(uri)
            for stream in streams:
                while b'"notifications/resources/updated"' not in await stream.chunk():
                    pass  # the stream's first event, or a comment that keeps it alive

        yield work
        for http in (connection, *streams):
            http.peer.close()


@asynccontextmanager
async def calls_over_sse(number: int) -> AsyncIterator[Work]:
    """HTTP+SSE of 2024-11-05."""
    async with listening() as path:
        http, stream = Http(dial(path), OLDEST), Http(dial(path), OLDEST)
        await stream.send("GET", "/sse", "Accept: text/event-stream\r\n")
        await stream.head()
        chunks = stream.chunks()
        place = (await anext(chunks)).split(b"data: ")[1].split()[0].decode()

        async def ask(data: bytes) -> bytes:
            await http.post(data, path=place)
            event = await anext(chunks)
            return event.partition(b"data: ")[2].rstrip()

        assert b'"protocolVersion"' in await ask(initialize(OLDEST)[1])
        await http.post(INITIALIZED, path=place)

        async def work() -> None:
            for _ in range(number):
                id, text, data = echo(OLDEST)
                check(await ask(data), {id: text})

        yield work
        await chunks.aclose()
        http.peer.close()
        stream.peer.close()


# Agent tools


@asynccontextmanager
async def calls_of_agents(number: int, **members: str) -> AsyncIterator[Work]:
    """Calls by the agent-tools protocol, over HTTP."""
    from trimcp.agent_tools import AgentTools  # the other cells have none of it

    server = make_server()
    async with listening(agent_tools=AgentTools(server), server=server) as path:
        http = Http(dial(path), MODERN)

        async def work() -> None:
            for number_of_call in range(number):
                await call_agent(http, str(number_of_call), **members)

        yield work
        http.peer.close()


@asynccontextmanager
async def calls_over_grpc(number: int, reports: int = 0) -> AsyncIterator[Work]:
    """Calls of agent tools through gRPC, 64 under way, or one that reports progress; the client is ours."""
    from trimcp.agent_tools import AgentTools, connect

    server = make_server()
    async with (
        listening(agent_tools=AgentTools(server), server=server) as path,
        connect("grpc://localhost", uds=path) as agent,
    ):

        async def call(calls: int) -> None:
            for each in range(calls):
                assert await agent.call("echo", {"text": f"hello {each}"}) == f"hello {each}"

        # Sessions of one call are kept for later ones, as many as were open at once: in the work that depends on turns.
        async with trio.open_nursery() as nursery:
            for _ in range(2 * _UNDER_WAY):
                nursery.start_soon(agent.call, "stream", {"n": 100})

        async def work() -> None:
            if reports:
                seen: list[float] = []
                told = agent.call("stream", {"n": reports}, on_progress=lambda said: seen.append(said.progress))
                assert await told == "done"
                assert seen == [float(each) for each in range(1, reports + 1)]
                return
            async with trio.open_nursery() as nursery:
                for _ in range(_UNDER_WAY):
                    nursery.start_soon(call, number // _UNDER_WAY)

        yield work


# WebSocket


async def over_websocket(path: str, revision: str) -> Peer:
    """Connect to a server, and return the connection when it has been greeted."""
    peer = dial(path)
    headers = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    headers += f"Sec-WebSocket-Key: {'A' * 22}==\r\nSec-WebSocket-Protocol: mcp\r\n"
    await peer.send(f"GET /ws HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode())
    assert (await peer.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    if revision != MODERN:
        await peer.send(frame(initialize(revision)[1]))
        assert b'"protocolVersion"' in await message(peer)
        await peer.send(frame(INITIALIZED))
    return peer


@asynccontextmanager
async def sessions_over_websocket(revision: str, number: int) -> AsyncIterator[Work]:
    """Sessions that are opened, used once and closed."""
    async with listening() as path:

        async def work() -> None:
            for _ in range(number):
                peer = await over_websocket(path, revision)
                id, text, data = echo(revision)
                await peer.send(frame(data))
                check(await message(peer), {id: text})
                await peer.send(CLOSE)
                assert await peer.exactly(4) == b"\x88\x02\x03\xe8"
                peer.close()
            await trio.testing.wait_all_tasks_blocked()

        yield work


@asynccontextmanager
async def calls_over_websocket(revision: str, number: int) -> AsyncIterator[Work]:
    async with listening() as path:
        peer = await over_websocket(path, revision)

        async def work() -> None:
            for _ in range(number // _UNDER_WAY):
                calls = [echo(revision) for _ in range(_UNDER_WAY)]
                wanted = {id: text for id, text, _ in calls}
                await peer.send(b"".join(frame(data) for _, _, data in calls))
                while wanted:
                    check(await message(peer), wanted)

        yield work
        peer.close()


# Clients


async def call(session: trimcp.ClientSession, number: int, under_way: int) -> None:
    """Call `echo` so often."""

    async def caller() -> None:
        for _ in range(number // under_way):
            result = await session.call_tool("echo", {"text": "hello number"})
            assert result.content == [trimcp.Text("hello number")]

    if under_way == 1:
        await caller()
        return
    async with trio.open_nursery() as nursery:
        for _ in range(under_way):
            nursery.start_soon(caller)


@asynccontextmanager
async def calls_in_memory(number: int, under_way: int) -> AsyncIterator[Work]:
    async with trimcp.Client("check").connect(trimcp.in_process(make_server())) as session:
        yield partial(call, session, number, under_way)


@asynccontextmanager
async def calls_by_http_client(revision: str, number: int) -> AsyncIterator[Work]:
    async with listening() as path:
        target = trimcp.http("http://localhost/mcp", uds=path)
        async with trimcp.Client("check").connect(target, revision=revision) as session:
            yield partial(call, session, number, 1)


@asynccontextmanager
async def calls_by_http_client_alone(revision: str, number: int, under_way: int) -> AsyncIterator[Work]:
    """A client over HTTP, with a server that does the least it can and is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        far_end = trio.socket.socket(trio.socket.AF_UNIX)
        await far_end.bind(path)
        far_end.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve_connection, [trio.SocketListener(far_end)])
            target = trimcp.http("http://localhost/mcp", uds=path)
            async with trimcp.Client("check").connect(target, revision=revision) as session:
                yield partial(call, session, number, under_way)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def calls_by_client(revision: str, number: int) -> AsyncIterator[Work]:
    """A client over pipes, with a server that has an answer ready for everything."""
    (reader, far_writer), (far_reader, writer) = os.pipe(), os.pipe()
    peer = Peer(far_reader, far_writer)
    channel = StreamChannel(FdReceiver(reader), FdSender(writer))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_answer, peer)
        async with trimcp.Client("check").connect(channel, revision=revision) as session:
            yield partial(call, session, number, _UNDER_WAY)
    peer.close()


async def _answer(peer: Peer) -> None:
    info = {"name": "script", "version": "1"}
    capabilities = {"capabilities": {"tools": {}}}
    results: dict[str, dict[str, Any]] = {
        "initialize": {"protocolVersion": LEGACY, "serverInfo": info, **capabilities},
        "server/discover": {"supportedVersions": [MODERN], "serverInfo": info, **capabilities},
        "tools/list": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "hello number"}]},
    }
    cached = {"resultType": "complete", "ttlMs": 0, "cacheScope": "public"}
    while True:
        replies = []
        try:
            lines = await peer.lines()
        except EOFError:  # the client is done
            return
        for line in lines:
            asked = orjson.loads(line)
            if "id" in asked:
                result = {**results[asked["method"]], **(cached if "_meta" in asked["params"] else {})}
                replies.append(orjson.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}))
        await peer.send(b"".join(reply + b"\n" for reply in replies))


_LARGE = "x" * 100_000

CELLS: dict[str, Cell] = {
    "stdio, 2025-11-25": Cell(256, partial(calls_over_stdio, LEGACY, 256)),
    "stdio, 2026-07-28": Cell(256, partial(calls_over_stdio, MODERN, 256)),
    "stdio, progress": Cell(256, partial(progress_over_stdio, MODERN, 256)),
    "stdio, cancelled": Cell(128, partial(cancelled_over_stdio, LEGACY, 128)),
    "stdio, 100 KB": Cell(8, partial(calls_over_stdio, LEGACY, 8, 1, _LARGE)),
    "stdio, list of 1,000 tools": Cell(8, partial(list_over_stdio, MODERN, 8, 1_000)),
    "HTTP 2025-11-25, JSON": Cell(128, partial(calls_over_http, LEGACY, 128)),
    "HTTP 2026-07-28, JSON": Cell(128, partial(calls_over_http, MODERN, 128)),
    "HTTP/2 2026-07-28, JSON": Cell(128, partial(calls_over_http2, 128)),
    "HTTP 2025-11-25, SSE": Cell(128, partial(calls_over_http, LEGACY, 128, reply="sse")),
    "HTTP 2026-07-28, SSE": Cell(128, partial(calls_over_http, MODERN, 128, reply="sse")),
    "HTTP 2025-11-25, progress": Cell(256, partial(progress_over_http, LEGACY, 256)),
    "HTTP 2026-07-28, progress": Cell(256, partial(progress_over_http, MODERN, 256)),
    "HTTP 2026-07-28, 100 KB": Cell(8, partial(calls_over_http, MODERN, 8, _LARGE)),
    "HTTP 2026-07-28, list of 1,000 tools": Cell(8, partial(list_over_http, MODERN, 8, 1_000)),
    "HTTP 2025-11-25, a change told": Cell(64, partial(told_over_http, LEGACY, 64)),
    "HTTP 2025-11-25, a session": Cell(32, partial(sessions_over_http, LEGACY, 32)),
    "agent tools": Cell(128, partial(calls_of_agents, 128)),
    "agent tools, in a context": Cell(128, partial(calls_of_agents, 128, context_id="ctx-1")),
    "agent tools through gRPC": Cell(256, partial(calls_over_grpc, 256), rests=False),
    "agent tools through gRPC, progress": Cell(256, partial(calls_over_grpc, 1, 256), rests=False),
    "HTTP+SSE": Cell(128, partial(calls_over_sse, 128), rests=False),
    "WebSocket": Cell(256, partial(calls_over_websocket, LEGACY, 256), rests=False),
    "WebSocket, a session": Cell(32, partial(sessions_over_websocket, LEGACY, 32)),
    "in memory, one under way": Cell(128, partial(calls_in_memory, 128, 1)),
    "in memory, 64 under way": Cell(256, partial(calls_in_memory, 256, _UNDER_WAY)),
    "client over pipes, 2025-11-25": Cell(256, partial(calls_by_client, LEGACY, 256)),
    "client over pipes, 2026-07-28": Cell(256, partial(calls_by_client, MODERN, 256)),
    "client and server over HTTP": Cell(32, partial(calls_by_http_client, MODERN, 32)),
    **{
        f"client over HTTP {revision}, {under_way} under way": Cell(
            128, partial(calls_by_http_client_alone, revision, 128, under_way), rests=False
        )
        for revision in (LEGACY, MODERN)
        for under_way in (1, _UNDER_WAY)
    },
}
