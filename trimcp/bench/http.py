"""Calls over Streamable HTTP, in either era: each is a POST, and each that is under way has its own connection.

Sources: basic/transports (2025-11-25), basic/transports/streamable-http (2026-07-28). The stream on which a legacy
server may speak unasked is not opened, and a stream that ends before the answer is not resumed: it is an error.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
import orjson
import trio

from trimcp.bench.caller import answer_to
from trimcp.bench.h1 import LoadConnection, Site, UnreadableReply
from trimcp.bench.http_session import LoadSession
from trimcp.bench.load import Load
from trimcp.bench.shot import cancellation
from trimcp.bench.supply import LoadCall
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.errors import McpError
from trimcp.framing.sse import EventDecoder

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer

__all__ = ["run_http_session"]

_EVENTS: Final = b"text/event-stream"
_JSON: Final = b"application/json"
_LINGER: Final = 0.5  # seconds a stream may go on after the answer; then its connection is given up


async def run_http_session(
    load: Load, server: HttpServer, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run one session to the end of the measurement. It counts as started once it is open, or failed to for once."""
    session = LoadSession(load, Site.of(server), CLIENT_MAX_MESSAGE)
    attempt = 0
    while True:
        try:
            await session.open()
            break
        except McpError as error:
            load.tally.wrong("no connection", str(error), trio.current_time())
        if attempt == 0:
            task_status.started()
        if not await load.again(attempt):
            return
        attempt += 1
    connections = [session.connection() for _ in range(load.plan.places)]
    load.open += 1
    try:
        if load.plan.rate is None:  # connecting is not what is measured; an open loop uses as few as it can
            with suppress(McpError):  # then the calls will find out
                for connection in connections:
                    await connection.open()
        if attempt == 0:
            task_status.started()
        async with trio.open_nursery() as nursery:
            session.nursery = nursery
            for connection in connections:
                nursery.start_soon(_CallSlot(session, connection).run)
    finally:
        for connection in connections:
            connection.close()
        load.open -= 1
        await session.close()


