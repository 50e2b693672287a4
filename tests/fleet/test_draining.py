"""A server that shuts down: what is under way is answered, and what was not begun waits for the next one."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import attrs
import pytest
import trio

import trimcp
import trimcp.testing
from tests.client.peers import HandMade
from tests.fleet.test_supervisor import QUICK, caught, supervised
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import served
from trimcp import CancelReason, Context, NotStarted, RemoteError, Stopped
from trimcp.fleet import Health, UpstreamState
from trimcp.wire.codes import CANCELLED_BY_DRAIN

TRANSPORTS = [
    ("http", trimcp.LATEST),
    ("http", trimcp.LATEST_LEGACY),
    ("http on hypercorn", trimcp.LATEST),
    ("http+sse", "2024-11-05"),
    ("websocket", trimcp.LATEST),
    ("websocket", trimcp.LATEST_LEGACY),
]


@attrs.define(eq=False)
class Work:
    """A server with something slow, and what was done there."""

    done: list[str] = attrs.field(factory=list)
    reasons: list[CancelReason | None] = attrs.field(factory=list)
    release: trio.Event = attrs.field(factory=trio.Event)
    server: trimcp.Server[Any] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.server = server = trimcp.Server("s")

        @server.tool
        async def slow(ctx: Context[Any]) -> str:
            try:
                await ctx.report_progress(1)
                await self.release.wait()
            finally:
                self.reasons.append(ctx.cancel_reason)
            return "slow"

        @server.tool
        async def quick() -> str:
            self.done.append("quick")
            return "quick"

        server.add_resource("notes://a", "text")


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.parametrize("health", [Health(owing=600, idle=600), None], ids=["pinged", "never pinged"])
@pytest.mark.parametrize(("transport", "revision"), TRANSPORTS)
async def test_a_drain_costs_no_call(transport: str, revision: Any, health: Health | None) -> None:
    work, port = Work(), a_free_port()
    answered: list[str] = []
    again = trio.Event()

    async def call(upstream: trimcp.Upstream) -> None:
        while not place.ended.is_set():  # the last of these is refused, or finds nobody who listens
            answered.append((await upstream.call_tool("quick")).text)
        again.set()

    async def read(upstream: trimcp.Upstream) -> None:
        while not place.ended.is_set():
            await upstream.read_resource("notes://a", fresh=True)

    with trio.fail_after(PATIENCE):
        async with served(work.server, transport, grace=PATIENCE, port=port) as place:
            options: dict[str, Any] = {"revision": revision, "restarts": QUICK, "health": health}
            async with supervised(place.target(), **options) as upstream, trio.open_nursery() as nursery:
                async with upstream.calling("slow") as slow:
                    await anext(aiter(slow.progress))
                    place.stop.set()
                    nursery.start_soon(call, upstream)
                    nursery.start_soon(read, upstream)
                    await upstream.wait_state(UpstreamState.WAITING)
                    work.release.set()
                    assert (await slow.result()).text == "slow"
                await place.ended.wait()
                assert work.reasons == [None], "its handler was left alone"
                assert not again.is_set(), "what was refused waits"
                async with served(work.server, transport, port=port):
                    await again.wait()
                    assert len(work.done) == len(answered), "each once"
                    assert upstream.statistics().losses <= 1, "none if the transport itself tried again"
                    nursery.cancel_scope.cancel()


async def test_whether_something_was_begun_is_told_by_the_class_and_the_data(autojump_clock: Any) -> None:
    work, outcomes = Work(), []
    async with trimcp.testing.connected(work.server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(caught, partial(session.call_tool, "slow"), outcomes)
        await trio.testing.wait_all_tasks_blocked()
        (theirs,) = next(iter(work.server.runs)).sessions
        nursery.start_soon(theirs.drain, 1.0)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(NotStarted) as refused:
            await session.call_tool("quick")
    ((stopped, _),) = outcomes
    assert type(stopped) is Stopped
    assert refused.value.data == {"reason": "drain", "started": False}
    assert stopped.data == {"reason": "drain", "started": True}
    assert stopped.code == refused.value.code == CANCELLED_BY_DRAIN
    assert work.reasons == [CancelReason.DRAIN]


async def test_the_code_of_a_drain_may_be_anything_elsewhere(autojump_clock: Any) -> None:
    server = HandMade()

    @server.tool
    async def fail(params: Any, ctx: Any) -> Any:
        raise trimcp.ErrorReply(CANCELLED_BY_DRAIN, "no such city", params.arguments["data"])

    async with supervised(server) as upstream:
        for data in (None, 5, {"started": False}, {"reason": "city", "started": False}):
            with pytest.raises(RemoteError) as caught:
                await upstream.call_tool("fail", {"data": data})
            assert type(caught.value) is RemoteError
            assert upstream.state is UpstreamState.UP


@pytest.mark.slow
@pytest.mark.parametrize("revision", [trimcp.LATEST, trimcp.LATEST_LEGACY], ids=["modern", "legacy"])
@pytest.mark.parametrize(
    "transport", ["http", "http on hypercorn", "http+sse", "websocket", "websocket on hypercorn", "http over unix"]
)
async def test_a_handler_of_a_server_that_is_cancelled_is_told_so(transport: str, revision: Any) -> None:
    work, outcomes = Work(), []
    chosen = "2024-11-05" if transport == "http+sse" else revision
    with trio.fail_after(PATIENCE):
        async with served(work.server, transport) as place:
            client = trimcp.Client("c").connect(place.target(), revision=chosen)
            async with client as session, trio.open_nursery() as nursery:
                nursery.start_soon(caught, partial(session.call_tool, "slow"), outcomes)
                await place.at_work()
                place.scope.cancel()
                await place.ended.wait()
    assert work.reasons == [CancelReason.DRAIN]
