"""Writing in bursts, and to readers that are slow: what waits is counted, told, waited for, and given up at last."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from tests.transports.http.support import memory
from trimcp.support.deadlines import Deadlines
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.interfaces import HttpResponse
from trimcp.transports.http.settings import HttpLimits

LIMITS = HttpLimits()
HELLO = b'{"hello": 1}'


async def test_what_waits_for_a_slow_reader_is_counted_and_told(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        reply = handler.reply
        await reply.room()
        reply.start(HttpResponse(200, (), b"first"))
        assert reply.waiting > 0
        for _ in range(100):
            reply.write(b"x" * 10_000)
        assert reply.waiting > 1_000_000
        async with trio.open_nursery() as nursery:
            woken: list[int] = []

            async def wait_for_room() -> None:
                await reply.room()
                woken.append(reply.waiting)

            nursery.start_soon(wait_for_room)
            nursery.start_soon(wait_for_room)
            await wait_all_tasks_blocked()
            assert woken == []
            await client.head()
            assert await client.chunk() == b"first"
            for _ in range(100):
                assert await client.chunk() == b"x" * 10_000
            await wait_all_tasks_blocked()
            assert len(woken) == 2
            assert all(0 < waiting <= LIMITS.low_water for waiting in woken)
        assert reply.waiting == 0
        assert handler.drained == 1
        reply.write(b"more")  # a second round
        await client.chunk()
        await wait_all_tasks_blocked()
        assert handler.drained == 2
        reply.finish()
        assert await client.chunk() == b""
        await wait_all_tasks_blocked()
        assert handler.drained == 2


async def test_a_reader_that_takes_nothing_is_cut(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        start = trio.current_time()
        handler.reply.start(HttpResponse(200, (), b"x" * 1_000_000))
        assert handler.reply.waiting > 1_000_000
        for _ in range(3):
            await trio.sleep(59)
            await client.stream.receive_some(100_000)  # it took something: it has another minute
            await wait_all_tasks_blocked()
            assert not handler.reply.gone
        await site.over.wait()
        assert trio.current_time() - start == 3 * 59 + 60
        assert handler.reply.gone
        assert (handler.gone, handler.reply.waiting, site.ended) == (1, 0, 1)
        ((path, status, sent),) = site.face.ended
        assert (path, status) == ("/wait", 200)
        assert 0 < sent < 1_000_000
        assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
        assert vars(caplog.records[0])["event"] == "peer_stalled"


async def test_whoever_waits_for_room_is_let_go_when_the_reader_leaves(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        reply = site.face.handlers[0].reply
        reply.start(HttpResponse(200, (), b"x" * 1_000_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reply.room)
            await wait_all_tasks_blocked()
            await client.stream.aclose()
        assert reply.gone
        assert reply.waiting == 0


# Bursts


class _Told:
    """Whose writer it is, with what it was told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def drained(self) -> None:
        self.heard.append("drained")

    def wake(self) -> None:
        self.heard.append("broke")


class _Taker:
    """A wire that takes at once as much as it is told to, and the rest only from whoever waits."""

    def __init__(self, takes: float = math.inf) -> None:
        self.takes = takes
        self.writes: list[bytes] = []
        self.waited: list[bytes] = []
        self.room = trio.Event()

    def try_write(self, data: bytes | bytearray) -> int:
        if self.takes < 0:
            raise trio.BrokenResourceError
        taken = bytes(data[: int(min(self.takes, len(data)))])
        self.writes.append(taken)
        return len(taken)

    async def write_some(self, data: bytearray) -> int:
        await self.room.wait()
        self.waited.append(bytes(data))
        return len(data)

    def progress(self) -> int:
        return len(self.waited)


@asynccontextmanager
async def _writing(wire: _Taker) -> AsyncIterator[tuple[H1Writer, _Told, trio.Nursery]]:
    told = _Told()
    async with trio.open_nursery() as nursery:
        yield H1Writer(told, cast(Wire, wire), nursery, Deadlines(), LIMITS), told, nursery
        nursery.cancel_scope.cancel()


async def test_a_burst_leaves_in_one_write_when_the_turn_ends(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, told, nursery):
        for number in range(100):
            writer.gather(b"%d," % number)
        assert wire.writes == [b"0,"], "what comes first leaves at once"
        assert len(nursery.child_tasks) == 1
        assert writer.waiting == len(b"".join(b"%d," % number for number in range(1, 100)))
        await wait_all_tasks_blocked()
        assert wire.writes[1:] == [b"".join(b"%d," % number for number in range(1, 100))]
        assert (writer.waiting, told.heard, len(nursery.child_tasks)) == (0, ["drained"], 0)
        writer.gather(b"a")
        writer.gather(b"b")
        await wait_all_tasks_blocked()
        assert wire.writes[2:] == [b"ab"]


