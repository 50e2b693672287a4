"""What the operating system knows about a pipe or socket: whether its peer reads, and how many bytes wait unread."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import sys
from collections.abc import Hashable
from contextlib import suppress
from typing import Final, TypeAlias

import trio

if sys.platform != "win32":
    import fcntl
    import termios

AnySocket: TypeAlias = socket.socket | trio.socket.SocketType

READ_SIZE: Final = 65536
"""Bytes per read: the size of a Linux pipe's buffer. For much larger buffers malloc would map pages on each read."""


PIECE: Final = 65536
"""Bytes. Each such piece of a large write counts as one step of progress; see `progress_of`."""


def progress_of(stream: object) -> Hashable:
    """Return a value that changes while the peer reads what was written to a Trio stream; None if that is unknown.

    Our own streams have `write_progress`. For a socket, also under TLS, it is the number of bytes in the system's send
    buffer. That number can be equal again after the buffer was read and refilled, so senders of large messages also
    count pieces.
    """
    write_progress = getattr(stream, "write_progress", None)
    if write_progress is not None:
        progress: Hashable = write_progress()
        return progress
    if isinstance(stream, trio.StapledStream):
        stream = stream.send_stream
    sock = socket_under(stream)
    return None if sock is None else unread_bytes(sock.fileno())


def socket_under(stream: object) -> trio.socket.SocketType | None:
    """Return the socket under a Trio stream or under its layers, such as TLS; None if the stream has none."""
    while (under := getattr(stream, "transport_stream", None)) is not None:
        stream = under
    return stream.socket if isinstance(stream, trio.SocketStream) else None


async def wait_peer_closed(sock: AnySocket | None) -> int:
    """Wait until a socket's peer has sent its last byte or the connection is broken, without reading.

    A read would report this only after all unread bytes. Linux reports it at once (epoll(7), EPOLLRDHUP) if those bytes
    fit into the buffers. On other systems, without a socket, or without a free descriptor for epoll, this waits until
    cancelled.

    Returns:
        The `errno` that broke the connection (the next read or write does not report it again), or 0. EBADF if the
        socket is closed here already, or by its reader at the same time; if it is closed here during the wait, the wait
        continues.
    """
    if sys.platform == "linux" and sock is not None:
        if sock.fileno() < 0:
            return errno.EBADF
        await _wait_epoll(sock.fileno(), select.EPOLLRDHUP)
        if sock.fileno() < 0:  # its reader has seen the end in the same turn, and closed it
            return errno.EBADF
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return await trio.sleep_forever()


async def wait_peer_stops_reading(stream: object) -> None:
    """Wait until the peer no longer reads from a stream. Without this, only the next write would report it.

    A peer that has only closed its sending side may still read. Where the system cannot report this, wait until
    cancelled.
    """
    fileno = getattr(socket_under(stream) or stream, "fileno", None)
    if fileno is not None and (fd := fileno()) >= 0:
        await _wait_epoll(fd, 0)
    else:
        await trio.sleep_forever()


async def _wait_epoll(fd: int, events: int) -> None:
    """Wait with epoll for `events` or an error; until cancelled where the system cannot report them."""
    if sys.platform == "linux":
        with suppress(OSError), select.epoll(1) as watch:  # no free descriptor, or `fd` is a file
            watch.register(fd, events)
            await trio.lowlevel.wait_readable(watch.fileno())
            return
    await trio.sleep_forever()


async def over_or_peer_closed(over: trio.Event, sock: AnySocket | None) -> None:
    """Wait until the reading task sets `over`, or until `wait_peer_closed` returns."""

    async def watch() -> None:
        await wait_peer_closed(sock)
        nursery.cancel_scope.cancel(reason="the peer has hung up")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        await over.wait()
        nursery.cancel_scope.cancel(reason="it is known already")


def unread_bytes(fd: int) -> int:
    """Return how many bytes written to a pipe, socket or terminal its reader has not yet taken; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    try:
        request = termios.FIONREAD if stat.S_ISFIFO(os.fstat(fd).st_mode) else termios.TIOCOUTQ
        return int.from_bytes(fcntl.ioctl(fd, request, bytes(4)), sys.byteorder)
    except OSError:
        return 0  # closed, or the kind of descriptor does not support it
