"""Finding tools by words: what is found, by whom, and that calls go through as calls of the tool."""

from __future__ import annotations

from typing import Any

import pytest

import trimcp
from tests.yardsticks import another_task
from trimcp.errors import LocalError, RemoteError
from trimcp.server.tool_search import _words, rank, words_of
from trimcp.session.context import Context
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.common import PageParams
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import Tool

THINGS = ("invoice", "customer", "order", "ticket", "contract")
DEEDS = {"create": "Make a new {}.", "delete": "Remove the {} for ever.", "list": "Show each {} there is."}


async def nothing(text: str = "") -> str:
    return f"nothing {text}".strip()


def office() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("office", dynamic=True)
    for thing in THINGS:
        for deed, says in DEEDS.items():
            server.add_tool(nothing, name=f"{deed}_{thing}s", description=says.format(thing), tags=[deed])
    server.add_tool(nothing, name="today", title="What day it is")
    server.search_tools(listed=["today"], most=3)
    return server


async def found(session: trimcp.ClientSession, query: str) -> list[str]:
    result = await session.call_tool("search_tools", {"query": query})
    return [tool["name"] for tool in result.data["tools"]]


def test_words_are_those_of_names_in_every_style() -> None:
    assert _words("getUserNames get_user_names GET-user2Names") == 2 * ["get", "user", "name"] + [
        "get",
        "user",
        "2",
        "name",
    ]
    assert _words("HTTPServer über Straße") == ["http", "server", "über", "strasse"]
    assert _words("access glass") == ["access", "glass"]


