"""Sessions over connections that carry many calls, with a server that is a function, in virtual time."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
import pytest
import trio

from tests.bench.support import FakeChannel, a_load, after, at_once, errors, fake_opener, greeting, reply
from trimcp.bench.mux import LoadCaller, LoadChannel, multiplexed
from trimcp.bench.sessions import run_session
from trimcp.bench.supply import Load
from trimcp.errors import ConnectionLost
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision


async def run_for(
    load: Load, seconds: float, serve: Callable[[dict[str, Any], FakeChannel], object], *, greets: bool = True
) -> list[FakeChannel]:
    """Run the load's sessions and let calls begin for so many seconds, or as many calls as the plan counts."""
    channels: list[FakeChannel] = []
    async with trio.open_nursery() as nursery:
        if load.plan.rate is not None:
            nursery.start_soon(load.supply.pace)
        async with trio.open_nursery() as sessions:
            for _ in range(load.plan.sessions):
                await sessions.start(
                    run_session, load, partial(multiplexed, fake_opener(serve, channels, greets=greets))
                )
            load.supply.allow(math.inf if load.plan.count is None else load.plan.count)
            await trio.sleep(seconds)
            load.supply.close(trio.current_time())
        nursery.cancel_scope.cancel()
    return channels


async def test_a_session_calls_as_often_as_its_places_allow(autojump_clock: object) -> None:
    load = a_load(under_way=3, sessions=2)
    channels = await run_for(load, 0.95, after(0.1))
    assert len(channels) == 2
    assert load.tally.calls == 2 * 3 * 10
    assert load.tally.latency.count == 0 or load.tally.latency.most == pytest.approx(0.1)
    assert errors(load) == {}
    assert all(channel.closed for channel in channels)


async def test_the_modern_era_has_no_handshake_but_the_first_call_finds_the_server_awake(
    autojump_clock: object,
) -> None:
    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if message["method"] == "server/discover":
            channel.answer_after(5.0, b'{"jsonrpc":"2.0","id":0,"error":{"code":-32601,"message":"no"}}')
        else:
            channel.answer_after(0.1, reply(message))

    load = a_load(count=1)
    (channel,) = await run_for(load, 1.0, serve, greets=False)
    assert [message["method"] for _, message in channel.sent] == ["server/discover", "tools/call"]
    load.tally.end(10.0)
    assert load.tally.latency.most == pytest.approx(0.1)


async def test_the_legacy_era_shakes_hands(autojump_clock: object) -> None:
    (channel,) = await run_for(a_load(LATEST_LEGACY, count=1), 1.0, at_once)
    assert [message["method"] for _, message in channel.sent] == [
        "initialize",
        "notifications/initialized",
        "tools/call",
    ]
    assert channel.sent[0][1]["params"]["protocolVersion"] == LATEST_LEGACY.name


async def test_thinking_paces_a_session(autojump_clock: object) -> None:
    load = a_load(think=1.0)
    (channel,) = await run_for(load, 3.25, after(0.5))
    began = channel.calls[0][0]
    assert [at - began for at, _ in channel.calls] == pytest.approx([0.0, 1.5, 3.0])
    assert load.tally.calls == 3


async def test_a_timeout_frees_the_place_without_an_answer(autojump_clock: object) -> None:
    load = a_load(timeout=0.25, under_way=2)
    (channel,) = await run_for(load, 0.9, lambda message, channel: None)
    assert load.tally.timed_out == 8
    assert load.tally.calls == 0
    assert sorted(channel.cancelled) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert errors(load) == {}


async def test_a_share_of_the_calls_is_cancelled_midway(autojump_clock: object) -> None:
    load = a_load(cancel=0.5, cancel_after=0.05, under_way=4, seed=3)
    (channel,) = await run_for(load, 20.0, after(0.1))
    total = load.tally.calls + load.tally.cancelled
    assert load.tally.cancelled == pytest.approx(total / 2, rel=0.1)
    assert len(channel.cancelled) == load.tally.cancelled
    assert errors(load) == {}


async def test_an_open_loop_does_not_wait_for_answers(autojump_clock: object) -> None:
    load = a_load(rate=10.0, under_way=100)
    (channel,) = await run_for(load, 0.95, after(5.0))
    began = channel.calls[0][0]
    assert [at - began for at, _ in channel.calls] == pytest.approx([0.1 * each for each in range(10)])
    assert load.tally.calls == 10
    assert load.tally.late == 0


async def test_an_open_loop_counts_from_the_intended_start(autojump_clock: object) -> None:
    """A server that stops for a second may not hide what would have been asked meanwhile (coordinated omission)."""
    load = a_load(rate=10.0, under_way=1)
    first = True

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        nonlocal first
        channel.answer_after(1.0 if first else 0.0, reply(message))
        first = False

    await run_for(load, 1.45, serve)
    load.tally.end(2.0)
    times = load.tally.latency
    assert load.tally.calls == 15
    assert times.most == pytest.approx(1.0)
    assert times.percentile(50) == pytest.approx(0.3, abs=0.11)  # a closed loop would have said nearly 0
    assert load.tally.late == 9


async def test_the_sessions_of_an_open_loop_take_turns(autojump_clock: object) -> None:
    channels = await run_for(a_load(rate=10.0, sessions=5), 1.95, after(0.01))
    assert [len(channel.calls) for channel in channels] == [4, 4, 4, 4, 4]


