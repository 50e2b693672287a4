"""What rounds of sessions come to, and that ours can be measured."""

from __future__ import annotations

import math
import resource

import pytest
import sessions
from rows import Rows
from sessions import Counts, Round, Spent

KIB = 1024


def counts(resident: float, peak: float, *, blocks: int = 0, tasks: int = 1, descriptors: int = 3) -> Counts:
    return Counts(int(resident * KIB), int(peak * KIB), blocks, 0, tasks, descriptors)


def a_round(before: Counts, opened: Counts, after: Counts, cpu: float) -> Round:
    spent = Spent(cpu, 2 * cpu)
    return Round(before, spent, opened, spent, spent, after)


_LATER = counts(300, 500, blocks=9, tasks=2, descriptors=4)
ROUNDS = [
    a_round(counts(100, 100), counts(500, 500, blocks=80, tasks=41), counts(300, 500, blocks=9), 0.1),
    a_round(_LATER, counts(510, 520), counts(350, 520, blocks=4, tasks=2, descriptors=5), 0.3),
]


def found(rounds: list[Round]) -> dict[str, list[float]]:
    rows = Rows()
    sessions._add(rows, "cell", "peer", rounds, 40)
    assert {(row["cell"], row["peer"]) for row in rows.data} == {("cell", "peer")}
    return {row["figure"]: row["values"] for row in rows.data}


def test_what_a_session_holds_is_what_the_first_round_added() -> None:
    figures = found(ROUNDS)
    assert figures["memory"] == [10.0]
    assert figures["blocks"] == [2.0]
    assert figures["tasks"] == [1.0]
    assert figures["kept"] == [5.0]


def test_each_round_spends() -> None:
    figures = found(ROUNDS)
    for phase in ("opening", "calling", "closing"):
        assert figures[phase] == pytest.approx([2.5, 7.5])
        assert figures[f"{phase}-wall"] == pytest.approx([5.0, 15.0])


def test_what_the_last_round_added_is_counted_by_the_peak() -> None:
    assert found(ROUNDS)["growth"] == [0.5]


def test_what_is_left_is_counted_from_the_very_beginning() -> None:
    figures = found(ROUNDS)
    assert (figures["left-blocks"], figures["left-tasks"], figures["left-descriptors"]) == ([4], [1], [2])


def test_one_round_says_nothing_of_growth() -> None:
    assert not {"growth", "left-blocks"} & found(ROUNDS[:1]).keys()


def test_files_may_be_open_while_they_are_needed() -> None:
    before = soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with sessions.open_files(10):
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_more_files_than_the_system_allows_are_an_error() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10**9 if hard == resource.RLIM_INFINITY else hard + 1
    with pytest.raises((OSError, ValueError)), sessions.open_files(wanted):
        raise AssertionError("they may not be open")


def test_more_sessions_may_leave_more_blocks() -> None:
    assert sessions.few(1_000) < sessions.few(5_000) < math.inf
