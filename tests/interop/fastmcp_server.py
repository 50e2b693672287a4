"""A server made with FastMCP, which has its own way with all that is above the wire. Runs where `fastmcp` is installed.

    python tests/interop/fastmcp_server.py http|sse

No `from __future__ import annotations` here: FastMCP reads the annotations.
"""

import sys
from collections import defaultdict

import anyio
import mcp_types as t
from asgi_serving import serve
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.server.event_store import EventStore
from pydantic import BaseModel

server = FastMCP("fast", version="1.0", instructions="Ask for anything.")


class Name(BaseModel):
    """A form of one field."""

    name: str


class Colour(BaseModel):
    """Another."""

    colour: str


class Sum(BaseModel):
    """A structured result."""

    total: int


@server.tool
async def add(a: int, b: int) -> Sum:
    """Return a structured result."""
    return Sum(total=a + b)


@server.tool
async def fail() -> str:
    """Fail in a way the model can read."""
    raise ToolError("no luck today")


@server.tool
async def large(size: int) -> str:
    """Return a text of so many characters."""
    return "x" * size


@server.tool
async def count(to: int, ctx: Context) -> str:
    """Report progress."""
    for number in range(1, to + 1):
        await ctx.report_progress(number, to, f"now {number}")
    return "done"


@server.tool
async def warn(text: str, ctx: Context) -> str:
    """Send a log message."""
    await ctx.warning(text)
    return "warned"


# Calls of `wait_for_ever` that were stopped, by the name the caller gave them.
cancelled: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)


@server.tool
async def wait_for_ever(name: str, ctx: Context) -> str:
    """Say that it waits, and wait until somebody cancels this call."""
    await ctx.report_progress(1, message="waiting")
    try:
        await anyio.sleep_forever()
    finally:
        cancelled[name].set()
    return "never"


@server.tool
async def was_cancelled(name: str) -> str:
    """Answer once the call of `wait_for_ever` with this name was stopped."""
    await cancelled[name].wait()
    return "stopped"


@server.tool
async def poll(ctx: Context) -> str:
    """Let go of the connection in the middle, so that the client has to come back for the rest."""
    await ctx.report_progress(1, message="before")
    await ctx.close_sse_stream()
    await ctx.report_progress(2, message="after")
    return "done"


@server.tool
async def lose_connection(ctx: Context) -> str:
    """Say the word at which a relay cuts the connection, and more that is lost on the way."""
    await ctx.report_progress(1, message="cut-here")
    await ctx.report_progress(2, message="after")
    return "done"


@server.tool
async def greet(ctx: Context) -> str | t.InputRequiredResult:
    """Ask two questions, the second after the first: in the older revisions by a call, since 2026-07-28 in a result."""
    if ctx.request_context.protocol_version < "2026":
        name = await ctx.elicit("Your name?", Name)
        if name.action != "accept":
            return name.action
        colour = await ctx.elicit(f"Your colour, {name.data.name}?", Colour)
        assert colour.action == "accept"
        return f"{name.data.name} likes {colour.data.colour}"
    answers = ctx.input_responses
    if answers is None:
        return ask("Your name?", "name", "")
    if ctx.request_state == "name":
        given = answers["name"]
        assert isinstance(given, t.ElicitResult)
        if given.action != "accept":
            return given.action
        return ask(f"Your colour, {given.content['name']}?", "colour", given.content["name"])
    return f"{ctx.request_state} likes {answers['colour'].content['colour']}"


def ask(message: str, field: str, state: str) -> t.InputRequiredResult:
    """A result that asks for one field."""
    schema = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    params = t.ElicitRequestFormParams(message=message, requested_schema=schema)
    asked = {field: t.ElicitRequest(params=params)}
    return t.InputRequiredResult(input_requests=asked, request_state=state or field)


@server.tool
async def grow(name: str, ctx: Context) -> str:
    """Offer one more tool, which FastMCP tells clients by itself."""
    server.tool(grown, name=name)
    await ctx.send_notification(t.ToolListChangedNotification())
    return "grown"


async def grown() -> str:
    """A tool that was not there at first."""
    return "new"


@server.resource("peer://greeting")
async def greeting() -> str:
    """A text."""
    return "hello"


@server.resource("peer://items/{name}")
async def item(name: str) -> str:
    """One of a family."""
    return f"item {name}"


@server.prompt
async def review(path: str) -> str:
    """Ask for a review."""
    return f"Please review {path}."


@server.completion
async def complete(ref: object, argument: t.CompletionArgument, context: object) -> t.Completion | None:
    """Suggest paths."""
    return t.Completion(values=[path for path in ("setup.py", "setup.cfg") if path.startswith(argument.value)])


if __name__ == "__main__":
    over_sse = sys.argv[1] == "sse"
    serve(
        server.http_app(transport="sse") if over_sse else server.http_app(event_store=EventStore(), retry_interval=100)
    )
