"""The measured tools on the official Python SDK's low level: no schema from hints, no conversion of results."""

from __future__ import annotations

import sys

import anyio
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from official import in_memory


def text(name: str, kind: str) -> types.Tool:
    schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
    return types.Tool(name="echo" if name == "text" else "count", input_schema=schema)


async def list_tools(ctx: object, params: object) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[text("text", "string"), text("to", "integer")])


async def call_tool(ctx: object, params: types.CallToolRequestParams) -> types.CallToolResult:
    if params.name == "echo":
        return types.CallToolResult(content=[types.TextContent(type="text", text=params.arguments["text"])])
    to = params.arguments["to"]
    for number in range(1, to + 1):
        await ctx.session.report_progress(number, to)
    return types.CallToolResult(content=[types.TextContent(type="text", text="done")])


server = Server("echo", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


async def serve() -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        anyio.run(serve)
    else:
        anyio.run(in_memory, server, int(sys.argv[2]), int(sys.argv[3]))
