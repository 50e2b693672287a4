"""The watchdog: event loops that really stand still, in processes of their own, and what is said of them."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import attrs
import pytest
import trio

import trimcp
from trimcp.testing import connected

ROOT = Path(trimcp.__file__).parent.parent
SERVER = """
import ctypes, sys, time
import trimcp, trio

server = trimcp.Server("freezing")

@server.tool
async def wait_here(seconds: float) -> str:
    time.sleep(seconds)
    return "waited"

@server.tool(run="inline")
def count_here(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "counted"

@server.tool
async def hold_the_lock(seconds: float) -> str:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return "held"

@server.tool
async def sleep(seconds: float) -> str:
    await trio.sleep(seconds)
    return "slept"
"""
INITIALIZE = {
    "protocolVersion": trimcp.LATEST_LEGACY.name,
    "capabilities": {},
    "clientInfo": {"name": "watcher", "version": "1"},
}


@attrs.define
class Told:
    """What a process writes to standard error, line by line."""

    lines: list[str] = attrs.field(factory=list)
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def read(self, stream: IO[bytes]) -> None:
        for line in stream:
            with self.changed:
                self.lines.append(line.decode().rstrip("\n"))
                self.changed.notify_all()

    def until(self, text: str, number: int = 1) -> str:
        """Wait for lines with this text, and return all there is by then."""
        with self.changed:
            found = self.changed.wait_for(lambda: sum(text in line for line in self.lines) >= number, 30)
            assert found, "\n".join(self.lines)
            return "\n".join(self.lines)


@contextmanager
def running(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Told]]:
    """The command with a server that freezes."""
    (tmp_path / "freezing.py").write_text(SERVER)
    command = [sys.executable, "-m", "trimcp.cli", "run", "freezing.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        told = Told()
        assert process.stderr is not None
        reader = threading.Thread(target=told.read, args=(process.stderr,))
        reader.start()
        try:
            yield process, told
        finally:
            process.kill()
            process.wait()
            reader.join()


def ask(process: subprocess.Popen[bytes], *requests: tuple[str, dict[str, Any]]) -> list[Any]:
    """Send all of these at once over standard input and return the replies as they come."""
    assert process.stdin is not None
    assert process.stdout is not None
    for number, (method, params) in enumerate(requests):
        message = {"jsonrpc": "2.0", "id": f"{method} {number}", "method": method, "params": params}
        process.stdin.write(json.dumps(message).encode() + b"\n")
    process.stdin.flush()
    return [json.loads(process.stdout.readline()) for _ in requests]


def call(name: str, seconds: float) -> tuple[str, dict[str, Any]]:
    return "tools/call", {"name": name, "arguments": {"seconds": seconds}}


def seconds_in(pattern: str, text: str) -> float:
    found = re.search(pattern, text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["wait_here", "count_here"])
def test_a_frozen_loop_is_told_with_everything_it_holds_up(tmp_path: Path, tool: str) -> None:
    with running(tmp_path, "--watchdog", "1") as (process, told):
        ask(process, ("initialize", INITIALIZE))
        began = time.monotonic()
        replies = ask(process, call("sleep", 0.3), call(tool, 2.5))
        assert {reply["result"]["content"][0]["text"] for reply in replies} == {
            "slept",
            "waited" if tool == "wait_here" else "counted",
        }
        text = told.until("the event loop goes on; it stood still for ")
        took = time.monotonic() - began
    # What a busy machine adds to the seconds is in all that is told and in what we have seen of it.
    tenths = 0.2  # what is told is rounded, and looked at ten times a second
    reported = seconds_in(r"^the event loop has stood still for (\d+\.\d) s$", text)
    stood = seconds_in(r"it stood still for (\d+\.\d) s", text)
    assert 1 <= reported <= stood
    assert 2.5 - tenths <= stood <= took + tenths
    assert f"it is held in the tool {tool}, at:" in text
    line = "time.sleep(seconds)" if tool == "wait_here" else "while time.monotonic() < until:"
    assert line in text
    # What every session is busy with, the other one's call too, and the tasks.
    assert "'watcher' '1', in revision" in text
    for name, number in (("sleep", 0), (tool, 1)):
        age = seconds_in(rf"tools/call '{name}', request 'tools/call {number}', for (\d+\.\d) s", text)
        assert reported - tenths <= age <= took + tenths
    assert "await trio.sleep(seconds)" in text
    assert re.search(r"^tasks:\n  <init>", text, re.MULTILINE)
    # Once for each time it stands still.
    assert text.count("has stood still for") == 1


@pytest.mark.slow
def test_each_stall_is_told_and_each_late_tool_once(tmp_path: Path) -> None:
    # 1.5 s is far from 0.6, which a busy machine makes more, and from 3, of which its watching thread may miss a part.
    with running(tmp_path, "--watchdog", "1.5") as (process, told):
        ask(process, ("initialize", INITIALIZE))
        for name, seconds in (("wait_here", 0.6), ("wait_here", 0.6), ("count_here", 0.6), ("wait_here", 3)):
            ask(process, call(name, seconds))
        text = told.until("the event loop goes on")
        ask(process, call("wait_here", 3))
        text = told.until("the event loop goes on", 2)
    assert text.count("has stood still for") == 2
    late = re.findall(r"the event loop is late by \d+\.\d+ s because of the tool (\w+), at", text)
    assert late == ["wait_here", "count_here"]
    assert 'run="thread"; if it computes, one with run="process"' in text


@pytest.mark.slow
def test_a_process_in_which_nothing_can_run_writes_its_stacks_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path, "--watchdog", "0.5") as (process, told):
        ask(process, ("initialize", INITIALIZE))
        ask(process, call("sleep", 0.3))
        ask(process, call("hold_the_lock", 2.5))
        text = told.until("nothing in this process could run for ")
    assert "Timeout (0:00:01" in text
    assert "in hold_the_lock" in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--workers", "2")], ids=["alone", "workers"])
async def test_a_frozen_loop_is_told_over_http(tmp_path: Path, options: tuple[str, ...]) -> None:
    with running(tmp_path, "--http", "--port", "0", "--watchdog", "1", *options) as (_, told):
        said = await trio.to_thread.run_sync(told.until, "listening on http")
        found = re.search(r"listening on (http://\S+/mcp)", said)
        assert found is not None
        async with trimcp.Client("c").connect(trimcp.http(found[1])) as session:
            assert (await session.call_tool("wait_here", {"seconds": 1.8})).content == [trimcp.Text("waited")]
        text = await trio.to_thread.run_sync(told.until, "the event loop goes on")
    assert "it is held in the tool wait_here, at:" in text
    assert re.search(r"tools/call 'wait_here', request", text)


@pytest.mark.slow
def test_without_the_option_nothing_is_watched(tmp_path: Path) -> None:
    with running(tmp_path) as (process, told):
        ask(process, ("initialize", INITIALIZE))
        ask(process, call("wait_here", 0.6))
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
    assert told.lines == []


# In a program of one's own


@pytest.mark.slow
async def test_tools_that_compute_in_threads_are_named_when_the_loop_is_late(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Forty threads that compute keep the loop from its turn without ever running in it."""
    from trimcp.watch import watchdog as watching

    # On a busy machine others compute as well, and the watchdog says nothing; here this process has all the time.
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=time.monotonic, process_time=time.monotonic))
    server = trimcp.Server("s")
    until = time.monotonic() + 1.5

    @server.tool
    def compute() -> str:
        while time.monotonic() < until:
            pass
        return "done"

    async with connected(server) as session:
        with trimcp.watchdog(server, seconds=60, lag=0.1):
            async with trio.open_nursery() as nursery:
                for _ in range(60):
                    nursery.start_soon(session.call_tool, "compute")
    told = [record.getMessage() for record in caplog.records if record.name == "trimcp.watchdog"]
    assert len(told) == 1, told
    assert "computes in threads: the tool compute." in told[0]
    assert 'run="process"' in told[0]


