"""What every `SharedStore` does, whatever it is kept in: one contract, which each store passes.

A new store adds its world to `WORLDS`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
import trio
import trio.testing

from tests.programs import require
from tests.store.memory_store import MemoryHub, MemoryStore
from tests.store.redis_server import RedisServer, redis_server
from trimcp.store import database
from trimcp.store.redis.shared import RedisStore
from trimcp.store.shared import (
    MOST_LETTERS,
    AppendEvent,
    DropEvents,
    EndSession,
    KeptSession,
    Letter,
    SaveSession,
    SharedStore,
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


async def test_events_are_dropped_one_by_one_or_by_stream(world: World) -> None:
    async with opened(world) as (one, two):
        await one.commit([new("s"), *(AppendEvent("s", 1, stream, n, b"x") for n in (1, 2, 3) for stream in (1, 2))])
        assert not await one.commit([DropEvents("s", 1, 1, 2), DropEvents("s", 1, 2), DropEvents("s", 1, 8, 8)])
        assert await seqs(two, "s", 1) == [1, 3]
        assert await seqs(two, "s", 2) == []


async def test_a_write_that_is_repeated_changes_nothing(world: World) -> None:
    async with opened(world) as (one, two):
        writes: list[Write] = [
            new("s"),
            AppendEvent("s", 1, 1, 1, b"x"),
            AppendEvent("s", 1, 1, 2, b"y"),
            DropEvents("s", 1, 1, 1),
        ]
        assert not await one.commit(writes)
        assert not await one.commit(writes)
        assert await two.after("s", 1, 0) == [(2, b"y")]


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