async def test_a_long_search_lets_others_have_their_turns() -> None:
    """A stranger's words in thousands of tools, each of which has all of them: a second without a turn, once."""
    assert await rank("a", []) == []
    words = [f"w{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tool = Tool(name="t", input_schema={"type": "object"}, description=" ".join(words))
    async with another_task() as other:
        best = await rank(" ".join(words), [words_of(tool)] * 4_000)
    assert len(best) == 4_000
    assert other.turns >= len(words) - 3  # one after each word; who begins and who ends first is chance


async def test_the_first_search_lets_others_have_their_turns_while_words_are_counted() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    for number in range(500):
        server.add_tool(nothing, name=f"tool_{number}", description="one of many tools")
    server.search_tools()
    async with connected(server) as session, another_task() as other:
        await found(session, "tool 77")
        first = other.turns
        await found(session, "tool 77")
        assert first >= (other.turns - first) + 500 // 10 - 10  # nothing is counted the second time


async def test_a_search_looks_for_some_words_only() -> None:
    tools = [Tool(name=f"x{number}", input_schema={}) for number in range(100)]
    best = await rank(" ".join(str(number) for number in range(100)), [words_of(tool) for tool in tools])
    assert [tool.name for tool in best] == [f"x{number}" for number in range(32)]


@every_revision
async def test_tools_are_found_and_called(revision: Revision, autojump_clock: Any) -> None:
    async with connected(office(), revision=revision) as session:
        assert [tool.name for tool in await session.list_tools()] == ["today", "search_tools", "call_tool"]
        if revision.name > "2025-06":
            assert await found(session, "remove an invoice") == ["delete_invoices", "create_invoices", "list_invoices"]
            assert (await found(session, "what day is it?"))[0] == "today"
            assert await found(session, "zebra") == []
        called = await session.call_tool("call_tool", {"name": "list_orders", "arguments": {"text": "much"}})
        assert called.text == "nothing much"
        assert (await session.call_tool("call_tool", {"name": "list_orders"})).text == "nothing"
        assert (await session.call_tool("list_orders")).text == "nothing"


async def test_what_was_found_says_how_to_call_it(autojump_clock: Any) -> None:
    async with connected(office()) as session:
        [tool, *_] = (await session.call_tool("search_tools", {"query": "contract delete"})).data["tools"]
        assert tool["name"] == "delete_contracts"
        assert tool["inputSchema"]["properties"]["text"]["type"] == "string"


async def test_a_call_is_one_of_the_tool_for_all_that_look_at_calls(autojump_clock: Any) -> None:
    records: list[Any] = []
    seen: list[str] = []
    server: trimcp.Server[None] = trimcp.Server("s", audit=trimcp.guard.Audit(write=records.append))
    server.add_tool(nothing, name="look", allow=lambda asked: seen.append(asked.name) or True, quota=trimcp.Quota(1))
    server.add_tool(nothing, name="secret", allow=lambda asked: False)
    server.search_tools()

    @server.middleware
    async def watch(ctx: Any, params: Any, call_next: Any) -> Any:
        seen.append(params.name)
        return await call_next(ctx, params)

    @server.filter(names="look")
    def mark(ctx: Any, params: Any, result: Any) -> Any:
        return result if result.is_error else trimcp.CallToolResult([trimcp.Text("filtered")])

    async with connected(server) as session:
        assert (await session.call_tool("call_tool", {"name": "look"})).text == "filtered"
        assert seen == ["look", "look"]
        with pytest.raises(RemoteError, match="not allowed"):
            await session.call_tool("call_tool", {"name": "secret"})
        wrong = await session.call_tool("call_tool", {"name": "look", "arguments": {"text": 5}})
        assert wrong.is_error
    assert [record["target"] for record in records] == ["look", "secret", "look"]


async def test_what_cannot_be_seen_is_not_found_and_does_not_exist(autojump_clock: Any) -> None:
    server = office()
    server.add_tool(nothing, name="list_secrets", visible=lambda who: False)
    server.add_tool(nothing, name="list_keys", scopes=["keys"])
    server.disable_tools(tags=["create"])
    async with connected(server, principal=trimcp.Principal("ada", scopes=[])) as session:
        for query in ("secrets", "keys", "create", "search", "call"):
            assert not {*await found(session, query)} & {"list_secrets", "list_keys", "search_tools", "call_tool"}
        assert not [name for name in await found(session, "create an order") if name.startswith("create")]
        for name in ("list_secrets", "create_orders", "nothing_there"):
            with pytest.raises(RemoteError, match=f"unknown tool: {name}"):
                await session.call_tool("call_tool", {"name": name})
        with pytest.raises(RemoteError, match="this needs the scopes keys"):
            await session.call_tool("call_tool", {"name": "list_keys"})
        for wrong in (
            {},
            {"name": "call_tool"},
            {"name": "search_tools"},
            {"name": 5},
            {"name": "today", "arguments": [1]},
        ):
            assert (await session.call_tool("call_tool", wrong)).is_error


async def test_what_a_called_tool_asks_and_reports_goes_through(autojump_clock: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    client = trimcp.Client("c")

    @server.tool
    async def greet(ctx: Context[None]) -> str:
        await ctx.report_progress(1, 2)
        form: Any = {"type": "object", "properties": {"name": {"type": "string"}}}
        return str(((await ctx.elicit("Who?", form)).content or {})["name"])

    @client.elicitation
    async def answer(params: Any) -> trimcp.ElicitResult:
        return trimcp.ElicitResult("accept", {"name": "Ada"})

    server.search_tools()
    for revision in (trimcp.LATEST, trimcp.LATEST_LEGACY):
        async with (
            connected(server, client, revision=revision) as session,
            session.calling("call_tool", {"name": "greet"}) as call,
        ):
            assert (await call.result()).text == "Ada"
            assert [each.progress async for each in call.progress] == [1]


async def test_a_found_tool_may_become_a_task(autojump_clock: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    server.search_tools()

    @server.tool(task="required")  # tasks come later, and have to be inside of the search
    async def slow(ctx: Context[None]) -> bool:
        return ctx.task.id is not None

    async with connected(server, trimcp.Client("c", tasks=True)) as session:
        assert (await session.call_tool("call_tool", {"name": "slow"})).text == "true"


async def test_hundreds_of_tools_are_searched_without_counting_each_again(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    for number in range(500):
        server.add_tool(nothing, name=f"tool_{number}", description="one of many tools")
    server.search_tools()
    counted: list[str] = []
    from trimcp.server import tool_search

    count = tool_search.words_of
    monkeypatch.setattr(tool_search, "words_of", lambda tool: counted.append(tool.name) or count(tool))
    async with connected(server) as session:
        for _ in range(3):
            assert (await found(session, "tool 77"))[0] == "tool_77"
            assert len(counted) == 500
        assert await found(session, "x " * 100_000) == []


@every_revision
async def test_what_is_mounted_is_found_and_called_too(revision: Revision, autojump_clock: Any) -> None:
    far: trimcp.Server[None] = trimcp.Server("far")
    far.add_tool(nothing, name="find_whale", description="Look for a whale in the sea.")
    near: trimcp.Server[None] = trimcp.Server("near", page_size=1)
    near.add_tool(nothing, name="find_sparrow", description="Look for a sparrow in the garden.")
    near.add_tool(nothing, name="find_owl", description="Look for an owl in the barn.")
    server: trimcp.Server[None] = trimcp.Server("all", page_size=2)
    server.search_tools(most=1)
    server.mount(trimcp.proxy(trimcp.in_process(far), name="far"), prefix="far")
    server.mount(near, prefix="near")
    async with connected(server, revision=revision) as session:
        for _ in range(2):
            assert {tool.name for tool in await session.list_tools(fresh=True)} == {"search_tools", "call_tool"}
            for query, name in (("whale", "far__find_whale"), ("owl", "near__find_owl")):
                result = await session.call_tool("search_tools", {"query": query})
                assert f'"name": "{name}"' in result.text
                assert (await session.call_tool("call_tool", {"name": name})).text == "nothing"
        with pytest.raises(RemoteError, match="unknown tool"):
            await session.call_tool("call_tool", {"name": "near__nothing"})


async def test_lists_are_what_they_were_after_a_search(autojump_clock: Any) -> None:
    """What a search lists is not sent: it must not be taken for a page that is."""
    server = office()
    inner: trimcp.Server[None] = trimcp.Server("inner")
    inner.mount(server, prefix="office")
    async with connected(server) as session, connected(inner) as other:
        await found(session, "order")
        assert [tool.name for tool in await session.list_tools()] == ["today", "search_tools", "call_tool"]
        assert [tool.name for tool in await other.list_tools()] == [
            *("office__today", "office__search_tools", "office__call_tool")
        ]
        assert (await other.call_tool("office__call_tool", {"name": "list_orders"})).text == "nothing"
        with pytest.raises(RemoteError, match="invalid cursor"):
            await session.list_page("tools/list", "x")  # type: ignore[arg-type]


@every_revision
async def test_what_a_tool_lists_is_not_sent_to_a_client(revision: Revision, autojump_clock: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def look(ctx: Context[None]) -> str:
        page = await ctx.running.handle_for(ctx, "tools/list", PageParams())
        return " ".join(tool.name for tool in page.value.tools)

    async with connected(server, revision=revision) as session:
        assert (await session.call_tool("look")).text == "look"
        assert [tool.name for tool in await session.list_tools()] == ["look"]
        assert (await session.call_tool("look")).text == "look"


def test_a_server_with_a_search_is_not_included() -> None:
    with pytest.raises(LocalError, match="has a search for tools of its own"):
        trimcp.Server("s").include(office())


def test_wrong_settings_are_refused() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    with pytest.raises(ValueError, match="most"):
        server.search_tools(most=0)
    with pytest.raises(TypeError, match="listed is a list"):
        server.search_tools(listed="today")
    server.add_tool(nothing, name="search_tools")
    with pytest.raises(LocalError, match="named 'search_tools' already"):
        server.search_tools()
