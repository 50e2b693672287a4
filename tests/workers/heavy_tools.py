"""Tools that run in worker processes, for the tests: those have to be at the top level of a module of their own."""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Annotated

import attrs

import trimcp
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.tools import CallToolResult

FORM = {"type": "object", "properties": {"name": {"type": "string"}}}

leftover: list[threading.Thread] = []
said: list[str] = []


@attrs.frozen
class Point:
    x: int
    when: datetime.date


def pid() -> int:
    return os.getpid()


def move(point: Point, by: int = 1) -> Point:
    """Convert both ways."""
    return Point(point.x + by, point.when + datetime.timedelta(days=by))


def picture() -> list[trimcp.Image | str]:
    return ["a picture", trimcp.Image(b"\x89PNG", "image/png")]


def finished() -> CallToolResult:
    return CallToolResult([trimcp.Text("whole")], meta={"example/key": 1})


def nothing_json_can_carry() -> object:
    return object()


def report(steps: int, *, ctx: trimcp.ThreadContext) -> str:
    for step in range(1, steps + 1):
        ctx.report_progress(step, steps, f"step {step}")
        ctx.info({"step": step}, logger="heavy")
    return "reported"


def progress_is_wanted(*, ctx: trimcp.ThreadContext) -> bool:
    return ctx.progress_wanted


def report_twice(*, ctx: trimcp.ThreadContext) -> str:
    ctx.report_progress(1)
    ctx.report_progress(1)
    return "never"


def facts(*, ctx: trimcp.ThreadContext) -> dict[str, object]:
    assert ctx.peer is not None
    try:
        state = str(ctx.state)
    except trimcp.LocalError as error:
        state = str(error)
    return {
        "id": isinstance(ctx.request_id, int | str),
        "method": ctx.method,
        "revision": ctx.revision.name,
        "peer": ctx.peer.name,
        "capabilities": type(ctx.capabilities).__name__,
        "principal": ctx.principal,
        "meta": ctx.meta.get("example/key"),
        "trace": dict(ctx.trace),
        "headers": dict(ctx.headers),
        "cancelled": [ctx.cancel_reason, ctx.cancel_detail],
        "left": round(ctx.deadline - time.monotonic()),
        "state": state,
    }


def greet(*, ctx: trimcp.ThreadContext) -> str:
    answer = ctx.elicit("Your name?", FORM)
    return f"{answer.action} {answer.content and answer.content['name']}"


def declared(name: Annotated[str, trimcp.Elicit("Your name?")]) -> str:
    return f"Hello {name}"


def declared_whole(name: Annotated[ElicitResult, trimcp.Elicit("Your name?", FORM)]) -> str:
    return f"Hello {name.action}"


def try_to_ask(*, ctx: trimcp.ThreadContext) -> str:
    try:
        ctx.list_roots()
    except trimcp.LocalError as error:
        return f"{type(error).__name__}: {error}"
    return "asked"


def spin(file: str) -> str:
    """Hold the interpreter lock as only C code can, with a child beside; both write their ids first."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(file, "w") as stream:
        stream.write(f"{os.getpid()} {child.pid}\n")
    ctypes.PyDLL(None).sleep(600)
    return "never"


def wait_for(file: str) -> str:
    """Say that it has begun, then wait for nothing."""
    with open(file, "a") as stream:
        stream.write(f"{os.getpid()}\n")
    time.sleep(600)
    return "never"


def leave(code: int) -> str:
    print("these were my last words")
    os._exit(code)


def leave_by_exit() -> str:
    sys.exit(4)


def crash(number: int) -> str:
    os.kill(os.getpid(), number)
    time.sleep(600)
    return "never"


def segfault() -> str:
    ctypes.string_at(0)
    return "never"


def leave_a_fork() -> str:
    """A forked child holds every pipe of ours, and is in our group."""
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    os._exit(5)


def eat() -> str:
    pieces: list[bytearray] = []
    try:
        while len(pieces) < 2_000:
            pieces.append(bytearray(2**20))
    except MemoryError:
        had = len(pieces)
        pieces.clear()
        print(f"had {had} MiB")
        raise
    return "was not stopped"


def burn() -> str:
    until = time.process_time() + 10
    while time.process_time() < until:
        pass
    return "was not stopped"


def refuse() -> str:
    raise trimcp.ToolError("no luck")


def reply_error() -> str:
    raise trimcp.ErrorReply(7, "my own", {"why": [1]})


def fail() -> str:
    raise ValueError("with a secret")


def print_both() -> str:
    print("on standard output")
    print("on standard error", file=sys.stderr)
    os.system("echo from a child")
    return str(os.getpid())


def leave_a_thread(*, ctx: trimcp.ThreadContext) -> str:
    def late() -> None:
        while not leftover:
            time.sleep(0.001)
        time.sleep(0.05)
        try:
            ctx.report_progress(99)
        except trimcp.LocalError as error:
            said.append(str(error))

    thread = threading.Thread(target=late)
    thread.start()
    leftover.append(thread)
    return "left"


def hear_of_the_thread() -> list[str]:
    leftover[0].join()  # which looks whether it is there, so it stays until then
    leftover.clear()
    return said


def ignore_signals(file: str) -> str:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return wait_for(file)


def big(size: int) -> str:
    return "x" * size


def chatter(file: str, count: int, *, ctx: trimcp.ThreadContext) -> str:
    """Say much, and write down as many dots."""
    with open(file, "wb", buffering=0) as stream:
        for number in range(1, count + 1):
            stream.write(b".")
            ctx.report_progress(number, message="x" * 10_000)
    return "said"


def thread_count(argument: int) -> int:
    return argument


not_what_it_seems = thread_count


def thread_count(argument: int) -> int:
    return -argument


def whole(arguments: dict[str, object]) -> dict[str, object]:
    return arguments


def busy_for(seconds: float) -> str:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return "done"
