"""Load over HTTP+SSE (2024-11-05): each message is a POST of its own, and one stream carries all responses."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import attrs
import orjson
import trio

from trimcp.bench.connection import LoadConnection, LoadSite, events_in
from trimcp.bench.mux import LoadCaller, LoadChannel, Opener
from trimcp.bench.supply import Load
from trimcp.channel import CLIENT_MAX_MESSAGE
from trimcp.errors import ConnectionLost, McpError
from trimcp.framing.sse import Event, EventDecoder
from trimcp.transports.http.client.h1 import whole_request
from trimcp.transports.http.client.urls import origin, resolved
from trimcp.transports.http.h1.replies import UnreadableReply

_LISTEN: Final = {"accept": "text/event-stream"}
_SEND: Final = {"content-type": "application/json"}


def events_opener(site: LoadSite) -> Opener:
    """Return an opener that opens a new stream for each session."""

    @asynccontextmanager
    async def opened(load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
        channel = _EventChannel(load, caller, site)
        try:
            await channel.open()
            yield channel
        finally:
            await channel.close()

    return opened


@attrs.define(eq=False)
class _EventChannel:
    """One session: the stream, and connections for POSTs, at most one for each concurrent call."""

    _load: Load
    _caller: LoadCaller
    _site: LoadSite
    _stream: LoadConnection = attrs.field(init=False)
    _decoder: EventDecoder = attrs.field(init=False, factory=lambda: EventDecoder(CLIENT_MAX_MESSAGE))
    _head: bytes = attrs.field(init=False, default=b"")
    _arrived: list[Event] = attrs.field(init=False, factory=list)
    _outgoing: deque[bytes] = attrs.field(init=False, factory=deque)
    _idle: list[trio.Event] = attrs.field(init=False, factory=list)
    _workers: int = attrs.field(init=False, default=0)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _why: str = attrs.field(init=False, default="the server ended its event stream")

    def __attrs_post_init__(self) -> None:
        self._stream = LoadConnection(self._site, self._load)

    # The stream

    async def open(self) -> None:
        """Open the stream and wait for its first event, the endpoint for POSTs.

        Raises ConnectionLost: no endpoint was received; the text has the reason.
        """
        patience = self._load.plan.opening
        stream = self._stream
        try:
            with trio.fail_after(patience):
                await stream.request(whole_request(self._site.head("GET", _LISTEN), None))
                while not self._arrived:
                    pieces = await stream.more()
                    status = stream.reply.status
                    if status and (status != 200 or stream.reply.content_type != "text/event-stream"):
                        raise ConnectionLost(f"the server does not speak HTTP+SSE here: HTTP {status}")
                    self._arrived += events_in(pieces, self._decoder)
        except trio.TooSlowError:
            raise ConnectionLost(f"the server named no endpoint within {patience:g} seconds") from None
        except (trio.BrokenResourceError, UnreadableReply) as error:
            raise ConnectionLost(str(error)) from None
        event = self._arrived.pop(0)
        url = self._site.url
        target = resolved(event.data.decode(errors="replace").strip(), url)
        if event.event != "endpoint" or target is None or origin(target) != origin(url):
            raise ConnectionLost(f"the server named no endpoint of its own but {event.data[:200]!r}")
        self._head = self._site.head("POST", _SEND, url=target)

    async def receive(self) -> Sequence[bytes]:
        """Return the messages received over the stream; see `LoadChannel.receive`."""
        try:
            if not self._arrived:
                if self._stream.reply.complete:
                    raise trio.EndOfChannel(self._why)
                self._arrived += events_in(await self._stream.more(), self._decoder)
        except UnreadableReply as error:
            self._why = str(error)
            raise trio.BrokenResourceError(self._why) from None
        arrived, self._arrived = self._arrived, []
        return [event.data for event in arrived if event.data]

    async def close_reason(self) -> str:
        """Return how the connection ended; see `LoadChannel.close_reason`."""
        return self._why

    # Sending

    def send(self, messages: Sequence[bytes]) -> None:
        """Queue the messages, each for the next free connection; see `LoadChannel.send`."""
        self._outgoing.extend(messages)
        for _ in messages:
            if self._idle:
                self._idle.pop().set()
            elif self._nursery is not None and self._workers <= self._load.plan.places:
                self._workers += 1
                self._nursery.start_soon(self._work)

    async def run(self) -> None:
        """Run the nursery of the tasks that POST; see `LoadChannel.run`."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.send(())
            if self._outgoing:
                self._workers += 1
                nursery.start_soon(self._work)
            await trio.sleep_forever()

    async def _work(self) -> None:
        connection = LoadConnection(self._site, self._load)
        try:
            while True:
                while self._outgoing:
                    await self._post(connection, self._outgoing.popleft())
                event = trio.Event()
                self._idle.append(event)
                await event.wait()
        finally:
            await connection.close()

    async def _post(self, connection: LoadConnection, message: bytes) -> None:
        try:
            body = await connection.post(self._head, message)
            if connection.reply.status < 300:
                return
            kind, why = f"HTTP {connection.reply.status}", body.decode(errors="replace")
        except (McpError, UnreadableReply, trio.BrokenResourceError) as error:
            await connection.close()
            kind, why = "connection lost", str(error)
        self._caller.fail(orjson.loads(message).get("id"), kind, why, trio.current_time())

    async def close(self) -> None:
        """Close the stream."""
        await self._stream.close()
