"""A measurement from beginning to end: connections, warm-up, counting, and the report."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import trio

from trimcp.bench.cost import Cutter, ProcessTree, environment
from trimcp.bench.discovery import Found, Target, as_planned, discover, name_of
from trimcp.bench.mux import run_session
from trimcp.bench.plan import Plan
from trimcp.bench.report import Cost, Generator, Report, Snapshot, WireName
from trimcp.bench.stages import Stages
from trimcp.bench.supply import Load, Seat, Supply
from trimcp.bench.tally import Tally
from trimcp.errors import LocalError
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.stdio.child import StdioServer

if TYPE_CHECKING:
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.websocket.client import WebSocketServer

_OPENING: Final = 64  # sessions at a time
_IMPATIENT: Final = 1.0
_VARIED: Final = 0.05  # seconds between changes of the number of sessions


async def measure(
    target: Target,
    plan: Plan,
    *,
    on_tick: Callable[[Snapshot], object] | None = None,
    tick: float = 0.5,
    stop: trio.Event | None = None,
    ssl_context: ssl.SSLContext | None = None,
    gate: Callable[[], Awaitable[None]] | None = None,
) -> Report:
    """Put load on a server and return a report.

    Cancelling it closes every connection and child process; then there is no report. Raises McpError: the server cannot
    be reached, or lacks something that the plan calls; the text says what to do. After the first call, failures are
    counted instead.

    `on_tick` is called with the current state every `tick` seconds. It must return at once, and its time counts as the
    generator's. `stop`, once set, ends the measurement early; the report is then about the time until then. `gate` is
    awaited once all sessions are open, before any call.
    """
    if not plan.mix:
        raise LocalError("there is nothing to send: name a tool or a method")
    for pid in plan.pids:
        if not ProcessTree([[pid]]).cpu():
            raise LocalError(f"there is no process {pid} whose cost could be read here")
    stop = trio.Event() if stop is None else stop
    found = await _discover(target, plan, stop)
    tally = Tally()
    supply = Supply(plan, found.requests, tally)
    load = Load(plan, found.revision, supply, tally, ssl_context)
    run = Measurement(load, _session_runner(target, found.transport, load), stop, on_tick, tick, gate)
    await run.run()
    return run.report(name_of(target), found)


async def _discover(target: Target, plan: Plan, stop: trio.Event) -> Found:
    with trio.CancelScope() as scope:
        async with open_service_nursery() as nursery:

            async def watch() -> None:
                await stop.wait()
                scope.cancel()

            nursery.start_soon(watch)
            return await discover(target, plan)
    raise LocalError("it was ended before anything was measured")


def _session_runner(target: Target, transport: WireName, load: Load) -> Callable[..., Awaitable[None]]:
    """Return a function that runs one session to the end of the measurement, also across lost connections.

    It takes a `Load` and a `task_status`. It calls `started` once the session can be used, or the first attempt to open
    it has failed. Modules of single transports are imported here.
    """
    if load.plan.steps != {"call"} or transport == "grpc" or getattr(target, "auth", None) is not None:
        from trimcp.bench.steps import StepRunner

        if load.plan.progress or load.plan.cut or load.plan.reply != "any":
            raise LocalError("--progress, --cut and --reply are for calls that no login and no gRPC is needed for")
        return StepRunner(load, as_planned(target, load.plan)).run
    from trimcp.bench import channels

    if isinstance(target, StdioServer):
        return partial(run_session, opener=channels.stdio_opener(target))
    if transport == "websocket":
        return partial(run_session, opener=channels.websocket_opener(cast("WebSocketServer", target)))
    from trimcp.bench.connection import LoadSite

    site = LoadSite.of(cast("HttpServer", target), load)
    if transport == "sse":
        return partial(run_session, opener=channels.events_opener(site))
    from trimcp.bench.http import run_http_session

    return partial(run_http_session, site=site)


@attrs.frozen
class _Mark:
    """CPU time and bytes at one moment."""

    at: float
    cpu: float
    bytes_in: int
    bytes_out: int
    processes: dict[int, float]


@attrs.define(eq=False)
class Measurement:
    """One running measurement."""

    _load: Load
    _run_session: Callable[..., Awaitable[object]]
    _stop: trio.Event
    _on_tick: Callable[[Snapshot], object] | None
    _tick_length: float
    _gate: Callable[[], Awaitable[None]] | None = None
    _began: _Mark | None = attrs.field(init=False, default=None)
    _ended: _Mark | None = attrs.field(init=False, default=None)
    _interrupted: bool = attrs.field(init=False, default=False)
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)
    _closing: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _sessions: int = attrs.field(init=False, default=0)
    _seats: list[Seat] = attrs.field(init=False, factory=list)
    _sessions_nursery: trio.Nursery = attrs.field(init=False)
    _warm_until: float = attrs.field(init=False, default=0.0)
    _processes: ProcessTree = attrs.field(init=False)
    _cost: Cost | None = attrs.field(init=False, default=None)
    _environment: dict[str, Any] = attrs.field(init=False, factory=environment)

    def __attrs_post_init__(self) -> None:
        self._processes = ProcessTree([self._load.plan.pids, self._load.pids])

    async def run(self) -> None:
        """Open the sessions, load them, and close them."""
        load = self._load
        async with trio.open_nursery() as serving:
            serving.start_soon(self._watch_stop)
            if load.plan.paced:
                serving.start_soon(load.supply.pace)
            async with trio.open_nursery() as sessions:
                self._closing, self._sessions_nursery = sessions.cancel_scope, sessions
                await self._open(sessions)
                self._processes.find()
                if self._gate is not None:
                    await self._gate()
                serving.start_soon(self._tick)
                await self._conduct()
                patience = _IMPATIENT if self._interrupted else load.plan.patience
                sessions.cancel_scope.deadline = trio.current_time() + patience
                load.overdue = not self._interrupted
            serving.cancel_scope.cancel()

    # Phases

    async def _open(self, sessions: trio.Nursery) -> None:
        """Open all sessions before any call: opening them is not measured."""
        limit = trio.CapacityLimiter(_OPENING)

        async def open_one() -> None:
            async with limit:
                await sessions.start(self._session)

        if self._load.plan.stages_of == "sessions":
            return
        self._sessions = self._load.plan.sessions
        async with trio.open_nursery() as opening:
            for _ in range(self._sessions):
                opening.start_soon(open_one)

    async def _session(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run a session, and those that come after it where each makes a few calls only."""
        calls = self._load.plan.session_calls
        seat = Seat(math.inf if calls is None else calls)
        self._seats.append(seat)
        try:
            while True:
                await self._run_session(self._load, seat=seat, task_status=task_status)
                task_status = trio.TASK_STATUS_IGNORED
                if calls is None or seat.left > 0 or seat not in self._seats or self._load.supply.over:
                    return  # no more are wanted, or the connection was lost too often
                self._seats[self._seats.index(seat)] = seat = Seat(calls)
        finally:
            if seat in self._seats:
                self._seats.remove(seat)
            self._sessions -= 1
            self._changed.set()

    async def _vary(self, sessions: trio.Nursery, course: Stages) -> None:
        """Open and end sessions as the stages say, until cancelled."""
        began = trio.current_time()
        while True:
            wanted = round(course.level(trio.current_time() - began))
            while len(self._seats) > wanted:
                self._seats.pop().leave()
            for _ in range(wanted - len(self._seats)):
                self._sessions += 1
                sessions.start_soon(self._session)
            await trio.sleep(_VARIED)

    async def _conduct(self) -> None:
        """Warm up, then measure."""
        plan, supply, tally = self._load.plan, self._load.supply, self._load.tally
        supply.on_milestone = lambda: self._changed.set()
        counted = plan.count is not None
        self._warm_until = trio.current_time() + plan.warm_up
        if plan.warm_up or plan.warm_up_count:
            supply.allow(plan.warm_up_count if counted and plan.warm_up_count else math.inf)
            await self._until(plan.warm_up or math.inf, plan.warm_up_count or math.inf)
            if counted:  # no call of the warm-up may run when counting begins
                supply.allow(0)
                await self._until(math.inf, supply.done + supply.under_way)
        self._began = self._mark()
        tally.begin(self._began.at)
        supply.allow(math.inf if plan.count is None else plan.count)
        cutter = Cutter(tally, self._processes, self._began.processes)
        async with open_service_nursery() as cutting:
            cutting.start_soon(cutter.run)
            if plan.course is not None and not plan.paced:
                cutting.start_soon(self._vary, self._sessions_nursery, plan.course)
            await self._until(plan.duration or math.inf, math.inf if plan.count is None else supply.done + plan.count)
            cutting.cancel_scope.cancel()
        self._ended = self._mark()
        cutter.cut(self._ended.at)
        supply.close(self._ended.at)
        tally.end(self._ended.at)
        self._processes.find()
        self._cost = self._processes.cost(self._began.processes, self._ended.processes)

    async def _until(self, seconds: float, done: float) -> None:
        """Wait until the time is over, this many calls have ended, or the server has been silent for too long."""
        supply = self._load.supply
        plan = self._load.plan
        deadline = trio.current_time() + seconds
        silence = math.inf if done == math.inf else plan.patience + (plan.timeout or 0.0)
        supply.milestone = done
        varied = plan.stages_of == "sessions"
        while (self._sessions or varied) and supply.done < done and not self._stop.is_set():
            before, waited = supply.done, supply.under_way
            self._changed = trio.Event()
            with trio.move_on_at(min(deadline, trio.current_time() + silence)) as scope:
                await self._changed.wait()
            if trio.current_time() >= deadline:
                return
            if scope.cancelled_caught and supply.done == before and waited:
                return  # the server is silent; calls that still wait are counted as failures at the end

    async def _watch_stop(self) -> None:
        await self._stop.wait()
        self._interrupted = True
        self._changed.set()
        if self._began is None or self._ended is not None:
            self._closing.deadline = min(self._closing.deadline, trio.current_time() + _IMPATIENT)
            self._load.overdue = False

    def _mark(self) -> _Mark:
        tally = self._load.tally
        spent = self._processes.cpu()
        return _Mark(trio.current_time(), time.process_time(), tally.bytes_in, tally.bytes_out, spent)

    # Snapshots and the report

    async def _tick(self) -> None:
        """Call `on_tick` with a snapshot at each interval."""
        if self._on_tick is None:
            return
        due = trio.current_time()
        before_at, before_cpu = due, time.process_time()
        while True:
            due += self._tick_length
            await trio.sleep_until(due)
            now, cpu = trio.current_time(), time.process_time()
            self._on_tick(self._snapshot(now, now - before_at, (cpu - before_cpu) / (now - before_at)))
            before_at, before_cpu = now, cpu

    def _snapshot(self, now: float, seconds: float, busy: float) -> Snapshot:
        load, tally, plan = self._load, self._load.tally, self._load.plan
        times, reported = tally.take_recent(now)
        # The first snapshot after the warm-up covers a shorter time.
        seconds = max(min(seconds, now - tally.began), 1e-9)
        elapsed = now - tally.began if tally.began < math.inf else -max(self._warm_until - now, 1e-9)
        if plan.count is not None:
            share = (tally.calls + tally.failed + tally.cancelled + tally.timed_out) / plan.count
        else:
            share = max(elapsed, 0.0) / (plan.duration or math.inf)
        return Snapshot(
            elapsed=elapsed,
            share=min(share, 1.0),
            seconds=seconds,
            calls=tally.calls,
            times=times,
            errors={kind: each.count for kind, each in tally.errors.items()},
            cancelled=tally.cancelled,
            timed_out=tally.timed_out,
            late=tally.late,
            progress=tally.progress,
            reported=reported,
            under_way=load.supply.under_way,
            sessions=load.open,
            busy=busy,
        )

    def report(self, target: str, found: Found) -> Report:
        """Return the report."""
        load, tally = self._load, self._load.tally
        cost, spent = self._cost, [each.cpu for each in tally.slices if each.cpu is not None]
        if cost is None and spent:  # its processes have ended with the last sessions
            held = [each.rss or 0 for each in tally.slices]
            cost = Cost(sum(spent), held[-1], max(held))
        nothing = _Mark(0.0, 0.0, 0, 0, {})
        began, ended = self._began or nothing, self._ended or self._began or nothing
        return Report(
            target=target,
            transport=found.transport,
            revision=found.spoken,
            reply=load.reply,
            server_name=found.name,
            server_version=found.version,
            plan=load.plan,
            seconds=ended.at - began.at,
            calls=tally.calls,
            after=tally.after,
            parts=tally.parts,
            bytes_in=ended.bytes_in - began.bytes_in,
            bytes_out=ended.bytes_out - began.bytes_out,
            errors=dict(tally.errors),
            cancelled=tally.cancelled,
            timed_out=tally.timed_out,
            late=tally.late,
            latency=tally.latency,
            over_time=tally.over_time,
            progress=tally.progress,
            cost=cost,
            generator=Generator(ended.cpu - began.cpu, ended.at - began.at, tally.answers),
            interrupted=self._interrupted,
            requests=tally.requests,
            slices=tally.slices,
            environment=self._environment,
        )
