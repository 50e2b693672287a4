"""Three processes that serve as one, what is before them and behind them, and what can be done to them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import attrs
import httpx2
import trio

from tests.cli.test_serving import serving
from tests.store.redis_server import RedisServer, redis_server
from trimcp.support.descendants import parent_of, with_descendants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVER = str(HERE / "server.py")
LEASE = 4.0
"""Seconds after which a process that says nothing is taken for dead; half of what is usual, so that tests are short."""

GRACE = 5.0
PATIENCE = 60.0

NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream replicas {{
        {servers}
        keepalive 16;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://replicas;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_buffering off;
            proxy_read_timeout 1h;
            proxy_next_upstream error timeout;
        }}
    }}
}}
"""


class Site(Protocol):
    """Several processes that serve as one."""

    @property
    def url(self) -> str:
        """Where they are reached."""
        ...

    def processes(self) -> list[int]:
        """Those that serve now."""
        ...


@attrs.define(eq=False)
class Replica:
    """One process of a site behind nginx."""

    folder: Path
    number: int
    store: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.number}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        process = self._launch()
        assert process.stdout is not None
        with trio.fail_after(PATIENCE):
            await trio.lowlevel.wait_readable(process.stdout.fileno())
        said = process.stdout.readline()
        assert said == b"ready\n", self.log()

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, SERVER, str(self.port), self.store, str(LEASE), str(GRACE)]
        with open(f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT)
        return self.process

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and wait until it is gone."""
        process = self.process
        assert process is not None
        process.send_signal(number)
        with trio.fail_after(PATIENCE):
            while process.poll() is None:  # noqa: ASYNC110  # of other processes there are no events
                await trio.sleep(0.01)
        if process.stdout is not None:
            process.stdout.close()
        return int(process.returncode)

    def log(self) -> str:
        return Path(f"{self.name}.log").read_text("utf-8", errors="replace")


@attrs.define(eq=False)
class Replicas:
    """Replicas behind nginx, which takes one after the other, and knows of no session."""

    folder: Path
    port: int
    store: str
    redis: RedisServer | None
    replicas: list[Replica]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def processes(self) -> list[int]:
        return [replica.pid for replica in self.replicas]

    async def kill_one(self, chosen: random.Random) -> None:
        """Kill one without a warning, and start it again."""
        replica = chosen.choice(self.replicas)
        assert await replica.end(signal.SIGKILL) == -signal.SIGKILL
        await replica.start()

    async def roll(self) -> None:
        """Restart one after the other, as a release does."""
        for replica in self.replicas:
            assert await replica.end() == 0, replica.log()
            await replica.start()

    def nginx_log(self) -> str:
        return (self.folder / "nginx.log").read_text("utf-8")

    def logs(self) -> str:
        return "".join(replica.log() for replica in self.replicas)


@asynccontextmanager
async def replicas(
    number: int = 3, store: str = "", redis: RedisServer | None = None, at: Callable[[RedisServer], str] | None = None
) -> AsyncIterator[Replicas]:
    """Run a site; by default over the Redis given."""
    with tempfile.TemporaryDirectory(prefix="trimcp") as name:
        folder = Path(name)
        url = store or (redis.url if redis is not None else "")
        members = [Replica(folder, each, url, _free_port()) for each in range(number)]
        port = _free_port()
        servers = "\n        ".join(f"server 127.0.0.1:{each.port} max_fails=0;" for each in members)
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, servers=servers))
        site = Replicas(folder, port, url, redis, members)
        nginx: subprocess.Popen[bytes] | None = None
        try:
            async with trio.open_nursery() as nursery:
                for each in members:
                    nursery.start_soon(each.start)
            nginx = _launch_nginx(folder)
            await answering(site.url)
            yield site
        finally:
            for each in [replica.process for replica in members] + [nginx]:
                if each is not None:
                    each.kill()
                    each.wait()
                    if each.stdout is not None:
                        each.stdout.close()


@asynccontextmanager
async def redis_replicas(*settings: str) -> AsyncIterator[Replicas]:
    """Three replicas over a Redis of their own."""
    with redis_server(*settings) as server:
        async with replicas(redis=server) as site:
            yield site


@attrs.define(eq=False)
class Workers:
    """Workers of one command, over an SQLite file."""

    url: str
    parent: int

    def processes(self) -> list[int]:
        return [pid for pid in with_descendants([self.parent]) if parent_of(pid) == self.parent]

    async def kill_one(self, chosen: random.Random) -> None:
        """Kill one without a warning; the parent starts another one.

        It starts those that end again and again after a second in the end: so this waits until there are two.
        """
        while len(alive := await trio.to_thread.run_sync(self.processes)) < 2:  # noqa: ASYNC110
            await trio.sleep(0.1)
        os.kill(chosen.choice(alive), signal.SIGKILL)


@asynccontextmanager
async def sqlite_workers(number: int = 3) -> AsyncIterator[Workers]:
    words = ("--http", "--port", "0", "--workers", str(number), "--no-websocket")
    async with serving(*words, server=f"{SERVER}:server") as served:
        yield Workers(await served.url(), served.process.pid)


def _launch_nginx(folder: Path) -> subprocess.Popen[bytes]:
    command = ["nginx", "-c", f"{folder}/nginx.conf", "-p", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


async def answering(url: str) -> None:
    async with httpx2.AsyncClient() as client:
        with trio.fail_after(PATIENCE):
            while True:
                try:
                    if (await client.get(url.replace("/mcp", "/healthz"))).status_code == 200:
                        return
                except httpx2.HTTPError:
                    pass
                await trio.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
