"""What a report says in JSON, name by name: other programs rely on it."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

import attrs
import pytest

from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Cost, Failures, Generator, Histogram, Report, Second, Slice, Snapshot
from trimcp.errors import LocalError

PLAN = Plan(MixEntry.tool("echo", {"text": "{n}"}))


def times(*seconds: float) -> Histogram:
    made = Histogram()
    made.add(seconds)
    return made


def a_report(**options: Any) -> Report:
    latency = Histogram()
    latency.add([0.001, 0.002, 0.004])
    given: dict[str, Any] = {
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
        "environment": {"cores": 2},
    }
    return Report(**{**given, **options})


def test_every_name_of_the_json_stays() -> None:
    slices = (Slice(0.0, 0.5, {"echo": times(0.001)}, {"wrong text": 1}, 0.1, 2**20, 0.5, 0.25, 0.125, 0.25),)
    errors = {"wrong text": Failures(1, "no")}
    found = a_report(errors=errors, late=3, slices=slices, requests={"echo": times(0.001)}).to_json()
    one = {"total": 0.001, "min": 0.001, "max": 0.001, "buckets": [[1309, 1]]}
    assert math.exp((1309 - 2000) / 100) <= 0.001 < math.exp((1310 - 2000) / 100)
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
        "parts": 4.5,
        "after": 1,
        "per_second": 2.0,
        "rough": False,
        "bytes_in": 100,
        "bytes_out": 200,
        "errors": {"wrong text": {"count": 1, "example": "no"}},
        "cancelled": 0,
        "timed_out": 0,
        "late": 3,
        "uncut": 0,
        "over_time": [{"second": 0, "calls": 4, "errors": 1, "p50": 1.0, "p99": None}],
        "progress": {"count": 10, "per_second": 5.0},
        "cost": {"cpu_seconds": 0.5, "cpu_us_per_call": 125_000.0, "rss_mib": 1.0, "peak_rss_mib": 2.0},
        "generator": {
            "cpu_seconds": 0.5,
            "busy": 0.25,
            "saturated": False,
            "ceiling_per_second": 10.0,
            "answers": 5,
            "seconds": 2.0,
            "busiest": None,
            "processes": 1,
        },
        "interrupted": False,
        "requests": {"echo": one},
        "replicas": {},
        "slices": [
            {
                "start": 0.0,
                "seconds": 0.5,
                "times": {"echo": one},
                "errors": {"wrong text": 1},
                "cpu": 0.1,
                "rss": 2**20,
                "busy": 0.5,
                "lag": 0.25,
                "work_cpu": 0.125,
                "work": 0.25,
            }
        ],
        "environment": {"cores": 2},
    }


@pytest.mark.parametrize("changed", [{}, {"cost": None, "calls": 0, "latency": Histogram(), "over_time": ()}])
def test_a_report_is_read_as_it_was_written(changed: dict[str, object]) -> None:
    plan = Plan([MixEntry.tool("echo", {"text": "{n}"}, expect="{n}"), MixEntry("ping")], rate=5.0, pids=(1,))
    slices = (Slice(0.0, 0.5, {"echo": times(0.001, 0.5)}, {"boom": 1}),)
    report = a_report(**{"plan": plan, "slices": slices, "errors": {"boom": Failures(2, "x")}, **changed})

    def as_text(report: Report) -> Any:
        return json.loads(json.dumps(report.to_json()), parse_float=lambda digits: f"{float(digits):.9g}")

    again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert as_text(again) == as_text(report)
    assert again.plan == attrs.evolve(plan, under_way=256, seconds=10.0)
    assert again.latency.percentile(50) == report.latency.percentile(50)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"format": 2}, "it has the format 2, and this version reads 1"),
        ({"format": 1}, "does not hold the figures of a measurement: KeyError"),
        ([], "does not hold the figures"),
        ({**a_report().to_json(), "over_time": 3}, "does not hold the figures"),
        ({**a_report().to_json(), "slices": [{"start": 1}]}, "does not hold the figures"),
    ],
)
def test_what_is_no_report_is_refused(value: Any, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        Report.from_json(value)


def test_histograms_are_merged_without_loss() -> None:
    chance = Random(1)
    parts = [[chance.expovariate(100) for _ in range(count)] for count in (1, 10, 5000)]
    whole = times(*[each for part in parts for each in part])
    merged = Histogram.merged(Histogram.from_json(json.loads(json.dumps(times(*part).to_json()))) for part in parts)
    assert list(merged.buckets()) == list(whole.buckets())
    assert (merged.count, merged.least, merged.most) == (whole.count, whole.least, whole.most)
    assert merged.total == pytest.approx(whole.total)


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
