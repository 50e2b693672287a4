"""Contexts in memory: order, exactly once, watchers, deadlines, bounds, and that nothing is left of one that ended."""

from __future__ import annotations

import logging
import re
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.agent_tools.tables import ADA, BOB, EMPTY, all_tasks, assert_empty, begin, open_table
from trimcp.agent_tools.contexts.actor import ActorContext, ContextActor
from trimcp.agent_tools.contexts.state import SERVER_MEMBERS, ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages.errors import (
    ContextGone,
    Draining,
    MalformedMessage,
    NameTaken,
    RequestUnderWay,
    TooLargeMessage,
    TooMuch,
    UnknownContext,
    VersionConflict,
)
from trimcp.budget import LITTLE, NOWHERE_KNOWN, Budget
from trimcp.store.contexts import MemoryContexts


def own(actor: ContextActor) -> dict[str, Any]:
    """The members of a state that agents write."""
    return {name: value for name, value in actor.snapshot().items() if name not in {"session_id", *EMPTY}}


# Making and finding


async def test_a_context_is_made_read_and_found() -> None:
    async with open_table() as table:
        actor = await table.create(ADA, state={"a": 1, "b": None})
        assert re.fullmatch(r"ctx_[\w-]{22}", actor.id)
        assert actor.snapshot() == {**EMPTY, "session_id": actor.id, "a": 1}
        assert actor.version == 0
        assert await table.find(ADA, actor.id) is await table.find_or_make(ADA, actor.id) is actor
        assert table.get(ADA, actor.id) is actor
        assert (await table.create(ADA)).id != actor.id


async def test_a_context_begins_with_its_first_message() -> None:
    async with open_table() as table:
        actor = await table.find_or_make(ADA, "ctx-001", permissions=["read"])
        assert actor.snapshot() == {**EMPTY, "session_id": "ctx-001", "permissions": ["read"]}
        assert await table.find_or_make(ADA, "ctx-001") is actor


async def test_to_others_it_does_not_exist() -> None:
    async with open_table() as table:
        mine = await table.create(ADA, "ctx-001", {"mine": True})
        for stranger in (BOB, ("ada", "agent-b"), ("bob", "agent-a"), ("", "agent-a")):
            assert table.get(stranger, "ctx-001") is None
            with pytest.raises(UnknownContext):
                await table.find(stranger, "ctx-001")
        theirs = await table.find_or_make(BOB, "ctx-001")
        assert theirs is not mine
        assert own(theirs) == {}
        await mine.destroy()
        assert await table.find(BOB, "ctx-001") is theirs


async def test_an_id_that_only_the_service_gives_out_cannot_be_chosen() -> None:
    async with open_table() as table:
        minted = (await table.create(BOB)).id
        with pytest.raises(UnknownContext):
            await table.find_or_make(ADA, minted)
        with pytest.raises(MalformedMessage, match="ctx_"):
            await table.create(ADA, minted)


@pytest.mark.parametrize("id", ["", "x" * 257, "a\nb", "\x00", "\ud800"])
async def test_what_is_no_id_is_refused(id: str) -> None:
    async with open_table() as table:
        with pytest.raises(MalformedMessage, match="256 printable"):
            await table.find_or_make(ADA, id)
        with pytest.raises(MalformedMessage, match="256 printable"):
            await table.create(ADA, id)
        with pytest.raises(UnknownContext):
            await table.find(ADA, id)


async def test_an_id_that_is_alive_is_taken() -> None:
    async with open_table() as table:
        await table.create(ADA, "ctx-001")
        with pytest.raises(NameTaken):
            await table.create(ADA, "ctx-001")


@pytest.mark.parametrize("name", SERVER_MEMBERS)
async def test_members_of_the_server_cannot_be_written(name: str) -> None:
    async with open_table() as table:
        with pytest.raises(MalformedMessage, match=name) as refused:
            await table.create(ADA, state={name: []})
        assert refused.value.data == {"member": name}
        actor = await table.create(ADA)
        for value in ([], None, {"x": 1}):
            with pytest.raises(MalformedMessage, match=name):
                await actor.update({"a": 1, name: value})
            with pytest.raises(MalformedMessage, match=name):
                actor.apply({"a": 1, name: value})
        assert (actor.snapshot(), actor.version) == ({**EMPTY, "session_id": actor.id}, 0)


@pytest.mark.parametrize("ttl", [0, -1, float("nan")])
async def test_a_lifetime_is_positive(ttl: float) -> None:
    async with open_table() as table:
        with pytest.raises(MalformedMessage, match="ttl"):
            await table.create(ADA, ttl=ttl)


