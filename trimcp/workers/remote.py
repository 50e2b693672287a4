"""Tools that run in worker processes, on the server's side: how a worker finds the function, and how calls run.

A worker is not trusted to be what it was started as: a stranger's code may run in it. Each of its messages is checked
here against what the tool declares, and a worker that says anything else is killed.

A function is identified by its module and its name in it; arguments and results are sent as JSON. Nothing is pickled. A
function that cannot be found this way is refused when the tool is added.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.errors import CannotAsk, ErrorReply, McpError, ToolError
from trimcp.session.context import Context, client_key
from trimcp.support.bounds import check_number
from trimcp.support.cleaning import names_a_secret
from trimcp.wire.codes import ERRORS, INTERNAL_ERROR, INVALID_PARAMS, RESOURCE_NOT_FOUND, TIMED_OUT
from trimcp.wire.common import SEVERITY
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.input_requests import ElicitResult, InputRequiredResult
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import LATEST
from trimcp.wire.tools import CallToolResult
from trimcp.workers.output import quoted
from trimcp.workers.packing import FailedInWorker, pack, unpack
from trimcp.workers.pool import WorkerPool, WorkerProcess

if TYPE_CHECKING:
    from trimcp.workers.bubblewrap import Sandbox  # few servers need it

log: logging.Logger = logging.getLogger("trimcp.server")

RESULTS: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in (CallToolResult, InputRequiredResult)}
"""The types of a worker's result, by name."""

_QUESTIONS: Final = frozenset({"elicitation/create", "sampling/createMessage", "roots/list"})
_LONGEST_LOGGED: Final = 2_000  # characters of an exception's text
_LONGEST: Final = 64 * 1024  # characters of what one in a sandbox may log, or say of its progress, at once

# Errors that mean nothing but that the tool failed. Others make a client ask its user (for a page to visit, or for more
# rights), send the request again, or begin anew.
_PLAIN_ERRORS: Final = frozenset({INVALID_PARAMS, INTERNAL_ERROR, RESOURCE_NOT_FOUND, TIMED_OUT})

# options that a worker needs, because it builds the result
_SHAPING: Final = ("input_schema", "output_schema", "structured")

_HINT: Final = (
    'a worker process finds its function by name: run="process" needs a function at the top level of a module with a '
    'file. Move it there, or use run="thread"'
)


