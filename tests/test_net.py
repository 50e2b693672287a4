"""One run of a server that is reached by many roads."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

import trimcp
from trimcp.net import Software
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision


@attrs.define(eq=False)
class App:
    entered: int = 0
    greeted: int = 0
    at_work: trio.Event = attrs.field(factory=trio.Event)
    release: trio.Event = attrs.field(factory=trio.Event)
    stopped: trio.Event = attrs.field(factory=trio.Event)


def make_server(app: App) -> trimcp.Server[App]:
    @asynccontextmanager
    async def lifespan(server: trimcp.Server[App]) -> AsyncIterator[App]:
        app.entered += 1
        yield app

    server = trimcp.Server("shared", lifespan=lifespan)

    @server.tool
    async def greet(*, ctx: trimcp.Context[App]) -> int:
        ctx.state.greeted += 1
        return ctx.state.greeted

    @server.tool
    async def work(*, ctx: trimcp.Context[App]) -> str:
        ctx.state.at_work.set()
        try:
            await ctx.state.release.wait()
        finally:
            ctx.state.stopped.set()
        return "done"

    return server


async def greet(target: Any, revision: Revision = LATEST) -> str:
    async with trimcp.Client("c").connect(target, revision=revision) as session:
        return (await session.call_tool("greet")).content[0].text


def ws(url: str) -> str:
    return url.replace("http", "ws", 1).replace("/mcp", "/ws")


async def test_one_run_is_reached_by_many_roads() -> None:
    """Each road had a run of its own: two lifespans, two pools of database connections."""
    app = App()
    async with make_server(app).running() as running, open_service_nursery() as nursery:
        (own,) = await nursery.start(partial(trimcp.serve_http, running, port=0))
        (hypercorn,) = await nursery.start(partial(trimcp.serve_http, running, port=0, software="hypercorn"))
        (alone,) = await nursery.start(partial(trimcp.serve_websocket, running, port=0))
        targets = [
            trimcp.http(own),
            trimcp.http(hypercorn),
            trimcp.websocket(ws(own)),
            trimcp.websocket(alone),
            trimcp.in_process(running),
            trimcp.in_process(running, framed=True),
        ]
        assert [await greet(target) for target in targets] == [str(n) for n in range(1, 7)]
        application = trimcp.asgi_app(running)
        async with application.lifespan() as face:
            assert face.service is running
        assert await greet(trimcp.in_process(running)) == "7", "the run goes on after one of its roads"
        nursery.cancel_scope.cancel()
    assert app.entered == 1


async def test_standard_input_is_a_road_like_the_others(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    ours, theirs = trimcp.memory_channels(framed=True)
    monkeypatch.setattr("trimcp.run.claim_stdio", lambda: ours)
    app = App()
    async with make_server(app).running() as running, open_service_nursery() as nursery:
        nursery.start_soon(trimcp.serve_stdio, running)
        assert [await greet(theirs), await greet(trimcp.in_process(running))] == ["1", "2"]
    assert app.entered == 1


@pytest.mark.parametrize("software", ["own", "hypercorn"])
@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY], ids=str)
async def test_a_road_that_stops_drains_what_came_by_it_alone(software: Software, revision: Revision) -> None:
    app, stop = App(), trio.Event()
    client = trimcp.Client("c")
    async with make_server(app).running() as running, open_service_nursery() as nursery:
        serve = partial(trimcp.serve_http, running, port=0, software=software)
        (stays,) = await nursery.start(serve)
        ended = trio.Event()

        async def stopping(task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(stop=stop, grace=0.05, task_status=task_status)
            ended.set()

        (stops,) = await nursery.start(stopping)
        async with client.connect(trimcp.http(stays), revision=revision) as other:
            with trio.fail_after(60):
                async with (
                    client.connect(trimcp.http(stops), revision=revision) as session,
                    session.calling("work") as call,
                ):
                    await app.at_work.wait()
                    stop.set()
                    with pytest.raises(trimcp.RemoteError, match="stopped: drain"):
                        await call.result()
                await ended.wait()
            assert (await other.call_tool("greet")).content == [trimcp.Text("1")]
            assert await greet(trimcp.http(stays), revision) == "2"
            assert await greet(trimcp.in_process(running), revision) == "3"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("software", ["own", "hypercorn"])
@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY], ids=str)
async def test_a_road_that_is_cancelled_ends_what_came_by_it(software: Software, revision: Revision) -> None:
    app = App()
    async with make_server(app).running() as running, open_service_nursery() as clients:
        async with open_service_nursery() as nursery:
            (url,) = await nursery.start(partial(trimcp.serve_http, running, port=0, software=software))

            async def call() -> None:
                with pytest.raises(trimcp.ConnectionLost):
                    async with trimcp.Client("c").connect(trimcp.http(url), revision=revision) as session:
                        await session.call_tool("work")

            clients.start_soon(call)
            await app.at_work.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(60):
            await app.stopped.wait()
        assert not running.sessions
        assert await greet(trimcp.in_process(running), revision) == "1"
        clients.cancel_scope.cancel()


def test_a_websocket_server_is_a_whole_program_too() -> None:
    told: list[str] = []

    def ready(urls: list[str]) -> None:
        told.extend(urls)
        signal.raise_signal(signal.SIGTERM)

    trimcp.run_websocket(trimcp.Server("s"), port=0, path="/talk", ready=ready)
    (url,) = told
    assert url.startswith("ws://127.0.0.1:")
    assert url.endswith("/talk")
