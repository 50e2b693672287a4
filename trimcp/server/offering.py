"""A server's tools, resources, prompts and completions, added before it runs or while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, Unpack, get_args, overload

import attrs

from trimcp.budget import Budget
from trimcp.errors import LocalError
from trimcp.protocol.events import Admission, Admitted
from trimcp.protocol.profile import Profile
from trimcp.protocol.request_state import Sealer
from trimcp.server.handlers.calling import Handler, at_users_line, prepare
from trimcp.server.handlers.needs import Needs
from trimcp.server.options import check_method, check_options, check_quota, check_scopes
from trimcp.server.registry import Bus, Change, Registry
from trimcp.server.tools import RunMode, ToolEntry, ToolOptions, tool_entry, warn_of_name
from trimcp.session.incoming.job import Finished
from trimcp.session.limits import Limits, Quota
from trimcp.support.bounds import check_callable, check_members, check_truth
from trimcp.wire.capabilities import APPS, PromptsCapability, ResourcesCapability, ServerCapabilities, ToolsCapability
from trimcp.wire.common import CacheScope
from trimcp.wire.given import given_settings
from trimcp.wire.methods import METHODS

# A server that has only tools does not load the modules for resources and prompts.
if TYPE_CHECKING:
    from trimcp.guard.audit import Audit
    from trimcp.guard.filters import AppliedFilter, Filter
    from trimcp.guard.permission import Allow, Fallback, Permission
    from trimcp.server.commands import CommandOptions
    from trimcp.server.prompts import Completer, PromptEntry, PromptOptions
    from trimcp.server.resources import ResourceEntry, ResourceOptions
    from trimcp.session.session import Session

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
EntryT = TypeVar("EntryT")
FilterT = TypeVar("FilterT", bound="Filter")

Confirm = Literal["destructive"]
"""Which tools run only after the user agreed: those with the annotation `destructive_hint=True`."""

Offers = Literal["tools", "resources", "prompts"]
"""What a server may offer: each is a capability with lists of its own."""
_OFFERS: Final = get_args(Offers)
_Entry: TypeAlias = "ToolEntry | ResourceEntry | PromptEntry"

HandlerErrors = Literal["log", "tell", "raise"]
"""How an unexpected exception of a handler is treated; see `Server`."""

Middleware = Callable[[Any, Any, Callable[[Any, Any], Awaitable[Any]]], Awaitable[Any]]
"""`async def middleware(ctx, params, call_next)`: returns `await call_next(ctx, params)`, or a result of its own.

