"""One server's connection of HTTP/2: what is read when, how streams share the wire, and how it ends.

One task reads all the time. What it reads is looked at in slices with a turn of Trio's loop between them, whatever it
is. Responses are written by the task that answers, as over HTTP/1.1 (`H1Writer`), so a request costs no task here, but
for the first with each head, whose caller may have to be asked for.

What waits for the peer waits in its stream. The writer gets so much that the socket has enough to do, in turn from the
streams that may send: so no large answer holds up a small one.
"""

from __future__ import annotations

import logging
from typing import Final

import attrs
import trio

from trimcp.budget import LITTLE, MemoryCharge, owner_of
from trimcp.security import security_event
from trimcp.support.cleaning import log_crash
from trimcp.support.deadlines import Deadline
from trimcp.support.slotted import slotted
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.http.h2.engine import Engine
from trimcp.transports.http.h2.frames import Code, Http2Error, Setting, name_of
from trimcp.transports.http.h2.heads import BlockReader, RequestFields, limited_request, read_request
from trimcp.transports.http.h2.interface import Http2Stream
from trimcp.transports.http.h2.replies import StreamOwner
from trimcp.transports.http.h2.requests import STREAM_COST, RequestStream
from trimcp.transports.websocket.frames import KEEP_ALIVE

log: logging.Logger = logging.getLogger("trimcp.http")

_FRAMES: Final = 64  # looked at in one turn
_UNREAD: Final = 256 * 1024  # bytes that wait for the socket, from which on nothing is read


