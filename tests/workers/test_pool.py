"""Worker processes of a running server: reused, bounded, killed with their calls, and none left over."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import trimcp
from tests.stopwatch import Stopwatch
from tests.workers import heavy_tools
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing import connected
from trimcp.transports.memory import memory_channels
from trimcp.watch.tree import work_tree
from trimcp.workers import pool as worker_pool
from trimcp.workers import programs as worker_programs
from trimcp.workers.pool import ProcessStatistics, WorkerPool

pytestmark = pytest.mark.slow


def offering(*functions: Callable[..., object], most: int | None = None, **options: object) -> trimcp.Server:
    server = trimcp.Server("heavy", max_processes=most)
    for function in functions:
        server.add_tool(function, run="process", **options)
    return server


def pool(server: trimcp.Server) -> WorkerPool:
    (running,) = server.runs
    return running.pools.use_processes()


def counted(server: trimcp.Server) -> ProcessStatistics:
    return pool(server).statistics()


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Return when another process has done something."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 -- it is another process that is asked
            await trio.sleep(0.001)


def exists(pid: int) -> bool:
    """Whether there is such a process, as a zombie too."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def lives(pid: int) -> bool:
    """Whether it runs. A descendant is somebody else's to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def test_a_worker_is_kept_and_used_again() -> None:
    server = offering(heavy_tools.pid)
    async with connected(server) as session:
        pids = [(await session.call_tool("pid")).structured_content for _ in range(5)]
        assert len({str(each) for each in pids}) == 1
        assert pids[0]["result"] != os.getpid()
        statistics = counted(server)
        assert (statistics.alive, statistics.busy, statistics.started) == (1, 0, 1)
        assert (statistics.killed, statistics.crashed) == (0, 0)


def read_ids(file: Path) -> list[int]:
    return [int(word) for word in file.read_text().split()]


def children() -> list[str]:
    """The children of this process: each of its threads may have some."""
    return [text for file in Path("/proc/self/task").glob("*/children") if (text := file.read_text())]


@asynccontextmanager
async def spinning(session: trimcp.ClientSession, file: Path) -> AsyncIterator[tuple[list[int], trio.CancelScope]]:
    """A call under way that only SIGKILL stops, with the ids of its process and of a child of that."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "spin", {"file": str(file)})
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        yield read_ids(file), nursery.cancel_scope
        nursery.cancel_scope.cancel()


