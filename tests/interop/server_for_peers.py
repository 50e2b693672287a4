"""One of everything, served over stdio to clients that are not ours."""

from __future__ import annotations

import attrs
import trio

import trimcp

server = trimcp.Server("interop", version="1.0", instructions="Ask for anything.", dynamic=True)
cancelled = trio.Event()


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
async def wait_for_ever() -> str:
    """Wait until somebody cancels this call."""
    try:
        await trio.sleep_forever()
    finally:
        cancelled.set()
    return "never"


@server.tool
async def was_cancelled() -> str:
    """Answer once `wait_for_ever` was stopped."""
    await cancelled.wait()
    return "stopped"


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
    messages = [trimcp.SamplingMessage(role="user", content=trimcp.Text(question))]
    answer = await ctx.sample(trimcp.CreateMessageParams(messages=messages, max_tokens=50))
    (block,) = answer.blocks
    assert isinstance(block, trimcp.Text)
    return f"{answer.model} says {block.text}"


@server.tool
async def places(*, ctx: trimcp.Context) -> list[str]:
    """Name the places the client lets us see."""
    return [root.uri for root in await ctx.list_roots()]


@server.tool
async def grow() -> str:
    """Offer one more tool, and say that the greeting changed."""
    server.add_tool(grown)
    server.resource_updated("interop://greeting")
    return "grown"


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


if __name__ == "__main__":
    trio.run(trimcp.serve_stdio, server)
