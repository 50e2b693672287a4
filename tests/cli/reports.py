"""Reports as a measurement would make them, for the tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from trimcp.bench.histogram import Histogram
from trimcp.bench.plan import Plan, Request
from trimcp.bench.report import Cost, Failures, Generator, Report, Second, Snapshot
from trimcp.wire.revisions import LATEST

MEBI = 1024 * 1024


def a_plan(**options: Any) -> Plan:
    return Plan(Request.tool("echo", {"text": "hello {n}"}), **{"under_way": 16, "seconds": 2.0, **options})


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


def a_snapshot(**changed: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "elapsed": 1.0,
        "share": 0.5,
        "calls": 500,
        "rate": 1234.0,
        "p50": 0.001,
        "p90": 0.002,
        "p99": 0.003,
        "errors": {},
        "cancelled": 0,
        "timed_out": 0,
        "late": 0,
        "progress": 0,
        "progress_rate": 0.0,
        "under_way": 16,
        "sessions": 1,
        "busy": 0.25,
    }
    return Snapshot(**{**fields, **changed})
