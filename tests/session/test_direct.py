"""Sessions joined without a wire: the same laws as over a channel, and nothing of one side leaks into the other."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import trio

import trimcp
from trimcp.session.drive import direct_ends, driving
from trimcp.session.incoming.job import CancelReason
from trimcp.session.limits import Limits
from trimcp.testing import connected, every_revision

WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="outside")


def make_server(**options: Any) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("direct", **options)

    @server.tool
    async def where() -> str:
        return WHERE.get()

    @server.tool
    async def keep(values: list[int]) -> list[int]:
        values.append(0)
        return values

    return server


async def test_a_handler_does_not_see_its_callers_context() -> None:
    async with connected(make_server()) as session:
        WHERE.set("in the caller")
        assert (await session.call_tool("where")).content == [trimcp.Text("outside")]


async def test_neither_side_sees_the_others_objects() -> None:
    values = [1, 2]
    async with connected(make_server()) as session:
        result = await session.call_tool("keep", {"values": values})
    assert result.structured_content == {"result": [1, 2, 0]}
    assert values == [1, 2]


@every_revision
async def test_a_full_backlog_makes_callers_wait_and_loses_nothing(
    revision: trimcp.Revision, steady_clock: trio.abc.Clock
) -> None:
    limits = Limits(max_running=2, backlog_requests=3)
    server = make_server(limits=limits)
    gate = trio.Event()
    begun = 0

    @server.tool
    async def wait() -> str:
        nonlocal begun
        begun += 1
        await gate.wait()
        return "done"

    async with connected(server, revision=revision) as session, trio.open_nursery() as nursery:
        done: list[Any] = []

        async def call() -> None:
            done.append((await session.call_tool("wait")).content)

        for _ in range(20):
            nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        now = session.peer.statistics()
        assert (begun, now.running) == (2, 2)
        assert now.waiting == 3, "the others wait at the caller's side"
        assert session.statistics().pending == 5
        gate.set()
        with trio.fail_after(5):
            while len(done) < 20:
                await trio.testing.wait_all_tasks_blocked()
    assert done == [[trimcp.Text("done")]] * 20


async def test_the_client_leaving_ends_handlers_with_the_reason(autojump_clock: Any) -> None:
    server = make_server()
    seen: list[Any] = []
    begun = trio.Event()

    @server.tool
    async def wait(ctx: trimcp.Context) -> str:
        begun.set()
        try:
            await trio.sleep_forever()
        finally:
            seen.append(ctx.cancel_reason)

    ours, theirs = direct_ends()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, ours)
        async with trimcp.Client("c").connect(theirs) as session:
            with trio.move_on_after(0):
                await session.call_tool("where")
            async with trio.open_nursery() as calls:

                async def call() -> None:
                    with pytest.raises(trimcp.ConnectionLost):
                        await session.call_tool("wait")

                calls.start_soon(call)
                await begun.wait()
                theirs.close()
                session.session.lose("left")
    assert seen == [CancelReason.DISCONNECTED]


async def test_the_server_ending_fails_calls_and_leaves_the_body_alone() -> None:
    server = make_server()

    @server.tool
    async def wait() -> str:
        await trio.sleep_forever()
        raise AssertionError

    async with connected(server) as session, trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises((trimcp.ConnectionLost, trimcp.RemoteError)):
                await session.call_tool("wait")

        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        session.peer.close()
        await session.wait_lost()
        with pytest.raises(trimcp.ConnectionLost):
            await session.call_tool("where")


async def test_what_the_body_raises_leaves_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with connected(make_server()):
            raise KeyError("mine")


async def test_what_is_said_before_the_other_side_is_there_is_kept() -> None:
    server = make_server()
    ours, theirs = direct_ends()

    async def serve_late() -> None:
        await trio.testing.wait_all_tasks_blocked()
        await server.serve(ours)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_late)
        async with trimcp.Client("c").connect(theirs) as session:
            assert (await session.call_tool("where")).content == [trimcp.Text("outside")]


async def test_an_end_whose_other_side_has_closed_loses_its_session_at_once(steady_clock: trio.abc.Clock) -> None:
    server = make_server()
    ours, theirs = direct_ends()
    theirs.close()
    async with server.running() as running:
        session = running.session()
        async with driving(session, ours):
            with trio.fail_after(5):
                await session.closed.wait()
        assert session.lost is not None
    assert not running.sessions


async def test_what_is_too_large_for_a_server_fails_its_call_and_nothing_else() -> None:
    """As over any transport; a client takes more."""
    server = make_server()

    @server.tool
    async def repeat(text: str, times: int) -> str:
        return text * times

    async with connected(server) as session:
        with pytest.raises(trimcp.RemoteError, match="larger than 4,194,304 bytes"):
            await session.call_tool("repeat", {"text": "x" * 4 * 1024 * 1024, "times": 1})
        result = await session.call_tool("repeat", {"text": "x" * 1024 * 1024, "times": 8})
        assert result.content == [trimcp.Text("x" * 8 * 1024 * 1024)]


@every_revision
async def test_what_is_refused_at_once_fails_its_call(revision: trimcp.Revision, autojump_clock: object) -> None:
    server = make_server()

    async with connected(server, revision=revision) as session:
        arguments: Any = 5
        with pytest.raises(trimcp.RemoteError), trio.fail_after(60):
            async with session.calling(arguments) as call:
                await call.result()
        assert session.peer is not None
        session.peer.draining.set()
        with pytest.raises(trimcp.RemoteError, match="shutting down"), trio.fail_after(60):
            async with session.calling("where") as call:
                assert [params async for params in call.progress] == []
                await call.result()
        if revision.modern:
            with pytest.raises(trimcp.RemoteError, match="shutting down"), trio.fail_after(60):
                async with session.listen(tools=True):
                    pass
