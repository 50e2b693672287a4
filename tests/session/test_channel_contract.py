"""Every queue of a session is a Trio channel: what a memory channel does the outbox and the mailbox do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from trimcp.channel import Kind, Outgoing
from trimcp.session.queues import EACH, Mailbox, Outbox

ROOM = 3


@attrs.define(eq=False)
class Queued:
    """As much of a job as a mailbox looks at."""

    size: int = 1
    headers: None = None


@attrs.frozen
class Ends:
    """A channel with room for three items."""

    send: trio.abc.SendChannel[Any]
    receive: trio.abc.ReceiveChannel[Any]
    item: Callable[[], Any]

    @property
    def statistics(self) -> Any:
        channel: Any = self.send
        return channel.statistics()

    async def received(self) -> Sequence[Any]:
        """Receive once: an outbox gives all there is."""
        got = await self.receive.receive()
        return got if isinstance(got, list) else [got]

    async def all(self) -> list[Any]:
        """Receive until the end."""
        got: list[Any] = []
        async for each in self.receive:
            got += each if isinstance(each, list) else [each]
        return got


def message() -> Outgoing:
    return Outgoing(b"{}", Kind.NOTIFICATION)


def memory() -> Ends:
    send, receive = trio.open_memory_channel[Any](ROOM)
    return Ends(send, receive, object)


def outbox(max_bytes: int = 1_000) -> Ends:
    box = Outbox(ROOM, max_bytes)
    return Ends(box, box, message)


def mailbox(max_bytes: int = 10 * EACH) -> Ends:
    box = Mailbox(ROOM, max_bytes)
    return Ends(box, box, Queued)


@pytest.fixture(params=[memory, outbox, mailbox])
def ends(request: pytest.FixtureRequest) -> Ends:
    made: Ends = request.param()
    return made


async def test_what_is_sent_is_received_once_and_in_order(ends: Ends) -> None:
    items = [ends.item() for _ in range(10)]
    got: list[Any] = []

    async def send() -> None:
        for item in items:
            await ends.send.send(item)
        await ends.send.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        got = await ends.all()
    assert got == items


async def test_receiving_waits_and_cancelling_it_loses_nothing(ends: Ends) -> None:
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.received)
            await trio.testing.wait_all_tasks_blocked()
            assert ends.statistics.tasks_waiting_receive == 1
            scope.cancel()
    assert ends.statistics.tasks_waiting_receive == 0
    item = ends.item()
    await ends.send.send(item)
    assert await ends.received() == [item]


async def test_sending_waits_for_room_and_a_cancelled_send_has_sent_nothing(ends: Ends) -> None:
    items = [ends.item() for _ in range(ROOM)]
    for item in items:
        await ends.send.send(item)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.send.send, ends.item())
            await trio.testing.wait_all_tasks_blocked()
            assert ends.statistics.tasks_waiting_send == 1
            scope.cancel()
    got = list(await ends.received())
    last = ends.item()
    await ends.send.send(last)
    await ends.send.aclose()
    assert got + await ends.all() == [*items, last]


async def test_who_waits_for_room_goes_on_when_there_is_some(ends: Ends) -> None:
    for _ in range(ROOM):
        await ends.send.send(ends.item())
    last = ends.item()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ends.send.send, last)
        await trio.testing.wait_all_tasks_blocked()
        assert ends.statistics.current_buffer_used == ROOM
        await ends.received()
    await ends.send.aclose()
    assert (await ends.all())[-1] is last


async def test_after_the_close_what_is_queued_is_received_and_then_the_end(ends: Ends) -> None:
    item = ends.item()
    await ends.send.send(item)
    await ends.send.aclose()
    await ends.send.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await ends.send.send(ends.item())
    assert await ends.received() == [item]
    for _ in range(2):
        with pytest.raises(trio.EndOfChannel):
            await ends.receive.receive()


async def test_the_close_wakes_who_waits_to_receive(ends: Ends) -> None:
    async def receive() -> None:
        with pytest.raises(trio.EndOfChannel):
            await ends.receive.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await trio.testing.wait_all_tasks_blocked()
        await ends.send.aclose()


async def test_the_close_wakes_who_waits_to_send(ends: Ends) -> None:
    for _ in range(ROOM):
        await ends.send.send(ends.item())

    async def send() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await ends.send.send(ends.item())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        await ends.send.aclose()


async def test_sending_is_a_checkpoint_and_so_is_the_close(ends: Ends) -> None:
    with trio.testing.assert_checkpoints():
        await ends.send.send(ends.item())
    with trio.testing.assert_checkpoints():
        await ends.send.aclose()


async def test_statistics_tell_how_full_it_is(ends: Ends) -> None:
    await ends.send.send(ends.item())
    told = ends.statistics
    assert (told.current_buffer_used, told.max_buffer_size) == (1, ROOM)
    assert (told.tasks_waiting_send, told.tasks_waiting_receive) == (0, 0)


@pytest.mark.parametrize("make", [lambda: outbox(max_bytes=2), lambda: mailbox(max_bytes=EACH + 1)])
async def test_bytes_are_counted_too(make: Callable[[], Ends]) -> None:
    ends = make()
    await ends.send.send(ends.item())
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ends.send.send, ends.item())
            await trio.testing.wait_all_tasks_blocked()
            assert ends.statistics.tasks_waiting_send == 1
            scope.cancel()
