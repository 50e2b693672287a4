"""The server as a whole: lifespan, middleware, notifications, what it announces, several sessions, its end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import pytest
import trio
import trio.testing

import trimcp
from tests.peers.messages import text_of
from trimcp.channel import Kind, Outgoing
from trimcp.client.client import Client
from trimcp.errors import ErrorReply, LocalError, McpError, RemoteError
from trimcp.run import in_process
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.drive import drive
from trimcp.testing.connect import connected, every_revision
from trimcp.transports.memory import memory_channels
from trimcp.wire.codes import CANCELLED_BY_DRAIN
from trimcp.wire.content import TextContent
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, Revision
from trimcp.wire.tools import CallToolResult

both_eras = pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)


class OurOwnError(Exception):
    pass


async def test_the_lifespan_surrounds_everything_and_its_state_reaches_handlers() -> None:
    happened: list[str] = []

    @asynccontextmanager
    async def lifespan(server: Server[dict[str, int]]) -> AsyncIterator[dict[str, int]]:
        happened.append(f"enter {server.info.name}")
        yield {"answer": 42}
        happened.append("leave")

    server = Server("s", lifespan=lifespan)

    @server.tool
    async def tool(ctx: Context[dict[str, int]]) -> str:
        async def background() -> None:
            try:
                await trio.sleep_forever()
            finally:
                happened.append("background ended")

        ctx.server.start_soon(background)
        happened.append("tool")
        return str(ctx.state["answer"])

    async with connected(server) as session:
        assert text_of(await session.call_tool("tool")) == "42"
        await trio.testing.wait_all_tasks_blocked()
    assert happened == ["enter s", "tool", "background ended", "leave"]


@pytest.mark.parametrize("where", ["enter", "leave", "body", "both"])
async def test_what_a_lifespan_or_its_body_raises_leaves_as_itself(where: str) -> None:
    seen: list[BaseException] = []

    @asynccontextmanager
    async def lifespan(server: Server[None]) -> AsyncIterator[None]:
        if where == "enter":
            raise OurOwnError("enter")
        try:
            yield
        except OurOwnError as error:
            seen.append(error)
            if where == "both":
                raise OurOwnError("instead") from error
            raise
        if where == "leave":
            raise OurOwnError("leave")

    server = Server("s", lifespan=lifespan)
    with pytest.raises(OurOwnError) as caught:
        async with server.running():
            assert where != "enter"
            if where in ("body", "both"):
                raise OurOwnError("body")
    assert str(caught.value) == {"both": "instead"}.get(where, where)
    assert [str(error) for error in seen] == (["body"] if where in ("body", "both") else [])
    assert not server.runs


async def test_middleware_runs_around_requests_first_added_outermost() -> None:
    server = Server("s")
    order: list[str] = []

    def add(name: str) -> None:
        @server.middleware
        async def middleware(ctx: Any, params: Any, call_next: Any) -> Any:
            order.append(f"{name} before {ctx.method}")
            try:
                return await call_next(ctx, params)
            finally:
                order.append(f"{name} after")

    add("a")
    add("b")

    @server.tool
    async def tool() -> str:
        order.append("tool")
        return "ok"

    async with connected(server) as session:
        await session.call_tool("tool")
        assert order == ["a before tools/call", "b before tools/call", "tool", "b after", "a after"]
        order.clear()
        await session.list_tools()
        assert order[0] == "a before tools/list"
        with pytest.raises(LocalError, match="while the server runs"):
            add("c")


async def test_a_method_cannot_be_added_while_the_server_runs() -> None:
    server = Server("s")
    add = server.method("example/early")
    async with connected(server):
        for decorate in (add, server.method("example/late")):
            with pytest.raises(LocalError, match="while the server runs"):

                @decorate
                async def method(ctx: Any, params: Any) -> Any:
                    return {}

    assert not server.foreign


async def test_middleware_may_answer_refuse_change_and_crash(caplog: Any) -> None:
    server = Server("s")

    @server.middleware
    async def middleware(ctx: Any, params: Any, call_next: Any) -> Any:
        name = getattr(params, "name", None)
        if name == "answered":
            return CallToolResult([TextContent("by middleware")])
        if name == "refused":
            raise ErrorReply(403, "no")
        if name == "crashed":
            raise ValueError("secret")
        if name == "changed":
            params = attrs.evolve(params, name="real")
        return await call_next(ctx, params)

    @server.tool
    async def real() -> str:
        return "real"

    async with connected(server) as session:
        assert text_of(await session.call_tool("answered")) == "by middleware"
        assert text_of(await session.call_tool("changed")) == "real"
        with pytest.raises(RemoteError, match="no") as refused:
            await session.call_tool("refused")
        assert refused.value.code == 403
        with pytest.raises(RemoteError) as crashed:
            await session.call_tool("crashed")
        assert "secret" not in str(crashed.value)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


async def test_notification_handlers_all_run_and_a_crash_ends_nothing(caplog: Any) -> None:
    server = Server("s")
    heard: list[Any] = []

    @server.notification("notifications/roots/list_changed")
    async def crashes(params: Any) -> None:
        heard.append("first")
        raise ValueError("a bug")

    @server.notification("notifications/roots/list_changed")
    async def second(params: Any) -> None:
        heard.append("second")

    @server.notification("notifications/initialized")
    async def initialized(params: Any) -> None:
        heard.append("initialized")

    client = Client("c", roots=["file:///a"])
    async with connected(server, client, revision=LATEST_LEGACY) as session:
        await trio.testing.wait_all_tasks_blocked()
        client.set_roots(["file:///b"])
        await trio.testing.wait_all_tasks_blocked()
        await session.ping()
    assert heard == ["initialized", "first", "second"]
    assert "a bug" in caplog.text


@every_revision
async def test_a_server_announces_what_it_has(revision: Revision) -> None:
    async with connected(Server("s"), revision=revision) as session:
        capabilities = session.server_capabilities
        assert [capabilities.tools.list_changed, capabilities.prompts.list_changed] == [False, False]
        assert capabilities.resources.list_changed is False
        assert not capabilities.resources.subscribe
        assert session.instructions is None
        assert await session.list_tools() == []
        assert await session.list_prompts() == []
        assert await session.list_resources() == []
        assert await session.list_resource_templates() == []
    dynamic = Server("s", dynamic=True, instructions="Read.", extensions={"example.org/x": {"a": 1}})
    async with connected(dynamic, revision=revision) as session:
        capabilities = session.server_capabilities
        assert capabilities.tools.list_changed is True
        assert capabilities.resources.subscribe is True
        assert session.instructions == "Read."
        assert capabilities.extensions == ({"example.org/x": {"a": 1}} if revision.name >= "2025-06-18" else None)


@both_eras
async def test_what_changed_once_is_announced_to_later_clients(revision: Revision) -> None:
    server = Server("s")
    async with server.running():
        server.add_tool(lambda: 1, name="late")
    async with connected(server, revision=revision) as session:
        assert session.server_capabilities.tools.list_changed is True
        assert session.server_capabilities.prompts.list_changed is False


@both_eras
async def test_lists_may_be_paged_and_kept(revision: Revision) -> None:
    server = Server("s", page_size=2, list_ttl_ms=5_000, list_cache_scope="private")
    for number in range(5):
        server.add_tool(lambda: "x", name=f"tool{number}")
    async with connected(server, revision=revision) as session:
        assert [tool.name for tool in await session.list_tools()] == [f"tool{number}" for number in range(5)]
        page = await session.list_page("tools/list", fresh=True)
        assert len(page.tools) == 2
        if revision.modern:
            assert (page.ttl_ms, page.cache_scope) == (5_000, "private")


async def test_a_list_is_encoded_once_for_all_sessions_and_anew_after_a_change() -> None:
    server = Server("s")

    @server.tool
    async def first() -> str:
        return "x"

    async with server.running() as running:
        for _ in range(3):
            async with connected(server) as session:
                assert [tool.name for tool in await session.list_tools()] == ["first"]
        assert len(server.tools._pages) == 1
        server.add_tool(first, name="second")
        assert len(server.tools._pages) == 0
        async with connected(server) as session:
            assert [tool.name for tool in await session.list_tools()] == ["first", "second"]
            server.remove_tool("first")
            assert [tool.name for tool in await session.list_tools(fresh=True)] == ["second"]
    assert running not in server.runs


@every_revision
async def test_a_server_may_speak_some_revisions_only(revision: Revision) -> None:
    others = [r for r in REVISIONS if r is not revision]
    async with connected(Server("s", revisions=[revision]), revision=revision) as session:
        await session.ping()
    async with Client("c").connect(in_process(Server("s", revisions=[revision]))) as session:
        assert session.revision is revision
    with pytest.raises(McpError):
        async with Client("c", revisions=others).connect(in_process(Server("s", revisions=[revision]))):
            pass


async def test_draining_reaches_every_session(autojump_clock: trio.testing.MockClock) -> None:
    server = Server("s")

    @server.tool
    async def wait(seconds: float) -> str:
        await trio.sleep(seconds)
        return "done"

    outcomes: list[Any] = []

    async def ask(session: Any, seconds: float) -> None:
        try:
            outcomes.append(text_of(await session.call_tool("wait", {"seconds": seconds})))
        except RemoteError as error:
            outcomes.append(error.code)

    async with server.running() as running, trio.open_nursery() as nursery:
        for seconds in (1, 2, 60):
            ours, theirs = memory_channels()
            nursery.start_soon(drive, running.session(), ours)

            async def use(theirs: Any = theirs, seconds: float = seconds) -> None:
                async with Client("c").connect(theirs) as session:
                    await ask(session, seconds)
                    await session.wait_lost()

            nursery.start_soon(use)
        await trio.sleep(0.5)
        assert len(running.sessions) == 3
        began = trio.current_time()
        await running.drain(5)
        assert trio.current_time() - began == pytest.approx(5, abs=0.01)
        await trio.testing.wait_all_tasks_blocked()
        assert not running.sessions
    assert outcomes == ["done", "done", CANCELLED_BY_DRAIN]


@both_eras
async def test_a_crash_may_be_let_through_in_tests(revision: Revision) -> None:
    server = Server("s", handler_errors="raise")

    @server.tool
    async def crash() -> str:
        raise OurOwnError("seen by the test")

    with pytest.raises((OurOwnError, BaseExceptionGroup)) as caught:
        async with connected(server, revision=revision) as session:
            await session.call_tool("crash")
    leaves = [caught.value]
    while isinstance(leaves[0], BaseExceptionGroup):
        leaves = [leaf for group in leaves for leaf in getattr(group, "exceptions", [group])]
    assert any(isinstance(leaf, OurOwnError) for leaf in leaves)


async def test_cancelling_serve_stops_handlers_and_closes_the_channel() -> None:
    stopped = trio.Event()
    started = trio.Event()
    server = Server("s")

    @server.tool
    async def hang() -> str:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            stopped.set()
        return "never"

    ours, theirs = memory_channels()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, ours)
        meta = {
            "io.modelcontextprotocol/protocolVersion": LATEST.name,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "hang", "_meta": meta}}
        await theirs.send([Outgoing(orjson.dumps(call), Kind.REQUEST)])
        await started.wait()
        nursery.cancel_scope.cancel()
    assert stopped.is_set()
    with pytest.raises(trio.EndOfChannel):
        while True:
            await theirs.receive()


async def test_one_server_may_run_many_times_at_once() -> None:
    entered: list[int] = []

    @asynccontextmanager
    async def lifespan(server: Server[int]) -> AsyncIterator[int]:
        entered.append(len(entered))
        yield entered[-1]

    server = Server("s", lifespan=lifespan)

    @server.tool
    async def which(ctx: Context[int]) -> int:
        return ctx.state

    async with connected(server) as first, connected(server) as second:
        assert text_of(await first.call_tool("which")) == "0"
        assert text_of(await second.call_tool("which")) == "1"
        assert len(server.runs) == 2


async def test_the_decorators_leave_the_function_as_it_was() -> None:
    server = Server("s")

    @server.tool
    def tool(a: int) -> int:
        return a + 1

    @server.prompt(title="P")
    def prompt() -> str:
        return "p"

    @server.resource("a://b")
    def resource() -> str:
        return "r"

    assert (tool(1), prompt(), resource()) == (2, "p", "r")


@pytest.mark.parametrize("memory", [0, -1, 16 * 1024 * 1024 - 1, 1e9, True, "256 MiB"])
def test_memory_holds_four_of_the_largest_messages(memory: Any) -> None:
    with pytest.raises(ValueError, match=r"at least four times the largest message \(16777216\)"):
        Server("x", memory=memory)


def test_by_default_there_is_memory_for_four_of_the_largest_messages() -> None:
    assert Server("x").budget.bound == 256 * 1024 * 1024
    large = trimcp.Limits(max_message=100 * 1024 * 1024)
    assert Server("x", limits=large).budget.bound == 400 * 1024 * 1024
    assert Server("x", memory=16 * 1024 * 1024).budget.bound == 16 * 1024 * 1024
