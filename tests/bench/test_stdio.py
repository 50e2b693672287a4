"""Load on child processes: right ones, and ones that go wrong in every way we could think of."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import memory_stream_one_way_pair

from tests.bench.support import ECHO
from trimcp.bench.channels import LineChannel
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Report
from trimcp.bench.tally import Tally
from trimcp.errors import LocalError
from trimcp.transports.stdio.child import ShutdownTimes, StdioServer
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

SERVER = Path(__file__).with_name("server_for_bench.py")
HASTE = ShutdownTimes(close=1.0, terminate=0.3, kill=0.3)


def a_server(kind: str) -> StdioServer:
    return StdioServer((sys.executable, str(SERVER), kind), cwd=Path.cwd(), shutdown=HASTE, on_stderr=lambda line: None)


def counts(report: Report) -> dict[str, int]:
    return {kind: each.count for kind, each in report.errors.items()}


async def measured(kind: str, **options: Any) -> Report:
    return await measure(a_server(kind), Plan(options.pop("mix", ECHO), **options))


@pytest.mark.parametrize("revision", [LATEST.name, LATEST_LEGACY.name])
async def test_a_right_server_answers_rightly(revision: str) -> None:
    report = await measured("right", count=300, under_way=16, revision=revision)
    assert (report.calls, report.errors, report.right) == (300, {}, True)
    assert (report.transport, report.revision, report.reply) == ("stdio", revision, None)
    assert (report.server_name, report.server_version) == ("right", "1.5")
    assert report.bytes_in > 300 * 60
    assert report.bytes_out > 300 * 60
    assert report.generator.answers == 300
    assert report.target.endswith("server_for_bench.py right")


async def test_a_mix_of_requests_is_answered_by_kind() -> None:
    mix = [
        ECHO,
        MixEntry("tools/list"),
        MixEntry("resources/read", {"uri": "bench://greeting"}, expect="hello"),
        MixEntry.tool("fail", {"text": "call {n}"}, weight=0.2),
    ]
    report = await measured("right", mix=mix, count=200, under_way=8, sessions=2)
    failed = counts(report)["tool error"]
    assert report.calls == 200 - failed
    assert 0 < failed < 40
    assert report.errors["tool error"].example.startswith("call ")


async def test_progress_is_asked_for_and_counted() -> None:
    stream = MixEntry.tool("stream", {"n": 40}, expect="done")
    report = await measured("right", mix=stream, count=5, under_way=2, progress=True)
    assert (report.calls, report.progress, report.errors) == (5, 200, {})


async def test_messages_larger_than_a_pipe_go_both_ways() -> None:
    big = MixEntry.tool("echo", {"text": "x{n}" * 50_000}, expect="x{n}" * 50_000)
    report = await measured("right", mix=big, count=12, under_way=6)
    assert (report.calls, report.errors) == (12, {})
    assert report.bytes_in > 12 * 100_000


async def test_calls_given_up_leave_the_session_usable() -> None:
    slow = MixEntry.tool("slow", {"seconds": 60}, weight=1.0)
    report = await measured("right", mix=[slow, ECHO], count=40, under_way=4, timeout=0.1)
    assert report.timed_out + report.calls == 40
    assert report.timed_out > 5
    assert report.calls > 5
    assert report.errors == {}


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
async def test_the_cost_is_that_of_the_server_with_its_children() -> None:
    through_a_shell = StdioServer(("sh", "-c", f"{sys.executable} {SERVER} right; :"), shutdown=HASTE)
    report = await measure(through_a_shell, Plan(ECHO, count=500, under_way=16))
    cost = report.cost
    assert cost is not None
    assert 0.001 < cost.cpu_seconds < report.seconds + 0.5
    assert cost.peak_rss >= cost.rss > 20_000_000  # the interpreter, not the shell
    assert report.generator.cpu_seconds > 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("text", {"wrong text": 30}),
        ("error", {"error -32603": 30}),
        ("is_error", {"tool error": 30}),
    ],
)
async def test_wrong_answers_are_counted_by_kind(kind: str, expected: dict[str, int]) -> None:
    report = await measured(kind, count=30, under_way=4)
    assert (report.calls, counts(report), report.latency.count) == (0, expected, 0)
    if kind == "text":
        assert report.errors["wrong text"].example == "\\x1b[31mwrong"


async def test_right_answers_among_wrong_ones_are_told_apart() -> None:
    report = await measured("mixed", count=60, under_way=30, patience=1.5)
    found = counts(report)
    assert report.calls == 20  # those that came twice were right once
    assert (found["wrong text"], found["error -32603"], found["tool error"]) == (10, 10, 10)
    assert found["answered twice"] == 10
    assert (found["not JSON"], found["no answer"]) == (10, 10)
    assert report.errors["not JSON"].example == "this is no JSON"


async def test_silence_is_an_error_after_a_bounded_wait() -> None:
    with trio.fail_after(60):
        report = await measured("silence", seconds=0.1, under_way=5, patience=0.5)
    assert (report.calls, counts(report)) == (0, {"no answer": 5})


async def test_a_dying_server_is_started_again_a_bounded_number_of_times() -> None:
    with trio.fail_after(30):
        report = await measured("dying", seconds=600.0, under_way=2, reopen=2)
    assert report.calls == 15
    assert 3 <= counts(report)["connection lost"] <= 6
    example = report.errors["connection lost"].example
    assert "exited with status 3" in example
    assert "I am dying of a call" in example


async def test_a_server_that_closes_its_output_has_ended() -> None:
    with trio.fail_after(30):
        report = await measured("deaf", seconds=600.0, reopen=0)
    assert (report.calls, counts(report)) == (5, {"connection lost": 1})


async def test_a_tool_that_is_not_there_is_told_before_anything_is_measured() -> None:
    with pytest.raises(LocalError, match="no tool 'ehco'; it has echo, slow, stream, fail"):
        await measured("right", mix=MixEntry.tool("ehco", {"text": "x"}))


async def test_a_missing_argument_is_told_before_anything_is_measured() -> None:
    with pytest.raises(LocalError, match="the tool 'echo' needs text"):
        await measured("right", mix=MixEntry.tool("echo", {"txt": "x"}))


async def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(LocalError, match="cannot start the server"):
        await measure(StdioServer(("/no/such/program",)), Plan(ECHO))


async def test_a_process_that_is_not_there_is_told() -> None:
    with pytest.raises(LocalError, match="there is no process 4194305 whose cost"):
        await measure(a_server("right"), Plan(ECHO, pids=(4_194_305,)))


async def test_cancelling_ends_the_children() -> None:
    begun = trio.Event()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            async def load() -> None:
                await measure(a_server("right"), Plan(ECHO, seconds=600.0), on_tick=lambda tick: begun.set())

            nursery.start_soon(load)
            await begun.wait()
            children = children_of(os.getpid())
            assert children
            nursery.cancel_scope.cancel()
    assert not children & children_of(os.getpid())


def children_of(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(child) for child in (task / "children").read_text().split()}
    return found


# Lines


async def test_lines_are_cut_wherever_the_chunks_are() -> None:
    sender, receiver = memory_stream_one_way_pair()
    channel = LineChannel(receiver, sender, Tally(), 1000)
    text = b'{"a":1}\n\n  \r\n{"b":2}\r\n{"c":3}\n'
    found: list[bytes] = []
    for byte in text:
        await sender.send_all(bytes([byte]))
        found += await channel.receive()
    assert [line.strip() for line in found] == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    await sender.send_all(text)
    assert [line.strip() for line in await channel.receive()] == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    await sender.aclose()
    with pytest.raises(trio.EndOfChannel):
        await channel.receive()
    assert await channel.close_reason() == "the server closed the connection"


async def test_a_line_without_end_ends_the_connection() -> None:
    sender, receiver = memory_stream_one_way_pair()
    channel = LineChannel(receiver, sender, Tally(), 1000)
    with pytest.raises(trio.BrokenResourceError):
        for _ in range(100):
            await sender.send_all(b"x" * 100)
            assert not await channel.receive()
    assert await channel.close_reason() == "the server sent a message larger than 1,000 bytes"
