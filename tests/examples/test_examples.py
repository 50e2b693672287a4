"""The examples, driven as their users would: the weather server by a recorded client, the others by ours."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from hashlib import sha256
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner
from jsonschema import Draft7Validator
from rich.console import Console
from trio.testing import MockClock

import trimcp
from tests.docs.test_docs import compare
from tests.pages import blocks_of
from tests.peers.serving import connected as connected_over
from tests.workers.test_pool import seconds_to_kill_a_family
from trimcp.cli.app import app
from trimcp.session.outgoing.listening import ResourceUpdated
from trimcp.testing import Transcript, connected, every_revision, replay
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05

ROOT = Path(__file__).parents[2]
SPEC = Path(os.environ.get("TRIMCP_SPEC") or ROOT.parent / "shared" / "spec")
CLINE = ROOT / "tests" / "transcripts" / "cline-2024-11-05.txt"
RESULTS = {
    "initialize": "InitializeResult",
    "tools/list": "ListToolsResult",
    "resources/list": "ListResourcesResult",
    "resources/templates/list": "ListResourceTemplatesResult",
    "tools/call": "CallToolResult",
}


def load(name: str) -> ModuleType:
    """Import an example afresh, so that no test sees the state of another."""
    specification = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    # As Python does for a script, whose neighbours it can import.
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    specification.loader.exec_module(module)
    return module


# Weather


async def test_a_recorded_client_meets_the_weather_server() -> None:
    await replay(Transcript.read(CLINE), load("weather").server)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"isError":false', '"isError":true', "message 11: $.result.isError is false, expected true"),
        ('"subscribe":false,', "", "message 2: $.result.capabilities.resources.subscribe should not be there: false"),
        ('{"resources":[]}', '{"resources":[],"nextCursor":"2"}', "message 7: $.result.nextCursor is missing"),
        (
            '"required":["latitude","longitude"]',
            '"required":["latitude"]',
            "message 5: $.result.tools[1].inputSchema.required has 2 members, expected 1",
        ),
        ("Sunny.", "Rain.", "message 11: $.result.content[0].text is"),
    ],
)
async def test_the_replay_names_each_field_that_differs(old: str, new: str, told: str) -> None:
    text = CLINE.read_text("utf-8")
    assert old in text
    with pytest.raises(AssertionError) as caught:
        await replay(Transcript.parse(text.replace(old, new)), load("weather").server)
    assert told in str(caught.value)


@pytest.mark.skipif(not SPEC.is_dir(), reason="the official schemas are not here: point TRIMCP_SPEC at them")
def test_the_recorded_replies_have_the_shapes_of_their_revision() -> None:
    schema = json.loads((SPEC / V2024_11_05.name / "schema.json").read_text("utf-8"))
    methods: dict[Any, str] = {}
    seen = []
    for from_client, message in Transcript.read(CLINE).messages:
        if from_client:
            methods[message.get("id")] = message["method"]
            continue
        method = methods[message["id"]]
        Draft7Validator({**schema, "$ref": "#/definitions/JSONRPCResponse"}).validate(message)
        definition = schema["definitions"][RESULTS[method]]
        Draft7Validator({**schema, **definition}).validate(message["result"])
        # The schema is open, so it lets fields of later revisions pass; we do not.
        assert set(message["result"]) <= set(definition["properties"]), method
        for tool in message["result"].get("tools", []):
            assert set(tool) <= set(schema["definitions"]["Tool"]["properties"])
        seen.append(method)
    assert seen == list(RESULTS)


@every_revision
async def test_the_weather_answers_in_the_words_of_the_classic_server(revision: trimcp.Revision) -> None:
    async with connected(load("weather").server, revision=revision) as session:
        result = await session.call_tool("get_forecast", {"latitude": 0, "longitude": 0})
        assert result.is_error
        assert "New York, NY (40.7128, -74.006)" in result.content[0].text
        result = await session.call_tool("get_alerts", {"state": "ny"})
        assert not result.is_error
        first, second = result.content[0].text.split("\n---\n")
        assert first.splitlines() == [
            "Event: Wind Advisory",
            "Area: Kings (Brooklyn); Queens; Nassau",
            "Severity: Moderate",
            "Description: Northwest winds of 20 to 30 mph with gusts up to 50 mph.",
            "Instructions: Secure outdoor objects. Tree limbs may come down and cut the power.",
        ]
        assert second.startswith("Event: Small Craft Advisory\n")
        result = await session.call_tool("get_forecast", {"latitude": 40.7, "longitude": -74})
        assert result.content[0].text.split("\n---\n")[1].splitlines() == [
            "Tonight:",
            "Temperature: 36°F",
            "Wind: 10 to 15 mph NW",
            "Forecast: Clear and cold.",
        ]


# Code search


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory to serve, beside what must not be seen from there."""
    served = tmp_path / "served"
    (served / "pkg" / "deep").mkdir(parents=True)
    (served / "node_modules").mkdir()
    (served / "main.py").write_text("import pkg\n\n# TODO: more\x0c\nprint('Done')\n")
    (served / "pkg" / "a.py").write_text("todo = 1\r\n\r\nTODO = 2")
    (served / "pkg" / "deep" / "note.txt").write_text("nothing\n" * 3)
    (served / "pkg" / "picture.png").write_bytes(b"\x89PNG\0\0")
    (served / "pkg" / "latin.txt").write_bytes(b"caf\xe9 TODO")
    (served / "node_modules" / "left.js").write_text("// TODO")
    (served / ".hidden").write_text("TODO")
    (tmp_path / "secret.py").write_text("TODO = 'secret'")
    (served / "link.py").symlink_to(tmp_path / "secret.py")
    (served / "loop").symlink_to(served / "loop")
    return served


