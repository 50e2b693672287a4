"""Several processes under load, while one thing after another goes wrong: nothing is lost, nothing doubled, all ends.

`nox -s replicas` runs this, with a minute of kills; `-- --short` what fits into half a minute.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.replicas.histories import Judged, read, told, write, wrong
from tests.replicas.loads import COUNT, PAUSE, Load, busy
from tests.replicas.topology import LEASE, redis_replicas, replicas, sqlite_workers
from tests.store.history import CallHistory
from tests.store.redis_server import redis_server, slowed

pytestmark = [pytest.mark.needs("redis-server", "nginx"), pytest.mark.timeout(200)]

SECONDS = float(os.environ.get("TRIMCP_REPLICAS_SECONDS", "10"))
EVERY = 2.0
LONGEST = COUNT * PAUSE + LEASE + 6.0
"""Seconds for a call: its own, the lease of a process that is gone, and what a busy machine adds."""

LONGEST_OF_WORKERS = LONGEST + 8.0 - LEASE  # whose lease is the usual one

HISTORIES = Path("build", "replicas")
JUDGED: list[Judged] = []
"""What was tried and found right, for the table in the end."""


def judge(load: Load, name: str, longest: float = LONGEST, **how: bool) -> list[Any]:
    """Write the histories of a load into a file, read them there, and fail where they show what must not be."""
    path = HISTORIES / f"{name}.jsonl"
    write(path, load.histories)
    histories = read(path)
    print(f"\n{name}: {told(histories)}")
    said = wrong(histories, longest, **how)
    assert said == [], "\n".join([*said, *load.said])
    JUDGED.append(Judged(name, histories, longest))
    return histories


async def test_a_rolling_restart_fails_no_call() -> None:
    async with redis_replicas() as site:
        async with busy(site.url) as load:
            await trio.sleep(1)
            await site.roll()
            await trio.sleep(1)
        load.said += [site.nginx_log(), site.logs()]
        judge(load, "rolling-restart", all_answered=True)
        assert "Traceback" not in site.logs()


async def test_replicas_are_killed() -> None:
    chosen = random.Random(22)
    async with redis_replicas() as site:
        async with busy(site.url) as load:
            kills, end = 0, trio.current_time() + SECONDS
            while trio.current_time() < end:
                next_one = trio.current_time() + EVERY
                await site.kill_one(chosen)
                kills += 1
                await trio.sleep_until(next_one)
            await trio.sleep(EVERY)
        judge(load, "kills-redis")
        assert kills >= SECONDS / EVERY / 2


@pytest.mark.slow
async def test_workers_over_sqlite_are_killed() -> None:
    chosen = random.Random(22)
    async with sqlite_workers() as site:
        async with busy(site.url, agents=False) as load:
            kills, end = 0, trio.current_time() + SECONDS
            while trio.current_time() < end:
                await trio.sleep(EVERY)
                await site.kill_one(chosen)
                kills += 1
            await trio.sleep(EVERY)
        judge(load, "kills-sqlite", LONGEST_OF_WORKERS)
        assert kills >= SECONDS / EVERY / 2


# Redis


@pytest.mark.slow
async def test_redis_stops_for_a_while() -> None:
    async with redis_replicas() as site:
        assert site.redis is not None
        async with busy(site.url) as load:
            await trio.sleep(1)
            with site.redis.stopped():
                await trio.sleep(5)
            back = len(load.histories)
            await trio.sleep(5)
        assert results(load.histories[back:]) > 5, load.said
        judge(load, "redis-stopped", LONGEST + 5)


@pytest.mark.slow
async def test_redis_is_killed_and_started_again() -> None:
    async with redis_replicas() as site:
        assert site.redis is not None
        async with busy(site.url) as load:
            for _ in range(3):
                await trio.sleep(1)
                site.redis.kill()
                await trio.sleep(1)
                await trio.to_thread.run_sync(site.redis.start)
            back = len(load.histories)
            await trio.sleep(4)
        assert results(load.histories[back:]) > 5, load.said
        judge(load, "redis-killed")


@pytest.mark.slow
async def test_connections_to_redis_are_cut() -> None:
    async with redis_replicas() as site:
        assert site.redis is not None
        async with busy(site.url) as load:
            for _ in range(10):
                await trio.sleep(0.5)
                site.redis.say("CLIENT KILL TYPE normal SKIPME yes")
            back = len(load.histories)
            await trio.sleep(2)
        assert results(load.histories[back:]) > 5, load.said
        judge(load, "redis-cut")


@pytest.mark.slow
async def test_redis_is_slow() -> None:
    with redis_server() as server:
        async with slowed(server, 0.2) as url, replicas(store=url) as site:
            async with busy(site.url) as load:
                await trio.sleep(8)
            assert results(load.histories) > 5, load.said
            judge(load, "redis-slow", LONGEST + 5)


@pytest.mark.slow
async def test_redis_has_no_memory_left() -> None:
    """What frees memory, and what needs none, goes on; and all does once there is room."""
    async with redis_replicas("--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as site:
        assert site.redis is not None
        async with busy(site.url) as load:
            await trio.sleep(1)
            assert site.redis.say("CONFIG SET maxmemory 1") == b"+OK\r\n"
            before = len(load.histories)
            await trio.sleep(5)
            assert results(load.histories[before:]) > 5, load.said  # those of 2026-07-28
            assert site.redis.say("CONFIG SET maxmemory 100mb") == b"+OK\r\n"
            back = len(load.histories)
            await trio.sleep(4)
        assert results(load.histories[back:]) > 5, load.said
        judge(load, "redis-full", LONGEST + 5)


@pytest.mark.slow
async def test_redis_refuses_the_password() -> None:
    async with redis_replicas() as site:
        assert site.redis is not None
        async with busy(site.url) as load:
            await trio.sleep(1)
            assert site.redis.say("CONFIG SET requirepass secret") == b"+OK\r\n"
            assert site.redis.say_all("AUTH secret", "CLIENT KILL TYPE normal SKIPME yes").startswith(b"+OK\r\n")
            await trio.sleep(5)
            assert site.redis.say_all("AUTH secret", 'CONFIG SET requirepass ""').startswith(b"+OK\r\n+OK")
            back = len(load.histories)
            await trio.sleep(4)
        assert results(load.histories[back:]) > 5, load.said
        judge(load, "redis-password", LONGEST + 5)
        assert "secret" not in site.logs()


@pytest.mark.slow
async def test_the_data_of_redis_are_flushed() -> None:
    """Sessions and contexts have ended; clients begin anew, and nothing hangs."""
    async with redis_replicas() as site:
        assert site.redis is not None
        async with busy(site.url, agents=False) as load:
            await trio.sleep(1)
            site.redis.say("FLUSHALL")
            back = len(load.histories)
            await trio.sleep(5)
        assert results(load.histories[back:]) > 5, load.said
        for history in load.histories:  # which is what a client hears then
            if isinstance(history, CallHistory) and history.ends == ["session lost"]:
                history.ends = ["error"]
        judge(load, "redis-flushed")


# A process that stands still


@pytest.mark.slow
async def test_a_replica_stands_still_for_longer_than_its_lease() -> None:
    async with redis_replicas() as site:
        async with busy(site.url) as load:
            await trio.sleep(1)
            sleeper = site.replicas[0]
            os.kill(sleeper.pid, signal.SIGSTOP)
            await trio.sleep(2 * LEASE)
            os.kill(sleeper.pid, signal.SIGCONT)
            await trio.sleep(2)
        # nginx goes on sending to a process that stands still, and the client waits for as long as that does.
        judge(load, "standstill", LONGEST + 2 * LEASE)


# SQLite's disk


@pytest.mark.slow
async def test_the_disk_of_sqlite_is_full() -> None:
    with small_disk(32) as folder:
        async with replicas(store=f"sqlite://{folder}/sessions.db") as site:
            async with busy(site.url, agents=False) as load:
                await trio.sleep(1)
                filling = folder / "filling"
                fill(filling)
                before = len(load.histories)
                await trio.sleep(5)
                assert results(load.histories[before:]) > 5, load.said  # those of 2026-07-28
                filling.unlink()
                back = len(load.histories)
                await trio.sleep(6)
            assert results(load.histories[back:]) > 5, load.said
            judge(load, "disk-full", LONGEST + 5)


def results(histories: list[Any]) -> int:
    return sum(isinstance(history, CallHistory) and history.ends == ["result"] for history in histories)


@contextmanager
def small_disk(mebibytes: int) -> Iterator[Path]:
    """A file system of this size, where we may make one."""
    with tempfile.TemporaryDirectory(prefix="trimcp") as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "none", name]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("a small file system can be made by root only")
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
