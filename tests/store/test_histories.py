"""The checker of what clients of several processes saw (tests/replicas) finds what was planted in their histories."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replicas.histories import CounterHistory, History, WatchHistory, read, told, write, wrong
from tests.store.history import CallHistory


def heard(*numbers: int, to: int = 5) -> CallHistory:
    return CallHistory(to, list(numbers), [f"1-{place}" for place, _ in enumerate(numbers)], ["result"], 0.5)


GOOD: list[History] = [
    heard(1, 2, 3, 4, 5),
    CallHistory(5, [1, 2], ["2-1", "2-2"], ["error"], 4.0, resumed=1),
    CounterHistory("counter", acknowledged=7, unknown=2, found=8),
    WatchHistory("watch", heard=3, ended=1),
]
FAULTS: dict[str, History] = {
    "lost, or out of order": heard(1, 2, 4, 5),
    "lost: 4 of 5": heard(1, 2, 3, 4),
    "doubled": heard(1, 2, 3, 3, 4, 5),
    "ended by ['silent']": CallHistory(5, [1], ["1-1"], ["silent"], 30.0),
    "ended by ['session lost']": CallHistory(5, [1], ["1-1"], ["session lost"], 1.0),
    "after 99.0 s": CallHistory(5, [1], ["1-1"], ["error"], 99.0),
    "counter few: lost, or doubled": CounterHistory("few", acknowledged=7, unknown=0, found=6),
    "counter many: lost, or doubled": CounterHistory("many", acknowledged=7, unknown=1, found=9),
    "watch deaf: lost": WatchHistory("deaf", heard=2, missed=[2]),
}


def test_nothing_is_wrong_with_what_went_well(tmp_path: Path) -> None:
    path = tmp_path / "build" / "histories.jsonl"
    write(path, GOOD)
    assert read(path) == GOOD
    assert wrong(read(path), 10.0) == []
    assert told(read(path)).startswith("2 calls (1 error, 1 result), 7 events, 1 resumptions, the slowest 4.0 s")


@pytest.mark.parametrize("found", FAULTS)
def test_what_was_planted_is_found(found: str, tmp_path: Path) -> None:
    path = tmp_path / "histories.jsonl"
    write(path, [*GOOD, FAULTS[found]])
    [said] = wrong(read(path), 10.0)
    assert found in said


def test_where_all_must_be_answered_an_error_is_wrong() -> None:
    said = wrong([*GOOD, WatchHistory("deaf")], 10.0, all_answered=True)
    assert said == ["call 1: ['error']", "counter counter: 2 unknown", "watch deaf: nothing was heard"]
