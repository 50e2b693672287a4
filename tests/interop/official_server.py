"""A server made with the official Python SDK, for what the ready-made ones cannot show.

    python tests/interop/official_server.py stdio|http|json|stateless

Over HTTP, HTTP+SSE is beside it; "json" answers every request with JSON, "stateless" has no sessions. No `from
__future__ import annotations` here: the SDK reads the annotations.
"""

import sys
import warnings
from typing import Annotated

import mcp_types as t
from asgi_serving import Events, serve
from mcp import MCPDeprecationWarning
from mcp.server.mcpserver import Context, Elicit, ElicitationResult, ListRoots, MCPServer, Resolve, Sample
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from same_offer import Colour, Name, grown, offer, paths

# Logging is deprecated there, and what it warns of would end up among its log lines.
warnings.simplefilter("ignore", MCPDeprecationWarning)

server = MCPServer("official", version="1.0", instructions="Ask for anything.")
offer(server, Context, ToolError)


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
async def grow(name: str, ctx: Context) -> str:
    """Offer one more tool, and say so."""
    server.add_tool(grown, name=name)
    if ctx.protocol_version < "2026":
        await ctx.session.send_tool_list_changed()
    else:
        await ctx.notify_tools_changed()
        await ctx.notify_resource_updated("peer://greeting")
    return "grown"


@server.completion()
async def complete(
    ref: t.PromptReference | t.ResourceTemplateReference,
    argument: t.CompletionArgument,
    context: t.CompletionContext | None,
) -> t.Completion | None:
    """Suggest paths."""
    return t.Completion(values=paths(argument.value))


class Kept(Events, EventStore):
    """Keeps events for clients that come back."""

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        return await self.replay(last_event_id, lambda id, message: send_callback(EventMessage(message, id)))


def main(kind: str) -> None:
    if kind == "stdio":
        server.run("stdio")
    else:
        settings = {"json_response": kind == "json", "stateless_http": kind == "stateless"}
        events = None if any(settings.values()) else Kept()
        app = server.streamable_http_app(event_store=events, retry_interval=100, **settings)
        app.router.routes.extend(server.sse_app().routes)
        serve(app)


if __name__ == "__main__":
    main(sys.argv[1])
