"""Registered tools: whose they are, in which versions, who may register them, and what becomes of their calls."""

from __future__ import annotations

from typing import Any

import trimcp
from trimcp.agent_tools import AgentCaller, Catalog
from trimcp.testing.connect import connected

WEATHER = {
    "name": "get_weather",
    "description": "Get current weather for a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ADA = AgentCaller(trimcp.Principal("ada", scopes={"tools:register"}), "agent-a")
BOB = AgentCaller(trimcp.Principal("bob", scopes={"tools:register"}), "agent-b")


async def get_weather(city: str) -> dict[str, Any]:
    return {"city": city, "temperature": 5, "unit": "Celsius"}


def manifest(**members: Any) -> dict[str, Any]:
    return {**WEATHER, **members}


async def test_a_tool_by_reference_is_called_by_mcp_clients(autojump_clock: Any) -> None:
    server = trimcp.Server("s")
    catalog = Catalog(server, {"get_weather": get_weather})
    async with connected(server) as session:
        assert (await session.list_tools()) == []
        registered = await catalog.register(WEATHER, ADA)
        assert registered.status == "registered"
        assert [tool.name for tool in await session.list_tools()] == ["get_weather"]
        result = await session.call_tool("get_weather", {"city": "Beijing"})
        assert result.data == {"city": "Beijing", "temperature": 5, "unit": "Celsius"}
        assert catalog.find("get_weather")[0] == catalog.find("get_weather", "1")[0] == "get_weather"
        assert [each.to_json() for each in catalog.manifests()] == [{**WEATHER, "version": "1"}]
        await catalog.remove("get_weather", ADA)
        assert (await session.list_tools()) == []
