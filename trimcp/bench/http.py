"""Calls over Streamable HTTP, in either era: each is a POST, and each running call has its own connection.

The standalone GET stream of a legacy server is not opened. A stream that ends before the response is an error; it is
resumed only where `Plan.cut` says so. The modern era has no sessions; there a session is only what calls share here.

Sources: basic/transports (2025-11-25), basic/transports/streamable-http (2026-07-28).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.bench.connection import LoadConnection, LoadSite, events_in
from trimcp.bench.mux import LoadCaller
from trimcp.bench.plan import cancellation
from trimcp.bench.replicas import named_by_headers, named_by_message
from trimcp.bench.sessions import LoadPlaces
from trimcp.bench.supply import INITIALIZED, Load, LoadCall, Seat
from trimcp.errors import ConnectionLost, McpError
from trimcp.framing.sse import EventDecoder
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.h1 import whole_request
from trimcp.transports.http.h1.replies import UnreadableReply

_ACCEPT: Final = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
_EVENTS: Final = "text/event-stream"
_JSON: Final = "application/json"
_LINGER: Final = 0.5  # seconds a stream may stay open after the response; then its connection is closed
_CLOSE_TIME: Final = 1.0  # seconds for the DELETE that ends the session
_MOST_NOTICES: Final = 1_000


async def run_http(site: LoadSite, load: Load, seat: Seat, usable: Callable[[], object]) -> bool:
    """Run a session over Streamable HTTP; see `SessionRunner`."""
    session = _LoadSession(load, site, LoadPlaces(load, seat))
    await session.open()
    try:
        await session.run(usable)
        return True
    finally:
        await session.close()


@attrs.define(eq=False)
class _LoadSession:
    """The state shared by the calls of one session."""

    load: Load
    site: LoadSite
    places: LoadPlaces
    head: bytes = attrs.field(init=False, default=b"")  # the head of each POST of a call, without its last lines
    id: int = attrs.field(init=False, default=0)  # the id of the last request
    nursery: trio.Nursery = attrs.field(init=False)  # runs the tasks that send notifications
    session_id: str | None = attrs.field(init=False, default=None)  # the server's session id; None without one
    replica: str | None = attrs.field(init=False, default=None)  # who answered `initialize`, if that told it
    _side: LoadConnection = attrs.field(init=False)
    _turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _renewals: int = attrs.field(init=False, default=0)
    _notices: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._side = LoadConnection(self.site, self.load)

    # The session at the server

    async def open(self) -> None:
        """Initialize the session, if the revision has `initialize`. Raises McpError: it failed."""
        self._head_from({})
        if self.load.revision.modern:
            return
        patience = self.load.plan.opening
        try:
            with trio.fail_after(patience):
                status, body = await self._post(self.load.greeting())
                message = _message_in(body, self._side.reply.content_type)
                if status != 200 or not isinstance(message.get("result"), dict):
                    raise ConnectionLost(f"initialize was answered with HTTP {status} {body[:200]!r}")
                self.replica = named_by_message(self.load.plan.replica_by, message)
                self.session_id = self._side.reply.headers.get("mcp-session-id")
                self._head_from(self.named())
                status, body = await self._post(INITIALIZED)
                if status >= 300:
                    raise ConnectionLost(f"notifications/initialized was answered with HTTP {status} {body[:200]!r}")
        except trio.TooSlowError:
            await self._side.close()
            raise ConnectionLost(f"initialize was not answered within {patience:g} seconds") from None
        except (trio.BrokenResourceError, UnreadableReply, ExchangeBroken) as error:
            await self._side.close()
            raise ConnectionLost(str(error)) from None

    async def renew(self, head: bytes) -> None:
        """Initialize again, once for all calls that were told for this `head` that the session does not exist.

        Raises McpError: it failed, or was done too often.
        """
        async with self._turn:
            if head != self.head:
                return
            self._renewals += 1
            if self._renewals > self.load.plan.reopen:
                raise ConnectionLost("the server forgets one session after the other")
            await self.open()

    async def close(self) -> None:
        """End the session at the server, if it has one, within one second, also when cancelled."""
        # Shielded, because a measurement ends by cancelling, and the server should not keep its sessions.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_TIME):
            if self.session_id is not None:
                with suppress(McpError, trio.BrokenResourceError, UnreadableReply, ExchangeBroken):
                    await self._side.request(whole_request(self.site.head("DELETE", self.named()), None))
                    await self._side.body()
        await self._side.close()

    def named(self) -> dict[str, str]:
        """Return the headers that say which session a request is of."""
        named = {} if self.session_id is None else {"mcp-session-id": self.session_id}
        if self.load.revision.version_header:
            named["mcp-protocol-version"] = self.load.revision.name
        return named

    def _head_from(self, named: dict[str, str]) -> None:
        self.head = self.site.head("POST", {**_ACCEPT, **named})

    async def run(self, usable: Callable[[], object]) -> None:
        """Make calls until no more begin; each place opens its own connection again."""
        connections = [LoadConnection(self.site, self.load) for _ in range(self.load.plan.places)]
        self.load.open += 1
        try:
            if not self.load.plan.paced:  # connecting is not measured; an open loop uses as few connections as it can
                with suppress(McpError):  # the calls then count the failure
                    for connection in connections:
                        await connection.ready()
            usable()
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                for connection in connections:
                    nursery.start_soon(_CallPlace(self, connection).run, self.places)
        finally:
            for connection in connections:
                await connection.close()
            self.load.open -= 1

    # Messages besides calls

    def notify(self, message: bytes) -> None:
        """Send a notification or a response in a task, without waiting."""
        if self._notices < _MOST_NOTICES:
            self._notices += 1
            self.nursery.start_soon(self._notify, message)

    async def _notify(self, message: bytes) -> None:
        patience = self.load.plan.patience
        try:
            async with self._turn:
                with trio.fail_after(patience):
                    status, body = await self._post(message)
            if status >= 300:
                self.load.tally.wrong("notification refused", f"HTTP {status} {body[:200]!r}", trio.current_time())
        except (McpError, trio.BrokenResourceError, UnreadableReply, trio.TooSlowError) as error:
            await self._side.close()
            why = str(error) or f"no answer within {patience:g} seconds"
            self.load.tally.wrong("notification lost", why, trio.current_time())
        finally:
            self._notices -= 1

    async def _post(self, message: bytes) -> tuple[int, bytes]:
        body = await self._side.post(self.head, message)
        return self._side.reply.status, body


def _message_in(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the first JSON-RPC response in the body of an HTTP response, or {}."""
    texts = [body]
    if content_type == _EVENTS:
        texts = [event.data for event in EventDecoder().feed(body)]
    for text in texts:
        with suppress(orjson.JSONDecodeError):
            message = orjson.loads(text)
            if isinstance(message, dict) and message.get("id") == 0 and "method" not in message:
                return message
    return {}


