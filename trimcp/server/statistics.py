"""A snapshot of a whole server: what its sessions are busy with, what waits, what was refused, what gave way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

from trimcp.server.turns import TurnStatistics
from trimcp.session.statistics import Lanes, lanes_of
from trimcp.values import valued

if TYPE_CHECKING:
    from trimcp.server.processes import ProcessStatistics
    from trimcp.server.running import Running

__all__ = ["ServerStatistics", "add_up"]


@attrs.frozen
@valued
class ServerStatistics:
    """A snapshot of a server, over all its runs (mostly one).

    Attributes:
        sessions: connections and sessions there are now; over HTTP since 2026-07-28 each request is one.
        running, parked, waiting, pending: the sums of what `Statistics` says of each.
        abandoned_threads: threads whose call is over but which cannot be stopped, those of ended sessions included.
        waiting_turns: requests that wait for a turn, because a quota or the number of threads or processes is used up.
        refused: requests refused so far because too much was under way: in their session, for a quota, for threads or
            processes, or because the server ends. What HTTP refuses before it is a request (503) is not among them.
        quotas: each quota that is in use, by what it bounds ("tool forecast").
        threads: sync handlers in threads; None before the first.
        processes: worker processes; None before the first.
        lanes: what waits for slow peers, what was merged and dropped so far, sessions that have ended included.
        hosts: what serves it holds, by name: over HTTP `connections`, `exchanges` (POSTs under way), `sessions` and
            `streams` (HTTP+SSE).
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
    hosts: Mapping[str, int] = attrs.field(factory=dict)


def add_up(runs: Iterable[Running]) -> ServerStatistics:
    """Return the snapshot of these runs. Costs some microseconds for each session."""
    total = ServerStatistics()
    for running in runs:
        total = _sum(total, _of(running))
    return total


def _of(running: Running) -> ServerStatistics:
    each = [session.statistics() for session in running.sessions]
    lanes = lanes_of(running.counts)
    for one in each:
        lanes += one.lanes
    gate, threads, processes = running.used_gate, running.used_threads, running.processes
    turns = [each for each in (gate, threads, processes) if each is not None]
    refused = running.refused + sum(session.refused for session in running.sessions)
    hosts: dict[str, int] = {}
    for host in running.hosts:
        for name, count in host().items():
            hosts[name] = hosts.get(name, 0) + count
    return ServerStatistics(
        sessions=len(each),
        running=sum(one.running for one in each),
        parked=sum(one.parked for one in each),
        waiting=sum(one.waiting for one in each),
        pending=sum(one.pending for one in each),
        abandoned_threads=0 if threads is None else threads.abandoned,
        waiting_turns=sum(each.waiting for each in turns),
        refused=refused + sum(each.refused for each in turns),
        quotas={} if gate is None else gate.statistics(),
        threads=None if threads is None else threads.statistics(),
        processes=None if processes is None else processes.statistics(),
        lanes=lanes,
        hosts=hosts,
    )


def _sum(one: ServerStatistics, other: ServerStatistics) -> ServerStatistics:
    """Return both together. A server that runs more than once has quotas, threads and processes of each run."""
    numbers = ("sessions", "running", "parked", "waiting", "pending", "abandoned_threads", "waiting_turns", "refused")
    return ServerStatistics(
        **{name: getattr(one, name) + getattr(other, name) for name in numbers},
        quotas={**one.quotas, **other.quotas},
        threads=other.threads or one.threads,
        processes=other.processes or one.processes,
        lanes=one.lanes + other.lanes,
        hosts={name: one.hosts.get(name, 0) + other.hosts.get(name, 0) for name in {**one.hosts, **other.hosts}},
    )
