"""Writing to readers that are slow: what waits is counted, told, waited for, and given up when nobody takes it."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, wait_all_tasks_blocked

from tests.transports.http.support import memory
from trimcp.transports.http.limits import HttpLimits
from trimcp.transports.http.model import Response

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
        reply.start(Response(200, (), b"first"))
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
        handler.reply.start(Response(200, (), b"x" * 1_000_000))
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
        assert [record.levelname for record in caplog.records] == ["DEBUG"]


async def test_whoever_waits_for_room_is_let_go_when_the_reader_leaves(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        reply = site.face.handlers[0].reply
        reply.start(Response(200, (), b"x" * 1_000_000))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reply.room)
            await wait_all_tasks_blocked()
            await client.stream.aclose()
        assert reply.gone
        assert reply.waiting == 0
