"""Sync handlers in real threads: how they ask, how they learn that nobody waits, and what their context says."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio

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
    with trio.fail_after(5):
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

    with trio.fail_after(5):
        async with connected(server, client, revision=revision) as session:
            result = await session.call_tool("greet")
            assert result.content == [trimcp.Text("Hello Ada")]
            await until_over(session)
    # Where the server may not call its client, the first run unwinds like any handler's.
    assert [type(error) for error in left] == ([trio.Cancelled, type(None)] if revision.modern else [type(None)])


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

    with trio.fail_after(5):
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

    with trio.fail_after(5):
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
    with trio.fail_after(5):
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
