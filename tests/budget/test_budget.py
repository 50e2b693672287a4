"""What all peers of a server make it keep: counted by owner, with room for one more; who holds most gives way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import attrs
import hypothesis.strategies as st
import pytest
import trio
import trio.testing
from hypothesis import given
from trio.testing import wait_all_tasks_blocked

from trimcp.budget import LITTLE, Budget, MemoryAccount, MemoryCharge, TurnBound

MIB = 1024 * 1024


@attrs.define(eq=False)
class Someone:
    """A holder that can be ended."""

    at_rest: bool = True
    ended: list[str] = attrs.field(factory=list)

    def evict(self, why: str) -> None:
        self.ended.append(why)


def fill(holding: MemoryAccount) -> int:
    """Hold as much as fits, a LITTLE at a time."""
    while holding.fits(LITTLE):
        holding.add(LITTLE)
    return holding.held


def test_one_owner_gets_half_two_a_third_each_and_there_is_room_for_one_more() -> None:
    budget = Budget(300 * MIB)
    first = [budget.holding("a") for _ in range(100)]
    for holding in first:
        fill(holding)
    alone = sum(holding.held for holding in first)
    assert 140 * MIB < alone <= 157 * MIB  # each may hold a little in any case
    assert 45 * MIB < fill(budget.holding("b")) <= 50 * MIB  # which all three bounds count
    assert all(holding.fits(0) for holding in (budget.holding("a"), budget.holding("c")))


def test_one_connection_alone_gets_a_third_and_a_newcomer_beside_half_a_quarter() -> None:
    alone = fill(Budget(300 * MIB).holding("a"))
    assert 99 * MIB < alone <= 100 * MIB
    budget = Budget(300 * MIB)
    for name in "ab":
        for _ in range(150 if name == "a" else 75):
            budget.holding(name).add(MIB)
        assert not budget.holding(name).fits(MIB)
    assert dict(budget.owners()) == {"a": 150 * MIB, "b": 75 * MIB}
    assert budget.holding("c").fits(MIB)


def test_little_fits_however_full_it_is() -> None:
    budget = Budget(MIB)
    budget.holding("greedy").add(5 * MIB)
    holding = budget.holding("greedy")
    assert holding.fits(LITTLE)
    assert not holding.fits(LITTLE + 1)


async def test_who_holds_most_and_is_at_rest_gives_way_where_the_bound_is_passed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    budget = Budget(10 * MIB)
    small, large, busy = Someone(), Someone(), Someone(at_rest=False)
    one, two, three = budget.holding("a", small), budget.holding("b", large), budget.holding("c", busy)
    one.add(2 * MIB)
    two.add(3 * MIB)
    with caplog.at_level(logging.WARNING, "trimcp.security"):
        three.add(5 * MIB + 1)
    assert large.ended == []  # not in the frames of whoever holds the message
    await wait_all_tasks_blocked()
    assert large.ended == ["it held 3145728 bytes when the memory for all peers was used up"]
    assert (small.ended, busy.ended) == ([], [])
    assert (budget.held, budget.ended) == (7 * MIB + 1, 1)
    assert "memory_reclaimed owner=b bytes=3145728" in caplog.text
    two.add(MIB)  # what it still says counts nowhere
    assert budget.held == 7 * MIB + 1


async def test_who_ended_by_itself_meanwhile_is_not_ended_again() -> None:
    budget, someone = Budget(MIB), Someone()
    holding = budget.holding("a", someone)
    holding.add(2 * MIB)
    holding.close()
    await wait_all_tasks_blocked()
    assert (someone.ended, budget.ended) == ([], 1)


async def test_one_that_cannot_be_ended_is_told_of_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Someone):
        def evict(self, why: str) -> None:
            raise ValueError("no")

    budget, next_one = Budget(MIB), Someone()
    budget.holding("a", Broken()).add(2 * MIB)
    budget.holding("b", next_one).add(2 * MIB)
    await wait_all_tasks_blocked()
    assert len(next_one.ended) == 1
    assert "ending a peer that held most crashed" in caplog.text


async def test_the_owner_who_holds_most_gives_way_though_another_has_a_larger_holding() -> None:
    budget = Budget(10 * MIB)
    many = [Someone() for _ in range(6)]
    for someone in many:
        budget.holding("many", someone).add(MIB)
    one = Someone()
    budget.holding("one", one).add(4 * MIB + 1)
    await wait_all_tasks_blocked()
    assert one.ended == []
    assert sum(len(someone.ended) for someone in many) == 1


async def test_who_is_at_work_gives_way_only_far_beyond_the_bound() -> None:
    budget = Budget(8 * MIB)
    busy = [Someone(at_rest=False) for _ in range(3)]
    holdings = [budget.holding("a", someone) for someone in busy]
    for holding in holdings:
        holding.add(3 * MIB - 1000)
    assert [len(someone.ended) for someone in busy] == [0, 0, 0]
    assert budget.held > budget.bound
    holdings[0].add(MIB)
    await wait_all_tasks_blocked()
    assert [len(someone.ended) for someone in busy] == [1, 0, 0]


def test_what_was_refused_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget()
    with caplog.at_level(logging.WARNING, "trimcp.security"):
        budget.holding("a").refuse("bodies")
    assert budget.refused == 1
    assert "flood_refused what=bodies owner=a held=0 why=memory" in caplog.text


def test_it_counts_with_the_owner_it_turned_out_to_be() -> None:
    budget = Budget()
    holding = budget.holding("address 192.0.2.1")
    holding.add(100)
    holding.move("principal ada")
    assert budget.owners() == [("principal ada", 100)]
    holding.close()
    holding.close()
    assert (budget.owners(), budget.held) == ([], 0)
    holding.move("nobody")
    assert budget.owners() == []


async def test_who_waits_goes_on_when_there_is_room(autojump_clock: trio.testing.MockClock) -> None:
    budget = Budget(10 * MIB)
    first, other, waiting = (budget.holding(name) for name in ("a", "b", "b"))
    first.add(9 * MIB)
    other.add(MIB // 2)
    waiting.add(MIB // 2)
    went: list[str] = []

    async def wait(holding: MemoryAccount, name: str) -> None:
        await holding.room()
        went.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, other, "the favoured one")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(wait, waiting, "the next one")
        await trio.testing.wait_all_tasks_blocked()
        assert went == ["the favoured one"], "of each owner one goes on, or all would wait for each other"
        other.close()
        await trio.testing.wait_all_tasks_blocked()
        assert went == ["the favoured one", "the next one"]
        waiting.add(MIB)
        third = budget.holding("b")
        third.add(MIB)
        nursery.start_soon(wait, third, "the last one")
        await trio.testing.wait_all_tasks_blocked()
        assert len(went) == 2
        first.close()
    assert went[2:] == ["the last one"]


async def test_who_is_cancelled_while_it_waits_is_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    budget = Budget(10 * MIB)
    first, second = budget.holding("a"), budget.holding("a")
    for holding in (first, second):
        holding.add(6 * MIB)
    await first.room()
    with trio.move_on_after(1) as scope:
        await second.room()
    assert scope.cancelled_caught
    first.close()
    assert second.held == 6 * MIB


def test_small_changes_are_counted_once_they_come_to_something() -> None:
    budget = Budget(MIB)
    holding = budget.holding("a")
    amount = MemoryCharge(holding)
    amount.set(budget.step - 1)
    assert holding.held == 0
    amount.set(budget.step)
    assert holding.held == budget.step
    amount.set(1)
    assert holding.held == 1 if budget.step <= 1 else holding.held in (1, budget.step)
    amount.set(0)
    assert holding.held == 0
    amount.set(MIB)
    amount.belong_to(None)
    amount.set(MIB)
    assert budget.held == 0


def test_what_goes_uncounted_stays_a_small_part_of_the_bound() -> None:
    budget = Budget()
    holdings = []
    for number in range(1, 3_000):
        holdings.append(budget.holding(str(number)))
        assert budget.step * number <= budget.bound // 16
    for holding in holdings:
        holding.close()
    assert budget.step == 128 * 1024


Steps = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["add", "less", "move", "close", "new"]), st.integers(0, 4 * MIB)),
    max_size=60,
)


@given(Steps)
def test_the_sums_are_right_whatever_happens(steps: list[tuple[int, str, int]]) -> None:
    async def main() -> None:
        budget = Budget(20 * MIB)
        holdings = [budget.holding(name, Someone(at_rest=name != "c")) for name in "aabbcc"]
        for at, what, size in steps:
            holding = holdings[at]
            if what == "add":
                holding.add(size)
            elif what == "less":
                holding.add(-min(size, holding.held))
            elif what == "move":
                holding.move("abc"[size % 3])
            else:
                holding.close()
                if what == "new":
                    holdings[at] = budget.holding("abc"[size % 3], Someone())
            live = [each for each in holdings if each.budget is budget]
            assert budget.held == sum(each.held for each in live)
            assert dict(budget.owners()) == {
                name: held for name in "abc" if (held := sum(each.held for each in live if each.owner.name == name))
            }
            assert budget.held <= budget.bound + budget.bound // 8

    trio.run(main)


def test_it_is_told_once_little_is_left_of_much() -> None:
    budget = Budget(16 * MIB)
    told: list[int] = []
    budget.when_low = lambda: told.append(budget.held)
    holding = budget.holding("a")
    for _ in range(2):
        holding.add(3 * MIB)
        holding.add(-3 * MIB)
        assert not told, "that was not much"
    holding.add(5 * MIB)
    holding.add(-3 * MIB)
    assert not told
    holding.add(-2 * MIB)
    holding.add(-0)
    assert told == [0]
    holding.add(17 * MIB)
    holding.close()
    assert told == [0, 0]


async def test_large_messages_are_parsed_in_turn_and_counted_while_they_wait(
    mock_clock: trio.testing.MockClock,
) -> None:
    budget = Budget()
    holding = budget.holding("a")
    assert budget.take_turn()
    budget.parsed()
    assert budget.take_turn(), "the last one took no time"
    mock_clock.jump(2)
    budget.parsed()
    assert not budget.take_turn()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(holding.wait_for_turn, MIB)
        for _ in range(2):
            await trio.lowlevel.checkpoint()
        assert budget.held == MIB
        mock_clock.jump(2)
    assert budget.held == 0
    budget.parsed()
    mock_clock.jump(1)
    budget.parsed()
    await holding.wait_for_turn(MIB)  # of a clock that stands still nobody waits for ever
    assert not budget.take_turn()


async def test_the_next_turn_is_asked_for_once_however_many_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, reads, asked = TurnBound(2, 2), 0, 0
    run_sync_soon = trio.lowlevel.TrioToken.run_sync_soon

    def counted(token: trio.lowlevel.TrioToken, function: Callable[[], object]) -> None:
        nonlocal asked
        asked += 1
        run_sync_soon(token, function)

    async def read() -> None:
        nonlocal reads
        await turns.wait(1)
        reads += 1

    monkeypatch.setattr(trio.lowlevel.TrioToken, "run_sync_soon", counted)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(read)
        for turn in range(1, 8):
            await trio.lowlevel.checkpoint()
            assert reads <= 2 * turn
            assert asked <= turn
    assert reads == 10


def test_a_turn_that_was_asked_for_when_a_run_ended_does_not_keep_the_next_run_waiting() -> None:
    turns = TurnBound(1)

    async def run(*, leaves: bool) -> None:
        with trio.fail_after(5):
            await wait_thrice(leaves=leaves)

    async def wait_thrice(*, leaves: bool) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(turns.wait, 1)
            if leaves:
                nursery.cancel_scope.cancel()

    trio.run(partial(run, leaves=True))
    trio.run(partial(run, leaves=False))


def test_the_step_is_chosen_anew_at_twice_as_many_holdings_and_at_half() -> None:
    budget = Budget()
    holdings = [budget.holding("a") for _ in range(127)]
    assert budget.step == 128 * 1024
    holdings += [budget.holding("a") for _ in range(129)]
    assert budget.step == 32 * 1024
    for _ in range(127):
        holdings.pop().close()
    assert budget.step == 32 * 1024
    holdings.pop().close()
    assert budget.step == 64 * 1024
    for _ in range(64):
        holdings.pop().close()
    assert budget.step == 128 * 1024