@attrs.define(eq=False)
class _CallSlot:
    """Room for one call at a time."""

    _session: LoadSession
    _connection: LoadConnection
    _call: LoadCall | None = attrs.field(init=False, default=None)
    _id: int = attrs.field(init=False, default=0)

    async def run(self) -> None:
        """Make calls until all is over, or too many in a row find no connection."""
        load = self._session.load
        supply, think = load.supply, load.plan.think
        failures = 0
        try:
            while True:
                call = supply.take(trio.current_time())
                if call is None:
                    if supply.over:
                        return
                    await self._session.parked()
                    continue
                if await self._make(call):
                    failures = 0
                    if think:
                        with trio.move_on_after(think):
                            await load.over.wait()
                elif await load.again(failures):
                    failures += 1
                else:
                    return
        except trio.Cancelled:
            if self._call is not None and load.overdue:
                self._fail("no answer", f"none came within {load.plan.patience:g} seconds")
            raise
        finally:
            self._connection.close()

    # One call

    async def _make(self, call: LoadCall) -> bool:
        """Make a call, or count why it failed; False if there is no connection any more."""
        session = self._session
        session.id = self._id = id = session.id + 1
        self._call = call
        body = call.shot.render(id, call.number)
        head, own = session.head, call.shot.render_headers(call.number)
        data = b"%b%bcontent-length: %d\r\n\r\n%b" % (head, own, len(body), body)
        try:
            if call.give_up == math.inf:
                await self._exchange(data)
            else:
                with trio.move_on_after(call.give_up):
                    await self._exchange(data)
                if self._call is not None:
                    self._give_up(call)
            if self._connection.reply.status == 404 and session.has_id:
                await session.renew(head)
        except McpError as error:
            self._fail("no connection", str(error))
            return False
        except trio.BrokenResourceError as error:
            self._fail("connection lost", str(error))
            self._connection.close()
            return False
        except UnreadableReply as error:
            self._fail("not HTTP", str(error))
            self._connection.close()
        return True

    async def _exchange(self, data: bytes) -> None:
        connection = self._connection
        await connection.request(data)
        pieces = await connection.more()
        reply = connection.reply
        while not reply.status:
            pieces = await connection.more()
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
            self._fail("neither JSON nor events", reply.content_type.decode("latin-1") or "no content type")
        elif load.plan.reply == "sse":
            self._fail("JSON in place of events", body.decode(errors="replace"))
        else:
            self._take(body)
        if self._call is not None:
            self._fail("no answer in the reply", body.decode(errors="replace"))

    async def _read_events(self, pieces: list[bytes]) -> None:
        """Take in a stream up to its end, or a moment longer than the answer."""
        load, connection = self._session.load, self._connection
        load.replies.add("sse")
        if load.plan.reply == "json":
            self._fail("events in place of JSON", b"".join(pieces).decode(errors="replace"))
            connection.close()
            return
        decoder = EventDecoder(connection.max_size)
        while True:
            self._take_events(decoder, pieces)
            if connection.reply.complete or self._call is None:
                break
            pieces = await connection.more()
        if self._call is not None:
            self._fail("no answer in the stream", "it ended without one")
        elif not connection.reply.complete:
            await self._finish(decoder)

    def _take_events(self, decoder: EventDecoder, pieces: list[bytes]) -> None:
        for piece in pieces:
            for event in decoder.feed(piece):
                if event.oversize is not None:
                    raise UnreadableReply(event.oversize.message)
                if event.data:
                    self._take(event.data)

    async def _finish(self, decoder: EventDecoder) -> None:
        """Wait for the end of a stream that has brought the answer, so that its connection can be used again."""
        connection = self._connection
        with trio.move_on_after(_LINGER):
            while not connection.reply.complete:
                self._take_events(decoder, await connection.more())
            return
        connection.close()

    # Messages

    def _take(self, text: bytes) -> None:
        now = trio.current_time()
        tally = self._session.load.tally
        try:
            message = orjson.loads(text)
        except orjson.JSONDecodeError:
            tally.wrong("not JSON", text.decode(errors="replace"), now)
            return
        for each in message if type(message) is list else (message,):
            if type(each) is not dict:
                tally.wrong("no JSON-RPC", each, now)
            elif "method" in each:
                self._asked(each, now)
            else:
                self._answered(each, now)

    def _answered(self, message: dict[str, Any], now: float) -> None:
        load, call, id = self._session.load, self._call, message.get("id")
        if type(id) is not int or id != self._id:
            load.tally.wrong("answer to no call", message, now)
        elif call is None:
            load.tally.wrong("answered twice", message, now)
        else:
            self._call = None
            trouble = call.shot.trouble(message, call.number)
            if trouble is None:
                load.tally.right(now - call.due, now)
            else:
                load.tally.wrong(*trouble, now)
            load.supply.settle()

    def _asked(self, message: dict[str, Any], now: float) -> None:
        if message["method"] == "notifications/progress":
            params = message.get("params")
            if type(params) is dict and params.get("progressToken") == self._id and self._call is not None:
                self._session.load.tally.reported(1)
            else:
                self._session.load.tally.wrong("progress of no call", message, now)
        elif (answer := answer_to(message)) is not None:
            self._session.notify(answer)

    def _fail(self, kind: str, example: str) -> None:
        """The call under way has failed, if there is one; else something else has."""
        load = self._session.load
        load.tally.wrong(kind, example, trio.current_time())
        if self._call is not None:
            self._call = None
            load.supply.settle()

    def _give_up(self, call: LoadCall) -> None:
        """Tell the server, as its revision says, and use another connection for what comes next."""
        self._call = None
        load = self._session.load
        load.tally.given_up(timeout=call.timeout)
        self._connection.close()
        if not load.revision.disconnect_cancels:
            self._session.notify(cancellation(self._id))
        load.supply.settle()
