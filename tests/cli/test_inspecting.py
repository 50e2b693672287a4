"""What is shown of a server's lists: titles, hints, what a tool returns, and what could not be read."""

from __future__ import annotations

from typing import Any, TypedDict

import trimcp
import trimcp.testing
from tests.client.peers import Scripted, discover_result
from trimcp.cli.inspecting import describe, offer_json, take_stock


class Weather(TypedDict):
    city: str
    temperature: int


async def shown(session: trimcp.ClientSession) -> str:
    return "\n".join(line for line, _ in describe(session, await take_stock(session)))


async def test_titles_hints_and_results_are_shown() -> None:
    server = trimcp.Server("s", title="The Weather")

    @server.tool(title="Weather", annotations={"readOnlyHint": True, "destructiveHint": False, "openWorldHint": True})
    async def weather(city: str) -> Weather:
        """Get the weather."""
        return Weather(city=city, temperature=1)

    @server.tool(annotations={"title": "Of old"})
    async def several() -> list[Weather]:
        """Get several."""
        return []

    @server.tool(title="Only a title")
    async def count() -> int:
        return 2

    server.add_resource("notes://today", "text", title="Today", description="What is to be done.")
    server.add_resource("notes://other", "text", size=4, annotations={"audience": ["user"], "priority": 0.5})

    @server.resource("notes://{day}", title="A day", mime_type="text/plain", annotations={"lastModified": "2026-01-02"})
    async def note(day: str) -> str:
        return day

    async with trimcp.testing.connected(server) as session:
        text = await shown(session)
    for lines in (
        "s 0 (The Weather)\n",
        "  weather (Weather): Get the weather.\n      says that it reads only, destroys nothing, reaches out\n",
        "      city (string, required)\n      returns object\n          city (string, required)\n          temp",
        "  several (Of old): Get several.\n      returns list of object\n          city (string, required)\n",
        "  count: Only a title\n      returns integer",
        "  notes://today (Today): What is to be done.",
        "  notes://other: other\n      4 bytes, for the user, priority 0.5",
        "  notes://{day}: A day\n      text/plain, changed 2026-01-02",
    ):
        assert lines in text, text


async def test_what_cannot_be_read_is_shown_as_such() -> None:
    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        return {"id": message["id"], "result": {"tools": [{"name": "bad\x1b[2J"}]}}

    async with trimcp.Client("c").connect(Scripted(script)) as session:
        text = await shown(session)
        rejected = offer_json(session, await take_stock(session))["rejected"]
    assert rejected == [{"place": "tools[0]", "name": "bad\x1b[2J", "reason": "is missing @ $.inputSchema"}]
    assert "Tools (0)\n  tools[0] bad\\x1b[2J cannot be read: is missing @ $.inputSchema" in text