@pytest.mark.parametrize(("used", "named"), [(0.4, True), (0.1, False)], ids=["computing", "machine busy elsewhere"])
async def test_a_watchdog_that_is_late_itself_knows_why(
    used: float, named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that keeps the interpreter lock, in one long call in C, keeps it from the watchdog as from the loop."""
    from trimcp.watch import watchdog as watching

    server = trimcp.Server("s")
    began, go = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    @server.tool
    def compute() -> None:
        token.run_sync_soon(began.set)
        go.wait()

    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "compute")
        await began.wait()
        clock = trio.lowlevel.current_clock()
        dog = watching._Watchdog((server,), 60, 0.25, False, clock, root=None, held_by=threading.get_ident())
        times = iter([0.0, 0.6]), iter([0.0, used])
        passed = SimpleNamespace(monotonic=times[0].__next__, process_time=times[1].__next__)
        monkeypatch.setattr(watching, "time", passed)
        assert dog._pause() is False
        monkeypatch.undo()
        go.set()
    told = [record.getMessage() for record in caplog.records if record.name == "trimcp.watchdog"]
    assert [("computes in threads: the tool compute." in text) for text in told] == [True] * named


async def test_a_loop_that_answers_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    with trimcp.watchdog(seconds=0.5, whole_process=False):
        assert threading.active_count() == before + 1
        await trio.sleep(0.7)
    assert [record for record in caplog.records if record.name == "trimcp.watchdog"] == []
    with trio.fail_after(60):
        while threading.active_count() > before:  # noqa: ASYNC110 -- a thread
            await trio.sleep(0.001)


@pytest.mark.slow
async def test_what_it_costs_while_all_is_well() -> None:
    """The processor time of half a second in which nothing happens, beside that of as much without it."""

    async def used_in_a_second() -> float:
        before = time.process_time()
        await trio.sleep(0.5)
        return 2 * (time.process_time() - before)

    without = min([await used_in_a_second() for _ in range(2)])
    with trimcp.watchdog(seconds=30):
        watched = min([await used_in_a_second() for _ in range(3)])
    print(f"the watchdog takes {1000 * (watched - without):.2f} ms of processor time a second")
    assert watched - without < 0.02


def test_times_are_positive() -> None:
    async def watch(**times: float) -> None:
        with trimcp.watchdog(**times):
            pass

    for times in ({"seconds": 0.0}, {"lag": -1.0}):
        with pytest.raises(ValueError, match="is a number greater than 0"):
            trio.run(lambda times=times: watch(**times))


async def test_what_changes_while_it_is_looked_at_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trimcp.watch import watchdog as watching

    def broken(*args: object) -> list[str]:
        raise RuntimeError("Set changed size during iteration")

    monkeypatch.setattr(watching, "work_tree", broken)
    with trimcp.watchdog(seconds=0.2, lag=None):
        time.sleep(0.6)  # noqa: ASYNC251 -- it is the loop that is to stand still
        with trio.fail_after(60):
            while "the event loop goes on" not in caplog.text:  # noqa: ASYNC110 -- a thread
                await trio.sleep(0.01)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "(it changes too fast to be shown)" in told
    assert "time.sleep(0.6)" in told
