"""What processes cost, read from a real one and its children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trimcp.bench.cost import ProcessTree

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


def test_the_cost_between_two_readings_is_what_was_worked_between_them() -> None:
    with a_worker() as process:
        ask(process, "0.05")
        processes = ProcessTree([[process.pid]])
        before = processes.cpu()
        ask(process, "0.2")
        after = processes.cpu()
        ask(process, "0.05")
        cost = processes.cost(before, after)
    assert cost is not None
    assert cost.cpu_seconds == pytest.approx(0.2, abs=0.02)
    assert 1_000_000 < cost.rss <= cost.peak_rss


def test_children_count_also_those_that_began_later() -> None:
    with a_worker() as process:
        roots: set[int] = set()
        processes = ProcessTree([(), roots])
        assert processes.cpu() == {}
        roots.add(process.pid)
        processes.find()
        before = processes.cpu()
        assert list(before) == [process.pid]
        ask(process, "fork")
        after = processes.cpu()
        processes.find()
        cost = processes.cost(before, after)
    assert cost is not None
    assert cost.cpu_seconds > 0.1


def test_of_nobody_nothing_is_known() -> None:
    assert ProcessTree([[]]).cost({}, {}) is None
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    processes = ProcessTree([[int(gone.stdout)]])
    assert (processes.cpu(), processes.cost({}, {})) == ({}, None)
