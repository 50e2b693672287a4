"""A connection for client programs: a typed method for every request, the same in every revision.

`session.calls` sends a request and gets the server's questions answered; `endpoint` calls the client's handlers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.client.endpoint import ClientEndpoint, Logs
from trimcp.client.handlers import ClientProgram, call_handler
from trimcp.client.tools import Listing, Mirrors, Outputs, Rejections
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, RemoteError
from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.events import Notified
from trimcp.session.clock import Clocks
from trimcp.session.outgoing.calls import Call, Rounds
from trimcp.session.outgoing.listening import Subscription, Subscriptions, changes_wanted
from trimcp.session.session import Session
from trimcp.session.statistics import Statistics
from trimcp.support.cleaning import one_line
from trimcp.wire.capabilities import ServerCapabilities, declares
from trimcp.wire.common import META_LOG_LEVEL, REJECTED, Cacheable, Implementation, LoggingLevel, PageParams, Unreadable
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import InputRequest
from trimcp.wire.jsonrpc import JSON, encode
from trimcp.wire.lifecycle import SetLevelParams
from trimcp.wire.methods import LISTS, METHODS
from trimcp.wire.prompts import (
    CompleteParams,
    Completion,
    CompletionArgument,
    CompletionContext,
    GetPromptParams,
    GetPromptResult,
    Prompt,
    PromptReference,
    Reference,
    ResourceTemplateReference,
)
from trimcp.wire.resources import ReadResourceParams, ReadResourceResult, Resource, ResourceTemplate
from trimcp.wire.revisions import LATEST, Revision
from trimcp.wire.tools import CallToolParams, CallToolResult, Tool

if TYPE_CHECKING:
    from trimcp.client.tasks import ClientTask

log: logging.Logger = logging.getLogger("trimcp.client")

_MOST_KEPT: Final = 1_024
_MOST_BYTES: Final = 32 * 1024 * 1024

_STALE: Final = {
    "notifications/tools/list_changed": ("tools/list",),
    "notifications/prompts/list_changed": ("prompts/list",),
    "notifications/resources/list_changed": ("resources/list", "resources/templates/list"),
    "notifications/resources/updated": ("resources/read",),
}


@attrs.define(eq=False)
class Cache:
    """Results by method and the one parameter that selects them (a cursor, a URI), at most 1,024 and 32 MiB.

    They are kept for as long as their server allows (2026-07-28 server/utilities/caching); those of the legacy era are
    not. There is one cache per connection, so nothing is shared between principals.
    """

    _kept: dict[tuple[str, str | None], tuple[float, Cacheable, int]] = attrs.field(init=False, factory=dict)
    _bytes: int = attrs.field(init=False, default=0)
    _changes: dict[str, int] = attrs.field(init=False, factory=dict)

    def get(self, method: str, key: str | None) -> Cacheable | None:
        """Return a result that is still fresh, or None."""
        found = self._kept.get((method, key))
        if found is None:
            return None
        until, result, _ = found
        if trio.current_time() < until:
            return result
        self._forget((method, key))
        return None

    def edition(self, method: str) -> int:
        """Return a number that changes whenever results of the method become stale; read it before asking."""
        return self._changes.get(method, 0)

    def put(self, method: str, key: str | None, result: Cacheable, edition: int) -> None:
        """Keep a result for its time to live, unless the server notified a change since the request."""
        if result.ttl_ms <= 0 or edition != self.edition(method):
            return
        weight = len(encode(converter_for(LATEST).dump(result)))  # approximately its memory
        if weight > _MOST_BYTES:
            return
        if (method, key) in self._kept:
            self._forget((method, key))
        while len(self._kept) >= _MOST_KEPT or self._bytes + weight > _MOST_BYTES:
            self._forget(next(iter(self._kept)))
        self._kept[method, key] = (trio.current_time() + result.ttl_ms / 1000, result, weight)
        self._bytes += weight

    def drop(self, method: str) -> None:
        """Remove the results of a method."""
        self._changes[method] = self.edition(method) + 1
        for key in [key for key in self._kept if key[0] == method]:
            self._forget(key)

    def _forget(self, key: tuple[str, str | None]) -> None:
        self._bytes -= self._kept.pop(key)[2]

    def notified(self, event: Notified) -> None:
        """Remove the results that a notification makes stale."""
        for method in _STALE.get(event.method.name, ()):
            self.drop(method)


@attrs.define(eq=False, repr=False)
class ClientSession:
    """One connection to one server, valid until its `connect` block is left. Any task may use it.

    Cancelling any of its calls (a deadline included) tells the server, which stops its handler. All of them raise
    `RemoteError` if the server answers with an error, `InvalidReply` if its answer is invalid, `ConnectionLost` if it
    is gone, `LocalError` if the request cannot be sent, and `trio.TooSlowError` after the client's `request_timeout`
    or `max_request_time`.

    It has more than 300 lines because each request of the protocol is a documented method.

    Attributes:
        client: the client that connected.
        session: the session underneath, which sends and receives.
        server_info: the server's name and version, as sent (not verified), or None.
        server_capabilities: what the server declared.
        instructions: how a model should use the server, or None. Untrusted text.
        cache, clocks, subscriptions, logs, outputs, mirrors: internal, and may change.
    """

    client: ClientProgram
    session: Session
    _endpoint: ClientEndpoint
    server_info: Implementation | None = attrs.field(init=False, default=None)
    server_capabilities: ServerCapabilities = attrs.field(init=False, factory=ServerCapabilities)
    instructions: str | None = attrs.field(init=False, default=None)
    _peer: Session | None = attrs.field(init=False, default=None)
    cache: Cache = attrs.field(init=False, factory=Cache)
    clocks: Clocks = attrs.field(init=False)
    subscriptions: Subscriptions = attrs.field(init=False)
    logs: Logs | None = attrs.field(init=False, default=None)
    outputs: Outputs = attrs.field(init=False, factory=Outputs)
    mirrors: Mirrors = attrs.field(init=False, factory=Mirrors)
    _rejections: Rejections = attrs.field(init=False, factory=Rejections)
    _detached: set[Rounds] = attrs.field(init=False, factory=set)
    _log_level: LoggingLevel | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.clocks = self._endpoint.clocks
        self.subscriptions = Subscriptions(self.session)
        self._endpoint.session = self
        if self.client.on_logging is not None:
            self.logs = Logs(self.client.on_logging, self.session)
            self._log_level = self.client.log_level

    # Facts

    @property
    def revision(self) -> Revision:
        """The revision of this connection."""
        revision = self.session.revision
        assert revision is not None
        return revision

    @property
    def peer(self) -> Session:
        """The server's side of this connection, for a session that `trimcp.testing.connected` yields.

        Raises:
            LocalError: the session was created by other code.
        """
        if self._peer is None:
            raise LocalError("session.peer is for sessions that trimcp.testing.connected yields; this is another")
        return self._peer

    @peer.setter
    def peer(self, peer: Session) -> None:
        self._peer = peer

    def statistics(self) -> Statistics:
        """Return a snapshot of its queues and of the requests in progress."""
        return self.session.statistics()

    async def wait_lost(self) -> None:
        """Wait until the server is gone or the session ends. Cancelling this changes nothing."""
        await self.session.closed.wait()

    # Tools

    async def list_tools(self, *, fresh: bool = False) -> Listing[Tool]:
        """Return all tools, following cursors; none if the server declared no tools.

        A tool that cannot be read is left out with a warning, and is in the list's `rejected` (see `Client(strict=)`).
        So is, over HTTP since 2026-07-28, one whose `x-mcp-header` annotations are invalid.

        Args:
            fresh: ask the server even if the cached result is still good.
        """
        tools: Listing[Tool] = await self._list("tools/list", fresh)
        self.outputs.listed(tools)
        if self._mirroring:
            self.mirrors.keep(tools)
        return tools

    async def call_tool(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> CallToolResult:
        """Call a tool and return its result. One with `is_error` raises nothing: it reports a failure to the model.

        The client's handlers answer the server's questions during the call.

        Args:
            meta: members to add to the request's `_meta`, such as trace context.

        Raises:
            InvalidReply: the structured content does not match the tool's output schema, as listed.
        """
        rounds = self._rounds("tools/call", _call_params(name, arguments), meta)
        if self.client.on_call is not None or self.session.transport.mirrors_headers:
            await self.allow(rounds)
        result: CallToolResult = await self._payload_of(rounds)
        return result

    def calling(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> AbstractAsyncContextManager[Call[CallToolResult]]:
        """Call a tool and yield the call, to follow its `progress` and await its `result()`.

        Leaving the block without the result, also by an exception or a cancellation, cancels the call at the server.
        """
        return Call[CallToolResult](self._rounds("tools/call", _call_params(name, arguments), meta), self.clocks)

    async def start_task(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> ClientTask:
        """Call a tool as `call_tool` does, and return its task instead of waiting for it.

        Needs `Client(tasks=True)`. The server decides whether it is a task; else the result is there at once.
        """
        from trimcp.client.tasks import ClientTask  # few clients need it

        rounds = self._rounds("tools/call", _call_params(name, arguments), meta)
        await self.allow(rounds)
        self._detached.add(rounds)
        try:
            answer: ClientTask | CallToolResult = await self._payload_of(rounds)
        finally:
            self._detached.discard(rounds)
        return answer if isinstance(answer, ClientTask) else ClientTask(self, None, name, answer)

    def task(self, id: str, *, tool: str | None = None) -> ClientTask:
        """Return a task that was started before, perhaps by another process; nothing is sent yet.

        Args:
            id: its id, as `start_task(...)` told it.
            tool: the tool that was called, to check the result by its schema.
        """
        from trimcp.client.tasks import ClientTask

        return ClientTask(self, id, tool)

    # Resources

    async def list_resources(self, *, fresh: bool = False) -> Listing[Resource]:
        """Return all resources, following cursors; none if the server declared no resources. See `list_tools`."""
        return await self._list("resources/list", fresh)

    async def list_resource_templates(self, *, fresh: bool = False) -> Listing[ResourceTemplate]:
        """Return all resource templates, as `list_tools` does; none if the server declared no resources."""
        return await self._list("resources/templates/list", fresh)

    async def read_resource(
        self, uri: str, *, meta: Mapping[str, JSON] | None = None, fresh: bool = False
    ) -> ReadResourceResult:
        """Return the contents of a resource."""

        async def read() -> tuple[Cacheable, bool]:
            rounds = self._rounds("resources/read", ReadResourceParams(uri=uri), meta)
            return await self._payload_of(rounds), not rounds.asked

        result = await self._cached("resources/read", uri, read, fresh or bool(meta))
        assert isinstance(result, ReadResourceResult)
        return result

    # Prompts and completion

    async def list_prompts(self, *, fresh: bool = False) -> Listing[Prompt]:
        """Return all prompts, following cursors; none if the server declared no prompts. See `list_tools`."""
        return await self._list("prompts/list", fresh)

    async def get_prompt(
        self, name: str, arguments: Mapping[str, str] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> GetPromptResult:
        """Return the messages of a prompt, filled in with `arguments`."""
        params = GetPromptParams(name=name, arguments=None if arguments is None else dict(arguments))
        result: GetPromptResult = await self._ask("prompts/get", params, meta=meta)
        return result

    async def complete(
        self, ref: Reference, name: str, value: str, context: Mapping[str, str] | None = None
    ) -> Completion:
        """Return suggestions for the value of an argument that is being typed.

        Args:
            ref: the prompt or resource template that has the argument.
            name: the argument's name.
            value: the text typed so far.
            context: the other arguments that are already known.
        """
        known = None if context is None else CompletionContext(arguments=dict(context))
        params = CompleteParams(ref=ref, argument=CompletionArgument(name=name, value=value), context=known)
        return (await self._ask("completion/complete", params)).completion  # type: ignore[no-any-return]  # the method says which

    async def complete_prompt(
        self, prompt: str, name: str, value: str, context: Mapping[str, str] | None = None
    ) -> Completion:
        """`complete` for an argument of the prompt of that name."""
        return await self.complete(PromptReference(name=prompt), name, value, context)

    async def complete_resource(
        self, uri_template: str, name: str, value: str, context: Mapping[str, str] | None = None
    ) -> Completion:
        """`complete` for a variable of that resource template."""
        return await self.complete(ResourceTemplateReference(uri=uri_template), name, value, context)

    # Changes

    def listen(
        self,
        *,
        tools: bool = False,
        prompts: bool = False,
        resources_list: bool = False,
        resources: Iterable[str] = (),
    ) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to changes: `async with session.listen(tools=True) as changes: async for change in changes: ...`.

        Args:
            tools, prompts, resources_list: whether to report changes of that list.
            resources: URIs of resources whose updates to report.

        The iteration ends when the server closes the subscription. It raises `ConnectionLost` when the connection is
        lost or the server cancels the subscription with a reason.
        """
        return self.subscriptions.listening(changes_wanted(tools, prompts, resources_list, resources))

    # Logging, ping, roots

    async def set_log_level(self, level: LoggingLevel) -> None:
        """Ask for log messages of this level and above from now on; the client's logging handler gets them."""
        if self.revision.logs_on_request:
            self._log_level = level
            await trio.lowlevel.checkpoint()
        else:
            await self._ask("logging/setLevel", SetLevelParams(level=level))

    async def ask_for_logs(self) -> None:
        """Tell a server of the legacy era which log messages the client's handler wants. A refusal is only logged."""
        if (
            self._log_level is None
            or self.revision.logs_on_request
            or not declares(self.server_capabilities, "logging")
        ):
            return
        try:
            await self._ask("logging/setLevel", SetLevelParams(level=self._log_level))
        except (RemoteError, InvalidReply, trio.TooSlowError) as error:
            log.debug("the server did not take the log level: %s", one_line(str(error)))

    async def ping(self) -> None:
        """Wait until the server has answered a ping (since 2026-07-28 `server/discover`): it is alive."""
        await self._ask("ping" if "ping" in methods_of(self.revision) else "server/discover", None)

    async def request(self, name: str, params: Mapping[str, JSON] | None = None) -> dict[str, JSON]:
        """Send a request that is defined by an extension, and return its result as JSON.

        Cancelling this tells the server. Raises as `call_tool`, and LocalError for a method of the protocol itself.
        """
        if name in METHODS:
            raise LocalError(f"{name} is a method of the protocol; use its own method")
        return await self.request_raw(name, params)

    async def request_raw(self, name: str, params: Mapping[str, JSON] | None = None) -> dict[str, JSON]:
        """As `request`, also if a revision has a method of its own with the name that the extension uses."""
        self.client.foreign.add(name)
        result: dict[str, JSON] = await self._ask(name, dict(params or {}))
        return result

    async def notify(self, name: str, params: Mapping[str, JSON] | None = None) -> None:
        """Send a notification that is defined by an extension. Waits for room, and for no answer: there is none.

        A server that has no handler for it ignores it. Cancelled, it was not sent, or wholly.

        Raises:
            LocalError: the protocol itself defines the notification, or JSON cannot carry the params.
            ConnectionLost: the connection has ended.
        """
        if name in METHODS:
            raise LocalError(f"{name} is of the protocol itself; use its own method")
        if self.session.lost is not None:
            raise ConnectionLost(*self.session.lost.args)
        await self.session.notify(name, params)

    def roots_changed(self) -> None:
        """Notify the server that the client's roots changed, if the revision has that notification. Never blocks."""
        name = "notifications/roots/list_changed"
        if name in methods_of(self.revision) and self.session.lost is None:
            self.session.notify_latest(name)

    # Lists

    async def list_page(self, method: str, cursor: str | None = None, *, fresh: bool = False) -> Any:
        """Return one page of a list, as the result class of its method, for programs that follow cursors themselves.

        Args:
            method: "tools/list", "prompts/list", "resources/list" or "resources/templates/list".
            cursor: the `next_cursor` of the previous page, None for the first.
        """
        if method not in LISTS:
            raise LocalError(f"{method} is not paged; use one of {', '.join(LISTS)}")

        async def fetch() -> tuple[Cacheable, bool]:
            page = await self._ask(method, None if cursor is None else PageParams(cursor=cursor))
            if method == "tools/list" and self._mirroring:
                valid, rejected = self.mirrors.take(page.tools), page.rejected
                self._warn(method, valid.rejected)
                page = attrs.evolve(page, tools=valid)
                object.__setattr__(page, REJECTED, (*rejected, *valid.rejected))
            return page, True

        return await self._cached(method, cursor, fetch, fresh)

    async def _list(self, method: str, fresh: bool) -> Listing[Any]:
        if not declares(self.server_capabilities, METHODS[method].capability or ""):
            await trio.lowlevel.checkpoint()
            return Listing()
        items = Listing[Any]()
        seen: set[str] = set()
        cursor: str | None = None
        for _ in range(self.client.max_pages):
            try:
                page = await self.list_page(method, cursor, fresh=fresh)
            except RemoteError:
                if cursor == "":
                    return items  # so servers say that there is no cursor, which then know none
                raise
            if cursor == page.next_cursor == "":
                return items  # and others begin anew
            items += getattr(page, METHODS[method].members or "")
            items.rejected += tuple(page.rejected)
            if page.next_cursor is None:
                return items
            following: str = page.next_cursor
            if following in seen:
                why = "the server's pages go round in a circle"
                break
            seen.add(following)
            cursor = following
        else:
            why = f"the list has more than {self.client.max_pages} pages"
        error = InvalidReply(f"{method}: {why}")
        error.listed = items
        raise error

    async def _cached(self, method: str, key: str | None, fetch: Callable[[], Any], fresh: bool) -> Cacheable:
        """Return the cached result if it is fresh, else that of `fetch`, which also returns whether to cache it."""
        if not fresh and (kept := self.cache.get(method, key)) is not None:
            await trio.lowlevel.checkpoint()
            return kept
        edition = self.cache.edition(method)
        result, keep = await fetch()
        if keep:
            self.cache.put(method, key, result, edition)
        found: Cacheable = result
        return found

    # One request

    async def _ask(self, name: str, params: Any, *, meta: Mapping[str, JSON] | None = None) -> Any:
        return await self._payload_of(self._rounds(name, params, meta))

    async def _payload_of(self, rounds: Rounds) -> Any:
        rounds.deadline = self.clocks.deadline()
        if not self.clocks:
            await rounds.begin()
            return await rounds.payload()
        with self.clocks.running() as clock:
            rounds.on_progress = clock.restart
            await rounds.begin()
            return await rounds.payload()

    def _rounds(self, name: str, params: Any, meta: Mapping[str, JSON] | None) -> Rounds:
        if self._log_level is not None and self.revision.logs_on_request:
            meta = {META_LOG_LEVEL: self._log_level, **(meta or {})}
        return self.client.make_rounds(self.session, self, name, params, self.client.max_rounds, meta)

    def notified(self, event: Notified) -> None:
        """Queue a log message for its handler, and remove cached results that a notification makes stale."""
        name = event.method.name
        if name == "notifications/message":
            if self.logs is not None:
                self.logs.put(event.params)
            return
        if self.logs is not None and name in self.client.in_log_order:
            self.logs.put(event)
        if name == "notifications/tools/list_changed":
            self.outputs.listed(())  # their output schemas are unknown until they are listed again
        self.cache.notified(event)
        self.subscriptions.notified(event)

    # The `Caller` of its calls

    async def allow(self, rounds: Rounds) -> None:
        """Ask the client's approval function about a tool call, and set the headers that the tool requires."""
        if self.client.on_call is not None:
            await self._approve(self.client.on_call, rounds)
        if self.session.transport.mirrors_headers:
            self._mirror(rounds)

    async def _approve(self, hook: Callable[..., Any], rounds: Rounds) -> None:
        name = rounds.params.name
        tool = self.outputs.tool(name)
        if tool is None:
            await self.list_tools()
            tool = self.outputs.tool(name)
        if not await call_handler(hook, tool, dict(rounds.params.arguments or {}), session=self):
            raise LocalError(f"the call of {name!r} was not approved")

    async def refresh(self, rounds: Rounds) -> None:
        """List the tools again, because the server requires other headers than this call had, and set those."""
        with suppress(RemoteError, InvalidReply):  # the call is then refused again, with a better error
            await self.list_tools(fresh=True)
        self._mirror(rounds)

    def _mirror(self, rounds: Rounds) -> None:
        if self._mirroring:
            rounds.headers = self.mirrors.headers(rounds.params.name, rounds.params.arguments or {})

    @property
    def _mirroring(self) -> bool:
        """Whether arguments of calls are repeated in headers."""
        return self.session.transport.mirrors_headers and self.revision.method_headers

    async def answer(self, question: InputRequest) -> Any:
        """Answer a question of the server with the client's handlers."""
        return await self._endpoint.answer(question)

    async def follow(self, rounds: Rounds, task: dict[str, Any]) -> Any:
        """Return the result of a call that was answered with a task, or for `start_task` the task."""
        from trimcp.client.tasks import follow

        return await follow(self, rounds, task, rounds in self._detached)

    def check(self, rounds: Rounds, payload: Any) -> None:
        """Check a tool's structured content against the schema it was listed with; warn of what was left out."""
        rejected = getattr(payload, REJECTED, ())  # its property would be a call more
        if rejected:
            self._warn(rounds.name, rejected)
        if self.client.validate_output and rounds.name == "tools/call":
            self.outputs.check(rounds.params.name, payload)

    def _warn(self, method: str, rejected: Iterable[Unreadable]) -> None:
        self._rejections.warn(self.server_info.name if self.server_info else "the server", method, rejected)


def _call_params(name: str, arguments: Mapping[str, JSON] | None) -> CallToolParams:
    return CallToolParams(name=name, arguments=None if arguments is None else dict(arguments))
