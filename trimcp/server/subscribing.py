"""Who is told of changes: legacy sessions, through notifications, and subscriptions, each a request that stays open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from trimcp.channel import Kind, Outgoing
from trimcp.errors import ErrorReply
from trimcp.protocol.states import Inbound
from trimcp.server.changes import Change, Watch
from trimcp.session.context import Context, severity
from trimcp.session.job import Job
from trimcp.session.session import Session
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.common import META_SUBSCRIPTION_ID, EmptyResult, LoggingLevel
from trimcp.wire.fields import ABSENT
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.logs import LoggingMessageParams
from trimcp.wire.resources import ResourceUpdatedParams, SubscribeParams
from trimcp.wire.subscriptions import (
    SubscriptionFilter,
    SubscriptionsAcknowledgedParams,
    SubscriptionsListenParams,
    SubscriptionsListenResult,
)

if TYPE_CHECKING:
    from trimcp.server.offering import Offering

__all__ = ["Subscribers"]

# Resources one legacy session may watch, or one subscription name: each costs a set entry for as long as it lasts.
_MOST_SUBSCRIPTIONS: Final = 1_000


@attrs.define(eq=False, repr=False)
class _LegacyListener:
    """Tells one legacy session of changes, through notifications of which only the latest counts."""

    session: Session
    told: frozenset[Change]
    uris: set[str] = attrs.field(factory=set)

    def changed(self, change: Change) -> None:
        if change in self.told:
            self.session.notify_latest(change.notification)

    def updated(self, uri: str) -> None:
        if uri in self.uris:
            self.session.notify_latest("notifications/resources/updated", ResourceUpdatedParams(uri=uri), key=uri)


@attrs.define(eq=False, repr=False)
class Subscribers:
    """Those of one run.

    Args:
        server: what may change.
    """

    server: Offering
    _listeners: dict[Session, _LegacyListener] = attrs.field(init=False, factory=dict)

    def attach(self, session: Session) -> None:
        """Begin to tell a legacy session of changes."""
        listener = self._listeners[session] = _LegacyListener(session, self.server.announced())
        self.server.changes.attach(listener)

    def detach(self, session: Session) -> None:
        """Tell a session nothing more."""
        listener = self._listeners.pop(session, None)
        if listener is not None:
            self.server.changes.detach(listener)

    def log(self, level: LoggingLevel, data: JSON, logger: str | None = None) -> None:
        """Send a log message outside any request, to the legacy sessions that want its level. Never waits."""
        for session in self._listeners:
            engine = session.engine
            if severity(level) < severity(engine.legacy.log_level):
                continue
            if session.sink.full:
                session.counts.drop("logs")
                session.counts.untold += 1
                continue
            if session.counts.untold:
                from trimcp.session.lanes import tell_dropped_logs

                tell_dropped_logs(session, None)
            params = LoggingMessageParams(level=level, data=data, logger=ABSENT if logger is None else logger)
            session.sink.post(Outgoing(session.encode_notification("notifications/message", params), Kind.NOTIFICATION))

    def _known(self, uri: str) -> bool:
        server = self.server
        return uri in server.resources or any(t.match(uri) is not None for t in server.templates)

    async def subscribe(self, ctx: Context[Any], params: SubscribeParams) -> EmptyResult:
        """Watch a resource for a legacy session."""
        if not self._known(params.uri):
            from trimcp.server.resources import missing

            raise missing(ctx, params.uri)
        listener = self._listener(ctx)
        if len(listener.uris) >= _MOST_SUBSCRIPTIONS:
            raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_SUBSCRIPTIONS} subscriptions on one session")
        listener.uris.add(params.uri)
        return EmptyResult()

    async def unsubscribe(self, ctx: Context[Any], params: SubscribeParams) -> EmptyResult:
        """Watch it no longer."""
        self._listener(ctx).uris.discard(params.uri)
        return EmptyResult()

    def _listener(self, ctx: Context[Any]) -> _LegacyListener:
        session, _ = ctx.internals
        if session not in self._listeners:
            self.attach(session)
        return self._listeners[session]

    async def listen(self, ctx: Context[Any], params: SubscriptionsListenParams) -> Any:
        """Acknowledge, then forward what changes, until the client leaves or this session ends."""
        session, job = ctx.internals
        wanted = params.notifications
        announced = self.server.announced()
        asked = {
            Change.TOOLS: wanted.tools_list_changed,
            Change.PROMPTS: wanted.prompts_list_changed,
            Change.RESOURCES: wanted.resources_list_changed,
        }
        changes = frozenset(change for change in announced if asked[change])
        uris = wanted.resource_subscriptions or []
        if len(uris) > _MOST_SUBSCRIPTIONS:
            raise ErrorReply(INVALID_PARAMS, f"more than {_MOST_SUBSCRIPTIONS} resources in one subscription")
        honoured = [uri for uri in uris if self._known(uri)]
        watch = Watch(changes, frozenset(honoured))
        self.server.changes.attach(watch)
        try:
            agreed = SubscriptionFilter(
                tools_list_changed=True if Change.TOOLS in changes else ABSENT,
                prompts_list_changed=True if Change.PROMPTS in changes else ABSENT,
                resources_list_changed=True if Change.RESOURCES in changes else ABSENT,
                resource_subscriptions=honoured or ABSENT,
            )
            acknowledged = SubscriptionsAcknowledgedParams(notifications=agreed)
            await _tell(session, job, "notifications/subscriptions/acknowledged", acknowledged)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forward, session, job, watch)
                await session.draining.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.server.changes.detach(watch)
        return SubscriptionsListenResult(meta={META_SUBSCRIPTION_ID: ctx.request_id})

    @staticmethod
    async def _forward(session: Session, job: Job, watch: Watch) -> None:
        while True:
            changed, updated = await watch.take()
            for change in changed:
                await _tell(session, job, change.notification, None)
            for uri in updated:
                params = ResourceUpdatedParams(uri=uri)
                await _tell(session, job, "notifications/resources/updated", params)


async def _tell(session: Session, job: Job, name: str, params: Any) -> None:
    """Send a notification on a subscription: room first, and nothing once the subscription is over."""
    data = session.encode_related(job, name, params, subscription=job.request.id)
    await job.sink.room()
    if job.request.state is Inbound.UNDER_WAY:
        job.sink.post(Outgoing(data, Kind.NOTIFICATION, job.request.id, job.origin))
