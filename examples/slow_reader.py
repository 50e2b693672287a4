"""A slow reader beside fast ones: what it costs, what it misses, and when it is dropped and why.

    $ python examples/slow_reader.py
    $ python examples/slow_reader.py --clients 20 --seconds 30 --stall-timeout 10

A server runs in a process of its own. Some clients call a small tool as fast as they can, and one calls tools that say
much and stops reading. What to look at:

- **the others do not notice**: the slowest hundredth of their calls (p99) before and while somebody does not read;
- **it costs a bounded amount**: the server's memory (RSS) stays where it was but for the buffers of one connection;
- **what gave way is counted**, lane by lane: progress that was sent without waiting kept the latest ("merged"), log
  messages were dropped ("dropped"); results wait, and none is lost while the peer is there;
- **it ends, with a reason**: after `--stall-timeout` seconds in which it took nothing its handlers are cancelled, they
  can read why, and the server's log has one line, a security event.

Nothing here is slow by itself: the slow one sends its requests and then leaves the connection unread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import trio

import trimcp
from trimcp import Client, Context, HttpLimits, Server

ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": trimcp.LATEST.name,
    "io.modelcontextprotocol/clientInfo": {"name": "slow reader", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/logLevel": "info",
    "progressToken": "p",
}


# The server


def make_server() -> Server[None]:
    """A server with a small tool, one that says much without waiting, and one that tells how the server is."""
    server: Server[None] = Server("busy", "1")
    ends: list[str] = []

    @server.tool
    async def echo(text: str) -> str:
        """Return the text."""
        return text

    @server.tool
    async def chatter(*, ctx: Context) -> str:
        """Log and report progress without ever waiting for the reader, until stopped."""
        number = 0
        try:
            while True:
                number += 1
                ctx.log_nowait("info", f"line {number} " + "x" * 100_000)
                ctx.report_progress_nowait(number)
                await trio.sleep(0.001)
        finally:
            assert ctx.cancel_reason is not None
            ends.append(f"{ctx.cancel_reason.name}: {ctx.cancel_detail}")

    @server.tool
    async def health() -> str:
        """Tell what memory the server has, what gave way so far, and how the chatter ended, if it did."""
        lanes = server.statistics().lanes  # those of sessions that have ended among them
        counts = {"logs dropped": lanes.logs.dropped, "progress merged": lanes.progress.merged}
        return json.dumps({"memory": memory(), **counts, "ends": ends})

    return server


def memory() -> int:
    """Return the memory of this process in KiB (Linux; 0 elsewhere)."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return 0


async def serve(stall_timeout: float) -> None:
    """Serve until standard input ends; the first line of output says where."""
    stop = trio.Event()
    serving = partial(trimcp.serve_http, port=0, limits=HttpLimits(stall_timeout=stall_timeout), stop=stop, grace=1.0)
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serving, make_server())
        print(url, flush=True)
        await trio.lowlevel.wait_readable(sys.stdin.fileno())
        stop.set()


# The clients


async def call_often(url: str, seconds: float, times: list[float]) -> None:
    """Call the small tool, one call after the other, and note how long each took."""
    async with Client("fast").connect(trimcp.http(url)) as session:
        with trio.move_on_after(seconds):
            while True:
                began = trio.current_time()
                await session.call_tool("echo", {"text": "hello"})
                times.append(trio.current_time() - began)


async def stop_reading(url: str) -> trio.SocketStream:
    """Call the tool that says much, and read nothing of it."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    params = {"name": "chatter", "arguments": {}, "_meta": ENVELOPE}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).encode()
    head = (
        f"POST /mcp HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        "Accept: application/json, text/event-stream\r\n"
        f"MCP-Protocol-Version: {trimcp.LATEST.name}\r\nMcp-Method: tools/call\r\nMcp-Name: chatter\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    stream = await trio.open_tcp_stream(host, int(port))
    await stream.send_all(head.encode() + body)
    return stream


async def fast_ones(url: str, clients: int, seconds: float) -> float:
    """Let the fast ones call for a while; return what the slowest hundredth of their calls took, in milliseconds."""
    times: list[float] = []
    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(call_often, url, seconds, times)
    times.sort()
    return times[len(times) * 99 // 100] * 1_000


async def ask(url: str) -> dict[str, Any]:
    """Return what the server says of itself."""
    async with Client("watcher").connect(trimcp.http(url)) as session:
        result = await session.call_tool("health")
        found: dict[str, Any] = json.loads(result.text)
        return found


async def watch(url: str, clients: int, seconds: float) -> dict[str, Any]:
    """Run everything against one server and print what is to be seen; return how it ended."""
    before, health = await fast_ones(url, clients, seconds / 3), await ask(url)
    print(f"{clients} fast clients alone:   p99 {before:6.1f} ms, server {health['memory']:,} KiB")
    slow = await stop_reading(url)
    meanwhile, health = await fast_ones(url, clients, seconds * 2 / 3), await ask(url)
    print(f"one more that reads nothing: p99 {meanwhile:6.1f} ms, server {health['memory']:,} KiB")
    print(f"given way so far: {health['logs dropped']:,} logs dropped, {health['progress merged']:,} progress merged")
    while not health["ends"]:
        await trio.sleep(0.2)
        health = await ask(url)
    print(f"the slow one was dropped: {health['ends'][0]}")
    await trio.aclose_forcefully(slow)
    return health


async def main(clients: int, seconds: float, stall_timeout: float) -> dict[str, Any]:
    """Start the server as a child and watch it."""
    command = [sys.executable, __file__, "--serve", "--stall-timeout", str(stall_timeout)]
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process: trio.Process = await nursery.start(start)
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            url = bytes(await process.stdout.receive_some()).decode().strip()
            health = await watch(url, clients, seconds)
        finally:
            with trio.CancelScope(shield=True):  # it ends with its input; to close a pipe takes no time
                await process.stdin.aclose()
    return health


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clients", type=int, default=10, help="fast ones")
    parser.add_argument("--seconds", type=float, default=15, help="for which the fast ones call")
    parser.add_argument("--stall-timeout", type=float, default=10, help="seconds in which a client has to read")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


if __name__ == "__main__":
    options = arguments()
    if options.serve:
        trio.run(serve, options.stall_timeout)
    else:
        trio.run(main, options.clients, options.seconds, options.stall_timeout)
