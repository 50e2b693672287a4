"""What it costs to be looked at: CPU of calls with a viewer, or with OpenTelemetry, against the same calls alone.

Run by itself: `python benchmarks/watch_cost.py [--rounds N] [--seconds N] [--most PERCENT]`. In one process our own
HTTP listener serves servers over Unix sockets with 64 calls under way on 64 connections, in turns:

    alone       nobody looks
    looked at   a viewer is given four pictures a second, each as a line of the admin socket
    API         the server is instrumented, and no provider is configured
    sampled     it has OpenTelemetry's SDK, which records one call of ten, and measures each
    recorded    it records and measures each call

Time is CPU of this process, the least of all rounds. What a viewer and the API cost is counted, too, in bytecodes,
which are the same in every run: of each call, and of one picture while 64 calls wait. With four pictures for all calls
that one core makes in a second (by the least time of a call alone), it ends with status 1 where that is more than the
bound.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from auth_cost import UNDER_WAY, calls
from check_cells import make_server
from check_count import BYTECODES, Counter
from check_far_end import MODERN, Http, dial, request
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

import trimcp
from trimcp.watch import instrument_server
from trimcp.watch.admin import answer_line

__all__ = ["measure"]

INTERVAL = 0.25
TURN = 20 * UNDER_WAY
BOUND = ("looked at", "API")


PICTURES = 1 / INTERVAL


class _Nowhere(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def make_servers() -> dict[str, trimcp.Server[None]]:
    """Return the server of each kind of turn."""
    servers = {name: make_server() for name in ("alone", "API", "sampled", "recorded")}
    instrument_server(servers["API"])
    for name, rate in (("sampled", 0.1), ("recorded", 1.0)):
        spans = TracerProvider(TraceIdRatioBased(rate), shutdown_on_exit=False)
        spans.add_span_processor(BatchSpanProcessor(_Nowhere()))
        meters = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
        instrument_server(servers[name], tracer_provider=spans, meter_provider=meters)
    return servers | {"looked at": servers["alone"]}


async def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return microseconds of CPU per call of each round, by kind."""
    servers = make_servers()
    taken: dict[str, list[float]] = {name: [] for name in servers}

    async def look() -> None:
        with servers["looked at"].observe(INTERVAL) as pictures:
            async for picture in pictures:
                answer_line({"done": picture})

    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            connections: dict[str, list[Http]] = {}
            for number, name in enumerate(servers):
                if name != "looked at":
                    path = f"{folder}/{number}"
                    await nursery.start(partial(trimcp.serve_http, servers[name], uds=path, grace=0))
                    connections[name] = [Http(dial(path), MODERN) for _ in range(UNDER_WAY)]
                    await calls(connections[name], TURN)  # the first calls are slow everywhere
            connections["looked at"] = connections["alone"]
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
                            await calls(connections[name], TURN)
                            number += TURN
                        viewers.cancel_scope.cancel()
                    taken[name].append((time.process_time() - began) / number * 1e6)
            del connections["looked at"]
            for each in connections.values():
                for http in each:
                    http.peer.close()
            nursery.cancel_scope.cancel()
    return taken


async def count() -> tuple[dict[str, float], int]:
    """Return the bytecodes of a call, by kind, and those of a picture."""
    servers = make_servers()
    counts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with trio.open_nursery() as nursery:
            for name in ("alone", "API"):
                path = f"{folder}/{name}"
                await nursery.start(partial(trimcp.serve_http, servers[name], uds=path, grace=0))
                connections = [Http(dial(path), MODERN) for _ in range(UNDER_WAY)]
                await calls(connections, TURN)
                counts[name] = await _counted(calls, connections, TURN) / TURN
                if name == "alone":
                    with servers[name].observe():  # which keeps of the first how they end, as after each picture
                        kept = await _counted(calls, connections, TURN)
                        more = await _counted(calls, connections, TURN)
                        counts["looked at"] = more / TURN
            waiting = [Http(dial(f"{folder}/alone"), MODERN) for _ in range(UNDER_WAY)]
            for http in waiting:
                _, data = request(MODERN, "tools/call", {"name": "wait", "arguments": {}})
                nursery.start_soon(partial(http.post, data, method="tools/call", name="wait"))
            while servers["alone"].statistics().running < UNDER_WAY:  # noqa: ASYNC110  # a network is between
                await trio.sleep(0.01)
            with servers["alone"].observe() as pictures:

                async def look() -> None:
                    answer_line({"done": pictures.picture()})

                await look()
                picture = await _counted(look) + kept - more
            nursery.cancel_scope.cancel()
    return counts, picture


async def _counted(work: Callable[..., Awaitable[object]], *args: object) -> int:
    counter = Counter(BYTECODES)
    counter.start()
    await work(*args)
    counter.stop()
    return sum(sum(functions.values()) for functions in counter.functions().values())


def main() -> None:
    """Measure, print a table, and end with status 1 where something costs more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each kind")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long a turn takes")
    parser.add_argument("--most", type=float, default=2.0, help="percent that a viewer, or the API, may cost")
    options = parser.parse_args()
    taken = trio.run(measure, options.rounds, options.seconds)
    print(f"{'CPU per call, µs':<20}{'least':>10}{'median':>10}{'more':>10}")
    more = {name: (min(each) / min(taken["alone"]) - 1) * 100 for name, each in taken.items()}
    for name, each in taken.items():
        print(f"{name:<20}{min(each):>10.1f}{statistics.median(each):>10.1f}{more[name]:>+9.1f} %")
    counts, picture = trio.run(count)
    of_pictures = PICTURES * picture / counts["alone"] * min(taken["alone"]) / 1e6 * 100
    print(f"\nbytecodes of a call: {counts['alone']:,.0f} alone, of a picture of {UNDER_WAY} calls: {picture:,}")
    failed = []
    for name in BOUND:
        cost = (counts[name] / counts["alone"] - 1) * 100
        told = f"{cost:.2f} % of each call"
        if name == "looked at":
            told += f" and {of_pictures:.2f} % for {PICTURES:g} pictures a second"
            cost += of_pictures
        print(f"{name:<20}{told}: {cost:.2f} %")
        failed += [name] * (cost > options.most)
    if failed:
        sys.exit(f"{', '.join(failed)}: that is more than {options.most:g} %")


if __name__ == "__main__":
    main()
