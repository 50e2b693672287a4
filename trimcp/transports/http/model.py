"""What the HTTP face and the software that hosts it say to each other.

A host parses requests and writes replies: our own listener (`h1connection`), or an ASGI server (`asgi`). The face knows
routes, headers, revisions and streams. For each request

    found = await face.admit(head)          the head alone, before anything of the body was read
        Response   send it, and be done with the request without reading its body
        Upgrade    make it a WebSocket and run `found.serve(channel)`
        Handler    read at most `found.max_body` bytes of body, then `found.start(body, reply)`

and from then on the handler answers through `reply`, which never blocks. Nobody here knows a parser, ASGI or a session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeAlias

import attrs

from trimcp.channel import MessageChannel

__all__ = ["Admitted", "Face", "Handler", "Head", "Reply", "Response", "Upgrade"]


# These two are mutable only because making a frozen value takes attrs three times as long; nobody changes them.
@attrs.define(eq=False)
class Head:
    """The head of one request. What it contains is a stranger's: never log it unescaped.

    Attributes:
        method: as sent ("POST").
        path: percent-decoded, without query, below the prefix under which the face is mounted.
        query: what stands behind "?", as sent, or "".
        headers: values by lower-case name, without white space around them; a header that came more than once has its
            values joined with ", ". Decoded as latin-1.
        peer: the other side's address, for logs ("127.0.0.1:40312", "unix").
        loopback: whether it came in over a loopback address or a Unix socket.
        secure: whether it came in over TLS.
        root: the prefix under which the face is mounted, or "".
        websocket: whether it asks for an upgrade to WebSocket.
    """

    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)
    peer: str = ""
    loopback: bool = True
    secure: bool = False
    root: str = ""
    websocket: bool = False


@attrs.define(eq=False)
class Response:
    """A status, headers and a body. The host adds Content-Length, Date and what framing needs; HEAD sends no body."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


class Reply(Protocol):
    """The road back of one request, as its host offers it. Nothing here blocks, and nothing raises if the client left.

    Either `send` once, or `start`, any number of `write`, and `finish`.
    """

    def send(self, response: Response) -> None:
        """Send a whole response."""

    def start(self, response: Response) -> None:
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
    """What the face does with one request. Called by the host, in this order; each returns at once."""

    @property
    def max_body(self) -> int:
        """Bytes of the largest body it takes; of a larger one the host need not read more than that."""
        ...

    def start(self, body: bytes, reply: Reply) -> None:
        """Take the whole body and begin to answer."""

    def too_large(self, beginning: bytes) -> Response:
        """Return the answer to a request whose body is too large, of which this much was read. Nothing follows."""
        ...

    def disconnected(self, slow: str | None = None) -> None:
        """Note that the client left before its response was finished. Called at most once, never before `start`.

        `slow` is the reason if it was the host that dropped the client, because it took nothing for too long.
        """

    def writable(self) -> None:
        """Note that the operating system has taken what waited: what was held back may be written now."""


@attrs.frozen(eq=False)
class Upgrade:
    """What to do with a request for a WebSocket.

    Attributes:
        serve: runs one connection until the peer leaves; closes the channel. Cancelling it ends the connection.
        subprotocol: the one to agree to, or None if the client offered none that is ours.
        max_message: bytes of the largest message to take.
        principal: who asks; put on every `Incoming`.
        headers: the request's, by lower-case name; put on every `Incoming`.
    """

    serve: Callable[[MessageChannel], Awaitable[None]]
    subprotocol: str | None
    max_message: int
    principal: str | None = None
    headers: Mapping[str, str] | None = None


Admitted: TypeAlias = Response | Handler | Upgrade


class Face(Protocol):
    """What a host serves.

    Attributes:
        connections: open now; our own listener counts them.
    """

    connections: int

    async def admit(self, head: Head) -> Admitted:
        """Judge a request by its head. Quick, unless the application's identity check takes its time."""
        ...

    def done(self, head: Head, status: int, sent: int) -> None:
        """Note for the access log that a response has ended: its status (0 if none) and the bytes of its body."""
