"""Every bound and deadline of HTTP serving in one record, with the reason for each default beside it."""

from __future__ import annotations

import attrs

__all__ = ["HttpLimits"]


@attrs.frozen
class HttpLimits:
    """How much a client may cost over HTTP, and how long it may take. Sizes are bytes, times are seconds.

    Attributes:
        max_connections: connections at once; more wait in the system's queue until one ends. An idle one costs about
            10 KiB, so this many cost 100 MiB.
        backlog: connections the system queues for us before it refuses; it cuts this to its own maximum.
        max_request_line: of a request line. Longer ones (414) are no addresses of ours.
        max_head: of a whole request head, as most servers allow (431). Tokens in headers may be large.
        max_headers: lines in a head (431).
        max_body: of a request's body (413): one message into a server.
        max_bodies: of all bodies that are being received; beyond it a new one gets 503. Without it each connection
            could make us hold `max_body`.
        max_pipelined: of requests that wait behind the one under way; then reading stops until it is answered.
        head_timeout: from a head's first byte (of the first one: from accepting) to its end. No honest client needs
            it; it bounds those that send a byte now and then.
        body_timeout: from a head to the end of its body.
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
    max_body: int = 4 * 1024 * 1024
    max_bodies: int = 256 * 1024 * 1024
    max_pipelined: int = 64 * 1024
    head_timeout: float = 10.0
    body_timeout: float = 30.0
    idle_timeout: float = 75.0
    stall_timeout: float = 60.0
    linger_timeout: float = 1.0
    linger_bytes: int = 1024 * 1024
    low_water: int = 64 * 1024
