"""The server under attack, run as a program; its argument is JSON with `grace`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections import defaultdict
from typing import Any

import trio

import trimcp


def give_back() -> None:
    """Give the system what the C library keeps free for later.

    How much that is depends on how large messages met by chance, and it hides what really was kept: in one run 20,000
    mutated conversations over WebSocket let it grow by 3.5 MiB, and what was kept by one.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def make_server(**options: Any) -> trimcp.Server[None]:
    """A server whose tools do what hurts."""
    server: trimcp.Server[None] = trimcp.Server("target", dynamic=True, **options)
    released = threading.Event()
    gates: defaultdict[str, trio.Event] = defaultdict(trio.Event)

    @server.tool
    async def echo(text: str = "") -> str:
        return text

    @server.tool
    async def hang() -> str:
        await trio.sleep_forever()
        return "never"

    @server.tool
    async def keep(text: str) -> str:
        await trio.sleep_forever()
        return text

    @server.tool
    async def wait(gate: str) -> str:
        await gates[gate].wait()
        return "waited"

    @server.tool
    async def open(gate: str) -> str:
        gates.pop(gate).set()
        return "open"

    @server.tool
    async def big(size: int) -> str:
        return "x" * size

    @server.tool
    async def late(size: int, gate: str) -> str:
        await gates[gate].wait()
        return "x" * size

    @server.tool
    async def stream(count: int, size: int = 100, *, ctx: trimcp.Context) -> str:
        for n in range(count):
            await ctx.report_progress(n + 1, message="p" * size)
        return "streamed"

    @server.tool
    async def chatter(count: int, size: int = 100, *, ctx: trimcp.Context) -> str:
        for _ in range(count):
            await ctx.info("l" * size)
        return "said"

    @server.tool
    def block() -> str:
        released.wait(60)
        return "released"

    @server.tool
    async def release() -> str:
        """Let those go on that are blocked now."""
        nonlocal released
        released.set()
        released = threading.Event()
        return "done"

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> str:
        answer = await ctx.elicit("name?", trimcp.form(str, name="name"))
        return str(answer)

    @server.tool
    async def crash() -> str:
        raise RuntimeError("secret of the handler")

    @server.tool
    async def statistics(kept: bool = False, *, ctx: trimcp.Context) -> str:
        session, _ = ctx.internals
        gc.collect()
        if kept:
            give_back()
        counts = {
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "files": len(os.listdir("/proc/self/fd")),
            "running": session.statistics().running,
        }
        return json.dumps(counts)

    @server.resource("note://{name}")
    async def note(name: str) -> str:
        return name

    @server.prompt
    async def review(path: str) -> str:
        return path

    return server


def main(options: dict[str, Any]) -> None:
    trimcp.run_stdio(make_server(), **options)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