async def test_contexts_are_bounded_in_number() -> None:
    async with open_table(max_contexts=3, max_per_owner=2) as table:
        first = await table.create(ADA)
        await table.find_or_make(ADA, "ctx-2")
        for make in (table.create(ADA), table.find_or_make(ADA, "ctx-3")):
            with pytest.raises(TooMuch, match="you may have 2") as refused:
                await make
            assert refused.value.retry_after
        await table.create(BOB)
        for each in (*table._live.by_owner[ADA].values(), *table._live.by_owner[BOB].values()):
            each.used()
        with pytest.raises(TooMuch, match="too many contexts"):
            await table.create(("eve", "agent-e"))
        await first.destroy()
        await table.create(("eve", "agent-e"))
        assert table.statistics().contexts == 3


@pytest.mark.parametrize("use", ["update", "read", "call", "watch"])
async def test_a_context_that_was_never_used_gives_way_where_there_are_too_many(
    use: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who makes as many as there may be keeps everybody else from having one, for half an hour."""
    async with open_table(max_contexts=6, max_per_owner=5) as table, AsyncExitStack() as stack:
        used, *others = [await table.create(ADA) for _ in range(5)]
        if use == "update":
            used.apply({"a": 1})
        elif use == "read":
            assert table.get(ADA, used.id) is used
        elif use == "call":
            begin(used)
        else:
            await stack.enter_async_context(used.watch())
        mine = [await table.create(BOB)]
        for count in (1, 2):
            mine.append(await table.create(BOB))
            assert [each.ended is not None for each in others] == [True] * count + [False] * (4 - count)
        assert used.ended is None
        assert "never used" in str(others[0].ended)
        assert {each.ended for each in mine} == {None}
        newest = await table.create(BOB)
        assert [each.ended is None for each in (*mine, newest)] == [False, True, True, True], "nobody has more than Bob"
        assert [each.ended is None for each in (used, *others)] == [True, False, False, True, True]
    assert "gave_way what=context" in caplog.text


async def test_owners_who_hold_far_more_give_way_although_they_use_all(caplog: pytest.LogCaptureFixture) -> None:
    """Ten owners with all they may have each do not keep an eleventh out."""
    async with open_table(max_contexts=500, max_per_owner=50) as table, AsyncExitStack() as stack:
        theirs = [await table.create((f"p{n // 50}", "agent")) for n in range(500)]
        for actor in theirs:
            actor.used()
        await stack.enter_async_context(theirs[0].watch())
        call = begin(theirs[1])
        mine = [await table.create(ADA) for _ in range(2)]
        for actor in mine:
            actor.used()
        assert {actor.ended for actor in mine} == {None}
        ended = [actor for actor in theirs if actor.ended is not None]
        assert len(ended) == 2
        assert {"its place is needed by others"} == {actor.ended for actor in ended}
        assert not call.reasons, "those in which nothing happens go"
        assert theirs[0].ended is None
        (await table.create(ADA)).used()  # 50 is sixteen times 3
        with pytest.raises(TooMuch, match="too many contexts"):
            await table.create(ADA)
    assert "gave_way what=context" in caplog.text


async def test_callers_without_a_principal_have_a_share_by_address() -> None:
    nobody = ("", "anonymous")
    async with open_table(max_per_owner=3) as table:
        for _ in range(3):
            await table.create(nobody, address="192.0.2.1")
        for make in (table.create(nobody, address="192.0.2.1"), table.find_or_make(nobody, "a", address="192.0.2.1")):
            with pytest.raises(TooMuch, match="you may have 3"):
                await make
        other = await table.find_or_make(nobody, "b", address="192.0.2.2")
        assert dict(table._live._budget.owners()).keys() == {"address 192.0.2.1", "address 192.0.2.2"}
        assert table.get(nobody, "b") is other, "whoever knows its id may use it, from anywhere"
        await other.destroy()
        assert dict(table._live._budget.owners()).keys() == {"address 192.0.2.1"}


# Changing


async def test_updates_are_merge_patches_with_versions() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        first = await actor.update({"a": {"b": 1, "c": 2}})
        assert (first.updates, first.version) == ({"a": {"b": 1, "c": 2}}, 1)
        second = await actor.update({"a": {"b": None, "d": 3}}, version=1)
        assert (second.updates, second.version) == ({"a": {"b": None, "d": 3}}, 2)
        assert actor.apply({"intermediate_results": {"step": 1}}).version == 3
        assert actor.snapshot()["a"] == {"c": 2, "d": 3}
        assert actor.snapshot()["intermediate_results"] == {"step": 1}
        for version in (0, 2, 4):
            with pytest.raises(VersionConflict) as refused:
                await actor.update({"a": None}, version)
            assert refused.value.data == {"version": 3}
        assert actor.version == 3
        assert own(actor) == {"a": {"c": 2, "d": 3}}


async def test_an_update_beyond_the_limits_changes_nothing() -> None:
    async with open_table(max_state=1_000, max_depth=4, max_members=20) as table:
        actor = await table.create(ADA, state={"a": 1})
        for updates in ({"a": 2, "b": "x" * 1_000}, {"a": 2, "b": [[[[1]]]]}, {"a": 2, "b": [0] * 20}):
            with pytest.raises(TooLargeMessage):
                await actor.update(updates)
            with pytest.raises(TooLargeMessage):
                await table.create(ADA, state=updates)
        assert (own(actor), actor.version) == ({"a": 1}, 0)
        assert table.statistics().contexts == 1


async def test_a_snapshot_stays_what_it_was() -> None:
    async with open_table() as table:
        actor = await table.create(ADA, state={"a": {"b": [1]}})
        before = actor.snapshot()
        await actor.update({"a": {"b": [2], "c": 1}, "d": 1})
        assert before["a"] == {"b": [1]}
        assert "d" not in before


@pytest.mark.parametrize("agents", [2, 50])
async def test_every_update_is_applied_once_and_in_order(agents: int) -> None:
    """Each agent adds its own numbers; watchers see each agent's in the order in which it sent them."""
    each = 40
    async with open_table() as table:
        actor = await table.create(ADA)
        versions: list[int] = []

        async def send(agent: int) -> None:
            for number in range(each):
                applied = await actor.update({f"agent-{agent}": number})
                versions.append(applied.version)
                if number % 7 == agent % 7:
                    await trio.lowlevel.checkpoint()

        seen: dict[str, list[int]] = {}
        count = 0
        async with actor.watch() as watch, trio.open_nursery() as nursery:
            assert (await watch.receive()).version == 0
            for agent in range(agents):
                nursery.start_soon(send, agent)
            while count < agents * each:
                event = await watch.receive()
                if event.kind == "state":  # it was slow for a moment
                    assert event.content is not None
                    count = event.version
                    for name, number in event.content.items():
                        if name.startswith("agent-"):
                            seen[name] = list(range(number + 1))
                    continue
                count += 1
                assert event.version == count
                assert event.content is not None
                for name, number in event.content.items():
                    seen.setdefault(name, []).append(number)
        assert sorted(versions) == list(range(1, agents * each + 1))
        assert seen == {f"agent-{agent}": list(range(each)) for agent in range(agents)}
        assert own(actor) == {f"agent-{agent}": each - 1 for agent in range(agents)}


async def test_updates_apply_in_the_order_of_their_calls() -> None:
    """Whatever an update waits for, one that was called later does not overtake it."""
    async with open_table() as table:
        actor = await table.create(ADA)
        for _ in range(130):  # of which some are checkpoints
            first, second = actor.update({"last": "first"}), actor.update({"last": "second"})
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda coroutine=first: coroutine)  # bound now
                await wait_all_tasks_blocked()
                nursery.start_soon(lambda coroutine=second: coroutine)
            assert own(actor) == {"last": "second"}


