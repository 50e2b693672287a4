"""Functions that connect servers, clients and transports: the last call of a program. Imported by `trimcp` only."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from trimcp.channel import MessageChannel, run_trio
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.drive import AnyChannel, drive
from trimcp.session.session import Session
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.slotted import slotted, valued
from trimcp.transports.stdio.server import claim_stdio

if TYPE_CHECKING:
    from trimcp.client.hosts import ServerEntry
    from trimcp.transports.grpc.client import GrpcServer
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.stdio.child import StdioServer
    from trimcp.transports.trace import Write
    from trimcp.transports.websocket.client import WebSocketServer
    from trimcp.wire.revisions import Revision

# Rarely needed modules are imported inside functions, so that servers start faster.


def _perhaps_traced(channel: MessageChannel) -> MessageChannel:
    if "TRIMCP_TRACE" not in os.environ:
        return channel
    from trimcp.transports.trace import trace_from_environment, traced

    write = trace_from_environment()
    return channel if write is None else traced(channel, write)


Served: TypeAlias = Server[Any] | Running
"""What can be served: a server, which is then run, or a running server, which may be served elsewhere too."""


@asynccontextmanager
async def run_of(served: Served) -> AsyncIterator[Running]:
    """Yield a running server; a server that does not run is run while the block runs."""
    if isinstance(served, Running):
        yield served
    else:
        async with served.running() as running:
            yield running


async def serve_stdio(server: Served) -> None:
    """Serve one client over this process's standard input and output, until the client disconnects.

    Meanwhile `print` writes to standard error. Requests still running when the input ends get `limits.eof_grace`
    seconds. Cancelling this stops every handler. It installs no signal handlers; see `run_stdio`.

    Args:
        server: the server, to be run here; or a running server (`async with server.running() as running`), which may be
            served elsewhere too.
    """
    async with claim_stdio() as channel:
        await server.serve(_perhaps_traced(channel))


def run_stdio(server: Server[Any], *, grace: float = 5.0, watchdog: float | None = None) -> None:
    """Serve one client over standard input and output as the whole program, and shut down gracefully.

    On SIGTERM or SIGINT no new requests are accepted, those in progress get `grace` seconds to answer and are then
    cancelled with an error reply, and all clean-up code runs. A second signal ends the process at once. If the client
    also closes the input, it no longer waits: from then on `limits.eof_grace` applies.

    Args:
        server: the server.
        grace: seconds.
        watchdog: seconds after which a blocked event loop is logged, with what it is running; see `trimcp.watchdog`.
    """
    run_trio("run_stdio", "serve_stdio", _serve_stdio_until_signal, server, grace, watchdog)


def watched(server: Server[Any], seconds: float | None) -> AbstractContextManager[None]:
    """Return a context manager that watches the event loop of a serving program; with None it does nothing."""
    if seconds is None:
        return nullcontext()
    from trimcp.watch.watchdog import watchdog

    return watchdog(server, seconds=seconds, whole_process=True)


async def _serve_stdio_until_signal(server: Server[Any], grace: float, watchdog: float | None) -> None:
    with signals() as stop, watched(server, watchdog):
        async with server.running() as running, claim_stdio() as channel:
            session = running.session()
            async with open_service_nursery() as nursery:
                nursery.start_soon(_drain_when, stop, session, grace)
                await drive(session, _perhaps_traced(channel))


async def _drain_when(stop: trio.Event, session: Session, grace: float) -> None:
    await stop.wait()
    from trimcp.watch.tree import Overdue  # which nothing needs before

    await session.drain(grace, Overdue([session], grace))
    session.close()


@contextmanager
def on_signals(first: Callable[[int], object], last: Callable[[], object] = lambda: None) -> Iterator[None]:
    """While the block runs, call `first` with the first SIGINT or SIGTERM; a second one ends the process.

    `first` is called in Trio's thread, where it may cancel a scope or set an event; `last` just before the process
    ends, even if the event loop is blocked.
    """
    token = trio.lowlevel.current_trio_token()
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            last()
            os._exit(128 + number)
        token.run_sync_soon(first, number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def signals() -> Iterator[trio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; the second ends the process, even with a blocked loop."""
    stop = trio.Event()
    with on_signals(lambda number: stop.set()):
        yield stop


