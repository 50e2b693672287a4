"""`trimcp worker` and `trimcp run --tasks`: what they refuse, and how a worker ends. What they do: test_task_kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

import trimcp
from tests.store.test_task_kills import (
    COMMAND,
    EXAMPLE,
    SECONDS,
    at,
    free_port,
    leaving,
    reached,
    start,
    started,
    worker,
)
from trimcp.cli.app import app

PLAIN = "import trimcp\nserver = trimcp.Server('plain')\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["worker", "plain.py", "--store", "sqlite:///tmp/x.db"], "plain.py has no tool that runs as a task"),
        (["run", "plain.py", "--tasks", "sqlite:///tmp/x.db"], "plain.py has no tool that runs as a task"),
        (["worker", EXAMPLE], "--store says where tasks are kept that other processes leave"),
        (["worker", EXAMPLE, "--store", "jobs.db"], "a store is named by a URL"),
        (["run", EXAMPLE, "--tasks", "jobs.db"], "a store is named by a URL"),
        (["worker", EXAMPLE, "--store", "redis://:secret@[::1/0"], "a URL of Redis is not valid"),
        (["worker", EXAMPLE, "--store", "unix:///nowhere/redis.sock"], "cannot use unix:///nowhere/redis.sock"),
        (["worker", EXAMPLE, "--store", "sqlite:///nowhere/jobs.db"], "No such file or directory"),
        (["worker", EXAMPLE, "--running", "0"], "0 is not in the range"),
        (["worker", "none.py", "--store", "sqlite:///tmp/x.db"], "there is no file none.py"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plain.py").write_text(PLAIN)
    done = CliRunner().invoke(app, words, prog_name="trimcp")
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


async def test_a_worker_is_seen_in_the_live_view_and_ends_when_it_is_told(tmp_path: Path) -> None:
    url, port = f"sqlite://{tmp_path}/jobs.db", free_port()
    socket, client = tmp_path / "admin.sock", trimcp.Client("test", tasks=True)
    command = [*COMMAND, "worker", EXAMPLE, "--store", url, f"--admin={socket}", "--grace", "0"]
    async with leaving(port, url), client.connect(at(port)) as session, started(command, "carrying out") as process:
        task, _ = await start(session, 1000)
        await reached(task, 2)
        seen = await trio.run_process([*COMMAND, "top", "--json", str(socket)], capture_stdout=True)
        assert '"target": "add_up"' in json.dumps(json.loads(seen.stdout))
        process.terminate()
        with trio.fail_after(SECONDS):
            assert await process.wait() == 0
        assert (await task.state()).status == "working"
        await task.cancel()


async def test_a_server_on_standard_input_leaves_tasks_too(tmp_path: Path) -> None:
    url, client = f"sqlite://{tmp_path}/jobs.db", trimcp.Client("test", tasks=True)
    server = trimcp.stdio([*COMMAND, "run", EXAMPLE, "--tasks", url])
    with trio.fail_after(SECONDS):
        async with client.connect(server) as session, worker(url):
            result = await session.call_tool("add_up", {"numbers": 3, "seconds": 0})
            assert result.structured_content == {"next": 4, "total": 6, "begun": [1]}


def test_a_worker_loads_no_transport() -> None:
    program = "import sys, trimcp.cli.serve.worker\nprint([name for name in sys.modules if 'transports.http' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "[]\n"