async def test_what_comes_alone_leaves_at_once_and_costs_no_task(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, told, nursery):
        for number in range(3):
            writer.gather(b"%d" % number)
            assert wire.writes == [b"%d" % past for past in range(number + 1)]
            assert not nursery.child_tasks
            await trio.sleep(0.001)
        writer.gather(b"")
        assert len(wire.writes) == 3
        assert told.heard == []


async def test_who_does_not_let_the_turn_end_holds_nothing_back_for_long(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, told, _):
        writer.gather(b"a")
        writer.gather(b"b")
        autojump_clock.jump(0.001)  # a handler that computes
        writer.gather(b"c")
        assert wire.writes == [b"a", b"bc"]
        for _ in range(7):
            writer.gather(b"x" * 10_000)
        assert [len(data) for data in wire.writes[2:]] == [70_000], "enough is enough"
        await wait_all_tasks_blocked()
        assert len(wire.writes) == 3
        assert told.heard == ["drained"]  # whoever held something back meanwhile has to learn of the room


async def test_what_ends_a_burst_leaves_with_it_at_once(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, _, _):
        writer.gather(b"a")
        writer.gather(b"b")
        writer.gather(b"c")
        writer.write(b"end")
        assert wire.writes == [b"a", b"bcend"]
        assert writer.waiting == 0
        await wait_all_tasks_blocked()
        assert len(wire.writes) == 2


async def test_a_large_piece_is_not_copied_to_be_gathered(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, _, _):
        writer.gather(b"a")
        writer.gather(b"b")
        writer.gather(b"x" * 100_000)
        assert wire.writes == [b"a", b"b", b"x" * 100_000]
        writer.gather(b"y" * 100_000)
        assert wire.writes[3:] == [b"y" * 100_000]


async def test_a_burst_to_a_slow_reader_waits_in_order(autojump_clock: MockClock) -> None:
    wire = _Taker(takes=1)
    async with _writing(wire) as (writer, told, _):
        writer.gather(b"ab")  # of this one is taken, and the rest waits for the task
        writer.gather(b"cd")
        writer.write(b"ef")
        await wait_all_tasks_blocked()
        assert wire.writes == [b"a"]
        assert writer.waiting == 5
        writer.gather(b"gh")
        wire.room.set()
        await wait_all_tasks_blocked()
        assert wire.waited == [b"bcdefgh"]
        assert (writer.waiting, told.heard) == (0, ["drained"])
        wire.takes = math.inf
        writer.gather(b"ij")
        writer.gather(b"kl")
        await wait_all_tasks_blocked()
        assert wire.writes[1:] == [b"ijkl"]


async def test_a_burst_that_is_refused_when_the_turn_ends(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, told, _):
        writer.gather(b"a")
        writer.gather(b"bcd")
        wire.takes = 2
        await wait_all_tasks_blocked()
        assert wire.writes == [b"a", b"bc"]
        assert (writer.waiting, told.heard) == (1, [])
        writer.gather(b"e")
        wire.room.set()
        await wait_all_tasks_blocked()
        assert wire.waited == [b"de"]
        assert told.heard == ["drained"]


async def test_room_in_the_midst_of_a_burst(autojump_clock: MockClock) -> None:
    wire = _Taker()
    limits = HttpLimits(low_water=100)
    async with trio.open_nursery() as nursery:
        writer = H1Writer(_Told(), cast(Wire, wire), nursery, Deadlines(), limits)
        writer.gather(b"a")
        writer.gather(b"b" * 200)
        with trio.fail_after(1):
            await writer.room()
        assert wire.writes[1:] == [b"b" * 200]


@pytest.mark.parametrize("how", ["leaves", "closes"])
async def test_a_peer_that_is_gone_before_a_burst_has_left(how: str, autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, told, nursery):
        writer.gather(b"a")
        writer.gather(b"bcd")
        if how == "leaves":
            wire.takes = -1
        else:
            writer.close()
        await wait_all_tasks_blocked()
        assert wire.writes == [b"a"]
        assert (writer.broken, writer.waiting, writer.undelivered) == (True, 0, 3)
        assert told.heard == (["broke"] if how == "leaves" else [])
        writer.gather(b"e")
        writer.write(b"f")
        await wait_all_tasks_blocked()
        assert wire.writes == [b"a"]
        assert not nursery.child_tasks


async def test_what_a_cancelled_task_said_leaves(autojump_clock: MockClock) -> None:
    wire = _Taker()
    async with _writing(wire) as (writer, _, _):
        with trio.CancelScope() as scope:
            writer.gather(b"a")
            writer.gather(b"b")
            scope.cancel()
            await trio.sleep_forever()
        await wait_all_tasks_blocked()
    assert wire.writes == [b"a", b"b"]
