"""Snapshots of a whole server: what is under way, what waits, what was refused or dropped, and who holds memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

import attrs

from trimcp.budget import Budget
from trimcp.channel import LaneCounts
from trimcp.session.session import Session
from trimcp.session.statistics import Lanes, lanes_of
from trimcp.session.turns import Turns, TurnStatistics
from trimcp.values import valued

if TYPE_CHECKING:
    from trimcp.workers.pool import ProcessStatistics, WorkerPool

__all__ = ["MemoryStatistics", "ServerStatistics", "add_up", "server_statistics"]


_SHOWN: Final = 10  # owners that statistics name


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


class Quotas(Protocol):
    """The quotas of one run (`server.gate`)."""

    @property
    def waiting(self) -> int: ...
    @property
    def refused(self) -> int: ...
    def statistics(self) -> Mapping[str, TurnStatistics]: ...


def server_statistics(
    sessions: Collection[Session],
    counts: LaneCounts,
    refused: int,
    budget: Budget,
    hosts: Iterable[Mapping[str, int]],
    *,
    quotas: Quotas | None = None,
    threads: Turns | None = None,
    processes: WorkerPool | None = None,
) -> ServerStatistics:
    """Return the snapshot of one run. Costs some microseconds for each session.

    Args:
        sessions: those there are now.
        counts, refused: what sessions that have ended dropped or merged, and how many requests they refused.
        budget: what peers make the server keep.
        hosts: what each host of the run holds.
        quotas, threads, processes: those in use.
    """
    each = [session.statistics() for session in sessions]
    lanes = lanes_of(counts)
    for one in each:
        lanes += one.lanes
    turns = [used for used in (quotas, threads, processes) if used is not None]
    held: Counter[str] = Counter()
    for host in hosts:
        held.update(host)
    return ServerStatistics(
        sessions=len(each),
        **{name: sum(getattr(one, name) for one in each) for name in ("running", "parked", "waiting", "pending")},
        abandoned_threads=0 if threads is None else threads.abandoned,
        waiting_turns=sum(used.waiting for used in turns),
        refused=refused + sum(session.refused for session in sessions) + sum(used.refused for used in turns),
        quotas={} if quotas is None else quotas.statistics(),
        threads=None if threads is None else threads.statistics(),
        processes=None if processes is None else processes.statistics(),
        lanes=lanes,
        memory=_memory_of(budget),
        hosts=dict(held),
    )


def add_up(runs: Iterable[ServerStatistics]) -> ServerStatistics:
    """Return the snapshot of a server from those of its runs."""
    return functools.reduce(_sum, runs, ServerStatistics())


def _memory_of(budget: Budget) -> MemoryStatistics:
    return MemoryStatistics(budget.bound, budget.held, dict(budget.owners()[:_SHOWN]), budget.refused, budget.ended)


def _sum(one: ServerStatistics, other: ServerStatistics) -> ServerStatistics:
    """Return both together. A server that runs more than once has quotas, threads and processes of each run."""
    numbers = ("sessions", "running", "parked", "waiting", "pending", "abandoned_threads", "waiting_turns", "refused")
    return ServerStatistics(
        **{name: getattr(one, name) + getattr(other, name) for name in numbers},
        quotas={**one.quotas, **other.quotas},
        threads=other.threads or one.threads,
        processes=other.processes or one.processes,
        lanes=one.lanes + other.lanes,
        memory=other.memory,  # the server's, so the same for each run
        hosts={name: one.hosts.get(name, 0) + other.hosts.get(name, 0) for name in {**one.hosts, **other.hosts}},
    )
