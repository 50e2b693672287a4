"""`trimcp run --http`: a server over a network, in this process or in several (`trimcp.cli.serve.processes`)."""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import quote

import attrs
import trio

from trimcp.cli.exits import Failure, say
from trimcp.cli.loading import ADMIN_GROUP, RELOADED, Loaded
from trimcp.cli.options import RunOptions
from trimcp.cli.serve.processes import InheritedSockets, Workers, inherited
from trimcp.errors import LocalError
from trimcp.net import serve_http
from trimcp.principal import Principal
from trimcp.protocol.request_state import Sealer
from trimcp.run import signals, watched
from trimcp.server.registry import Change
from trimcp.server.server import Server
from trimcp.support.addresses import is_loopback
from trimcp.support.files import read_text
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.h1.sockets import open_tcp, open_unix, tls_context, url_of
from trimcp.transports.http.peers.access import AccessLog, JsonFormatter
from trimcp.transports.http.peers.identity import Authenticate, TokenAuth, bearer_tokens
from trimcp.transports.http.peers.origins import Origins
from trimcp.transports.http.settings import HttpSettings

_FIRST_HANDED: Final = 3  # sd_listen_fds(3)
_STATE_KEYS: Final = "TRIMCP_STATE_KEYS"
"""The environment variable with secrets that sign `requestState`, newest first, separated by commas."""

_SCOPED: Final = re.compile(r"(\S.*?) *\[([^\[\]]*)\]")
_STORE: Final = "TRIMCP_WORKER_STORE"
_SLOW: Final = 1.0  # seconds after which a handler that was cancelled should have stopped


def serve(load: Callable[[], Loaded], words: Sequence[str], options: RunOptions) -> int:
    """Serve until a signal is received, and return the exit code.

    `load`: returns the server and what belongs to it; called only in a process that serves it.
    """
    settings = _settings(options)
    worker = inherited()
    if options.certfile is not None:
        tls_context(options.certfile, options.keyfile)  # to say what is wrong with it before anything is started
    if (options.workers > 1 or options.reload) and worker is None:
        return trio.run(_serve_by_workers, words, options, settings)
    loaded = load()
    server, auth = loaded.server, loaded.auth
    if auth is not None and settings.auth is None and settings.authenticate is None:
        settings = attrs.evolve(settings, auth=auth)
    if options.agent_tools:
        from trimcp.agent_tools import AgentTools

        settings = attrs.evolve(settings, agent_tools=loaded.agent_tools or AgentTools(server))
    if options.metrics:
        from trimcp.watch.metrics import Metrics

        settings = attrs.evolve(settings, routes={**settings.routes, "/metrics": Metrics(server)})
    if options.admin_http:
        settings = _with_admin(server, settings)
    _use_state_keys(server)
    settings = _with_store(options, settings)
    _set_up_logging(options)
    return trio.run(_serve_here, server, options, settings, worker)


async def _serve_here(
    server: Server[Any], options: RunOptions, settings: HttpSettings, worker: InheritedSockets | None
) -> int:
    with ExitStack() as stack:
        stop = stack.enter_context(signals())
        stack.enter_context(watched(server, options.watchdog))
        sockets = worker.sockets if worker is not None else await _open_sockets(options, stack)
        told: Callable[[], None] = (
            worker.ready if worker is not None else partial(_announce, _describe(sockets, options, settings))
        )
        async with open_service_nursery() as nursery:
            if worker is not None:
                stack.callback(worker.close)
                nursery.start_soon(_stop_with_parent, server, worker, stop)
            else:
                nursery.start_soon(_explain_end, server, stop, options.grace)
            await serve_http(
                server,
                sockets=sockets,
                shares=None if worker is None else worker.shares,
                settings=settings,
                certfile=options.certfile,
                keyfile=options.keyfile,
                software=options.software,
                stop=stop,
                grace=options.grace,
                task_status=_ListeningStatus(told),
            )
    return 0


@attrs.frozen
class _ListeningStatus(trio.TaskStatus[list[str]]):
    """Notified when a server listens."""

    _told: Callable[[], None]

    def started(self, value: list[str] | None = None) -> None:
        self._told()


async def _explain_end(server: Server[Any], stop: trio.Event, grace: float) -> None:
    """Say what a server that was told to end waits for, and again when it waits for handlers that do not stop."""
    await stop.wait()
    for pause, what in ((grace + _SLOW, f"has up to {grace:g} s to answer"), (math.inf, "has not stopped yet")):
        running = server.statistics().running
        if running:
            calls = "1 call" if running == 1 else f"{running} calls"
            what = what if running == 1 else what.replace("has", "have", 1)
            say(f"{calls} under way {what}; Ctrl-C again ends at once")
        await trio.sleep(pause)


async def _stop_with_parent(server: Server[Any], worker: InheritedSockets, stop: trio.Event) -> None:
    await worker.stopped()
    if RELOADED in os.environ:  # another version serves by now, perhaps with other lists
        for change in Change:
            server.changes.publish(change)
    stop.set()


