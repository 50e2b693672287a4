"""What a process is busy with, as it is printed when the time to end has come."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.session.support import FORM, Answers, Tools, call, linked, served
from trimcp.session.context import Context
from trimcp.session.limits import Limits
from trimcp.session.session import Session
from trimcp.watch.tree import Overdue, work_tree
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import LATEST_LEGACY


def looked_at(*sessions: Session) -> list[str]:
    """The tree without the calls of the test's own endpoint."""
    return [line for line in work_tree(sessions) if "support.py" not in line]


async def inner(event: trio.Event) -> None:
    await event.wait()  # the innermost line


async def test_each_request_is_named_with_its_age_and_the_calls_it_waits_in(autojump_clock: MockClock) -> None:
    event = trio.Event()

    async def run(ctx: Context[Any]) -> str:
        await inner(event)
        return "done"

    async with linked({"run": run}) as pair:
        call = await pair.begin()
        await wait_all_tasks_blocked()
        await trio.sleep(12.5)
        lines = looked_at(pair.client, pair.server)
        assert lines[0] == f"'client' '1', in revision {LATEST_LEGACY.name}"
        assert lines[1] == f"  tools/call 'run', request {call.id}, for 12.5 s"
        first, second = lines[2:]
        assert first.startswith("    tests/session/test_tree.py:")
        assert first.endswith(" in run: await inner(event)")
        assert second.endswith(" in inner: await event.wait()  # the innermost line")
        event.set()
        await call.raw()
        assert looked_at(pair.client, pair.server) == []


async def test_the_tasks_a_handler_waits_for_stand_below_it() -> None:
    event = trio.Event()

    async def run(ctx: Context[Any]) -> str:
        ctx.request.start_soon(inner, event)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inner, event)
            nursery.start_soon(trio.sleep_forever)  # nothing of it is anybody's but Trio's
            await event.wait()
            nursery.cancel_scope.cancel()
        return "done"

    async with linked({"run": run}) as pair:
        call = await pair.begin()
        await wait_all_tasks_blocked()
        lines = [line.partition("test_tree.py")[2] or line for line in looked_at(pair.server)[2:]]
        texts = [line.partition(" in ")[2] or line for line in lines]
        name = f"{__name__}.inner"
        innermost = "inner: await event.wait()  # the innermost line"
        assert texts == ["run: await event.wait()", f"    task {name}", innermost, f"    task {name}", innermost]
        event.set()
        await call.raw()


async def test_a_thread_is_looked_into() -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        end.wait(30)  # in the thread
        return "done"

    async def run(ctx: Context[Any]) -> str:
        return await trio.to_thread.run_sync(work)

    async with linked({"run": run}) as pair:
        call = await pair.begin()
        await trio.to_thread.run_sync(begun.wait)
        lines = looked_at(pair.server)
        end.set()
        await call.raw()
    inside = [line for line in lines if "in a thread: " in line]
    assert "in work: end.wait(30)  # in the thread" in "".join(inside)


async def test_what_waits_for_the_client_or_for_a_slot_or_is_being_cancelled_says_so(mock_clock: Any) -> None:
    async def ask(ctx: Context[Any]) -> str:
        await ctx.elicit("name?", FORM)
        return "done"

    async def stubborn(ctx: Context[Any]) -> str:
        with trio.CancelScope(shield=True):
            await event.wait()
        return "done"

    async def answer(job: Any) -> ElicitResult:
        await event.wait()
        return ElicitResult(action="decline")

    event = trio.Event()
    limits = Limits(max_running=1, eof_grace=0.0)
    async with linked({"ask": ask, "stubborn": stubborn}, limits=limits, answers=Answers(answer)) as pair:
        asking = await pair.begin("ask")
        await wait_all_tasks_blocked()
        given_up = await pair.begin("stubborn")
        await wait_all_tasks_blocked()
        waiting = await pair.begin("stubborn")
        pair.client.abandon(given_up, "no longer needed")
        await wait_all_tasks_blocked()
        lines = looked_at(pair.server)
        event.set()
        await asking.raw()
        await waiting.raw()
    requests = [line for line in lines if not line.startswith("   ")][1:]
    assert requests == [
        f"  tools/call 'ask', request {asking.id}, for 0.0 s, waiting for the client to answer",
        f"  tools/call 'stubborn', request {given_up.id}, for 0.0 s, being cancelled (cancelled by peer)",
        f"  tools/call 'stubborn', request {waiting.id}, waiting to be started",
    ]


async def test_what_a_peer_wrote_is_harmless() -> None:
    async def run(ctx: Context[Any]) -> str:
        await trio.sleep_forever()
        raise AssertionError

    name = "\x1b[31m\n" + "x" * 10_000
    async with served({name: run}) as (wire, session):
        wire.feed(call("\u202e" * 5_000, name))
        await wait_all_tasks_blocked()
        lines = looked_at(session)
        session.close()
    assert len(lines) == 3
    assert all(line.isascii() and line.isprintable() and len(line) < 1_000 for line in lines)


async def test_it_has_an_end() -> None:
    async def run(ctx: Context[Any]) -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with served({"run": run}, limits=Limits(max_running=200, eof_grace=0.0)) as (wire, session):
        wire.feed(*(call(number) for number in range(200)))
        await wait_all_tasks_blocked()
        lines = work_tree([session] * 100)
        session.close()
    told = len([line for line in lines if line.startswith("  tools/call")])
    assert 100 < told < 200, "not even one session with very much to do fills the screen"
    assert len(lines) < 510
    assert lines[-1] == f"and {20_000 - told} more requests"


async def test_what_has_been_at_work_longest_comes_first(autojump_clock: MockClock) -> None:
    async def run(ctx: Context[Any]) -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with linked({"run": run}) as one, linked({"run": run}) as two, linked({"run": run}) as three:
        for pair in (two, three, one):
            await pair.begin()
            await wait_all_tasks_blocked()
            await trio.sleep(1)
        ages = [
            line.rpartition(" for ")[2] for line in looked_at(one.server, two.server, three.server) if " for " in line
        ]
        for pair in (one, two, three):
            pair.server.close()
    assert ages == ["3.0 s", "2.0 s", "1.0 s"]


async def test_a_session_that_was_never_driven_is_no_trouble() -> None:
    async with served(Tools().tools) as (_, session):
        assert looked_at(session) == []


async def test_what_a_drain_has_to_stop_is_logged_once(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow(ctx: Context[Any]) -> str:
        await trio.sleep(60)
        raise AssertionError

    async def quick(ctx: Context[Any]) -> str:
        await trio.sleep(2)
        return "done"

    async with linked({"slow": slow}) as one, linked({"quick": quick, "slow": slow}) as two:
        calls = [await one.begin("slow"), await two.begin("slow")]
        await two.begin("quick")
        await wait_all_tasks_blocked()
        overdue = Overdue([two.server, one.server], 5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.server.drain, 5, overdue)
            nursery.start_soon(two.server.drain, 5, overdue)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    text = record.getMessage()
    assert text.startswith("still at work after 5 seconds and stopped now:\n")
    for begun in calls:
        assert f"tools/call 'slow', request {begun.id}, for 5.0 s" in text
    assert text.count("in slow: await trio.sleep(60)") == 2
    assert "quick" not in text


async def test_a_drain_that_is_in_time_says_nothing(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def quick(ctx: Context[Any]) -> str:
        await trio.sleep(2)
        return "done"

    async with linked({"quick": quick}) as pair:
        await pair.begin("quick")
        await wait_all_tasks_blocked()
        await pair.server.drain(5, Overdue([pair.server], 5))
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
