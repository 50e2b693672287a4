"""Others' clients go on with their sessions while all the processes that serve them are killed between their calls."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from mcp import Client

from tests.interop.peers import HERE, NODE, SLOWEST
from trimcp.support.descendants import parent_of, with_descendants

SERVER = Path(HERE.parent, "replicas", "server.py")
CALLS = 3

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")]
Eras = pytest.mark.parametrize("era", ["legacy", "modern"])


class Workers:
    """Three workers of one command, which share an SQLite file."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def pids(self) -> list[int]:
        parent = self.process.pid
        return [pid for pid in with_descendants([parent]) if parent_of(pid) == parent]

    def kill_all(self) -> None:
        """Kill each, and wait until as many others serve."""
        for _ in range(3):
            before = self.log.read_bytes().count(b"was ended by SIGKILL")
            killed = self.pids()[0]
            os.kill(killed, signal.SIGKILL)
            self._until(lambda: self.log.read_bytes().count(b"was ended by SIGKILL") > before)  # noqa: B023
            self._until(lambda: len([pid for pid in self.pids() if pid != killed]) == 3)  # noqa: B023

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SLOWEST
        while not condition():
            assert time.monotonic() < end, self.log.read_text("utf-8")
            time.sleep(0.02)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "trimcp.cli", "run", f"{SERVER}:server", "--http", "--port", "0", "--workers", "3"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, cwd=HERE.parents[1])
    try:
        end = time.monotonic() + SLOWEST
        while b"/mcp" not in log.read_bytes():
            assert time.monotonic() < end, log.read_text("utf-8")
            assert process.poll() is None, log.read_text("utf-8")
            time.sleep(0.02)
        [line] = [line for line in log.read_text("utf-8").splitlines() if "/mcp" in line]
        yield Workers(process, line.split()[2], log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(SLOWEST)
        finally:
            process.kill()
            process.wait()


@Eras
def test_the_official_python_client_notices_nothing(workers: Workers, era: str) -> None:
    async def main() -> None:
        with anyio.fail_after(3 * SLOWEST):
            async with Client(workers.url, mode="legacy" if era == "legacy" else "auto") as client:
                for _ in range(CALLS):
                    result = await client.call_tool("count", {"to": 3, "pause": 0.01})
                    assert not result.is_error
                    assert result.content[0].text == "counted to 3"  # type: ignore[union-attr]
                    await anyio.to_thread.run_sync(workers.kill_all)

    anyio.run(main)


@Eras
def test_the_typescript_client_notices_nothing(workers: Workers, era: str) -> None:
    with node_client(workers.url, era) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == b"connected\n"
        for _ in range(CALLS):
            client.stdin.write(b"\n")
            client.stdin.flush()
            assert client.stdout.readline() == b"counted to 3\n"
            workers.kill_all()
        client.stdin.close()
        assert client.wait(SLOWEST) == 0


@contextmanager
def node_client(url: str, era: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(NODE), str(HERE / "node_between_kills.mjs"), era, url]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield client
    finally:
        client.kill()
        client.wait()
        for stream in (client.stdin, client.stdout):
            if stream is not None:
                stream.close()
