"""Connections are spread evenly over processes that accept from the same sockets.

The system wakes all of them for each connection, and whoever is first gets it. So each one writes how many it has where
the others see it, and lets those first that have fewer. One that does not come for its own is not waited for.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import tempfile
from struct import Struct
from typing import Final

import trio

_SLOT: Final = Struct("=qq")  # connections, -1 of a process that accepts none; and a number that changes while it runs
_PAUSE: Final = 0.005  # seconds for those that have fewer,
_LOOK: Final = 0.0005  # and how often it is looked whether one of them has come
_GIVEN_UP: Final = 0.1  # seconds without a sign after which one is not waited for


def open_shares(processes: int) -> int:
    """Return the descriptor of the memory that so many processes share."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("trimcp-connections")
    else:
        fd, path = tempfile.mkstemp(prefix="trimcp-")
        os.unlink(path)
    os.truncate(fd, processes * _SLOT.size)
    for place in range(processes):
        leave(fd, place)
    return fd


def leave(fd: int, place: int) -> None:
    """Note that a process accepts no connection."""
    os.pwrite(fd, _SLOT.pack(-1, 0), place * _SLOT.size)


class ConnectionShares:
    """How many connections each of several processes has."""

    def __init__(self, fd: int, place: int) -> None:
        """`fd` is what `open_shares` returned, in this process, and `place` that of this process."""
        self._memory = mmap.mmap(fd, 0)
        self._place = place
        self._signs = 0
        self._left = False
        self._late: dict[int, tuple[int, float]] = {}  # who was waited for: its last sign, and since when

    def note(self, connections: int) -> None:
        """Say how many connections this process has."""
        if not self._left:
            self._signs += 1
            _SLOT.pack_into(self._memory, self._place * _SLOT.size, connections, self._signs)

    def leave(self) -> None:
        """Say that this process accepts none any more."""
        self.note(-1)
        self._left = True

    async def wait_turn(self, sock: socket.socket, connections: int) -> None:
        """Let processes accept that have fewer connections than this one: return at once if there is none.

        Nobody can be told that another has come, so this looks, for a few milliseconds at most.
        """
        self.note(connections)
        first = fewer = self._fewer(connections)
        until = trio.current_time() + _PAUSE
        waiting = select.poll()
        waiting.register(sock, select.POLLIN)
        while fewer and trio.current_time() < until:
            await trio.sleep(_LOOK)
            if not waiting.poll(0):
                return
            fewer = self._fewer(connections)
        slots = list(_SLOT.iter_unpack(self._memory))
        for place, sign in first.items():
            if slots[place][1] == sign:
                self._late.setdefault(place, (sign, trio.current_time()))

    def _fewer(self, connections: int) -> dict[int, int]:
        """Return who has fewer, and is not given up, with the number it has written."""
        fewer, now = {}, trio.current_time()
        for place, (theirs, sign) in enumerate(_SLOT.iter_unpack(self._memory)):
            if place == self._place or not 0 <= theirs < connections:
                continue
            late = self._late.get(place)
            if late is None or late[0] != sign:
                self._late.pop(place, None)
                fewer[place] = sign
            elif now - late[1] < _GIVEN_UP:
                fewer[place] = sign
        return fewer
