"""The poller wakes a bounded number of readers in a turn of the loop, each of them in its turn, and forgets sockets."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.transports.http.h1 import wires as module
from trimcp.transports.http.h1.wires import PolledWire, Poller

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no epoll")


class Turns(trio.abc.Instrument):
    """Counts the turns of Trio's loop."""

    def __init__(self) -> None:
        self.number = 0

    def before_io_wait(self, timeout: float) -> None:
        self.number += 1


@pytest.fixture
def poller() -> Iterator[Poller]:
    with Poller() as made:
        yield made


async def test_many_with_input_wake_a_few_at_a_time(poller: Poller, nursery: trio.Nursery) -> None:
    turns, read = Turns(), Counter[int]()
    trio.lowlevel.add_instrument(turns)
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(100)]
        peers = [stack.enter_context(theirs) for _, theirs in pairs]
        wires = [PolledWire(ours, poller) for ours, _ in pairs]

        async def reader(wire: PolledWire) -> None:
            while await wire.read(10) == b"x":
                read[turns.number] += 1

        for wire in wires:
            nursery.start_soon(reader, wire)
        nursery.start_soon(poller.run)
        await wait_all_tasks_blocked()
        for times in (1, 2):
            for peer in peers:
                peer.send(b"x")
            while read.total() < 100 * times:
                await wait_all_tasks_blocked()
        assert max(read.values()) == module._AT_ONCE
        assert len(read) == 2 * 4  # 32, 32, 32 and 4, in turns of their own
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            for wire in wires:
                await wire.close()


async def test_who_always_has_input_lets_the_others_have_their_turn(
    poller: Poller, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    pairs = [socket.socketpair() for _ in range(3)]
    wires = [PolledWire(ours, poller) for ours, _ in pairs]
    order: list[int] = []

    async def reader(number: int) -> None:
        while await wires[number].read(10) == b"x":
            order.append(number)
            if order.count(number) < 5:
                pairs[number][1].send(b"x")  # there is more as soon as it has been read

    for number, (_, theirs) in enumerate(pairs):
        nursery.start_soon(reader, number)
        theirs.send(b"x")
    nursery.start_soon(poller.run)
    while len(order) < 15:
        await wait_all_tasks_blocked()
    first = order.index(order[0], 1)
    assert sorted(order[:first]) == [0, 1, 2]
    assert order == order[:3] * 5
    nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        for wire in wires:
            await wire.close()
        for _, theirs in pairs:
            theirs.close()


async def test_a_closed_socket_is_forgotten_and_its_number_can_be_used_again(
    poller: Poller, nursery: trio.Nursery
) -> None:
    nursery.start_soon(poller.run)
    numbers = set()
    for text in (b"one", b"two", b"three"):
        ours, theirs = socket.socketpair()
        numbers.add(ours.fileno())
        wire = PolledWire(ours, poller)
        with closing(theirs):
            theirs.send(text)
            assert await wire.read(10) == text
            await wire.close()
    assert len(numbers) == 1
    assert not poller._readers
    nursery.cancel_scope.cancel()


async def test_closing_twice_leaves_alone_who_has_the_number_now(poller: Poller, nursery: trio.Nursery) -> None:
    nursery.start_soon(poller.run)
    first, far = socket.socketpair()
    number, old = first.fileno(), PolledWire(first, poller)
    await old.close()
    ours, theirs = socket.socketpair()
    assert ours.fileno() == number
    wire = PolledWire(ours, poller)
    await old.close()
    with closing(far), closing(theirs), trio.fail_after(5):
        theirs.send(b"still heard")
        assert await wire.read(100) == b"still heard"
        await wire.close()
    nursery.cancel_scope.cancel()


async def test_a_socket_that_cannot_be_watched_is_refused(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = ours.detach()
        socket.close(number)
        with pytest.raises(OSError):
            poller.add(number, reader=None)
    assert not poller._readers


async def test_wires_outlive_it(poller: Poller) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        wire = PolledWire(ours, poller)
        poller.__exit__(None, None, None)
        await wire.close()
        assert theirs.recv(1) == b""
