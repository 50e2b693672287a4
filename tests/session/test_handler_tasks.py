"""Handler tasks: jobs share tasks and scopes, and no job ever notices."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.session.support import Pair, call_all, linked
from trimcp.errors import RemoteError
from trimcp.protocol.connection import Connection
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.revisions import LATEST

MOOD: ContextVar[str] = ContextVar("mood", default="calm")
LARGE_RESULT = "x" * 1_100_000


def hands(pair: Pair) -> list[str]:
    """What the tasks of the server's nursery that run jobs are busy with."""
    return sorted(task.name for task in pair.server.nursery.child_tasks if ".read" not in task.name)


def meeting(many: int, result: str) -> Callable[[Any], Awaitable[str]]:
    """A handler of which so many have to run before they end, all together."""
    inside = 0
    everybody = trio.Event()

    async def meet(ctx: Any) -> str:
        nonlocal inside
        inside += 1
        if inside == many:
            everybody.set()
        await everybody.wait()
        return result

    return meet


async def test_jobs_that_never_wait_share_a_task() -> None:
    tasks: set[Any] = set()

    async def run(ctx: Any) -> str:
        tasks.add(trio.lowlevel.current_task())
        return "done"

    async with linked({"run": run}) as pair:
        assert await call_all(pair, "run", 50) == ["done"] * 50
        assert await call_all(pair, "run", 50) == ["done"] * 50
        assert len(tasks) <= 2, "the one who took the first, and the one it called"
        await wait_all_tasks_blocked()
        assert hands(pair) == ["waiting for a job"]


async def test_a_job_that_waits_delays_nobody_and_one_hand_stays(autojump_clock: Any) -> None:
    async with linked({"meet": meeting(40, "met")}, limits=Limits(max_running=40, eof_grace=0)) as pair:
        with trio.fail_after(1):
            assert await call_all(pair, "meet", 40) == ["met"] * 40
        await wait_all_tasks_blocked()
        assert hands(pair) == ["waiting for a job"]


async def test_a_context_variable_that_a_handler_set_is_its_own() -> None:
    async def change(ctx: Any) -> str:
        before = MOOD.get()
        MOOD.set("furious")
        return before

    async with linked({"change": change}) as pair:
        assert await call_all(pair, "change", 20) == ["calm"] * 20
        assert [await pair.call("change") for _ in range(3)] == ["calm"] * 3


async def test_a_context_variable_whose_values_cannot_be_compared_is_taken_for_changed() -> None:
    class Array:
        def __eq__(self, other: object) -> bool:
            raise ValueError("the truth value of an array is ambiguous")

        __hash__ = None

    variable: ContextVar[Any] = ContextVar("array", default=None)

    async def change(ctx: Any) -> str:
        before = variable.get()
        variable.set(Array())
        return str(before)

    token = variable.set(Array())
    try:
        async with linked({"change": change}) as pair:
            assert "Array" in await pair.call("change")
            assert "Array" in await pair.call("change")
    finally:
        variable.reset(token)


async def test_a_scope_that_a_handler_left_open_is_its_own(autojump_clock: Any, caplog: Any) -> None:
    kept: list[Any] = []

    async def within() -> AsyncIterator[int]:
        with trio.move_on_after(0.5):
            yield 1
            yield 2

    async def leave_open(ctx: Any) -> str:
        kept.append(within())
        await kept[-1].__anext__()
        return "nothing wrong"

    async def nap(ctx: Any) -> str:
        await trio.sleep(1)
        return "rested"

    async with linked({"leave_open": leave_open, "nap": nap}) as pair:
        with caplog.at_level(logging.ERROR), pytest.raises(RemoteError) as refused:
            await pair.call("leave_open")
        assert refused.value.code == INTERNAL_ERROR
        assert "left a cancel scope or a nursery open" in caplog.text
        assert await call_all(pair, "nap", 3) == ["rested"] * 3
    for generator in kept:
        await generator.aclose()


