"""The answer to an array (2025-03-26): its replies leave together, once the last is there."""

from __future__ import annotations

import json
from typing import Any

from trimcp.channel import Kind, Outgoing
from trimcp.protocol.events import AnsweredByEngine, BatchReceived, Event, Ignored, Rejected, RequestReceived
from trimcp.session.facts import SessionMemory
from trimcp.session.queues import BatchSink, Outbox
from trimcp.wire.jsonrpc import RequestId


class _Road:
    name = "stream"
    client = None
    sink = None


class _Noting(Outbox):
    """Notes for which requests it was told that they get no answer."""

    def unanswered(self, request_id: RequestId) -> None:
        told.append(request_id)


told: list[RequestId] = []
ORIGIN = _Road()


def asked(*ids: RequestId) -> list[RequestReceived]:
    nothing: Any = None
    return [RequestReceived(id, nothing, None, {}, nothing) for id in ids]


def known(reply: bytes) -> AnsweredByEngine:
    return AnsweredByEngine(0, "ping", reply)


def outbox() -> Outbox:
    told.clear()
    return _Noting(10, 1_000)


def batch(outbox: Outbox, *events: Event, held: SessionMemory | None = None, most: int = 1_000) -> BatchSink:
    sink = BatchSink(outbox, ORIGIN, held or SessionMemory(), most)
    sink.expect(BatchReceived(events))
    return sink


def reply(id: RequestId, data: bytes) -> Outgoing:
    return Outgoing(data, Kind.REPLY, id, ORIGIN)


async def sent(outbox: Outbox) -> list[bytes]:
    return [outgoing.data for outgoing in await outbox.receive()] if len(outbox) else []


async def test_replies_go_out_together_with_the_last() -> None:
    box, held = outbox(), SessionMemory()
    sink = batch(box, *asked(1, "a", 2), held=held)
    sink.post(reply("a", b'"A"'))
    sink.post(reply(2, b"22"))
    assert await sent(box) == []
    assert held.in_arrays == 5
    sink.post(reply(1, b"11"))
    [outgoing] = await box.receive()
    assert json.loads(outgoing.data) == ["A", 22, 11]
    assert (outgoing.kind, outgoing.request_id, outgoing.origin) == (Kind.REPLY, None, ORIGIN)
    assert held.in_arrays == 0


async def test_an_array_is_answered_once_all_its_members_are() -> None:
    box = outbox()
    sink = batch(box, *asked(1), known(b'{"id":2}'), *asked(3), Rejected("no"), Ignored("what"))
    sink.post(reply(3, b'{"id":3}'))
    assert await sent(box) == []
    sink.unanswered(1)
    [array] = await sent(box)
    assert [member["id"] for member in json.loads(array)] == [2, 3]


async def test_errors_known_at_once_wait_for_the_others() -> None:
    box = outbox()
    sink = batch(box, *asked(1), Rejected("broken", b'"broken"'))
    assert await sent(box) == []
    sink.post(reply(1, b"1"))
    assert await sent(box) == [b'["broken",1]']


async def test_nothing_to_wait_for() -> None:
    box = outbox()
    batch(box, known(b"1"), known(b"2"))
    assert await sent(box) == [b"[1,2]"]
    batch(box, Ignored("what"))
    assert await sent(box) == []


async def test_cancelled_requests_drop_out() -> None:
    box = outbox()
    sink = batch(box, *asked(1, 2))
    sink.post(reply(1, b"1"))
    assert await sent(box) == []
    sink.unanswered(2)
    assert await sent(box) == [b"[1]"]
    assert told == []  # the array was the answer


async def test_where_all_were_cancelled_nothing_is_sent_and_the_road_is_told() -> None:
    box = outbox()
    sink = batch(box, *asked(1, 2))
    sink.unanswered(1)
    sink.unanswered(2)
    assert await sent(box) == []
    assert told == [1, 2]


async def test_batches_do_not_mix() -> None:
    box, held = outbox(), SessionMemory()
    one = batch(box, *asked(1, 2), held=held)
    other = batch(box, *asked(3, 4), known(b"0"), held=held)
    other.post(reply(3, b"3"))
    one.post(reply(1, b"1"))
    assert held.in_arrays == 3
    other.post(reply(4, b"4"))
    one.post(reply(2, b"2"))
    assert await sent(box) == [b"[0,3,4]", b"[1,2]"]
    assert held.in_arrays == 0


async def test_what_is_no_reply_of_the_array_goes_straight_on() -> None:
    box = outbox()
    sink = batch(box, *asked(1))
    sink.post(Outgoing(b"log", Kind.NOTIFICATION, 1, ORIGIN))
    sink.post(reply(2, b"2"))
    sink.post_latest("key", Outgoing(b"latest", Kind.NOTIFICATION, 1, ORIGIN))
    sink.finish_latest("key", keep=True)
    sink.post(Outgoing(b"question", Kind.REQUEST, 7, ORIGIN))
    assert sink.withdraw(7)
    assert not sink.withdraw(7)
    assert sink.waiting() == ((), 0)
    assert await sent(box) == [b"log", b"2", b"latest"]


async def test_a_full_outbox_is_full_for_its_arrays_too() -> None:
    box = Outbox(1, 1_000)
    sink = batch(box, *asked(1))
    await sink.room()
    assert not sink.full
    box.post(reply(9, b"9"))
    assert sink.full


async def test_replies_that_wait_are_bounded_over_all_arrays() -> None:
    box, held = outbox(), SessionMemory()
    one, other = batch(box, *asked(1, 2), held=held, most=10), batch(box, *asked(3), held=held, most=10)
    one.post(reply(1, b"1" * 20))  # alone it may be of any size
    other.post(reply(3, b"3"))
    [array] = await sent(box)
    assert json.loads(array)[0]["error"]["message"] == "too many replies wait for others of their arrays"
