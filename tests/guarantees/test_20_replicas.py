"""Promise 20: processes that serve as one lose no event and no session, whichever is killed, and no call to a restart.

`nox -s replicas` has the same for a minute, with the official client among others, and what can happen to their store.
"""

from __future__ import annotations

import random

import pytest
import trio

from tests.guarantees.report import figure
from tests.replicas.histories import CounterHistory, History, WatchHistory, wrong
from tests.replicas.loads import COUNT, PAUSE, busy
from tests.replicas.topology import LEASE, redis_replicas, sqlite_workers
from tests.store.history import CallHistory

pytestmark = [pytest.mark.slow, pytest.mark.needs("redis-server", "nginx")]

KILLS = 6
EVERY = 2.0
OF_WORKERS = 8.0
"""The usual lease, in seconds."""


def measured(histories: list[History], what: str, where: str, longest: float) -> None:
    """Record what was wrong, and how long the slowest call took."""
    calls = [each for each in histories if isinstance(each, CallHistory)]
    events = sum(len(each.numbers) for each in calls)
    changes = sum(each.heard for each in histories if isinstance(each, WatchHistory))
    updates = sum(each.acknowledged for each in histories if isinstance(each, CounterHistory))
    found = wrong(histories, longest)
    figure(20, f"histories with a loss or a double, {what}", len(found), 0, "", where)
    figure(20, f"slowest call, {what}", max(each.seconds for each in calls), longest, "s", where)
    figure(20, f"calls, {what}", len(calls), None, "", where)
    figure(20, f"events, updates and changes, {what}", events + changes + updates, None, "", where)
    assert found == []


async def test_replicas_are_killed() -> None:
    chosen = random.Random(20)
    async with redis_replicas() as site, busy(site.url, official=False) as load:
        for _ in range(KILLS):
            await trio.sleep(EVERY)
            await site.kill_one(chosen)
        await trio.sleep(EVERY)
    measured(load.histories, f"{KILLS} killed", "three replicas over Redis", COUNT * PAUSE + LEASE + 6.0)


async def test_workers_are_killed() -> None:
    chosen = random.Random(20)
    async with sqlite_workers() as site, busy(site.url, agents=False, official=False) as load:
        for _ in range(KILLS):
            await trio.sleep(EVERY)
            await site.kill_one(chosen)
        await trio.sleep(EVERY)
    measured(load.histories, f"{KILLS} killed", "three workers over SQLite", COUNT * PAUSE + OF_WORKERS + 6.0)


async def test_replicas_are_restarted_one_after_the_other() -> None:
    async with redis_replicas() as site, busy(site.url, official=False) as load:
        await trio.sleep(1)
        await site.roll()
        await trio.sleep(1)
    calls = [each for each in load.histories if isinstance(each, CallHistory)]
    failed = [each for each in calls if each.ends != ["result"]]
    figure(20, "calls failed by a rolling restart", len(failed), 0, "", "three replicas over Redis")
    measured(load.histories, "restarted", "three replicas over Redis", COUNT * PAUSE + LEASE + 6.0)
    assert failed == [], load.said
