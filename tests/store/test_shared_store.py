"""What every `SharedStore` does, whatever it is kept in: one contract, which each store passes.

A new store adds its world to `WORLDS`.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import trio
import trio.testing

from tests.programs import require
from tests.store import memory_store
from tests.store.memory_store import MemoryHub, MemoryStore
from tests.store.redis_server import RedisServer, redis_server
from trimcp.store import counted_sqlite, database
from trimcp.store.redis import counted
from trimcp.store.redis.shared import RedisStore
from trimcp.store.shared import (
    MOST_LETTERS,
    AppendEvent,
    DropEvents,
    EndSession,
    KeptSession,
    Letter,
    RecordChange,
    SaveSession,
    SharedStore,
    SharedTurn,
    Write,
)
from trimcp.store.shared_sqlite import SqliteStore

LONG = 600.0


class World(Protocol):
    """Makes stores that are processes to each other."""

    def __init__(self, folder: Path) -> None: ...

    def store(self) -> SharedStore: ...

    async def end_lease(self, store: SharedStore) -> None:
        """Make the lease of a store that is open be over, as after ten seconds of silence."""


class MemoryWorld(World):
    def __init__(self, folder: Path) -> None:
        self.hub = MemoryHub()

    def store(self) -> SharedStore:
        return MemoryStore(self.hub)

    async def end_lease(self, store: SharedStore) -> None:
        del self.hub.leased[store.name]


class _Nothing(set[tuple[int, int]]):
    def add(self, element: tuple[int, int]) -> None:
        pass


class SqliteWorld(World):
    """Several stores of one process on one file: refused elsewhere, as they would cost each other their locks."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sessions.db"

    def store(self) -> SharedStore:
        return SqliteStore(self.path)

    async def end_lease(self, store: SharedStore) -> None:
        connection = sqlite3.connect(self.path)
        connection.execute("UPDATE processes SET until = 0 WHERE name = ?", (store.name,))
        connection.commit()
        connection.close()


class RedisWorld(World):
    """All tests on one server, each with keys of its own."""

    def __init__(self, folder: Path) -> None:
        require("redis-server")
        self.server = SERVERS.enter_context(redis_server()) if not RUNNING else RUNNING[0]
        RUNNING[:] = [self.server]
        self.prefix = folder.name

    def store(self) -> SharedStore:
        return RedisStore(self.server.url, prefix=self.prefix)

    async def end_lease(self, store: SharedStore) -> None:
        self.server.say(f"DEL {self.prefix}:lease:{store.name}")


SERVERS = ExitStack()
RUNNING: list[RedisServer] = []
WORLDS: dict[str, type[World]] = {"memory": MemoryWorld, "redis": RedisWorld, "sqlite": SqliteWorld}


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with SERVERS:
        yield
    RUNNING.clear()


@pytest.fixture(params=sorted(WORLDS))
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(database, "_used", _Nothing())
    return WORLDS[request.param](tmp_path)


@asynccontextmanager
async def opened(world: World, number: int = 2) -> AsyncIterator[list[SharedStore]]:
    async with AsyncExitStack() as stack:
        stores = [world.store() for _ in range(number)]
        for store in stores:
            await stack.enter_async_context(store.opened())
        yield stores


def new(session: str, data: bytes = b"{}") -> SaveSession:
    return SaveSession(session, 1, data, LONG, new=True)


async def some(store: SharedStore, number: int) -> list[bytes]:
    """Return the next letters."""
    letters: list[bytes] = []
    with trio.fail_after(5):
        while len(letters) < number:
            letters += await store.receive()
    return letters


async def seqs(store: SharedStore, session: str, stream: int, after: int = 0) -> list[int]:
    return [seq for seq, _ in await store.after(session, stream, after)]


# Sessions


async def test_a_session_is_known_to_all_and_held_by_its_maker(world: World) -> None:
    async with opened(world) as (one, two):
        assert one.name != two.name
        assert await two.load("s") is None
        assert not await one.commit([new("s", b'{"v":1}')])
        for store in (one, two):
            kept = await store.load("s")
            assert kept is not None
            assert kept == KeptSession(one.name, 1, b'{"v":1}')


