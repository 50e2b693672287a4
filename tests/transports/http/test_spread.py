"""Connections are spread over processes that accept from one socket, and nobody waits for one that does not come."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

import trimcp
from tests.peers.states import until
from trimcp.transports.http.h1 import spread
from trimcp.transports.http.h1.spread import ConnectionShares, leave, open_shares

LONG = 20.0


@contextmanager
def shares(number: int) -> Iterator[list[ConnectionShares]]:
    fd = open_shares(number)
    try:
        yield [ConnectionShares(fd, place) for place in range(number)]
    finally:
        os.close(fd)


@contextmanager
def called() -> Iterator[socket.socket]:
    """A listening socket at which somebody waits."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        yield listening


async def waited(one: ConnectionShares, sock: socket.socket, connections: int) -> float:
    begun = trio.current_time()
    await one.wait_turn(sock, connections)
    return trio.current_time() - begun


@pytest.mark.parametrize("number", [1, 2, 3, 5])
async def test_each_process_gets_as_many(number: int) -> None:
    """Processes are servers of one process here: who accepts runs whenever another waits."""
    listening = socket.create_server(("127.0.0.1", 0))
    servers = [trimcp.Server(f"s{n}", "1") for n in range(number)]
    with shares(number) as made, listening, ExitStack() as stack, trio.fail_after(LONG):
        async with trio.open_nursery() as nursery:
            for server, one in zip(servers, made, strict=True):
                await nursery.start(partial(trimcp.serve_http, server, sockets=[listening.dup()], shares=one))
            clients = set[trio.SocketStream]()
            for each in (1, 2, 10):
                while len(clients) < number * each:
                    clients.add(await trio.open_tcp_stream(*listening.getsockname()))
                await until(partial(_all, made[0], number * each))
                counts = _counts(made[0])
                assert max(counts) - min(counts) <= 2, counts  # on a busy machine one may come too late
                for client in list(clients)[:: number + 1]:
                    clients.remove(client)
                    await client.aclose()
                await until(partial(_all, made[0], len(clients)))
            for client in clients:
                await client.aclose()
            nursery.cancel_scope.cancel()
        stack.close()


def _counts(one: ConnectionShares) -> list[int]:
    return [count for count, _ in spread._SLOT.iter_unpack(one._memory)]


def _all(one: ConnectionShares, number: int) -> bool:
    return sum(_counts(one)) == number


async def test_who_has_fewest_does_not_wait(autojump_clock: Any) -> None:
    with shares(3) as [one, two, three], called() as sock:
        two.note(4)
        three.note(5)
        assert await waited(one, sock, 4) == 0
        assert await waited(one, sock, 3) == 0
        assert await waited(one, sock, 5) == pytest.approx(spread._PAUSE, abs=spread._LOOK * 1.5)


async def test_nobody_waits_for_who_accepts_none(autojump_clock: Any) -> None:
    fd = open_shares(3)
    one, two, three = (ConnectionShares(fd, place) for place in range(3))
    with called() as sock:
        assert await waited(one, sock, 9) == 0  # the others have not begun
        two.note(0)
        three.note(0)
        two.leave()
        two.note(1)  # the last connections of one that ends
        leave(fd, 2)  # what its parent notes
        assert await waited(one, sock, 9) == 0
    os.close(fd)


async def test_nobody_waits_long_for_who_gives_no_sign(autojump_clock: Any) -> None:
    with shares(2) as [one, two], called() as sock:
        two.note(0)
        times = [await waited(one, sock, 9) for _ in range(60)]
        assert sum(times) == pytest.approx(spread._GIVEN_UP, abs=3 * spread._PAUSE)
        assert times[-1] == 0
        two.note(0)  # it is back
        assert await waited(one, sock, 9) > 0


async def test_who_waits_goes_on_as_soon_as_the_other_has_come(autojump_clock: Any) -> None:
    with shares(2) as [one, two], called() as sock:
        two.note(0)
        async with trio.open_nursery() as nursery:

            async def come() -> None:
                await trio.sleep(spread._LOOK * 1.5)
                sock.accept()[0].close()
                two.note(1)

            nursery.start_soon(come)
            assert await waited(one, sock, 9) == pytest.approx(2 * spread._LOOK)
