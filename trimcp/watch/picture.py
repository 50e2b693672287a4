"""A picture of what a server does: its sessions, their requests with progress and where each waits, and what ended.

It is read from what the sessions know anyway, so nothing is done for it until somebody looks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs
import trio

from trimcp.channel import Link, Sink
from trimcp.session.facts import Beside
from trimcp.session.incoming.job import Extras, Finished, Job, Owner, session_key
from trimcp.session.session import Session
from trimcp.support.cleaning import one_line
from trimcp.support.slotted import valued
from trimcp.watch.tree import waiting_places
from trimcp.wire.common import Implementation

if TYPE_CHECKING:
    from trimcp.watch.statistics import ServerStatistics

MOST_SESSIONS: Final = 200
MOST_REQUESTS: Final = 500
MOST_BESIDE: Final = 200
_MOST_LINES: Final = 20  # of where one request waits
_LONGEST: Final = 500  # characters of a progress message


@attrs.frozen
@valued
class RequestPicture:
    """One request that a server handles or keeps waiting."""

    key: str
    """Names it for `Observation.cancel`; good while the request lives."""
    method: str
    target: str | None
    """The tool, prompt or resource that it is for."""
    id: str
    state: str
    """"running", "waiting" for a slot, "asking" its client, or "cancelled" and not ended yet."""
    seconds: float
    """Since it arrived."""
    left: float | None
    """Seconds to its deadline; None if it has none."""
    progress: float | None
    total: float | None
    message: str | None
    """What the last report said, if it had a text."""
    per_second: float | None
    """How fast its progress grows, from its beginning."""
    reason: str | None
    """Why it is being cancelled."""
    waits: tuple[str, ...]
    """Where its task waits, the outermost call first, and below it the tasks that it started."""


@attrs.frozen
@valued
class SessionPicture:
    """One session of a server."""

    key: str
    """Names it for `Observation.close`; good while the session lives."""
    peer: str | None
    """Name and version of the client, as it says."""
    principal: str | None
    owner: str | None
    """Whose memory it counts as: the principal, or the address; None where nothing is counted."""
    revision: str | None
    transport: str | None
    """How the client has come: "stdio", "HTTP/1.1", "HTTP/2", "HTTP+SSE", "WebSocket", "gRPC" or "in memory"."""
    address: str | None
    """The client's, where there is one."""
    seconds: float | None
    """Since it began; None of one that serves a single request."""
    running: int
    waiting: int
    asking: int
    unread: int
    """Bytes that wait for the client."""
    merged: int
    dropped: int
    held: int
    """Bytes of memory counted for it."""
    requests: tuple[RequestPicture, ...]


@attrs.frozen
@valued
class EndedRequest:
    """One request that has ended while somebody looked."""

    method: str
    target: str | None
    principal: str | None
    seconds: float
    outcome: str
    """As `outcome_of` says."""
    reason: str | None
    """Why it was cancelled, or the code of its error."""
    at: float
    """When, in seconds since 1970."""


@attrs.frozen
@valued
class BesidePicture:
    """What a server has beside its sessions."""

    kind: str
    """"upstream", "provider" or "context"."""
    name: str
    state: str
    seconds: float | None
    """How long it has been so; of a context, since it was used; None if it is not known."""


@attrs.frozen
@valued
class Picture:
    """What a server does at one moment."""

    server: str
    version: str
    pid: int
    at: float
    """In seconds since 1970."""
    statistics: ServerStatistics
    sessions: tuple[SessionPicture, ...]
    """Those with the most requests first, at most 200."""
    more_sessions: int
    """How many are not shown."""
    more_requests: int
    beside: tuple[BesidePicture, ...]
    """What `Server.beside` tells of: upstreams of a fleet, providers and contexts of agents; at most 200.
    `statistics.hosts` has the number of contexts."""
    ended: tuple[EndedRequest, ...]
    """The latest last."""


class Observed(Protocol):
    """What this room uses of `Server`, which stands above it."""

    info: Implementation
    beside: list[Callable[[], Iterable[Beside]]]
    parts: list[Any]
    around: Any
    on_session: Any

    @property
    def runs(self) -> Iterable[Any]: ...
    @property
    def tools(self) -> Any: ...
    @property
    def prompts(self) -> Any: ...
    def runs_in_thread(self, tool: str) -> bool: ...
    def sessions(self) -> Mapping[Session, float]: ...
    def statistics(self) -> ServerStatistics: ...
    def telling_finished(self, hook: Finished) -> AbstractContextManager[None]: ...