async def test_a_cancelled_update_changes_nothing() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        with trio.CancelScope() as scope:
            scope.cancel()
            await actor.update({"a": 1})
        assert scope.cancelled_caught
        assert (own(actor), actor.version) == ({}, 0)


async def test_updates_let_other_tasks_run() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        ran = False

        async def other() -> None:
            nonlocal ran
            ran = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for number in range(128):  # two checkpoints: both tasks may go on after the first, in any order
                await actor.update({"n": number})
            assert ran


# Watching


async def test_a_watcher_sees_the_state_then_each_update_then_the_end() -> None:
    async with open_table() as table:
        actor = await table.create(ADA, "ctx-001", {"a": 1})
        async with actor.watch() as watch:
            event = await watch.receive()
            assert (event.kind, event.context_id, event.version) == ("state", "ctx-001", 0)
            assert event.content == {**EMPTY, "session_id": "ctx-001", "a": 1}
            await actor.update({"a": None})
            await actor.update({"b": 2})
            await actor.destroy("the task is done")
            events = [event async for event in watch]
        assert [(event.kind, event.version, event.content, event.reason) for event in events] == [
            ("update", 1, {"a": None}, None),
            ("update", 2, {"b": 2}, None),
            ("destroyed", 2, None, "the task is done"),
        ]


