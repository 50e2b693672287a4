"""How fast we want to be: each bar a ratio against another implementation measured in the same run.

Data first, then the few ways of judging. A bar that cannot be judged, because something was not measured, says so; it
is never taken for met.
"""

from __future__ import annotations

from typing import Literal

import attrs
from cells import CELLS, UNDER_WAY
from names import BEFORE, FASTMCP, FLOOR, GO_SDK, GRPC_GO, GRPCIO, HTTP1, LOW_LEVEL, MCP, MCP_1, OURS, RMCP, TYPESCRIPT
from results import Results, Spread, paired_ratio

__all__ = ["BARS", "GRPC_BARS", "HTTP2_BARS", "NOT_THERE", "Bar", "Verdict", "judge", "verdicts"]

NOT_THERE = "not in this run"
PEERS = (MCP, LOW_LEVEL, FASTMCP, MCP_1, TYPESCRIPT)


@attrs.frozen
class Bar:
    """One promise.

    Attributes:
        what: in words, for the table.
        cell, figure: what is compared.
        limit: the ratio that is at most allowed, or at least demanded where `more` is true.
        against: the peers of which the best counts.
        more: more is better.
        over: another cell by which each peer's values are divided first: how throughput holds up is 256 over 16.
        alone: our own value, not a ratio to anybody, is held against the limit.
    """

    what: str
    cell: str
    figure: str
    limit: float
    against: tuple[str, ...] = PEERS
    more: bool = False
    over: str | None = None
    alone: bool = False

    def holds(self, value: float) -> bool:
        """Tell whether a ratio is good enough."""
        return value >= self.limit if self.more else value <= self.limit


@attrs.frozen
class Verdict:
    """What became of a bar.

    Attributes:
        ratio: what was found, with its range over the rounds; None if it could not be judged.
        against: the peer it was held against.
        steady: every single round agrees with the verdict.
        reason: why it could not be judged.
        saturated: it is about what the load generator could be the limit of, and it may have been.
    """

    bar: Bar
    said: Literal["met", "missed", "not measured"]
    ratio: Spread | None = None
    against: str | None = None
    steady: bool = True
    reason: str = ""
    saturated: bool = False

    @property
    def spare(self) -> float:
        """By which share of the limit it is better; less than 0 where the bar is missed."""
        share = self.ratio.median / self.bar.limit if self.ratio is not None else 1.0
        return share - 1 if self.bar.more else 1 - share


def judge(bar: Bar, results: Results) -> Verdict:
    """Hold a run against a bar."""
    ours = _values(bar, results, OURS)
    if not ours:
        return Verdict(bar, "not measured", reason=_why_not(bar, results, OURS))
    if bar.alone:
        return _verdict(bar, results, Spread.of(ours), None)
    if bar.over is None:
        best = results.best(bar.cell, bar.figure, bar.against, more=bar.more)
    else:
        best = next((peer for peer in bar.against if _values(bar, results, peer)), None)
    if best is None:
        return Verdict(bar, "not measured", reason=_why_not(bar, results, *bar.against))
    ratio = paired_ratio(ours, _values(bar, results, best))
    if ratio is None:
        return Verdict(bar, "not measured", reason=f"{best} has nothing to compare with")
    return _verdict(bar, results, ratio, best)


def _values(bar: Bar, results: Results, peer: str) -> list[float]:
    values = results.values(bar.cell, bar.figure, peer)
    if bar.over is None:
        return values
    divisors = results.values(bar.over, bar.figure, peer)
    return [one / other for one, other in zip(values, divisors, strict=False) if other]


def _verdict(bar: Bar, results: Results, ratio: Spread, against: str | None) -> Verdict:
    met = bar.holds(ratio.median)
    steady = bar.holds(ratio.low) == bar.holds(ratio.high) == met
    # CPU of the server is the server's, however busy the generator is.
    saturated = bar.figure == "rate" and any(
        results.saturated(cell, peer) for cell in (bar.cell, bar.over) if cell for peer in (OURS, against) if peer
    )
    return Verdict(bar, "met" if met else "missed", ratio, against, steady, saturated=saturated)


