"""The pytest plugin finds what is planted and says where it was made; it is silent where all is well or nobody asks."""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pkgutil
import socket
import subprocess
import sys
import textwrap
import threading
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from trimcp.session.session import Session
from trimcp.testing.leaks import KINDS, LeakWatch

pytest_plugins = ["pytester"]

CONFTEST = """
import os, subprocess, threading
kept = []

def pytest_sessionfinish():
    for each in kept:
        if isinstance(each, threading.Event):
            each.set()
        elif isinstance(each, int):
            os.close(each)
        elif isinstance(each, subprocess.Popen):
            each.communicate()
        elif not hasattr(each, "aclose"):
            each.close()
"""
HEAD = """
import os, socket, subprocess, sys, threading, time
import pytest, trio, trimcp
from conftest import kept
from trimcp.testing import connected
"""
LEAKS = {
    "socket": """
        def test_it():
            kept.append(socket.create_server(("127.0.0.1", 0)))  # here
        """,
    "descriptor": """
        def test_it(tmp_path):
            kept.append(open(tmp_path / "file", "w"))  # here
        """,
    "thread": """
        def test_it():
            event = threading.Event()
            kept.append(event)
            threading.Thread(target=event.wait, daemon=True, name="planted").start()  # here
        """,
    "process": """
        def test_it():
            kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))  # here
        """,
    "task": """
        async def test_it(nursery):
            nursery.start_soon(trio.sleep_forever)  # here
        """,
    "session": """
        async def test_it(nursery):
            ours, theirs = trimcp.memory_channels()
            kept.append(theirs)
            nursery.start_soon(trimcp.Server("planted").serve, ours)  # here
            await trio.testing.wait_all_tasks_blocked()
        """,
}
OTHER_WAYS = {
    "thread of Trio's cache": """
        async def test_it():
            begun, event = threading.Event(), threading.Event()
            kept.append(event)

            def work():
                begun.set()
                event.wait()

            async def call():
                await trio.to_thread.run_sync(work, abandon_on_cancel=True)  # here

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await trio.testing.wait_all_tasks_blocked()
                assert begun.wait(10)
                nursery.cancel_scope.cancel()
        """,
    "system task": """
        async def test_it():
            trio.lowlevel.spawn_system_task(trio.sleep_forever)  # here
        """,
    "task of a run in a sync test": """
        def test_it():
            async def main():
                trio.lowlevel.spawn_system_task(trio.sleep_forever)  # here
            trio.run(main)
        """,
    "descriptor opened by a helper": """
        def open_it():
            kept.append(os.open("/dev/null", os.O_RDONLY))  # here

        def test_it():
            open_it()
        """,
    "child nobody waited for": """
        def test_it():
            process = subprocess.Popen([sys.executable, "-c", ""])  # here
            kept.append(process)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        """,
    "socket made by a task": """
        async def serve():
            kept.append(socket.socket())  # here

        async def test_it():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve)
        """,
    "client session": """
        async def use(target):
            async with trimcp.Client("planted").connect(target):  # here
                await trio.sleep_forever()

        async def test_it(nursery):
            nursery.start_soon(use, trimcp.in_process(trimcp.Server("s")))
            await trio.testing.wait_all_tasks_blocked()
        """,
    "socket in a test whose fixture ends later": """
        @pytest.fixture
        def something():
            yield

        def test_it(something):
            kept.append(socket.socket())  # here
        """,
}
QUIET = {
    "closed by a fixture": """
        @pytest.fixture
        def sockets():
            made = []
            yield made
            for each in made:
                each.close()

        def test_it(sockets):
            sockets.append(socket.socket())
        """,
    "of a module": """
        @pytest.fixture(scope="module")
        def server():
            with socket.create_server(("127.0.0.1", 0)) as made:
                yield made

        def test_it(server):
            pass
        """,
    "closed with the garbage": """
        class Owner:
            def __init__(self):
                self.itself = self
                self.number = os.open("/dev/null", os.O_RDONLY)

            def __del__(self):
                os.close(self.number)

        def test_it():
            Owner()
        """,
    "threads that are idle or ending": """
        async def test_it():
            await trio.to_thread.run_sync(time.sleep, 0.001)
            threading.Thread(target=time.sleep, args=(0.05,)).start()
        """,
    "tasks that are ending": """
        async def test_it(nursery):
            event = trio.Event()
            nursery.start_soon(event.wait)
            event.set()
        """,
    "whole conversations": """
        server = trimcp.Server("s")

        @server.tool
        def add(a: int, b: int) -> int:
            return a + b

        @pytest.fixture
        async def session():
            async with connected(server) as session:
                yield session

        async def test_it(session, nursery):
            assert (await session.call_tool("add", {"a": 1, "b": 2})).structured_content == {"result": 3}

        async def test_child():
            program = "import trimcp; trimcp.run_stdio(trimcp.Server('s'))"
            async with trimcp.Client("c").connect(trimcp.stdio(sys.executable, "-c", program)) as session:
                await session.list_tools()
        """,
}


