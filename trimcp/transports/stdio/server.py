"""This process's own standard input and output as a message channel, for a server.

O_NONBLOCK belongs to the open file description, which the parent, its other children and the user's terminal may share.
If set there, it would stay set after this process ends, even if killed. So it is set on a description of our own if one
can be opened.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Final

from trimcp.channel import Link, require_trio
from trimcp.support.slotted import slotted
from trimcp.transports.stdio.streams import AnyReceiver, AnySender, FdReceiver, FdSender, ThreadReceiver, ThreadSender
from trimcp.transports.stream import StreamChannel
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, ParseLimits

if sys.platform != "win32":
    import fcntl

_FIRST_FREE: Final = 3
_PTMX: Final = (5, 2)  # opening it again would create a new terminal (Linux "devices.txt")

_claimed = False


@asynccontextmanager
async def claim_stdio(*, limits: ParseLimits = DEFAULT_LIMITS) -> AsyncIterator[StreamChannel]:
    """Yield the channel over this process's standard input and output; both are restored on leaving.

    Meanwhile user code and its children read an empty standard input, and what they print is written to standard error.
    So only messages reach the client (specification, "stdio": the server must not write anything else). The flags of a
    shared terminal or pipe do not change, not even if this process is killed.

    Args:
        limits: bounds for one message besides its size.

    Raises:
        RuntimeError: another server in this process has claimed them.
    """
    require_trio()
    claimed = claim()
    try:
        async with StreamChannel(claimed.receiver, claimed.sender, limits=limits) as channel:
            channel.link = Link("stdio")
            yield channel
    finally:
        claimed.release()


@slotted
class Claim:
    """Claimed descriptors 0 and 1: `receiver` reads from 0, `sender` writes to 1."""

    receiver: AnyReceiver
    sender: AnySender
    _undo: ExitStack

    def release(self) -> None:
        """Close both streams and restore descriptors 0 and 1; safe to call twice."""
        self._undo.close()


def claim() -> Claim:
    """Claim descriptors 0 and 1: user code and its children then read /dev/null and print to standard error.

    Text that is still in the buffer of `sys.stdout` is written to standard error too. A closed descriptor 0 acts as an
    empty input; a closed descriptor 1 as an output without a reader. Raises RuntimeError: they are claimed already.
    """
    global _claimed
    if _claimed:
        raise RuntimeError("standard input and output are in use by another server in this process")
    with ExitStack() as undo:
        _claimed = True
        undo.callback(_unclaim)
        # If the descriptor was closed when Python started, its number may now belong to something else, such as Trio's
        # epoll instance, and must not be changed.
        saved_input = _save(0, undo) if sys.__stdin__ is not None else None
        saved_output = _save(1, undo) if sys.__stdout__ is not None else None
        undo.callback(_flush_stdout)  # flush user code's output while descriptor 1 is still standard error
        sender = _open_sender(saved_output)
        undo.callback(sender.close)
        receiver = _open_receiver(saved_input)
        undo.callback(receiver.close)
        _stand_in(saved_input is not None, saved_output is not None)
        _set_line_buffering(undo)
        return Claim(receiver, sender, undo.pop_all())


def _unclaim() -> None:
    global _claimed
    _claimed = False


def _save(fd: int, undo: ExitStack) -> int:
    """Return a copy of a descriptor, which is restored by `undo`."""
    saved = _above(os.dup(fd))

    def put_back() -> None:
        os.dup2(saved, fd)
        os.close(saved)

    undo.callback(put_back)
    return saved


def _stand_in(for_input: bool, for_output: bool) -> None:
    null = _above(os.open(os.devnull, os.O_RDWR))
    if for_input:
        os.dup2(null, 0)
    if for_output:
        os.dup2(2 if sys.__stderr__ is not None else null, 1)
    os.close(null)


def _set_line_buffering(undo: ExitStack) -> None:
    """Make `sys.stdout` line-buffered, if it can be configured, so that user code's output appears at once."""
    _flush_stdout()
    if isinstance(sys.stdout, io.TextIOWrapper):
        undo.callback(_set_stdout, sys.stdout.line_buffering, sys.stdout.errors)
        # What the user's locale cannot print is escaped, as on standard error: a print never fails a tool.
        _set_stdout(True, "backslashreplace")


def _set_stdout(line_buffering: bool, errors: str | None) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=line_buffering)
        with suppress(OSError):  # it asks a file for its position, which another one behind the descriptor may not know
            sys.stdout.reconfigure(errors=errors)


def _flush_stdout() -> None:
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()


def _open_receiver(fd: int | None) -> AnyReceiver:
    if fd is None:
        return ThreadReceiver(_above(os.open(os.devnull, os.O_RDONLY)))
    own, options = _own(fd, os.O_RDONLY)
    return ThreadReceiver(own) if options is None else FdReceiver(own, **options)


def _open_sender(fd: int | None) -> AnySender:
    if fd is None:
        unread, fd = os.pipe()
        os.close(unread)
        return ThreadSender(_above(fd))
    own, options = _own(fd, os.O_WRONLY)
    return ThreadSender(own) if options is None else FdSender(own, **options)


def _own(fd: int, flags: int) -> tuple[int, dict[str, bool] | None]:
    """Return a descriptor of our own for the file of `fd`, and how to use it without blocking; None if it may block."""
    if sys.platform != "win32":
        mode = os.fstat(fd).st_mode
        if stat.S_ISSOCK(mode):
            return _above(os.dup(fd)), {"dontwait": True}
        private = _reopen(fd, flags)
        if private is not None:
            return private, {}
        if stat.S_ISFIFO(mode) and not _shared_with_stderr(fd):
            return _above(os.dup(fd)), {"restore": os.get_blocking(fd)}
    return _binary(_above(os.dup(fd))), None


def _above(fd: int) -> int:
    """Move a new descriptor above 0, 1 and 2, which may be free; children do not inherit it."""
    if fd >= _FIRST_FREE or sys.platform == "win32":
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE)
    os.close(fd)
    return moved


if sys.platform != "win32":

    def _reopen(fd: int, flags: int) -> int | None:
        """Open the pipe or terminal behind `fd` again, as a description of our own; None if that is not possible."""
        status = os.fstat(fd)
        terminal = os.isatty(fd) and (os.major(status.st_rdev), os.minor(status.st_rdev)) != _PTMX
        if not (terminal or stat.S_ISFIFO(status.st_mode)):
            return None
        try:
            private = _above(os.open(f"/proc/self/fd/{fd}", flags | os.O_NONBLOCK | os.O_NOCTTY))
        except OSError:
            return None
        again = os.fstat(private)
        if (again.st_dev, again.st_ino, again.st_rdev) != (status.st_dev, status.st_ino, status.st_rdev):
            os.close(private)
            return None
        return private

    def _shared_with_stderr(fd: int) -> bool:
        """Whether `fd` may share its description with standard error, whose writers expect it to block."""
        return sys.__stderr__ is not None and os.path.sameopenfile(fd, 2)

    def _binary(fd: int) -> int:
        return fd

else:

    def _binary(fd: int) -> int:
        import msvcrt

        msvcrt.setmode(fd, os.O_BINARY)
        return fd
