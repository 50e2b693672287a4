"""How fast we want to be: each bar a ratio against another implementation measured in the same run.

Data first, then the few ways of judging. A bar that cannot be judged, because something was not measured, says so; it
is never taken for met.
"""

from __future__ import annotations

from typing import Literal

import attrs
from names import FASTMCP, FLOOR, LOW_LEVEL, MCP, MCP_1, OURS, TYPESCRIPT
from results import Results, Spread, paired_ratio

__all__ = ["BARS", "Bar", "Verdict", "judge"]

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
    return "; ".join(reasons) or "not in this run"


def _same(what: str, cells: dict[str, str], figure: str, limit: float, against: tuple[str, ...] = PEERS) -> list[Bar]:
    return [Bar(f"{what}, {name}", cell, figure, limit, against) for name, cell in cells.items()]


BOTH = {"2025-11-25": "stdio-2025", "2026-07-28": "stdio-2026"}

BARS: list[Bar] = [
    *_same(
        "tools/call over Streamable HTTP, JSON reply",
        {"2025-11-25": "http-2025-json", "2026-07-28": "http-2026-json"},
        "cpu",
        1 / 3,
    ),
    *_same(
        "tools/call over Streamable HTTP, SSE reply",
        {"2025-11-25": "http-2025-sse", "2026-07-28": "http-2026-sse"},
        "cpu",
        1 / 3,
    ),
    Bar("tools/call over HTTP+SSE", "sse", "cpu", 4 / 5),
    *_same("tools/call over stdio", BOTH, "cpu", 1.0, (TYPESCRIPT,)),
    *_same("tools/call over stdio", BOTH, "cpu", 1 / 15, (MCP,)),
    Bar("tools/call over WebSocket", "websocket", "cpu", 1 / 2, (MCP_1,)),
    *_same(
        "a progress notification",
        {
            "stdio": "progress-stdio",
            "Streamable HTTP 2025-11-25": "progress-http-2025",
            "Streamable HTTP 2026-07-28": "progress-http-2026",
        },
        "cpu",
        1 / 2,
    ),
    Bar(
        "calls per second, 256 under way over 16, stdio",
        "window-stdio-256",
        "rate",
        0.9,
        more=True,
        over="window-stdio-16",
        alone=True,
    ),
    Bar(
        "calls per second, 256 under way over 16, WebSocket",
        "window-websocket-256",
        "rate",
        0.9,
        more=True,
        over="window-websocket-16",
        alone=True,
    ),
    Bar(
        "calls per second, 256 under way over 16, Streamable HTTP",
        "window-http-256",
        "rate",
        1.0,
        (FLOOR,),
        more=True,
        over="window-http-16",
    ),
    Bar("memory of an idle session with an open stream", "sessions-1000", "memory", 1 / 2),
    Bar("KiB that a fourth round of 1,000 sessions adds to each", "sessions-1000", "growth", 0.5, alone=True),
    Bar("calls per second within one process", "memory-64", "rate", 3.0, more=True),
    Bar("tools/list of 1,000 tools, 2nd time on", "list-1000", "cpu", 1 / 20),
    Bar("import, CPU", "cold-start", "import", 1 / 4, (MCP,)),
    Bar("spawn to first answer, CPU", "cold-start", "first-answer", 1 / 3, (MCP,)),
]
