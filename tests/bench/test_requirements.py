"""What is read from `--require`, and how a report is judged by it."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.bench.test_report import a_report, times
from trimcp.bench.report import Cost, Failures, Histogram, Report, Slice
from trimcp.bench.requirements import Requirement
from trimcp.errors import LocalError

MEBI = 2**20


def judged(text: str, **changed: Any) -> tuple[bool, str]:
    (requirement,) = Requirement.read(text)
    verdict = requirement.judge(a_report(**changed))
    return verdict.passed, verdict.text


def test_a_list_with_commas_is_several() -> None:
    found = Requirement.read("p99<50ms, errors<0.1%,rate>2000,rss_growth<5MiB/h, tools/list:p50<=2 ms")
    assert [(each.figure, each.label, each.sign) for each in found] == [
        ("p99", None, "<"),
        ("errors", None, "<"),
        ("rate", None, ">"),
        ("rss_growth", None, "<"),
        ("p50", "tools/list", "<="),
    ]
    assert [each.limit for each in found] == pytest.approx([0.05, 0.001, 2000, 5 * MEBI / 3600, 0.002])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("p99", "no requirement; write them as in p99<50ms"),
        ("p99<50", "measured in µs, us, ms, s: 'p99<50' has ''"),
        ("errors<1ms", "errors is measured in %"),
        ("speed>3", "no figure 'speed'; there are p50, p99.9, mean"),
        ("p0<3ms", "no figure 'p0'"),
        ("p100<3ms", "no figure 'p100'"),
        ("echo:rate>3", "a figure of all requests together"),
        ("p50<5ms,", "'' is no requirement"),
        ("p50==5ms", "no requirement"),
    ],
)
def test_what_is_no_requirement_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(LocalError) as caught:
        Requirement.read(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kept", "words"),
    [
        ("max<4ms", False, "4 ms"),
        ("max<=4ms", True, "4 ms"),
        ("min>=1ms", True, "1 ms"),
        ("min>1ms", False, "1 ms"),
        ("mean<2333us", False, "2,333.333 us"),
        ("p50<3ms", True, "1.999 ms"),
        ("p99<3ms", False, "4 ms (the slowest of only 3 calls)"),
        ("rate>1.9", True, "2"),
        ("rate>2/s", False, "2 /s"),
        ("errors<20%", False, "20 %"),
        ("errors<=20%", True, "20 %"),
        ("late<61%", True, "60 %"),
        ("cpu<126ms", True, "125 ms"),
        ("rss<1MiB", False, "1 MiB"),
        ("peak_rss<=2MiB", True, "2 MiB"),
    ],
)
def test_each_figure_is_shown_in_the_unit_of_its_limit(text: str, kept: bool, words: str) -> None:
    errors = {"wrong text": Failures(1, "no")}
    found = judged(text, errors=errors, late=3)
    assert found == (kept, words)


def test_what_is_not_known_is_not_kept_and_says_what_to_do() -> None:
    assert judged("cpu<1s", cost=None) == (False, "not known: name the server's process with --pid")
    assert judged("p50<1s", latency=Histogram()) == (False, "not known: there were no right answers")
    assert judged("rss_growth<1MiB/h") == (False, "not known: measure for 60 seconds or more")
    assert judged("x:p50<1s", requests={"echo": times(0.1)}) == (
        False,
        "no right answer to x; there were some to echo",
    )


def test_one_request_may_be_meant() -> None:
    requests = {"echo": times(0.001), "tools/list": times(0.1)}
    assert judged("echo:max<2ms", requests=requests) == (True, "1 ms")
    assert judged("tools/list:max<2ms", requests=requests) == (False, "100 ms")


def growing(per_second: int, seconds: int = 120) -> Report:
    slices = tuple(Slice(float(at), 1.0, {}, {}, 0.1, 10 * MEBI + at * per_second) for at in range(seconds))
    return attrs.evolve(a_report(), seconds=float(seconds), slices=slices)


def test_growth_is_the_median_slope_of_the_second_half() -> None:
    (requirement,) = Requirement.read("rss_growth<1MiB/h")
    assert requirement.judge(growing(200)).passed
    assert not requirement.judge(growing(400)).passed
    assert requirement.judge(growing(1000)).text.startswith("3.433 MiB/h")
    warm = list(growing(0).slices)
    warm[:50] = [attrs.evolve(each, rss=MEBI) for each in warm[:50]]  # a server that is still filling its caches
    warm[100] = attrs.evolve(warm[100], rss=99 * MEBI)  # one jump
    assert requirement.judge(attrs.evolve(growing(0), slices=tuple(warm))).passed


def test_confidence_says_how_sure_a_requirement_is_kept() -> None:
    def of(fast: int, slow: int) -> float:
        slices = [Slice(0.0, 1.0, {"echo": times(*[0.001] * 100)}, {})] * fast
        slices += [Slice(0.0, 1.0, {"echo": times(*[0.001] * 90, *[0.1] * 10)}, {})] * slow
        whole = Histogram.merged(each.whole for each in slices)
        report = attrs.evolve(a_report(), latency=whole, slices=tuple(slices), cost=Cost(1.0, 1, 1))
        (requirement,) = Requirement.read("p99<50ms")
        return requirement.confidence(report)

    assert of(20, 0) == 1.0
    assert of(0, 20) == 0.0
    assert of(17, 3) < 0.5 < of(19, 1) < 1.0  # one call in a hundred may be slow: one slice in ten


def test_confidence_counts_rate_and_errors_of_the_slices() -> None:
    slices = tuple(Slice(0.0, 0.5, {"echo": times(*[0.001] * 10)}, {"boom": 1}) for _ in range(10))
    report = attrs.evolve(a_report(), slices=slices)
    found = {text: Requirement.read(text)[0].confidence(report) for text in ("rate>19", "rate>21", "errors<10%")}
    assert found == {"rate>19": 1.0, "rate>21": 0.0, "errors<10%": 1.0}
