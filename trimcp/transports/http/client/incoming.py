"""Incoming messages: reads streams of events to their end, and queues messages for the session.

Knows neither requests nor sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, Incoming, OneTask
from trimcp.framing.sse import Event, EventDecoder
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import OpenReply
from trimcp.wire.jsonrpc import Message, parse

_LONGEST_PAUSE = 300.0
_LONGEST_ID = 1024
# Lines per turn of the event loop. The cost of a chunk grows with its number of lines, and 64 KiB can contain as many
# empty lines. So such a chunk is read in parts, and other tasks run in between.
_LINES = 256
_PIECE = 1024


@attrs.define(eq=False)
class Inbox:
    """A bounded queue of incoming messages, from any number of streams to one reader."""

    max_messages: int = 1_024  # messages that may wait before streams are read no further
    # of waiting messages. One message may exceed it; otherwise a large one could never be received.
    max_bytes: int = 4 * 1024 * 1024
    max_message: int = CLIENT_MAX_MESSAGE  # bytes of the largest message that is accepted; may be changed at any time
    _queue: deque[Incoming] = attrs.field(init=False, factory=deque)
    _bytes: int = attrs.field(init=False, default=0)
    _ended: bool = attrs.field(init=False, default=False)
    _closed: bool = attrs.field(init=False, default=False)
    _receiving: OneTask = attrs.field(init=False, factory=partial(OneTask, "receiving from"))
    _reader: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _streams: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    @property
    def ended(self) -> bool:
        """Whether no more messages will be added."""
        return self._ended or self._closed

    @property
    def full(self) -> bool:
        """Whether streams have to wait before they add a message."""
        return (len(self._queue) >= self.max_messages or self._bytes >= self.max_bytes) and not self.ended

    async def put(self, incoming: Incoming) -> None:
        """Add a message once there is room. If cancelled, nothing was added."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.full:
            await self._streams.park()
        self.post(incoming)

    def post(self, incoming: Incoming) -> None:
        """Add a message without waiting: this client's own report about a request, at most one for each."""
        if self._ended or self._closed:
            return
        self._queue.append(incoming)
        self._bytes += incoming.size
        self._reader.unpark()

    async def take(self, event: Event) -> None:
        """Add the message of an event, if it has one, like `put`."""
        message = message_in(event)
        if message is not None:
            await self.put(Incoming(message, len(event.data)))

    async def receive(self) -> Sequence[Incoming]:
        """Wait for messages and return all that have arrived; see `MessageChannel.receive`."""
        with self._receiving:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._queue or self.ended:
                await trio.lowlevel.cancel_shielded_checkpoint()
            while not self._queue and not self.ended:
                await self._reader.park()
            if self._closed:
                raise trio.ClosedResourceError("this channel was closed")
            if not self._queue:
                raise trio.EndOfChannel("the server has ended its stream")
            batch = list(self._queue)
            self._queue.clear()
            self._bytes = 0
            self._streams.unpark_all()
            return batch

    def end(self) -> None:
        """Accept no more messages; those that have arrived can still be received."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Accept no more messages, and drop those that wait."""
        self._closed = True
        self._queue.clear()
        self._bytes = 0
        self._wake()

    def _wake(self) -> None:
        self._reader.unpark_all()
        self._streams.unpark_all()


@attrs.define(eq=False)
class Cursor:
    """Where to resume a stream that ended (WHATWG HTML, "Server-sent events", "Last-Event-ID")."""

    last_event_id: str | None = None  # of the newest event, or None if none had one
    retry: float | None = None  # seconds to wait before reconnecting, as the server requests, or None
    moved: bool = False  # whether an event arrived since this was last set to False

    @property
    def header(self) -> dict[str, str]:
        """The header that requests the events after the newest one; empty if it has no usable id."""
        id = self.last_event_id
        # An id that a header cannot contain cannot be sent back. Servers that support resuming use no such ids.
        usable = id and id.isascii() and id.isprintable() and len(id) <= _LONGEST_ID
        return {"last-event-id": id} if id and usable else {}


@attrs.define(eq=False)
class EventReader:
    """Decodes the stream of one reply, piece by piece, and passes its events on."""

    cursor: Cursor  # notes where to resume the stream
    _inbox: Inbox  # says how large an event may be. A larger one is passed without its data.
    _take: Callable[[Event], Awaitable[object]]  # called with each event
    _decoder: EventDecoder = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._decoder = EventDecoder(self._inbox.max_message, last_event_id=self.cursor.last_event_id)

    async def read(self, chunk: bytes) -> None:
        """Pass on the events that these bytes complete."""
        decoder, cursor = self._decoder, self.cursor
        decoder.max_event = self._inbox.max_message
        few = len(chunk) <= _LINES or chunk.count(b"\n") + chunk.count(b"\r") <= _LINES
        size = (len(chunk) or 1) if few else _PIECE
        for start in range(0, len(chunk), size):
            events = decoder.feed(chunk[start : start + size])
            cursor.last_event_id = decoder.last_event_id
            if decoder.retry is not None:
                cursor.retry = min(decoder.retry / 1000, _LONGEST_PAUSE)
            for event in events:
                cursor.moved = True
                await self._take(event)
            if not few:
                await trio.lowlevel.checkpoint()


async def read_events(
    reply: OpenReply, cursor: Cursor, inbox: Inbox, take: Callable[[Event], Awaitable[object]]
) -> ExchangeBroken | None:
    """Pass every event of a reply to `take` until the stream ends; return how it broke, None if it ended in order.

    An event of more than `inbox.max_message` bytes is passed without its data.
    """
    reader = EventReader(cursor, inbox, take)
    try:
        async with reply.chunks() as chunks:
            async for chunk in chunks:
                await reader.read(chunk)
    except ExchangeBroken as broken:
        return broken
    return None


def message_in(event: Event) -> Message | None:
    """Return the message of an event; None if it has none."""
    if event.oversize is not None:
        return event.oversize
    if event.event != "message" or not event.data.strip():
        return None
    return parse(event.data)
