"""Writing without waiting, and the rest when there is room."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.bench.mux import Writer
from trimcp.bench.tally import Tally


class Pipe:
    """Takes so many bytes at once, and anything later, when it is opened."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken = b""
        self.opened = trio.Event()
        self.broken = False

    def send_nowait(self, data: bytes) -> int:
        if self.broken:
            raise trio.BrokenResourceError
        sent = data[: self.room]
        self.room -= len(sent)
        self.taken += sent
        return len(sent)

    async def send_all(self, data: bytes) -> None:
        if self.broken:
            raise trio.BrokenResourceError
        await self.opened.wait()
        self.taken += data


async def test_what_fits_is_sent_at_once_and_the_rest_in_order() -> None:
    pipe, tally = Pipe(5), Tally()
    writer = Writer(pipe.send_nowait, pipe.send_all, tally)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        writer.write(b"abc")
        assert pipe.taken == b"abc"
        writer.write(b"defg")
        assert pipe.taken == b"abcde"
        pipe.room = 100
        writer.write(b"hi")  # there is room again, but "fg" comes first
        await wait_all_tasks_blocked()
        assert pipe.taken == b"abcde"
        pipe.opened.set()
        await wait_all_tasks_blocked()
        assert pipe.taken == b"abcdefghi"
        writer.write(b"j")
        assert pipe.taken == b"abcdefghij"
        nursery.cancel_scope.cancel()
    assert tally.bytes_out == 10


async def test_where_nothing_can_be_sent_at_once_all_is_sent_later() -> None:
    pipe = Pipe(0)
    pipe.opened.set()
    writer = Writer(None, pipe.send_all, Tally())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(writer.run)
        writer.write(b"a")
        writer.write(b"b")
        await wait_all_tasks_blocked()
        assert pipe.taken == b"ab"
        nursery.cancel_scope.cancel()


async def test_a_broken_pipe_is_met_by_who_waits_for_it() -> None:
    pipe = Pipe(0)
    pipe.broken = True
    writer = Writer(pipe.send_nowait, pipe.send_all, Tally())
    writer.write(b"a")
    with pytest.raises(trio.BrokenResourceError):
        await writer.run()
