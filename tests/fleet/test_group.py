"""Several servers in one nursery: opened, used and closed by any task, and dying alone."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, Scripted, text
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, ErrorReply, LocalError
from trimcp.fleet.group import Group
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.memory import memory_channels
from trimcp.wire.revisions import V2025_06_18
from trimcp.wire.tools import ListToolsResult, Tool


def named(name: str) -> HandMade:
    server = HandMade()

    @server.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        return ListToolsResult([Tool("who", {"type": "object"})], ttl_ms=60_000)

    @server.tool
    async def who(params: Any, ctx: Any) -> Any:
        await ctx.report_progress(1)
        return text(name)

    @server.tool
    async def leave(params: Any, ctx: Any) -> Any:
        server.session.close()
        return text("")

    return server


async def test_several_servers_are_used_as_one() -> None:
    async with Group(Client("c")) as group:
        for name in ("a", "b"):
            await group.open(name, named(name))
        assert list(group) == ["a", "b"]
        assert len(group) == 2
        assert [tool.name for tool in await group.list_tools()] == ["a__who", "b__who"]
        assert (await group.call_tool("b__who")).content[0].text == "b"
        assert (await group["a"].call_tool("who")).content[0].text == "a"
        async with group.calling("a__who") as call:
            assert [step.progress async for step in call.progress] == [1]
            assert (await call.result()).content[0].text == "a"
        for unknown in ("c__who", "who"):
            with pytest.raises(LocalError, match="the servers are a, b"):
                await group.call_tool(unknown)


async def test_any_task_may_open_use_and_close() -> None:
    servers = {name: named(name) for name in ("a", "b", "c")}
    async with Group(Client("c")) as group:
        async with trio.open_nursery() as nursery:
            for name, server in servers.items():
                nursery.start_soon(group.open, name, server)
        async with trio.open_nursery() as nursery:
            for name in servers:
                nursery.start_soon(group.call_tool, f"{name}__who")
        async with trio.open_nursery() as nursery:
            for name in servers:
                nursery.start_soon(group.close, name)
        assert list(group) == []
        assert all(server.session.lost for server in servers.values())
        await group.open("a", servers["a"], revision=V2025_06_18)
        assert group["a"].revision is V2025_06_18


async def test_one_death_ends_no_other_and_the_dead_can_be_opened_again() -> None:
    a, b = named("a"), named("b")
    async with Group(Client("c")) as group:
        await group.open("a", HandMadeThatCloses(a))
        await group.open("b", b)
        assert [tool.name for tool in await group.list_tools()] == ["a__who", "b__who"]
        await group.call_tool("a__leave")
        await group["a"].wait_lost()
        with pytest.raises(ConnectionLost):
            await group.call_tool("a__who")
        assert (await group.call_tool("b__who")).content[0].text == "b"
        await trio.testing.wait_all_tasks_blocked()
        assert [tool.name for tool in await group.list_tools()] == ["b__who"]
        await group.open("a", a)
        assert [tool.name for tool in await group.list_tools()] == ["b__who", "a__who"]


class HandMadeThatCloses:
    """A target whose channel ends when its server closes the session."""

    def __init__(self, server: HandMade) -> None:
        self.server = server

    def connect(self) -> Any:
        @asynccontextmanager
        async def opened() -> Any:
            ours, theirs = memory_channels()

            async def serve() -> None:
                async with self.server.serving(ours) as session:
                    await session.closed.wait()

            async with open_service_nursery() as nursery:
                nursery.start_soon(serve)
                yield theirs

        return opened()


async def test_a_server_that_cannot_list_is_left_out(caplog: Any) -> None:
    broken = HandMade()

    @broken.method("tools/list")
    async def tools(params: Any, ctx: Any) -> Any:
        raise ErrorReply(5, "no\n\x1b[2K2026-01-01 ERROR root: forged")

    async with Group(Client("c")) as group:
        await group.open("bad", broken)
        await group.open("good", named("good"))
        assert [tool.name for tool in await group.list_tools()] == ["good__who"]
    assert r"'bad' cannot list its tools: no \x1b[2K2026-01-01 ERROR root: forged (code 5)" in caplog.text


async def test_a_failed_opening_raises_here_and_leaves_the_name_free() -> None:
    async with Group(Client("c")) as group:
        await group.open("good", named("good"))
        with pytest.raises(ConnectionLost):
            await group.open("a", Scripted(lambda message: "die"))
        assert "a" not in group
        await group.open("a", named("a"))
        with pytest.raises(LocalError, match="open already"):
            await group.open("a", named("a"))
        with pytest.raises(LocalError, match="separates"):
            await group.open("a__b", named("a"))
        assert (await group.call_tool("good__who")).content[0].text == "good"


async def test_an_opening_can_be_given_up(autojump_clock: Any) -> None:
    async with Group(Client("c")) as group:
        with trio.move_on_after(1) as scope:
            await group.open("mute", Scripted(lambda message: None))
        assert scope.cancelled_caught
        assert list(group) == []
        with pytest.raises(KeyError):
            group["mute"]
        await group.open("mute", named("mute"))


async def test_the_bodys_exception_leaves_as_itself_and_all_is_closed() -> None:
    server = named("a")
    with pytest.raises(KeyError, match="mine"):
        async with Group(Client("c")) as group:
            await group.open("a", server)
            raise KeyError("mine")
    assert server.session.lost
    with pytest.raises(LocalError, match="async with"):
        await group.open("a", server)


async def test_leaving_while_another_task_opens() -> None:
    outcomes: list[BaseException] = []

    async def open_one(group: Group) -> None:
        try:
            await group.open("mute", Scripted(lambda message: None))
        except ConnectionLost as error:
            outcomes.append(error)

    async with trio.open_nursery() as nursery, Group(Client("c")) as group:
        nursery.start_soon(open_one, group)
        await trio.testing.wait_all_tasks_blocked()
    assert "while 'mute' was being opened" in str(outcomes[0])


async def test_a_cancelled_group_ends(autojump_clock: Any) -> None:
    server = named("a")
    with trio.move_on_after(5) as scope:
        async with Group(Client("c")) as group:
            await group.open("a", server)
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert server.session.lost


async def test_a_failed_opening_forgets_nobody_who_took_its_name(autojump_clock: Any) -> None:
    @asynccontextmanager
    async def broken() -> Any:
        raise ConnectionLost("no such server")
        yield

    for _ in range(20):  # of two tasks that wake together, either may run first
        with trio.fail_after(10):
            async with Group(Client("c")) as group, trio.open_nursery() as nursery:

                async def follow(group: Group = group) -> None:
                    while "a" not in group:
                        await trio.lowlevel.checkpoint()
                    await group._members["a"].ended.wait()
                    await group.open("a", named("a"))

                nursery.start_soon(follow)
                with pytest.raises(ConnectionLost, match="no such server"):
                    await group.open("a", broken())
                await trio.testing.wait_all_tasks_blocked()
                assert (await group.call_tool("a__who")).content[0].text == "a"
