"""Serving an ASGI application with Hypercorn on Trio: HTTP/1.1, TLS, WebSocket.

Hypercorn implements the protocols. This module has its settings, installs its guards (`guards`), and bounds its
shutdown. Several workers are separate processes that share a socket: `bind="fd://3"`.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import hypercorn.logging
import hypercorn.trio
import trio

from trimcp.channel import SERVER_MAX_MESSAGE, require_trio
from trimcp.errors import LocalError
from trimcp.support.nurseries import split_cancelled, unwrap_single
from trimcp.transports.http.asgi.request import AsgiEvent, Receive, Scope, Send
from trimcp.transports.http.settings import HttpLimits

if TYPE_CHECKING:
    from trimcp.transports.http.asgi.guards import GuardedConfig

_log = logging.getLogger("trimcp.http")

AsgiApplication: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

SERVED: Final = "hypercorn>=0.17,<0.19"
"""The versions of Hypercorn that the guards support, as pip's requirement. Others are refused."""

_FROM, _BELOW = (tuple(int(part) for part in bound) for bound in re.findall(r"=?(\d+)\.(\d+)", SERVED))

_FOREVER = 1 << 62


def check_version() -> None:
    """Check that the guards, which replace private parts, support the installed version of Hypercorn.

    Raises LocalError: they do not.
    """
    found = version("hypercorn")
    parts = re.match(r"(\d+)\.(\d+)", found)
    if parts is None or not _FROM <= (int(parts[1]), int(parts[2])) < _BELOW:
        raise LocalError(
            f"Hypercorn {found} is not a version whose faults are known here, and without guards one client can end "
            f"the server: install {SERVED!r}, or serve with our own listener"
        )


async def serve_hypercorn(
    app: AsgiApplication,
    *,
    bind: str | Sequence[str] = "127.0.0.1:8000",
    certfile: str | os.PathLike[str] | None = None,
    keyfile: str | os.PathLike[str] | None = None,
    keyfile_password: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    limits: HttpLimits | None = None,
    grace: float = 5.0,
    shutdown_trigger: Callable[[], Awaitable[object]] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve an ASGI application until `shutdown_trigger` returns, or it fails.

    Then no more connections are accepted, and open ones get `grace` seconds; idle ones are closed at once. Cancelling
    closes every connection at once.

    Args:
        app: an `AsgiApp`, or an application in which one is mounted.
        bind: where to listen: "host:port" (port 0: any that is free), "[::1]:8000", "unix:/path", "fd://3"; or several.
        certfile: certificate chain in PEM; enables TLS for all connections.
        keyfile: its key in PEM, if that is a separate file.
        keyfile_password: of the key, if it has one.
        ssl_context: for TLS with other settings, instead of the files. This function sets its protocols (ALPN), so use
            it for nothing else.
        limits: of connections and heads. `head_timeout` is also how long a connection may be idle, because Hypercorn
            has one timer for both; `max_streams` is not used. Connections above `max_connections` are closed
            at once.
        grace: seconds.
        shutdown_trigger: returns when to stop; None: run until cancelled.
        task_status: started with the addresses once connections are accepted: "http://127.0.0.1:40123",
            "unix:/run/mcp.sock".

    Raises:
        LocalError: the guards do not support this version of Hypercorn; the text says which they do.
        OSError: an address is not available, or a file cannot be read.
        hypercorn.utils.LifespanFailureError: the application failed to start or stop; the text says why.
        Exception: the application failed with it while it was running.
    """
    require_trio()
    check_version()
    config = _configure(HttpLimits() if limits is None else limits, ssl_context)
    config.bind = [bind] if isinstance(bind, str) else list(bind)
    config.certfile = None if certfile is None else os.fspath(certfile)
    config.keyfile = config.certfile if keyfile is None else os.fspath(keyfile)  # without one, Hypercorn drops TLS
    config.keyfile_password = keyfile_password
    config.alpn_protocols = ["http/1.1"]  # HTTP/2 is our own listener's
    config.graceful_timeout = grace
    watched = _WatchedApplication(app)
    failure: BaseException | None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end, config, watched.ending, grace)
            if shutdown_trigger is not None:
                nursery.start_soon(_trigger, shutdown_trigger, watched.ending)
            await hypercorn.trio.serve(
                watched,  # type: ignore[arg-type]  # an object with `__call__`, not a function
                config,
                shutdown_trigger=watched.ending.wait,
                mode="asgi",
                task_status=_Addresses(task_status),
            )
            nursery.cancel_scope.cancel(reason="the server has ended")
    except BaseExceptionGroup as group:
        failure = unwrap_single(split_cancelled(group)[0] or group)
    else:
        failure = watched.failure
    if failure is not None:
        try:
            raise failure  # raised here to keep its own context: why the application could not start
        finally:
            del failure


def _configure(limits: HttpLimits, ssl_context: ssl.SSLContext | None = None) -> GuardedConfig:
    from trimcp.transports.http.asgi.guard_protocols import install  # may not load with another version of Hypercorn
    from trimcp.transports.http.asgi.guards import GuardedConfig

    install()
    config = GuardedConfig(limits, ssl_context)
    config.backlog = limits.backlog
    config.h11_max_incomplete_size = limits.max_head
    # One timer for the head of a request and for the time between two.
    config.keep_alive_timeout = config.ssl_handshake_timeout = limits.head_timeout
    config.keep_alive_max_requests = _FOREVER
    config.websocket_max_message_size = SERVER_MAX_MESSAGE  # our own applications set theirs
    config.max_app_queue_size = 4  # whole messages, for WebSocket
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = _log
    config.logger_class = _Logger
    return config


async def _trigger(trigger: Callable[[], Awaitable[object]], ending: trio.Event) -> None:
    await trigger()
    ending.set()


async def _end(config: GuardedConfig, ending: trio.Event, grace: float) -> None:
    """Close the remaining connections after the grace, or at once if cancelled: Hypercorn shields its writes."""
    try:
        await ending.wait()
        await trio.sleep(grace)
    finally:
        config.cut()


@attrs.define(eq=False)
class _WatchedApplication:
    """An application whose failure ends its server; Hypercorn would go on without it."""

    app: AsgiApplication
    ending: trio.Event = attrs.field(init=False, factory=trio.Event)  # set when the server has to end
    failure: Exception | None = attrs.field(init=False, default=None)  # the failure that ended it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self.app(scope, receive, send)
        running = False

        async def noted(event: AsgiEvent) -> None:
            nonlocal running
            await send(event)
            running = event["type"] == "lifespan.startup.complete"

        async def heard() -> AsgiEvent:
            nonlocal running
            event = await receive()
            running = running and event["type"] != "lifespan.shutdown"
            return event

        try:
            await self.app(scope, heard, noted)
        except Exception as error:  # while it runs: kept, and raised once the server has stopped
            if not running:
                raise
            self.failure = error
            self.ending.set()
            await receive()  # lifespan.shutdown
            await send({"type": "lifespan.shutdown.complete"})
        return None


@attrs.frozen
class _Addresses:
    """Reports the addresses in the format of our own listener."""

    _task_status: trio.TaskStatus[list[str]]

    def started(self, value: list[str] | None = None) -> None:
        found = [text.partition("://")[2] if "://unix:" in text else text for text in value or ()]
        self._task_status.started(found)


class _Logger(hypercorn.logging.Logger):
    """Does not log the addresses, which `task_status` reports."""

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        await self.debug(message, *args, **kwargs)