@attrs.define(eq=False, repr=False)
class RemoteTool:
    """A tool's function, as worker processes find and run it."""

    name: str
    function: Callable[..., Any]
    recipe: dict[str, JSON]  # what a worker needs to build the tool, in JSON
    memory: int | None  # the bound of its workers' address space in bytes, or None
    cpu_time: float | None  # seconds of processor time a call may take, or None
    wants_context: bool  # whether the function takes the context
    may_ask: bool  # whether its workers may have the client asked, in the server's name
    sandbox: Sandbox | None = None  # where its workers run, or None for plain processes
    _checked: bool = attrs.field(init=False, default=False)

    def check(self) -> None:
        """Raise TypeError if its name refers to another function.

        This cannot be checked when the tool is added: its module is still being imported.
        """
        if self._checked:
            return
        module = sys.modules.get(self.recipe["module"])
        found = getattr(module, self.recipe["qualname"], None)
        if module is not None and (found is None or inspect.unwrap(found) is not inspect.unwrap(self.function)):
            where = f"{self.recipe['qualname']} in {self.recipe['module']}"
            raise TypeError(f"{where} is not the function of the tool {self.name}; {_HINT}")
        self._checked = True

    async def run(
        self, pool: WorkerPool, ctx: Context[Any], arguments: Mapping[str, Any], answers: Mapping[str, ElicitResult]
    ) -> Any:
        """Run a call in a worker and return its finished result. Cancelling it kills the worker.

        `answers` are the user's to each declared question, by parameter. Raises ToolError as the function did, or if
        the process ended before there was a result; ConversionError for an argument that fits its schema but not its
        type; and FailedInWorker for any other exception of the function, whose traceback is the cause.
        """
        async with pool.worker(
            self.memory, client_key(ctx), ctx.deadline, tool=self.name, sandbox=self.sandbox
        ) as worker:
            await worker.send(
                {
                    "do": "call",
                    "call": worker.call,
                    "tool": self.recipe,
                    "arguments": dict(arguments),
                    "answers": {name: _dump(answer) for name, answer in answers.items()},
                    "cpu_time": self.cpu_time,
                    "facts": self._facts(ctx) if self.wants_context else None,
                }
            )
            try:
                return await self._follow(worker, ctx)
            except trio.EndOfChannel:
                raise self._crash(worker, worker.end_reason(self.cpu_time)) from None

    async def _follow(self, worker_process: WorkerProcess, ctx: Context[Any]) -> Any:
        """Do what the worker requests until it has a result. `watch.tree` looks for a parameter `worker_process`."""
        while True:
            message = await worker_process.receive()
            match message:
                case {
                    "say": "progress",
                    "values": [int() | float() as value, int() | float() | None as total, str() | None as text],
                } if self.wants_context and self._is_short(text):
                    # True is a number to Python, and none to JSON.
                    await ctx.report_progress(+value, None if total is None else +total, text)
                case {"say": "log", "level": str() as level, "data": data, "logger": str() | None as logger} if (
                    self.wants_context and level in SEVERITY and self._is_short(data, logger)
                ):
                    await ctx.log(level, data, logger=self._logger(logger))  # type: ignore[arg-type]
                case {
                    "say": "ask",
                    "id": int() as id,
                    "method": str() as name,
                    "params": params,
                    "key": str() | None as key,
                } if self.may_ask and name in _QUESTIONS:
                    question = _loaded(params, METHODS[name].params)
                    if question is _NONE:
                        raise self._refuse(worker_process, name)
                    answer = await _answer(ctx, name, question, key)
                    await worker_process.send({"do": "answer", "id": id, **answer})
                case {"say": "result", "kind": str() as kind, "result": dict() as raw} if (
                    kind == CallToolResult.__name__ or (kind in RESULTS and (self.sandbox is None or self.may_ask))
                ):
                    result = _loaded(raw, RESULTS[kind])
                    if result is _NONE:
                        raise self._refuse(worker_process, kind)
                    worker_process.done = True
                    return result
                case {
                    "say": "raised",
                    "error": {"kind": str(), "arguments": [*_], "trace": str() as trace} as error,
                }:
                    try:
                        raised = unpack({**error, "trace": trace if self.sandbox is None else ""})
                    except (TypeError, ValueError):
                        raise self._refuse(worker_process, "an error that is none") from None
                    worker_process.done = True
                    raise self._permitted(raised, worker_process, trace)
                case {"say": "memory", "trace": str() as trace}:
                    worker_process.kill(crashed=True)  # its state cannot be trusted
                    mib = None if self.memory is None else self.memory / 2**20
                    how = "ran out of memory" if mib is None else f"needed more than {mib:.4g} MiB of memory"
                    raise self._crash(worker_process, how, trace)
                case _:
                    raise self._refuse(worker_process, message.get("method") or message.get("say"))

    def _is_short(self, *said: Any) -> bool:
        return self.sandbox is None or all(each is None or len(str(each)) <= _LONGEST for each in said)

    def _logger(self, name: str | None) -> str | None:
        """Return the name under which the worker logs. The client is to see that a sandbox says it, not the server."""
        return name if self.sandbox is None else self.name if name is None else f"{self.name}: {name[:100]}"

    def _refuse(self, worker: WorkerProcess, what: object) -> ToolError:
        """Kill a worker that sent what its tool does not declare, and return the error for the model."""
        worker.breach(f"not declared: {str(what)[:100]}")
        worker.kill(crashed=True)
        return self._crash(worker, "sent what the tool does not declare, and was ended")

    def _permitted(self, error: Exception, worker: WorkerProcess, trace: str) -> Exception:
        """Return what the function raised; from a sandbox, without what makes a client do more than tell its user."""
        if self.sandbox is None:
            return error
        if isinstance(error, ErrorReply):
            known = type(error.code) is int and type(error.message) is str
            plain = known and (error.code not in ERRORS or error.code in _PLAIN_ERRORS)
        else:
            plain = self.may_ask or not isinstance(error, CannotAsk)
        if not plain or isinstance(error, FailedInWorker):
            error = FailedInWorker(f"{type(error).__name__}: {error}"[:_LONGEST_LOGGED])
        if shown := quoted(trace, worker.output.bound):
            error.__cause__ = FailedInWorker(shown)
        return error

    def _facts(self, ctx: Context[Any]) -> dict[str, JSON]:
        facts = {**facts_of(ctx), "may_ask": self.may_ask}
        if self.sandbox is not None:
            kept = {name: value for name, value in ctx.headers.items() if not _is_private(name)}
            facts["headers"] = kept
        return facts

    def _crash(self, worker: WorkerProcess, how: str, trace: str = "") -> ToolError:
        """Log how a worker ended, with its last output, and return the error for the model."""
        output = worker.output.tail() + quoted(trace, worker.output.bound)
        shown = f"; what it wrote last:{output}" if output else ""
        log.error("the worker process %d of the tool %s %s%s", worker.process.pid, self.name, how, shown)
        return ToolError(f"{self.name} failed: its process {how}")


