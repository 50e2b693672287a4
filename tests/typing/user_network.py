# pyright: strict
"""Servers on a network, clients that reach them, a transport of one's own, for type checkers: nothing here runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import assert_type

import httpx2
import trio

import trimcp
from tests.typing.user_server import server
from trimcp.transports.http.interfaces import Head, HttpResponse

known = trimcp.bearer_tokens({"t0ken": "ada"}, realm="notes")


def authenticate(head: Head) -> trimcp.Principal | trimcp.Refused:
    """Look at the head, then as before."""
    assert_type(head.headers.get("x-maintenance"), str | None)
    return trimcp.Refused(403, (), "come back tomorrow") if head.path == "/closed" else known(head)


async def look_up(head: Head) -> trimcp.Principal | trimcp.Refused:
    """Ask somebody else."""
    await trio.lowlevel.checkpoint()
    return trimcp.Principal(head.headers["x-api-key"], {"admin": True})


async def version(head: Head) -> HttpResponse:
    """Answer at another path."""
    return HttpResponse(200, (("Content-Type", "text/plain"),), b"1.0")


def greeting(head: Head, body: bytes) -> HttpResponse | None:
    """Speak something else."""
    return HttpResponse(200, body=b"hello to you") if body == b"hello" else None


settings = trimcp.HttpSettings(
    authenticate=authenticate,
    origins=trimcp.Origins(allow_origins=["https://app.example"], allowed_hosts=["mcp.example"]),
    routes={"/version": version},
    dialects=[greeting],
    events=trimcp.MemoryEvents(),
    access_log=trimcp.AccessLog(),
    reply="json",
)


async def serve(nursery: trio.Nursery) -> None:
    """Serve in a nursery, and end in order."""
    stop = trio.Event()
    options = trimcp.HttpSettings(authenticate=look_up)
    urls: list[str] = await nursery.start(partial(trimcp.serve_http, server, port=0, settings=options, stop=stop))
    await nursery.start(partial(trimcp.serve_websocket, server, port=0))
    async with trimcp.Client("host").connect(trimcp.http(urls[0], headers={"X-Api-Key": "a"})) as session:
        assert_type(session, trimcp.ClientSession)
    async with trimcp.Client("host").connect(trimcp.websocket(urls[1]), revision=trimcp.LATEST) as session:
        await session.ping()
    stop.set()


async def mount() -> None:
    """An application, in memory and under Hypercorn."""
    app = trimcp.asgi_app(server, settings=settings, root="/api")
    web = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    timeouts = trimcp.HttpTimeouts(connect=2)
    async with app.lifespan(), web:
        target = trimcp.http("http://localhost/api/mcp", client=web, timeouts=timeouts, retry_calls=True)
        assert_type(target, trimcp.HttpServer)
        async with trimcp.Client("host").connect(target) as session:
            await session.ping()
    await trimcp.serve_hypercorn(app, bind=["127.0.0.1:0"])


class Kept(trimcp.MessageChannel):
    """A transport of one's own."""

    async def send(self, batch: Sequence[trimcp.channel.Outgoing]) -> None:
        """Send some."""
        for message in batch:
            assert_type(message.data, bytes)

    async def receive(self) -> Sequence[trimcp.channel.Incoming]:
        """Receive some."""
        raise trio.EndOfChannel

    async def aclose(self) -> None:
        """Close."""
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def kept() -> AsyncGenerator[Kept, None]:
    """A target of one's own."""
    yield Kept()


async def talk() -> None:
    """Serve on it and connect to it."""
    async with server.running() as running, trio.open_nursery() as nursery:
        assert_type(running, trimcp.Running)
        nursery.start_soon(running.serve, Kept())
        async with trimcp.Client("host").connect(kept()) as session:
            await session.ping()
        await running.drain(5)


def choose(url: str | None) -> trimcp.Target:
    """Return anything that can be connected to."""
    if url is None:
        return trimcp.stdio("python", "weather.py")
    return trimcp.websocket(url) if url.startswith("ws") else trimcp.http(url)


# A function with settings of a program's own.
if __name__ == "__main__":
    trimcp.run_http(server, port=8000, settings=settings, limits=trimcp.HttpLimits(), ready=print)
