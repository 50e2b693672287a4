"""Change notices of 2026-07-28: one long request that says what to watch (basic/patterns/subscriptions)."""

from __future__ import annotations

from trimcp.wire.common import Params, Result
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2026_07_28

__all__ = [
    "SubscriptionFilter",
    "SubscriptionsAcknowledgedParams",
    "SubscriptionsListenParams",
    "SubscriptionsListenResult",
]


@wire(since=V2026_07_28)
class SubscriptionFilter:
    """Which changes a client wants to hear of, or a server agreed to tell."""

    tools_list_changed: bool | Absent = field(default=ABSENT)
    prompts_list_changed: bool | Absent = field(default=ABSENT)
    resources_list_changed: bool | Absent = field(default=ABSENT)
    resource_subscriptions: list[str] | Absent = field(default=ABSENT)


@wire(since=V2026_07_28)
class SubscriptionsListenParams(Params):
    """What to watch for as long as the request is open."""

    notifications: SubscriptionFilter


@wire(since=V2026_07_28)
class SubscriptionsAcknowledgedParams(Params):
    """The first word on a subscription: what of it the server will tell."""

    notifications: SubscriptionFilter


@wire(since=V2026_07_28)
class SubscriptionsListenResult(Result):
    """The last word on a subscription; its `_meta` names the subscription."""
