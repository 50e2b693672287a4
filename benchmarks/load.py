"""Drives a server over its standard input and output as fast as it answers, and checks every reply.

Blocking pipes and one `read` for whatever is there, so that the load costs little beside any server it measures. What
a server costs is the CPU time of its process with all its threads, as the kernel counts it (Linux).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import attrs
import orjson
from processes import cpu_seconds, pin, resident_bytes

__all__ = ["LEGACY", "MODERN", "Spent", "Under"]

LEGACY = "2025-11-25"
MODERN = "2026-07-28"

_CHUNK = 1 << 18


@attrs.frozen
class Spent:
    """What `count` operations took: CPU seconds of the server and seconds of wall-clock time."""

    count: int
    cpu: float
    wall: float

    @property
    def cpu_us(self) -> float:
        """CPU microseconds of the server for each."""
        return self.cpu / self.count * 1e6

    @property
    def per_second(self) -> float:
        """How many a second."""
        return self.count / self.wall


class Under:
    """A server under measurement: started, greeted, and at its block's end closed.

    Args:
        command: what starts it, to speak MCP over its standard streams.
        revision: the words to use; the modern era has no greeting, so it begins with `server/discover`.
        environment: variables beside our own.
    """

    def __init__(self, command: list[str], revision: str, *, environment: dict[str, str] | None = None) -> None:
        self._revision = revision
        self._tail = b""
        self._last_id = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
            bufsize=0,
        )
        pin(self._process.pid, 0)

    def __enter__(self) -> Self:
        try:
            self._greet()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._errors.close()

    def _greet(self) -> None:
        if self._revision == MODERN:
            self._exchange("server/discover", {})
            return
        client = {"name": "bench", "version": "1.0"}
        params = {"protocolVersion": self._revision, "capabilities": {}, "clientInfo": client}
        answer = self._exchange("initialize", params)
        if answer["protocolVersion"] != self._revision:
            raise AssertionError(f"the server speaks {answer['protocolVersion']}")
        self._write(orjson.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}) + b"\n")

    # What it has cost

    @property
    def cpu(self) -> float:
        """CPU seconds of the process so far."""
        return cpu_seconds(self._process.pid)

    @property
    def resident(self) -> int:
        """Bytes of memory it holds."""
        return resident_bytes(self._process.pid)

    # Work

    def calls(self, count: int, under_way: int) -> Spent:
        """Call `echo` this often, with so many under way at any time."""
        expected: dict[int, str] = {}
        cpu, wall = self.cpu, time.perf_counter()
        left = count - under_way
        self._write(self._echoes(under_way, expected))
        while expected:
            answered = 0
            for line in self._lines():
                message = orjson.loads(line)
                text = expected.pop(message["id"])
                if message["result"]["content"] != [{"type": "text", "text": text}]:
                    raise AssertionError(f"wanted {text!r}, got {line!r}")
                answered += 1
            more = min(answered, left)
            left -= more
            if more:
                self._write(self._echoes(more, expected))
        return Spent(count, self.cpu - cpu, time.perf_counter() - wall)

    def progress(self, count: int) -> Spent:
        """Let one call report progress this often, and take each report."""
        cpu, wall = self.cpu, time.perf_counter()
        id = self._next_id()
        params = self._params({"name": "count", "arguments": {"to": count}}, {"progressToken": "bench"})
        self._write(orjson.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}) + b"\n")
        seen = 0
        while True:
            for line in self._lines():
                message = orjson.loads(line)
                if "id" in message:
                    if seen != count or message["result"]["content"][0]["text"] != "done":
                        raise AssertionError(f"{seen} of {count} reports before {line!r}")
                    return Spent(count, self.cpu - cpu, time.perf_counter() - wall)
                seen += 1
                if message["params"]["progress"] != seen:
                    raise AssertionError(f"wanted report {seen}, got {line!r}")

    # Lines

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _echoes(self, count: int, expected: dict[int, str]) -> bytes:
        requests = []
        for _ in range(count):
            id = self._next_id()
            text = expected[id] = f"hello number {id}"
            params = self._params({"name": "echo", "arguments": {"text": text}}, {})
            requests.append(orjson.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}))
        return b"\n".join((*requests, b""))

    def _params(self, params: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
        if self._revision == MODERN:
            name = "io.modelcontextprotocol/"
            modern = {f"{name}protocolVersion": MODERN, f"{name}clientCapabilities": {}}
            meta = {**modern, f"{name}clientInfo": {"name": "bench", "version": "1.0"}, **meta}
        return {**params, "_meta": meta} if meta else params

    def _exchange(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        id = self._next_id()
        request = {"jsonrpc": "2.0", "id": id, "method": method, "params": self._params(params, {})}
        self._write(orjson.dumps(request) + b"\n")
        while True:
            for line in self._lines():
                message: dict[str, Any] = orjson.loads(line)
                if message.get("id") == id:
                    result: dict[str, Any] = message["result"]
                    return result

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            view = view[self._process.stdin.write(view) :]

    def _lines(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        chunk = os.read(self._process.stdout.fileno(), _CHUNK)
        if not chunk:
            self._errors.seek(0)
            raise AssertionError(f"the server ended: {self._errors.read().decode(errors='replace')[-2000:]}")
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        yield from (line for line in lines if line)
