"""Python functions in a sandbox: each call in a worker process of its own, which reaches nothing."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import trimcp
from tests.workers import sandboxed_tools as tools
from tests.workers.test_bubblewrap import names
from tests.workers.test_commands import _running
from tests.workers.test_pool import counted, until
from trimcp.testing import connected

pytestmark = [pytest.mark.slow, pytest.mark.needs("bwrap", "coreutils")]


def offering(*functions: Callable[..., object], **options: Any) -> trimcp.Server:
    server = trimcp.Server("s")
    for function in functions:
        server.add_tool(function, **{"isolation": "bwrap", **options})
    return server


async def test_nothing_is_written_and_nobody_connected_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        arguments = {"path": str(file), "port": listener.getsockname()[1]}
        for options, said in (
            ({"read": [tmp_path]}, ["EROFS", "ECONNREFUSED"]),
            ({"write": [tmp_path]}, ["done", "ECONNREFUSED"]),
            ({"isolation": "process"}, ["done", "done"]),
        ):
            async with connected(offering(tools.attempt, **options)) as session:
                result = await session.call_tool("attempt", arguments)
                assert result.structured_content == {"result": said}, result.text
            assert names(tmp_path) == (["file"] if said[0] == "done" else [])
            file.unlink(missing_ok=True)


async def test_the_environment_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    async with connected(offering(tools.environment)) as session:
        environment = (await session.call_tool("environment")).structured_content
        assert environment["HOME"] == "/tmp"
        assert "API_TOKEN" not in environment


async def test_nothing_of_a_call_is_left_to_the_next() -> None:
    server = offering(tools.count)
    async with connected(server) as session:
        for _ in range(2):
            assert (await session.call_tool("count")).structured_content == {"result": [1, 1]}
        await until(lambda: counted(server).alive == 0)
        statistics = counted(server)
        assert (statistics.started, statistics.killed, statistics.crashed, statistics.busy) == (2, 0, 0, 0)


async def test_the_context_and_errors_come_out() -> None:
    async with connected(offering(tools.report)) as session, session.calling("report") as call:
        steps = [step.message async for step in call.progress]
        result = await call.result()
    assert (steps, result.is_error, result.text) == (["half"], True, "said in a sandbox")


async def test_how_it_ended_is_told() -> None:
    async with connected(offering(tools.crash, tools.take, memory=2**29)) as session:
        assert (await session.call_tool("crash")).text == "crash failed: its process was ended by SIGABRT"
        result = await session.call_tool("take", {"size": 2**30})
        assert result.text == "take failed: its process needed more than 512 MiB of memory"


async def test_cancelling_leaves_no_process() -> None:
    mark = f"604.{os.getpid()}"
    server = offering(tools.flee)
    async with connected(server) as session:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.call_tool, "flee", {"mark": mark})
            await until(lambda: len(_running(mark)) == 2)
            nursery.cancel_scope.cancel()
        await until(lambda: counted(server).alive == 0)
        assert _running(mark) == []
        assert counted(server).killed == 1


async def test_a_command_of_a_module_that_a_worker_loaded_keeps_its_sandbox() -> None:
    """It is not looked for while the worker loads the module, but when it is called."""
    async with connected(offering(tools.listing, isolation="process")) as session:
        result = await session.call_tool("listing")
    assert "usr" in result.text.split()
    assert not {"home", "var", "run"} & {*result.text.split()}


async def test_isolation_process_is_run_process() -> None:
    server = offering(tools.pid, isolation="process")
    async with connected(server) as session:
        pids = {(await session.call_tool("pid")).text for _ in range(2)}
        assert len(pids) == 1
        assert pids != {str(os.getpid())}


async def test_in_virtual_time_it_does_not_run_without_its_sandbox(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    tools.calls = 0
    async with connected(offering(tools.count)) as session:
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("count")
    assert "needs its sandbox" in caplog.text
    assert tools.calls == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"isolation": "command"}, r"'process' or 'bwrap', not 'command'; a program is added by server.add_command"),
        ({"isolation": "docker"}, "'process' or 'bwrap', not 'docker'"),
        ({"run": "thread"}, "isolation='bwrap' runs it in a process; drop run='thread'"),
        ({"isolation": "process", "read": ["/srv"]}, 'add isolation="bwrap"'),
        ({"isolation": None, "write": ["/srv"]}, 'add isolation="bwrap"'),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        offering(tools.pid, **options)


def test_only_what_a_worker_finds(tmp_path: Path) -> None:
    async def wait() -> None:
        """An async function has no process of its own."""

    def within() -> None:
        """Nor has one that only this test can find."""

    with pytest.raises(TypeError, match="is for sync functions"):
        offering(wait)
    with pytest.raises(TypeError, match="at the top level of a module"):
        offering(within)
    with pytest.raises(ValueError, match="read names absolute paths that exist"):
        offering(tools.pid, read=[tmp_path / "gone"])


def test_without_bubblewrap_a_tool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **options: None if name == "bwrap" else which(name, **options))
    with pytest.raises(trimcp.LocalError, match='install the package "bubblewrap"'):
        offering(tools.pid)
