"""Peers of agents' streams that flood, read slowly or not at all: bounded, told the latest, and dropped in the end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.agent_tools.streams import ADA, BOB, JsonChannel, Peer, World, until, world
from tests.agent_tools.test_providers import call, success
from tests.agent_tools.test_websocket import update
from trimcp.agent_tools import RegistrationRules
from trimcp.session.queues import Outbox
from trimcp.session.session import Session
from trimcp.store.contexts import ContextKey, KeptContext, MemoryContexts

LIMITS = trimcp.Limits(outbox_messages=16, outbox_bytes=64 * 1024, stall_timeout=30, drain_timeout=1)


@asynccontextmanager
async def narrow(
    server: trimcp.Server[Any] | None = None, **options: Any
) -> AsyncIterator[tuple[World, Peer, JsonChannel]]:
    """A connection that holds one message in each direction beside what the server queues."""
    async with world(server or trimcp.Server("s", limits=LIMITS), **options) as at:
        peer, channel, over = await at.connected(buffer=1)
        yield at, peer, channel
        peer.leave()
        with trio.fail_after(60):
            await over.wait()


def session_of(at: World) -> Session:
    (session,) = at.running.sessions
    return session


def outbox_of(at: World) -> Outbox:
    sink = session_of(at).sink
    assert isinstance(sink, Outbox)
    return sink


async def pour(peer: Peer, *messages: Any) -> int:
    """Send messages one after the other until the server takes no more for a second; return how many it took."""
    taken = 0
    for message in messages:
        with trio.move_on_after(1) as scope:
            await peer.say(message)
        if scope.cancelled_caught:
            break
        taken += 1
    return taken


@pytest.mark.parametrize(
    "message",
    [
        b"nothing",
        {"type": "unheard"},
        {"type": "list_tools"},
        update("c", n=1),
        {"type": "context_read", "context_id": "c"},
        {"type": "context_create", "context_id": "c"},
        {"type": "tool_request", "tool_name": "nothing", "request_id": "1"},
        {"type": "tool_request", "tool_name": "hello", "request_id": "1"},
    ],
    ids=str,
)
async def test_who_sends_and_never_reads_is_paused_and_then_gets_every_answer(
    message: Any, autojump_clock: MockClock
) -> None:
    server = trimcp.Server("s", limits=LIMITS)

    @server.tool
    async def hello() -> str:
        return "hello"

    async with narrow(server) as (at, peer, _):
        await peer.ask(**update("c"))
        taken = await pour(peer, *[message] * 500)
        assert 16 <= taken < 60
        assert len(outbox_of(at)) <= 40
        for _ in range(taken):
            await peer.hear()
        await wait_all_tasks_blocked()
        assert peer.nothing()
        assert (await peer.ask(type="list_tools"))["type"] == "tools"


async def test_large_answers_are_bounded_also_within_one_read(autojump_clock: MockClock) -> None:
    async with narrow() as (at, peer, _):
        await peer.ask(**update("c", big="x" * 100_000))
        await peer.say(*[{"type": "context_read", "context_id": "c"}] * 200)
        await wait_all_tasks_blocked()
        assert outbox_of(at).bytes_queued < 300_000
        for _ in range(200):
            assert len((await peer.hear())["state"]["big"]) == 100_000


async def test_what_a_peer_does_not_read_is_counted_as_its_memory(autojump_clock: MockClock) -> None:
    async with narrow() as (at, peer, _):
        budget = at.server.budget
        await peer.ask(**update("c", big="x" * 100_000))
        held = budget.held
        read = {"type": "context_read", "context_id": "c", "arrays": [[]] * 500}
        await peer.say(*[read] * 100)
        await wait_all_tasks_blocked()
        unread = len(next(iter(at.running.sessions)).sink)
        assert unread < 10
        # Nearly 100 messages of some 30 KiB each in memory, and the answers that wait.
        assert budget.held - held > 100 * 20_000 + 200_000
        for number in range(100):
            await peer.hear()
            if number == 50:
                assert 10 * 20_000 < budget.held - held < 75 * 60_000
        await wait_all_tasks_blocked()
        assert budget.held == held
        watcher, _, _ = await at.connected(buffer=1)
        await watcher.ask(type="context_watch", context_id="c", request_id="w")
        for number in range(10):
            await peer.ask(**update("c", big="y" * 100_000, n=number))
        await wait_all_tasks_blocked()
        assert budget.held - held > 60_000
        while _n(await watcher.hear()) != 9:
            pass
        await wait_all_tasks_blocked()
        assert abs(budget.held - held) < 1_000


async def test_who_reads_nothing_for_too_long_is_dropped_and_its_calls_are_cancelled(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = trimcp.Server("s", limits=LIMITS)
    reasons: list[Any] = []

    @server.tool
    async def wait(ctx: trimcp.Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(ctx.cancel_reason)

    async with world(server) as at:
        peer, _, over = await at.connected(buffer=1)
        await peer.ask(**update("c"))
        await peer.say({"type": "tool_request", "tool_name": "wait", "request_id": "1"})
        await pour(peer, *[update("c")] * 100)
        began = trio.current_time()
        await over.wait()
        assert 20 < trio.current_time() - began < 45
        assert [reason.name for reason in reasons] == ["LIMIT"]
        assert "peer_stalled" in caplog.text


async def test_a_provider_that_reads_nothing_is_dropped_and_its_calls_fail(autojump_clock: MockClock) -> None:
    async with world(trimcp.Server("s", limits=LIMITS)) as at:
        provider, _, over = await at.connected(buffer=1)
        manifest = {"name": "shout", "parameters": {"type": "object"}}
        assert (await provider.ask(type="provide_tools", tools=[manifest]))["type"] == "tools_registered"
        agent = await at.connect(BOB)
        await agent.say(*(call(str(number)) for number in range(100)))
        heard = [await agent.hear() for _ in range(100)]
        assert {each["error"]["code"] for each in heard} == {"provider_gone"}
        await over.wait()
        assert at.tools.catalog._table.families == {}


async def test_calls_wait_for_room_at_a_provider_that_reads_slowly(autojump_clock: MockClock) -> None:
    async with world(trimcp.Server("s", limits=LIMITS), registration=RegistrationRules(timeout=1_000)) as at:
        provider, _, _ = await at.connected(buffer=1)
        manifest = {"name": "shout", "parameters": {"type": "object"}}
        await provider.ask(type="provide_tools", tools=[manifest])
        agent = await at.connect(BOB)
        await agent.say(*(call(str(number)) for number in range(100)))
        await wait_all_tasks_blocked()
        provided = [session for session in at.running.sessions if session.transport.owed]
        assert [len(session.sink) for session in provided if isinstance(session.sink, Outbox)] == [16]
        # One that is given up before it was sent is not sent at all.
        await agent.say({"type": "tool_cancel", "request_id": "99"})
        assert (await agent.hear_of("99"))["error"]["code"] == "cancelled"
        for _ in range(99):
            asked = await provider.hear()
            assert asked["type"] == "tool_request"
            await provider.say(success(asked, "A"))
            assert (await agent.hear())["result"] == "A"
            await trio.sleep(1)


async def test_progress_for_a_slow_reader_is_the_latest_and_never_after_the_answer(autojump_clock: MockClock) -> None:
    server = trimcp.Server("s", limits=LIMITS)

    @server.tool
    async def count(ctx: trimcp.Context) -> str:
        for number in range(1, 10_001):
            ctx.report_progress_nowait(number)
            if not number % 100:
                await trio.lowlevel.checkpoint()
        return "done"

    async with narrow(server) as (_, peer, _):
        await peer.say({"type": "tool_request", "tool_name": "count", "request_id": "1", "progress": True})
        await wait_all_tasks_blocked()
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["type"] == "tool_progress":
            heard.append(await peer.hear())
        told = [each["progress"] for each in heard[:-1]]
        assert told == sorted(set(told))
        assert told[-1] == 10_000
        assert len(told) < 10
        await wait_all_tasks_blocked()
        assert peer.nothing()


async def test_a_slow_watcher_gets_the_last_state_and_holds_up_nobody(autojump_clock: MockClock) -> None:
    async with narrow() as (at, peer, channel):
        agent = await at.connect()
        for name in ("a", "b"):
            await agent.ask(**update(name))
            await peer.say({"type": "context_watch", "context_id": name, "request_id": name})
            await wait_all_tasks_blocked()
        for number in range(1, 501):
            for name in ("a", "b"):
                assert (await agent.ask(**update(name, n=number)))["version"] == number + 1
        assert len(outbox_of_peer(at, channel)) <= 17
        seen: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
        while not all(each and _n(each[-1]) == 500 for each in seen.values()):
            event = await peer.hear()
            seen[event["request_id"]].append(event)
        for events in seen.values():
            versions = [event["version"] for event in events]
            assert versions == sorted(set(versions))
            assert len(events) < 200
            assert [event["type"] for event in events].count("context_state") == 2
            # An update follows on what was told before.
            for before, event in pairwise(events):
                assert event["type"] == "context_state" or event["version"] == before["version"] + 1
        await agent.say({"type": "context_destroy", "context_id": "a"})
        assert (await peer.hear_of("a"))["type"] == "context_destroyed"
        assert (await agent.hear())["type"] == "context_destroyed"
        assert (await agent.ask(**update("b", n=0)))["version"] == 502
        assert _n(await peer.hear_of("b")) == 0


def outbox_of_peer(at: World, channel: JsonChannel) -> Outbox:
    found = [session.sink for session in at.running.sessions if isinstance(session.sink, Outbox)]
    return max(found, key=len)


def _n(event: Mapping[str, Any]) -> Any:
    return event.get("state", event.get("updates", {})).get("n")


async def test_many_late_watches_keep_little(autojump_clock: MockClock) -> None:
    async with narrow() as (at, peer, _):
        agent = await at.connect()
        for number in range(300):
            await agent.ask(**update(str(number)))
            state = await peer.ask(type="context_watch", context_id=str(number), request_id=str(number))
            assert state["type"] == "context_state"
        for number in range(300):
            for turn in range(5):
                await agent.ask(**update(str(number), n=turn))
        watched = list(at.run.contexts._live)
        waiting = [watch._updates for actor in watched for watch in actor._watches or () if watch._updates]
        assert 30 < len(waiting) <= 65
        seen: dict[str, Any] = {}
        while len(seen) < 300 or set(seen.values()) != {4}:
            event = await peer.hear()
            seen[event["request_id"]] = _n(event)


@attrs.define(eq=False)
class SlowStore(MemoryContexts):
    """A store that takes as long for each write as a test says."""

    seconds: float = 0.0
    writes: int = 0
    fails: bool = False
    durable = True

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> None:
        self.writes += 1
        await trio.sleep(self.seconds)
        if self.fails:
            raise OSError("the disk is full")


async def test_pausing_for_a_store_loses_no_message_whatever_the_clock_does(autojump_clock: MockClock) -> None:
    # The reader is interrupted from time to time to see whether the peer reads: that must not cost a message.
    store = SlowStore()
    server = trimcp.Server("s", limits=attrs.evolve(LIMITS, stall_timeout=0.1))
    async with world(server, store=store) as at:
        peer = await at.connect()
        await peer.ask(**update("c"))
        store.seconds = 1.0
        await peer.say(*(update("c", str(number), n=number) for number in range(20)))
        answers = [await peer.hear() for _ in range(20)]
        assert [answer["request_id"] for answer in answers] == [str(number) for number in range(20)]
        assert [answer["version"] for answer in answers] == list(range(2, 22))
        peer.leave()


async def test_updates_of_one_connection_are_kept_together_and_what_follows_sees_them(
    autojump_clock: MockClock,
) -> None:
    store = SlowStore()
    server = trimcp.Server("s")

    @server.tool
    async def look(ctx: trimcp.Context) -> int:
        assert ctx.agent_context is not None
        return int(ctx.agent_context.read()["n"])

    async with world(server, store=store) as at:
        peer = await at.connect()
        for name in ("a", "b"):
            await peer.ask(**update(name))
        store.seconds, store.writes = 1.0, 0
        of_a = [update("a", f"a{number}", n=number) for number in range(50)]
        await peer.say(
            *of_a,
            {**update("a", "conflict"), "version": 1},
            update("b", "b"),
            update("new", "new"),  # is made first, so those behind it wait
            update("a", "last", n=50),
            {"type": "context_read", "context_id": "a", "request_id": "read"},
            {"type": "tool_request", "tool_name": "look", "context_id": "a", "request_id": "look"},
        )
        heard = [await peer.hear() for _ in range(56)]
        assert store.writes <= 5
        assert trio.current_time() < 6
        found = {each["request_id"]: each for each in heard}
        assert [each["version"] for each in heard if each["request_id"].startswith("a")] == list(range(2, 52))
        assert found["conflict"]["error"]["code"] == "version_conflict"
        assert found["last"]["version"] == 52
        assert found["read"]["state"]["n"] == found["look"]["result"] == 50
        peer.leave()


async def test_updates_that_a_store_did_not_keep_are_answered_so(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = SlowStore()
    async with world(store=store) as at:
        peer = await at.connect()
        await peer.ask(**update("a", n=1))
        store.fails, store.seconds = True, 1.0
        await peer.say(*(update("a", str(number), n=number) for number in range(10)))
        answers = [await peer.hear() for _ in range(10)]
        assert [(each["request_id"], each["error"]["code"]) for each in answers] == [
            (str(number), "crashed") for number in range(10)
        ]
        store.fails = False
        assert (await peer.ask(type="context_read", context_id="a"))["state"]["n"] == 1
        assert (await peer.ask(**update("a", n=2)))["version"] == 2
        peer.leave()


async def test_updates_that_wait_for_a_store_are_bounded(autojump_clock: MockClock) -> None:
    store = SlowStore()
    async with narrow(store=store) as (_, peer, channel):
        await peer.ask(**update("a"))
        store.seconds = 1_000.0
        big = update("a", n="x" * 50_000)
        assert await pour(peer, *[big] * 100) < 12
        store.seconds = 0.0
        channel.gone.set()


async def test_a_peer_that_leaves_while_a_store_is_slow_is_let_go(autojump_clock: MockClock) -> None:
    store = SlowStore()

    async with world(store=store) as at:
        peer, channel, over = await at.connected()
        await peer.ask(type="provide_tools", tools=[{"name": "shout", "parameters": {"type": "object"}}])
        store.seconds = 20.0
        await peer.say(update("c"), update("c"), {"type": "list_tools"})
        await wait_all_tasks_blocked()
        await peer.say(update("c"))
        await wait_all_tasks_blocked()
        assert channel._incoming.statistics().current_buffer_used == 1, "reading has paused"
        peer.leave()
        channel.gone.set()
        began = trio.current_time()
        await over.wait()
        assert trio.current_time() - began < 1
        assert at.tools.catalog._table.families == {}


async def test_a_call_whose_context_is_still_loading_does_not_begin_once_its_agent_has_left(
    autojump_clock: MockClock,
) -> None:
    class Loading(SlowStore):
        async def counts(self) -> Mapping[Any, int]:
            return {ADA.owner: 1}

        async def load(self, owner: Any, id: str) -> KeptContext | None:
            await trio.sleep(5)
            return None

    server = trimcp.Server("s")
    began = 0

    @server.tool
    async def wait() -> None:
        nonlocal began
        began += 1
        await trio.sleep_forever()

    @server.tool
    async def linger() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(10)

    async with world(server, store=Loading()) as at:
        peer, channel, over = await at.connected()
        await peer.say(
            {"type": "tool_request", "tool_name": "linger", "request_id": "1"},
            {"type": "tool_request", "tool_name": "wait", "request_id": "2", "context_id": "c"},
        )
        await trio.sleep(1)
        peer.leave()
        channel.gone.set()
        with trio.fail_after(20):
            await over.wait()
        assert began == 0


async def test_a_provider_that_calls_its_own_tools_by_the_thousand_still_answers(autojump_clock: MockClock) -> None:
    limits = trimcp.Limits(max_running=10, backlog_requests=20)
    rules = RegistrationRules(timeout=1_000)
    async with world(trimcp.Server("s", limits=limits), registration=rules) as at:
        peer = await at.connect()
        await peer.ask(type="provide_tools", tools=[{"name": "shout", "parameters": {"type": "object"}}])
        await peer.say(*(call(str(number)) for number in range(100)))
        results: dict[str, str] = {}
        while len(results) < 100:
            message = await peer.hear()
            if message["type"] == "tool_request":
                await peer.say(success(message, "A"))
            else:
                results[message["request_id"]] = message.get("result") or message["error"]["code"]
        assert trio.current_time() < 1
        assert set(results.values()) == {"A", "too_much"}
        peer.leave()
        await wait_all_tasks_blocked()


async def test_a_crash_in_telling_a_watcher_fails_no_update(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trimcp.agent_tools.bindings import websocket

    async with world() as at:
        peer, watcher = await at.connect(), await at.connect()
        await peer.ask(**update("c"))
        assert (await watcher.ask(type="context_watch", context_id="c"))["type"] == "context_state"

        def crash(event: Any) -> Any:
            raise ValueError("secret")

        monkeypatch.setattr(websocket, "message_of", crash)
        caplog.set_level(logging.ERROR)
        assert (await peer.ask(**update("c")))["version"] == 2
        assert "telling a watcher" in caplog.text
        assert at.run.contexts.statistics().watchers == 0
        peer.leave()
        watcher.leave()
        await until(lambda: not at.running.sessions)
