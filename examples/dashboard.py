"""A live dashboard of this machine over HTTP: values that change, and long work that reports how far it is.

Run it:       python examples/dashboard.py [PORT]                  (by default 8000, on this machine only)
              trimcp run examples/dashboard.py --http              (TLS, other addresses, several hosts)
Watch it:     python examples/dashboard_client.py                  (as often as you like, for as long as you like)
By hand:      trimcp call http://127.0.0.1:8000/mcp watch seconds=10

What to look at:

- The sampler is one task, owned by `lifespan`. It takes a sample each second and says which resources changed; it does
  not know whether anybody listens. Changes are state: a client that reads slowly gets the latest, not a queue.
- `watch` streams progress for up to a day. The reply becomes a stream of events with the first report; silence is
  filled with comments, so that no proxy gives up.
- `batch` does real work in threads, two jobs at a time. Stop the client in the middle: in 2026-07-28 the job is
  cancelled with it, in 2025-11-25 it goes on, and a client that comes back is given what it missed. `jobs://recent`
  shows which.
- `batch` has a page, for hosts that show apps: `dashboard_jobs.html` draws the jobs live, by a tool for pages alone.
  Who shows no pages gets the result as before, and is not told of that tool.
- Nothing grows: an hour of samples, twenty jobs, and per client what the server allows. Let it run for days, and see
  so in its own `memory` and `tasks`, which are metrics like any other.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import attrs
import trio

import trimcp

INTERVAL = 1.0  # seconds between samples
HISTORY = 3_600  # samples kept
JOBS_KEPT = 20
AT_ONCE = 2  # batch jobs; others wait

JobState = Literal["waiting", "running", "finished", "cancelled", "failed"]
Metric = Literal["load", "cpu", "used", "memory", "tasks"]
METRICS: dict[Metric, str] = {
    "load": "processes that want to run, averaged over a minute",
    "cpu": "percent of all processors in use",
    "used": "MiB of the machine's memory in use",
    "memory": "MiB of memory this server holds",
    "tasks": "Trio tasks alive in this server",
}
assert tuple(METRICS) == get_args(Metric)


# Where the numbers come from. What this system does not tell is left out.


def read_metrics(before: CpuTime | None) -> tuple[dict[str, float], CpuTime | None]:
    """Return what can be measured now, and the processors' times for the next time."""
    values: dict[str, float] = {"tasks": trio.lowlevel.current_statistics().tasks_living}
    if hasattr(os, "getloadavg"):
        values["load"] = round(os.getloadavg()[0], 2)
    now = read_cpu()
    if now is not None and before is not None and now.total > before.total:
        values["cpu"] = round(100 * (now.busy - before.busy) / (now.total - before.total), 1)
    memory = read_pairs("/proc/meminfo")
    if "MemTotal" in memory:
        values["used"] = (memory["MemTotal"] - memory.get("MemAvailable", memory["MemFree"])) // 1024
    if "VmRSS" in (status := read_pairs("/proc/self/status")):
        values["memory"] = round(status["VmRSS"] / 1024, 1)
    return values, now


@attrs.frozen
class CpuTime:
    """Time of all processors since the start, in ticks."""

    busy: int
    total: int


def read_cpu() -> CpuTime | None:
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return CpuTime(sum(ticks) - ticks[3] - ticks[4], sum(ticks))  # all but idle and waiting for disks


