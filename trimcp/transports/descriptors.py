"""What the system knows of the other end of a pipe or socket: whether anybody is there, and how much was taken."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import sys
from collections.abc import Hashable
from contextlib import suppress
from typing import Final

import trio

if sys.platform != "win32":
    import fcntl
    import termios

READ_SIZE: Final = 65536
"""Bytes asked for per read: what a Linux pipe holds; malloc would map pages for much larger buffers."""


PIECE: Final = 65536
"""Bytes of a large write that are counted as one step of progress; see `progress_of`."""


def progress_of(stream: object) -> Hashable:
    """Return what changes while the peer reads what was written to a Trio stream; None where that is unknown.

    A stream of ours has `taken`. Of a socket, also under TLS, the system knows how many bytes wait in its buffer. That
    number can be the same after the buffer was read and filled again, so a sender of much counts its pieces, too.
    """
    taken = getattr(stream, "taken", None)
    if taken is not None:
        progress: Hashable = taken()
        return progress
    if isinstance(stream, trio.StapledStream):
        stream = stream.send_stream
    sock = socket_under(stream)
    return None if sock is None else unread_bytes(sock.fileno())


def socket_under(stream: object) -> trio.socket.SocketType | None:
    """Return the socket under a Trio stream, also if TLS is between, or what calls it so; None if there is none."""
    while (under := getattr(stream, "transport_stream", None)) is not None:
        stream = under
    return stream.socket if isinstance(stream, trio.SocketStream) else None


async def hung_up(sock: socket.socket | trio.socket.SocketType | None) -> int:
    """Wait until a socket's peer has sent its last byte, or the connection is broken, whatever is still unread.

    A read reports it only behind everything that was sent before. Linux reports it at once (epoll(7), EPOLLRDHUP), if
    all that was sent fits into the buffers. Elsewhere, without a socket, and where there is no descriptor left for
    epoll, this waits until it is cancelled.

    Returns:
        What broke the connection (an `errno`; the next read or write does not report it again), or 0. EBADF if the
        socket is closed here already; if it is closed here meanwhile, this goes on waiting.
    """
    if sys.platform == "linux" and sock is not None:
        if sock.fileno() < 0:
            return errno.EBADF
        await _wait_epoll(sock.fileno(), select.EPOLLRDHUP)
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return await trio.sleep_forever()


async def unheard(stream: object) -> None:
    """Wait until the peer no longer reads what is written to a stream, which else only the next write would report.

    A peer that has only closed its sending side may still read. Where that is unknown, this waits for ever.

    Args:
        stream: a Trio stream over a socket, or one that has a `fileno`.
    """
    fileno = getattr(socket_under(stream) or stream, "fileno", None)
    if fileno is not None and (fd := fileno()) >= 0:
        await _wait_epoll(fd, 0)
    else:
        await trio.sleep_forever()


async def _wait_epoll(fd: int, events: int) -> None:
    """Wait with epoll for `events` or an error; for ever where the system cannot tell."""
    if sys.platform == "linux":
        with suppress(OSError), select.epoll(1) as watch:  # there is no descriptor to spare, or it is a file
            watch.register(fd, events)
            await trio.lowlevel.wait_readable(watch.fileno())
            return
    await trio.sleep_forever()


async def over_or_hung_up(over: trio.Event, sock: socket.socket | trio.socket.SocketType | None) -> None:
    """Wait until the task that reads sets `over`, or until `hung_up` returns."""

    async def watch() -> None:
        await hung_up(sock)
        nursery.cancel_scope.cancel(reason="the peer has hung up")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await over.wait()
        nursery.cancel_scope.cancel(reason="it is known already")


def unread_bytes(fd: int) -> int:
    """Return how much of what was written to a pipe, socket or terminal was not taken out of it yet; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    try:
        request = termios.FIONREAD if stat.S_ISFIFO(os.fstat(fd).st_mode) else termios.TIOCOUTQ
        return int.from_bytes(fcntl.ioctl(fd, request, bytes(4)), sys.byteorder)
    except OSError:
        return 0  # closed, or nothing that knows
