"""What the connections of one listener share, and how another protocol takes a connection over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs
import trio

from trimcp.support.deadlines import Deadlines
from trimcp.support.shares import OwnerCounts
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.interfaces import Application, Head, Upgrade
from trimcp.transports.http.settings import HttpLimits

ServeWebSocket: TypeAlias = Callable[[bytes, Wire, H1Writer, Deadlines, Head, Upgrade], Awaitable[bool]]
"""Serves a WebSocket, after the request's head, until the peer leaves. Returns whether there was one.

Its arguments: bytes that arrived after the head, the connection's bytes, its writer, the clock, the head, the upgrade.
"""


@attrs.define(eq=False)
class Hosting:
    """Shared by the connections of a listener."""

    application: Application
    limits: HttpLimits
    nursery: trio.Nursery  # runs connections, and the tasks that write what a socket did not accept at once
    serve_websocket: ServeWebSocket | None = None  # None refuses WebSockets
    ending: bool = False  # whether each response of HTTP/1.1 is the last one of its connection, and says so
    draining: bool = False  # whether connections without a request end, too
    stopping: bool = False  # whether connections of HTTP/2 are told so while requests are under way
    streams: OwnerCounts = attrs.field(init=False)  # those of HTTP/2, over all connections

    def __attrs_post_init__(self) -> None:
        self.streams = OwnerCounts(self.limits.max_connections, "streams")
