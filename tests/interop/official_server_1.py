"""A server made with the first generation of the official Python SDK: Streamable HTTP, HTTP+SSE and WebSocket.

No `from __future__ import annotations` here: the SDK reads the annotations.
"""

import warnings
from typing import Any

import mcp.types as t
from asgi_serving import Events, serve
from mcp.server.fastmcp import Context, FastMCP
from mcp.server.fastmcp.exceptions import ToolError
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.websocket import websocket_server
from pydantic import AnyUrl
from same_offer import Colour, Name, grown, offer, paths

warnings.simplefilter("ignore", DeprecationWarning)


class Kept(Events, EventStore):
    """Keeps events for clients that come back."""

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        return await self.replay(last_event_id, lambda id, message: send_callback(EventMessage(message, id)))


server = FastMCP("official", instructions="Ask for anything.", event_store=Kept(), retry_interval=100)
offer(server, Context, ToolError)


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


@server._mcp_server.subscribe_resource()
async def subscribe(uri: AnyUrl) -> None:
    """Take subscriptions; everybody is told of everything."""


@server._mcp_server.unsubscribe_resource()
async def unsubscribe(uri: AnyUrl) -> None:
    """Take them back."""


@server.completion()
async def complete(
    ref: t.PromptReference | t.ResourceTemplateReference,
    argument: t.CompletionArgument,
    context: t.CompletionContext | None,
) -> t.Completion | None:
    """Suggest paths."""
    return t.Completion(values=paths(argument.value))


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
