"""Tools: building one from a function, and calling it (server/tools)."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs
import trio

from trimcp.errors import CannotAsk, ErrorReply, ToolError
from trimcp.framing.headers import METHOD, Mirror, check_params, find_mirrors
from trimcp.schema.convert import ConversionError, without_root
from trimcp.schema.signature import ResultShape
from trimcp.schema.validator import Fitter, Validator, check_author_schema, validator_for
from trimcp.server.handlers.calling import PreparedFunction, Validate, prepare
from trimcp.server.handlers.media import as_content, holds_content, json_text
from trimcp.server.options import ListedOptions, TaskMode, TaskRule, check_options, listed_members, name_of, task_rule
from trimcp.session.clock import WorkClock
from trimcp.session.context import Context
from trimcp.session.limits import Quota
from trimcp.support.bounds import check_number
from trimcp.support.nurseries import unwrap_single
from trimcp.wire.codes import HEADER_MISMATCH, INVALID_PARAMS, TIMED_OUT
from trimcp.wire.content import TextContent
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.jsonrpc import Unencodable, encode
from trimcp.wire.tool_versions import META_TAGS, META_VERSION
from trimcp.wire.tools import CallToolParams, CallToolResult, Tool, ToolAnnotations, failed_call

if TYPE_CHECKING:
    from trimcp.guard.permission import Confirmation, Permission
    from trimcp.server.caching import ResultCache
    from trimcp.server.handlers.pools import Pools
    from trimcp.store.tasks import Restart

log: logging.Logger = logging.getLogger("trimcp.server")

RunMode = Literal["inline", "thread", "process"]
"""How a sync function runs: in the event loop (it must be quick), in a thread of the server's own limiter, or, for
tools, in a worker process that is killed when its call is cancelled."""

Isolation = Literal["process", "bwrap"]
"""Where a sync tool runs apart from the server: in a worker process, or in one of its own in a sandbox (Linux)."""

_RUNS: Final = ("inline", "thread", "process")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")  # server/tools, "Tool Names", a SHOULD

_FINISHED: Final = (CallToolResult, InputRequiredResult)


class ToolOptions(ListedOptions, total=False):
    """The options of a tool, each with a default, beside those of `ListedOptions`.

    It has more than 20 fields because each is an option of one decorator.

    Attributes:
        annotations: hints on its behaviour: a `ToolAnnotations`, or a dict such as `{"readOnlyHint": True}`.
        input_schema: any JSON Schema 2020-12 of an object, sent unchanged; the function then takes its properties as
            keyword arguments, or all of them as the one parameter `arguments`.
        output_schema: the schema of the structured result, by default that of the return type.
        structured: False sends the result as content only.
        timeout: seconds for one call; then it is cancelled and the model gets a tool error. Waiting for a turn counts,
            waiting for the client's answer to a question does not.
        max_concurrent: calls that may run at once; others wait. Short for a quota.
        validate: a sync or async function of the arguments, called after they were validated and converted, before the
            tool; with `run="process"` it gets their JSON values. It raises `ToolError` or `ValueError` if they are
            wrong: the text is sent as that of invalid arguments. A sync one runs in the event loop, so it must be
            quick.
        confirm: True asks the user before each call, by elicitation; False never does, whatever `Server(confirm=)` is.
        run: how a sync function runs: "thread", "inline" or "process". For "process" define it at its module's top
            level.
        isolation: "process" is the same as `run="process"`. "bwrap" is that in a sandbox of bubblewrap (Linux), a new
            one for each call: no network, and no files but the system's, Python's and those of its module.
        read: with `isolation="bwrap"`, absolute paths that it may read beside those.
        write: with `isolation="bwrap"`, absolute paths that it may write.
        asks: with `isolation="bwrap"`, True lets what runs in the sandbox ask the client's user and model through its
            context, in the server's name. By default only declared questions (`Elicit`) are asked.
        memory: with `run="process"`, bytes of address space for its process (RLIMIT_AS).
        cpu_time: with `run="process"`, seconds of processor time for a call, rounded up (RLIMIT_CPU).
        ui: the address of the page that shows its results, added before with `server.ui`. Return content too, for
            models and for hosts that show no pages.
        visibility: who may call it, some of "model" and "app"; by default both. One for "app" alone is listed only to
            clients that show pages.
        task: "allowed" lets a call that takes long become a task, for clients that declared tasks: they fetch its
            result later (see `Server.tasks`). "required" makes each call one, and others get an error. Questions that
            the handler asks while it is a task, and those after a restart, begin it again from the top.
        task_after: with `task="allowed"`, the seconds within which its result is the answer; by default 1.
        restart: what becomes of a task whose server ends: "fail" tells that it may be half done, "resume" begins it
            again with its last checkpoint (`ctx.task.saved`), "again" begins it anew.
        tags: words by which tools are switched together (`Server.disable_tools`); listed in `_meta`.
        version: such as "2.1"; listed in `_meta`. Of several tools of one name, each with its version, the newest is
            listed and called by that name, and each as `NAME@VERSION`.
        cache: keeps results and answers equal calls with them, for a tool whose annotations say that it is idempotent
            or only reads.
    """

    annotations: ToolAnnotations | Mapping[str, Any] | None
    input_schema: Mapping[str, Any] | None
    output_schema: Mapping[str, Any] | None
    structured: bool
    timeout: float | None
    max_concurrent: int | None
    validate: Validate | None
    confirm: bool | None
    run: RunMode
    isolation: Isolation | None
    read: Sequence[str | os.PathLike[str]]
    write: Sequence[str | os.PathLike[str]]
    asks: bool
    memory: int | None
    cpu_time: float | None
    ui: str | None
    visibility: Sequence[Literal["model", "app"]] | None
    task: TaskMode
    task_after: float | None
    restart: Restart
    tags: Iterable[str]
    version: str | None
    cache: ResultCache | None


@attrs.define(eq=False, repr=False)
class ToolEntry:
    """One tool: its listing and the objects that its calls need, built once."""

    listed: Tool
    prepared: PreparedFunction
    validator: Validator
    shape: ResultShape | None
    output_validator: Validator | None
    timeout: float | None
    quota: Quota | None
    mirrors: tuple[Mirror, ...] = ()
    confirmation: Confirmation | None = None
    permission: Permission | None = None
    task: TaskRule | None = None
    turns: str = ""  # the name under which its calls are counted; "" for its own

    def __attrs_post_init__(self) -> None:
        self.turns = self.turns or self.listed.name

    async def call(self, pools: Pools, ctx: Context[Any], params: CallToolParams) -> Any:
        """Run a call and return its result, also for `ToolError`s and, from 2025-11-25 on, wrong arguments."""
        arguments = params.arguments
        if arguments is None:
            arguments = {}
        if self.mirrors:
            check_headers(self.listed.name, self.mirrors, ctx, arguments)
        try:
            if not self.validator.is_valid(arguments):
                return self._refuse(ctx, self.validator.problems(arguments))
            if self.permission is not None or self.confirmation is not None:
                await self.obtain(ctx, arguments)
            if self.timeout is not None:
                value = await self._timed(pools, ctx, arguments, self.timeout)
            elif self.quota is None and not pools.bounded:  # as `in_turn` decides; saves most calls one function call
                value = await self.prepared.run(pools, ctx, arguments)
            else:
                run = self.prepared.run
                value = await pools.in_turn(ctx, "tool", self.turns, self.quota, run, arguments)
            return self.make_result(value)
        except ConversionError as error:
            return self._refuse(ctx, error.problems)
        except (ToolError, CannotAsk, trio.TooSlowError, ExceptionGroup) as error:
            text = error_text(self.listed.name, error)
            if text is None:
                raise
            return failed_call(text)

    async def obtain(self, ctx: Context[Any], arguments: Mapping[str, Any]) -> None:
        """Return once its `allow` function, and the user if that or the tool asks, allow a call. Raises ErrorReply."""
        if self.permission is not None:
            await self.permission.obtain(ctx, self.listed.name, arguments)
        if self.confirmation is not None:
            await self.confirmation.obtain(ctx, arguments)

    async def _timed(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any], timeout: float) -> Any:
        """Run within the tool's own timeout. Waiting for a turn counts, waiting for the client's answer does not."""
        clock = WorkClock(timeout, math.inf)
        with clock.scope, ctx.timed_by(clock):
            run = self.prepared.run
            return await pools.in_turn(ctx, "tool", self.turns, self.quota, run, arguments)
        text = f"{self.listed.name} did not finish within {timeout:g} seconds"
        raise ErrorReply(TIMED_OUT, text) if _has_own_errors(ctx) else ToolError(text)

    def _refuse(self, ctx: Context[Any], problems: list[str]) -> CallToolResult:
        """Report wrong arguments: from 2025-11-25 on as a tool error (SEP-1303), before as a protocol error."""
        problems = without_root(problems)
        text = f"invalid arguments for {self.listed.name}: {'; '.join(problems)}"
        if ctx.revision.invalid_arguments_are_tool_errors and not _has_own_errors(ctx):
            return failed_call(text)
        raise ErrorReply(INVALID_PARAMS, text[:500], {"problems": problems})

    def make_result(self, value: Any) -> Any:
        if isinstance(value, _FINISHED):
            remote = self.prepared.remote
            sandboxed = remote is not None and remote.sandbox is not None
            if sandboxed and isinstance(value, CallToolResult) and value.is_error is not True:
                self._fitting(value.structured_content)  # nothing in there holds it to the schema
            return value
        shape = self.shape
        try:
            if shape is None or (shape.untyped and holds_content(value)):
                if type(value) is str:  # what most tools return
                    return CallToolResult([TextContent(value)], is_error=False)
                return CallToolResult(content=as_content(value), is_error=False)
            structured = shape.dump(value)
        except ConversionError as error:  # otherwise it would be reported as wrong arguments
            raise TypeError(f"{self.listed.name} returned what JSON cannot carry: {error}") from error
        structured = self._fitting(structured)
        shown = structured["result"] if shape.wrapped else structured
        text = shown if isinstance(shown, str) else json_text(shown)
        return CallToolResult(content=[TextContent(text)], structured_content=structured, is_error=False)

    def _fitting(self, structured: Any) -> Any:
        """Return a result that fits the schema. Raises TypeError, or Unencodable for what JSON cannot carry."""
        validator = self.output_validator
        if validator is None or validator.is_valid(structured):
            return structured
        encode(structured)
        fitting = Fitter(validator.schema).fit(structured, validator.schema)
        if validator.is_valid(fitting):
            return fitting
        problems = "; ".join(validator.problems(structured))
        raise TypeError(f"{self.listed.name} returned what its outputSchema forbids: {problems}")


def check_headers(name: str, mirrors: tuple[Mirror, ...], ctx: Context[Any], arguments: Mapping[str, Any]) -> None:
    """Check the headers that repeat arguments of a tool, if the request has the header `Mcp-Method`.

    Headers of a WebSocket upgrade are not checked: they do not describe single requests.

    Raises ErrorReply: they differ.
    """
    headers = ctx.headers
    if METHOD in headers and ctx.revision.method_headers:
        mismatch = check_params(mirrors, arguments, headers)
        if mismatch is not None:
            from trimcp.security import security_event

            security_event("header_mismatch", why=mismatch, tool=name, principal=ctx.principal)
            raise ErrorReply(HEADER_MISMATCH, mismatch)


def _has_own_errors(ctx: Context[Any]) -> bool:
    """Return whether a call came by another protocol, which has errors for what MCP tells in results."""
    return getattr(ctx.internals[1].origin, "explicit_errors", False) is True


def error_text(name: str, error: BaseException) -> str | None:
    """Return the text sent to the model for a tool's exception, or None if it gets none."""
    cause = unwrap_single(error)
    if isinstance(cause, ToolError) or (isinstance(cause, CannotAsk) and cause.required is None):
        return str(cause)
    if isinstance(cause, Unencodable) and "surrogate" in str(cause):
        return f"the result of {name} cannot be sent: {cause}"
    if isinstance(cause, trio.TooSlowError):
        from trimcp.support.cleaning import log_crash

        log_crash(log, error, "the tool %s ran into a time limit of its own", name, level=logging.DEBUG)
        return f"{name} gave up: a time limit in its own code has passed"
    return None


