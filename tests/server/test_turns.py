from __future__ import annotations

import math
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trimcp.errors import ErrorReply
from trimcp.session.incoming.turns import Turns, TurnStatistics
from trimcp.session.limits import Quota
from trimcp.wire.codes import OVERLOADED


class Took:
    """Takes turns in tasks of its own and notes who got one when."""

    def __init__(self, turns: Turns, nursery: trio.Nursery) -> None:
        self.turns = turns
        self.nursery = nursery
        self.order: list[str] = []
        self.times: list[float] = []
        self.errors: list[ErrorReply] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    def want(self, name: str, *, hold: float = math.inf, deadline: float = math.inf) -> None:
        self.nursery.start_soon(self._take, name, hold, deadline)

    async def _take(self, name: str, hold: float, deadline: float) -> None:
        with trio.CancelScope() as self.scopes[name]:
            try:
                since = await self.turns.acquire(name[0], deadline)
            except ErrorReply as error:
                self.errors.append(error)
                return
            self.order.append(name)
            self.times.append(trio.current_time())
            try:
                await trio.sleep(hold)
            finally:
                self.turns.give_back(since)

    async def end(self, name: str) -> None:
        self.scopes[name].cancel()
        await wait_all_tasks_blocked()


async def test_only_so_many_are_under_way_and_the_next_begins_with_the_end_of_one() -> None:
    async with trio.open_nursery() as nursery:
        took = Took(turns := Turns(Quota(running=2), "tool"), nursery)
        for name in ("a1", "a2", "a3", "a4"):
            took.want(name)
            await wait_all_tasks_blocked()
        assert took.order == ["a1", "a2"]
        assert turns.statistics() == TurnStatistics(2, 2, 2, 0, 2, None)
        await took.end("a1")
        assert took.order == ["a1", "a2", "a3"]
        await took.end("a3")
        await took.end("a2")
        assert took.order == ["a1", "a2", "a3", "a4"]
        nursery.cancel_scope.cancel()
    assert turns.idle
    assert turns.statistics() == TurnStatistics(0, 0, 4, 0, 2, None)


async def test_sessions_take_turns_so_one_with_much_to_do_delays_another_by_one() -> None:
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(running=1), "tool"), nursery)
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
            took.want(name)
            await wait_all_tasks_blocked()
        while len(took.order) < 7:
            await took.end(took.order[-1])
        nursery.cancel_scope.cancel()
    assert took.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_who_leaves_the_queue_lets_the_others_go_on() -> None:
    async with trio.open_nursery() as nursery:
        took = Took(turns := Turns(Quota(running=1), "tool"), nursery)
        for name in ("a1", "b1", "b2", "c1"):
            took.want(name)
            await wait_all_tasks_blocked()
        await took.end("b1")
        await took.end("b2")
        assert turns.statistics().waiting == 1
        await took.end("a1")
        assert took.order == ["a1", "c1"]
        nursery.cancel_scope.cancel()
    assert turns.idle


async def test_who_is_woken_and_cancelled_at_once_hands_its_turn_on() -> None:
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(running=1), "tool"), nursery)
        for name in ("a1", "b1", "c1"):
            took.want(name)
            await wait_all_tasks_blocked()
        took.scopes["a1"].cancel()
        took.scopes["b1"].cancel()  # in the same turn of the loop as the end of the one before it
        await wait_all_tasks_blocked()
        assert took.order == ["a1", "c1"]
        nursery.cancel_scope.cancel()


async def test_nobody_overtakes_one_who_was_woken() -> None:
    order: list[str] = []
    turns = Turns(Quota(running=1), "tool")

    async def want(name: str) -> None:
        since = await turns.acquire(name)
        order.append(name)
        turns.give_back(since)

    async with trio.open_nursery() as nursery:
        since = await turns.acquire("a")
        nursery.start_soon(want, "b")
        await wait_all_tasks_blocked()
        turns.give_back(since)  # it is b's turn, though b has not run yet
        await want("c")
    assert order == ["b", "c"]


async def test_several_turns_that_become_free_at_once_are_all_taken() -> None:
    async with trio.open_nursery() as nursery:
        took = Took(turns := Turns(Quota(running=3), "tool"), nursery)
        for name in ("a1", "a2", "a3", "b1", "b2", "b3", "b4"):
            took.want(name)
            await wait_all_tasks_blocked()
        for name in ("a1", "a2", "a3"):
            took.scopes[name].cancel()
        await wait_all_tasks_blocked()
        assert took.order == ["a1", "a2", "a3", "b1", "b2", "b3"]
        assert turns.running == 3
        nursery.cancel_scope.cancel()


