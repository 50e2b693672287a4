"""The response of one request of HTTP/2 on a server, and what of it waits for the peer to read.

What waits is kept here and weighed, and is dropped with the stream. A stream that holds much has an account of its own
in the budget, so that it gives way alone.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from functools import lru_cache
from typing import Final

import attrs
import trio

from trimcp.budget import LARGE, LITTLE, MemoryAccount, MemoryCharge
from trimcp.support.cleaning import log_crash
from trimcp.support.slotted import slotted
from trimcp.transports.http.h1.hosting import Hosting
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.h1.writer import H1Writer, http_date
from trimcp.transports.http.h2.engine import Engine
from trimcp.transports.http.h2.frames import Code
from trimcp.transports.http.h2.heads import BlockReader, RequestFields, write_block
from trimcp.transports.http.h2.interface import EngineUser, Http2Stream
from trimcp.transports.http.interfaces import BODILESS, Handler, Head, HttpResponse

log: logging.Logger = logging.getLogger("trimcp.http")

_SMALL: Final = 16 * 1024  # bytes that are sent at once if the windows let it
_FULL: Final = 64 * 1024  # bytes that wait for the socket, from which on streams keep what they have to say
_PIECE: Final = 16 * 1024  # bytes of a stream, before others have their turn
_TURN: Final = 1024 * 1024  # bytes that are written before other tasks have their turn


@slotted
class StreamOwner(EngineUser):
    """The connection of streams: they write in turn, so that no large answer holds up a small one."""

    hosting: Hosting
    wire: Wire
    writer: H1Writer
    holding: MemoryAccount
    peer: str
    loopback: bool
    secure: bool
    engine: Engine = attrs.field(init=False)
    owner: str = attrs.field(init=False)  # of streams, and of what they hold, before their callers are known
    # streams whose body is incomplete
    receiving: dict[ReplyStream, None] = attrs.field(init=False, factory=dict)
    weight: int = attrs.field(init=False, default=0)  # bytes that the streams take beside their bodies
    _reader: BlockReader[RequestFields] = attrs.field(init=False)
    _amount: MemoryCharge = attrs.field(init=False)
    # whether what is said is gathered, because more is looked at first
    _corked: bool = attrs.field(init=False, default=False)
    # streams that may send, and have something to; and those that have written since the socket took everything
    _ready: dict[ReplyStream, None] = attrs.field(init=False, factory=dict)
    _written: dict[ReplyStream, None] = attrs.field(init=False, factory=dict)
    _idle_since: float = attrs.field(init=False, factory=trio.current_time)
    # the reader, while it waits for no input
    _parked: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def flush(self) -> None:
        """Write what the engine has to say, unless more is gathered first."""
        out = self.engine.out
        if out and not self._corked:
            data = bytes(out)
            out.clear()
            if len(self.engine.streams) > 1:
                self.writer.gather(data)  # others may have something to say in this turn, too
            else:
                self.writer.write(data)

    def push(self, stream: ReplyStream) -> None:
        """Send what a stream has to say, as far as there is room."""
        self._written[stream] = None
        self._ready[stream] = None
        if not self._corked:
            self._pump()

    def closed(self, stream: ReplyStream) -> None:
        """Forget a stream that has ended."""
        self.hosting.streams.release(stream.owner)
        self.holding.little -= LITTLE
        self.weight -= stream.weight
        self._amount.set(self.weight + self._reader.remembered)
        self.receiving.pop(stream, None)
        self._ready.pop(stream, None)
        self._written.pop(stream, None)
        if not self.engine.streams:
            self._idle_since = trio.current_time()
            if self.hosting.draining:
                self.wake()

    def wrote(self, stream: ReplyStream) -> None:
        """Write what a stream has given to the engine, and tell it when the socket has taken that."""
        out = self.engine.out
        if out and not self._corked:
            data = bytes(out)
            out.clear()
            self.writer.gather(data)  # a stream that says one thing soon says the next
        if self.writer.waiting:
            self._written[stream] = None

    @property
    def full(self) -> bool:
        """Whether the socket has enough to do."""
        return self.writer.waiting + len(self.engine.out) >= _FULL

    def _pump(self) -> None:
        """Let the streams that may send do so in turn, until the socket has enough to do."""
        ready, left = self._ready, _TURN
        while ready and left > 0 and not self.writer.broken:
            if self.full:
                self.flush()
                if self.full:
                    break
            stream = next(iter(ready))
            del ready[stream]
            sent = stream.send_some(_PIECE)
            left -= sent
            if sent and stream.has_unsent:
                ready[stream] = None  # behind the others
        self.flush()
        if ready:
            self.writer.write_later()

    def wake(self) -> None:
        """Wake the reader to check what has changed: `writer.broken`, `Hosting.draining`, the last stream's end."""
        self._parked.unpark_all()
        self.wire.wake()


