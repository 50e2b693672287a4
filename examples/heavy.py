"""Heavy work in processes of its own, killed in the middle: cancelled, out of time, out of memory, crashed.

Watch it:     python examples/heavy.py                 (a client and a server, six scenes, some ten seconds)
Serve it:     trimcp run examples/heavy.py --watchdog 30
By hand:      trimcp call examples/heavy.py factorize number=1000000016000000063    (and then Ctrl-C)

What to look at:

- `factorize` computes without a pause, in pure Python. In the event loop it would stop the server, in a thread it would
  slow everybody down and could not be stopped. With `run="process"` the server answers others in a millisecond
  meanwhile, and a cancelled call has no process any more a few milliseconds later.
- Its progress comes out of the process while it works; a client that reads slowly slows it down, and nothing is lost.
- What ends a worker is told to the model as a tool error, in a word or two: its time, its memory, its crash. The log of
  the server has the rest. The next call gets another process.
- Four calls at once have two processes here (`max_processes`); the others wait for their turn. Idle ones are kept, so
  that only the first call pays for the start.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import trio

import trimcp

HARD = 1_000_000_016_000_000_063  # the product of two primes near 10**9
EASY = 1_000_036_000_099  # and of two near 10**6

server = trimcp.Server("heavy", version="1.0", max_processes=2)


@server.tool(run="process", timeout=600, memory=2 * 2**30)
def factorize(
    number: Annotated[int, trimcp.Arg("What to take apart", ge=2)], *, ctx: trimcp.ThreadContext
) -> dict[str, object]:
    """Find the smallest factor of a number by trying them all."""
    last = math.isqrt(number)
    for block in range(2, last + 1, 100_000):
        ctx.report_progress(block, last, f"tried all below {block:,}")
        for candidate in range(block, min(block + 100_000, last + 1)):
            if number % candidate == 0:
                return {"factor": candidate, "process": os.getpid()}
    return {"factor": number, "process": os.getpid()}


@server.tool(run="process", timeout=2)
def factorize_quickly(number: int) -> int:
    """The same, within two seconds."""
    return next(candidate for candidate in range(2, math.isqrt(number) + 1) if number % candidate == 0)


@server.tool(run="process", memory=512 * 2**20)
def remember_everything() -> str:
    """Take memory until there is no more."""
    pieces = []
    while True:
        pieces.append(bytearray(2**20))


@server.tool(run="process")
def crash() -> str:
    """Do what a bug in a compiled library does."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return "never"


@server.tool
async def ping() -> str:
    """Answer at once."""
    return "pong"


# A client that shows it


async def pings(session: trimcp.ClientSession, seconds: float) -> list[float]:
    """Return how long each of some pings took, one after the other, in milliseconds."""
    took = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        await session.call_tool("ping")
        took.append(1000 * (time.perf_counter() - begun))
        await trio.sleep(0.01)
    return sorted(took)


def exists(process: int) -> bool:
    """Return whether there is such a process."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def show_cancelling(session: trimcp.ClientSession) -> None:
    """Begin what would take minutes, ping meanwhile, and give up."""
    async with trio.open_nursery() as nursery:
        steps: list[str] = []

        async def work() -> None:
            async with session.calling("factorize", {"number": HARD}) as call:
                async for step in call.progress:
                    steps.append(step.message or "")  # noqa: PERF401 -- it is looked at meanwhile

        nursery.start_soon(work)
        took = await pings(session, 2)
        busy = worker_processes()
        print(f"   {len(steps)} reports of progress, the last one: {steps[-1]}")
        half, all_ = took[len(took) // 2], took[-1]
        print(f"   {len(took)} pings meanwhile: half of them within {half:.1f} ms, all within {all_:.1f} ms")
        begun = time.perf_counter()
        nursery.cancel_scope.cancel(reason="it takes too long")
        # We are in what was cancelled, and stay to watch, for ten seconds at the most.
        with trio.CancelScope(shield=True), trio.fail_after(10):
            while any(map(exists, busy)):  # noqa: ASYNC110 -- the system is asked
                await trio.sleep(0.001)
        print(f"   cancelled: {len(busy)} process(es) gone after {1000 * (time.perf_counter() - begun):.1f} ms")


def children_of(process: int) -> list[int]:
    """Return the children of a process, where the system tells (Linux): each of its threads may have some."""
    found = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        found += [int(word) for word in file.read_text().split()]
    return found


def worker_processes() -> list[int]:
    """Return the children of the server, which is our own child."""
    return [worker for child in children_of(os.getpid()) for worker in children_of(child)]


async def show_a_call(session: trimcp.ClientSession, name: str, arguments: Mapping[str, object] | None = None) -> None:
    """Call a tool and print what its result says."""
    begun = time.perf_counter()
    result = await session.call_tool(name, arguments)
    said = "error" if result.is_error else "result"
    print(f"   {said} after {time.perf_counter() - begun:.2f} s: {' '.join(result.text.split())}")


async def main() -> None:
    """Start the server as a child process and show one scene after the other."""
    lines: list[str] = []
    target = trimcp.stdio(sys.executable, "-m", "trimcp.cli", "run", __file__, on_stderr=lines.append)
    async with trimcp.Client("heavy-demo").connect(target) as session:
        print("1. an easy one, twice: the first call starts a process, the second one finds it")
        for _ in range(2):
            await show_a_call(session, "factorize", {"number": EASY})
        print("2. a hard one, cancelled in the middle")
        await show_cancelling(session)
        print("3. a hard one that has two seconds")
        await show_a_call(session, "factorize_quickly", {"number": HARD})
        print("4. one that needs too much memory")
        await show_a_call(session, "remember_everything")
        print("5. one that crashes")
        await show_a_call(session, "crash")
        print("6. four easy ones at once, with two processes")
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(show_a_call, session, "factorize", {"number": EASY})
        left = worker_processes()
    print(f"the server has ended; of its {len(left)} processes are left: {sum(map(exists, left))}")
    print(f"and its log said {sum('the worker process' in line for line in lines)} times what ended a worker")


if __name__ == "__main__":
    trio.run(main)
