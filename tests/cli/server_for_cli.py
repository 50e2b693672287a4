"""A server for the command's tests, with something to wait for, to be asked and to fail."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Any

import trio

import trimcp

server = trimcp.Server("for the command", "1.0", instructions="Be \x1b[31mkind\x1b[0m.")


def note(file: str, line: str) -> None:
    with Path(file).open("a") as log:
        log.write(line + "\n")


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@server.tool
def add(a: int, b: float = 0.5, *, size: Size = Size.SMALL, tags: list[str] | None = None, loud: bool = False) -> str:
    """Add two numbers."""
    return f"{a + b} {size.value} {tags} {loud}"


@server.tool
async def slow(file: str, ctx: trimcp.Context[Any]) -> str:
    """Write a line when it begins and when it ends, a minute later or cancelled."""
    try:
        await ctx.report_progress(1, 10, "half \x1b]0;title\x07 way")
        note(file, "begun")
        await trio.sleep(60)
        return "slept"
    finally:
        note(file, f"ended: {ctx.cancel_reason.value if ctx.cancel_reason else 'by itself'}")


@server.tool
async def stubborn(file: str) -> str:
    """Take its time to end when it is cancelled."""
    note(file, "begun")
    try:
        await trio.sleep(60)
    finally:
        note(file, "holding on")
        with trio.CancelScope(shield=True):
            await trio.sleep(3)
    return "slept"


@server.tool
async def short(file: str, seconds: float) -> str:
    """Write a line, work for a moment, answer."""
    note(file, "begun")
    await trio.sleep(seconds)
    return "finished in time"


@server.tool
async def ask(ctx: trimcp.Context[Any]) -> str:
    """Ask for a name."""
    result = await ctx.elicit("Who?", {"type": "object", "properties": {"name": {"type": "string"}}})
    return result.action


@server.tool
async def chatter(ctx: trimcp.Context[Any]) -> str:
    """Log, print and answer, all of it hostile."""
    await ctx.log("warning", "careful \x1b[2J", logger="a\u202eb")
    print("a stray print \x1b[31m", file=sys.stderr)
    return "[bold]plain[/bold] \x9b31m text"


@server.tool
async def fail() -> str:
    """Fail as a tool does."""
    raise trimcp.ToolError("it did \x1b[5mnot work")


@server.resource("notes:///today", mime_type="text/plain")
def today() -> str:
    """What is to be done."""
    return "milk \x07\nbread"


@server.prompt
def greet(name: str, tone: str = "warm") -> str:
    """Greet somebody."""
    return f"Greet {name}, {tone}."


@server.complete("greet", "name")
def people(typed: str) -> list[str]:
    """Suggest whom to greet."""
    return ["Ada", "Grace\x1b[2J"]


def make() -> trimcp.Server[None]:
    return server


if __name__ == "__main__":
    trimcp.run_stdio(server)
