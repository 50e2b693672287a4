"""One conversation of the command with a server: connect, do one thing, end; with Ctrl-C, a time limit and a trace."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import attrs
import trio

from trimcp.cli.asking import Asker
from trimcp.cli.exits import INTERRUPTED, NO_CONNECTION, REMOTE_ERROR, TERMINATED, TIMED_OUT, USAGE, Failure
from trimcp.cli.options import ConnectOptions
from trimcp.cli.screen import Screen
from trimcp.cli.targets import Target, find_target, lost_text, read_headers
from trimcp.cli.text import as_json
from trimcp.client.client import Client, Opener
from trimcp.client.session import ClientSession
from trimcp.errors import InvalidReply, LocalError, McpError, RemoteError
from trimcp.run import on_signals
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.trace import Write, trace_writer
from trimcp.wire.capabilities import declares
from trimcp.wire.input_requests import ElicitParams, ElicitResult
from trimcp.wire.lifecycle import LoggingMessageParams
from trimcp.wire.revisions import LEGACY, REVISIONS

_SILENCE: Final = 5.0
_SLOW: Final = 1.0

Body = Callable[[ClientSession, Screen], Awaitable[int]]
"""Called with the session; returns the exit code."""


def own_version() -> str:
    """Return the version of trimcp that is installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("trimcp")
    except PackageNotFoundError:
        return "0"


def trace_to(target: str | None, screen: Screen) -> Write | None:
    """Return the writer of the trace, from the option or else the environment variable TRIMCP_TRACE; None without."""
    if target is None:
        target = os.environ.get("TRIMCP_TRACE", "")
        if target in ("", "0"):
            return None
    return screen.trace if target in ("-", "1", "stderr") else trace_writer(target)


@attrs.frozen
class Parts:
    """What takes part in a conversation in place of the terminal."""

    answer: Callable[[ElicitParams], Awaitable[ElicitResult]]  # answers the server's questions
    log: Callable[[LoggingMessageParams], None]  # takes log messages
    watch: Callable[[Target], Opener]  # returns what to connect to in place of a target


def client_of(options: ConnectOptions, parts: Parts) -> Client:
    """Return the client of a command."""
    client = Client(
        "trimcp",
        own_version(),
        title="trimcp command",
        revisions=LEGACY if options.legacy else REVISIONS,
        log_level=options.log_level or "info",
    )
    if options.timeout is not None:
        client.connect_timeout = options.timeout
    client.logging(parts.log)
    client.elicitation(parts.answer)
    return client


def traced(server: Target, options: ConnectOptions, screen: Screen) -> Target:
    """Return a server with the trace that is wanted, if any."""
    write = trace_to(options.trace, screen)
    return server if write is None else attrs.evolve(server, trace=write)


def converse(target: str, options: ConnectOptions, body: Body, parts: Parts | None = None) -> int:
    """Connect to a server, run `body` with the session, disconnect, and return the exit code.

    The first Ctrl-C cancels the body, and the server is notified; the second ends the process at once.
    """
    screen = Screen(options.quiet)
    server = find_target(target, screen.server_says, read_headers(options.headers, options.bearer))
    return trio.run(_attended, server, options, body, screen, parts)


async def _attended(server: Target, options: ConnectOptions, body: Body, screen: Screen, parts: Parts | None) -> int:
    async with open_service_nursery() as nursery:
        nursery.start_soon(_explain_silence, screen)
        return await _converse(server, options, body, screen, parts, nursery)