async def test_a_slow_watcher_gets_the_whole_state_instead() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        async with actor.watch() as watch:
            await watch.receive()
            for number in range(500):
                await actor.update({"n": number})
            event = await watch.receive()
            assert (event.kind, event.version) == ("state", 500)
            assert event.content is not None
            assert event.content["n"] == 499
            await actor.update({"n": 500})
            assert (await watch.receive()).content == {"n": 500}
        assert table.statistics().replaced == 500


async def test_a_few_large_updates_are_replaced_too() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        async with actor.watch() as watch:
            await watch.receive()
            for number in range(3):
                await actor.update({"n": str(number) * 60_000})
            event = await watch.receive()
            assert (event.kind, event.version) == ("state", 3)


async def test_a_slow_watcher_sees_the_last_state_before_the_end() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        async with actor.watch() as watch:
            for number in range(100):
                await actor.update({"n": number})
            await actor.destroy()
            events = [event async for event in watch]
        assert [event.kind for event in events] == ["state", "destroyed"]
        assert events[0].content is not None
        assert events[0].content["n"] == 99


async def test_a_waiting_watcher_is_woken() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        kinds: list[str] = []

        async def look() -> None:
            async with actor.watch() as watch:
                async for event in watch:
                    kinds.append(event.kind)  # noqa: PERF401  # seen from outside meanwhile

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await wait_all_tasks_blocked()
            assert kinds == ["state"]
            await actor.update({"a": 1})
            await wait_all_tasks_blocked()
            assert kinds == ["state", "update"]
            await actor.destroy()
        assert kinds == ["state", "update", "destroyed"]


async def test_cancelling_receive_loses_nothing() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        async with actor.watch() as watch:
            await watch.receive()
            for _ in range(2):
                with trio.move_on_after(0):
                    await watch.receive()
            await actor.update({"a": 1})
            with trio.CancelScope() as scope:
                scope.cancel()
                await watch.receive()
            assert (await watch.receive()).content == {"a": 1}


async def test_a_watcher_that_is_always_a_little_late_gets_each_update() -> None:
    """What it has taken does not count against it: only what waits is bounded."""
    async with open_table() as table:
        actor = await table.create(ADA)
        async with actor.watch() as watch:
            await watch.receive()
            await actor.update({"text": "x" * 8_000})
            for number in range(20):  # 160 KB in all, of which 16 KB wait
                await actor.update({"text": "x" * 8_000, "number": number})
                assert (await watch.receive()).kind == "update"
            assert watch.replaced == 0


async def test_a_channel_that_was_closed_stays_closed() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        async with actor.watch() as watch:
            await watch.aclose()
            await actor.update({"a": 1})
            await actor.destroy()
            with pytest.raises(trio.ClosedResourceError):
                await watch.receive()


async def test_watchers_are_bounded_and_leave() -> None:
    async with open_table(max_watchers=2) as table:
        actor = await table.create(ADA)
        async with actor.watch() as first:
            async with actor.watch():
                with pytest.raises(TooMuch, match="2 watchers"):
                    async with actor.watch():
                        pass
                assert table.statistics().watchers == 2
            async with actor.watch():
                pass
            await first.aclose()
            with pytest.raises(trio.ClosedResourceError):
                await first.receive()
        assert table.statistics().watchers == 0


# Deadlines


async def test_an_unused_context_ends(autojump_clock: Any) -> None:
    async with open_table(idle=10.0, gone=5.0) as table:
        actor = await table.create(ADA, "ctx-001")
        began = trio.current_time()
        async with actor.watch() as watch:  # which is no use
            events = [event async for event in watch]
        assert trio.current_time() - began == pytest.approx(10.0)
        assert events[-1].reason == "it was not used for too long"
        with pytest.raises(ContextGone):
            await table.find(ADA, "ctx-001")


@pytest.mark.parametrize("use", ["get", "find", "update", "used", "call"])
async def test_use_pushes_the_deadline_on(use: str, autojump_clock: Any) -> None:
    async with open_table(idle=10.0) as table:
        actor = await table.create(ADA, "ctx-001")
        for _ in range(3):
            await trio.sleep(9.0)
            assert actor.deadline == pytest.approx(trio.current_time() + 1.0)
            if use == "get":
                table.get(ADA, "ctx-001")
            elif use == "find":
                await table.find(ADA, "ctx-001")
            elif use == "update":
                await actor.update({})
            elif use == "used":
                actor.used()
            else:
                begin(actor)
                actor.end_call("req-1")
            assert actor.deadline == pytest.approx(trio.current_time() + 10.0)
        await trio.sleep(9.9)
        assert actor.ended is None
        await trio.sleep(0.2)
        assert actor.ended == "it was not used for too long"


