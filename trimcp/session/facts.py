"""What a session is told by its transport, and what its peer makes it keep."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import NamedTuple

import attrs

from trimcp.budget import Budget, MemoryCharge
from trimcp.channel import HttpClientStatistics, Link
from trimcp.support.slotted import slotted


class Beside(NamedTuple):
    """What a server has beside its sessions, for people who look: an upstream, or an agent's context or tools."""

    kind: str
    """"upstream", "context" or "provider"."""
    name: str
    state: str
    seconds: float | None = None
    """How long it has been so; of a context, since it was used."""


class SessionMemory(MemoryCharge):
    """The memory that the peer uses in one session, as counted in the budget, and the parts of it that others tell.

    `budget`: counts the memory that all peers together use; None counts nothing.
    """

    __slots__ = ("arriving", "budget", "handshake", "in_arrays")

    def __init__(self, budget: Budget | None = None) -> None:
        super().__init__()
        self.budget: Budget | None = budget
        self.arriving: int = 0  # bytes of the message being processed now
        self.handshake: int = 0  # bytes that the engine keeps of the handshake
        # bytes of replies that wait for the others of their arrays. They are bounded by themselves and not counted.
        self.in_arrays: int = 0


@slotted
class TransportFacts:
    """What the transport of a session has told it, or whatever drives it instead of a transport."""

    mirrors_headers: bool = False  # whether its channel sends headers with our requests
    # The channel's method of that name; None while the session does not run over a channel
    http_statistics: Callable[[], HttpClientStatistics | None] | None = None
    sends_now: bool = False  # whether its channel can send a message without a turn of the writer
    # Whether it can, and the last message arrived without others: then no others follow what it leads to
    alone: bool = False
    pushed: bool = False  # whether messages are pushed: then overload is refused instead of pausing the reader
    single_request: bool = False  # whether the session ends after one request
    via: object = None  # the part of a program that accepted it, if that part ends it; None for the whole run
    link: Link | None = None  # how the peer has come, for the whole session; else its sinks know
    when_closed: Callable[[], None] | None = None  # called when it is closed, once, if no driver waits for that
    # What others wait for from this peer, beside our requests. While it holds anything, reading does not pause for
    # lack of room, and draining goes on.
    owed: Sized = attrs.field(default=())
