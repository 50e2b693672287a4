"""The server that the promises are held against, run as a program; its argument is JSON, see `main`.

Its handlers write into a journal, a file with a line for each thing that happened and when, by a clock that all
processes share.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import trio

import trimcp
from tests.hostile import server_for_attack, server_over_network

__all__ = ["make_server"]


def make_server(journal: Path) -> trimcp.Server[None]:
    """The server under attack, with tools that tell how they began and how they ended."""
    server = server_for_attack.make_server()
    released: defaultdict[str, threading.Event] = defaultdict(threading.Event)
    looked_for: dict[str, trio.Event] = {}

    def note(what: str, name: str, **more: Any) -> None:
        line = json.dumps({"what": what, "name": name, "at": time.monotonic(), **more}) + "\n"
        file = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)

    async def stay(name: str, seconds: float, ctx: trimcp.Context[None]) -> str:
        """Own a file, a socket and a task of its own, and give them back however it ends."""

        async def beside() -> None:
            try:
                await trio.sleep_forever()
            finally:
                note("beside ended", name)

        with open(os.devnull), socket.socket():  # noqa: ASYNC230  # it never blocks
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(beside)
                    note("begun", name)
                    await trio.sleep(seconds)
                    nursery.cancel_scope.cancel()
                return "slept"
            finally:
                reason = ctx.cancel_reason
                note("ended", name, reason=None if reason is None else reason.name)

    @server.tool
    async def nap(name: str, seconds: float, ctx: trimcp.Context[None]) -> str:
        return await stay(name, seconds, ctx)

    @server.tool(timeout=0.3)
    async def limited(name: str, ctx: trimcp.Context[None]) -> str:
        return await stay(name, 600, ctx)

    @server.tool
    def stuck(name: str) -> str:
        """Block a thread, which nothing can stop, until `unstick`."""
        note("begun", name)
        released[name].wait(60)
        note("ended", name, reason=None)
        return "unstuck"

    @server.tool
    async def unstick(name: str) -> str:
        released[name].set()
        return "done"

    @server.tool
    async def abandoned() -> int:
        return server.statistics().abandoned_threads

    @server.tool
    async def watch(gate: str, filling: str) -> str:
        """Wait for a file, for callers who cannot say more. One of them looks for it, so that they keep nobody busy."""
        while not os.path.exists(f"{journal}.{gate}"):  # noqa: ASYNC240  # it never blocks
            if gate in looked_for:
                await looked_for[gate].wait()
                continue
            looked_for[gate] = over = trio.Event()
            try:
                while not os.path.exists(f"{journal}.{gate}"):  # noqa: ASYNC110, ASYNC240  # of files there are no events
                    await trio.sleep(0.1)
            finally:
                del looked_for[gate]
                over.set()
        return "waited"

    @server.tool
    async def freeze(name: str, seconds: float) -> str:
        note("begun", name)
        time.sleep(seconds)  # noqa: ASYNC251  # what nobody should do
        return "thawed"

    return server


def main(serve: str, journal: str, **options: Any) -> None:
    """Serve.

    Args:
        serve: "stdio", or "http" until a signal comes, or "network" as `server_over_network` does.
        journal: the file of what happens.
        options: of `run_stdio`, `run_http` or `server_over_network.main`.
    """
    server = make_server(Path(journal))
    if serve == "stdio":
        trimcp.run_stdio(server, **options)
    elif serve == "http":
        trimcp.run_http(server, port=0, ready=lambda urls: print(urls[0], flush=True), **options)
    else:
        server_over_network.log_complaints()
        trio.run(partial(server_over_network.main, lambda: server, **options))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
