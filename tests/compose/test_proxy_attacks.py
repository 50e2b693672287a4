"""A proxy between those who mean harm: a hostile upstream, a lost one, hostile clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

import trimcp
from tests.interaction.proxied import Behind, able
from trimcp.compose.proxy import ProxyServer, proxy
from trimcp.errors import InvalidReply, LocalError, RemoteError
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.drive import AnyChannel, drive
from trimcp.session.limits import Limits
from trimcp.testing.connect import _FromPrincipal
from trimcp.wire.common import META_PROGRESS
from trimcp.wire.lifecycle import SubscriptionFilter
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision
from trimcp.wire.tools import ListToolsResult, Tool

FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


def before(server: Server[Any], **options: Any) -> ProxyServer:
    """A proxy before a server that runs once in this process."""
    behind = Behind(server)
    made = proxy(behind, name="behind", **options)
    made.parts.insert(0, behind.while_running)
    return made


@attrs.define(eq=False)
class Cut:
    """A way to a server, which a test can cut; `down` lets nobody connect."""

    behind: Behind
    down: bool = False
    opened: int = 0
    _end: Callable[[], Awaitable[None]] | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AnyChannel]:
        if self.down:
            raise OSError("nobody listens at /secret/path")
        self.opened += 1
        ours, theirs = trimcp.memory_channels()
        assert self.behind._running is not None
        running = self.behind._running
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.serve, ours)
            self._end = ours.aclose
            yield theirs
            nursery.cancel_scope.cancel()

    async def cut(self) -> None:
        assert self._end is not None
        await self._end()


async def test_a_lost_upstream_is_one_clear_error_and_comes_back(clock: Any) -> None:
    server = Server("behind")

    @server.tool
    async def hang() -> str:
        await trio.sleep_forever()
        return "never"

    @server.tool
    async def echo(text: str) -> str:
        return text

    behind = Behind(server)
    way = Cut(behind)
    made = proxy(way, name="behind")
    made.parts.insert(0, behind.while_running)
    async with trimcp.Client("c").connect(made) as session:
        assert (await session.call_tool("echo", {"text": "a"})).text == "a"
        async with trio.open_nursery() as nursery:
            lost: list[RemoteError] = []

            async def call() -> None:
                with pytest.raises(
                    RemoteError, match="the upstream 'behind' was lost; the request may have been"
                ) as got:
                    await session.call_tool("hang")
                lost.append(got.value)

            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            await way.cut()
        assert lost[0].data == {"reason": "upstream_lost"}
        assert (await session.call_tool("echo", {"text": "b"})).text == "b", "it was connected to again"
        way.down = True
        await way.cut()
        with trio.fail_after(600), pytest.raises(RemoteError, match="the upstream 'behind' is down") as down:
            await session.call_tool("echo", {"text": "c"})
        assert "secret" not in str(down.value)
        way.down = False
        await trio.sleep(120)
        assert (await session.call_tool("echo", {"text": "d"})).text == "d"


async def test_an_upstream_that_cannot_be_reached_is_said_at_the_start() -> None:
    made = proxy(Cut(Behind(Server("x")), down=True), name="gone")
    with pytest.raises(LocalError, match="the upstream 'gone' cannot be reached"):
        async with made.running():
            pass


async def test_endless_pages_are_asked_for_one_by_one(clock: Any) -> None:
    """The proxy holds one page; the client ends it."""
    server = Server("behind")
    pages = 0

    @server.middleware
    async def endless(ctx: Any, params: Any, call_next: Any) -> Any:
        nonlocal pages
        if ctx.method != "tools/list":
            return await call_next(ctx, params)
        pages += 1
        tools = [Tool(name=f"tool {pages} {number}", input_schema={"type": "object"}) for number in range(50)]
        return ListToolsResult(tools=tools, next_cursor=str(pages))

    async with trimcp.Client("c", max_pages=20).connect(before(server)) as session:
        with pytest.raises(InvalidReply, match="more than 20 pages"):
            await session.list_tools()
        assert pages == 20


async def test_progress_that_lies_reaches_nobody(clock: Any) -> None:
    server = Server("behind")

    @server.tool
    async def lie(ctx: Context[Any]) -> str:
        _, job = ctx.internals
        for value in (5, 4, 3, 5, 6):
            job.reports = None  # so that our own server lets it through
            await ctx.report_progress(value, total=1, message="x" * 10)
        return "done"

    async with trimcp.Client("c").connect(before(server)) as session, session.calling("lie") as call:
        assert [step.progress async for step in call.progress] == [5, 6]
        assert (await call.result()).text == "done"


async def test_a_flood_of_progress_is_bounded(clock: Any) -> None:
    server = Server("behind")

    @server.tool
    async def flood(ctx: Context[Any]) -> str:
        for value in range(1, 5_001):
            await ctx.report_progress(value)
        return "done"

    made = before(server, limits=Limits(outbox_messages=8))
    async with trimcp.Client("c").connect(trimcp.in_process(made, framed=True)) as session:
        async with session.calling("flood") as call:
            result = await call.result()
            steps = [step.progress async for step in call.progress]
        assert result.text == "done"
        assert steps == sorted(steps)
        assert steps[-1] == 5_000


def asking(**options: Any) -> Server[Any]:
    server = Server("behind", **options)

    @server.tool
    async def ask(ctx: Context[Any]) -> str:
        answer = await ctx.elicit("Your name?", FORM)
        return f"{answer.action} {answer.content}"

    @server.tool
    async def echo(text: str) -> str:
        return text

    return server


async def raw(session: trimcp.ClientSession, **more: Any) -> dict[str, Any]:
    """Call the tool that asks, once, and return what came, raw."""
    pending = await session.session.start_call("tools/call", trimcp.wire.tools.CallToolParams(name="ask", **more))
    return await pending.raw()


async def test_calls_that_are_left_with_questions_are_bounded_and_end(clock: Any) -> None:
    made = before(asking(), revision=LATEST_LEGACY, limits=Limits(answer_timeout=60))
    async with able().connect(made, revision=LATEST) as session:
        for _ in range(16):
            assert (await raw(session))["resultType"] == "input_required"
        refused = await raw(session)
        assert refused["isError"]
        assert "wait for its answers" in refused["content"][0]["text"]
        assert (await session.call_tool("echo", {"text": "still"})).text == "still"
        assert len(made.relays.held) == 16
        await trio.sleep(61)
        assert made.relays.held == {}
        assert (await session.call_tool("ask")).text == "accept {'name': 'Ada'}"
    assert made.relays._open == []


async def test_a_state_that_is_not_ours_or_used_up_is_refused(clock: Any) -> None:
    made = before(asking(), revision=LATEST_LEGACY)
    answer = {"question 1": {"action": "accept", "content": {"name": "Ada"}}}
    async with able().connect(made, revision=LATEST) as session:
        asked = await raw(session)
        state = asked["requestState"]
        assert list(asked["inputRequests"]) == ["question 1"]
        for wrong in (state[:-2] + "AA", "x", state[1:]):
            with pytest.raises(RemoteError, match="requestState is not valid"):
                await raw(session, request_state=wrong, input_responses=answer)
        with pytest.raises(RemoteError, match=r"inputResponses\.question 1 is invalid"):
            await raw(session, request_state=state, input_responses={"question 1": {"action": 7}})
        assert (await raw(session, request_state=state))["resultType"] == "input_required", "it is asked again"
        done = await raw(session, request_state=state, input_responses=answer)
        assert done["content"][0]["text"] == "accept {'name': 'Ada'}"
        with pytest.raises(RemoteError, match="no longer under way"):
            await raw(session, request_state=state, input_responses=answer)


async def test_a_state_of_the_upstream_is_sealed_for_its_client(clock: Any) -> None:
    """What the upstream would take from anybody that we speak for comes back only from the client that got it."""
    made = before(asking())
    async with able().connect(made, revision=LATEST) as session:
        asked = await raw(session)
        [key] = asked["inputRequests"]
        answer = {key: {"action": "accept", "content": {"name": "Eve"}}}
        done = await raw(session, request_state=asked["requestState"], input_responses=answer)
        assert done["content"][0]["text"] == "accept {'name': 'Eve'}"
        with pytest.raises(RemoteError, match="requestState is not valid"):
            await raw(session, request_state="AAAA", input_responses=answer)


async def test_connections_are_bounded_and_go_with_their_sessions(clock: Any) -> None:
    made = before(asking(), max_connections=2)
    async with made.running() as running:
        target = trimcp.in_process(running)
        async with able().connect(target) as one, able().connect(target) as two, able().connect(target) as three:
            assert (await one.call_tool("echo", {"text": "1"})).text == "1"
            assert (await two.call_tool("echo", {"text": "2"})).text == "2"
            with pytest.raises(RemoteError, match="too many connections"):
                await three.call_tool("echo", {"text": "3"})
        await trio.testing.wait_all_tasks_blocked()
        assert made.relays._open == []


@asynccontextmanager
async def connected_as(
    running: Running, who: str | None, revision: Revision = LATEST, **options: Any
) -> AsyncIterator[trimcp.ClientSession]:
    """A session of somebody with a run of a proxy; `options` are the client's."""
    ours, theirs = trimcp.memory_channels()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.serve, ours if who is None else _FromPrincipal(ours, trimcp.Principal(who)))
        async with trimcp.Client("c", **options).connect(theirs, revision=revision) as session:
            yield session
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST])
async def test_what_clients_tell_an_upstream_that_is_away_is_bounded_in_bytes(clock: Any, revision: Revision) -> None:
    behind = Behind(asking())
    way = Cut(behind)
    made = proxy(way, name="behind", notifications=["notifications/said"])
    made.parts.insert(0, behind.while_running)
    async with made.running() as running:
        way.down = True
        ours, theirs = trimcp.memory_channels()
        peer = running.session()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drive, peer, ours)
            async with trimcp.Client("c").connect(theirs, revision=revision) as session:
                for _ in range(10):
                    await session.notify("notifications/said", {"text": "x" * 300_000})
                await trio.testing.wait_all_tasks_blocked()
                assert peer.statistics().dropped == 7
            nursery.cancel_scope.cancel()