class ReplyStream(Http2Stream):
    """A stream that is answered: an `HttpReply`."""

    __slots__ = (
        *("_amount", "_bodiless", "_connection", "_end", "_own", "_queue", "_queued", "_room", "_size", "_stalls_at"),
        *("_trailers", "ended", "fields", "handler", "head", "owner", "sent", "status", "weight"),
    )

    def __init__(self, connection: StreamOwner, fields: RequestFields, weight: int) -> None:
        super().__init__()
        self.fields: RequestFields = fields  # the head of its request, as it was sent
        self.weight: int = weight  # bytes that count for it in its connection's account
        self.owner: str = connection.owner  # in whose share of all streams it counts
        self.head: Head | None = None  # as the front knows it; None before it was looked at
        self.handler: Handler | None = None  # answers it, or None
        self.status: int = 0  # of the response, once it has begun
        self.sent: int = 0  # bytes of the response's body that were written here
        self.ended: bool = False  # whether the response is complete, though parts of it may still wait here
        self._connection: StreamOwner | None = connection  # None once it has ended
        self._size = 0  # bytes of the request's body that have arrived
        self._queue: deque[bytes | memoryview] | None = None  # what could not be sent yet
        self._queued = 0  # its bytes
        self._end = False  # whether the end of the response is behind what is in the queue
        self._trailers: bytes | None = None  # their block
        self._bodiless = False
        self._room: trio.lowlevel.ParkingLot | None = None
        self._stalls_at = math.inf  # when the peer has read nothing for too long
        self._own: MemoryAccount | None = None  # an account of its own
        self._amount: MemoryCharge | None = None  # what is counted of its bodies

    def send(self, response: HttpResponse) -> None:
        connection, body = self._connection, response.body
        if connection is None or self.status:
            return
        trailers = response.trailers
        bodiless = not body or self._is_bodiless(response.status)
        block = self._block(response, len(body) if not trailers and (body or self._bodiless) else None)
        if bodiless:
            self.ended = True
            if trailers:
                self._send_head(block, end=False)
                self._send_head(write_block(trailers), end=True)
            else:
                self._send_head(block, end=True)
            self._finished()
            return
        connection.engine.send_head(self, block, end=False)  # written together with what follows
        self.finish(body, trailers)

    def start(self, response: HttpResponse) -> None:
        if self._connection is None or self.status:
            return
        self._is_bodiless(response.status)
        self._send_head(self._block(response, None), end=False)
        if response.body:
            self.write(response.body)

    def write(self, data: bytes) -> None:
        """Send more of the body: at once, or with other pieces in this turn of Trio's loop."""
        if self._connection is None or not self.status or self.ended or self._bodiless or not data:
            return
        self.sent += len(data)
        if self._sends_at_once(data, end=False):
            self._connection.wrote(self)
        else:
            self._enqueue(data)

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        if self._connection is None or not self.status or self.ended:
            return
        self.ended = self._end = True
        if self._room is not None:
            self._room.unpark_all()
        if self._bodiless:
            data = b""
        self.sent += len(data)
        if trailers:
            self._trailers = write_block(trailers)
        if self._sends_at_once(data, end=not trailers):
            self._end = False
            if self._trailers is not None:
                self._connection.engine.send_head(self, self._trailers, end=True)
            self._connection.flush()
            self._finished()
        else:
            self._enqueue(data)

    def abort(self) -> None:
        connection = self._connection
        if connection is not None and not self.ended:
            self.ended = True
            self.handler = None
            connection.engine.reset(self, Code.INTERNAL_ERROR)
            connection.flush()
            self._finished()

    @property
    def waiting(self) -> int:
        connection = self._connection
        return 0 if connection is None else self._queued + connection.writer.waiting

    @property
    def gone(self) -> bool:
        return self.ended or self._connection is None

    async def room(self) -> None:
        while (connection := self._connection) is not None and not self.ended:
            if self._queued <= connection.hosting.limits.low_water:
                await connection.writer.room()
                return
            if self._room is None:
                self._room = trio.lowlevel.ParkingLot()
            await self._room.park()

    def _is_bodiless(self, status: int) -> bool:
        self.status = status
        self._bodiless = status in BODILESS or self.fields.method == "HEAD"
        return self._bodiless

    def _block(self, response: HttpResponse, length: int | None) -> bytes:
        self.status = response.status
        now = int(time.time())
        try:
            return response_block(now, response.status, response.headers, length)
        except ValueError as error:  # the body is sent without these headers
            log_crash(log, error, "the headers of a response with status %d cannot be sent", response.status)
            return response_block(now, response.status, (), length)

    def _send_head(self, block: bytes, *, end: bool) -> None:
        connection = self._connection
        if connection is not None:
            connection.engine.send_head(self, block, end=end)
            connection.flush()

    # What waits for the peer

    @property
    def has_unsent(self) -> bool:
        return self._queued > 0 or self._end

    def _sends_at_once(self, data: bytes, *, end: bool) -> bool:
        """Give everything to the engine, and return True, if nothing waits and the windows let it."""
        connection, size = self._connection, len(data)
        if connection is None or self._queued or size > _SMALL or size > self.send_window or connection.full:
            return False
        engine = connection.engine
        if size > engine.send_window:
            return False
        engine.send_data(self, data, end=end)
        return True

    def _enqueue(self, data: bytes) -> None:
        connection = self._connection
        if connection is None:
            return
        queue = self._queue
        if queue is None:
            queue = self._queue = deque()
        if data:
            queue.append(data)
            self._queued += len(data)
        connection.push(self)
        if self._queued:
            self._weigh()
            if self._stalls_at == math.inf:
                self._stalls_at = trio.current_time() + connection.hosting.limits.stall_timeout

    def send_some(self, most: int) -> int:
        """Give the connection so many bytes as the windows let; return how many these were, at least 1 at the end."""
        connection, queue = self._connection, self._queue
        if connection is None or queue is None:
            return 0
        engine, sent = connection.engine, 0
        while queue and sent < most:
            data = queue[0]
            if len(queue) > 1 and len(data) < 1_024:  # pieces of a burst share a frame
                data = b"".join(queue) if self._queued <= most else data
                if len(data) == self._queued:
                    queue.clear()
                    queue.append(data)
            if len(data) > most - sent:
                data = memoryview(data)[: most - sent]
            last = self._end and self._trailers is None and len(data) == self._queued
            taken = engine.send_data(self, data, end=last)
            if not taken:
                break
            sent += taken
            self._queued -= taken
            if taken == len(queue[0]):
                queue.popleft()
            else:
                queue[0] = memoryview(queue[0])[taken:]
        if sent:
            self._stalls_at = (
                trio.current_time() + connection.hosting.limits.stall_timeout if self._queued else math.inf
            )
            if self._amount is not None:
                self._weigh()
        if not self._queued and self._end:
            self._end = False
            if self._trailers is not None:
                engine.send_head(self, self._trailers, end=True)
            elif self.sends:
                engine.send_data(self, b"", end=True)
            self._finished()
            return max(sent, 1)
        if self._room is not None and self._queued <= connection.hosting.limits.low_water:
            self._room.unpark_all()
        return sent

    def window_opened(self) -> None:
        if self.has_unsent and self._connection is not None:
            self._connection.push(self)

    def writable(self) -> None:
        """Tell the handler that the socket has taken everything."""
        handler = self.handler
        if handler is not None and not self.ended:
            handler.writable()

    @property
    def at_rest(self) -> bool:
        handler = self.handler
        return handler is None or self.ended or handler.at_rest

    def evict(self, why: str, code: Code = Code.ENHANCE_YOUR_CALM) -> None:
        connection = self._connection
        if connection is not None:
            log.debug("a request from %s gives way: %s", connection.peer, why)
            connection.engine.reset(self, code)
            connection.flush()
            self.give_up("gave way", why)

    def give_up(self, how: str, slow: str | None = None) -> None:
        """Drop everything: the client has left, or is being dropped. `slow` is the reason if this side ended it."""

    def _finished(self) -> None:
        """Note that everything was given to the connection."""

    # The budget

    @property
    def is_large(self) -> bool:
        """Whether much of a body has arrived, and not its end."""
        return self._size >= LARGE

    def _holding(self) -> MemoryAccount:
        """Return the account that large things are counted in: its own."""
        connection, head = self._connection, self.head
        assert connection is not None
        if self._own is None:
            self._own = connection.holding.budget.holding(connection.owner, self)
        if head is not None and head.principal is not None and head.holding is not self._own:
            self._own.move(f"principal {head.principal}")
        return self._own

    def _weigh(self) -> None:
        size = self._size + self._queued
        if self._amount is None:
            if size < LARGE:
                return
            self._amount = MemoryCharge(self._holding())
        self._amount.set(size)

    def _unweigh(self) -> None:
        if self._amount is not None:
            self._amount.set(0)


@lru_cache(maxsize=256)  # within one second most responses begin alike
def response_block(now: int, status: int, headers: tuple[tuple[str, str], ...], length: int | None) -> bytes:
    """Return the block of a response's head. Raises ValueError if a header cannot be sent."""
    fields = [(":status", str(status)), ("date", http_date(now))]
    fields += [(name.lower(), value) for name, value in headers]
    if length is not None and status not in BODILESS:
        fields.append(("content-length", str(length)))
    return write_block(fields)
