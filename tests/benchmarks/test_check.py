"""What `nox -s bench-check` counts, when it complains, and what it says then."""

from __future__ import annotations

import dis
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import check
import pytest
from check import ACCEPT, BASELINE, CI_PYTHON, SPAWN
from check_cells import CELLS
from check_compare import Change, compare, record_of, table, tell, versions_changed
from check_count import BYTECODES, CALLS, Counter, place_of

OURS = "trimcp/session/session.py:Session.deliver"
TRIOS = "trio/_core/_run.py:Runner.reschedule"

# Counting


@pytest.mark.parametrize(
    ("file", "place"),
    [
        ("/venv/lib/python3.11/site-packages/trimcp/channel.py", ("trimcp", "trimcp/channel.py")),
        ("/home/me/trimcp/trimcp/session/incoming/job.py", ("trimcp", "trimcp/session/incoming/job.py")),
        ("/home/me/trimcp/.venv/lib/site-packages/trio/_core/_run.py", ("trio", "trio/_core/_run.py")),
        ("/venv/site-packages/typing_extensions.py", ("typing_extensions", "typing_extensions.py")),
        (json.__file__, ("stdlib", "json/__init__.py")),
        ("<attrs generated methods trimcp.channel.Incoming>", ("trimcp",)),
        ("<cattrs generated structure trimcp.wire.tools.CallToolParams>", ("trimcp",)),
        ("<attrs generated methods trio._core._run.Runner>", ("trio",)),
        ("<string>", ("stdlib",)),
        ("/somewhere/else.py", ("other", "else.py")),
    ],
)
def test_code_belongs_to_the_package_it_was_written_for(file: str, place: tuple[str, ...]) -> None:
    found = place_of(file)
    assert found is not None
    assert found == (*place, file)[:2]


def test_the_driver_and_the_import_system_are_not_counted() -> None:
    assert place_of(check.__file__) is None
    assert place_of("<frozen importlib._bootstrap>") is None


@pytest.fixture
def ours() -> types.ModuleType:
    """A module of the package, as far as counting knows."""
    module = types.ModuleType("ours")
    text = "def work(times):\n for _ in range(times):\n  len(())\ndef other(a):\n b = a\n return b\n"
    exec(compile(text, "/x/site-packages/trimcp/ours.py", "exec"), module.__dict__)
    return module


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    """Put back what traces the tests, such as a debugger."""
    trace, profile = sys.gettrace(), sys.getprofile()
    yield
    sys.settrace(trace)
    sys.setprofile(profile)


def counted(what: str, work: Callable[[int], object], *arguments: int) -> dict[str, dict[str, int]]:
    counter = Counter(what)
    counter.start()
    for argument in arguments:
        work(argument)
    counter.stop()
    work(0)
    return counter.functions()


def test_bytecodes_are_counted_exactly(ours: types.ModuleType) -> None:
    twice, thrice = (counted(BYTECODES, ours.other, *calls)["trimcp"] for calls in ([1] * 2, [1] * 3))
    resume, *others = dis.get_instructions(ours.other)
    assert resume.opname == "RESUME"  # where tracing begins
    assert thrice["trimcp/ours.py:other"] - twice["trimcp/ours.py:other"] == len(others)


def test_bytecodes_are_counted_as_often_as_they_are_executed(ours: types.ModuleType) -> None:
    counts = [counted(BYTECODES, ours.work, 0, times) for times in (10, 10, 20, 30)]
    numbers = [count["trimcp"]["trimcp/ours.py:work"] for count in counts]
    assert counts[0] == counts[1]
    assert numbers[2] - numbers[1] == numbers[3] - numbers[2] >= 10 * 5


def test_calls_into_c_are_counted_where_they_are_made(ours: types.ModuleType) -> None:
    assert counted(CALLS, ours.work, 12)["trimcp"] == {"trimcp/ours.py:work": 12}


# Records


