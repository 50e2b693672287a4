"""Rounds, time, and one whole run of the smallest kind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from cells import Cell, cell
from environments import Peer, Way
from names import FASTMCP, FLOOR, MCP, OURS
from report import tables
from results import BUSY
from run import Budget, Run, figures, versions
from servers import Failed, check, floor, words_for

HERE = Path(__file__).parents[2] / "benchmarks"


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_there_is_time_for_all_rounds() -> None:
    clock = Clock()
    budget = Budget(100.0, {"a": 40.0, "b": 40.0}, now=clock)
    assert budget.left == 80.0
    assert budget.rounds("a", 3) == 3
    clock.now += 45.0
    budget.done("a")
    # The first took an eighth longer than expected, and so will the second.
    assert budget.left == 45.0
    assert budget.rounds("b", 3) == 3
    clock.now += 45.0
    budget.done("b")
    assert budget.left == 0.0
    assert budget.spent == 90.0


def test_rounds_are_cut_to_stay_in_time() -> None:
    clock = Clock()
    budget = Budget(100.0, {"a": 40.0, "b": 40.0}, now=clock)
    clock.now += 60.0
    budget.done("a")
    # 60 seconds' work left and 40 to do it in.
    assert budget.rounds("b", 3) == 2
    assert budget.rounds("b", 1) == 1
    clock.now += 39.0
    assert budget.rounds("b", 3) == 1


def test_those_of_less_weight_are_cut_first() -> None:
    clock = Clock()
    budget = Budget(100.0, {"bar": 60.0, "rest": 60.0}, {"rest": 30.0}, now=clock)
    assert budget.rounds("bar", 3) == 3
    clock.now += 60.0
    budget.done("bar")
    assert budget.rounds("rest", 2) == 1


def test_a_cell_that_was_cut_was_not_quick() -> None:
    clock = Clock()
    budget = Budget(1000.0, {"a": 60.0, "b": 60.0}, now=clock)
    clock.now += 40.0
    budget.done("a", 1 / 3)
    assert budget.left == 60.0  # too little was done to judge by
    budget = Budget(1000.0, {"a": 120.0, "b": 60.0}, now=clock)
    clock.now += 80.0
    budget.done("a", 1 / 3)
    assert budget.left == 120.0


def told(**changes: Any) -> dict[str, Any]:
    """Return a report of `trimcp bench`."""
    report = {
        "revision": "2025-11-25",
        "calls": 100,
        "per_second": 50.0,
        "bytes_in": 10_000,
        "errors": {},
        "latency_ms": {"p50": 1.0, "p99": 2.0, "p99.9": 3.0},
        "progress": {"count": 0, "per_second": 0.0},
        "cost": {"cpu_seconds": 0.5, "cpu_us_per_call": 5000.0, "rss_mib": 20.0, "peak_rss_mib": 30.0},
        "generator": {"busy": 0.25},
    }
    return report | changes


def test_figures_of_calls() -> None:
    assert figures(told(), cell("stdio-2025")) == {
        "cpu": ("µs", 5000.0),
        "rate": ("per second", 50.0),
        "p50": ("ms", 1.0),
        "p99": ("ms", 2.0),
        "p99.9": ("ms", 3.0),
        "memory": ("MiB", 30.0),
        BUSY: ("share of a core", 0.25),
    }


def test_figures_of_progress_are_those_of_one_notification() -> None:
    found = figures(told(progress={"count": 100_000, "per_second": 9000.0}), cell("progress-stdio"))
    assert found["cpu"] == ("µs", pytest.approx(5.0))
    assert found["rate"] == ("per second", 9000.0)


WRONG = {
    "an error": (told(errors={"wrong": {"count": 3, "example": "hello 1"}}), 0, "3 x wrong: hello 1"),
    "a bad end": (told(), 1, "exit code 1"),
    "no calls": (told(calls=0), 0, "not one call"),
    "another revision": (told(revision="2025-06-18"), 0, "speaks 2025-06-18"),
    "no cost": (told(cost=None), 0, "not known"),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_wrong_is_counted(name: str) -> None:
    report, code, reason = WRONG[name]
    check(told(), 0, cell("stdio-2025"))
    with pytest.raises(Failed, match=reason):
        check(report, code, cell("stdio-2025"))


def test_a_list_that_is_too_short_is_no_answer() -> None:
    with pytest.raises(Failed, match="104 bytes"):
        check(told(), 0, cell("list-100"))
    # Four were under way when the time began.
    check(told(bytes_in=96 * 6_000), 0, cell("list-100"))


@pytest.mark.parametrize(("count", "right"), [(100_000, True), (101_000, True), (98_999, False), (0, False)])
def test_every_notification_has_to_come(count: int, right: bool) -> None:
    report = told(progress={"count": count, "per_second": 1.0})
    if right:
        check(report, 0, cell("progress-stdio"))
    else:
        with pytest.raises(Failed, match="notifications for 100 calls"):
            check(report, 0, cell("progress-stdio"))


def test_what_the_generator_is_told() -> None:
    words = words_for(cell("http-2025-sse"), ["http://x/mcp", "--pid", "7"], Path("s.json"), seconds=1.5, warm_up="0.4")
    assert words[:3] == ["http://x/mcp", "--pid", "7"]
    line = " ".join(words)
    for part in ("--under-way 64", "--seconds 1.5", "--revision 2025-11-25", "--transport http", "--reply sse"):
        assert part in line
    words = words_for(cell("payload-5mb"), ["http://x/mcp"], Path("s.json"), seconds=1, warm_up="10x")
    assert words[1:3] == ["--script", "s.json"]
    assert "--tool" not in words


def peer(name: str = OURS, *program: str) -> Peer:
    ways = (Way("stdio", "2025-11-25"), Way("http", "2025-11-25", "json"))
    return Peer(name, (sys.executable, *(program or (str(HERE / "peers" / "ours.py"),))), ways)


def run(cell: Cell, *peers: Peer, rounds: int = 1) -> tuple[Run, list[str]]:
    lines: list[str] = []
    return Run(peers, [cell], quick=False, rounds=rounds, minutes=1.0, say=lines.append), lines


def tiny(name: str, *peers: str) -> Cell:
    return attrs.evolve(cell(name), seconds=0.3, warm_up=0.1, warm_calls=10, under_way=4, peers=peers)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_a_small_run_finds_figures_of_ours_and_of_the_minimal_server() -> None:
    whole, lines = run(tiny("stdio-2025", OURS, FLOOR), peer(), floor(peer()), rounds=2)
    found = whole.run()
    assert found.failures == []
    for who in (OURS, FLOOR):
        values = found.values("stdio-2025", "cpu", who)
        assert len(values) == 2
        assert all(1 < value < 100_000 for value in values)
        assert len(found.values("stdio-2025", BUSY, who)) == 2
    assert lines[0].startswith("1 cells")
    assert lines[1].startswith("[1/1] stdio-2025, 2 rounds; ")
    assert "minimal server" in tables(found)
    assert found.made["seconds"] > 0


@pytest.mark.needs("taskset")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["client-http-2025-64", "client-stdio-64"])
def test_a_client_is_measured_with_a_server_that_does_not_take_part(name: str) -> None:
    one = attrs.evolve(peer(), calls=(Way("stdio", "2025-11-25"), Way("http", "2025-11-25")))
    small = tiny(name, OURS)
    found = Run([one], [small], quick=False, rounds=2, minutes=1.0, far=[floor(one)], say=lambda line: None).run()
    assert found.failures == []
    assert len(found.values(name, "cpu", OURS)) == 2
    assert all(
        value > 0 for figure in ("cpu", "rate", "p50", "p99", "memory") for value in found.values(name, figure, OURS)
    )
    assert len(found.values(name, "server", OURS)) == (2 if small.road == "http" else 0)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_a_client_whose_server_answers_wrongly_has_no_figures(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    source = (HERE / "floor" / "minimal.py").read_text("utf-8")
    wrong.write_text(source.replace('["arguments"]["text"]', '["arguments"]["text"] + "!"'))
    one = attrs.evolve(peer(), calls=(Way("http", "2025-11-25"),))
    far = attrs.evolve(floor(one), program=(sys.executable, str(wrong)))
    cells = [tiny("client-http-2025-64", OURS)]
    found = Run([one], cells, quick=False, rounds=1, minutes=1.0, far=[far], say=lambda line: None).run()
    assert [failure.peer for failure in found.failures] == [OURS]
    assert "ended before it had counted its calls" in found.failures[0].reason
    assert not found.values("client-http-2025-64", "cpu", OURS)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_two_cells_take_their_turns_in_the_same_rounds_and_collecting_is_noted() -> None:
    cells = [tiny("window-http-16", OURS, FLOOR), tiny("window-http-256", OURS)]
    lines: list[str] = []
    run = Run([peer(), floor(peer())], cells, quick=False, rounds=2, minutes=1.0, say=lines.append)
    found = run.run()
    assert found.failures == []
    assert lines[1].startswith("[2/2] window-http-16, window-http-256, 2 rounds; ")
    for one in cells:
        for who in one.peers:
            shares = found.values(one.name, "collected", who)
            assert len(shares) == 2
            assert all(0 <= share < 1 for share in shares)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_workers_are_measured() -> None:
    one = attrs.evolve(peer(), ways=(Way("http", "2026-07-28", "json"),))
    found = run(tiny("workers-2", OURS), one)[0].run()
    assert found.failures == []
    assert found.values("workers-2", "rate", OURS)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_what_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    wrong, dead = tmp_path / "wrong.py", tmp_path / "dead.py"
    source = (HERE / "floor" / "minimal.py").read_text("utf-8")
    wrong.write_text(source.replace('["arguments"]["text"]', '["arguments"]["text"] + "!"'))
    dead.write_text(f"import sys\nsys.exit('{HERE}: not today')\n")
    one = tiny("http-2025-json", OURS, MCP, FASTMCP)
    whole, lines = run(one, peer(), peer(MCP, str(wrong)), peer(FASTMCP, str(dead)))
    found = whole.run()
    reasons = {failure.peer: failure.reason for failure in found.failures}
    assert set(reasons) == {MCP, FASTMCP}
    assert reasons[MCP].startswith("exit code 1: ")
    assert reasons[FASTMCP] == "ended before it listened: ./benchmarks: not today"  # paths say where it was run
    assert found.values(one.name, "cpu", OURS)
    assert not found.values(one.name, "cpu", MCP)
    assert any("FAILED: ended before it listened" in line for line in lines)


def test_a_peer_takes_part_where_it_offers_that() -> None:
    whole, _ = run(tiny("stdio-2025", OURS), peer())
    assert [one.name for one in whole.able(cell("stdio-2025"))] == [OURS]
    assert whole.able(cell("stdio-2026")) == []


def test_versions_are_those_that_are_installed() -> None:
    import trio

    site = Path(trio.__file__).parents[1]
    installed = attrs.evolve(peer(), distribution="trio", home=site)
    assert versions([installed, floor(peer())])[OURS] == f"trio {trio.__version__}"
