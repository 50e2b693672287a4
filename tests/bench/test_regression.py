"""What a comparison with earlier measurements finds, and what it does not, on slices made up by chance."""

from __future__ import annotations

import math
from random import Random

import attrs
import pytest

from tests.bench.test_report import a_report
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.regression import Comparison, compare
from trimcp.bench.report import Cost, Failures, Histogram, Report, Slice
from trimcp.errors import LocalError

TEN = tuple(f"tool{number}" for number in range(10))


def a_run(
    seed: int,
    *,
    labels: tuple[str, ...] = TEN,
    slow: dict[str, float] | None = None,
    by: float = 1.0,
    cpu: float = 1.0,
    machine: float = 1.0,
    lag: float = 0.0,
    busy: bool = False,
    calls: int = 40,
    slices: int = 24,
    **changed: object,
) -> Report:
    """A measurement in which each call takes about 0.5 ms.

    `slow`: seconds more for these tools. `by`: how many times as long every call takes. `cpu`: the server's CPU.
    `machine`: how many times as long the piece of work takes. `lag`: how late the generator woke.
    `busy`: other programs disturb most of the slices.
    """
    chance = Random(seed)
    made = []
    for number in range(slices):
        disturbed = busy and chance.random() < 0.6
        drift = by * chance.uniform(0.97, 1.03) * (chance.uniform(1.5, 6.0) if disturbed else 1.0)
        times = {}
        for label in labels:
            each = Histogram()
            tail = [chance.expovariate(1 / 0.0005) for _ in range(calls)]
            each.add([drift * (0.0005 + 0.1 * extra) + (slow or {}).get(label, 0.0) for extra in tail])
            times[label] = each
        count = calls * len(labels)
        work = 20e-6 * machine * chance.uniform(0.97, 1.05)
        spent = 40e-6 * count * cpu * machine * chance.uniform(0.98, 1.02)
        made.append(Slice(number / 4, 0.25 * drift, times, {}, spent, 2**20, lag=lag, work_cpu=work, work=work))
    requests = {label: Histogram.merged(each.times[label] for each in made) for label in labels}
    latency = Histogram.merged(requests.values())
    plan = Plan([MixEntry.tool(label) for label in labels], under_way=8)
    report = a_report(plan=plan, latency=latency, requests=requests, slices=tuple(made), calls=latency.count)
    return attrs.evolve(report, cost=Cost(1.0, 1, 1), **changed)


def worse(found: Comparison) -> set[str]:
    return {f"{each.figure} {each.label}".strip() for each in found.worse}


def test_a_tool_of_ten_that_sleeps_for_two_milliseconds_is_found_each_time() -> None:
    for seed in range(10):
        found = compare([a_run(seed)], a_run(100 + seed, slow={"tool3": 0.002}, busy=seed % 2 == 0))
        assert "p50 tool3" in worse(found), seed
        assert {each.label for each in found.worse} <= {"tool3"}, seed


def test_equal_servers_do_not_differ_also_on_a_busy_machine() -> None:
    found = [compare([a_run(seed, busy=seed % 3 == 0)], a_run(50 + seed, busy=seed % 2 == 0)) for seed in range(20)]
    assert sum(bool(each.worse) for each in found) <= 1


def test_what_makes_all_slower_is_found_of_all_and_not_of_each() -> None:
    after = a_run(2, by=1.5, cpu=1.5)
    assert worse(compare([a_run(1), a_run(3), a_run(4)], after)) == {"p50", "p99", "rate", "cpu"}
    found = compare([a_run(1)], after)
    assert worse(found) == {"p50", "cpu"}  # one earlier run does not say how much the others vary
    (change,) = [each for each in found.changes if (each.figure, each.label) == ("p50", "")]
    assert 1.4 < change.low < change.ratio < change.high < 1.6


def test_a_little_slower_is_tolerated_as_far_as_the_user_says() -> None:
    before, after = a_run(1), a_run(2, by=1.08)
    assert worse(compare([before], after)) == set()
    assert "p50" in worse(compare([before], after, tolerance=0.03))


def test_faster_is_no_regression() -> None:
    assert worse(compare([a_run(1)], a_run(2, by=0.5, cpu=0.5))) == set()


def test_one_tool_alone_is_compared_as_a_whole() -> None:
    one = ("echo",)
    assert worse(compare([a_run(1, labels=one)], a_run(2, labels=one))) == set()
    found = worse(compare([a_run(1, labels=one)], a_run(2, labels=one, slow={"echo": 0.002})))
    assert found == {"p50"}


@pytest.mark.parametrize(
    ("before", "after", "judged"),
    [(0.003, 0.006, False), (0.006, 0.003, True), (0.003, 0.004, True), (0.0001, 0.0009, True)],
)
def test_where_the_generator_woke_later_the_whole_is_not_judged(before: float, after: float, judged: bool) -> None:
    found = compare([a_run(1, lag=before)], a_run(2, by=1.5, lag=after))
    assert ("p50" in worse(found)) is judged
    assert [note for note in found.notes if "times as late" in note] == ([] if judged else list(found.notes))
    assert worse(compare([a_run(1, lag=before)], a_run(2, lag=after, slow={"tool3": 0.002}))) >= {"p50 tool3"}


def test_on_another_machine_the_whole_is_not_judged() -> None:
    found = compare([a_run(1)], a_run(2, by=1.5, machine=1.5))
    assert worse(found) == set()
    assert "another one" in found.notes[0]
    assert worse(compare([a_run(1)], a_run(2, by=1.5, machine=1.5, slow={"tool3": 0.002}))) == {
        "p50 tool3",
        "p99 tool3",
    }


def test_several_earlier_runs_say_how_much_runs_differ() -> None:
    after = a_run(9, by=1.2)
    assert "p50" in worse(compare([a_run(1)], after))
    assert "p50" not in worse(compare([a_run(1), a_run(2, by=1.1), a_run(3, by=1.25)], after))


def test_errors_are_a_regression_where_there_were_fewer() -> None:
    bad = {"boom": Failures(500, "no")}
    assert worse(compare([a_run(1)], a_run(2, errors=bad))) == {"errors"}
    assert worse(compare([a_run(1, errors=bad)], a_run(2, errors=bad))) == set()
    assert math.isinf(compare([a_run(1)], a_run(2, errors=bad)).changes[-1].ratio)


def test_what_cannot_be_compared_is_refused_with_its_reason() -> None:
    with pytest.raises(LocalError, match=r"8 slices are needed.* has 5: measure for 4 seconds or more"):
        compare([a_run(1)], a_run(2, slices=5))
    other = attrs.evolve(a_run(2), plan=Plan(MixEntry.tool("x"), sessions=4))
    with pytest.raises(LocalError, match="another mix, sessions, under_way"):
        compare([a_run(1)], other)
    with pytest.raises(LocalError, match="another transport, stdio"):
        compare([a_run(1)], attrs.evolve(a_run(2), transport="http"))


def test_a_request_with_few_calls_is_named_and_left_out() -> None:
    before, after = a_run(1), a_run(2)
    few = Histogram()
    few.add([0.1] * 99)
    found = compare([before], attrs.evolve(after, requests={**after.requests, "tool9": few}))
    assert found.notes == ("too few calls to compare: tool9",)
    assert {each.label for each in found.changes} == {"", *TEN[:9]}
