"""The outbox: room, order, withdrawal, the latest only, and its end."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.budget import LARGE, STEP
from trimcp.channel import Kind, Outgoing
from trimcp.session.queues import Outbox


def _note(data: bytes = b"note") -> Outgoing:
    return Outgoing(data, Kind.NOTIFICATION)


def _request(id: Any) -> Outgoing:
    return Outgoing(b"request", Kind.REQUEST, id)


async def test_all_that_waits_leaves_together_in_order() -> None:
    outbox = Outbox(10, 1000)
    for n in range(3):
        outbox.post(_note(b"%d" % n))
    assert (len(outbox), outbox.bytes_queued) == (3, 3)
    assert [message.data for message in await outbox.receive()] == [b"0", b"1", b"2"]
    assert (len(outbox), outbox.bytes_queued) == (0, 0)


async def test_a_large_message_alone_is_left_to_the_writer() -> None:
    outbox = Outbox(10, 1000)
    sent: list[Outgoing] = []
    outbox.send_nowait = sent.append
    outbox.post_alone(_note(bytes(LARGE)))
    assert (len(outbox), len(sent)) == (0, 1)
    outbox.post_alone(_note(bytes(LARGE + 1)))
    assert (len(outbox), len(sent)) == (1, 1)


async def test_a_message_alone_leaves_at_once_but_never_before_others() -> None:
    outbox = Outbox(10, 1000)
    sent: list[bytes] = []
    left: Outgoing | None = None

    def send(outgoing: Outgoing) -> Outgoing | None:
        sent.append(outgoing.data)
        return left

    outbox.post_alone(_note(b"1"))
    assert [message.data for message in await outbox.receive()] == [b"1"], "without a way to send, it waits"
    outbox.send_nowait = send
    outbox.post_alone(_note(b"2"))
    assert (len(outbox), sent) == (1, []), "the writer has not written the first"
    assert [message.data for message in await outbox.receive()] == [b"2"]
    with trio.move_on_after(0):
        await outbox.receive()  # it has written
    outbox.post_alone(_note(b"3"))
    assert (len(outbox), outbox.bytes_held, sent) == (0, 0, [b"3"])
    left = _note(b"rest")
    outbox.post_alone(_note(b"4"))
    outbox.post_alone(_note(b"5"))
    assert sent == [b"3", b"4"]
    assert [message.data for message in await outbox.receive()] == [b"rest", b"5"]
    with trio.move_on_after(0):
        await outbox.receive()
    outbox.post_latest("key", _note(b"latest"))
    outbox.post_alone(_note(b"6"))
    outbox.close()
    outbox.post_alone(_note(b"7"))
    assert sent == [b"3", b"4"]
    assert [message.data for message in await outbox.receive()] == [b"6", b"latest"]


@pytest.mark.parametrize(("outbox", "size"), [(Outbox(2, 1000), 1), (Outbox(100, 20), 10)])
async def test_senders_wait_for_room_in_messages_and_bytes(outbox: Outbox, size: int) -> None:
    passed: list[int] = []

    async def send(n: int) -> None:
        await outbox.room()
        outbox.post(_note(b"x" * size))
        passed.append(n)

    async with trio.open_nursery() as nursery:
        for n in range(6):
            nursery.start_soon(send, n)
        for count in (2, 4, 6):
            await wait_all_tasks_blocked()
            assert len(passed) == count
            assert len(await outbox.receive()) == 2


async def test_one_message_may_exceed_the_bytes() -> None:
    outbox = Outbox(10, 10)
    await outbox.room()
    outbox.post(_note(b"x" * 1000))
    assert outbox.full
    assert len(await outbox.receive()) == 1
    assert not outbox.full


async def test_posting_never_waits_even_beyond_the_room() -> None:
    outbox = Outbox(1, 1)
    for _ in range(5):
        outbox.post(_note())
    assert len(outbox) == 5


async def test_only_answers_count_as_what_the_peer_does_not_read() -> None:
    outbox = Outbox(2, 1000)
    outbox.post(_request(1))
    outbox.post(Outgoing(b"c", Kind.CANCEL, 1))
    outbox.post(Outgoing(b"r", Kind.REPLY, 1))
    states = [(outbox.full, outbox.full_of_replies())]
    outbox.post(Outgoing(b"r", Kind.REPLY, 2))
    states.append((outbox.full, outbox.full_of_replies()))
    await outbox.receive()
    states.append((outbox.full, outbox.full_of_replies()))
    assert states == [(True, False), (True, True), (False, False)]


async def test_a_request_is_withdrawn_by_its_id_and_kind() -> None:
    outbox = Outbox(3, 1000)
    outbox.post(Outgoing(b"reply", Kind.REPLY, 1))
    outbox.post(_request(1))
    outbox.post(_request("1"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.room)
        await wait_all_tasks_blocked()
        assert outbox.withdraw(1)
    assert not outbox.withdraw(1)
    assert outbox.bytes_queued == len(b"reply" + b"request")
    assert [(m.kind, m.request_id) for m in await outbox.receive()] == [(Kind.REPLY, 1), (Kind.REQUEST, "1")]
    assert not outbox.withdraw("1")


async def test_only_the_latest_of_a_key_leaves() -> None:
    outbox = Outbox(10, 1000)
    for n in range(5):
        outbox.post_latest("a", _note(b"%d" % n))
    outbox.post_latest("b", _note(b"b"))
    outbox.post(_note(b"queued"))
    assert (len(outbox), sum(outbox.counts.merged.values())) == (3, 4)
    assert [message.data for message in await outbox.receive()] == [b"queued", b"4", b"b"]


async def test_the_latest_can_be_put_in_order_or_dropped() -> None:
    outbox = Outbox(10, 1000)
    outbox.post_latest("a", _note(b"a"))
    outbox.post_latest("b", _note(b"b"))
    outbox.finish_latest("a", keep=True)
    outbox.finish_latest("b", keep=False)
    outbox.finish_latest("c", keep=True)
    outbox.post(_note(b"result"))
    assert [message.data for message in await outbox.receive()] == [b"a", b"result"]


@pytest.mark.parametrize("post", ["post", "post_latest"])
async def test_whatever_comes_wakes_the_writer(post: str) -> None:
    outbox = Outbox(10, 1000)
    got: list[Any] = []

    async def write() -> None:
        got.extend(await outbox.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await wait_all_tasks_blocked()
        if post == "post":
            outbox.post(_note())
        else:
            outbox.post_latest("k", _note())
    assert len(got) == 1


async def test_closed_it_gives_what_it_has_and_ends() -> None:
    outbox = Outbox(1, 1000)
    outbox.post(_note(b"last"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.room)
        await wait_all_tasks_blocked()
        outbox.close()
    outbox.post(_note(b"too late"))
    outbox.post_latest("k", _note(b"too late"))
    assert [message.data for message in await outbox.receive()] == [b"last"]
    with pytest.raises(trio.EndOfChannel):
        await outbox.receive()


async def test_closing_wakes_a_waiting_writer() -> None:
    outbox = Outbox(1, 1000)

    async def write() -> None:
        with pytest.raises(trio.EndOfChannel):
            await outbox.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await wait_all_tasks_blocked()
        outbox.close()


async def test_abandoned_it_holds_nothing() -> None:
    outbox = Outbox(1, 1)
    outbox.post(Outgoing(b"reply", Kind.REPLY, 1))
    outbox.post_latest("k", _note())
    outbox.abandon()
    assert (len(outbox), outbox.bytes_queued, outbox.full, outbox.full_of_replies()) == (0, 0, False, False)


async def test_a_cancelled_receive_loses_nothing(steady_clock: trio.abc.Clock) -> None:
    outbox = Outbox(10, 1000)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(outbox.receive)
            await wait_all_tasks_blocked()
            scope.cancel()
            outbox.post(_note())
    with trio.move_on_after(0.1):
        assert len(await outbox.receive()) == 1


async def test_what_waits_is_weighed_each_time_it_has_grown_by_a_step() -> None:
    outbox = Outbox(1_000, 1_000_000)
    seen: list[int] = []
    outbox.weigh = lambda: seen.append(outbox.bytes_held)
    outbox.post(_note(b"x" * (STEP - 1)))
    assert seen == []
    outbox.post(_note(b"x"))
    for _ in range(2 * STEP // 100 + 1):
        outbox.post(_note(b"x" * 100))
    assert seen == [STEP, 2 * STEP + 4, 3 * STEP + 8]
    await outbox.receive()
    outbox.post(_note(b"x" * 50_000))
    assert len(seen) == 4
    assert seen[-1] > 50_000 + 3 * STEP  # what is being written counts on
    outbox.abandon()
    assert outbox.weigh is None