def _why_not(bar: Bar, results: Results, *peers: str) -> str:
    cells = (bar.cell, bar.over)
    reasons = [f"{one.peer}: {one.reason}" for one in results.failures if one.cell in cells and one.peer in peers]
    return "; ".join(reasons) or NOT_THERE


def _each(what: str, figure: str, *limits: tuple[str, str, float, tuple[str, ...]], more: bool = False) -> list[Bar]:
    return [Bar(f"{what}, {name}", cell, figure, limit, against, more=more) for name, cell, limit, against in limits]


def _holding_up(what: str, windows: str, least: float, against: tuple[str, ...] = ()) -> Bar:
    few, many = f"window-{windows}-16", f"window-{windows}-256"
    what = f"calls per second, 256 {what} over 16"
    return Bar(what, many, "rate", least, against, more=True, over=few, alone=not against)


OLD, NEW = "2025-11-25", "2026-07-28"

GRPC_BARS: list[Bar] = [
    *_each(
        "agent tools through gRPC",
        "cpu",
        ("a call, 64 under way", "grpc-64", 0.35, (GRPCIO,)),
        ("a call, 64 under way", "grpc-64", 3.5, (GRPC_GO,)),
        ("a message of a stream", "grpc-stream", 0.25, (GRPCIO,)),
        ("a call by the client, 64 under way", "grpc-client", 0.5, (GRPCIO,)),
    ),
]

HTTP2_BARS: list[Bar] = [Bar(f"tools/call, HTTP/2, {NEW}, JSON", "http2-json", "cpu", 1.7, (HTTP1,))]

