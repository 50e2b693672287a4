"""What a proxy serves: each method of a client's requests, made at the upstream over the client's connection."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.client.session import ClientSession
from trimcp.compose.calls import HeldCall, QuestionsAsked, RelayedCall, asked_of, inward_task, kept_of, outward_task
from trimcp.compose.relays import Relay, Relays, can_be_asked
from trimcp.errors import (
    CannotAsk,
    ConnectionLost,
    ErrorReply,
    InvalidReply,
    LocalError,
    McpError,
    NotStarted,
    RemoteError,
    Stopped,
    UpstreamDown,
)
from trimcp.fleet.combinators import first_of
from trimcp.framing.headers import METHOD, Mirror, find_mirrors
from trimcp.server.handlers.calling import Handler
from trimcp.server.registry import Change
from trimcp.server.subscribing import LookAtTask, notification_of, task_change, tell_of_task, tell_subscriber
from trimcp.server.tools import check_headers
from trimcp.session.context import Context
from trimcp.session.outgoing.listening import (
    PromptsChanged,
    ResourcesChanged,
    ResourceUpdated,
    Subscription,
    ToolsChanged,
)
from trimcp.session.session import Session
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.capabilities import declares
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS, MISSING_CAPABILITY, TIMED_OUT
from trimcp.wire.common import META_SUBSCRIPTION_ID, EmptyResult, PageParams
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.lifecycle import (
    SubscriptionFilter,
    SubscriptionsAcknowledgedParams,
    SubscriptionsListenParams,
    SubscriptionsListenResult,
)
from trimcp.wire.methods import CALLS, LISTS, METHODS, TASK_ID
from trimcp.wire.resources import ReadResourceParams, SubscribeParams
from trimcp.wire.tools import CallToolParams, Tool

log: logging.Logger = logging.getLogger("trimcp.compose")

_OF_TASKS: Final = ("tasks/get", "tasks/update", "tasks/cancel")
EXTENSIONS: Final = ("skills/list", "skills/get", "resources/directory/read", *_OF_TASKS)
"""The methods of the official extensions."""

_CHANGES: Final[Mapping[object, Change]] = {
    ToolsChanged(): Change.TOOLS,
    PromptsChanged(): Change.PROMPTS,
    ResourcesChanged(): Change.RESOURCES,
}
_MOST_MIRRORED: Final = 4_096
_MOST_PAGES: Final = 100
_MOST_HELD: Final = 16  # calls of one client that may wait for its answers
_MOST_WATCHED: Final = 200  # resources of one session: each is a subscription of its own
_MOST_LISTENED: Final = 1_000


@attrs.define(eq=False, repr=False)
class Forwarding:
    """Makes the requests of clients at one upstream.

    It has more than 300 lines because lists, calls, and changes for each kind of client are passed on each in its way.
    """

    relays: Relays
    _mirrors: dict[str, tuple[Mirror, ...]] = attrs.field(init=False, factory=dict)  # of tools that have any
    # where changes are heard for all clients together, and where they are published
    _common: Relay | None = attrs.field(init=False, default=None)
    _publish: Callable[[Change | str], object] | None = attrs.field(init=False, default=None)
    _watched: set[str] = attrs.field(init=False, factory=set)
    _listed_once: bool = attrs.field(init=False, default=False)

    def handlers(self, methods: Iterable[str]) -> dict[str, Handler]:
        """Return the handlers of the protocol's methods, and of these of extensions."""
        return {
            **{name: partial(self.page, name) for name in LISTS},
            **{name: partial(self.request, name) for name in CALLS},
            **{name: partial(self.extension, name) for name in methods},
            "resources/subscribe": self.subscribe,
            "resources/unsubscribe": self.unsubscribe,
            "subscriptions/listen": self.listen,
        }

    # Requests

    async def page(self, method: str, ctx: Context[Any], params: PageParams) -> Any:
        """Return a page of a list; an empty one if the upstream has no such list."""

        async def ask(session: ClientSession) -> Any:
            row = METHODS[method]
            if not declares(session.server_capabilities, row.capability or ""):
                return row.result(**{row.members or "": []})
            page = await session.list_page(method, params.cursor)
            if method == "tools/list":
                self._note_mirrors(page.tools)
            return page

        try:
            async with self.relays.lease(ctx) as relay:
                return await (await relay.connected()).use(ask, idempotent=True)
        except (McpError, trio.TooSlowError) as error:
            raise self.translated(error, ctx, None) from None

    def _note_mirrors(self, tools: Iterable[Tool]) -> None:
        """Note which arguments of tools have to be repeated in headers, to check those of calls."""
        for tool in tools:
            self._mirrors.pop(tool.name, None)
            with suppress(ValueError):
                if mirrors := find_mirrors(tool.input_schema):
                    self._mirrors[tool.name] = mirrors
        for name in list(self._mirrors)[:-_MOST_MIRRORED]:
            del self._mirrors[name]

    async def _check_headers(self, ctx: Context[Any], params: CallToolParams) -> None:
        if METHOD not in ctx.headers or not ctx.revision.method_headers:
            return
        if not self._listed_once:  # nobody has asked for the list yet
            cursor, pages = None, 0
            while pages < _MOST_PAGES and (pages == 0 or cursor is not None):
                page = await self.page("tools/list", ctx, PageParams(cursor=cursor))
                cursor, pages = page.next_cursor, pages + 1
            self._listed_once = True
        if mirrors := self._mirrors.get(params.name):
            check_headers(params.name, mirrors, ctx, params.arguments or {})

    async def extension(self, method: str, ctx: Context[Any], params: Mapping[str, Any]) -> Any:
        """Make a request of an extension."""
        given = {key: each for key, each in params.items() if key != "_meta"}
        if method not in _OF_TASKS or not isinstance(id := given.get(TASK_ID), str):
            return await self.request(method, ctx, given)
        given[TASK_ID] = inward_task(ctx, id)
        if given[TASK_ID] is None:
            raise ErrorReply(INVALID_PARAMS, "there is no such task, or no more")
        answer = await self.request(method, ctx, given)
        return {**answer, TASK_ID: id} if TASK_ID in answer else answer

    async def request(self, method: str, ctx: Context[Any], params: Any) -> Any:
        """Make a request at the upstream, and return its result or questions of it."""
        try:
            if method == "tools/call":
                await self._check_headers(ctx, params)
            return await self._request(ctx, method, params)
        except (McpError, trio.TooSlowError) as error:
            raise self.translated(error, ctx, params) from None

    async def _request(self, ctx: Context[Any], method: str, params: Any) -> Any:
        row = METHODS.get(method)
        asks = row is not None and row.may_ask_from is not None and ctx.revision >= row.may_ask_from
        kept = kept_of(ctx) if asks else {}
        answers: Mapping[str, Any] = getattr(params, "input_responses", None) or {}
        if not isinstance(params, dict):
            params = attrs.evolve(params, meta=None)
        if method == "tools/call":
            params = attrs.evolve(params, task=None)
        if (id := kept.get("held")) is not None:
            held = self.relays.held.get(id)
            if held is None or held.awaited:
                raise ErrorReply(INVALID_PARAMS, "this call is no longer under way: begin it again")
            held.take(answers, ctx)
            held.call.ctx = ctx
        elif asks and self.relays.asks_apart and can_be_asked(ctx.capabilities) and not self.relays.shared:
            held = self._hold(ctx, method, params)
        else:
            if asks:
                params = attrs.evolve(params, request_state=kept.get("state"))
            async with self.relays.lease(ctx) as relay:
                try:
                    return await self._over(relay, RelayedCall(ctx, method, params))
                except QuestionsAsked as questions:
                    return asked_of(ctx, questions.asked, state=questions.asked.request_state)
        outcome = await held.outcome()
        return asked_of(ctx, outcome, held=held.id) if isinstance(outcome, InputRequiredResult) else outcome

    def _hold(self, ctx: Context[Any], method: str, params: Any) -> HeldCall:
        """Begin a call that can be held while its client answers."""
        relays = self.relays
        owner = relays.key_of(ctx)

        def may_wait() -> bool:
            return sum(each.owner == owner and each.asks for each in relays.held.values()) < _MOST_HELD

        call = RelayedCall(ctx, method, params)
        held = call.held = HeldCall(call, owner, ctx.internals[0].limits.answer_timeout, may_wait)
        relays.held[held.id] = held

        async def work() -> Any:
            async with relays.lease(ctx) as relay:
                return await self._over(relay, call)

        relays.nursery.start_soon(held.run, work, lambda: relays.held.pop(held.id))
        return held

    async def _over(self, relay: Relay, call: RelayedCall) -> Any:
        """Make a call over a connection, and pass on what the upstream says meanwhile before its result."""
        upstream = await relay.connected()

        async def run(session: ClientSession) -> Any:
            await relay.ask_for_logs(session, call.ctx)
            payload = await call.run(session)
            if session.logs is not None and session.logs.unread:
                await first_of(session.logs.drained, session.wait_lost)
            return payload

        relay.calls.append(call)
        try:
            return await upstream.use(run, idempotent=call.method in ("resources/read", "prompts/get"))
        finally:
            relay.calls.remove(call)

    def translated(self, error: Exception, ctx: Context[Any], params: Any) -> Exception:
        """Return the error for the client: what the upstream said, in the client's revision, or that it is gone."""
        name = self.relays.name
        if isinstance(error, ErrorReply | CannotAsk):
            return error
        if isinstance(error, NotStarted | Stopped):
            done = "was not begun" if isinstance(error, NotStarted) else "may be half done"
            return ErrorReply(INTERNAL_ERROR, f"the upstream {name!r} shut down; the request {done}", _LOST)
        if isinstance(error, RemoteError):
            code, learned = error.code, self.relays.learned
            missing = isinstance(error.data, dict) and "uri" in error.data
            reads = learned is not None and isinstance(params, ReadResourceParams) and missing
            if reads and learned is not None and code == learned.revision.resource_missing_code:
                code = ctx.revision.resource_missing_code
            if code == MISSING_CAPABILITY and ctx.revision.server_may_call:
                return CannotAsk(error.message)
            return ErrorReply(code, error.message, error.data)
        log.warning("a request to the upstream %r failed: %s", name, one_line(str(error)))
        if isinstance(error, UpstreamDown):
            return ErrorReply(INTERNAL_ERROR, f"the upstream {name!r} is down; nothing was done", _LOST)
        if isinstance(error, ConnectionLost):
            done = "nothing was done" if error.nothing_sent else "the request may have been carried out"
            return ErrorReply(INTERNAL_ERROR, f"the upstream {name!r} was lost; {done}", _LOST)
        if isinstance(error, InvalidReply):
            why = one_line(str(error), 300)
            return ErrorReply(INTERNAL_ERROR, f"the upstream {name!r} gave an answer that is not valid: {why}")
        if isinstance(error, LocalError):
            return ErrorReply(INTERNAL_ERROR, f"the upstream {name!r} cannot be asked that")
        return ErrorReply(TIMED_OUT, f"the upstream {name!r} did not answer in time", {"reason": "deadline"})

    # Changes, for sessions that are told of them unasked

    def tell_lists(self, session: Session, relay: Relay) -> None:
        """Tell a session of changes of the upstream's lists, until it ends."""
        wanted = {"tools": True, "prompts": True, "resources_list": True}
        self.relays.nursery.start_soon(self._tell, session, relay, wanted, trio.Event(), [])

    async def _tell(
        self, session: Session, relay: Relay, wanted: dict[str, Any], opened: trio.Event, failed: list[Exception]
    ) -> None:
        async def tell() -> None:
            upstream = await relay.connected()
            async with upstream.listen(**wanted) as changes:
                opened.set()
                async for change in changes:
                    about = change.uri if isinstance(change, ResourceUpdated) else _CHANGES[change]
                    name, params = notification_of(about)
                    session.notify_latest(name, params, key=None if params is None else params.uri)

        scope = trio.CancelScope()
        try:
            with scope:
                for uri in wanted.get("resources", ()):
                    relay.watched[session, uri] = scope
                await first_of(tell, session.closed.wait)
        except McpError as error:
            failed.append(error)
        finally:
            for uri in wanted.get("resources", ()):
                if relay.watched.get((session, uri)) is scope:
                    del relay.watched[session, uri]
            opened.set()

    async def subscribe(self, ctx: Context[Any], params: SubscribeParams) -> EmptyResult:
        """Tell a session of changes of a resource from now on."""
        session, _ = ctx.internals
        async with self.relays.lease(ctx) as relay:
            if (session, params.uri) not in relay.watched:
                if sum(each is session for each, _ in relay.watched) >= _MOST_WATCHED:
                    raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_WATCHED} subscriptions on one session")
                opened, failed = trio.Event(), list[Exception]()
                wanted = {"resources": [params.uri]}
                self.relays.nursery.start_soon(self._tell, session, relay, wanted, opened, failed)
                await opened.wait()
                if failed:
                    raise self.translated(failed[0], ctx, ReadResourceParams(uri=params.uri))
        return EmptyResult()

    async def unsubscribe(self, ctx: Context[Any], params: SubscribeParams) -> EmptyResult:
        """Tell a session of a resource no longer."""
        session, _ = ctx.internals
        async with self.relays.lease(ctx) as relay:
            if (scope := relay.watched.pop((session, params.uri), None)) is not None:
                scope.cancel(reason="the client unsubscribed")
        return EmptyResult()

    # Changes, for all clients together

    def tell_all(self, publish: Callable[[Change | str], object]) -> None:
        """Publish changes of the upstream's lists, over a connection of its own, from now on."""
        relay = self._common = self.relays.open(None if self.relays.shared else ("changes",), None, None, None)
        relay.users += 1
        self._publish = publish
        self.relays.nursery.start_soon(self._tell_all, {"tools": True, "prompts": True, "resources_list": True}, None)

    async def learn(self) -> None:
        """Learn what the upstream offers, from that connection. Raises LocalError: it cannot be reached."""
        assert self._common is not None
        try:
            await (await self._common.connected(tried=True)).use(ClientSession.ping, idempotent=True)
        except (McpError, trio.TooSlowError) as error:
            raise LocalError(f"the upstream {self.relays.name!r} cannot be reached: {error}") from error

    async def _tell_all(self, wanted: dict[str, Any], opened: trio.Event | None) -> None:
        relay, publish = self._common, self._publish
        assert relay is not None
        assert publish is not None
        uris = wanted.get("resources", ())
        try:
            async with (await relay.connected()).listen(**wanted) as changes:
                if uris and not changes.acknowledged.resource_subscriptions:
                    return  # it has no such resource
                self._watched.update(uris)
                if opened is not None:
                    opened.set()
                async for change in changes:
                    publish(change.uri if isinstance(change, ResourceUpdated) else _CHANGES[change])
        except McpError as error:
            log.debug("no changes of the upstream %r: %s", self.relays.name, one_line(str(error)))
        finally:
            self._watched.difference_update(uris)
            if opened is not None:
                opened.set()

    async def watch_for_all(self, ctx: Context[Any], uri: str) -> bool:
        """Publish changes of a resource from now on; return whether it can be watched."""
        if uri not in self._watched and len(self._watched) < _MOST_LISTENED:
            opened = trio.Event()
            self.relays.nursery.start_soon(self._tell_all, {"resources": [uri]}, opened)
            await opened.wait()
        return uri in self._watched

    @asynccontextmanager
    async def watching(self, ctx: Context[Any], ids: list[str]) -> AsyncIterator[dict[str, LookAtTask]]:
        """See `WatchTasks`. Raises McpError or TooSlowError: the upstream cannot be asked, or refuses."""

        async def hear() -> None:
            assert self._publish is not None
            with suppress(McpError):  # it is lost
                async for change in changes:
                    each: Any = change
                    self._publish(task_change(outward_task(ctx, each.id)))

        async def look(inward: Any) -> Mapping[str, Any] | None:
            return changes.tasks.get(inward)

        wanted = SubscriptionFilter(task_ids=ids)
        async with self._subscribed(ctx, wanted) as (changes, agreed), open_service_nursery() as nursery:
            nursery.start_soon(hear)
            yield {id: partial(look, inward_task(ctx, id)) for id in agreed.task_ids or ()}
            nursery.cancel_scope.cancel()

    # Changes, for clients that ask for them

    async def listen(self, ctx: Context[Any], params: SubscriptionsListenParams) -> SubscriptionsListenResult:
        """Pass on a subscription until either side ends it."""
        session, job = ctx.internals
        wanted = params.notifications
        for uris in (wanted.resource_subscriptions or (), wanted.task_ids or ()):
            if len(uris) > _MOST_LISTENED:
                raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_LISTENED} resources or tasks in one subscription")
        try:
            async with self._subscribed(ctx, wanted) as (changes, given):
                agreed = SubscriptionsAcknowledgedParams(notifications=given)
                await tell_subscriber(session, job, "notifications/subscriptions/acknowledged", agreed)
                await first_of(partial(self._forward, ctx, changes), session.draining.wait)
        except (McpError, trio.TooSlowError) as error:
            raise self.translated(error, ctx, None) from None
        return SubscriptionsListenResult(meta={META_SUBSCRIPTION_ID: ctx.request_id})

    @asynccontextmanager
    async def _subscribed(
        self, ctx: Context[Any], wanted: SubscriptionFilter
    ) -> AsyncIterator[tuple[Subscription, SubscriptionFilter]]:
        """Subscribe at the upstream for a client; yield that, and what was agreed to, in the client's ids of tasks."""
        tasks: dict[str, str] = {}  # the client's ids, by the upstream's
        for id in wanted.task_ids or ():
            if (inward := inward_task(ctx, id)) is not None:
                tasks[inward] = id
        given: Any = wanted
        if wanted.task_ids is not None:
            wanted = attrs.evolve(given, task_ids=list(tasks))
        async with (
            self.relays.lease(ctx) as relay,
            (await relay.connected()).session() as opened,
            opened.subscriptions.listening(_within(wanted, opened)) as changes,
        ):
            given = changes.acknowledged
            if given.task_ids is not None:
                given = attrs.evolve(given, task_ids=[tasks[id] for id in given.task_ids if id in tasks])
            yield changes, given

    async def _forward(self, ctx: Context[Any], changes: Subscription) -> None:
        session, job = ctx.internals
        async for change in changes:
            each: Any = change
            if (id := getattr(each, "id", None)) is not None:
                await tell_of_task(session, job, {**changes.tasks[id], TASK_ID: outward_task(ctx, id)})
            else:
                about = each.uri if isinstance(each, ResourceUpdated) else _CHANGES[each]
                await tell_subscriber(session, job, *notification_of(about))


_LOST: Final = {"reason": "upstream_lost"}


def _within(wanted: SubscriptionFilter, session: ClientSession) -> SubscriptionFilter:
    """Return what can be asked of this upstream: one of the legacy era refuses to be asked for what it has not."""
    if session.revision.modern:
        return wanted
    given: Any = wanted
    watchable = declares(session.server_capabilities, "resources.subscribe")
    uris = wanted.resource_subscriptions if watchable else None
    narrowed: SubscriptionFilter = attrs.evolve(given, resource_subscriptions=uris, task_ids=None)
    return narrowed
