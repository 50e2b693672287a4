"""The measured tools on the MCPServer of the official Python SDK, version 2.

official.py stdio | sse | http [--reply json|sse] | memory COUNT UNDER_WAY | client REVISION TARGET...
"""

from __future__ import annotations

import sys

from mcp.server.mcpserver import Context, MCPServer
from serving import BODIES, COUNTED, TOOLS, counts, option, serve

server = MCPServer("bench", version="1.0", log_level="WARNING")


@server.tool()
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool()
async def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


@server.tool()
async def stream(n: int, ctx: Context) -> str:
    """Report every number on the way."""
    for number in range(1, n + 1):
        await ctx.report_progress(number, n)
    return "done"


@server.resource("bench://greeting")
async def greeting() -> str:
    """Return a greeting."""
    return "hello"


@server.prompt()
async def greet(name: str) -> str:
    """Ask for a greeting."""
    return f"Say hello to {name}."


async def nothing(text: str = "") -> str:
    """Return the text; one tool of many."""
    return text


for number in range(TOOLS):
    server.add_tool(nothing, name=f"tool_{number}")

if COUNTED:
    server.tool()(counts)


if __name__ == "__main__":
    sizes = {} if BODIES is None else {"max_request_body_size": BODIES}
    if sys.argv[1] == "stdio":
        server.run("stdio")
    elif sys.argv[1] == "http":
        serve(server.streamable_http_app(json_response=option("--reply", "sse") == "json", **sizes), "/mcp")
    elif sys.argv[1] == "sse":
        serve(server.sse_app(**sizes), "/sse")
    else:
        import anyio
        from calling import REVISION, call, called, target
        from mcp import Client

        if sys.argv[1] == "client":
            anyio.run(called, Client(target(), mode="legacy" if REVISION < "2026" else REVISION))
        else:
            anyio.run(call, Client(server), int(sys.argv[2]), int(sys.argv[3]))
