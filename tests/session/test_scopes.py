"""Scopes: exceptions without the groups around them, and nurseries that serve a body."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import trio
import trio.testing

from tests.peers.cancellations import kept_cancellation
from tests.session.support import linked
from trimcp.errors import LocalError
from trimcp.session.clock import deadline_around
from trimcp.session.scopes import Work, guarded
from trimcp.support.nurseries import contained, merge_failures, open_service_nursery, split_cancelled, unwrap_single


def test_the_sole_exception_is_found_inside_groups() -> None:
    error = ValueError()
    assert unwrap_single(error) is error
    assert unwrap_single(ExceptionGroup("a", [ExceptionGroup("b", [error])])) is error
    two = ExceptionGroup("a", [error, KeyError()])
    assert unwrap_single(two) is two


async def test_a_cancellation_is_parted_from_what_failed() -> None:
    cancelled, error = await kept_cancellation(), ValueError()
    assert split_cancelled(error) == (error, None)
    assert split_cancelled(cancelled) == (None, cancelled)
    group = ExceptionGroup("mine", [error])
    assert split_cancelled(group)[0] is group
    rest, cancellation = split_cancelled(BaseExceptionGroup("both", [error, cancelled]))
    assert rest is not None
    assert unwrap_single(rest) is error
    assert isinstance(cancellation, BaseExceptionGroup)


async def test_a_group_that_cannot_be_split_is_parted_as_well() -> None:
    class Whole(BaseExceptionGroup[BaseException]):
        def derive(self) -> Whole:
            return self

    cancelled, error = await kept_cancellation(), ValueError()
    group = Whole("failed", [error])
    assert split_cancelled(group) == (group, None)
    rest, cancellation = split_cancelled(Whole("both", [Whole("one", [error]), cancelled]))
    assert rest is not None
    assert cancellation is not None
    assert (unwrap_single(rest), unwrap_single(cancellation)) == (error, cancelled)
    assert split_cancelled(Whole("gone", [cancelled]))[0] is None


async def test_one_failure_leaves_as_itself_and_two_as_a_group() -> None:
    cancelled, error, other = await kept_cancellation(), ValueError(), KeyError()
    wrapped = BaseExceptionGroup("n", [BaseExceptionGroup("n", [error, cancelled])])
    assert merge_failures("both", None, wrapped) is error
    assert merge_failures("both", other, cancelled) is other
    assert merge_failures("both", None, cancelled) is None
    both = merge_failures("both", other, wrapped)
    assert isinstance(both, BaseExceptionGroup)
    assert both.exceptions == (other, error)


async def test_a_service_nursery_ends_with_its_body_whose_exception_stays_itself() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with open_service_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise error
    assert caught.value is error
    with pytest.raises(ValueError, match="mine"), trio.CancelScope() as scope:
        async with open_service_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            raise error


async def test_a_service_task_that_fails_cancels_the_body_and_leaves_as_itself() -> None:
    async def crash() -> None:
        raise ValueError("of the task")

    with pytest.raises(ValueError, match="of the task"):
        async with open_service_nursery() as nursery:
            nursery.start_soon(crash)
            await trio.sleep_forever()


async def test_a_cancelled_service_nursery_is_justkept_cancellation() -> None:
    with trio.CancelScope() as scope:
        async with open_service_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_work_takes_no_more_once_it_is_over() -> None:
    async with trio.open_nursery() as nursery:
        work = Work(nursery, trio.CancelScope())
        ran: list[int] = []

        async def one() -> None:
            ran.append(1)

        work.start_soon(one)
        await work.join()
        with pytest.raises(LocalError):
            work.start_soon(one)
        await work.end()
    assert ran == [1]


async def test_the_end_of_work_waits_for_its_clean_up_though_everything_iskept_cancellation() -> None:
    cleaned: list[int] = []

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                for n in range(5):
                    await trio.lowlevel.checkpoint()
                    cleaned.append(n)

    async with trio.open_nursery() as host:
        work = Work(host, trio.CancelScope())
        work.start_soon(task)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as around:
            around.cancel()
            await work.end()
        assert cleaned == [0, 1, 2, 3, 4]


async def test_work_that_fails_while_everything_is_cancelled_is_remembered_not_raised() -> None:
    async def crash_late() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("in clean-up")

    owner = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        work = Work(nursery, owner)
        work.start_soon(crash_late)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        await work.end()
    assert isinstance(work.failure, ExceptionGroup)
    assert owner.cancel_called


async def test_session_work_is_cancelled_at_the_end_and_not_waited_for_by_the_answer() -> None:
    ended: list[Any] = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append(trio.current_effective_deadline())

    async def run(ctx: Any) -> str:
        ctx.session.start_soon(work)
        ctx.server.start_soon(work)
        return "x"

    async with linked({"run": run}) as pair:
        assert await pair.call() == "x"
        assert ended == []
    assert len(ended) == 2


async def test_the_deadline_around_a_task_is_trios(monkeypatch: pytest.MonkeyPatch, autojump_clock: Any) -> None:
    """However scopes are nested, shielded, moved and cancelled; and also where Trio keeps them in another way."""

    def same() -> float:
        found = deadline_around()
        with monkeypatch.context() as patch:
            patch.setattr(trio.lowlevel, "current_task", object)
            assert deadline_around() == found
        assert trio.current_effective_deadline() == found
        return found

    assert same() == math.inf
    with trio.CancelScope(deadline=trio.current_time() + 30) as outer:
        assert same() == outer.deadline
        with trio.CancelScope(deadline=outer.deadline + 5), trio.CancelScope() as inner:
            assert same() == outer.deadline
            inner.shield = True
            assert same() == math.inf
            inner.deadline = outer.deadline + 7
            assert same() == inner.deadline
            inner.shield = False
            async with trio.open_nursery() as nursery:
                assert same() == outer.deadline
                nursery.cancel_scope.cancel()
                assert same() == -math.inf
        with trio.CancelScope(relative_deadline=3) as near:
            await trio.lowlevel.checkpoint()
            assert same() == near.deadline < outer.deadline
        outer.cancel()
        assert same() == -math.inf


# What anybody's code may raise, and leave open


async def _raise(error: BaseException) -> None:
    await trio.lowlevel.checkpoint()
    raise error


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, asyncio.CancelledError, trio.Cancelled])
async def test_whatever_code_raises_is_an_exception_with_its_cause(kind: Any) -> None:
    error = await kept_cancellation() if kind is trio.Cancelled else kind()
    with pytest.raises(RuntimeError, match=f"_raise raised {kind.__name__}") as caught:
        await contained(_raise, error)
    assert caught.value.__cause__ is error
    await trio.lowlevel.checkpoint()


async def test_an_exception_and_an_interrupt_stay_themselves() -> None:
    for error in (ValueError("mine"), RuntimeError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            await contained(_raise, error)
        assert caught.value is error
    with pytest.raises(BaseExceptionGroup):
        await contained(_raise, BaseExceptionGroup("both", [KeyboardInterrupt(), ValueError()]))


async def test_a_cancellation_in_force_passes_and_a_crash_beside_it_is_told() -> None:
    async def crash_late() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise SystemExit(3)

    with trio.CancelScope() as scope:
        scope.cancel()
        await contained(trio.sleep_forever)
    assert scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(RuntimeError, match="crash_late raised SystemExit"):
            await contained(crash_late)


@pytest.mark.parametrize("crash", [False, True])
async def test_a_nursery_that_code_leaves_open_is_given_up(crash: bool) -> None:
    ended: list[str] = []
    kept: list[Any] = []

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("cancelled")

    async def leave_open() -> None:
        nursery = await trio.open_nursery().__aenter__()
        kept.append(nursery)
        nursery.start_soon(work)
        await trio.lowlevel.checkpoint()
        if crash:
            raise ValueError("mine")

    async with trio.open_nursery() as ours:
        with pytest.raises(RuntimeError, match="left a cancel scope or a nursery open") as caught:
            await contained(leave_open)
        assert isinstance(caught.value.__cause__, ValueError) is crash
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["cancelled"]
        ours.start_soon(trio.lowlevel.checkpoint)  # nothing of ours was given up


async def test_what_background_work_raises_is_one_line_of_the_log(caplog: Any) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(guarded, _raise, (SystemExit("a\n\x1b[31mERROR forged"),))
    (record,) = caplog.records
    assert "_raise" in record.getMessage()
    assert record.exc_info is not None
    assert record.filename == "scopes.py"
    assert "\x1b" not in caplog.text
    assert "\nERROR forged" not in caplog.text
