"""Workers in real processes: they share a socket, are replaced when they crash, and end together."""

from __future__ import annotations

import ast
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trimcp.cli.serve.processes import Workers, inherited

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sockets are handed down on POSIX only")

ROOT = Path(__file__).parents[2]
WORKER = str(Path(__file__).with_name("worker_for_tests.py"))


@attrs.define
class Crew:
    """Workers under way, in the hands of a test."""

    address: tuple[str, int]
    said: list[str]
    done: trio.Event
    code: int | None = None

    async def order(self, order: str) -> str:
        """Tell one of the workers to do something and return what it says."""
        stream = await trio.open_tcp_stream(*self.address)
        async with stream:
            await stream.send_all(order.encode())
            try:
                return b"".join([chunk async for chunk in stream]).decode()
            except trio.BrokenResourceError:
                return ""

    async def told(self, text: str) -> str:
        """Wait until something is said, and return it."""
        while True:
            for line in self.said:
                if text in line:
                    return line
            await trio.sleep(0.01)


@asynccontextmanager
async def working(number: int, *arguments: str, grace: float = 5.0) -> AsyncIterator[Crew]:
    """Run workers for as long as the block runs, and see that they all end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, trio.fail_after(60):
        crew = Crew(listener.getsockname(), [], trio.Event())
        command = [sys.executable, WORKER, *arguments]
        workers = Workers(command, number, [listener], {"TRIMCP_SECRET": "s"}, grace, crew.said.append, pause=0.01)
        ready = trio.Event()

        async def run() -> None:
            crew.code = await workers.run(ready.set)
            crew.done.set()
            ready.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await ready.wait()
            yield crew
            if not crew.done.is_set():
                os.kill(os.getpid(), signal.SIGTERM)  # `run` has installed a handler
            await crew.done.wait()


async def test_they_share_the_socket_and_end_together() -> None:
    async with working(2) as crew:
        seen = set()
        while len(seen) < 2:
            seen.add(int(await crew.order("pid")))
    assert os.getpid() not in seen
    assert (crew.code, crew.said) == (0, [])
    assert all(gone(pid) for pid in seen)


async def test_they_are_given_our_variables_and_none_of_what_is_between_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TRIMCP_")]:
        monkeypatch.delenv(name)  # how the tests are run is said in such
    async with working(1) as crew:
        assert ast.literal_eval(await crew.order("environment")) == {"TRIMCP_SECRET": "s"}


async def test_one_that_crashes_is_replaced_and_the_port_stays() -> None:
    async with working(1) as crew:
        first = await crew.order("pid")
        await crew.order("crash")
        second = await crew.order("pid")  # it waits in the socket's queue until there is a worker again
        assert second != first
        assert (
            await crew.told("worker 1")
            == f"worker 1 (process {first}) ended with status 7; the next one starts in 0.01 s"
        )
        os.kill(int(second), signal.SIGKILL)
        await crew.order("pid")
        assert (
            await crew.told("SIGKILL")
            == f"worker 1 (process {second}) was ended by SIGKILL; the next one starts in 0.02 s"
        )
    assert crew.code == 0


async def test_one_that_served_is_replaced_within_a_second(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends before it serves is not: it would end again and again."""
    begun: list[float] = []

    async def run_one(workers: Any, ready: Any, place: int) -> Any:
        begun.append(trio.current_time())
        ended = SimpleNamespace(pid=1, returncode=-signal.SIGKILL)
        if len(begun) <= 6:
            ready(ended)
        elif len(begun) == 11:
            workers._stop.set()
        return ended

    monkeypatch.setattr(Workers, "_run_one", run_one)
    await Workers([], 1, [], {}, 0.0, lambda line: None).run(lambda: None)
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 2.0, 4.0, 8.0, 10.0])


async def test_where_none_can_start_all_give_up() -> None:
    async with working(3, "--broken") as crew:
        await crew.done.wait()
    assert crew.code == 5
    assert crew.said[0].endswith("ended with status 5 before it served anything")


async def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimcp.cli.serve.processes._MARGIN", 0.0)
    async with working(1, grace=0.2) as crew:
        pid = int(await crew.order("pid"))
        stream = await trio.open_tcp_stream(*crew.address)
        await stream.send_all(b"stubborn")
        assert await stream.receive_some(3) == b"yes"
    await stream.aclose()
    assert crew.code == 1
    assert crew.said == ["a worker did not end in time and was killed"]
    assert gone(pid)


async def test_one_that_is_just_being_started_hears_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    open_process = trio.lowlevel.open_process

    async def open_and_stop(*arguments: Any, **options: Any) -> trio.Process:
        process = await open_process(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        await trio.testing.wait_all_tasks_blocked(0.1)
        return process

    monkeypatch.setattr(trio.lowlevel, "open_process", open_and_stop)
    monkeypatch.setattr("trimcp.cli.serve.processes._MARGIN", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, trio.fail_after(60):
        workers = Workers([sys.executable, WORKER], 1, [listener], {}, 20.0, print)
        assert await workers.run(lambda: None) == 0


PARENT = """
import socket, sys, trio
from trimcp.cli.serve.processes import Workers
listener = socket.create_server(("127.0.0.1", 0))
workers = Workers([sys.executable, sys.argv[1]], 2, [listener], {}, 30.0, print)
sys.exit(trio.run(workers.run, lambda: print(listener.getsockname()[1], flush=True)))
"""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat")  # a zombie has ended; that nobody takes note of it is no fault of its own
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


async def until_gone(pids: set[int], number: int) -> None:
    """Wait until so many of the processes have ended."""
    while sum(gone(pid) for pid in pids) < number:  # noqa: ASYNC110  # of processes there are no events
        await trio.sleep(0.01)


@contextmanager
def parent_process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PARENT, WORKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        try:
            yield parent
        finally:
            parent.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, "second signal"])
async def test_workers_do_not_outlive_their_parent(how: signal.Signals | str) -> None:
    """Neither when it is killed, nor when it is told twice to end while they hold on."""
    with parent_process() as parent, trio.fail_after(60):
        assert parent.stdout is not None
        crew = Crew(("127.0.0.1", int(await trio.to_thread.run_sync(parent.stdout.readline))), [], trio.Event())
        seen: set[int] = set()
        while len(seen) < 2:
            seen.add(int(await crew.order("pid")))
        if isinstance(how, signal.Signals):
            parent.send_signal(how)
        else:
            stream = await trio.open_tcp_stream(*crew.address)
            await stream.send_all(b"stubborn")
            assert await stream.receive_some(3) == b"yes"
            parent.send_signal(signal.SIGTERM)
            await until_gone(seen, 1)
            parent.send_signal(signal.SIGTERM)
            await stream.aclose()
        code = await trio.to_thread.run_sync(parent.wait)
        await until_gone(seen, 2)
    assert code == (-signal.SIGKILL if how is signal.SIGKILL else 128 + signal.SIGTERM)


def test_who_is_no_worker_knows_it() -> None:
    assert inherited() is None
