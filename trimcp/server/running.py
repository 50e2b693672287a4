"""A server at work: its lifespan entered, its nursery open. What sessions are served by (`Endpoint`)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio

from trimcp.channel import NOWHERE, LaneCounts, Sink
from trimcp.errors import ErrorReply, ResourceNotFound
from trimcp.protocol.events import Notified
from trimcp.protocol.requests import Encoded
from trimcp.server.notices import Notice
from trimcp.server.registry import Registry
from trimcp.server.subscribing import Subscribers
from trimcp.session.asking import open_questions
from trimcp.session.context import Context
from trimcp.session.crew import Crew
from trimcp.session.drive import Road, drive
from trimcp.session.job import Job
from trimcp.session.limits import Quota
from trimcp.session.push import Pushed
from trimcp.session.scopes import Scope, guarded
from trimcp.session.session import Session
from trimcp.session.tree import Overdue
from trimcp.wire.codes import INVALID_PARAMS, TIMED_OUT
from trimcp.wire.common import META_TIMEOUT, LoggingLevel, PageParams
from trimcp.wire.completion import CompleteParams, PromptReference
from trimcp.wire.fields import ABSENT
from trimcp.wire.jsonrpc import JSON, encode
from trimcp.wire.prompts import GetPromptParams, ListPromptsResult
from trimcp.wire.resources import (
    ListResourcesResult,
    ListResourceTemplatesResult,
    ReadResourceParams,
)
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolParams, ListToolsResult

if TYPE_CHECKING:
    from trimcp.server.gate import Gate, Kind
    from trimcp.server.processes import Processes
    from trimcp.server.server import Server
    from trimcp.server.statistics import ServerStatistics
    from trimcp.server.turns import Turns

__all__ = ["CURRENT", "Running"]

log: logging.Logger = logging.getLogger("trimcp.server")

CURRENT: ContextVar[Context[Any] | None] = ContextVar("trimcp_request", default=None)
"""The context of the request being handled in this task or thread; for the logging bridge."""

# Sessions kept for the next requests that need one for themselves, some 4 KiB each.
_MOST_SPARE = 128

# Seconds past its deadline in which a caller may say itself that it gives up, and why: that is the better reason.
_SLACK = 0.05

_T = TypeVar("_T")

Handler = Callable[[Any, Any], Awaitable[Any]]


@attrs.define(eq=False, repr=False)
class Running:
    """One run of a server, from entering its lifespan to leaving it.

    Attributes:
        server: what is served.
        state: what the lifespan made.
        nursery: where work of `ctx.server` lives.
        bounded: whether tools, resources, prompts and completions without a quota of their own may have one.
        counts: what gave way in sessions that have ended, by lane.
        processes: the worker processes of tools, or None before the first call of one.
        refused: requests that sessions which have ended had refused.
        hosts: each tells what one of those that serve it over a network holds, for statistics.
    """

    server: Server[Any]
    state: Any
    nursery: trio.Nursery
    bounded: bool = attrs.field(init=False)
    sessions: set[Session] = attrs.field(init=False, factory=set)
    counts: LaneCounts = attrs.field(init=False, factory=LaneCounts)
    processes: Processes | None = attrs.field(init=False, default=None)
    refused: int = attrs.field(init=False, default=0)
    hosts: list[Callable[[], Mapping[str, int]]] = attrs.field(init=False, factory=list)
    _draining: bool = attrs.field(init=False, default=False)
    _spare: list[Pushed] = attrs.field(init=False, factory=list)
    _subscribers: Subscribers = attrs.field(init=False)
    _handlers: dict[str, Handler] = attrs.field(init=False)
    _noticed: Handler = attrs.field(init=False)
    _scope: Scope = attrs.field(init=False)
    _crew: Crew = attrs.field(init=False)
    _gate: Gate | None = attrs.field(init=False, default=None)
    _threads: Turns | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._crew = Crew(self.nursery)
        limits = self.server.limits
        self.bounded = any(quota.bounds for quota in (limits.tool, limits.resource, limits.prompt, limits.completion))
        self._subscribers = Subscribers(self.server)
        self._scope = Scope(lambda: self.nursery)
        handlers: dict[str, Handler] = {
            "tools/list": self._list_tools,
            "tools/call": self._call_tool,
            "resources/list": self._list_resources,
            "resources/templates/list": self._list_templates,
            "resources/read": self._read_resource,
            "resources/subscribe": self._subscribers.subscribe,
            "resources/unsubscribe": self._subscribers.unsubscribe,
            "prompts/list": self._list_prompts,
            "prompts/get": self._get_prompt,
            "completion/complete": self._complete,
            "subscriptions/listen": self._subscribers.listen,
            **self.server.foreign,
        }
        if limits.session.bounds or limits.principal.bounds:
            for name in ("tools/call", "resources/read", "prompts/get", "completion/complete"):
                handlers[name] = self.gate.shared(handlers[name])
        self._handlers = {name: self.server.dressed(name, handler) for name, handler in handlers.items()}
        self._noticed = self.server.wrap(self._call_notification_handlers)

    # What is bounded. Most servers bound nothing, and need none of it.

    @property
    def gate(self) -> Gate:
        """The quotas of requests."""
        if self._gate is None:
            from trimcp.server.gate import Gate

            self._gate = Gate(self.server.limits)
        return self._gate

    @property
    def threads(self) -> Turns:
        """The turns of sync handlers in threads."""
        if self._threads is None:
            from trimcp.server.turns import MOST_WAITING, Turns

            self._threads = Turns(Quota(running=self.server.max_threads, waiting=MOST_WAITING), "threads")
        return self._threads

    def process_pool(self) -> Processes:
        """Return the worker processes, which are looked after in our nursery and end with it."""
        if self.processes is None:
            from trimcp.server.processes import Processes, cores

            self.processes = Processes(self.nursery, self.server.max_processes or cores())
        return self.processes

    def statistics(self) -> ServerStatistics:
        """Return a snapshot of this run."""
        from trimcp.server.statistics import add_up

        return add_up([self])

    @property
    def used_gate(self) -> Gate | None:
        """The quotas of requests, if there are any."""
        return self._gate

    @property
    def used_threads(self) -> Turns | None:
        """The turns of threads, if there were any."""
        return self._threads

    def in_turn(
        self,
        ctx: Context[Any],
        kind: Kind,
        name: str,
        own: Quota | None,
        function: Callable[..., Awaitable[_T]],
        *args: Any,
    ) -> Awaitable[_T]:
        """Return `function(*args)`, or where there is a quota what first waits for a turn; see `Gate.pass_through`."""
        if own is None and not self.bounded:
            return function(*args)
        return self.gate.pass_through(ctx, kind, name, own, function, *args)

    # The endpoint of sessions

    @property
    def served(self) -> Container[str]:
        """The methods that have a handler, as of the moment one is looked up."""
        return self

    def __contains__(self, name: object) -> bool:
        # Completion only while something can be completed: prompts and completers may come and go.
        return name == "logging/setLevel" or (
            name in self._handlers and (name != "completion/complete" or self.server.completes)
        )

    @property
    def revisions(self) -> Sequence[Revision]:
        """The revisions it speaks, oldest first."""
        return self.server.profile.revisions

    async def handle(self, session: Session, job: Job) -> Any:
        """Handle one request in the context of this run."""
        ctx = Context(session, job, self.state, self._scope)
        if "requestState" in job.raw or "inputResponses" in job.raw:
            open_questions(session, job, session.sealer)
        token = CURRENT.set(ctx)
        try:
            handler = self._handlers[job.request.verb.name]
            meta = job.request.admission.meta
            if meta is not None and META_TIMEOUT in meta:
                return await _while_awaited(handler, ctx, job, meta[META_TIMEOUT])
            return await handler(ctx, job.params)
        finally:
            CURRENT.reset(token)

    def notified(self, session: Session, event: Notified) -> None:
        """Take note of a notification: start telling a legacy session of changes, and call who asked for it."""
        name = event.verb.name
        if name == "notifications/initialized":
            self._subscribers.attach(session)
        if session.runner is not None and (self.server.has_middleware or name in self.server.notification_handlers):
            if session.notices >= session.limits.backlog_requests:
                session.counts.drop("others")
                return
            session.notices += 1
            notice = Notice(name, event.admission, self.state)
            session.background.start_soon(self._notice, session, notice, event.params)

    async def _notice(self, session: Session, notice: Notice, params: Any) -> None:
        try:
            await guarded(self._noticed, (notice, params))
        finally:
            session.notices -= 1

    async def _call_notification_handlers(self, notice: Notice, params: Any) -> None:
        for handler in self.server.notification_handlers.get(notice.method, ()):
            await guarded(handler, (params,))  # one that crashes does not keep it from the next

    def opened(self, session: Session) -> None:
        """Remember a session, so that draining the server finds it."""
        self.sessions.add(session)

    def closed(self, session: Session) -> None:
        """Forget a session."""
        if session in self.sessions:  # it may be told twice
            self.sessions.discard(session)
            if session.counts.merged or session.counts.dropped:
                self.counts.add(session.counts)
            self.refused += session.refused
            session.refused = 0
        self._subscribers.detach(session)
        if self._gate is not None:
            self._gate.closed(session)

    def open_brief(self) -> Pushed:
        """Return a session for one request of the modern era. What belongs to no request has no road there."""
        if self._spare:
            pushed = self._spare.pop()
            self.opened(pushed.session)
            return pushed
        pushed = Pushed(self.server.session(self, sink=NOWHERE), self._crew, self._take_back)
        pushed.require_envelope()
        if self._draining:
            pushed.session.draining.set()
        return pushed

    def _take_back(self, pushed: Pushed) -> bool:
        if len(self._spare) >= _MOST_SPARE:
            return False
        self.closed(pushed.session)
        self._spare.append(pushed)
        return True

    def open(self, sink: Sink) -> Pushed:
        """Return a new session into which messages are pushed; `sink` takes what belongs to no request."""
        pushed = Pushed(self.server.session(self, sink=sink), self._crew)
        if self._draining:
            pushed.session.draining.set()
        return pushed

    async def serve(self, channel: Road) -> None:
        """Serve one connection in this run until the peer leaves; then close the channel. Many may be served at once.

        Cancelling it stops the connection's handlers and closes the channel.
        """
        await drive(self.server.session(self), channel)

    async def drain(self, grace: float) -> None:
        """Drain every session at once, as `Session.drain` does, and close them. Later ones refuse every request.

        What has to be cancelled is logged as one warning: each request with its age and where it waits.
        """
        self._draining = True
        self._spare.clear()
        overdue = Overdue(self.sessions, grace)
        async with trio.open_nursery() as nursery:
            for session in list(self.sessions):
                nursery.start_soon(self._drain_one, session, grace, overdue)

    @staticmethod
    async def _drain_one(session: Session, grace: float, overdue: Overdue) -> None:
        await session.drain(grace, overdue)
        session.close()

    def log_to_all(self, level: LoggingLevel, data: JSON, logger: str | None = None) -> None:
        """Send a log message outside any request, to the legacy clients that want its level. Never waits."""
        self._subscribers.log(level, data, logger)

    # Lists

    def _page(
        self, ctx: Context[Any], registry: Registry[Any], params: PageParams, make: Callable[..., Any]
    ) -> Encoded:
        session, job = ctx.internals

        def encode_page(entries: list[Any], cursor: Any) -> Encoded:
            ttl_ms, scope = self.server.list_ttl_ms, self.server.list_cache_scope
            result = make(entries, next_cursor=cursor, ttl_ms=ttl_ms, cache_scope=scope)
            return Encoded(encode(session.engine.dump_result(job.request, result)))

        key = (ctx.revision, ctx.principal)
        return registry.page(params.cursor, self.server.page_size, key, encode_page)

    async def _list_tools(self, ctx: Context[Any], params: PageParams) -> Encoded:
        return self._page(
            ctx,
            self.server.tools,
            params,
            lambda entries, **rest: ListToolsResult(tools=[entry.tool for entry in entries], **rest),
        )

    async def _list_resources(self, ctx: Context[Any], params: PageParams) -> Encoded:
        return self._page(
            ctx,
            self.server.resources,
            params,
            lambda entries, **rest: ListResourcesResult(resources=[entry.resource for entry in entries], **rest),
        )

    async def _list_templates(self, ctx: Context[Any], params: PageParams) -> Encoded:
        return self._page(
            ctx,
            self.server.templates,
            params,
            lambda entries, **rest: ListResourceTemplatesResult(
                resource_templates=[entry.listed for entry in entries], **rest
            ),
        )

    async def _list_prompts(self, ctx: Context[Any], params: PageParams) -> Encoded:
        return self._page(
            ctx,
            self.server.prompts,
            params,
            lambda entries, **rest: ListPromptsResult(prompts=[entry.prompt for entry in entries], **rest),
        )

    # What is asked of one of them. A server that has only tools does not load what makes resources and prompts.

    async def _call_tool(self, ctx: Context[Any], params: CallToolParams) -> Any:
        entry = self.server.tools.get(params.name)
        if entry is None:
            raise ErrorReply(INVALID_PARAMS, f"unknown tool: {params.name[:100]}")
        return await entry.call(self, ctx, params)

    async def _read_resource(self, ctx: Context[Any], params: ReadResourceParams) -> Any:
        uri = params.uri
        try:
            entry = self.server.resources.get(uri)
            if entry is not None:
                return await self.in_turn(ctx, "resource", uri, entry.quota, entry.read, self, ctx)
            for template in self.server.templates:
                variables = template.match(uri)
                if variables is not None:
                    name, read = template.listed.uri_template, template.read
                    return await self.in_turn(ctx, "resource", name, template.quota, read, self, ctx, uri, variables)
        except ResourceNotFound:
            pass
        from trimcp.server.resources import missing

        raise missing(ctx, uri)

    async def _get_prompt(self, ctx: Context[Any], params: GetPromptParams) -> Any:
        entry = self.server.prompts.get(params.name)
        if entry is None:
            raise ErrorReply(INVALID_PARAMS, f"unknown prompt: {params.name[:100]}")
        arguments: Mapping[str, str] = {} if params.arguments is ABSENT else params.arguments
        return await self.in_turn(ctx, "prompt", params.name, entry.quota, entry.get, self, ctx, arguments)

    async def _complete(self, ctx: Context[Any], params: CompleteParams) -> Any:
        from trimcp.server.prompts import suggestions

        ref = params.ref
        target = ref.name if isinstance(ref, PromptReference) else ref.uri
        completer = self.server.completer(target, params.argument.name)
        if completer is not None:
            name = f"{target}: {params.argument.name}"
            return await self.in_turn(ctx, "completion", name, completer.quota, completer.complete, self, ctx, params)
        if isinstance(ref, PromptReference):
            prompt = self.server.prompts.get(target)
            if prompt is None:
                raise ErrorReply(INVALID_PARAMS, f"unknown prompt: {target[:100]}")
            typed = params.argument.value.casefold()
            choices = prompt.choices.get(params.argument.name, ())
            return suggestions([choice for choice in choices if choice.casefold().startswith(typed)])
        if target not in self.server.templates and target not in self.server.resources:
            raise ErrorReply(INVALID_PARAMS, f"unknown resource template: {target[:100]}")
        return suggestions(())


async def _while_awaited(handler: Handler, ctx: Context[Any], job: Job, seconds: Any) -> Any:
    """Handle a request for as long as its caller waits, which began when the request came in."""
    if type(seconds) not in (int, float):  # nothing that anybody promised; another program may use the same key
        return await handler(ctx, job.params)
    deadline = job.arrived + seconds
    ctx.caller_waits_until(deadline)
    if deadline > trio.current_time():
        with trio.CancelScope(deadline=deadline + _SLACK) as scope:
            return await handler(ctx, job.params)
        assert scope.cancelled_caught
    job.timed_out("the caller's time was over")
    raise ErrorReply(TIMED_OUT, "the caller's time was over", {"reason": "deadline"})
