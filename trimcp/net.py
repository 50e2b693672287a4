"""Functions that connect servers and clients to the network: the last call of a program that uses sockets.

Only `trimcp` itself, the command and `trimcp.testing` import it. The HTTP server software is imported at first use.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict
from urllib.parse import quote, urlsplit

import attrs
import trio

from trimcp.channel import run_trio
from trimcp.errors import LocalError
from trimcp.run import Served, run_of, signals
from trimcp.server.running import Running
from trimcp.support.addresses import bracketed
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.peers.identity import TokenAuth
from trimcp.transports.http.settings import HttpLimits, HttpSettings, SecondProtocolFactory
from trimcp.transports.trace import Write, trace_from_environment

if TYPE_CHECKING:
    from pathlib import Path

    import httpx2
    from typing_extensions import Unpack

    from trimcp.server.server import Server
    from trimcp.store.shared import SharedStore
    from trimcp.transports.grpc.client import GrpcServer
    from trimcp.transports.http.asgi.app import AsgiApp
    from trimcp.transports.http.client.exchanges import ClientAuth
    from trimcp.transports.http.client.policy import Mode, Timeouts
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.http.h1.spread import ConnectionShares
    from trimcp.transports.websocket.client import WebSocketServer

Software: TypeAlias = Literal["own", "hypercorn"]
"""The HTTP server to use: trimcp's own, the fastest, with HTTP/1.1, HTTP/2 and gRPC, or Hypercorn with HTTP/1.1."""

_FLUSH: Final = 2.0
"""Seconds allowed for sending the last answers to their clients."""

_QUIET: Final = 0.25
"""Seconds for which clients that go on with another request are still answered, and then told to go elsewhere."""

_QUIET_OF_MANY: Final = 2.0
"""The same where others go on: a balancer keeps more connections than a client, and needs longer to come to each."""


class _Common(TypedDict, total=False):
    """Options of everything that listens; `serve_http` has the defaults."""

    host: str | None
    uds: str | Path | None
    sockets: Sequence[socket.socket]
    auth: TokenAuth | None
    agent_tools: SecondProtocolFactory | None
    store: SharedStore | str | None
    limits: HttpLimits | None
    certfile: str | Path | None
    keyfile: str | Path | None
    ssl_context: ssl.SSLContext | None
    grace: float
    admin: str | Path | Literal[True] | None


class _ServingGrpc(_Common, total=False):
    """Options that `serve_grpc` passes on to `serve_http`."""

    stop: trio.Event | None


class _Serving(_ServingGrpc, total=False):
    """Options that `serve_websocket` passes on to `serve_http`."""

    software: Software
    task_status: trio.TaskStatus[list[str]]


class _RunningGrpc(_Common, total=False):
    """Options that `run_grpc` passes on."""

    port: int
    settings: HttpSettings | None


class _RunningOptions(_RunningGrpc, total=False):
    """Options that `run_http` and `run_websocket` pass on."""

    software: Software


# Serving


@asynccontextmanager
async def http_application(server: Served, settings: HttpSettings | None = None) -> AsyncIterator[HttpApplication]:
    """Run a server while the block runs, and yield its HTTP interface, for HTTP server software of your own.

    A server that already runs (`async with server.running() as running`) keeps running after the block. Leaving the
    block ends every session of this interface; call `HttpApplication.drain` before, to let calls in progress answer.
    """
    settings = HttpSettings() if settings is None else settings
    if settings.trace is None:
        settings = attrs.evolve(settings, trace=trace_from_environment())
    judging = nullcontext() if settings.auth is None else settings.auth.running()
    async with run_of(server) as running, judging:
        application = HttpApplication(running, settings)
        running.hosts.append(application.statistics)
        sharing = application.sharing
        async with open_service_nursery() as nursery:
            nursery.start_soon(application.run)
            try:
                async with nullcontext() if sharing is None else sharing.running(application.end):
                    yield application
            finally:
                running.hosts.remove(application.statistics)
                application.end()
                running.leave(application.shared.sessions)


