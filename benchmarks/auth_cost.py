"""What it costs to ask who calls: CPU of calls with a verified token, against the same calls without one.

Run by itself: `python benchmarks/auth_cost.py [--rounds N] [--calls N] [--most PERCENT]`. In one process our own HTTP
listener serves a protected server and an open one, over Unix sockets, each with 64 calls under way on 64 connections.
They take turns in every round, so that what the machine does meanwhile is the same for both. Time is CPU of this
process, the least of all rounds; the load, which speaks HTTP by hand and sends the one header more, is in both figures.
It ends with status 1 where the token costs more than the bound.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
from check_cells import make_server
from check_far_end import MODERN, Http, check, dial, echo

import trimcp
from trimcp.auth import ResourceServer
from trimcp.testing import toy_issuer

__all__ = ["measure"]

UNDER_WAY = 64
RESOURCE = "http://localhost/mcp"


@asynccontextmanager
async def connections(path: str, token: str | None, auth: Any = None) -> AsyncIterator[list[Http]]:
    """Serve at a Unix socket, and yield connections that have made a call."""
    more = "" if token is None else f"Authorization: Bearer {token}\r\n"
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(trimcp.serve_http, make_server(), uds=path, auth=auth, grace=0))
        found = [Http(dial(path), MODERN, more=more) for _ in range(UNDER_WAY)]
        try:
            await calls(found, UNDER_WAY)
            yield found
        finally:
            for http in found:
                http.peer.close()
            nursery.cancel_scope.cancel()


async def calls(connections: list[Http], number: int) -> None:
    """Make so many calls, one at a time on each connection, and check every reply."""

    async def caller(http: Http) -> None:
        for _ in range(number // len(connections)):
            id, wanted, data = echo(MODERN)
            _, [reply] = await http.post(data, method="tools/call", name="echo")
            check(reply, {id: wanted})

    async with trio.open_nursery() as nursery:
        for http in connections:
            nursery.start_soon(caller, http)


async def measure(rounds: int, number: int) -> dict[str, list[float]]:
    """Return microseconds of CPU per call of each round: "open" without a token, "protected" with one."""
    taken: dict[str, list[float]] = {"open": [], "protected": []}
    with tempfile.TemporaryDirectory() as folder:
        async with toy_issuer() as issuer:
            token = issuer.token("ann", RESOURCE, "read write")
            auth = ResourceServer(RESOURCE, [issuer.url])
            async with (
                connections(f"{folder}/open", None) as plain,
                connections(f"{folder}/protected", token, auth) as protected,
            ):
                order = [("open", plain), ("protected", protected)]
                for each in order:
                    await calls(each[1], number)  # the first calls are slow everywhere
                for _ in range(rounds):
                    order.reverse()
                    for name, used in order:
                        gc.collect()
                        began = time.process_time()
                        await calls(used, number)
                        taken[name].append((time.process_time() - began) / number * 1e6)
    return taken


def main() -> None:
    """Measure, print a table, and end with status 1 where a token costs more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each of the two")
    parser.add_argument("--calls", type=int, default=2048, help="calls in a turn")
    parser.add_argument("--most", type=float, default=10.0, help="percent that a token may cost")
    options = parser.parse_args()
    taken = trio.run(measure, options.rounds, options.calls)
    print(f"{'CPU per call, µs':<20}{'least':>10}{'median':>10}")
    for name, each in taken.items():
        print(f"{name:<20}{min(each):>10.1f}{statistics.median(each):>10.1f}")
    # Of each pair of neighbours, since a machine changes in the course of a run.
    pairs = [protected / plain for plain, protected in zip(taken["open"], taken["protected"], strict=True)]
    more = (min(taken["protected"]) / min(taken["open"]) - 1) * 100
    print(f"a token costs {more:+.1f} % (median of neighbours {(statistics.median(pairs) - 1) * 100:+.1f} %)")
    if more > options.most:
        sys.exit(f"that is more than {options.most:g} %")


if __name__ == "__main__":
    main()