async def test_so_many_begin_per_second_after_a_burst(autojump_clock: MockClock) -> None:
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(per_second=4, burst=2), "tool"), nursery)
        for number in range(6):
            took.want(f"a{number}", hold=0)
            await trio.lowlevel.checkpoint()
    assert [time - begin for time in took.times] == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1.0], abs=0.01)


async def test_a_pause_saves_up_no_more_than_the_burst(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        took = Took(turns := Turns(Quota(per_second=2), "tool"), nursery)
        await trio.sleep(1_000)
        begin = trio.current_time()
        assert turns.idle
        for number in range(4):
            took.want(f"a{number}", hold=0)
    assert [time - begin for time in took.times] == pytest.approx([0, 0, 0.5, 1.0], abs=0.01)
    assert not turns.idle  # whoever made it anew now would give more than is due
    await trio.sleep(2)
    assert turns.idle


async def test_tokens_and_slots_are_both_needed(autojump_clock: MockClock) -> None:
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(running=1, per_second=10, burst=10), "tool"), nursery)
        for number in range(3):
            took.want(f"a{number}", hold=2)
    assert [time - begin for time in took.times] == pytest.approx([0, 2, 4], abs=0.01)
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(running=5, per_second=1), "tool"), nursery)
        for number in range(3):
            took.want(f"a{number}", hold=10)
    assert [time - begin for time in took.times] == pytest.approx([0, 1, 2], abs=0.01)


async def test_sessions_take_turns_at_tokens_too(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(per_second=1), "tool"), nursery)
        for name in ("a1", "a2", "a3", "b1", "b2"):
            took.want(name, hold=0)
            await wait_all_tasks_blocked()
    assert took.order == ["a1", "a2", "b1", "a3", "b2"]


async def test_who_is_next_may_leave_while_it_waits_for_a_token(autojump_clock: MockClock) -> None:
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(per_second=1), "tool"), nursery)
        for name in ("a1", "b1", "c1"):
            took.want(name, hold=0)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        await trio.sleep(0.5)
        took.scopes["b1"].cancel()
    assert took.order == ["a1", "c1"]
    assert took.times[-1] - begin == pytest.approx(1.0, abs=0.01)


async def test_too_many_waiters_are_refused_and_told_when_to_come_again(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        took = Took(turns := Turns(Quota(per_second=2, burst=1, waiting=2), "forecast"), nursery)
        for number in range(5):
            took.want(f"a{number}", hold=0)
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
    assert len(took.order) == 3
    assert [error.code for error in took.errors] == [OVERLOADED, OVERLOADED]
    assert str(took.errors[0]).startswith("forecast: too many calls wait already")
    assert took.errors[0].data == {"reason": "overloaded", "retryAfter": pytest.approx(1.5, abs=0.01)}
    assert turns.statistics().refused == 2


async def test_with_no_room_to_wait_what_is_too_much_is_refused_at_once() -> None:
    turns = Turns(Quota(running=1, waiting=0), "tool")
    await turns.acquire("a")
    with pytest.raises(ErrorReply):
        await turns.acquire("b")


async def test_who_could_not_begin_in_time_is_refused_at_once(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(running=2), "forecast"), nursery)
        for number in range(4):
            took.want(f"a{number}", hold=10)  # that is what one usually takes, then
        await trio.sleep(10.5)
        now = trio.current_time()
        took.want("b1", hold=0, deadline=now + 4)  # both are taken for 9.5 seconds more
        await wait_all_tasks_blocked()
        assert [str(error) for error in took.errors] == [
            f"forecast: the call could not begin before its deadline (code {OVERLOADED})"
        ]
        assert trio.current_time() == now
        took.want("b2", hold=0, deadline=now + 20)
    assert took.order[-1] == "b2"


async def test_a_deadline_that_can_be_met_is_no_reason_to_refuse(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        took = Took(Turns(Quota(running=1), "tool"), nursery)
        took.want("a1", hold=5)
        await wait_all_tasks_blocked()
        took.want("b1", hold=1, deadline=trio.current_time() + 1)  # nothing is known of how long they take
    assert took.order == ["a1", "b1"]
    assert not took.errors


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"running": 0}, "Quota.running is an integer of at least 1 or None, not 0"),
        ({"per_second": -1.0}, "Quota.per_second is a number greater than 0 or None, not -1.0"),
        ({"burst": 0}, "Quota.burst is an integer of at least 1 or None, not 0"),
        ({"waiting": -1}, "Quota.waiting is an integer of at least 0, not -1"),
    ],
)
def test_a_quota_that_makes_no_sense_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^" + text):
        Quota(**wrong)
    assert not Quota(burst=3).bounds
    assert Quota(running=1).bounds
    assert Quota(per_second=0.1).bounds
