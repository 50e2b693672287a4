"""Tools that run in worker processes inside a sandbox. Each worker loads this module, commands and all."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import Any

import trio

import trimcp
from tests.programs import works
from trimcp.workers.programs import worker_loads

server = trimcp.Server("loaded in a sandbox")
LISTING: Any = None  # where no test uses it
if worker_loads() or (works("bwrap") and works("coreutils")):
    LISTING = trimcp.Command(["ls", "/"], isolation="bwrap")
    server.add_command("listing", ["ls", "/"], isolation="bwrap", read=["/usr/bin"])

calls = 0


def attempt(path: str, port: int) -> list[str]:
    """Try to write a file and to open a connection."""
    said = []
    try:
        with open(path, "w") as file:
            file.write("written")
        said.append("done")
    except OSError as error:
        said.append(errno.errorcode[error.errno or 0])
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        said.append("done")
    except OSError as error:
        said.append(errno.errorcode[error.errno or 0])
    return said


def environment() -> dict[str, str]:
    return dict(os.environ)


def count() -> list[int]:
    """Count calls, in memory and in files."""
    global calls
    calls += 1
    with open("/tmp/trimcp calls", "a") as file:
        file.write("x")
    return [calls, os.path.getsize("/tmp/trimcp calls")]


def report(*, ctx: trimcp.ThreadContext) -> str:
    ctx.report_progress(1, 2, "half")
    raise trimcp.ToolError("said in a sandbox")


def flee(mark: str) -> None:
    """Start two that leave the session, the parent and the environment, and stay."""
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve("/bin/sleep", ["sleep", mark], {})  # noqa: S606  # a program of the system
            os._exit(0)
    time.sleep(600)


def crash() -> None:
    os.abort()


def take(size: int) -> int:
    return len(bytearray(size))


def listing() -> str:
    """Run a command of this module, which was loaded in a worker."""
    found: str = trio.run(LISTING, {})
    return found


def pid() -> int:
    return os.getpid()
