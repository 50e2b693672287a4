"""The audit: one record for each call and no more, whatever became of it, and nothing in it that a stranger chose."""

from __future__ import annotations

import inspect
import json
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import trio
import trio.testing

import trimcp
from tests.pages import ROOT
from tests.peers.serving import NETWORK, served
from tests.yardsticks import turns
from trimcp.channel import NOWHERE, Incoming
from trimcp.session.drive import direct_ends, drive
from trimcp.session.limits import Limits, Quota
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.jsonrpc import parse
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05, V2025_06_18, Revision


def make_server(audit: trimcp.guard.Audit | None, **options: Any) -> trimcp.Server[Any]:
    server = trimcp.Server("s", audit=audit, **options)

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError("it did not work")

    @server.tool
    async def crash() -> str:
        raise RuntimeError("secret of ours")

    @server.tool
    async def wait() -> str:
        await trio.sleep_forever()
        return "never"

    @server.resource("notes://{name}")
    async def note(name: str) -> str:
        return "n" * 50

    @server.prompt
    async def review(path: str) -> str:
        return f"Review {path}."

    @server.complete("review", "path")
    async def paths(typed: str) -> list[str]:
        return [typed + ".py"]

    return server


@every_revision
async def test_every_call_is_one_record(revision: Revision, autojump_clock: trio.testing.MockClock) -> None:
    records: list[Any] = []
    server = make_server(trimcp.guard.Audit(write=records.append))
    async with connected(server, trimcp.Client("host", version="3.1"), revision=revision) as session:
        await session.list_tools()
        await session.call_tool("add", {"a": 2, "b": 3})
        await session.read_resource("notes://today")
        await session.get_prompt("review", {"path": "a.py"})
        await session.complete_prompt("review", "path", "b")
    assert [(record["method"], record.get("target")) for record in records] == [
        ("tools/call", "add"),
        ("resources/read", "notes://today"),
        ("prompts/get", "review"),
        ("completion/complete", "review"),
    ]
    first = records[0]
    assert first["outcome"] == "ok"
    assert (first["client"], first["client_version"]) == ("host", "3.1")
    assert first["revision"] == revision.name
    assert first["arguments"] == {"a": "number", "b": "number"}
    assert first["transport"] == "stream"
    assert first["request_bytes"] > 20
    assert first["reply_bytes"] > 20
    assert records[1]["reply_bytes"] > 50
    assert records[2]["arguments"] == {"path": "string(4)"}
    assert len({record["request_id"] for record in records}) == 4
    json.dumps(records)


async def test_how_a_call_ended(autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture) -> None:
    records: list[Any] = []
    server = make_server(trimcp.guard.Audit(write=records.append))
    async with connected(server) as session:
        await session.call_tool("fail")
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("crash")
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("nothing of that name")
        with trio.move_on_after(3):
            await session.call_tool("wait")
        await trio.testing.wait_all_tasks_blocked()
    assert [(record["outcome"], record.get("code"), record.get("reason")) for record in records] == [
        ("tool_error", None, None),
        ("error", -32603, None),
        ("error", -32602, None),
        ("cancelled", None, "cancelled by peer"),
    ]
    assert records[3]["duration"] == pytest.approx(3)
    assert records[3]["reply_bytes"] == 0
    assert "secret of ours" not in json.dumps(records)


async def test_what_the_canceller_said_is_there_and_can_pretend_nothing(autojump_clock: trio.testing.MockClock) -> None:
    records: list[Any] = []
    server = make_server(trimcp.guard.Audit(write=records.append))
    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "wait")
        await trio.testing.wait_all_tasks_blocked()
        [job] = session.peer.jobs
        job.cancel(trimcp.CancelReason.PEER, 'enough\n{"outcome":"ok"}\x1b[2J\u202e')
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    (record,) = records
    assert record["outcome"] == "cancelled"
    assert record["detail"].startswith("enough\\n")
    assert record["detail"].isprintable()


