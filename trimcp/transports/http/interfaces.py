"""The interfaces between the HTTP application, the host that runs it, and the server behind it.

A host parses requests and writes replies: our own listener (`h1.connection`), or an ASGI server (`asgi.app`). The
application handles routes, headers, revisions and streams. For each request the host calls

    found = await application.admit(head)          before it reads the body; the result is one of
        HttpResponse   send it; the body need not be read
        Upgrade        make it a WebSocket: `found.open(writer)`, or `found.serve(channel)`
        Tunnel         run `found.serve(stream)`; only for heads with `http2`
        Handler        read at most `found.max_body` bytes of body, then `found.start(body, reply)`

and then the handler responds through `reply`, which never blocks. The server behind the application is a `Service`
(`trimcp.server.running.Running`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import attrs
import trio

from trimcp.budget import Budget, MemoryAccount
from trimcp.channel import Incoming, LaneCounts, Link, MessageChannel, MessageWriter, Sink, stall_text
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.support.cleaning import digest, harmless
from trimcp.support.deadlines import Deadlines
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import JSON, Message, RequestId, encode_error, parse
from trimcp.wire.revisions import Revision

if TYPE_CHECKING:
    from trimcp.store.keeping import SessionKeeper

_log = logging.getLogger("trimcp.http")

JSON_HEADERS: Final = (("Content-Type", "application/json"),)
BODILESS: Final = frozenset({204, 304})
"""Statuses of responses that have no body, and no length of one (RFC 9110, section 8.6)."""
_LATER: Final = (("Retry-After", "1"),)


_CONTEXTS: Final = "/contexts/"
_EVENTS: Final = "/events"


# Head and HttpResponse are mutable only because making a frozen value takes attrs three times as long.
@attrs.define(eq=False)
class Head:
    """The head of one request. The client wrote its contents: never log it unescaped.

    Attributes:
        method: as sent ("POST").
        path: percent-decoded, without query, below the prefix under which the application is mounted.
        query: the text after "?", as sent, or "".
        headers: values by lower-case name, without white space around them; the values of a repeated header are joined
            with ", ". Decoded as latin-1.
        peer: the client's address, for logs ("127.0.0.1:40312", "unix").
        loopback: whether it was sent to a loopback address or a Unix socket.
        secure: whether it was sent over TLS.
        certificate: the digest of the client's certificate, as tokens contain it (RFC 8705), or None.
        root: the prefix under which the application is mounted, or "".
        websocket: whether it requests an upgrade to WebSocket.
        http2: whether it came over HTTP/2 to a host that sends trailers and can serve a `Tunnel`.
        holding: counts the memory used for its connection; None counts nothing.
        principal: the authenticated caller, set by the application's identity check; None if anonymous.
        began: when the application was called, on Trio's clock, if the access log needs it.
        reply_headers: added to every response; set by the application.
        again: returns the handler of another request with this head, or None if it has to be judged anew; set by the
            application where everything that it looks at is in the head. Then several requests may share the head.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)
    peer: str = ""
    loopback: bool = True
    secure: bool = False
    certificate: str | None = None
    root: str = ""
    websocket: bool = False
    http2: bool = False
    holding: MemoryAccount | None = None
    principal: Principal | None = None
    began: float | None = None
    reply_headers: tuple[tuple[str, str], ...] = ()
    again: Callable[[Head], Handler | None] | None = None

    def with_headers(self, headers: Mapping[str, str]) -> Head:
        """Return this head, judged, with other headers."""
        return Head(
            *(self.method, self.path, self.query, headers, self.peer, self.loopback, self.secure, self.certificate),
            *(self.root, self.websocket, self.http2, self.holding, self.principal, self.began, self.reply_headers),
            self.again,
        )

    @property
    def address(self) -> str:
        """The client's address without its port; "" for a Unix socket."""
        return self.peer.rpartition(":")[0]

    @property
    def link(self) -> Link:
        """How the client has come here."""
        if self.websocket:
            return Link("WebSocket", self.peer)
        if self.headers.get("content-type", "").startswith("application/grpc"):
            return Link("gRPC", self.peer)
        return Link("HTTP/2" if self.http2 else "HTTP/1.1", self.peer)

    @property
    def until(self) -> float:
        """Seconds since 1970 until which the caller is authorized, for streams that outlive a request."""
        ends = None if self.principal is None else self.principal.expires_at
        return math.inf if ends is None else ends

    @property
    def shown_path(self) -> str:
        """The path for a log: a digest stands for the id of an agent's context, which may be all that protects it."""
        if not self.path.startswith(_CONTEXTS):
            return self.path
        name = self.path.removeprefix(_CONTEXTS)
        id = name.removesuffix(_EVENTS)
        return f"{_CONTEXTS}{digest(id)}{name[len(id) :]}"


