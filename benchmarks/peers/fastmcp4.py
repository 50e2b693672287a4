"""The measured tools on fastmcp.

    fastmcp4.py stdio | sse | http [--reply json|sse] | memory COUNT UNDER_WAY

Its HTTP application takes no larger body than usual, so BENCH_MAX_MESSAGE changes nothing here.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("FASTMCP_LOG_LEVEL", "WARNING")
os.environ.setdefault("FASTMCP_CHECK_FOR_UPDATES", "off")

from fastmcp import Context, FastMCP
from fastmcp.tools import Tool
from serving import COUNTED, TOOLS, counts, option, serve

server = FastMCP("bench", version="1.0")


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool
async def add(a: int, b: int) -> int:
    """Return the sum."""
    return a + b


@server.tool
async def stream(n: int, ctx: Context) -> str:
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
    server.add_tool(Tool.from_function(nothing, name=f"tool_{number}"))

if COUNTED:
    server.tool()(counts)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio", show_banner=False)
    elif sys.argv[1] == "memory":
        import anyio
        from calling import call
        from fastmcp import Client

        anyio.run(call, Client(server), int(sys.argv[2]), int(sys.argv[3]))
    else:
        # As its `run` protects a server on this address; in production it recommends uvicorn and this application.
        kind, path = ("sse", "/sse") if sys.argv[1] == "sse" else ("http", "/mcp")
        json = option("--reply", "sse") == "json"
        serve(server.http_app(transport=kind, path=path, json_response=json, allowed_hosts=["127.0.0.1"]), path)