async def test_what_is_refused_is_recorded_with_the_reason(autojump_clock: trio.testing.MockClock) -> None:
    records: list[Any] = []
    limits = Limits(max_running=1, backlog_requests=1)
    server = make_server(trimcp.guard.Audit(write=records.append), limits=limits)
    async with server.running() as running:
        pushed = running.open(NOWHERE)  # nobody can stop reading here, so what is too much is refused
        pushed.assume(LATEST_LEGACY)
        for id, tool in enumerate(("wait", "wait", "add")):
            pushed.deliver([Incoming(parse(call(id, tool)))])
        pushed.session.draining.set()
        pushed.deliver([Incoming(parse(call(3, "add")))])
        pushed.disconnect("the test is over")
        await trio.testing.wait_all_tasks_blocked()
    refused = [(record["outcome"], record["reason"]) for record in records if record["target"] == "add"]
    assert refused == [("refused", "overload"), ("refused", "drain")]
    gone = [(record["outcome"], record["reason"]) for record in records if record["target"] == "wait"]
    assert gone == [("cancelled", "disconnected")] * 2


def call(id: int, tool: str) -> bytes:
    params = {"name": tool, "arguments": {"a": 1, "b": 1} if tool == "add" else {}}
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}).encode()


async def test_a_call_beyond_its_quota_is_refused_by_it(autojump_clock: trio.testing.MockClock) -> None:
    records: list[Any] = []
    server = trimcp.Server("s", audit=trimcp.guard.Audit(write=records.append))

    @server.tool(quota=Quota(running=1, waiting=0))
    async def once() -> str:
        await trio.sleep_forever()
        return ""

    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(partial(session.call_tool, "once"))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trimcp.Overloaded):
            await session.call_tool("once")
        nursery.cancel_scope.cancel()
    assert next((record["outcome"], record["reason"]) for record in records) == ("refused", "quota")


async def test_waiting_for_a_turn_is_no_work(autojump_clock: trio.testing.MockClock) -> None:
    records: list[Any] = []
    server = trimcp.Server("s", audit=trimcp.guard.Audit(write=records.append), limits=Limits(max_running=1))

    @server.tool
    async def nap() -> str:
        await trio.sleep(2)
        return "up"

    async with connected(server) as session, trio.open_nursery() as nursery:
        await trio.sleep(1)  # at 0 nothing has a time yet
        nursery.start_soon(session.call_tool, "nap")
        nursery.start_soon(session.call_tool, "nap")
    assert [(record["waited"], record["duration"]) for record in records] == [
        (pytest.approx(0), pytest.approx(2)),
        (pytest.approx(2), pytest.approx(2)),
    ]


@pytest.mark.parametrize("revision", [V2025_06_18, LATEST], ids=str)
async def test_a_call_that_asks_its_user_is_told_apart(
    revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    records: list[Any] = []
    server = trimcp.Server("s", audit=trimcp.guard.Audit(write=records.append))

    @server.tool
    async def greet(name: Annotated[str, trimcp.Elicit("Who?")]) -> str:
        return name

    client = trimcp.Client("c")

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="accept", content={"name": "Ada"})

    async with connected(server, client, revision=revision) as session:
        await session.call_tool("greet")
    assert [record["outcome"] for record in records] == (["asked", "ok"] if revision.modern else ["ok"])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("none", None),
        ("shapes", {"token": "string(6)", "text": "string(400)"}),
        ("masked", {"token": "***", "text": "x" * 300 + "... (400 characters)"}),
        ("whole", {"token": "s3cr3t", "text": "x" * 400}),
    ],
)
async def test_arguments_are_shown_as_far_as_it_was_chosen(
    arguments: Any, shown: Any, autojump_clock: trio.testing.MockClock
) -> None:
    records: list[Any] = []
    server = trimcp.Server("s", audit=trimcp.guard.Audit(write=records.append, arguments=arguments))

    @server.tool
    async def send(token: str, text: str) -> str:
        return ""

    async with connected(server) as session:
        await session.call_tool("send", {"token": "s3cr3t", "text": "x" * 400})
    assert records[0].get("arguments") == shown
    assert ("s3cr3t" in json.dumps(records)) == (arguments == "whole")


async def test_methods_are_chosen(autojump_clock: trio.testing.MockClock) -> None:
    records: list[Any] = []
    async with connected(make_server(trimcp.guard.Audit(write=records.append, methods=("tools/list",)))) as session:
        await session.list_tools()
        await session.call_tool("add", {"a": 1, "b": 1})
    assert [record["method"] for record in records] == ["tools/list"]


