"""The shutdown ladder reaches the whole descendants within its time, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import attrs
import pytest
import trio

from tests.stopwatch import Stopwatch
from trimcp.channel import Incoming
from trimcp.support.descendants import MARK, Descendants, KnownProcess, _table, _table_from_ps
from trimcp.transports.stdio.child import ChildChannel, ShutdownTimes, StdioServer, end_process
from trimcp.wire.jsonrpc import Notification

# Starts descendants as told, reports their ids in a message, then does the last thing told.
TREE = """
import json, os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
def start(code, **options):
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return process.pid
pids = []
if "setsid" in sys.argv:
    pids.append(start(stubborn, start_new_session=True))
if "group" in sys.argv:
    pids.append(start(stubborn))
if "forgotten" in sys.argv:  # its parent is gone and its session is its own
    fork = "import os, sys, time\\nif os.fork() == 0:\\n os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", fork], stdout=subprocess.PIPE)
    pids.append(int(process.stdout.readline()))
    process.wait()
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(json.dumps({"jsonrpc": "2.0", "method": "n", "params": {"pids": pids}}), flush=True)
if "die" in sys.argv:
    os._exit(1)
sys.stdin.read()
if "deaf" in sys.argv:
    time.sleep(60)
"""

# Whoever does as told has a minute for it, and whoever does not is not waited for.
KIND = ShutdownTimes(close=60, terminate=60, kill=60)
QUICK = ShutdownTimes(close=0.2, terminate=0.3, kill=60)


def tree(*what: str, shutdown: ShutdownTimes | None = None) -> StdioServer:
    if shutdown is None:
        shutdown = QUICK if "deaf" in what else attrs.evolve(KIND, terminate=0.3)
    return StdioServer((sys.executable, "-c", TREE, *what), shutdown=shutdown)


async def descendants(channel: ChildChannel) -> list[int]:
    (arrived,) = await channel.receive()
    assert isinstance(arrived, Incoming)
    assert isinstance(arrived.message, Notification)
    assert arrived.message.params is not None
    return list(arrived.message.params["pids"])


def alive(pid: int) -> bool:
    return any(row.alive for row in _table([pid]).values())


async def until_gone(pid: int) -> None:
    with trio.fail_after(60):
        while alive(pid):  # noqa: ASYNC110 -- a process
            await trio.sleep(0.01)


async def test_who_exits_by_itself_is_not_signalled() -> None:
    async with tree().connect() as channel:
        await descendants(channel)
    assert channel.process.returncode == 0


@pytest.mark.parametrize(
    "what",
    [
        ("deaf",),
        ("setsid",),
        ("group",),
        ("deaf", "setsid", "group"),
        ("setsid", "group", "die"),
        pytest.param(
            ("forgotten",), marks=pytest.mark.skipif(sys.platform != "linux", reason="needs environ of others")
        ),
    ],
)
async def test_the_whole_family_is_gone(what: tuple[str, ...]) -> None:
    async with tree(*what).connect() as channel:
        pids = await descendants(channel)
        assert all(alive(pid) for pid in pids)
        if "die" in what:
            await channel.process.wait()
    assert channel.process.returncode == (-signal.SIGKILL if "deaf" in what else 1 if "die" in what else 0)
    assert [pid for pid in pids if alive(pid)] == []


async def test_nobody_is_waited_for_longer_than_the_patience_which_is_less_than_five_seconds(
    steady_clock: trio.abc.Clock,
) -> None:
    assert sum(attrs.astuple(ShutdownTimes())) < 5
    shutdown = ShutdownTimes(close=0.3, terminate=0.3, kill=0.5)
    async with tree("deaf", "setsid", shutdown=shutdown).connect() as channel:
        (pid,) = await descendants(channel)
        start = trio.current_time()
    assert 0.6 <= trio.current_time() - start < 2 * sum(attrs.astuple(shutdown))
    await until_gone(pid)


async def test_the_family_is_gone_when_cancelled_too() -> None:
    with trio.CancelScope() as scope:
        async with tree("deaf", "setsid", "group").connect() as channel:
            pids = await descendants(channel)
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert [pid for pid in pids if alive(pid)] == []


async def test_cancelling_cuts_the_polite_wait_short() -> None:
    with trio.CancelScope() as scope:
        async with tree("deaf", shutdown=ShutdownTimes(close=600, terminate=0.1, kill=60)).connect() as channel:
            await descendants(channel)
            scope.cancel()
            clock = Stopwatch((channel.process.pid,))
    assert clock.took() < 5


@contextmanager
def child(**options: object) -> Iterator[subprocess.Popen[bytes]]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(["cat"], bufsize=0, **pipes, **options)
    try:
        # Once it answers it runs: just after its start the system does not tell its environment yet.
        process.stdin.write(b"!")
        assert process.stdout.read(1) == b"!"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.needs("coreutils")
def test_others_are_not_descendants() -> None:
    mark = Descendants.new_mark()
    with (
        child(start_new_session=True) as ours,
        child(start_new_session=True) as sibling,
        child(start_new_session=True, env={MARK: Descendants.new_mark()}) as marked_by_another,
        child(start_new_session=True, env={MARK: mark}) as marked,
    ):
        known = {each.pid for each in Descendants(ours.pid, mark).look()}
        assert os.getpid() not in known
        assert not known & {ours.pid, sibling.pid, marked_by_another.pid}
        if sys.platform == "linux":
            assert known == {marked.pid}


@pytest.mark.needs("coreutils")
def test_an_id_given_to_somebody_else_is_not_signalled() -> None:
    with child() as process:
        row = _table([process.pid])[process.pid]
        stranger = KnownProcess(process.pid, row.known.start + "0")
        descendants = Descendants(process.pid, Descendants.new_mark())
        descendants.signal([stranger], signal.SIGKILL)
        assert process.poll() is None
        descendants.signal([row.known], signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        descendants.signal([row.known], signal.SIGKILL)  # nobody is there any more


@pytest.mark.needs("coreutils")
def test_a_session_whose_leader_changed_is_not_ours() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '60']); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    descendants = Descendants(process.pid, Descendants.new_mark())
    (known,) = descendants.look()
    impostor = Descendants(process.pid, Descendants.new_mark())
    impostor._start = "another time"
    assert impostor.look() == []
    descendants.signal([known], signal.SIGKILL)
    process.communicate(b"\n", timeout=60)


@pytest.mark.needs("coreutils", "ps")
def test_ps_tells_the_same_tree() -> None:
    with child(start_new_session=True) as process:
        (row,) = _table_from_ps([process.pid])
        assert (row.known.pid, row.parent, row.session, row.alive) == (process.pid, os.getpid(), process.pid, True)
        assert _table_from_ps([process.pid]) == [row]
        assert process.pid in [each.known.pid for each in _table_from_ps(None)]
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [each.alive for each in _table_from_ps([process.pid])] == [False]


async def test_a_survivor_is_reported(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing survives SIGKILL in a test, so the signal is held back."""
    monkeypatch.setattr(trio.Process, "kill", lambda self: None)
    deaf = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); s.sigwait([s.SIGUSR1])"
    process = await trio.lowlevel.open_process(
        [sys.executable, "-c", deaf],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    await process.stdout.receive_some()
    await end_process(process, Descendants(process.pid, "x"), lambda: None, ShutdownTimes(0, 0.1, 0.1))
    assert [record.getMessage() for record in caplog.records] == [
        f"process {process.pid} or a descendant of it survived SIGKILL"
    ]
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await process.stdout.aclose()
