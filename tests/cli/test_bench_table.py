"""The table in the end: every figure stands there with its unit, and what makes it doubtful beside it."""

from __future__ import annotations

import attrs
import pytest

from tests.cli.reports import a_plan, a_report, some_errors
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Generator, Histogram, Report
from trimcp.cli.bench.table import describe_report, headline, milliseconds, setting, three, what
from trimcp.wire.revisions import LATEST


def text_of(report: Report) -> str:
    return "\n".join(text for text, _ in describe_report(report))


def styles_of(report: Report, part: str) -> set[str]:
    return {style for text, style in describe_report(report) if part in text}


def test_all_that_was_measured_is_in_the_table() -> None:
    assert text_of(a_report()).splitlines() == [
        f"echo · library 1.0 · stdio · {LATEST.name}",
        "  1 session, 16 calls under way, 2.00 s",
        "",
        "  calls       1,000 answered rightly, 500 per second",
        "  errors      none",
        "",
        "  time              min     mean      p50      p90      p99    p99.9      max",
        "                1.00 ms  1.01 ms  1.00 ms  1.00 ms  1.00 ms  1.00 ms  10.0 ms",
        "              from sending to answer, not corrected for coordinated omission",
        "",
        "  data        1.50 MB/s sent, 1.00 MB/s received",
        "  server      500 µs of CPU per call, 25 % of a core, 40.0 MiB, 50.0 at most",
        "  generator   10 % of a core; it could make about 5,000 such calls per second",
    ]


def test_errors_come_by_kind_the_most_frequent_first_and_harmless() -> None:
    report = a_report(errors=some_errors())
    lines = text_of(report).splitlines()
    at = lines.index("  errors      10, 0.99 % of the calls")
    assert lines[at + 1] == "              9 wrong text: 'a' instead of \\x1b[31m'b'"
    assert lines[at + 2] == "              1 timeout: no answer"
    assert styles_of(report, "  errors") == {"bold red"}
    assert "  errors      10, 100 % of the calls" in text_of(a_report(calls=0, errors=some_errors()))


def test_no_answer_at_all_is_no_success() -> None:
    report = a_report(calls=0, latency=Histogram(), cost=None)
    assert "errors      none, but no answer either" in text_of(report)
    assert styles_of(report, "no answer either") == {"red"}
    assert "time        none, for there were no right answers" in text_of(report)
    assert "CPU and memory unknown; name its process with --pid" in text_of(report)


def test_a_generator_near_its_limit_is_marked() -> None:
    busy = a_report(generator=Generator(1.7, 2.0, 1000))
    assert "SATURATED: above 80 % these figures may show its limit and not the server's" in text_of(busy)
    assert styles_of(busy, "85 % of a core") == styles_of(busy, "SATURATED") == {"bold yellow"}
    assert "SATURATED" not in text_of(a_report(generator=Generator(1.6, 2.0, 1000)))


def test_calls_given_up_and_progress_are_shown_where_there_are_any() -> None:
    shown = text_of(a_report(cancelled=7, timed_out=2, progress=50))
    assert "given up    7 cancelled, 2 timed out" in shown
    assert "progress    50 notifications, 25.0 per second" in shown
    assert "progress    0 notifications, 0.00 per second" in text_of(a_report(plan=a_plan(progress=True)))


def test_a_rate_that_is_an_estimate_is_marked_with_what_would_be_better() -> None:
    report = a_report(milliseconds=1500.0, calls=0, parts=6.6)
    told = "ROUGH: a call takes 1.51 s of the 2.00 s; better: --seconds 19"
    assert "calls       0 answered rightly in time and 16 later, 3.30 per second\n" in text_of(report)
    assert styles_of(report, told) == {"yellow"}
    assert "75.8 ms of CPU per call" in text_of(report)
    assert "ROUGH" not in text_of(a_report(milliseconds=190.0))


def test_an_open_loop_says_what_it_could_not_do() -> None:
    plan = a_plan(rate=1000.0, under_way=None)
    shown = text_of(a_report(plan=plan, late=12))
    assert "1 session, 1,000 calls begun per second (constant), 2.00 s" in shown
    assert "late        12 calls began more than 10 ms after their time, or not at all" in shown
    assert "only 500 of 1,000 calls per second were over in time" in shown
    assert "from due time to answer, corrected for coordinated omission" in shown
    kept = text_of(a_report(plan=attrs.evolve(plan, rate=510.0)))
    assert "late" not in kept
    assert "only" not in kept
    assert "only" not in text_of(a_report(plan=plan, cancelled=900, timed_out=50)), "given up is over, too"


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"transport": "http", "reply": "sse"}, "echo · library 1.0 · Streamable HTTP, SSE replies · "),
        ({"transport": "websocket"}, "echo · library 1.0 · WebSocket · "),
        ({"server_name": None}, "echo · python library.py · stdio · "),
        ({"server_version": None}, "echo · library · stdio · "),
    ],
)
def test_the_head_says_what_was_met(changed: dict[str, object], shown: str) -> None:
    assert headline(a_report(**changed)).startswith(shown)


def test_the_setting_says_how_it_was_met() -> None:
    plan = a_plan(sessions=3, under_way=2, think=0.5, warm_up=1.5)
    shown = "3 sessions, 2 calls under way each, 500 ms to think, 2.00 s after 1.5 s of warm-up, interrupted"
    assert setting(a_report(plan=plan, interrupted=True)) == shown
    assert setting(a_report(plan=a_plan(warm_up_count=1))).endswith("2.00 s after 1 call of warm-up")


def test_a_mix_is_named_by_its_first_calls() -> None:
    mix = [MixEntry.tool(name) for name in ("a", "b", "a", "c", "d")]
    assert what(Plan(mix)) == "a, b, c and 1 more"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0000042, "4.20 µs"),
        (0.0009994, "999 µs"),
        (0.0009996, "1.00 ms"),
        (0.04249, "42.5 ms"),
        (0.99949, "999 ms"),
        (1234.5, "1,234 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float | None, shown: str) -> None:
    assert milliseconds(seconds) == shown


def test_numbers_never_have_four_digits_and_a_point() -> None:
    assert [three(value) for value in (0.0, 9.994, 9.995, 99.94, 99.95, 12345.6)] == [
        "0.00",
        "9.99",
        "10.0",
        "99.9",
        "100",
        "12,346",
    ]
