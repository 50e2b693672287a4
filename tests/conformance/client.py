"""The client that the official conformance suite drives, and that uses everything a server offers.

    python tests/conformance/client.py http://localhost:8000/mcp

The suite says in the environment which of its scenarios it plays. Most of them want what any client would do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

import trimcp

client = trimcp.Client("conformance", "1.0", roots=[Path.cwd().as_uri()])


@client.elicitation
def fill_in(request: trimcp.ElicitParams) -> trimcp.ElicitResult:
    """Accept what the form suggests, and invent the rest."""
    if not isinstance(request, trimcp.wire.ElicitFormParams):
        return trimcp.ElicitResult(action="decline")
    invented = {name: INVENTED[field.type] for name, field in request.requested_schema.properties.items()}
    return trimcp.ElicitResult(action="accept", content=invented | trimcp.fill_defaults(request.requested_schema))


@client.sampling
def complete(params: trimcp.CreateMessageParams) -> str:
    """Stand in for a model."""
    return "a model's words"


async def use_everything(session: trimcp.ClientSession) -> None:
    """Look at everything the server lists."""
    for tool in await session.list_tools():
        await session.call_tool(tool.name, invent(tool.input_schema))
    for resource in await session.list_resources():
        await session.read_resource(resource.uri)
    for prompt in await session.list_prompts():
        await session.get_prompt(prompt.name, {argument.name: "text" for argument in prompt.arguments or ()})


async def look_at_tools(session: trimcp.ClientSession) -> None:
    """List tools, which is all that some servers answer."""
    await session.list_tools()


async def make_the_calls_asked_for(session: trimcp.ClientSession) -> None:
    """Call tools with arguments that travel in headers."""
    context = json.loads(os.environ["MCP_CONFORMANCE_CONTEXT"])
    await session.list_tools()  # whose schemas say which
    for call in context["toolCalls"]:
        await session.call_tool(call["name"], call["arguments"])


async def return_the_schema(session: trimcp.ClientSession) -> None:
    """Send the schema of a tool back as it was understood."""
    tools = {tool.name: tool for tool in await session.list_tools()}
    schema = dict(tools["json_schema_2020_12_tool"].input_schema)
    await session.call_tool("json_schema_echo", {"schema": schema})


SPECIAL = {
    "http-custom-headers": make_the_calls_asked_for,
    "json-schema-2020-12-preservation": return_the_schema,
    "json-schema-ref-no-deref": look_at_tools,
}

INVENTED: dict[str, Any] = {"string": "text", "number": 5, "integer": 3, "boolean": True, "array": [], "object": {}}


def invent(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that suit a schema, as far as its types tell."""
    properties = schema.get("properties", {})
    return {name: INVENTED.get(property.get("type", "string")) for name, property in properties.items()}


async def main(url: str) -> None:
    scenario = SPECIAL.get(os.environ.get("MCP_CONFORMANCE_SCENARIO", ""), use_everything)
    async with client.connect(trimcp.http(url)) as session:
        await scenario(session)


if __name__ == "__main__":
    trio.run(main, sys.argv[-1])
