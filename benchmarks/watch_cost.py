"""What it costs to be looked at: CPU of calls while a viewer gets four pictures a second, against the same calls alone.

Run by itself: `python benchmarks/watch_cost.py [--rounds N] [--seconds N] [--most PERCENT]`. In one process our own
HTTP listener serves a server over a Unix socket with 64 calls under way on 64 connections, in turns with and without
the viewer, who is given each picture as a line of the admin socket. Time is CPU of this process, the least of all
rounds. It ends with status 1 where the viewer costs more than the bound.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from functools import partial

import trio
from auth_cost import UNDER_WAY, calls
from check_cells import make_server
from check_far_end import MODERN, Http, dial

import trimcp
from trimcp.watch.admin import answer_line

__all__ = ["measure"]

INTERVAL = 0.25
TURN = 20 * UNDER_WAY


async def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return microseconds of CPU per call of each round: "alone", and "looked at"."""
    taken: dict[str, list[float]] = {"alone": [], "looked at": []}
    server = make_server()

    async def look() -> None:
        with server.observe(INTERVAL) as pictures:
            async for picture in pictures:
                answer_line({"done": picture})

    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(trimcp.serve_http, server, uds=f"{folder}/here", grace=0))
            connections = [Http(dial(f"{folder}/here"), MODERN) for _ in range(UNDER_WAY)]
            await calls(connections, TURN)  # the first calls are slow everywhere
            order = list(taken)
            for _ in range(rounds):
                order.reverse()
                for name in order:
                    gc.collect()
                    number, began, ends = 0, time.process_time(), time.monotonic() + seconds
                    async with trio.open_nursery() as viewers:
                        if name == "looked at":
                            viewers.start_soon(look)
                        while time.monotonic() < ends:
                            await calls(connections, TURN)
                            number += TURN
                        viewers.cancel_scope.cancel()
                    taken[name].append((time.process_time() - began) / number * 1e6)
            for http in connections:
                http.peer.close()
            nursery.cancel_scope.cancel()
    return taken


def main() -> None:
    """Measure, print a table, and end with status 1 where a viewer costs more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each of the two")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a turn takes")
    parser.add_argument("--most", type=float, default=2.0, help="percent that a viewer may cost")
    options = parser.parse_args()
    taken = trio.run(measure, options.rounds, options.seconds)
    print(f"{'CPU per call, µs':<20}{'least':>10}{'median':>10}")
    for name, each in taken.items():
        print(f"{name:<20}{min(each):>10.1f}{statistics.median(each):>10.1f}")
    pairs = [watched / alone for alone, watched in zip(taken["alone"], taken["looked at"], strict=True)]
    more = (min(taken["looked at"]) / min(taken["alone"]) - 1) * 100
    print(f"a viewer costs {more:+.1f} % (median of neighbours {(statistics.median(pairs) - 1) * 100:+.1f} %)")
    if more > options.most:
        sys.exit(f"that is more than {options.most:g} %")


if __name__ == "__main__":
    main()
