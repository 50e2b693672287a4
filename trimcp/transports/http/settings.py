"""What can be set about serving over HTTP: paths, who may come, and every bound and deadline, with its reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs

from trimcp.bounds import checked
from trimcp.transports.http.access import AccessLog
from trimcp.transports.http.events import EventStore
from trimcp.transports.http.identity import Authenticate, TokenAuth
from trimcp.transports.http.origins import Origins
from trimcp.transports.http.seams import Admitted, Head, HttpResponse
from trimcp.transports.trace import Write
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, ParseLimits

ReplyForm: TypeAlias = Literal["auto", "json", "sse"]
"""How a POST is answered: as JSON until there is something to stream, always as JSON, or always as events."""

Route: TypeAlias = Callable[[Head], Awaitable[Admitted]]
"""Answers requests to a path of the application's own, after the checks of Host, Origin and identity."""

Dialect: TypeAlias = Callable[[Head, bytes], HttpResponse | None]
"""Looks at the body of a POST to the endpoint, and answers it if it is of a protocol it knows; else returns None."""


@attrs.frozen(kw_only=True, field_transformer=checked(zero=("retry", "silence", "max_replays", "replay_time")))
class HttpSettings:
    """All of a face that can be set. Sizes are bytes, times are seconds.

    Attributes:
        path: where Streamable HTTP is served; None leaves it out.
        sse_path, messages_path: where HTTP+SSE of 2024-11-05 is; None for the first leaves it out.
        websocket_path: where WebSocket is; None leaves it out.
        health: whether `/healthz` and `/readyz` are answered.
        routes: what else is served, by path.
        dialects: other protocols on the endpoint.
        origins: which pages and host names may reach it.
        authenticate: who asks; None lets everybody in.
        auth: takes access tokens, in place of `authenticate`: `trimcp.auth.ResourceServer(...)`.
        reply: how POSTs are answered.
        stateless: serve legacy clients without sessions: any worker can answer, nothing can be asked or watched.
        events: keeps events for clients that come back; None makes one in memory. `resumable` False keeps none.
        retry: milliseconds after which a client should come back for the rest of a stream.
        access_log: where to note every response, or None.
        trace: called with a line for every message, secrets masked; None for no trace.
        limits: what one message may cost beside its size, which is the server's `Limits.max_message`.
        max_exchanges: POSTs under way at once, over all clients; more are refused (503).
        max_sessions: legacy sessions at once, and as many streams of HTTP+SSE. Then one that was never used makes room,
            or one of a client that holds far more than the newcomer; else a new one is refused (503). One that is idle
            keeps about 5 KiB.
        session_idle: after which a session is ended in which nothing is under way and that nobody reads.
        stream_buffer: that may wait for one reader before handlers wait: a slow reader costs little more.
        silence: after which a reply that is not there becomes a stream: proxies and clients give up on silence.
        keep_alive: between comments on a stream on which nothing else happens (HTML, "Server-sent events": 15).
        max_replays: streams of one session that have ended and can still be asked for again; the oldest go.
        replay_time: for which a stream that was read to its end can still be asked for again.
    """

    path: str | None = "/mcp"
    sse_path: str | None = "/sse"
    messages_path: str = "/messages"
    websocket_path: str | None = "/ws"
    health: bool = True
    routes: Mapping[str, Route] = attrs.field(factory=dict)
    dialects: Sequence[Dialect] = ()
    origins: Origins = attrs.field(factory=Origins)
    authenticate: Authenticate | None = None
    auth: TokenAuth | None = None
    reply: ReplyForm = attrs.field(default="auto", validator=attrs.validators.in_(("auto", "json", "sse")))
    stateless: bool = False
    events: EventStore | None = None
    resumable: bool = True
    retry: int = 1_000
    access_log: AccessLog | None = None
    trace: Write | None = None
    limits: ParseLimits = DEFAULT_LIMITS
    max_exchanges: int = 10_000
    max_sessions: int = 10_000
    session_idle: float = 1_800.0
    stream_buffer: int = 256 * 1024
    silence: float = 2.0
    keep_alive: float = 15.0
    max_replays: int = 1_000
    replay_time: float = 60.0


@attrs.frozen(field_transformer=checked(zero=("max_pipelined", "linger_timeout", "linger_bytes", "low_water")))
class HttpLimits:
    """How much a client may cost over HTTP, and how long it may take. Sizes are bytes, times are seconds.

    Attributes:
        max_connections: connections at once; more wait until one ends, or one of an address that holds far more gives
            way to them. An idle one costs about 10 KiB, so this many cost 100 MiB.
        backlog: connections that wait then, and that the system queues for us before it refuses, which cuts this to its
            own maximum.
        max_request_line: of a request line. Longer ones (414) are no addresses of ours.
        max_head: of a whole request head, as most servers allow (431). Tokens in headers may be large.
        max_headers: lines in a head (431).
        max_pipelined: of requests that wait behind the one under way; then reading stops until it is answered.
        head_timeout: from a head's first byte (of the first one: from accepting) to its end. No honest client needs
            it; it bounds those that send a byte now and then.
        body_timeout: from a head to the end of its body, and from a WebSocket message's first byte to its last.
        body_rate: bytes of a body or of such a message for which it has a second more. So a large one may take its
            time, and one of 4 MiB at most 46 seconds.
        idle_timeout: for which a connection without a request is kept. Longer than the minute for which clients and
            proxies usually keep theirs, so that it is they who close: who closes first may cross a request.
        stall_timeout: for which a client that reads nothing of what waits for it keeps its connection.
        linger_timeout, linger_bytes: how long, and how much of it, we still read from a client after our last
            response, so that a reset does not destroy that on its way.
        low_water: of what waits for the client when senders may go on.
    """

    max_connections: int = 10_000
    backlog: int = 1_024
    max_request_line: int = 16 * 1024
    max_head: int = 64 * 1024
    max_headers: int = 100
    max_pipelined: int = 64 * 1024
    head_timeout: float = 10.0
    body_timeout: float = 30.0
    body_rate: float = 256 * 1024
    idle_timeout: float = 75.0
    stall_timeout: float = 60.0
    linger_timeout: float = 1.0
    linger_bytes: int = 1024 * 1024
    low_water: int = 64 * 1024