@pytest.fixture
def codesearch(tree: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "argv", ["codesearch.py", str(tree)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    module = load("codesearch")
    monkeypatch.setattr(module, "POLL_INTERVAL", 0.02)
    return module


def lines(result: trimcp.CallToolResult) -> list[tuple[str, int, str]]:
    structured: Any = json.loads(result.content[0].text)  # as revisions without structured results have it too
    return [(match["path"], match["line"], match["text"]) for match in structured["matches"]]


@every_revision
async def test_lines_are_found_in_text_files_below_the_directory(
    codesearch: ModuleType, revision: trimcp.Revision
) -> None:
    async with connected(codesearch.server, revision=revision) as session:
        assert lines(await session.call_tool("search", {"pattern": "TODO"})) == [
            ("main.py", 3, "# TODO: more\x0c"),
            ("pkg/a.py", 3, "TODO = 2"),
        ]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"pattern": "todo", "ignore_case": True}, ["main.py:3", "pkg/a.py:1", "pkg/a.py:3"]),
        ({"pattern": "^TODO", "regex": True}, ["pkg/a.py:3"]),
        ({"pattern": "^todo", "regex": True, "ignore_case": True}, ["pkg/a.py:1", "pkg/a.py:3"]),
        ({"pattern": "=|nothing$", "regex": True, "glob": "*.txt"}, [f"pkg/deep/note.txt:{n}" for n in (1, 2, 3)]),
        ({"pattern": "TODO", "path": "pkg"}, ["pkg/a.py:3"]),
        ({"pattern": "TODO", "path": "main.py"}, ["main.py:3"]),
        ({"pattern": "nothing", "glob": "pkg/deep/*"}, [f"pkg/deep/note.txt:{n}" for n in (1, 2, 3)]),
        ({"pattern": "nothing", "max_results": 2}, [f"pkg/deep/note.txt:{n}" for n in (1, 2)]),
        ({"pattern": "."}, []),  # a dot is a dot
    ],
)
async def test_a_search_can_be_narrowed(codesearch: ModuleType, arguments: dict[str, Any], found: list[str]) -> None:
    async with connected(codesearch.server) as session:
        result = await session.call_tool("search", arguments)
        assert [f"{path}:{line}" for path, line, _ in lines(result)] == found
        structured: Any = result.structured_content
        assert structured["complete"] is ("max_results" not in arguments)


