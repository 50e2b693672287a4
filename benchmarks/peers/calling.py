"""What the peers' clients written in Python share: calls that check every reply, and what they cost this process.

On Trio or on asyncio: whoever calls hands in its own way to open a group of tasks, and to read in a thread.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

__all__ = ["call", "called", "take_turns", "target", "turn"]

REVISION, *TARGET = sys.argv[2:] if sys.argv[1:2] == ["client"] else [""]
"""`client REVISION URL`, or `client REVISION PROGRAM WORD...` for a server over stdio."""


async def turn(
    echo: Callable[[str], Awaitable[str]], open_group: Callable[[], Any], numbers: Iterator[int], under_way: int
) -> dict[str, float]:
    """Call `echo` for each number, so many at a time; return seconds of CPU and on the clock, and latencies in ms."""
    took: list[float] = []

    async def caller() -> None:
        for number in numbers:
            text = f"hello {number}"
            began = time.perf_counter()
            found = await echo(text)
            took.append(time.perf_counter() - began)
            if found != text:
                raise AssertionError(f"wanted {text!r}, got {found!r}")

    wall, cpu = time.perf_counter(), time.process_time()
    async with open_group() as group:
        for _ in range(under_way):
            group.start_soon(caller)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    took.sort()
    latency = {f"p{share:g}": took[math.ceil(len(took) * share / 100) - 1] * 1e3 for share in (50, 99, 99.9)}
    return {"calls": len(took), "cpu": cpu, "wall": wall, **latency}


async def take_turns(
    echo: Callable[[str], Awaitable[str]], open_group: Callable[[], Any], in_thread: Callable[..., Awaitable[str]]
) -> None:
    """Say "ready", and take a turn for each line of standard input, answered by a line of JSON.

    A line is `SECONDS UNDER_WAY`, or `CALLSx UNDER_WAY`.
    """
    print("ready", flush=True)
    while line := await in_thread(sys.stdin.readline):
        amount, under_way = line.split()
        print(json.dumps(await turn(echo, open_group, _numbers(amount), int(under_way))), flush=True)


def _numbers(amount: str) -> Iterator[int]:
    if amount.endswith("x"):
        yield from range(int(amount[:-1]))
        return
    end = time.perf_counter() + float(amount)
    for number in count():
        if time.perf_counter() > end:
            return
        yield number


# Clients of the official Python SDK, and of what is built on it


def _echo(client: Any) -> Callable[[str], Awaitable[str]]:
    async def echo(text: str) -> str:
        return (await client.call_tool("echo", {"text": text})).content[0].text

    return echo


def target() -> Any:
    """Return what the command line says to connect to, as this SDK's clients want it."""
    from mcp.client.stdio import StdioServerParameters

    return TARGET[0] if len(TARGET) == 1 else StdioServerParameters(command=TARGET[0], args=TARGET[1:])


async def called(client: Any) -> None:
    """Let a client take turns."""
    import anyio

    async with client as session:
        await take_turns(_echo(session), anyio.create_task_group, anyio.to_thread.run_sync)


async def call(client: Any, calls: int, under_way: int) -> None:
    """Let a client call `echo` so often within this process, and print the wall-clock and CPU seconds that took."""
    import anyio

    async with client:
        await turn(_echo(client), anyio.create_task_group, iter(range(calls // 8)), under_way)
        found = await turn(_echo(client), anyio.create_task_group, iter(range(calls)), under_way)
        print(found["wall"], found["cpu"])
