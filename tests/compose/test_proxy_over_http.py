"""A proxy over HTTP, before a server over HTTP: who is let through, what is left over, how long is waited."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import trimcp
from trimcp.compose.proxy import ProxyServer, proxy
from trimcp.errors import RemoteError
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

SECRET = "token-of-the-client"


@asynccontextmanager
async def http(server: Server[Any], **settings: Any) -> AsyncIterator[str]:
    """Serve a server, and yield its URL."""
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        made = trimcp.HttpSettings(**settings)
        urls = await nursery.start(
            lambda task_status: trimcp.serve_http(server, port=0, settings=made, stop=stop, task_status=task_status)
        )
        yield urls[0]
        stop.set()


def make(seen: list[dict[str, str]]) -> Server[Any]:
    """A server that notes the headers of its calls."""
    server = Server("behind")

    @server.tool
    async def echo(text: str, ctx: Context[Any]) -> str:
        seen.append(dict(ctx.headers))
        return text

    @server.tool
    async def left(ctx: Context[Any]) -> float:
        return ctx.deadline - trio.current_time()

    return server


async def settled(made: ProxyServer, number: int) -> None:
    """Wait until a proxy has so many connections."""
    while len(made.relays._open) != number:
        await made.relays._changed.park()


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_no_token_of_a_client_reaches_the_server_behind(revision: Any) -> None:
    seen: list[dict[str, str]] = []
    own = trimcp.bearer_tokens({"token-of-the-proxy": "proxy"})
    clients = trimcp.bearer_tokens({SECRET: "ann"})
    with trio.fail_after(30):
        async with http(make(seen), authenticate=own) as behind:
            target = trimcp.http(behind, headers={"Authorization": "Bearer token-of-the-proxy"})
            async with http(proxy(target, name="behind"), authenticate=clients) as url:
                reached = trimcp.http(url, headers={"Authorization": f"Bearer {SECRET}", "X-Key": SECRET})
                async with trimcp.Client("c").connect(reached, revision=revision) as session:
                    assert (await session.call_tool("echo", {"text": "a"})).text == "a"
    assert seen
    assert SECRET not in str(seen)
    assert all(headers["authorization"] == "Bearer token-of-the-proxy" for headers in seen)


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_nothing_is_left_of_clients_that_left(revision: Any) -> None:
    """Of sessions at once; of single requests when their connection was not used for a while."""
    with trio.fail_after(30):
        async with http(make([])) as behind:
            made = proxy(behind, name="behind", idle=0.2)
            async with http(made) as url:
                for _ in range(3):
                    async with trimcp.Client("c").connect(trimcp.http(url), revision=revision) as session:
                        assert (await session.call_tool("echo", {"text": "a"})).text == "a"
                        assert len(made.relays._open) >= 1
                await settled(made, 0)
                assert made.relays.held == {}


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_the_time_that_a_caller_has_left_shrinks_on_its_way(revision: Any) -> None:
    with trio.fail_after(30):
        async with (
            http(make([])) as behind,
            http(proxy(behind, name="behind")) as url,
            trimcp.Client("c").connect(trimcp.http(url), revision=revision) as session,
        ):
            for seconds in (20, 10):
                with trio.move_on_after(seconds):
                    assert 0 < (await session.call_tool("left")).data["result"] < seconds


async def test_a_client_is_bounded_by_its_principal_alone() -> None:
    """Two who say the same of themselves from one address have connections of their own."""
    tokens = trimcp.bearer_tokens({"a": "ann", "b": "bob"})
    with trio.fail_after(30):
        async with http(make([])) as behind:
            made = proxy(behind, name="behind", max_connections=2)
            async with http(made, authenticate=tokens) as url:
                for token in "abab":
                    reached = trimcp.http(url, headers={"Authorization": f"Bearer {token}"})
                    async with trimcp.Client("c").connect(reached, revision=LATEST) as session:
                        await session.call_tool("echo", {"text": "a"})
                assert len(made.relays._open) == 2
                with pytest.raises(RemoteError, match="too many connections"):
                    made.relays._open[0].users = made.relays._open[1].users = 1
                    async with trimcp.Client("other").connect(reached, revision=LATEST) as session:
                        await session.call_tool("echo", {"text": "a"})
