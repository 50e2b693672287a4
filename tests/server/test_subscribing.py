"""The bus: told at once, kept conflated, forgotten when nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from trimcp.server.registry import Bus, Change
from trimcp.server.server import Server
from trimcp.server.subscribing import Watch, notification_of
from trimcp.session.outgoing.listening import ResourceUpdated
from trimcp.testing import connected, every_revision
from trimcp.wire.revisions import LATEST_LEGACY, Revision


@pytest.mark.parametrize("change", Change)
def test_each_change_has_its_notification(change: Change) -> None:
    assert notification_of(change) == (f"notifications/{change.name.lower()}/list_changed", None)


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


class Told:
    """Many listeners of a bus, and who was told what in which turn of the event loop."""

    def __init__(self, bus: Bus, count: int) -> None:
        self.turns: list[list[tuple[int, object]]] = [[]]
        self.listeners = [lambda change, n=n: self.turns[-1].append((n, change)) for n in range(count)]
        for listener in self.listeners:
            bus.attach(listener)

    def of(self, n: int) -> list[object]:
        return [change for turn in self.turns for told, change in turn if told == n]

    async def all(self) -> None:
        """Count turns until nothing is told any more."""
        while True:
            self.turns.append([])
            await trio.lowlevel.checkpoint()
            if not self.turns[-1] and not self.turns[-2]:
                return


async def test_many_listeners_are_told_in_several_turns() -> None:
    bus = Bus()
    told = Told(bus, 500)
    bus.publish("a")
    assert told.turns[0], "the first ones at once"
    await told.all()
    assert max(map(len, told.turns)) <= 2 * 32  # a turn of ours may have two of the loop's in it
    assert [told.of(n) for n in range(500)] == [["a"]] * 500


async def test_changes_are_told_in_their_order_and_one_that_waits_once() -> None:
    bus = Bus()
    told = Told(bus, 100)
    for _ in range(1_000):
        bus.publish("a")
        bus.publish("b")
    await told.all()
    assert [told.of(n) for n in range(100)] == [["a", "b", "a"]] * 100  # the first was being told already
    bus.publish("b")
    await told.all()
    assert told.of(99) == ["a", "b", "a", "b"]


async def test_a_listener_that_leaves_or_crashes_meanwhile_keeps_nobody_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = Bus()
    told = Told(bus, 99)

    def crash(change: object) -> None:
        raise ValueError("for the test")

    bus.attach(crash)
    last = Told(bus, 50)
    bus.publish("a")
    bus.detach(last.listeners[0])
    await told.all()
    assert told.of(98) == ["a"]
    assert (last.of(0), last.of(1)) == ([], ["a"])
    assert "for the test" in caplog.text


def test_the_end_of_the_loop_keeps_nobody_from_being_told_later() -> None:
    bus = Bus()
    told = Told(bus, 1_000)

    async def run(change: str) -> None:
        bus.publish(change)
        if change == "b":
            await told.all()

    trio.run(run, "a")
    trio.run(run, "b")
    assert told.of(999)[-1] == "b"
    bus.publish("c")  # outside of any loop
    assert told.of(999)[-1] == "c"


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
        monkeypatch.setattr(type(session.peer.sink), "post_latest", lambda self, *args: told.append(args))
        server.resource_updated("note:1")
        assert told == []


async def test_each_session_is_told_of_each_change_though_it_is_written_once() -> None:
    server: Server[None] = Server("shared")
    for name in ("note:1", "note:2"):
        server.add_resource(name, "one")
    async with (
        connected(server, revision="2025-03-26") as one,
        connected(server, revision=LATEST_LEGACY) as two,
        one.listen(resources=["note:1", "note:2"]) as first,
        two.listen(resources=["note:2", "note:1"]) as second,
    ):
        with trio.fail_after(5):
            for name in ("note:1", "note:2", "note:1"):
                server.resource_updated(name)
                assert await first.receive() == await second.receive() == ResourceUpdated(name)
