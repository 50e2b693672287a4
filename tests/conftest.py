"""What every test has for itself although others stand in the same process, and which tests run beside each other."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from tests.programs import require, unknown
from trimcp import security

# An example has no 200 ms of a clock, nor those before the test a second: on a busy machine they would be over.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Whom a client trusts who names nobody, here and in what tests start: one authority, that has signed nothing. To read
# all those of a system again for each client would take longer than most tests do.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "peers" / "nobody.pem")

ALONE: Final = os.environ.get("TRIMCP_ALONE", "")
"""Which tests `nox` asks for: "no" without those marked `alone`, "only" just those, and "" (a plain `pytest`) all."""

NOTES: Final = os.environ.get("TRIMCP_NOTES", "")
"""The folder in which `nox` finds what became of its runs.

"ran" is there if one of them had tests, "alone" has the number of those that the first left to the second, and
"left-out" the number of tests for each reason why they were, one JSON array in a line.
"""


@pytest.fixture(autouse=True)
def _fresh_security_events() -> None:
    """What earlier tests left out of the log is told in no later one's, a minute after."""
    security._bounds.end_all()


@pytest.fixture
def children_hear_sigint() -> Iterator[None]:
    """A shell that runs us in its background has us and all our children ignore it; a handler is not inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a requirement that nothing would ever ask for, and let Ctrl-C reach what tests start.

    A shell has commands that end with "&" ignore it, and so do all programs that these start.
    """
    if said := unknown():
        raise pytest.UsageError(said)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not even import the files without a test that runs alone, where only those are wanted."""
    if ALONE == "only" and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text("utf-8") or None
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out tests that need a program which is not here."""
    for marker in item.iter_markers("needs"):
        require(*marker.args)


class _Turned(pytest.Dir):
    """A folder of which each process of xdist reads the files from another place on."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        worker = self.config.workerinput  # type: ignore[attr-defined]  # of xdist
        begin = len(found) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        return found[begin:] + found[:begin]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Have processes of xdist share the first reading: each else rewrites every file that the others do meanwhile."""
    return _Turned.from_parent(parent, path=path) if hasattr(parent.config, "workerinput") else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Leave out those of the other run, of those that -k, -m and names have left."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.parts)  # all these processes have to find the same
    yield
    if ALONE:
        wanted, left_out = [], []
        for item in items:
            alone = item.get_closest_marker("alone") is not None
            (wanted if alone is (ALONE == "only") else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = wanted
        if NOTES and ALONE == "no" and left_out:
            Path(NOTES, "alone").write_text(str(len(left_out)))  # every process of xdist writes the same


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector look through nothing but what tests make, neither while they are collected nor afterwards.

    And not after every 700 objects, as Python has it: that were a seventh of the time that all tests take.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()  # two million objects, in each collection of each test
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note that there were tests."""
    if NOTES and exitstatus != pytest.ExitCode.NO_TESTS_COLLECTED and not hasattr(session.config, "workerinput"):
        Path(NOTES, "ran").touch()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Note which tests were left out and why, and tell how many are still to come."""
    if not NOTES or hasattr(terminalreporter.config, "workerinput"):
        return
    alone = Path(NOTES, "alone")
    stats = terminalreporter.stats
    if ALONE == "no" and "deselected" not in stats and alone.exists():
        stats["deselected"] = [SimpleNamespace()] * int(alone.read_text())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in stats.get("skipped", ()))
    with Path(NOTES, "left-out").open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in reasons.items())


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, Any]:
    """Escape lone surrogates, which a process of xdist cannot send: it would end with the test that reports them."""
    return _escaped((yield))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(name): _escaped(each) for name, each in value.items()}
    return type(value)(map(_escaped, value)) if isinstance(value, list | tuple) else value


class _Indexed(list[str]):
    """A list of names, for whoever asks for the place of each of 15,000."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._places = {name: place for place, name in enumerate(names)}

    def index(self, value: str, *_: Any) -> int:  # type: ignore[override]  # nobody looks in a part of it
        return self._places[value]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file together, for what they share, but where each takes its time and has all to itself, or
    shares with all of its process.

    The largest files come first, and those single tests last, mixed: in their order, all that wait for a clock would do
    so beside each other, while no process has anything to do; and nobody waits for whoever has the last file.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.startswith(("tests/interaction/", "tests/guarantees/")) else file

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            self.registered_collections[node] = _Indexed(collection)

        def schedule(self) -> None:
            begun = self.collection is not None
            super().schedule()
            if not begun:
                files, single = ([each for each in self.workqueue if ("::" in each) is one] for one in (False, True))
                for scope in (*files, *sorted(single, key=lambda nodeid: crc32(nodeid.encode()))):
                    self.workqueue.move_to_end(scope)

    return ByFile(config, log)
