"""The page of `trimcp bench --html`: all of it in one file, and nothing in it that a server could have written."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest

from tests.bench.test_regression import a_run
from tests.cli.reports import a_report, some_errors
from tests.cli.test_app import trimcp
from tests.cli.test_bench_run import ADD, measuring
from trimcp.bench.report import Failures, Slice
from trimcp.bench.requirements import Check
from trimcp.cli.bench.html import page
from trimcp.cli.bench.run import shown_command
from trimcp.cli.bench.table import Side, write_result
from trimcp.cli.exits import Failure

HOSTILE = "<img src=x onerror=hit()><script>hit()</script><b id=hit>\u202e\"'`"


class Reader(HTMLParser):
    """Keeps which elements there are, what they refer to, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_is_one_file_without_scripts() -> None:
    text = page([Side("x", [a_run(1, errors=some_errors())])], "trimcp bench x")
    read = Reader(text)
    assert "script" not in read.tags
    assert read.refers == []
    assert not re.search(r"url\(|@import|https?://", text)
    headings = [each for each in read.text if each.strip()]
    for name in (
        "How long calls took",
        "Time of calls, over time",
        "Throughput and errors",
        "CPU",
        "Memory of the server",
    ):
        assert name in headings
    assert read.tags.count("svg") == 6


def test_what_others_say_is_text_on_the_page() -> None:
    run = a_run(1, labels=(HOSTILE,), errors={HOSTILE: Failures(3, HOSTILE)}, server_name=HOSTILE, target=HOSTILE)
    run = attrs.evolve(run, slices=tuple(attrs.evolve(each, errors={HOSTILE: 1}) for each in run.slices))
    text = page([Side(HOSTILE, [run]), Side(HOSTILE, [run])], HOSTILE, [Check(HOSTILE, False, HOSTILE)])
    read = Reader(text)
    assert not {"img", "b", "script"} & {*read.tags}
    assert "\u202e" not in text


def test_two_sides_stand_beside_each_other() -> None:
    text = page([Side("now", [a_run(1), a_run(2)]), Side("before", [a_run(3)])], "x")
    assert text.count("Requests of now") == text.count("Requests of before") == 1
    assert re.search(r"<th>.*now</th><th>.*before</th>", text)
    (curves,) = re.findall(r'aria-label="Throughput and errors">(.*?)</svg>', text)
    assert curves.count("<polyline") == 2


def test_the_slowest_calls_are_in_the_bands() -> None:
    run = a_run(1, slices=10)
    (calm,) = re.findall(r'aria-label="Time of calls, over time">(.*?)</svg>', page([Side("x", [run])], "x"))
    slow = a_run(1, slices=10, by=100.0)
    slices = (*run.slices[:9], attrs.evolve(slow.slices[9], start=run.slices[9].start))
    (jump,) = re.findall(
        r'aria-label="Time of calls, over time">(.*?)</svg>', page([Side("x", [attrs.evolve(run, slices=slices)])], "x")
    )
    assert "p99 1.0" not in calm
    assert jump.count("<title>") == calm.count("<title>") == 10
    assert re.search(r"p50 5\d\.\d ms", jump)


@pytest.mark.parametrize("slices", [(), (Slice(0.0, 1.0, {}, {}),)])
def test_a_measurement_without_answers_has_a_page_too(slices: tuple[Slice, ...]) -> None:
    run = a_report(calls=0, slices=slices, cost=None)
    nothing = attrs.evolve(run, latency=type(run.latency)(), over_time=())
    assert "No call was answered rightly" in page([Side("x", [nothing])], "x")


def test_checks_that_failed_come_first_and_many_kept_ones_are_folded() -> None:
    checks = [Check(f"c{number}", number != 5, "t") for number in range(20)]
    text = page([Side("x", [a_run(1)])], "x", checks)
    assert "1 of 20 checks failed" in text
    assert text.index("c5") < text.index("<details><summary>19 kept") < text.index("c0")
    assert "all checks passed" in page([Side("x", [a_run(1)])], "x", checks[:2])


def test_the_command_is_shown_without_secrets() -> None:
    words = ["https://me:pw@x.test/mcp?key=1", "-H", "X-Key: secret", "--header=A: secret", "--tool", "add"]
    assert shown_command(words) == "trimcp bench 'https://x.test/mcp?...' -H 'X-Key: ...' '--header=A: ...' --tool add"


def test_the_command_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, file = tmp_path / "before.json", tmp_path / "bench.html"
    script = tmp_path / "mix.json"
    script.write_text(json.dumps([{"tool": f"tool{number}"} for number in range(10)]))
    before.write_text(json.dumps(a_run(1).to_json()))
    measuring(monkeypatch, a_run(2, slow={"tool3": 0.002}))
    words = ["--script", str(script), "--under-way", "8", "--baseline", str(before), "--html", str(file)]
    assert trimcp("bench", *words, "--", "node", "server.js").exit_code == 5
    text = file.read_text()
    assert "checks failed" in text
    assert "trimcp bench --script" in text
    assert trimcp("bench", *ADD, "--html", "/none/x.html", "--", "node", "x.js").exit_code == 2
    with pytest.raises(Failure, match="cannot write"):
        write_result(str(tmp_path), "x")
