"""Tasks that wait to be woken: in order, where most sessions never have one, and all at once."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.session.queues import LazyParkingLot
from trimcp.session.scopes import WaitingTasks


async def test_the_longest_waiting_is_woken_first(nursery: trio.Nursery) -> None:
    lot, woken = LazyParkingLot(), list[int]()

    async def wait(number: int) -> None:
        await lot.park()
        woken.append(number)

    lot.unpark()  # nobody: no error
    lot.unpark_all()
    assert not lot
    for number in range(3):
        nursery.start_soon(wait, number)
        await wait_all_tasks_blocked()
    assert len(lot) == 3
    lot.unpark()
    await wait_all_tasks_blocked()
    assert woken == [0]
    lot.unpark_all()
    await wait_all_tasks_blocked()
    assert sorted(woken) == [0, 1, 2]  # Trio wakes tasks of one turn in any order
    assert not lot


async def test_who_is_cancelled_waits_no_more() -> None:
    lot = LazyParkingLot()
    with trio.CancelScope() as scope:
        scope.cancel()
        await lot.park()
    assert len(lot) == 0


def test_it_has_no_parking_lot_until_somebody_waits() -> None:
    assert LazyParkingLot().lot is None


async def test_waiting_tasks_are_woken_together(nursery: trio.Nursery) -> None:
    waiting, woken = WaitingTasks(), list[int]()

    async def wait(number: int) -> None:
        await waiting.wait()
        woken.append(number)

    waiting.wake()  # nobody, and not kept for later
    for number in range(3):
        nursery.start_soon(wait, number)
    await wait_all_tasks_blocked()
    with trio.CancelScope() as scope:
        scope.cancel()
        await waiting.wait()
    assert (len(waiting.tasks), woken) == (3, [])
    waiting.wake()
    await wait_all_tasks_blocked()
    assert (waiting.tasks, sorted(woken)) == ([], [0, 1, 2])