async def test_what_is_no_text_is_counted_as_skipped(codesearch: ModuleType) -> None:
    async with connected(codesearch.server) as session:
        found: Any = (await session.call_tool("search", {"pattern": "x"})).structured_content
        assert (found["files_searched"], found["files_skipped"]) == (3, 2)
        counted: Any = (await session.call_tool("line_statistics")).structured_content
        assert counted == {
            "files": 3,
            "lines": 10,
            "blank": 2,
            "kinds": [
                {"kind": ".py", "files": 2, "lines": 7, "blank": 2},
                {"kind": ".txt", "files": 1, "lines": 3, "blank": 0},
            ],
            "longest_file": "main.py",
        }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"pattern": "(a", "regex": True}, "is not a regular expression we can run"),
        ({"pattern": "(?=a)", "regex": True}, "look-around and back-references are not supported"),
        ({"pattern": "x", "path": ".."}, "there is no .. here"),
        ({"pattern": "x", "path": "/etc"}, "there is no /etc here"),
        ({"pattern": "x", "path": "link.py"}, "there is no link.py here"),
        ({"pattern": "x", "path": "gone"}, "there is no gone here"),
        ({"pattern": "x", "path": "loop"}, "there is no loop here"),
        ({"pattern": "x", "path": "a\0b"}, "there is no a\0b here"),
    ],
)
async def test_what_cannot_be_searched_is_explained(
    codesearch: ModuleType, arguments: dict[str, Any], told: str
) -> None:
    async with connected(codesearch.server) as session:
        result = await session.call_tool("search", arguments)
        assert result.is_error
        assert told in result.content[0].text


async def test_no_pattern_takes_long(codesearch: ModuleType, tree: Path) -> None:
    (tree / "long.txt").write_text("a" * 500_000 + "!")
    async with connected(codesearch.server) as session:
        with trio.fail_after(60):
            result = await session.call_tool("search", {"pattern": "^(a+)+$", "regex": True, "glob": "long.txt"})
        assert lines(result) == []


async def test_a_cancelled_search_stops_at_the_next_file_or_block(codesearch: ModuleType, tree: Path) -> None:
    for number in range(2_000):
        (tree / f"{number:04}.py").write_text("x\n")
    async with connected(codesearch.server) as session:
        async with session.calling("search", {"pattern": "y"}) as call:
            async for step in call.progress:
                if step.progress >= 20:
                    break
        work = await read_work(session)
        while work["running"]:
            work = await read_work(session)
        assert work["cancelled"] == 1
        assert work["last_cancelled"].endswith("of 2005: cancelled by peer")
        assert work["files_read"] < 2_000
        assert (await read_work(session)) == work


async def read_work(session: trimcp.ClientSession) -> dict[str, Any]:
    result = await session.read_resource("codesearch://work")
    work: dict[str, Any] = json.loads(result.contents[0].text)
    return work


@every_revision
async def test_a_clients_roots_are_where_it_may_look(
    codesearch: ModuleType, tree: Path, revision: trimcp.Revision
) -> None:
    client = trimcp.Client("rooted", roots=[(tree / "pkg").as_uri(), "file:///nowhere"])
    async with connected(codesearch.server, client, revision=revision) as session:
        assert [path for path, _, _ in lines(await session.call_tool("search", {"pattern": "TODO"}))] == ["pkg/a.py"]
        result = await session.call_tool("search", {"pattern": "TODO", "path": "main.py"})
        assert result.is_error
        assert "outside the roots" in result.content[0].text
        assert (await session.read_resource("code:///pkg/a.py")).contents[0].text.startswith("todo")
        with pytest.raises(trimcp.RemoteError):
            await session.read_resource("code:///main.py")


@every_revision
async def test_files_are_resources_that_tell_when_they_change(
    codesearch: ModuleType, tree: Path, revision: trimcp.Revision
) -> None:
    uri = "code:///pkg/a.py"
    async with connected(codesearch.server, revision=revision) as session:
        (contents,) = (await session.read_resource("code:///pkg/picture.png")).contents
        assert contents.blob == "iVBORwAA"
        async with session.listen(resources=[uri]) as changes:
            (tree / "pkg" / "a.py").write_text("changed = True")
            os.utime(tree / "pkg" / "a.py", (1, 1))
            with trio.fail_after(60):
                assert await changes.receive() == ResourceUpdated(uri)
        assert (await session.read_resource(uri)).contents[0].text == "changed = True"


@pytest.mark.parametrize("path", ["../secret.py", "%2e%2e/secret.py", "/etc/passwd", "link.py", "pkg", "gone", "a%00"])
async def test_nothing_outside_can_be_read(codesearch: ModuleType, path: str) -> None:
    async with connected(codesearch.server) as session:
        with pytest.raises(trimcp.RemoteError, match="resource not found"):
            await session.read_resource(f"code:///{path}")
        with pytest.raises(trimcp.RemoteError, match="there is no file"):
            await session.get_prompt("review", {"path": path})