async def test_a_call_under_way_is_use(autojump_clock: Any) -> None:
    async with open_table(idle=10.0) as table:
        actor = await table.create(ADA)
        begin(actor)
        await trio.sleep(95.0)
        assert actor.ended is None
        actor.end_call("req-1")
        await trio.sleep(9.9)
        assert actor.ended is None
        await trio.sleep(0.2)
        assert actor.ended is not None


@pytest.mark.parametrize(("ttl", "ends"), [(None, 30.0), (20.0, 20.0), (1_000.0, 30.0), (0.5, 0.5)])
async def test_a_lifetime_ends_whatever_happens(ttl: float | None, ends: float, autojump_clock: Any) -> None:
    async with open_table(idle=10.0, lifetime=30.0) as table:
        actor = await table.create(ADA, ttl=ttl)
        began = trio.current_time()
        call = begin(actor)
        async with actor.watch() as watch:
            events = [event async for event in watch]
        assert trio.current_time() - began == pytest.approx(ends)
        assert events[-1].reason == "its lifetime is over"
        assert call.reasons == ["its lifetime is over"]


async def test_an_ended_id_is_remembered_for_a_while(autojump_clock: Any) -> None:
    async with open_table(gone=10.0) as table:
        actor = await table.create(ADA, "ctx-001")
        await actor.destroy("done")
        for look in (table.find, table.find_or_make):
            with pytest.raises(ContextGone) as refused:
                await look(ADA, "ctx-001")
            assert refused.value.data == {"reason": "done"}
        with pytest.raises(UnknownContext):
            await table.find(BOB, "ctx-001")
        await trio.sleep(9.9)
        assert table.statistics().gone == 1
        await trio.sleep(0.2)
        assert table.statistics().gone == 0  # forgotten although nobody asked
        with pytest.raises(UnknownContext):
            await table.find(ADA, "ctx-001")
        assert (await table.find_or_make(ADA, "ctx-001")).version == 0


async def test_an_ended_id_may_be_made_again_expressly() -> None:
    async with open_table() as table:
        first = await table.create(ADA, "ctx-001", {"a": 1})
        await first.destroy()
        second = await table.create(ADA, "ctx-001")
        assert own(second) == {}
        assert await table.find(ADA, "ctx-001") is second
        assert table.statistics().gone == 0


@pytest.mark.parametrize("most", [0, 3])
async def test_ended_ids_are_bounded(most: int) -> None:
    async with open_table(max_gone=most) as table:
        for number in range(10):
            await (await table.find_or_make(ADA, f"ctx-{number}")).destroy()
        assert table.statistics().gone == most
        if most:
            with pytest.raises(ContextGone):
                await table.find(ADA, "ctx-9")
        with pytest.raises(UnknownContext):
            await table.find(ADA, "ctx-0")


# Ending


async def test_an_ended_context_takes_nothing_more() -> None:
    async with open_table() as table:
        actor = await table.create(ADA, state={"a": 1})
        await actor.destroy("done")
        assert actor.ended == "done"

        async def work() -> None: ...

        for attempt in (
            lambda: actor.apply({"a": 2}),
            lambda: begin(actor),
            lambda: actor.start_soon(work),
            lambda: actor.on_destroy(work),
        ):
            with pytest.raises(ContextGone) as refused:
                attempt()
            assert refused.value.data == {"reason": "done"}
        with pytest.raises(ContextGone):
            await actor.update({"a": 2})
        with pytest.raises(ContextGone):
            async with actor.watch():
                pass
        actor.record({"request_id": "r", "tool": "t"})
        actor.end_call("unknown")
        assert actor.snapshot() == {**EMPTY, "session_id": actor.id, "a": 1}
        statistics = table.statistics()
        assert (statistics.contexts, statistics.owners, statistics.bytes) == (0, 0, 0)


async def test_destroying_cancels_calls_with_the_reason_then_tasks_then_cleans_up() -> None:
    order: list[str] = []
    async with open_table() as table:
        actor = await table.create(ADA)
        calls = [begin(actor, "req-1"), begin(actor, "req-2")]
        with pytest.raises(RequestUnderWay):
            begin(actor, "req-1")

        async def work() -> None:
            try:
                await trio.sleep_forever()
            finally:
                order.append("task")

        async def last() -> None:
            await trio.lowlevel.checkpoint()
            order.append("the first clean-up")

        actor.start_soon(work)
        actor.on_destroy(last)
        actor.on_destroy(lambda: order.append("the second clean-up"))
        await wait_all_tasks_blocked()
        assert table.statistics().tasks == 1
        await actor.destroy("the task is done")
        assert [call.reasons for call in calls] == [["the task is done"], ["the task is done"]]
        assert order == ["task", "the second clean-up", "the first clean-up"]
        assert not actor.calls