# A pytest inside this one forgets in the end what it was first to import, and a second copy of our modules would not
# know the classes of the first.
for module in pkgutil.walk_packages(trimcp.__path__, "trimcp."):
    if not module.name.startswith(("trimcp.bench", "trimcp.cli")):
        importlib.import_module(module.name)


def run(pytester: pytest.Pytester, source: str, *, mark: bool = True, **ini: str) -> pytest.RunResult:
    """Run a test module in a pytest of its own."""
    pytester.makeini(
        "[pytest]\n" + "".join(f"{name} = {value}\n" for name, value in {"trio_mode": "true", **ini}.items())
    )
    pytester.makeconftest(CONFTEST)
    asked = "pytestmark = pytest.mark.trimcp_leaks\n" if mark else ""
    pytester.makepyfile(test_planted=HEAD + asked + textwrap.dedent(source))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


@pytest.mark.parametrize("kind", LEAKS)
def test_what_is_left_behind_fails_the_test_and_is_named_with_its_place(pytester: pytest.Pytester, kind: str) -> None:
    result = run(pytester, LEAKS[kind])
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"  {kind} '*", "    made at test_planted.py:* in *# here"])


def test_every_kind_is_planted() -> None:
    assert tuple(sorted(LEAKS)) == tuple(sorted(KINDS))


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_it_is_found_however_it_was_made(pytester: pytest.Pytester, way: str) -> None:
    result = run(pytester, OTHER_WAYS[way])
    outcomes = result.parseoutcomes()
    assert outcomes in ({"failed": 1}, {"passed": 1, "errors": 1})
    assert ("errors" in outcomes) == ("fixture" in way)
    result.stdout.fnmatch_lines(["the test left * behind:", "    made at test_planted.py:* in *# here"])


def test_a_line_of_a_helper_is_told_with_its_caller(pytester: pytest.Pytester) -> None:
    result = run(pytester, OTHER_WAYS["descriptor opened by a helper"])
    result.stdout.fnmatch_lines(["    made at * in open_it: *", "       from * in test_it: open_it()"])


@pytest.mark.parametrize("way", QUIET)
def test_it_is_silent_where_all_is_well(pytester: pytest.Pytester, way: str) -> None:
    result = run(pytester, QUIET[way])
    assert set(result.parseoutcomes()) == {"passed"}


@pytest.mark.parametrize("kind", LEAKS)
def test_nothing_is_found_where_nobody_asked(pytester: pytest.Pytester, kind: str) -> None:
    run(pytester, LEAKS[kind], mark=False).assert_outcomes(passed=1)


def test_a_project_can_ask_for_all_its_tests_and_allow_some_of_it(pytester: pytest.Pytester) -> None:
    both = LEAKS["thread"] + LEAKS["socket"].replace("test_it", "test_other")
    run(pytester, both, mark=False, trimcp_leaks="true").assert_outcomes(failed=2)
    run(pytester, both, mark=False, trimcp_leaks="true", trimcp_leaks_allow="thread").assert_outcomes(
        passed=1, failed=1
    )
    run(pytester, both, mark=False, trimcp_leaks="true", trimcp_leaks_allow="thread:plan*\n  127.*").assert_outcomes(
        passed=2
    )


