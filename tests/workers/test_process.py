"""One worker process: it goes with its parent, its output comes out, and nothing of ours leaks into it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio

import trimcp
from tests.stopwatch import Stopwatch
from tests.workers import heavy_tools
from tests.workers.test_pool import exists, lives, offering, until
from trimcp.testing import connected
from trimcp.workers import pool as worker_pool

pytestmark = pytest.mark.slow

ROOT = Path(trimcp.__file__).parent.parent
SCRIPT = """
import sys
import trimcp, trio
from trimcp.testing import connected
from tests.workers import heavy_tools

server = trimcp.Server("s", max_processes=2)
server.add_tool(heavy_tools.spin, run="process")
server.add_tool(heavy_tools.pid, run="process")

@server.tool(run="process")
def here(number: int) -> list[str]:
    print("from the script")
    return [__name__, *sys.argv[1:], str(number)]

async def main():
    async with connected(server) as session, trio.open_nursery() as nursery:
        if sys.argv[1] == "here":
            print((await session.call_tool("here", {"number": 3})).structured_content["result"])
            return
        nursery.start_soon(session.call_tool, "spin", {"file": sys.argv[1]})
        print((await session.call_tool("pid")).structured_content["result"], flush=True)

if __name__ == "__main__":
    trio.run(main)
"""


async def test_workers_go_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """One idle, one with a call that never lets Python run, and that one's child."""
    (tmp_path / "parent.py").write_text(SCRIPT)
    file = tmp_path / "began"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, tmp_path / "parent.py", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:  # noqa: ASYNC220 -- to be killed
        try:
            await until(lambda: file.exists() and file.read_text().endswith("\n"))
            assert parent.stdout is not None
            pids = [int(parent.stdout.readline()), *map(int, file.read_text().split())]
            assert len(set(pids)) == 3
            assert all(map(lives, pids))
        finally:
            parent.kill()
        clock = Stopwatch(tuple(pids))

        def gone() -> bool:
            clock.look()
            return not any(map(lives, pids))

        await until(gone)
        took = clock.took()
    print(f"from the death of the parent to that of its workers: {1000 * took:.1f} ms")
    assert took < 4


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker sees the end of its connection only")
def test_the_end_of_the_connection_is_enough() -> None:
    """As on systems that have no signal for the end of a pipe."""
    ours, theirs = socket.socketpair()
    parent_pipe, held = os.pipe()
    start = Path(worker_pool.__file__).parent.with_name("worker_program") / "start.py"
    command = [sys.executable, "-P", str(start), str(theirs.fileno()), str(parent_pipe)]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(), parent_pipe), process_group=0) as worker:
        theirs.close()
        os.close(parent_pipe)
        ours.sendall(json.dumps({"path": sys.path, "argv": [], "memory": None}).encode() + b"\n")
        facts = {"name": "pid", "module": "tests.workers.heavy_tools", "found_as": "tests.workers.heavy_tools"}
        recipe = {**facts, "file": heavy_tools.__file__, "qualname": "pid", "options": {}}
        call = {
            "do": "call",
            "call": "1",
            "tool": recipe,
            "arguments": {},
            "answers": {},
            "cpu_time": None,
            "facts": None,
        }
        ours.sendall(json.dumps(call).encode() + b"\n")
        said = json.loads(ours.makefile("rb").readline())
        assert said["say"] == "result", said
        assert said["result"]["structuredContent"] == {"result": worker.pid}
        ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        assert worker.wait(60) == -signal.SIGKILL
    os.close(held)


def test_a_function_of_a_script_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "parent.py", "here", "second"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['__trimcp_main__', 'here', 'second', '3']\n", done.stderr
    assert re.fullmatch(r"\[here \d+\] from the script\n", done.stderr)


@pytest.mark.needs("bwrap")
def test_the_server_may_be_process_1(tmp_path: Path) -> None:
    """As the only program of a container is."""
    (tmp_path / "parent.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["bwrap", "--dev-bind", "/", "/", "--proc", "/proc", "--unshare-pid", "--as-pid-1"]
    command += [sys.executable, "parent.py", "here", "first"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "['__trimcp_main__', 'here', 'first', '3']\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker sees the end of its connection only")
def test_a_parent_that_has_ended_already_is_noticed() -> None:
    """Before the worker has asked to be told of it."""
    ours, theirs = socket.socketpair()
    parent_pipe, held = os.pipe()
    os.close(held)
    start = Path(worker_pool.__file__).parent.with_name("worker_program") / "start.py"
    command = [sys.executable, "-P", str(start), str(theirs.fileno()), str(parent_pipe)]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(), parent_pipe), process_group=0) as worker:
        assert worker.wait(60) == -signal.SIGKILL
    for each in (ours, theirs):
        each.close()
    os.close(parent_pipe)


