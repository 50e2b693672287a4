"""Results that are kept: for whom, for how long, how many, and what is never kept."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
import trio

import trimcp
from trimcp.errors import RemoteError
from trimcp.session.context import Context
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.revisions import Revision

READS: Any = {"readOnlyHint": True}


class Counting:
    """A server whose tool counts its calls."""

    def __init__(self, cache: trimcp.ResultCache) -> None:
        self.calls = 0
        self.server: trimcp.Server[None] = trimcp.Server("s")
        self.server.add_tool(self.look, cache=cache, annotations=READS)

    async def look(self, what: str, size: int = 1) -> dict[str, Any]:
        """Look something up."""
        self.calls += 1
        if what == "wrong":
            raise trimcp.ToolError("there is no such thing")
        return {"what": what * size, "call": self.calls}


@every_revision
async def test_an_equal_call_is_answered_with_what_was_kept(revision: Revision, autojump_clock: Any) -> None:
    place = Counting(cache := trimcp.ResultCache(60))
    async with connected(place.server, revision=revision) as session:
        first = await session.call_tool("look", {"what": "a", "size": 2})
        again = await session.call_tool("look", {"size": 2, "what": "a"})
        assert (again, json.loads(first.text)) == (first, {"what": "aa", "call": 1})
        assert json.loads((await session.call_tool("look", {"what": "b"})).text) == {"what": "b", "call": 2}
        assert (cache.hits, cache.misses) == (1, 2)
        await trio.sleep(61)
        await session.call_tool("look", {"what": "b"})
        cache.clear()
        await session.call_tool("look", {"what": "b"})
        assert (place.calls, cache.held > 0) == (4, True)


async def test_what_is_kept_is_its_principals(autojump_clock: Any) -> None:
    for shared, calls in ((False, 3), (True, 1)):
        place = Counting(trimcp.ResultCache(60, shared=shared))
        for who in ("ada", "bob", "ada", None):
            principal = None if who is None else trimcp.Principal(who)
            async with connected(place.server, principal=principal) as session:
                await session.call_tool("look", {"what": "a"})
        assert place.calls == calls


async def test_what_is_kept_for_more_rights_is_not_used_for_fewer(autojump_clock: Any) -> None:
    place = Counting(trimcp.ResultCache(60))
    for scopes in (None, ("read", "write"), ("read",), ("write", "read"), ()):
        async with connected(place.server, principal=trimcp.Principal("ada", scopes=scopes)) as session:
            await session.call_tool("look", {"what": "a"})
    assert place.calls == 4


async def test_errors_and_wrong_arguments_are_not_kept(autojump_clock: Any) -> None:
    place = Counting(cache := trimcp.ResultCache(60))
    async with connected(place.server) as session:
        for _ in range(2):
            assert (await session.call_tool("look", {"what": "wrong"})).is_error
            assert (await session.call_tool("look", {"what": 5})).is_error
    assert (place.calls, cache.held) == (2, 0)


async def test_the_bytes_are_bounded_and_the_oldest_gives_way(autojump_clock: Any) -> None:
    place = Counting(cache := trimcp.ResultCache(60, max_bytes=10_000))
    async with connected(place.server) as session:
        for number in range(200):
            await session.call_tool("look", {"what": str(number), "size": 100})
            assert cache.held <= 10_000
        await session.call_tool("look", {"what": "199", "size": 100})
        assert place.calls == 200
        await session.call_tool("look", {"what": "0", "size": 100})
        assert place.calls == 201
        held = cache.held
        await session.call_tool("look", {"what": "x", "size": 20_000})  # larger than all
        assert cache.held == held
        cache.clear()
        assert (cache.held, len(cache._kept)) == (0, 0)


async def test_a_filter_that_changes_a_result_does_not_change_what_is_kept(autojump_clock: Any) -> None:
    place = Counting(trimcp.ResultCache(60))

    @place.server.filter
    def mark(ctx: Any, params: Any, result: Any) -> Any:
        result.structured_content["what"] += "!"
        return result

    async with connected(place.server) as session:
        for _ in range(3):
            result = await session.call_tool("look", {"what": "a"})
            assert result.structured_content == {"what": "a!", "call": 1}


async def test_rights_are_asked_before_anything_is_used(autojump_clock: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    allowed = True

    @server.tool(cache=trimcp.ResultCache(60), annotations=READS, allow=lambda request: allowed)
    async def look() -> str:
        return "seen"

    async with connected(server) as session:
        assert (await session.call_tool("look")).text == "seen"
        allowed = False
        with pytest.raises(RemoteError, match="not allowed"):
            await session.call_tool("look")


async def test_servers_and_tools_share_a_cache_without_sharing_results(autojump_clock: Any) -> None:
    cache = trimcp.ResultCache(60)
    one, other = Counting(cache), Counting(cache)
    one.server.add_tool(one.look, name="look2", cache=cache, annotations=READS)
    async with connected(one.server) as session, connected(other.server) as second:
        for name in ("look", "look2"):
            await session.call_tool(name, {"what": "a"})
        await second.call_tool("look", {"what": "a"})
    assert (one.calls, other.calls) == (2, 1)


def test_a_cache_is_refused_where_it_would_be_wrong() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    cache = trimcp.ResultCache(60)

    async def look(ctx: Context[None]) -> str:
        return ""

    async def ask(name: Annotated[str, trimcp.Elicit("Who?")]) -> str:
        return name

    with pytest.raises(TypeError, match="once in place of twice"):
        server.add_tool(look, cache=cache)
    with pytest.raises(TypeError, match="asks its user"):
        server.add_tool(ask, cache=cache, annotations=READS)
    with pytest.raises(TypeError, match=r"trimcp\.ResultCache"):
        server.add_tool(look, cache=60, annotations=READS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds"):
        trimcp.ResultCache(0)
    with pytest.raises(TypeError, match="max_bytes"):
        trimcp.ResultCache(1, max_bytes=1.5)  # type: ignore[arg-type]
