"""Which of several servers behind a balancer answered: as headers, results and handshakes say."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from tests.bench.support import ECHO, FakeChannel, a_load, errors
from tests.bench.test_http import ERAS, echoed, http, of_wrong, result_of, serving
from tests.bench.test_mux import run_for
from tests.bench.test_report import a_report, times
from tests.bench.test_steps import desk
from tests.cli import reports
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.replicas import named_by_headers, named_by_message
from trimcp.bench.report import Replica, Report
from trimcp.bench.tally import Tally
from trimcp.bench.team import merged
from trimcp.cli.bench.html import page
from trimcp.cli.bench.table import Side, describe_report
from trimcp.errors import LocalError
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.wire.common import META_SERVER_INFO
from trimcp.wire.revisions import LATEST_LEGACY


def outcomes(report: Report) -> dict[str, tuple[int, int]]:
    return {name: (each.times.count, each.errors) for name, each in report.replicas.items()}


async def test_a_header_says_who_answered_rightly_and_who_did_not() -> None:
    def answer(n: int, message: dict[str, Any]) -> bytes:
        if n == 3:
            return http(b"no replica could take it", status=502)
        if n == 6:
            return b""  # the connection breaks before anything is said
        if n % 4 == 0:
            return http(result_of(message, {"content": []}), headers="X-Served-By: b\r\n")
        return http(echoed(message), headers="x-served-by: a\r\n")

    report, _ = await of_wrong(answer, count=10, replica_by="X-Served-By")
    assert outcomes(report) == {"a": (6, 0), "b": (0, 2), "not told": (0, 2)}
    assert (report.calls, sum(each.count for each in report.errors.values())) == (6, 4)


@pytest.mark.parametrize("revision", ERAS)
@pytest.mark.parametrize("reply", ["json", "sse"])
async def test_a_server_says_by_itself_who_it_is(revision: str, reply: Any) -> None:
    async with serving(settings=HttpSettings(reply=reply)) as url:
        plan = Plan(ECHO, count=20, under_way=2, revision=revision, replica_by="serverInfo")
        report = await measure(HttpServer(url), plan)
    assert outcomes(report) == {"right 1.5": (20, 0)}


@pytest.mark.parametrize("revision", ERAS)
async def test_sessions_are_with_one_of_several_servers_after_the_other(revision: str) -> None:
    async with serving() as one, serving() as other:
        targets = [HttpServer(one), HttpServer(other)]
        report = await measure(targets, Plan(ECHO, count=40, sessions=4, revision=revision))
        assert report.target == f"{one}, {other}"
        assert report.calls == 40
        assert sum(right for right, _ in outcomes(report).values()) == 40
        assert {name: right > 0 for name, (right, _) in outcomes(report).items()} == {one: True, other: True}
        for seed, url in ((0, one), (1, other)):
            report = await measure(targets, Plan(ECHO, count=5, seed=seed, revision=revision))
            assert outcomes(report) == {url: (5, 0)}


@pytest.mark.parametrize(("expect", "wrong"), [("Zoe", False), ("Ada", True)])
async def test_an_ordinary_client_counts_each_of_several_servers_too(expect: str, wrong: bool) -> None:
    async with serving(desk()) as one, serving(desk()) as other:
        plan = Plan(MixEntry.tool("who", {}, step="question", expect=expect), count=8, sessions=2)
        found = outcomes(await measure([HttpServer(one), HttpServer(other)], plan))
    assert found.keys() == {one, other}
    assert sum(each[wrong] for each in found.values()) == 8
    assert sum(each[not wrong] for each in found.values()) == 0


async def test_several_servers_are_spoken_to_alike() -> None:
    async with serving() as one:
        other = WebSocketServer(f"{one.replace('http', 'ws').removesuffix('/mcp')}/ws")
        with pytest.raises(LocalError, match="in another way"):
            await measure([HttpServer(one), other], Plan(ECHO, count=1, sessions=2))


async def test_over_one_connection_each_answer_may_be_another_ones(autojump_clock: object) -> None:
    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if message["method"] == "tools/call":
            number = message["id"]
            result = orjson.loads(echoed(message))["result"] if number != 4 else {}
            channel.answer(result_of(message, {**result, "_meta": {"pod": number % 2}}))

    load = a_load(count=6, replica_by="_meta:pod")
    await run_for(load, 1.0, serve)
    assert {name: (each.times.count, each.errors) for name, each in load.tally.replicas.items()} == {
        "1": (3, 0),
        "0": (2, 1),
    }
    assert sum(errors(load).values()) == 1


async def test_a_session_that_breaks_is_whoevers_handshake_it_was(autojump_clock: object) -> None:
    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if message["method"] == "tools/call":
            channel.die()

    load = a_load(LATEST_LEGACY, count=1, replica_by="serverInfo")
    await run_for(load, 1.0, serve)
    assert {name: each.errors for name, each in load.tally.replicas.items()} == {"of the tests 0": 1}


async def test_what_has_no_headers_is_refused(autojump_clock: object) -> None:
    entry = MixEntry.tool("book", step="question")
    with pytest.raises(LocalError, match="--replica-by go with --step call"):
        Plan(entry, replica_by="serverInfo")


@pytest.mark.parametrize(
    ("by", "message", "name"),
    [
        ("serverInfo", {"result": {"_meta": {META_SERVER_INFO: {"name": "x", "version": "2"}}}}, "x 2"),
        ("serverInfo", {"result": {"serverInfo": {"name": "x"}}}, "x"),
        ("serverInfo", {"result": {"_meta": [1], "serverInfo": 3}}, None),
        ("serverInfo", {"error": {"code": 1}}, None),
        ("_meta:a:b", {"result": {"_meta": {"a:b": 7}}}, "7"),
        ("_meta:pod", {"result": {"_meta": {"pod": {"zone": "b"}}}}, '{"zone": "b"}'),
        ("_meta:pod", {"result": {"_meta": {"a": 7}}}, None),
        ("X-Served-By", {"result": {"serverInfo": {"name": "x"}}}, None),
        (None, {"result": {"serverInfo": {"name": "x"}}}, None),
    ],
)
def test_only_what_is_meant_names_a_replica(by: str | None, message: dict[str, Any], name: str | None) -> None:
    assert named_by_message(by, message) == name
    assert named_by_headers(by, {"x-served-by": "h"}) == ("h" if by == "X-Served-By" else None)


def test_names_are_bounded_and_safe_to_show() -> None:
    tally = Tally()
    tally.begin(0.0)
    for number in range(500):
        tally.answered_by(f"\x1b[31m{number}" + "x" * 1000, 0.001, 1.0)
    assert len(tally.replicas) <= 101
    assert all(len(name) <= 60 and "\x1b" not in name for name in tally.replicas)
    tally = Tally()
    tally.answered_by("early", 0.001, 1.0)
    assert tally.replicas == {}  # the warm-up


def test_what_generators_counted_is_added_and_saved() -> None:
    one = a_report(replicas={"a": Replica(times(0.001), 2), "b": Replica(times(0.002))})
    other = a_report(replicas={"a": Replica(times(0.003), 1)})
    both = merged([one, other], one.plan)
    again = Report.from_json(json.loads(json.dumps(both.to_json())))
    for report in (both, again):
        assert outcomes(report) == {"a": (2, 3), "b": (1, 0)}
        assert report.replicas["a"].times.most == pytest.approx(0.003)


def test_it_is_shown_in_the_table_and_on_the_page() -> None:
    replicas = {"10.0.0.11:8000": Replica(times(*[0.001] * 75)), "10.0.0.12:8000": Replica(times(*[0.002] * 24), 1)}
    report = reports.a_report(replicas=replicas)
    lines = [text for text, _ in describe_report(report)]
    first = next(number for number, line in enumerate(lines) if line.startswith("  replicas"))
    assert " ".join(lines[first].split()) == "replicas 10.0.0.11:8000: 75 right, 75 % p50 1.00 ms p99 1.00 ms"
    assert " ".join(lines[first + 1].split()) == "10.0.0.12:8000: 24 right, 25 % p50 2.00 ms p99 2.00 ms 1 error"
    assert "Who answered" in page([Side("x", [report])], "x")
    assert "Who answered" not in page([Side("x", [reports.a_report()])], "x")
