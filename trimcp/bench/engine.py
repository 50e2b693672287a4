"""A measurement from its beginning to its end: who is met, who sends, what is counted when."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import trio

from trimcp.bench.plan import Plan
from trimcp.bench.report import Report, Snapshot
from trimcp.transports.child import StdioServer

if TYPE_CHECKING:
    from trimcp.transports.http.client import HttpServer
    from trimcp.transports.websocket_client import WebSocketServer

__all__ = ["Target", "measure"]

Target: TypeAlias = "StdioServer | HttpServer | WebSocketServer"


async def measure(
    target: Target,
    plan: Plan,
    *,
    on_tick: Callable[[Snapshot], object] | None = None,
    stop: trio.Event | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> Report:
    """Put load on a server and return what was found.

    Args:
        target: the server.
        plan: the load.
        on_tick: called twice a second with how things stand. It must return at once, and its time counts as ours.
        stop: set it to end the measurement before its time; the report tells what was found until then.
        ssl_context: whom to trust at an https or wss URL; None for whom this system trusts.

    Cancelling it ends every connection and child process, as `target` would, and there is no report.

    Raises:
        McpError: the server cannot be reached, or does not have what the plan calls; the text says what to do. Once
            calls are sent, failures are counted instead.
    """
    raise NotImplementedError
