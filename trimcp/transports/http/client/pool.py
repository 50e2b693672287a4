"""Connections of HTTP/1.1 to one server: opened when needed, used again, watched while idle, bounded and fair.

Each connection has one task, which connects, reads all the time and pushes what arrives to the exchange under way: so a
call costs no task, and the end of an idle connection is known before it is used again. A request is written at once by
whoever makes it. What the socket does not take is written by a task that lives only for that.

    waiting exchange -> an idle connection, else the next that is free or newly open, in order
    exchange over    -> the next waiting exchange, else idle; closed if it cannot be used again
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import attrs
import trio

from trimcp.channel import HttpClientStatistics
from trimcp.errors import ConnectionLost
from trimcp.support.cleaning import log_crash
from trimcp.support.deadlines import Deadline, DeadlineQueue, Deadlines
from trimcp.transports.http.client.connection import ClientConnection, Dial
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.http.h1.replies import ReplyParser, UnreadableReply

# Seconds an idle connection is kept: less than the five after which common servers close it, since a request that is
# sent while the server closes may be lost.
_KEPT: Final = 4.0
LINGER: Final = 0.5
"""Seconds that a server has to end a stream after the answer in it."""
_UNASKED: Final = "a server sent bytes on an idle connection, a reply to nobody; it is closed"

_log = logging.getLogger("trimcp.http")


class ClientExchange(Protocol):
    """One request and what becomes of it. All but `arrived` are called at once and must not block or raise."""

    request: bytes  # the bytes to send
    connection: PooledConnection | None  # the connection that carries it; None before and after

    def sent(self) -> None:
        """Note that the last byte of the request was written."""

    async def arrived(self, reply: ReplyParser) -> None:
        """Take what has arrived of the reply. The connection is read no further before this returns."""

    def finished(self) -> None:
        """Note that the reply was received to its end; the connection is free for others already."""

    def broken(self, why: str, nothing_sent: bool) -> None:
        """Note that no (more) reply will arrive."""


@attrs.define(eq=False)
class PooledConnection(ClientConnection):
    """One connection of a pool, and its task."""

    _pool: Pool
    exchange: ClientExchange | None = attrs.field(init=False, default=None)  # the exchange under way, or None
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _why: str = attrs.field(init=False, default="")
    _silence: Deadline | None = attrs.field(init=False, default=None)
    _draining: trio.CancelScope | None = attrs.field(init=False, default=None)
    _drained: trio.Event | None = attrs.field(init=False, default=None)

    # Called by exchanges and by the pool

    def begin(self, exchange: ClientExchange) -> bool:
        """Write a request, or as much of it as the socket takes; return False if nothing of it could be sent."""
        wire = self._wire
        assert wire is not None
        request = exchange.request
        try:
            taken = wire.try_write(request)
        except trio.BrokenResourceError:
            self.cut()
            return False
        self.exchange, exchange.connection = exchange, self
        if self._silence is not None:
            self._silence.set(self._pool.timeouts.silence)
        if taken == len(request):
            exchange.sent()
        else:
            self._draining, self._drained = trio.CancelScope(), trio.Event()
            self._pool.start(self._drain, request[taken:], self._draining, self._drained)
        return True

    def hand_over(self, exchange: ClientExchange) -> None:
        """Let another exchange take (the rest of) the reply."""
        if self.exchange is not None:
            self.exchange.connection = None
        self.exchange, exchange.connection = exchange, self

    def leave(self, exchange: ClientExchange) -> None:
        """Give up an exchange: close the connection if it is under way here."""
        if self.exchange is exchange:
            self.exchange = exchange.connection = None
            self.cut()

    def linger(self) -> None:
        """Close it soon, unless the reply ends before: then it can be used again."""
        self._pool.lingering.add(self)

    def cut(self, why: str = "") -> None:
        """Close it; its exchange, if it has one, is broken for this reason."""
        self._why = self._why or why
        self._pool.forget(self)
        self._scope.cancel(reason="the connection is of no use any more")

    def timed_out(self) -> None:
        """Called when it was idle, or its answered exchange went on, for long enough."""
        self.cut()

    # Its tasks

    async def run(self) -> None:
        """Connect, carry exchanges, and close."""
        pool = self._pool
        refused = None
        try:
            with self._scope:
                await self.open(pool.dial)
                if pool.timeouts.silence < math.inf:
                    self._silence = pool.deadlines.new(self._was_silent)
                pool.opened(self)
                await self._serve()
        except ConnectionLost as error:
            refused = str(error)
        except UnreadableReply as error:
            if self.exchange is None:
                _log.debug(_UNASKED)
            self._why = pool.broke(str(error))
        except Exception as error:  # a bug here or in a library, which must not end other exchanges
            log_crash(_log, error, "a connection over HTTP crashed")
            self._why = pool.broke("its task crashed; the log has the details")
        finally:
            await self._close(refused)

    async def _serve(self) -> None:
        """Read to the end of the last exchange, or of the connection."""
        reply = self.reply
        while True:
            received = await self.receive()
            exchange = self.exchange
            if exchange is None:
                if received:
                    _log.debug(_UNASKED)
                return
            if self._silence is not None:
                self._silence.clear()
            if not received and not reply.complete:
                when = "in the middle of" if reply.begun else "before"
                self._why = self._pool.broke(f"the server closed it {when} its reply")
                return
            await exchange.arrived(reply)
            if self.exchange is None or (reply.complete and not self._complete()):
                return
            if self._silence is not None and self.exchange is not None:
                self._silence.set(self._pool.timeouts.silence)

    def _complete(self) -> bool:
        """End the exchange; return whether the connection can be used again."""
        exchange, pool = self.exchange, self._pool
        assert exchange is not None
        self.exchange = exchange.connection = None
        pool.lingering.remove(self)
        keeps = self.reply.keeps and self._drained is None
        self.reply.reset()  # also so that an idle connection holds nothing of what it brought
        if keeps:
            pool.release(self)
        else:
            pool.forget(self)
        exchange.finished()
        return keeps

    async def _drain(self, rest: bytes, scope: trio.CancelScope, drained: trio.Event) -> None:
        """Write the rest of a request. If the server reads no more, its reply may still come."""
        left, patience = bytearray(rest), self._pool.timeouts.write
        assert self._wire is not None
        try:
            with scope:
                while left:
                    scope.deadline = trio.current_time() + patience
                    del left[: await self._wire.write_some(left)]
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            if not left:
                self._draining = self._drained = None
            drained.set()
        if self.exchange is None:
            return
        if left:
            self.cut(self._pool.broke(f"the server took nothing more of the request for {patience:g} s"))
        else:
            self.exchange.sent()

    async def _close(self, refused: str | None) -> None:
        pool = self._pool
        pool.forget(self)
        pool.lingering.remove(self)
        if self._silence is not None:
            self._silence.close()
        if self._draining is not None and self._drained is not None:
            self._draining.cancel(reason="the connection is closed")
            # The wire must not be closed while it is written to. Bounded: that task is cancelled.
            with trio.CancelScope(shield=True):
                await self._drained.wait()
        await self.close()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.connection = None
        pool.gone(self, exchange, self._why or pool.broke("it was closed here"), refused)

    def _was_silent(self) -> None:
        self.cut(f"{self._pool.server} was silent for too long")


@attrs.define(eq=False)
class _WaitingExchange:
    """An exchange that waits for a connection."""

    _pool: Pool
    _exchange: ClientExchange

    def timed_out(self) -> None:
        self._pool.waited_too_long(self._exchange)


@attrs.define(eq=False)
class Pool:
    """The connections to one server. `server`, `place`: how that, and where it is reached, are called in errors."""

    dial: Dial  # opens one, within its time limit, or raises `ConnectionLost`
    server: str
    _place: str
    timeouts: Timeouts
    _most: int  # connections at a time; further exchanges wait, in order
    _kept: int  # idle connections at a time
    deadlines: Deadlines = attrs.field(init=False, factory=Deadlines)
    lingering: DeadlineQueue = attrs.field(init=False)
    _expiry: DeadlineQueue = attrs.field(init=False)
    _patience: DeadlineQueue | None = attrs.field(init=False, default=None)
    _connections: set[PooledConnection] = attrs.field(init=False, factory=set)
    _dialing: dict[PooledConnection, None] = attrs.field(init=False, factory=dict)
    _idle: dict[PooledConnection, None] = attrs.field(init=False, factory=dict)
    _waiting: dict[ClientExchange, _WaitingExchange] = attrs.field(init=False, factory=dict)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _closed: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.lingering = DeadlineQueue(self.deadlines, LINGER)
        self._expiry = DeadlineQueue(self.deadlines, _KEPT)
        if self.timeouts.connect < math.inf:
            self._patience = DeadlineQueue(self.deadlines, self.timeouts.connect)

    async def run(self, *, task_status: trio.TaskStatus[Pool] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the connections until `close`."""
        # Shielded, so that the last messages of a cancelled channel, which are bounded in time, find connections that
        # work. Whoever opened the pool calls `close` at its end.
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as self._nursery:
                task_status.started(self)
                await self.deadlines.run()

    def close(self) -> None:
        """Close every connection. Exchanges under way are not told: nobody waits for them any more."""
        self._closed = True
        self._waiting.clear()
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel(reason="the client disconnects")

    def statistics(self) -> HttpClientStatistics:
        """Return a snapshot of the connections."""
        busy = sum(connection.exchange is not None for connection in self._connections)
        waiting = len(self._waiting)
        return HttpClientStatistics("trimcp", len(self._connections), len(self._idle), busy + waiting, waiting)

    @property
    def begins_at_once(self) -> bool:
        """Whether the next request is written at once, on an idle connection that no input is hidden in."""
        return bool(self._idle) and next(reversed(self._idle)).at_once

    def begin(self, exchange: ClientExchange) -> None:
        """Send a request on an idle connection at once, or on the next one that is there. Never blocks."""
        while self._idle:
            connection, _ = self._idle.popitem()  # the one used last, which the server has most likely kept open
            self._expiry.remove(connection)
            if connection.is_quiet() and connection.begin(exchange):
                return
            connection.cut()
        waiting = self._waiting[exchange] = _WaitingExchange(self, exchange)
        if self._patience is not None:
            self._patience.add(waiting)
        self._open()

    def withdraw(self, exchange: ClientExchange) -> None:
        """Give up an exchange, wherever it is."""
        if exchange.connection is not None:
            exchange.connection.leave(exchange)
        elif self._drop(exchange):
            while len(self._dialing) > len(self._waiting):
                next(reversed(self._dialing)).cut()

    def waited_too_long(self, exchange: ClientExchange) -> None:
        if self._drop(exchange):
            why = f"no connection within {self.timeouts.connect:g} seconds"
            exchange.broken(f"cannot connect to {self._place}: {why}", True)

    # Called by connections

    def start(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task of a connection."""
        assert self._nursery is not None
        self._nursery.start_soon(task, *args)

    def opened(self, connection: PooledConnection) -> None:
        """Take a new connection into use."""
        self._dialing.pop(connection, None)
        if self._waiting:
            exchange = next(iter(self._waiting))
            self._drop(exchange)
            if not connection.begin(exchange):
                exchange.broken(self.broke("the server closed it at once"), True)
        else:
            self._keep(connection)

    def release(self, connection: PooledConnection) -> None:
        """Use a connection for the exchange that waits longest, or keep it."""
        if not self._waiting:
            self._keep(connection)
            return
        exchange = next(iter(self._waiting))
        if connection.is_quiet() and connection.begin(exchange):
            self._drop(exchange)
        else:
            connection.cut()

    def forget(self, connection: PooledConnection) -> None:
        """Use a connection for no more exchanges."""
        self._dialing.pop(connection, None)
        if connection in self._idle:
            del self._idle[connection]
            self._expiry.remove(connection)

    def gone(
        self, connection: PooledConnection, exchange: ClientExchange | None, why: str, refused: str | None
    ) -> None:
        """Note the end of a connection, with the exchange that it has cut short, if any.

        `refused`: why it could not be opened; None if it was.
        """
        self._connections.discard(connection)
        if self._closed:
            return
        if refused is not None and self._waiting:
            first = next(iter(self._waiting))
            self._drop(first)
            first.broken(f"cannot connect to {self._place}: {refused}", True)
        if exchange is not None:
            exchange.broken(why, False)
        self._open()

    def _keep(self, connection: PooledConnection) -> None:
        if len(self._idle) < self._kept:
            self._idle[connection] = None
            self._expiry.add(connection)
        else:
            connection.cut()

    def _open(self) -> None:
        """Open as many connections as exchanges wait for."""
        while len(self._dialing) < len(self._waiting) and len(self._connections) < self._most:
            connection = PooledConnection(self)
            self._connections.add(connection)
            self._dialing[connection] = None
            self.start(connection.run)

    def _drop(self, exchange: ClientExchange) -> bool:
        waiting = self._waiting.pop(exchange, None)
        if waiting is not None and self._patience is not None:
            self._patience.remove(waiting)
        return waiting is not None

    def broke(self, why: str) -> str:
        """Return the text of an error about a connection that broke."""
        return f"the connection to {self.server} broke: {why}"
