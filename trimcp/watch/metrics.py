"""Metrics of a server in the text format of Prometheus (version 0.0.4), for a route of its own: docs/howto/operate.md.

Most of it is read from `Server.statistics()` when somebody asks; only calls are counted as they end.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

import attrs
import trio

from trimcp.channel import LANES
from trimcp.session.incoming.job import Job
from trimcp.transports.http.interfaces import Head, HttpResponse
from trimcp.watch.commands import lacks_scope
from trimcp.watch.picture import Observed, outcome_of, target_of

BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 3600.0)
"""Upper bounds of the histogram of durations, in seconds."""

_TYPE: Final = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
_MOST_TARGETS: Final = 500  # tools and prompts that are told apart; the others are one
_OTHERS: Final = "(others)"
_NAMED: Final = frozenset({"tools/call", "prompts/get"})  # of which there are as many as the program registers

Labels = tuple[tuple[str, str], ...]


@attrs.define(eq=False)
class _Durations:
    """How many took how long."""

    counts: list[int] = attrs.field(factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Metrics:
    """Counts the calls of a server while it runs, and tells Prometheus all its figures: `routes={"/metrics": metrics}`.

    The route comes after the checks of Host, Origin and identity, like every other. Tools and prompts are told apart,
    as long as there are fewer than 500; principals and clients never are.

    Args:
        server: the server, which does not run yet.
        scope: a scope that a token needs for this; None lets in everybody whom the server lets in.
    """

    def __init__(self, server: Observed, *, scope: str | None = None) -> None:
        self._server = server
        self._scope = scope
        self._ended: dict[tuple[str, str, str], int] = {}
        self._durations: dict[tuple[str, str], _Durations] = {}
        server.parts.append(self._while_running)

    @asynccontextmanager
    async def _while_running(self, running: object) -> AsyncIterator[None]:
        with self._server.telling_finished(self._finished):
            yield

    def _finished(self, job: Job, reply: bytes | None) -> None:
        method = job.request.method.name
        target = target_of(self._server, job) or (_OTHERS if method in _NAMED else "")
        if (method, target) not in self._durations and len(self._durations) >= _MOST_TARGETS:
            target = _OTHERS
        durations = self._durations.get((method, target))
        if durations is None:
            durations = self._durations[method, target] = _Durations()
        durations.add(max(0.0, trio.current_time() - job.arrived))
        key = method, target, outcome_of(job, reply)
        self._ended[key] = self._ended.get(key, 0) + 1

    async def __call__(self, head: Head) -> HttpResponse:
        """Answer a request of the route."""
        if head.method not in ("GET", "HEAD"):
            return HttpResponse(405, (("Allow", "GET, HEAD"),), b"")
        if self._scope is not None and (refused := lacks_scope(head, self._scope)) is not None:
            return refused
        before = trio.current_time()
        await trio.lowlevel.checkpoint()
        return HttpResponse(200, (_TYPE,), self.text(trio.current_time() - before).encode())

    def text(self, lag: float = 0.0) -> str:
        """Return all metrics.

        Args:
            lag: seconds that a task of the event loop has just waited for its turn.
        """
        return "".join(line for family in self._families(lag) for line in family)

    def _families(self, lag: float) -> Iterator[Iterator[str]]:
        now = self._server.statistics()
        info = self._server.info
        yield _family("info", "gauge", "The server.", {(("name", info.name), ("version", info.version)): 1})
        calls: dict[Labels, float] = {
            (("method", method), ("target", target), ("outcome", outcome)): count
            for (method, target, outcome), count in self._ended.items()
        }
        yield _family("requests_ended_total", "counter", "Requests that ended, by outcome.", calls)
        yield self._histogram()
        yield _family("sessions", "gauge", "Open sessions.", {(): now.sessions})
        states = {"running": now.running, "asking": now.parked, "waiting": now.waiting, "turn": now.waiting_turns}
        yield _family("requests", "gauge", "Requests under way, by state.", _by("state", states))
        yield _family(
            "requests_refused_total", "counter", "Requests refused before anything was done.", {(): now.refused}
        )
        for name, kind, told in (
            ("messages", "gauge", "Messages that wait for slow clients."),
            ("bytes", "gauge", "Bytes of the messages that wait for slow clients."),
            ("merged", "counter", "Messages replaced by a later one of their kind."),
            ("dropped", "counter", "Messages that will not be delivered."),
        ):
            found = {lane: getattr(getattr(now.lanes, lane), name) for lane in LANES}
            yield _family(f"lane_{name}{'_total' * (kind == 'counter')}", kind, told, _by("lane", found))
        memory = now.memory
        yield _family("memory_bytes", "gauge", "Memory held for clients.", {(): memory.held})
        yield _family("memory_bound_bytes", "gauge", "The most that may be held.", {(): memory.bound})
        yield _family("memory_refused_total", "counter", "Messages refused for lack of memory.", {(): memory.refused})
        yield _family("memory_ended_total", "counter", "Sessions ended for lack of memory.", {(): memory.ended})
        turns = {"threads": now.threads, **now.quotas}
        for name, kind, told in (
            ("running", "gauge", "Calls that have a turn of a quota."),
            ("waiting", "gauge", "Calls that wait for a turn of a quota."),
            ("refused", "counter", "Calls that a quota refused."),
        ):
            counts = {quota: getattr(one, name) for quota, one in turns.items() if one is not None}
            yield _family(f"quota_{name}{'_total' * (kind == 'counter')}", kind, told, _by("quota", counts))
        if now.processes is not None:
            processes = {name: getattr(now.processes, name) for name in ("alive", "busy", "waiting")}
            yield _family("worker_processes", "gauge", "Worker processes, and calls for one.", _by("state", processes))
            ended = {name: getattr(now.processes, name) for name in ("started", "killed", "crashed")}
            yield _family("worker_processes_total", "counter", "Worker processes so far.", _by("event", ended))
        yield _family("hosts", "gauge", "What network hosts have open.", _by("what", now.hosts))
        yield _family("loop_lag_seconds", "gauge", "How long a task waited for its turn.", {(): lag})

    def _histogram(self) -> Iterator[str]:
        name = "trimcp_request_seconds"
        yield f"# HELP {name} Seconds from a request to its end.\n# TYPE {name} histogram\n"
        for (method, target), durations in self._durations.items():
            labels: Labels = (("method", method), ("target", target))
            so_far = 0
            for bound, count in zip((*BUCKETS, math.inf), durations.counts, strict=True):
                so_far += count
                upper = "+Inf" if bound == math.inf else f"{bound:g}"
                yield f"{name}_bucket{_labels((*labels, ('le', upper)))} {so_far}\n"
            yield f"{name}_sum{_labels(labels)} {durations.total!r}\n{name}_count{_labels(labels)} {so_far}\n"


def _by(label: str, values: Mapping[str, float]) -> dict[Labels, float]:
    return {((label, name),): value for name, value in values.items()}


def _family(name: str, kind: str, told: str, samples: Mapping[Labels, float]) -> Iterator[str]:
    yield f"# HELP trimcp_{name} {told}\n# TYPE trimcp_{name} {kind}\n"
    for labels, value in samples.items():
        yield f"trimcp_{name}{_labels(labels)} {value!r}\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    text = value.encode("utf-8", "replace").decode()  # half a surrogate pair has no UTF-8
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