async def _converse(
    server: Target, options: ConnectOptions, body: Body, screen: Screen, parts: Parts | None, nursery: trio.Nursery
) -> int:
    asker = Asker(screen)
    parts = Parts(asker.answer, screen.log, lambda target: target) if parts is None else parts
    client = client_of(options, parts)
    server = traced(server, options, screen)
    code: int | None = None

    with signals(screen) as stop:
        nursery.start_soon(_explain_slow_end, screen, stop)
        deadline = trio.current_time() + (float("inf") if options.timeout is None else options.timeout)
        try:
            with stop.guarding(deadline) as connecting:
                async with client.connect(parts.watch(server), revision=options.revision) as session:
                    screen.listening = True
                    connecting.deadline = float("inf")
                    # Inside the connection, so that the server is notified of a cancellation before it closes.
                    with stop.guarding(deadline) as working:
                        asker.standstill = partial(_standing_still, working)
                        if options.log_level is not None and declares(session.server_capabilities, "logging"):
                            await session.set_log_level(options.log_level)
                        code = await body(session, screen)
                    screen.end_progress()
        except McpError as error:
            if stop.signal is None:
                raise failure_of(error, server, connected=screen.listening) from None
        except trio.TooSlowError as error:  # a timeout of the client itself, earlier than --timeout
            if stop.signal is None:
                raise Failure(str(error), TIMED_OUT) from None
        finally:
            screen.end_progress()
    if stop.signal is not None:
        told = "; the server was told to stop" if screen.listening else ""
        raise Failure(f"interrupted{told}", stop.exit_code)
    if code is None:
        what = "was told to stop" if screen.listening else "was not ready in time"
        raise Failure(f"not done after {options.timeout:g} seconds; the server {what}", TIMED_OUT)
    return code


async def _explain_silence(screen: Screen) -> None:
    """Print what the command waits for if the server does not answer."""
    await trio.sleep(_SILENCE)
    if not screen.listening:
        screen.note("still waiting for the server's first answer; Ctrl-C gives up, --trace shows what is said", "dim")


async def _explain_slow_end(screen: Screen, stop: Stop) -> None:
    """Print what the command waits for if the server does not end after Ctrl-C."""
    await stop.came.wait()
    await trio.sleep(_SLOW)
    screen.note("the server was told to stop, and has not ended yet; Ctrl-C again ends this at once", "dim")


def failure_of(error: McpError, server: Target, *, connected: bool) -> Failure:
    """Return how a command ends after an error of a server, before it was connected or after."""
    if not connected:
        spoke = isinstance(error, RemoteError | InvalidReply)
        hint = "\nAdd --trace to see what was said." if spoke else ""
        return Failure(f"could not connect: {lost_text(error, server)}{hint}", NO_CONNECTION)
    text = lost_text(error, server)
    if isinstance(error, RemoteError):
        text = f"the server answered with an error: {text}"
    data = getattr(error, "data", None)
    code = USAGE if isinstance(error, LocalError) else REMOTE_ERROR
    return Failure(text if data is None else f"{text}\n{as_json(data)[:2_000]}", code)


@contextmanager
def _standing_still(scope: trio.CancelScope) -> Iterator[None]:
    """Stop the scope's timeout while the user answers in the block."""
    left = scope.deadline - trio.current_time()
    scope.deadline = float("inf")
    try:
        yield
    finally:
        scope.deadline = trio.current_time() + left


@attrs.define(eq=False)
class Stop:
    """Cancels the innermost guarded block when a signal is received."""

    signal: int | None = None  # the first signal received, or None
    came: trio.Event = attrs.field(factory=trio.Event)  # set when it is received
    _scopes: list[trio.CancelScope] = attrs.field(factory=list)

    @property
    def exit_code(self) -> int:
        """The exit code of the command after the signal."""
        return INTERRUPTED if self.signal == signal.SIGINT else TERMINATED

    @contextmanager
    def guarding(self, deadline: float = float("inf")) -> Iterator[trio.CancelScope]:
        """Cancel the block when a signal is received, or at the deadline."""
        with trio.CancelScope(deadline=deadline) as scope:
            self._scopes.append(scope)
            try:
                yield scope
            finally:
                self._scopes.remove(scope)

    def cancel(self, number: int) -> None:
        """Cancel the innermost guarded block, because of this signal."""
        self.signal = number
        self.came.set()
        for scope in self._scopes[-1:]:
            scope.cancel(reason="interrupted by the user")


@contextmanager
def signals(screen: Screen) -> Iterator[Stop]:
    """Yield a `Stop`, cancelled by the first SIGINT or SIGTERM; the second ends the process, even a blocked loop."""
    stop = Stop()
    with on_signals(stop.cancel, screen.give_back):
        yield stop