def read_pairs(path: str) -> dict[str, int]:
    """Return the numbers of a file of lines like `MemFree:  12345 kB`. Such files are memory: no thread is needed."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


# The state of a run


@attrs.define
class Job:
    """A batch job, as `jobs://recent` tells of it."""

    number: int
    items: int
    done: int = 0
    state: JobState = "waiting"
    why: str | None = None


@attrs.define(eq=False)
class Board:
    """What is shown: the last hour of samples, and the last jobs."""

    samples: deque[dict[str, float]] = attrs.field(factory=lambda: deque(maxlen=HISTORY))
    jobs: deque[Job] = attrs.field(factory=lambda: deque(maxlen=JOBS_KEPT))
    jobs_so_far: int = 0
    turns: trio.Semaphore = attrs.field(factory=lambda: trio.Semaphore(AT_ONCE))
    next_sample: trio.Event = attrs.field(factory=trio.Event)

    def add(self, values: dict[str, float]) -> list[str]:
        """Add a sample, wake those who wait for it, and return the resources that changed with it."""
        before = self.samples[-1] if self.samples else {}
        self.samples.append({"at": round(time.time(), 3), **values})
        self.next_sample.set()
        self.next_sample = trio.Event()
        return ["metrics://now", *(f"metrics://{name}" for name in values if values[name] != before.get(name))]

    def history(self, metric: Metric, most: int = 60) -> list[float]:
        """Return the last values of a metric, oldest first."""
        latest = [sample[metric] for sample in islice(reversed(self.samples), most) if metric in sample]
        return latest[::-1]


@asynccontextmanager
async def lifespan(server: trimcp.Server[Board]) -> AsyncIterator[Board]:
    """Take samples for as long as the server runs."""
    board = Board()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_samples, server, board)
        yield board
        nursery.cancel_scope.cancel()


async def take_samples(server: trimcp.Server[Board], board: Board) -> None:
    values, cpu = read_metrics(None)
    while True:
        for uri in board.add(values):
            server.resource_updated(uri)
        await trio.sleep(INTERVAL)
        values, cpu = read_metrics(cpu)


server: trimcp.Server[Board] = trimcp.Server(
    "dashboard",
    "1.0.0",
    instructions="metrics://now is the machine at this moment, metrics://NAME the last minute of one metric.",
    lifespan=lifespan,
)


# Resources


@server.resource("metrics://now", mime_type="application/json")
async def now(ctx: trimcp.Context[Board]) -> dict[str, float]:
    """All metrics in the latest sample; `at` is in seconds since 1970."""
    return ctx.state.samples[-1]


@server.resource("metrics://{metric}", mime_type="application/json")
async def one_metric(metric: Metric, ctx: trimcp.Context[Board]) -> dict[str, Any]:
    """One metric: what it is, and its values in the last minute, oldest first."""
    return {"metric": metric, "is": METRICS[metric], "values": ctx.state.history(metric)}


@server.complete("metrics://{metric}", "metric")
async def suggest_metrics(value: str) -> list[str]:
    """Return the metrics that begin with what was typed."""
    return [name for name in METRICS if name.startswith(value)]


@server.resource("jobs://recent", mime_type="application/json")
async def recent_jobs(ctx: trimcp.Context[Board]) -> list[dict[str, Any]]:
    """The last batch jobs, oldest first."""
    return [attrs.asdict(job) for job in ctx.state.jobs]


# Tools


@attrs.frozen
class Watched:
    """What a metric did while it was watched."""

    metric: Metric
    samples: int
    least: float
    mean: float
    most: float


@server.tool(annotations=trimcp.ToolAnnotations(read_only_hint=True, open_world_hint=False))
async def watch(
    seconds: Annotated[float, trimcp.Arg("How long to watch", gt=0, le=86_400)],
    metric: Annotated[Metric, "What to watch"] = "load",
    *,
    ctx: trimcp.Context[Board],
) -> Watched:
    """Watch a metric, reporting each sample as progress, and sum up what it did."""
    if metric not in ctx.state.samples[-1] and metric != "cpu":  # which takes two samples
        raise trimcp.ToolError(f"this machine does not tell {metric}")
    count, total, least, most = 0, 0.0, float("inf"), float("-inf")
    start = trio.current_time()
    with trio.move_on_after(seconds):
        while True:
            # Before waiting, or a sample that comes while we report would be missed.
            next_sample = ctx.state.next_sample
            if values := ctx.state.history(metric, most=1):
                value = values[0]
                count, total, least, most = count + 1, total + value, min(least, value), max(most, value)
                # Not the verb that waits: who reads slowly should see the machine as it is, not as it was.
                elapsed = round(trio.current_time() - start, 3)
                ctx.report_progress_nowait(elapsed, total=seconds, message=f"{metric} {value:g}")
            await next_sample.wait()
    if not count:
        raise trimcp.ToolError(f"there was no sample of {metric} in {seconds:g} seconds")
    return Watched(metric, count, least, round(total / count, 2), most)


@attrs.frozen
class Batch:
    """What a batch job came to."""

    job: int
    items: int
    digest: str


JOBS_PAGE = "ui://dashboard/jobs"
server.ui(JOBS_PAGE, Path(__file__).with_name("dashboard_jobs.html"), title="Jobs", prefers_border=True)


@server.tool(ui=JOBS_PAGE)
async def batch(
    items: Annotated[int, trimcp.Arg("How many items to work on", ge=1, le=100_000)] = 50,
    mib: Annotated[int, trimcp.Arg("How large each is: MiB to hash", ge=1, le=32)] = 8,
    *,
    ctx: trimcp.Context[Board],
) -> Batch:
    """Work on items one after the other, and report how many are done. The machine will feel it."""
    async with new_job(ctx, items) as job:
        digest = sha256()
        while job.done < job.items:
            digest.update(await trio.to_thread.run_sync(hash_block, job.done, mib))
            job.done += 1
            await ctx.report_progress(job.done, total=items, message=f"job {job.number}: {job.done} of {items}")
    return Batch(job.number, items, digest.hexdigest())


@server.tool(visibility=["app"], annotations=trimcp.ToolAnnotations(read_only_hint=True))
async def job_progress(ctx: trimcp.Context[Board]) -> list[Job]:
    """Return the last batch jobs, oldest first. For the page of `batch`."""
    return list(ctx.state.jobs)


def hash_block(number: int, mib: int) -> bytes:
    """Hash so much memory, outside of Python's lock."""
    return sha256(bytes([number % 256]) * (mib << 20)).digest()


@asynccontextmanager
async def new_job(ctx: trimcp.Context[Board], items: int) -> AsyncIterator[Job]:
    """Write a job on the board, wait for its turn, and note how it ends."""
    board = ctx.state
    board.jobs_so_far += 1
    job = Job(board.jobs_so_far, items)
    board.jobs.append(job)
    try:
        tell_state(job, "waiting")
        async with board.turns:
            tell_state(job, "running")
            yield job
        tell_state(job, "finished")
    except trio.Cancelled:
        tell_state(job, "cancelled", ctx.cancel_reason.value if ctx.cancel_reason else "shutdown")
        raise
    except Exception as error:
        tell_state(job, "failed", type(error).__name__)
        raise


def tell_state(job: Job, state: JobState, why: str | None = None) -> None:
    job.state, job.why = state, why
    server.resource_updated("jobs://recent")


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    trimcp.run_http(server, port=port, ready=lambda urls: print("serving at", *urls, flush=True))
