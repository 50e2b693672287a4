"""What the HTTP face, the software that hosts it, and what it serves expect of each other.

A host parses requests and writes replies: our own listener (`h1.connection`), or an ASGI server (`asgi.app`). The face
knows routes, headers, revisions and streams. For each request

    found = await face.admit(head)          the head alone, before anything of the body was read
        HttpResponse   send it; the body need not be read
        Upgrade        make it a WebSocket and run `found.serve(channel)`
        Handler        read at most `found.max_body` bytes of body, then `found.start(body, reply)`

and from then on the handler answers through `reply`, which never blocks. What is served is a `Service`: a server in its
run (`trimcp.server.running.Running`) is one.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

import attrs

from trimcp.budget import Budget, Holding
from trimcp.channel import Incoming, LaneCounts, MessageChannel, Sink
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.transports.http.deadlines import Deadlines
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import JSON, RequestId, encode_error
from trimcp.wire.revisions import Revision

JSON_HEADERS: Final = (("Content-Type", "application/json"),)
_LATER: Final = (("Retry-After", "1"),)


# Head and HttpResponse are mutable only because making a frozen value takes attrs three times as long.
@attrs.define(eq=False)
class Head:
    """The head of one request. The client wrote what it contains: never log it unescaped.

    Attributes:
        method: as sent ("POST").
        path: percent-decoded, without query, below the prefix under which the face is mounted.
        query: what stands behind "?", as sent, or "".
        headers: values by lower-case name, without white space around them; a header that came more than once has its
            values joined with ", ". Decoded as latin-1.
        peer: the other side's address, for logs ("127.0.0.1:40312", "unix").
        loopback: whether it came in over a loopback address or a Unix socket.
        secure: whether it came in over TLS.
        certificate: the digest of the certificate that the client showed, as tokens name it (RFC 8705), or None.
        root: the prefix under which the face is mounted, or "".
        websocket: whether it asks for an upgrade to WebSocket.
        holding: counts the memory that its connection makes us keep; None counts nothing.
        principal: who asks, once the face's identity check has said so; None for anybody.
        began: when the face was asked, on Trio's clock, if it notes that.
        reply_headers: of every response to it; set by the face.
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
    holding: Holding | None = None
    principal: Principal | None = None
    began: float | None = None
    reply_headers: tuple[tuple[str, str], ...] = ()

    @property
    def until(self) -> float:
        """Seconds since 1970 until which whoever asks is let in, for streams that outlive a request."""
        ends = None if self.principal is None else self.principal.expires_at
        return math.inf if ends is None else ends


@attrs.define(eq=False)
class HttpResponse:
    """A status, headers and a body. The host adds Content-Length, Date and what framing needs; HEAD sends no body."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def refusal(
    status: int,
    text: str,
    *headers: tuple[str, str],
    id: RequestId | None = None,
    code: int = INVALID_REQUEST,
    data: JSON = None,
    null_id: bool = False,
) -> HttpResponse:
    """Return a response that says in JSON-RPC what is wrong; with 503, that the client may try again in a second.

    The error has this id (None where it was not read), code and data; `headers` come beside the content's type.
    """
    again = _LATER if status == 503 else ()
    body = encode_error(id, code, text, data, null_id=null_id)
    return HttpResponse(status, (*JSON_HEADERS, *headers, *again), body)


def stalled(peer: str, seconds: float, unread: int) -> str:
    """Report a client that was dropped because it took nothing for so long, and return the reason in words."""
    security_event("peer_stalled", peer=peer, seconds=seconds, unread_bytes=unread)
    return f"the peer read nothing for {seconds:g} seconds"


class HttpReply(Protocol):
    """Sends the response to one request; made by the host. Nothing here blocks, or raises if the client left.

    Either `send` once, or `start`, any number of `write`, and `finish`.
    """

    def send(self, response: HttpResponse) -> None:
        """Send a whole response."""

    def start(self, response: HttpResponse) -> None:
        """Send the head of a response of unknown length, with the beginning of its body in the same write."""

    def write(self, data: bytes) -> None:
        """Send more of the body, at once if the socket takes it."""

    def finish(self, data: bytes = b"") -> None:
        """Send the rest of the body and end the response."""

    def abort(self) -> None:
        """Cut the connection, so that the client can tell an unfinished response from a finished one."""

    @property
    def waiting(self) -> int:
        """Bytes given to this reply that the operating system has not taken yet."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the client has left, or the response is finished: what is written now goes nowhere."""
        ...

    async def room(self) -> None:
        """Wait until so few bytes wait that more are welcome, or the client is gone. Cancelling it loses nothing."""