async def _serve_by_workers(words: Sequence[str], options: RunOptions, settings: HttpSettings) -> int:
    if sys.platform == "win32":
        raise Failure("--workers and --reload hand sockets down to processes, which this system cannot do")
    with ExitStack() as stack:
        sockets = await _open_sockets(options, stack)
        keys = os.environ.get(_STATE_KEYS) or secrets.token_urlsafe(32)
        if options.store is None:
            folder = stack.enter_context(TemporaryDirectory(prefix="trimcp-"))  # of this user alone
            store = f"sqlite://{quote(folder)}/s.db"  # short, as the path of a socket has to be
        else:
            from trimcp.store.naming import store_of

            store_of(store := options.store)  # to say what is wrong with it before anything is started
        # in the environment, which other users cannot read
        env = {_STATE_KEYS: keys, _STORE: store} | ({ADMIN_GROUP: secrets.token_hex(8)} if options.admin_http else {})
        command = [sys.executable, "-m", "trimcp.cli", "run", *words]
        listening = partial(_announce, _describe(sockets, options, settings))
        if not options.reload:
            return await Workers(command, options.workers, sockets, env, options.grace, say).run(listening)
        from trimcp.cli.serve.reloading import ENVIRONMENT, changes, own_words  # for those who write a server

        command[4:] = own_words(words)
        workers = Workers(command, 1, sockets, {**env, **ENVIRONMENT}, options.grace, say)
        async with changes(sys.argv[0]) as changed:
            return await workers.run_versions(listening, changed)


# From options to settings


def _with_admin(server: Server[Any], settings: HttpSettings) -> HttpSettings:
    """Let who has the scope look at a server over the network. Raises Failure: nobody is authenticated here."""
    from trimcp.watch.network import PATH, NetworkAdmin

    if settings.auth is None and settings.authenticate is None:
        raise Failure("--admin-http wants tokens to tell who may look: --token-file or --auth-issuer")
    admin = NetworkAdmin(server, group=os.environ.pop(ADMIN_GROUP, None))  # not for what tools start
    return attrs.evolve(settings, routes={**settings.routes, PATH: admin})


def _settings(options: RunOptions) -> HttpSettings:
    sse = options.sse and not options.ws
    path = options.path or ("/ws" if options.ws else "/mcp")
    taken = {"/healthz", "/readyz"}
    taken |= {"/sse", "/messages"} if sse else set()
    taken |= {"/ws"} if options.websocket and not options.ws else set()
    if not path.startswith("/") or path in taken:
        raise Failure(f"the endpoint cannot be at {path!r}: write a path such as /mcp")
    try:
        tokens = None if options.token_file is None else _read_tokens(Path(options.token_file))
        return HttpSettings(
            path=None if options.ws else path,
            sse_path="/sse" if sse else None,
            websocket_path=path if options.ws else "/ws" if options.websocket else None,
            origins=Origins(options.allow_origins, options.allowed_hosts, options.allow_headers),
            authenticate=None if tokens is None or options.auth_issuers else tokens,
            auth=_token_auth(options, path, tokens) if options.auth_issuers else None,
            reply=options.reply,
            root=options.root,
            stateless=options.stateless,
            access_log=AccessLog() if options.access_log else None,
        )
    except ValueError as error:
        raise Failure(str(error)) from None


def _token_auth(options: RunOptions, path: str, also: Authenticate | None) -> TokenAuth:
    """Return what takes the tokens of the authorization servers that the options name."""
    try:
        from trimcp.auth import ResourceServer
    except ImportError:
        raise Failure('access tokens are checked with joserfc: pip install "trimcp[auth]"') from None
    if options.auth_audience is None and not is_loopback(options.host):
        raise Failure("--auth-audience says at which URL clients reach the server; tokens have to be for that")
    scheme = "http" if options.certfile is None else "https"
    resource = options.auth_audience or f"{scheme}://{options.host}:{options.port}{path}"
    return ResourceServer(resource, options.auth_issuers, scopes=tuple((options.scopes or "").split()), also=also)


def _read_tokens(file: Path) -> Authenticate:
    """Return a hook that knows the tokens of a file: `NAME: TOKEN` or `NAME [SCOPES]: TOKEN`, # for comments."""
    tokens: dict[str, str] = {}
    lines = read_text(file, "the tokens", secret=True).splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, token = (part.strip() for part in line.rpartition(":"))
        if not colon or not name or not token:
            raise Failure(f"{file}, line {number}: write NAME: TOKEN")  # the line may be the token: not shown
        if tokens.setdefault(token, name) != name:
            raise Failure(f"{file}, line {number}: {tokens[token]!r} and {name!r} cannot have the same token")
    if not tokens:
        raise Failure(f"{file} has no tokens, so nobody could come in; write lines of NAME: TOKEN")
    try:
        return bearer_tokens({token: _principal(name) for token, name in tokens.items()})
    except ValueError as error:
        raise Failure(f"{file}: {error}") from None


