"""What has arrived and waits for the reader: bounded by count and by bytes, and never lost to a cancellation."""

from __future__ import annotations

import pytest
import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trimcp.channel import Incoming
from trimcp.transports.http.client.incoming import Inbox
from trimcp.wire.jsonrpc import Lost, Notification


def message(n: int, size: int = 1) -> Incoming:
    return Incoming(Notification(str(n)), size)


async def test_what_was_put_is_received_in_order_and_together() -> None:
    inbox = Inbox()
    for n in range(3):
        await inbox.put(message(n))
    with assert_checkpoints():
        batch = await inbox.receive()
    assert [each.message for each in batch] == [Notification(str(n)) for n in range(3)]


@pytest.mark.parametrize(("inbox", "size"), [(Inbox(max_messages=2), 1), (Inbox(max_bytes=20), 10)])
async def test_a_full_inbox_lets_streams_wait(inbox: Inbox, size: int) -> None:
    put = 0

    async def stream() -> None:
        nonlocal put
        for n in range(5):
            await inbox.put(message(n, size))
            put += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream)
        await wait_all_tasks_blocked()
        assert put == 2
        assert len(await inbox.receive()) == 2
        await wait_all_tasks_blocked()
        assert put == 4
        await inbox.receive()


async def test_one_message_may_weigh_more_than_all_should() -> None:
    inbox = Inbox(max_bytes=10)
    await inbox.put(message(1, 1000))
    assert len(await inbox.receive()) == 1


async def test_a_word_about_a_request_needs_no_room() -> None:
    inbox = Inbox(max_messages=1)
    await inbox.put(message(1))
    inbox.post(Incoming(Lost(1, "gone")))
    assert len(await inbox.receive()) == 2


async def test_a_cancelled_put_adds_nothing_and_a_cancelled_receive_takes_nothing(autojump_clock: object) -> None:
    inbox = Inbox(max_messages=1)
    await inbox.put(message(1))
    with trio.move_on_after(1) as scope:
        await inbox.put(message(2))
    assert scope.cancelled_caught
    with trio.CancelScope() as scope:
        scope.cancel()
        await inbox.receive()
    assert [each.message for each in await inbox.receive()] == [Notification("1")]
    with trio.move_on_after(1) as scope:
        await inbox.receive()
    assert scope.cancelled_caught


async def test_only_one_task_receives() -> None:
    inbox = Inbox()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(inbox.receive)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await inbox.receive()
        inbox.post(message(1))


async def test_after_its_end_what_had_come_is_still_received() -> None:
    inbox = Inbox()
    await inbox.put(message(1))
    inbox.end()
    inbox.post(message(2))
    assert len(await inbox.receive()) == 1
    for _ in range(2):
        with assert_checkpoints(), pytest.raises(trio.EndOfChannel):
            await inbox.receive()


@pytest.mark.parametrize("close", [True, False])
async def test_closing_or_ending_wakes_everybody(close: bool) -> None:
    empty, full = Inbox(), Inbox(max_messages=1)
    await full.put(message(1))
    expected = trio.ClosedResourceError if close else trio.EndOfChannel

    async def receive() -> None:
        with pytest.raises(expected):
            await empty.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        nursery.start_soon(full.put, message(2))
        await wait_all_tasks_blocked()
        for inbox in (empty, full):
            inbox.close() if close else inbox.end()
    if close:
        with pytest.raises(trio.ClosedResourceError):
            await full.receive()
