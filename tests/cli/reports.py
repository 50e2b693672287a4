"""Reports as a measurement would make them, for the tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Cost, Failures, Generator, Histogram, Report, Second, Snapshot
from trimcp.wire.revisions import LATEST

MEBI = 1024 * 1024


def a_plan(**options: Any) -> Plan:
    return Plan(MixEntry.tool("echo", {"text": "hello {n}"}), **{"under_way": 16, "seconds": 2.0, **options})


def a_report(*, milliseconds: float = 1.0, **changed: Any) -> Report:
    """A report of two seconds with a thousand calls of so many milliseconds, but for one that took ten times that."""
    latency = Histogram()
    latency.add([milliseconds / 1e3] * 999 + [milliseconds / 1e2])
    fields: dict[str, Any] = {
        "target": "python library.py",
        "transport": "stdio",
        "revision": LATEST.name,
        "reply": None,
        "server_name": "library",
        "server_version": "1.0",
        "plan": a_plan(),
        "seconds": 2.0,
        "calls": 1000,
        "after": 16,
        "parts": 1008.0,
        "bytes_in": 2_000_000,
        "bytes_out": 3_000_000,
        "errors": {},
        "cancelled": 0,
        "timed_out": 0,
        "late": 0,
        "latency": latency,
        "over_time": (Second(0, 400, 0, 0.001, 0.002), Second(1, 600, 0, 0.001, 0.003)),
        "progress": 0,
        "cost": Cost(0.5, 40 * MEBI, 50 * MEBI),
        "generator": Generator(0.2, 2.0, 1000),
    }
    return Report(**{**fields, **changed})


def some_errors() -> dict[str, Failures]:
    return {"timeout": Failures(1, "no answer"), "wrong text": Failures(9, "'a' instead of \x1b[31m'b'")}


def a_snapshot(*, rate: float = 1234.0, milliseconds: float = 1.0, **changed: Any) -> Snapshot:
    """How things stand after half a second with calls that took so long, or twice or thrice that."""
    times = Histogram()
    count = round(rate / 2)
    slow, slower = count // 10, count // 50
    each = [1.0] * (count - slow - slower) + [2.0] * slow + [3.0] * slower
    times.add([factor * milliseconds / 1e3 for factor in each])
    fields: dict[str, Any] = {
        "elapsed": 1.0,
        "share": 0.5,
        "seconds": 0.5,
        "calls": 500,
        "times": times,
        "errors": {},
        "cancelled": 0,
        "timed_out": 0,
        "late": 0,
        "progress": 0,
        "reported": 0,
        "under_way": 16,
        "sessions": 1,
        "busy": 0.25,
    }
    return Snapshot(**{**fields, **changed})
