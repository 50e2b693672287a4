"""What a call of agent tools costs: CPU of the server for it, against the same call of the Model Context Protocol.

Run by itself: `python benchmarks/agent_cost.py [--rounds N] [--calls N] [--most FACTOR]`. One server with one tool is
served over a Unix socket by our own HTTP listener, with agent tools. A child process makes the calls, 64 at a time on
64 connections: MCP of 2026-07-28, a `tool_request` at /tools/call, the same at /mcp, and with a context. They take
turns in every round, so that what the machine does meanwhile is the same for all. Time is CPU of the server's process,
the least of all rounds. It ends with status 1 where a plain call costs more than the bound.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import count

import orjson
import trio
from check_cells import make_server
from check_far_end import MODERN, Http, call_agent, check, dial, echo

import trimcp
from trimcp.agent_tools import AgentTools

__all__ = ["measure"]

UNDER_WAY = 64
CASES = ("mcp", "tools/call", "mcp endpoint", "context")

_ids = count(1)


async def call_mcp(http: Http, number: int) -> None:
    """Make one call of MCP."""
    id, wanted, data = echo(MODERN)
    _, [reply] = await http.post(data, method="tools/call", name="echo")
    check(reply, {id: wanted})


async def call_tool(http: Http, number: int, path: str = "/tools/call", *, context: bool = False) -> None:
    """Make one call of agent tools."""
    await call_agent(http, str(next(_ids)), path, **({"context_id": f"ctx-{number}"} if context else {}))


CALLS = {
    "mcp": call_mcp,
    "tools/call": call_tool,
    "mcp endpoint": partial(call_tool, path="/mcp"),
    "context": partial(call_tool, context=True),
}


async def load(path: str) -> None:
    """Make as many calls as each line of standard input says: the program of the child process."""
    connections = [Http(dial(path), MODERN) for _ in range(UNDER_WAY)]

    async def caller(case: str, number: int, calls: int) -> None:
        for _ in range(calls):
            await CALLS[case](connections[number], number)

    for line in sys.stdin:
        case, calls = orjson.loads(line)
        async with trio.open_nursery() as nursery:
            for number in range(UNDER_WAY):
                nursery.start_soon(caller, case, number, calls // UNDER_WAY)
        print("done", flush=True)


async def measure(rounds: int, number: int) -> dict[str, list[float]]:
    """Return microseconds of CPU per call of each round, by case."""
    taken: dict[str, list[float]] = {case: [] for case in CASES}
    server = make_server()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/server"
        async with trio.open_nursery() as nursery:
            tools = AgentTools(server)
            await nursery.start(partial(trimcp.serve_http, server, uds=path, agent_tools=tools, grace=0))
            child = await trio.lowlevel.open_process(
                [sys.executable, __file__, "--load", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert child.stdin is not None
            assert child.stdout is not None

            async def turn(case: str) -> float:
                gc.collect()
                began = time.process_time()
                await child.stdin.send_all(orjson.dumps([case, number]) + b"\n")
                said = b""
                while not said.endswith(b"\n"):
                    piece = await child.stdout.receive_some(100)
                    if not piece:
                        raise AssertionError("the load has failed")
                    said += piece
                return (time.process_time() - began) / number * 1e6

            for case in CASES:
                await turn(case)  # the first calls are slow everywhere
            for each in range(rounds):
                for case in CASES[:: 1 if each % 2 else -1]:
                    taken[case].append(await turn(case))
            await child.stdin.aclose()
            await child.wait()
            nursery.cancel_scope.cancel()
    return taken


def main() -> None:
    """Measure, print a table, and end with status 1 where a plain call costs more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--calls", type=int, default=2048, help="calls in a turn")
    parser.add_argument("--most", type=float, default=1.3, help="times the call of MCP that a plain call may cost")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        trio.run(load, options.load)
        return
    taken = trio.run(measure, options.rounds, options.calls)
    least = {case: min(each) for case, each in taken.items()}
    print(f"{'CPU of the server per call, µs':<32}{'least':>10}{'median':>10}{'to MCP':>10}")
    for case, each in taken.items():
        print(f"{case:<32}{least[case]:>10.1f}{statistics.median(each):>10.1f}{least[case] / least['mcp']:>10.2f}")
    plain = max(least["tools/call"], least["mcp endpoint"])
    if plain > options.most * least["mcp"]:
        sys.exit(f"a plain call costs {plain / least['mcp']:.2f} times one of MCP, more than {options.most:g}")


if __name__ == "__main__":
    main()
