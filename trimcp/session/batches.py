"""Arrays of messages (2025-03-26): the replies to the requests of one array are sent together."""

from __future__ import annotations

from collections.abc import Hashable

import attrs

from trimcp.channel import Kind, Origin, Outgoing, Sink
from trimcp.protocol.events import BatchReceived, Rejected, RequestReceived, Settled
from trimcp.support.slotted import slotted
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import RequestId, encode_error


@slotted
class HeldReplies:
    """Bytes of replies in one session that wait for the other replies of their arrays, and the bound on them."""

    most: int
    bytes: int = 0


@slotted
class BatchSink(Sink):
    """The sink of one array: its replies are sent together as one array, once all of them are ready.

    Everything else is sent at once. An array of notifications is never answered.
    """

    below: Sink  # the sink of the connection that the array was received on
    origin: Origin | None  # where it was received
    held: HeldReplies  # the bytes that wait in all arrays of the session
    _waiting: set[RequestId] = attrs.field(init=False, factory=set)
    _replies: list[bytes] = attrs.field(init=False, factory=list)

    def expect(self, event: BatchReceived) -> None:
        """Wait for the replies to an array's requests, some of which may be ready. If all are, send them now."""
        for member in event.events:
            if isinstance(member, RequestReceived):
                self._waiting.add(member.id)
            elif isinstance(member, Settled | Rejected) and member.reply is not None:
                self._keep(member.reply)
        self._send_if_whole()

    def _keep(self, reply: bytes) -> None:
        self._replies.append(reply)
        self.held.bytes += len(reply)

    def _send_if_whole(self) -> None:
        if self._replies and not self._waiting:
            self.held.bytes -= sum(map(len, self._replies))
            array, self._replies = b"[" + b",".join(self._replies) + b"]", []
            self.below.post(Outgoing(array, Kind.REPLY, None, self.origin))

    @property
    def full(self) -> bool:
        return self.below.full

    async def room(self) -> None:
        await self.below.room()

    def post(self, outgoing: Outgoing) -> None:
        """Keep the reply to a request of the array; the last one sends the array. Send anything else at once."""
        id, data = outgoing.request_id, outgoing.data
        if outgoing.kind is not Kind.REPLY or id not in self._waiting:
            self.below.post(outgoing)
            return
        if self.held.bytes and self.held.bytes + len(data) > self.held.most:
            # An array whose last reply never arrives must not collect replies without bounds.
            data = encode_error(id, OVERLOADED, "too many replies wait for others of their arrays")
        self._waiting.discard(id)
        self._keep(data)
        self._send_if_whole()

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        self.below.post_latest(key, outgoing)

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        self.below.finish_latest(key, keep=keep)

    def withdraw(self, request_id: RequestId) -> bool:
        return self.below.withdraw(request_id)

    def unanswered(self, request_id: RequestId) -> None:
        """Stop waiting for the reply to a request that gets none."""
        self._waiting.discard(request_id)
        if self._waiting or not self._replies:
            self.below.unanswered(request_id)
        else:
            self._send_if_whole()

    def release(self) -> None:
        self.below.release()
