"""A client's subscription to changes, with one interface for every revision.

If the revision has `subscriptions/listen`, one long request is the subscription (basic/patterns/subscriptions). Earlier
revisions use `resources/subscribe` and the list_changed notifications that a server sends unasked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final, TypeAlias

import attrs
import trio

from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.events import Notified, Replied
from trimcp.session.outgoing.pending import Pending
from trimcp.session.queues import Changes
from trimcp.session.scopes import cancellation_text
from trimcp.session.session import Session
from trimcp.support.slotted import valued
from trimcp.wire.capabilities import ServerCapabilities, declares
from trimcp.wire.common import META_SUBSCRIPTION_ID
from trimcp.wire.jsonrpc import RequestId
from trimcp.wire.lifecycle import SubscriptionFilter, SubscriptionsListenParams
from trimcp.wire.methods import LISTEN, TASK_ID, TASK_NOTICE
from trimcp.wire.resources import SubscribeParams


@attrs.frozen
@valued
class ToolsChanged:
    """The list of tools has changed."""


@attrs.frozen
@valued
class PromptsChanged:
    """The list of prompts has changed."""


@attrs.frozen
@valued
class ResourcesChanged:
    """The list of resources has changed."""


@attrs.frozen
@valued
class ResourceUpdated:
    """The resource's contents have changed. The URI may be below the one that was subscribed to."""

    uri: str


@attrs.frozen
@valued
class TaskChanged:
    """The task has changed (the extension "Tasks")."""

    id: str


Change: TypeAlias = ToolsChanged | PromptsChanged | ResourcesChanged | ResourceUpdated

_LISTS: Final[dict[str, tuple[str, Change]]] = {
    "notifications/tools/list_changed": ("tools_list_changed", ToolsChanged()),
    "notifications/prompts/list_changed": ("prompts_list_changed", PromptsChanged()),
    "notifications/resources/list_changed": ("resources_list_changed", ResourcesChanged()),
}


@attrs.define(eq=False, repr=False)
class Subscription:
    """Changes in the order of arrival; iterate over it, or `receive` them one by one.

    Attributes:
        acknowledged: what the server agreed to send, which may be less than was requested.
        tasks: the latest that it said of each task, as JSON.
    """

    _wanted: SubscriptionFilter
    _session: Session
    tasks: dict[str, Any] = attrs.field(init=False, factory=dict)
    acknowledged: SubscriptionFilter = attrs.field(init=False, factory=SubscriptionFilter)
    _changes: Changes[Any] = attrs.field(init=False, factory=Changes)
    _opened: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def receive(self) -> Change:
        """Wait for the next change. Equal changes not received yet are merged. Cancelling this loses nothing.

        Raises:
            trio.EndOfChannel: the server ended the subscription, and all changes were received.
            ConnectionLost: the server cancelled the subscription with a reason, or the connection ended.
        """
        # One of a task comes only where that was asked for, by `ClientTask`.
        change: Change = await self._changes.receive()
        return change

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Change:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    @property
    def end(self) -> BaseException | None:
        """The exception that the last `receive` will raise; None while more may arrive."""
        return self._changes.end

    # Called by the reader

    def notified(self, event: Notified) -> None:
        """Keep a notification, if it is one that was subscribed to."""
        name = event.method.name
        if name == "notifications/subscriptions/acknowledged":
            self.acknowledged = event.params.notifications
            self._opened.set()
        elif name == "notifications/resources/updated":
            updated = event.params.uri
            if any(_lies_in(updated, uri) for uri in self._wanted.resource_subscriptions or ()):
                self._add(ResourceUpdated(updated))
        elif name == TASK_NOTICE:
            id = event.params.get(TASK_ID)
            if id in (self._wanted.task_ids or ()):
                self.tasks[id] = event.params
                self._add(TaskChanged(id))
        elif name in _LISTS:
            wanted, change = _LISTS[name]
            if getattr(self._wanted, wanted):
                self._add(change)

    def _add(self, change: Change | TaskChanged) -> None:
        session = self._session
        self._changes.keep(change, session.memory.arriving, session.limits, session.counts)

    def _replied(self, reply: Replied) -> None:
        """Note that the server ended the subscription: a result closes it, an error or a cancellation breaks it."""
        self._finish(trio.EndOfChannel() if reply.error is None else reply.error)

    def _finish(self, end: BaseException) -> None:
        self._changes.finish(end)
        self._opened.set()


