"""Replies on their way to the sink: one by one, or gathered into an array where an array asked (2025-03-26).

Knows ids and bytes. Each method is given the sink, which is the session's and which a driver may replace.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trimcp.channel import Kind, Origin, Outgoing, Sink
from trimcp.framing.batch import Gather
from trimcp.protocol.events import BatchReceived, Rejected, RequestReceived, Settled
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.jsonrpc import RequestId, encode_error

__all__ = ["Replies"]


@attrs.define(eq=False, repr=False)
class Replies:
    """The replies of one session to requests that were admitted.

    Args:
        max_held: bytes of replies that may wait for others of their arrays. One that would pass it becomes an error.
    """

    max_held: int = 16 * 1024 * 1024
    _gather: Gather | None = attrs.field(init=False, default=None)

    def expect(self, sink: Sink, event: BatchReceived, origin: Origin | None) -> None:
        """Hold the replies to an array's members back until all are there; those that are known already count."""
        if self._gather is None:
            self._gather = Gather()
        under_way = [member.id for member in event.events if isinstance(member, RequestReceived)]
        known = [
            member.reply
            for member in event.events
            if isinstance(member, Settled | Rejected) and member.reply is not None
        ]
        _post(sink, self._gather.open(under_way, known), origin)

    def post(
        self,
        sink: Sink,
        id: RequestId,
        data: bytes,
        origin: Origin | None,
        error: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the reply to a request, or keep it for its array; the last one sends the array."""
        if self._gather is not None and id in self._gather:
            held = self._gather.held
            if held and held + len(data) > self.max_held:
                # An array whose last reply never comes must not collect without bounds what nobody can read.
                data = encode_error(id, OVERLOADED, "too many replies wait for others of their arrays")
            _post(sink, self._gather.add(id, data), origin)
        else:
            sink.post(Outgoing(data, Kind.REPLY, id, origin, headers, error))

    def none(self, sink: Sink, id: RequestId, origin: Origin | None) -> None:
        """Note that a request gets no reply: its array, if it came in one, waits for it no longer."""
        array = None
        if self._gather is not None and id in self._gather:
            array = self._gather.drop(id)
        if array is None:
            sink.unanswered(id)
        _post(sink, array, origin)


def _post(sink: Sink, array: bytes | None, origin: Origin | None) -> None:
    if array is not None:
        sink.post(Outgoing(array, Kind.REPLY, None, origin))
