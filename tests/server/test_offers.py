"""A server that has no resources, prompts or tools, and says so."""

from __future__ import annotations

from typing import Any

import pytest

import trimcp
import trimcp.testing
from trimcp.wire.codes import METHOD_NOT_FOUND
from trimcp.wire.prompts import PromptReference

LISTS = {"tools": "list_tools", "resources": "list_resources", "prompts": "list_prompts"}


@pytest.mark.parametrize("offers", [["tools"], ["resources", "prompts"], [], {"tools", "resources", "prompts"}])
@pytest.mark.parametrize("dynamic", [False, True])
@trimcp.testing.every_revision
async def test_only_what_is_offered_is_declared_and_served(
    offers: Any, dynamic: bool, revision: trimcp.Revision
) -> None:
    server: trimcp.Server[None] = trimcp.Server("s", offers=offers, dynamic=dynamic)
    async with trimcp.testing.connected(server, revision=revision) as session:
        capabilities = session.server_capabilities
        assert {name for name in LISTS if getattr(capabilities, name) is not None} == set(offers)
        for name, method in LISTS.items():
            assert await getattr(session, method)() == []
            if name not in offers:
                with pytest.raises(trimcp.RemoteError) as caught:
                    await session.list_page(f"{name}/list")
                assert caught.value.code == METHOD_NOT_FOUND
        if "prompts" not in offers:
            with pytest.raises(trimcp.RemoteError):
                await session.complete(PromptReference("p"), "a", "")
        if dynamic:
            async with session.listen(tools=True, prompts=True, resources_list=True) as changes:
                agreed = changes.acknowledged
                told = (agreed.tools_list_changed, agreed.resources_list_changed, agreed.prompts_list_changed)
                assert [bool(each) for each in told] == [name in offers for name in ("tools", "resources", "prompts")]


@pytest.mark.parametrize("kind", LISTS)
def test_what_is_not_offered_cannot_be_added(kind: str) -> None:
    server: trimcp.Server[None] = trimcp.Server("s", offers=[name for name in LISTS if name != kind])

    def function() -> str:
        return ""

    add = {
        "tools": lambda: server.add_tool(function),
        "resources": lambda: server.add_resource("a://b", "text"),
        "prompts": lambda: server.add_prompt(function),
    }
    with pytest.raises(trimcp.LocalError, match=f"does not offer {kind}; see Server"):
        add[kind]()
    for other in LISTS:
        if other != kind:
            add[other]()


@pytest.mark.parametrize("offers", ["tools", ["toools"], ["completions"]])
def test_what_a_server_cannot_offer_is_refused(offers: Any) -> None:
    with pytest.raises(ValueError, match="offers are some of 'tools', 'resources', 'prompts'"):
        trimcp.Server("s", offers=offers)
