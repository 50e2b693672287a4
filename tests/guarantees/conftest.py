"""Every promise is held against servers everywhere, and their figures stand at the end of a run, green or not."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from tests.guarantees import report
from tests.guarantees.harm import harmful_server
from tests.guarantees.worlds import PROGRAM, Homes, Journal
from tests.peers.servers import ServerPool

if sys.platform != "linux":  # memory is read from /proc
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def pythons_own_collector() -> Iterator[None]:
    """Have the collector look as often as it does where people use this: what memory is kept depends on that."""
    others = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*others)


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    """Servers in every world."""
    journal = Journal(tmp_path_factory.mktemp("promises") / "journal")
    pool = ServerPool(PROGRAM, {"serve": "network", "journal": str(journal.path)})
    yield Homes(pool, journal)
    pool.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerPool]:
    """Servers in processes of their own on the network, shared by the tests that leave them as they were."""
    pool = ServerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """Where a server is that means harm."""
    with harmful_server() as port:
        yield port


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print every figure that was measured."""
    if report.figures:
        terminalreporter.section("what the promises came to")
        for line in report.table():
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the figures for the docs; one process of several hands its own to the first."""
    if (handed := getattr(session.config, "workeroutput", None)) is not None:
        handed["figures"] = [attrs.asdict(each) for each in report.figures]
    else:
        report.write()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the figures of a process that has ended."""
    report.figures += [report.Figure(**each) for each in getattr(node, "workeroutput", {}).get("figures", ())]