def test_a_module_that_serves_when_it_is_imported_says_so(tmp_path: Path) -> None:
    """It would start the server once more in each worker."""
    (tmp_path / "server.py").write_text(
        "import trimcp\nserver = trimcp.Server('s')\n@server.tool(run='process')\ndef f() -> str:\n    return 'x'\n"
        "trimcp.run_stdio(server)\n"
    )
    requests = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": trimcp.LATEST_LEGACY.name, "capabilities": {}}},
        {"id": 2, "method": "tools/call", "params": {"name": "f"}},
    ]
    requests[0]["params"]["clientInfo"] = {"name": "x", "version": "1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "server.py"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        replies = []
        for request in requests:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **request}).encode() + b"\n")
            process.stdin.flush()
            replies.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        log = process.stderr.read().decode()
    assert replies[1]["error"]["message"] == "internal error"
    assert 'run the server under if __name__ == "__main__":' in log


async def test_what_a_tool_prints_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    async with connected(offering(heavy_tools.print_both)) as session:
        pid = (await session.call_tool("print_both")).text
        seen = ""

        def printed() -> bool:
            nonlocal seen
            captured = capfd.readouterr()
            assert captured.out == ""
            seen += captured.err
            return seen.count("\n") == 3

        await until(printed)
    wanted = ["from a child", "on standard error", "on standard output"]
    assert sorted(seen.splitlines()) == [f"[print_both {pid}] {line}" for line in wanted]


async def test_a_worker_has_no_descriptor_of_ours_but_its_own() -> None:
    """A descriptor it kept would keep a connection open that we closed."""
    near, far = socket.socketpair()
    async with connected(offering(heavy_tools.pid)) as session:
        pid = (await session.call_tool("pid")).structured_content["result"]
        (running,) = server_runs(session)
        assert running.pools.use_processes().statistics().alive == 1
        there = {int(each): os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")}
        # 0, 1, 2, the connection, the pipe of the parent; libffi opens itself, once ctypes is imported.
        assert len([opened for opened in there.values() if "libffi" not in opened]) <= 5, there
    near.close()
    far.close()
    assert not exists(pid)


def server_runs(session: trimcp.ClientSession) -> list[object]:
    peer = session.peer
    assert peer is not None
    return [peer.endpoint]


async def test_a_worker_that_says_too_much_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "MAX_LINE", 2 * 2**20)
    async with connected(offering(heavy_tools.big)) as session:
        result = await session.call_tool("big", {"size": 3_000_000})
        assert result.is_error
        assert result.content == [trimcp.Text("big failed: its process said more than 2 MiB at once")]
        assert (await session.call_tool("big", {"size": 3})).content == [trimcp.Text("xxx")]


async def test_a_process_that_ignores_signals_is_killed_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "began"
    async with connected(offering(heavy_tools.ignore_signals)) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "ignore_signals", {"file": str(file)})
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        nursery.cancel_scope.cancel()
    assert not exists(int(file.read_text()))


async def test_a_server_that_is_told_to_stop_kills_what_does_not_end_in_its_grace(tmp_path: Path) -> None:
    """As `trimcp run` does on SIGTERM: the call gets its grace, then an error; the process is gone with the server."""
    (tmp_path / "heavy.py").write_text(
        "import trimcp\nfrom tests.workers.heavy_tools import spin\nserver = trimcp.Server('s')\n"
        "server.add_tool(spin, run='process')\n"
    )
    file = tmp_path / "began"
    messages = [
        {"id": 1, "method": "initialize", "params": {"protocolVersion": trimcp.LATEST_LEGACY.name, "capabilities": {}}},
        {"id": 2, "method": "tools/call", "params": {"name": "spin", "arguments": {"file": str(file)}}},
    ]
    messages[0]["params"]["clientInfo"] = {"name": "x", "version": "1"}
    lines = b"".join(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n" for message in messages)
    command = [sys.executable, "-m", "trimcp.cli", "run", "heavy.py", "--grace", "0.3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(  # noqa: ASYNC220 -- a program of its own
        command, cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdin is not None
        process.stdin.write(lines)
        process.stdin.flush()
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        pids = [int(word) for word in file.read_text().split()]
        process.terminate()
        out, log = await trio.to_thread.run_sync(process.communicate)
    assert process.returncode == 0
    assert json.loads(out.splitlines()[-1])["error"]["message"] == "stopped: drain"
    assert f"in the worker process {pids[0]}".encode() in log
    assert b"Traceback" not in log
    assert not exists(pids[0])
    await until(lambda: not lives(pids[1]))