`ctx` is the `Context` of a request, or the `Notice` of a notification, whose result is dropped."""
MiddlewareT = TypeVar("MiddlewareT", bound=Middleware)


@attrs.frozen(eq=False, repr=False)
class Notice(Admitted):
    """One notification from a client, as middleware sees it.

    Attributes:
        method: such as `notifications/roots/list_changed`.
        admission: its sender.
        state: the value that the server's lifespan yielded.
    """

    method: str
    admission: Admission
    state: Any


class Offering:
    """A server's tools, resources, prompts and extensions, and the capabilities it declares for them.

    It has more than 300 lines because each kind of thing that is offered is added, removed and found by documented
    methods.
    """

    limits: Limits
    budget: Budget
    sealer: Sealer
    page_size: int | None
    list_ttl_ms: int
    list_cache_scope: CacheScope
    max_threads: int
    max_processes: int | None
    handler_errors: HandlerErrors
    audit: Audit | None
    on_finished: list[Finished]
    confirm: Confirm | None
    confirm_fallback: Fallback

    def __init__(
        self,
        profile: Profile,
        *,
        dynamic: bool,
        extensions: Mapping[str, Mapping[str, Any]],
        offers: Iterable[Offers] = _OFFERS,
    ) -> None:
        self.profile: Profile = profile
        self.dynamic: bool = dynamic
        self.offers: frozenset[str] = frozenset(
            offers if isinstance(offers, str) else check_members("offers", offers, str, "texts")
        )
        if not self.offers <= set(_OFFERS):
            raise ValueError(f"offers are some of {', '.join(map(repr, _OFFERS))}, not {offers!r:.60}")
        self.extensions: dict[str, dict[str, Any]] = given_settings("extensions", extensions) or {}
        self.changes: Bus = Bus()
        self.tools: Registry[ToolEntry] = Registry("tool", self.changes, Change.TOOLS)
        self._normal_uris: dict[str, str] | None = None  # those of `resources`, by their normal form, once needed
        self.resources: Registry[ResourceEntry] = Registry("resource", self.changes, Change.RESOURCES)
        self.templates: Registry[ResourceEntry] = Registry("resource template", self.changes, Change.RESOURCES)
        self.prompts: Registry[PromptEntry] = Registry("prompt", self.changes, Change.PROMPTS)
        self.notification_handlers: dict[str, list[Callable[[Any], Awaitable[object]]]] = {}
        self.foreign: dict[str, Handler] = {}
        self.completers: dict[tuple[str, str], Completer] = {}
        self.needs: Needs = Needs()
        self.middlewares: list[Middleware] = []
        self._filters: list[AppliedFilter] = []
        self.around: Callable[[Handler], Handler] | None = None  # goes around each handler, outermost
        self.on_session: Callable[[Session, bool], object] | None = None  # told of each that begins (True) or has ended
        self._lifespans = 0
        self._declare()

    # Tools

    @overload
    def tool(self, function: FunctionT, /) -> FunctionT: ...
    @overload
    def tool(self, /, **options: Unpack[ToolOptions]) -> Callable[[FunctionT], FunctionT]: ...
    @at_users_line
    def tool(self, function: Any = None, /, **options: Unpack[ToolOptions]) -> Any:
        """Offer a function as a tool: `@server.tool` or `@server.tool(timeout=5, ...)`.

        The schema follows from type hints, the descriptions from the docstring. An async function runs in the event
        loop; a sync one in a thread, or with `run="inline"` in the loop, where it must be quick, or with
        `run="process"` in a worker process that is killed with its call; with `isolation="bwrap"` that is in a sandbox.

        Args:
            function: the function; its parameters are the tool's arguments, except a `Context` and declared questions.
            options: see `ToolOptions`.

        Raises:
            TypeError: a type has no JSON Schema, a given schema is not valid, an option is unknown, or a worker process
                could not find the function (`run="process"`); the text says what to do.
            ValueError: `timeout`, `max_concurrent`, `memory` or `cpu_time` is not positive, or a path does not exist.
            LocalError: a tool of that name exists, or its sandbox cannot be made here.
        """
        return _decorate(self.add_tool, function, options)

    @at_users_line
    def add_tool(self, function: Callable[..., Any], **options: Unpack[ToolOptions]) -> None:
        """Offer a function as a tool, as `tool` does; also while the server runs, then clients are notified."""
        checked: Any = check_options(options, ToolOptions)
        entry = tool_entry(function, checked)
        self.guard_tool(entry, checked)
        if "ui" in checked or "visibility" in checked:
            if entry.listed.app is not None and self.find_resource(entry.listed.app)[0] is None:
                raise LocalError(f"there is no page {entry.listed.app}: add it with server.ui before the tool")
            self.extend(APPS)
        self.add_entry(self.tools, entry.listed.name, entry)
        warn_of_name(entry.listed.name)

    def guard_tool(self, entry: ToolEntry, options: ToolOptions) -> None:
        """Give a tool the confirmation and the permission that its options and the server's settings require."""
        confirm = options.get("confirm")
        if confirm is None:
            hints = entry.listed.annotations
            confirm = self.confirm == "destructive" and hints is not None and hints.destructive_hint is True
        if confirm:
            from trimcp.guard.permission import Confirmation

            entry.confirmation = Confirmation(entry.listed, self.confirm_fallback)
        entry.permission = _permission(options, entry)

    def put_tool(self, name: str, entry: ToolEntry, *, listed: bool = True) -> None:
        """Offer a finished tool under a name, in the place of any other; `listed` is for a name that is new.

        A tool that is not listed may be called by those who know its name.
        """
        if name in self.tools:
            self.tools.add(name, entry, live=self._live, replace=True, **_seen_by(entry))
            self._declare()
        else:
            Offering.add_entry(self, self.tools, name, entry, listed)

    @at_users_line
    def add_command(self, name: str, command: Sequence[str], /, **options: Unpack[CommandOptions]) -> None:
        """Offer an external program as a tool: `add_command("grep", ["grep", "-n", "--", "{pattern}", "{file}"])`.

        It runs once for each call, without a shell, in a directory of its own, with little of our environment, and is
        killed with its call, with everything it has started. `isolation="bwrap"` runs it in a sandbox (Linux).

        Args:
            name: the tool's name.
            command: the program and its arguments. `{pattern}` is replaced by that argument of the call: it is one
                argument of the program, or part of one, whatever it contains. Without a value it is left out. One that
                begins with "-" is refused, unless "--" or other text stands before it. `{{pattern}}` is no placeholder.
            options: see `CommandOptions`.

        Raises:
            TypeError: the command, its placeholders or a schema are not valid, or an option is unknown.
            ValueError: a number is not positive, or a path does not exist.
            LocalError: a tool of that name exists; the program is not installed; or with "bwrap", bubblewrap is not
                installed, or the system lets it make no sandbox.
        """
        from trimcp.server.commands import command_tool  # few servers need it

        function, tool_options = command_tool(name, command, options)
        self.add_tool(function, **tool_options)

    def remove_tool(self, name: str) -> None:
        """Stop offering a tool; running calls continue. Raises KeyError for an unknown name."""
        self._remove(self.tools, name)

    def expect_tools(self) -> None:
        """Declare that the list of tools may change, also to clients that connect before it first does."""
        self.tools.touched = True
        self._declare()

    # Resources

    def resource(
        self, uri: str, *, run: RunMode = "thread", guard: bool = True, **options: Unpack[ResourceOptions]
    ) -> Callable[[FunctionT], FunctionT]:
        """Offer a function's return value as a resource, or as a resource template: `@server.resource("notes://{name}")`.

        A URI with braces is an RFC 6570 template, whose variables are the function's parameters; a URI whose text does
        not fit their types does not match. The function may return text, bytes, contents, a list of them, or any JSON
        value; None means that the resource does not exist.

        Args:
            uri: the URI or the template.
            run: how a sync function runs, "thread" or "inline".
            guard: False lets variables match values that leave a directory (`..`); then check them yourself.
            options: see `ResourceOptions`.

        Raises:
            LocalError: a resource with that URI exists.
            TypeError: the template's variables and the function's parameters differ, or an option is unknown.
        """
        if not isinstance(uri, str):
            raise TypeError('a resource needs its address: @server.resource("notes://today")')
        check_truth("guard", guard)

        @at_users_line
        def decorate(function: FunctionT) -> FunctionT:
            from trimcp.server.resources import ResourceOptions, from_function

            checked: Any = check_options(options, ResourceOptions)
            self._add_resource(from_function(uri, function, checked, run=run, guard=guard), checked)
            return function

        return decorate

    @at_users_line
    def add_resource(self, uri: str, content: str | bytes | Path, **options: Unpack[ResourceOptions]) -> None:
        """Offer fixed text or bytes, or a file that is read for each request; also while the server runs."""
        from trimcp.server.resources import ResourceOptions, from_content

        if not isinstance(uri, str):
            raise TypeError(f"a resource needs its address, such as 'notes://today', not {uri!r:.60}")
        checked: Any = check_options(options, ResourceOptions)
        self._add_resource(from_content(uri, content, checked), checked)

    def _add_resource(self, entry: ResourceEntry, options: ResourceOptions) -> None:
        entry.permission = _permission(options)
        self._normal_uris = None
        self.add_entry(self.resources if entry.template is None else self.templates, entry.address, entry)

    def remove_resource(self, uri: str) -> None:
        """Stop offering a resource or a template. Raises KeyError for an unknown URI."""
        self._remove(self.templates if uri in self.templates else self.resources, uri)

    def find_resource(self, uri: str) -> tuple[ResourceEntry | None, Mapping[str, Any]]:
        """Return the resource with this URI, or the first template that matches it and its variables; else None."""
        entry = self.resources.get(uri)
        if entry is not None:
            return entry, {}
        for family in self.templates:
            variables = family.match(uri)
            if variables is not None:
                return family, variables
        from trimcp.server.resources import normal_uri

        if self._normal_uris is None:
            self._normal_uris = {normal_uri(each.address): each.address for each in self.resources}
        return self.resources.get(self._normal_uris.get(normal_uri(uri), uri)), {}

    def resource_updated(self, uri: str) -> None:
        """Notify the subscribers of this resource that its contents changed. Never blocks; call it in Trio's thread."""
        self.changes.publish(uri)

    # Prompts and completion

    @overload
    def prompt(self, function: FunctionT, /) -> FunctionT: ...
    @overload
    def prompt(self, /, **options: Unpack[PromptOptions]) -> Callable[[FunctionT], FunctionT]: ...
    @at_users_line
    def prompt(self, function: Any = None, /, **options: Unpack[PromptOptions]) -> Any:
        """Offer a function as a prompt: its parameters are the arguments; `Literal`s become choices.

        Arguments are text on the wire. Numbers and booleans are converted; a text that does not fit is refused.
        The function returns text (one user message), content, `PromptMessage`s, or a list of those.
        """
        return _decorate(self.add_prompt, function, options)

    @at_users_line
    def add_prompt(self, function: Callable[..., Any], **options: Unpack[PromptOptions]) -> None:
        """Offer a function as a prompt, as `prompt` does; also while the server runs."""
        from trimcp.server.prompts import PromptOptions, prompt_entry

        checked: Any = check_options(options, PromptOptions)
        entry = prompt_entry(function, checked)
        entry.permission = _permission(checked)
        self.add_entry(self.prompts, entry.listed.name, entry)

    def remove_prompt(self, name: str) -> None:
        """Stop offering a prompt. Raises KeyError for an unknown name."""
        self._remove(self.prompts, name)

    def complete(
        self,
        target: str | Callable[..., Any],
        argument: str,
        *,
        quota: Quota | None = None,
        scopes: Iterable[str] = (),
        allow: Allow | None = None,
    ) -> Callable[[FunctionT], FunctionT]:
        """Suggest values for an argument: `@server.complete("review", "path")`.

        The function gets the text typed so far, and in a parameter `context`, if it has one, the arguments that are
        already known. It returns suggestions, best first.

        Args:
            target: a prompt's name or function, or a resource template.
            argument: the prompt's argument or the template's variable.
            quota: how many may run at once, begin per second and wait; by default `Limits.completion`.
            scopes: the scopes that a token needs, all of them.
            allow: a sync or async function that allows or denies each request.
        """
        if not isinstance(target, str) and not hasattr(target, "__name__"):
            raise TypeError(f"what is completed is a prompt's name or function, or a template, not {target!r:.60}")
        if not isinstance(argument, str):
            raise TypeError(
                f'complete needs the argument\'s name: @server.complete("review", "path"), not {argument!r:.60}'
            )
        check_quota("quota", quota)
        wanted = check_scopes("scopes", scopes)
        name = target if isinstance(target, str) else target.__name__

        @at_users_line
        def decorate(function: FunctionT) -> FunctionT:
            from trimcp.server.prompts import Completer

            prepared = prepare(function)
            self.needs.add(prepared.needs, live=self._live)
            permission = _permission({"scopes": wanted, "allow": allow})
            self.completers[(name, argument)] = Completer(prepared, quota, permission)
            self._declare()
            return function

        return decorate

    @property
    def completes(self) -> bool:
        return bool(self.completers) or any(entry.choices for entry in self.prompts)

    # Around handlers

    def middleware(self, function: MiddlewareT) -> MiddlewareT:
        """Run `async def function(ctx, params, call_next)` around every request and notification, the first outermost.

        `ctx.method` is its name; for a notification `ctx` is a `Notice`. Requests of the connection itself
        (`initialize`, `ping`, `server/discover`, `logging/setLevel`) pass none. Raises LocalError once the server runs.
        """
        if self._live:
            raise LocalError("middleware cannot be added while the server runs")
        check_callable("middleware", function)
        self.middlewares.append(function)
        return function

    def wrap(self, handler: Handler) -> Handler:
        """Return a handler with all middleware around it."""
        for middleware in reversed(self.middlewares):
            handler = _around(middleware, handler)
        return handler

    @overload
    def filter(
        self, function: FilterT, /, *, names: str | Sequence[str] | None = None, methods: Sequence[str] | None = None
    ) -> FilterT: ...
    @overload
    def filter(
        self, /, *, names: str | Sequence[str] | None = None, methods: Sequence[str] | None = None
    ) -> Callable[[FilterT], FilterT]: ...
    def filter(
        self, function: Any = None, /, *, names: str | Sequence[str] | None = None, methods: Sequence[str] | None = None
    ) -> Any:
        """Pass each result of a tool, resource or prompt through a function before it is sent: `@server.filter`.

        `def function(ctx, params, result)`, sync or async, returns the result to send: the same or another one. It
        withholds a result by raising `ToolError` or `ErrorReply`; if it crashes, the client gets an internal error and
        the exception is logged. Filters run in the order they were added, outside all middleware. Questions to the user
        and protocol errors are not filtered.

        Args:
            function: the filter, such as `trimcp.guard.SecretsFilter()`.
            names: only for tools and prompts of this name, or resources of this URI; `*` and `?` as in a shell.
            methods: only for some of "tools/call", "resources/read" and "prompts/get".

        Raises:
            LocalError: the server runs.
            TypeError: the filter is not callable.
            ValueError: the results of a method cannot be filtered.
        """

        def add(function: FilterT) -> FilterT:
            from trimcp.guard.filters import AppliedFilter

            if self._live:
                raise LocalError("filters cannot be added while the server runs")
            self._filters.append(AppliedFilter.of(function, names, methods))
            return function

        return add if function is None else add(function)

    def filtered(self, name: str, handler: Handler) -> Handler:
        """Return the handler of a method with the filters for its results around it."""
        filters = [applied for applied in self._filters if name in applied.methods]
        if not filters:
            return handler
        from trimcp.guard.filters import filtered

        return filtered(name, handler, filters)

    def audited(self, name: str, handler: Handler) -> Handler:
        """Return the handler of a method inside the audit, if that refuses what it cannot record."""
        audit = self.audit
        return audit.guarded(handler) if audit is not None and audit.required and name in audit.methods else handler

    def notification(self, name: str) -> Callable[[FunctionT], FunctionT]:
        """Call an async function with the params of each notification of that name from a client.

        It runs in a task of the client's session; a crash is only logged.
        """

        check_method(name, "notification", "notifications/roots/list_changed")

        def decorate(function: FunctionT) -> FunctionT:
            check_callable("what a notification is passed to", function)
            self.notification_handlers.setdefault(name, []).append(function)
            return function

        return decorate

    def function_of(self, method: str, params: Any) -> Callable[..., Any] | None:
        """Return the registered function that handles a request, or None."""
        entry: Any = self.foreign.get(method)
        if method == "tools/call":
            entry = self.tools.get(params.name)
        elif method == "prompts/get":
            entry = self.prompts.get(params.name)
        elif method == "resources/read":
            entry, _ = self.find_resource(params.uri)
            entry = getattr(entry, "source", None)
        elif method == "completion/complete":
            ref = params.ref
            entry = self.completers.get((getattr(ref, "name", None) or ref.uri, params.argument.name))
        entry = getattr(entry, "prepared", entry)
        function = getattr(entry, "function", entry)
        return function if callable(function) else None

    def runs_in_thread(self, tool: str) -> bool:
        """Return whether a tool of this name exists and runs in threads."""
        entry = self.tools.get(tool)
        return entry is not None and entry.prepared.run_mode == "thread" and not entry.prepared.is_async

    def add_entry(self, registry: Registry[Any], name: str, entry: _Entry, listed: bool = True) -> None:
        """Add an entry to its registry, and serve what it needs. Called by `tool` and its like, and by `include`."""
        if registry.change.value not in self.offers:
            raise LocalError(f"this server does not offer {registry.change.value}; see Server(offers=)")
        self.prepare_for(entry)
        registry.add(name, entry, live=self._live, listed=listed, **_seen_by(entry))
        self._declare()

    def prepare_for(self, entry: _Entry) -> None:
        """Have each run begin with what an entry needs. Raises LocalError: one has begun without it."""
        prepared = getattr(entry, "prepared", None) or getattr(entry, "source", None)
        self.needs.add(getattr(prepared, "needs", ()), live=self._live)

    def _remove(self, registry: Registry[Any], name: str) -> None:
        registry.remove(name, live=self._live)
        self._declare()

    # Capabilities

    def extend(self, id: str, **settings: Any) -> None:
        """Declare an extension, with settings beside those that were given for it."""
        self.extensions[id] = {**settings, **self.extensions.get(id, {})}
        self._declare()

    @property
    def _live(self) -> bool:
        return self._lifespans > 0

    def announced(self) -> frozenset[Change]:
        """Return the lists for which `listChanged` is declared."""
        registries: tuple[Registry[Any], ...] = (self.tools, self.resources, self.templates, self.prompts)
        changing = {registry.change for registry in registries if self.dynamic or registry.touched}
        return frozenset(change for change in changing if change.value in self.offers)

    def offers_method(self, name: str) -> bool:
        """Return whether a method belongs to what is offered here."""
        root = ((METHODS[name].capability or "") if name in METHODS else "").partition(".")[0]
        return root in self.offers or root not in _OFFERS

    def _declare(self) -> None:
        """Update the declared capabilities. Lists of what is offered are served also while they are empty."""
        announced, offers = self.announced(), self.offers
        resources = ResourcesCapability(
            subscribe=self.dynamic or bool(len(self.resources) or len(self.templates)),
            list_changed=Change.RESOURCES in announced,
        )
        prompts = PromptsCapability(list_changed=Change.PROMPTS in announced)
        self.profile.capabilities = ServerCapabilities(
            tools=ToolsCapability(list_changed=Change.TOOLS in announced) if "tools" in offers else None,
            resources=resources if "resources" in offers else None,
            prompts=prompts if "prompts" in offers else None,
            completions={} if self.completes else None,
            logging={},
            extensions=self.extensions or None,
        )


