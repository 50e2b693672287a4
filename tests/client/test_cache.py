"""Results are kept as long as the server said, and not a moment after it said otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, Scripted, connected, discover_result
from trimcp.client.client import Client
from trimcp.client.session import Cache
from trimcp.wire.content import TextResourceContents
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.resources import ListResourcesResult, ReadResourceResult, Resource
from trimcp.wire.revisions import LATEST, LATEST_LEGACY
from trimcp.wire.tools import ListToolsResult, Tool

FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


def slow_changing(ttl_ms: int = 60_000) -> HandMade:
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        if params.cursor:
            return ListToolsResult([Tool("b", {"type": "object"})], ttl_ms=ttl_ms * 2)
        return ListToolsResult([Tool("a", {"type": "object"})], next_cursor="2", ttl_ms=ttl_ms)

    @server.method("resources/read")
    async def read(params: Any, ctx: Any) -> Any:
        return ReadResourceResult([TextResourceContents(uri=params.uri, text="")], ttl_ms=ttl_ms)

    @server.method("resources/list")
    async def resources(params: Any, ctx: Any) -> Any:
        return ListResourcesResult([Resource("x:1", "one")], ttl_ms=ttl_ms)

    return server


async def test_each_page_is_fresh_as_long_as_it_says(autojump_clock: Any) -> None:
    server = slow_changing()
    async with connected(server) as session:
        with trio.testing.assert_checkpoints():
            await session.list_tools()
        for _ in range(3):
            with trio.testing.assert_checkpoints():
                assert [tool.name for tool in await session.list_tools()] == ["a", "b"]
        assert [params.cursor or None for _, params in server.asked] == [None, "2"]
        await trio.sleep(60)
        await session.list_tools()
        assert [params.cursor or None for _, params in server.asked] == [None, "2", None]
        await session.list_tools(fresh=True)
        assert len(server.asked) == 5


@pytest.mark.parametrize("ttl_ms", [0, -5])
async def test_what_is_stale_at_once_is_not_kept(ttl_ms: int) -> None:
    server = slow_changing(ttl_ms)
    async with connected(server) as session:
        await session.read_resource("x:1")
        await session.read_resource("x:1")
    assert len(server.asked) == 2


async def test_legacy_results_are_not_kept() -> None:
    server = slow_changing()
    async with connected(server, revision=LATEST_LEGACY) as session:
        await session.read_resource("x:1")
        await session.read_resource("x:1")
    assert len(server.asked) == 2


async def test_the_key_is_method_and_params() -> None:
    server = slow_changing()
    async with connected(server) as session:
        await session.read_resource("x:1")
        await session.read_resource("x:2")
        await session.read_resource("x:1")
        assert [params.uri for _, params in server.asked] == ["x:1", "x:2"]
        await session.read_resource("x:1", meta={"mine": 1})
        assert len(server.asked) == 3


async def test_answers_to_questions_are_not_kept() -> None:
    client = Client("c")
    client.elicitation(lambda params: ElicitResult("accept", {"name": "Ada"}))
    server = HandMade()

    @server.method("resources/read")
    async def read(params: Any, ctx: Any) -> Any:
        answer = await ctx.elicit("who?", FORM)
        return ReadResourceResult([TextResourceContents(uri=params.uri, text=answer.content["name"])], ttl_ms=60_000)

    async with connected(server, client, LATEST) as session:
        await session.read_resource("x:1")
        asked = len(server.asked)
        await session.read_resource("x:1")
        assert len(server.asked) == 2 * asked


async def test_a_change_notice_makes_stale_what_it_names() -> None:
    listen: list[int] = []
    asked: list[str] = []

    def script(message: dict[str, Any]) -> Any:
        id = message.get("id")
        asked.append(message["method"])
        result: dict[str, Any] = {"resultType": "complete", "ttlMs": 60_000, "cacheScope": "public"}
        match message["method"]:
            case "server/discover":
                return discover_result(id, tools={"listChanged": True}, prompts={})
            case "subscriptions/listen":
                listen.append(message["id"])
                meta = {"io.modelcontextprotocol/subscriptionId": id}
                return {
                    "method": "notifications/subscriptions/acknowledged",
                    "params": {"notifications": message["params"]["notifications"], "_meta": meta},
                }
            case "tools/list":
                return {"id": id, "result": {**result, "tools": []}}
            case "prompts/list":
                return {"id": id, "result": {**result, "prompts": []}}
        return None

    server = Scripted(script)
    async with Client("c").connect(server, revision=LATEST) as session, session.listen(tools=True) as changes:
        await session.list_tools()
        await session.list_prompts()
        meta = {"io.modelcontextprotocol/subscriptionId": listen[0]}
        await server.say({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": {"_meta": meta}})
        await changes.receive()
        await session.list_tools()
        await session.list_prompts()
    assert asked.count("tools/list") == 2
    assert asked.count("prompts/list") == 1


async def test_a_result_asked_for_before_a_change_is_not_kept() -> None:
    cache = Cache()
    page = ListToolsResult([], ttl_ms=1000)
    edition = cache.edition("tools/list")
    cache.drop("tools/list")
    cache.put("tools/list", None, page, edition)
    assert cache.get("tools/list", None) is None
    cache.put("tools/list", None, page, cache.edition("tools/list"))
    assert cache.get("tools/list", None) is page


async def test_the_cache_is_bounded(autojump_clock: trio.testing.MockClock) -> None:
    cache = Cache()
    page = ReadResourceResult([], ttl_ms=600_000)
    for n in range(3_000):
        cache.put("resources/read", str(n), page, 0)
    assert cache.get("resources/read", "0") is None
    assert cache.get("resources/read", "2999") is page
    assert sum(cache.get("resources/read", str(n)) is not None for n in range(3_000)) == 1_024


async def test_the_cache_is_bounded_by_text_too(autojump_clock: trio.testing.MockClock) -> None:
    cache = Cache()

    def page(size: int) -> ReadResourceResult:
        return ReadResourceResult([TextResourceContents(uri="x", text="." * size)], ttl_ms=600_000)

    cache.put("resources/read", "huge", page(40_000_000), 0)
    assert cache.get("resources/read", "huge") is None
    for n in range(10):
        cache.put("resources/read", str(n), page(10_000_000), 0)
        cache.put("resources/read", str(n), page(10_000_000), 0)
    assert [n for n in range(10) if cache.get("resources/read", str(n))] == [7, 8, 9]
    cache.drop("resources/read")
    for n in range(3):
        cache.put("resources/read", str(n), page(10_000_000), 1)
    assert cache.get("resources/read", "0") is not None


async def test_long_lists_count_by_their_bytes() -> None:
    cache = Cache()
    page = ListToolsResult([Tool("t", {"type": "object", "description": "d" * 10_000_000})], ttl_ms=60_000)
    for number in range(8):
        cache.put("tools/list", str(number), page, cache.edition("tools/list"))
    kept = [number for number in range(8) if cache.get("tools/list", str(number)) is not None]
    assert kept == [5, 6, 7], "32 MiB hold three pages of 10 MB"
