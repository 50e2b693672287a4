"""The functions of a user's that judge a request before any handler: what they raise costs one response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import pytest
import trio

import trimcp
from tests.peers.cancellations import kept_cancellation
from tests.peers.http1 import http_request
from tests.peers.serving import served
from trimcp.principal import Principal
from trimcp.transports.http.interfaces import Head, HttpResponse
from trimcp.transports.http.peers.identity import Authenticate, Refused
from trimcp.transports.http.settings import HttpSettings


@pytest.mark.parametrize("where", ["authenticate", "authenticate later", "route"])
@pytest.mark.parametrize(
    "raised", [SystemExit, GeneratorExit, asyncio.CancelledError, trio.Cancelled], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("transport", ["http", "http on hypercorn", "websocket"])
async def test_what_a_hook_raises_costs_one_response(
    transport: str, where: str, raised: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """No function of the user's ends the server, whatever it raises."""
    error = await kept_cancellation() if raised is trio.Cancelled else raised("secret")

    def leave(head: Head) -> Principal | Refused:
        if head.path == "/leave" or "authorization" in head.headers:
            raise error
        return Principal("ada")

    async def leave_later(head: Head) -> Principal | Refused:
        return leave(head)

    async def route(head: Head) -> HttpResponse:
        leave(head)
        raise AssertionError

    hooks: dict[str, Authenticate] = {"authenticate": leave, "authenticate later": leave_later}
    settings = HttpSettings(authenticate=hooks.get(where), routes={"/leave": route})
    path = "/leave" if where == "route" else "/mcp"
    async with served(trimcp.Server("s"), transport, settings=settings) as place:
        for _ in range(2):
            async with place.wire() as wire:
                answer = await wire.ask(http_request("GET", path, "Authorization: Bearer x"))
                assert answer.status == 500
                assert b"secret" not in answer.body
        async with place.wire() as wire:
            assert (await wire.ask(http_request("GET", "/healthz"))).status == 200
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 2


@pytest.mark.parametrize("where", ["authenticate", "route"])
@pytest.mark.parametrize("leave", [trio.CancelScope, trio.open_nursery])
@pytest.mark.parametrize("transport", ["http", "http on hypercorn"])
async def test_what_a_hook_leaves_open_costs_one_response(
    transport: str, where: str, leave: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As a generator does that is left in the middle of its scope or nursery."""
    left: list[Any] = []

    async def numbers() -> AsyncIterator[int]:
        with ExitStack() as scopes:
            async with AsyncExitStack() as nurseries:
                manager = leave()
                if leave is trio.CancelScope:
                    scopes.enter_context(manager)
                else:
                    await nurseries.enter_async_context(manager)
                yield 1

    async def authenticate(head: Head) -> Principal | Refused:
        if "authorization" in head.headers:
            left.append(numbers())  # never collected, so never closed
            await left[-1].__anext__()
        return Principal("ada")

    async def route(head: Head) -> HttpResponse:
        await authenticate(head)
        return HttpResponse(200)

    settings = HttpSettings(authenticate=authenticate if where == "authenticate" else None, routes={"/leave": route})
    async with served(trimcp.Server("s"), transport, settings=settings) as place:
        for _ in range(2):
            async with place.wire() as wire:
                assert (await wire.ask(http_request("GET", "/leave", "Authorization: Bearer x"))).status == 500
        async with place.wire() as wire:
            assert (await wire.ask(http_request("GET", "/leave"))).status == 200
    assert len(left) == 2
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 2
