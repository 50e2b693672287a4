"""A Redis of a test's own, on a Unix socket in a temporary folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
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

    def say_all(self, *lines: str) -> bytes:
        """Send several commands on one connection, and return the replies that came with the last."""
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(SECONDS)
            one.connect(self.path)
            said = b""
            for line in lines:
                one.sendall(line.encode() + b"\r\n")
                said += one.recv(65_536)
            return said

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


@asynccontextmanager
async def relayed(server: RedisServer, script: bytes) -> AsyncIterator[tuple[str, list[bool], list[bytes]]]:
    """Another socket of a server; for each item of the list the answer to a script with these bytes is lost.

    The connection ends instead. The second list has what was asked.
    """
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    await listening.bind(f"{server.folder}/r")
    listening.listen()
    drops: list[bool] = []
    asked: list[bytes] = []

    async def serve(client: trio.SocketStream) -> None:
        async with client, await trio.open_unix_socket(server.path) as stream, trio.open_nursery() as nursery:
            latest = b""

            async def forward() -> None:
                nonlocal latest
                async for data in client:
                    latest = bytes(data)
                    asked.append(latest)
                    await stream.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward)
            async for data in stream:
                if drops and b"EVALSHA" in latest and script in latest:
                    drops.pop()
                    break
                await client.send_all(data)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listening)])
        yield f"unix://{server.folder}/r", drops, asked
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def slowed(server: RedisServer, seconds: float) -> AsyncIterator[str]:
    """Another socket of a server, whose answers come later."""
    listening = trio.socket.socket(trio.socket.AF_UNIX)
    await listening.bind(f"{server.folder}/r")
    listening.listen()

    async def later(client: trio.SocketStream, data: bytes, before: trio.Event, after: trio.Event) -> None:
        await trio.sleep(seconds)
        await before.wait()
        await client.send_all(data)
        after.set()

    async def serve(client: trio.SocketStream) -> None:
        async with client, await trio.open_unix_socket(server.path) as stream, trio.open_nursery() as nursery:

            async def forward() -> None:
                async for data in client:
                    await stream.send_all(data)
                nursery.cancel_scope.cancel()

            nursery.start_soon(forward)
            before = trio.Event()
            before.set()
            async for data in stream:
                after = trio.Event()
                nursery.start_soon(later, client, bytes(data), before, after)
                before = after
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listening)])
        yield f"unix://{server.folder}/r"
        nursery.cancel_scope.cancel()
