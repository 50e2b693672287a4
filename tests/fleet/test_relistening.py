"""A subscription that outlives its connections: what is reported after a restart, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

import trimcp
from tests.client.peers import HandMade
from tests.fleet.shaky import Shaky
from tests.fleet.test_supervisor import supervised
from trimcp import ResourceUpdated, ToolsChanged, UpstreamDown
from trimcp.fleet import Restarts, UpstreamState
from trimcp.server.subscribing import tell_subscriber
from trimcp.testing import every_revision
from trimcp.wire.lifecycle import SubscriptionsAcknowledgedParams, SubscriptionsListenResult
from trimcp.wire.resources import ResourceUpdatedParams

QUICK = Restarts(first_pause=0.01)


async def nothing_more(changes: trimcp.fleet.UpstreamSubscription, seconds: float = 100) -> bool:
    with trio.move_on_after(seconds) as scope:
        await changes.receive()
    return scope.cancelled_caught


@every_revision
async def test_after_a_restart_everything_asked_for_is_reported_once(
    revision: trimcp.Revision, autojump_clock: Any
) -> None:
    shaky = Shaky()
    async with supervised(shaky, revision=revision, restarts=QUICK) as upstream:
        async with upstream.listen(tools=True, resources=["note://a", "note://a"]) as changes:
            assert changes.acknowledged.tools_list_changed
            assert await nothing_more(changes)
            shaky.server.resource_updated("note://a")
            with assert_checkpoints():
                assert await changes.receive() == ResourceUpdated("note://a")
            for restarts in (1, 2):
                await shaky.die()
                assert {await changes.receive(), await changes.receive()} == {
                    ToolsChanged(),
                    ResourceUpdated("note://a"),
                }
                assert await nothing_more(changes)
                assert changes.restarts == restarts
            shaky.server.resource_updated("note://a")
            assert await changes.receive() == ResourceUpdated("note://a")
            shaky.server.remove_tool("look")
            async for change in changes:
                assert change == ToolsChanged()
                break
        assert upstream.statistics().connections == 3


async def test_a_change_while_nobody_reads_is_kept_once(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, restarts=QUICK, breaker=None) as upstream, upstream.listen(tools=True) as changes:
        for _ in range(5):
            await shaky.die()
            await upstream.wait_state(UpstreamState.WAITING)
            await upstream.wait_up()
            await trio.sleep(1)
        assert changes.restarts == 5
        assert await changes.receive() == ToolsChanged()
        assert await nothing_more(changes)


async def test_what_nobody_reads_is_kept_up_to_a_weight(autojump_clock: Any) -> None:
    server = HandMade()

    @server.method("subscriptions/listen")
    async def listen(params: Any, ctx: Any) -> Any:
        agreed = SubscriptionsAcknowledgedParams(notifications=params.notifications)
        await tell_subscriber(*ctx.internals, "notifications/subscriptions/acknowledged", agreed)
        for n in range(40):
            updated = ResourceUpdatedParams(uri=f"note://a/{n}/{'x' * 1_000_000}")
            await tell_subscriber(*ctx.internals, "notifications/resources/updated", updated)
        await trio.sleep_forever()

    async with supervised(server) as upstream, upstream.listen(resources=["note://a"]) as changes:
        await wait_all_tasks_blocked()
        for _ in range(4):  # MiB, as a session itself keeps
            await changes.receive()
        assert await nothing_more(changes)
        async with upstream.session() as session:
            assert session.statistics().lanes.changes.dropped == 36


async def test_one_that_the_server_ends_is_made_again_after_a_pause(autojump_clock: Any) -> None:
    server = HandMade()
    times: list[float] = []

    @server.method("subscriptions/listen")
    async def listen(params: Any, ctx: Any) -> Any:
        times.append(trio.current_time())
        return SubscriptionsListenResult()

    restarts = Restarts(first_pause=1, longest_pause=60)
    async with supervised(server, restarts=restarts) as upstream, upstream.listen(tools=True) as changes:
        await trio.sleep(600)
        assert 5 < len(times) < 60  # it never lasts, so the pauses grow
        assert changes.restarts == len(times) - 1
        assert await changes.receive() == ToolsChanged()
        assert upstream.statistics().connections == 1


async def test_it_ends_when_the_upstream_is_given_up(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, restarts=Restarts(most=2)) as upstream:
        async with upstream.listen(tools=True) as changes:
            shaky.refusals = 10**9
            await shaky.die()
            with pytest.raises(UpstreamDown, match="given up"):
                await changes.receive()
            with pytest.raises(UpstreamDown, match="given up"), assert_checkpoints():
                await changes.receive()
        with pytest.raises(UpstreamDown, match="given up"):
            async with upstream.listen(tools=True):
                pass


async def test_entering_waits_or_fails_like_a_call(autojump_clock: Any) -> None:
    client = trimcp.Client("host", "1")
    async with trimcp.supervise(client, Shaky(stalls=1), when_down="fail") as upstream:
        with pytest.raises(UpstreamDown, match="not connected yet"):
            async with upstream.listen(tools=True):
                pass
    restarts = Restarts(connect_timeout=20, first_pause=0.01)
    async with trimcp.supervise(client, Shaky(stalls=1), restarts=restarts) as upstream, upstream.listen(tools=True):
        assert trio.current_time() == pytest.approx(20, abs=0.1)
    async with trimcp.supervise(client, Shaky(stalls=1)) as upstream:
        with trio.move_on_after(5) as scope:
            async with upstream.listen(tools=True):
                pass
        assert scope.cancelled_caught


async def test_what_a_server_refuses_is_refused(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, restarts=QUICK) as upstream:
        async with upstream.listen(tools=True) as changes:
            # Over the next connection the very same subscription is refused.
            refusing = HandMade()

            @refusing.method("subscriptions/listen")
            async def refuse(params: Any, ctx: Any) -> Any:
                raise trimcp.ErrorReply(-32602, "not any more")

            shaky.instead = refusing
            await shaky.die()
            with pytest.raises(trimcp.RemoteError, match="not any more"):
                await changes.receive()
        with pytest.raises(trimcp.RemoteError, match="not any more"):
            async with upstream.listen(tools=True):
                pass


async def test_leaving_unsubscribes(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky) as upstream, upstream.session() as session:
        with pytest.raises(KeyError, match="mine"):
            async with upstream.listen(tools=True):
                assert session.statistics().pending == 1
                raise KeyError("mine")
        await wait_all_tasks_blocked()
        assert session.statistics().pending == 0