OnBothEras = pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST])


@OnBothEras
async def test_nobody_takes_all_connections_by_many_sessions(clock: Any, revision: Revision) -> None:
    made = before(asking(), max_connections=20)
    async with made.running() as running, AsyncExitStack() as stack:
        refused = 0
        for _ in range(40):
            session = await stack.enter_async_context(connected_as(running, "eve", revision))
            try:
                await session.call_tool("echo", {"text": "a"})
            except RemoteError as error:
                assert "too many connections" in str(error)  # noqa: PT017 -- some are not refused
                refused += 1
            await trio.testing.wait_all_tasks_blocked()
            assert len(made.relays._open) <= 20
        assert refused >= 10
        for _ in range(3):
            ada = await stack.enter_async_context(connected_as(running, "ada", revision))
            assert (await ada.call_tool("echo", {"text": "b"})).text == "b"
        await trio.testing.wait_all_tasks_blocked()
        assert len(made.relays._open) <= 20


async def test_a_session_whose_connection_gave_way_gets_another_and_hears_of_changes(clock: Any) -> None:
    server = asking(dynamic=True)
    made = before(server, max_connections=4)
    async with made.running() as running, AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(connected_as(running, "eve", LATEST_LEGACY)) for _ in range(4)]
        for session in sessions:
            assert (await session.call_tool("echo", {"text": "a"})).text == "a"
        async with connected_as(running, "ada", LATEST_LEGACY) as ada:
            assert (await ada.call_tool("echo", {"text": "b"})).text == "b"
        await trio.testing.wait_all_tasks_blocked()
        first = sessions[0]
        async with first.listen(tools=True) as changes:
            assert (await first.call_tool("echo", {"text": "c"})).text == "c", "it is opened again"
            await trio.testing.wait_all_tasks_blocked()

            @server.tool
            async def later() -> str:
                return "later"

            with trio.fail_after(60):
                assert await anext(aiter(changes)) is not None


