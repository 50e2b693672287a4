"""Whether a bar was met."""

from __future__ import annotations

import pytest
from bars import BARS, Bar, judge, verdicts
from cells import CELLS
from names import BEFORE, FLOOR, MCP, OURS, TYPESCRIPT
from results import BUSY, Results, Spread

BAR = Bar("a call", "calls", "cpu", 0.5)


def found(**values: list[float]) -> Results:
    results = Results()
    names = {"ours": OURS, "mcp": MCP, "typescript": TYPESCRIPT, "floor": FLOOR}
    for name, figures in values.items():
        results.add("calls", "cpu", names[name], "µs", figures)
    return results


def test_the_best_peer_counts() -> None:
    verdict = judge(BAR, found(ours=[4.0], mcp=[100.0], typescript=[10.0], floor=[1.0]))
    assert (verdict.said, verdict.against) == ("met", TYPESCRIPT)
    assert verdict.ratio == Spread(0.4, 0.4, 0.4)
    assert verdict.steady


def test_a_bar_is_missed_by_the_median() -> None:
    verdict = judge(BAR, found(ours=[6.0, 4.0, 6.0], mcp=[10.0, 10.0, 10.0]))
    assert verdict.said == "missed"
    assert not verdict.steady  # one round met it


def test_what_is_just_at_the_limit_is_met() -> None:
    assert judge(BAR, found(ours=[5.0], mcp=[10.0])).said == "met"


def test_only_those_it_is_against_count() -> None:
    bar = Bar("a call", "calls", "cpu", 0.5, (MCP,))
    assert judge(bar, found(ours=[4.0], mcp=[10.0], typescript=[1.0])).said == "met"


def test_more_may_be_better() -> None:
    bar = Bar("calls a second", "calls", "cpu", 3.0, more=True)
    verdict = judge(bar, found(ours=[100.0], mcp=[10.0], typescript=[40.0]))
    assert (verdict.said, verdict.against) == ("missed", TYPESCRIPT)
    assert judge(bar, found(ours=[120.0], mcp=[10.0], typescript=[40.0])).said == "met"


def windows(**pairs: tuple[float, float]) -> Results:
    results = Results()
    for name, (few, many) in pairs.items():
        peer = {"ours": OURS, "floor": FLOOR}[name]
        results.add("few", "rate", peer, "per second", [few])
        results.add("many", "rate", peer, "per second", [many])
    return results


def test_a_value_may_be_held_against_another_of_our_own() -> None:
    bar = Bar("more at a time", "many", "rate", 0.9, more=True, over="few", alone=True)
    assert judge(bar, windows(ours=(100.0, 95.0))).said == "met"
    assert judge(bar, windows(ours=(100.0, 85.0))).said == "missed"


def test_how_we_hold_up_may_be_held_against_how_another_does() -> None:
    bar = Bar("more at a time", "many", "rate", 1.0, (FLOOR,), more=True, over="few")
    verdict = judge(bar, windows(ours=(100.0, 80.0), floor=(1000.0, 700.0)))
    assert verdict.said == "met"
    assert verdict.ratio is not None
    assert verdict.ratio.median == pytest.approx(0.8 / 0.7)
    assert judge(bar, windows(ours=(100.0, 60.0), floor=(1000.0, 700.0))).said == "missed"


def test_a_busy_generator_is_told_where_it_could_matter() -> None:
    bar = Bar("more at a time", "many", "rate", 0.9, more=True, over="few", alone=True)
    results = windows(ours=(100.0, 95.0))
    assert not judge(bar, results).saturated
    results.add("few", BUSY, OURS, "share of a core", [0.9])
    assert judge(bar, results).saturated
    results.add("calls", "cpu", OURS, "µs", [4.0])
    results.add("calls", "cpu", MCP, "µs", [10.0])
    results.add("calls", BUSY, OURS, "share of a core", [0.9])
    assert not judge(BAR, results).saturated  # CPU time is the server's


def test_what_was_not_measured_is_not_met() -> None:
    assert judge(BAR, Results()).said == "not measured"
    assert judge(BAR, found(ours=[1.0])).said == "not measured"
    assert judge(BAR, found(mcp=[1.0])).said == "not measured"


def test_by_how_much_is_told() -> None:
    assert judge(BAR, found(ours=[6.0], mcp=[10.0])).spare == pytest.approx(-0.2)
    assert judge(BAR, found(ours=[4.0], mcp=[10.0])).spare == pytest.approx(0.2)
    bar = Bar("more at a time", "many", "rate", 0.5, more=True, over="few", alone=True)
    assert judge(bar, windows(ours=(100.0, 75.0))).spare == pytest.approx(0.5)
    assert judge(bar, windows(ours=(100.0, 25.0))).spare == pytest.approx(-0.5)


def test_an_earlier_trimcp_counts_where_it_took_part() -> None:
    results = found(ours=[4.0], mcp=[10.0])
    assert not any(BEFORE in verdict.bar.against for verdict in verdicts(results))
    for peer, p99 in ((OURS, 9.0), (BEFORE, 8.0)):
        results.add("stdio-2025", "p99", peer, "ms", [p99])
    (said,) = [one for one in verdicts(results) if one.bar.against == (BEFORE,) and one.bar.cell == "stdio-2025"]
    assert (said.said, said.against) == ("missed", BEFORE)


def test_why_it_was_not_measured_is_told() -> None:
    results = found(mcp=[1.0])
    results.fail("calls", OURS, "no reply")
    results.fail("others", OURS, "something else")
    assert judge(BAR, results).reason == f"{OURS}: no reply"


def test_every_bar_is_about_a_cell_that_is_measured() -> None:
    by_name = {cell.name: cell for cell in CELLS}
    for bar in BARS:
        for name in filter(None, (bar.cell, bar.over)):
            assert OURS in by_name[name].peers
            assert bar.alone or set(bar.against) & {*by_name[name].peers, BEFORE}, bar.what
            assert bar.alone or set(bar.against) & {*by_name[name].rivals, BEFORE}, "who counts has every round"
            assert by_name[name].quick, "the quick form judges every bar, too"


def test_no_bar_is_twice() -> None:
    assert len({(bar.what, bar.against) for bar in BARS}) == len(BARS)
