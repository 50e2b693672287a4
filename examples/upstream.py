"""A supervised upstream: a server that is killed again and again, and a host that hardly notices.

Run it:       python examples/upstream.py [KILLS]         (by default 3)

It starts a server as its child, kills it with SIGKILL while calls are under way, and prints what a host sees. At the
end the server cannot start for a while.

What to look at:

- `count` only reads, and is called with `idempotent=True`: no call of it fails because the server was killed under it.
  The numbers begin anew, which shows that it is another process.
- `work` is a tool that does something. The call that was under way when the server died fails at once, and says how it
  died; it is never made twice by itself. The next one waits for the new server.
- The subscription lives on, and reports a change after each restart, since anything may be different now.
- While the server cannot start, the pauses between the attempts grow, with jitter. After three in a row the circuit
  opens: calls fail at once, and say when it is tried again. One probe closes it.
- Nothing is left behind: each process is gone before the next one is started, and leaving the block ends the last one.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import trio

import trimcp
from trimcp.fleet import UpstreamState

EVERY = 1.5  # seconds of peace before the next kill
BREAKER = trimcp.fleet.Breaker(failures=3, open_for=5)
RESTARTS = trimcp.fleet.Restarts(first_pause=0.2, longest_pause=5, lasting=1)


# The server


def serve(broken: Path) -> None:
    if broken.exists():
        sys.exit(f"cannot start: {broken.name} is there")
    server = trimcp.Server("counter", "1.0.0")
    counted = 0

    @server.tool(annotations=trimcp.ToolAnnotations(read_only_hint=True))
    async def count() -> int:
        """How often this was called since the server was started."""
        nonlocal counted
        counted += 1
        return counted

    @server.tool
    async def work(seconds: float) -> str:
        """Do something that takes a while and should not be done twice."""
        await trio.sleep(seconds)
        return "done"

    @server.tool
    async def pid() -> int:
        """The number of the server's process."""
        return os.getpid()

    trimcp.run_stdio(server)


# The host


def show(who: str, what: object) -> None:
    print(f"{trio.current_time() - start:6.2f}  {who:8}  {what}", flush=True)


def text_of(result: trimcp.CallToolResult) -> str:
    return "".join(part.text for part in result.content if isinstance(part, trimcp.Text))


async def watch(upstream: trimcp.Upstream) -> None:
    """Show each state. One that passes within a moment may be missed."""
    state = None
    while state is not UpstreamState.ENDED:
        state = await upstream.wait_state(*(each for each in UpstreamState if each is not state))
        statistics = upstream.statistics()
        why = ""
        if state in (UpstreamState.WAITING, UpstreamState.OPEN):
            why = f": {' '.join(str(statistics.last_reason).split()):.180}"
        show("state", f"{state.value}{why}")


async def keep_counting(upstream: trimcp.Upstream) -> None:
    while True:
        try:
            show("count", text_of(await upstream.call_tool("count", idempotent=True)))
        except trimcp.UpstreamDown as down:
            show("count", f"refused at once: {str(down).rpartition('; ')[2]}")
        await trio.sleep(0.5)


async def work(upstream: trimcp.Upstream) -> None:
    show("work", "begins; it needs a minute")
    try:
        await upstream.call_tool("work", {"seconds": 60})
    except trimcp.ConnectionLost as lost:
        show("work", f"failed at once: {lost}")


async def listen(upstream: trimcp.Upstream) -> None:
    async with upstream.listen(tools=True) as changes:
        async for _ in changes:
            tools = ", ".join(tool.name for tool in await upstream.list_tools())
            show("changes", f"the tools may have changed; they are {tools}")


async def kill(upstream: trimcp.Upstream) -> None:
    """Kill the server while it works."""
    number = int(text_of(await upstream.call_tool("pid")))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, upstream)
        await trio.sleep(EVERY)
        show("kill", f"process {number}")
        os.kill(number, signal.SIGKILL)
    await upstream.wait_up()


async def main(kills: int, directory: str) -> trimcp.fleet.UpstreamStatistics:
    global start
    start = trio.current_time()
    broken = Path(directory) / "broken"
    target = trimcp.stdio(sys.executable, __file__, "serve", str(broken))
    client = trimcp.Client("host", "1.0.0")
    async with trimcp.supervise(client, target, name="counter", breaker=BREAKER, restarts=RESTARTS) as upstream:
        async with trio.open_nursery() as nursery:
            for task in (watch, keep_counting, listen):
                nursery.start_soon(task, upstream)
            for _ in range(kills):
                await kill(upstream)
                await trio.sleep(EVERY)
            broken.touch()
            show("host", "from now on the server cannot start")
            number = int(text_of(await upstream.call_tool("pid")))
            os.kill(number, signal.SIGKILL)
            await upstream.wait_state(UpstreamState.OPEN)
            await trio.sleep(EVERY)
            broken.unlink()
            show("host", "it could start again; the probe will find out")
            await upstream.wait_up()
            await trio.sleep(EVERY)
            nursery.cancel_scope.cancel()
        statistics = upstream.statistics()
    show("host", f"{statistics.connections} connections, {statistics.failed_attempts} attempts failed")
    show("host", f"{statistics.refused_calls} calls refused, {statistics.repeated_calls} made again")
    return statistics


start = 0.0

if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            trio.run(partial(main, int(sys.argv[1]) if len(sys.argv) > 1 else 3, directory))
