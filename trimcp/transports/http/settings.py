"""What can be set about an HTTP face: its paths, who may come, and every bound of sessions and streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import attrs

from trimcp.transports.http.access import AccessLog
from trimcp.transports.http.events import EventStore
from trimcp.transports.http.identity import Authenticate
from trimcp.transports.http.model import Admitted, Head, Response
from trimcp.transports.http.origins import Origins
from trimcp.transports.trace import Write
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, Limits

__all__ = ["Dialect", "ReplyForm", "Route", "Settings"]

ReplyForm: TypeAlias = Literal["auto", "json", "sse"]
"""How a POST is answered: as JSON until there is something to stream, always as JSON, or always as events."""

Route: TypeAlias = Callable[[Head], Awaitable[Admitted]]
"""Answers requests to a path of the application's own, after the checks of Host, Origin and identity."""

Dialect: TypeAlias = Callable[[Head, bytes], Response | None]
"""Looks at the body of a POST to the endpoint, and answers it if it is of a protocol it knows; else returns None."""


@attrs.frozen(kw_only=True)
class Settings:
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
        reply: how POSTs are answered.
        stateless: serve legacy clients without sessions: any worker can answer, nothing can be asked or watched.
        events: keeps events for clients that come back; None makes one in memory. `resumable` False keeps none.
        retry: milliseconds after which a client should come back for the rest of a stream.
        access_log: where to note every response, or None.
        trace: called with a line for every message, secrets masked; None for no trace.
        max_message: of the largest body, as over every transport.
        limits: what else one message may cost.
        max_exchanges: POSTs under way at once, over all clients; more are refused (503).
        max_sessions: legacy sessions at once; more are refused (503). One that is idle keeps about 5 KiB.
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
    reply: ReplyForm = attrs.field(default="auto", validator=attrs.validators.in_(("auto", "json", "sse")))
    stateless: bool = False
    events: EventStore | None = None
    resumable: bool = True
    retry: int = 1_000
    access_log: AccessLog | None = None
    trace: Write | None = None
    max_message: int = 4 * 1024 * 1024
    limits: Limits = DEFAULT_LIMITS
    max_exchanges: int = 10_000
    max_sessions: int = 10_000
    session_idle: float = 1_800.0
    stream_buffer: int = 256 * 1024
    silence: float = 2.0
    keep_alive: float = 15.0
    max_replays: int = 1_000
    replay_time: float = 60.0
