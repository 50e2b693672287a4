"""What a client takes from servers that leave out what newer revisions demand."""

from __future__ import annotations

from typing import Any

from tests.client.peers import Scripted, discover_result
from trimcp.client.client import Client
from trimcp.wire.revisions import LATEST


async def test_an_absent_result_type_means_complete_and_an_absent_ttl_means_stale() -> None:
    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        return {"id": message["id"], "result": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}}

    server = Scripted(script)
    async with Client("c").connect(server, revision=LATEST) as session:
        assert [tool.name for tool in await session.list_tools()] == ["t"]
        assert [tool.name for tool in await session.list_tools()] == ["t"]
    assert server.methods == ["server/discover", "tools/list", "tools/list"]
