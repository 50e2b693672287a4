"""What a client program answers to its servers and allows them: its handlers, its approvals and its bounds.

It knows no connection. The client's declared capabilities follow from its handlers.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, TypeAlias, TypeVar, overload

import attrs

from trimcp.protocol.profile import Profile
from trimcp.session.limits import Limits, limits_of
from trimcp.session.outgoing.calls import Rounds
from trimcp.session.session import Session
from trimcp.support.bounds import check_callable, check_members, check_number, check_truth
from trimcp.support.nurseries import contained
from trimcp.wire.capabilities import (
    TASKS,
    ClientCapabilities,
    ElicitationCapability,
    RootsCapability,
    SamplingCapability,
)
from trimcp.wire.common import SEVERITY, Icon, LoggingLevel
from trimcp.wire.given import given_implementation, given_settings
from trimcp.wire.input_requests import (
    CreateMessageParams,
    CreateMessageResult,
    ElicitAnswer,
    ElicitResult,
    FormSchema,
    Root,
)
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.methods import TASK_NOTICE
from trimcp.wire.revisions import REVISIONS, Revision

Sampled: TypeAlias = CreateMessageResult | str
Roots: TypeAlias = Sequence[Root | str]
Handler: TypeAlias = Callable[..., Any]

HandlerT = TypeVar("HandlerT", bound=Handler)
# A decorated handler keeps its own type. The bounds detect a wrong result; parameters are free, for the `session`.
SamplingT = TypeVar("SamplingT", bound=Callable[..., Awaitable[Sampled] | Sampled])
ElicitationT = TypeVar("ElicitationT", bound=Callable[..., Awaitable[ElicitResult] | ElicitResult])
RootsT = TypeVar("RootsT", bound=Callable[..., Awaitable[Roots] | Roots])
NoticeT = TypeVar("NoticeT", bound=Callable[..., Awaitable[None] | None])
CallApprovalT = TypeVar("CallApprovalT", bound=Callable[..., Awaitable[bool] | bool])
SamplingApprovalT = TypeVar(
    "SamplingApprovalT", bound=Callable[..., Awaitable[bool | CreateMessageParams] | bool | CreateMessageParams]
)
SampledApprovalT = TypeVar(
    "SampledApprovalT", bound=Callable[..., Awaitable[bool | CreateMessageResult] | bool | CreateMessageResult]
)


class ClientProgram:
    """Everything of a `Client` except `connect`: settings, handlers and approvals. `Client` documents the arguments.

    It has more than 20 fields because each is a setting or a handler of one client.
    """

    def __init__(
        self,
        name: str,
        version: str = "0",
        *,
        title: str | None = None,
        description: str | None = None,
        website_url: str | None = None,
        icons: Iterable[Icon | Mapping[str, Any]] = (),
        revisions: Iterable[Revision | str] = REVISIONS,
        roots: Sequence[Root | str] | None = None,
        tasks: bool = False,
        extensions: Mapping[str, Mapping[str, JSON]] | None = None,
        experimental: Mapping[str, Mapping[str, JSON]] | None = None,
        request_timeout: float | None = None,
        max_request_time: float | None = None,
        send_deadlines: bool = True,
        asks_per_minute: int = 600,
        connect_timeout: float = 30.0,
        probe_timeout: float | None = None,
        validate_output: bool = True,
        strict: bool = False,
        max_rounds: int = 10,
        max_pages: int = 1_000,
        log_level: LoggingLevel = "info",
        limits: Limits | None = None,
    ) -> None:
        for setting, seconds in (("request_timeout", request_timeout), ("max_request_time", max_request_time)):
            check_number(setting, seconds, optional=True)
        check_number("connect_timeout", connect_timeout)
        check_number("probe_timeout", probe_timeout, optional=True)
        for setting, most in (("asks_per_minute", asks_per_minute), ("max_rounds", max_rounds)):
            check_number(setting, most, whole=True, zero=True)
        check_number("max_pages", max_pages, whole=True)
        flags = {"send_deadlines": send_deadlines, "validate_output": validate_output, "strict": strict, "tasks": tasks}
        for setting, flag in flags.items():
            check_truth(setting, flag)
        if log_level not in list(SEVERITY):
            raise ValueError(f"log_level is one of {', '.join(SEVERITY)}, not {log_level!r:.60}")
        self.name: Final = name
        texts = {"title": title, "description": description, "website_url": website_url}
        info = given_implementation(name, version, icons, **texts)
        declared = given_settings("extensions", extensions)
        capabilities = ClientCapabilities(
            extensions={TASKS: {}, **(declared or {})} if tasks else declared,
            experimental=given_settings("experimental", experimental),
        )
        self.limits: Final = limits_of(limits)
        most = self.limits.max_server_info
        self.profile: Final = Profile(info, capabilities, revisions=revisions, max_peer_info=most)
        self.request_timeout = request_timeout
        self.max_request_time = max_request_time
        self.send_deadlines = send_deadlines
        self.asks_per_minute = asks_per_minute
        self.connect_timeout = connect_timeout
        self.probe_timeout = probe_timeout
        self.validate_output = validate_output
        self.strict = strict
        self.max_rounds = max_rounds
        self.max_pages = max_pages
        self.log_level: LoggingLevel = log_level
        self.served: Final[dict[str, Handler]] = {}  # the handler of each method that servers may call
        self.foreign: Final[set[str]] = set()  # methods of extensions that were called
        self.notification_handlers: Final[dict[str, list[Handler]]] = {}  # by the notification's name
        if TASKS in (capabilities.extensions or {}):
            self.foreign.add("tasks/cancel")
            self.notification_handlers[TASK_NOTICE] = []
        self.sessions: set[Any] = set()
        self.make_rounds: Callable[..., Rounds] = Rounds  # makes each call
        self.on_session: Callable[[Session, bool], object] | None = None  # told of each that begins (True) or has ended
        self.legacy_targets: Final[set[object]] = set()  # keys of targets that were found to be of the legacy era
        self.on_logging: Handler | None = None
        self.in_log_order: Final[set[str]] = set()  # notifications that `on_logging` gets, too, each as a `Notified`
        self.on_call: Handler | None = None
        self.before_sampling: Handler | None = None
        self.after_sampling: Handler | None = None
        if roots is not None:
            self.set_roots(roots)

    @property
    def capabilities(self) -> ClientCapabilities:
        """The capabilities declared to servers. They follow from the handlers; register them before connecting."""
        capabilities = self.profile.capabilities
        assert isinstance(capabilities, ClientCapabilities)
        return capabilities

    # Handlers

    @overload
    def sampling(self, handler: SamplingT, /) -> SamplingT: ...
    @overload
    def sampling(self, *, tools: bool = ..., context: bool = ...) -> Callable[[SamplingT], SamplingT]: ...
    def sampling(self, handler: Any = None, *, tools: bool = False, context: bool = False) -> Any:
        """Register the function that asks the model.

        Its form is `async def sample(params: CreateMessageParams) -> CreateMessageResult | str`.

        Args:
            tools: whether the model may use tools (2025-11-25 on).
            context: whether context from other servers can be included.
        """

        declared = SamplingCapability(tools={} if tools else None, context={} if context else None)
        register = partial(self._serve, "sampling/createMessage", sampling=declared)
        return register if handler is None else register(handler)

    @overload
    def elicitation(self, handler: ElicitationT, /) -> ElicitationT: ...
    @overload
    def elicitation(self, *, form: bool = ..., url: bool = ...) -> Callable[[ElicitationT], ElicitationT]: ...
    def elicitation(self, handler: Any = None, *, form: bool = True, url: bool = True) -> Any:
        """Register the function that asks the user: `async def ask(params: ElicitParams) -> ElicitResult`.

        `params` is an `ElicitFormParams`, or an `ElicitURLParams`, whose URL must be displayed in full and opened only
        if the user agrees.

        Args:
            form, url: which of the two it supports (before 2025-11-25 there are only forms).
        """

        declared = ElicitationCapability(form={} if form else None, url={} if url else None)
        register = partial(self._serve, "elicitation/create", elicitation=declared)
        return register if handler is None else register(handler)

    def roots(self, handler: RootsT) -> RootsT:
        """Register the function that returns the client's roots: `def roots() -> list[Root | str]`, URIs or `Root`s."""
        return self._serve("roots/list", handler, roots=RootsCapability(list_changed=True))

    def set_roots(self, roots: Sequence[Root | str]) -> None:
        """Set the client's roots, and notify servers that they changed.

        Raises ValueError: a root is not a `file://` URI (client/roots).
        """
        given = check_members("roots", roots, (str, Root), "texts or Roots, such as ['file:///srv']")
        fixed = [Root(uri=root) if isinstance(root, str) else root for root in given]
        for root in fixed:
            if not root.uri.startswith("file://"):
                raise ValueError(f"a root must be a file:// URI, not {root.uri!r}; use Path(...).as_uri()")
        declared = "roots/list" in self.served
        self.roots(lambda: fixed)
        if declared:
            for session in [*self.sessions]:  # those of `portal` come and go in another thread
                session.roots_changed()

    def logging(self, handler: NoticeT) -> NoticeT:
        """Register the handler of servers' log messages: `async def log(params: LoggingMessageParams) -> None`.

        It gets one message at a time, in order, per connection. `Limits.logs_kept` messages are kept for a slow
        handler; then the oldest are dropped. What it raises is logged.
        """
        check_callable("what takes log messages", handler)
        self.on_logging = handler
        return handler

    def notification(self, name: str) -> Callable[[NoticeT], NoticeT]:
        """Call a function with the params of each notification of that name from a server.

        For example "notifications/resources/updated", "notifications/elicitation/complete" (2025-11-25), or one of an
        extension, whose params are a dict. Progress and cancellations belong to calls and are not passed to handlers.
        Each runs in a task of the connection, so in no order; a crash is logged and ends nothing else. At most
        `Limits.backlog_requests` run at once; further notifications are dropped and counted.
        """
        given: object = name  # written without a name, it is the function
        if not isinstance(given, str):
            text = '@client.notification("notifications/resources/updated")'
            raise TypeError(f"notification needs a name: {text}, not {name!r:.60}")

        def decorate(handler: NoticeT) -> NoticeT:
            check_callable("what a notification is passed to", handler)
            self.notification_handlers.setdefault(name, []).append(handler)
            return handler

        return decorate

    # Approval

    def approve_call(self, hook: CallApprovalT) -> CallApprovalT:
        """Register a function to decide on each tool call: `async def approve(tool: Tool | None, arguments) -> bool`.

        `tool` has the annotations sent by the server; it is None for a tool that the server does not list. False raises
        `LocalError` in the caller, and nothing is sent. An exception of the function is raised in the caller.
        """
        self.on_call = hook
        return hook

    def approve_sampling(self, hook: SamplingApprovalT) -> SamplingApprovalT:
        """Register a function that decides before the model is asked.

        Its form is `async def approve(params) -> bool | CreateMessageParams`. False refuses the server's request;
        params returned replace the server's.
        """
        self.before_sampling = hook
        return hook

    def approve_sampled(self, hook: SampledApprovalT) -> SampledApprovalT:
        """Register a function that decides on the model's answer before the server gets it.

        Its form is `async def approve(params, result) -> bool | CreateMessageResult`. False refuses the server's
        request; a result returned replaces the model's.
        """
        self.after_sampling = hook
        return hook

    def _serve(self, method: str, handler: HandlerT, **declared: Any) -> HandlerT:
        """Register the handler of a method, and declare the capability for it."""
        check_callable(f"what answers {method}", handler)
        capabilities: Any = self.capabilities
        self.served[method] = handler
        self.profile.capabilities = attrs.evolve(capabilities, **declared)
        return handler


async def call_handler(handler: Callable[..., Any], *args: Any, session: object = None) -> Any:
    """Return the result of a sync or async handler. It gets the session if it has a keyword of that name.

    Raises Exception: as `contained`: also if the handler raised anything else, or left something open.
    """
    kwargs: dict[str, object] = {}
    with suppress(TypeError, ValueError):  # not every callable has a signature
        if session is not None and "session" in inspect.signature(handler).parameters:
            kwargs["session"] = session

    @wraps(handler)
    async def call() -> Any:
        value = handler(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    return await contained(call)


def fill_defaults(schema: FormSchema, filled_in: dict[str, ElicitAnswer] | None = None) -> dict[str, ElicitAnswer]:
    """Return the filled-in values, with the form's defaults for the others (client/elicitation, "Defaults").

    Args:
        schema: `params.requested_schema` of the question.
        filled_in: the values that the user gave, by name.
    """
    values = dict(filled_in or {})
    for name, question in schema.properties.items():
        if name not in values and question.default is not None:
            values[name] = question.default
    return values
