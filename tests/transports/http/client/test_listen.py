"""The stream for what a legacy server says unasked: opened once, opened again, and not missed where there is none."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import (
    Exchange,
    engine,
    event,
    legacy,
    receive,
    request,
    scripted,
    shake_hands,
    welcome,
)
from trimcp.wire.jsonrpc import Lost, Notification, Response

pytestmark = pytest.mark.usefixtures("on_both_engines")

NOTE = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}


async def results(exchange: Exchange) -> None:
    await (exchange.result() if "id" in exchange.message else exchange.respond(202))


async def test_what_is_said_unasked_arrives() -> None:
    async def get(exchange: Exchange) -> None:
        assert exchange.headers["accept"] == "text/event-stream"
        assert exchange.headers["mcp-session-id"] == "s1"
        assert "last-event-id" not in exchange.headers
        await exchange.events(event(NOTE, id="1"))
        await exchange.gone.wait()

    async with scripted(legacy(results, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        assert await receive(channel) == [Notification("notifications/tools/list_changed")]
        stream = server.called("GET")[0]
    await stream.gone.wait()


@pytest.mark.parametrize(
    "get",
    [
        lambda exchange: exchange.respond(405),
        lambda exchange: exchange.respond(404),
        lambda exchange: exchange.respond(400, b"Parse error"),
        lambda exchange: exchange.respond(401),
        lambda exchange: exchange.respond(200, b"{}", {"content-type": "application/json"}),
        lambda exchange: exchange.respond(200, b"<html>", {"content-type": "text/html"}),
    ],
)
async def test_a_server_without_such_a_stream_is_not_asked_again_and_nobody_hears_of_it(
    get: Any, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with scripted(legacy(results, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        assert await receive(channel) == [Response(1, {})]
        await trio.sleep(1000)
        assert len(server.called("GET")) == 1
        assert len(server.called("initialize")) == 1
    assert caplog.text == ""


async def test_no_stream_is_opened_in_the_modern_era(autojump_clock: object) -> None:
    async with scripted(results) as server, server.target().connect() as channel:
        await channel.send([request(1, "server/discover"), request(2)])
        await receive(channel, 2)
        await trio.sleep(100)
    assert sorted(server.calls) == ["server/discover", "tools/call"]


async def test_a_stream_that_ends_is_opened_again_where_it_ended(autojump_clock: object) -> None:
    async def get(exchange: Exchange) -> None:
        n = len(server.called("GET"))
        await exchange.events(event(NOTE, id=f"e{n}"))
        await exchange.finish()

    async with (
        scripted(legacy(results, get=get)) as server,
        server.target(random=random.Random(1)).connect() as channel,
    ):
        await shake_hands(channel)
        await receive(channel, 3)
        first, second, third = server.called("GET")
        assert "last-event-id" not in first.headers
        assert (second.headers["last-event-id"], third.headers["last-event-id"]) == ("e1", "e2")
        assert second.at - first.at == pytest.approx(1.0)


async def test_the_time_a_server_asks_for_is_respected(autojump_clock: object) -> None:
    async def get(exchange: Exchange) -> None:
        await exchange.events(event(b"", id="1", retry=20_000))
        await exchange.finish()

    async with scripted(legacy(results, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        second = await server.wait_for("GET", 2)
        assert second.at == pytest.approx(20)


async def test_a_server_that_wants_no_pause_is_left_alone_all_the_same(autojump_clock: object) -> None:
    async def get(exchange: Exchange) -> None:
        await exchange.events(event(b"", id=str(len(server.called("GET"))), retry=0))
        await exchange.finish()

    async with scripted(legacy(results, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await trio.sleep(10.5)
        assert len(server.called("GET")) == 11


@pytest.mark.parametrize("how", ["cut", "busy", "conflict"])
async def test_trouble_makes_the_pauses_longer_and_ends_nothing(how: str, autojump_clock: object) -> None:
    healthy = False

    async def get(exchange: Exchange) -> None:
        if len(server.called("GET")) == 1:
            await exchange.events(event(b"", id="1"))
            await exchange.finish()
        elif healthy:
            await exchange.events(event(NOTE))
            await exchange.gone.wait()
        elif how == "cut":
            exchange.answered = True
        else:
            await exchange.respond(503 if how == "busy" else 409)

    async with (
        scripted(legacy(results, get=get)) as server,
        server.target(random=random.Random(1)).connect() as channel,
    ):
        await shake_hands(channel)
        await trio.sleep(600)
        pauses = [b.at - a.at for a, b in zip(server.called("GET"), server.called("GET")[1:], strict=False)]
        assert pauses[0] == 1
        assert pauses[-1] >= 15
        assert max(pauses) <= 30
        healthy = True
        await receive(channel)


async def test_a_stream_that_is_gone_with_its_session_begins_a_new_one(autojump_clock: object) -> None:
    sessions = 0
    let_go = trio.Event()

    async def handle(exchange: Exchange) -> None:
        nonlocal sessions
        if exchange.called == "initialize":
            sessions += 1
            return await exchange.result(welcome(), mcp_session_id=f"s{sessions}")
        if exchange.method != "GET":
            return await results(exchange) if exchange.body else await exchange.respond(200)
        if exchange.headers["mcp-session-id"] != f"s{sessions}" or (sessions == 1 and let_go.is_set()):
            return await exchange.respond(404)
        await exchange.events(event(NOTE))
        await (let_go.wait() if sessions == 1 else exchange.gone.wait())
        return await exchange.finish()

    async with scripted(handle) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await receive(channel)
        let_go.set()
        lost, note = await receive(channel, 2)
        assert isinstance(lost, Lost)
        assert lost.id is None
        assert isinstance(note, Notification)
        assert [each.headers["mcp-session-id"] for each in server.called("GET")] == ["s1", "s1", "s2"]
        await trio.sleep(100)
        assert len(server.called("GET")) == 3
        assert len(server.called("initialize")) == 2


async def test_it_waits_when_nobody_receives() -> None:
    written = 0

    async def get(exchange: Exchange) -> None:
        nonlocal written
        await exchange.events()
        for _ in range(5000):
            await exchange.write(event(NOTE) * 10)
            written += 10
            await trio.lowlevel.checkpoint()
        await exchange.gone.wait()

    async with scripted(legacy(results, get=get)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        await wait_all_tasks_blocked()
        assert (written == 50_000) is (engine.get() == "httpx2")  # whose pipe, in memory, takes all; a socket does not
        assert len(await channel.receive()) <= 1_024
