"""Servers and workers that are killed while they carry out tasks: real processes, on SQLite and on Redis."""

from __future__ import annotations

import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

import trimcp
from tests.programs import require
from tests.store.redis_server import redis_server
from trimcp.store.naming import tasks_of

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "long_job.py")
COMMAND = [sys.executable, "-m", "trimcp.cli"]
T = TypeVar("T")
SECONDS = 120.0
ROUNDS = max(1, int(os.environ.get("TRIMCP_REPLICAS_SECONDS", "8")) // 8)
FAULTS = ["killed"] if ROUNDS == 1 else ["killed", "cut", "stopped", "full"]  # of Redis


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite://{tmp_path}/jobs.db"
    else:
        require("redis-server")
        with redis_server() as server:
            yield server.url


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port


async def kill(process: trio.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def stop_between_writes(process: trio.Process, url: str) -> None:
    """Let a process stand still, but not with a file of SQLite in its hand: all others would wait for it."""
    while True:
        process.send_signal(signal.SIGSTOP)
        if not url.startswith("sqlite"):
            return
        try:
            with closing(sqlite3.connect(url.removeprefix("sqlite://"), timeout=0.2, isolation_level=None)) as file:
                file.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError:
            process.send_signal(signal.SIGCONT)
            await trio.sleep(0.01)


@asynccontextmanager
async def started(command: list[str], word: str) -> AsyncIterator[trio.Process]:
    """Start a process, and yield once it has said this word."""
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        said = b""
        with trio.fail_after(SECONDS):
            while word.encode() not in said:
                more = await process.stdout.receive_some()
                assert more, said.decode()
                said += more
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drop, process.stdout)
            yield process
            nursery.cancel_scope.cancel()
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def _drop(stream: trio.abc.ReceiveStream) -> None:
    async for _ in stream:
        pass


def serving(port: int, url: str) -> Any:
    return started([sys.executable, EXAMPLE, "serve", str(port), url], "serving at")


def leaving(port: int, url: str) -> Any:
    """A server that leaves its tasks to workers."""
    return started([*COMMAND, "run", EXAMPLE, "--http", "--port", str(port), "--tasks", url], "listening on")


def worker(url: str) -> Any:
    return started([*COMMAND, "worker", EXAMPLE, "--store", url], "carrying out")


def at(port: int) -> str:
    return f"http://127.0.0.1:{port}/mcp"


async def answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again where the server was killed, until there is another one."""
    while True:
        try:
            return await ask()
        except trimcp.ConnectionLost:
            await trio.sleep(0.05)


async def reached(task: trimcp.ClientTask, number: int) -> None:
    with trio.fail_after(SECONDS):
        while ((await answered(task.state)).progress or {"progress": 0})["progress"] < number:  # noqa: ASYNC110
            await trio.sleep(0.01)  # it wants the processor too


async def result_of(session: trimcp.ClientSession, id: str) -> Any:
    with trio.fail_after(SECONDS):
        result = (await session.task(id).result()).structured_content
        assert (await answered(session.task(id).state)).status == "completed"
    return result


async def start(session: trimcp.ClientSession, numbers: int, seconds: float = 0.05) -> tuple[trimcp.ClientTask, str]:
    task = await session.start_task("add_up", {"numbers": numbers, "seconds": seconds})
    assert task.id is not None
    return task, task.id


def check(done: Any, numbers: int, *, begun: int) -> None:
    assert isinstance(done, dict)
    assert done["total"] == sum(range(numbers + 1))  # each number once
    assert done["begun"][0] == 1
    assert len(done["begun"]) == begun
    assert done["begun"] == sorted(set(done["begun"]))  # from its checkpoint each time


async def test_a_long_job_goes_on_where_it_was_and_ends_once(url: str) -> None:
    port, client = free_port(), trimcp.Client("test", tasks=True)
    async with serving(port, url) as first, client.connect(at(port)) as session:
        task, id = await start(session, 30)
        await reached(task, 5)
        await kill(first)
        async with trio.open_nursery() as nursery:
            waited: list[trimcp.CallToolResult] = []

            async def wait() -> None:
                waited.append(await task.result())  # while nobody serves, and then somebody else

            nursery.start_soon(wait)
            async with serving(port, url), client.connect(at(port)) as other:
                done = await result_of(other, id)
                while not waited:
                    await trio.lowlevel.checkpoint()
    assert waited[0].structured_content == done
    check(done, 30, begun=2)
    store = tasks_of(url)
    async with store.opened():
        kept = await store.load(id)
        assert kept is not None
        assert kept.ended


async def test_another_process_on_the_same_store_takes_a_job_over(url: str) -> None:
    client, ports = trimcp.Client("test", tasks=True), (free_port(), free_port())
    async with (
        serving(ports[0], url) as first,
        serving(ports[1], url),
        client.connect(at(ports[0])) as session,
        client.connect(at(ports[1])) as elsewhere,
    ):
        task, id = await start(session, 10)
        other, done = await start(session, 1, 0)
        result = await other.result()
        assert await result_of(elsewhere, done) == result.structured_content  # whoever computed it
        await reached(task, 2)
        assert (await elsewhere.task(id).state()).status == "working"
        await kill(first)
        check(await result_of(elsewhere, id), 10, begun=2)


async def test_a_job_survives_its_server_and_its_worker(url: str) -> None:
    port, client = free_port(), trimcp.Client("test", tasks=True)
    async with leaving(port, url) as server, client.connect(at(port)) as session:
        task, id = await start(session, 40)
        async with worker(url) as first:
            await reached(task, 5)
            await kill(first)
        async with worker(url):
            await kill(server)
            async with leaving(port, url):
                done = await result_of(session, id)
                check(done, 40, begun=2)
                async with client.connect(at(port)) as other:
                    assert await result_of(other, id) == done


async def test_a_worker_that_is_told_to_end_lets_the_next_go_on_at_once(url: str) -> None:
    port, client = free_port(), trimcp.Client("test", tasks=True)
    async with leaving(port, url), client.connect(at(port)) as session:
        task, id = await start(session, 10, 0.3)
        command = [*COMMAND, "worker", EXAMPLE, "--store", url, "--grace", "0"]
        async with started(command, "carrying out") as first, worker(url):
            if not (await task.state()).progress:
                await reached(task, 1)
            first.terminate()
            with trio.fail_after(SECONDS):
                assert await first.wait() == 0
            done = await result_of(session, id)
        assert done["total"] == 55


async def test_a_worker_that_stood_still_has_lost_its_job(url: str) -> None:
    port, client = free_port(), trimcp.Client("test", tasks=True)
    async with leaving(port, url), client.connect(at(port)) as session:
        task, id = await start(session, 40)
        async with worker(url) as first:
            await reached(task, 5)
            await stop_between_writes(first, url)
            async with worker(url):
                await reached(task, 15)
                first.send_signal(signal.SIGCONT)  # which wants to go on
                done = await result_of(session, id)
            check(done, 40, begun=2)
            assert await result_of(session, id) == done
            again, _ = await start(session, 3)
            assert (await again.result()).structured_content  # what stood still works on, with other jobs


@pytest.mark.needs("redis-server")
@pytest.mark.parametrize("fault", FAULTS)
async def test_jobs_survive_what_happens_to_redis(fault: str) -> None:
    port, client = free_port(), trimcp.Client("test", tasks=True)
    with redis_server() as server:
        async with leaving(port, server.url), worker(server.url), client.connect(at(port)) as session:
            jobs = [await start(session, 30) for _ in range(3)]
            for number in (3, 10):
                await reached(jobs[0][0], number)
                if fault == "killed":
                    server.kill()
                    server.start()
                elif fault == "cut":
                    server.say("CLIENT KILL TYPE normal SKIPME yes")
                elif fault == "stopped":
                    with server.stopped():
                        await trio.sleep(3)  # longer than their lease
                else:
                    assert server.say("CONFIG SET maxmemory 1") == b"+OK\r\n"
                    await trio.sleep(1)
                    server.say("CONFIG SET maxmemory 0")
            for _, id in jobs:
                done = await result_of(session, id)
                check(done, 30, begun=1 if fault == "killed" else len(done["begun"]))


@pytest.mark.slow
async def test_every_task_ends_exactly_once_while_servers_and_workers_are_killed(url: str) -> None:
    """Each of two servers and three workers is killed and started anew; results never change once they were told.

    `nox -s replicas` has some more rounds of it.
    """
    drawn, client = random.Random(23), trimcp.Client("test", tasks=True)
    ports, ended, lengths = (free_port(), free_port()), dict[str, Any](), dict[str, int]()
    kinds = [(leaving, port, url) for port in ports] + [(worker, url)] * 3

    async def keep(kind: Any, *arguments: Any, task_status: trio.TaskStatus[list[trio.Process]]) -> None:
        """Keep a process of this kind, whoever kills it."""
        now: list[trio.Process] = []
        while True:
            async with kind(*arguments) as process:
                now[:] = [process]
                task_status.started(now)
                task_status = trio.TASK_STATUS_IGNORED
                await process.wait()

    async def watch(id: str, session: trimcp.ClientSession) -> None:
        done = await result_of(session, id)
        assert ended.setdefault(id, done) == done

    async def fault(running: list[list[trio.Process]]) -> None:
        # Four of them at workers: of a task that five have left, it is said that it is given up.
        for index in (0, 3, 1, 4, 0, 2, 1, 3, 0, 1):
            (victim,) = running[index]
            if victim.poll() is None:
                await kill(victim)
            await trio.sleep(drawn.uniform(0.1, 0.8))  # faults come at their own times, whatever others do

    async with trio.open_nursery() as nursery:
        running = [await nursery.start(keep, *kind) for kind in kinds]
        async with client.connect(at(ports[0])) as one, client.connect(at(ports[1])) as other:
            for _ in range(ROUNDS):
                new = {(await answered(partial(start, (one, other)[n % 2], n, 0.1)))[1]: n for n in range(20, 40)}
                lengths.update(new)
                for id in new:
                    await reached(one.task(id), 3)
                async with trio.open_nursery() as watching:
                    for id in new:
                        watching.start_soon(watch, id, one)
                        watching.start_soon(watch, id, other)
                    await fault(running)
            assert ended.keys() == lengths.keys()
            for id, done in ended.items():
                check(done, lengths[id], begun=len(done["begun"]))
                for session in (one, other):
                    assert await result_of(session, id) == done
            assert max(len(done["begun"]) for done in ended.values()) > 1  # they were indeed killed at work
        nursery.cancel_scope.cancel()
    store = tasks_of(url)
    async with store.opened():
        kept = [await store.load(id) for id in lengths]
    assert [each and (each.status, each.checkpoint) for each in kept] == [("completed", None)] * len(lengths)
