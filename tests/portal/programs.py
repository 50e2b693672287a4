"""Programs that are interrupted, forked and ended: `python programs.py NAME`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from typing import Any

import trio

import trimcp


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def wait() -> str:
        await trio.sleep_forever()
        raise AssertionError

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    return server


def child() -> Any:
    return trimcp.stdio(sys.executable, __file__, "serve")


def ours() -> int:
    return sum(thread.name == "trimcp" for thread in threading.enumerate())


async def tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


def interrupts() -> None:
    """Interrupt 1,000 calls, each at another moment, as Ctrl-C and a notebook's stop do."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    lots = random.Random(7)
    before = interrupted = 0
    with trimcp.blocking.connect(make_server()) as session:
        for _ in range(1_010):
            try:
                signal.setitimer(signal.ITIMER_REAL, lots.uniform(1e-5, 2e-3), 0.2)
                session.call_tool("wait")
                raise AssertionError
            except KeyboardInterrupt:
                interrupted += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if interrupted == 10:
                session.ping()
                before = before or session.wait(tasks)
        session.ping()
        assert session.statistics().pending == 0
        assert session.call_tool("add", {"a": 1, "b": 2}).text == "3"
        print(interrupted >= 1_000, session.wait(tasks) <= before)
    print(ours())


def cancels() -> None:
    """Cancel 1,000 calls of asyncio, each at another moment, and ten connections."""
    lots = random.Random(7)

    async def main() -> None:
        interrupted = 0
        async with trimcp.asyncio.connect(make_server()) as session:
            await session.ping()
            before = 0
            for number in range(101):
                calls = [asyncio.create_task(session.call_tool("wait")) for _ in range(10)]
                for call in calls:
                    if lots.random() < 0.7:
                        await asyncio.sleep(lots.uniform(0, 1e-3))
                    call.cancel()
                ends = await asyncio.gather(*calls, return_exceptions=True)
                interrupted += sum(isinstance(end, asyncio.CancelledError) for end in ends)
                if not number:  # tasks that run handlers are kept, and used again
                    await session.ping()
                    before = await session.wait(tasks)
            await session.ping()
            assert session.statistics().pending == 0
            assert (await session.call_tool("add", {"a": 1, "b": 2})).text == "3"
            print(interrupted >= 1_000, await session.wait(tasks) <= before, len(asyncio.all_tasks()))
        for _ in range(10):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(lots.uniform(0, 5e-3)), trimcp.asyncio.connect(make_server()) as other:
                    await other.ping()
        print(len(asyncio.all_tasks()))

    asyncio.run(main())
    print(ours())


def connects() -> None:
    """Interrupt connections while they are made and left."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    lots = random.Random(7)
    with trimcp.blocking.connect(make_server()) as session:  # everything is imported then
        session.ping()
    for _ in range(100):
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, lots.uniform(1e-5, 1e-2), 0.2)
            with trimcp.blocking.connect(make_server()) as session:
                session.ping()
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    with trimcp.blocking.connect(make_server()) as session:
        print(session.call_tool("add", {"a": 1, "b": 2}).text, ours())
    print(ours())


def forks() -> None:
    """Go on in both processes after `os.fork`."""
    with trimcp.blocking.connect(child()) as session:
        print(session.call_tool("add", {"a": 1, "b": 2}).text, flush=True)
        pid = os.fork()
        if not pid:
            try:
                session.ping()
            except trimcp.LocalError as error:
                print(error, flush=True)
            with trimcp.blocking.connect(make_server()) as other:
                print("child", other.call_tool("add", {"a": 3, "b": 4}).text, ours(), flush=True)
        else:
            os.waitpid(pid, 0)
            print("parent", session.call_tool("add", {"a": 5, "b": 6}).text, ours(), flush=True)
    print("child" if not pid else "parent", "left", ours(), flush=True)


def forgets() -> None:
    """End without leaving a connection."""
    connection = trimcp.blocking.connect(child())
    session = connection.__enter__()
    globals()["kept"] = connection
    print(session.call_tool("add", {"a": 1, "b": 2}).text)


def run(name: str) -> list[str]:
    """Run one of these programs, and return the lines it wrote. It must end well, and in time."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        trimcp.run_stdio(make_server())
    else:
        globals()[sys.argv[1]]()
