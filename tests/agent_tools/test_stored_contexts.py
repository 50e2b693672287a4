"""Contexts over a store that outlives them: what is answered, what is seen, and what happens while the store fails."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.agent_tools.tables import ADA, BOB, ScriptedStore, all_tasks, assert_empty, begin, open_table
from trimcp.agent_tools.contexts.actor import ActorContext, ContextActor
from trimcp.agent_tools.contexts.state import ContextLimits
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages.errors import (
    AgentToolsError,
    ContextGone,
    Draining,
    NameTaken,
    TooLargeMessage,
    TooMuch,
    UnknownContext,
    VersionConflict,
)
from trimcp.budget import Budget
from trimcp.store.contexts import KeptContext
from trimcp.store.contexts_sqlite import SqliteContexts

FAILED = OSError("the disk is full")


def row(id: str = "ctx-001", owner: Any = ADA, **members: Any) -> KeptContext:
    """A context as an earlier process left it."""
    now = time.time()
    values: dict[str, Any] = {
        "version": 3,
        "state": {"a": 1},
        "history": [b'{"tool":"t"}'],
        "created": now - 50,
        "ends": now + 1_000,
        "until": now + 100,
    }
    return KeptContext(owner, id, **{**values, **members})


def store_with(*rows: KeptContext) -> ScriptedStore:
    return ScriptedStore({one.key: one for one in rows})


# Answers wait for the store


async def test_an_update_is_answered_and_seen_once_the_store_has_it() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor = await table.create(ADA, "ctx-001")
        answers: list[int] = []

        async def update(number: int) -> None:
            answers.append((await actor.update({"n": number})).version)

        async with actor.watch() as watch, trio.open_nursery() as nursery:
            await watch.receive()
            with store.hold():
                nursery.start_soon(update, 1)
                await wait_all_tasks_blocked()
                assert not answers
                assert (actor.version, actor.snapshot().get("n")) == (0, None)
                with trio.move_on_after(0):
                    await watch.receive()
                    raise AssertionError("seen before it was kept")
            event = await watch.receive()
            assert (event.version, event.content) == (1, {"n": 1})
        assert answers == [1]
        assert store.rows[ADA, "ctx-001"].state == {"n": 1}


async def test_what_arrives_during_a_write_is_written_together() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actors = [await table.create(ADA, f"c{number}") for number in range(5)]
        before = len(store.writes)
        answers = []

        async def update(number: int) -> None:
            actor = actors[number % 5]
            answers.append((number, (await actor.update({f"n{number}": number})).version))

        async with trio.open_nursery() as nursery:
            with store.hold():
                for number in range(100):
                    nursery.start_soon(update, number)
                    await wait_all_tasks_blocked()  # so that they are called in this order
        assert len(store.writes) - before == 2
        assert sorted(answers) == [(number, number // 5 + 1) for number in range(100)]
        for number, actor in enumerate(actors):
            assert actor.version == 20
            assert store.rows[ADA, f"c{number}"].state == {f"n{each}": each for each in range(number, 100, 5)}
            assert store.rows[ADA, f"c{number}"].version == 20


async def test_large_contexts_are_written_some_at_a_time() -> None:
    store = ScriptedStore()
    async with open_table(store, max_state=9_000_000) as table:
        actors = [await table.create(ADA, f"c{number}") for number in range(5)]
        before = len(store.writes)
        async with trio.open_nursery() as nursery:
            with store.hold():
                nursery.start_soon(actors[0].update, {"n": 0})
                await wait_all_tasks_blocked()
                for actor in actors[1:]:
                    nursery.start_soon(actor.update, {"text": "x" * 8_500_000})
                await wait_all_tasks_blocked()
        assert [len(kept) for kept, _ in store.writes[before:]] == [1, 2, 2]
        failed: list[AgentToolsError] = []

        async def update(actor: ContextActor) -> None:
            try:
                await actor.update({"n": 1})
            except AgentToolsError as error:
                failed.append(error)

        store.broken = FAILED
        async with trio.open_nursery() as nursery:
            for actor in actors[1:]:
                nursery.start_soon(update, actor)
        assert len(failed) == 4, "those that are not even tried fail with the others"
        assert len(store.writes) - before == 4
        store.broken = None


async def test_updates_that_wait_are_counted_and_bounded() -> None:
    """Whatever they replace: the memory of each is its own until the store has it, and what fails leaves nothing."""
    store, budget = ScriptedStore(), Budget(4_000_000)
    async with open_table(store, budget=budget, max_unsaved=100) as table:
        actor = await table.create(ADA, "ctx-001", {f"m{n}": n for n in range(1_000)})
        before, outcomes = budget.held, []

        async def update(text: str) -> None:
            try:
                await actor.update({"text": text})
            except AgentToolsError as error:
                outcomes.append(error)

        async with trio.open_nursery() as nursery:
            with store.hold():
                for _ in range(101):
                    nursery.start_soon(update, "")
                await wait_all_tasks_blocked()
                assert 100 * 8 * 1024 + 2 * 100 * 1_000 <= budget.held - before <= 100 * 9 * 1024 + 2 * 100 * 1_100
        assert [(type(error), error.message) for error in outcomes] == [
            (TooMuch, "100 updates of the context wait for the store")
        ]
        assert budget.held - before <= 200
        outcomes.clear()
        for broken in (None, FAILED):
            store.broken = broken
            async with trio.open_nursery() as nursery:
                with store.hold():
                    for _ in range(50):
                        nursery.start_soon(update, "x" * 200_000)
                    await wait_all_tasks_blocked()
                    assert 1_000_000 < budget.held - before < 2_000_000
                    assert {error.message for error in outcomes} == {"the server has no memory for a larger state"}
            assert 200_000 < budget.held - before < 200_200, "the one that was kept"
        store.broken = None


async def test_versions_are_judged_by_updates_that_wait() -> None:
    store = ScriptedStore()
    async with open_table(store, max_state=200) as table:
        actor = await table.create(ADA, "ctx-001")
        async with trio.open_nursery() as nursery:
            with store.hold():
                nursery.start_soon(actor.update, {"a": "x" * 100}, 0)
                await wait_all_tasks_blocked()
                with pytest.raises(VersionConflict) as refused:
                    await actor.update({"b": 1}, version=0)
                assert refused.value.data == {"version": 1}
                with pytest.raises(TooLargeMessage):  # together with the one that waits
                    await actor.update({"b": "x" * 100})
                nursery.start_soon(actor.update, {"b": 1}, 1)
                await wait_all_tasks_blocked()
        assert (actor.version, store.rows[actor.key].version) == (2, 2)
        assert store.rows[actor.key].state == {"a": "x" * 100, "b": 1}


async def test_an_update_that_nobody_waits_for_is_no_state_before_the_store_has_it() -> None:
    async with open_table(store := ScriptedStore()) as table:
        assert table.durable
        actor = await table.create(ADA)
        with store.hold():
            first, second = actor.apply({"a": 1}), actor.apply({"b": 2}, 1)
            await wait_all_tasks_blocked()
            assert (first.version, second.version) == (1, 2)
            assert (actor.version, actor.to_store().version, actor.snapshot().get("a")) == (0, 2, None)
            with pytest.raises(trio.TooSlowError), trio.fail_after(0):
                await first.stored()
        assert await second.stored() is second
        assert (actor.version, actor.snapshot()["b"]) == (2, 2)
        store.broken = FAILED
        third = actor.apply({"a": 3})
        for _ in range(2):
            with pytest.raises(AgentToolsError, match="nothing was changed"):
                await third.stored()
        assert actor.snapshot()["a"] == 1
        store.broken = None
        assert await ActorContext(actor).update({"a": 4}) == 3


async def test_cancelling_an_update_that_waits_does_not_undo_it() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor = await table.create(ADA)
        with store.hold():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(actor.update, {"a": 1})
                await wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        await actor.update({"b": 1})
        assert actor.version == 2
        assert store.rows[actor.key].state == {"a": 1, "b": 1}


async def test_a_context_is_answered_once_the_store_has_it() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        made = []

        async def make() -> None:
            made.append(await table.create(ADA, "ctx-001", {"a": 1}))

        async with trio.open_nursery() as nursery:
            with store.hold():
                nursery.start_soon(make)
                await wait_all_tasks_blocked()
                assert not made
                with pytest.raises(NameTaken):
                    await table.create(ADA, "ctx-001")
        assert (made[0].version, table.statistics().updates) == (0, 0)
        assert store.rows[ADA, "ctx-001"].state == {"a": 1}


async def test_the_history_is_kept() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor = await table.create(ADA)
        actor.record({"request_id": "r", "tool": "t"})
        await wait_all_tasks_blocked()
        assert list(store.rows[actor.key].history) == [b'{"request_id":"r","tool":"t"}']


# The store fails


async def test_updates_fail_with_the_store_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store, budget = ScriptedStore(), Budget()
    async with open_table(store, budget=budget) as table:
        actor = await table.create(ADA, state={"a": 1})
        held = budget.held
        store.broken = FAILED
        failures: list[AgentToolsError] = []

        async def update(number: int) -> None:
            try:
                await actor.update({"n": number, "pad": "x" * 1_000})
            except AgentToolsError as error:
                failures.append(error)

        async with actor.watch() as watch:
            await watch.receive()
            for _ in range(2):
                async with trio.open_nursery() as nursery:
                    with store.hold():  # some fail with the write, others because they build on those
                        for number in range(10):
                            nursery.start_soon(update, number)
                            await wait_all_tasks_blocked()
            assert len(failures) == 20
            assert all(type(error) is AgentToolsError for error in failures)
            assert "disk" not in str(failures[0])  # that is for the log
            assert (actor.version, actor.snapshot()["a"], budget.held) == (0, 1, held)
            assert [record.levelname for record in caplog.records].count("ERROR") == 1
            assert "the disk is full" in caplog.text
            store.broken = None
            assert (await actor.update({"n": 1})).version == 1
            assert (await watch.receive()).content == {"n": 1}
        assert "works again" in caplog.text
        assert store.rows[actor.key].state == {"a": 1, "n": 1}


async def test_a_context_that_cannot_be_kept_is_not_made() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        store.broken = FAILED
        with pytest.raises(AgentToolsError, match="could not keep"):
            await table.create(ADA, "ctx-001")
        store.broken = None
        with pytest.raises(ContextGone):
            await table.find(ADA, "ctx-001")
        await table.create(ADA, "ctx-001")


async def test_a_context_that_cannot_be_read_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    store = store_with(row())
    async with open_table(store) as table:
        store.broken = FAILED
        for _ in range(3):
            with pytest.raises(AgentToolsError, match="could not read the context") as failed:
                await table.find(ADA, "ctx-001")
        assert caplog.text.count("cannot be read") == 1
        assert failed.value.code == "crashed"
        assert "the disk is full" in caplog.text
        store.broken = None
        assert (await table.find(ADA, "ctx-001")).version == 3


async def test_what_was_destroyed_while_the_store_failed_is_deleted_later() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor, other = await table.create(ADA, "ctx-001"), await table.create(ADA, "ctx-002")
        store.broken = FAILED
        await actor.destroy()
        assert actor.key in store.rows
        with pytest.raises(ContextGone):
            await table.find(ADA, "ctx-001")
        store.broken = None
        await other.update({"a": 1})
        assert actor.key not in store.rows


async def test_one_made_again_before_the_old_one_could_be_deleted_stays() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor = await table.create(ADA, "ctx-001", {"old": True})
        store.broken = FAILED
        await actor.destroy()
        store.broken = None
        await table.create(ADA, "ctx-001", {"new": True})
        await table.create(ADA, "ctx-002")
        assert store.rows[ADA, "ctx-001"].state == {"new": True}


async def test_a_failing_sweep_is_logged_and_tried_again(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_with(row(until=1.0))
    store_counts = store.counts

    async def counts() -> Any:
        found = await store_counts()
        store.broken = FAILED
        return found

    monkeypatch.setattr(ScriptedStore, "counts", lambda self: counts())
    async with open_table(store) as table:
        await trio.sleep(1)
        assert "could not forget" in caplog.text
        assert table.statistics().stored == 1
        store.broken = None
        await trio.sleep(61)
        assert table.statistics().stored == 0
        assert not store.rows


# Loading


async def test_a_context_is_loaded_once_for_all_who_ask() -> None:
    store = store_with(row())
    before = row().until
    async with open_table(store) as table:
        found = []

        async def find() -> None:
            found.append(await table.find_or_make(ADA, "ctx-001"))

        async with trio.open_nursery() as nursery:
            with store.hold():
                for _ in range(10):
                    nursery.start_soon(find)
                await wait_all_tasks_blocked()
        assert len(set(found)) == 1
        assert store.loads == [(ADA, "ctx-001")]
        actor = found[0]
        assert (actor.version, actor.snapshot()["a"]) == (3, 1)
        assert actor.snapshot()["tool_history"] == [{"tool": "t"}]
        await wait_all_tasks_blocked()
        assert store.rows[actor.key].until > before  # the store knows that it is in use
        assert (await actor.update({"a": 2}, version=3)).version == 4
        assert table.statistics().stored == 0


async def test_a_loader_that_is_cancelled_leaves_it_to_the_next() -> None:
    store = store_with(row())
    async with open_table(store) as table:
        found = []

        async def find() -> None:
            found.append(await table.find(ADA, "ctx-001"))

        async with trio.open_nursery() as nursery:
            with store.hold():
                with trio.move_on_after(0):
                    nursery.start_soon(find)
                    await table.find(ADA, "ctx-001")
                await wait_all_tasks_blocked()
        assert len(found) == 1
        assert not table._unloaded.loading


async def test_strangers_do_not_find_it_and_cost_the_store_nothing() -> None:
    store = store_with(row())
    async with open_table(store) as table:
        for stranger in (BOB, ("ada", "agent-b")):
            with pytest.raises(UnknownContext):
                await table.find(stranger, "ctx-001")
        assert (await table.find_or_make(BOB, "ctx-001")).version == 0
        assert store.loads == []


@pytest.mark.parametrize("id", ["unknown", "x" * 300, "\ud800"])
async def test_what_the_store_does_not_have_is_unknown(id: str) -> None:
    async with open_table(store_with(row())) as table:
        with pytest.raises(UnknownContext):
            await table.find(ADA, id)


async def test_a_context_in_the_store_is_taken_and_counted() -> None:
    store = store_with(row(), row("ctx-002"))
    async with open_table(store, max_per_owner=3, max_contexts=4) as table:
        with pytest.raises(NameTaken):
            await table.create(ADA, "ctx-001")
        (await table.create(ADA, "ctx-003")).used()
        with pytest.raises(TooMuch, match="you may have 3"):
            await table.create(ADA)
        (await table.create(BOB)).used()
        with pytest.raises(TooMuch, match="too many"):
            await table.create(("eve", "e"))
        await (await table.find(ADA, "ctx-002")).destroy()
        await table.create(ADA)
        assert table.statistics().contexts == 4


@pytest.mark.parametrize("over", ["until", "ends"])
async def test_what_is_over_is_not_loaded(over: str) -> None:
    store = store_with(row(**{over: time.time() - 1}))
    async with open_table(store) as table:
        with pytest.raises(UnknownContext):
            await table.find(ADA, "ctx-001")
        assert (await table.find_or_make(ADA, "ctx-001")).version == 0


async def test_a_lifetime_goes_on_after_a_restart(autojump_clock: Any) -> None:
    async with open_table(store_with(row(ends=time.time() + 30)), idle=10.0) as table:
        actor = await table.find(ADA, "ctx-001")
        began = trio.current_time()
        begin(actor)
        async with actor.watch() as watch:
            events = [event async for event in watch]
        assert trio.current_time() - began == pytest.approx(30, abs=2)
        assert events[-1].reason == "its lifetime is over"


async def test_a_state_larger_than_the_limits_of_now_is_loaded_and_may_shrink() -> None:
    store = store_with(row(state={"a": "x" * 1_000}))
    async with open_table(store, max_state=500) as table:
        actor = await table.find(ADA, "ctx-001")
        with pytest.raises(TooLargeMessage):
            await actor.update({"b": 1})
        await actor.update({"a": "y"})
        await actor.update({"b": 1})


async def test_memory_for_a_loaded_context_is_counted_too() -> None:
    budget = Budget(1_000)
    async with open_table(store_with(row(state={"a": "x" * 100_000})), budget=budget) as table:
        with pytest.raises(TooMuch, match="memory"):
            await table.find(ADA, "ctx-001")
        assert budget.held == 0
        assert not budget._owners
        assert table.statistics().stored == 1


async def test_what_nobody_uses_is_forgotten(autojump_clock: Any) -> None:
    store = store_with(row(until=time.time() - 1), row("ctx-002"))
    async with open_table(store) as table:
        await trio.sleep(1)
        assert list(store.rows) == [(ADA, "ctx-002")]
        assert table.statistics().stored == 1


async def test_one_that_is_used_is_kept_although_it_does_not_change(autojump_clock: Any) -> None:
    async with open_table(store := ScriptedStore(), idle=10.0) as table:
        actor = await table.create(ADA)
        written = len(store.writes)
        for _ in range(10):
            await trio.sleep(9.0)
            actor.used()
        assert len(store.writes) - written >= 8  # each of them says anew until when it is in use


async def test_one_that_expired_in_the_store_while_it_is_used_is_written_again(autojump_clock: Any) -> None:
    store = store_with(row())
    async with open_table(store) as table:
        actor = await table.find(ADA, "ctx-001")
        await wait_all_tasks_blocked()
        store.rows[actor.key].until = 1.0  # as if the store's clock went ahead
        await trio.sleep(61)
        assert actor.key in store.rows
        assert table.statistics().stored == 0


# Ending


async def test_a_destroyed_context_is_deleted_before_that_is_answered() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor = await table.create(ADA, "ctx-001", {"a": 1})
        async with trio.open_nursery() as nursery:
            with store.hold():
                nursery.start_soon(_gone, actor)  # whose write is under way
                await wait_all_tasks_blocked()
                nursery.start_soon(_gone, actor)  # which waits for the next one
                await wait_all_tasks_blocked()
                nursery.start_soon(actor.destroy, "done")
                await wait_all_tasks_blocked()
                assert table.statistics().ending == 1
                assert actor.key in store.rows
        assert not store.rows
        await wait_all_tasks_blocked()
        assert not store.rows


async def _gone(actor: Any) -> None:
    with pytest.raises(ContextGone):
        await actor.update({"a": 2})


async def test_a_failed_write_does_not_bring_back_what_was_destroyed() -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor, other = await table.create(ADA, "ctx-001"), await table.create(ADA, "ctx-002")
        async with trio.open_nursery() as nursery:
            with store.hold():
                store.broken = FAILED
                nursery.start_soon(_gone, actor)
                await wait_all_tasks_blocked()
                nursery.start_soon(actor.destroy)
                await wait_all_tasks_blocked()
        store.broken = None
        await other.update({"a": 1})
        assert list(store.rows) == [(ADA, "ctx-002")]


async def test_contexts_outlive_the_table() -> None:
    store, budget = ScriptedStore(), Budget()
    table = ContextTable(ContextLimits(), store, budget)
    tasks, cleaned = all_tasks(), []
    async with table.running():
        actor = await table.create(ADA, "ctx-001")
        await actor.update({"a": 1})
        call = begin(actor)
        actor.start_soon(trio.sleep_forever)
        actor.on_destroy(lambda: cleaned.append(True))
        events: list[str] = []

        async def look() -> None:
            async with actor.watch() as watch:
                events.extend([event.kind async for event in watch])

        actor.start_soon(look)
        await wait_all_tasks_blocked()
        actor.record({"tool": "last"})
    assert_empty(table, budget)
    assert all_tasks() == tasks
    assert call.reasons == ["the server is shutting down"]
    assert cleaned == [True]
    assert "destroyed" not in events
    assert store.rows[ADA, "ctx-001"].state == {"a": 1}
    assert list(store.rows[ADA, "ctx-001"].history) == [b'{"tool":"last"}']
    for attempt in (actor.update({"a": 2}), table.find(ADA, "ctx-001")):
        with pytest.raises(Draining):
            await attempt


@pytest.mark.parametrize("broken", [False, True])
async def test_updates_that_wait_when_the_table_ends_are_written(broken: bool) -> None:
    store, budget = ScriptedStore(), Budget()
    table = ContextTable(ContextLimits(), store, budget)
    outcomes: list[Any] = []

    async def update(actor: Any) -> None:
        try:
            outcomes.append(await actor.update({"a": 1}))
        except AgentToolsError as error:
            outcomes.append(error.code)

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with table.running():
                actor = await table.create(ADA, "ctx-001")
                with store.hold():
                    nursery.start_soon(update, actor)
                    await wait_all_tasks_blocked()
                    if broken:
                        store.broken = FAILED
                    scope.cancel()
    assert outcomes == ["crashed"] if broken else [({"a": 1}, 1)]
    assert store.rows[ADA, "ctx-001"].state == ({} if broken else {"a": 1})
    assert_empty(table, budget)


async def test_a_store_that_hangs_does_not_keep_the_table(autojump_clock: Any) -> None:
    store, budget = ScriptedStore(), Budget()
    table = ContextTable(ContextLimits(), store, budget)
    outcomes: list[str] = []

    async def update(actor: Any) -> None:
        try:
            await actor.update({"a": 1})
        except AgentToolsError as error:
            outcomes.append(error.code)

    async with trio.open_nursery() as nursery:
        began = trio.current_time()
        with store.hold():
            store.gate, gate = None, store.gate
            async with table.running():
                actor, other = await table.create(ADA, "ctx-001"), await table.create(ADA, "ctx-002")
                store.gate = gate
                nursery.start_soon(update, actor)
                await wait_all_tasks_blocked()
                nursery.start_soon(update, other)  # which waits for the next write
                await wait_all_tasks_blocked()
            assert trio.current_time() - began == pytest.approx(30.0)
    assert outcomes == ["crashed", "crashed"]
    assert_empty(table, budget)


async def test_what_could_not_be_written_is_tried_again_at_the_end() -> None:
    store = ScriptedStore()
    async with ContextTable(ContextLimits(), store, Budget()).running() as table:
        actor, ended = await table.create(ADA, "ctx-001"), await table.create(ADA, "ctx-002")
        store.broken = FAILED
        actor.record({"tool": "last"})
        await ended.destroy()
        assert len(store.rows) == 2
        store.broken = None
    assert list(store.rows) == [(ADA, "ctx-001")]
    assert list(store.rows[ADA, "ctx-001"].history) == [b'{"tool":"last"}']


async def test_a_store_that_cannot_be_opened_says_so() -> None:
    store = ScriptedStore(broken=FAILED)
    with pytest.raises(OSError, match="disk"):
        async with ContextTable(ContextLimits(), store, Budget()).running():
            pass


async def test_the_log_of_a_store_names_its_logger(caplog: pytest.LogCaptureFixture) -> None:
    store = ScriptedStore()
    async with open_table(store) as table:
        actor = await table.create(ADA)
        store.broken = FAILED
        with pytest.raises(AgentToolsError):
            await actor.update({"a": 1})
    assert ("trimcp.agent_tools", logging.ERROR) in {(record.name, record.levelno) for record in caplog.records}


# One store for all


@attrs.define(eq=False)
class OneAtATime(ScriptedStore):
    """A store that does one thing at a time, in the order of the calls; each takes a second."""

    turns: trio.Lock = attrs.field(factory=trio.Lock)

    async def _work(self) -> None:
        async with self.turns:
            await trio.sleep(1)


@pytest.mark.parametrize("strangers", [{"owner": BOB}, {"owner": ("", "anonymous"), "address": "192.0.2.1"}])
async def test_reads_of_one_hold_up_nobody_else(strangers: dict[str, Any], autojump_clock: Any) -> None:
    store = OneAtATime({one.key: one for one in (row("c1", owner=strangers["owner"]), row("c2"), row("c3"))})
    async with open_table(store, idle=1e6, lifetime=1e6) as table, trio.open_nursery() as nursery:
        actor = await table.find(ADA, "c2")
        unknown = 0

        async def ask(number: int) -> None:
            nonlocal unknown
            with pytest.raises(UnknownContext):
                await table.find(strangers["owner"], f"none-{number}", address=strangers.get("address"))
            unknown += 1

        for number in range(1_000):
            nursery.start_soon(ask, number)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        await actor.update({"n": 1})
        assert trio.current_time() - began <= 4, "what is under way, and the write before it"
        await table.find(ADA, "c3")
        with pytest.raises(UnknownContext):
            await table.find(("", "anonymous"), "none", address="192.0.2.9")
        assert trio.current_time() - began <= 12
        assert unknown < 20
        nursery.cancel_scope.cancel()
    assert not table._unloaded.readers


async def test_all_reads_of_one_are_answered_in_order_and_those_of_a_closing_table_too(autojump_clock: Any) -> None:
    store = OneAtATime({one.key: one for one in (row("c1"), row("c2"))})
    answers: list[tuple[int, type]] = []

    async def ask(table: ContextTable, number: int) -> None:
        with pytest.raises(AgentToolsError) as caught:
            await table.find(ADA, f"none-{number}")
        answers.append((number, type(caught.value)))

    async with trio.open_nursery() as nursery, open_table(store) as table:
        for number in range(5):
            nursery.start_soon(ask, table, number)
            await wait_all_tasks_blocked()
        await trio.sleep(3.5)
        assert answers == [(0, UnknownContext), (1, UnknownContext)]
        table._unloaded.open = False
        while len(answers) < 5:  # noqa: ASYNC110  # virtual time
            await trio.sleep(0.1)
        assert answers[2:] == [(2, UnknownContext), (3, Draining), (4, Draining)]
        table._unloaded.open = True


async def test_a_session_ends_with_those_that_only_the_store_has(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    async with open_table(SqliteContexts(path), gone=0) as table:
        for id, session in (("a", "s"), ("b", "s"), ("c", "other"), ("d", None), ("s", None)):
            await table.create(ADA, id, session=session)
        await table.create(BOB, "a", session="s")
    table = ContextTable(ContextLimits(), SqliteContexts(path), Budget())
    async with table.running():
        assert (await table.find(ADA, "b")).session == "s"
        with pytest.raises(UnknownContext):
            await table.end_session(ADA, "none", "over")
        await table.end_session(ADA, "s", "over")
        for id in ("a", "b", "s"):
            with pytest.raises(ContextGone):
                await table.find(ADA, id)
        assert (await table.find(ADA, "d")).session == "d"
        assert (await table.find(BOB, "a")).session == "s"
        assert table.statistics().stored == 1
    store = SqliteContexts(path)
    async with store.opened():
        assert sorted(await store.ids(ADA)) == ["c", "d"]


async def test_a_session_ends_beside_a_context_of_it_that_has_ended_already() -> None:
    rows = [row(id, state={"session_id": "s"}) for id in ("a", "b", "c")]
    async with open_table(store_with(*rows)) as table:
        ended = await table.find(ADA, "b")
        call = begin(ended, stubborn=True)
        ended.end("it was enough")
        await table.end_session(ADA, "s", "over")
        for id, why in (("a", "over"), ("b", "it was enough"), ("c", "over")):
            with pytest.raises(ContextGone) as info:
                await table.find(ADA, id)
            assert info.value.data == {"reason": why}
        assert call.reasons == ["it was enough"]
        ended.end_call(call.id)


async def test_a_session_whose_store_cannot_be_read_stays() -> None:
    async with open_table(store := store_with(row("a", state={"session_id": "s"}))) as table:
        store.broken = FAILED
        with pytest.raises(AgentToolsError, match="could not read"):
            await table.end_session(ADA, "s", "over")
        store.broken = None
        await table.end_session(ADA, "s", "over")
