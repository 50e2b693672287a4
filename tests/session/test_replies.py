from __future__ import annotations

import json
from typing import Any

from trimcp.channel import Outgoing
from trimcp.protocol.events import BatchReceived, Ignored, Rejected, RequestReceived, Settled
from trimcp.session.outbox import Outbox
from trimcp.session.replies import Replies


class _Road:
    name = "stream"
    sink = None


def asked(id: int) -> RequestReceived:
    nothing: Any = None
    return RequestReceived(id, nothing, None, {}, nothing)


async def sent(outbox: Outbox) -> list[Outgoing]:
    return list(await outbox.receive()) if len(outbox) else []


async def test_a_reply_outside_an_array_goes_out_by_itself() -> None:
    outbox, replies, origin = Outbox(10, 1_000), Replies(), _Road()
    replies.none(outbox, 1, origin)
    replies.post(outbox, 2, b"{}", origin)
    [outgoing] = await sent(outbox)
    assert (outgoing.data, outgoing.request_id, outgoing.origin) == (b"{}", 2, origin)


async def test_an_array_is_answered_once_all_its_members_are() -> None:
    outbox, replies, origin = Outbox(10, 1_000), Replies(), _Road()
    batch = BatchReceived((asked(1), Settled(2, "ping", b'{"id":2}'), asked(3), Rejected("no"), Ignored("what")))
    replies.expect(outbox, batch, origin)
    replies.post(outbox, 3, b'{"id":3}', None)
    assert await sent(outbox) == []
    replies.none(outbox, 1, origin)
    [outgoing] = await sent(outbox)
    assert sorted(member["id"] for member in json.loads(outgoing.data)) == [2, 3]
    assert (outgoing.request_id, outgoing.origin) == (None, origin)


async def test_an_array_that_is_settled_already_is_answered_at_once() -> None:
    outbox, replies = Outbox(10, 1_000), Replies()
    replies.expect(outbox, BatchReceived((Settled(1, "ping", b'{"id":1}'),)), None)
    [outgoing] = await sent(outbox)
    assert json.loads(outgoing.data) == [{"id": 1}]
