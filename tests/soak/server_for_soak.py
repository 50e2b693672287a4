"""The server that is soaked, run as a program: over the network with JSON options, over stdio with the word `stdio`."""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import trio

import trimcp
from tests.hostile import server_for_attack, server_over_network


def make_server() -> trimcp.Server[None]:
    """The server under attack, with tools that wait in threads and change its lists."""
    server = server_for_attack.make_server()

    @server.tool
    def nap(seconds: float = 0.005) -> str:
        time.sleep(min(seconds, 0.1))
        return "slept"

    @server.tool
    async def change() -> str:
        async def fleeting() -> str:
            return "gone soon"

        server.add_tool(fleeting)
        server.remove_tool("fleeting")
        server.resource_updated("note://x")
        return "changed"

    return server


def children() -> int:
    """How many child processes this one has."""
    return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))


def extra() -> dict[str, int]:
    """What is counted of a process besides what `server_over_network` counts."""
    return {"threads": threading.active_count(), "children": children()}


def main() -> None:
    server_over_network.log_complaints()
    if sys.argv[1] == "stdio":
        trimcp.run_stdio(make_server())
    else:
        trio.run(partial(server_over_network.main, make_server, extra, **json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
