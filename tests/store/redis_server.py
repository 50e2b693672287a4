"""A Redis of a test's own, on a Unix socket in a temporary folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

SECONDS = 30.0


async def until(condition: Callable[[], object]) -> None:
    """Wait for what a server or another process brings about."""
    with trio.fail_after(SECONDS):
        while not condition():  # noqa: ASYNC110  # of other processes there are no events
            await trio.sleep(0.001)


class RedisServer:
    """A redis-server that may be killed and started again over the same files."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.path = str(folder / "s")
        self.url = f"unix://{self.path}"
        self.settings = settings
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        command = ["redis-server", "--port", "0", "--unixsocket", self.path, "--dir", str(self.folder), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "no", *self.settings]  # killed, it loses nothing
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + SECONDS
        while not self._answers():
            assert time.monotonic() < end
            assert self.process.poll() is None, "it did not start"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            return self.say("PING") == b"+PONG\r\n"
        except OSError:
            return False

    def say(self, line: str) -> bytes:
        """Send one command beside all that is tested, and return the first of its reply."""
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(SECONDS)
            one.connect(self.path)
            one.sendall(line.encode() + b"\r\n")
            return one.recv(65_536)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it do nothing while the block runs."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)


@contextmanager
def redis_server(*settings: str) -> Iterator[RedisServer]:
    # Not below pytest's folder, since the path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="trimcp") as folder:
        server = RedisServer(Path(folder), *settings)
        try:
            server.start()
            yield server
        finally:
            if server.process is not None:
                server.kill()