@slotted
class H2Connection(StreamOwner):
    """Serves one client. `run` is its task; it uses the wire and the writer, and closes neither.

    The writer tells it what it was told to tell its owner.
    """

    lost: bool = attrs.field(init=False, default=False)  # whether the client is gone, or is being dropped
    _looked: bool = attrs.field(init=False, default=False)  # whether what is read next was looked at already
    _behind: bool = attrs.field(init=False, default=False)  # whether more was received than was looked at
    _over: bool = attrs.field(init=False, default=False)  # whether nothing more is read
    _heard: float = attrs.field(init=False)
    _in_head_since: float | None = attrs.field(init=False, default=None)
    _pinged: bool = attrs.field(init=False, default=False)
    _period: float = attrs.field(init=False)
    _alarm: Deadline = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        limits = self.hosting.limits
        self.owner: str = owner_of(None, self.peer)
        self._reader = BlockReader(limits.max_head, read_request, limited_request)
        self.engine: Engine = Engine(
            self,
            self._reader,
            client=False,
            settings={
                Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
                Setting.MAX_HEADER_LIST_SIZE: limits.max_head,
                Setting.ENABLE_CONNECT_PROTOCOL: 1,
            },
            max_streams=limits.max_streams,
        )
        self._amount = MemoryCharge(self.holding)
        self._heard = self._idle_since
        self._period = min(
            *(limits.head_timeout, limits.body_timeout, limits.idle_timeout, limits.stall_timeout),
            KEEP_ALIVE.interval,
        )
        self._alarm = self.hosting.application.deadlines.new(self._look)
        self.writer.owner = self

    # The connection's task

    async def run(self, data: bytes) -> None:
        """Serve until either side ends the connection; `data` was read already, and begins with the preface."""
        self._alarm.set(self._period)
        try:
            self._take(data)
            del data
            while not self._over:
                if self._behind:
                    await self._turn()
                    self._behind = self._advance()
                else:
                    await self._read()
            if not self.lost:
                await self.writer.linger(self._parked)
        except Http2Error as error:
            await self._refuse(error)
        finally:
            self._alarm.close()
            self._end()

    def _offer(self, data: bytes) -> bool:
        """Look at what was received before the task that waits for it does; return whether it has nothing to do."""
        self._take(data)
        self._looked = self._behind or self._over or self._pauses
        return not self._looked

    def _take(self, data: bytes) -> None:
        """Look at what was received."""
        self._heard = trio.current_time()
        self._pinged = False
        self.engine.feed(data, self._heard)
        self._behind = self._advance()

    async def _turn(self) -> None:
        """Let other tasks run before the next slice; a large head waits until one may be read."""
        if self.engine.large and not self.holding.budget.take_turn():
            await self.holding.wait_for_turn(self.engine.large)
        else:
            await trio.lowlevel.checkpoint()

    def _advance(self) -> bool:
        """Look at a slice of what was received; return whether there is more."""
        engine = self.engine
        large = engine.large
        self._corked = True
        try:
            return engine.advance(_FRAMES)
        finally:
            if large:
                self.holding.budget.parsed()
            if not engine.in_head:
                self._in_head_since = None
            elif self._in_head_since is None:
                self._in_head_since = self._heard
            self._corked = False
            self.flush()
            if self._ready:
                self._pump()

    @property
    def _pauses(self) -> bool:
        """Whether something is to be waited for before more is read."""
        return self.writer.waiting >= _UNREAD or self.hosting.draining or self._is_receiving_much

    @property
    def _is_receiving_much(self) -> bool:
        return bool(self.receiving) and any(stream.is_large for stream in self.receiving)

    async def _read(self) -> None:
        """Wait for input and look at it, or for what ends the connection."""
        if self.writer.broken:
            self._drop("read nothing" if self.writer.stalled else "left")
        elif self.hosting.draining and self._drained():
            return
        elif self.writer.waiting >= _UNREAD:
            if await self.wire.wait_peer_closed():
                self._drop("left")
        else:
            if self._is_receiving_much:
                await self.holding.budget.reads.wait(1)
            data = await self.wire.read(READ_SIZE, self._offer)
            if self._looked:
                self._looked = False
            elif data:
                self._take(data)
            elif data is not None:
                self._half_closed()

    def _half_closed(self) -> None:
        """Handle the end of the client's input: what was answered is still sent, the rest is given up."""
        unanswered = [stream for stream in self._streams() if not stream.ended]
        for stream in unanswered:
            stream.give_up("left")
        self._over = True
        self.lost = self.lost or bool(unanswered)

    def _drained(self) -> bool:
        """Serve no more streams once none is left, or the server stops for good; return whether none is left.

        Not earlier: to some clients, those on the library h2 among them, a GOAWAY is the end of what is under way.
        """
        if self.engine.streams and not self.hosting.stopping:
            return False
        if not self.engine.gone_away:
            self.engine.go_away()
            self.flush()
        self._over = not self.engine.streams
        return self._over

    # Called by the engine

    def request(self, id: int, head: RequestFields, ended: bool) -> Http2Stream | None:
        weight, holding = STREAM_COST + head.size, self.holding
        if not holding.fits(weight):
            holding.refuse("streams")
            return None
        if not self.hosting.streams.admit(self.owner):
            return None
        holding.little += LITTLE  # a stream may hold as much as a connection of HTTP/1.1
        self.weight: int = self.weight + weight
        self._amount.set(self.weight + self._reader.remembered)
        stream = RequestStream(self, head, weight)
        stream.left = head.length
        return stream

    def began(self, stream: Http2Stream, ended: bool) -> None:
        assert isinstance(stream, RequestStream)
        if not ended:
            stream.due = self._heard + self.hosting.limits.body_timeout
            self.receiving[stream] = None
        stream.begin()

    def windows_opened(self) -> None:
        for stream in self._streams():
            if stream.has_unsent:
                self._ready[stream] = None
        if not self._corked:
            self._pump()

    def went_away(self, last: int, code: int) -> None:
        if code != Code.NO_ERROR:
            log.debug("%s ends the connection: %s", self.peer, name_of(code))

    # Called by the writer

    def drained(self) -> None:
        """Let the streams go on: the socket has taken everything."""
        if self._ready:
            self._pump()
        written, self._written = self._written, {}
        for stream in written:
            if stream.has_unsent:
                self._written[stream] = None
            else:
                stream.writable()
        self._parked.unpark_all()
        if self.writer.waiting < _UNREAD:
            self.wire.wake()

    # Called by the budget, through the connection that it belongs to

    @property
    def at_rest(self) -> bool:
        return all(stream.at_rest for stream in self._streams())

    @property
    def idle(self) -> bool:
        return not self.engine.streams

    def evict(self, why: str) -> None:
        self._drop("gave way", why)
        self.writer.give_up()

    # The clock

    def _look(self) -> None:
        """End what takes too long; ping a client that is silent while it is being answered."""
        limits, now, engine = self.hosting.limits, trio.current_time(), self.engine
        due = now + self._period
        if not engine.has_settings or self._in_head_since is not None:
            since = self._heard if self._in_head_since is None else self._in_head_since
            due = min(due, since + limits.head_timeout)
            if now >= since + limits.head_timeout:
                return self._close("its head took too long")
        for stream in self._streams():
            when = stream.look(now)
            due = min(due, when)
        if not engine.streams:
            ends = self._idle_since + limits.idle_timeout
            if now >= ends:
                return self._close("it was idle")
            due = min(due, ends)
        elif now >= self._heard + KEEP_ALIVE.dead_after:
            log.debug("nothing was heard of %s for %g seconds", self.peer, KEEP_ALIVE.dead_after)
            return self.evict("nothing was heard of the peer")
        elif now >= self._heard + KEEP_ALIVE.interval and not self._pinged:
            self._pinged = True
            engine.ping()
            self.flush()
        self._alarm.set(max(due - now, 0.001))
        return None

    def _close(self, why: str) -> None:
        """End the connection in order; no stream loses anything but those that are not answered."""
        log.debug("the connection from %s is closed: %s", self.peer, why)
        self.engine.go_away()
        self.flush()
        self._half_closed()
        self.wake()

    # The end

    def _drop(self, how: str, slow: str | None = None) -> None:
        """Give up every stream at once. `slow` is the reason if the connection was ended here, not by the client."""
        if not self.lost:
            self.lost = self._over = True
            for stream in self._streams():
                stream.give_up(how, slow)
            self.wake()

    def _streams(self) -> list[RequestStream]:
        return list(self.engine.streams.values())  # type: ignore[arg-type]  # `request` made them

    async def _refuse(self, error: Http2Error) -> None:
        """Tell a client that broke the protocol why the connection ends."""
        if error.code is Code.ENHANCE_YOUR_CALM:
            security_event("flood_refused", what=error.reason, peer=self.peer)
        log.debug("%s broke the protocol of HTTP/2: %s", self.peer, error.reason)
        engine = self.engine
        engine.go_away(error.code, error.reason)
        self._corked = False
        self.flush()
        self._over = True
        for stream in self._streams():
            stream.give_up("broke the protocol")
        await self.writer.linger(self._parked)

    def _end(self) -> None:
        """Give up what is left, and break the reference cycles between connection, streams and engine."""
        try:
            for stream in self._streams():
                stream.give_up("was cut off")
        except Exception as error:  # as for a connection of HTTP/1.1; it is closed nevertheless
            log_crash(log, error, "ending a connection from %s crashed", self.peer)
        finally:
            for stream in self._streams():
                self.engine.streams.pop(stream.id, None)
            self.writer.owner = None
            self._ready.clear()
            self._written.clear()
            self.receiving.clear()
            self._amount.set(0)
            self.engine.forget()
