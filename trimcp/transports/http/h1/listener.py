"""The HTTP server: accepts a bounded number of connections, and ends them when it is stopped."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Final

import attrs
import trio

from trimcp.budget import owner_of
from trimcp.support.shares import BoundedShares, Shares
from trimcp.transports.http.h1.connection import H1Connection
from trimcp.transports.http.h1.hosting import Hosting, ServeWebSocket
from trimcp.transports.http.h1.sockets import open_tcp, open_unix, peer_name, url_of
from trimcp.transports.http.h1.spread import ConnectionShares
from trimcp.transports.http.h1.wires import PolledWire, Poller, SocketWire, StreamWire, Wire
from trimcp.transports.http.interfaces import Application
from trimcp.transports.http.settings import HttpLimits

log: logging.Logger = logging.getLogger("trimcp.http")

_AT_ONCE: Final = 64  # connections accepted before other tasks run; fewer while there are few
# Other processes may accept from the same socket. Whoever wakes first takes no more than its share: one connection, and
# one for each so many that it has already.
_ONE_FOR: Final = 16
_PAUSE: Final = 1.0
_LAST_REQUESTS: Final = 0.25  # seconds in which requests that have come to connections that end are begun
_QUIET: Final = 60.0
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


async def serve_http1(
    application: Application,
    *,
    host: str | None = "127.0.0.1",
    port: int | None = None,
    path: str | os.PathLike[str] | None = None,
    sockets: Sequence[socket.socket] = (),
    shares: ConnectionShares | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: HttpLimits | None = None,
    serve_websocket: ServeWebSocket | None = None,
    stop: trio.Event | None = None,
    drain: Callable[[Callable[[], Awaitable[object]]], Awaitable[object]] | None = None,
    quiet: float = 0.0,
    grace: float = 5.0,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an application over HTTP/1.1 and HTTP/2 until `stop` is set, or until cancelled.

    At least one of `port`, `path` and `sockets` is required; several may be given. Cancelling closes all connections at
    once. The caller runs the application, and with it the application's clock.

    Args:
        sockets: listening sockets that the caller has opened. They are closed when accepting ends.
        shares: how many connections other processes have that accept from the same `sockets`.
        ssl_context: enables TLS; `sockets.tls_context` makes one.
        serve_websocket: serves a WebSocket; None refuses them.
        stop: once it is set, no connection is accepted, connections without a request are closed, and others end with
            the current response.
        drain: awaited after `stop` and before that, with a function that ends connections as soon as it loses nothing:
            see `quiet`. Until it is called connections stay open, so that clients can still send what running calls
            need: the answer to a question, or a cancellation.
        quiet: seconds for which that function waits. Each response is the last one of its connection then, and says so:
            a client that goes on in that time is answered, and goes elsewhere.
        grace: seconds after `drain` until the remaining connections are closed.
        task_status: started with the URLs once connections are accepted: "http://127.0.0.1:8000", "unix:/run/mcp.sock".

    Raises:
        LocalError: it cannot listen there; the text says why.
        ValueError: none of `port`, `path` and `sockets` was given.
    """
    limits = HttpLimits() if limits is None else limits
    stop = trio.Event() if stop is None else stop
    if port is None and path is None and not sockets:
        raise ValueError("say where to listen: a port, a path or sockets")
    polled = sys.platform == "linux" and ssl_context is None
    with Poller() if polled else nullcontext() as poller, ExitStack() as waiting, ExitStack() as stack:
        listening: list[socket.socket] = []
        urls: list[str] = []
        for sock in sockets:
            listening.append(stack.enter_context(sock))
            sock.listen(limits.backlog)
        if port is not None:
            opened = await open_tcp(host, port, backlog=limits.backlog, unacknowledged=limits.stall_timeout)
            listening += [stack.enter_context(sock) for sock in opened]
        urls += [url_of(sock, secure=ssl_context is not None) for sock in listening]
        if path is not None:
            listening.append(stack.enter_context(open_unix(path, backlog=limits.backlog)))
            urls.append(f"unix:{os.fspath(path)}")
        async with trio.open_nursery() as nursery:
            if poller is not None:
                nursery.start_soon(poller.run)
            hosting = Hosting(application, limits, nursery, serve_websocket)
            listener = _Listener(hosting, ssl_context, poller, shares)
            waiting.callback(listener.forget_waiting)
            async with trio.open_nursery() as accepting:
                for sock in listening:
                    sock.setblocking(False)
                    accepting.start_soon(listener.accept, sock)
                task_status.started(urls)
                await stop.wait()
                accepting.cancel_scope.cancel(reason="this server stops")
            if shares is not None:
                shares.leave()
            still_open = [sock.dup() for sock in listening]
            stack.close()  # nobody finds a Unix socket any more, so that its queue can be emptied
            for sock in still_open:
                with sock:
                    listener.accept_all(sock)
            if drain is not None:
                await drain(partial(listener.end_idle, quiet))
            await listener.drain(grace)
            nursery.cancel_scope.cancel(reason="this server has stopped")


@attrs.define(eq=False)
class _Accepted:
    """A connection that is being served, or waits until another ends."""

    sock: socket.socket
    peer: str
    loopback: bool
    owner: str
    connection: H1Connection | None = None

    @property
    def idle(self) -> bool:
        return self.connection is not None and self.connection.idle

    def evict(self, why: str) -> None:
        if self.connection is not None:
            self.connection.evict(why)


