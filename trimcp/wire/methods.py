"""Every method of every revision, one row each: its payloads, who sends it, which revisions have it, what it requires.

The engine looks up methods only here: a method whose row has `until` is removed from that revision on.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Flag
from typing import Any, Final

import attrs

from trimcp.support.slotted import slotted
from trimcp.wire import lifecycle, prompts, resources, tools
from trimcp.wire.common import EmptyResult, NotificationParams, PageParams, RequestParams
from trimcp.wire.input_requests import (
    CreateMessageParams,
    CreateMessageResult,
    ElicitationCompleteParams,
    ElicitParams,
    ElicitResult,
    ListRootsResult,
)
from trimcp.wire.revisions import OLDEST, V2025_06_18, V2025_11_25, V2026_07_28, Revision


class Direction(Flag):
    """Who sends a method: `Direction.CLIENT_TO_SERVER in method.direction_at(revision)`."""

    CLIENT_TO_SERVER = 1
    SERVER_TO_CLIENT = 2
    BOTH = 3


C2S: Final = Direction.CLIENT_TO_SERVER
S2C: Final = Direction.SERVER_TO_CLIENT
BOTH: Final = Direction.BOTH


@slotted(frozen=True)
class Method:
    """One method."""

    name: str  # its name on the wire
    # the payload class of its params (a union of two for `elicitation/create`). If a message has no params, load this
    # from an empty object.
    params: Any
    result: Any  # the payload class of its result, or None for a notification
    direction: Direction  # who sends it; `narrowed` changes that from some revision on
    since: Revision = attrs.field(default=OLDEST, kw_only=True)  # the first revision that has it
    # the first revision that no longer has it as a message
    until: Revision | None = attrs.field(default=None, kw_only=True)
    # the capability that it requires, as an argument of `capabilities.declares`, or None
    capability: str | None = attrs.field(default=None, kw_only=True)
    cacheable: bool = attrs.field(default=False, kw_only=True)  # its result says for how long it may be cached
    # the first revision in which its result may be an `InputRequiredResult`, or None
    may_ask_from: Revision | None = attrs.field(default=None, kw_only=True)
    narrowed: tuple[Revision, Direction] | None = attrs.field(default=None, kw_only=True)
    # the params member that Streamable HTTP repeats as `Mcp-Name`, or None
    mirrored: str | None = attrs.field(default=None, kw_only=True)
    # makes a result from an error text, if its results can report errors; else None
    failed: Callable[[str], Any] | None = attrs.field(default=None, kw_only=True)
    # the list in its result from which a member that cannot be read is left out, or None
    members: str | None = attrs.field(default=None, kw_only=True)
    is_notification: bool = attrs.field(
        init=False, default=attrs.Factory(lambda method: method.result is None, takes_self=True)
    )

    def available(self, revision: Revision) -> bool:
        """Return whether the revision has it as a separate message, in either direction."""
        return self.since <= revision and (self.until is None or revision < self.until)

    def direction_at(self, revision: Revision) -> Direction:
        """Return who may send it in that revision."""
        if self.narrowed is not None and revision >= self.narrowed[0]:
            return self.narrowed[1]
        return self.direction


def _lists(name: str, result: Any, capability: str, members: str) -> Method:
    return Method(name, PageParams, result, C2S, capability=capability, cacheable=True, members=members)


def _changed(name: str, capability: str, direction: Direction = S2C, until: Revision | None = None) -> Method:
    return Method(name, NotificationParams, None, direction, capability=capability, until=until)


def _legacy(
    name: str,
    params: Any,
    result: Any,
    direction: Direction,
    capability: str | None = None,
    since: Revision = OLDEST,
    members: str | None = None,
) -> Method:
    return Method(
        name, params, result, direction, since=since, until=V2026_07_28, capability=capability, members=members
    )


def _task(name: str, params: Any, result: Any, capability: str) -> Method:
    """Return the row of an experimental task method: it can be loaded, but we never declare it."""
    return _legacy(name, params, result, BOTH, capability, V2025_11_25)


_ROWS: Final = (
    _legacy("initialize", lifecycle.InitializeParams, lifecycle.InitializeResult, C2S),
    _legacy("notifications/initialized", NotificationParams, None, C2S),
    _legacy("ping", RequestParams, EmptyResult, BOTH),
    Method("server/discover", RequestParams, lifecycle.DiscoverResult, C2S, since=V2026_07_28, cacheable=True),
    Method("notifications/cancelled", lifecycle.CancelledParams, None, BOTH),
    Method("notifications/progress", lifecycle.ProgressParams, None, BOTH, narrowed=(V2026_07_28, S2C)),
    _lists("tools/list", tools.ListToolsResult, "tools", "tools"),
    Method(
        "tools/call",
        tools.CallToolParams,
        tools.CallToolResult,
        C2S,
        capability="tools",
        may_ask_from=V2026_07_28,
        mirrored="name",
        failed=tools.failed_call,
        members="content",
    ),
    _changed("notifications/tools/list_changed", "tools.listChanged"),
    _lists("resources/list", resources.ListResourcesResult, "resources", "resources"),
    _lists("resources/templates/list", resources.ListResourceTemplatesResult, "resources", "resource_templates"),
    Method(
        "resources/read",
        resources.ReadResourceParams,
        resources.ReadResourceResult,
        C2S,
        capability="resources",
        cacheable=True,
        may_ask_from=V2026_07_28,
        mirrored="uri",
        members="contents",
    ),
    _legacy("resources/subscribe", resources.SubscribeParams, EmptyResult, C2S, "resources.subscribe"),
    _legacy("resources/unsubscribe", resources.SubscribeParams, EmptyResult, C2S, "resources.subscribe"),
    Method(
        "notifications/resources/updated", resources.ResourceUpdatedParams, None, S2C, capability="resources.subscribe"
    ),
    _changed("notifications/resources/list_changed", "resources.listChanged"),
    _lists("prompts/list", prompts.ListPromptsResult, "prompts", "prompts"),
    Method(
        "prompts/get",
        prompts.GetPromptParams,
        prompts.GetPromptResult,
        C2S,
        capability="prompts",
        may_ask_from=V2026_07_28,
        mirrored="name",
        members="messages",
    ),
    _changed("notifications/prompts/list_changed", "prompts.listChanged"),
    Method("completion/complete", prompts.CompleteParams, prompts.CompleteResult, C2S, capability="completions"),
    _legacy("logging/setLevel", lifecycle.SetLevelParams, EmptyResult, C2S, "logging"),
    Method("notifications/message", lifecycle.LoggingMessageParams, None, S2C, capability="logging"),
    Method(
        "subscriptions/listen",
        lifecycle.SubscriptionsListenParams,
        lifecycle.SubscriptionsListenResult,
        C2S,
        since=V2026_07_28,
    ),
    Method(
        "notifications/subscriptions/acknowledged",
        lifecycle.SubscriptionsAcknowledgedParams,
        None,
        S2C,
        since=V2026_07_28,
    ),
    # Since 2026-07-28 these three are part of an `InputRequiredResult`.
    _legacy("sampling/createMessage", CreateMessageParams, CreateMessageResult, S2C, "sampling"),
    _legacy("elicitation/create", ElicitParams, ElicitResult, S2C, "elicitation", V2025_06_18),
    _legacy("roots/list", RequestParams, ListRootsResult, S2C, "roots", members="roots"),
    _legacy("notifications/elicitation/complete", ElicitationCompleteParams, None, S2C, "elicitation.url", V2025_11_25),
    _changed("notifications/roots/list_changed", "roots.listChanged", C2S, V2026_07_28),
    _task("tasks/get", lifecycle.TaskIdParams, lifecycle.GetTaskResult, "tasks"),
    _task("tasks/result", lifecycle.TaskIdParams, lifecycle.GetTaskPayloadResult, "tasks"),
    _task("tasks/cancel", lifecycle.TaskIdParams, lifecycle.GetTaskResult, "tasks.cancel"),
    _task("tasks/list", PageParams, lifecycle.ListTasksResult, "tasks.list"),
    _task("notifications/tasks/status", lifecycle.TaskStatusParams, None, "tasks"),
)

METHODS: Final[dict[str, Method]] = {row.name: row for row in _ROWS}
"""Every method by name."""

LISTS: Final = ("tools/list", "prompts/list", "resources/list", "resources/templates/list")
CALLS: Final = ("tools/call", "resources/read", "prompts/get", "completion/complete")
"""The requests for one of what is listed: they have quotas and are recorded."""
LISTEN: Final = "subscriptions/listen"
OPENING: Final = ("initialize", "server/discover")
"""What begins a connection: before it no request has decided what is spoken, nor does a refusal of it."""

TASK_ID: Final = "taskId"
"""The params member that `Mcp-Name` repeats in the methods of the extension "Tasks"."""
TASK_NOTICE: Final = "notifications/tasks"
NAMED: Final[dict[str, str | None]] = {name: row.mirrored for name, row in METHODS.items()} | dict.fromkeys(
    ("tasks/get", "tasks/update", "tasks/cancel"), TASK_ID
)
"""The params member that Streamable HTTP repeats as `Mcp-Name`, by method."""
