"""From a manifest to its name and entry in a server's registry: a function of the server, or another program."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, Unpack, get_args

import attrs

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.rules import RegistrationRules, prefix_of
from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.messages.manifests import NAME, Manifest
from trimcp.errors import ErrorReply, ToolError
from trimcp.framing.headers import find_mirrors
from trimcp.principal import Principal
from trimcp.protocol.events import Admission
from trimcp.schema.convert import ConversionError
from trimcp.schema.hints import split
from trimcp.schema.signature import ResultShape
from trimcp.schema.validator import Validator, validator_for
from trimcp.server.handlers.media import is_content
from trimcp.server.offering import Offering
from trimcp.server.tools import ToolEntry, ToolOptions, tool_entry
from trimcp.session.context import Context
from trimcp.support.cleaning import harmless
from trimcp.support.slotted import evolved
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.codes import FORBIDDEN, INTERNAL_ERROR, OVERLOADED, TIMED_OUT
from trimcp.wire.revisions import LATEST
from trimcp.wire.tool_versions import META_VERSION, version_in

if TYPE_CHECKING:
    from trimcp.agent_tools.catalog.callbacks import CallbackTarget

Progress: TypeAlias = Callable[[float, float | None, str | None], None]
"""Called with the progress of a call, its last value if known, and one line for a person. Never waits."""

_FIRST: Final = "1"
_ANY_RESULT: Final = ResultShape({"type": "object", "properties": {"result": {}}, "required": ["result"]}, wrapped=True)
_ANY_ARGUMENTS: Final = {"type": "object"}


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


_Template: TypeAlias = tuple[ToolEntry, ToolOptions]
"""What the entries of several manifests have in common: one to copy, and the options it was made with."""


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


def by_reference(name: str, given: Callable[..., Any] | Implemented) -> _Template:
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
    return entry, options


def _schema_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return what an implementation that takes all arguments wants: of a command, a text for each placeholder.

    A manifest may not leave one out: then the next argument of the program would be taken for it.
    """
    from trimcp.workers.commands import Command  # few servers need it

    schema = function.schema() if isinstance(function, Command) else {}
    return schema if schema.get("properties") else _ANY_ARGUMENTS


def version_of(entry: ToolEntry) -> str:
    """Return the version of a tool, "1" if it says none."""
    return version_in(entry.listed.meta) or _FIRST


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
    listed = evolved(entry.listed, output_schema=_ANY_RESULT.schema)
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


class Provider(Protocol):
    """Whoever carries out tools elsewhere and is connected now.

    Attributes:
        name: for logs.
    """

    @property
    def name(self) -> str: ...

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Carry out a call and return its result, any JSON value. Cancelling it cancels the call there.

        Args:
            manifest: as the provider sent it, without the prefix of its name.
            arguments: of the call, valid for the manifest.
            progress: reports how far the call is.
            request_id: as no other call has it.

        Raises:
            ToolFailed: the tool reports an error of its own.
            ProviderGone: the provider has disconnected; raised at once when it does.
            AgentToolsError: anything else that the provider answered.
        """


class EntryMaker:
    """Makes the entries of registered tools for one server."""

    def __init__(
        self,
        server: Offering,
        implementations: Mapping[str, Callable[..., Any] | Implemented],
        rules: RegistrationRules,
    ) -> None:
        self._server = server
        self._rules = rules
        self._implementations = {name: by_reference(name, given) for name, given in implementations.items()}
        for entry, _ in self._implementations.values():
            server.prepare_for(entry)  # they become tools only while the server runs

    def full_name(self, sent: Manifest, caller: AgentCaller, by: Provider | None) -> str:
        """Return the name under which a manifest is registered. Raises UnfitManifest."""
        if by is None and sent.callback is None:
            wanted = sent.implementation or sent.name
            if wanted not in self._implementations:
                raise errors.UnfitManifest(f"the server has no implementation named {harmless(wanted, 100)}")
            if "." in sent.name and sent.name not in self._implementations:
                raise errors.UnfitManifest(
                    "a name with a point is for tools that live elsewhere, which begin with a prefix"
                )
            return sent.name
        if by is not None and (sent.implementation is not None or sent.callback is not None):
            raise errors.UnfitManifest(
                "the tool of a provider is called on its stream: it has no implementation or callback"
            )
        prefix = (self._rules.prefix or prefix_of)(caller)
        if not prefix or sent.name.startswith(f"{prefix}."):
            return sent.name
        name = f"{prefix}.{sent.name}"
        if NAME.fullmatch(name) is None:
            raise errors.UnfitManifest(f"{harmless(name, 160)}, which has the prefix of this agent, is no tool's name")
        return name

    def entry(self, sent: Manifest, manifest: Manifest, by: Provider | None) -> ToolEntry | None:
        """Return the entry of a manifest; None for a callback, whose host is yet to be resolved."""
        if manifest.callback is not None:
            if self._rules.callbacks is None:
                raise errors.NotAllowed("this server calls no tools at URLs")
            self._rules.callbacks.check(manifest.callback)
            return None
        if by is None:
            return self._guarded(self._implementations[manifest.implementation or manifest.name], manifest)
        return self._elsewhere(by, sent, manifest)

    async def resolved(self, sent: Manifest, manifest: Manifest) -> ToolEntry:
        """Return the entry of a callback, at the addresses that its host has now."""
        assert self._rules.callbacks is not None
        assert manifest.callback is not None
        return self._elsewhere(await self._rules.callbacks.resolve(manifest.callback), sent, manifest)

    def _elsewhere(self, by: Provider | CallbackTarget, sent: Manifest, manifest: Manifest) -> ToolEntry:
        """Return the entry of a tool that another program carries out."""

        async def call(ctx: Context[Any], arguments: dict[str, Any]) -> Any:
            id = f"call_{secrets.token_urlsafe(12)}"
            try:
                return await by.call(sent, arguments, progress=ctx.report_progress_nowait, request_id=id)
            except errors.AgentToolsError as error:
                raise _as_answer(error) from error

        options: ToolOptions = {
            "name": manifest.name,
            "input_schema": _ANY_ARGUMENTS,
            "timeout": self._rules.timeout,
            "max_concurrent": self._rules.max_concurrent,
        }
        return self._guarded((_with_any_result(tool_entry(call, options)), options), manifest)

    def _guarded(self, template: _Template, manifest: Manifest) -> ToolEntry:
        """Return a template's entry for a manifest, with its rights."""
        entry, options = template
        first, own = manifest.validator, entry.validator
        listed = evolved(
            entry.listed,
            name=manifest.name,
            description=manifest.description or entry.listed.description,
            input_schema=dict(manifest.parameters),
            meta={**(options.get("meta") or {}), META_VERSION: manifest.version},
        )
        made = attrs.evolve(
            entry,
            listed=listed,
            validator=first if own.schema == _ANY_ARGUMENTS else _BothSchemas(first, own),
            mirrors=find_mirrors(manifest.parameters),
        )
        self._server.guard_tool(made, options)
        return made
