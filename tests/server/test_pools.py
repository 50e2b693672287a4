"""The pools of one run: made when first used, and out of the way where nothing is bounded."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from trimcp.server.handlers.pools import Pools
from trimcp.session.limits import Limits, Quota


def make(nursery: Any = None, **limits: Any) -> Pools:
    return Pools(Limits(**limits), max_threads=3, max_processes=2, nursery=nursery)


async def test_nothing_is_made_before_it_is_used() -> None:
    pools = make()
    assert (pools.quotas(), pools.threads, pools.processes) == ({}, None, None)


async def test_each_is_made_once_with_its_bound() -> None:
    async with trio.open_nursery() as nursery:
        pools = make(nursery)
        assert pools.use_threads() is pools.use_threads() is pools.threads
        assert pools.use_processes() is pools.use_processes() is pools.processes
        assert pools.use_threads().quota.running == 3
        assert pools.use_processes().most == 2


async def test_without_a_quota_the_function_is_called_at_once() -> None:
    pools = make()
    ctx: Any = object()

    async def handle(*args: Any) -> Any:
        return args

    assert not pools.bounded
    assert await pools.in_turn(ctx, "tool", "sum", None, handle, 1, 2) == (pools, ctx, 1, 2)
    assert pools.quotas() == {}


@pytest.mark.parametrize("kind", ["tool", "resource", "prompt", "completion"])
async def test_a_quota_of_a_kind_bounds_all_of_that_kind(kind: str) -> None:
    assert make(**{kind: Quota(running=1)}).bounded
    assert not make(session=Quota(running=1)).bounded