def measured(**changes: Any) -> dict[str, Any]:
    """What a cell of ten operations may give."""
    functions = {
        BYTECODES: {"trimcp": {"trimcp/session/session.py:Session.deliver": 20_000}, "trio": {"trio/x.py:f": 10_000}},
        CALLS: {"trimcp": {"trimcp/session/session.py:Session.deliver": 300}, "trio": {"trio/x.py:f": 200}},
    }
    return {"functions": functions, "memory": {"peak": 90_000, "garbage": 0, "kept": 3, "places": []}, **changes}


def test_a_record_says_what_one_operation_costs() -> None:
    figures = record_of(10, measured())["figures"]
    assert figures == {
        "bytecodes": 3_000,
        "bytecodes in trimcp": 2_000,
        "bytecodes in trio": 1_000,
        "calls into C": 50,
        "calls into C in trimcp": 30,
        "peak bytes": 90_000,
        "garbage objects": 0,
        "kept blocks": 0.3,
    }


def test_small_functions_are_not_recorded() -> None:
    found = measured()
    found["functions"][BYTECODES]["trimcp"]["trimcp/small.py:f"] = 90
    found["functions"][BYTECODES]["stdlib"] = {"x.py:f": 2_000}
    record = record_of(10, found)
    assert list(record["functions"][BYTECODES]) == ["stdlib/x.py:f", OURS, "trio/x.py:f"]
    assert record["figures"]["bytecodes in trimcp"] == 2_009


def record(*, memory: dict[str, Any] | None = None, **counts: float) -> dict[str, Any]:
    """A record of 100 operations, in which some counts are others."""
    each = {"trimcp": 2_000, "trio": 1_000, "stdlib": 100, "calls": 30, **counts}
    calls = {"trimcp": {"trimcp/session/session.py:Session.deliver": int(each.pop("calls") * 100)}}
    files = {"trimcp": "trimcp/session/session.py:Session.deliver", "trio": "trio/_core/_run.py:Runner.reschedule"}
    bytecodes = {package: {files.get(package, "x.py:f"): int(count * 100)} for package, count in each.items()}
    held = {"peak": 90_000, "garbage": 0, "kept": 0, "places": [], **(memory or {})}
    return record_of(100, {"functions": {BYTECODES: bytecodes, CALLS: calls}, "memory": held})


# Comparing


