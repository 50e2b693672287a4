"""A server made with the official Python SDK, for what the ready-made ones cannot show: questions since 2026-07-28.

No `from __future__ import annotations` here: the SDK reads the annotations.
"""

import warnings
from typing import Annotated

import anyio
import mcp_types as t
from mcp import MCPDeprecationWarning
from mcp.server.mcpserver import Context, Elicit, ElicitationResult, ListRoots, MCPServer, Resolve, Sample
from pydantic import BaseModel

# Logging is deprecated there, and what it warns of would end up among its log lines.
warnings.simplefilter("ignore", MCPDeprecationWarning)

server = MCPServer("official", version="1.0", instructions="Ask for anything.")


class Name(BaseModel):
    """A form of one field."""

    name: str


class Colour(BaseModel):
    """Another."""

    colour: str


class Sum(BaseModel):
    """A structured result."""

    total: int


async def ask_name() -> Elicit[Name]:
    """Ask first."""
    return Elicit("Your name?", Name)


async def ask_colour(name: Annotated[Name, Resolve(ask_name)]) -> Elicit[Colour]:
    """Ask once the name is known."""
    return Elicit(f"Your colour, {name.name}?", Colour)


async def ask_model() -> Sample:
    """Ask the client's model."""
    content = t.TextContent(type="text", text="six by nine?")
    return Sample([t.SamplingMessage(role="user", content=content)], max_tokens=50)


async def ask_roots() -> ListRoots:
    """Ask where the client works."""
    return ListRoots()


@server.tool()
async def greet(name: Annotated[Name, Resolve(ask_name)], colour: Annotated[Colour, Resolve(ask_colour)]) -> str:
    """Ask two questions, the second after the first."""
    return f"{name.name} likes {colour.colour}"


@server.tool()
async def outcome(name: Annotated[ElicitationResult[Name], Resolve(ask_name)]) -> str:
    """Tell what the user did."""
    return name.action


@server.tool()
async def everything_at_once(
    name: Annotated[Name, Resolve(ask_name)],
    thought: Annotated[t.CreateMessageResult, Resolve(ask_model)],
    roots: Annotated[t.ListRootsResult, Resolve(ask_roots)],
) -> str:
    """Ask three things in one round."""
    assert isinstance(thought.content, t.TextContent)
    return f"{name.name}, {thought.content.text}, {', '.join(str(root.uri) for root in roots.roots)}"


@server.tool()
async def add(a: int, b: int) -> Sum:
    """Return a structured result."""
    return Sum(total=a + b)


@server.tool()
async def count(to: int, ctx: Context) -> str:
    """Report progress."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"now {number}")
    return "done"


@server.tool()
async def warn(text: str, ctx: Context) -> str:
    """Send a log message."""
    await ctx.warning(text)
    return "warned"


cancelled = anyio.Event()


@server.tool()
async def wait_for_ever() -> str:
    """Wait until somebody cancels this call."""
    try:
        await anyio.sleep_forever()
    finally:
        cancelled.set()
    return "never"


@server.tool()
async def was_cancelled() -> str:
    """Answer once `wait_for_ever` was stopped."""
    await cancelled.wait()
    return "stopped"


@server.tool()
async def grow(ctx: Context) -> str:
    """Offer one more tool, and say so."""
    server.add_tool(grown)
    await ctx.notify_tools_changed()
    await ctx.notify_resource_updated("official://greeting")
    return "grown"


async def grown() -> str:
    """A tool that was not there at first."""
    return "new"


@server.resource("official://greeting")
async def greeting() -> str:
    """A text."""
    return "hello"


@server.resource("official://items/{name}")
async def item(name: str) -> str:
    """One of a family."""
    return f"item {name}"


@server.prompt()
async def review(path: str) -> str:
    """Ask for a review."""
    return f"Please review {path}."


@server.completion()
async def complete(
    ref: t.PromptReference | t.ResourceTemplateReference,
    argument: t.CompletionArgument,
    context: t.CompletionContext | None,
) -> t.Completion | None:
    """Suggest paths."""
    return t.Completion(values=[path for path in ("setup.py", "setup.cfg") if path.startswith(argument.value)])


if __name__ == "__main__":
    server.run("stdio")
