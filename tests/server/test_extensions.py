"""Extensions: settings declared by both sides, and requests that no revision has."""

from __future__ import annotations

from typing import Any

import pytest

import trimcp
from trimcp.testing import connected, every_revision
from trimcp.wire.codes import METHOD_NOT_FOUND

SETTINGS = {"com.example/search": {"depth": 3}}


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("ext", extensions=SETTINGS)

    @server.method("com.example/search")
    async def search(ctx: trimcp.Context[None], params: dict[str, Any]) -> dict[str, Any]:
        return {"found": params["query"].upper(), "asked_in": ctx.revision.name}

    return server


@every_revision
async def test_a_foreign_method_carries_json_objects_both_ways(revision: trimcp.Revision) -> None:
    async with connected(make_server(), revision=revision) as session:
        result = await session.request("com.example/search", {"query": "trio"})
    assert result["found"] == "TRIO"
    assert ("resultType" in result) == revision.modern
    assert result["asked_in"] == revision.name


async def test_a_foreign_method_nobody_serves_is_unknown() -> None:
    async with connected(make_server()) as session:
        with pytest.raises(trimcp.RemoteError) as info:
            await session.request("com.example/other")
    assert info.value.code == METHOD_NOT_FOUND


async def test_a_method_of_the_protocol_is_no_foreign_one() -> None:
    server = make_server()
    with pytest.raises(trimcp.LocalError, match="method of the protocol"):
        server.method("tools/call")
    async with connected(server) as session:
        with pytest.raises(trimcp.LocalError, match="its own method"):
            await session.request("tools/call", {})


async def test_both_sides_see_the_other_ones_settings() -> None:
    server = make_server()
    seen = []

    @server.tool
    async def look(ctx: trimcp.Context[None]) -> str:
        seen.append(ctx.capabilities.extensions)
        return "ok"

    client = trimcp.Client("c", extensions={"com.example/ui": {"dark": True}})
    async with connected(server, client) as session:
        assert session.server_capabilities.extensions == SETTINGS
        await session.call_tool("look")
    assert seen == [{"com.example/ui": {"dark": True}}]
