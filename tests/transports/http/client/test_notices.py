"""Messages that get no answer: they never wait for calls, keep their order, and fail without harm."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import (
    Exchange,
    answer,
    cancellation,
    close_idle,
    event,
    legacy,
    notification,
    receive,
    reply_event,
    request,
    scripted,
    shake_hands,
)
from trimcp.transports.http.client.policy import Timeouts
from trimcp.wire.jsonrpc import Request, Response

pytestmark = pytest.mark.usefixtures("on_both_engines")

CHANGED = notification("notifications/roots/list_changed")


async def test_an_answer_reaches_a_server_whose_calls_take_every_turn(autojump_clock: object) -> None:
    """Each call asks before it answers. If answers waited behind the calls, nothing would ever move again."""
    answered: dict[int, trio.Event] = {}

    async def then(exchange: Exchange) -> None:
        if exchange.called == "reply":
            await exchange.respond(202)
            answered[exchange.id].set()
        else:
            answered[exchange.id + 1000] = trio.Event()
            await exchange.events(event({"jsonrpc": "2.0", "id": exchange.id + 1000, "method": "roots/list"}))
            await answered[exchange.id + 1000].wait()
            await exchange.write(reply_event(exchange.id))
            await exchange.finish()

    async with scripted(legacy(then)) as server, server.target(max_posts=2).connect() as channel:
        await shake_hands(channel)
        await channel.send([request(n, modern=False) for n in range(1, 41)])
        results = 0
        with trio.fail_after(60):
            while results < 40:
                for message in await receive(channel):
                    if isinstance(message, Request):
                        await channel.send([answer(message.id)])
                    else:
                        assert isinstance(message, Response)
                        results += 1


async def test_what_belongs_to_one_request_keeps_its_order(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        await trio.sleep(1)
        await exchange.respond(202)

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        progress = [notification("notifications/progress", 7, progress=n) for n in range(3)]
        await channel.send([*progress, answer(7), notification("notifications/progress", 8, progress=9)])
        await server.wait_for("reply")
        ours = [each for each in server.asked if each.called in ("notifications/progress", "reply")]
        told = [each.message.get("params", {}).get("progress") for each in ours]
        assert told.index(9) < 2  # what belongs to another request does not wait for it
        assert [each for each in told if each != 9] == [0, 1, 2, None]


async def test_not_too_many_are_on_their_way(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        await trio.sleep(10)
        await exchange.respond(202)

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        await wait_all_tasks_blocked()
        before = trio.current_time()
        await channel.send([answer(n) for n in range(64)])
        assert trio.current_time() == before
        await channel.send([answer(64)])
        assert trio.current_time() == before + 10
        with trio.move_on_after(1) as scope:
            await channel.send([answer(n) for n in range(200)])
        assert scope.cancelled_caught


async def test_a_server_that_does_not_accept_a_message_does_not_hold_it_for_ever(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    async def then(exchange: Exchange) -> None:
        await exchange.gone.wait()

    async with scripted(legacy(then)) as server, server.target(timeouts=Timeouts(notice=3)).connect() as channel:
        await shake_hands(channel)
        await channel.send([CHANGED])
        exchange = await server.wait_for("notifications/roots/list_changed")
        await exchange.gone.wait()
        assert trio.current_time() == 3
        await wait_all_tasks_blocked()
        assert "did not accept a notification of ours in 3 s" in caplog.text


@pytest.mark.parametrize("status", [400, 401, 404, 500])
async def test_a_refused_message_is_logged_and_harms_nothing(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def then(exchange: Exchange) -> None:
        await (exchange.respond(status, b"x" * 100_000) if exchange.called == "reply" else exchange.result())

    async with scripted(legacy(then, session=None)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([answer(1), request(2, modern=False)])
        await server.wait_for("reply")
        assert await receive(channel) == [Response(2, {})]
        await wait_all_tasks_blocked()
        (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert f"an answer of ours did not reach the server: the server answered {status}" in record.getMessage()


@pytest.mark.parametrize("status", [429, 503])
async def test_a_message_that_was_turned_away_is_sent_again(status: int, autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        if trio.current_time() < 4:
            await exchange.respond(status, b"", {"retry-after": "5"})
        else:
            await exchange.respond(202)

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([answer(1)])
        assert (await server.wait_for("reply", 2)).at == 5


@pytest.mark.parametrize("status", [502, 504, None])
async def test_an_answer_that_may_have_arrived_is_sent_again(status: int | None, autojump_clock: object) -> None:
    """It counts once; lost, the call that asked would wait for ever. Other messages might be carried out twice."""

    async def then(exchange: Exchange) -> None:
        if len(server.called(exchange.called)) > 1:
            await exchange.respond(202)
        elif status is not None:
            await exchange.respond(status)
        else:
            raise trio.ClosedResourceError  # as when its process is killed

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([CHANGED, answer(1)])
        await server.wait_for("reply", 2)
        await trio.sleep(60)
        assert len(server.called("reply")) == 2
        assert len(server.called("notifications/roots/list_changed")) == 1


async def test_a_message_that_never_left_is_sent_again(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        await exchange.respond(202)

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await server.wait_for("GET")
        await wait_all_tasks_blocked()
        await close_idle(channel)
        server.refuse = True
        await channel.send([CHANGED])
        await trio.sleep(0.3)
        server.refuse = False
        await server.wait_for("notifications/roots/list_changed")


@pytest.mark.parametrize(
    "how",
    [
        lambda exchange: exchange.respond(200, b"x" * 1_000_000),
        lambda exchange: (
            exchange.result() if "id" in exchange.message else exchange.json({"jsonrpc": "2.0", "result": {}})
        ),
        lambda exchange: exchange.events(event({"jsonrpc": "2.0", "method": "n"})),
        lambda exchange: exchange.start(202, {"content-length": "9"}),
    ],
)
async def test_what_a_server_says_to_it_is_of_no_interest(how: Any, autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        await (how(exchange) if exchange.called.startswith("notifications/") else exchange.result({"x": 1}))

    async with scripted(legacy(then)) as server, server.target().connect() as channel:
        await shake_hands(channel)
        await channel.send([CHANGED])
        await server.wait_for("notifications/roots/list_changed")
        await channel.send([request(1, modern=False)])
        assert await receive(channel) == [Response(1, {"x": 1})]


async def test_last_words_are_sent_before_the_channel_is_closed(autojump_clock: object) -> None:
    async def then(exchange: Exchange) -> None:
        if exchange.called == "tools/call":
            await exchange.gone.wait()
        else:
            await trio.sleep(0.3)
            await exchange.respond(202)

    async with scripted(legacy(then)) as server:
        async with server.target().connect() as channel:
            await shake_hands(channel)
            await server.wait_for("GET")
            await channel.send([request(1, modern=False)])
            await server.wait_for("tools/call")
            await channel.send([CHANGED, cancellation(1)])
            with trio.CancelScope() as scope:
                scope.cancel()
                await channel.aclose()
        assert server.calls[-3:-1] == ["notifications/roots/list_changed", "notifications/cancelled"]
        assert server.calls[-1] == "DELETE"
        assert trio.current_time() == pytest.approx(0.3)
