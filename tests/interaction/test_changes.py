"""Changes: a subscription looks the same in every revision, whatever carries it."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import Links
from tests.peers.messages import text_of
from trimcp.client.session import ClientSession
from trimcp.session.outgoing.listening import PromptsChanged, ResourcesChanged, ResourceUpdated, ToolsChanged


async def test_changes_arrive_and_nothing_that_was_not_asked_for(links: Links, clock: Any) -> None:
    async with links() as session:
        with trio.fail_after(PATIENCE):
            await check_tools(session)
            await check_updates(session)
            await check_prompts_and_resources(session)


async def check_tools(session: ClientSession) -> None:
    before = {tool.name for tool in await session.list_tools()}
    async with session.listen(tools=True) as changes:
        assert changes.acknowledged.tools_list_changed is True
        assert not changes.acknowledged.prompts_list_changed
        await session.call_tool("offer", {"name": "new"})
        assert await changes.receive() == ToolsChanged()
        assert {tool.name for tool in await session.list_tools()} == before | {"new"}
        assert text_of(await session.call_tool("new")) == "new"
        await session.call_tool("withdraw", {"name": "new"})
        assert await changes.receive() == ToolsChanged()
        assert {tool.name for tool in await session.list_tools()} == before
        await session.call_tool("touch", {"uri": "notes://readme"})
        with trio.move_on_after(0.05) as nothing_more:
            await changes.receive()
        assert nothing_more.cancelled_caught, "updates were not asked for"
    with pytest.raises(trio.EndOfChannel):
        await changes.receive()


async def check_updates(session: ClientSession) -> None:
    async with session.listen(resources=["notes://readme", "numbers://1/2"]) as changes:
        for uri in ("notes://pixel", "notes://readme", "numbers://1/2", "numbers://1/3"):
            await session.call_tool("touch", {"uri": uri})
        assert await changes.receive() == ResourceUpdated("notes://readme")
        assert await changes.receive() == ResourceUpdated("numbers://1/2")
        # Two at once, of which each sees what it asked for.
        async with session.listen(resources=["notes://pixel"]) as others:
            await session.call_tool("touch", {"uri": "notes://pixel"})
            await session.call_tool("touch", {"uri": "notes://readme"})
            assert await others.receive() == ResourceUpdated("notes://pixel")
            assert await changes.receive() == ResourceUpdated("notes://readme")


async def check_prompts_and_resources(session: ClientSession) -> None:
    async with session.listen(prompts=True, resources_list=True) as changes:
        await session.call_tool("change_all")
        assert {await changes.receive(), await changes.receive()} == {PromptsChanged(), ResourcesChanged()}
    assert [prompt.name for prompt in await session.list_prompts()] == ["review", "later"]
    [later] = (await session.read_resource("notes://later")).contents
    assert later.text == "later"


async def test_a_server_that_ends_closes_its_subscriptions_gracefully(links: Links, clock: Any) -> None:
    links.grace = 1.0
    async with links() as session:
        with trio.fail_after(PATIENCE):
            async with session.listen(tools=True) as changes:
                await session.call_tool("offer", {"name": "last"})
                links.shut_down()
                seen = [change async for change in changes] if links.modern else [await changes.receive()]
                assert seen == [ToolsChanged()]
            if links.connected:
                await session.wait_lost()
