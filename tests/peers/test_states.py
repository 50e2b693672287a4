from __future__ import annotations

import pytest
import trio
import trio.lowlevel

from tests.peers.states import until


async def test_what_holds_is_not_waited_for() -> None:
    await until(lambda: True)


async def test_it_returns_with_the_step_that_makes_it_hold() -> None:
    steps: list[int] = []

    async def walk() -> None:
        for number in range(100):
            steps.append(number)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(walk)
        await until(lambda: len(steps) == 50)
        assert len(steps) < 55, "the steps until it is its turn"


async def test_a_thread_that_calls_back_is_seen() -> None:
    said: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, lambda: trio.from_thread.run_sync(said.append, "hello"))
        with trio.fail_after(60):
            await until(lambda: said)


async def test_an_error_of_the_condition_is_raised() -> None:
    places: dict[str, int] = {}

    async def go() -> None:
        await trio.lowlevel.checkpoint()
        places["a"] = 0

    with pytest.RaisesGroup(ZeroDivisionError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go)
            await until(lambda: places and 1 / places["a"])


async def test_it_looks_no_more_once_it_is_given_up() -> None:
    looked = 0

    def look() -> bool:
        nonlocal looked
        looked += 1
        return False

    with trio.move_on_after(0):
        await until(look)
    before = looked
    await trio.testing.wait_all_tasks_blocked()
    assert looked == before
