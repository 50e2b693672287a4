"""Which way of putting load on a server suits its target."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import trio

from trimcp.bench.discovery import Target
from trimcp.bench.load import Load
from trimcp.bench.mux import run_session
from trimcp.bench.report import WireName
from trimcp.transports.stdio.child import StdioServer

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.websocket.client import WebSocketServer

__all__ = ["SessionRunner", "session_runner"]


class SessionRunner(Protocol):
    """What runs one session to the end of the measurement, whatever happens to it."""

    def __call__(self, load: Load, *, task_status: trio.TaskStatus[None]) -> Awaitable[None]:
        """Run it; it counts as started once it can be used, or the first attempt to open it has failed."""
        ...


def session_runner(target: Target, transport: WireName) -> SessionRunner:
    """Return what runs sessions with this server. What only some transports need is imported here."""
    if isinstance(target, StdioServer):
        from trimcp.bench.stdio import stdio_opener

        return partial(run_session, opener=stdio_opener(target))
    if transport == "http":
        from trimcp.bench.http import run_http_session

        return partial(run_http_session, server=cast("HttpServer", target))
    if transport == "sse":
        from trimcp.bench.events import events_opener

        return partial(run_session, opener=events_opener(cast("HttpServer", target)))
    from trimcp.bench.websocket import websocket_opener

    return partial(run_session, opener=websocket_opener(cast("WebSocketServer", target)))