async def test_a_logger_gets_fields(autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimcp.audit")
    async with connected(make_server(trimcp.guard.Audit())) as session:
        await session.call_tool("add", {"a": 1, "b": 1})
    [record] = [record for record in caplog.records if record.name == "trimcp.audit"]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("tools/call add ok ")
    written = json.loads(trimcp.JsonFormatter().format(record))
    assert written["target"] == "add"
    assert written["outcome"] == "ok"
    assert written["message"] == record.getMessage()


async def test_a_client_cannot_write_lines_of_its_own(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    bait = 'x\n{"outcome":"ok","principal":"root"}\r\x1b[31m\u202e\u2028\x7f'
    file = tmp_path / "audit.jsonl"
    caplog.set_level(logging.INFO, "trimcp.audit")
    for audit in (trimcp.guard.Audit(file=file, arguments="whole"), trimcp.guard.Audit(arguments="whole")):
        async with connected(make_server(audit), trimcp.Client(bait, version=bait)) as session:
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool(bait, {bait: bait})
    (line,) = file.read_bytes().splitlines()
    assert line.isascii()
    assert line.decode().isprintable()
    assert json.loads(line)["arguments"] == {bait: bait}  # whole, as it was asked for
    [record] = [record for record in caplog.records if record.name == "trimcp.audit"]
    assert record.getMessage().isprintable()
    assert trimcp.JsonFormatter().format(record).isprintable()


async def test_a_file_is_appended_to_for_its_owner_alone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    file = tmp_path / "audit.jsonl"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        async with connected(make_server(trimcp.guard.Audit(file=str(file)))) as session:
            for n in range(5):
                await session.call_tool("add", {"a": n, "b": n})
            assert len(file.read_text().splitlines()) % 5 == 0  # nothing waits in a buffer
    assert [json.loads(line)["target"] for line in file.read_text().splitlines()] == ["add"] * 10
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(os.listdir("/proc/self/fd")) == before


async def test_each_record_is_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    written: list[bytes] = []
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(bytes(data)) or whole(fd, data))
    async with connected(make_server(trimcp.guard.Audit(file=tmp_path / "a"))) as session:
        await session.call_tool("add", {"a": 1, "b": 1})
        await session.call_tool("add", {"a": 1, "b": 1})
    lines = [data for data in written if data.startswith(b"{")]
    assert len(lines) == 2
    assert all(data.endswith(b"}\n") for data in lines)


async def test_a_file_that_cannot_be_opened_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no_such"):
        async with make_server(trimcp.guard.Audit(file=tmp_path / "no_such" / "audit")).running():
            pass


class Disk:
    """A place that is full for a while."""

    def __init__(self) -> None:
        self.full = False
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        if self.full:
            raise OSError("no space left\nERROR fake")
        self.records.append(record)


async def test_a_record_that_cannot_be_written_is_one_error_and_no_calls_failure(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk()
    audit = trimcp.guard.Audit(write=disk.write)
    async with connected(make_server(audit)) as session:
        disk.full = True
        for _ in range(3):
            assert (await session.call_tool("add", {"a": 1, "b": 1})).structured_content == {"result": 2}
        assert audit.lost == 3
        disk.full = False
        await session.call_tool("add", {"a": 1, "b": 1})
        assert audit.lost == 0
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "trimcp.server"]
    assert [level for level, _ in said] == ["ERROR", "WARNING"]
    assert said[0][1].isprintable()
    assert "no space left" in said[0][1]
    assert said[1][1] == "the audit is written again; 3 records were lost"
    assert len(disk.records) == 1


async def test_where_it_is_required_nothing_is_done_without_it(autojump_clock: trio.testing.MockClock) -> None:
    disk = Disk()
    ran: list[int] = []
    server = trimcp.Server("s", audit=trimcp.guard.Audit(write=disk.write, required=True))

    @server.tool
    async def act() -> str:
        ran.append(1)
        return "done"

    async with connected(server) as session:
        await session.call_tool("act")
        disk.full = True
        await session.call_tool("act")  # nobody can know before
        for _ in range(3):
            with pytest.raises(trimcp.Overloaded, match="audit"):
                await session.call_tool("act")
        await session.list_tools()
        assert len(ran) == 2
        disk.full = False
        with pytest.raises(trimcp.Overloaded):
            await session.call_tool("act")  # its refusal is the record that gets through
        await session.call_tool("act")
    assert len(ran) == 3
    assert [record["outcome"] for record in disk.records] == ["ok", "refused", "ok"]
    assert disk.records[1]["reason"] == "audit"


async def test_half_a_line_swallows_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    file = tmp_path / "audit"
    whole = os.write
    short = [True]
    monkeypatch.setattr(
        os, "write", lambda fd, data: whole(fd, data[:30] if data.startswith(b"{") and short.pop() else data)
    )
    audit = trimcp.guard.Audit(file=file)
    async with connected(make_server(audit)) as session:
        await session.call_tool("add", {"a": 1, "b": 1})
        assert audit.lost == 1
        short.append(False)
        await session.call_tool("add", {"a": 1, "b": 1})
    torn, line = file.read_bytes().splitlines()
    assert len(torn) == 30
    assert json.loads(line)["target"] == "add"


@pytest.mark.parametrize(
    "options",
    [
        {"file": "a", "logger": "b"},
        {"required": True},
        {"required": True, "logger": "x"},
        {"arguments": "all"},
        {"methods": "tools/call"},
    ],
)
def test_what_cannot_be_meant_is_refused(options: Any) -> None:
    with pytest.raises(ValueError):
        trimcp.guard.Audit(**options)


async def test_a_server_without_audit_pays_nothing() -> None:
    server = make_server(None)
    async with server.running() as running:
        assert not running.session().on_finished
        handler = running._handlers["tools/call"]
        assert "guarded" not in handler.__qualname__


@pytest.mark.parametrize("road", NETWORK)
async def test_who_called_over_a_network(road: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    server = make_server(trimcp.guard.Audit(file=file))
    tokens = trimcp.bearer_tokens({"a-token-of-ada": "ada"})
    async with served(server, road, settings=trimcp.HttpSettings(authenticate=tokens, sse_path="/sse")) as place:
        client = trimcp.Client("host", version="1")
        headers = {"authorization": "Bearer a-token-of-ada"}
        revision = V2024_11_05 if road == "http+sse" else LATEST_LEGACY if "websocket" in road else LATEST
        async with client.connect(place.target(headers=headers), revision=revision) as session:
            await session.call_tool("add", {"a": 1, "b": 2})
    (line,) = file.read_text().splitlines()
    record = json.loads(line)
    assert (record["principal"], record["transport"]) == (
        "ada",
        "sse" if road == "http+sse" else road.partition(" ")[0].removesuffix("/2"),
    )
    assert (record["outcome"], record["client"]) == ("ok", "host")
    assert record.get("address") == ("127.0.0.1" if record["transport"] == "http" else None)
    assert "a-token-of-ada" not in line


async def test_a_record_costs_little(tmp_path: Path) -> None:
    """A ratio in one run: what the same calls take with and without a file of records."""

    @asynccontextmanager
    async def calling(audit: trimcp.guard.Audit | None) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
        server = make_server(audit)
        async with server.running() as running, open_service_nursery() as nursery:
            ours, theirs = direct_ends()
            nursery.start_soon(drive, running.session(), ours)
            async with trimcp.Client("c").connect(theirs) as session:

                async def call(times: int) -> None:
                    for _ in range(times):
                        await session.call_tool("add", {"a": 1, "b": 2})

                await call(50)
                yield call

    async with calling(None) as without, calling(trimcp.guard.Audit(file=tmp_path / "audit")) as recorded:
        for turn in turns(at_most=4):
            with turn.of_work():
                await recorded(300)
            with turn.of_yardstick():
                await without(300)


def test_what_is_no_call_is_noted_too(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    audit = trimcp.guard.Audit(write=records.append)
    audit.note("tools/register", "ok", target='evil"\n', principal=trimcp.Principal("ada"), version=None, count=3)
    (record,) = records
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "method": "tools/register",
        "outcome": "ok",
        "target": "evil\\x22\\n",
        "principal": "ada",
        "count": 3,
    }


def test_what_is_noted_goes_where_calls_go(caplog: pytest.LogCaptureFixture) -> None:
    def full(record: Any) -> None:
        raise OSError("no space")

    audit = trimcp.guard.Audit(write=full)
    audit.note("tools/register", "ok", target="a")
    assert audit.lost == 1
    assert "the audit cannot be written" in caplog.text
    with caplog.at_level(logging.INFO, "trimcp.audit"):
        trimcp.guard.Audit().note("tools/remove", "refused", target="a")
    assert caplog.records[-1].getMessage() == "tools/remove a refused "


def test_the_page_has_every_reason() -> None:
    page = (ROOT / "docs" / "howto" / "audit.md").read_text("utf-8")
    refused = {"overload", "quota", "drain", "audit", "scopes", "forbidden"}
    source = inspect.getsource(trimcp.guard.Audit)
    assert all(f'"{each}"' in source for each in refused)
    reasons = {reason.value for reason in trimcp.CancelReason} | refused
    assert {each for each in reasons if f'"{each}"' not in page} == set()