async def serve_http(
    server: Served,
    *,
    host: str | None = "127.0.0.1",
    port: int = 8000,
    uds: str | Path | None = None,
    sockets: Sequence[socket.socket] = (),
    shares: ConnectionShares | None = None,
    auth: TokenAuth | None = None,
    agent_tools: SecondProtocolFactory | None = None,
    store: SharedStore | str | None = None,
    settings: HttpSettings | None = None,
    limits: HttpLimits | None = None,
    certfile: str | Path | None = None,
    keyfile: str | Path | None = None,
    ssl_context: ssl.SSLContext | None = None,
    software: Software = "own",
    stop: trio.Event | None = None,
    grace: float = 5.0,
    admin: str | Path | Literal[True] | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve over HTTP: Streamable HTTP of both eras, HTTP+SSE and WebSocket, until cancelled or stopped.

    Cancelling this ends every connection at once. It installs no signal handlers; see `run_http`.

    Args:
        server: the server, to be run here; or a running server (`async with server.running() as running`), which may be
            served elsewhere too.
        host: the address to listen on; None for all addresses, where checking Origin and `allowed_hosts` matters more.
        port: 0 for any free port.
        uds: the path of a Unix socket to listen on instead.
        sockets: listening sockets to use instead, as passed by a service manager.
        shares: how many connections other processes have that accept from the same `sockets`, as those of
            `trimcp run --workers` do.
        auth: validates access tokens: `trimcp.auth.ResourceServer(...)`. The same as in `settings`.
        agent_tools: serves agent tools beside MCP: `trimcp.agent_tools.AgentTools(server)`. The same as in `settings`.
        store: where processes share their sessions: "sqlite:///path", "redis://host" or a store. The same as in
            `settings`.
        settings: paths, identity, origins, streams and sessions.
        limits: bounds on what one client may use, and timeouts.
        certfile, keyfile: PEM files, for TLS; one file may contain both.
        ssl_context: for TLS with other options. Hypercorn sets the protocols that it offers (ALPN).
        software: the HTTP server to use.
        stop: once set, no new connections are accepted, calls in progress get `grace` seconds to answer and are then
            cancelled with an error reply, and this returns.
        grace: seconds.
        admin: the path of a Unix socket at which this user looks at the server (`trimcp top`), or True for one in the
            folder that `trimcp ps` looks into; see `trimcp.watch.serve_admin`. None opens none.
        task_status: `await nursery.start(serve_http, ...)` returns the URLs it listens on.

    Raises:
        LocalError: it cannot listen there (Hypercorn: OSError), cannot use the certificate, only one of the two TLS
            files is given, or the installed version of Hypercorn is not supported. The text says which.
    """
    if certfile is None and keyfile is not None:
        raise LocalError("keyfile goes with certfile: without a certificate there is no TLS")
    if certfile is not None and ssl_context is not None:
        raise LocalError("pass either certfile or ssl_context: there is one certificate")
    stop = trio.Event() if stop is None else stop
    settings = _with_parts(settings, auth, agent_tools, store)
    limits = HttpLimits() if limits is None else limits
    from_files: ssl.SSLContext | None = None
    if certfile is not None:
        from trimcp.transports.http.h1.sockets import tls_context

        from_files = tls_context(certfile, keyfile)  # Hypercorn's own error would not name the file
    at_port = None if uds is not None or sockets else port
    async with (
        _observable(server, admin),
        http_application(server, settings) as application,
        open_service_nursery() as nursery,
    ):
        drained = trio.Event()
        if software == "hypercorn":
            from trimcp.transports.http.asgi.app import AsgiApp
            from trimcp.transports.http.asgi.hypercorn import serve_hypercorn

            # Hypercorn cannot stop accepting and keep its connections, so new ones are accepted and refused meanwhile.
            listen: Callable[..., Awaitable[None]] = partial(
                serve_hypercorn,
                AsgiApp(lambda: nullcontext(application), limits=limits),
                bind=_binds(host, at_port, uds, sockets),
                certfile=certfile,
                keyfile=keyfile,
                ssl_context=ssl_context,
                limits=limits,
                grace=_FLUSH,
                shutdown_trigger=drained.wait,
            )
        else:
            from trimcp.transports.http.h1.listener import serve_http1
            from trimcp.transports.websocket import served
            from trimcp.transports.websocket.frames import KeepAlive

            keep_alive = KeepAlive(message_timeout=limits.body_timeout, message_rate=limits.body_rate)
            listen = partial(
                serve_http1,
                application,
                host=host,
                port=at_port,
                path=uds,
                sockets=sockets,
                shares=shares,
                ssl_context=ssl_context or from_files,
                limits=limits,
                serve_websocket=partial(served.serve_websocket, keep_alive),
                stop=stop,
                drain=partial(application.drain, grace),
                quiet=min(_QUIET if settings.store is None else _QUIET_OF_MANY, grace / 4),
                grace=_FLUSH,
            )
        ended = trio.Event()
        urls = await nursery.start(_listen, listen, ended)
        task_status.started([_endpoint(url, settings) for url in urls])
        if software == "hypercorn":
            await stop.wait()
            await application.drain(grace)
            drained.set()
        await ended.wait()


@asynccontextmanager
async def _observable(server: Served, admin: str | Path | Literal[True] | None) -> AsyncIterator[None]:
    """Let this user look at a server while the block runs, if that is wanted."""
    if admin is None:
        yield
        return
    from trimcp.watch.admin import serve_admin  # loaded by nobody else

    observed: Any = server.server if isinstance(server, Running) else server
    async with serve_admin(observed, None if admin is True else admin):
        yield


def _with_parts(
    settings: HttpSettings | None,
    auth: TokenAuth | None,
    agent_tools: SecondProtocolFactory | None,
    store: SharedStore | str | None,
) -> HttpSettings:
    settings = HttpSettings() if settings is None else settings
    if auth is not None:
        settings = attrs.evolve(settings, auth=auth)
    if agent_tools is not None:
        settings = attrs.evolve(settings, agent_tools=agent_tools)
    if store is not None:
        from trimcp.store.naming import store_of

        settings = attrs.evolve(settings, store=store_of(store))
    if settings.store is not None and settings.events is not None:
        raise LocalError("pass either store or events: a store that processes share keeps the events, too")
    if settings.auth is not None and settings.authenticate is not None:
        raise LocalError("pass either auth or authenticate; ResourceServer(also=...) takes a check of your own")
    return settings


async def _listen(
    listen: Callable[..., Awaitable[None]], ended: trio.Event, task_status: trio.TaskStatus[list[str]]
) -> None:
    await listen(task_status=task_status)
    ended.set()


def _binds(host: str | None, port: int | None, uds: str | Path | None, sockets: Sequence[socket.socket]) -> list[str]:
    """Return the addresses to listen on, in Hypercorn's notation."""
    binds = [f"fd://{sock.detach()}" for sock in sockets]
    if uds is not None:
        binds.append(f"unix:{uds}")
    if port is not None:
        places = ["0.0.0.0", "[::]"] if host is None else [bracketed(host)]
        binds += [f"{place}:{port}" for place in places]
    return binds


def _endpoint(url: str, settings: HttpSettings) -> str:
    """Return the URL for clients."""
    if url.startswith("unix:"):
        url = f"http+unix://{quote(url.removeprefix('unix:'), safe='')}"
    path = settings.path or settings.sse_path
    return f"{url}{path}" if path else f"{url.replace('http', 'ws', 1)}{settings.websocket_path}"


async def serve_websocket(
    server: Served,
    *,
    port: int = 8000,
    path: str = "/ws",
    settings: HttpSettings | None = None,
    **options: Unpack[_Serving],
) -> None:
    """Serve over WebSocket only, on its own port, until cancelled or stopped.

    Args:
        server: a server or a running server.
        port: 0 for any free port.
        path: the path to serve; other paths are 404.
        settings: identity, origins and sizes; its paths are not used.
        options: as for `serve_http`.
    """
    settings = HttpSettings() if settings is None else settings
    settings = attrs.evolve(settings, path=None, sse_path=None, websocket_path=path)
    await serve_http(server, port=port, settings=settings, **options)


async def serve_grpc(
    server: Served,
    *,
    port: int = 8000,
    settings: HttpSettings | None = None,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[_ServingGrpc],
) -> None:
    """Serve as `serve_http` does, which answers gRPC on the same port, and report the URLs of gRPC.

    In clear text clients begin with HTTP/2 at once (prior knowledge), with TLS it is agreed on (ALPN). The service
    `grpc.health.v1.Health` says whether new work is taken.

    Args:
        server: a server or a running server.
        port: 0 for any free port.
        settings: identity, origins and sizes, and paths of what is served over HTTP.
        task_status: `await nursery.start(serve_grpc, ...)` returns the URLs it listens on: "grpc://127.0.0.1:8000".
        options: as for `serve_http`.
    """
    urls = _GrpcUrls(task_status)
    await serve_http(server, port=port, settings=settings, task_status=urls, **options)


@attrs.frozen
class _GrpcUrls:
    """Reports the URLs of an HTTP server as those of gRPC on the same port."""

    _task_status: trio.TaskStatus[list[str]]

    def started(self, value: list[str] | None = None) -> None:
        schemes = {"http": "grpc", "https": "grpcs", "http+unix": "grpc+unix", "ws": "grpc", "wss": "grpcs"}
        found = [urlsplit(url) for url in value or ()]
        self._task_status.started([f"{schemes[url.scheme]}://{url.netloc}" for url in found])


def run_http(
    server: Server[Any], *, ready: Callable[[list[str]], object] | None = None, **options: Unpack[_RunningOptions]
) -> None:
    """Serve over HTTP as the whole program, and shut down gracefully.

    On SIGTERM or SIGINT no new connections are accepted, calls in progress get `grace` seconds to answer and are then
    cancelled with an error reply, and all clean-up code runs. A second signal ends the process at once.

    Args:
        server: the server.
        ready: called with the URLs it listens on.
        options: as for `serve_http`.
    """
    run_trio("run_http", "serve_http", partial(_run_until_signal, serve_http, server, ready, **options))


def run_websocket(
    server: Server[Any],
    *,
    ready: Callable[[list[str]], object] | None = None,
    path: str = "/ws",
    **options: Unpack[_RunningOptions],
) -> None:
    """Serve over WebSocket only as the whole program, and shut down gracefully, as `run_http` does.

    Args:
        server: the server.
        ready: called with the URLs it listens on.
        path: the path to serve; other paths are 404.
        options: as for `serve_http`.
    """
    start = partial(_run_until_signal, serve_websocket, server, ready, path=path, **options)
    run_trio("run_websocket", "serve_websocket", start)


def run_grpc(
    server: Server[Any], *, ready: Callable[[list[str]], object] | None = None, **options: Unpack[_RunningGrpc]
) -> None:
    """Serve through gRPC as the whole program, and shut down gracefully, as `run_http` does.

    Args:
        server: the server.
        ready: called with the URLs it listens on.
        options: as for `serve_grpc`.
    """
    run_trio("run_grpc", "serve_grpc", partial(_run_until_signal, serve_grpc, server, ready, **options))


async def _run_until_signal(
    serve_over: Callable[..., Awaitable[None]],
    server: Server[Any],
    ready: Callable[[list[str]], object] | None,
    **options: Any,
) -> None:
    with signals() as stop:
        async with open_service_nursery() as nursery:
            ended = trio.Event()
            serve = partial(serve_over, server, stop=stop, **options)
            urls = await nursery.start(_listen, serve, ended)
            if ready is not None:
                ready(urls)
            await ended.wait()


def asgi_app(
    server: Served,
    *,
    auth: TokenAuth | None = None,
    agent_tools: SecondProtocolFactory | None = None,
    store: SharedStore | str | None = None,
    settings: HttpSettings | None = None,
    limits: HttpLimits | None = None,
    root: str = "",
) -> AsgiApp:
    """Return an ASGI application that serves over HTTP and WebSocket, for Hypercorn on Trio: `app = asgi_app(server)`.

    It can be mounted in any ASGI application that runs on Trio. If that one does not forward the lifespan, write
    `async with app.lifespan():` in its own.

    Args:
        server: a server or a running server.
        auth: validates access tokens: `trimcp.auth.ResourceServer(...)`. The same as in `settings`.
        agent_tools: serves agent tools beside MCP: `trimcp.agent_tools.AgentTools(server)`. The same as in `settings`.
        store: where processes share their sessions: "sqlite:///path", "redis://host" or a store. The same as in
            `settings`.
        settings: paths, identity, origins, streams and sessions.
        limits: how large and slow requests may be.
        root: the prefix under which it is mounted, for parent applications that do not set `root_path`.
    """
    from trimcp.transports.http.asgi.app import AsgiApp

    settings = _with_parts(settings, auth, agent_tools, store)
    return AsgiApp(
        partial(http_application, server, settings), root=root, limits=HttpLimits() if limits is None else limits
    )


# Calling


def http(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    auth: ClientAuth | None = None,
    mode: Mode = "auto",
    uds: str | None = None,
    client: httpx2.AsyncClient | None = None,
    timeouts: Timeouts | None = None,
    retries: int = 3,
    retry_calls: bool = False,
    trace: Write | None = None,
) -> HttpServer:
    """Describe a server that is reached over HTTP, for `client.connect(trimcp.http("http://127.0.0.1:8000/mcp"))`.

    Its revision and its transport (Streamable HTTP or HTTP+SSE) are found out when connecting.

    Args:
        url: its endpoint: "http://...", "https://...", or "http+unix://%2Frun%2Fserver.sock/mcp".
        headers: headers to send with every request, such as `{"Authorization": "Bearer ..."}`.
        auth: how to get an access token if the server requires one, such as `trimcp.auth.OAuth()`.
        mode: "auto", or "streamable" or "sse" to try one transport only.
        uds: path of a Unix socket to connect to; the host of `url` is then only a name.
        client: an `httpx2.AsyncClient` of your own, with its proxies and certificates.
        timeouts: how long the steps of an exchange may take.
        retries: how often a request is sent again when that is safe: nothing of it was sent, or it only reads.
        retry_calls: also send `tools/call` again if its answer was lost. It may then be carried out twice.
        trace: called with a line for every message, secrets masked; by default the environment decides.
    """
    from trimcp.transports.http.client.policy import Timeouts
    from trimcp.transports.http.client.target import HttpServer

    return HttpServer(
        url,
        headers,
        uds,
        mode,
        client,
        auth=auth,
        timeouts=Timeouts() if timeouts is None else timeouts,
        retries=retries,
        retry_calls=retry_calls,
        trace=trace or trace_from_environment(),
    )


def websocket(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    uds: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    trace: Write | None = None,
) -> WebSocketServer:
    """Describe a server that is reached over WebSocket: `client.connect(trimcp.websocket("ws://127.0.0.1:8000/ws"))`.

    Args:
        url: "ws://..." or "wss://...".
        headers: headers to send with the handshake.
        uds: path of a Unix socket to connect to; the host of `url` is then only a name.
        ssl_context: for wss; by default the certificates that this system trusts.
        trace: called with a line for every message, secrets masked; by default the environment decides.
    """
    from trimcp.transports.websocket.client import WebSocketServer

    return WebSocketServer(url, headers, uds, ssl_context, trace=trace or trace_from_environment())


def grpc(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    uds: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    trace: Write | None = None,
) -> GrpcServer:
    """Describe a server that is reached through gRPC: `client.connect(trimcp.grpc("grpc://127.0.0.1:8000"))`.

    Args:
        url: "grpc://host:port", or "grpcs://host:port" with TLS.
        headers: metadata to send with each call.
        uds: path of a Unix socket to connect to; the host of `url` is then only a name.
        ssl_context: for grpcs; by default the certificates that this system trusts. It is set to HTTP/2.
        trace: called with a line for every message, secrets masked; by default the environment decides.
    """
    from trimcp.transports.grpc.client import GrpcServer

    return GrpcServer(url, headers, uds, ssl_context, trace=trace or trace_from_environment())
