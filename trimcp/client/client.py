"""What a client program is to servers: its name, its handlers, its limits, for any number of connections.

Knows no connection; `connect` makes one. What the client declares it can do follows from the handlers it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, overload

import attrs

from trimcp.client.connect import Target, connecting
from trimcp.client.supervision import Breaker, Health, Restarts
from trimcp.protocol.profile import Profile
from trimcp.session.limits import Limits
from trimcp.wire.capabilities import (
    ClientCapabilities,
    ElicitationCapability,
    RootsCapability,
    SamplingCapability,
)
from trimcp.wire.common import Icon, Implementation
from trimcp.wire.elicitation import ElicitResult
from trimcp.wire.fields import ABSENT
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.logs import LoggingLevel
from trimcp.wire.revisions import REVISIONS, Revision
from trimcp.wire.roots import Root
from trimcp.wire.sampling import CreateMessageParams, CreateMessageResult

if TYPE_CHECKING:
    from trimcp.client.facade import ClientSession
    from trimcp.client.upstream import Upstream, WhenDown

__all__ = ["Client"]

Sampled: TypeAlias = CreateMessageResult | str
SamplingHandler: TypeAlias = Callable[..., Awaitable[Sampled] | Sampled]
ElicitationHandler: TypeAlias = Callable[..., Awaitable[ElicitResult] | ElicitResult]
RootsHandler: TypeAlias = Callable[..., Awaitable[Sequence[Root | str]] | Sequence[Root | str]]
LoggingHandler: TypeAlias = Callable[..., Awaitable[None] | None]
CallApproval: TypeAlias = Callable[..., Awaitable[bool] | bool]
SamplingApproval: TypeAlias = Callable[..., Awaitable[bool | CreateMessageParams] | bool | CreateMessageParams]
SampledApproval: TypeAlias = Callable[..., Awaitable[bool | CreateMessageResult] | bool | CreateMessageResult]

# A decorated handler keeps its own type. The bounds catch a wrong result; parameters are free, for the `session`.
SamplingT = TypeVar("SamplingT", bound=SamplingHandler)
ElicitationT = TypeVar("ElicitationT", bound=ElicitationHandler)
RootsT = TypeVar("RootsT", bound=RootsHandler)
LoggingT = TypeVar("LoggingT", bound=LoggingHandler)
CallApprovalT = TypeVar("CallApprovalT", bound=CallApproval)
SamplingApprovalT = TypeVar("SamplingApprovalT", bound=SamplingApproval)
SampledApprovalT = TypeVar("SampledApprovalT", bound=SampledApproval)

_SAMPLING: Final = "sampling/createMessage"
_ELICITATION: Final = "elicitation/create"
_ROOTS: Final = "roots/list"

_RESTARTS: Final = Restarts()
_BREAKER: Final = Breaker()
_HEALTH: Final = Health()


class Client:
    """A client program.

    Handlers may be sync or async; a sync one must return at once. Each may take the asking session as a keyword
    `session`. They run while calls are under way, in tasks of their connection.

    Args:
        name, version, title, description, website_url, icons: how it introduces itself to servers.
        revisions: the revisions it is willing to speak.
        roots: the places it works on; see `set_roots`.
        extensions: settings by extension id, declared to servers (2026-07-28 "Extensions").
        experimental: settings of non-standard abilities, declared to servers.
        request_timeout: seconds a server may work on a request without a sign of progress; the clock stands still
            while a person answers its questions. None: no limit but the caller's own scopes.
        max_request_time: seconds after which a request fails in any case; None for no limit.
        send_deadlines: tell servers how long a request's caller waits (its own scopes, `max_request_time`), in
            `_meta["trimcp/timeout"]` as the seconds left; a server of trimcp then stops work nobody waits for.
        asks_per_minute: how many questions one server may ask per minute; beyond it they are refused.
        probe_timeout: seconds a server may take to answer the first message before it is taken for a legacy one, and
            then as many to answer `initialize`. The default suits programs that are downloaded when they are started.
        validate_output: check structured results against the output schemas of listed tools.
        max_rounds: how often one call may come back with questions instead of a result.
        max_pages: how many pages a list may have.
        log_level: the lowest level of log message asked for where each request says so, if there is a handler.
        limits: every other bound.

    Attributes:
        sessions: the connections there are now.

    Timeouts and bounds can be read under their names. What else has a public name, such as `on_sampling`, is there for
    what connects and answers, and may change; handlers are registered with the methods.
    """

    def __init__(
        self,
        name: str,
        version: str = "0",
        *,
        title: str | None = None,
        description: str | None = None,
        website_url: str | None = None,
        icons: Sequence[Icon] = (),
        revisions: Iterable[Revision] = REVISIONS,
        roots: Sequence[Root | str] | None = None,
        extensions: Mapping[str, Mapping[str, JSON]] | None = None,
        experimental: Mapping[str, Mapping[str, JSON]] | None = None,
        request_timeout: float | None = None,
        max_request_time: float | None = None,
        send_deadlines: bool = True,
        asks_per_minute: int = 600,
        probe_timeout: float = 30.0,
        validate_output: bool = True,
        max_rounds: int = 10,
        max_pages: int = 1_000,
        log_level: LoggingLevel = "info",
        limits: Limits | None = None,
    ) -> None:
        info = Implementation(
            name=name,
            version=version,
            title=ABSENT if title is None else title,
            description=ABSENT if description is None else description,
            website_url=ABSENT if website_url is None else website_url,
            icons=list(icons) or ABSENT,
        )
        capabilities = ClientCapabilities(
            extensions=_settings(extensions),
            experimental=_settings(experimental),
        )
        self.profile: Final = Profile(info, capabilities, revisions=tuple(sorted(revisions)))
        self.request_timeout = request_timeout
        self.max_request_time = max_request_time
        self.send_deadlines = send_deadlines
        self.asks_per_minute = asks_per_minute
        self.probe_timeout = probe_timeout
        self.validate_output = validate_output
        self.max_rounds = max_rounds
        self.max_pages = max_pages
        self.log_level: LoggingLevel = log_level
        self.limits: Final = limits if limits is not None else Limits()
        self.served: Final[set[str]] = set()
        self.foreign: Final[set[str]] = set()
        self.sessions: Final[set[ClientSession]] = set()
        self.legacy_targets: Final[set[object]] = set()
        self.elicitation_modes: frozenset[str] = frozenset()
        self.on_sampling: SamplingHandler | None = None
        self.on_elicitation: ElicitationHandler | None = None
        self.on_roots: RootsHandler | None = None
        self.on_logging: LoggingHandler | None = None
        self.on_call: CallApproval | None = None
        self.before_sampling: SamplingApproval | None = None
        self.after_sampling: SampledApproval | None = None
        if roots is not None:
            self.set_roots(roots)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.profile.info.name

    @property
    def capabilities(self) -> ClientCapabilities:
        """What is declared to servers. It follows from the handlers; register them before connecting."""
        capabilities = self.profile.capabilities
        assert isinstance(capabilities, ClientCapabilities)
        return capabilities

    def connect(
        self, target: Target, *, revision: Revision | str | None = None
    ) -> AbstractAsyncContextManager[ClientSession]:
        """Connect to a server, agree with it on a revision, and yield the session.

        What the body raises leaves as itself. Leaving the block ends the connection (and a child process with it);
        so does cancelling it. The loss of the server ends no body: it fails calls with `ConnectionLost`.

        Args:
            target: what `trimcp.stdio`, `trimcp.http` or `trimcp.websocket` returns, a `MessageChannel`, or an async
                context manager that yields one.
            revision: speak exactly this one; by default the newest that both sides know.

        Raises:
            LocalError: the target cannot be opened, or there is no such revision.
            ConnectionLost: the server ended before it was ready; the text carries its last words.
            RemoteError, InvalidReply: it refused, or there is no common revision.
            trio.TooSlowError: it did not answer `initialize` in time (`probe_timeout`).
        """
        return connecting(self, target, revision)

    def supervise(
        self,
        target: Target,
        *,
        name: str | None = None,
        revision: Revision | str | None = None,
        when_down: WhenDown = "wait",
        repeat_safe_tools: bool = False,
        restarts: Restarts = _RESTARTS,
        breaker: Breaker | None = _BREAKER,
        health: Health | None = _HEALTH,
        random: Random | None = None,
    ) -> AbstractAsyncContextManager[Upstream]:
        """Connect to a server, again whenever the connection is lost, and yield it as an `Upstream`.

        The block is entered at once, whether or not the server can be reached; `Upstream.wait_up` waits for it. Leaving
        the block ends the connection (and a child process with it). What the body raises leaves as itself. The
        upstream's loss ends no body, nor does giving it up.

        Args:
            target: what `trimcp.stdio`, `trimcp.http`, `trimcp.websocket` or `trimcp.in_process` returns, or anything
                else that can be connected to again and again.
            name: what to call it in logs and errors.
            revision: as for `connect`.
            when_down: whether calls wait for a connection, as long as their own scopes let them, or fail at once.
            repeat_safe_tools: call tools once more where the connection was lost under the call, if the server says in
                their annotations that they only read or that this does no harm. That is the server's word.
            restarts: the pauses between attempts, and after how many it is given up.
            breaker: when it is left alone for a while; None for never.
            health: when a silent server is asked whether it lives; None for never.
            random: what the pauses vary by, for tests.

        Raises:
            LocalError: the target is good for one connection only, or there is no such revision.
        """
        from trimcp.client.upstream import supervising  # what few clients need

        chance = Random() if random is None else random
        return supervising(
            self, target, name, revision, when_down, repeat_safe_tools, restarts, breaker, health, chance
        )

    # Handlers

    @overload
    def sampling(self, handler: SamplingT, /) -> SamplingT: ...
    @overload
    def sampling(self, *, tools: bool = ..., context: bool = ...) -> Callable[[SamplingT], SamplingT]: ...
    def sampling(self, handler: Any = None, *, tools: bool = False, context: bool = False) -> Any:
        """Register what asks the model: `async def sample(params: CreateMessageParams) -> CreateMessageResult | str`.

        Args:
            tools: it can let the model use tools (2025-11-25 on).
            context: it can include context from other servers.
        """

        def register(handler: SamplingT) -> SamplingT:
            self.on_sampling = handler
            self.served.add(_SAMPLING)
            capability = SamplingCapability(tools={} if tools else ABSENT, context={} if context else ABSENT)
            self._declare(sampling=capability)
            return handler

        return register if handler is None else register(handler)

    @overload
    def elicitation(self, handler: ElicitationT, /) -> ElicitationT: ...
    @overload
    def elicitation(self, *, form: bool = ..., url: bool = ...) -> Callable[[ElicitationT], ElicitationT]: ...
    def elicitation(self, handler: Any = None, *, form: bool = True, url: bool = True) -> Any:
        """Register what asks the user: `async def ask(params: ElicitParams) -> ElicitResult`.

        `params` is an `ElicitFormParams`, or an `ElicitURLParams` whose address is to be shown whole and opened only
        if the user agrees.

        Args:
            form, url: which of the two it can handle (all of elicitation is form before 2025-11-25).
        """

        def register(handler: ElicitationT) -> ElicitationT:
            self.on_elicitation = handler
            self.served.add(_ELICITATION)
            self.elicitation_modes = frozenset(mode for mode, can in (("form", form), ("url", url)) if can)
            self._declare(elicitation=ElicitationCapability(form={} if form else ABSENT, url={} if url else ABSENT))
            return handler

        return register if handler is None else register(handler)

    def roots(self, handler: RootsT) -> RootsT:
        """Register what tells the places worked on: `def roots() -> list[Root | str]`, URIs or `Root`s."""
        self.on_roots = handler
        self.served.add(_ROOTS)
        self._declare(roots=RootsCapability(list_changed=True))
        return handler

    def set_roots(self, roots: Sequence[Root | str]) -> None:
        """Say which places are worked on now; servers that can be told of a change are told.

        Raises:
            ValueError: a root is no `file://` URI (client/roots).
        """
        fixed = [Root(uri=root) if isinstance(root, str) else root for root in roots]
        for root in fixed:
            if not root.uri.startswith("file://"):
                raise ValueError(f"a root must be a file:// URI, not {root.uri!r}; use Path(...).as_uri()")
        declared = self.on_roots is not None
        self.roots(lambda: fixed)
        if declared:
            for session in self.sessions:
                session.roots_changed()

    def logging(self, handler: LoggingT) -> LoggingT:
        """Register what takes servers' log messages: `async def log(params: LoggingMessageParams) -> None`.

        One message at a time, in order, per connection. While it is slow `Limits.logs_kept` messages are kept, then
        the oldest give way. What it raises is logged.
        """
        self.on_logging = handler
        return handler

    # Approval

    def approve_call(self, hook: CallApprovalT) -> CallApprovalT:
        """Register what decides on each tool call: `async def approve(tool: Tool | None, arguments) -> bool`.

        `tool` carries the annotations as the server claims them; it is None for a tool the server does not list.
        False raises `LocalError` in the caller, and nothing is sent; what the hook raises reaches the caller.
        """
        self.on_call = hook
        return hook

    def approve_sampling(self, hook: SamplingApprovalT) -> SamplingApprovalT:
        """Register what decides before the model is asked: `async def approve(params) -> bool | CreateMessageParams`.

        False refuses the server; params returned are used in place of the server's.
        """
        self.before_sampling = hook
        return hook

    def approve_sampled(self, hook: SampledApprovalT) -> SampledApprovalT:
        """Register what decides on the model's words before the server sees them:
        `async def approve(params, result) -> bool | CreateMessageResult`.

        False refuses the server; a result returned is sent in place of the model's.
        """
        self.after_sampling = hook
        return hook

    def _declare(self, **changes: Any) -> None:
        capabilities: Any = self.capabilities
        self.profile.capabilities = attrs.evolve(capabilities, **changes)


def _settings(given: Mapping[str, Mapping[str, JSON]] | None) -> Any:
    return ABSENT if given is None else {id: dict(settings) for id, settings in given.items()}