@attrs.define(eq=False)
class HttpResponse:
    """A status, headers and a body. The host adds Content-Length, Date and the framing; HEAD sends no body.

    A host without HTTP/2 leaves out the trailers.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    trailers: tuple[tuple[str, str], ...] = ()


def refusal(
    status: int,
    text: str,
    *headers: tuple[str, str],
    id: RequestId | None = None,
    code: int = INVALID_REQUEST,
    data: JSON = None,
    null_id: bool = False,
) -> HttpResponse:
    """Return a response with a JSON-RPC error; with 503, it asks the client to try again in a second.

    `headers` are added to the Content-Type. An `id` of None (it was not read) is left out, or sent as null
    with `null_id`.
    """
    again = _LATER if status == 503 else ()
    body = encode_error(id, code, text, data, null_id=null_id)
    return HttpResponse(status, (*JSON_HEADERS, *headers, *again), body)


def stalled(peer: str, seconds: float, unread: int) -> str:
    """Log a client that was dropped because it did not read for `seconds`, and return the reason as text."""
    security_event("peer_stalled", peer=peer, seconds=seconds, unread_bytes=unread)
    return stall_text(seconds)


def token_expired(principal: Principal | None) -> None:
    """Log that a WebSocket was closed because its caller is authorized no longer."""
    _log.info("a WebSocket of %s was closed: the access token has expired", harmless(principal or ""))


class HttpReply(Protocol):
    """Sends the response to one request; made by the host. Nothing here blocks, or raises if the client left.

    Call either `send` once, or `start`, any number of `write`, and `finish`.

    Attributes:
        handler: the handler that responds, which may be replaced before it has responded; None if there is none.
    """

    handler: Handler | None

    def send(self, response: HttpResponse) -> None:
        """Send a whole response."""

    def start(self, response: HttpResponse) -> None:
        """Send the head of a response of unknown length, with the beginning of its body in the same write."""

    def write(self, data: bytes) -> None:
        """Send more of the body, at once if the socket accepts it."""

    def finish(self, data: bytes = b"", trailers: tuple[tuple[str, str], ...] = ()) -> None:
        """Send the rest of the body, then the trailers (over HTTP/2), and end the response."""

    def abort(self) -> None:
        """Close the connection at once, so that the client notices that the response is unfinished."""

    @property
    def waiting(self) -> int:
        """Bytes given to this reply that the operating system has not accepted yet."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the client has left, or the response is finished: further writes are dropped."""
        ...

    async def room(self) -> None:
        """Wait until few enough bytes wait, or the client is gone. Cancelling it loses nothing."""


class Handler(Protocol):
    """Responds to one request. The host calls the methods in this order; each returns at once.

    The defaults suit a request without a body that is answered at once.
    """

    __slots__ = ()

    @property
    def max_body(self) -> int:
        """Bytes of the largest accepted body; the host may stop reading a larger one there."""
        return 0

    @property
    def at_rest(self) -> bool:
        """Whether no handler of the application is running for it; see `Evictable`."""
        return True

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Take the whole body and begin to respond."""

    def too_large(self, beginning: bytes) -> HttpResponse:
        """Return the response to a request whose body is too large; `beginning` is what was read of it."""
        return HttpResponse(413)

    def refused(self, response: HttpResponse) -> HttpResponse:
        """Return the response to a request of which the host does not read the body; `response` is the host's own."""
        return response

    def disconnected(self, slow: str | None = None) -> None:
        """Note that the client left before its response was finished. Called at most once, never before `start`.

        `slow`: the reason, if the host dropped the client because it did not read for too long.
        """
        return

    def writable(self) -> None:
        """Note that the operating system has accepted all waiting bytes: messages held back may be written now."""
        return


