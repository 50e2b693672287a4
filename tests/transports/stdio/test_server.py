"""Claiming standard input and output inside this process: once at a time, and undone at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from trimcp.channel import Kind, Outgoing
from trimcp.transports.stdio.server import claim_stdio
from trimcp.wire.jsonrpc import Request, encode_request


@contextmanager
def own_pipes() -> Iterator[tuple[int, int]]:
    """Put pipes on descriptors 0 and 1, and yield the other ends: where to write to, where to read from."""
    saved = os.dup(0), os.dup(1)
    (source, write_end), (read_end, target) = os.pipe(), os.pipe()
    os.dup2(source, 0)
    os.dup2(target, 1)
    os.close(source)
    os.close(target)
    try:
        yield write_end, read_end
    finally:
        for fd, original in enumerate(saved):
            os.dup2(original, fd)
            os.close(original)
        os.close(write_end)
        os.close(read_end)


async def test_the_channel_speaks_through_them_and_gives_them_back() -> None:
    with own_pipes() as (write_end, read_end):
        before = os.fstat(0).st_ino, os.fstat(1).st_ino
        async with claim_stdio() as channel:
            assert (os.fstat(0).st_ino, os.fstat(1).st_ino) != before
            os.write(write_end, encode_request(1, "m") + b"\n")
            assert [each.message for each in await channel.receive()] == [Request(1, "m")]
            await channel.send([Outgoing(b"{}", Kind.REPLY, 1)])
            assert os.read(read_end, 100) == b"{}\n"
        assert (os.fstat(0).st_ino, os.fstat(1).st_ino) == before
        with pytest.raises(trio.ClosedResourceError):
            await channel.receive()


async def test_they_are_claimed_once_at_a_time() -> None:
    with own_pipes():
        for _ in range(2):
            async with claim_stdio():
                with pytest.raises(RuntimeError, match="in use"):
                    async with claim_stdio():
                        pass


async def test_they_are_given_back_when_cancelled_while_clogged() -> None:
    with own_pipes():
        before = os.fstat(0).st_ino, os.fstat(1).st_ino
        async with trio.open_nursery() as nursery:

            async def clog() -> None:
                async with claim_stdio() as channel:
                    await channel.send([Outgoing(bytes(1_000_000), Kind.REPLY, 1)])

            nursery.start_soon(clog)
            await trio.testing.wait_all_tasks_blocked()
            assert os.fstat(1).st_ino != before[1]
            nursery.cancel_scope.cancel()
        assert (os.fstat(0).st_ino, os.fstat(1).st_ino) == before


async def test_descriptors_do_not_leak() -> None:
    with own_pipes():
        count = len(os.listdir("/dev/fd"))
        async with claim_stdio() as channel:
            with trio.move_on_after(0):
                await channel.receive()
        assert len(os.listdir("/dev/fd")) == count
