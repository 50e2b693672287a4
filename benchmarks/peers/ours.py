"""The measured tools on trimcp.

ours.py stdio | sse | websocket | http [--reply json|sse|auto] [--server own|hypercorn | --workers N]
ours.py memory COUNT UNDER_WAY | client REVISION TARGET...
"""

from __future__ import annotations

import sys

from serving import BODIES, CHANGES, COUNTED, TOOLS, option

import trimcp

server = trimcp.Server("bench", version="1.0", limits=trimcp.Limits(max_message=BODIES))


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool
async def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


@server.tool
async def stream(n: int, *, ctx: trimcp.Context) -> str:
    """Report every number on the way."""
    for number in range(1, n + 1):
        await ctx.report_progress(number, n)
    return "done"


@server.resource("bench://greeting")
async def greeting() -> str:
    """Return a greeting."""
    return "hello"


@server.prompt
async def greet(name: str) -> str:
    """Ask for a greeting."""
    return f"Say hello to {name}."


async def nothing(text: str = "") -> str:
    """Return the text; one tool of many."""
    return text


for number in range(TOOLS):
    server.add_tool(nothing, name=f"tool_{number}")

if CHANGES:

    @server.tool
    async def change() -> str:
        """Tell of a change."""
        server.resource_updated("bench://greeting")
        return "changed"


if COUNTED:

    @server.tool
    async def counts() -> str:
        """Return how many blocks of memory, objects and tasks there are, after a collection of garbage."""
        import gc

        import trio

        gc.collect()
        tasks = trio.lowlevel.current_statistics().tasks_living
        return f"{sys.getallocatedblocks()} {len(gc.get_objects())} {tasks}"


def over_stdio() -> None:
    trimcp.run_stdio(server)


def by_workers(number: str) -> None:
    """Serve as the command does, which says where on standard error."""
    import os

    os.dup2(1, 2)
    words = ["-P", "-m", "trimcp.cli", "run", __file__, "--http", "--port", "0", "--workers", number]
    os.execv(sys.executable, [sys.executable, *words, "--reply", option("--reply", "auto")])


def over_network(mode: str) -> None:
    from trimcp.transports.http.settings import HttpSettings

    def ready(urls: list[str]) -> None:
        base = urls[0].removesuffix("/mcp")
        paths = {"http": f"{base}/mcp", "sse": f"{base}/sse", "websocket": f"ws{base.removeprefix('http')}/ws"}
        print(paths[mode], flush=True)

    settings = HttpSettings(reply=option("--reply", "auto"))
    software = option("--server", "own")
    trimcp.run_http(server, ready=ready, port=0, settings=settings, software=software)


async def in_memory(calls: int, under_way: int) -> None:
    from calling import turn

    async with trimcp.Client("bench", version="1.0").connect(trimcp.in_process(server)) as session:
        await turn(partial(echo_by, session), trio.open_nursery, iter(range(calls // 8)), under_way)
        found = await turn(partial(echo_by, session), trio.open_nursery, iter(range(calls)), under_way)
        print(found["wall"], found["cpu"])


async def by_client() -> None:
    from calling import REVISION, TARGET, take_turns

    target = TARGET[0] if len(TARGET) == 1 else trimcp.stdio(*TARGET)
    async with trimcp.Client("bench", version="1.0").connect(target, revision=REVISION) as session:
        await take_turns(partial(echo_by, session), trio.open_nursery, trio.to_thread.run_sync)


async def echo_by(session: trimcp.ClientSession, text: str) -> str:
    result = await session.call_tool("echo", {"text": text})
    return result.content[0].text


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        over_stdio()
    elif sys.argv[1] in ("memory", "client"):
        from functools import partial

        import trio

        main = by_client if sys.argv[1] == "client" else partial(in_memory, *map(int, sys.argv[2:]))
        trio.run(main)
    elif number := option("--workers", ""):
        by_workers(number)
    else:
        over_network(sys.argv[1])
