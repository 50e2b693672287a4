"""What processes cost, read from a real one and its children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import pytest
import trio

from trimcp.bench.cost import Cutter, ProcessTree
from trimcp.bench.tally import Tally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")

WORK = """
import os, sys, time

def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    print("done", flush=True)

for line in sys.stdin:
    if line == "fork\\n":
        if not os.fork():
            work(0.1)
            time.sleep(60)
    else:
        work(float(line))
"""


@contextmanager
def a_worker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.communicate()


def ask(process: subprocess.Popen[str], what: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{what}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def a_cutter(*roots: Collection[int]) -> tuple[Cutter, ProcessTree]:
    tally, processes = Tally(), ProcessTree(roots)
    tally.begin(trio.current_time())
    return Cutter(tally, processes), processes


async def test_the_cost_is_what_was_worked_while_it_lasted() -> None:
    with a_worker() as process:
        ask(process, "0.05")
        cutter, _ = a_cutter([process.pid])
        ask(process, "0.1")
        cutter.cut(trio.current_time())
        ask(process, "0.1")
        cutter.cut(trio.current_time())
        ask(process, "0.05")
        cost = cutter.cost
    assert cost is not None
    assert cost.cpu_seconds == pytest.approx(0.2, abs=0.02)
    assert 1_000_000 < cost.rss <= cost.peak_rss


async def test_children_count_also_those_that_began_later() -> None:
    with a_worker() as process:
        roots: set[int] = set()
        cutter, processes = a_cutter((), roots)
        assert processes.cpu() == {}
        roots.add(process.pid)
        processes.find()
        assert list(processes.cpu()) == [process.pid]
        cutter.cut(trio.current_time())
        ask(process, "fork")
        processes.find()
        cutter.cut(trio.current_time())
        cost = cutter.cost
    assert cost is not None
    assert cost.cpu_seconds > 0.1


def a_pid_that_is_gone() -> int:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(gone.stdout)


async def test_of_nobody_nothing_is_known() -> None:
    for pids in ([], [a_pid_that_is_gone()]):
        cutter, processes = a_cutter(pids)
        cutter.cut(trio.current_time())
        assert (processes.cpu(), cutter.cost) == ({}, None)


async def test_what_a_process_cost_that_has_ended_is_kept() -> None:
    with a_worker() as process:
        cutter, _ = a_cutter([process.pid])
        ask(process, "0.1")
        cutter.cut(trio.current_time())
    cutter.cut(trio.current_time())
    assert cutter.cost is not None
    assert cutter.cost.cpu_seconds > 0.09
