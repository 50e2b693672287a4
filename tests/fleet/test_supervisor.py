"""A connection that is opened again when it is lost: pauses, limits, the circuit and health, in virtual time."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.client.peers import HandMade, Scripted, discover_result, error, initialize_result
from tests.fleet.shaky import Shaky
from trimcp import ConnectionLost, UpstreamDown
from trimcp.fleet import Breaker, Health, Restarts, UpstreamState
from trimcp.fleet.upstream import Upstream
from trimcp.testing import every_revision
from trimcp.wire.revisions import LATEST_LEGACY
from trimcp.wire.tools import ListToolsResult, Tool

QUICK = Restarts(first_pause=0.01)


def near(seconds: float, tolerance: float = 0.1) -> Any:
    return pytest.approx(seconds, abs=tolerance)


@asynccontextmanager
async def supervised(target: Any, client: trimcp.Client | None = None, **options: Any) -> AsyncIterator[Upstream]:
    """Supervise a target, with pauses that are always the same, and wait for its first connection."""
    client = client or trimcp.Client("host", "1")
    options.setdefault("random", Random(1))
    async with trimcp.supervise(client, target, name="shaky", **options) as upstream:
        await upstream.wait_up()
        yield upstream


async def caught(call: Callable[[], Awaitable[Any]], into: list[Any]) -> None:
    """Note what a call returned or raised, and when."""
    try:
        value = await call()
    except (trimcp.McpError, trio.TooSlowError) as problem:
        value = problem
    into.append((value, trio.current_time()))


def work(upstream: Upstream, seconds: float = 0, **arguments: Any) -> Callable[[], Awaitable[Any]]:
    return lambda: upstream.call_tool("work", {"seconds": seconds, **arguments})


def next_attempt(upstream: Upstream) -> float:
    at = upstream.statistics().next_attempt
    assert at is not None
    return at


# Lost and opened again


@every_revision
async def test_pending_calls_fail_at_once_and_later_ones_get_a_new_connection(
    revision: trimcp.Revision, autojump_clock: Any, nursery: trio.Nursery
) -> None:
    shaky = Shaky()
    async with supervised(shaky, revision=revision) as upstream:
        outcomes: list[Any] = []
        for _ in range(3):
            nursery.start_soon(caught, work(upstream, 500), outcomes)
        await trio.sleep(5)
        lost_at = trio.current_time()
        await shaky.die()
        await wait_all_tasks_blocked()
        assert [(type(value), at) for value, at in outcomes] == [(ConnectionLost, lost_at)] * 3
        assert "closed the connection" in str(outcomes[0][0])
        assert upstream.state is not UpstreamState.UP
        result = await upstream.call_tool("work")  # waits for the next connection
        assert not result.is_error
        assert len(shaky.times) == 2
        statistics = upstream.statistics()
        assert statistics.state is upstream.state is UpstreamState.UP
        assert (statistics.connections, statistics.restarts, statistics.losses) == (2, 1, 1)
        assert statistics.last_reason == str(outcomes[0][0])
    assert upstream.state is UpstreamState.ENDED


async def test_what_the_old_connection_had_cached_is_forgotten() -> None:
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        return ListToolsResult([Tool(f"t{len(server.sessions)}", {"type": "object"})], ttl_ms=60_000)

    async with supervised(server, restarts=QUICK) as upstream:
        for _ in range(2):
            assert [tool.name for tool in await upstream.list_tools()] == ["t1"]
        assert len([name for name, _ in server.asked if name == "tools/list"]) == 1
        upstream.restart()
        assert upstream.state is UpstreamState.CONNECTING
        assert [tool.name for tool in await upstream.list_tools()] == ["t2"]


async def test_calls_fail_at_once_while_it_is_down_if_they_are_to(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, when_down="fail", restarts=Restarts(first_pause=20)) as upstream:
        await upstream.call_tool("work")
        shaky.refusals = 1
        await shaky.die()
        await upstream.wait_state(UpstreamState.WAITING)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        with pytest.raises(UpstreamDown, match=r"'shaky' is down: .*; it is tried again in [\d.]+ s") as down:
            await upstream.call_tool("work")
        assert trio.current_time() == start
        assert down.value.retry_at == upstream.statistics().next_attempt
        assert down.value.retry_at is not None
        assert down.value.retry_at > start
        assert not down.value.given_up
        assert down.value.reasons == upstream.statistics().reasons
        assert upstream.statistics().refused_calls == 1
        assert len(shaky.handled) == 1
        await upstream.wait_up()
        await upstream.call_tool("work")
    async with trimcp.supervise(trimcp.Client("host"), Shaky(), when_down="fail") as upstream:
        with pytest.raises(UpstreamDown, match="is not connected yet; it is being tried now"):
            await upstream.call_tool("work")


async def test_a_call_that_waits_is_bounded_by_its_callers_scope(autojump_clock: Any) -> None:
    shaky = Shaky(stalls=1)
    async with trimcp.supervise(trimcp.Client("host"), shaky) as upstream:
        with trio.move_on_after(5) as scope:
            await upstream.call_tool("work")
        assert scope.cancelled_caught
        assert trio.current_time() == near(5)


async def test_the_body_goes_on_whatever_happens_to_the_upstream(autojump_clock: Any) -> None:
    shaky = Shaky(refusals=10**9)
    async with trimcp.supervise(trimcp.Client("host"), shaky, restarts=Restarts(most=3)) as upstream:
        await trio.sleep(10_000)
        assert upstream.state is UpstreamState.GIVEN_UP


# Pauses and limits


async def test_pauses_double_from_the_seed_and_start_again_after_a_connection_that_lasted(autojump_clock: Any) -> None:
    shaky = Shaky(refusals=4)
    restarts = Restarts(first_pause=1, longest_pause=6, lasting=10)
    async with supervised(shaky, restarts=restarts, breaker=None, random=Random(11)) as upstream:
        expected, random, at = [shaky.times[0]], Random(11), shaky.times[0]
        for in_a_row in (1, 2, 3, 4):
            at += restarts.pause(in_a_row, random)
            expected.append(at)
        assert shaky.times == [near(at, 0.001) for at in expected]
        await trio.sleep(9)
        await shaky.die()  # did not last: the fifth in a row
        lost = trio.current_time()
        await upstream.wait_state(UpstreamState.CONNECTING)
        assert shaky.times[-1] - lost == near(restarts.pause(5, random), 0.001)
        await upstream.wait_up()
        await trio.sleep(11)
        await shaky.die()
        lost = trio.current_time()
        await upstream.wait_state(UpstreamState.CONNECTING)
        assert shaky.times[-1] - lost == near(restarts.pause(0, random), 0.001)


async def test_it_is_given_up_after_too_many_restarts_with_the_reasons(autojump_clock: Any) -> None:
    shaky = Shaky()
    restarts = Restarts(most=3, within=100, first_pause=1)
    async with supervised(shaky, restarts=restarts, breaker=None) as upstream:
        shaky.refusals = 3
        await shaky.die()
        await upstream.wait_state(UpstreamState.WAITING)
        outcomes: list[Any] = []
        await caught(work(upstream), outcomes)  # waits, until there is nothing to wait for
        assert upstream.state is UpstreamState.GIVEN_UP
        down = outcomes[0][0]
        assert isinstance(down, UpstreamDown)
        assert down.given_up
        assert down.retry_at is None
        assert "given up after 3 restarts within 100 s; the last reason: nobody is there (4)" in str(down)
        assert [reason[:12] for reason in down.reasons] == ["the peer clo", *["nobody is th"] * 3]
        await trio.sleep(10_000)
        assert len(shaky.times) == 4
        with pytest.raises(UpstreamDown):
            await upstream.wait_up()
        upstream.restart()
        await upstream.wait_up()
        assert not (await upstream.call_tool("work")).is_error
        assert len(shaky.times) == 5
        shaky.refusals = 10**9
        await shaky.die()
        await upstream.wait_state(UpstreamState.GIVEN_UP)
        shaky.refusals = 2
        upstream.restart()  # what was before is forgotten, so it may fail again a few times
        await upstream.wait_up()


async def test_restarts_far_apart_are_no_reason_to_give_up(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, restarts=Restarts(most=2, within=100, first_pause=0.1)) as upstream:
        for _ in range(10):
            await trio.sleep(51)
            await shaky.die()
            await upstream.wait_state(UpstreamState.WAITING)
            await upstream.wait_up()
        assert upstream.statistics().restarts == 10


async def test_one_that_is_merely_away_is_never_given_up(autojump_clock: Any) -> None:
    """With the settings that nobody has to think about."""
    async with trimcp.supervise(trimcp.Client("host", "1"), Shaky(refusals=10**9)) as upstream:
        for _ in range(100):
            before = upstream.statistics().failed_attempts
            await trio.sleep(600)
            assert upstream.state is not UpstreamState.GIVEN_UP
            assert 5 <= upstream.statistics().failed_attempts - before <= 20


async def test_an_attempt_may_take_so_long_and_no_longer(autojump_clock: Any) -> None:
    shaky = Shaky(stalls=1)
    start = trio.current_time()
    async with supervised(shaky, restarts=Restarts(connect_timeout=25, first_pause=0.01)) as upstream:
        assert trio.current_time() - start == near(25)
        assert upstream.statistics().reasons == ("the connection was not opened within 25 seconds (connect_timeout)",)
        await trio.sleep(100)  # the time is for connecting only
        assert upstream.state is UpstreamState.UP


async def test_a_bug_in_the_target_is_logged_whole_and_counts_as_a_failure(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shaky = Shaky()

    class Buggy:
        def connect(self) -> Any:
            if not shaky.times:
                shaky.times.append(0)
                raise ZeroDivisionError("oops")
            return shaky.connect()

    async with supervised(Buggy()) as upstream:
        assert upstream.statistics().reasons == ("oops",)
    assert "ZeroDivisionError" in caplog.text


# The circuit


async def test_the_circuit_opens_after_failures_in_a_row_and_one_probe_closes_it(autojump_clock: Any) -> None:
    shaky = Shaky(refusals=4)
    client = trimcp.Client("host", "1")
    outcomes: list[Any] = []
    options: dict[str, Any] = {"restarts": Restarts(first_pause=0.5), "breaker": Breaker(3, 30), "random": Random(1)}
    async with trimcp.supervise(client, shaky, name="shaky", **options) as upstream, trio.open_nursery() as nursery:
        nursery.start_soon(caught, work(upstream), outcomes)
        await upstream.wait_state(UpstreamState.OPEN)
        opened = trio.current_time()
        await wait_all_tasks_blocked()
        ((waiting, failed_at),) = outcomes  # who waited is told now, and who comes is told at once
        assert isinstance(waiting, UpstreamDown)
        assert failed_at == opened
        with pytest.raises(UpstreamDown, match=r"nobody is there \(3\); it is tried again in 3\d"):
            await upstream.call_tool("work")
        assert trio.current_time() == opened
        assert len(shaky.times) == 3
        await trio.sleep_until(next_attempt(upstream) + 0.1)
        assert len(shaky.times) == 4  # one probe, in vain
        assert 30 <= shaky.times[3] - opened <= 35
        assert upstream.state is UpstreamState.OPEN
        assert 30 <= next_attempt(upstream) - shaky.times[3] <= 40
        assert await upstream.wait_state(UpstreamState.PROBING, UpstreamState.UP) is UpstreamState.PROBING
        assert not (await upstream.call_tool("work")).is_error  # waits for the probe
        assert len(shaky.times) == 5
        assert upstream.state is UpstreamState.UP


async def test_a_server_that_dies_soon_after_each_start_opens_the_circuit_too(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, breaker=Breaker(3, 30), restarts=Restarts(first_pause=0.1)) as upstream:
        for expected in (UpstreamState.WAITING, UpstreamState.WAITING, UpstreamState.OPEN, UpstreamState.OPEN):
            await upstream.call_tool("work")
            await shaky.die()
            assert await upstream.wait_state(UpstreamState.WAITING, UpstreamState.OPEN) is expected
            await upstream.wait_up()
        await trio.sleep(11)  # it lasts: all is forgotten
        await shaky.die()
        assert await upstream.wait_state(UpstreamState.WAITING, UpstreamState.OPEN) is UpstreamState.WAITING


async def test_calls_without_an_answer_open_the_circuit_of_a_connection_that_stands(
    autojump_clock: Any, nursery: trio.Nursery
) -> None:
    shaky = Shaky()
    client = trimcp.Client("host", "1", request_timeout=5)
    outcomes: list[Any] = []
    async with supervised(shaky, client, breaker=Breaker(3, 30)) as upstream:
        nursery.start_soon(caught, work(upstream, 120, progress=True), outcomes)
        for _ in range(2):
            with pytest.raises(trio.TooSlowError):
                await upstream.call_tool("work", {"seconds": 60})
        await upstream.call_tool("work")  # an answer: counted from the start again
        for _ in range(3):
            with pytest.raises(trio.TooSlowError):
                await upstream.call_tool("work", {"seconds": 60})
        await wait_all_tasks_blocked()
        assert upstream.state is UpstreamState.OPEN
        opened = trio.current_time()
        with pytest.raises(UpstreamDown, match="3 calls in a row got no answer; it is tried again in 30 s"):
            await upstream.call_tool("work")
        await upstream.wait_state(UpstreamState.PROBING)
        assert trio.current_time() - opened == near(30)
        await upstream.wait_up()
        with pytest.raises(trio.TooSlowError):
            await upstream.call_tool("work", {"seconds": 60})  # on trial: the first failure opens it again
        await wait_all_tasks_blocked()
        assert upstream.state is UpstreamState.OPEN
        await upstream.wait_up()
        await upstream.call_tool("work")
        with pytest.raises(trio.TooSlowError):
            await upstream.call_tool("work", {"seconds": 60})
        await wait_all_tasks_blocked()
        assert upstream.state is UpstreamState.UP
        while not outcomes:  # noqa: ASYNC110 - of the virtual clock
            await trio.sleep(1)
        assert not outcomes[0][0].is_error  # what went on meanwhile was left alone
        assert len(shaky.times) == 1
        assert upstream.statistics().unanswered_calls == 7


async def test_a_connection_lost_while_the_circuit_is_open_is_opened_no_sooner(autojump_clock: Any) -> None:
    shaky = Shaky()
    client = trimcp.Client("host", "1", request_timeout=5)
    async with supervised(shaky, client, breaker=Breaker(1, 30), restarts=QUICK) as upstream:
        with pytest.raises(trio.TooSlowError):
            await upstream.call_tool("work", {"seconds": 60})
        await upstream.wait_state(UpstreamState.OPEN)
        opened = trio.current_time()
        await trio.sleep(10)
        await shaky.die()
        await wait_all_tasks_blocked()
        assert upstream.state is UpstreamState.OPEN
        await upstream.wait_up()
        assert trio.current_time() - opened == near(30)
        await trio.sleep(100)  # no call failed since
        assert upstream.state is UpstreamState.UP


async def test_errors_are_answers_and_calls_given_up_say_nothing(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, breaker=Breaker(1, 30)) as upstream:
        for _ in range(3):
            with pytest.raises(trimcp.RemoteError):
                await upstream.get_prompt("none")
            with trio.move_on_after(1):
                await upstream.call_tool("work", {"seconds": 60})
        await wait_all_tasks_blocked()
        assert upstream.state is UpstreamState.UP
        assert upstream.statistics().unanswered_calls == 0


# Health


async def test_an_upstream_that_talks_is_never_pinged(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, health=Health(owing=15, idle=60)) as upstream:
        async with upstream.calling("work", {"seconds": 300, "progress": True}) as call:
            await call.result()
        assert upstream.statistics().pings == 0


async def test_a_silent_one_is_pinged_and_spared_when_it_answers(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, health=Health(owing=15, idle=60, patience=10)) as upstream:
        await upstream.call_tool("work", {"seconds": 300})
        assert 10 <= upstream.statistics().pings <= 20
        before = upstream.statistics().pings
        async with upstream.listen(tools=True):  # which owes nothing
            await trio.sleep(600)
        assert 5 <= upstream.statistics().pings - before <= 10
        assert upstream.statistics().connections == 1


@every_revision
async def test_one_that_does_not_answer_is_taken_for_dead(
    revision: trimcp.Revision, autojump_clock: Any, nursery: trio.Nursery
) -> None:
    shaky = Shaky()
    outcomes: list[Any] = []
    async with supervised(shaky, revision=revision, health=Health(owing=15, idle=60, patience=10)) as upstream:
        await trio.sleep(100)
        shaky.freeze()
        start = trio.current_time()
        nursery.start_soon(caught, work(upstream, 1), outcomes)
        await upstream.wait_state(UpstreamState.WAITING)
        await wait_all_tasks_blocked()
        ((value, at),) = outcomes
        assert type(value) is ConnectionLost
        assert "was silent, and did not answer a ping for 10 s" in str(value)
        assert at - start <= 2 * 15 + 10
        assert not (await upstream.call_tool("work")).is_error
        shaky.freeze()
        start = trio.current_time()
        await upstream.wait_state(UpstreamState.WAITING)
        assert 60 + 10 <= trio.current_time() - start <= 60 + 15 + 15 + 10  # it was idle


async def test_nobody_is_pinged_if_that_is_not_wanted(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, health=None) as upstream:
        shaky.freeze()
        with trio.move_on_after(10_000) as scope:
            await upstream.call_tool("work")
        assert scope.cancelled_caught
        assert upstream.statistics().pings == 0


@pytest.mark.parametrize("modern", [True, False])
async def test_an_error_is_a_sign_of_life(modern: bool, autojump_clock: Any) -> None:
    asked = 0

    def script(message: dict[str, Any]) -> Any:
        nonlocal asked
        if message.get("method") == "initialize":
            return initialize_result(message["id"])
        if message.get("method") == "server/discover" and modern and not asked:
            asked += 1
            return discover_result(message["id"])
        asked += 1
        return error(message["id"], -32601) if "id" in message else None

    options: dict[str, Any] = {} if modern else {"revision": LATEST_LEGACY}
    async with supervised(Scripted(script), health=Health(idle=20), **options) as upstream:
        await trio.sleep(200)
        assert upstream.statistics().connections == 1
        assert upstream.statistics().pings >= 5


async def test_anything_it_says_instead_of_answering_the_ping_will_do(
    autojump_clock: Any, nursery: trio.Nursery
) -> None:
    """A server that does one thing at a time answers no ping while it works, but tells how far it is."""
    heard: list[dict[str, Any]] = []

    def script(message: dict[str, Any]) -> Any:
        heard.append(message)
        if message.get("method") == "initialize":
            return initialize_result(message["id"], tools={})
        return None

    target = Scripted(script)
    outcomes: list[Any] = []
    health = Health(owing=15, patience=10)
    async with supervised(target, revision=LATEST_LEGACY, health=health) as upstream:
        nursery.start_soon(caught, work(upstream), outcomes)
        note = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        for _ in range(20):
            while not [message for message in heard if message.get("method") == "ping"]:  # noqa: ASYNC110 - as above
                await trio.sleep(1)
            heard.clear()
            await trio.sleep(3)
            await target.say(note)
        assert upstream.statistics().connections == 1
        await upstream.wait_state(UpstreamState.WAITING)
    assert "did not answer a ping" in str(outcomes[0][0])


# The end, and what is told


async def test_leaving_ends_it_in_every_state(autojump_clock: Any) -> None:
    client = trimcp.Client("host", "1")
    for shaky in (Shaky(), Shaky(stalls=1), Shaky(refusals=1), Shaky(refusals=10**9)):
        start = trio.current_time()
        outcomes: list[Any] = []
        async with trio.open_nursery() as nursery:
            async with trimcp.supervise(client, shaky, name="shaky", restarts=Restarts(first_pause=50)) as upstream:
                await wait_all_tasks_blocked()
                state = upstream.state
                nursery.start_soon(caught, work(upstream, 1000), outcomes)
                await wait_all_tasks_blocked()
            assert trio.current_time() - start < 1
        ((value, _),) = outcomes
        assert isinstance(value, ConnectionLost), state
        with pytest.raises(UpstreamDown, match="'shaky' was left"):
            await upstream.call_tool("work")
        with pytest.raises(UpstreamDown, match="'shaky' was left"):
            upstream.restart()
        assert upstream.state is UpstreamState.ENDED
    assert not client.sessions


async def test_the_bodys_exception_leaves_as_itself_and_cancelling_ends_all(autojump_clock: Any) -> None:
    client = trimcp.Client("host", "1")
    with pytest.raises(KeyError, match="mine"):
        async with trimcp.supervise(client, Shaky()) as upstream:
            await upstream.wait_up()
            raise KeyError("mine")
    shaky = Shaky()
    with trio.move_on_after(5) as scope:
        async with trimcp.supervise(client, shaky) as upstream:
            await upstream.call_tool("work", {"seconds": 600})
    assert scope.cancelled_caught
    assert len(shaky.ended) == 1
    assert not client.sessions


async def test_a_restart_by_hand_drops_the_connection_there_is(autojump_clock: Any, nursery: trio.Nursery) -> None:
    shaky = Shaky()
    outcomes: list[Any] = []
    async with supervised(shaky) as upstream:
        nursery.start_soon(caught, work(upstream, 600), outcomes)
        await wait_all_tasks_blocked()
        upstream.restart()
        assert upstream.state is UpstreamState.CONNECTING
        assert not (await upstream.call_tool("work")).is_error
        assert isinstance(outcomes[0][0], ConnectionLost)
        assert upstream.statistics().losses == 0  # nobody lost it
        shaky.stalls = 1
        upstream.restart()
        await wait_all_tasks_blocked()
        upstream.restart()  # gives the attempt up, too
        await upstream.wait_up()
        assert trio.current_time() < 1


async def test_each_change_is_a_line_in_the_log(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimcp.client")
    shaky = Shaky()
    async with supervised(shaky, breaker=Breaker(2, 30), restarts=Restarts(most=3)) as upstream:
        shaky.refusals = 10**9
        await shaky.die()
        await upstream.wait_state(UpstreamState.GIVEN_UP)
    lines = [(record.levelname, record.getMessage().partition(": tried again")[0]) for record in caplog.records]
    assert lines == [
        ("INFO", "upstream 'shaky': connecting -> up: connection 1"),
        ("WARNING", "upstream 'shaky': up -> waiting: the peer closed the connection"),
        ("WARNING", "upstream 'shaky': connecting -> open"),
        ("WARNING", "upstream 'shaky': probing -> open"),
        ("ERROR", "upstream 'shaky': probing -> given up: nobody is there (4)"),
    ]


async def test_what_cannot_be_supervised_is_refused() -> None:
    client = trimcp.Client("host", "1")
    for target in (trimcp.memory_channels()[0], Shaky().connect()):
        with pytest.raises(trimcp.LocalError, match="good for one connection"):
            async with trimcp.supervise(client, target):
                pass
    with pytest.raises(trimcp.LocalError, match="no revision"):
        async with trimcp.supervise(client, Shaky(), revision="2020-01-01"):
            pass
    with pytest.raises(trimcp.LocalError, match='"wait" or "fail"'):
        async with trimcp.supervise(client, Shaky(), when_down="panic"):
            pass