async def test_calls_under_way_are_not_ended_for_a_newcomer(clock: Any) -> None:
    server = asking()

    @server.tool
    async def hang() -> str:
        await trio.sleep(3600)
        return "done"

    made = before(server, max_connections=4)
    async with made.running() as running, trio.open_nursery() as nursery, AsyncExitStack() as stack:
        done: list[str] = []
        for _ in range(4):
            session = await stack.enter_async_context(connected_as(running, "eve", LATEST))

            async def call(session: trimcp.ClientSession = session) -> None:
                done.append((await session.call_tool("hang")).text)

            nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        ada = await stack.enter_async_context(connected_as(running, "ada", LATEST))
        with pytest.raises(RemoteError, match="too many connections"):
            await ada.call_tool("echo", {"text": "b"})
        await trio.sleep(3601)
        assert done == ["done"] * 4
        assert (await ada.call_tool("echo", {"text": "b"})).text == "b"


async def test_one_connection_can_be_shared_and_then_nobody_is_asked(clock: Any) -> None:
    server = asking()
    made = before(server, shared=True, max_connections=1)
    async with made.running() as running:
        target = trimcp.in_process(running)
        async with able().connect(target) as one, able().connect(target, revision=LATEST_LEGACY) as two:
            for session in (one, two):
                assert (await session.call_tool("echo", {"text": "1"})).text == "1"
            assert len(made.relays._open) == 1
            with pytest.raises(RemoteError):
                await one.call_tool("ask")
            assert (await two.call_tool("ask")).is_error


async def test_a_task_is_its_callers_alone_though_the_upstream_knows_one_caller(clock: Any) -> None:
    server = Server("behind")

    @server.tool(task="required")
    async def slow(ctx: Context[Any]) -> str:
        await trio.sleep(60)
        await ctx.report_progress(1, message="half")
        await trio.sleep(60)
        return "done"

    made = before(server)
    async with (
        made.running() as running,
        connected_as(running, "ada", tasks=True) as ada,
        connected_as(running, "eve", tasks=True) as eve,
        connected_as(running, None, tasks=True) as nobody,
    ):
        task = await ada.start_task("slow")
        assert task.id is not None
        wanted = SubscriptionFilter(task_ids=[task.id])
        for other in (eve, nobody):
            stolen = other.task(task.id)
            with pytest.raises(RemoteError, match="there is no such task"):
                await stolen.state()
            with pytest.raises(RemoteError, match="there is no such task"):
                await stolen.cancel()
            async with other.subscriptions.listening(wanted) as changes:
                assert not changes.acknowledged.task_ids
        async with ada.subscriptions.listening(wanted) as changes:
            assert changes.acknowledged.task_ids == [task.id]
            told: Any = await anext(aiter(changes))
            state = changes.tasks[told.id]
            assert (told.id, state["status"], state["_meta"][META_PROGRESS]["progress"]) == (task.id, "working", 1)
        assert (await ada.task(task.id).result()).text == "done"
        assert (await nobody.call_tool("slow")).text == "done", "without a principal an id is as the upstream made it"
