"""Servers for the load's tests, over stdio: a right one of this package, and ones that go wrong as they are told.

python server_for_bench.py right
python server_for_bench.py KIND        KIND says what a call gets from a server that has no library
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import trio

import trimcp

server = trimcp.Server("right", version="1.5")


@server.tool
async def echo(text: str) -> str:
    """Return the text."""
    return text


@server.tool
async def slow(seconds: float) -> str:
    """Answer after a while."""
    await trio.sleep(seconds)
    return "done"


@server.tool
async def stream(n: int, *, ctx: trimcp.Context[Any]) -> str:
    """Report every number on the way."""
    for number in range(1, n + 1):
        await ctx.report_progress(number, n)
    return "done"


@server.tool
async def fail(text: str) -> str:
    """Fail."""
    raise trimcp.ToolError(text)


@server.resource("bench://greeting")
async def greeting() -> str:
    """Return a greeting."""
    return "hello"


TOOLS = [{"name": "echo", "inputSchema": {"type": "object", "required": ["text"]}}]


def wrong(kind: str) -> None:
    """Shake hands properly, then answer calls in some wrong way."""
    calls = 0
    for line in sys.stdin:
        request = json.loads(line)
        id, method = request.get("id"), request["method"]
        if method == "initialize":
            version = request["params"]["protocolVersion"]
            info = {"name": "wrong", "version": "0"}
            say(id, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            say(id, {"tools": TOOLS})
        elif method == "tools/call":
            calls += 1
            answer(kind, calls, id, request["params"]["arguments"]["text"])
        elif id is not None:
            write({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no"}})


def answer(kind: str, calls: int, id: object, text: str) -> None:
    right = {"content": [{"type": "text", "text": text}]}
    if kind == "mixed":
        kind = ("right", "text", "error", "twice", "is_error", "garbage")[calls % 6]
    if kind == "silence" or (kind == "garbage" and write("this is no JSON")):
        return
    if kind == "dying" and calls > 5:
        print("I am dying of a call", file=sys.stderr, flush=True)
        os._exit(3)
    if kind == "deaf" and calls > 5:
        os.close(1)
        sys.stdin.read()
    if kind == "error":
        write({"jsonrpc": "2.0", "id": id, "error": {"code": -32603, "message": "boom"}})
    elif kind == "is_error":
        say(id, {**right, "isError": True})
    else:
        say(id, {"content": [{"type": "text", "text": "\x1b[31mwrong"}]} if kind == "text" else right)
        if kind == "twice":
            say(id, right)


def say(id: object, result: dict[str, Any]) -> None:
    write({"jsonrpc": "2.0", "id": id, "result": result})


def write(message: object) -> bool:
    print(message if isinstance(message, str) else json.dumps(message), flush=True)
    return True


if __name__ == "__main__":
    if sys.argv[1] == "right":
        trimcp.run_stdio(server)
    else:
        wrong(sys.argv[1])