BARS: list[Bar] = [
    *_each(
        "tools/call by a client",
        "cpu",
        (f"Streamable HTTP {NEW}, 64 under way", "client-http-2026-64", 0.25, PEERS),
        (f"Streamable HTTP {NEW}, one under way", "client-http-2026-1", 0.35, PEERS),
        (f"Streamable HTTP {OLD}, 64 under way", "client-http-2025-64", 0.15, (MCP,)),
        ("stdio, 64 under way", "client-stdio-64", 0.6, (TYPESCRIPT,)),
        ("stdio, one under way", "client-stdio-1", 0.9, (TYPESCRIPT,)),
        (f"Streamable HTTP {NEW}, 64 under way", "client-http-2026-64", 0.5, (GO_SDK,)),
        (f"Streamable HTTP {NEW}, one under way", "client-http-2026-1", 1.0, (GO_SDK,)),
        (f"Streamable HTTP {OLD}, 64 under way", "client-http-2025-64", 0.5, (GO_SDK,)),
        (f"Streamable HTTP {OLD}, one under way", "client-http-2025-1", 1.0, (GO_SDK,)),
    ),
    *_each(
        "tools/call",
        "cpu",
        (f"Streamable HTTP {NEW}, JSON", "http-2026-json", 0.14, (MCP,)),
        (f"Streamable HTTP {NEW}, JSON", "http-2026-json", 0.1, (TYPESCRIPT,)),
        (f"Streamable HTTP {OLD}, JSON", "http-2025-json", 0.13, PEERS),
        (f"Streamable HTTP {OLD}, SSE", "http-2025-sse", 0.16, PEERS),
        (f"Streamable HTTP {NEW}, SSE", "http-2026-sse", 0.11, PEERS),
        ("HTTP+SSE", "sse", 0.35, PEERS),
        ("WebSocket, 64 connections", "websocket-64", 0.3, (MCP_1,)),
        (f"stdio {OLD}", "stdio-2025", 0.6, (TYPESCRIPT,)),
        (f"stdio {NEW}", "stdio-2026", 0.6, (TYPESCRIPT,)),
        (f"stdio {OLD}", "stdio-2025", 1 / 15, (MCP,)),
        (f"stdio {NEW}", "stdio-2026", 1 / 15, (MCP,)),
        (f"Streamable HTTP {NEW}, JSON", "http-2026-json", 1.1, (RMCP,)),
        (f"Streamable HTTP {NEW}, SSE", "http-2026-sse", 1.1, (RMCP,)),
        (f"Streamable HTTP {OLD}, SSE", "http-2025-sse", 1.1, (RMCP,)),
        (f"stdio {OLD}", "stdio-2025", 1.0, (RMCP,)),
        (f"stdio {NEW}", "stdio-2026", 1.0, (RMCP,)),
        (f"256 KB echoed, Streamable HTTP {NEW}, JSON", "payload-256kb", 1.5, (RMCP,)),
    ),
    *_each(
        "a progress notification",
        "cpu",
        ("stdio", "progress-stdio", 0.25, PEERS),
        (f"Streamable HTTP {OLD}", "progress-http-2025", 0.25, PEERS),
        (f"Streamable HTTP {NEW}", "progress-http-2026", 0.3, PEERS),
        *(
            (what, cell, limit, (peer,))
            for what, cell in (
                ("stdio", "progress-stdio"),
                (f"Streamable HTTP {OLD}", "progress-http-2025"),
                (f"Streamable HTTP {NEW}", "progress-http-2026"),
            )
            for limit, peer in ((0.6, GO_SDK), (0.5, RMCP))
        ),
    ),
    *HTTP2_BARS,
    *GRPC_BARS,
    _holding_up("connections of Streamable HTTP", "http", 1.0, (FLOOR,)),
    _holding_up("connections of WebSocket", "connections", 0.9),
    _holding_up("calls on one WebSocket", "websocket", 0.9),
    _holding_up("calls over stdio", "stdio", 0.9),
    Bar("calls per second, two workers over one", "workers-2", "rate", 1.8, more=True, over="workers-1", alone=True),
    *_each(
        "calls per second of CPU within one process",
        "rate",
        ("one under way", "memory-1", 3.0, (MCP,)),
        ("one under way", "memory-1", 1.0, (TYPESCRIPT,)),
        ("64 under way", "memory-64", 4.0, (MCP,)),
        ("64 under way", "memory-64", 1.25, (TYPESCRIPT,)),
        ("64 under way", "memory-64", 0.5, (RMCP,)),
        more=True,
    ),
    Bar("memory of an idle session, Streamable HTTP", "sessions-1000", "memory", 1 / 2),
    Bar("memory of an idle session, WebSocket", "sessions-websocket-1000", "memory", 0.25, (MCP_1,)),
    *(
        Bar(f"KiB that a fourth round of 1,000 sessions adds to each, {name}", cell, "growth", 0.2, alone=True)
        for name, cell in (("Streamable HTTP", "sessions-1000"), ("WebSocket", "sessions-websocket-1000"))
    ),
    Bar(f"a session that comes and goes, Streamable HTTP {OLD}", "come-and-go", "cpu", 1.0, (GO_SDK,)),
    *(
        bar
        for cell, subscribers in (("told-1000", "1,000 subscribers"), ("told-3000", "3,000 subscribers"))
        for bar in (
            Bar(f"telling {subscribers} of a change, each", cell, "cpu", 0.8, (GO_SDK,)),
            Bar(f"ms of a call while {subscribers} are told of a change", cell, "meanwhile", 10.0, alone=True),
        )
    ),
    Bar("tools/list of 1,000 tools, 2nd time on", "list-1000", "cpu", 1 / 20),
    Bar("import, CPU", "cold-start", "import", 0.2, (MCP,)),
    Bar("spawn to first answer, CPU", "cold-start", "first-answer", 0.5, (TYPESCRIPT,)),
    Bar("p99 in ms, WebSocket, 64 connections", "websocket-64", "p99", 15.0, alone=True),
    *(
        Bar(f"p99, {one.title}", one.name, "p99", 1.0, (BEFORE,))
        for one in CELLS
        if one.kind in ("load", "client")
        and one.section in ("calls", "clients")
        and one.under_way * one.connections == UNDER_WAY
        and one.server != TYPESCRIPT
    ),
]


def verdicts(results: Results) -> list[Verdict]:
    """Hold a run against every bar; against an earlier trimcp only where one took part."""
    before = any(one.peer == BEFORE for one in results.series)
    return [judge(bar, results) for bar in BARS if before or bar.against != (BEFORE,)]