def _run_mode(options: ToolOptions) -> str:
    """Return where a sync function runs. Raises TypeError if the options contradict each other."""
    isolation, run = options.get("isolation"), options.get("run")
    if isolation != "bwrap" and (options.get("read") or options.get("write") or options.get("asks")):
        raise TypeError('read, write and asks open a sandbox; add isolation="bwrap"')
    if isolation is None:
        return run or "thread"
    if isolation not in get_args(Isolation):
        hint = 'a program is added by server.add_command("name", ["program", "{argument}"])'
        raise TypeError(f"isolation of a function is 'process' or 'bwrap', not {isolation!r}; {hint}")
    if run not in (None, "process"):
        raise TypeError(f"isolation={isolation!r} runs it in a process; drop run={run!r}")
    return "process"


def warn_of_name(name: str) -> None:
    """Log a warning for a name that hosts may refuse: the specification's rule has other characters."""
    if _NAME.fullmatch(name) is None:
        text = "the tool %r has a name that hosts may refuse: letters, digits, _, - and . are safe, and at most 128"
        log.warning(text, name[:200])


def tool_entry(function: Callable[..., Any], options: ToolOptions) -> ToolEntry:
    """Build a tool from a function. Raises TypeError and ValueError as `Offering.tool` does."""
    checked = check_options(options, ToolOptions)
    timeout, max_concurrent = options.get("timeout"), options.get("max_concurrent")
    check_number("timeout", timeout, optional=True)
    check_number("max_concurrent", max_concurrent, whole=True, optional=True)
    quota = options.get("quota")
    if max_concurrent is not None:
        quota = attrs.evolve(quota or Quota(), running=max_concurrent)
    given, promised = options.get("input_schema"), options.get("output_schema")
    validate = options.get("validate")
    if validate is not None and not callable(validate):
        raise TypeError("validate is a function of the arguments")
    mode = _run_mode(options)
    prepared = prepare(function, run=mode, runs=_RUNS, schema_given=given is not None, validate=validate)
    schema = prepared.signature.input_schema
    if given is not None:
        schema = dict(given)
        if schema.get("type") != "object":  # some clients refuse a whole list for it
            raise TypeError('input_schema describes the arguments, an object: add "type": "object"')
    validator = validator_for(schema) if given is None else check_author_schema(schema)
    name = name_of(options, prepared.signature.name, "tool")
    try:
        mirrors = find_mirrors(schema)
    except ValueError as error:
        raise TypeError(f"the tool {name}: {error}") from None
    shape = None
    if promised is not None:
        shape = ResultShape(dict(promised))
    elif options.get("structured", True):
        shape = prepared.result_shape()
    memory, cpu_time = options.get("memory"), options.get("cpu_time")
    if prepared.run_mode == "process":
        from trimcp.workers.remote import remote_tool  # few servers need it

        wants_context = prepared.context_parameter is not None
        prepared.remote = remote_tool(function, name, options, is_async=prepared.is_async, wants_context=wants_context)
    elif memory is not None or cpu_time is not None:
        raise TypeError(f'the tool {name}: memory and cpu_time bound a process of its own; add run="process"')
    page, visibility = options.get("ui"), options.get("visibility")
    if page is not None or visibility is not None:
        from trimcp.server.extensions.apps import app_link  # few servers need it

        checked["meta"] = {**(checked.get("meta") or {}), "ui": app_link(page, visibility)}
    chosen = {META_TAGS: list(options.get("tags") or ()), META_VERSION: options.get("version")}
    if any(chosen.values()):
        checked["meta"] = {**(checked.get("meta") or {}), **{key: one for key, one in chosen.items() if one}}
    task: TaskRule | None = None
    if not options.keys().isdisjoint(("task", "task_after", "restart")):
        mode, restart = options.get("task", "never"), options.get("restart", "fail")
        task = task_rule(name, mode, options.get("task_after"), restart)
    promise = None if shape is None or shape.untyped else shape.schema
    check = validator_for if promised is None else check_author_schema
    listed = Tool(
        input_schema=schema,
        output_schema=promise,
        annotations=checked.get("annotations") or None,
        **listed_members(checked, name, prepared.signature.description),
    )
    return ToolEntry(
        listed=listed,
        prepared=prepared,
        validator=validator,
        shape=shape,
        output_validator=None if promise is None else check(promise),
        timeout=timeout,
        quota=quota,
        mirrors=mirrors,
        task=task,
    )
