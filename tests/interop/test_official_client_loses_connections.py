"""The official Python SDK's client and our server over HTTP: connections that are lost or let go, and how it leaves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx2
import mcp_types as t
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from tests.interop.peers import Served

Steps = list[str | None]

on_both_hosts = pytest.mark.parametrize("host", ["own", "hypercorn"], indirect=True)
deprecated = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")


def converse(url: str, mode: str, body: Callable[[Client], Awaitable[None]], **options: Any) -> int:
    """Run `body` with a client connected to our server; return how often it came back for the rest of a stream."""
    failures: list[Exception] = []
    returns = 0

    async def note(request: httpx2.Request) -> None:
        nonlocal returns
        returns += "last-event-id" in request.headers

    async def main() -> None:
        with anyio.fail_after(30):
            async with (
                httpx2.AsyncClient(timeout=30, event_hooks={"request": [note]}) as http,
                Client(streamable_http_client(url, http_client=http), mode=mode, **options) as client,
            ):
                # Kept aside, because the client's task groups would wrap it in three groups.
                try:
                    await body(client)
                except Exception as failure:
                    failures.append(failure)

    anyio.run(main)
    if failures:
        raise failures[0]
    return returns


async def call(client: Client, tool: str, steps: Steps) -> t.CallToolResult:
    """Call a tool, and note the messages of its progress."""

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message)

    return await client.call_tool(tool, {}, progress_callback=on_progress)


@on_both_hosts
def test_it_comes_back_for_the_rest_when_the_server_lets_go(host: Served) -> None:
    steps: Steps = []

    async def body(client: Client) -> None:
        result = await call(client, "poll", steps)
        assert result.content == [t.TextContent(type="text", text="done")]
        assert steps == ["before", "after"]

    assert converse(host.http, "legacy", body) == 1


@on_both_hosts
def test_it_comes_back_for_what_was_lost_with_its_connection(lossy: Served) -> None:
    steps: Steps = []

    async def body(client: Client) -> None:
        result = await call(client, "lose_connection", steps)
        assert result.content == [t.TextContent(type="text", text="done")]
        assert steps == ["cut-here", "after"]

    assert converse(lossy.http, "legacy", body) == 1


@on_both_hosts
def test_since_2026_what_was_lost_is_an_error(lossy: Served) -> None:
    steps: Steps = []

    async def body(client: Client) -> None:
        with pytest.raises(MCPError) as lost:
            await call(client, "lose_connection", steps)
        assert lost.value.error.code == t.CONNECTION_CLOSED
        assert steps == ["cut-here"]
        result = await client.call_tool("echo", {"text": "still here"})
        assert result.content == [t.TextContent(type="text", text="still here")]

    assert converse(lossy.http, "auto", body) == 0


@deprecated
@on_both_hosts
def test_updates_it_missed_reach_it_on_its_next_stream(lossy: Served) -> None:
    sender, updates = anyio.create_memory_object_stream[str](10)

    async def on_message(message: Any) -> None:
        await sender.send(message.params.uri)

    async def body(client: Client) -> None:
        for name in ("cut-here", "lamp"):
            await client.subscribe_resource(f"interop://items/{name}")
        await client.call_tool("touch", {"name": "cut-here"})
        assert await updates.receive() == "interop://items/cut-here"
        await client.call_tool("touch", {"name": "lamp"})
        assert await updates.receive() == "interop://items/lamp"

    with sender, updates:
        assert converse(lossy.http, "legacy", body, message_handler=on_message) == 1


@on_both_hosts
def test_it_ends_its_session(host: Served) -> None:
    sessions: set[str] = set()

    async def note(response: httpx2.Response) -> None:
        if session := response.headers.get("mcp-session-id"):
            sessions.add(session)

    def ping(session: str) -> int:
        headers = {"mcp-session-id": session, "accept": "application/json, text/event-stream"}
        body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        return httpx2.post(host.http, json=body, headers=headers).status_code

    async def main() -> None:
        async with httpx2.AsyncClient(event_hooks={"response": [note]}) as http:
            async with Client(streamable_http_client(host.http, http_client=http), mode="legacy") as client:
                await client.list_tools()
                (session,) = sessions
                assert await anyio.to_thread.run_sync(ping, session) == 200
            assert await anyio.to_thread.run_sync(ping, session) == 404

    anyio.run(main)
