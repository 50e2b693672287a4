"""A server made with the first generation of the official Python SDK: Streamable HTTP, HTTP+SSE and WebSocket.

No `from __future__ import annotations` here: the SDK reads the annotations.
"""

import warnings
from collections import defaultdict
from typing import Any

import anyio
import mcp.types as t
from asgi_serving import Events, serve
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.exceptions import ToolError
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.websocket import websocket_server
from pydantic import AnyUrl, BaseModel

warnings.simplefilter("ignore", DeprecationWarning)


class Kept(Events, EventStore):
    """Keeps events for clients that come back."""

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        return await self.replay(last_event_id, lambda id, message: send_callback(EventMessage(message, id)))


server = FastMCP("official", instructions="Ask for anything.", event_store=Kept(), retry_interval=100)


class Name(BaseModel):
    """A form of one field."""

    name: str


class Colour(BaseModel):
    """Another."""

    colour: str


class Sum(BaseModel):
    """A structured result."""

    total: int


@server.tool()
async def add(a: int, b: int) -> Sum:
    """Return a structured result."""
    return Sum(total=a + b)


@server.tool()
async def fail() -> str:
    """Fail in a way the model can read."""
    raise ToolError("no luck today")


@server.tool()
async def large(size: int) -> str:
    """Return a text of so many characters."""
    return "x" * size


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


# Calls of `wait_for_ever` that were stopped, by the name the caller gave them.
cancelled: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)


@server.tool()
async def wait_for_ever(name: str, ctx: Context) -> str:
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
async def poll(ctx: Context) -> str:
    """Let go of the connection in the middle, so that the client has to come back for the rest."""
    await ctx.report_progress(1, message="before")
    await ctx.close_sse_stream()
    await ctx.report_progress(2, message="after")
    return "done"


@server.tool()
async def lose_connection(ctx: Context) -> str:
    """Say the word at which a relay cuts the connection, and more that is lost on the way."""
    await ctx.report_progress(1, message="cut-here")
    await ctx.report_progress(2, message="after")
    return "done"


@server.tool()
async def greet(ctx: Context) -> str:
    """Ask two questions, the second after the first."""
    name = await ctx.elicit("Your name?", Name)
    if name.action != "accept":
        return name.action
    colour = await ctx.elicit(f"Your colour, {name.data.name}?", Colour)
    assert colour.action == "accept"
    return f"{name.data.name} likes {colour.data.colour}"


@server.tool()
async def think(question: str, ctx: Context) -> str:
    """Ask the client's model."""
    content = t.TextContent(type="text", text=question)
    messages = [t.SamplingMessage(role="user", content=content)]
    answer = await ctx.session.create_message(messages, max_tokens=50, related_request_id=ctx.request_id)
    assert isinstance(answer.content, t.TextContent)
    return answer.content.text


@server.tool()
async def places(ctx: Context) -> str:
    """Ask where the client works."""
    return ", ".join(str(root.uri) for root in (await ctx.session.list_roots()).roots)


@server.tool()
async def grow(name: str, ctx: Context) -> str:
    """Offer one more tool, and say so."""
    server.add_tool(grown, name=name)
    await ctx.session.send_tool_list_changed()
    await ctx.session.send_resource_updated(AnyUrl("peer://greeting"))
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


@server._mcp_server.subscribe_resource()
async def subscribe(uri: AnyUrl) -> None:
    """Take subscriptions; everybody is told of everything."""


@server._mcp_server.unsubscribe_resource()
async def unsubscribe(uri: AnyUrl) -> None:
    """Take them back."""


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


over_http = server.streamable_http_app()
over_http.router.routes.extend(server.sse_app().routes)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """All three transports on one port."""
    if scope["type"] != "websocket":
        await over_http(scope, receive, send)
        return
    low = server._mcp_server
    async with websocket_server(scope, receive, send) as streams:
        await low.run(*streams, low.create_initialization_options())


if __name__ == "__main__":
    serve(app)
