"""The measured tools on trimcp.

ours.py stdio | sse | websocket | http [--reply json|sse|auto] [--server own|hypercorn] | memory COUNT UNDER_WAY
"""

from __future__ import annotations

import sys

from serving import BODIES, COUNTED, TOOLS, option

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
    import time

    import trio

    async with trimcp.Client("bench", version="1.0").connect(trimcp.in_process(server)) as session:

        async def caller(share: int) -> None:
            for number in range(share):
                result = await session.call_tool("echo", {"text": f"hello {number}"})
                if result.content[0].text != f"hello {number}":
                    raise AssertionError(result)

        async def callers(calls: int) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(under_way):
                    nursery.start_soon(caller, calls // under_way)

        await callers(calls // 8)
        wall, cpu = time.perf_counter(), time.process_time()
        await callers(calls)
        print(time.perf_counter() - wall, time.process_time() - cpu)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        over_stdio()
    elif sys.argv[1] == "memory":
        import trio

        trio.run(in_memory, int(sys.argv[2]), int(sys.argv[3]))
    else:
        over_network(sys.argv[1])