async def test_only_the_holder_writes(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s")])
        theirs: list[Write] = [
            new("s", b"theirs"),
            SaveSession("s", 1, b"theirs", LONG),
            SaveSession("s", 2, b"theirs", LONG),
            AppendEvent("s", 1, 1, 1, b"theirs"),
            DropEvents("s", 1, 1),
            EndSession("s", 1),
        ]
        assert list(await two.commit(theirs)) == theirs
        assert await one.commit([AppendEvent("s", 2, 1, 1, b"of a fence that never was")])
        assert not await one.commit([SaveSession("s", 1, b"ours", LONG), AppendEvent("s", 1, 1, 1, b"ours")])
        kept = await two.load("s")
        assert kept is not None
        assert kept.data == b"ours"
        assert await two.after("s", 1, 0) == [(1, b"ours")]


async def test_what_was_never_made_is_not_saved(world: World) -> None:
    async with opened(world) as (one, _):
        assert await one.commit([SaveSession("s", 1, b"{}", LONG), AppendEvent("s", 1, 1, 1, b"x")])
        assert await one.load("s") is None
        assert await one.after("s", 1, 0) == []


async def test_a_session_that_ended_is_forgotten_with_its_events(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s"), new("t"), AppendEvent("s", 1, 1, 1, b"x"), AppendEvent("t", 1, 1, 1, b"y")])
        assert not await one.commit([EndSession("s", 1)])
        assert await two.load("s") is None
        assert await two.after("s", 1, 0) == []
        assert await two.after("t", 1, 0) == [(1, b"y")]
        assert await one.commit([AppendEvent("s", 1, 1, 2, b"late")])


async def test_a_session_is_forgotten_when_its_time_is_over(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([SaveSession("s", 1, b"{}", -1.0, new=True), new("t")])
        await one.renew()
        assert await two.load("s") is None
        assert await two.load("t") is not None


async def test_a_session_that_was_released_is_taken_at_once(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s")])
        assert not await one.commit([SaveSession("s", 1, b"last", LONG, release=True)])
        assert await one.commit([SaveSession("s", 1, b"later", LONG), AppendEvent("s", 1, 1, 1, b"later")])
        kept = await two.load("s")
        assert kept is not None
        assert (kept.holder, kept.gone) == ("", True)
        taken = await two.take("s", 1)
        assert taken is not None
        assert (taken.fence, taken.data) == (2, b"last")


# Leases


async def test_a_session_is_taken_when_its_holder_is_gone(world: World) -> None:
    async with opened(world, 3) as (one, two, three):
        await one.commit([new("s", b"state"), AppendEvent("s", 1, 4, 1, b"a"), AppendEvent("s", 1, 9, 1, b"b")])
        assert await two.take("s", 1) is None  # it is not gone
        await world.end_lease(one)
        assert await two.gone(one.name)
        kept = await two.load("s")
        assert kept is not None
        assert kept.gone
        taken = await two.take("s", 1)
        assert taken is not None
        assert (taken.holder, taken.fence, taken.data) == (two.name, 2, b"state")
        assert sorted(taken.streams) == [4, 9]
        assert await three.take("s", 1) is None  # somebody was first
        assert await three.take("s", 2) is None
        assert not await two.commit([AppendEvent("s", 2, 4, 2, b"c")])
        assert await three.after("s", 4, 0) == [(1, b"a"), (2, b"c")]


async def test_who_lost_its_lease_writes_nothing(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s"), new("untouched")])
        await world.end_lease(one)
        assert await two.take("s", 1) is not None
        late: list[Write] = [
            SaveSession("s", 1, b"late", LONG),
            AppendEvent("s", 1, 1, 1, b"late"),
            AppendEvent("s", 2, 1, 1, b"late"),
            AppendEvent("untouched", 1, 1, 1, b"late"),
            new("made late"),
        ]
        assert list(await one.commit(late)) == late
        assert await two.load("made late") is None
        assert not await one.renew()
        assert await two.after("s", 1, 0) == []


async def test_who_ends_in_order_is_gone_at_once(world: World) -> None:
    async with opened(world, 1) as (two,):
        one = world.store()
        async with one.opened():
            name = one.name
            await one.commit([new("s")])
            assert not await two.gone(name)
            assert await one.renew()
        assert await two.gone(name)
        assert await two.take("s", 1) is not None
        async with one.opened():
            assert one.name != name


async def test_who_retires_has_read_each_letter_that_was_not_refused(world: World) -> None:
    async with opened(world) as (one, two):
        await two.commit([Letter(one.name, b"x"), Letter(one.name, b"y")])
        assert not await one.retire()
        assert not await two.gone(one.name)
        assert await some(one, 2) == [b"x", b"y"]
        assert await one.retire()
        assert await two.gone(one.name)
        late = Letter(one.name, b"late")
        assert list(await two.commit([late])) == [late]
        assert not await one.commit([Letter(two.name, b"last")])
        assert await some(two, 1) == [b"last"]
        assert await one.commit([new("s")])
        assert await one.retire()


async def test_who_lost_its_lease_has_nothing_to_read_before_it_retires(world: World) -> None:
    async with opened(world) as (one, two):
        await two.commit([Letter(one.name, b"x")])
        await world.end_lease(one)
        assert await one.retire()


async def test_a_holder_takes_anew_what_it_lost_from_memory(world: World) -> None:
    async with opened(world, 1) as (one,):
        await one.commit([new("s", b"state")])
        taken = await one.take("s", 1)
        assert taken is not None
        assert (taken.holder, taken.fence, taken.data) == (one.name, 2, b"state")
        assert await one.commit([AppendEvent("s", 1, 1, 1, b"before")])


async def test_nobody_has_the_lease_of_an_unknown_name(world: World) -> None:
    async with opened(world, 1) as (one,):
        for name in ("nobody", "", "../x", "x' OR 1", "\N{SNOWMAN}", "a" * 10_000):
            assert await one.gone(name)
            assert await one.commit([Letter(name, b"x")])


# Events


async def test_events_are_read_in_order_after_a_number(world: World) -> None:
    async with opened(world) as (one, two):
        far = 1 << 50
        await one.commit([new("s"), *(AppendEvent("s", 1, far, far + n, b"%d" % n) for n in range(5))])
        await one.commit([AppendEvent("s", 1, 2, 1, b"of another stream")])
        assert await two.after("s", far, far + 2) == [(far + 3, b"3"), (far + 4, b"4")]
        assert await two.after("s", far, far + 4) == []
        assert await two.after("s", 7, 0) == []


async def test_of_what_is_written_together_that_alone_is_refused_which_others_hold(world: World) -> None:
    def event(session: str, seq: int, fence: int = 1) -> AppendEvent:
        return AppendEvent(session, fence, 1, seq, b"%d" % seq)

    async with opened(world) as (one, two):
        await one.commit([new("ours")])
        await two.commit([new("theirs")])
        refused = [event("theirs", 1), event("theirs", 2), event("ours", 9, fence=2)]
        writes = [event("ours", 1), refused[0], event("ours", 2), refused[1], refused[2], event("ours", 3)]
        writes += [DropEvents("ours", 1, 1, before=3), event("ours", 4), Letter(two.name, b"x"), event("ours", 5)]
        found = await one.commit(writes)
        assert len(found) == len(refused)
        assert all(write in found for write in refused)
        await two.commit([event("theirs", 7)])
        assert await seqs(two, "theirs", 1) == [7]
        assert (await seqs(two, "ours", 1))[-3:] == [3, 4, 5]
        assert await some(two, 1) == [b"x"]


async def test_events_are_dropped_by_stream(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s"), *(AppendEvent("s", 1, stream, n, b"x") for n in (1, 2, 3) for stream in (1, 2))])
        assert not await one.commit([DropEvents("s", 1, 2), DropEvents("s", 1, 8), DropEvents("s", 1, 9, before=9)])
        assert await seqs(two, "s", 1) == [1, 2, 3]
        assert await seqs(two, "s", 2) == []


@pytest.mark.parametrize("seed", range(6))
async def test_events_are_those_that_were_appended_and_not_dropped(world: World, seed: int) -> None:
    """Appended a few or many at once, small and large, with commits that come twice, and dropped from the first on."""
    chance = random.Random(seed)
    kept: dict[tuple[int, int], bytes] = {}
    first = dict.fromkeys((1, 2, 3), 0)  # what is before these may be there or not
    last = 0
    async with opened(world) as (one, two):
        await one.commit([new("s")])
        for _ in range(25):
            writes: list[Write] = []
            for _ in range(chance.choice((1, 3, 150))):
                if kept and chance.random() < 0.2:
                    stream, seq = chance.choice(sorted(kept))
                    writes.append(DropEvents("s", 1, stream, before=seq))
                    first[stream] = max(first[stream], seq)
                else:
                    last += chance.choice((1, 1, 1, 1 << 40))
                    stream, data = chance.randint(1, 3), chance.randbytes(chance.choice((0, 10, 40_000)))
                    writes.append(AppendEvent("s", 1, stream, last, data))
                    kept[stream, last] = data
            if chance.random() < 0.1:
                stream = chance.randint(1, 3)
                writes.append(DropEvents("s", 1, stream))
                kept = {key: data for key, data in kept.items() if key[0] != stream}
            for _ in range(chance.choice((1, 2))):
                assert not await one.commit(writes)
            stream = chance.randint(1, 3)
            after = chance.choice([0, last, *(seq for _, seq in kept)])
            wanted = [(seq, data) for (of, seq), data in sorted(kept.items()) if of == stream and seq > after]
            found = list(await two.after("s", stream, after))
            left = sum(seq >= first[stream] for seq, _ in wanted)
            assert found == wanted[len(wanted) - len(found) :]
            assert len(found) >= left


@pytest.mark.parametrize("together", [1, 7, 200])
async def test_events_before_one_are_dropped(world: World, together: int) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s"), AppendEvent("s", 1, 2, 1, b"of another stream")])
        events: list[Write] = [AppendEvent("s", 1, 1, seq, b"%d" % seq) for seq in range(1, 201)]
        for at in range(0, 200, together):
            assert not await one.commit(events[at : at + together])
        for before in (1, 50, 150, 201):
            for _ in range(2):
                assert not await one.commit([DropEvents("s", 1, 1, before=before)])
            left = await seqs(two, "s", 1)
            assert left[-(201 - before) :] == list(range(before, 201)) or before == 201
            assert len(left) <= 201 - before + 64
        assert await seqs(two, "s", 2) == [1]


async def test_a_write_that_is_repeated_changes_nothing(world: World) -> None:
    async with opened(world) as (one, two):
        writes: list[Write] = [
            new("s"),
            AppendEvent("s", 1, 1, 1, b"x"),
            AppendEvent("s", 1, 1, 2, b"y"),
            DropEvents("s", 1, 1),
            AppendEvent("s", 1, 1, 3, b"z"),
        ]
        assert not await one.commit(writes)
        assert not await one.commit(writes)
        assert await two.after("s", 1, 0) == [(3, b"z")]


async def test_any_bytes_are_kept(world: World) -> None:
    async with opened(world) as (one, two):
        data = bytes(range(256)) * 5_000
        await one.commit([new("s", data), AppendEvent("s", 1, 1, 1, data), Letter(two.name, data)])
        kept = await two.load("s")
        assert kept is not None
        assert kept.data == data
        assert await two.after("s", 1, 0) == [(1, data)]
        assert await some(two, 1) == [data]


# Letters


async def test_letters_reach_whom_they_name_in_order(world: World) -> None:
    async with opened(world, 3) as (one, two, three):
        letters = [Letter(two.name, b"%d" % n) for n in range(100)]
        assert not await one.commit(letters[:50])
        assert not await one.commit([*letters[50:], Letter(three.name, b"other")])
        assert await some(two, 100) == [letter.data for letter in letters]
        assert await some(three, 1) == [b"other"]


async def test_who_waits_is_woken(world: World) -> None:
    async with opened(world) as (one, two):
        got: list[bytes] = []

        async def wait() -> None:
            got.extend(await some(two, 1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert not got
            await one.commit([Letter(two.name, b"x")])
        assert got == [b"x"]


async def test_a_receive_that_is_cancelled_loses_nothing(world: World) -> None:
    async with opened(world) as (one, two):
        with trio.move_on_after(0):
            await two.receive()
        await one.commit([Letter(two.name, b"x")])
        with trio.CancelScope() as scope:
            scope.cancel()
            await two.receive()
        assert await some(two, 1) == [b"x"]


async def test_a_letter_to_all_reaches_each_other_process(world: World) -> None:
    async with opened(world, 3) as (one, two, three):
        assert not await one.commit([Letter(None, b"all"), Letter(one.name, b"me")])
        assert await some(two, 1) == [b"all"]
        assert await some(three, 1) == [b"all"]
        assert await some(one, 1) == [b"me"]


async def test_a_letter_to_who_is_gone_is_refused(world: World) -> None:
    async with opened(world) as (one, two):
        letter = Letter(two.name, b"x")
        await world.end_lease(two)
        assert list(await one.commit([letter, Letter(None, b"all")])) == [letter]


async def test_letters_to_who_does_not_read_are_bounded(world: World) -> None:
    async with opened(world) as (one, two):
        letters = [Letter(two.name, b"%d" % n) for n in range(MOST_LETTERS + 5)]
        assert list(await one.commit(letters)) == letters[MOST_LETTERS:]
        assert len(await some(two, MOST_LETTERS)) == MOST_LETTERS
        assert not await one.commit(letters[:1])


# What all agree on


async def test_what_the_first_proposed_counts(world: World) -> None:
    async with opened(world) as (one, two):
        assert await one.agree("key", b"first") == b"first"
        assert await two.agree("key", b"second") == b"first"
        assert await two.agree("other", b"third") == b"third"
        assert await one.agree("key", b"fourth") == b"first"


# What all use up together


def turn(id: str, whose: str = "a", quota: str = "q", **bounds: Any) -> SharedTurn:
    usual = {"running": 1, "per_second": None, "burst": 1.0, "waiting": 100}
    return SharedTurn(quota, id, whose, **{**usual, **bounds})


async def test_a_quota_counts_the_turns_of_all_processes(world: World) -> None:
    async with opened(world) as (one, two):
        first, second, third = (turn(id, running=2) for id in "123")
        assert (await one.turns([], [first])).after == [0]
        assert (await two.turns([], [second, third])).after[0] == 0
        found = await two.turns([], [third])
        assert found.after[0]
        assert not found.come
        found = await one.turns([first], [])
        assert list(found.come) == [(two.name, "3")]
        assert (await two.turns([], [third])).after == [0]
        assert (await one.turns([], [turn("of another", quota="other")])).after == [0]


async def test_owners_alternate_over_all_processes(world: World) -> None:
    async with opened(world) as (one, two):
        await one.turns([], [turn(f"a{n}", "a") for n in range(4)])
        await two.turns([], [turn(f"b{n}", "b") for n in range(2)])
        await one.turns([], [turn("a4", "a")])
        order, running = [], "a0"
        while running:
            order.append(running)
            come = (await one.turns([turn(running)], [])).come
            running = come[0][1] if come else ""
        assert order == ["a0", "a1", "b0", "a2", "b1", "a3", "a4"]


async def test_who_comes_again_at_once_does_not_hold_up_a_queue(world: World) -> None:
    async with opened(world, 1) as (one,):
        await one.turns([], [turn("b0", "b"), turn("b1", "b"), turn("b2", "b"), turn("a0", "a")])
        assert list((await one.turns([turn("b0")], [])).come) == [(one.name, "b1")]
        assert list((await one.turns([turn("b1")], [])).come) == [(one.name, "a0")]
        assert list((await one.turns([turn("a0")], [turn("a1", "a")])).come) == [(one.name, "b2")]


async def test_a_rate_is_that_of_all_processes(world: World) -> None:
    async with opened(world) as (one, two):
        slow = {"running": None, "per_second": 0.001, "burst": 3.0, "waiting": 2}
        assert (await one.turns([], [turn("1", **slow), turn("2", **slow)])).after == [0, 0]
        after = list((await two.turns([], [turn(id, **slow) for id in "3456"])).after)
        assert after[0] == 0
        assert after[1] == pytest.approx(1_000, rel=0.01)
        assert after[2] == pytest.approx(2_000, rel=0.01)
        assert after[3] is None  # as many wait as may
        await one.turns([turn("1"), turn("2")], [])  # a call that has ended gives no second start
        assert (await two.turns([], [turn("4", **slow)])).after[0] == pytest.approx(1_000, rel=0.01)


async def test_a_token_comes_with_time(world: World) -> None:
    async with opened(world) as (one, two):
        quick = {"running": None, "per_second": 50.0, "burst": 1.0}
        assert (await one.turns([], [turn("1", **quick)])).after == [0]
        with trio.fail_after(5):
            while after := (await two.turns([], [turn("2", **quick)])).after[0]:
                assert 0 < after <= 0.02
                await trio.sleep(after)


async def test_what_is_asked_or_ended_twice_changes_nothing(world: World) -> None:
    async with opened(world) as (one, two):
        bounds = {"running": 2, "per_second": 0.001, "burst": 2.0}
        for _ in range(3):
            assert (await one.turns([], [turn("1", **bounds)])).after == [0]
        for _ in range(3):
            await one.turns([turn("1", **bounds)], [])
        assert (await two.turns([], [turn("2", **bounds)])).after == [0]
        assert (await two.turns([], [turn("3", **bounds)])).after[0]


async def test_a_turn_that_nobody_asks_for_any_more_ends_with_the_lease(world: World) -> None:
    async with opened(world) as (one, two):
        one.lease = 0.02
        await one.turns([], [turn("1"), turn("given up")])
        await trio.sleep(0.1)
        assert (await two.turns([], [turn("2")])).after == [0]
        assert (await two.turns([turn("2")], [turn("3")])).after == [0]
        assert (await one.turns([], [turn("4")])).after != [0]


async def test_a_turn_that_is_given_up_leaves_its_place(world: World) -> None:
    async with opened(world) as (one, two):
        await one.turns([], [turn("1")])
        await one.turns([], [turn("2")])
        await two.turns([], [turn("3")])
        assert not (await one.turns([turn("2")], [])).come
        assert list((await one.turns([turn("1")], [])).come) == [(two.name, "3")]


@pytest.mark.parametrize("seed", range(5))
async def test_never_more_turns_than_a_quota_has_and_each_comes(world: World, seed: int) -> None:
    """Processes ask and end as they like, twice at times; what comes of it is what one process would give."""
    chance = random.Random(seed)
    most, number = chance.choice((1, 2, 5)), 60
    async with opened(world, 3) as stores:
        names = {store.name: store for store in stores}
        by_id: dict[str, SharedStore] = {}
        asked, running, over = list[str](), set[str](), set[str]()
        while len(over) < number:
            ids = [str(len(asked) + n) for n in range(chance.randint(0, 3)) if len(asked) + n < number]
            store, ending = chance.choice(stores), [id for id in running if chance.random() < 0.5]
            again = [id for id in running.difference(ending) if by_id[id] is store and chance.random() < 0.2]
            for id in ids:
                by_id[id] = store
            asked += ids
            over.update(ending)
            running.difference_update(ending)
            ended = [turn(id, running=most) for id in ending + chance.sample(sorted(over), min(2, len(over)))]
            turns = [turn(id, str(int(id) % 4), running=most) for id in ids + again]
            answer = await store.turns(ended, turns)
            come = {id for _, id in answer.come}
            assert not come & over
            assert all(names[process] is by_id[id] for process, id in answer.come)
            assert {turn.id for turn, after in zip(turns, answer.after, strict=True) if after == 0} == {
                each.id for each in turns if each.id in come | running
            }
            running |= come
            assert len(running) == min(most, len(asked) - len(over))


@pytest.mark.parametrize("text", ["", "x' OR 1 --", "\N{SNOWMAN}", "{}", "a b\n", "a" * 5_000])
async def test_any_names_are_told_apart(world: World, text: str) -> None:
    async with opened(world) as (one, two):
        assert (await one.turns([], [turn("1", text, text)])).after == [0]
        assert (await two.turns([], [turn("2", text, f"{text}.")])).after == [0]
        assert (await two.turns([], [turn("3", text, text)])).after != [0]
        assert await one.first_use(text, text, LONG)
        assert await two.first_use(text, f"{text}.", LONG)
        assert not await two.first_use(text, text, LONG)


async def test_what_is_good_for_one_use_is_so_for_all_processes(world: World) -> None:
    async with opened(world) as (one, two):
        assert await one.first_use("key", "proof", LONG)
        assert not await two.first_use("key", "proof", LONG)
        assert not await one.first_use("key", "proof", LONG)
        assert await two.first_use("another key", "proof", LONG)
        won: list[bool] = []

        async def use(store: SharedStore) -> None:
            won.append(await store.first_use("key", "at once", LONG))

        async with trio.open_nursery() as nursery:
            for store in (one, two) * 5:
                nursery.start_soon(use, store)
        assert sum(won) == 1


async def test_a_use_is_forgotten_when_its_time_is_over(world: World) -> None:
    async with opened(world) as (one, two):
        assert await one.first_use("key", "proof", 0.02)
        await trio.sleep(0.1)
        await one.renew()
        assert await two.first_use("key", "proof", LONG)
        assert not await one.first_use("key", "proof", LONG)


async def test_the_uses_of_one_owner_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (counted_sqlite, counted, memory_store):
        monkeypatch.setattr(module, "MOST_MARKS", 3)
    async with opened(world) as (one, two):
        assert [await one.first_use("much", str(n), LONG) for n in range(5)] == [True] * 3 + [False] * 2
        assert await two.first_use("other", "1", LONG)


# What all know


async def test_a_record_is_changed_by_who_knows_it(world: World) -> None:
    async with opened(world) as (one, two):
        assert await one.records("k") == {}
        assert await one.change_records("k", [RecordChange("a", None, b"1")], LONG)
        assert not await two.change_records("k", [RecordChange("a", None, b"theirs")], LONG)
        assert await two.records("k") == {"a": b"1"}
        assert await two.change_records("k", [RecordChange("a", b"1", b"2")], LONG)
        assert not await one.change_records("k", [RecordChange("a", b"1", None)], LONG)
        assert await one.change_records("k", [RecordChange("a", b"2", None)], LONG)
        assert await two.records("k") == {}


async def test_all_records_change_or_none(world: World) -> None:
    async with opened(world) as (one, two):
        await one.change_records("k", [RecordChange("a", None, b"1"), RecordChange("b", None, b"1")], LONG)
        both = [RecordChange("c", None, b"1"), RecordChange("a", b"1", None), RecordChange("b", b"other", b"2")]
        assert not await two.change_records("k", both, LONG)
        assert await two.records("k") == {"a": b"1", "b": b"1"}
        assert await two.change_records("k", [*both[:2], RecordChange("b", b"1", b"2")], LONG)
        assert await one.records("k") == {"b": b"2", "c": b"1"}


async def test_a_change_of_records_that_is_repeated_changes_nothing(world: World) -> None:
    async with opened(world, 1) as (one,):
        for _ in range(3):
            assert await one.change_records("k", [RecordChange("a", None, b"1")], LONG)
        for _ in range(3):
            assert await one.change_records("k", [RecordChange("a", b"1", None)], LONG)
        assert await one.records("k") == {}


async def test_a_record_is_forgotten_when_its_time_is_over(world: World) -> None:
    async with opened(world) as (one, two):
        await one.change_records("k", [RecordChange("a", None, b"1"), RecordChange("b", None, b"1")], 0.02)
        await one.change_records("k", [RecordChange("b", b"1", b"1")], LONG)  # kept for longer
        await trio.sleep(0.1)
        await one.renew()
        assert await two.records("k") == {"b": b"1"}
        assert await two.change_records("k", [RecordChange("a", None, b"2")], LONG)


async def test_records_hold_any_bytes_by_kind(world: World) -> None:
    async with opened(world) as (one, two):
        data = bytes(range(256)) * 1_000
        names = ["", "a b\n", "x' OR 1 --", "\N{SNOWMAN}", "="]
        assert await one.change_records("k", [RecordChange(name, None, data) for name in names], LONG)
        assert await one.change_records("empty", [RecordChange("a", None, b"")], LONG)
        assert await two.records("k") == dict.fromkeys(names, data)
        assert await two.records("empty") == {"a": b""}
        assert not await two.change_records("empty", [RecordChange("a", None, b"x")], LONG)
        assert await two.records("other") == {}
