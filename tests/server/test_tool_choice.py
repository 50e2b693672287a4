"""Which tools a client finds: switched on and off, for everyone or one client; the newest of several versions."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import trio

import trimcp
from trimcp.agent_tools import AgentTools
from trimcp.errors import LocalError, RemoteError
from trimcp.session.context import Context
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.revisions import Revision


def files() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("files", dynamic=True)

    @server.tool
    async def read() -> str:
        return "read"

    @server.tool(tags=["admin", "slow"])
    async def delete() -> str:
        return "deleted"

    @server.tool(tags=["admin"])
    async def rename() -> str:
        return "renamed"

    @server.tool
    async def unlock(ctx: Context[None]) -> str:
        server.enable_tools(tags=["admin"], client=ctx)
        return "unlocked"

    @server.tool
    async def lock(ctx: Context[None]) -> str:
        server.disable_tools("read", tags=["admin"], client=ctx)
        return "locked"

    return server


async def names(session: trimcp.ClientSession) -> list[str]:
    return [tool.name for tool in await session.list_tools()]


ALL = ["read", "delete", "rename", "unlock", "lock"]


@every_revision
async def test_tools_are_hidden_and_shown_again_while_the_server_runs(revision: Revision, autojump_clock: Any) -> None:
    server = files()
    async with connected(server, revision=revision) as session, session.listen(tools=True) as changes:
        assert await names(session) == ALL
        server.disable_tools("read", tags=["slow"])
        assert await changes.receive() == trimcp.ToolsChanged()
        assert await names(session) == ["rename", "unlock", "lock"]
        for hidden in ("read", "delete"):
            with pytest.raises(RemoteError, match=f"unknown tool: {hidden}"):
                await session.call_tool(hidden)
        server.enable_tools(tags=["admin"])
        assert await changes.receive() == trimcp.ToolsChanged()
        assert await names(session) == ALL[1:]
        assert (await session.call_tool("delete")).text == "deleted"
        server.enable_tools("read")
        assert await names(session) == ALL


async def test_the_last_word_counts_and_holds_for_tools_added_later(autojump_clock: Any) -> None:
    server = files()
    server.disable_tools(tags=["admin"])
    server.enable_tools("rename")
    async with connected(server) as session:
        assert await names(session) == ["read", "rename", "unlock", "lock"]
        server.disable_tools(tags=["admin"])
        assert await names(session) == ["read", "unlock", "lock"]

        @server.tool(tags=["admin"])
        async def format() -> str:
            return ""

        server.add_tool(format, name="plain")
        assert await names(session) == ["read", "unlock", "lock", "plain"]


@every_revision
async def test_one_client_switches_for_itself_alone(revision: Revision, autojump_clock: Any) -> None:
    server = files()
    server.disable_tools(tags=["admin"])
    async with (
        connected(server, revision=revision) as one,
        connected(server, revision=revision) as other,
        one.listen(tools=True) as told,
        other.listen(tools=True) as untold,
    ):
        await one.call_tool("unlock")
        assert await told.receive() == trimcp.ToolsChanged()
        assert await names(one) == ALL
        assert (await one.call_tool("delete")).text == "deleted"
        with trio.move_on_after(5) as waited:
            await untold.receive()
        assert waited.cancelled_caught
        assert await names(other) == ["read", "unlock", "lock"]
        with pytest.raises(RemoteError, match="unknown tool"):
            await other.call_tool("delete")
        server.disable_tools("rename")  # what was said for a client comes first
        assert await untold.receive() == trimcp.ToolsChanged()
        assert await names(one) == ALL
        await one.call_tool("lock")
        assert await names(one) == ["unlock", "lock"]
    async with connected(server, revision=revision) as again:
        assert await names(again) == ["read", "unlock", "lock"]


async def test_nothing_is_kept_of_sessions_that_have_ended(autojump_clock: Any) -> None:
    server = files()

    async def use() -> None:
        async with connected(server) as session:
            await session.call_tool("lock")
            assert server._switches is not None
            assert len(server._switches._sessions) == 1

    await use()
    gc.collect()
    assert server._switches is not None
    assert len(server._switches._sessions) == 0


async def test_what_may_be_seen_before_is_still_asked(autojump_clock: Any) -> None:
    server = trimcp.Server("s")
    server.add_tool(names, name="never", visible=lambda who: False, input_schema={"type": "object"})
    server.add_tool(files, name="scoped", scopes=["write"], tags=["a"], structured=False)
    server.disable_tools(tags=["b"])
    async with connected(server, principal=trimcp.Principal("ada", scopes=["read"])) as session:
        assert await names(session) == []
    async with connected(server, principal=trimcp.Principal("ada", scopes=["write"])) as session:
        assert await names(session) == ["scoped"]


async def test_wrong_switches_say_what_is_wrong() -> None:
    server = files()
    with pytest.raises(KeyError, match="no tool named 'nothing'"):
        server.disable_tools("read", "nothing")
    with pytest.raises(TypeError, match="by their names"):
        server.disable_tools()
    with pytest.raises(TypeError, match="Context of an async handler, not str"):
        server.enable_tools("read", client="ada")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tags is a list"):
        server.enable_tools(tags="admin")
    with pytest.raises(TypeError, match="tags is a list"):
        server.add_tool(names, name="x", tags="admin", input_schema={"type": "object"})
    async with connected(server) as session:
        assert await names(session) == ALL


async def test_rules_of_one_client_are_bounded(autojump_clock: Any) -> None:
    server = files()

    @server.tool
    async def many(ctx: Context[None]) -> str:
        for number in range(2_000):
            server.disable_tools(tags=[str(number)], client=ctx)
        return "done"

    async with connected(server) as session:
        with pytest.raises(RemoteError, match="internal error"):
            await session.call_tool("many")
        assert len(await names(session)) == 6


# Versions


def versioned() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("sums", dynamic=True)
    for version in ("1.9", "1.10", "1.2"):

        async def add(a: int, said: str = version) -> str:
            return said

        server.add_tool(add, version=version, tags=[f"v{version}"])
    return server


async def test_the_newest_version_is_the_default_and_each_can_be_named(autojump_clock: Any) -> None:
    server = versioned()
    async with connected(server) as session:
        [tool] = await session.list_tools()
        assert (tool.name, tool.meta) == ("add", {"version": "1.10", "trimcp/tags": ["v1.10"]})
        for name, version in (("add", "1.10"), ("add@1.2", "1.2"), ("add@1.9", "1.9"), ("add@1.10", "1.10")):
            assert (await session.call_tool(name, {"a": 1})).text == version
        with pytest.raises(RemoteError, match="unknown tool"):
            await session.call_tool("add@2", {"a": 1})
        server.remove_tool("add@1.10")
        assert (await session.call_tool("add", {"a": 1})).text == "1.9"
        server.disable_tools("add@1.9")
        assert await names(session) == []
        assert (await session.call_tool("add@1.2", {"a": 1})).text == "1.2"
        server.disable_tools("add")
        with pytest.raises(RemoteError, match="unknown tool"):
            await session.call_tool("add@1.2", {"a": 1})
        server.enable_tools("add@1.2")
        server.remove_tool("add")
        assert [*server.tools.items()] == []


async def test_equal_versions_and_mixtures_are_refused() -> None:
    server = versioned()
    with pytest.raises(LocalError, match=r"of version 1\.9\.0 already"):
        server.add_tool(names, name="add", version="1.9.0", input_schema={"type": "object"})
    with pytest.raises(LocalError, match="named 'add' already"):
        server.add_tool(names, name="add", input_schema={"type": "object"})
    server.add_tool(names, name="plain", input_schema={"type": "object"})
    with pytest.raises(LocalError, match="named 'plain' already"):
        server.add_tool(names, name="plain", version="2", input_schema={"type": "object"})
    for wrong in ("", "a@b", "x" * 65, 2):
        with pytest.raises((TypeError, ValueError), match="version is a text"):
            server.add_tool(names, name="other", version=wrong, input_schema={"type": "object"})  # type: ignore[arg-type]


async def test_versions_and_switches_are_included(autojump_clock: Any) -> None:
    server, part = trimcp.Server("s"), versioned()
    server.include(part)
    server.disable_tools(tags=["v1.10"])
    async with connected(server) as session, connected(part) as alone:
        assert await names(session) == []
        assert (await session.call_tool("add@1.2", {"a": 1})).text == "1.2"
        assert await names(alone) == ["add"]
        assert (await alone.call_tool("add", {"a": 1})).text == "1.10"


async def test_agents_find_the_versions_of_own_tools(autojump_clock: Any) -> None:
    server = versioned()
    agents = AgentTools(server)
    assert agents.catalog.find("add", "1.2")[0] == "add@1.2"
    assert agents.catalog.find("add", "1.10")[0] == "add"
    assert agents.catalog.find("add")[0] == "add"


# Over HTTP since 2026-07-28 each request stands alone


async def test_where_requests_stand_alone_a_principal_switches_for_itself() -> None:
    server = files()
    server.disable_tools(tags=["admin"])
    people = {"1" * 40: trimcp.Principal("ada"), "2" * 40: trimcp.Principal("bob")}
    settings = trimcp.HttpSettings(authenticate=trimcp.bearer_tokens(people))
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(trimcp.serve_http, server, port=0, settings=settings))
        ada, bob = (trimcp.http(url, headers={"Authorization": f"Bearer {token}"}) for token in people)
        async with trimcp.Client("c").connect(ada) as session, session.listen(tools=True) as changes:
            await session.call_tool("unlock")
            assert await changes.receive() == trimcp.ToolsChanged()
            assert await names(session) == ALL
            async with trimcp.Client("c").connect(bob) as other:
                assert await names(other) == ["read", "unlock", "lock"]
        async with trimcp.Client("c").connect(ada) as session:
            assert (await session.call_tool("delete")).text == "deleted"
        nursery.cancel_scope.cancel()


async def test_without_a_session_and_a_principal_nothing_is_switched(caplog: pytest.LogCaptureFixture) -> None:
    server = files()
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(trimcp.serve_http, server, port=0))
        async with trimcp.Client("c").connect(trimcp.http(url)) as session:
            with pytest.raises(RemoteError, match="internal error"):
                await session.call_tool("lock")
            assert await names(session) == ALL
        nursery.cancel_scope.cancel()
    assert "neither a session nor a principal" in caplog.text
