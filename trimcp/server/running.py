"""One run of a server, from entering its lifespan to leaving it: the `Endpoint` of its sessions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.budget import Budget, MemoryAccount
from trimcp.channel import NOWHERE, LaneCounts, MessageWriter, Sink
from trimcp.errors import CannotAsk, ErrorReply, ResourceNotFound
from trimcp.protocol.connection import Connection, Encoded
from trimcp.protocol.events import Notified
from trimcp.protocol.profile import Role
from trimcp.server.handlers.calling import Handler
from trimcp.server.handlers.pools import Pools
from trimcp.server.offering import Notice, Offering
from trimcp.server.registry import Registry
from trimcp.server.subscribing import Subscribers
from trimcp.session.context import CURRENT, Context
from trimcp.session.drive import AnyChannel, Receiver, drive
from trimcp.session.facts import SessionMemory
from trimcp.session.incoming.job import CancelReason, Job
from trimcp.session.incoming.jobs import HandlerTasks
from trimcp.session.queues import Outbox
from trimcp.session.scopes import Scope, guarded, written
from trimcp.session.session import Session
from trimcp.support.nurseries import unwrap_single
from trimcp.support.slotted import slotted
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND, TIMED_OUT
from trimcp.wire.common import META_TIMEOUT, LoggingLevel, PageParams
from trimcp.wire.jsonrpc import JSON, Unencodable, encode
from trimcp.wire.methods import CALLS, LISTS
from trimcp.wire.prompts import CompleteParams, GetPromptParams, ListPromptsResult, PromptReference
from trimcp.wire.resources import ListResourcesResult, ListResourceTemplatesResult, ReadResourceParams
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolParams, ListToolsResult

if TYPE_CHECKING:
    from trimcp.server.keeping import Keeper
    from trimcp.session.push import Pushed, PushedConnection
    from trimcp.watch.statistics import ServerStatistics
    from trimcp.watch.tree import Overdue

log: logging.Logger = logging.getLogger("trimcp.server")

_OWNERS = 10  # owners of memory in a snapshot of statistics

# Sessions kept for reuse by later single requests, about 4 KiB each.
_MOST_SPARE = 128

_ENCODED: Final = "_encoded"  # the attribute by which a page that middleware left alone is known

# Seconds beyond the caller's deadline: its own cancellation, which gives a better reason, may arrive first.
_SLACK = 0.05


@slotted
class Running:
    """One run of a server, from entering its lifespan to leaving it.

    It has more than 300 lines because handlers, sessions and their end share one nursery and one state, and a call
    passes as few modules as it can.

    Attributes:
        server: the server that runs.
        state: the value that the lifespan yielded.
        nursery: runs the background tasks of `ctx.server`.
        max_message: bytes of the largest message accepted, over every transport.
        pools: the quotas, threads and worker processes.
        sessions: the open sessions, with when each began on Trio's clock; 0 for one that serves a single request.
        counts: messages that ended sessions dropped and merged, by lane.
        refused: requests that ended sessions refused.
        on_notified: called with each notification of a client, before its handlers; it must not block.
        subscribers: the sessions that are notified of changes.
        hosts: for statistics, one function per network host that returns its counts.
    """

    server: Offering
    state: Any
    nursery: trio.Nursery
    max_message: int = attrs.field(init=False)
    pools: Pools = attrs.field(init=False)
    sessions: dict[Session, float] = attrs.field(init=False, factory=dict)
    counts: LaneCounts = attrs.field(init=False, factory=LaneCounts)
    refused: int = attrs.field(init=False, default=0)
    hosts: list[Callable[[], Mapping[str, int]]] = attrs.field(init=False, factory=list)
    # what functions have provided for this run, and the tasks that enter what belongs to a session; see `Depends`
    provided: dict[Callable[..., Any], Any] = attrs.field(init=False, factory=dict)
    providing: dict[Session, trio.MemorySendChannel[Any]] = attrs.field(init=False, factory=dict)
    on_notified: Callable[[Session, Notified], object] | None = attrs.field(init=False, default=None)
    subscribers: Subscribers = attrs.field(init=False)
    # runs the handlers of sessions that have no task of their own
    handler_tasks: HandlerTasks = attrs.field(init=False)
    _drained: set[object] = attrs.field(init=False, factory=set)
    _spare: list[Pushed] = attrs.field(init=False, factory=list)
    _handlers: dict[str, Handler] = attrs.field(init=False)
    _noticed: Handler = attrs.field(init=False)
    _scope: Scope = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        server, limits = self.server, self.server.limits
        self.handler_tasks = HandlerTasks(self.nursery)
        self.max_message = limits.largest_into(Role.SERVER)
        self.pools = Pools(limits, server.max_threads, server.max_processes, self.nursery)
        self.subscribers = Subscribers(server)
        self._scope = Scope(lambda: self.nursery)
        listing = self._lister
        handlers: dict[str, Handler] = {
            "tools/list": listing(server.tools, ListToolsResult, "tools"),
            "tools/call": self._call_tool,
            "resources/list": listing(server.resources, ListResourcesResult, "resources"),
            "resources/templates/list": listing(server.templates, ListResourceTemplatesResult, "resource_templates"),
            "resources/read": self._read_resource,
            "resources/subscribe": self.subscribers.subscribe,
            "resources/unsubscribe": self.subscribers.unsubscribe,
            "prompts/list": listing(server.prompts, ListPromptsResult, "prompts"),
            "prompts/get": self._get_prompt,
            "completion/complete": self._complete,
            "subscriptions/listen": self.subscribers.listen,
            **server.foreign,
        }
        self._handlers = {}
        self.serve_by(handlers, own=LISTS)
        self._noticed = server.wrap(self._call_notification_handlers)

    def serve_by(self, handlers: Mapping[str, Handler], own: Collection[str] = ()) -> None:
        """Have these handlers serve their methods from now on, inside the turns, middleware and filters of the server.

        `own`: the methods whose handlers call the middleware themselves.
        """
        for name, handler in handlers.items():
            if self.server.offers_method(name):
                self._handlers[name] = self.within(name, handler, own=name in own)

    def within(self, name: str, handler: Handler, *, own: bool = False) -> Handler:
        """Return the handler of a method inside the turns, middleware and filters; `own` as for `serve_by`."""
        server = self.server
        if name in CALLS:
            handler = self.pools.shared(handler)
        if not own:
            handler = server.filtered(name, server.wrap(handler))
        handler = server.audited(name, handler)
        return handler if server.around is None else server.around(handler)

    def replace(self, name: str, wrap: Callable[[Any], Handler]) -> None:
        """Put another handler in the place of a method's, outermost. `wrap` gets that one; None if there is none."""
        self._handlers[name] = wrap(self._handlers.get(name))

    def handle_for(self, ctx: Context[Any], name: str, params: Any) -> Awaitable[Any]:
        """Handle a request that another running server got, in this run: `ctx` is the one of that run.

        Raises ErrorReply: there is no such method here.
        """
        handler = self._handlers.get(name)
        if handler is None or name not in self:
            raise ErrorReply(METHOD_NOT_FOUND, f"method not offered here: {name[:100]}")
        session, job = ctx.internals
        return handler(Context(session, job, self.state, self._scope, self), params)

    def statistics(self) -> ServerStatistics:
        """Return a snapshot of this run. It takes a few microseconds per session."""
        from trimcp.session.statistics import lanes_of
        from trimcp.watch.statistics import MemoryStatistics, ServerStatistics

        pools, budget = self.pools, self.budget
        sessions = [session.statistics() for session in self.sessions]
        hosts: Counter[str] = Counter()
        for host in self.hosts:
            hosts.update(host())
        return ServerStatistics(
            sessions=len(sessions),
            running=sum(one.running for one in sessions),
            parked=sum(one.parked for one in sessions),
            waiting=sum(one.waiting for one in sessions),
            pending=sum(one.pending for one in sessions),
            abandoned_threads=0 if pools.threads is None else pools.threads.abandoned,
            waiting_turns=pools.waiting,
            refused=self.refused + sum(session.jobs.refused for session in self.sessions) + pools.refused,
            quotas=pools.quotas(),
            threads=None if pools.threads is None else pools.threads.statistics(),
            processes=None if pools.processes is None else pools.processes.statistics(),
            lanes=sum((one.lanes for one in sessions), lanes_of(self.counts)),
            memory=MemoryStatistics(
                budget.bound, budget.held, dict(budget.owners()[:_OWNERS]), budget.refused, budget.ended
            ),
            hosts=dict(hosts),
        )

    # The endpoint of sessions

    def __contains__(self, name: object) -> bool:
        """Return whether the method of this name has a handler now."""
        # Completers may be added and removed while the server runs.
        return name == "logging/setLevel" or (
            name in self._handlers and (name != "completion/complete" or self.server.completes)
        )

    @property
    def budget(self) -> Budget:
        return self.server.budget

    @property
    def revisions(self) -> Sequence[Revision]:
        return self.server.profile.revisions

    async def handle(self, session: Session, job: Job) -> Any:
        ctx = Context(session, job, self.state, self._scope)
        if "requestState" in job.request.raw or "inputResponses" in job.request.raw:
            from trimcp.session.outgoing.asking import open_questions  # loaded with the first question

            open_questions(session, job)
        token = CURRENT.set(ctx)
        try:
            handler = self._handlers[job.request.method.name]
            meta = job.request.admission.meta
            if meta is not None and META_TIMEOUT in meta:
                return await _while_awaited(handler, ctx, job, meta[META_TIMEOUT])
            return await handler(ctx, job.request.params)
        finally:
            CURRENT.reset(token)

    async def failure(self, session: Session, job: Job, error: BaseException) -> Any:
        """Return the tool error for an exception of a tool's middleware or of tasks that it started; None for a crash.

        An integer beyond 64 bits in a result is a tool error, too, and logged: the tool's author cannot know who has
        such JSON. The filters get it like any result. With `handler_errors="tell"` a crash is logged and its text sent.
        """
        if job.request.method.name != "tools/call":
            return None
        from trimcp.server.tools import error_text
        from trimcp.wire.tools import failed_call

        text, cause = error_text(job.request.params.name, error), unwrap_single(error)
        too_large = isinstance(cause, Unencodable) and "64-bit" in str(cause)  # orjson's words
        if text is None and session.handler_errors != "raise" and too_large:
            job.log_crash(error)
            text = f"the result of {job.request.params.name} cannot be sent: {cause}"
        if text is None and session.handler_errors == "tell" and not isinstance(cause, ErrorReply | CannotAsk):
            from trimcp.support.cleaning import mask
            from trimcp.workers.packing import FailedInWorker

            job.log_crash(error)
            kind = "" if isinstance(cause, FailedInWorker) else f"{type(cause).__name__}: "  # already in its text
            text = f"{job.request.params.name} failed: {kind}{mask(str(cause))}"
        if text is None:
            return None

        async def tell(ctx: Any, params: Any) -> Any:
            return failed_call(text)

        ctx = Context(session, job, self.state, self._scope)
        return await self.server.filtered("tools/call", tell)(ctx, job.request.params)

    def source_location(self, job: Job) -> str | None:
        function = self.server.function_of(job.request.method.name, job.request.params)
        return None if function is None else written(function)

    def notified(self, session: Session, event: Notified) -> None:
        """Handle a notification: call its handlers; from `initialized` on, notify a legacy session of changes."""
        name = event.method.name
        if name == "notifications/initialized":
            self.subscribers.attach(session)
        if self.on_notified is not None:
            self.on_notified(session, event)
        self.notice(session, event)

    def notice(self, session: Session, event: Notified) -> None:
        """Call the handlers of a notification, and the middleware around them."""
        name = event.method.name
        if session.driven and (self.server.middlewares or name in self.server.notification_handlers):
            notice = Notice(name, event.admission, self.state)
            session.start_notice(guarded, self._noticed, (notice, event.params))

    async def _call_notification_handlers(self, notice: Notice, params: Any) -> None:
        for handler in self.server.notification_handlers.get(notice.method, ()):
            await guarded(handler, (params,))  # the next one is called even if this one crashes

    def session(self, sink: Sink | None = None, *, force_rerun: bool = False) -> Session:
        """Return a new session of this run, for a driver. `force_rerun` is for tests, see `Session`."""
        server = self.server
        engine = Connection(Role.SERVER, server.profile, self, server.foreign, server.notification_handlers)
        session = Session(
            engine,
            self,
            server.limits,
            Outbox.of(server.limits) if sink is None else sink,
            handler_errors=server.handler_errors,
            force_rerun=force_rerun,
            sealer=server.sealer,
            memory=SessionMemory(server.budget),
        )
        session.on_finished = server.on_finished
        self.sessions[session] = trio.current_time()
        if server.on_session is not None:
            server.on_session(session, True)
        return session

    def closed(self, session: Session) -> None:
        if session in self.sessions:  # may be called twice
            del self.sessions[session]
            if self.server.on_session is not None:
                self.server.on_session(session, False)
            counts = session.counts
            if counts.merged or counts.dropped:
                self.counts.add(counts)
            if session.jobs.refused:
                self.refused += session.jobs.refused
                session.jobs.refused = 0
        self.subscribers.detach(session)
        if self.pools.sessions:
            self.pools.closed(session)

    def open_for_one(self, holding: MemoryAccount | None = None, via: object = None) -> Pushed:
        """Return a session for one request of the modern era. It sends no messages outside that request."""
        if self._spare and not self._drained:
            pushed = self._spare.pop()
            session = pushed.session
            session.memory.holding, session.transport.via = holding, via
            self.sessions[session] = 0.0
            return pushed
        from trimcp.session.push import Pushed  # loaded with the first such session, as below

        pushed = Pushed(self.session(NOWHERE), self.handler_tasks, self._recycle)
        pushed.session.engine.modern.required = True  # even if the envelope of the request is missing
        return self._opened_with(pushed, holding, via)

    def _recycle(self, pushed: Pushed) -> bool:
        if len(self._spare) >= _MOST_SPARE or self._drained:
            return False
        self.closed(pushed.session)
        pushed.session.memory.belong_to(None)
        self._spare.append(pushed)
        return True

    def open(self, sink: Sink, holding: MemoryAccount | None = None, via: object = None) -> Pushed:
        """Return a new session into which messages are pushed; `sink` takes the messages outside any request."""
        from trimcp.session.push import Pushed

        return self._opened_with(Pushed(self.session(sink), self.handler_tasks), holding, via)

    def _opened_with(self, pushed: Pushed, holding: MemoryAccount | None, via: object) -> Pushed:
        """Count a session's memory in `holding`, and drain it with `via`, see `drain`."""
        session = pushed.session
        session.memory.holding, session.transport.via = holding, via
        if self._drained and not self._drained.isdisjoint((via, None)):
            session.draining.set()
        return pushed

    def open_connected(
        self, writer: MessageWriter, holding: MemoryAccount | None = None, via: object = None
    ) -> PushedConnection:
        """Return a new session that is one connection; its transport pushes messages and `writer` sends its own."""
        from trimcp.session.push import PushedConnection, WrittenOutbox

        session = self.session(WrittenOutbox(self.server.limits, writer))
        session.engine.legacy.reopens, session.transport.link = True, writer.link
        opened = PushedConnection(session, self.handler_tasks)
        self._opened_with(opened, holding, via)
        return opened

    def keeper(self) -> Keeper:
        """Return what writes sessions down for other processes."""
        from trimcp.server.keeping import Keeper  # loaded where processes share sessions

        return Keeper(self.server, self.subscribers, self.pools)

    async def serve(
        self, channel: AnyChannel, via: object = None, receiver: Callable[[Session], Receiver] | None = None
    ) -> None:
        """Serve one connection in this run until the peer closes it; then close the channel. Many may run at once.

        Cancelling it stops the connection's handlers and closes the channel. It is drained with `via`, see `drain`.
        `receiver` returns what is given the messages in place of the session.
        """
        session = self.session()
        session.transport.via = via
        await drive(session, channel, None if receiver is None else receiver(session))

    async def drain(self, grace: float, via: object = None) -> None:
        """Drain all sessions concurrently, as `Session.drain` does, and close them. Later ones refuse every request.

        Requests that have to be cancelled are logged in one warning, each with its age and where it waits. With `via`
        only the sessions opened with it are drained, such as those of one port; the others continue.
        """
        from trimcp.watch.tree import Overdue

        self._drained.add(via)
        self._spare.clear()
        sessions = self._sessions_of(via)
        overdue = Overdue(sessions, grace)
        async with trio.open_nursery() as nursery:
            for session in sessions:
                nursery.start_soon(self._drain_one, session, grace, overdue)

    def leave(self, via: object) -> None:
        """End at once the sessions that were opened with `via`: no client will read their results."""
        self._drained.discard(via)
        for session in self._sessions_of(via):
            session.lose("the server has left this address")
            session.jobs.cancel_all(CancelReason.DRAIN)
            session.close()

    def _sessions_of(self, via: object) -> list[Session]:
        return [session for session in self.sessions if via is None or session.transport.via is via]

    @staticmethod
    async def _drain_one(session: Session, grace: float, overdue: Overdue) -> None:
        await session.drain(grace, overdue)
        session.close()

    def log_to_all(self, level: LoggingLevel, data: JSON, logger: str | None = None) -> None:
        """Send a log message outside any request, to the legacy clients that want its level. Never waits."""
        self.subscribers.log(level, data, logger)

    def _lister(self, registry: Registry[Any], result: Callable[..., Any], member: str) -> Handler:
        """Return the handler that lists a registry; `member` names the entries in its results.

        Pages are encoded once. Middleware gets the page as a value, with a list of its own that it may change.
        """
        server = self.server

        async def list_page(ctx: Context[Any], params: PageParams) -> Encoded:
            session, job = ctx.internals

            def encode_page(entries: list[Any], cursor: Any) -> Encoded:
                scope = "private" if registry.differs else server.list_cache_scope
                listed = {member: [entry.listed for entry in entries]}
                page = result(**listed, next_cursor=cursor, ttl_ms=server.list_ttl_ms, cache_scope=scope)
                return Encoded(encode(session.engine.dump_result(job.request, page)) if sent else b"", page)

            sent = job.request.method.name in LISTS  # else a tool wants the list
            key = (ctx.revision, registry.rights_of(ctx.principal), sent)
            hidden = registry.hidden_from(ctx.admission)
            return registry.page(params.cursor, server.page_size, key, encode_page, hidden)

        if not server.middlewares:
            return list_page

        async def list_values(ctx: Context[Any], params: PageParams) -> Any:
            encoded = await list_page(ctx, params)
            page = attrs.evolve(encoded.value, **{member: [*getattr(encoded.value, member)]})
            object.__setattr__(page, _ENCODED, encoded)  # of this object alone: a changed copy does not have it
            return page

        with_middleware = server.wrap(list_values)

        async def list_encoded(ctx: Context[Any], params: PageParams) -> Any:
            page = await with_middleware(ctx, params)
            encoded = getattr(page, _ENCODED, None)
            return page if encoded is None or page != encoded.value else encoded

        return list_encoded

    # Requests for one entry. A server that has only tools does not load the modules for resources and prompts.

    def _call_tool(self, ctx: Context[Any], params: CallToolParams) -> Awaitable[Any]:
        entry = self.server.tools.get(params.name)
        if entry is None or (entry.permission is not None and entry.permission.hides(ctx.admission)):
            raise _unknown("tool", params.name)
        if entry.permission is not None:
            entry.permission.check_scopes(ctx, params.name)
        return entry.call(self.pools, ctx, params)

    async def _read_resource(self, ctx: Context[Any], params: ReadResourceParams) -> Any:
        uri = params.uri
        entry, variables = self.server.find_resource(uri)
        if entry is not None and not (entry.permission is not None and entry.permission.hides(ctx.admission)):
            if entry.permission is not None:
                await entry.permission.require(ctx, uri, variables)
            try:
                return await self.pools.in_turn(ctx, "resource", entry.address, entry.quota, entry.read, uri, variables)
            except ResourceNotFound:
                pass
        from trimcp.server.resources import missing

        raise missing(ctx, uri)

    async def _get_prompt(self, ctx: Context[Any], params: GetPromptParams) -> Any:
        entry = self.server.prompts.get(params.name)
        if entry is None or (entry.permission is not None and entry.permission.hides(ctx.admission)):
            raise _unknown("prompt", params.name)
        arguments: Mapping[str, str] = {} if params.arguments is None else params.arguments
        if entry.permission is not None:
            await entry.permission.require(ctx, params.name, arguments)
        return await self.pools.in_turn(ctx, "prompt", params.name, entry.quota, entry.get, arguments)

    async def _complete(self, ctx: Context[Any], params: CompleteParams) -> Any:
        from trimcp.server.prompts import suggestions

        ref = params.ref
        server, of_prompt = self.server, isinstance(ref, PromptReference)
        target = ref.name if isinstance(ref, PromptReference) else ref.uri
        about: Any = server.prompts.get(target)
        if not of_prompt:
            about = server.templates.get(target) or server.resources.get(target)
        what = "prompt" if of_prompt else "resource template"
        if about is not None and about.permission is not None:
            if about.permission.hides(ctx.admission):
                raise _unknown(what, target)
            known = (params.context and params.context.arguments) or {}
            await about.permission.require(ctx, target, {**known, params.argument.name: params.argument.value})
        completer = server.completers.get((target, params.argument.name))
        if completer is not None:
            name = f"{target}: {params.argument.name}"
            if completer.permission is not None:
                completer.permission.check_scopes(ctx, name)
                await completer.permission.obtain(ctx, target)
            return await self.pools.in_turn(ctx, "completion", name, completer.quota, completer.complete, params)
        if about is None:
            raise _unknown(what, target)
        typed = params.argument.value.casefold()
        choices = about.choices.get(params.argument.name, ()) if of_prompt else ()
        return suggestions([choice for choice in choices if choice.casefold().startswith(typed)])


def _unknown(what: str, name: str) -> ErrorReply:
    return ErrorReply(INVALID_PARAMS, f"unknown {what}: {name[:100]}")


async def _while_awaited(handler: Handler, ctx: Context[Any], job: Job, seconds: Any) -> Any:
    """Handle a request within the caller's timeout, counted from the request's arrival."""
    if type(seconds) not in (int, float):  # another program may use the same key
        return await handler(ctx, job.request.params)
    deadline = job.deadline = job.arrived + seconds
    if deadline > trio.current_time():
        with trio.CancelScope(deadline=deadline + _SLACK) as scope:
            return await handler(ctx, job.request.params)
        assert scope.cancelled_caught
    job.note_cancelled(CancelReason.DEADLINE, "the caller's time was over")
    raise ErrorReply(TIMED_OUT, "the caller's time was over", {"reason": "deadline"})
