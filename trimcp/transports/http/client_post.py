"""One request of ours over Streamable HTTP, from its first POST to its answer: attempts, streams and their resumption.

It ends when the answer was handed on, when it is known that none will come (then that is handed on), or when its scope
is cancelled, which closes the stream and says nothing.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

import attrs
import trio

from trimcp.channel import Incoming, Outgoing
from trimcp.framing.sse import Event
from trimcp.transports.http.client_events import Cursor, message_in, read_events
from trimcp.transports.http.client_handshake import ACCEPT, LISTEN, SESSION, VERSION, Handshake, method_of
from trimcp.transports.http.client_http import EVENT_STREAM, JSON_TEXT, Cut, Http, Reply, TooLarge
from trimcp.transports.http.client_inbox import Inbox
from trimcp.transports.http.client_policy import (
    PASSING,
    Patience,
    Trouble,
    answers,
    error_in,
    refusal,
    seconds_to_wait,
    status_text,
)
from trimcp.wire.codes import INVALID_REQUEST, METHOD_NOT_FOUND
from trimcp.wire.jsonrpc import Lost, Malformed, Message, parse
from trimcp.wire.revisions import find

__all__ = ["Post", "Road"]

_LINGER = 0.5
_MAX_ERROR = 1024 * 1024

_log = logging.getLogger("trimcp.http")


class Road(Protocol):
    """What a request needs of the channel it is sent on."""

    http: Http
    inbox: Inbox
    handshake: Handshake
    patience: Patience
    max_message: int
    retry_calls: bool
    unreachable: bool
    """Whether the last request could not be sent in all its attempts; then the next ones make one each."""

    async def fall_back(self, trouble: Trouble, offer: Outgoing) -> Trouble | None:
        """Try `initialize` by the older transport after it met `trouble`; None if that has taken over."""

    def failed(self, why: str) -> None:
        """Note why a request got no answer."""


@attrs.define(eq=False)
class Post:
    """One request under way.

    Attributes:
        outgoing: the request.
        scope: cancel it to give the request up.
        written: set once the request is with the operating system, or over.
    """

    outgoing: Outgoing
    _road: Road
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    written: trio.Event = attrs.field(init=False, factory=trio.Event)
    _answered: bool = attrs.field(init=False, default=False)
    _method: str | None = attrs.field(init=False, default=None)

    @property
    def method(self) -> str:
        """What is called."""
        if self._method is None:
            headers = self.outgoing.headers or {}
            self._method = headers.get("mcp-method") or method_of(self.outgoing.data)
        return self._method

    @property
    def ends_with_its_stream(self) -> bool:
        """Whether closing its stream tells the server to stop, so that no cancellation has to be sent."""
        version = (self.outgoing.headers or {}).get(VERSION)
        revision = None if version is None else find(version)
        return revision is not None and revision.disconnect_cancels

    async def run(self) -> None:
        """Send the request and hand on what comes of it. Cancelling it closes the stream."""
        with self.scope:
            try:
                trouble = await self._persist()
            except Exception:
                # A bug here or in the library below must not end what goes on beside it.
                _log.exception("a request over HTTP crashed")
                trouble = Trouble("the request could not be sent; the log has the details")
            if trouble is not None and not self._answered:
                self._give_up(trouble)
        self.written.set()

    async def _persist(self) -> Trouble | None:
        """Try until there is an answer, or no sense in trying again."""
        road = self._road
        await road.handshake.confirmed()
        renewed = False
        attempt = 0
        while True:
            trouble = await self._attempt()
            if trouble is None:
                return None
            if trouble.forgotten is not None and not renewed:
                trouble = await road.handshake.renew(trouble.forgotten)
                if trouble is None:
                    renewed = True
                    continue
            repeatable = road.retry_calls and self.method == "tools/call"
            pause = road.patience.before_next(attempt, trouble, self.method, repeatable)
            if pause is None or (trouble.untouched and road.unreachable):
                return trouble
            _log.debug("%s is sent again in %.2f s: %s", self.method, pause, trouble.why)
            await trio.sleep(pause)
            attempt += 1

    def _give_up(self, trouble: Trouble) -> None:
        id = self.outgoing.request_id
        self._road.failed(trouble.why)
        self._road.unreachable = trouble.untouched
        message: Message
        if trouble.answer is not None:
            message = trouble.answer
        elif trouble.nonsense or self.method == "server/discover":
            # Whoever probes learns from it that this is no modern server, not that there is no server.
            message = Malformed(INVALID_REQUEST, trouble.why, id, "shape", is_response=True)
        else:
            message = Lost(id, trouble.why)
        self._road.inbox.post(Incoming(message))

    # One attempt

    async def _attempt(self) -> Trouble | None:
        road = self._road
        handshake = road.handshake
        outgoing = self.outgoing
        first = not outgoing.headers and handshake.revision is None and self.method == "initialize"
        if first:
            handshake.offered(outgoing.data)
        session_id = handshake.session_id
        headers = {**ACCEPT, **handshake.headers(), **(outgoing.headers or {})}
        cursor = Cursor()
        # Only a cancellation that has to be said waits for what it cancels.
        written = None if self.ends_with_its_stream else self.written.set
        try:
            async with road.http.open("POST", headers, outgoing.data, written=written) as reply:
                road.unreachable = False
                trouble: Trouble | None
                if reply.status >= 300:
                    trouble = await self._refused(reply, session_id)
                else:
                    handshake.alive()
                    trouble = await self._read(reply, cursor, reply.header(SESSION) if first else None)
        except Cut as cut:
            return Trouble(cut.why, untouched=cut.nothing_sent, passing=True)
        if trouble is not None:
            return await road.fall_back(trouble, outgoing) if first else trouble
        return None if self._answered else await self._resume(cursor, session_id)

    async def _read(self, reply: Reply, cursor: Cursor, session_id: str | None) -> Trouble | None:
        """Read a reply that is no refusal. A stream may end without the answer, which is no trouble yet."""
        if reply.content_type == EVENT_STREAM:
            await self._read_events(reply, cursor, session_id)
            return None
        if reply.content_type not in (JSON_TEXT, ""):
            what = f"the server answered with the content type {reply.content_type!r:.100}, not JSON or events"
            return Trouble(what, nonsense=True, status=reply.status)
        try:
            body = await reply.body(self._road.max_message)
        except TooLarge:
            too_large = f"message larger than {self._road.max_message:,} bytes"
            await self._take(Malformed(INVALID_REQUEST, too_large, self.outgoing.request_id, "size", True), 0)
            return None
        if not body.strip():
            return Trouble(f"the server answered {status_text(reply.status)} and no result", nonsense=True)
        message = parse(body)
        if isinstance(message, Malformed):
            # Which request it was meant to answer is clear, whatever can be read of it.
            message = attrs.evolve(message, id=self.outgoing.request_id, is_response=True, is_request=False)
        await self._take(message, len(body), session_id)
        return None if self._answered else Trouble("the server answered something else than asked", nonsense=True)

    async def _read_events(self, reply: Reply, cursor: Cursor, session_id: str | None = None) -> None:
        """Hand on what a stream brings until it ends, or for a moment longer than the answer."""
        scope = trio.CancelScope()

        async def take(event: Event) -> None:
            message = message_in(event)
            if message is not None:
                await self._take(message, len(event.data), session_id)
                if self._answered:
                    # The server should end it now, and an exchange that ends in order leaves its connection usable.
                    scope.deadline = min(scope.deadline, trio.current_time() + _LINGER)

        with scope:
            await read_events(reply, cursor, self._road.max_message, take)

    async def _take(self, message: Message, size: int, session_id: str | None = None) -> None:
        answer = answers(message, self.outgoing.request_id)
        if answer and session_id is not None:
            self._road.handshake.agreed(message, session_id)
        await self._road.inbox.put(Incoming(message, size))
        self._answered = self._answered or answer

    async def _refused(self, reply: Reply, session_id: str | None) -> Trouble:
        """Say what a status above 299 means for this request."""
        try:
            body = await reply.body(_MAX_ERROR)
        except (TooLarge, Cut):
            body = b""
        status = reply.status
        error = error_in(body, self.outgoing.request_id)
        after = seconds_to_wait(reply.header("retry-after") or None, time.time)
        why = refusal(status, error, reply.elsewhere)
        if status == 404 and session_id is not None and (error is None or error.code != METHOD_NOT_FOUND):
            return Trouble(why, status=status, forgotten=session_id)
        if status in (401, 403):
            return Trouble(why, status=status)
        # An error that does not say when to come back is the server's last word.
        passing = status in PASSING and (error is None or after is not None)
        return Trouble(why, passing=passing, after=after, answer=error, status=status)

    # A stream that ended before the answer

    async def _resume(self, cursor: Cursor, session_id: str | None) -> Trouble | None:
        """Take the stream up where it ended, again and again as long as that brings something new."""
        road = self._road
        revision = road.handshake.revision
        lost = Trouble("the server's reply ended before the answer to the request", passing=True)
        if self.outgoing.headers or revision is None or not revision.resumable:
            return lost
        failures = 0
        while failures <= road.patience.retries:
            if not cursor.header:
                return lost
            await trio.sleep(road.patience.pause(failures) if cursor.retry is None else cursor.retry)
            if road.handshake.session_id != session_id:
                return lost  # another session knows nothing of this stream
            cursor.moved = False
            try:
                trouble = await self._take_up(cursor)
            except Cut as cut:
                trouble = Trouble(cut.why, passing=True)
            if self._answered:
                return None
            if trouble is not None and not trouble.passing:
                return attrs.evolve(lost, why=f"{lost.why}, and {trouble.why}")
            failures = 0 if cursor.moved else failures + 1
        return lost

    async def _take_up(self, cursor: Cursor) -> Trouble | None:
        road = self._road
        headers = {**LISTEN, **road.handshake.headers(), **cursor.header}
        async with road.http.open("GET", headers) as reply:
            if reply.status == 200 and reply.content_type == EVENT_STREAM:
                await self._read_events(reply, cursor)
                return None
            return Trouble(refusal(reply.status, None, reply.elsewhere), passing=reply.status in PASSING)
