"""On which core processes run, what they have open (Linux), and servers that are processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

__all__ = [
    "CORES",
    "LOAD_CORE",
    "SERVER_CORE",
    "descriptors",
    "kept_on",
    "listening",
    "on_core",
    "pin",
]

# Before anybody keeps this process, too, on one of them.
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = 0, 1
START_LIMIT = 60.0


def on_core(*cores: int) -> list[str]:
    """Return what keeps a command on these cores, where there are two to choose from."""
    return ["taskset", "-c", ",".join(str(CORES[core]) for core in cores)] if len(CORES) > 1 else []


@contextmanager
def kept_on(core: int) -> Iterator[None]:
    """Keep this process on one core, where there are two to choose from, as long as the block runs."""
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, CORES)


def pin(process: int, core: int) -> None:
    """Keep a process on one core, where there are two to choose from."""
    cores = sorted(os.sched_getaffinity(os.getppid()))
    if len(cores) > 1:
        os.sched_setaffinity(process, {cores[core % len(cores)]})


def descriptors(process: int) -> int:
    """How many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))


@asynccontextmanager
async def listening(command: Sequence[str | Path], environment: Mapping[str, str]) -> AsyncIterator[tuple[str, int]]:
    """Start a server that prints its URL, yield that with its process id, and stop it in the end."""
    process = await trio.lowlevel.open_process(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = b""
        with trio.fail_after(START_LIMIT):
            while not line.endswith(b"\n"):
                data = await process.stdout.receive_some()
                if not data:
                    raise AssertionError("it ended before it said its URL")
                line += data
        yield line.decode().strip(), process.pid
    finally:
        process.terminate()
        with trio.move_on_after(5, shield=True):
            await process.wait()
        process.kill()
        await process.stdout.aclose()
