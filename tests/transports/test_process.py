"""The shutdown ladder reaches the whole family within its time, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from trimcp.channel import Incoming
from trimcp.transports.child import ChildChannel, StdioServer
from trimcp.transports.family import MARK, Family, Kin, _table, _table_from_ps
from trimcp.transports.process import Patience, end_process
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

QUICK = Patience(close=0.2, terminate=0.3, kill=2)


def tree(*what: str, patience: Patience = QUICK) -> StdioServer:
    return StdioServer((sys.executable, "-c", TREE, *what), patience=patience)


async def descendants(channel: ChildChannel) -> list[int]:
    (arrived,) = await channel.receive()
    assert isinstance(arrived, Incoming)
    assert isinstance(arrived.message, Notification)
    assert arrived.message.params is not None
    return list(arrived.message.params["pids"])


def alive(pid: int) -> bool:
    return any(row.alive for row in _table([pid]))


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


@pytest.mark.slow
async def test_the_default_patience_ends_within_five_seconds() -> None:
    async with tree("deaf", "setsid", patience=Patience()).connect() as channel:
        (pid,) = await descendants(channel)
        start = time.monotonic()
    assert time.monotonic() - start < 5
    assert not alive(pid)


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
        async with tree("deaf", patience=Patience(close=30, terminate=0.1)).connect() as channel:
            await descendants(channel)
            scope.cancel()
            start = time.monotonic()
    assert time.monotonic() - start < 5


@contextmanager
def child(**options: object) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_others_are_not_family() -> None:
    mark = Family.new_mark()
    with (
        child(start_new_session=True) as ours,
        child(start_new_session=True) as sibling,
        child(start_new_session=True, env={MARK: Family.new_mark()}) as marked_by_another,
        child(start_new_session=True, env={MARK: mark}) as marked,
    ):
        kin = {each.pid for each in Family(ours.pid, mark).look()}
        assert os.getpid() not in kin
        assert not kin & {ours.pid, sibling.pid, marked_by_another.pid}
        if sys.platform == "linux":
            assert kin == {marked.pid}


def test_an_id_given_to_somebody_else_is_not_signalled() -> None:
    with child() as process:
        (row,) = _table([process.pid])
        stranger = Kin(process.pid, row.kin.start + "0")
        family = Family(process.pid, Family.new_mark())
        family.signal([stranger], signal.SIGKILL)
        assert process.poll() is None
        family.signal([row.kin], signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        family.signal([row.kin], signal.SIGKILL)  # nobody is there any more


def test_a_session_whose_leader_changed_is_not_ours() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '60']); print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    family = Family(process.pid, Family.new_mark())
    (kin,) = family.look()
    impostor = Family(process.pid, Family.new_mark())
    impostor._start = "another time"
    assert impostor.look() == []
    family.signal([kin], signal.SIGKILL)
    process.communicate(b"\n", timeout=10)


def test_ps_tells_the_same_tree() -> None:
    if not Path("/bin/ps").exists():
        pytest.skip("no ps here")
    with child(start_new_session=True) as process:
        (row,) = _table_from_ps([process.pid])
        assert (row.kin.pid, row.parent, row.session, row.alive) == (process.pid, os.getpid(), process.pid, True)
        assert _table_from_ps([process.pid]) == [row]
        assert process.pid in [each.kin.pid for each in _table_from_ps(None)]
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
    await end_process(process, Family(process.pid, "x"), lambda: None, Patience(0, 0.1, 0.1))
    assert [record.getMessage() for record in caplog.records] == [
        f"process {process.pid} or a descendant of it survived SIGKILL"
    ]
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await process.stdout.aclose()
