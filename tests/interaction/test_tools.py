"""Tools: listing, calling, what goes wrong, and what results look like in each revision."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import Links
from tests.peers.messages import text_of
from trimcp.client.session import ClientSession
from trimcp.errors import RemoteError
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS
from trimcp.wire.content import AudioContent, EmbeddedResource, ImageContent, ResourceLink, TextContent
from trimcp.wire.fields import ABSENT
from trimcp.wire.revisions import V2025_03_26, V2025_06_18


async def test_tools_are_listed_called_and_answer_in_the_words_of_the_revision(links: Links, clock: Any) -> None:
    async with links() as session:
        await check_list(links, session)
        await check_structured(links, session)
        await check_arguments(links, session)
        await check_content(links, session)


async def check_list(links: Links, session: ClientSession) -> None:
    tools = {tool.name: tool for tool in await session.list_tools()}
    assert list(tools)[:3] == ["echo", "add", "move"], "in the order they were added"
    assert len(tools) > 7, "more than one page"
    echo = tools["echo"]
    assert echo.description == "Say it again."
    assert echo.input_schema["properties"]["text"]["description"] == "what to say"
    assert tools["spell"].input_schema == {
        "type": "object",
        "properties": {"word": {"type": "string", "pattern": "^[a-z]+$"}},
        "required": ["word"],
    }
    assert (tools["add"].title == "Addition") is (links.revision >= V2025_06_18)
    assert (tools["add"].output_schema is not None) is (links.revision >= V2025_06_18)
    first = await session.list_page("tools/list")
    assert [tool.name for tool in first.tools] == list(tools)[:7]
    assert first.next_cursor
    with pytest.raises(RemoteError) as wrong:
        await session.list_page("tools/list", "no such cursor")
    assert wrong.value.code == INVALID_PARAMS


async def check_structured(links: Links, session: ClientSession) -> None:
    result = await session.call_tool("add", {"a": 40, "b": 2})
    assert text_of(result) == "42"
    assert result.structured_content == ({"result": 42} if links.revision >= V2025_06_18 else ABSENT)
    result = await session.call_tool("move", {"point": {"x": 1, "y": 2}, "by": [10, 20]})
    assert orjson.loads(text_of(result)) == {"x": 11, "y": 22}
    if links.revision >= V2025_06_18:
        assert result.structured_content == {"x": 11, "y": 22}
    assert text_of(await session.call_tool("spell", {"word": "trio"})) == "t-r-i-o"


async def check_arguments(links: Links, session: ClientSession) -> None:
    """Wrong arguments are told to the model where the revision says so, and are an error before."""
    for name, arguments, place in (
        ("add", {"a": "5"}, "@ a"),
        ("add", {"a": True}, "@ a"),
        ("add", {"a": 1, "b": -1}, "@ b"),
        ("add", {"a": 1, "c": 1}, "c"),
        ("move", {"point": {"x": 1, "y": None}, "by": [1, 1]}, "@ point.y"),
        ("spell", {"word": "UPPER"}, "@ word"),
        ("echo", {}, "text"),
    ):
        if links.revision.invalid_arguments_are_tool_errors:
            result = await session.call_tool(name, arguments)
            assert result.is_error is True
            assert place in text_of(result)
        else:
            with pytest.raises(RemoteError) as refused:
                await session.call_tool(name, arguments)
            assert refused.value.code == INVALID_PARAMS
            assert place in refused.value.message
            assert place in refused.value.data["problems"][0]
    with pytest.raises(RemoteError, match="unknown tool: nothing") as unknown:
        await session.call_tool("nothing")
    assert unknown.value.code == INVALID_PARAMS


async def check_content(links: Links, session: ClientSession) -> None:
    kinds = {
        "text": (TextContent, None),
        "image": (ImageContent, None),
        "embedded": (EmbeddedResource, None),
        "audio": (AudioContent, V2025_03_26),
        "link": (ResourceLink, V2025_06_18),
    }
    for kind, (block_type, since) in kinds.items():
        result = await session.call_tool("content", {"kind": kind})
        assert result.content[0] == TextContent(f"here is {kind}")
        newest = [type(block) for block in result.content[1:]]
        if since is None or links.revision >= since:
            assert newest == [block_type], kind
        else:
            assert block_type not in newest, "a kind this revision does not have"


async def test_what_goes_wrong_in_a_tool_ends_only_its_call_and_threads_delay_nobody(links: Links) -> None:
    async with links() as session:
        with trio.fail_after(PATIENCE):
            await check_threads_and_slots(session)
        result = await session.call_tool("fail", {"how": "tool"})
        assert (result.is_error, text_of(result)) == (True, "there is no such city")
        with pytest.raises(RemoteError) as crash:
            await session.call_tool("fail", {"how": "crash"})
        assert crash.value.code == INTERNAL_ERROR
        assert "hunter2" not in f"{crash.value.message} {crash.value.data}"
        with pytest.raises(RemoteError) as own:
            await session.call_tool("fail", {"how": "error"})
        assert (own.value.code, own.value.message, own.value.data) == (4711, "the disk is full", {"free": 0})
        with pytest.raises(RemoteError) as broken:
            await session.call_tool("promise")
        assert broken.value.code == INTERNAL_ERROR
        with trio.fail_after(PATIENCE):
            late = await session.call_tool("limited")
        assert late.is_error is True
        assert "0.2 seconds" in text_of(late)
        if links.transport == "stdio":
            assert text_of(await session.call_tool("noisy")) == "quiet"
        assert text_of(await session.call_tool("echo", {"text": "still here"})) == "still here"
    log = links.log()
    assert log.count("RuntimeError: the password is hunter2") == 1
    assert log.count("crashed") == 2, "one for each crash"
    if links.transport == "stdio":
        for stray in ("a stray print", "and another", "and a third", "a child prints"):
            assert stray in links.logged


async def check_threads_and_slots(session: ClientSession) -> None:
    async with session.calling("in_thread", {"text": "sums"}) as call:
        assert text_of(await call.result()) == "sums in a thread"
        assert [(step.progress, step.total) async for step in call.progress] == [(1, 2)]
    most: list[str] = []

    async def enter() -> None:
        most.append(text_of(await session.call_tool("narrow")))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(enter)
    assert max(map(int, most)) == 2
