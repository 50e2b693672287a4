"""One of everything, served to clients that are not ours: over stdio, or over HTTP with all that HTTP has.

    python tests/interop/server_for_peers.py own|hypercorn [stateless] [sse|json]

The first word is the host, the others how legacy clients are served and how requests are answered. Without any it
serves over stdio.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict

import attrs
import trio

import trimcp

server = trimcp.Server("interop", version="1.0", instructions="Ask for anything.", dynamic=True)

# Calls of `wait_for_ever` that were stopped, by the name the caller gave them: many clients share one server.
cancelled: defaultdict[str, trio.Event] = defaultdict(trio.Event)


@attrs.frozen
class Sum:
    """What `add` returns."""

    total: int


@server.tool
async def echo(text: str) -> str:
    """Return the text as it came.

    Args:
        text: whatever you like.
    """
    return text


@server.tool
async def add(a: int, b: int) -> Sum:
    """Add two whole numbers."""
    return Sum(a + b)


@server.tool
async def count(to: int, *, ctx: trimcp.Context) -> str:
    """Count aloud."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, total=to, message=f"now {number}")
    return "done"


@server.tool
async def fail() -> str:
    """Fail in a way the model can read."""
    raise trimcp.ToolError("no luck today")


@server.tool
async def crash() -> str:
    """Fail in a way nobody but the log may read."""
    raise RuntimeError("the password is swordfish")


@server.tool
async def large(size: int) -> str:
    """Return a text of so many characters."""
    return "x" * size


@server.tool
async def wait_for_ever(name: str = "", *, ctx: trimcp.Context) -> str:
    """Say that it waits, and wait until somebody cancels this call."""
    await ctx.report_progress(1, message="waiting")
    try:
        await trio.sleep_forever()
    finally:
        cancelled[name].set()
    return "never"


@server.tool
async def was_cancelled(name: str = "") -> str:
    """Answer once the call of `wait_for_ever` with this name was stopped."""
    await cancelled[name].wait()
    return "stopped"


@server.tool
async def poll(*, ctx: trimcp.Context) -> str:
    """Let go of the connection in the middle, so that the client has to come back for the rest."""
    await ctx.report_progress(1, message="before")
    ctx.close_stream()
    await ctx.report_progress(2, message="after")
    return "done"


@server.tool
async def lose_connection(*, ctx: trimcp.Context) -> str:
    """Say the word at which a relay cuts the connection, and more that is lost on the way."""
    await ctx.report_progress(1, message="cut-here")
    await ctx.report_progress(2, message="after")
    return "done"


@server.tool
async def warn(text: str, *, ctx: trimcp.Context) -> str:
    """Send a log message before the answer."""
    await ctx.log("warning", text)
    return "warned"


@server.tool
async def greet(*, ctx: trimcp.Context) -> str:
    """Ask the user for a name, then for a colour."""
    name = await ctx.elicit("Your name?", {"type": "object", "properties": {"name": {"type": "string"}}})
    if not name.content:
        return "nobody"
    colour = await ctx.elicit("Your colour?", {"type": "object", "properties": {"colour": {"type": "string"}}})
    return f"{name.content['name']} likes {colour.content['colour']}" if colour.content else "no colour"


@server.tool
async def think(question: str, *, ctx: trimcp.Context) -> str:
    """Let the client's model answer."""
    messages = [trimcp.wire.SamplingMessage(role="user", content=trimcp.Text(question))]
    answer = await ctx.sample(trimcp.CreateMessageParams(messages=messages, max_tokens=50))
    (block,) = answer.blocks
    assert isinstance(block, trimcp.Text)
    return f"{answer.model} says {block.text}"


@server.tool
async def places(*, ctx: trimcp.Context) -> list[str]:
    """Name the places the client lets us see."""
    return [root.uri for root in await ctx.list_roots()]


@server.tool
async def grow(name: str) -> str:
    """Offer one more tool, and say that the greeting changed."""
    server.add_tool(grown, name=name)
    server.resource_updated("interop://greeting")
    return "grown"


@server.tool
async def touch(name: str) -> str:
    """Say that an item changed."""
    server.resource_updated(f"interop://items/{name}")
    return "touched"


async def grown() -> str:
    """A tool that was not there at first."""
    return "new"


@server.resource("interop://greeting", mime_type="text/plain")
async def greeting() -> str:
    """A text that never changes."""
    return "hello"


@server.resource("interop://bytes", mime_type="application/octet-stream")
async def some_bytes() -> bytes:
    """What is no text."""
    return bytes(range(256))


@server.resource("interop://items/{name}", mime_type="text/plain")
async def item(name: str) -> str:
    """One item of a set nobody lists."""
    return f"item {name}"


@server.prompt
async def review(path: str) -> str:
    """Ask for a review of one file."""
    return f"Please review {path}."


@server.complete(review, "path")
async def complete_path(value: str) -> list[str]:
    """The paths that begin with what was typed."""
    return [path for path in ("readme.md", "setup.py", "setup.cfg") if path.startswith(value)]


def serve(software: str, *settings_of: str) -> None:
    """Serve over HTTP on a free port, print where, and note every response on stderr."""
    (reply,) = [word for word in settings_of if word != "stateless"] or ["auto"]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    stateless = "stateless" in settings_of
    settings = trimcp.HttpSettings(access_log=trimcp.AccessLog(), retry=100, stateless=stateless, reply=reply)
    trimcp.run_http(server, port=0, settings=settings, software=software, ready=lambda urls: print(*urls, flush=True))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(*sys.argv[1:])
    else:
        trio.run(trimcp.serve_stdio, server)
