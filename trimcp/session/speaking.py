"""What a session says on its own account: calls, their cancellation, and notifications.

Everything that leaves goes room first, then the engine's state, then the queue, with no checkpoint between the last
two; so a call that is cancelled early was never sent, and one that was is announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from trimcp.channel import Kind, Origin, Outgoing, Sink
from trimcp.errors import ConnectionLost, LocalError
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Replied
from trimcp.protocol.vocabulary import vocabulary
from trimcp.session.endpoint import Watcher
from trimcp.session.job import Job
from trimcp.session.mirroring import mirrored
from trimcp.session.pending import Pending, cancellation_text
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.lifecycle import CancelledParams

__all__ = ["Speaking"]


class Speaking:
    """The half of a session that speaks first. `Session` is the other, has these attributes and says what they are."""

    if not TYPE_CHECKING:  # a type checker would miss the attributes in it, which are in `Session`'s
        __slots__ = ()

    engine: Connection
    sink: Sink
    pending: dict[RequestId, Pending]
    watchers: set[Watcher]
    lost: ConnectionLost | None
    mirrors_headers: bool
    _reading: trio.lowlevel.ParkingLot

    def road(self, origin: Origin | None) -> Sink:
        """Return where messages go that belong to what came from there."""
        return self.sink if origin is None or origin.sink is None else origin.sink

    def nudge(self) -> None:
        """Let the reader look again whether it may go on."""
        self._reading.unpark_all()

    # Calls

    async def call(
        self,
        name: str,
        params: Any = None,
        *,
        meta: Mapping[str, JSON] | None = None,
        origin: Origin | None = None,
    ) -> Any:
        """Send a request and return the payload of its answer.

        Cancelling it (a deadline included) tells the peer, which stops its handler. What it belongs to, if anything,
        is the request that came from `origin`.

        Raises:
            RemoteError: the peer answered with an error.
            InvalidReply: it answered with what is no answer.
            ConnectionLost: the connection ended meanwhile.
            LocalError: the request may not be sent now; nothing was.
        """
        pending = await self.begin(name, params, meta=meta, origin=origin)
        try:
            return await pending.payload()
        except BaseException as error:
            # Nothing to do where an answer came; a cancellation or an interrupt leaves it under way.
            self.abandon(pending, cancellation_text(error))
            raise

    async def begin(
        self,
        name: str,
        params: Any = None,
        *,
        wants_progress: bool = False,
        meta: Mapping[str, JSON] | None = None,
        headers: Mapping[str, str] | None = None,
        origin: Origin | None = None,
    ) -> Pending:
        """Send a request and return it, to be waited for or abandoned. Cancelled, it has sent nothing."""
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
        engine = self.engine
        verb = engine.verb(name)
        engine.may_call(verb)
        id = engine.new_id()
        data = engine.encode_request(id, verb, params, wants_progress=wants_progress, meta=meta)
        pending = Pending(self, id, verb, origin)
        if self.mirrors_headers:
            headers = mirrored(engine.revision, verb, params, headers)
        return await self.send_request(pending, data, wants_progress=wants_progress, headers=headers)

    async def send_request(
        self,
        pending: Pending,
        data: bytes,
        *,
        wants_progress: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> Pending:
        """Send an encoded request: room, then state, then queue."""
        origin = pending.origin
        sink = self.road(origin)
        if sink.full:
            await sink.room()
        if self.lost is not None:
            raise ConnectionLost(*self.lost.args)
        self.engine.sent(pending.id, pending.verb, wants_progress=wants_progress)
        self.pending[pending.id] = pending
        try:
            sink.post(Outgoing(data, Kind.REQUEST, pending.id, origin, headers))
        except LocalError:
            del self.pending[pending.id]
            self.engine.give_up(pending.id)
            raise
        self.nudge()
        return pending

    def abandon(self, pending: Pending, why: str) -> None:
        """Give a request up and tell the peer, unless it was never written. Never blocks."""
        if self.pending.pop(pending.id, None) is None:
            return
        self.engine.give_up(pending.id)
        sink = self.road(pending.origin)
        if sink.withdraw(pending.id) or pending.verb.name in ("initialize", "server/discover"):
            return
        verb = self.engine.verb("notifications/cancelled")
        data = self.engine.encode_notification(verb, CancelledParams(request_id=pending.id, reason=why))
        sink.post(Outgoing(data, Kind.CANCEL, pending.id, pending.origin))

    # Notifications

    def encode_related(self, job: Job, name: str, params: Any, *, subscription: RequestId | None = None) -> bytes:
        """Return a notification that belongs to a request of the peer's, in the words of that request's revision."""
        verb = vocabulary(job.request.admission.revision)[name]
        return self.engine.encode_notification(verb, params, subscription=subscription)

    def encode_notification(self, name: str, params: Any, *, subscription: RequestId | None = None) -> bytes:
        """Return a notification of ours as bytes.

        Raises:
            LocalError: this revision has no such notification in this direction, or it cannot be encoded.
        """
        return self.engine.encode_notification(self.engine.verb(name), params, subscription=subscription)

    async def notify(self, name: str, params: Any = None) -> None:
        """Send a notification that belongs to no request; waits for room."""
        data = self.encode_notification(name, params)
        await self.room()
        self.sink.post(Outgoing(data, Kind.NOTIFICATION))

    async def room(self) -> None:
        """Wait for room in the outbox; always a checkpoint."""
        if self.sink.full:
            await self.sink.room()
        else:
            await trio.lowlevel.checkpoint()

    def notify_latest(self, name: str, params: Any = None, *, key: object = None) -> None:
        """Send a notification of which only the latest of its `key` (by default its name) counts; never blocks."""
        data = self.encode_notification(name, params)
        self.sink.post_latest((name, key), Outgoing(data, Kind.NOTIFICATION))

    def lose(self, why: str) -> None:
        """Note that the peer is gone: every call under way fails now, and later ones at once."""
        if self.lost is not None:
            return
        self.lost = ConnectionLost(why)
        self.engine.lose_all()
        pending, self.pending = self.pending, {}
        for call in pending.values():
            call.replied(Replied(call.id, None, ConnectionLost(why)))
        for watcher in list(self.watchers):
            watcher.lost(self.lost)
        self.nudge()