_NONE: Final[Any] = object()


def _loaded(raw: Any, kind: Any) -> Any:
    """Return a payload that a worker sent, or `_NONE` if it is none of this kind."""
    if raw is None or kind is None:
        return None if raw is None else _NONE
    try:
        return converter_for(LATEST).load(raw, kind)
    except WireError:
        return _NONE


def _is_private(header: str) -> bool:
    return names_a_secret(header) or header in ("mcp-session-id", "dpop")


async def _answer(ctx: Context[Any], name: str, question: Any, key: str | None) -> dict[str, JSON]:
    try:
        return {"value": _dump(await ctx.ask(name, question, key=key))}
    except McpError as error:
        return {"error": pack(error)}


def _dump(payload: Any) -> JSON:
    return converter_for(LATEST).dump(payload)


def facts_of(ctx: Context[Any]) -> dict[str, JSON]:
    """Return what a worker's context needs to know of a request, in JSON."""
    admission = ctx.admission
    session, _ = ctx.internals
    return {
        "request_id": ctx.request_id,
        "method": ctx.method,
        "revision": ctx.revision.name,
        "peer": None if ctx.peer is None else _dump(ctx.peer),
        "capabilities": _dump(ctx.capabilities),
        "log_level": session.engine.log_level(admission),
        "progress_token": admission.progress_token,
        "meta": dict(ctx.meta),
        "principal": None if ctx.principal is None else ctx.principal.facts(),
        "headers": dict(ctx.headers),
        "seconds_left": None if ctx.deadline == float("inf") else ctx.deadline - trio.current_time(),
    }


def remote_tool(
    function: Callable[..., Any], name: str, options: Mapping[str, Any], *, is_async: bool, wants_context: bool
) -> RemoteTool:
    """Inspect the function of a tool that is to run in worker processes.

    Raises TypeError: it is async, or a worker could not find it; the text says what to do. Raises ValueError: a bound
    is not positive, or a path of a sandbox does not exist. Raises LocalError: its sandbox cannot be made here.
    """
    memory, cpu_time = options.get("memory"), options.get("cpu_time")
    if sys.platform == "win32":
        raise TypeError('run="process" needs process groups and resource limits, which this system does not have')
    if is_async:
        raise TypeError(f'the tool {name}: run="process" is for sync functions; an async one runs in the event loop')
    check_number("memory", memory, optional=True)
    check_number("cpu_time", cpu_time, optional=True)
    memory, cpu_time = (None if bound == math.inf else bound for bound in (memory, cpu_time))
    qualname = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or not qualname.isidentifier():
        raise TypeError(f"the tool {name}: {_HINT}")
    specification = module.__spec__ if module.__name__ == "__main__" else None
    recipe = {
        "name": name,
        # A module run by `python -m package.module` is found by its real name, a script only by its file.
        "module": module.__name__,
        "found_as": specification.name if specification is not None else module.__name__,
        "file": os.path.abspath(file),
        "qualname": qualname,
        "options": {key: value for key, value in options.items() if key in _SHAPING and value is not None},
    }
    sandbox = _sandbox_of(options, file)
    may_ask = wants_context and (sandbox is None or options.get("asks", False))
    return RemoteTool(name, function, recipe, memory, cpu_time, wants_context, may_ask, sandbox)


def _sandbox_of(options: Mapping[str, Any], file: str) -> Sandbox | None:
    if options.get("isolation") != "bwrap":
        return None
    from trimcp.workers.bubblewrap import SCRATCH, Sandbox, of_python

    return Sandbox.of([*of_python(file), *options.get("read", ())], options.get("write", ()), SCRATCH)