async def seconds_to_kill_a_family() -> float:
    """What it takes to kill a process and its child, and to see that they are gone."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:  # noqa: ASYNC220 -- to be killed
        assert process.stdout is not None
        child = int(process.stdout.readline())
        begun = time.perf_counter()
        os.killpg(process.pid, signal.SIGKILL)
        await until(lambda: process.poll() is not None and not lives(child))
        return time.perf_counter() - begun


@pytest.mark.needs("coreutils")
async def test_a_cancelled_call_takes_its_process_and_its_descendants_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = offering(heavy_tools.spin, heavy_tools.pid)
    took: list[float] = []
    plainly: list[float] = []
    async with connected(server) as session:
        # At once: it takes no more than thirty times what it takes to kill such a family, and it waits for nothing.
        monkeypatch.setattr(worker_pool, "_DRAINED", 600)
        monkeypatch.setattr(worker_programs, "_ENDED", 600)
        while len(took) < 5 or (len(took) < 20 and min(took) > 30 * min(plainly)):
            number = len(took)
            async with spinning(session, tmp_path / str(number)) as ((worker, child), scope):
                assert f"in the worker process {worker}" in "\n".join(work_tree(next(iter(server.runs)).sessions))
                assert lives(worker)
                assert lives(child)
                begun = time.perf_counter()
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await until(lambda pids=(worker, child): not exists(pids[0]) and not lives(pids[1]))
                took.append(time.perf_counter() - begun)
            plainly.append(await seconds_to_kill_a_family())
        print(
            f"from the cancel to the end of its process and descendants: {1000 * min(took):.1f} ms; "
            f"where nothing but killing is done: {1000 * min(plainly):.1f} ms"
        )
        assert min(took) <= 30 * min(plainly)
        assert counted(server).killed == len(took)
        assert (await session.call_tool("pid")).is_error is not True  # by a new one


async def test_a_timeout_kills_the_process(tmp_path: Path) -> None:
    server = offering(heavy_tools.pid, most=1)
    server.add_tool(heavy_tools.wait_for, run="process", timeout=1.0)
    async with connected(server) as session:
        await session.call_tool("pid")  # the start of a process takes some of the time
        result = await session.call_tool("wait_for", {"file": str(tmp_path / "began")})
        assert result.is_error
        assert result.content == [trimcp.Text("wait_for did not finish within 1 seconds")]
        await until(lambda: counted(server).alive == 0)
        assert not exists(int((tmp_path / "began").read_text()))


@asynccontextmanager
async def clients(server: trimcp.Server, number: int) -> AsyncIterator[list[trimcp.ClientSession]]:
    """Several clients of one run."""
    async with server.running() as running, AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(open_service_nursery())
        sessions = []
        for _ in range(number):
            ours, theirs = memory_channels()
            nursery.start_soon(running.serve, ours)
            sessions.append(await stack.enter_async_context(trimcp.Client("c").connect(theirs)))
        yield sessions


async def test_a_client_that_leaves_takes_the_process_with_it(tmp_path: Path) -> None:
    server = offering(heavy_tools.spin)
    file = tmp_path / "began"
    async with server.running() as running, trio.open_nursery() as nursery:
        ours, theirs = memory_channels()
        nursery.start_soon(running.serve, ours)

        async def call_in_vain(session: trimcp.ClientSession) -> None:
            with pytest.raises(trimcp.ConnectionLost):
                await session.call_tool("spin", {"file": str(file)})

        async with trimcp.Client("c").connect(theirs) as session:
            nursery.start_soon(call_in_vain, session)
            await until(lambda: file.exists() and file.read_text().endswith("\n"))
        worker, child = map(int, file.read_text().split())
        await until(lambda: not exists(worker) and not lives(child))
        assert counted(server).killed == 1


async def test_nothing_outlives_the_run(tmp_path: Path) -> None:
    """Idle ones and busy ones are gone, and reaped, when `running()` is left."""
    server = offering(heavy_tools.pid, heavy_tools.spin, most=2)
    pids: list[int] = []
    async with connected(server) as session:
        pids.append((await session.call_tool("pid")).structured_content["result"])
        async with spinning(session, tmp_path / "a") as (found, _):
            pids += found
            async with spinning(session, tmp_path / "b") as (others, _):
                pids += others
        await session.call_tool("pid")
        assert counted(server).alive >= 1
        clock = Stopwatch(tuple(pids))
    took = clock.took()
    print(f"the run ended within {1000 * took:.1f} ms")
    assert took < 2.5, "it ended because a wait did, not because the processes did"
    assert [pid for pid in pids if lives(pid)] == []
    assert [pid for pid in (pids[0], pids[1], pids[3]) if exists(pid)] == []


async def test_two_hundred_cancelled_calls_leave_no_process() -> None:
    """Some die as they start, some in the middle, some never had one."""
    server = offering(heavy_tools.burn, heavy_tools.pid, most=2)
    descriptors, relatives = len(os.listdir("/proc/self/fd")), children()  # of other tests, perhaps
    async with connected(server) as session:
        for number in range(20):
            async with trio.open_nursery() as nursery:
                for _ in range(10):
                    nursery.start_soon(session.call_tool, "burn")
                if number % 2 == 0:
                    await until(lambda: counted(server).alive == 2)
                    await trio.sleep(0.05 * (number % 3))
                else:
                    await session.ping()
                assert not server.runs or pool(server).statistics().alive <= 2
                nursery.cancel_scope.cancel()
        with trio.fail_after(60):
            assert (await session.call_tool("pid")).is_error is not True
        await until(lambda: counted(server).busy == 0)
        statistics = counted(server)
        print(statistics)
        assert statistics.alive <= 2
        assert statistics.waiting == 0
        assert statistics.crashed == 0
    assert children() == relatives
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_there_are_never_more_than_the_bound_and_the_rest_wait_in_turn(tmp_path: Path) -> None:
    """Sessions take turns: one with ten calls that wait delays another's by one."""
    server = offering(heavy_tools.wait_for, heavy_tools.pid, most=1)
    order: list[str] = []

    async def call(session: trimcp.ClientSession, name: str) -> None:
        await session.call_tool("pid")
        order.append(name)

    async with clients(server, 2) as (greedy, modest), trio.open_nursery() as nursery, trio.open_nursery() as first:
        first.start_soon(greedy.call_tool, "wait_for", {"file": str(tmp_path / "began")})
        await until((tmp_path / "began").exists)
        for _ in range(10):
            nursery.start_soon(call, greedy, "greedy")
        await until(lambda: counted(server).waiting == 10)
        nursery.start_soon(call, modest, "modest")
        await until(lambda: counted(server).waiting == 11)
        assert counted(server).alive == 1
        with pytest.raises(trimcp.ErrorReply, match="could not begin before its deadline"):
            async with pool(server).worker(None, "late", trio.current_time() - 1):
                pass
        statistics = server.statistics()
        assert (statistics.waiting_turns, statistics.refused) == (11, 1)
        first.cancel_scope.cancel()
    assert len(order) == 11
    assert order.index("modest") <= 1