@attrs.define(eq=False)
class _Listener:
    """The connections of one server.

    Connections above the bound are also accepted, and wait: only accepted ones show their peer's address.
    """

    _hosting: Hosting
    _ssl_context: ssl.SSLContext | None
    _poller: Poller | None
    _others: ConnectionShares | None
    _connections: set[H1Connection] = attrs.field(init=False, factory=set)
    _waiting: dict[_Accepted, None] = attrs.field(init=False, factory=dict)
    _shares: BoundedShares[_Accepted] = attrs.field(init=False)
    _shares_of_waiting: Shares[_Accepted] = attrs.field(init=False, factory=Shares)
    _ended: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _warned: float = attrs.field(init=False, default=-math.inf)

    def __attrs_post_init__(self) -> None:
        self._shares = BoundedShares(2, what="connection", most=self._hosting.limits.max_connections)

    async def accept(self, sock: socket.socket) -> None:
        """Accept connections until cancelled."""
        while True:
            most = min(_AT_ONCE, 1 + len(self._connections) // _ONE_FOR)
            if self._others is not None:
                most = 1
                self._others.note(len(self._connections) + len(self._waiting))
            await trio.lowlevel.wait_readable(sock)
            if self._others is not None:
                await self._others.wait_turn(sock, len(self._connections) + len(self._waiting))
            try:
                for _ in range(most):
                    if not self._accept_one(sock):
                        break
            except OSError as error:
                self._warn("cannot accept connections: %s", error.strerror)
                with trio.move_on_after(_PAUSE):
                    await self._ended.park()

    def accept_all(self, sock: socket.socket) -> None:
        """Accept what waits: closing the socket would reset it, and lose what its client has sent already."""
        with suppress(OSError):  # which ended `accept`, too
            for _ in range(self._hosting.limits.backlog):
                if not self._accept_one(sock):
                    break

    def _accept_one(self, sock: socket.socket) -> bool:
        """Accept a connection; return False if none waits. Raises OSError: the system has no room for it."""
        try:
            accepted, address = sock.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _EXHAUSTED:
                raise
            log.debug("a connection was gone before it was accepted: %s", error.strerror)
        else:
            self._place(accepted, address)
        return True

    async def _wait_idle(self, seconds: float) -> None:
        """Wait until no connection is without a request, for `seconds` at most."""
        idle = [connection for connection in self._connections if connection.idle]
        with trio.move_on_after(seconds):
            while idle:
                if idle[-1] in self._connections and idle[-1].idle:
                    await self._ended.park()
                else:
                    del idle[-1]

    def _stop_idle(self) -> None:
        self._hosting.ending = self._hosting.draining = True
        for connection in self._connections:
            connection.wake()

    async def end_idle(self, quiet: float) -> None:
        """End the connections without a request that have none for `quiet` seconds, and let what has come begin."""
        self._hosting.ending = True
        await self._wait_idle(quiet)
        self._stop_idle()
        await self._wait_idle(_LAST_REQUESTS)

    async def drain(self, grace: float) -> None:
        """Stop all connections: those with a request after its response, for which they have `grace` seconds."""
        self._hosting.stopping = True
        self._stop_idle()
        with trio.move_on_after(grace):
            while self._connections:
                await self._ended.park()
        if self._connections:
            log.debug("%d connections are cut: their responses take too long", len(self._connections))

    def _warn(self, text: str, value: object) -> None:
        """Log a shortage, at most once a minute."""
        now = trio.current_time()
        if now - self._warned >= _QUIET:
            self._warned = now
            log.warning(text, value)

    def forget_waiting(self) -> None:
        """Close the connections that still wait to be served."""
        waiting, self._waiting = self._waiting, {}
        for accepted in waiting:
            accepted.sock.close()

    def _place(self, sock: socket.socket, address: object) -> None:
        peer, loopback = peer_name(address)
        accepted = _Accepted(sock, peer, loopback, owner_of(None, peer))
        if self._shares.has_room(accepted.owner):
            self._begin(accepted)
        else:
            self._warn("%d connections are open; more have to wait", self._shares.most)
            self._enqueue(accepted)

    def _enqueue(self, accepted: _Accepted) -> None:
        """Queue a connection until another ends; beyond the backlog, close the oldest of the owner that has most."""
        if len(self._waiting) >= self._hosting.limits.backlog:
            other = self._shares_of_waiting.giving_way(accepted.owner) or accepted
            other.sock.close()
            if other is accepted:
                return
            self._dequeue(other)
        self._waiting[accepted] = None
        self._shares_of_waiting.add(accepted)

    def _dequeue(self, accepted: _Accepted) -> None:
        del self._waiting[accepted]
        self._shares_of_waiting.remove(accepted)

    def _begin(self, accepted: _Accepted) -> None:
        try:
            wire = self._wire(accepted.sock)
        except OSError:
            accepted.sock.close()  # closed by the peer already
            return
        secure = self._ssl_context is not None
        accepted.connection = connection = H1Connection(
            self._hosting, wire, peer=accepted.peer, loopback=accepted.loopback, secure=secure
        )
        self._connections.add(connection)
        self._shares.add(accepted, used=True)
        self._hosting.application.connections += 1
        self._hosting.nursery.start_soon(self._serve, accepted, connection)

    def _wire(self, sock: socket.socket) -> Wire:
        if self._ssl_context is None:
            return SocketWire(sock) if self._poller is None else PolledWire(sock, self._poller)
        sock.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        return StreamWire(trio.SSLStream(stream, self._ssl_context, server_side=True))

    async def _serve(self, accepted: _Accepted, connection: H1Connection) -> None:
        try:
            await connection.run()
        finally:
            accepted.connection = None
            self._connections.discard(connection)
            self._shares.remove(accepted)
            self._hosting.application.connections -= 1
            self._ended.unpark_all()
            if self._others is not None:
                self._others.note(len(self._connections) + len(self._waiting))
            while self._waiting and len(self._connections) < self._hosting.limits.max_connections:
                first = next(iter(self._waiting))
                self._dequeue(first)
                self._begin(first)
