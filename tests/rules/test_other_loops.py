"""Under another event loop, or none, every public entry says that trimcp runs on Trio, and what to do instead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio

import trimcp
import trimcp.agent_tools
import trimcp.auth
import trimcp.testing

server: trimcp.Server[Any] = trimcp.Server("s")
client = trimcp.Client("c")
ENTERED: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
    "connect": lambda: client.connect(trimcp.in_process(server)),
    "supervise": lambda: trimcp.supervise(client, trimcp.in_process(server)),
    "group": lambda: trimcp.Group(client),
    "connected": lambda: trimcp.testing.connected(server),
    "running": server.running,
    "http_application": lambda: trimcp.http_application(server),
    "lifespan": lambda: trimcp.asgi_app(server).lifespan(),
    "claim_stdio": trimcp.claim_stdio,
    "stdio": lambda: trimcp.stdio("python").connect(),
    "http": lambda: trimcp.http("http://127.0.0.1:1/mcp").connect(),
    "websocket": lambda: trimcp.websocket("ws://127.0.0.1:1/ws").connect(),
    "grpc": lambda: trimcp.grpc("grpc://127.0.0.1:1").connect(),
    "agent_tools.connect": lambda: trimcp.agent_tools.connect("http://127.0.0.1:1/agent"),
    "toy_issuer": trimcp.testing.toy_issuer,
    "resource_server": lambda: trimcp.auth.ResourceServer("https://a.test/mcp", ["https://b.test"]).running(),
}


async def watched() -> None:
    with trimcp.watchdog(server):
        raise AssertionError("it began")


AWAITED: dict[str, Callable[[], Awaitable[None]]] = {
    "serve_stdio": lambda: trimcp.serve_stdio(server),
    "serve_http": lambda: trimcp.serve_http(server, port=0),
    "serve_http on hypercorn": lambda: trimcp.serve_http(server, port=0, software="hypercorn"),
    "serve_websocket": lambda: trimcp.serve_websocket(server, port=0),
    "serve_grpc": lambda: trimcp.serve_grpc(server, port=0),
    "serve_hypercorn": lambda: trimcp.serve_hypercorn(trimcp.asgi_app(server)),
    "agent_tools.provide": lambda: trimcp.agent_tools.provide("http://127.0.0.1:1/agent", ()),
    "check_channel": lambda: trimcp.testing.check_channel(trimcp.memory_channels),
    "watchdog": watched,
}
RUN: dict[str, Callable[..., None]] = {
    "serve_stdio": trimcp.run_stdio,
    "serve_http": trimcp.run_http,
    "serve_websocket": trimcp.run_websocket,
    "serve_grpc": trimcp.run_grpc,
}


async def begin(name: str) -> None:
    if name in AWAITED:
        await AWAITED[name]()
    else:
        async with ENTERED[name]():
            raise AssertionError("it began")


@pytest.mark.parametrize("name", [*ENTERED, *AWAITED])
def test_an_entry_under_asyncio_says_what_to_do(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^trimcp runs on Trio; use trio\.run\. .*asyncio\.to_thread"):
        asyncio.run(begin(name))


@pytest.mark.parametrize("name", [*ENTERED, *AWAITED])
def test_an_entry_without_any_loop_says_what_to_do(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^trimcp runs on Trio; use trio\.run\. .*pytest-trio"):
        begin(name).__await__().send(None)


@pytest.mark.parametrize("name", RUN)
def test_a_whole_program_is_not_run_inside_a_loop(name: str) -> None:
    async def main() -> None:
        RUN[name](server)

    with pytest.raises(RuntimeError, match=rf"would stop the asyncio loop .*trio\.run, trimcp\.{name}"):
        asyncio.run(main())
    with pytest.raises(RuntimeError, match=rf"inside Trio use await trimcp\.{name}\(server\)"):
        trio.run(main)


def test_what_is_said_can_be_done() -> None:
    async def main() -> str:
        async with client.connect(trimcp.in_process(server)) as session:
            return session.server_info.name if session.server_info else ""

    async def beside() -> str:
        return await asyncio.to_thread(trio.run, main)

    assert asyncio.run(beside()) == "s"
