"""What the servers made with other people's Python SDKs offer alike. It runs in their environments, not in ours.

No `from __future__ import annotations` here: the SDKs read the annotations.
"""

from collections import defaultdict
from typing import Any

import anyio
from pydantic import BaseModel


class Name(BaseModel):
    """A form of one field."""

    name: str


class Colour(BaseModel):
    """Another."""

    colour: str


class Sum(BaseModel):
    """A structured result."""

    total: int


# Calls of `wait_for_ever` that were stopped, by the name the caller gave them.
cancelled: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)


async def grown() -> str:
    """A tool that was not there at first."""
    return "new"


def offer(server: Any, context: Any, error: type[Exception]) -> None:
    """Give a server the tools, resources and the prompt; `context` and `error` are the SDK's own classes."""

    @server.tool()
    async def add(a: int, b: int) -> Sum:
        """Return a structured result."""
        return Sum(total=a + b)

    @server.tool()
    async def count(to: int, ctx: context) -> str:
        """Report progress."""
        for number in range(1, to + 1):
            await ctx.report_progress(number, to, f"now {number}")
        return "done"

    @server.tool()
    async def warn(text: str, ctx: context) -> str:
        """Send a log message."""
        await ctx.warning(text)
        return "warned"

    @server.tool()
    async def fail() -> str:
        """Fail in a way the model can read."""
        raise error("no luck today")

    @server.tool()
    async def large(size: int) -> str:
        """Return a text of so many characters."""
        return "x" * size

    @server.tool()
    async def wait_for_ever(name: str, ctx: context) -> str:
        """Say that it waits, and wait until somebody cancels this call."""
        await ctx.report_progress(1, message="waiting")
        try:
            await anyio.sleep_forever()
        finally:
            cancelled[name].set()
        return "never"

    @server.tool()
    async def was_cancelled(name: str) -> str:
        """Answer once the call of `wait_for_ever` with this name was stopped."""
        await cancelled[name].wait()
        return "stopped"

    @server.tool()
    async def poll(ctx: context) -> str:
        """Let go of the connection in the middle, so that the client has to come back for the rest."""
        await ctx.report_progress(1, message="before")
        await ctx.close_sse_stream()
        await ctx.report_progress(2, message="after")
        return "done"

    @server.tool()
    async def lose_connection(ctx: context) -> str:
        """Say the word at which a relay cuts the connection, and more that is lost on the way."""
        await ctx.report_progress(1, message="cut-here")
        await ctx.report_progress(2, message="after")
        return "done"

    @server.resource("peer://greeting")
    async def greeting() -> str:
        """A text."""
        return "hello"

    @server.resource("peer://items/{name}")
    async def item(name: str) -> str:
        """One of a family."""
        return f"item {name}"

    @server.prompt()
    async def review(path: str) -> str:
        """Ask for a review."""
        return f"Please review {path}."


def paths(beginning: str) -> list[str]:
    """What completes the argument of the prompt."""
    return [path for path in ("setup.py", "setup.cfg") if path.startswith(beginning)]
