"""The bus: told at once, kept conflated, forgotten when nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from trimcp.server.registry import Bus, Change
from trimcp.server.server import Server
from trimcp.server.subscribing import Watch, _notification
from trimcp.session.listening import ResourceUpdated
from trimcp.testing import connected, every_revision
from trimcp.wire.revisions import LATEST_LEGACY, Revision


@pytest.mark.parametrize("change", Change)
def test_each_change_has_its_notification(change: Change) -> None:
    assert _notification(change) == (f"notifications/{change.name.lower()}/list_changed", None)


async def test_a_watch_gives_what_it_watches_once_each_in_order() -> None:
    bus = Bus()
    watch = Watch(frozenset({Change.TOOLS, Change.PROMPTS, "a", "b"}))
    bus.attach(watch.note)
    for uri in ("b", "a", "c", "b"):
        bus.publish(uri)
    for change in (Change.RESOURCES, Change.PROMPTS, Change.TOOLS, Change.PROMPTS):
        bus.publish(change)
    assert await watch.noted.receive_all() == ["b", "a", Change.PROMPTS, Change.TOOLS]
    bus.publish("a")
    assert await watch.noted.receive_all() == ["a"]


async def test_taking_waits_for_something_that_is_watched(autojump_clock: trio.testing.MockClock) -> None:
    bus = Bus()
    watch = Watch(frozenset({Change.TOOLS}))
    bus.attach(watch.note)
    taken: list[object] = []

    async def take() -> None:
        taken.append(await watch.noted.receive_all())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked()
        bus.publish(Change.PROMPTS)
        bus.publish("a")
        await trio.testing.wait_all_tasks_blocked()
        assert taken == []
        bus.publish(Change.TOOLS)
    assert taken == [[Change.TOOLS]]


async def test_a_detached_watch_hears_nothing_and_a_million_updates_cost_one() -> None:
    bus = Bus()
    watch, other = Watch(frozenset({"a"})), Watch(frozenset({"a"}))
    bus.attach(watch.note)
    bus.attach(other.note)
    bus.detach(other.note)
    bus.detach(other.note)
    for _ in range(1_000):
        bus.publish("a")
    assert await watch.noted.receive_all() == ["a"]
    with trio.move_on_after(0) as nothing:
        await other.noted.receive()
    assert nothing.cancelled_caught


def test_a_listener_may_leave_while_it_is_told() -> None:
    bus = Bus()
    told: list[str] = []

    def leaves(name: str) -> Callable[[object], None]:
        def tell(change: object) -> None:
            told.append(name)
            bus.detach(tell)

        return tell

    for name in "ab":
        bus.attach(leaves(name))
    bus.publish(Change.TOOLS)
    bus.publish(Change.TOOLS)
    assert told == ["a", "b"]


@every_revision
async def test_listening_again_at_once_hears_what_changes(
    revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    # Which of two handlers runs first is random, so once would prove little.
    for _ in range(20):
        server: Server[None] = Server("again")
        server.add_resource("note:1", "one")
        async with connected(server, revision=revision) as session:
            async with session.listen(resources=["note:1"]):
                pass
            async with session.listen(resources=["note:1"]) as changes:
                await trio.testing.wait_all_tasks_blocked()
                server.resource_updated("note:1")
                with trio.fail_after(5):
                    assert await changes.receive() == ResourceUpdated("note:1")


async def test_a_legacy_client_that_left_is_told_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Server[None] = Server("left")
    server.add_resource("note:1", "one")
    async with connected(server, revision=LATEST_LEGACY) as session:
        async with session.listen(resources=["note:1"]):
            pass
        await trio.testing.wait_all_tasks_blocked()
        told: list[Any] = []
        monkeypatch.setattr(type(session.peer), "notify_latest", lambda self, *args, **rest: told.append(args))
        server.resource_updated("note:1")
        assert told == []