async def test_a_cancelled_job_takes_no_other_along(autojump_clock: Any) -> None:
    ended: list[str] = []

    async def nap(ctx: Any) -> str:
        try:
            await trio.sleep(5)
        finally:
            ended.append(str(ctx.cancel_reason))
        return "rested"

    async with linked({"nap": nap}) as pair:
        for _ in range(3):
            pending = await pair.begin("nap")
            await wait_all_tasks_blocked()
            pair.client.abandon(pending, "no longer needed")
            assert await pair.call("nap") == "rested"
    assert ended == [str(CancelReason.PEER), "None"] * 3


async def test_a_cancellation_that_a_handler_does_not_notice_is_not_the_next_ones(autojump_clock: Any) -> None:
    async def deaf(ctx: Any) -> str:
        with trio.CancelScope(shield=True):
            await trio.sleep(1)
        return "never heard"

    async def nap(ctx: Any) -> str:
        await trio.sleep(1)
        return "rested"

    async with linked({"deaf": deaf, "nap": nap}, limits=Limits(max_running=1, eof_grace=0)) as pair:
        pending = await pair.begin("deaf")
        await wait_all_tasks_blocked()
        pair.client.abandon(pending, None)
        assert await call_all(pair, "nap", 2) == ["rested"] * 2


async def test_a_cancellation_that_comes_too_late_is_not_the_next_ones(autojump_clock: Any) -> None:
    async def nap(ctx: Any) -> str:
        await trio.sleep(1)
        return "rested"

    async with linked({"nap": nap}) as pair:
        assert await pair.call("nap") == "rested"
        (over,) = pair.tools.jobs
        pair.nursery.start_soon(call_all, pair, "nap", 1)
        await wait_all_tasks_blocked()
        over.cancel(CancelReason.PEER)
        await trio.sleep(2)
        assert [job.reason for job in pair.tools.jobs] == [CancelReason.PEER, None]


async def test_what_is_under_way_when_the_session_ends_is_ended(autojump_clock: Any) -> None:
    async def nap(ctx: Any) -> None:
        await trio.sleep(5)

    async with linked({"nap": nap}) as pair:
        await pair.begin("nap")
        await wait_all_tasks_blocked()
        (job,) = pair.tools.jobs
    assert (job.over, job.reason) == (True, CancelReason.DISCONNECTED)


async def test_what_is_under_way_when_everything_is_cancelled_is_ended(autojump_clock: Any) -> None:
    async def nap(ctx: Any) -> None:
        await trio.sleep(5)

    with trio.CancelScope() as everything:
        async with linked({"nap": nap}) as pair:
            for _ in range(3):
                await pair.begin("nap")
            await wait_all_tasks_blocked()
            everything.cancel()
            await trio.sleep(1)
    assert everything.cancelled_caught
    assert [job.over for job in pair.tools.jobs] == [True] * 3
    pair.at_rest()


async def test_what_is_cancelled_before_its_turn_never_runs(autojump_clock: Any) -> None:
    ran: list[str] = []

    async def note(ctx: Any) -> str:
        ran.append("note")
        return "noted"

    async with linked({"note": note}) as pair:
        job_cancelled = False

        class Impatient:
            """Cancels what was just taken, before a hand had a turn."""

            def before_task_step(self, task: Any) -> None:
                nonlocal job_cancelled
                for job in pair.server.jobs:
                    if job.task is None and not job_cancelled:
                        job_cancelled = True
                        job.cancel(CancelReason.PEER)

        trio.lowlevel.add_instrument(Impatient())
        with trio.move_on_after(1):
            await pair.call("note")
        assert job_cancelled
        assert ran == []
        assert await pair.call("note") == "noted"


async def test_a_question_by_rerun_leaves_its_hand_fit_for_others(autojump_clock: Any) -> None:
    async def ask(ctx: Any) -> str:
        answer = await ctx.elicit("name?", {"type": "object", "properties": {"name": {"type": "string"}}})
        return str(answer.content["name"])

    async def nap(ctx: Any) -> str:
        await trio.sleep(1)
        return "rested"

    async with linked({"ask": ask, "nap": nap}, force_rerun=True) as pair:
        for _ in range(3):
            assert await pair.call("ask") == "name?"
            assert await pair.call("nap") == "rested"
        await wait_all_tasks_blocked()
        assert hands(pair) == ["waiting for a job"]