def _seen_by(entry: ToolEntry | ResourceEntry | PromptEntry) -> Any:
    """Return what a registry has to know to list an entry to those who may see it."""
    permission = entry.permission
    hides = None if permission is None or permission.visible is None else permission.hides
    if isinstance(entry, ToolEntry) and not entry.listed.visible_to("model"):
        hides = partial(_hidden_without_apps, hides)
    return {"scopes": frozenset() if permission is None else permission.scopes, "hides": hides}


def _hidden_without_apps(hides: Callable[[Admission], bool] | None, who: Admission) -> bool:
    """Return whether a tool of pages alone is hidden: who shows no pages would offer it to a model."""
    capabilities: Any = who.capabilities  # a client's
    return not capabilities.shows_apps or (hides is not None and hides(who))


def _permission(options: Mapping[str, Any], tool: ToolEntry | None = None) -> Permission | None:
    """Return the permission that an entry's options require, or None if every client may use it."""
    scopes, allow, visible = options.get("scopes"), options.get("allow"), options.get("visible")
    if not scopes and allow is None and visible is None:
        return None
    from trimcp.guard.permission import permission_of  # few servers need it

    if tool is None:
        return permission_of(scopes, allow, visible=visible)
    return permission_of(scopes, allow, tool.listed, tool.confirmation, visible)


def _decorate(add: Callable[..., None], function: Any, options: Mapping[str, Any]) -> Any:
    if isinstance(function, str):
        raise TypeError(f"pass a function or keywords; was name={function!r} meant?")
    if function is not None:
        add(function)
        return function

    @at_users_line
    def decorate(function: FunctionT) -> FunctionT:
        add(function, **options)
        return function

    return decorate


def _around(middleware: Middleware, handler: Handler) -> Handler:
    async def call(ctx: Any, params: Any) -> Any:
        return await middleware(ctx, params, handler)

    return call
