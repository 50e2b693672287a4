"""A long job whose server may be killed: it goes on where it was, and ends once.

    python examples/long_job.py serve 8000 sqlite:///tmp/jobs.db    # kill -9 it while a job runs, and start it again
    python examples/long_job.py start http://127.0.0.1:8000/mcp 100
    python examples/long_job.py wait http://127.0.0.1:8000/mcp ID

`start` prints an id by which `wait` finds the job again, from another process too. The server keeps jobs in a file or
a Redis (redis://host), and its tool saves after each step how far it is. Others may do the work:

    trimcp run examples/long_job.py --http --tasks sqlite:///tmp/jobs.db
    trimcp worker examples/long_job.py --store sqlite:///tmp/jobs.db    # any number; kill -9 them, too
"""

from __future__ import annotations

import sys
from typing import TypedDict

import trio

import trimcp

server = trimcp.Server("long job")
# A process that was killed cannot say so: its jobs are taken over when it has not been heard of for two seconds.
server.tasks(lease=2, poll_interval=0.5)


class Sum(TypedDict):
    """What the job has so far."""

    next: int
    """The number to add next."""
    total: int
    begun: list[int]
    """The numbers at which it has begun: 1, and one more for each time that its server had ended."""


@server.tool(task="required", restart="resume")
async def add_up(numbers: int, ctx: trimcp.Context, seconds: float = 0.1) -> Sum:
    """Add up the numbers from 1, which takes a while for each."""
    done: Sum = ctx.task.saved or Sum(next=1, total=0, begun=[])
    done["begun"].append(done["next"])
    for number in range(done["next"], numbers + 1):
        await trio.sleep(seconds)  # in place of work
        done["total"] += number
        done["next"] = number + 1
        await ctx.task.checkpoint(done)
        await ctx.report_progress(number, numbers, "adding up")
    return done


def show(progress: trimcp.wire.ProgressParams) -> None:
    print(f"{progress.message}: {progress.progress:g} of {progress.total or 0:g}")


async def use(verb: str, url: str, what: str) -> None:
    """Start a job, or wait for one."""
    async with trimcp.Client("long job", tasks=True).connect(url) as session:
        if verb == "start":
            print((await session.start_task("add_up", {"numbers": int(what)})).id)
        else:
            print((await session.task(what).result(show)).text)


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "serve":
        server.tasks(rest[1], lease=2, poll_interval=0.5)
        trimcp.run_http(server, port=int(rest[0]), ready=lambda urls: print("serving at", *urls, flush=True))
    else:
        trio.run(use, verb, rest[0], rest[1])