@attrs.define(eq=False)
class _CallPlace:
    """A slot: makes one call at a time."""

    _session: _LoadSession
    _connection: LoadConnection
    _calls: LoadCaller = attrs.field(init=False)
    _call: LoadCall = attrs.field(init=False)
    _id: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        session = self._session
        self._calls = LoadCaller(session.load.supply, places=1, greeting={}, seat=session.places.seat)

    async def run(self, places: LoadPlaces) -> None:
        """Make calls until no more begin, or too many in a row find no connection."""
        load = self._session.load
        try:
            await places.run(self._make)
        except trio.Cancelled:
            if not self._calls.idle and load.overdue:
                self._fail("no answer", f"none came within {load.plan.patience:g} seconds")
            raise
        finally:
            await self._connection.close()

    async def _make(self, call: LoadCall) -> bool:
        """Make a call and count its outcome; return False if the connection is lost."""
        session = self._session
        session.id = self._id = id = session.id + 1
        self._call = call
        self._calls.begin(id, call)
        body = call.request.render(id, call.number)
        head, own = session.head, call.request.render_headers(call.number)
        data = whole_request(head + own, body)
        try:
            if call.give_up == math.inf:
                await self._exchange(data)
            else:
                with trio.move_on_after(call.give_up):
                    await self._exchange(data)
                if self._calls.give_up(id, trio.current_time()):
                    # The server is notified as its revision requires; the next call uses another connection.
                    await self._connection.close()
                    if not session.load.revision.disconnect_cancels:
                        session.notify(cancellation(id))
            session.load.tally.uncut += call.cut and session.load.tally.counting
            if self._connection.reply.status == 404 and session.session_id is not None:
                await session.renew(head)
        except McpError as error:
            self._fail("no connection", str(error))
            return False
        except trio.BrokenResourceError as error:
            self._fail("connection lost", str(error))
            await self._connection.close()
            return False
        except UnreadableReply as error:
            self._fail("not HTTP", str(error))
            await self._connection.close()
        return True

    async def _exchange(self, data: bytes) -> None:
        connection, session = self._connection, self._session
        self._calls.replica = None
        await connection.request(data)
        pieces = await connection.more()
        reply = connection.reply
        while not reply.status:
            pieces = await connection.more()
        self._calls.replica = named_by_headers(session.load.plan.replica_by, reply.headers) or session.replica
        if reply.content_type == _EVENTS and reply.status == 200:
            await self._read_events(pieces)
            return
        while not reply.complete:
            pieces += await connection.more()
        self._take_body(b"".join(pieces))

    def _take_body(self, body: bytes) -> None:
        load, reply = self._session.load, self._connection.reply
        load.replies.add("json")
        if reply.status != 200:
            self._fail(f"HTTP {reply.status}", body.decode(errors="replace"))
        elif reply.content_type != _JSON:
            self._fail("neither JSON nor events", reply.content_type or "no content type")
        elif load.plan.reply == "sse":
            self._fail("JSON in place of events", body.decode(errors="replace"))
        else:
            self._take(body)
        if not self._calls.idle:
            self._fail("no answer in the reply", body.decode(errors="replace"))

    async def _read_events(self, pieces: list[bytes]) -> None:
        """Read a stream to its end, or until `_LINGER` after the response."""
        load, connection = self._session.load, self._connection
        load.replies.add("sse")
        if load.plan.reply == "json":
            self._fail("events in place of JSON", b"".join(pieces).decode(errors="replace"))
            await connection.close()
            return
        decoder = EventDecoder(connection.max_size)
        cut_at: float | None = None
        while True:
            self._take_events(decoder, pieces)
            if self._call.cut and decoder.last_event_id and not self._calls.idle:
                cut_at, self._call.cut = trio.current_time(), False
                pieces = await self._resume(decoder.last_event_id)
                decoder = EventDecoder(connection.max_size)
            elif connection.reply.complete or self._calls.idle:
                break
            else:
                pieces = await connection.more()
        if not self._calls.idle:
            kind = "no answer in the stream" if cut_at is None else "not resumed"
            self._fail(kind, "the stream ended without the answer")
            return
        if cut_at is not None:
            load.tally.observe(f"{self._call.request.label}: resumed", trio.current_time() - cut_at)
        with trio.move_on_after(_LINGER):
            while not connection.reply.complete:
                self._take_events(decoder, await connection.more())
        if not connection.reply.complete:
            await connection.close()

    async def _resume(self, last: str) -> list[bytes]:
        """Cut the connection, and return what arrives first over another one, of the events after `last`."""
        connection, session = self._connection, self._session
        await connection.close()
        head = session.site.head("GET", {"accept": _EVENTS, **session.named(), "last-event-id": last})
        await connection.request(whole_request(head, None))
        pieces = await connection.more()
        while not connection.reply.status:
            pieces += await connection.more()
        if connection.reply.status != 200 or connection.reply.content_type != _EVENTS:
            self._fail("not resumed", f"HTTP {connection.reply.status} {b''.join(pieces)[:200]!r}")
        return pieces

    def _take_events(self, decoder: EventDecoder, pieces: list[bytes]) -> None:
        for event in events_in(pieces, decoder):
            if event.data:
                self._take(event.data)

    def _take(self, text: bytes) -> None:
        self._calls.take(text, trio.current_time())
        for answer in self._calls.answers():
            self._session.notify(answer)

    def _fail(self, kind: str, example: str) -> None:
        """Count a failure of the running call, or without one of something else."""
        self._calls.fail(self._id, kind, example, trio.current_time())
