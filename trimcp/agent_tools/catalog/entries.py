"""Entries of a server's registry for manifests: with functions of the server, or carried out by another program."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeAlias, Unpack, get_args

import attrs

from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.errors import ErrorReply, ToolError
from trimcp.framing.headers import find_mirrors
from trimcp.principal import Principal
from trimcp.protocol.events import Admission
from trimcp.schema.convert import ConversionError
from trimcp.schema.hints import split
from trimcp.schema.signature import ResultShape
from trimcp.schema.validator import Validator, validator_for
from trimcp.server.media import is_content
from trimcp.server.tools import ToolEntry, ToolOptions, tool_entry
from trimcp.session.context import Context
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.codes import FORBIDDEN, INTERNAL_ERROR, OVERLOADED, TIMED_OUT
from trimcp.wire.revisions import LATEST

VERSION: Final = "version"
"""The key of a tool's `_meta` under which its version stands; a tool without it has version "1"."""

Elsewhere: TypeAlias = Callable[[Context[Any], dict[str, Any]], Awaitable[Any]]
"""Has a call carried out by another program, and returns its result: any JSON value."""

_FIRST: Final = "1"
_ANY_RESULT: Final = ResultShape({"type": "object", "properties": {"result": {}}, "required": ["result"]}, wrapped=True)
_ANY_ARGUMENTS: Final = {"type": "object"}

# mypy does not recognise a payload class as an attrs class.
_evolve: Callable[..., Any] = attrs.evolve


class Implemented:
    """A function that manifests may name as their implementation, with options: `Implemented(get_weather, timeout=5)`.

    Its arguments have to fit the manifest's schema and, as for any tool, its type hints. A function with the one
    parameter `arguments` takes all of them.

    Args:
        function: async or sync, as for `Server.tool`.
        options: see `ToolOptions`, without `name`.
    """

    def __init__(self, function: Callable[..., Any], **options: Unpack[ToolOptions]) -> None:
        if "name" in options:
            raise TypeError("an implementation has no name: its key in implementations is one, and its manifests have")
        self.function: Callable[..., Any] = function
        self.options: ToolOptions = options


@attrs.frozen(eq=False)
class EntryTemplate:
    """What the entries of several manifests have in common."""

    entry: ToolEntry  # an entry to copy
    options: ToolOptions  # the options it was made with

    def entry_for(self, manifest: Manifest) -> ToolEntry:
        """Return the entry of one manifest, yet without rights and confirmation."""
        entry, own = self.entry, self.entry.validator
        listed = _evolve(
            entry.listed,
            name=manifest.name,
            description=manifest.description or entry.listed.description,
            input_schema=dict(manifest.parameters),
            meta={**(self.options.get("meta") or {}), VERSION: manifest.version},
        )
        first = manifest.validator
        return attrs.evolve(
            entry,
            listed=listed,
            validator=first if own.schema == _ANY_ARGUMENTS else _BothSchemas(first, own),
            mirrors=find_mirrors(manifest.parameters),
        )


class _BothSchemas(Validator):
    """Valid is what fits a manifest's schema and that of the function which carries it out."""

    __slots__ = ("_second",)

    def __init__(self, first: Validator, second: Validator) -> None:
        self.schema = first.schema
        self._compiled = first._compiled
        self._second: Validator = second

    def is_valid(self, value: Any) -> bool:
        return super().is_valid(value) and self._second.is_valid(value)

    def problems(self, value: Any) -> list[str]:
        if not super().is_valid(value):
            return super().problems(value)
        return self._second.problems(value)


def by_reference(name: str, given: Callable[..., Any] | Implemented) -> EntryTemplate:
    """Return the template of an implementation. All its tools share one quota. Raises as `Server.tool` does."""
    implemented = given if isinstance(given, Implemented) else Implemented(given)
    options: ToolOptions = {**implemented.options, "name": name}
    entry = tool_entry(implemented.function, options)
    if "input_schema" not in options and list(entry.prepared.signature.parameters) == ["arguments"]:
        options["input_schema"] = _schema_of(implemented.function)
        entry = tool_entry(implemented.function, options)
    if entry.shape is None and options.get("structured", True):
        returned = entry.prepared.signature.return_type
        if not _returns_content(returned):
            entry = _with_any_result(entry)
    entry.turns = f"implementation {name}"
    return EntryTemplate(entry, options)


def _schema_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return what an implementation that takes all arguments wants: of a command, a text for each placeholder.

    A manifest may not leave one out: then the next argument of the program would be taken for it.
    """
    from trimcp.workers.commands import Command  # few servers need it

    schema = function.schema() if isinstance(function, Command) else {}
    return schema if schema.get("properties") else _ANY_ARGUMENTS


def elsewhere(function: Elsewhere, name: str, timeout: float, max_concurrent: int) -> EntryTemplate:
    """Return the template of a tool that another program carries out."""

    async def call(ctx: Context[Any], arguments: dict[str, Any]) -> Any:
        try:
            return await function(ctx, arguments)
        except errors.AgentToolsError as error:
            raise _as_answer(error) from error

    options: ToolOptions = {
        "name": name,
        "input_schema": _ANY_ARGUMENTS,
        "timeout": timeout,
        "max_concurrent": max_concurrent,
    }
    return EntryTemplate(_with_any_result(tool_entry(call, options)), options)


def version_of(entry: ToolEntry) -> str:
    """Return the version of a tool."""
    meta = entry.listed.meta
    found = None if meta is None else meta.get(VERSION)
    return found if isinstance(found, str) and found else _FIRST


def shown(entry: ToolEntry, principal: Principal | None) -> bool:
    """Return whether a tool is listed to a principal."""
    return entry.permission is None or (entry.permission.shown_to(principal) and not hidden(entry, principal))


def hidden(entry: ToolEntry, principal: Principal | None) -> bool:
    """Return whether a tool does not exist for a principal."""
    permission = entry.permission
    if permission is None or permission.visible is None:
        return False
    return permission.hides(Admission(LATEST, None, ClientCapabilities(), principal=principal))


def _with_any_result(entry: ToolEntry) -> ToolEntry:
    """Return an entry whose structured results are any JSON values."""
    listed = _evolve(entry.listed, output_schema=_ANY_RESULT.schema)
    return attrs.evolve(entry, listed=listed, shape=_ANY_RESULT, output_validator=validator_for(_ANY_RESULT.schema))


def _returns_content(hint: Any) -> bool:
    """Return whether a return type has content in it, which is sent as it is."""
    bare, _ = split(hint)
    return is_content(bare) or any(_returns_content(each) for each in get_args(bare))


def _as_answer(error: errors.AgentToolsError) -> Exception:
    """Return the exception that answers a call with what happened elsewhere."""
    if isinstance(error, errors.ToolFailed):
        return ToolError(error.message)
    if isinstance(error, errors.InvalidArguments):
        data = error.data if isinstance(error.data, Mapping) else {}
        problems = data.get("problems")
        return ConversionError([str(each) for each in problems] if isinstance(problems, list) else [error.message])
    if isinstance(error, errors.NotAllowed):
        return ErrorReply(FORBIDDEN, error.message)
    if isinstance(error, errors.DeadlinePassed):
        return ErrorReply(TIMED_OUT, error.message, {"reason": "deadline"})
    if isinstance(error, errors.TooMuch):
        more = {} if error.retry_after is None else {"retryAfter": error.retry_after}
        return ErrorReply(OVERLOADED, error.message, {"reason": "overloaded", **more})
    return ErrorReply(INTERNAL_ERROR, error.message, {"reason": error.code})
