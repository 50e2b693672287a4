"""Notifying clients of changes: legacy sessions directly, later ones within a `subscriptions/listen` request.

Pending changes are a set of lists and URIs, so the memory for a slow client is bounded by its subscriptions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import trio

from trimcp.channel import Kind, Outgoing
from trimcp.errors import ErrorReply
from trimcp.protocol.states import Inbound
from trimcp.server.registry import EVERYTHING, Change
from trimcp.session.context import Context, client_key
from trimcp.session.incoming.job import Job
from trimcp.session.queues import Changes
from trimcp.session.session import Session
from trimcp.support.slotted import slotted
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.common import META_SUBSCRIPTION_ID, SEVERITY, EmptyResult, LoggingLevel
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.lifecycle import (
    LoggingMessageParams,
    SubscriptionFilter,
    SubscriptionsAcknowledgedParams,
    SubscriptionsListenParams,
    SubscriptionsListenResult,
)
from trimcp.wire.methods import TASK_ID, TASK_NOTICE
from trimcp.wire.resources import ResourceUpdatedParams, SubscribeParams
from trimcp.wire.revisions import Revision

if TYPE_CHECKING:
    from trimcp.server.offering import Offering

# Resources that one legacy session or one subscription may watch; each is an entry of a set.
_MOST_SUBSCRIPTIONS: Final = 1_000


_TASK: Final = "task "  # before the id of a task, among changes; no URI has a space


def task_change(id: str) -> str:
    """Return by what the bus knows that a task has changed."""
    return _TASK + id


def changed_task(change: Change | str) -> str | None:
    """Return the task that has changed; None if something else has."""
    return change.removeprefix(_TASK) if isinstance(change, str) and change.startswith(_TASK) else None


LookAtTask: TypeAlias = Callable[[], Awaitable[Mapping[str, Any] | None]]
"""Returns a task as clients are told of it now; None if it is forgotten."""

WatchTasks: TypeAlias = Callable[[Context[Any], list[str]], AbstractAsyncContextManager[Mapping[str, LookAtTask]]]
"""Publishes changes of tasks while a block runs; yields those of them that the sender of a request may watch."""


def notification_of(change: Change | str) -> tuple[str, ResourceUpdatedParams | None]:
    """Return the method and params of the notification for a change."""
    if isinstance(change, Change):
        return f"notifications/{change.value}/list_changed", None
    return "notifications/resources/updated", ResourceUpdatedParams(uri=change)


@slotted
class _LastNotice:
    """The last notification of a change, with its key: many sessions are sent the same, one after the other."""

    _change: Change | str | None = attrs.field(init=False, default=None)
    _revision: Revision | None = attrs.field(init=False, default=None)
    _made: tuple[Hashable, Outgoing] = attrs.field(init=False)

    def post(self, session: Session, change: Change | str) -> None:
        revision = session.engine.revision
        if change is not self._change or revision is not self._revision:
            name, params = notification_of(change)
            data = session.encode_notification(name, params)
            self._made = (name, None if params is None else params.uri), Outgoing(data, Kind.NOTIFICATION)
            self._change, self._revision = change, revision
        session.sink.post_latest(*self._made)


@slotted
class _LegacyListener:
    """Notifies one legacy session of changes; of equal notifications in its queue only the latest is sent."""

    session: Session
    lists: frozenset[Change]
    notice: _LastNotice
    uris: dict[str, None] = attrs.field(factory=dict)  # an empty set takes three times as much memory

    def tell(self, change: Change | str) -> None:
        if change in self.uris or change in self.lists:
            self.notice.post(self.session, change)
        elif change == EVERYTHING:
            watched: list[Change | str] = [*self.lists, *self.uris]
            for each in watched:
                self.notice.post(self.session, each)


@slotted
class Watch:
    """Collects the watched lists and resources that have changed, until a task receives them."""

    watched: frozenset[Change | str]
    noted: Changes[Change | str] = attrs.field(init=False, factory=Changes)

    def note(self, change: Change | str) -> None:
        if change in self.watched:
            self.noted.add(change)
        elif change == EVERYTHING:
            for each in self.watched:
                self.noted.add(each)


@slotted
class Subscribers:
    """The sessions and subscriptions of one run that are notified of changes in `server`."""

    server: Offering
    tasks: list[WatchTasks] = attrs.field(init=False, factory=list)
    # returns whether a resource that is not the server's own may be watched; None if there are no others
    others: Callable[[Context[Any], str], Awaitable[bool]] | None = attrs.field(init=False, default=None)
    _listeners: dict[Session, _LegacyListener] = attrs.field(init=False, factory=dict)
    _lists: frozenset[Change] = attrs.field(init=False, default=frozenset())  # as announced to the last session
    _notice: _LastNotice | None = attrs.field(init=False, default=None)  # made with the first session

    def attach(self, session: Session) -> None:
        lists = self.server.announced()
        if lists != self._lists:
            self._lists = lists
        notice = self._notice = self._notice or _LastNotice()
        listener = self._listeners[session] = _LegacyListener(session, self._lists, notice)
        self.server.changes.attach(listener.tell, session)

    def detach(self, session: Session) -> None:
        listener = self._listeners.pop(session, None)
        if listener is not None:
            self.server.changes.detach(listener.tell)

    def log(self, level: LoggingLevel, data: JSON, logger: str | None = None) -> None:
        """Send a log message outside any request, to the legacy sessions that want its level. Never waits."""
        for session in self._listeners:
            engine = session.engine
            if SEVERITY[level] < SEVERITY[engine.legacy.log_level]:
                continue
            if session.sink.full:
                session.counts.drop("logs")
                session.counts.untold += 1
                continue
            if session.counts.untold:
                session.tell_dropped_logs(None)
            params = LoggingMessageParams(level=level, data=data, logger=logger)
            session.sink.post(Outgoing(session.encode_notification("notifications/message", params), Kind.NOTIFICATION))

    async def subscribe(self, ctx: Context[Any], params: SubscribeParams) -> EmptyResult:
        if not await self.may_watch(ctx, params.uri):
            from trimcp.server.resources import missing

            raise missing(ctx, params.uri)
        listener = self._listener(ctx)
        if len(listener.uris) >= _MOST_SUBSCRIPTIONS:
            raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_SUBSCRIPTIONS} subscriptions on one session")
        listener.uris[params.uri] = None
        return EmptyResult()

    async def unsubscribe(self, ctx: Context[Any], params: SubscribeParams) -> EmptyResult:
        self._listener(ctx).uris.pop(params.uri, None)
        return EmptyResult()

    def uris_of(self, session: Session) -> list[str]:
        """Return the resources that a session is subscribed to."""
        listener = self._listeners.get(session)
        return [] if listener is None else list(listener.uris)

    def watch(self, session: Session, uris: Sequence[str]) -> None:
        """Subscribe a session anew that was subscribed in another process."""
        self._listeners[session].uris.update(dict.fromkeys(uris[:_MOST_SUBSCRIPTIONS]))

    def tell_everything(self, session: Session) -> None:
        """Tell a session that anything it watches may have changed."""
        if session in self._listeners:
            self._listeners[session].tell(EVERYTHING)

    async def may_watch(self, ctx: Context[Any], uri: str) -> bool:
        """Return whether there is a resource with this URI. Raises as `Permission.require` if it may not be read."""
        entry, variables = self.server.find_resource(uri)
        if entry is not None and entry.permission is not None:
            if entry.permission.hides(ctx.admission):
                return False
            await entry.permission.require(ctx, uri, variables)
        return entry is not None or (self.others is not None and await self.others(ctx, uri))

    def _listener(self, ctx: Context[Any]) -> _LegacyListener:
        session, _ = ctx.internals
        if session not in self._listeners:
            self.attach(session)
        return self._listeners[session]

    async def listen(self, ctx: Context[Any], params: SubscriptionsListenParams) -> Any:
        """Acknowledge, then send a notification for each change, until the request is cancelled or the session ends."""
        session, job = ctx.internals
        wanted = params.notifications
        lists = [change for change in self.server.announced() if getattr(wanted, change.member)]
        uris = wanted.resource_subscriptions or []
        if len(uris) > _MOST_SUBSCRIPTIONS:
            raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_SUBSCRIPTIONS} resources in one subscription")
        honoured = []
        for uri in uris:  # the acknowledgement lacks what is not there or not allowed
            with suppress(ErrorReply):
                if await self.may_watch(ctx, uri):
                    honoured.append(uri)
        ids = list(dict.fromkeys(wanted.task_ids or ()))
        if len(ids) > _MOST_SUBSCRIPTIONS:
            raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_SUBSCRIPTIONS} tasks in one subscription")
        watch = Watch(frozenset([*lists, *honoured, *map(task_change, ids)]))
        self.server.changes.attach(watch.note, client_key(ctx))
        try:
            async with AsyncExitStack() as stack:
                looks: dict[str, LookAtTask] = {}
                for watching in self.tasks if ids else ():
                    looks.update(await stack.enter_async_context(watching(ctx, ids)))
                agreed = SubscriptionFilter(
                    **{change.member: True for change in lists},
                    resource_subscriptions=honoured or None,
                    task_ids=list(looks) or None,
                )
                acknowledged = SubscriptionsAcknowledgedParams(notifications=agreed)
                await tell_subscriber(session, job, "notifications/subscriptions/acknowledged", acknowledged)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._forward, session, job, watch, looks)
                    await session.draining.wait()
                    nursery.cancel_scope.cancel()
        finally:
            self.server.changes.detach(watch.note)
        return SubscriptionsListenResult(meta={META_SUBSCRIPTION_ID: ctx.request_id})

    async def _forward(self, session: Session, job: Job, watch: Watch, looks: Mapping[str, LookAtTask]) -> None:
        while True:
            # Lists first: a client that then reads a resource knows that it exists.
            for change in sorted(await watch.noted.receive_all(), key=lambda noted: not isinstance(noted, Change)):
                if (id := changed_task(change)) is None:
                    await tell_subscriber(session, job, *notification_of(change))
                elif id in looks:
                    await job.sink.room()  # before it is looked at: it may change meanwhile
                    task = await looks[id]()
                    if task is not None:
                        await tell_of_task(session, job, {**task, TASK_ID: id})


async def tell_subscriber(session: Session, job: Job, name: str, params: Any) -> None:
    """Send a notification on a subscription as soon as its queue has room, unless the subscription has ended."""
    await _send(job, session.encode_notification(name, params, job, subscription=job.request.id))


async def tell_of_task(session: Session, job: Job, task: Mapping[str, Any]) -> None:
    """Send the notification of a task, as `tell_subscriber` does."""
    meta = {**(task.get("_meta") or {}), META_SUBSCRIPTION_ID: job.request.id}
    await _send(job, session.encode_foreign(TASK_NOTICE, {**task, "_meta": meta}))


async def _send(job: Job, data: bytes) -> None:
    await job.sink.room()
    if job.request.state is Inbound.UNDER_WAY:
        job.sink.post(Outgoing(data, Kind.NOTIFICATION, job.request.id, job.origin))
