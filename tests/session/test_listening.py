"""Subscriptions: the same in every revision, conflated, and honest about how they end."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, Scripted, connected, discover_result, initialize_result, text
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, LocalError, RemoteError
from trimcp.session.outgoing.listening import PromptsChanged, ResourcesChanged, ResourceUpdated, ToolsChanged
from trimcp.wire.capabilities import ResourcesCapability, ServerCapabilities
from trimcp.wire.common import META_SUBSCRIPTION_ID, EmptyResult
from trimcp.wire.lifecycle import SubscriptionFilter
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS

LISTS = {
    "notifications/tools/list_changed": ToolsChanged(),
    "notifications/prompts/list_changed": PromptsChanged(),
    "notifications/resources/list_changed": ResourcesChanged(),
}


def note(name: str, uri: str | None = None, subscription: Any = None) -> dict[str, Any]:
    params: dict[str, Any] = {} if uri is None else {"uri": uri}
    if subscription is not None:
        params["_meta"] = {META_SUBSCRIPTION_ID: subscription}
    return {"method": name, "params": params}


class Changing:
    """A server of either era whose changes the test announces."""

    def __init__(self, *, modern: bool, acknowledge: dict[str, Any] | None = None) -> None:
        self.modern = modern
        self.acknowledge = acknowledge
        self.server = Scripted(self.script)
        self.ids: list[int] = []

    def script(self, message: dict[str, Any]) -> Any:
        method, id = message.get("method"), message.get("id")
        if method == "server/discover":
            return discover_result(id, resources={"subscribe": True}) if self.modern else None
        if method == "initialize":
            lists = {"listChanged": True}
            return initialize_result(id, resources={"subscribe": True, **lists}, tools=lists, prompts=lists)
        if method == "subscriptions/listen":
            self.ids.append(message["id"])
            asked = message["params"]["notifications"]
            granted = asked if self.acknowledge is None else self.acknowledge
            meta = {META_SUBSCRIPTION_ID: id}
            return {
                "method": "notifications/subscriptions/acknowledged",
                "params": {"notifications": granted, "_meta": meta},
            }
        return {"id": id, "result": {}} if id is not None else None

    async def announce(self, name: str, uri: str | None = None, which: int = -1) -> None:
        subscription = self.ids[which] if self.modern else None
        await self.server.say({"jsonrpc": "2.0", **note(name, uri, subscription)})
        await trio.testing.wait_all_tasks_blocked()

    def connect(self, client: Client | None = None) -> Any:
        return (client or Client("c")).connect(self.server, revision=LATEST if self.modern else LATEST_LEGACY)


both_eras = pytest.mark.parametrize("modern", [False, True], ids=["legacy", "modern"])


@both_eras
async def test_every_kind_of_change(modern: bool) -> None:
    changing = Changing(modern=modern)
    async with (
        changing.connect() as session,
        session.listen(tools=True, prompts=True, resources_list=True, resources=["x:1"]) as changes,
    ):
        assert changes.acknowledged == SubscriptionFilter(True, True, True, ["x:1"])
        for name, change in LISTS.items():
            await changing.announce(name)
            assert await changes.receive() == change
        await changing.announce("notifications/resources/updated", "x:1")
        assert await changes.receive() == ResourceUpdated("x:1")


@both_eras
async def test_changes_are_conflated_and_unasked_ones_do_not_come(modern: bool, autojump_clock: Any) -> None:
    changing = Changing(modern=modern)
    async with changing.connect() as session, session.listen(tools=True, resources=["file:///a"]) as changes:
        for _ in range(50):
            await changing.announce("notifications/tools/list_changed")
            await changing.announce("notifications/prompts/list_changed")
            await changing.announce("notifications/resources/updated", "file:///a/below")
            await changing.announce("notifications/resources/updated", "file:///a")
            await changing.announce("notifications/resources/updated", "file:///ab")
        seen = [await changes.receive() for _ in range(3)]
        assert seen == [ToolsChanged(), ResourceUpdated("file:///a/below"), ResourceUpdated("file:///a")]
        with trio.move_on_after(1) as scope:
            await changes.receive()
        assert scope.cancelled_caught
        await changing.announce("notifications/tools/list_changed")
        with trio.testing.assert_checkpoints():
            assert await changes.receive() == ToolsChanged()


async def test_two_modern_subscriptions_are_told_apart_by_their_ids(autojump_clock: Any) -> None:
    changing = Changing(modern=True)
    async with (
        changing.connect() as session,
        session.listen(tools=True) as first,
        session.listen(tools=True) as second,
    ):
        await changing.announce("notifications/tools/list_changed", which=1)
        assert await second.receive() == ToolsChanged()
        with trio.move_on_after(1) as scope:
            await first.receive()
        assert scope.cancelled_caught


@both_eras
async def test_nothing_is_kept_of_a_subscription_that_was_left(modern: bool) -> None:
    changing = Changing(modern=modern)
    async with changing.connect() as session:
        async with session.listen(tools=True, resources=["x:1"]):
            pass
        subscriptions = session.subscriptions
        assert (subscriptions._by_id, subscriptions._unasked, subscriptions._watched) == ({}, set(), {})
        assert not session.session.watchers


@both_eras
async def test_updates_nobody_reads_are_bounded_and_counted(modern: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimcp.session.queues._MOST_CHANGES", 2)
    changing = Changing(modern=modern)
    async with changing.connect() as session, session.listen(resources=["file:///"]) as changes:
        for name in ("a", "b", "c", "a"):
            await changing.announce("notifications/resources/updated", f"file:///{name}")
        assert [await changes.receive() for _ in range(2)] == [
            ResourceUpdated("file:///a"),
            ResourceUpdated("file:///b"),
        ]
        assert session.statistics().dropped == 1


async def test_leaving_a_modern_subscription_cancels_its_request() -> None:
    changing = Changing(modern=True)
    async with changing.connect() as session:
        async with session.listen(prompts=True) as changes:
            pass
        await trio.testing.wait_all_tasks_blocked()
        assert changing.server.methods[-1] == "notifications/cancelled"
        assert changing.server.heard[-1]["params"]["requestId"] == changing.ids[0]
        with pytest.raises(trio.EndOfChannel):
            await changes.receive()
        assert session.statistics().pending == 0


async def test_legacy_resources_are_subscribed_once_left_and_shared() -> None:
    changing = Changing(modern=False)

    def count(method: str) -> int:
        return changing.server.methods.count(method)

    async with changing.connect() as session:
        async with session.listen(resources=["x:1"]) as first:
            async with session.listen(resources=["x:1", "x:2"]) as second:
                await changing.announce("notifications/resources/updated", "x:1")
                assert await first.receive() == await second.receive() == ResourceUpdated("x:1")
            await trio.testing.wait_all_tasks_blocked()
            assert count("resources/unsubscribe") == 1
            assert changing.server.heard[-1]["params"] == {"uri": "x:2"}
        await trio.testing.wait_all_tasks_blocked()
        assert count("resources/unsubscribe") == 2
        assert session.statistics().pending == 0


async def test_a_cancelled_legacy_block_still_unsubscribes() -> None:
    changing = Changing(modern=False)
    async with changing.connect() as session:
        with trio.CancelScope() as scope:
            async with session.listen(resources=["x:1"]):
                scope.cancel()
                await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        assert changing.server.methods[-1] == "resources/unsubscribe"


async def test_less_may_be_acknowledged_than_was_asked_for() -> None:
    changing = Changing(modern=True, acknowledge={"toolsListChanged": True})
    async with changing.connect() as session, session.listen(tools=True, prompts=True) as changes:
        assert changes.acknowledged == SubscriptionFilter(True)


@both_eras
async def test_the_loss_of_the_server_cuts_a_subscription(modern: bool) -> None:
    changing = Changing(modern=modern)
    async with changing.connect() as session, session.listen(tools=True) as changes:
        await changing.announce("notifications/tools/list_changed")
        await changing.server.channels[-1].aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert await changes.receive() == ToolsChanged()
        with pytest.raises(ConnectionLost):
            async for _ in changes:
                pass
        with pytest.raises(ConnectionLost):
            async with session.listen(tools=True):
                pass


async def test_a_final_result_closes_and_a_cancellation_cuts() -> None:
    changing = Changing(modern=True)
    async with changing.connect() as session:
        async with session.listen(tools=True) as changes:
            meta = {META_SUBSCRIPTION_ID: changing.ids[-1]}
            await changing.server.say(
                {"jsonrpc": "2.0", "id": changing.ids[-1], "result": {"resultType": "complete", "_meta": meta}}
            )
            assert [change async for change in changes] == []
        async with session.listen(tools=True) as changes:
            params = {"requestId": changing.ids[-1], "reason": "too slow"}
            await changing.server.say({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})
            with pytest.raises(ConnectionLost, match="too slow"):
                async for _ in changes:
                    pass


async def test_a_refused_subscription_raises_the_servers_error() -> None:
    async with connected(HandMade(), revision=LATEST) as session:
        with pytest.raises(RemoteError):
            async with session.listen(tools=True):
                pass


async def test_resources_that_cannot_be_watched_are_refused_locally() -> None:
    server = HandMade(capabilities=ServerCapabilities(resources=ResourcesCapability()))
    async with connected(server, revision=LATEST_LEGACY) as session:
        with pytest.raises(LocalError, match=r"resources\.subscribe"):
            async with session.listen(resources=["x:1"]):
                pass
        async with session.listen(tools=True) as changes:
            assert changes.acknowledged == SubscriptionFilter()


@pytest.mark.parametrize("revision", REVISIONS[:4], ids=str)
async def test_a_change_announced_by_a_handler_of_ours(revision: Any) -> None:
    server = HandMade()

    @server.method("resources/subscribe")
    async def subscribe(params: Any, ctx: Any) -> Any:
        return EmptyResult()

    @server.method("resources/unsubscribe")
    async def unsubscribe(params: Any, ctx: Any) -> Any:
        return EmptyResult()

    @server.tool
    async def change(params: Any, ctx: Any) -> Any:
        server.session.notify_latest("notifications/tools/list_changed")
        return text("")

    async with connected(server, revision=revision) as session:
        async with session.listen(tools=True, resources=["x:1"]) as changes:
            await session.call_tool("change")
            assert await changes.receive() == ToolsChanged()
        await trio.testing.wait_all_tasks_blocked()
    assert [name for name, _ in server.asked] == ["resources/subscribe", "tools/call", "resources/unsubscribe"]
