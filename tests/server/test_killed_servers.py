"""A server that is killed while it carries out tasks: real processes, and a file."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import trio

import trimcp

EXAMPLE = Path(__file__).parents[2] / "examples" / "long_job.py"


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port


@asynccontextmanager
async def serving(port: int, path: Path) -> AsyncIterator[tuple[str, trio.Process]]:
    command = [sys.executable, str(EXAMPLE), "serve", str(port), str(path)]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with trio.fail_after(60):
            said = b""
            while not said.endswith(b"\n"):
                said += await process.stdout.receive_some()
        yield said.decode().split()[2], process
    finally:
        if process.poll() is None:
            process.kill()
        await process.wait()


async def test_a_long_job_goes_on_where_it_was_and_ends_once(tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "jobs.db"
    client = trimcp.Client("test", tasks=True)
    async with serving(port, path) as (url, first), client.connect(url) as session:
        task = await session.start_task("add_up", {"numbers": 30, "seconds": 0.05})
        assert task.id is not None
        with trio.fail_after(60):
            while ((await task.state()).progress or {"progress": 0})["progress"] < 5:
                await trio.lowlevel.checkpoint()
        first.send_signal(signal.SIGKILL)
        await first.wait()
        async with trio.open_nursery() as nursery:
            waited: list[trimcp.CallToolResult] = []

            async def wait() -> None:
                waited.append(await task.result())  # while nobody serves, and then somebody else

            nursery.start_soon(wait)
            async with serving(port, path) as (again, _):
                assert again == url
                with trio.fail_after(60):
                    async with client.connect(url) as other:
                        result = await other.task(task.id).result()
                        assert (await other.task(task.id).state()).status == "completed"
                while not waited:
                    await trio.lowlevel.checkpoint()
    done = result.structured_content
    assert isinstance(done, dict)
    assert waited[0].structured_content == done
    assert done["total"] == sum(range(31))  # each number once
    assert done["begun"][0] == 1
    assert len(done["begun"]) == 2
    assert 5 <= done["begun"][1] <= 30
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT ended, result FROM tasks").fetchall()
    assert [(ended, json.loads(kept)["structuredContent"]) for ended, kept in rows] == [(1, done)]


async def test_another_process_on_the_same_file_takes_a_job_over(tmp_path: Path) -> None:
    path, client = tmp_path / "jobs.db", trimcp.Client("test", tasks=True)
    async with (
        serving(free_port(), path) as (one, first),
        serving(free_port(), path) as (other, _),
        client.connect(one) as session,
        client.connect(other) as elsewhere,
    ):
        task = await session.start_task("add_up", {"numbers": 10, "seconds": 0.05})
        done = await session.start_task("add_up", {"numbers": 1, "seconds": 0})
        result = await done.result()
        assert task.id is not None
        assert done.id is not None
        same = elsewhere.task(done.id)
        assert (await same.result()).structured_content == result.structured_content  # whoever computed it
        with trio.fail_after(60):
            while ((await task.state()).progress or {"progress": 0})["progress"] < 2:
                await trio.lowlevel.checkpoint()
        assert (await elsewhere.task(task.id).state()).status == "working"
        first.send_signal(signal.SIGKILL)
        await first.wait()
        with trio.fail_after(60):
            taken = (await elsewhere.task(task.id).result()).structured_content
    assert isinstance(taken, dict)
    assert taken["total"] == sum(range(11))
    assert len(taken["begun"]) == 2
