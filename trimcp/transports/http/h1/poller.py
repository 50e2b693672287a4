"""Wakes the tasks that read from many sockets, a bounded number of them in each turn of Trio's loop (Linux only).

Trio alone wakes all whose sockets have input. With hundreds of connections that many requests are then read before the
first is answered: their objects outlive each other, so the garbage collector copies and traverses them, and they leave
the processor's caches. Some dozens at a time cost the same however many there are, and are answered sooner.

A socket is registered once, not for each wait as in Trio, which saves a system call for each request.
"""

from __future__ import annotations

import select
from types import TracebackType
from typing import Final, Protocol, Self

import trio

_AT_ONCE: Final = 32
"""Sockets whose readers wake in one turn. With 16 the turns themselves cost more, with 64 the collector begins to."""


class Reader(Protocol):
    """What reads from a registered socket."""

    def input_came(self, *, ended: bool) -> None:
        """Note that there is input: all of it must be read before this is called again. Must not raise.

        `ended`: after the input the peer has ended or broken the connection, which is not said again either.
        """


class Poller:
    """Watches sockets with a single epoll; `run` is its task. Leaving its `with` block closes it."""

    __slots__ = ("_epoll", "_readers")

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Reader] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._epoll.close()

    def add(self, fd: int, reader: Reader) -> None:
        """Call `reader` about the input of a socket, what is there already included, until it is removed.

        Raises OSError: the system cannot watch it.
        """
        # Edge-triggered: a socket that nobody reads at the moment does not come up again and again.
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        self._readers[fd] = reader

    def remove(self, fd: int) -> None:
        """Forget a socket, before it is closed or used otherwise. No effect if it is not there."""
        if self._readers.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    async def run(self) -> None:
        """Wake readers until cancelled."""
        epoll, readers = self._epoll, self._readers
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            while found := epoll.poll(0, _AT_ONCE):
                for fd, events in found:
                    readers[fd].input_came(ended=events != select.EPOLLIN)
                if len(found) < _AT_ONCE:
                    break
                await trio.lowlevel.checkpoint()