def take_picture(server: Observed, ended: Iterable[EndedRequest] = ()) -> Picture:
    """Return what a server does now."""
    now = trio.current_time()
    began = server.sessions()
    sessions = sorted(began, key=lambda session: -len(session.jobs.by_id))
    shown, room, left = [], MOST_REQUESTS, 0
    for session in sessions[:MOST_SESSIONS]:
        jobs = list(session.jobs)
        shown.append(_session(session, jobs[:room], began[session], now))
        left += max(0, len(jobs) - room)
        room = max(0, room - len(jobs))
    left += sum(len(session.jobs.by_id) for session in sessions[MOST_SESSIONS:])
    beside = chain.from_iterable(tell() for tell in server.beside)
    besides = tuple(BesidePicture(*one) for one in islice(beside, MOST_BESIDE))
    return Picture(
        server.info.name,
        server.info.version,
        os.getpid(),
        time.time(),
        server.statistics(),
        tuple(shown),
        max(0, len(sessions) - MOST_SESSIONS),
        left,
        besides,
        tuple(ended),
    )


def request_key(job: Job) -> str:
    """Return what names a request while it lives. The time tells it from a later one in the same place of memory."""
    return f"{id(job):x}-{job.arrived:.6f}"


def link_of(session: Owner, sink: Sink) -> Link | None:
    """Return how the peer has come to which a sink of a session leads; None if nobody knows."""
    return sink.link or session.sink.link or session.transport.link


def _session(session: Session, jobs: list[Job], began: float, now: float) -> SessionPicture:
    held, unread = session.unread()
    peer, principal = session.engine.legacy.peer, None
    if jobs:
        admission = jobs[0].request.admission
        peer, principal = admission.peer, admission.principal
    holding = session.memory.holding
    revision = jobs[0].request.admission.revision if jobs else session.revision
    link = link_of(session, session.sink_of(jobs[0].origin) if jobs else session.sink)
    places = waiting_places(session, jobs, _MOST_LINES)
    return SessionPicture(
        key=session_key(session),
        peer=None if peer is None else f"{peer.name} {peer.version}",
        principal=None if principal is None else str(principal),
        owner=None if holding is None else holding.owner.name,
        revision=None if revision is None else revision.name,
        transport=None if link is None else link.transport,
        address=None if link is None else link.address,
        seconds=None if session.transport.single_request else now - began,
        running=session.jobs.running,
        waiting=len(session.jobs.mailbox),
        asking=session.jobs.parked,
        unread=unread + sum(len(outgoing.data) for outgoing in held),
        merged=sum(session.counts.merged.values()),
        dropped=sum(session.counts.dropped.values()),
        held=0 if holding is None else holding.held,
        requests=tuple(_request(job, places, now) for job in jobs),
    )


def _request(job: Job, places: Mapping[int, list[str]], now: float) -> RequestPicture:
    age = max(0.0, now - job.arrived)
    reports = job.reports
    progress = None if reports is None else reports.kept
    ran = now - job.since
    extras = job.extras or Extras()
    deadline = job.deadline if extras.clock is None else min(job.deadline, extras.clock.scope.deadline)
    state = "asking" if extras.parked else "running" if job.started else "waiting"
    return RequestPicture(
        key=request_key(job),
        method=job.request.method.name,
        target=job.target,
        id=str(job.request.id),
        state=state if job.reason is None else "cancelled",
        seconds=age,
        left=None if deadline == math.inf else deadline - now,
        progress=progress,
        total=None if reports is None else _number(reports.total or reports.told[0]),
        message=None if reports is None or reports.told[1] is None else one_line(str(reports.told[1]), _LONGEST),
        per_second=None if progress is None or ran <= 0 else progress / ran,
        reason=None if job.reason is None else why_cancelled(job),
        waits=tuple(places.get(id(job), ())),
    )


def _number(value: object) -> float | None:
    """Return what a handler reported, if it is a number that JSON has."""
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def why_cancelled(job: Job) -> str:
    """Return why a request was cancelled, and what was said to it."""
    assert job.cancelled is not None
    reason, detail = job.cancelled.reason, job.cancelled.detail
    return reason.value if detail is None else f"{reason.value}: {detail}"


def target_of(server: Observed, job: Job) -> str | None:
    """Return the tool or prompt that a request is for, if the server has it: what callers make up has no end."""
    method, target = job.request.method.name, job.target
    offered = server.tools if method == "tools/call" else server.prompts if method == "prompts/get" else None
    return None if offered is None or target is None or offered.get(target) is None else target


def outcome_of(job: Job, reply: bytes | None) -> str:
    """Return how a request ended: "ok", "failed" (a result with `isError`), "error", "cancelled" or "dropped"."""
    if job.cancelled is not None:
        return "cancelled"
    if job.error is not None:
        return "error"
    if job.extras is not None and job.extras.failed:
        return "failed"
    return "dropped" if reply is None else "ok"


def ended_request(job: Job, reply: bytes | None) -> EndedRequest:
    """Return how a request ended, as told by `Session.on_finished`."""
    principal = job.request.admission.principal
    return EndedRequest(
        job.request.method.name,
        job.target,
        None if principal is None else str(principal),
        max(0.0, trio.current_time() - job.arrived),
        outcome_of(job, reply),
        why_cancelled(job) if job.cancelled is not None else None if job.error is None else str(job.error.code),
        time.time(),
    )