@attrs.frozen(eq=False)
class Upgrade:
    """How to serve a request for a WebSocket.

    Attributes:
        serve: runs one connection until the peer leaves; closes the channel. Cancelling it ends the connection.
        subprotocol: the agreed subprotocol, or None if the client offered none that is supported.
        max_message: bytes of the largest accepted message.
        principal, headers: the caller, and the request's headers by lower-case name; set on every `Incoming`.
        read: returns a message from its text, see `WebSocketChannel`.
        open: opens a session into which a host pushes the messages. Our own listener calls this, and never `serve`;
            without it, it refuses the request.
        show: called with each message (see `Tracer.note`) by a host that pushes; None for no trace.
        until: seconds since 1970 until which the caller is authorized; see `serve`, which ends then by itself.
    """

    serve: Callable[[MessageChannel], Awaitable[None]]
    subprotocol: str | None
    max_message: int
    principal: Principal | None = None
    headers: Mapping[str, str] | None = None
    read: Callable[[bytes], Any] = parse
    open: Callable[[MessageWriter], ConnectedSession] | None = None
    show: Callable[[str, Message | bytes], object] | None = None
    until: float = math.inf


class ByteStream(Protocol):
    """A request of HTTP/2 whose two directions go their own ways: for a server's `Tunnel`, or a client's call."""

    window: int  # bytes that the peer may send before any of them is used
    message_timeout: float  # seconds that one message of the peer's may take; for each `message_rate` bytes one more
    message_rate: float
    too_slow: bool  # whether this side ended the stream because the peer read nothing for too long

    @property
    def gone(self) -> trio.Event:
        """Set when nothing sent reaches the peer any more."""
        ...

    @property
    def half_closed(self) -> bool:
        """Whether the peer has said everything, and still listens."""
        ...

    def start(self, headers: tuple[tuple[str, str], ...]) -> None:
        """Send the head of the response, with status 200 (servers). Called once, before anything else is sent."""

    async def send(self, data: bytes) -> None:
        """Send bytes, and wait while the peer does not read. Raises trio.BrokenResourceError if the peer is gone."""

    async def receive(self) -> bytes:
        """Return bytes that have arrived; b"" once the peer has said everything. Call `credit` once they are used.

        Raises:
            trio.BrokenResourceError: the peer is gone, or the stream was given up here; its text says how.
            trio.ClosedResourceError: it was finished here.
        """
        ...

    def credit(self, size: int) -> None:
        """Note that received bytes have been used: the peer may send as many again."""

    def finish(self, trailers: tuple[tuple[str, str], ...] = ()) -> None:
        """Send the trailers (servers), behind what is waiting, and end this side. May be called twice."""

    def reset(self, why: str) -> None:
        """End the stream at once, and drop what is waiting: what uses it then raises with this text."""

    def progress(self) -> Hashable:
        """Return a value that changes when the peer takes more; see `MessageChannel.write_progress`."""
        ...


@attrs.frozen(eq=False)
class Tunnel:
    """How to serve a request of HTTP/2 whose two directions go their own ways.

    `serve` runs until the request is answered. The stream is reset when it returns without having finished it. It is
    cancelled when the server stops, not when the peer leaves.
    """

    serve: Callable[[ByteStream], Awaitable[None]]


Admitted: TypeAlias = HttpResponse | Handler | Upgrade | Tunnel


class Application(Protocol):
    """The application that a host serves.

    Attributes:
        connections: open connections; our own listener counts them.
        deadlines: the clock, which its host uses too; it runs while the application runs.
        budget: counts the memory used for all peers.
    """

    connections: int
    deadlines: Deadlines
    budget: Budget

    async def admit(self, head: Head) -> Admitted:
        """Admit or refuse a request by its head. Waits only for the application's identity check."""
        ...

    def done(self, head: Head, status: int, sent: int) -> None:
        """Log in the access log that a response has ended: its status (0 if none) and the bytes of its body."""


class SecondProtocol(Protocol):
    """Another protocol that an application serves beside MCP: paths of its own, and its messages at the endpoint."""

    def find(self, head: Head) -> Callable[[Head], Awaitable[Admitted]] | None:
        """Return what answers a request after the identity check, if the path is one of its own."""
        ...

    def admits_anyone(self, head: Head) -> bool:
        """Return whether a request without credentials is answered."""
        ...

    def take(self, head: Head, body: bytes, value: Any) -> Handler | None:
        """Return what answers a body that was POSTed to the endpoint of MCP, if it is one of its messages.

        `value`: the JSON value that `body` is, or a `Malformed`.
        """
        ...

    def refused(self, status: int, why: str, headers: tuple[tuple[str, str], ...]) -> HttpResponse:
        """Return the response to a request for one of its paths that the identity check refuses."""
        ...

    def grpc_services(self) -> Mapping[str, Any]:
        """Return its services (`transports.grpc.server.GrpcService`), by the beginning of their paths."""
        ...

    def end(self) -> None:
        """End every stream now, because the port is closed."""


