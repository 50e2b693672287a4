"""Our client, soaked in a process of its own: it connects, calls and leaves over every road, over and over.

Its argument is the server's URL. For each line on standard input it writes one with what it counts of itself. It begins
with the line `start`; after the line `stop` it leaves everything and goes on counting until its input ends.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
from collections import Counter
from typing import Any

import trio

import trimcp
from tests.soak import server_for_soak
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2025_03_26, Revision

done = trio.Event()
seen: Counter[str] = Counter()


class LeavesInTheMiddle(Exception):
    """Ends a session from within."""


def make_client() -> trimcp.Client:
    client = trimcp.Client("soaked")

    @client.elicitation
    async def ask(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="accept", content={"name": "n"})

    @client.logging
    async def log(params: trimcp.wire.LoggingMessageParams) -> None:
        seen["logs"] += 1

    client.set_roots(["file:///a"])
    return client


async def again(make: Any, revision: Revision | None, rng: random.Random, most: int) -> None:
    """Connect, call for a while, and leave in one of several ways."""
    client = make_client()
    while not done.is_set():
        try:
            async with client.connect(make(), revision=revision) as session:
                seen["connections"] += 1
                for _ in range(rng.randrange(1, most)):
                    with trio.fail_after(60):  # nothing hangs
                        await one(session, rng)
                    if done.is_set():
                        break
                if rng.random() < 0.1:
                    raise LeavesInTheMiddle
        except LeavesInTheMiddle:
            pass
        except (trimcp.ConnectionLost, trimcp.Overloaded) as error:
            seen[type(error).__name__] += 1
        await trio.sleep(rng.random() * 0.05)


async def one(session: trimcp.ClientSession, rng: random.Random) -> None:
    """One call, or something like it."""
    kind = rng.random()
    seen["calls"] += 1
    try:
        if kind < 0.4:
            for _ in range(10):
                seen["calls"] += 1
                await session.call_tool("echo", {"text": "x" * rng.choice([1, 1_000, 20_000])})
        elif kind < 0.5:
            with trio.move_on_after(rng.random() * 0.02):
                await session.call_tool("hang")
        elif kind < 0.6:
            async with session.calling("stream", {"count": rng.randrange(1, 30)}) as call:
                if rng.random() < 0.7:
                    await call.result()
                    seen["progress"] += len([each async for each in call.progress])
        elif kind < 0.7:
            await session.call_tool("ask")
        elif kind < 0.75:
            async with session.listen(tools=True, resources=["note://x"]) as changes:
                await session.call_tool("change")
                with trio.move_on_after(0.5):
                    async for _ in changes:
                        seen["changes"] += 1
                        break
        else:
            rest = [("crash", {}), ("nap", {}), ("big", {"size": 200_000}), ("chatter", {"count": 5}), ("none", {})]
            await session.call_tool(*rng.choice(rest))
            await session.list_tools(fresh=rng.random() < 0.5)
            await session.read_resource("note://y")
    except trimcp.RemoteError as error:
        seen[f"error {error.code}"] += 1


def counts() -> dict[str, int]:
    gc.collect()
    return {
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "files": len(os.listdir("/proc/self/fd")),
        **server_for_soak.extra(),
    }


async def main(url: str, seed: int) -> None:
    own = trimcp.stdio(sys.executable, "-m", "tests.soak.server_for_soak", "stdio")
    socket = url.replace("http", "ws", 1).replace("/mcp", "/ws")
    stream = url.replace("/mcp", "/sse")
    ways: list[tuple[Any, Revision | None, int]] = [
        (lambda: trimcp.http(url), LATEST, 60),
        (lambda: trimcp.http(url), LATEST_LEGACY, 60),
        (lambda: trimcp.http(url), V2025_03_26, 60),
        (lambda: trimcp.http(stream, mode="sse"), None, 60),
        (lambda: trimcp.websocket(socket), LATEST, 60),
        (lambda: trimcp.websocket(socket), LATEST_LEGACY, 60),
        (lambda: own, None, 200),
    ]
    async with trio.open_nursery() as nursery:

        async def soak() -> None:
            async with trio.open_nursery() as agents:
                for n, (make, revision, most) in enumerate(ways):
                    agents.start_soon(again, make, revision, random.Random(seed + n), most)

        commands = trio.lowlevel.FdStream(os.dup(0))
        async with commands:
            while line := await commands.receive_some():
                if b"start" in line:
                    nursery.start_soon(soak)
                if b"stop" in line:
                    done.set()
                print(json.dumps({"counts": counts(), "seen": seen}), flush=True)
            done.set()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    trio.run(main, sys.argv[1], int(sys.argv[2]))
