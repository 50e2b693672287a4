"""Sync handlers in real threads: how they ask, how they learn that nobody waits, and what their context says."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

import trimcp
from trimcp.testing import connected
from trimcp.wire.revisions import V2025_06_18

NAME_FORM = {"type": "object", "properties": {"name": {"type": "string"}}}
can_ask = pytest.mark.parametrize(
    "revision",
    [revision for revision in trimcp.REVISIONS if revision >= V2025_06_18],
    ids=lambda revision: revision.name,
)


async def until_over(session: trimcp.ClientSession) -> None:
    """Return when the server has nothing under way and no thread is left over."""
    assert session.peer is not None
    with trio.fail_after(60):
        while session.peer.statistics().running or session.peer.statistics().abandoned_threads:
            await trio.lowlevel.checkpoint()


@can_ask
async def test_a_thread_asks_the_user(revision: trimcp.Revision) -> None:
    server, client = trimcp.Server("s"), trimcp.Client("c")
    left: list[BaseException | None] = []

    @server.tool
    def greet(*, ctx: trimcp.ThreadContext) -> str:
        try:
            answer = ctx.elicit("Your name?", NAME_FORM)
        except BaseException as error:
            left.append(error)
            raise
        left.append(None)
        assert answer.content
        return f"Hello {answer.content['name']}"

    @client.elicitation
    async def ask(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult("accept", {"name": "Ada"})

    with trio.fail_after(60):
        async with connected(server, client, revision=revision) as session:
            result = await session.call_tool("greet")
            assert result.content == [trimcp.Text("Hello Ada")]
            await until_over(session)
    # Where the server may not call its client, the first run unwinds like any handler's; its thread in its own time.
    unwound = [error for error in left if error is not None]
    assert [type(error) for error in unwound] == ([trio.Cancelled] if revision.modern else [])
    assert len(left) - len(unwound) == 1


async def test_a_cancelled_thread_is_stopped_at_its_next_word() -> None:
    server = trimcp.Server("s")
    started, told, reasons = trio.Event(), threading.Event(), []

    @server.tool
    def work(*, ctx: trimcp.ThreadContext) -> str:
        ctx.report_progress(1)
        trio.from_thread.run_sync(started.set)
        told.wait()
        reasons.append(ctx.cancel_reason)
        ctx.report_progress(2)
        reasons.append("went on")
        return "done"

    with trio.fail_after(60):
        async with connected(server) as session, trio.open_nursery() as nursery:
            nursery.start_soon(session.call_tool, "work")
            await started.wait()
            nursery.cancel_scope.cancel()
            assert session.peer is not None
            while not session.peer.statistics().abandoned_threads:
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
            told.set()
            with trio.CancelScope(shield=True):
                await until_over(session)
    assert reasons == [trimcp.CancelReason.PEER]


async def test_a_thread_that_waits_for_an_answer_is_stopped_with_its_call() -> None:
    server, client = trimcp.Server("s"), trimcp.Client("c")
    asked, ended = trio.Event(), threading.Event()

    @server.tool
    def greet(*, ctx: trimcp.ThreadContext) -> str:
        try:
            return ctx.elicit("Your name?", NAME_FORM).action
        finally:
            ended.set()

    @client.elicitation
    async def never(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        asked.set()
        await trio.sleep_forever()
        raise AssertionError

    with trio.fail_after(60):
        async with connected(server, client, revision=trimcp.LATEST_LEGACY) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call_tool, "greet")
                await asked.wait()
                nursery.cancel_scope.cancel()
            assert await trio.to_thread.run_sync(ended.wait, 5)


async def test_a_thread_of_the_handlers_own_may_use_the_context_while_the_call_lasts() -> None:
    server = trimcp.Server("s")
    go, errors, seen = threading.Event(), [], []

    @server.tool
    def work(*, ctx: trimcp.ThreadContext) -> str:
        def second() -> None:
            ctx.report_progress(1)
            seen.append(1)
            go.wait()
            try:
                ctx.report_progress(2)
            except trimcp.LocalError as error:
                errors.append(str(error))

        helper = threading.Thread(target=second, name="helper")
        helper.start()
        while not seen:
            pass
        threads.append(helper)
        return "done"

    threads: list[threading.Thread] = []
    with trio.fail_after(60):
        async with connected(server) as session:
            async with session.calling("work") as call:
                assert [step.progress async for step in call.progress] == [1]
                await call.result()
            go.set()
            await trio.to_thread.run_sync(threads[0].join)
    assert errors == ["the request is over; its context can no longer be used"]


async def test_what_a_thread_raises_stays_itself() -> None:
    server = trimcp.Server("s")

    @server.tool
    def refuse() -> str:
        raise trimcp.ToolError("no luck")

    async with connected(server) as session:
        result = await session.call_tool("refuse")
    assert result.is_error
    assert result.content == [trimcp.Text("no luck")]


async def test_the_facts_of_the_request_are_there() -> None:
    @asynccontextmanager
    async def lifespan(server: trimcp.Server[dict[str, int]]) -> AsyncGenerator[dict[str, int], None]:
        yield {"lamp": 3}

    server = trimcp.Server("s", lifespan=lifespan)

    @server.tool
    def facts(*, ctx: trimcp.ThreadContext[dict[str, int]]) -> dict[str, object]:
        assert ctx.peer is not None
        assert ctx.admission.revision is ctx.revision
        assert ctx.capabilities
        assert not hasattr(ctx, "session")
        return {
            "state": ctx.state,
            "peer": ctx.peer.name,
            "revision": ctx.revision.name,
            "method": ctx.method,
            "id": isinstance(ctx.request_id, int | str),
            "meta": ctx.meta["example/key"],
            "trace": dict(ctx.trace),
            "headers": dict(ctx.headers),
            "principal": ctx.principal,
            "cancelled": [ctx.cancel_reason, ctx.cancel_detail],
            "unlimited": ctx.deadline > 1e300,
        }

    async with connected(server, trimcp.Client("thread-test")) as session:
        result = await session.call_tool("facts", meta={"example/key": 7, "traceparent": "00-1-2-01"})
    assert result.structured_content == {
        "state": {"lamp": 3},
        "peer": "thread-test",
        "revision": trimcp.LATEST.name,
        "method": "tools/call",
        "id": True,
        "meta": 7,
        "trace": {"traceparent": "00-1-2-01"},
        "headers": {},
        "principal": None,
        "cancelled": [None, None],
        "unlimited": True,
    }


async def test_threads_have_a_limiter_of_their_own_and_others_go_on() -> None:
    """Two threads at once, a third waits; async tools are not in their queue."""
    server = trimcp.Server("s", max_threads=2)
    go, lock = threading.Event(), threading.Lock()
    inside: list[int] = []
    most: list[int] = []

    @server.tool
    def block() -> str:
        with lock:
            inside.append(1)
            most.append(len(inside))
        go.wait()
        with lock:
            inside.pop()
        return "done"

    @server.tool
    async def quick() -> str:
        return "quick"

    with trio.fail_after(60):
        async with connected(server) as session, trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(session.call_tool, "block")
            while len(inside) < 2:
                await trio.lowlevel.checkpoint()
            assert (await session.call_tool("quick")).content == [trimcp.Text("quick")]
            # Trio's own threads are free, too.
            await trio.to_thread.run_sync(lambda: None)
            go.set()
    assert max(most) == 2
    assert len(most) == 5


async def test_an_abandoned_thread_is_counted_and_keeps_its_place_until_it_ends() -> None:
    server = trimcp.Server("s", max_threads=1)
    started, go = threading.Event(), threading.Event()

    @server.tool
    def block() -> str:
        started.set()
        go.wait()
        return "late"

    with trio.fail_after(60):
        async with connected(server) as session:
            assert session.peer is not None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call_tool, "block")
                await trio.to_thread.run_sync(started.wait)
                nursery.cancel_scope.cancel()
            while not session.peer.statistics().abandoned_threads or session.peer.statistics().running:
                await trio.lowlevel.checkpoint()  # until the call itself is over
            waiting: list[trimcp.CallToolResult] = []

            async def second() -> None:
                waiting.append(await session.call_tool("block"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(second)
                for _ in range(20):
                    await session.ping()
                assert waiting == []
                go.set()
            assert waiting[0].content == [trimcp.Text("late")]
            await until_over(session)


async def test_a_call_cancelled_before_its_thread_began_leaves_none() -> None:
    server = trimcp.Server("s", max_threads=1)
    go, ran = threading.Event(), []

    @server.tool
    def block(name: str) -> str:
        ran.append(name)
        go.wait()
        return name

    with trio.fail_after(60):
        async with connected(server) as session, trio.open_nursery() as nursery:
            nursery.start_soon(session.call_tool, "block", {"name": "first"})
            while not ran:
                await trio.lowlevel.checkpoint()
            async with trio.open_nursery() as inner:
                inner.start_soon(session.call_tool, "block", {"name": "second"})
                await session.ping()
                inner.cancel_scope.cancel()
            await session.ping()
            assert session.peer is not None
            assert session.peer.statistics().abandoned_threads == 0
            go.set()
    assert ran == ["first"]


async def test_in_virtual_time_sync_tools_take_none(autojump_clock: trio.testing.MockClock) -> None:
    """A jumping clock would fire the timeout while the thread is out, so the function runs in the loop."""
    server = trimcp.Server("s")

    @server.tool(timeout=30)
    def work(*, ctx: trimcp.ThreadContext) -> str:
        ctx.report_progress(1)
        ctx.info("said")
        return threading.current_thread().name

    async with connected(server) as session, session.calling("work") as call:
        assert (await call.result()).content == [trimcp.Text(threading.current_thread().name)]
        assert [step.progress async for step in call.progress] == [1]
    assert trio.current_time() < 1


async def test_inline_tools_run_in_the_loop_and_cannot_wait() -> None:
    server, client = trimcp.Server("s"), trimcp.Client("c", roots=["file:///a"])

    @server.tool(run="inline")
    def where(*, ctx: trimcp.ThreadContext) -> str:
        assert threading.current_thread() is threading.main_thread()
        try:
            ctx.list_roots()
        except trimcp.LocalError as error:
            return str(error)
        return "asked"

    async with connected(server, client) as session:
        result = await session.call_tool("where")
    assert result.content == [trimcp.Text("a sync handler that runs in the event loop cannot wait; make it async")]
