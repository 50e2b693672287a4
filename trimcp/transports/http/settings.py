"""Settings for serving over HTTP: paths, access, and every bound and deadline, with its reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import attrs

from trimcp.store.events import EventStore
from trimcp.support.bounds import checked
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse, SecondProtocol
from trimcp.transports.http.peers.access import AccessLog
from trimcp.transports.http.peers.identity import Authenticate, TokenAuth
from trimcp.transports.http.peers.origins import Origins
from trimcp.transports.trace import Write
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, ParseLimits

if TYPE_CHECKING:
    from trimcp.store.shared import SharedStore

ReplyForm: TypeAlias = Literal["auto", "json", "sse"]
"""The format of a POST's response: JSON unless other messages come before the answer, always JSON, or always events."""

Route: TypeAlias = Callable[[Head], Awaitable[Admitted]]
"""Answers requests to a path of the application's own, after the checks of Host, Origin and identity."""

Dialect: TypeAlias = Callable[[Head, bytes], HttpResponse | None]
"""Checks the body of a POST to the endpoint: returns the response if the body is of its protocol, else None."""


class SecondProtocolFactory(Protocol):
    """Another protocol of a server, such as `trimcp.agent_tools.AgentTools`."""

    @property
    def authenticate(self) -> Authenticate | None:
        """Identifies callers on a port that has no check of its own."""
        ...

    def over_http(self, running: object, shared: Any, /) -> SecondProtocol:
        """Return what serves it on one port of a run of the server; `shared` is what the port's requests share.

        Raises LocalError if it belongs to another server.
        """
        ...


@attrs.frozen(kw_only=True, field_transformer=checked(zero=("retry", "silence", "max_replays", "replay_time")))
class HttpSettings:
    """All settings of an application. Sizes are bytes, times are seconds.

    It has more than 20 fields because each is a setting.

    Attributes:
        path: where Streamable HTTP is served; None disables it.
        sse_path, messages_path: where HTTP+SSE of 2024-11-05 is served; None for the first disables it.
        websocket_path: where WebSocket is served; None disables it.
        health: whether `/healthz` and `/readyz` are answered.
        routes: the application's own routes, by path.
        dialects: other protocols on the endpoint.
        agent_tools: serves agent tools beside MCP: `trimcp.agent_tools.AgentTools(server)`.
        origins: the pages and host names that may reach it.
        authenticate: identifies the caller; None admits everyone.
        auth: checks access tokens, in place of `authenticate`: `trimcp.auth.ResourceServer(...)`.
        reply: the format of responses to POSTs.
        root: the prefix of our paths that a proxy cuts off, such as "/tools": HTTP+SSE tells clients an address.
        stateless: serve legacy clients without sessions: any worker process can answer, but the server can send no
            requests and no subscriptions.
        events: keeps events for clients that reconnect; None makes a store in memory. `resumable` False keeps none.
        store: where processes share sessions, so that any of them answers any request: `trimcp.SqliteStore(path)`,
            `trimcp.RedisStore(url)`. None keeps sessions in this process.
        retry: milliseconds after which a client should reconnect for the rest of a stream; it is told where the server
            closes one before its end.
        access_log: where to log every response, or None.
        trace: called with a line for every message, secrets masked; None for no trace.
        limits: bounds for one message besides its size, which is the server's `Limits.max_message`.
        max_exchanges: POSTs in progress at once, over all clients; more are refused (503).
        max_sessions: legacy sessions at once, and as many streams of HTTP+SSE. At the bound, a new one replaces one
            that was never used, or one of a client that has far more than the new one's; else it is refused (503). An
            idle one uses about 5 KiB.
        session_idle: after which a session is ended if no handler runs and no stream is read.
        stream_buffer: that may wait for one reader before handlers wait: a slow reader costs little more.
        silence: after which a response without an answer becomes a stream. Some clients count a request as under way
            until its head comes, and have few under way; and only a stream can be resumed if the connection breaks.
        keep_alive: between comments on an otherwise silent stream (HTML, "Server-sent events": 15).
        max_replays: ended streams of one session that can still be resumed; the oldest are dropped.
        replay_time: for which a stream that was read to its end can still be resumed.
    """

    path: str | None = "/mcp"
    sse_path: str | None = "/sse"
    messages_path: str = "/messages"
    websocket_path: str | None = "/ws"
    health: bool = True
    routes: Mapping[str, Route] = attrs.field(factory=dict)
    dialects: Sequence[Dialect] = ()
    agent_tools: SecondProtocolFactory | None = None
    origins: Origins = attrs.field(factory=Origins)
    authenticate: Authenticate | None = None
    auth: TokenAuth | None = None
    reply: ReplyForm = attrs.field(default="auto", validator=attrs.validators.in_(("auto", "json", "sse")))
    root: str = ""
    stateless: bool = False
    events: EventStore | None = None
    store: SharedStore | None = None
    resumable: bool = True
    retry: int = 1_000
    access_log: AccessLog | None = None
    trace: Write | None = None
    limits: ParseLimits = DEFAULT_LIMITS
    max_exchanges: int = 10_000
    max_sessions: int = 10_000
    session_idle: float = 1_800.0
    stream_buffer: int = 256 * 1024
    silence: float = 0.1
    keep_alive: float = 15.0
    max_replays: int = 1_000
    replay_time: float = 60.0


@attrs.frozen(field_transformer=checked(zero=("max_pipelined", "linger_timeout", "linger_bytes", "low_water")))
class HttpLimits:
    """Bounds of each client's connections and requests over HTTP. Sizes are bytes, times are seconds.

    Attributes:
        max_connections: connections at once. More wait until one ends, or replace one of an address that has far more.
            An idle one uses about 10 KiB, so this many use 100 MiB.
        backlog: connections that may wait then, and that the system queues before it refuses more. The system may cut
            this to its own maximum.
        max_request_line: of a request line. Longer ones are refused (414).
        max_head: of a whole request head, as most servers allow (431). Tokens in headers may be large.
        max_headers: lines in a head (431).
        max_pipelined: of requests that wait behind the current one; then reading stops until it is answered.
        max_streams: requests in progress at once on one connection of HTTP/2. Over all connections there may be as many
            as `max_connections`, of one address or principal half as many.
        head_timeout: from a head's first byte (of the first head: from accepting) to its end. No honest client needs
            it; it bounds those that send a byte from time to time.
        body_timeout: from a head to the end of its body, and from a WebSocket message's first byte to its last.
        body_rate: for each so many bytes that arrive, a body or such a message gets one second more: one of 4 MiB at
            most 46 seconds.
        idle_timeout: for which a connection without a request is kept. It is longer than the usual minute of clients
            and proxies, so that they close first: a server that closes first may lose a request being sent.
        stall_timeout: for which a client that does not read its waiting data keeps its connection.
        linger_timeout, linger_bytes: how long, and how much, to read from a client after our last response, so that a
            reset does not destroy the response in transit.
        low_water: of data waiting for the client, at which senders may go on.
    """

    max_connections: int = 10_000
    backlog: int = 1_024
    max_request_line: int = 16 * 1024
    max_head: int = 64 * 1024
    max_headers: int = 100
    max_pipelined: int = 64 * 1024
    max_streams: int = 100
    head_timeout: float = 10.0
    body_timeout: float = 30.0
    body_rate: float = 256 * 1024
    idle_timeout: float = 75.0
    stall_timeout: float = 60.0
    linger_timeout: float = 1.0
    linger_bytes: int = 1024 * 1024
    low_water: int = 64 * 1024
