"""Quotas as clients meet them: on tools, resources, prompts and completion, by session, principal and name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from trimcp import Limits, Quota
from trimcp.channel import Incoming, MessageChannel
from trimcp.client.session import ClientSession
from trimcp.server.handlers.pools import _MANY, Pools
from trimcp.session.drive import drive
from trimcp.testing import connected, every_revision
from trimcp.transports.memory import memory_channels


@attrs.define
class Workshop:
    """Handlers of every kind that stay under way until they are let go."""

    under_way: int = 0
    most: int = 0
    begun: list[str] = attrs.field(factory=list)
    go: trio.Event = attrs.field(factory=trio.Event)

    async def work(self, name: str = "") -> str:
        self.under_way += 1
        self.begun.append(name)
        self.most = max(self.most, self.under_way)
        try:
            await self.go.wait()
        finally:
            self.under_way -= 1
        return name

    def server(self, limits: Limits | None = None, quota: Quota | None = None) -> trimcp.Server[None]:
        server: trimcp.Server[None] = trimcp.Server("s", limits=limits)

        @server.tool(quota=quota)
        async def work(name: str = "") -> str:
            return await self.work(name)

        @server.tool
        async def free() -> str:
            return "free"

        @server.resource("note://{name}", quota=quota)
        async def note(name: str) -> str:
            return await self.work(name)

        @server.resource("fixed://one", quota=quota)
        async def fixed() -> str:
            return await self.work("fixed")

        @server.prompt(quota=quota)
        async def ask(name: str = "") -> str:
            return await self.work(name)

        @server.complete("ask", "name", quota=quota)
        async def names(typed: str) -> list[str]:
            return [await self.work(typed)]

        return server


ASKED: dict[str, Callable[[ClientSession], Awaitable[Any]]] = {
    "tool": lambda session: session.call_tool("work"),
    "resource template": lambda session: session.read_resource("note://x", fresh=True),
    "resource": lambda session: session.read_resource("fixed://one", fresh=True),
    "prompt": lambda session: session.get_prompt("ask"),
    "completion": lambda session: session.complete_prompt("ask", "name", "a"),
}
KINDS = {"resource template": "resource"}


async def refused(ask: Callable[[ClientSession], Awaitable[Any]], session: ClientSession) -> trimcp.Overloaded:
    with pytest.raises(trimcp.Overloaded) as caught:
        await ask(session)
    return caught.value


@pytest.mark.parametrize("own", [True, False], ids=["its own quota", "that of its kind"])
@pytest.mark.parametrize("kind", ASKED)
@every_revision
async def test_so_many_are_under_way_so_many_wait_and_the_rest_is_refused(
    kind: str, own: bool, revision: trimcp.Revision
) -> None:
    quota, shop, ask = Quota(running=2, waiting=1), Workshop(), ASKED[kind]
    limits = Limits() if own else Limits(**{KINDS.get(kind, kind): quota})
    server = shop.server(limits, quota if own else None)
    async with connected(server, revision=revision) as session, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask, session)
        await wait_all_tasks_blocked()
        assert shop.under_way == 2
        statistics = server.statistics()
        assert (statistics.waiting_turns, statistics.refused) == (1, 0)
        (of_kind,) = statistics.quotas.values()
        assert (of_kind.running, of_kind.waiting, of_kind.most_running) == (2, 1, 2)
        error = await refused(ask, session)
        assert error.code == 1001
        assert error.data["reason"] == "overloaded"
        assert error.retry_after is not None
        assert error.retry_after > 0
        assert server.statistics().refused == 1
        assert (await session.call_tool("free")).content == [trimcp.Text("free")]
        shop.go.set()
    assert shop.most == 2
    assert len(shop.begun) == 3


@every_revision
async def test_a_session_and_a_principal_have_quotas_over_all_they_ask_for(revision: trimcp.Revision) -> None:
    for limits, principals in (
        (Limits(session=Quota(running=2, waiting=0)), ("ada", "ada")),
        (Limits(principal=Quota(running=2, waiting=0)), ("ada", "bob")),
    ):
        shop = Workshop()
        server = shop.server(limits)
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(server.running())
            first, second = [
                await stack.enter_async_context(_session_of(server, running, principal, revision))
                for principal in principals
            ]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ASKED["tool"], first)
                nursery.start_soon(ASKED["prompt"], first)
                await wait_all_tasks_blocked()
                await refused(ASKED["resource"], first)
                await refused(ASKED["completion"], first)
                nursery.start_soon(ASKED["tool"], second)  # another's, and so none of that quota
                await wait_all_tasks_blocked()
                assert shop.under_way == 3
                shop.go.set()
            await ASKED["resource"](first)


async def test_two_sessions_of_one_principal_share_its_quota() -> None:
    shop = Workshop()
    server = shop.server(Limits(principal=Quota(running=1, waiting=0)))
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(server.running())
        first, second, nobody, another = [
            await stack.enter_async_context(_session_of(server, running, principal, trimcp.LATEST))
            for principal in ("ada", "ada", None, None)
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ASKED["tool"], first)
            await wait_all_tasks_blocked()
            await refused(ASKED["tool"], second)
            nursery.start_soon(ASKED["tool"], nobody)  # who is nobody has no such quota
            nursery.start_soon(ASKED["tool"], another)
            await wait_all_tasks_blocked()
            assert shop.under_way == 3
            shop.go.set()


@attrs.define(eq=False)
class _As(MessageChannel):
    """A channel whose other side has shown who it is."""

    channel: MessageChannel
    principal: str | None

    async def send(self, batch: Any) -> None:
        await self.channel.send(batch)

    async def receive(self) -> list[Incoming]:
        return [attrs.evolve(each, principal=self.principal) for each in await self.channel.receive()]

    async def aclose(self) -> None:
        await self.channel.aclose()


def _session_of(server: trimcp.Server[None], running: Any, principal: str | None, revision: trimcp.Revision) -> Any:
    ours, theirs = memory_channels()
    running.nursery.start_soon(drive, running.session(), _As(ours, principal))
    return trimcp.Client("c").connect(theirs, revision=revision)


async def test_a_session_with_much_to_do_delays_another_by_one(autojump_clock: MockClock) -> None:
    server: trimcp.Server[None] = trimcp.Server("s", limits=Limits(tool=Quota(running=1)))
    order: list[str] = []

    @server.tool
    async def work(name: str) -> None:
        order.append(name)
        await trio.sleep(1)

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(server.running())
        busy, modest = [
            await stack.enter_async_context(_session_of(server, running, None, trimcp.LATEST)) for _ in range(2)
        ]
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(busy.call_tool, "work", {"name": "busy"})
            await trio.sleep(0.5)
            nursery.start_soon(modest.call_tool, "work", {"name": "modest"})
            nursery.start_soon(modest.call_tool, "work", {"name": "modest"})
    assert order.index("modest") == 2  # one was under way, one was next
    assert order[2:6] == ["modest", "busy", "modest", "busy"]


@every_revision
async def test_what_could_not_begin_before_its_callers_deadline_is_refused_at_once(
    revision: trimcp.Revision, autojump_clock: MockClock
) -> None:
    shop = Workshop()
    server = shop.server(quota=Quota(per_second=0.1, burst=1))
    shop.go.set()
    async with connected(server, revision=revision) as session:
        await session.call_tool("work")
        began = trio.current_time()
        with trio.fail_after(5):
            error = await refused(ASKED["tool"], session)
        assert trio.current_time() == began
        assert "deadline" in error.message
        assert error.retry_after == pytest.approx(10, abs=0.01)
        with trio.fail_after(15):
            await session.call_tool("work")
        assert trio.current_time() - began == pytest.approx(10, abs=0.01)


async def test_a_handler_that_fails_gives_its_turn_back() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool(max_concurrent=1, timeout=5)
    async def fail() -> None:
        raise trimcp.ToolError("no")

    async with connected(server) as session:
        for _ in range(3):
            assert (await session.call_tool("fail")).is_error
        assert server.statistics().quotas["tool fail"].running == 0


async def test_a_turn_is_waited_for_within_the_tools_time(autojump_clock: MockClock) -> None:
    shop = Workshop()
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool(timeout=3, max_concurrent=1)
    async def work() -> str:
        return await shop.work()

    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "work")
        await wait_all_tasks_blocked()
        result = await session.call_tool("work")
        assert result.is_error
        assert result.content == [trimcp.Text("work did not finish within 3 seconds")]
    assert len(shop.begun) == 1


async def test_sync_handlers_of_sessions_take_turns_at_threads() -> None:
    import threading

    server: trimcp.Server[None] = trimcp.Server("s", max_threads=1)
    order: list[str] = []
    go = threading.Semaphore(0)

    @server.tool
    def work(name: str) -> None:
        order.append(name)
        go.acquire()

    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(server.running())
        busy, modest = [
            await stack.enter_async_context(_session_of(server, running, None, trimcp.LATEST)) for _ in range(2)
        ]
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(busy.call_tool, "work", {"name": "busy"})
            await wait_all_tasks_blocked(0.01)
            nursery.start_soon(modest.call_tool, "work", {"name": "modest"})
            await wait_all_tasks_blocked(0.01)
            threads = server.statistics().threads
            assert threads is not None
            assert (threads.running, threads.waiting) == (1, 4)
            for _ in range(5):
                go.release()
    assert order == ["busy", "busy", "modest", "busy", "busy"]


async def test_quotas_of_those_who_left_are_forgotten() -> None:
    nursery: Any = None
    pools = Pools(Limits(principal=Quota(running=1)), 1, 1, nursery)
    for number in range(4 * _MANY):
        pools._kept(pools._principals, number, pools.limits.principal, "x")
    assert len(pools._principals) <= 2 * _MANY
    held = pools._kept(pools._principals, "held", pools.limits.principal, "x")
    await held.acquire("held")
    for number in range(4 * _MANY):
        pools._kept(pools._principals, -number, pools.limits.principal, "x")
    assert pools._principals["held"] is held


async def test_a_session_that_ends_leaves_no_quota_behind() -> None:
    shop = Workshop()
    shop.go.set()
    server = shop.server(Limits(session=Quota(running=1)))
    async with server.running() as running:
        async with _session_of(server, running, None, trimcp.LATEST) as session:
            await session.call_tool("work")
            assert len(running.pools.sessions) == 1
        await wait_all_tasks_blocked()
        assert not running.pools.sessions


async def test_where_nothing_is_bounded_nothing_is_counted() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def free() -> None: ...

    async with connected(server) as session:
        await session.call_tool("free")
        (running,) = server.runs
        assert running.pools.quotas() == {}
        assert server.statistics().sessions == 1
    assert server.statistics().sessions == 0


async def test_what_sessions_refuse_is_counted_past_their_end() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")

    @server.tool
    async def free() -> None: ...

    async with server.running() as running:
        async with _session_of(server, running, None, trimcp.LATEST) as session:
            await session.call_tool("free")
            for one in running.sessions:
                one.draining.set()
            for _ in range(2):
                with pytest.raises(trimcp.RemoteError):
                    await session.call_tool("free")
            assert server.statistics().refused == 2
        await wait_all_tasks_blocked()
        assert (server.statistics().sessions, server.statistics().refused) == (0, 2)
