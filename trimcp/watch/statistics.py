"""Snapshots of a whole server: what is under way, what waits, what was refused or dropped, and who holds memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs

from trimcp.session.statistics import Lanes
from trimcp.session.turns import TurnStatistics
from trimcp.values import valued

if TYPE_CHECKING:
    from trimcp.workers.pool import ProcessStatistics

_SUMS: Final = (
    *("sessions", "running", "parked", "waiting", "pending"),
    *("abandoned_threads", "waiting_turns", "refused"),
)


@attrs.frozen
@valued
class MemoryStatistics:
    """The memory that the peers of a server make it keep, in bytes.

    Attributes:
        bound: the most there may be, `Server(memory=...)`.
        held: how much there is now.
        owners: the ten principals or addresses that hold most, the largest first.
        refused: bodies and messages refused so far because there was no room.
        ended: connections and sessions ended so far because they held most.
    """

    bound: int = 0
    held: int = 0
    owners: Mapping[str, int] = attrs.field(factory=dict)
    refused: int = 0
    ended: int = 0


@attrs.frozen
@valued
class ServerStatistics:
    """A snapshot of a server, over all its runs (mostly one).

    Attributes:
        sessions: connections and sessions there are now; over HTTP since 2026-07-28 each request is one.
        running, parked, waiting, pending: sums over the sessions; see `Statistics`.
        abandoned_threads: threads whose call is over but which cannot be stopped, also of sessions that have ended.
        waiting_turns: requests that wait for a turn of a quota, a thread or a process.
        refused: requests refused so far because too much was under way in their session, for a quota, or for threads or
            processes, or because the server ends. What HTTP refuses with 503 is not counted.
        quotas: each quota in use, by what it bounds ("tool forecast").
        threads: sync handlers in threads; None before the first.
        processes: worker processes; None before the first.
        lanes: what waits for slow peers, and what was merged and dropped so far, also in sessions that have ended.
        memory: what peers make it keep.
        hosts: what network hosts hold: over HTTP `connections`, `exchanges` (POSTs under way), `sessions` and `streams`
            (HTTP+SSE).
    """

    sessions: int = 0
    running: int = 0
    parked: int = 0
    waiting: int = 0
    pending: int = 0
    abandoned_threads: int = 0
    waiting_turns: int = 0
    refused: int = 0
    quotas: Mapping[str, TurnStatistics] = attrs.field(factory=dict)
    threads: TurnStatistics | None = None
    processes: ProcessStatistics | None = None
    lanes: Lanes = attrs.field(factory=Lanes)
    memory: MemoryStatistics = attrs.field(factory=MemoryStatistics)
    hosts: Mapping[str, int] = attrs.field(factory=dict)

    def __add__(self, other: ServerStatistics) -> ServerStatistics:
        """Return two runs of one server as one snapshot. Each run has quotas, threads and processes of its own."""
        return ServerStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            quotas={**self.quotas, **other.quotas},
            threads=other.threads or self.threads,
            processes=other.processes or self.processes,
            lanes=self.lanes + other.lanes,
            memory=other.memory,  # the server's, so the same for each run
            hosts={name: self.hosts.get(name, 0) + other.hosts.get(name, 0) for name in {**self.hosts, **other.hosts}},
        )