@every_revision
async def test_what_no_file_can_be_called_can_be_subscribed_to_or_is_refused(
    codesearch: ModuleType, revision: trimcp.Revision
) -> None:
    async with connected(codesearch.server, revision=revision) as session:
        # Whether a subscription leaves them out or is refused is the revision's business; a crash it is not.
        refused = "" if revision.modern else "resource not found"
        with pytest.raises(trimcp.RemoteError, match=refused) if refused else nullcontext():
            async with session.listen(resources=["code:///loop", "code:///a%00b", "http://x.example/"]):
                pass
        assert lines(await session.call_tool("search", {"pattern": "Done"})) == [("main.py", 4, "print('Done')")]


async def test_a_review_carries_its_file(codesearch: ModuleType) -> None:
    async with connected(codesearch.server) as session:
        result = await session.get_prompt("review", {"path": "main.py", "focus": "style"})
        request, file = (message.content for message in result.messages)
        assert request.text.startswith("Review main.py for style.")
        assert file.resource.uri == "code:///main.py"
        assert file.resource.text.startswith("import pkg")
        with pytest.raises(trimcp.RemoteError, match="must be one of 'bugs'"):
            await session.get_prompt("review", {"path": "main.py", "focus": "beauty"})


async def test_paths_are_completed(codesearch: ModuleType) -> None:
    async with connected(codesearch.server) as session:
        for typed, values in {
            "": ["main.py", "pkg/"],
            "pkg/": ["pkg/a.py", "pkg/deep/", "pkg/latin.txt", "pkg/picture.png"],
            "pkg/d": ["pkg/deep/"],
            "../": [],
            "gone/": [],
        }.items():
            prompted = await session.complete_prompt("review", "path", typed)
            assert prompted.values == values, typed
        assert (await session.complete_resource("code:///{+path}", "path", "ma")).values == ["main.py"]
        assert (await session.complete_prompt("review", "focus", "s")).values == ["security", "style"]


# Dashboard


@pytest.fixture
def dashboard() -> ModuleType:
    return load("dashboard")


@every_revision
async def test_the_dashboard_tells_what_changes(
    dashboard: ModuleType, revision: trimcp.Revision, autojump_clock: MockClock
) -> None:
    async with connected(dashboard.server, revision=revision) as session:
        async with session.listen(resources=["metrics://now", "jobs://recent"]) as changes:
            now = await read_json(session, "metrics://now")
            assert now["tasks"] >= 3
            for _ in range(3):
                assert await changes.receive() == ResourceUpdated("metrics://now")
            later = await read_json(session, "metrics://now")
            assert later["at"] > now["at"]
            await session.call_tool("batch", {"items": 1, "mib": 1})
            while (await changes.receive()).uri != "jobs://recent":
                pass
        (job,) = await read_json(session, "jobs://recent")
        assert job == {"number": 1, "items": 1, "done": 1, "state": "finished", "why": None}
        assert (await session.complete_resource("metrics://{metric}", "metric", "t")).values == ["tasks"]


async def read_json(session: trimcp.ClientSession, uri: str) -> Any:
    return json.loads((await session.read_resource(uri, fresh=True)).contents[0].text)


async def test_a_metric_has_a_minute_of_values_and_an_unknown_one_is_none(
    dashboard: ModuleType, autojump_clock: MockClock
) -> None:
    async with connected(dashboard.server) as session:
        await trio.sleep(100.5)
        metric = await read_json(session, "metrics://tasks")
        assert metric["is"] == "Trio tasks alive in this server"
        assert len(metric["values"]) == 60
        for name in ("at", "nonsense", "now%00"):
            with pytest.raises(trimcp.RemoteError, match="resource not found"):
                await session.read_resource(f"metrics://{name}")


@every_revision
async def test_watching_reports_each_sample(
    dashboard: ModuleType, revision: trimcp.Revision, autojump_clock: MockClock
) -> None:
    async with connected(dashboard.server, revision=revision) as session:
        await trio.sleep(0.5)
        async with session.calling("watch", {"seconds": 10, "metric": "tasks"}) as call:
            steps = [(step.progress, step.total, step.message) async for step in call.progress]
            result = await call.result()
        assert [progress for progress, _, _ in steps] == [0, *(second + 0.5 for second in range(10))]
        assert {total for _, total, _ in steps} == {10}
        if revision is not V2024_11_05:
            assert all(message.startswith("tasks ") for _, _, message in steps)
        watched: Any = json.loads(result.content[0].text)
        assert (watched["metric"], watched["samples"]) == ("tasks", 11)
        assert 3 <= watched["least"] <= watched["mean"] <= watched["most"]