def _with_store(options: RunOptions, settings: HttpSettings) -> HttpSettings:
    """Return the settings with the store that the options name, or the parent of this worker."""
    named = os.environ.pop(_STORE, None) or options.store
    if named is None:
        return settings
    from trimcp.store.contexts import MemoryContexts
    from trimcp.store.naming import contexts_beside, store_of  # loaded where processes share sessions

    tools: Any = settings.agent_tools
    if tools is not None and isinstance(tools.store, MemoryContexts):  # whose author has named no other
        tools.store = contexts_beside(named)
    return attrs.evolve(settings, store=store_of(named))


def _principal(name: str) -> Principal:
    """Return who is meant by `NAME`, who may do everything but what wants a scope, or by `NAME [SCOPES]`."""
    named = _SCOPED.fullmatch(name)
    return Principal(name) if named is None else Principal(named[1], scopes=named[2].split())


def _use_state_keys(server: Server[Any]) -> None:
    """Let a server that has no keys of its own sign `requestState` with those in the environment, if there are any."""
    text = os.environ.get(_STATE_KEYS, "")
    if not text or server.sealer.keys is not None:
        return
    keys = [key.strip().encode() for key in text.split(",") if key.strip()]
    try:
        server.sealer = Sealer(keys, server.sealer.lifetime, server.sealer.cipher)
    except LocalError as error:
        raise Failure(f"{_STATE_KEYS}: {error}") from None


# Where to listen


async def _open_sockets(options: RunOptions, stack: ExitStack) -> list[socket.socket]:
    """Return listening sockets: those a service manager hands over, or new ones."""
    sockets = _handed_over()
    if not sockets and options.uds is not None:
        sockets = [stack.enter_context(open_unix(options.uds, mode=options.uds_mode))]
    elif not sockets:
        sockets = await open_tcp(options.host, options.port)
    for each in sockets:
        stack.enter_context(each)
    return sockets


def _handed_over() -> list[socket.socket]:
    """Return the sockets a service manager has opened for this very process (systemd.socket)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return []
    number = int(os.environ.pop("LISTEN_FDS", "0"))
    del os.environ["LISTEN_PID"]
    sockets = [socket.socket(fileno=_FIRST_HANDED + each) for each in range(number)]
    for each in sockets:
        each.set_inheritable(False)
    return sockets


# Messages for the user


def _describe(sockets: Sequence[socket.socket], options: RunOptions, settings: HttpSettings) -> list[str]:
    """Return what to print once these sockets are served; then they may no longer be ours to ask."""
    lines = []
    for sock in sockets:
        reached = url_of(sock, secure=options.certfile is not None)
        if reached == "unix":
            # Ours was bound under another name, then moved to this one.
            file = os.path.abspath(options.uds) if options.uds is not None else sock.getsockname()
            reached = f"http+unix://{quote(file, safe='')}"
        if settings.path is not None:
            lines.append(f"listening on {reached}{settings.path}")
        if settings.websocket_path is not None:
            lines.append(f"listening on ws{reached.removeprefix('http')}{settings.websocket_path}")
        if settings.sse_path is not None:
            lines.append(f"listening on {reached}{settings.sse_path} (HTTP+SSE)")
        if options.grpc:
            lines.append(f"listening on grpc{reached.removeprefix('http')} (gRPC)")
        if settings.agent_tools is not None:
            lines.append(f"listening on {reached} (agent tools: /tools, /contexts, /schemas, /agent)")
    addresses = [sock.getsockname() for sock in sockets]
    hosts = [str(address[0]) for address in addresses if isinstance(address, tuple)]  # of a Unix socket it is a path
    if (
        settings.authenticate is None
        and settings.auth is None
        and (settings.agent_tools is None or settings.agent_tools.authenticate is None)
        and not all(map(is_loopback, hosts))
    ):
        lines.append("whoever reaches this address can use the server; --token-file asks for tokens")
    return lines


def _announce(lines: Sequence[str]) -> None:
    for line in lines:
        say(line)
    _notify_manager()


def _notify_manager() -> None:
    """Tell a service manager that waits for it (sd_notify(3)) that requests are answered from now on."""
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"READY=1", address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError as error:
            say(f"cannot tell the service manager: {error.strerror}")


def _set_up_logging(options: RunOptions) -> None:
    """Log to standard error, unless the server's own module has decided otherwise."""
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        handler.setFormatter(JsonFormatter() if options.log_json else plain)
        if options.log_json:
            from trimcp.watch.log_ids import RequestIds

            handler.addFilter(RequestIds())
        root.addHandler(handler)
    if options.access_log:
        logging.getLogger("trimcp.access").setLevel(logging.INFO)