def changed(now: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    return [change.figure for change in compare("stdio", before or record(), now)]


@pytest.mark.parametrize(
    ("counts", "figures"),
    [
        ({}, []),
        ({"trimcp": 2_199}, []),
        ({"trimcp": 2_201}, ["bytecodes in trimcp"]),
        ({"trimcp": 2_600}, ["bytecodes", "bytecodes in trimcp"]),
        ({"trimcp": 1_790}, ["bytecodes in trimcp"]),
        ({"trio": 1_099, "trimcp": 2_195}, []),
        ({"trio": 1_150}, ["bytecodes in trio"]),
        ({"stdlib": 190}, []),  # a lot of little
        ({"stdlib": 200}, ["bytecodes in stdlib"]),
        ({"new": 100}, ["bytecodes in new"]),
        ({"calls": 33}, []),
        ({"calls": 34}, ["calls into C", "calls into C in trimcp"]),
    ],
)
def test_a_tenth_more_or_less_is_a_change(counts: dict[str, float], figures: list[str]) -> None:
    assert changed(record(**counts)) == figures


def test_one_call_into_c_more_is_no_growth() -> None:
    assert changed(record(calls=10), record(calls=9)) == []
    assert changed(record(calls=11), record(calls=9)) == ["calls into C", "calls into C in trimcp"]


def test_a_little_of_ours_counts_also_where_others_do_much() -> None:
    before = record(trimcp=100, trio=50_000)
    assert changed(record(trimcp=112, trio=50_000), before) == ["bytecodes in trimcp"]


def test_more_of_ours_is_seen_where_others_do_less() -> None:
    assert changed(record(trimcp=2_250, trio=900, stdlib=90)) == ["bytecodes in trimcp"]


@pytest.mark.parametrize(
    ("memory", "figures"),
    [
        ({"peak": 98_900}, []),
        ({"peak": 99_100}, ["peak bytes"]),
        ({"kept": 8}, []),  # a cache took another page
        ({"kept": 100}, ["kept blocks"]),
        ({"kept": -50}, []),
        ({"garbage": 40}, []),
        ({"garbage": 100}, ["garbage objects"]),
    ],
)
def test_memory_may_grow_a_little(memory: dict[str, Any], figures: list[str]) -> None:
    assert changed(record(memory=memory)) == figures


def test_a_small_peak_may_grow_by_a_page() -> None:
    before = record(memory={"peak": 2_000})
    assert changed(record(memory={"peak": 6_000}), before) == []
    assert changed(record(memory={"peak": 6_100}), before) == ["peak bytes"]


def test_what_was_kept_before_may_be_kept() -> None:
    before = record(memory={"kept": 1_100})
    assert changed(record(memory={"kept": 1_120}), before) == []
    assert changed(record(memory={"kept": 1_250}), before) == ["kept blocks"]


def test_another_module_or_two_is_no_change() -> None:
    before = record_of(1, measured(modules=["a", "b", "c"]))
    [change] = compare("spawn", before, record_of(1, measured(modules=["a", "b", "c", "d", "e", "f"])))
    assert change.figure == "modules"
    assert [name for name, _ in change.functions] == ["d", "e", "f"]
    assert not list(compare("spawn", before, record_of(1, measured(modules=["a", "b", "c", "d", "e"]))))


# Words


def said(now: dict[str, Any], versions: dict[str, str] | None = None) -> str:
    return "\n".join(tell(compare("stdio", record(), now), versions or {}, accept="accept it"))


def test_growth_is_told_with_where_it_is_and_what_to_do() -> None:
    text = said(record(trimcp=2_250))
    assert "GREW  stdio: bytecodes in trimcp per operation: 2,000.0 -> 2,250.0 (+12.5 %)" in text
    assert f"+250.0  {OURS}" in text
    assert "1 figure grew by more than 10 %. Is it worth that? Then accept it: accept it" in text


def test_functions_are_told_once_for_a_package_and_the_whole() -> None:
    text = said(record(trimcp=2_400))
    assert "2 figures grew by more than 10 %" in text
    assert text.count(OURS) == 1


def test_only_the_package_that_grew_is_blamed() -> None:
    change = next(iter(compare("stdio", record(), record(trimcp=2_250, trio=1_050))))
    assert change == Change("stdio", "bytecodes in trimcp", 2_000, 2_250, ((OURS, 250),), "trimcp")
    total = next(iter(compare("stdio", record(), record(trimcp=2_300, trio=1_090))))
    assert total.figure == BYTECODES
    assert total.functions == ((OURS, 300), (TRIOS, 90))


def test_the_ten_functions_that_grew_most_are_named() -> None:
    def many(each: int) -> dict[str, Any]:
        found = measured()
        found["functions"][BYTECODES]["trimcp"] = {f"trimcp/x.py:f{n}": 10_000 + each * n for n in range(20)}
        return record_of(10, found)

    total, ours = compare("stdio", many(0), many(500))
    assert total.figure == BYTECODES
    assert [name for name, _ in ours.functions] == [f"trimcp/x.py:f{n}" for n in range(19, 9, -1)]


def test_what_stays_is_told_with_its_line() -> None:
    text = said(record(memory={"kept": 100, "places": [["trimcp/session/session.py:161", 100]]}))
    assert "kept blocks per operation: 0.0 -> 1.0 (from nothing)" in text
    assert "+1.0  trimcp/session/session.py:161" in text


def test_a_gain_is_to_be_accepted() -> None:
    text = said(record(trimcp=1_500))
    assert "less  stdio: bytecodes -16 %, bytecodes in trimcp -25 %\n" in text
    assert "Accept the gain, to keep it: accept it" in text
    assert "GREW" not in text


def test_a_gain_beside_a_growth_is_no_invitation() -> None:
    text = said(record(trimcp=1_500, trio=1_400))
    assert "GREW  stdio: bytecodes in trio" in text
    assert "less  stdio: bytecodes in trimcp -25 %" in text
    assert "Accept the gain" not in text


def test_another_version_is_named_and_blamed_for_what_grew_in_it() -> None:
    versions = versions_changed({"trio": "0.35.0", "attrs": "1"}, {"trio": "0.36.0", "attrs": "1", "wsproto": "2"})
    assert versions == {"trio": "0.35.0 -> 0.36.0", "wsproto": "none -> 2"}
    text = said(record(trio=1_500), versions)
    assert "other versions than the baseline: trio 0.35.0 -> 0.36.0, wsproto none -> 2." in text
    assert "trio is not the version of the baseline: this may be its doing and not ours." in text
    assert "doing" not in said(record(trimcp=2_250), versions)
    assert "attrs is not" in said(record(attr=400), {"attrs": "1 -> 2"})


def test_the_table_shows_changes_from_half_a_thousandth_on() -> None:
    before = {"stdio": record()}
    same, grown = list(table({"stdio": record()}, before))[1], list(table({"stdio": record(trimcp=2_100)}, before))[1]
    assert "%" not in same
    assert "2,100.0  +5.0 %" in grown
    assert "%" not in "\n".join(table({"stdio": record()}, None))


# The command


def judged(capsys: pytest.CaptureFixture[str], now: dict[str, Any], *names: str) -> tuple[int, str]:
    baseline = {"versions": {"trio": "1"}, "cells": {"stdio": record()}}
    names = names or ("stdio",)
    code = check.judge(names, baseline, dict.fromkeys(names, now), {"trio": "1"})
    return code, capsys.readouterr().out


def test_growth_fails_and_a_gain_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(capsys, record()) == (0, "\nnothing has changed by more than a tenth\n")
    assert judged(capsys, record(trimcp=2_300))[0] == 1
    code, text = judged(capsys, record(trimcp=1_500))
    assert code == 0
    assert ACCEPT in text


def test_a_cell_that_was_never_counted_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = judged(capsys, record(), "stdio", "pigeons")
    assert code == 1
    assert f"not in the baseline yet: pigeons. Add them: {ACCEPT}" in text


def test_a_python_without_baseline_fails_only_where_there_has_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.without_baseline(CI_PYTHON) == 1
    assert ACCEPT in capsys.readouterr().out
    assert check.without_baseline("3.99") == 0
    assert "this is 3.99" in capsys.readouterr().out


def test_a_baseline_has_a_line_for_each_figure() -> None:
    baselines = {"3.11": {"versions": {"trio": "1"}, "cells": {"stdio": record(), "HTTP": record()}}}
    text = check.dumped(baselines)
    assert json.loads(text) == baselines
    lines = [line.strip() for line in text.splitlines()]
    assert lines.count('"bytecodes in trimcp": 2000.0,') == 2
    assert len([line for line in lines if line.startswith('"functions": {')]) == 2
    assert not [line for line in lines if line.startswith(f'"{OURS}"')]


def test_the_checked_in_baseline_knows_every_cell() -> None:
    baseline = json.loads(BASELINE.read_text("utf-8"))[CI_PYTHON]
    assert set(baseline["cells"]) == {*CELLS, SPAWN}
    assert set(baseline["versions"]) == {"python", *check.BESIDE}


@pytest.mark.slow
def test_the_same_work_costs_the_same_every_time() -> None:
    name = "client over pipes, 2025-11-25"
    first, second = (check.measure([name])[name]["figures"] for _ in range(2))
    assert first["bytecodes in trimcp"] > 100
    assert first["kept blocks"] < 0.25
    for figure in ("bytecodes", "bytecodes in trimcp", "calls into C"):
        assert second[figure] == pytest.approx(first[figure], rel=0.005)
