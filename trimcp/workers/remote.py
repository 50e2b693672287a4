"""Tools that run in worker processes, on the server's side: how a worker finds the function, and how calls run.

A function is identified by its module and its name in it; arguments and results are sent as JSON. Nothing is pickled. A
function that cannot be found this way is refused when the tool is added.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.bounds import check_number
from trimcp.errors import McpError, ToolError
from trimcp.session.context import Context, client_key
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import ElicitResult, InputRequiredResult
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import LATEST
from trimcp.wire.tools import CallToolResult
from trimcp.workers.packing import pack, unpack
from trimcp.workers.pool import WorkerPool, WorkerProcess

if TYPE_CHECKING:
    from trimcp.workers.bubblewrap import Sandbox  # few servers need it

log: logging.Logger = logging.getLogger("trimcp.server")

RESULTS: Final[Mapping[str, Any]] = {kind.__name__: kind for kind in (CallToolResult, InputRequiredResult)}
"""The types of a worker's result, by name."""

# options that a worker needs, because it builds the result
_SHAPING: Final = ("input_schema", "output_schema", "structured")

_HINT: Final = (
    'a worker process finds its function by name: run="process" needs a function at the top level of a module with a '
    'file. Move it there, or use run="thread"'
)


@attrs.define(eq=False, repr=False)
class RemoteTool:
    """A tool's function, as worker processes find and run it.

    Attributes:
        recipe: what a worker needs to build the tool, in JSON.
        memory: the bound of its workers' address space in bytes, or None.
        cpu_time: seconds of processor time a call may take, or None.
        wants_context: whether the function takes the context.
        sandbox: where its workers run, or None for plain processes.
    """

    name: str
    function: Callable[..., Any]
    recipe: dict[str, JSON]
    memory: int | None
    cpu_time: float | None
    wants_context: bool
    sandbox: Sandbox | None = None
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

        Args:
            pool: provides the worker.
            ctx: the request's context.
            arguments: as the client sent them.
            answers: the user's answer to each declared question, by parameter.

        Raises:
            ToolError: the function raised it, or the process ended before there was a result; the text says how.
            ConversionError: an argument fits its schema but cannot be converted to its type.
            FailedInWorker: the function raised another exception. Its traceback is the cause.
        """
        message = {
            "do": "call",
            "tool": self.recipe,
            "arguments": dict(arguments),
            "answers": {name: _dump(answer) for name, answer in answers.items()},
            "cpu_time": self.cpu_time,
            "facts": facts_of(ctx) if self.wants_context else None,
        }
        async with pool.worker(self.memory, client_key(ctx), ctx.deadline, sandbox=self.sandbox) as worker:
            await worker.send(message)
            try:
                return await self._follow(worker, ctx)
            except trio.EndOfChannel:
                raise self._crash(worker, worker.end_reason(self.cpu_time)) from None

    async def _follow(self, worker_process: WorkerProcess, ctx: Context[Any]) -> Any:
        """Do what the worker requests until it has a result. `watch.tree` looks for a parameter `worker_process`."""
        while True:
            message = await worker_process.receive()
            worker_process.done = message["say"] in ("result", "raised")
            match message["say"]:
                case "progress":
                    await ctx.report_progress(*message["values"])
                case "log":
                    await ctx.log(message["level"], message["data"], logger=message["logger"])
                case "ask":
                    await worker_process.send({"do": "answer", "id": message["id"], **await _answer(ctx, message)})
                case "result":
                    return converter_for(LATEST).load(message["result"], RESULTS[message["kind"]])
                case "raised":
                    raise unpack(message["error"])
                case "memory":
                    worker_process.kill(crashed=True)  # its state cannot be trusted
                    mib = None if self.memory is None else self.memory / 2**20
                    how = "ran out of memory" if mib is None else f"needed more than {mib:.4g} MiB of memory"
                    raise self._crash(worker_process, how, message["trace"])

    def _crash(self, worker: WorkerProcess, how: str, trace: str = "") -> ToolError:
        """Log how a worker ended, with its last output, and return the error for the model."""
        output = "\n".join(filter(None, (worker.output_tail(), trace)))
        shown = f"; what it wrote last:\n{output}" if output else ""
        log.error("the worker process %d of the tool %s %s%s", worker.process.pid, self.name, how, shown)
        return ToolError(f"{self.name} failed: its process {how}")


async def _answer(ctx: Context[Any], message: Mapping[str, Any]) -> dict[str, JSON]:
    method = METHODS[message["method"]]
    params = None if message["params"] is None else converter_for(LATEST).load(message["params"], method.params)
    try:
        return {"value": _dump(await ctx.ask(method.name, params, key=message["key"]))}
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

    Args:
        function: the tool's function.
        name: the tool's name.
        options: as the tool was added with.
        is_async: whether the function is async, which is refused.
        wants_context: whether the function takes the context.

    Raises:
        TypeError: it is async, or a worker could not find it; the text says what to do.
        ValueError: a bound is not positive, or a path of a sandbox does not exist.
        LocalError: its sandbox cannot be made here.
    """
    memory, cpu_time = options.get("memory"), options.get("cpu_time")
    if sys.platform == "win32":
        raise TypeError('run="process" needs process groups and resource limits, which this system does not have')
    if is_async:
        raise TypeError(f'the tool {name}: run="process" is for sync functions; an async one runs in the event loop')
    check_number("memory", memory, optional=True)
    check_number("cpu_time", cpu_time, optional=True)
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
    return RemoteTool(name, function, recipe, memory, cpu_time, wants_context, _sandbox_of(options, file))


def _sandbox_of(options: Mapping[str, Any], file: str) -> Sandbox | None:
    if options.get("isolation") != "bwrap":
        return None
    from trimcp.workers.bubblewrap import SCRATCH, Sandbox, of_python

    return Sandbox.of([*of_python(file), *options.get("read", ())], options.get("write", ()), SCRATCH)