async def test_a_session_whose_server_dies_is_opened_again_a_bounded_number_of_times(autojump_clock: object) -> None:
    load = a_load(reopen=3, under_way=2)

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if len(channel.calls) == 4:
            channel.die()
        else:
            channel.answer_after(0.1, reply(message))

    channels = await run_for(load, 60.0, serve)
    assert len(channels) == 4
    assert load.tally.errors["connection lost"].example == "the server died"
    assert load.supply.under_way == 0
    assert all(channel.closed for channel in channels)
    assert load.open == 0


async def test_a_death_between_two_calls_is_an_error_too(autojump_clock: object) -> None:
    load = a_load(think=5.0, reopen=0)

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        channel.answer(reply(message))
        channel.die()

    await run_for(load, 1.0, serve)
    assert (load.tally.calls, errors(load)) == (1, {"connection lost": 1})


REFUSED = b'{"jsonrpc":"2.0","id":0,"error":{"code":-1,"message":"go away"}}'


@pytest.mark.parametrize(
    ("revision", "says", "expected"),
    [
        (LATEST_LEGACY, None, "the server was not ready within 4 seconds"),
        (LATEST_LEGACY, REFUSED, "{'code': -1, 'message': 'go away'}"),
        (LATEST, None, "the server was not ready within 4 seconds"),
        (LATEST, b"what a nice day", "the server was not ready within 4 seconds"),
    ],
)
async def test_a_greeting_that_fails_is_told_and_tried_again(
    revision: Revision, says: bytes | None, expected: str, autojump_clock: object
) -> None:
    load = a_load(revision, reopen=2, opening=4.0)

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if says is not None:
            channel.answer(says)

    channels = await run_for(load, 60.0, serve, greets=False)
    assert len(channels) == 3
    assert errors(load) == {"no connection": 3}
    assert load.tally.errors["no connection"].example == expected
    assert [message["id"] for _, message in channels[0].sent] == [0]


async def test_a_server_that_dies_before_it_is_ready_is_no_connection(autojump_clock: object) -> None:
    load = a_load(reopen=1)
    await run_for(load, 60.0, lambda message, channel: channel.die(), greets=False)
    assert errors(load) == {"no connection": 2}
    assert load.tally.errors["no connection"].example == "the server died"


async def test_a_session_that_failed_to_open_does_not_keep_others_from_calls(autojump_clock: object) -> None:
    load = a_load(rate=10.0, sessions=2, reopen=0)
    deaths = 0

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        nonlocal deaths
        if not deaths:
            deaths += 1
            channel.die()
        else:
            channel.answer(reply(message))

    await run_for(load, 1.95, serve)
    assert errors(load) == {"connection lost": 1}
    assert load.tally.calls == 19
    assert load.tally.late == 0


async def test_no_connection_at_all_is_an_error_each_time(autojump_clock: object) -> None:
    load = a_load(reopen=2)

    @asynccontextmanager
    async def refused(load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
        raise ConnectionLost("nobody listens")
        yield

    async with trio.open_nursery() as nursery:
        await nursery.start(run_session, load, partial(multiplexed, refused))
    assert errors(load) == {"no connection": 3}
    assert load.tally.errors["no connection"].example == "nobody listens"


async def test_what_is_overdue_in_the_end_had_no_answer(autojump_clock: object) -> None:
    load = a_load(under_way=3, patience=7.0)
    channels: list[FakeChannel] = []
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                run_session, load, partial(multiplexed, fake_opener(lambda message, channel: None, channels))
            )
            load.supply.allow(math.inf)
            await trio.sleep(1.0)
            load.supply.close(trio.current_time())
            load.overdue = True
            scope.cancel()
    assert errors(load) == {"no answer": 3}
    assert load.tally.errors["no answer"].example == "none came within 7 seconds"
    assert channels[0].closed


async def test_being_cancelled_is_nobodys_fault(autojump_clock: object) -> None:
    load = a_load(under_way=3)
    channels: list[FakeChannel] = []
    with trio.move_on_after(1.0):
        async with trio.open_nursery() as nursery:
            await nursery.start(
                run_session, load, partial(multiplexed, fake_opener(lambda message, channel: None, channels))
            )
            load.supply.allow(math.inf)
            await trio.sleep_forever()
    assert errors(load) == {}
    assert channels[0].closed


async def test_the_load_answers_what_a_legacy_server_asks(autojump_clock: object) -> None:
    load = a_load(LATEST_LEGACY, count=1)

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if message.get("method") == "initialize":
            channel.answer(greeting(message), b'{"jsonrpc":"2.0","id":"p","method":"ping"}')
        elif message.get("method") == "tools/call":
            channel.answer(reply(message))

    @asynccontextmanager
    async def opened(load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
        async with trio.open_nursery() as nursery:
            channel = FakeChannel(
                lambda message, channel: sent.append(message) or serve(message, channel), nursery, greets=False
            )
            yield channel
            nursery.cancel_scope.cancel()

    sent: list[dict[str, Any]] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(run_session, load, partial(multiplexed, opened))
        load.supply.allow(1)
        await trio.sleep(1.0)
        load.supply.close(trio.current_time())
    assert orjson.loads(b'{"jsonrpc":"2.0","id":"p","result":{}}') in sent