async def test_a_worker_of_another_bound_makes_room() -> None:
    server = offering(heavy_tools.pid, most=1)
    server.add_tool(heavy_tools.pid, name="bounded", run="process", memory=2**30)
    async with connected(server) as session:
        pids = [(await session.call_tool(name)).structured_content["result"] for name in ("pid", "bounded", "pid")]
        assert len(set(pids)) == 3
        assert not exists(pids[0])
        assert not exists(pids[1])
        statistics = counted(server)
        assert (statistics.alive, statistics.started, statistics.killed, statistics.crashed) == (1, 3, 0, 0)


async def test_idle_workers_end_after_a_while_and_the_next_call_gets_another() -> None:
    server = offering(heavy_tools.pid)
    async with connected(server) as session:
        first = (await session.call_tool("pid")).structured_content
        pool(server).idle_time = 0.01
        assert (await session.call_tool("pid")).structured_content == first
        await until(lambda: counted(server).alive == 0)
        assert not exists(first["result"])
        assert (await session.call_tool("pid")).structured_content != first
        statistics = counted(server)
        assert (statistics.started, statistics.killed, statistics.crashed) == (2, 0, 0)


async def test_an_idle_worker_that_dies_is_replaced() -> None:
    server = offering(heavy_tools.pid)
    async with connected(server) as session:
        first = (await session.call_tool("pid")).structured_content["result"]
        os.kill(first, 9)
        await until(lambda: counted(server).alive == 0)
        assert counted(server).crashed == 1
        assert (await session.call_tool("pid")).structured_content["result"] != first


async def test_an_idle_worker_that_is_just_being_ended_is_not_lent() -> None:
    server = offering(heavy_tools.pid, most=2)
    async with connected(server) as session:
        first = (await session.call_tool("pid")).structured_content["result"]
        (ending,) = pool(server)._idle
        ending.idle_scope.cancel()
        async with pool(server).worker(None, "someone") as worker:
            assert worker.process.pid != first
            worker.done = True
        assert counted(server).busy == 0


async def test_starting_a_worker_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a system takes to start a process: here, until the loop has had fifty turns meanwhile."""
    start, begun, turned = subprocess.Popen.__init__, threading.Event(), threading.Event()

    def start_slowly(self: Any, *args: Any, **options: Any) -> None:
        begun.set()
        assert turned.wait(60), "the loop stands still"
        start(self, *args, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", start_slowly)
    server = offering(heavy_tools.pid)

    async with connected(server) as session, trio.open_nursery() as nursery:

        async def turn() -> None:
            while not begun.is_set():  # noqa: ASYNC110 -- a thread sets it
                await trio.sleep(0.001)
            for _ in range(50):
                await trio.sleep(0.001)
            turned.set()

        nursery.start_soon(turn)
        assert (await session.call_tool("pid")).is_error is not True
        assert turned.is_set()


async def test_in_virtual_time_it_runs_inline(autojump_clock: trio.testing.MockClock) -> None:
    server = offering(heavy_tools.pid, timeout=30)
    async with connected(server) as session:
        assert (await session.call_tool("pid")).structured_content == {"result": os.getpid()}
        assert trio.current_time() < 1
        assert all(running.pools.processes is None for running in server.runs)


async def test_a_bound_has_to_be_one() -> None:
    with pytest.raises(ValueError, match="max_processes is an integer of at least 1 or None, not 0"):
        trimcp.Server("s", max_processes=0)


async def test_a_check_of_the_arguments_runs_before_the_process() -> None:
    def near(arguments: dict[str, object]) -> None:
        assert arguments["point"] == {"x": 1, "when": "2026-01-01"}, "their JSON values"
        if arguments["by"] == 9:
            raise ValueError("too far")

    server = offering(heavy_tools.move, validate=near)
    point = {"x": 1, "when": "2026-01-01"}
    async with connected(server) as session:
        result = await session.call_tool("move", {"point": point, "by": 9})
        assert (result.is_error, result.text) == (True, "invalid arguments for move: too far")
        (running,) = server.runs
        assert running.pools.processes is None
        assert (await session.call_tool("move", {"point": point, "by": 1})).data["x"] == 2