def test_a_test_can_allow_something_or_opt_out(pytester: pytest.Pytester) -> None:
    planted = textwrap.dedent(LEAKS["thread"])
    for marker, outcome in (
        ('allow=["thread:plan*"]', "passed"),
        ('allow="planted"', "passed"),
        ("watch=False", "passed"),
        ('allow=["socket", "thread:other"]', "failed"),
    ):
        source = f"@pytest.mark.trimcp_leaks({marker})\n" + planted.strip()
        assert run(pytester, source, mark=False, trimcp_leaks="true").parseoutcomes() == {outcome: 1}, marker


def test_a_test_that_failed_is_not_blamed_twice(pytester: pytest.Pytester) -> None:
    run(pytester, LEAKS["socket"].replace("# here", "; assert False")).assert_outcomes(failed=1)
    result = run(pytester, OTHER_WAYS["socket in a test whose fixture ends later"].replace("# here", "; assert False"))
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*left * behind*")


def test_the_fixture_tells_what_is_there_now(pytester: pytest.Pytester) -> None:
    source = """
        def test_it(trimcp_leaks):
            read, write = os.pipe()
            assert [leak.kind for leak in trimcp_leaks.found()] == ["descriptor"] * 2
            os.close(read)
            trimcp_leaks.allow("pipe:*", "descriptor:pipe:*")
            assert trimcp_leaks.found() == []
            kept.append(write)
    """
    run(pytester, source, mark=False).assert_outcomes(passed=1)


def test_hypothesis_tests_are_watched_too(pytester: pytest.Pytester) -> None:
    source = """
        from hypothesis import given, settings, strategies

        @settings(max_examples=3, deadline=None, database=None)
        @given(strategies.integers())
        async def test_it(number):
            trio.lowlevel.spawn_system_task(trio.sleep_forever)  # here
    """
    result = run(pytester, source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the test left * behind:"])


# The hooks


def hooked() -> list[object]:
    names = ("open", "pipe", "dup", "fork", "posix_spawn")
    functions: list[object] = [getattr(os, name) for name in names]
    functions += [builtins.open, io.open, socket.socket.__init__, subprocess.Popen.__init__, threading.Thread.start]
    cache, runs = trio._core._thread_cache.ThreadCache, trio._core._run
    functions += [Session.__attrs_post_init__, cache.start_thread_soon, runs.setup_runner, set(os.supports_dir_fd)]
    return functions


def test_every_hook_is_put_back() -> None:
    before = hooked()
    watch = LeakWatch()
    watch.begin()
    during = hooked()
    watch.end()
    assert not [mine for mine, theirs in zip(during, before, strict=True) if mine == theirs]
    assert hooked() == before


def test_a_hook_of_somebody_else_on_top_of_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.open
    watch = LeakWatch()
    watch.begin()
    ours = os.open

    def theirs(*args: Any) -> int:
        return ours(*args)

    monkeypatch.setattr(os, "open", theirs)
    watch.end()
    assert os.open is theirs
    os.close(os.open(os.devnull, os.O_RDONLY))
    os.open = before


def test_a_hooked_function_becomes_no_method() -> None:
    watch = LeakWatch()
    watch.begin()
    try:

        class Opener:
            open = open

        with Opener().open(os.devnull) as file:
            assert file.read() == ""
    finally:
        watch.end()


# What it costs who does not ask


def test_it_loads_nothing_until_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    loaded = {name for name in sys.modules if name.split('.')[0] in ('trimcp', 'trio', 'attr', 'orjson')}\n"
        "    support = {'trimcp.support', 'trimcp.support.lazy'}\n"
        "    assert loaded == {'trimcp', *support, 'trimcp.testing', 'trimcp.testing.plugin'}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "trimcp.testing.plugin", "test_it.py"]
    root = str(Path(trimcp.__file__).parent.parent)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": root}
    environment.pop("PYTEST_PLUGINS", None)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_pytest_finds_it_by_itself(pytestconfig: pytest.Config) -> None:
    [entry] = distribution("trimcp").entry_points.select(group="pytest11")
    assert entry.value == "trimcp.testing.plugin"
    assert pytestconfig.pluginmanager.has_plugin(entry.name)
