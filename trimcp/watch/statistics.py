"""Snapshots of a whole server: running, waiting and refused requests, dropped messages, and memory by owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs

from trimcp.session.incoming.turns import TurnStatistics
from trimcp.session.statistics import Lanes
from trimcp.support.slotted import valued

if TYPE_CHECKING:
    from trimcp.workers.pool import ProcessStatistics

_SUMS: Final = (
    *("sessions", "running", "parked", "waiting", "pending"),
    *("abandoned_threads", "waiting_turns", "refused"),
)


@attrs.frozen
@valued
class MemoryStatistics:
    """The memory held for the peers of a server, in bytes.

    Attributes:
        bound: the maximum, `Server(memory=...)`.
        held: the bytes held now.
        owners: the ten principals or addresses with the most bytes, the largest first.
        refused: bodies and messages refused so far because the bound was reached.
        ended: connections and sessions ended so far because they held the most.
    """

    bound: int = 0
    held: int = 0
    owners: Mapping[str, int] = attrs.field(factory=dict)
    refused: int = 0
    ended: int = 0


@attrs.frozen
@valued
class ServerStatistics:
    """A snapshot of a server, over all its runs (usually one).

    Attributes:
        sessions: open connections and sessions; over HTTP since 2026-07-28 each request is one.
        running, parked, waiting, pending: sums over the sessions; see `Statistics`.
        abandoned_threads: threads whose call has ended but which cannot be stopped, also of ended sessions.
        waiting_turns: requests that wait for a turn of a quota, a thread or a process.
        refused: requests refused so far because of the bounds of their session, of a quota, or of threads or processes,
            or because the server drains. Requests that HTTP refuses with 503 are not counted.
        quotas: each quota in use, by its kind and name ("tool forecast").
        threads: sync handlers in threads; None before the first.
        processes: worker processes; None before the first.
        lanes: messages that wait for slow peers, and those merged and dropped so far, also in ended sessions.
        memory: the memory held for peers.
        hosts: counts of the network hosts: over HTTP `connections`, `exchanges` (running POSTs), `sessions` and
            `streams` (HTTP+SSE), and with agent tools `agent_contexts` (in memory), `agent_calls` under way and
            `agent_tools` registered.
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
        """Return the sum of two runs of one server. Each run has quotas, threads and processes of its own."""
        return ServerStatistics(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            quotas={**self.quotas, **other.quotas},
            threads=other.threads or self.threads,
            processes=other.processes or self.processes,
            lanes=self.lanes + other.lanes,
            memory=other.memory,  # of the server, so equal in each run
            hosts={name: self.hosts.get(name, 0) + other.hosts.get(name, 0) for name in {**self.hosts, **other.hosts}},
        )
