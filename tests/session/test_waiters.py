"""Tasks that wait to be woken, where most sessions never have one."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.session.queues import Waiters


async def test_the_longest_waiting_is_woken_first(nursery: trio.Nursery) -> None:
    waiters, woken = Waiters(), list[int]()

    async def wait(number: int) -> None:
        await waiters.park()
        woken.append(number)

    waiters.unpark()  # nobody: no error
    waiters.unpark_all()
    assert not waiters
    for number in range(3):
        nursery.start_soon(wait, number)
        await wait_all_tasks_blocked()
    assert len(waiters) == 3
    waiters.unpark()
    await wait_all_tasks_blocked()
    assert woken == [0]
    waiters.unpark_all()
    await wait_all_tasks_blocked()
    assert sorted(woken) == [0, 1, 2]  # Trio wakes tasks of one turn in any order
    assert not waiters


async def test_who_is_cancelled_waits_no_more() -> None:
    waiters = Waiters()
    with trio.CancelScope() as scope:
        scope.cancel()
        await waiters.park()
    assert len(waiters) == 0


def test_it_has_no_parking_lot_until_somebody_waits() -> None:
    assert Waiters().lot is None
