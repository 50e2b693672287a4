"""What a report says in JSON, name by name: other programs rely on it."""

from __future__ import annotations

import json

import pytest

from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Cost, Failures, Generator, Histogram, Report, Second, Snapshot

PLAN = Plan(MixEntry.tool("echo", {"text": "{n}"}))


def a_report(**options: object) -> Report:
    latency = Histogram()
    latency.add([0.001, 0.002, 0.004])
    given: dict[str, object] = {
        "target": "python server.py",
        "transport": "stdio",
        "revision": "a date",
        "reply": None,
        "server_name": "server",
        "server_version": "1",
        "plan": PLAN,
        "seconds": 2.0,
        "calls": 4,
        "after": 1,
        "parts": 4.5,
        "bytes_in": 100,
        "bytes_out": 200,
        "errors": {},
        "cancelled": 0,
        "timed_out": 0,
        "late": 0,
        "latency": latency,
        "over_time": (Second(0, 4, 1, 0.001, None),),
        "progress": 10,
        "cost": Cost(0.5, 2**20, 2**21),
        "generator": Generator(0.5, 2.0, 5),
    }
    return Report(**{**given, **options})


def test_every_name_of_the_json_stays() -> None:
    found = a_report(errors={"wrong text": Failures(1, "no")}, late=3).to_json()
    histogram = found.pop("histogram")
    assert [count for _, count in histogram] == [1, 1, 1]
    assert [edge for edge, _ in histogram] == pytest.approx([1.0, 2.0, 4.0], rel=0.011)
    latency = found.pop("latency_ms")
    assert list(latency) == ["min", "mean", "p50", "p90", "p99", "p99.9", "max"]
    assert list(latency.values()) == pytest.approx([1.0, 7 / 3, 2.0, 4.0, 4.0, 4.0, 4.0], rel=0.01)
    assert found.pop("plan") == PLAN.to_json()
    assert json.loads(json.dumps(found)) == {
        "format": 1,
        "target": "python server.py",
        "transport": "stdio",
        "revision": "a date",
        "reply": None,
        "server": {"name": "server", "version": "1"},
        "seconds": 2.0,
        "calls": 4,
        "after": 1,
        "per_second": 2.0,
        "rough": False,
        "bytes_in": 100,
        "bytes_out": 200,
        "errors": {"wrong text": {"count": 1, "example": "no"}},
        "cancelled": 0,
        "timed_out": 0,
        "late": 3,
        "over_time": [{"second": 0, "calls": 4, "errors": 1, "p50": 1.0, "p99": None}],
        "progress": {"count": 10, "per_second": 5.0},
        "cost": {"cpu_seconds": 0.5, "cpu_us_per_call": 125_000.0, "rss_mib": 1.0, "peak_rss_mib": 2.0},
        "generator": {"cpu_seconds": 0.5, "busy": 0.25, "saturated": False, "ceiling_per_second": 10.0},
        "interrupted": False,
    }


def test_what_is_not_known_is_null() -> None:
    found = a_report(
        latency=Histogram(), calls=0, seconds=0.0, cost=None, over_time=(), generator=Generator(0.0, 0.0, 0)
    ).to_json()
    assert set(found["latency_ms"].values()) == {None}
    assert (found["histogram"], found["per_second"], found["cost"]) == ([], 0.0, None)
    assert found["progress"] == {"count": 10, "per_second": 0.0}
    assert found["generator"]["ceiling_per_second"] is None
    assert a_report(calls=0).to_json()["cost"]["cpu_us_per_call"] is None


@pytest.mark.parametrize(("cpu", "saturated"), [(1.59, False), (1.61, True)])
def test_a_generator_that_has_little_time_left_says_so(cpu: float, saturated: bool) -> None:
    assert Generator(cpu, 2.0, 5).saturated is saturated


def test_right_is_what_has_answers_and_no_failures() -> None:
    assert a_report().right
    assert not a_report(errors={"x": Failures(2, "")}).right
    assert a_report(errors={"x": Failures(2, ""), "y": Failures(3, "")}).failures == 5
    assert not a_report(calls=0, latency=Histogram()).right
    assert a_report(calls=0, latency=Histogram(), timed_out=1).right


def test_a_snapshot_before_the_beginning_is_of_the_warm_up() -> None:
    values = [0.0, 0.5, 0, Histogram(), {}, 0, 0, 0, 0, 0, 0, 1, 0.0]
    assert Snapshot(-0.5, *values).warming_up
    assert not Snapshot(0.0, *values).warming_up