async def test_what_the_machine_does_not_tell_is_left_out(
    dashboard: ModuleType, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(dashboard, "Path", lambda _: Path("/nowhere"))
    monkeypatch.delattr(os, "getloadavg")
    async with connected(dashboard.server) as session:
        assert (await read_json(session, "metrics://now")).keys() == {"at", "tasks"}
        assert (await read_json(session, "metrics://load"))["values"] == []
        for metric, told in [("used", "this machine does not tell used"), ("cpu", "no sample of cpu in 5 seconds")]:
            result = await session.call_tool("watch", {"seconds": 5, "metric": metric})
            assert result.is_error
            assert told in result.content[0].text


async def read_once(dashboard: ModuleType) -> Any:
    return dashboard.read_metrics(dashboard.CpuTime(0, 0))


def test_the_numbers_are_the_machines(dashboard: ModuleType, tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc to read")
    values, _ = trio.run(read_once, dashboard)
    assert values.keys() == dashboard.METRICS.keys()
    assert 0 < values["cpu"] < 100
    assert 10 < values["memory"] < values["used"]
    odd = tmp_path / "status"
    odd.write_text("Name:\tpython\nVmRSS:\t  2048 kB\n\nGroups:\t\n")
    assert dashboard.read_pairs(str(odd)) == {"VmRSS": 2048}


@every_revision
async def test_a_batch_reports_each_item(
    dashboard: ModuleType, revision: trimcp.Revision, autojump_clock: MockClock
) -> None:
    async with connected(dashboard.server, revision=revision) as session:
        async with session.calling("batch", {"items": 20, "mib": 1}) as call:
            steps = [(step.progress, step.total, step.message) async for step in call.progress]
            result = await call.result()
        assert [step[:2] for step in steps] == [(n, 20) for n in range(1, 21)]
        if revision is not V2024_11_05:  # in which progress has no message
            assert [step[2] for step in steps] == [f"job 1: {n} of 20" for n in range(1, 21)]
        digest = sha256(b"".join(sha256(bytes([n]) * 2**20).digest() for n in range(20))).hexdigest()
        assert json.loads(result.content[0].text) == {"job": 1, "items": 20, "digest": digest}


@every_revision
async def test_jobs_wait_for_their_turn_and_tell_how_they_ended(
    dashboard: ModuleType, revision: trimcp.Revision, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def blocked(number: int, mib: int) -> bytes:
        assert go.wait(30)
        if mib == 2:
            raise trimcp.ToolError("not in a test")
        return b""

    monkeypatch.setattr(dashboard, "hash_block", blocked)
    async with connected(dashboard.server, revision=revision) as session:
        async with session.listen(resources=["jobs://recent"]) as changes, trio.open_nursery() as nursery:

            async def states() -> list[str]:
                return [job["state"] for job in await read_json(session, "jobs://recent")]

            async def until(wanted: list[str]) -> None:
                with trio.fail_after(60):
                    while await states() != wanted:
                        await changes.receive()

            cancelled = trio.CancelScope()

            async def call(number: int) -> None:
                with cancelled if number == 1 else nullcontext():
                    await session.call_tool("batch", {"items": 1, "mib": number})

            expected: list[str] = []
            for number in (1, 2, 3):
                nursery.start_soon(call, number)
                expected.append("running" if number < 3 else "waiting")
                await until(expected)
            cancelled.cancel()
            go.set()
            await until(["cancelled", "failed", "finished"])
        jobs = await read_json(session, "jobs://recent")
        assert [job["why"] for job in jobs] == ["cancelled by peer", "ToolError", None]


def test_the_board_does_not_grow(dashboard: ModuleType) -> None:
    board = dashboard.Board()
    for number in range(dashboard.HISTORY + 10):
        assert ("metrics://load" in board.add({"load": number // 2})) is (number % 2 == 0)
        board.jobs.append(number)
    assert len(board.samples) == dashboard.HISTORY
    assert len(board.jobs) == dashboard.JOBS_KEPT
    assert len(board.history("load")) == 60
    assert board.history("load", most=3) == [1803, 1804, 1804]


@attrs.define
class Flaky:
    """A way to a server: refused at first, then cut after a while, then good."""

    server: trimcp.Server[Any]
    killed: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    opened: int = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Any]:
        self.opened += 1
        if self.opened == 1:
            raise OSError("refused")
        ours, theirs = trimcp.memory_channels()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, theirs)
            yield ours
            nursery.cancel_scope.cancel()

    async def _serve(self, channel: trimcp.MessageChannel) -> None:
        with self.killed if self.opened == 2 else nullcontext():
            await self.server.serve(channel)


async def test_the_client_shows_the_dashboard_and_comes_back(
    dashboard: ModuleType, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    client = load("dashboard_client")
    view, target, states = client.View(), Flaky(dashboard.server), []

    def changed() -> None:
        if not states or states[-1] != view.state:
            states.append(view.state)
        if view.updates == 30:
            target.killed.cancel()

    # Without a batch job: its threads take real time, over which the clock would jump.
    nursery.start_soon(client.stay_connected, target, 0, view, changed)
    await trio.sleep(120)
    assert states[0] == "not connected: refused"
    assert states[1].startswith("connected, 2")
    assert states[2].startswith("not connected: ")
    assert states[3:] == [states[1]]
    assert view.connections == 2
    assert view.updates > 100
    screen = Console(file=StringIO(), width=120)
    screen.print(view.render())
    shown = screen.file.getvalue()
    assert f"tasks {' ' * 3}" in shown
    nursery.cancel_scope.cancel()


async def test_the_client_asks_a_missing_server_ever_more_rarely(
    autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    client, times = load("dashboard_client"), []

    class Missing:
        @asynccontextmanager
        async def connect(self) -> AsyncIterator[Any]:
            times.append(trio.current_time())
            raise OSError("refused")
            yield

    nursery.start_soon(client.stay_connected, Missing(), 0, client.View(), lambda: None)
    await trio.sleep(100)
    assert times == [0, 1, 3, 7, 15, 31, 61, 91]
    nursery.cancel_scope.cancel()


async def test_the_client_shows_how_far_its_batch_job_is(dashboard: ModuleType) -> None:
    client = load("dashboard_client")
    view, seen = client.View(), []
    async with connected(dashboard.server) as session:
        await client.work(session, 3, view, lambda: seen.append(view.batch))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert view.batch is None


def test_the_client_shows_text_as_text() -> None:
    client = load("dashboard_client")
    view = client.View(batch=(3, 4))
    view.take("metrics://now", {"at": 1, "[red]\x1b[2J": 5, "odd": "text"})
    view.take("jobs://recent", [{"number": 1, "done": 2, "items": 3, "state": "[b]bad[/b]", "why": "\x1b]0;x\x07"}])
    screen = Console(file=StringIO(), width=120)
    screen.print(view.render())
    shown = screen.file.getvalue()
    assert "[red]\N{REPLACEMENT CHARACTER}[2J" in shown
    assert "[b]bad[/b]" in shown
    assert "odd" not in shown
    assert "\x1b" not in shown
    assert client.sparkline([0, 7, 3.5, 7]) == "▁█▅█"
    assert client.sparkline([2, 2]) == "▁▁"


@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY, V2024_11_05], ids=lambda revision: revision.name)
async def test_the_dashboard_streams_over_http(
    dashboard: ModuleType, revision: trimcp.Revision, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL", 0.02)
    client = trimcp.Client("viewer", version="1.0")
    with trio.fail_after(30):
        async with connected_over(dashboard.server, "http", client, revision=revision) as session:
            async with session.listen(resources=["metrics://now"]) as changes:
                async with session.calling("watch", {"seconds": 3600, "metric": "tasks"}) as call:
                    for _ in range(5):
                        assert (await call.progress.receive()).total == 3600
                        assert await changes.receive() == ResourceUpdated("metrics://now")
                async with session.calling("batch", {"items": 3, "mib": 1}) as call:
                    assert [step.progress async for step in call.progress] == [1, 2, 3]
                    assert not (await call.result()).is_error
            (job,) = await read_json(session, "jobs://recent")
            assert job["state"] == "finished"


@pytest.mark.slow
@pytest.mark.usefixtures("children_hear_sigint")
def test_the_dashboard_and_its_client_are_programs() -> None:
    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}
        command = [sys.executable, str(ROOT / "examples" / name), *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)

    def read_until(process: subprocess.Popen[bytes], wanted: bytes) -> bytes:
        assert process.stdout is not None
        seen = b""
        while wanted not in seen and (more := os.read(process.stdout.fileno(), 65_536)):
            seen += more
        return seen

    def interrupt(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
        return process.returncode, complaints

    with start("dashboard.py", "0") as server:
        try:
            url = read_until(server, b"\n").decode().removeprefix("serving at ").strip()
            with start("dashboard_client.py", url, "--batch", "3") as client:
                try:
                    assert b"3/3" in read_until(client, b"finished")
                    assert interrupt(client) == (0, b"")
                finally:
                    client.kill()
            assert interrupt(server) == (0, b"")
        finally:
            server.kill()


# A supervised upstream


@pytest.mark.slow
async def test_the_upstream_dies_and_comes_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    example = load("upstream")
    monkeypatch.setattr(example, "EVERY", 0.7)
    monkeypatch.setattr(example, "BREAKER", trimcp.fleet.Breaker(failures=3, open_for=2))
    monkeypatch.setattr(example, "RESTARTS", trimcp.fleet.Restarts(first_pause=0.2, longest_pause=1, lasting=0.1))
    with trio.fail_after(90):
        statistics = await example.main(2, str(tmp_path))
    lines = [line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines()]
    assert statistics.connections == 4
    assert statistics.losses == 3
    assert statistics.failed_attempts >= 3
    said = {who: [what for name, what in lines if name == who] for who, _ in lines}
    ended = [what for what in said["work"] if not what.startswith("begins")]
    assert len(ended) == 2
    assert all("failed at once" in what and "was ended by SIGKILL" in what for what in ended)
    assert len(said["changes"]) == 3
    counted = [what for what in said["count"] if not what.startswith("refused at once: it is tried again")]
    assert counted.count("1") == 4  # of each process
    assert all(what.isdecimal() for what in counted)
    assert [what.partition(":")[0] for what in said["state"]].count("open") == 1
    for what in said["kill"]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(what.removeprefix("process ")), 0)


# Heavy work


@pytest.mark.slow
def test_heavy_work_is_killed_and_nothing_is_left_of_it() -> None:
    command = [sys.executable, str(ROOT / "examples" / "heavy.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = done.stdout
    print(told)
    assert len(set(re.findall(r'"factor": 1000003, "process": (\d+)', told.partition("2. ")[0]))) == 1
    reports = re.search(r"(\d+) reports of progress, the last one: tried all below", told)
    assert reports is not None
    assert int(reports[1]) > 1
    gone = re.search(r"cancelled: 1 process\(es\) gone after (\d+\.\d) ms", told)
    assert gone is not None
    # A few milliseconds where nothing else runs; elsewhere what it takes to kill a process and its child.
    control = trio.run(seconds_to_kill_a_family)
    assert float(gone[1]) < max(400, 30 * 1000 * control)
    assert "factorize_quickly did not finish within 2 seconds" in told
    assert "remember_everything failed: its process needed more than 512 MiB of memory" in told
    assert "crash failed: its process was ended by SIGSEGV" in told
    last = told.partition("6. ")[2]
    assert len(re.findall(r'result after .*"factor": 1000003', last)) == 4
    assert len(set(re.findall(r'"process": (\d+)', last))) == 2
    assert "the server has ended; of its 2 processes are left: 0" in told
    assert "its log said 2 times what ended a worker" in told


# A slow reader beside fast ones


async def test_a_slow_reader_is_told_apart_from_fast_ones_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    slow_reader = load("slow_reader")
    with trio.fail_after(60):
        health = await slow_reader.main(2, 3.0, 1.0)
    assert health["ends"] == ["LIMIT: the peer read nothing for 1 seconds"]
    assert health["logs dropped"] > 0
    assert health["progress merged"] > 0
    said = capsys.readouterr().out
    assert re.search(r"one more that reads nothing: p99 +[0-9.]+ ms, server [0-9,]+ KiB", said)
    assert "the slow one was dropped: LIMIT" in said


# A server that wants an access token

PERSON = """
import sys, urllib.error, urllib.request
class Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_): return None
try:
    urllib.request.build_opener(Stay).open(sys.argv[1], data=b"user=ann")
except urllib.error.HTTPError as answer:
    if "--stay" in sys.argv:
        print(answer.headers["location"])
    else:
        assert b"You can close this window" in urllib.request.urlopen(answer.headers["location"]).read()
"""


@attrs.frozen
class Protected:
    """`trimcp run examples/protected.py --http`, on ports of its own, and a home of its own for logins."""

    folder: Path
    ports: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        browser = f"{sys.executable} {self.folder / 'person.py'} %s"
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_DATA_HOME": str(self.folder / "data"),
            "HOME": str(self.folder),
            "BROWSER": browser,
            "COLUMNS": "80",
        }

    def told(self, text: str) -> str:
        """Return a text with the ports that this server has."""
        return re.sub("800[01]", lambda port: self.ports[port[0]], text)

    def run(self, words: list[str], **more: Any) -> str:
        """What is printed: by a process where there is a browser or something is typed."""
        if words[0] != "login" and not more:
            return CliRunner().invoke(app, words, env=self.environment, prog_name="trimcp").output
        command = [sys.executable, "-m", "trimcp.cli", *words]
        both: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, **both, env=self.environment, text=True, timeout=60, **more)
        return str(done.stdout)


@pytest.fixture
def protected(tmp_path: Path) -> Iterator[Protected]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"8000": str(one.getsockname()[1]), "8001": str(other.getsockname()[1])}
    there = Protected(tmp_path, ports)
    example = (ROOT / "examples" / "protected.py").read_text("utf-8")
    (tmp_path / "protected.py").write_text(there.told(example), "utf-8")
    (tmp_path / "person.py").write_text(PERSON, "utf-8")
    command = [sys.executable, "-m", "trimcp.cli", "run", str(tmp_path / "protected.py"), "--http"]
    with subprocess.Popen(
        [*command, "--port", ports["8000"]], stderr=subprocess.PIPE, env=there.environment
    ) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith(b"listening on")
            yield there
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
    assert process.returncode == 0


@pytest.mark.slow
def test_a_protected_server_is_used_as_the_page_prints_it(protected: Protected) -> None:
    page = ROOT / "docs" / "howto" / "logging-in.md"
    blocks = [block for block in blocks_of(page) if block.language == "console" and "8000/mcp" in block.text]
    steps = [part for block in blocks for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]]
    assert len(steps) > 8
    for step in steps:
        command, _, wanted = protected.told(step).partition("\n")
        printed = protected.run(shlex.split(command)[1:])
        compare(wanted, printed, f"$ {command}")


@pytest.mark.slow
def test_somebody_logs_in_without_a_browser(protected: Protected) -> None:
    url = protected.told("http://127.0.0.1:8000/mcp")
    command = [sys.executable, "-m", "trimcp.cli", "login", url, "--no-browser"]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, env=protected.environment, text=True) as login:
        assert login.stderr is not None
        page = next(line.strip() for line in login.stderr if "/authorize?" in line)
        person = [sys.executable, str(protected.folder / "person.py"), page, "--stay"]
        end = subprocess.run(person, capture_output=True, text=True, timeout=60, check=True).stdout
        assert end.startswith("http://127.0.0.1:8765/callback?")
        said, _ = login.communicate(end, timeout=60)
    assert said.startswith(f"Logged in to {url} as ann")
    assert protected.run(["call", url, "whoami"]) == "ann, with the scopes notes:read\n"
    [kept] = protected.folder.rglob("credentials.json")
    assert kept.stat().st_mode & 0o777 == 0o600
    [entry] = json.loads(kept.read_text("utf-8"))["logins"].values()
    tokens = json.loads(entry)["tokens"]
    for words in (["whoami"], ["whoami", "--json"], ["logout", url]):
        told = protected.run(words)
        assert url in told
        assert not [secret for secret in (tokens["access_token"], tokens["refresh_token"]) if secret in told]


async def test_over_a_pipe_the_protected_server_asks_nobody_for_a_token() -> None:
    example = load("protected")
    server = trimcp.Server("protected", version="1.0")  # without the toy, whose port may be taken
    server.add_tool(example.whoami)
    server.add_tool(example.write_note, scopes=["notes:read", "notes:write"])
    async with connected(server) as session:
        assert (await session.call_tool("whoami")).text == "nobody, over a pipe"
        assert (await session.call_tool("write_note", {"text": "milk"})).text == "1 notes"
