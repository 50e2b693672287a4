"""The measured tools on the low level of the official Python SDK, version 2: no schema from hints, no conversion.

    official_low_level.py stdio | http [--reply json|sse] | memory COUNT UNDER_WAY

It checks no arguments by itself; the two lines that do are what its documentation shows.
"""

from __future__ import annotations

import sys
from typing import Any

import mcp_types as types
from mcp.server.lowlevel import Server
from serving import BODIES, COUNTED, TOOLS, counts, option, serve


def tool(name: str, description: str, **arguments: str) -> types.Tool:
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": [*arguments]}
    return types.Tool(name=name, description=description, input_schema=schema)


TOOLS_LISTED = [
    tool("echo", "Return the text.", text="string"),
    tool("add", "Return the sum.", a="integer", b="integer"),
    tool("stream", "Report every number on the way.", n="integer"),
    *(tool(f"tool_{number}", "Return the text; one tool of many.", text="string") for number in range(TOOLS)),
]


def text(said: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=said)])


async def list_tools(ctx: Any, params: Any) -> types.ListToolsResult:
    return types.ListToolsResult(tools=TOOLS_LISTED)


async def call_tool(ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    match params.name, params.arguments:
        case "echo", {"text": str(said)}:
            return text(said)
        case "add", {"a": int(a), "b": int(b)}:
            return text(str(a + b))
        case "stream", {"n": int(n)}:
            for number in range(1, n + 1):
                await ctx.session.report_progress(number, n)
            return text("done")
        case "counts", _ if COUNTED:
            return text(await counts())
    return types.CallToolResult(content=[types.TextContent(type="text", text="no such call")], is_error=True)


async def list_resources(ctx: Any, params: Any) -> types.ListResourcesResult:
    return types.ListResourcesResult(resources=[types.Resource(name="greeting", uri="bench://greeting")])


async def read_resource(ctx: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=params.uri, text="hello")])


async def list_prompts(ctx: Any, params: Any) -> types.ListPromptsResult:
    asked = types.PromptArgument(name="name", required=True)
    return types.ListPromptsResult(prompts=[types.Prompt(name="greet", arguments=[asked])])


async def get_prompt(ctx: Any, params: types.GetPromptRequestParams) -> types.GetPromptResult:
    asked = types.TextContent(type="text", text=f"Say hello to {params.arguments['name']}.")
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=asked)])


server = Server(
    "bench",
    version="1.0",
    on_list_tools=list_tools,
    on_call_tool=call_tool,
    on_list_resources=list_resources,
    on_read_resource=read_resource,
    on_list_prompts=list_prompts,
    on_get_prompt=get_prompt,
)


async def over_stdio() -> None:
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    import anyio

    sizes = {} if BODIES is None else {"max_request_body_size": BODIES}
    if sys.argv[1] == "stdio":
        anyio.run(over_stdio)
    elif sys.argv[1] == "http":
        serve(server.streamable_http_app(json_response=option("--reply", "sse") == "json", **sizes), "/mcp")
    else:
        from calling import call
        from mcp import Client

        anyio.run(call, Client(server), int(sys.argv[2]), int(sys.argv[3]))
