"""What it costs to be looked at: CPU of calls with a viewer, or with OpenTelemetry, against the same calls alone.

Run by itself: `python benchmarks/watch_cost.py [--rounds N] [--seconds N] [--most PERCENT]`. In one process our own
HTTP listener serves servers over Unix sockets with 64 calls under way on 64 connections, in turns:

    alone       nobody looks
    looked at   a viewer is given four pictures a second, each as a line of the admin socket
    API         the server is instrumented, and no provider is configured
    sampled     it has OpenTelemetry's SDK, which records one call of ten, and measures each
    recorded    it records and measures each call

Time is CPU of this process, the least of all rounds. It ends with status 1 where a viewer or the API costs more than
the bound.
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
    if failed := [name for name in BOUND if more[name] > options.most]:
        sys.exit(f"{', '.join(failed)}: that is more than {options.most:g} %")


if __name__ == "__main__":
    main()
