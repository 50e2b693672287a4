"""The HTTP+SSE transport of 2024-11-05: one stream of events from the server, and a POST for every message to it.

The stream is the connection. Its first event names the URL to POST to, which must be on the same origin; its end is the
end of the session. Messages are sent one after another, in order. (2024-11-05 basic/transports.)

A server should accept a message at once. Some accept it only after they have answered it, which may take as long as a
call. So the next message waits for that only briefly.
"""

from __future__ import annotations

import logging
import math
from typing import Final

import attrs
import trio

from trimcp.channel import Incoming, Kind, Outgoing
from trimcp.framing.sse import Event
from trimcp.security import security_event
from trimcp.support.cleaning import log_crash
from trimcp.transports.descriptors import over_or_peer_closed
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import EVENT_STREAM, JSON_TEXT, OpenReply
from trimcp.transports.http.client.incoming import Cursor, message_in, read_events
from trimcp.transports.http.client.policy import AttemptFailure, error_in
from trimcp.transports.http.client.state import LISTEN, ClientState, method_of
from trimcp.transports.targets import origin
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import Malformed, RequestId, Response

_MAX_BODY: Final = 64 * 1024
_MOMENT: Final = 1.0
_MOST: Final = 64

_log = logging.getLogger("trimcp.http")


@attrs.define(eq=False)
class SseConnection:
    """One connection over HTTP+SSE."""

    _state: ClientState
    # set once the endpoint is known, or has failed to arrive
    known: trio.Event = attrs.field(init=False, factory=trio.Event)
    why: str | None = attrs.field(init=False, default=None)  # why there is no connection (any more), or None
    _over: trio.Event = attrs.field(init=False, factory=trio.Event)
    _reply: OpenReply | None = attrs.field(init=False, default=None)
    _endpoint: str | None = attrs.field(init=False, default=None, repr=False)
    _handshake: RequestId | None = attrs.field(init=False, default=None)
    _lock: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _under_way: int = attrs.field(init=False, default=0)
    _accepted: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    @property
    def open(self) -> bool:
        """Whether messages can be sent."""
        return self._endpoint is not None and self.why is None and not self._over.is_set()

    # Receiving

    async def run(self) -> None:
        """Read the stream to its end. Cancelling it closes the connection."""
        try:
            self.why = await self._read()
        except Exception as error:  # a bug here or in a library; calls fail with this reason
            log_crash(_log, error, "reading the event stream crashed")
            self.why = "the event stream could not be read; the log has the details"
        finally:
            self._reply = None
            self._over.set()
            self.known.set()
            self._accepted.unpark_all()

    async def wait_peer_closed(self) -> None:
        """Wait until the stream has ended, even while received bytes are still unread."""
        await over_or_peer_closed(self._over, None if self._reply is None else self._reply.socket)

    async def _read(self) -> str:
        http = self._state.http
        scope = trio.CancelScope(deadline=trio.current_time() + self._state.timeouts.endpoint)
        base = http.url

        async def take(event: Event) -> None:
            if self._endpoint is not None:
                await self._take(event)
            elif self.why is None:
                self.why = self._begin(event, base)
                if self.why is None:
                    scope.deadline = math.inf
                else:
                    scope.cancel(reason="the server named no endpoint")

        broken: ExchangeBroken | None = None
        try:
            with scope:
                async with http.open("GET", LISTEN) as reply:
                    if reply.status != 200 or reply.content_type != EVENT_STREAM:
                        return reply.refusal()
                    base, self._reply = reply.url, reply
                    broken = await read_events(reply, Cursor(), self._state.inbox, take)
        except ExchangeBroken as error:
            broken = error
        if self.why is not None:
            return self.why
        if scope.cancelled_caught:
            return f"the server named no endpoint in {self._state.timeouts.endpoint:g} s"
        return "the server ended its event stream" if broken is None else broken.why

    def _begin(self, event: Event, base: str) -> str | None:
        """Take the first event, which names the URL to POST to; return what is wrong with it, or None."""
        if event.event != "endpoint":
            return "the server's first event does not name an endpoint"
        http = self._state.http
        try:
            target = http.resolve(event.data.decode().strip(), base)
        except UnicodeDecodeError:
            target = None
        if target is None:
            return "the endpoint that the server names is no URL"
        if origin(target) != origin(http.url):
            security_event("redirect_refused", server=origin(http.url), to=origin(target))
            return f"the server's endpoint is on another origin ({origin(target)!r:.200}), where nothing is sent"
        # the rest of the URL identifies the session
        _log.debug("the server speaks HTTP+SSE; messages go to %s", origin(target))
        self._endpoint = target
        self.known.set()
        return None

    async def _take(self, event: Event) -> None:
        message = message_in(event)
        if message is None:
            return
        if isinstance(message, Response) and message.id == self._handshake:
            self._state.session.agreed(message, "")
        await self._state.inbox.put(Incoming(message, len(event.data)))

    # Sending

    async def send(self, outgoing: Outgoing) -> None:
        """Send a message, in order. If the server refuses a request, the error becomes its answer.

        Waits until the previous messages were accepted, or for a bounded time. Raises trio.BrokenResourceError: the
        stream has ended.
        """
        if self._handshake is None and outgoing.kind is Kind.REQUEST:
            method = method_of(outgoing.data)
            if method == "initialize":
                self._handshake = outgoing.request_id
            elif method == "server/discover":
                # The probe for the modern era is answered with an error here, without asking the server.
                text = "HTTP+SSE is a transport of the legacy era"
                refused = Malformed(INVALID_REQUEST, text, outgoing.request_id, "shape", is_response=True)
                self._state.inbox.post(Incoming(refused))
                return
        async with self._lock:
            await self.known.wait()
            while self._under_way >= _MOST and self.open:
                await self._accepted.park()
            if not self.open:
                raise trio.BrokenResourceError(self.why or "the connection is being ended")
            over = trio.Event()
            self._under_way += 1
            self._state.nursery.start_soon(self._send, outgoing, over)
            with trio.move_on_after(_MOMENT):
                await over.wait()

    async def _send(self, outgoing: Outgoing, over: trio.Event) -> None:
        try:
            failure = await self._state.persist(lambda: self._attempt(outgoing), self._next_pause)
            if failure is not None:
                self._give_up(outgoing, failure)
        except Exception as error:  # as above; other messages go on
            log_crash(_log, error, "a message over HTTP+SSE crashed")
            self._give_up(outgoing, AttemptFailure("the message could not be sent; the log has the details"))
        finally:
            self._under_way -= 1
            self._accepted.unpark_all()
            over.set()

    def _next_pause(self, attempts: int, failure: AttemptFailure) -> float | None:
        return self._state.backoff.before_next(attempts, failure) if self.open else None

    async def _attempt(self, outgoing: Outgoing) -> AttemptFailure | None:
        headers = {"content-type": JSON_TEXT, **self._state.session.headers()}
        async with self._state.http.open("POST", headers, outgoing.data, url=self._endpoint) as reply:
            body = await reply.small_body(_MAX_BODY)
            if reply.status < 300:
                return None
            error = error_in(body, outgoing.request_id) if outgoing.kind is Kind.REQUEST else None
            return AttemptFailure(reply.refusal(error), answer=error, status=reply.status)

    def _give_up(self, outgoing: Outgoing, failure: AttemptFailure) -> None:
        _log.debug("a %s was not taken: %s", outgoing.kind.value, failure.why)
        if outgoing.kind is Kind.REQUEST:
            self._state.give_up(outgoing.request_id, failure)
