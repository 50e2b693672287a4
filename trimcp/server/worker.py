"""Inside a worker process: one call at a time in the main thread, and a second thread that listens to the parent.

No event loop runs here. What the function says to its context goes to the parent as a line and is done there; when the
parent is gone, or lets go, the whole process group ends at once.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import io
import math
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from types import ModuleType
from typing import Any, BinaryIO, Final

import attrs
import orjson

from trimcp.errors import LocalError
from trimcp.server.packing import pack, unpack
from trimcp.server.threads import ThreadContext
from trimcp.server.tools import ToolEntry, tool_entry
from trimcp.server.worker_context import RemoteContext
from trimcp.wire.converter import converter_for
from trimcp.wire.elicitation import ElicitResult
from trimcp.wire.jsonrpc import JSON, encode
from trimcp.wire.revisions import LATEST

__all__ = ["serve"]

_MAIN: Final = "__trimcp_main__"
_LONGEST_TRACE: Final = 16 * 1024  # characters

loading: bool = False
"""Whether the module of a tool is being loaded just now: then nothing in it may start to serve."""


@attrs.define(eq=False, repr=False)
class Link:
    """The connection to the parent, as the function's threads use it while its call lasts.

    Attributes:
        calls: what the parent wants done.
    """

    _connection: socket.socket
    calls: SimpleQueue[dict[str, Any]] = attrs.field(init=False, factory=SimpleQueue)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    _call: int = attrs.field(init=False, default=0)
    _ids: Iterator[int] = attrs.field(init=False, factory=count)
    _waiting: dict[int, SimpleQueue[dict[str, Any]]] = attrs.field(init=False, factory=dict)

    def begin(self) -> int:
        """Begin a call, and return its number: what earlier ones left running can say nothing more."""
        self._call += 1
        return self._call

    def say(self, call: int, message: Mapping[str, JSON]) -> None:
        """Say something that belongs to a call. Waits while the client is slow.

        Raises:
            LocalError: that call is over.
            Unencodable: JSON cannot carry it.
        """
        line = encode(message) + b"\n"
        with self._lock:
            if call != self._call:
                raise LocalError("the request is over; its context can no longer be used")
            self._connection.sendall(line)

    def finish(self, call: int, message: Mapping[str, JSON]) -> None:
        """Say the last word of a call."""
        line = encode(message) + b"\n"
        with self._lock:
            self._call += 1
            self._connection.sendall(line)

    def ask(self, call: int, message: Mapping[str, JSON]) -> JSON:
        """Ask the parent to ask the client, and wait for the answer."""
        id = next(self._ids)
        answer = self._waiting[id] = SimpleQueue()
        try:
            self.say(call, {**message, "say": "ask", "id": id})
            said = answer.get()
        finally:
            del self._waiting[id]
        if "error" in said:
            raise unpack(said["error"])
        return said["value"]

    def listen(self, incoming: BinaryIO) -> None:
        """Take what the parent says; its end is ours, and that of all we started."""
        try:
            for line in incoming:
                message = orjson.loads(line)
                if message["do"] == "call":
                    self.calls.put(message)
                elif (waiting := self._waiting.get(message["id"])) is not None:
                    waiting.put(message)
        except OSError:
            pass
        finally:
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(1)


@attrs.frozen(eq=False, repr=False)
class _Desk:
    """Stands where a thread's desk stands (`threads.Desk`): what a remote context waits for, it waits for itself."""

    def wait(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        steps = function(*args).__await__()
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value
        raise AssertionError("nothing here waits for an event loop")


def serve(connection: socket.socket, incoming: BinaryIO, memory: int | None) -> None:
    """Carry out one call after the other, until the parent is gone.

    Args:
        connection: to the parent.
        incoming: what it says, from the line on that follows the first.
        memory: bytes this process may have as address space, for good; None for no bound.
    """
    faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that what was printed is out before anything is killed
    link = Link(connection)
    threading.Thread(target=link.listen, args=(incoming,), name="trimcp parent", daemon=True).start()
    if memory is not None:
        _bound(resource.RLIMIT_AS, memory, for_good=True)
    tools: dict[bytes, ToolEntry] = {}
    while True:
        message = link.calls.get()
        call = link.begin()
        outcome = _carry_out(message, call, link, tools)
        sys.stdout.flush()
        try:
            link.finish(call, outcome)
        except LocalError as error:  # a result that JSON cannot carry
            link.finish(call, {"say": "raised", "error": pack(error)})


def _carry_out(message: dict[str, Any], call: int, link: Link, tools: dict[bytes, ToolEntry]) -> dict[str, JSON]:
    """Return the last word of a call: its result, or what was raised."""
    try:
        with _processor_time(message["cpu_time"]):
            key = orjson.dumps(message["tool"])
            if key not in tools:
                tools[key] = _build(message["tool"])
            result = _call(tools[key], message, call, link)
        return {"say": "result", "kind": type(result).__name__, "result": converter_for(LATEST).dump(result)}
    except MemoryError as error:
        return {"say": "memory", "trace": _trace_in_little_memory(error)}
    except Exception as error:  # whatever the function raises, in a form that travels
        return {"say": "raised", "error": pack(error)}


def _trace_in_little_memory(error: MemoryError) -> str:
    try:
        trace: str = pack(error)["trace"]
    except MemoryError:
        return ""
    return trace[-_LONGEST_TRACE:]


def _call(tool: ToolEntry, message: dict[str, Any], call: int, link: Link) -> Any:
    calling = tool.calling
    arguments = message["arguments"]
    keywords = {"arguments": arguments} if calling.whole_arguments else dict(calling.signature.bind(arguments))
    for question in calling.questions:
        answer = converter_for(LATEST).load(message["answers"][question.parameter], ElicitResult)
        keywords[question.parameter] = question.value(answer)
    if calling.context_parameter is not None:
        ctx: Any = RemoteContext.of(message["facts"], link, call)
        desk: Any = _Desk()
        keywords[calling.context_parameter] = ThreadContext(ctx, desk)
    return tool.finished(calling.function(**keywords))


# The function


def _build(recipe: Mapping[str, Any]) -> ToolEntry:
    global loading
    loading = True
    try:
        module = _load(recipe)
    finally:
        loading = False
    options: Any = {**recipe["options"], "name": recipe["name"], "run": "inline"}
    return tool_entry(getattr(module, recipe["qualname"]), options)


def _load(recipe: Mapping[str, Any]) -> ModuleType:
    """Import the module by its name where that leads to its file, else from the file, as a script's neighbours do."""
    name, file = recipe["found_as"], recipe["file"]
    if name == "__main__":
        name = _MAIN
    else:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
        if found is not None and found.origin is not None and os.path.abspath(found.origin) == file:
            return importlib.import_module(name)
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise ImportError(f"{file} cannot be loaded as a module")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except BaseException:  # `SystemExit` too: half a module must not be found by the next call
        del sys.modules[name]
        raise
    return module


# Bounds


@contextmanager
def _processor_time(seconds: float | None) -> Iterator[None]:
    """Let the system end this process when the block takes more processor time than this."""
    if seconds is None:
        yield
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _bound(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
    try:
        yield
    finally:
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _bound(which: int, value: int, *, for_good: bool = False) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value if for_good else hard))
