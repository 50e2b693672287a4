"""Whose time a handler works in: its caller's, told in `_meta`, and its tool's own, which stands still for a person."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from trimcp.session.incoming.job import CancelReason
from trimcp.testing import connected, every_revision
from trimcp.wire.codes import TIMED_OUT
from trimcp.wire.common import META_TIMEOUT


def make_server(seen: list[Any]) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def work(ctx: trimcp.Context) -> str:
        seen.append(ctx.deadline - trio.current_time())
        try:
            await trio.sleep(100)
        except trio.Cancelled:
            seen.append(ctx.cancel_reason)
            raise
        return "done"

    return server


@every_revision
async def test_a_handler_knows_how_long_its_caller_waits(revision: trimcp.Revision, autojump_clock: MockClock) -> None:
    seen: list[Any] = []
    async with connected(make_server(seen), revision=revision) as session:
        with trio.move_on_after(7.5):
            await session.call_tool("work")
        await wait_all_tasks_blocked()
        assert session.peer is not None
        assert session.peer.statistics().running == 0
    assert seen[0] == pytest.approx(7.5, abs=0.01)
    assert seen[1] is CancelReason.PEER  # it says so itself, and so it is believed


async def test_a_server_is_not_told_less_time_than_there_is(autojump_clock: MockClock) -> None:
    """Else it would give up first, and its error would arrive where the caller is about to be cancelled."""
    seen: list[Any] = []
    async with connected(make_server(seen)) as session:
        with trio.move_on_after(1.0004):
            await session.call_tool("work")
    assert 1.0004 <= seen[0] <= 1.002


@every_revision
async def test_the_work_stops_by_itself_where_no_cancellation_comes_through(
    revision: trimcp.Revision, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the connection is slow: the caller's word is enough."""
    seen: list[Any] = []
    async with connected(make_server(seen), revision=revision) as session:
        began = trio.current_time()
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("work", meta={META_TIMEOUT: 3})
        assert 3 <= trio.current_time() - began < 3.1
    assert caught.value.code == TIMED_OUT
    assert caught.value.data == {"reason": "deadline"}
    assert seen == [pytest.approx(3, abs=0.01), CancelReason.DEADLINE]
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


@every_revision
async def test_deadlines_shrink_on_their_way_through_a_proxy(
    revision: trimcp.Revision, autojump_clock: MockClock
) -> None:
    seen: list[Any] = []
    proxy: trimcp.Server[None] = trimcp.Server("proxy")
    async with connected(make_server(seen), revision=revision) as upstream:

        @proxy.tool
        async def forward() -> str:
            await trio.sleep(2)  # part of the caller's time
            result = await upstream.call_tool("work")
            return str(result.is_error)

        async with connected(proxy, revision=revision) as session:
            with trio.move_on_after(10) as scope:
                await session.call_tool("forward")
            assert scope.cancelled_caught
            await wait_all_tasks_blocked()
        assert upstream.statistics().pending == 0
    assert seen[0] == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("wrong", ["5", True, None, [5], {"seconds": 5}])
async def test_what_is_no_number_of_seconds_is_ignored(wrong: Any, autojump_clock: MockClock) -> None:
    seen: list[Any] = []
    async with connected(make_server(seen)) as session:
        result = await session.call_tool("work", meta={META_TIMEOUT: wrong})
    assert result.content == [trimcp.Text("done")]
    assert seen == [math.inf]


@pytest.mark.parametrize("passed", [0, -5, -1e300])
async def test_a_handler_does_not_begin_for_whom_nobody_waits(passed: float, autojump_clock: MockClock) -> None:
    seen: list[Any] = []
    async with connected(make_server(seen)) as session:
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("work", meta={META_TIMEOUT: passed})
    assert caught.value.code == TIMED_OUT
    assert seen == []


async def test_waiting_for_a_running_slot_is_part_of_the_callers_time(autojump_clock: MockClock) -> None:
    server: trimcp.Server[None] = trimcp.Server("s", limits=trimcp.Limits(max_running=1))
    begun: list[str] = []

    @server.tool
    async def work(name: str) -> None:
        begun.append(name)
        await trio.sleep(5)

    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "work", {"name": "first"})
        await wait_all_tasks_blocked()
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("work", {"name": "late"}, meta={META_TIMEOUT: 4})
    assert caught.value.code == TIMED_OUT
    assert begun == ["first"]


