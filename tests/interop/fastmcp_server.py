"""A server made with FastMCP, which has its own way with all that is above the wire. Runs where `fastmcp` is installed.

    python tests/interop/fastmcp_server.py http|sse

No `from __future__ import annotations` here: FastMCP reads the annotations.
"""

import sys

import mcp_types as t
from asgi_serving import serve
from fastmcp import Context, FastMCP
from fastmcp.exceptions import ToolError
from fastmcp.server.event_store import EventStore
from same_offer import Colour, Name, grown, offer, paths

server = FastMCP("fast", version="1.0", instructions="Ask for anything.")
offer(server, Context, ToolError)


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


@server.completion
async def complete(ref: object, argument: t.CompletionArgument, context: object) -> t.Completion | None:
    """Suggest paths."""
    return t.Completion(values=paths(argument.value))


if __name__ == "__main__":
    over_sse = sys.argv[1] == "sse"
    serve(
        server.http_app(transport="sse") if over_sse else server.http_app(event_store=EventStore(), retry_interval=100)
    )
