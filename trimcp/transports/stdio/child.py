"""A server as a child process: its start, its channel, its standard error, and its end with all its descendants.

That end goes in steps and takes a bounded time.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, Incoming, Link, MessageChannel, Outgoing, require_trio
from trimcp.errors import LocalError
from trimcp.support.bounds import checked
from trimcp.support.cleaning import clean, log_crash
from trimcp.support.descendants import MARK, Descendants, look, signal_name, signal_until_gone
from trimcp.support.nurseries import closing_with, open_service_nursery
from trimcp.support.slotted import valued
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.stdio.streams import AnyReceiver, AnySender, FdReceiver, PipeReceiver, PipeSender
from trimcp.transports.stream import StreamChannel
from trimcp.transports.trace import Write, traced
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.revisions import Revision

INHERITED: Final = (
    # Needed to find the home directory, the shell and other programs: the official SDKs' list.
    *("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER"),
    # Needed for the user's language, encoding, time zone and temporary files.
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "TZ", "TMPDIR"),
    *("APPDATA", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATHEXT", "PROCESSOR_ARCHITECTURE", "SYSTEMDRIVE"),
    *("SYSTEMROOT", "TEMP", "USERNAME", "USERPROFILE"),
)
"""Environment variables that a server inherits by default; none of them commonly holds a secret."""

_ERRORS: Final = 1024  # bytes of standard error per read: each may be a line end
_TAIL: Final = 64 * 1024
_LONGEST_LINE: Final = 8 * 1024
_LAST_LINES: Final = 10
_REAPED: Final = 0.2
_HURRIED: Final = 0.5  # to exit by itself, if this is cancelled

_log = logging.getLogger("trimcp.stdio")


def child_environment(
    env: Mapping[str, str] | None = None, *, inherit: bool | Collection[str] = INHERITED
) -> dict[str, str]:
    """Return the environment for a server: the inherited variables, then `env`, which takes precedence.

    `inherit`: names of variables to copy from our environment; True for all, False for none.
    """
    if inherit is True:
        inherited = dict(os.environ)
    else:
        inherited = {name: os.environ[name] for name in inherit or () if name in os.environ}
        # Exported shell functions are code that a shell started by the child would run.
        inherited = {name: value for name, value in inherited.items() if not value.startswith("()")}
    return {**inherited, **(env or {})}


def _as_command(command: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    words: tuple[Any, ...] = tuple(command) if isinstance(command, list | tuple) else (None,)
    if not all(isinstance(word, str | os.PathLike) for word in words):
        wanted = 'the program and its arguments, such as ["python", "server.py"]'
        raise TypeError(f"a command is a list of texts, {wanted}, not {command!r:.100}")
    return tuple(map(os.fspath, words))


@attrs.frozen(field_transformer=checked(zero=("close", "terminate", "kill")))
@valued
class ShutdownTimes:
    """Seconds a child gets for each step of its shutdown; the defaults add up to less than five."""

    close: float = 2.0  # to exit by itself after its standard input was closed
    terminate: float = 1.5  # to exit, with its descendants, after SIGTERM
    kill: float = 0.5  # for the system to remove the processes after SIGKILL


async def end_process(
    process: trio.Process, descendants: Descendants, close_input: Callable[[], None], times: ShutdownTimes
) -> None:
    """End a child and its descendants: close its input, wait, SIGTERM, wait, SIGKILL.

    The steps are those of the specification's "Shutdown". Returns when all have exited, or when `times` are over, which
    is logged. Only processes identified as descendants are signalled. Cancelling shortens the first wait to half a
    second. The rest is shielded, since no process may outlive its connection, and bounded by `times`.

    `process`: the child. It may have exited already; its descendants are ended all the same.
    """
    with trio.CancelScope(shield=True):
        await look(descendants)  # before the child exits: orphans lose their parent id
    close_input()
    hurried = min(_HURRIED, times.close)
    try:
        with trio.move_on_after(times.close):
            await process.wait()
        hurried = 0
    finally:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(hurried):
                await process.wait()
            await _clear(process, descendants, times)


async def _clear(process: trio.Process, descendants: Descendants, times: ShutdownTimes) -> None:
    for name, seconds in (("SIGTERM", times.terminate), ("SIGKILL", times.kill)):
        with trio.move_on_after(seconds):
            await signal_until_gone(process, descendants, name)
            return
    _log.warning("process %d or a descendant of it survived SIGKILL", process.pid)


@attrs.frozen(field_transformer=checked(unchecked=("inherit_env",)))
class StdioServer:
    """How to start one server as a child process and communicate over its standard streams.

    Attributes:
        command: the program and its arguments; no shell is involved.
        env: variables to add to the inherited ones.
        inherit_env: names of the variables it inherits, True for all, False for none.
        cwd: its working directory, None for ours.
        on_stderr: called with each line it writes to standard error, without the newline. It must return at once;
            exceptions from it are logged. None writes the lines to the logger `trimcp.stdio` at DEBUG.
        shutdown: how long each step of its shutdown may take.
        trace: called with a line for every message, secrets masked; None for no trace.
        revision: the revision to begin with, or its name. With a legacy one, `initialize` is sent at once, for servers
            that break on the newer first message; they may answer with another that the client offers. None: the
            client finds out.
    """

    command: tuple[str, ...] = attrs.field(converter=_as_command)
    env: Mapping[str, str] | None = None
    inherit_env: bool | Collection[str] = INHERITED
    cwd: str | os.PathLike[str] | None = None
    on_stderr: Callable[[str], object] | None = None
    shutdown: ShutdownTimes = attrs.field(factory=ShutdownTimes)
    trace: Write | None = None
    revision: Revision | str | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[ChildChannel]:
        """Start the server and yield the channel to it; leaving ends the server and all its descendants.

        Exceptions of the body are raised without an exception group. Leaving takes as long as `shutdown` allows, less
        when cancelled.

        Raises:
            LocalError: the program could not be started; the text says why and what to do.
        """
        require_trio()
        channel = await _start(self)
        try:
            async with (
                open_service_nursery() as nursery,
                closing_with(partial(channel._end, nursery, self.shutdown)),
            ):
                nursery.start_soon(channel._watch_stderr)
                nursery.start_soon(channel._watch_exit)
                yield channel
        finally:
            channel._close_streams()


@attrs.define(eq=False, repr=False)
class ChildChannel(WrappedChannel):
    """The channel to a server that runs as a child process; `process` has its `pid` and `returncode`.

    Its input ends as soon as the process exits, even if a descendant holds the pipe open. What the process wrote before
    its exit is still received; then `receive` raises `trio.EndOfChannel`.
    """

    process: trio.Process
    _command: tuple[str, ...]
    _descendants: Descendants
    _receiver: AnyReceiver
    _sender: AnySender
    _stderr: AnyReceiver
    _on_stderr: Callable[[str], object] | None
    _tail: bytearray = attrs.field(factory=bytearray, init=False)
    _line: bytearray = attrs.field(factory=bytearray, init=False)
    _exited: trio.Event = attrs.field(factory=trio.Event, init=False)
    _leftovers: FdReceiver | None = attrs.field(default=None, init=False)

    @property
    def streams(self) -> tuple[trio.abc.ReceiveStream, trio.abc.SendStream]:
        """The pipes from and to the child, for callers that read and write bytes instead of messages."""
        return self._receiver, self._sender

    @property
    def sends_now(self) -> bool:  # type: ignore[override]  # as the wrapped channel is asked
        return self.channel.sends_now  # `send` changes nothing of what is sent

    async def send(self, batch: Sequence[Outgoing]) -> None:
        try:
            await self.channel.send(batch)
        except trio.BrokenResourceError:
            await self._probable_exit()
            raise

    async def receive(self) -> Sequence[Incoming]:
        try:
            return await self.channel.receive()
        except trio.EndOfChannel:
            await self._probable_exit()
            raise

    async def _probable_exit(self) -> None:
        """Wait a moment for the exit of a process that closed a pipe, so that `close_reason` knows its status.

        A process closes its pipes shortly before it can be waited for.
        """
        with trio.move_on_after(_REAPED):
            await self._exited.wait()

    async def aclose(self) -> None:
        """Close both pipes, so the child's input ends. `StdioServer.connect` waits for the child to exit."""
        self._keep_output_readable()
        await self.channel.aclose()

    @property
    def stderr_tail(self) -> str:
        """The last 64 KiB the child wrote to standard error. Untrusted text."""
        return self._tail.decode(errors="replace")

    def close_reason(self) -> str:
        """Return how the child ended and its last lines on standard error, for an error message."""
        code = self.process.returncode
        if code is None:
            state = f"is still running (process {self.process.pid})"
        elif code < 0:
            state = f"was ended by {signal_name(-code)}"
        else:
            state = f"exited with status {code}"
        self._take_remaining_stderr()
        text = f"the server {self._command[0]!r} {state}"
        lines = [line for line in clean(self.stderr_tail).split("\n") if line.strip()][-_LAST_LINES:]
        if lines:
            text += "; its last words on standard error:\n" + "\n".join(f"  {line[:500]}" for line in lines)
        return text

    async def _end(self, nursery: trio.Nursery, times: ShutdownTimes) -> None:
        """End the process and its descendants."""
        self._keep_output_readable()
        nursery.start_soon(self._discard_output)
        await end_process(self.process, self._descendants, self._sender.close, times)

    async def _watch_exit(self) -> None:
        await self.process.wait()
        self._receiver.end_after_buffered()
        self._sender.give_up()
        self._exited.set()

    async def _watch_stderr(self) -> None:
        with suppress(trio.BrokenResourceError):
            # `receive_some` yields after its read: a cancellation there would hide the bytes from `close_reason`.
            receive = self._stderr.receive_later if isinstance(self._stderr, FdReceiver) else self._stderr.receive_some
            while chunk := await receive(_ERRORS):
                self._take_stderr(chunk)

    def _take_stderr(self, chunk: bytes) -> None:
        self._tail += chunk
        del self._tail[:-_TAIL]
        self._line += chunk
        *lines, self._line = self._line.split(b"\n")
        for line in lines:
            self._pass_on(line.removesuffix(b"\r"))
        if len(self._line) > _LONGEST_LINE:
            self._pass_on(self._line)
            self._line = bytearray()

    def _pass_on(self, line: bytearray) -> None:
        for start in range(0, len(line) or 1, _LONGEST_LINE):
            text = line[start : start + _LONGEST_LINE].decode(errors="replace")
            try:
                if self._on_stderr is None:
                    _log.debug("%s: %s", self._command[0], clean(text))
                else:
                    self._on_stderr(text)
            except Exception as error:  # the hook is the user's function; its failure must not end the connection
                log_crash(_log, error, "the hook for standard error failed")

    def _take_remaining_stderr(self) -> None:
        with suppress(trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
            for _ in range(_TAIL // READ_SIZE + 1):
                if isinstance(self._stderr, FdReceiver):
                    self._take_stderr(self._stderr.receive_nowait())

    def _keep_output_readable(self) -> None:
        """Duplicate the descriptor of the child's output: a full pipe without a reader could keep the child from
        exiting.
        """
        if self._leftovers is None and isinstance(self._receiver, FdReceiver):
            self._leftovers = self._receiver.duplicate()

    async def _discard_output(self) -> None:
        with suppress(trio.BrokenResourceError):
            while self._leftovers is not None and await self._leftovers.receive_some():
                pass

    def _close_streams(self) -> None:
        _log.debug("%s", self.close_reason())
        if self._line:
            self._pass_on(self._line)
        for stream in (self._sender, self._receiver, self._stderr, self._leftovers):
            if stream is not None:
                stream.close()


def _why_not(server: StdioServer, environment: Mapping[str, str], error: Exception) -> str:
    """Return why a program could not be started, and what to do about it."""
    program = server.command[0]
    text = f"cannot start the server {program!r}: "
    if server.cwd is not None and not Path(server.cwd).is_dir():
        return f"{text}its working directory {os.fspath(server.cwd)!r} does not exist"
    if isinstance(error, ValueError):
        return f"{text}an argument or a variable holds a null character"
    found = program if os.path.dirname(program) else shutil.which(program, path=environment.get("PATH", os.defpath))
    place = None if found is None else Path(server.cwd or ".", found)
    if (
        place is not None
        and place.is_file()
        and isinstance(error, FileNotFoundError | OSError)
        and (error.errno in (errno.ENOENT, errno.ENOEXEC))
    ):
        return f"{text}{_no_interpreter(place)}"
    if isinstance(error, FileNotFoundError) and os.path.dirname(program):
        return f"{text}there is no such file; check the path"
    if isinstance(error, FileNotFoundError):
        path = environment.get("PATH", os.defpath)
        hint = "install it or give its full path"
        if any(map(str.isspace, program)):
            hint = "give the program and each of its arguments as a string of its own"
        return f"{text}no program of that name on its PATH ({path}); {hint}"
    if isinstance(error, PermissionError):
        return f"{text}the file is not executable; make it so, or name the interpreter that runs it first"
    return f"{text}{error}"


def _no_interpreter(file: Path) -> str:
    """Return why the system does not run a file that is there, by its first line."""
    with suppress(OSError), file.open("rb") as opened:
        first = opened.readline(_LONGEST_LINE)
        if not first.startswith(b"#!"):
            return 'it is no program, and its first line names no interpreter ("#!..."); name the interpreter first'
        if first.endswith(b"\r\n"):
            return 'its first line ends as on Windows (CRLF), so that its interpreter is not found; write it with "\\n"'
        named = clean(first[2:].decode(errors="replace").strip())
        return f"its first line names the interpreter {named!r}, which is not there; install it, or name another first"
    return "it cannot be run; name the interpreter that runs it first"


def _check(server: StdioServer) -> None:
    if not server.command or server.command[0] == "":
        raise LocalError("the command of a stdio server must name a program")
    given: list[object] = [each for pair in (server.env or {}).items() for each in pair]
    for value in given:
        if not isinstance(value, str | bytes | os.PathLike):
            hint = f"; write {str(value)!r}" if isinstance(value, int | float) else ""
            raise LocalError(f"the env of a stdio server holds texts, and {value!r:.60} is none{hint}")


async def _start(server: StdioServer) -> ChildChannel:
    _check(server)
    mark = Descendants.new_mark()
    environment = {**child_environment(server.env, inherit=server.inherit_env), MARK: mark}
    pipes: list[int] = []
    try:
        for _ in range(3):
            pipes += os.pipe()
        input_end, input_ours, output_ours, output_end, errors_ours, errors_end = pipes
        process = await trio.lowlevel.open_process(
            server.command,
            stdin=input_end,
            stdout=output_end,
            stderr=errors_end,
            env=environment,
            cwd=server.cwd,
            start_new_session=sys.platform != "win32",
        )
    except BaseException as exc:  # also if cancelled: no process uses the pipes then
        for fd in pipes:
            os.close(fd)
        if isinstance(exc, OSError | ValueError):
            raise LocalError(_why_not(server, environment, exc)) from exc
        raise
    for fd in (input_end, output_end, errors_end):
        os.close(fd)
    _log.debug("started %s as process %d", server.command[0], process.pid)
    descendants = Descendants(process.pid, mark)
    receiver, sender, stderr = PipeReceiver(output_ours), PipeSender(input_ours), PipeReceiver(errors_ours)
    messages: MessageChannel = StreamChannel(receiver, sender)
    messages.link = Link("stdio")
    messages.set_max_message(CLIENT_MAX_MESSAGE)
    if server.trace is not None:
        messages = traced(messages, server.trace)
    return ChildChannel(messages, process, server.command, descendants, receiver, sender, stderr, server.on_stderr)
