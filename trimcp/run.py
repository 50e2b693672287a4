"""Glue between servers, clients and transports: the functions a program ends with. Nothing here imports it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import trio

from trimcp.channel import MessageChannel, run_trio
from trimcp.nurseries import open_service_nursery
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.drive import AnyChannel, drive
from trimcp.session.session import Session
from trimcp.transports.stdio.server import claim_stdio
from trimcp.values import valued

if TYPE_CHECKING:
    from trimcp.client.hosts import ServerEntry
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.stdio.child import StdioServer
    from trimcp.transports.trace import Write
    from trimcp.transports.websocket.client import WebSocketServer

# What only some programs need is imported where they ask for it: the start of a server should not pay for it.


def _perhaps_traced(channel: MessageChannel) -> MessageChannel:
    if "TRIMCP_TRACE" not in os.environ:
        return channel
    from trimcp.transports.trace import trace_from_environment, traced

    write = trace_from_environment()
    return channel if write is None else traced(channel, write)


Served: TypeAlias = Server[Any] | Running
"""What can be served: a server, in a run of its own, or a run that is under way, which others may share."""


@asynccontextmanager
async def run_of(served: Served) -> AsyncIterator[Running]:
    """Yield the run itself, or run the server for as long as the block runs."""
    if isinstance(served, Running):
        yield served
    else:
        async with served.running() as running:
            yield running


async def serve_stdio(server: Served) -> None:
    """Serve one client over this process's standard input and output, until it leaves.

    What user code prints goes to standard error meanwhile. Requests under way when the input ends get
    `limits.eof_grace` seconds. Cancelling it stops every handler; no signal handlers are installed, see `run_stdio`.

    Args:
        server: what is served, in a run of its own; or a run (`async with server.running() as running`), which others
            may share.
    """
    async with claim_stdio() as channel:
        await server.serve(_perhaps_traced(channel))


def run_stdio(server: Server[Any], *, grace: float = 5.0, watchdog: float | None = None) -> None:
    """Serve one client over standard input and output as the whole program, with an orderly end.

    On SIGTERM or SIGINT no more requests are taken, those under way get `grace` seconds to answer, then they are
    cancelled with an error reply, and every clean-up runs. A second signal ends the process at once. A client that
    closes our input as well no longer waits: from then on `limits.eof_grace` counts.

    Args:
        server: what is served.
        grace: seconds.
        watchdog: seconds after which an event loop that stands still is logged with all it is busy with; see
            `trimcp.watchdog`.
    """
    run_trio("run_stdio", "serve_stdio", _serve_stdio_until_signal, server, grace, watchdog)


def watched(server: Server[Any], seconds: float | None) -> AbstractContextManager[None]:
    """Return what watches the event loop of a whole program that serves, or does nothing if there are no seconds."""
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
    """Call `first` with the number of the first SIGINT or SIGTERM that comes in the block; a second ends the process.

    Args:
        first: called in Trio's thread, where it may cancel or set an event.
        last: called just before the process ends, which works even with a frozen loop.
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
    """Yield an event that the first SIGINT or SIGTERM sets; the second ends the process, even with a frozen loop."""
    stop = trio.Event()
    with on_signals(lambda number: stop.set()):
        yield stop


def stdio(
    command: str,
    *args: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    on_stderr: Callable[[str], object] | None = None,
    trace: Write | None = None,
) -> StdioServer:
    """Name a server to be started as a child process, for `client.connect(trimcp.stdio("python", "weather.py"))`.

    Args:
        command: the program, found on PATH.
        args: its arguments; no shell is involved.
        env: variables beside the few a child inherits anyway (PATH, HOME, ...).
        cwd: where it runs; by default here.
        on_stderr: called with each line the child writes to its standard error; by default they are logged.
        trace: called with a line for every message, secrets masked; by default the environment decides.
    """
    from trimcp.transports.stdio.child import StdioServer
    from trimcp.transports.trace import trace_from_environment

    return StdioServer((command, *args), env=env, cwd=cwd, on_stderr=on_stderr, trace=trace or trace_from_environment())


def load_servers(
    source: str | Path | Mapping[str, Any], *, on_stderr: Callable[[str], object] | None = None
) -> dict[str, StdioServer | HttpServer | WebSocketServer]:
    """Return the servers of an `mcpServers` configuration by name, each ready for `client.connect` or `Group.open`.

    Args:
        source: a host's configuration file (`{"mcpServers": {name: {"command": ..., "args": ..., "env": ...}}}`, or
            `{"url": ..., "headers": ...}` for one that is served somewhere), or its contents. `${VAR}` in it stands
            for a variable of our environment.
        on_stderr: as for `stdio`.

    Raises:
        LocalError: the file cannot be read or an entry is not one we can use; the text says which, and why.
    """
    from trimcp.client.hosts import read_servers

    return {name: target_of(entry, on_stderr=on_stderr) for name, entry in read_servers(source).items()}


def target_of(
    entry: ServerEntry, *, on_stderr: Callable[[str], object] | None = None
) -> StdioServer | HttpServer | WebSocketServer:
    """Return what an entry of an `mcpServers` configuration names as something to connect to."""
    if entry.url is not None:
        from trimcp.client.client import at_url

        return at_url(entry.url, entry.headers)
    from trimcp.transports.stdio.child import StdioServer
    from trimcp.transports.trace import trace_from_environment

    trace = trace_from_environment()
    return StdioServer(entry.command, env=entry.env, cwd=entry.cwd, on_stderr=on_stderr, trace=trace)


@attrs.frozen
@valued
class InProcess:
    """A server in this process as something to connect to: in a run for each connection, or in one that is given."""

    server: Served
    framed: bool = False
    trace: Write | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AnyChannel]:
        """Serve one connection for as long as the block runs, and yield the client's end of it."""
        from trimcp.session.drive import direct_ends
        from trimcp.transports.memory import memory_channels

        ours: AnyChannel
        theirs: AnyChannel
        if self.trace is not None:
            from trimcp.transports.trace import traced

            ours, channel = memory_channels(framed=self.framed)
            theirs = traced(channel, self.trace)
        elif self.framed:
            ours, theirs = memory_channels(framed=True)
        else:
            ours, theirs = direct_ends()
        async with open_service_nursery() as nursery:
            nursery.start_soon(self.server.serve, ours)
            yield theirs


def in_process(server: Served, *, framed: bool = False, trace: Write | None = None) -> InProcess:
    """Name a server in this process, for `client.connect(trimcp.in_process(server))`.

    Args:
        server: what is served, in a run of its own for each connection; or a run that others may share.
        framed: pass every message through line framing and a small pipe, as over stdio; otherwise each is delivered
            straight into the other side's session.
        trace: called with a line for every message, secrets masked; by default the environment decides.
    """
    from trimcp.transports.trace import trace_from_environment

    return InProcess(server, framed, trace or trace_from_environment())