async def test_many_jobs_in_a_row_leave_the_loop_its_turns() -> None:
    turns = 0
    running = True

    async def run(ctx: Any) -> str:
        return str(turns)

    async def count_turns() -> None:
        nonlocal turns
        while running:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with linked({"run": run}, LATEST, limits=Limits(max_running=2, eof_grace=0)) as pair:
        pair.nursery.start_soon(count_turns)
        told = [int(answer) for answer in await call_all(pair, "run", 2000)]
        running = False
    # Within a turn tasks run in any order, so that two hands may have stood between two counts.
    assert max(told.count(turn) for turn in set(told)) <= 2 * 256


@pytest.fixture
def results_of_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many large results were encoded in each turn of the event loop, from its use on."""
    turns: list[int] = [0]
    encode = Connection.encode_result

    class Turns(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            turns.append(0)

    def counted(connection: Connection, request: Any, result: Any) -> bytes:
        if turns == [0]:
            trio.lowlevel.add_instrument(Turns())
        reply = encode(connection, request, result)
        turns[-1] += len(reply) > 1_000_000
        return reply

    monkeypatch.setattr(Connection, "encode_result", counted)
    return turns


async def test_large_results_of_handlers_that_end_together_take_a_turn_each(results_of_turns: list[int]) -> None:
    async with linked({"meet": meeting(20, LARGE_RESULT)}, limits=Limits(max_running=40, eof_grace=0)) as pair:
        assert len(await call_all(pair, "meet", 20)) == 20
    assert sum(results_of_turns) == 20
    assert max(results_of_turns) == 1


async def test_of_large_results_that_are_made_together_only_some_are_kept(results_of_turns: list[int]) -> None:
    limits = Limits(max_running=40, running_bytes=4_000_000, eof_grace=0)
    dropped: list[Any] = []
    async with linked({"meet": meeting(20, LARGE_RESULT)}, limits=limits) as pair, trio.open_nursery() as nursery:

        async def one() -> None:
            try:
                await pair.call("meet")
            except RemoteError as error:
                dropped.append(error.data)

        for _ in range(20):
            nursery.start_soon(one)
    # The first is encoded at once, seven wait for their turn; the others are dropped before they are encoded.
    assert dropped == [{"reason": "results_unread"}] * 12
    assert sum(results_of_turns) == 8


async def test_tasks_whose_jobs_are_cancelled_together_take_no_large_jobs_together(
    autojump_clock: Any, results_of_turns: list[int]
) -> None:
    async def wait(ctx: Any) -> str:
        await trio.sleep_forever()
        raise AssertionError

    async def large(ctx: Any) -> str:
        return LARGE_RESULT

    limits = Limits(max_running=20, eof_grace=0)
    async with linked({"wait": wait, "large": large}, limits=limits) as pair, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(pair.call, "wait")
        await wait_all_tasks_blocked()
        nursery.start_soon(call_all, pair, "large", 20)
        await wait_all_tasks_blocked()
        for job in list(pair.server.jobs):
            if job.started:
                job.cancel(CancelReason.PEER)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert sum(results_of_turns) == 20
    assert max(results_of_turns) == 1


async def test_a_crash_that_ends_the_session_lets_what_waits_end_too(autojump_clock: Any) -> None:
    async def crash(ctx: Any) -> str:
        raise ValueError("for the test")

    outcomes: list[str] = []
    with pytest.raises(ExceptionGroup) as raised:
        async with linked({"crash": crash}, handler_errors="raise") as pair:

            async def one() -> None:
                try:
                    await pair.call("crash")
                except BaseException as error:
                    outcomes.append(type(error).__name__)
                    raise

            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(one)
    assert raised.group_contains(ValueError, match="for the test")
    assert len(outcomes) == 5, "nobody waits for ever"
