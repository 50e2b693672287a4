"""A server that includes others: what they offer is offered by it, in its runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest

import trimcp
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.revisions import Revision


def pool() -> str:
    return "pool"


def part() -> Server[Any]:
    server = Server("maps", extensions={"com.example/maps": {"scale": 1}})

    @server.tool(visible=lambda who: False)
    async def hidden() -> str:
        return "found"

    @server.tool
    async def find(place: str, ctx: Context[Any], pool: Annotated[str, trimcp.Depends(pool, scope="server")]) -> str:
        return f"{place} {ctx.state} {pool}"

    @server.resource("map://{place}")
    async def map_of(place: str) -> str:
        return f"a map of {place}"

    server.add_resource("map://legend", "the legend")

    @server.prompt
    async def route(to: str) -> str:
        return f"the way to {to}"

    @server.complete("route", "to")
    async def places(typed: str) -> list[str]:
        return [typed + "burg"]

    @server.method("com.example/maps/zoom")
    async def zoom(ctx: Any, params: Any) -> Any:
        return {"zoom": 2}

    return server


@every_revision
async def test_what_another_offers_is_offered(revision: Revision, autojump_clock: Any) -> None:
    @asynccontextmanager
    async def lifespan(server: Any) -> Any:
        yield "state"

    server = Server("s", lifespan=lifespan)

    @server.middleware
    async def loud(ctx: Any, params: Any, call_next: Callable[..., Awaitable[Any]]) -> Any:
        seen.append(ctx.method)
        return await call_next(ctx, params)

    seen: list[str] = []
    server.add_tool(pool)
    server.include(part())
    async with connected(server, revision=revision) as session:
        assert [tool.name for tool in await session.list_tools()] == ["pool", "find"]
        assert (await session.call_tool("find", {"place": "Ulm"})).text == "Ulm state pool"
        assert "tools/call" in seen
        contents: Any = (await session.read_resource("map://Ulm")).contents
        assert contents[0].text == "a map of Ulm"
        contents = (await session.read_resource("map://legend")).contents
        assert contents[0].text == "the legend"
        prompted: Any = (await session.get_prompt("route", {"to": "Ulm"})).messages[0].content
        assert prompted.text == "the way to Ulm"
        assert (await session.request("com.example/maps/zoom", {}))["zoom"] == 2
        if revision.name >= "2025-06-18":
            assert "com.example/maps" in (session.server_capabilities.extensions or {})
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("hidden")


async def test_it_is_included_as_it_is_and_may_be_while_the_server_runs(autojump_clock: Any) -> None:
    server, other = Server("s", dynamic=True), Server("o")
    other.add_tool(pool)
    async with connected(server) as session:
        server.include(other)
        other.add_tool(pool, name="later")
        assert [tool.name for tool in await session.list_tools()] == ["pool"]
        with pytest.raises(trimcp.LocalError, match="both have a tool named 'pool'"):
            server.include(other)
        with pytest.raises(trimcp.LocalError, match="while the server runs"):
            server.include(part())


@asynccontextmanager
async def opened(server: Any) -> Any:
    yield None


def with_middleware() -> Server[Any]:
    server = Server("o")
    server.middleware(lambda ctx, params, call_next: call_next(ctx, params))
    return server


def with_filter() -> Server[Any]:
    server = Server("o")
    server.filter(lambda ctx, params, result: result)
    return server


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda: Server("o", lifespan=opened), "a lifespan of its own"),
        (with_middleware, "middleware of its own"),
        (with_filter, "filters of its own"),
        (lambda: Server("o", confirm="destructive"), "another confirm="),
    ],
)
def test_what_only_a_served_server_uses_is_refused(other: Callable[[], Server[Any]], why: str) -> None:
    server, included = Server("s"), other()
    included.add_tool(pool)
    with pytest.raises(trimcp.LocalError, match=why):
        server.include(included)
    assert not len(server.tools)


def test_nothing_is_included_where_one_name_is_taken() -> None:
    server, other = Server("s"), part()
    server.add_resource("map://legend", "ours")
    with pytest.raises(trimcp.LocalError, match="both have a resource named 'map://legend'"):
        server.include(other)
    with pytest.raises(trimcp.LocalError, match="both have"):
        other.include(other)
    with pytest.raises(TypeError, match=r"trimcp\.Server"):
        server.include("maps")  # type: ignore[arg-type]
    assert not len(server.tools)
    assert not server.foreign
