"""Apps and skills over every transport, in every revision that has extensions."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.interaction import extending_server
from tests.interaction.extending_server import PAGE, TEXT
from tests.interaction.links import Links
from trimcp.client.client import Client

APPS = {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html;profile=mcp-app"]}}


async def test_what_is_on_is_declared_and_works(links: Links, clock: Any) -> None:
    links.module = extending_server
    has = links.revision.name >= "2025-06-18"
    async with links(Client("tester", "0.1", extensions=APPS)) as session:
        with trio.fail_after(PATIENCE):
            declared = session.server_capabilities.extensions
            assert declared == (
                {"io.modelcontextprotocol/ui": {}, "io.modelcontextprotocol/skills": {"directoryRead": True}}
                if has
                else None
            )
            tools = {tool.name: tool for tool in await session.list_tools()}
            assert ("refresh" in tools) is has
            assert (await session.call_tool("refresh")).text == "fresh"
            if not has:
                return
            assert (tools["refresh"].app, tools["refresh"].visible_to("model")) == (PAGE, False)
            page = await session.read_resource(PAGE)
            assert page.contents[0].meta == {"ui": {"csp": {"connectDomains": ["https://api.example.com"]}}}
            skills = trimcp.ServerSkills(session, lambda skill: True)
            [skill] = await skills.list_all()
            active = await skills.activate(skill)
            assert (active.instructions, await active.read("logo")) == (TEXT, b"\xff\x00")
            folder: Any = await session.request("resources/directory/read", {"uri": "skill://git-workflow"})
            assert len(folder["resources"]) == 2
            with pytest.raises(trimcp.RemoteError, match="no skill"):
                await skills.get("skill://other/SKILL.md")


async def test_who_shows_no_pages_is_told_of_no_tool_for_them(links: Links, clock: Any) -> None:
    links.module = extending_server
    async with links() as session:
        assert "refresh" not in {tool.name for tool in await session.list_tools()}