def stdio(
    command: str | os.PathLike[str] | list[str] | tuple[str | os.PathLike[str], ...],
    *args: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    on_stderr: Callable[[str], object] | None = None,
    trace: Write | None = None,
    revision: Revision | str | None = None,
) -> StdioServer:
    """Describe a server that runs as a child process, for `client.connect(trimcp.stdio("python", "weather.py"))`.

    Args:
        command: the program, found on PATH; or a list of the program and its arguments.
        args: its (further) arguments; no shell is used.
        env: environment variables beside the few that a child always inherits (PATH, HOME, ...).
        cwd: its working directory; by default ours.
        on_stderr: called with each line of its standard error; by default the lines are logged.
        trace: called with a line for every message, secrets masked; by default the environment decides.
        revision: the revision to begin with; with one before 2026-07-28, old servers that break on the first message of
            newer clients never get it. By default the client finds out, and remembers what it found.

    Raises:
        TypeError: the command is no text and no list of texts.
    """
    from trimcp.transports.stdio.child import StdioServer
    from trimcp.transports.trace import trace_from_environment

    trace = trace or trace_from_environment()
    words: tuple[Any, ...] = tuple(command) if isinstance(command, list | tuple) else (command,)
    return StdioServer((*words, *args), env=env, cwd=cwd, on_stderr=on_stderr, trace=trace, revision=revision)


def load_servers(
    source: str | Path | Mapping[str, Any], *, on_stderr: Callable[[str], object] | None = None
) -> dict[str, StdioServer | HttpServer | WebSocketServer | GrpcServer]:
    """Return the servers of an `mcpServers` configuration by name, each ready for `client.connect` or `Group.open`.

    Args:
        source: a host's configuration file (`{"mcpServers": {name: {"command": ..., "args": ..., "env": ...}}}`, or
            `{"url": ..., "headers": ...}` for a remote server), or its contents. `${VAR}` is replaced by the
            environment variable of that name. `"revision"` beside a command is as for `stdio`.
        on_stderr: as for `stdio`.

    Raises:
        LocalError: the file cannot be read, or an entry is not usable; the text says which and why.
    """
    from trimcp.client.hosts import read_servers

    return {name: target_of(entry, on_stderr=on_stderr) for name, entry in read_servers(source).items()}


def target_of(
    entry: ServerEntry, *, on_stderr: Callable[[str], object] | None = None
) -> StdioServer | HttpServer | WebSocketServer | GrpcServer:
    """Return the connection target that one entry of an `mcpServers` configuration describes."""
    if entry.url is not None:
        from trimcp.client.client import at_url

        return at_url(entry.url, entry.headers)
    return stdio(entry.command, env=entry.env, cwd=entry.cwd, on_stderr=on_stderr, revision=entry.revision)


@slotted(frozen=True)
@valued
class InProcess:
    """A server in this process as a connection target. A server that does not run is run for each connection."""

    server: Served
    framed: bool = False
    trace: Write | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AnyChannel]:
        """Serve one connection while the block runs, and yield the client's end of it."""
        from trimcp.session.drive import direct_ends
        from trimcp.transports.memory import memory_channels

        ours: AnyChannel
        theirs: AnyChannel
        if self.trace is None and not self.framed:
            ours, theirs = direct_ends()
        else:
            ours, theirs = memory_channels(framed=self.framed)
        if self.trace is not None and isinstance(theirs, MessageChannel):
            from trimcp.transports.trace import traced

            theirs = traced(theirs, self.trace)
        async with open_service_nursery() as nursery:
            nursery.start_soon(self.server.serve, ours)
            yield theirs


def in_process(server: Served, *, framed: bool = False, trace: Write | None = None) -> InProcess:
    """Describe a server in this process, for `client.connect(trimcp.in_process(server))`.

    Args:
        server: the server, to be run for each connection; or a running server, which may have other connections.
        framed: send every message through line framing and a small pipe, as over stdio. Otherwise each message is
            delivered directly to the other side's session.
        trace: called with a line for every message, secrets masked; by default the environment decides.
    """
    from trimcp.transports.trace import trace_from_environment

    return InProcess(server, framed, trace or trace_from_environment())