async def test_work_sees_why_it_is_cancelled() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        seen = []

        async def work() -> None:
            try:
                await trio.sleep_forever()
            except trio.Cancelled as cancelled:
                seen.append(getattr(cancelled, "reason", "done"))
                raise

        actor.start_soon(work)
        await wait_all_tasks_blocked()
        await actor.destroy("done")
        assert seen == ["done"]


async def test_work_that_did_not_begin_yet_ends_too() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        actor.start_soon(trio.sleep_forever)
        with trio.fail_after(5):
            await actor.destroy()
        assert table.statistics().tasks == 0


async def test_crashing_work_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    async with open_table() as table:
        actor = await table.create(ADA)

        async def crash() -> None:
            raise RuntimeError("of the work")

        actor.start_soon(crash)
        await wait_all_tasks_blocked()
        assert "of the work" in caplog.text
        assert table.statistics().tasks == 0
        assert (await actor.update({"a": 1})).version == 1


async def test_clean_ups_wait_for_calls_that_unwind() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        call = begin(actor, stubborn=True)
        cleaned = []
        actor.on_destroy(lambda: cleaned.append(True))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.destroy, "done")
            await wait_all_tasks_blocked()
            assert call.reasons == ["done"]
            assert not cleaned
            assert table.statistics().ending == 1
            with pytest.raises(ContextGone):
                await table.find(ADA, actor.id)
            actor.end_call("req-1")
        assert cleaned


async def test_clean_ups_wait_for_tasks_that_unwind() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        gate, cleaned = trio.Event(), []

        async def work() -> None:
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await gate.wait()

        actor.start_soon(work)
        actor.on_destroy(lambda: cleaned.append(True))
        async with trio.open_nursery() as nursery:
            await wait_all_tasks_blocked()
            call = begin(actor)
            nursery.start_soon(actor.destroy)
            await wait_all_tasks_blocked()
            assert call.reasons
            assert not cleaned
            gate.set()
        assert cleaned


async def test_one_that_is_ending_is_gone_even_if_no_ended_id_is_remembered() -> None:
    async with open_table(gone=0) as table:
        actor = await table.create(ADA, "ctx-001")
        begin(actor, stubborn=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.destroy, "done")
            await wait_all_tasks_blocked()
            for look in (table.find, table.find_or_make):
                with pytest.raises(ContextGone) as refused:
                    await look(ADA, "ctx-001")
                assert refused.value.data == {"reason": "done"}
            actor.end_call("req-1")
        assert await table.find_or_make(ADA, "ctx-001") is not actor