class PushedSession(Protocol):
    """A session into which the transport pushes messages. It owns no task while no message is being handled."""

    @property
    def revision(self) -> Revision | None:
        """The revision that its handshake agreed on, or None before it."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any handler is running. Messages that wait for the peer to read do not count."""
        ...

    @property
    def at_rest(self) -> bool:
        """Whether no handler is running. Messages may still wait for the client to read."""
        ...

    @property
    def counts(self) -> LaneCounts:
        """Counts messages that were dropped because their reader was slow or gone."""
        ...

    def assume(self, revision: Revision) -> None:
        """Skip the handshake: another worker process did it, and its result is not known here."""

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Accept received messages. Never waits, and never raises because of a message's contents."""

    def disconnect(self, why: str, *, slow: bool = False, ending: bool = False) -> None:
        """End it because its peer is gone: handlers are cancelled.

        `slow`: it was dropped because it did not read. `ending`: the server ends, and the peer may still be there.
        """

    def close(self) -> None:
        """End it when no handler is running. The caller then drops its reference."""

    def leave(self) -> None:
        """End it after the handlers of its notifications have finished."""


class ConnectedSession(PushedSession, Protocol):
    """A pushed session that is one connection: what is too much for it pauses its reader, and they end together.

    Closed, it cancels what runs: handlers are answered for with an error.
    """

    @property
    def stall_timeout(self) -> float:
        """Seconds after which a peer that takes nothing is dropped."""
        ...

    @property
    def drain_timeout(self) -> float:
        """Seconds for sending the last messages."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the transport must not read on; see `readable`."""
        ...

    @property
    def closed(self) -> bool:
        """Whether it was closed, by either side."""
        ...

    @property
    def unsent(self) -> bool:
        """Whether messages wait until the peer reads."""
        ...

    async def readable(self, wait_peer_closed: Callable[[], Awaitable[bool]]) -> bool:
        """Wait until the transport may read on, or has something else to do. Returns True once the peer has left.

        `wait_peer_closed`: see `Wire.wait_peer_closed`. Called only if this takes long.
        """
        ...

    def writable(self) -> None:
        """Write what was kept while the peer did not read."""

    def stalled(self) -> None:
        """End it because its peer took nothing for `stall_timeout`, and log that."""

    async def finish(self) -> None:
        """Wait, after `close`, until the handlers have unwound and their last messages were written or kept."""

    def forget(self) -> None:
        """Drop everything, because its connection has ended."""


class Service(Protocol):
    """The server behind an application.

    To each session `holding` counts its memory, and `via` is the application: `drain` with the same value ends
    it.
    """

    @property
    def revisions(self) -> Sequence[Revision]:
        """The revisions it supports, oldest first."""
        ...

    @property
    def max_message(self) -> int:
        """Bytes of the largest message its sessions accept."""
        ...

    @property
    def budget(self) -> Budget:
        """Counts the memory used for all peers."""
        ...

    def open_for_one(self, holding: MemoryAccount | None = None, via: object = None) -> PushedSession:
        """Return a session for one request of 2026-07-28 or later; a request without its envelope counts as such."""
        ...

    def open(self, sink: Sink, holding: MemoryAccount | None = None, via: object = None) -> PushedSession:
        """Return a new session. `sink` sends the messages that belong to no request, and is closed with it."""
        ...

    async def serve(self, channel: MessageChannel, via: object = None) -> None:
        """Serve one connection until the peer leaves, then close the channel."""

    def open_connected(
        self, writer: MessageWriter, holding: MemoryAccount | None = None, via: object = None
    ) -> ConnectedSession:
        """Return a session for one connection, into which its transport pushes what it reads; `writer` writes."""
        ...

    def keeper(self) -> SessionKeeper:
        """Return what writes sessions down for other processes."""
        ...

    async def drain(self, grace: float, via: object = None) -> None:
        """Refuse new requests from `via`, let running ones answer for `grace` seconds, then cancel them."""