@every_revision
async def test_the_sooner_of_two_deadlines_counts(revision: trimcp.Revision, autojump_clock: MockClock) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    seen: list[float] = []

    @server.tool(timeout=5)
    async def work(ctx: trimcp.Context) -> None:
        seen.append(ctx.deadline - trio.current_time())
        await trio.sleep(100)

    async with connected(server, revision=revision) as session:
        with trio.fail_after(60):
            assert (await session.call_tool("work")).is_error
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("work", meta={META_TIMEOUT: 2})
        assert caught.value.code == TIMED_OUT
    assert seen == [pytest.approx(5, abs=0.01), pytest.approx(2, abs=0.01)]


async def test_a_client_may_keep_its_deadlines_to_itself(autojump_clock: MockClock) -> None:
    seen: list[Any] = []
    client = trimcp.Client("c", send_deadlines=False)
    async with connected(make_server(seen), client) as session:
        with trio.move_on_after(3):
            await session.call_tool("work")
        await wait_all_tasks_blocked()
    assert seen == [math.inf, CancelReason.PEER]


async def test_the_clients_hard_cap_is_told_and_its_work_clock_is_not(autojump_clock: MockClock) -> None:
    """Progress sets the work clock back, so what it says now is not when the caller stops waiting."""
    server: trimcp.Server[None] = trimcp.Server("s")
    seen: list[float] = []

    @server.tool
    async def work(ctx: trimcp.Context) -> str:
        seen.append(ctx.deadline - trio.current_time())
        for step in range(4):
            await trio.sleep(2)
            await ctx.report_progress(step + 1)
        return "done"

    client = trimcp.Client("c", request_timeout=3, max_request_time=20)
    async with connected(server, client) as session:
        assert (await session.call_tool("work")).content == [trimcp.Text("done")]
        async with session.calling("work") as call:
            await call.result()
    assert seen == [pytest.approx(20, abs=0.01)] * 2


# Two clocks


def asking_server(seen: list[float]) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool(timeout=5)
    async def work(before: float, after: float, ctx: trimcp.Context) -> str:
        await trio.sleep(before)
        answer = await ctx.elicit("Really?", {"type": "object", "properties": {"ok": {"type": "boolean"}}})
        seen.append(ctx.deadline - trio.current_time())
        await trio.sleep(after)
        return answer.action

    return server


def patient_client(seconds: float) -> trimcp.Client:
    client = trimcp.Client("c")

    @client.elicitation
    async def think(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        await trio.sleep(seconds)
        return trimcp.ElicitResult(action="accept", content={"ok": True})

    return client


ASKS = pytest.mark.parametrize("revision", [r for r in trimcp.REVISIONS if r.name >= "2025-06-18"], ids=str)


@ASKS
async def test_a_persons_time_is_not_the_tools(revision: trimcp.Revision, autojump_clock: MockClock) -> None:
    seen: list[float] = []
    async with connected(asking_server(seen), patient_client(1_000), revision=revision) as session:
        result = await session.call_tool("work", {"before": 2, "after": 2})
        assert result.content == [trimcp.Text("accept")]
        result = await session.call_tool("work", {"before": 2, "after": 4})
        assert result.is_error
        assert result.content == [trimcp.Text("work did not finish within 5 seconds")]
    assert seen == [pytest.approx(3, abs=0.01)] * 2


async def test_a_person_who_never_answers_is_not_waited_for_for_ever(autojump_clock: MockClock) -> None:
    server: trimcp.Server[None] = trimcp.Server("s", limits=trimcp.Limits(answer_timeout=60))
    asked: list[str] = []

    @server.tool
    async def work(ctx: trimcp.Context) -> str:
        try:
            await ctx.elicit("Really?", {"type": "object", "properties": {"ok": {"type": "boolean"}}})
        except trimcp.CannotAsk as error:
            asked.append(str(error))
            raise
        return "answered"

    stopped: list[bool] = []
    client = trimcp.Client("c")

    @client.elicitation
    async def think(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(True)

    async with connected(server, client, revision=trimcp.LATEST_LEGACY) as session:
        began = trio.current_time()
        result = await session.call_tool("work")
        assert trio.current_time() - began == pytest.approx(60, abs=0.01)
        assert result.is_error
        assert result.content == [trimcp.Text("the client did not answer within 60 seconds")]
        await wait_all_tasks_blocked()
        assert stopped == [True]  # the person is told that nobody waits any more
        assert session.peer is not None
        assert session.peer.statistics().parked == 0
    assert asked == ["the client did not answer within 60 seconds"]
