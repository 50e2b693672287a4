"""Two servers in turns: ratios of each round, and whether they mean anything."""

from __future__ import annotations

import pytest

from tests.cli.reports import MEBI, a_report, some_errors
from trimcp.bench.report import Cost, Generator
from trimcp.cli.bench.table import Pair, comparison_json, describe_comparison, ratios


def rounds(*pairs: tuple[int, int]) -> list[Pair]:
    """Rounds in which the two answered so many calls in two seconds."""
    return [(a_report(calls=first), a_report(calls=second, milliseconds=4.0)) for first, second in pairs]


def test_ratios_are_of_one_round_each() -> None:
    found = {each.figure.name: each for each in ratios(rounds((300, 100), (400, 200), (1000, 250)))}
    rate = found["per_second"]
    assert (rate.first, rate.second) == ("200", "100")
    assert (rate.median, rate.low, rate.high) == (3.0, 2.0, 4.0), "not the ratio of the medians, which is 2"
    assert found["p50"].median == pytest.approx(0.25, rel=0.02)
    assert found["cpu_per_call"].median == pytest.approx(1 / 3)
    assert found["rss"].median == 1.0


def test_what_is_not_known_of_both_has_no_ratio() -> None:
    pairs = [(a_report(), a_report(cost=None))]
    assert [each.figure.name for each in ratios(pairs)] == ["per_second", "p50", "p99"]
    one_round_without = [*rounds((1, 1)), (a_report(), a_report(calls=0))]
    assert "per_second" not in [each.figure.name for each in ratios(one_round_without)]


def test_the_table_has_both_and_says_what_is_not_clear() -> None:
    pairs = rounds((300, 100), (150, 100), (90, 100))
    lines = [text for text, _ in describe_comparison(pairs)]
    assert lines[0].startswith("1: echo · library 1.0 · stdio")
    assert lines[2] == "   3 rounds of: 1 session, 16 calls under way, 2.00 s"
    assert lines[3].startswith("2: echo")
    table = [" ".join(line.split()) for line in lines[lines.index("") + 1 :]]
    assert table[0] == "1 2 1 compared to 2 round by round"
    assert table[1] == "calls/s 75.0 50.0 1.50 × faster 1.11 × slower to 3.00 × faster no clear difference"
    assert table[2] == "p50 1.00 ms 4.00 ms 3.99 × faster 3.99 to 3.99"
    assert table[4] == "CPU per call 3.33 ms 5.00 ms 1.50 × less 3.00 × less to 1.11 × more no clear difference"
    assert table[5] == "memory 40.0 MiB 40.0 MiB the same 1.00 to 1.00 no clear difference"
    assert table[6].endswith("not corrected for coordinated omission; median of 3 rounds")
    columns = [line for line in lines if " × " in line]
    assert len({line.index(" × ") for line in columns}) == 1, "columns align"


def test_a_ratio_is_said_as_how_many_times_what() -> None:
    (rate,) = [text for text, _ in describe_comparison(rounds((23, 1000), (20, 1000))) if "calls/s" in text]
    assert " 46.5 × slower   " in rate
    assert rate.endswith(" 43.5 to 50.0")
    (rate,) = [text for text, _ in describe_comparison(rounds((99, 1000), (45678, 1))) if "calls/s" in text]
    assert "10.1 × slower to 45,678 × faster" in rate


def test_an_estimated_rate_is_marked() -> None:
    lines = [text for text, _ in describe_comparison([(a_report(), a_report(milliseconds=1500.0))])]
    assert lines[-1].startswith("  2: ROUGH: a call takes 1.51 s of the 2.00 s")


def test_one_round_cannot_be_unclear() -> None:
    assert "no clear difference" not in "".join(text for text, _ in describe_comparison(rounds((100, 100))))


def test_doubts_about_one_of_them_are_told() -> None:
    bad = a_report(errors=some_errors(), generator=Generator(1.8, 2.0, 1000))
    lines = list(describe_comparison([(a_report(), bad), (a_report(), bad)]))
    assert ("  2 answered wrongly: 18 wrong text: 'a' instead of \\x1b[31m'b'", "red") in lines
    saturated = "  2: the generator was SATURATED: the rate may be its limit and not the server's (90 % of a core)"
    assert (saturated, "bold yellow") in lines
    assert not any(text.startswith(("  1 answered", "  1: the generator")) for text, _ in lines)


def test_the_json_has_every_round_and_the_ratios() -> None:
    pairs = [(a_report(cost=Cost(1.0, MEBI, MEBI)), a_report()), (a_report(), a_report(cost=None))]
    value = comparison_json(pairs, [a_report(calls=5)])
    assert [each["first"]["calls"] for each in value["rounds"]] == [1000, 1000]
    assert value["rounds"][1]["second"]["cost"] is None
    assert value["ratios"]["per_second"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert "cpu_per_call" not in value["ratios"]
    assert [each["calls"] for each in value["unpaired"]] == [5]
