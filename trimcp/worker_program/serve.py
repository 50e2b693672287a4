"""The program of a worker process: one call at a time in the main thread, and a thread that receives from the parent.

No event loop runs here. What a function calls on its context is sent to the parent and done there. When the parent ends
or closes the connection, the whole process group ends at once.
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
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from types import ModuleType
from typing import Any, BinaryIO, ClassVar, Final

import attrs
import orjson

from trimcp.errors import LocalError
from trimcp.principal import Principal
from trimcp.protocol.events import Admission, Admitted
from trimcp.server.handlers.threads import ThreadContext
from trimcp.server.tools import ToolEntry, tool_entry
from trimcp.session.context import Context
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.common import SEVERITY, Implementation, LoggingLevel
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.jsonrpc import JSON, RequestId, encode
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import LATEST, REVISIONS
from trimcp.workers.packing import pack, unpack

_MAIN: Final = "__trimcp_main__"
_LONGEST_TRACE: Final = 16 * 1024  # characters

loading: bool = False
"""Whether the module of a tool is being imported. Meanwhile nothing in it may start a server."""


@attrs.define(eq=False, repr=False)
class ParentConnection:
    """The connection to the parent. All threads of a function may use it while its call lasts."""

    _connection: socket.socket
    calls: SimpleQueue[dict[str, Any]] = attrs.field(init=False, factory=SimpleQueue)
    _lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    _call: str = attrs.field(init=False, default="")
    _ids: Iterator[int] = attrs.field(init=False, factory=count)
    _waiting: dict[int, SimpleQueue[dict[str, Any]]] = attrs.field(init=False, factory=dict)

    def begin(self, call: str) -> None:
        """Begin the call with this id. Threads left over from earlier calls can no longer send."""
        self._call = call

    def send(self, call: str, message: Mapping[str, JSON], *, last: bool = False) -> None:
        """Send a message that belongs to a call. Waits while the client is slow. Raises as `encode` does.

        Raises LocalError: that call is over.
        """
        line = encode({**message, "call": call}) + b"\n"
        with self._lock:
            if call != self._call:
                raise LocalError("the request is over; its context can no longer be used")
            if last:
                self._call = ""
            self._connection.sendall(line)

    def ask(self, call: str, message: Mapping[str, JSON]) -> JSON:
        """Let the parent send a request to the client, and wait for the result."""
        id = next(self._ids)
        answer = self._waiting[id] = SimpleQueue()
        try:
            self.send(call, {**message, "say": "ask", "id": id})
            answered = answer.get()
        finally:
            del self._waiting[id]
        if "error" in answered:
            raise unpack(answered["error"])
        return answered["value"]

    def listen(self, incoming: BinaryIO) -> None:
        """Receive from the parent until it ends. Then end this process and all that it started."""
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


@attrs.define(eq=False, repr=False)
class RemoteContext(Admitted):
    """The context of a call, for a `ThreadContext` around it. Its async methods never yield."""

    # `admission`, `request_id`, `method`, `headers`, `deadline`: as a `Context` has them; the deadline is on the clock
    # of `time.monotonic`
    admission: Admission
    request_id: RequestId
    method: str
    headers: Mapping[str, str]
    deadline: float
    _parent: ParentConnection
    _call: str
    _may_ask: bool
    # `cancel_reason`, `cancel_detail`: always None, because cancelling a call kills the process
    cancel_reason: None = attrs.field(init=False, default=None)
    cancel_detail: None = attrs.field(init=False, default=None)
    _last_progress: float = attrs.field(init=False, default=-math.inf)

    @classmethod
    def of(cls, facts: Mapping[str, Any], parent: ParentConnection, call: str) -> RemoteContext:
        """Return the context of a call from the facts that the parent sent about its request."""
        load = converter_for(LATEST).load
        admission = Admission(
            revision=next(revision for revision in REVISIONS if revision.name == facts["revision"]),
            peer=None if facts["peer"] is None else load(facts["peer"], Implementation),
            capabilities=load(facts["capabilities"], ClientCapabilities),
            log_level=facts["log_level"],
            progress_token=facts["progress_token"],
            meta=facts["meta"],
            principal=None if facts["principal"] is None else Principal(**facts["principal"]),
        )
        left = facts["seconds_left"]
        deadline = math.inf if left is None else time.monotonic() + left
        asks = facts["may_ask"]
        return cls(admission, facts["request_id"], facts["method"], facts["headers"], deadline, parent, call, asks)

    @property
    def state(self) -> Any:
        """Not available here: the lifespan's state stays in the server's process."""
        raise LocalError('the state of the lifespan is not here: run="process" gives a tool a process of its own')

    @property
    def task(self) -> Any:
        """Not available here: a checkpoint is written by the server's process."""
        raise LocalError('checkpoints are not here: run="process" gives a tool a process of its own')

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Like `Context.report_progress`. Waits while the connection to the parent is full."""
        if not progress > self._last_progress:
            return  # as there
        self._last_progress = progress
        if self.admission.progress_token is not None:
            self._parent.send(self._call, {"say": "progress", "values": [progress, total, message]})

    async def log(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> None:
        wanted = self.admission.log_level
        if wanted is not None and SEVERITY[level] >= SEVERITY[wanted]:
            self._parent.send(self._call, {"say": "log", "level": level, "data": data, "logger": logger})

    async def ask(self, name: str, params: Any, *, key: str | None = None) -> Any:
        if not self._may_ask:
            raise LocalError("what runs in a sandbox asks nobody; add asks=True to its tool to let it")
        dumped = None if params is None else converter_for(LATEST).dump(params)
        value = self._parent.ask(self._call, {"method": name, "params": dumped, "key": key})
        return converter_for(LATEST).load(value, METHODS[name].result)

    # These methods of `Context` use only `ask`.
    elicit: ClassVar[Any] = Context.elicit
    elicit_url: ClassVar[Any] = Context.elicit_url
    sample: ClassVar[Any] = Context.sample
    list_roots: ClassVar[Any] = Context.list_roots


@attrs.frozen(eq=False, repr=False)
class _DirectPortal:
    """Replaces a `ThreadPortal`: runs the methods of a `RemoteContext`, which never yield."""

    def wait(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        steps = function(*args).__await__()
        try:
            next(steps)
        except StopIteration as finished:
            return finished.value
        raise AssertionError("nothing here waits for an event loop")


def serve(connection: socket.socket, incoming: BinaryIO, memory: int | None) -> None:
    """Run one call after another until the parent ends.

    `memory`: the bound of this process's address space from now on, in bytes; None for no bound.
    """
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)  # its lines would be the last, which are kept for the log
    else:
        faulthandler.enable()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a killed process does not flush
    parent = ParentConnection(connection)
    threading.Thread(target=parent.listen, args=(incoming,), name="trimcp parent", daemon=True).start()
    if memory is not None:
        _bound(resource.RLIMIT_AS, memory, for_good=True)
    tools: dict[bytes, ToolEntry] = {}
    while True:
        message = parent.calls.get()
        call = message.get("call", "")
        parent.begin(call)
        outcome = _carry_out(message, call, parent, tools)
        sys.stdout.flush()
        try:
            parent.send(call, outcome, last=True)
        except LocalError as error:  # the result cannot be encoded as JSON
            parent.send(call, {"say": "raised", "error": pack(error)}, last=True)


def _carry_out(
    message: dict[str, Any], call: str, parent: ParentConnection, tools: dict[bytes, ToolEntry]
) -> dict[str, JSON]:
    """Return the last message of a call: its result, or the exception that was raised."""
    try:
        with _processor_time(message["cpu_time"]):
            key = orjson.dumps(message["tool"])
            if key not in tools:
                tools[key] = _build(message["tool"])
            result = _call(tools[key], message, call, parent)
        return {"say": "result", "kind": type(result).__name__, "result": converter_for(LATEST).dump(result)}
    except MemoryError as error:
        try:
            trace = pack(error)["trace"][-_LONGEST_TRACE:]
        except MemoryError:
            trace = ""
        return {"say": "memory", "trace": trace}
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `SystemExit` too
        return {"say": "raised", "error": pack(error)}


def _call(tool: ToolEntry, message: dict[str, Any], call: str, parent: ParentConnection) -> Any:
    prepared = tool.prepared
    arguments = message["arguments"]
    keywords = {"arguments": arguments} if prepared.whole_arguments else dict(prepared.signature.bind(arguments))
    for question in prepared.questions:
        answer = converter_for(LATEST).load(message["answers"][question.parameter], ElicitResult)
        keywords[question.parameter] = question.value(answer)
    if prepared.context_parameter is not None:
        ctx: Any = RemoteContext.of(message["facts"], parent, call)
        portal: Any = _DirectPortal()
        keywords[prepared.context_parameter] = ThreadContext(ctx, portal)
    return tool.make_result(prepared.function(**keywords))


# Finding the function


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
    """Import the module by its name if that leads to its file, else from the file, as for a script."""
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
    except BaseException:  # `SystemExit` too: the next call must not find a half-imported module
        del sys.modules[name]
        raise
    return module


# Resource limits


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