async def test_what_does_not_end_is_not_waited_for(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_table(cleanup=5.0) as table:
        actor = await table.create(ADA)
        begin(actor, stubborn=True)
        ran = []

        async def crash() -> None:
            raise RuntimeError("of a clean-up")

        actor.on_destroy(lambda: ran.append(True))
        actor.on_destroy(crash)
        actor.on_destroy(trio.sleep_forever)
        began = trio.current_time()
        await actor.destroy()
        assert trio.current_time() - began == pytest.approx(10.0)
        assert ran == [True]
        assert "of a clean-up" in caplog.text
        assert "took more than 5.0 s" in caplog.text


async def test_destroying_twice_is_destroying_once() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        call = begin(actor, stubborn=True)
        cleaned = []
        actor.on_destroy(lambda: cleaned.append(True))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(actor.destroy, "first")
            await wait_all_tasks_blocked()
            nursery.start_soon(actor.destroy, "second")
            await wait_all_tasks_blocked()
            assert table.statistics().ending == 1
            actor.end_call("req-1")
        await actor.destroy("third")
        assert (call.reasons, cleaned, actor.ended) == (["first"], [True], "first")


async def test_cancelling_a_destroy_stops_only_the_waiting() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        begin(actor, stubborn=True)
        cleaned = []

        async def clean_up() -> None:
            await trio.lowlevel.checkpoint()
            cleaned.append(True)

        actor.on_destroy(clean_up)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(actor.destroy)
                await wait_all_tasks_blocked()
                scope.cancel()
        actor.end_call("req-1")
        await actor.destroy()
        assert cleaned == [True]


async def test_the_same_id_is_made_again_once_the_old_one_is_gone() -> None:
    async with open_table() as table:
        old = await table.create(ADA, "ctx-001")
        begin(old, stubborn=True)
        made = []

        async def make() -> None:
            made.append(await table.create(ADA, "ctx-001"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(old.destroy)
            await wait_all_tasks_blocked()
            nursery.start_soon(make)
            await wait_all_tasks_blocked()
            assert not made
            old.end_call("req-1")
        assert await table.find(ADA, "ctx-001") is made[0] is not old
        assert table.statistics().owners == 1


# The end of all


async def test_all_contexts_end_with_the_table() -> None:
    budget = Budget()
    table = ContextTable(ContextLimits(), MemoryContexts(), budget)
    tasks = all_tasks()
    async with table.running():
        actors = [await table.create((f"p{number % 5}", "a")) for number in range(20)]
        calls = [begin(actor) for actor in actors]
        cleaned = []
        for actor in actors:
            actor.start_soon(trio.sleep_forever)
            actor.on_destroy(lambda: cleaned.append(True))
        await wait_all_tasks_blocked()
    assert_empty(table, budget)
    assert all_tasks() == tasks
    assert len(cleaned) == 20
    assert all(call.reasons == ["the server is shutting down"] for call in calls)
    for attempt in (table.create(ADA), table.find(ADA, actors[0].id), table.find_or_make(ADA, "ctx-001")):
        with pytest.raises(Draining):
            await attempt


@pytest.mark.parametrize("how", ["cancelled", "raises"])
async def test_a_table_that_ends_early_leaves_nothing(how: str) -> None:
    budget = Budget()
    table = ContextTable(ContextLimits(), MemoryContexts(), budget)
    cleaned = []
    tasks = all_tasks()

    async def clean_up() -> None:
        await trio.lowlevel.checkpoint()
        cleaned.append(True)

    async def run() -> None:
        async with table.running():
            actor = await table.create(ADA)
            actor.on_destroy(clean_up)
            actor.start_soon(trio.sleep_forever)
            begin(actor)
            if how == "raises":
                raise KeyError("of the body")
            scope.cancel()
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        if how == "raises":
            with pytest.raises(KeyError):
                await run()
        else:
            await run()
    assert cleaned == [True]
    assert_empty(table, budget)
    assert all_tasks() == tasks


async def test_an_interrupt_in_a_clean_up_ends_the_table() -> None:
    table = ContextTable(ContextLimits(), MemoryContexts(), Budget())

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with table.running():
            actor = await table.create(ADA)
            actor.on_destroy(interrupt)
            with trio.fail_after(5):
                await actor.destroy()
                await trio.sleep_forever()


# Memory


async def test_the_budget_bounds_what_contexts_keep(caplog: pytest.LogCaptureFixture) -> None:
    budget = Budget(4 * 1024 * 1024)
    async with open_table(budget=budget, max_state=1_000_000) as table:
        actors = []
        with pytest.raises(TooMuch, match="memory") as refused:
            while True:
                actor = await table.create(ADA)
                actors.append(actor)
                await actor.update({"a": "x" * 200_000})
        assert refused.value.retry_after
        assert budget.held <= budget.bound / 2 + 300_000
        assert budget.refused == 1
        state, held, count = own(actors[-1]), budget.held, len(actors)
        with pytest.raises(TooMuch, match="memory"):
            await actors[-1].update({"b": "x" * 200_000})
        assert (own(actors[-1]), budget.held) == (state, held)
        await actors[0].update({"a": None})  # what shrinks is not refused
        await actors[-1].update({"b": "x" * 150_000})
        assert table.statistics().bytes == budget.held
        other = await table.create(BOB, state={"a": "x" * 200_000})  # there is always room for one more
        assert budget.owners()[0][0] == "principal ada"
        for each in (*actors, other):
            await each.destroy()
        assert (budget.held, count) == (0, len(actors))


async def test_an_ended_context_counts_no_more() -> None:
    async with open_table() as table:
        first, second = await table.create(ADA), await table.create(ADA)
        once = table.statistics().bytes
        await first.update({"a": "x" * 5_000})
        first.record(CALL)
        await first.destroy()
        assert table.statistics().bytes == once / 2
        await second.destroy()
        assert table.statistics().bytes == 0


async def test_each_owner_may_keep_a_little() -> None:
    budget = Budget(1_000)
    async with open_table(budget=budget) as table:
        actor = await table.create(ADA)
        await actor.update({"a": "x" * (LITTLE - 5_000)})
        with pytest.raises(TooMuch):
            await actor.update({"b": "x" * 5_000})
        with pytest.raises(TooMuch):
            for _ in range(10):
                await table.create(ADA)


async def test_contexts_of_a_principal_count_with_the_rest_of_it() -> None:
    budget = Budget()
    async with open_table(budget=budget) as table:
        await table.create(("ada", "agent-a"))
        await table.create(("ada", "agent-b"))
        await table.create(("", "anonymous"))
        await table.create(("", "anonymous"), address="2001:db8::1")
        assert {name for name, _ in budget.owners()} == {"principal ada", NOWHERE_KNOWN, "address 2001:db8::/64"}


# The tool history

CALL = {"request_id": "r", "tool": "t", "version": "1", "arguments": {"token": "abc", "n": 1}, "status": "success"}


async def test_the_history_has_the_latest_calls() -> None:
    async with open_table(history=3) as table:
        actor = await table.create(ADA)
        for number in range(5):
            actor.record({**CALL, "request_id": f"r{number}"})
        history = actor.snapshot()["tool_history"]
        assert [call["request_id"] for call in history] == ["r2", "r3", "r4"]
        assert history[0] == {**CALL, "request_id": "r2", "arguments": {"token": "string(3)", "n": "number"}}
        assert actor.version == 0


async def test_no_history_may_be_kept() -> None:
    async with open_table(history=0) as table:
        actor = await table.create(ADA)
        actor.record(CALL)
        assert actor.snapshot()["tool_history"] == []


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("none", None),
        ("shapes", {"token": "string(3)", "n": "number"}),
        ("masked", {"token": "***", "n": 1}),
        ("whole", {"token": "abc", "n": 1}),
    ],
)
async def test_arguments_are_shown_by_policy(policy: str, shown: Any) -> None:
    async with open_table(history_arguments=policy) as table:
        actor = await table.create(ADA)
        actor.record(CALL)
        (entry,) = actor.snapshot()["tool_history"]
        assert entry.get("arguments") == shown
        assert CALL["arguments"] == {"token": "abc", "n": 1}


async def test_the_history_is_bounded_in_bytes() -> None:
    async with open_table(history_arguments="whole", max_history=4_096, history=1_000) as table:
        actor = await table.create(ADA)
        before = table.statistics().bytes
        for number in range(200):
            actor.record({**CALL, "request_id": f"r{number}"})
        actor.record({**CALL, "request_id": "large", "arguments": {"a": "x" * 3_000}})
        actor.record({**CALL, "request_id": "last", "arguments": {"a": "\ud800"}})
        history = actor.snapshot()["tool_history"]
        assert 20 < len(history) < 40
        assert table.statistics().bytes - before <= 4_096
        large, last = history[-2:]
        assert (large["request_id"], last["request_id"]) == ("large", "last")
        assert "arguments" not in large
        assert "arguments" not in last


# What handlers get


async def test_a_handler_reads_and_writes_copies() -> None:
    async with open_table() as table:
        actor = await table.create(ADA, state={"a": {"b": [1]}})
        ctx = ActorContext(actor)
        assert (ctx.id, ctx.version) == (actor.id, 0)
        state = ctx.read()
        state["a"]["b"].append(2)
        assert own(actor) == {"a": {"b": [1]}}
        mine = {"c": [1]}
        assert await ctx.update(mine) == 1
        mine["c"].append(2)
        assert own(actor)["c"] == [1]
        assert await ctx.update({"permissions": ["pay"]}, version=1) == 2
        assert ctx.read()["permissions"] == ["pay"]
        with pytest.raises(VersionConflict):
            await ctx.update({}, version=1)


@pytest.mark.parametrize(
    "updates", [{"session_id": "x"}, {"tool_history": []}, {"a": float("nan")}, {"a": object()}, {"a": "\ud800"}]
)
async def test_a_handler_writes_json_and_nothing_of_the_servers(updates: dict[str, Any]) -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        with pytest.raises(MalformedMessage):
            await ActorContext(actor).update(updates)
        assert actor.version == 0


async def test_a_handler_watches_and_starts_work() -> None:
    async with open_table() as table:
        actor = await table.create(ADA)
        ctx = ActorContext(actor)
        done = trio.Event()

        async def work(value: int) -> None:
            await ctx.update({"worked": value})
            done.set()

        async with ctx.watch() as watch:
            await watch.receive()
            ctx.start_soon(work, 1)
            assert (await watch.receive()).content == {"worked": 1}
        await done.wait()


@pytest.mark.parametrize("wrong", [{"idle": 0}, {"max_state": 0}, {"history": -1}, {"history_arguments": "some"}])
def test_limits_are_checked(wrong: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    with pytest.raises(ValueError):
        ContextLimits(**wrong)
