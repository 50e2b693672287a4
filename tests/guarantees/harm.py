"""Servers that mean harm to our client: a child, and one on the network."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx2
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.hostile import server_for_clients
from tests.peers.processes import ENVIRONMENT, MIB
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.revisions import V2025_11_25

LIMIT = 4 * MIB

OnEngines = pytest.mark.parametrize("engine", ["own", "httpx2"])
"""What carries the requests of a client over HTTP."""

_SERVER = """
import json, os, random, sys
out = sys.stdout.buffer

def say(message):
    out.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n")
    out.flush()

def tell(method, **params):
    say({"method": method, "params": params})

OFFERS = {"tools": {}, "logging": {}}
for line in sys.stdin.buffer:
    message = json.loads(line)
    id, params = message.get("id"), message.get("params") or {}
    if message.get("method") == "initialize":
        hello = {"protocolVersion": "2025-11-25", "capabilities": OFFERS, "serverInfo": {"name": "h", "version": "1"}}
        say({"id": id, "result": hello})
    elif message.get("method") == "server/discover":
        say({"id": id, "error": {"code": -32601, "message": "no"}})
    elif "method" in message and id is not None:
        token = params.get("_meta", {}).get("progressToken")
        last = {"id": id, "result": {"content": []}}
"""

PROGRESS = """
        for n in range(200_000):
            line = {"jsonrpc": "2.0", "method": "notifications/progress",
                    "params": {"progressToken": token, "progress": n, "message": "m"}}
            out.write(json.dumps(line).encode() + b"\\n")
        say(last)
"""

LARGE_PROGRESS = """
        for n in range(100):
            tell("notifications/progress", progressToken=token, progress=n, message="x" * 2_000_000)
        say(last)
"""

LARGE_LOGS = """
        for n in range(100):
            tell("notifications/message", level="info", data="x" * 2_000_000)
        say(last)
"""

GARBAGE = """
        for n in range(2_000):
            out.write(b"Listening... \\xff\\xfe {[\\n")
        out.write(b"x" * (70 * 1024 * 1024) + b"\\n")
        say(last)
"""

TOO_LARGE = """
        out.write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % id)
        out.write(b"x" * (70 * 1024 * 1024) + b'"}]}}\\n')
        out.flush()
        tell("notifications/message", level="info", data="still here")
"""

MUTATIONS = """
        rng = random.Random(20_000)
        seeds = [
            {"id": id, "result": {"content": [{"type": "text", "text": "x"}]}},
            {"id": "q", "method": "roots/list"},
            {"id": 10**6, "error": {"code": -32600, "message": "x", "data": {}}},
            {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}},
            {"method": "notifications/message", "params": {"level": "info", "data": {"a": [1]}}},
            {"method": "notifications/tools/list_changed"},
            {"method": "notifications/cancelled", "params": {"requestId": "q"}},
        ]
        for n in range(20_000):
            data = bytearray(json.dumps({"jsonrpc": "2.0", **rng.choice(seeds[1:])}).encode())
            for _ in range(rng.randrange(1, 4)):
                place = rng.randrange(len(data))
                if rng.random() < 0.5:
                    data[place] = rng.randrange(256)
                else:
                    data[place : place + rng.randrange(1, 8)] = rng.choice([b"", b"null", b"[]", b"1e999", b"\\xff"])
            out.write(bytes(data).replace(b"\\n", b" ") + b"\\n")
            out.flush()
        say(last)
"""


def hostile(tail: str) -> trimcp.StdioServer:
    return trimcp.stdio(sys.executable, "-c", textwrap.dedent(_SERVER) + tail)


@contextmanager
def harmful_server() -> Iterator[int]:
    """Start a server that means harm, and yield its port."""
    command = [sys.executable, server_for_clients.__file__]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=ENVIRONMENT, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def seen(port: int) -> dict[str, int]:
    """What the server has seen of its clients since it was asked last."""
    async with httpx2.AsyncClient() as client:
        counts: dict[str, int] = (await client.get(f"http://127.0.0.1:{port}/seen")).json()
        return counts


def a_client() -> trimcp.Client:
    return trimcp.Client("c", limits=trimcp.Limits(max_message=LIMIT))


@asynccontextmanager
async def session_with(port: int, way: str, engine: str = "own", **options: Any) -> AsyncIterator[trimcp.ClientSession]:
    """A session with the server, which does this to a call of its tool `harm` and serves any other.

    Its requests are carried by the client's own engine, or by "httpx2".
    """
    async with httpx2.AsyncClient() as client:
        theirs = client if engine == "httpx2" else None
        server = HttpServer(f"http://127.0.0.1:{port}/{way}", {"x-port": str(port)}, client=theirs, **options)
        with trio.fail_after(PATIENCE):
            async with a_client().connect(server, revision=V2025_11_25) as session:
                await session.call_tool("fine")
                yield session
