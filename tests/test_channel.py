"""What sessions and transports share: when a peer has taken nothing for too long."""

from __future__ import annotations

import math

import pytest
import trio
from trio.testing import MockClock

from trimcp.channel import PeerProgress


async def test_a_peer_that_takes_nothing_is_told_from_one_that_takes_a_little(autojump_clock: MockClock) -> None:
    progress = PeerProgress(8)
    looks, mark, wait = 0, 0, progress.begin(0)
    while wait:
        await trio.sleep(wait)
        looks += 1
        mark = min(looks, 5)  # it takes something in each of the first five
        wait = progress.look(mark)
    assert looks == 5 + 4
    assert trio.current_time() == pytest.approx(5 * 2 + 8)
    assert progress.silence == pytest.approx(8)


async def test_rounding_makes_no_second_look(autojump_clock: MockClock) -> None:
    progress = PeerProgress(0.3)
    progress.begin()
    await trio.sleep(0.29999)
    assert progress.look(None) == 0


async def test_without_a_limit_nobody_is_too_slow(autojump_clock: MockClock) -> None:
    progress = PeerProgress(math.inf)
    assert progress.begin() == math.inf
    await trio.sleep(80_000)
    assert progress.look(None) == math.inf
    with progress.step() as scope:
        await trio.sleep(80_000)
    assert not scope.cancelled_caught


async def test_each_step_has_its_own_time(autojump_clock: MockClock) -> None:
    progress = PeerProgress(8)
    for seconds, over in ((7, False), (7, False), (9, True)):
        with progress.step() as scope:
            await trio.sleep(seconds)
        assert scope.cancelled_caught is over