class Handler(Protocol):
    """Answers one request. Called by the host, in this order; each method returns at once.

    The defaults suit a request whose body does not matter and which is answered at once.
    """

    __slots__ = ()

    @property
    def max_body(self) -> int:
        """Bytes of the largest body it takes; of a larger one the host need not read more than that."""
        return 0

    @property
    def at_rest(self) -> bool:
        """Whether no handler of the application is at work for it; see `Holder`."""
        return True

    def start(self, body: bytes, reply: HttpReply) -> None:
        """Take the whole body and begin to answer."""

    def too_large(self, beginning: bytes) -> HttpResponse:
        """Return the answer to a request whose body is too large, of which this much was read. Nothing follows."""
        return HttpResponse(413)

    def disconnected(self, slow: str | None = None) -> None:
        """Note that the client left before its response was finished. Called at most once, never before `start`.

        `slow` is the reason if it was the host that dropped the client, because it took nothing for too long.
        """
        return

    def writable(self) -> None:
        """Note that the operating system has taken what waited: what was held back may be written now."""
        return


@attrs.frozen(eq=False)
class Upgrade:
    """What to do with a request for a WebSocket.

    Attributes:
        serve: runs one connection until the peer leaves; closes the channel. Cancelling it ends the connection.
        subprotocol: the one to agree to, or None if the client offered none that is ours.
        max_message: bytes of the largest message to take.
        principal, headers: who asks, and the request's headers by lower-case name; put on every `Incoming`.
    """

    serve: Callable[[MessageChannel], Awaitable[None]]
    subprotocol: str | None
    max_message: int
    principal: Principal | None = None
    headers: Mapping[str, str] | None = None


Admitted: TypeAlias = HttpResponse | Handler | Upgrade


class Face(Protocol):
    """What a host serves.

    Attributes:
        connections: open now; our own listener counts them.
        deadlines: the clock of its host, too; whoever runs the face runs it.
        budget: counts what all peers make us keep.
    """

    connections: int
    deadlines: Deadlines
    budget: Budget

    async def admit(self, head: Head) -> Admitted:
        """Judge a request by its head. Quick, unless the application's identity check takes its time."""
        ...

    def done(self, head: Head, status: int, sent: int) -> None:
        """Note for the access log that a response has ended: its status (0 if none) and the bytes of its body."""


class PushedSession(Protocol):
    """A session into which messages are pushed. It owns no task while nothing is under way."""

    @property
    def revision(self) -> Revision | None:
        """What its handshake agreed on, or None before it."""
        ...

    @property
    def busy(self) -> bool:
        """Whether anything is at work in it. What waits for the peer is not."""
        ...

    @property
    def at_rest(self) -> bool:
        """Whether no handler is at work. What there is waits for the client to read."""
        ...

    @property
    def counts(self) -> LaneCounts:
        """Where messages are counted that gave way because their reader was slow or gone."""
        ...

    def assume(self, revision: Revision) -> None:
        """Skip the handshake: another worker did it, which is not known here."""

    def deliver(self, batch: Sequence[Incoming]) -> None:
        """Take what arrived. Never waits, and never raises because of what a peer sent."""

    def disconnect(self, why: str, *, slow: bool = False) -> None:
        """End it because its peer is gone: handlers are stopped. `slow`: we dropped it because it read nothing."""

    def close(self) -> None:
        """End it, now that nothing is under way any more. Whoever calls it forgets it."""

    def leave(self) -> None:
        """End it once what notifications began is done."""


class Service(Protocol):
    """What is served."""

    @property
    def revisions(self) -> Sequence[Revision]:
        """The revisions it speaks, oldest first."""
        ...

    @property
    def max_message(self) -> int:
        """Bytes of the largest message its sessions take in."""
        ...

    @property
    def budget(self) -> Budget:
        """What counts what all peers make us keep."""
        ...

    def open_brief(self, holding: Holding | None = None, via: object = None) -> PushedSession:
        """Return a session for one request of 2026-07-28 or later, for which it is taken also without its envelope.

        `holding` counts its memory; it is drained with `via`.
        """
        ...

    def open(self, sink: Sink, holding: Holding | None = None, via: object = None) -> PushedSession:
        """Return a new session; `sink` takes what belongs to no request, and is closed with it.

        `holding` counts its memory; it is drained with `via`.
        """
        ...

    async def serve(self, channel: MessageChannel, via: object = None) -> None:
        """Serve one connection until the peer leaves, then close the channel."""

    async def drain(self, grace: float, via: object = None) -> None:
        """Take no more requests by `via`, let those under way answer for `grace` seconds, then cancel them."""