@attrs.define(eq=False, repr=False)
class Subscriptions:
    """All subscriptions of one session."""

    session: Session
    _by_id: dict[RequestId, Subscription] = attrs.field(init=False, factory=dict)
    _unasked: set[Subscription] = attrs.field(init=False, factory=set)
    _watched: Counter[str] = attrs.field(init=False, factory=Counter)
    _leaving: dict[str, Pending] = attrs.field(init=False, factory=dict)

    def notified(self, event: Notified) -> None:
        """Pass a notification to the subscriptions that want it."""
        id = (event.admission.meta or {}).get(META_SUBSCRIPTION_ID)
        if type(id) is int or type(id) is str:
            subscription = self._by_id.get(id)
            if subscription is not None:
                subscription.notified(event)
            return
        for subscription in self._unasked:
            subscription.notified(event)

    @asynccontextmanager
    async def listening(self, wanted: SubscriptionFilter) -> AsyncIterator[Subscription]:
        """Subscribe, yield the subscription once the server acknowledged it, and unsubscribe on leaving.

        Raises RemoteError or ConnectionLost: the server refused, or is gone. Raises LocalError: it has none such.
        """
        revision = self.session.revision
        words = {} if revision is None else methods_of(revision)
        subscription = Subscription(wanted, self.session)
        how = self._by_request(subscription) if LISTEN in words else self._by_notices(subscription)
        async with how:
            yield subscription

    @asynccontextmanager
    async def _by_request(self, subscription: Subscription) -> AsyncIterator[None]:
        session = self.session
        params = SubscriptionsListenParams(notifications=subscription._wanted)
        pending = await session.start_call(LISTEN, params, on_reply=subscription._replied)
        self._by_id[pending.id] = subscription
        why = "the subscription was closed"
        try:
            await subscription._opened.wait()
            if isinstance(subscription._changes.end, McpError):
                raise subscription._changes.end
            yield
        except trio.Cancelled as cancelled:
            why = cancellation_text(cancelled)
            raise
        finally:
            del self._by_id[pending.id]
            session.abandon(pending, why)
            subscription._finish(trio.EndOfChannel())

    @asynccontextmanager
    async def _by_notices(self, subscription: Subscription) -> AsyncIterator[None]:
        session = self.session
        if session.lost is not None:
            raise ConnectionLost(*session.lost.args)
        capabilities = session.engine.legacy.capabilities
        assert isinstance(capabilities, ServerCapabilities)
        subscription.acknowledged = _honoured(subscription._wanted, capabilities)
        uris: Sequence[str] = subscription._wanted.resource_subscriptions or ()
        if uris and not declares(capabilities, "resources.subscribe"):
            raise LocalError("the server did not declare that its resources can be watched (resources.subscribe)")
        session.watchers.add(subscription._finish)
        self._unasked.add(subscription)
        try:
            async with AsyncExitStack() as watched:
                for uri in uris:
                    await watched.enter_async_context(self._watching(uri))
                yield
        finally:
            self._unasked.discard(subscription)
            session.watchers.discard(subscription._finish)
            subscription._finish(trio.EndOfChannel())

    @asynccontextmanager
    async def _watching(self, uri: str) -> AsyncIterator[None]:
        """Subscribe to one resource while the block runs; the last of several such blocks unsubscribes."""
        session = self.session
        self._watched[uri] += 1
        try:
            if uri in self._leaving:
                # Two concurrent requests may be processed in any order, so the unsubscribe has to be answered first.
                with suppress(McpError):
                    await self._leaving[uri].raw()
            await session.call("resources/subscribe", SubscribeParams(uri=uri))
            yield
        finally:
            self._watched[uri] -= 1
            if not self._watched[uri]:
                del self._watched[uri]
                self._leaving = {uri: pending for uri, pending in self._leaving.items() if pending.reply is None}
                with suppress(McpError):
                    # No wait for the answer, so that a cancelled block can send it too.
                    pending = await session.start_call("resources/unsubscribe", SubscribeParams(uri=uri))
                    self._leaving[uri] = pending


def changes_wanted(tools: bool, prompts: bool, resources_list: bool, resources: Iterable[str]) -> SubscriptionFilter:
    """Return a subscription filter for these changes."""
    return SubscriptionFilter(
        tools_list_changed=tools or None,
        prompts_list_changed=prompts or None,
        resources_list_changed=resources_list or None,
        resource_subscriptions=list(dict.fromkeys(resources)) or None,
    )


def possible_changes(wanted: SubscriptionFilter) -> list[Change]:
    """Return every change that may have happened while there was no subscription."""
    lists = [change for name, change in _LISTS.values() if getattr(wanted, name)]
    return [*lists, *map(ResourceUpdated, wanted.resource_subscriptions or ())]


def _lies_in(updated: str, uri: str) -> bool:
    return updated == uri or updated.startswith(uri if uri.endswith("/") else uri + "/")


def _honoured(wanted: SubscriptionFilter, capabilities: ServerCapabilities) -> SubscriptionFilter:
    """Return the part of a filter that a server with these capabilities supports."""

    def told(asked: Any, path: str) -> Any:
        return asked if asked and declares(capabilities, path) else None

    return SubscriptionFilter(
        tools_list_changed=told(wanted.tools_list_changed, "tools.listChanged"),
        prompts_list_changed=told(wanted.prompts_list_changed, "prompts.listChanged"),
        resources_list_changed=told(wanted.resources_list_changed, "resources.listChanged"),
        resource_subscriptions=told(wanted.resource_subscriptions, "resources.subscribe"),
    )
