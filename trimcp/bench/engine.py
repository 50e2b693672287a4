"""A measurement from beginning to end: connections, warm-up, counting, and the report."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import trio

from trimcp.bench.cost import Cutter, ProcessTree, environment
from trimcp.bench.discovery import Found, Target, as_planned, discover, name_of
from trimcp.bench.mux import multiplexed
from trimcp.bench.plan import Plan
from trimcp.bench.report import Counts, Generator, Report, Snapshot, WireName
from trimcp.bench.sessions import SessionRunner, run_session
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
    target: Target | Sequence[Target],
    plan: Plan,
    *,
    on_tick: Callable[[Snapshot], object] | None = None,
    tick: float = 0.5,
    stop: trio.Event | None = None,
    ssl_context: ssl.SSLContext | None = None,
    gate: Callable[[], Awaitable[None]] | None = None,
) -> Report:
    """Put load on a server, or on several whose sessions take turns, and return a report.

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
    targets = target if isinstance(target, Sequence) else (target,)
    found = await _discover(targets, plan, stop)
    tally = Tally()
    supply = Supply(plan, found.requests, tally)
    load = Load(plan, found.revision, supply, tally, ssl_context)
    runners = [(name_of(each), _session_runner(each, found.transport, load)) for each in targets]
    run = Measurement(load, _in_turns(runners, plan.seed), stop, on_tick, tick, gate)
    await run.run()
    return run.report(", ".join(name for name, _ in runners), found)


async def _discover(targets: Sequence[Target], plan: Plan, stop: trio.Event) -> Found:
    with trio.CancelScope() as scope:
        async with open_service_nursery() as nursery:

            async def watch() -> None:
                await stop.wait()
                scope.cancel()

            nursery.start_soon(watch)
            first = await discover(targets[0], plan)
            for target in targets[1:]:
                found = await discover(target, plan)
                if (found.transport, found.revision) != (first.transport, first.revision):
                    raise LocalError(f"{name_of(target)} is spoken to in another way than {name_of(targets[0])}")
            return first
    raise LocalError("it was ended before anything was measured")


def _session_runner(target: Target, transport: WireName, load: Load) -> SessionRunner:
    """Return what runs the sessions of a measurement. Modules of single transports are imported here."""
    if load.plan.steps != {"call"} or transport == "grpc" or getattr(target, "auth", None) is not None:
        from trimcp.bench.steps import step_runner

        if load.plan.needs_raw_messages:
            raise LocalError(
                "--progress, --cut, --reply and --replica-by are for calls that no login and no gRPC is needed for"
            )
        return step_runner(load, as_planned(target, load.plan))
    from trimcp.bench import channels

    if isinstance(target, StdioServer):
        return partial(multiplexed, partial(channels.open_process, target))
    if transport == "websocket":
        return partial(multiplexed, partial(channels.open_frames, cast("WebSocketServer", target)))
    from trimcp.bench.connection import LoadSite

    site = LoadSite.of(cast("HttpServer", target), load)
    if transport == "sse":
        return partial(multiplexed, partial(channels.open_events, site))
    from trimcp.bench.http import run_http

    return partial(run_http, site)


def _in_turns(runners: Sequence[tuple[str, SessionRunner]], first: int) -> SessionRunner:
    """Return a runner whose sessions go to one of several servers after the other, and say to which."""
    if len(runners) == 1:
        return runners[0][1]
    # Generators that share a plan have seeds one after the other: they do not all begin with the same server.
    turns = islice(cycle(runners), first % len(runners), None)

    async def run(load: Load, seat: Seat, usable: Callable[[], object]) -> bool:
        seat.server, runner = next(turns)
        return await runner(load, seat, usable)

    return run


@attrs.define(eq=False)
class Measurement:
    """One running measurement."""

    _load: Load
    _runner: SessionRunner
    _stop: trio.Event
    _on_tick: Callable[[Snapshot], object] | None
    _tick_length: float
    _gate: Callable[[], Awaitable[None]] | None = None
    _interrupted: bool = attrs.field(init=False, default=False)
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)
    _closing: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _sessions: int = attrs.field(init=False, default=0)
    _seats: list[Seat] = attrs.field(init=False, factory=list)
    _sessions_nursery: trio.Nursery = attrs.field(init=False)
    _warm_until: float = attrs.field(init=False, default=0.0)
    _processes: ProcessTree = attrs.field(init=False)
    _cutter: Cutter | None = attrs.field(init=False, default=None)
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
                await run_session(self._load, self._runner, seat, task_status=task_status)
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
        tally.begin(trio.current_time())
        supply.allow(math.inf if plan.count is None else plan.count)
        self._cutter = cutter = Cutter(tally, self._processes)
        async with open_service_nursery() as cutting:
            cutting.start_soon(cutter.run)
            if plan.course is not None and not plan.paced:
                cutting.start_soon(self._vary, self._sessions_nursery, plan.course)
            await self._until(plan.duration or math.inf, math.inf if plan.count is None else supply.done + plan.count)
            cutting.cancel_scope.cancel()
        self._processes.find()
        now = trio.current_time()
        cutter.cut(now)
        supply.close(now)
        tally.end(now)

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
        if not self._load.tally.counting:
            self._closing.deadline = min(self._closing.deadline, trio.current_time() + _IMPATIENT)
            self._load.overdue = False

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
        load, tally, cutter = self._load, self._load.tally, self._cutter
        seconds = 0.0 if tally.ended == math.inf else tally.ended - tally.began
        return Report(
            target=target,
            transport=found.transport,
            revision=found.spoken,
            reply=load.reply,
            server_name=found.name,
            server_version=found.version,
            plan=load.plan,
            seconds=seconds,
            **Counts.added([tally]),
            bytes_in=tally.moved[0],
            bytes_out=tally.moved[1],
            over_time=tally.over_time,
            cost=None if cutter is None else cutter.cost,
            generator=Generator(0.0 if cutter is None else cutter.own_cpu, seconds, tally.answers),
            interrupted=self._interrupted,
            slices=tally.slices,
            environment=self._environment,
        )
