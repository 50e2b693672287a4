"""Initialize, discover, cancelled, progress, log messages, subscriptions, and the experimental tasks."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.common import Cacheable, Implementation, LoggingLevel, Params, ProgressToken, Result
from trimcp.wire.fields import field, wire
from trimcp.wire.revisions import V2025_03_26, V2025_11_25, V2026_07_28


@wire(until=V2026_07_28)
class InitializeParams(Params):
    """The first message of a legacy connection (basic/lifecycle)."""

    protocol_version: str
    capabilities: ClientCapabilities
    client_info: Implementation


@wire(until=V2026_07_28)
class InitializeResult(Result):
    """The server's answer to `initialize`: the revision it chose, its capabilities, its name and version."""

    protocol_version: str
    capabilities: ServerCapabilities
    server_info: Implementation
    instructions: str | None = field(default=None)


@wire(since=V2026_07_28)
class DiscoverResult(Cacheable):
    """A modern server's capabilities, name and revisions (server/discover)."""

    supported_versions: list[str]
    capabilities: ServerCapabilities
    instructions: str | None = field(default=None)


@wire
class CancelledParams(Params):
    """Which request its sender cancelled, and why (basic/utilities/cancellation).

    In 2025-11-25 only, the id may be missing, for a task; such a notification cancels nothing here.
    """

    request_id: str | int | None = field(default=None, required_from=V2026_07_28)
    reason: str | None = field(default=None)


@wire
class ProgressParams(Params):
    """The progress of a request (basic/utilities/progress); it must increase with every message."""

    progress_token: ProgressToken
    progress: float
    total: float | None = field(default=None)
    message: str | None = field(default=None, since=V2025_03_26)


@wire(since=V2026_07_28)
class UnsupportedVersionData:
    """`error.data` of -32022: the revisions that the server supports, and the requested one."""

    supported: list[str]
    requested: str


@wire(since=V2026_07_28)
class MissingCapabilityData:
    """`error.data` of -32021: the capabilities that the client would have to declare."""

    required_capabilities: ClientCapabilities


@wire(until=V2026_07_28)
class SetLevelParams(Params):
    """The lowest log level that a legacy connection wants; modern requests have it in their `_meta`."""

    level: LoggingLevel


@wire
class LoggingMessageParams(Params):
    """One log message; `data` is any JSON value."""

    level: LoggingLevel
    data: Any
    logger: str | None = field(default=None)


@wire(since=V2026_07_28)
class SubscriptionFilter:
    """The changes that a client wants to be notified of, or a server agreed to notify."""

    tools_list_changed: bool | None = field(default=None)
    prompts_list_changed: bool | None = field(default=None)
    resources_list_changed: bool | None = field(default=None)
    resource_subscriptions: list[str] | None = field(default=None)
    task_ids: list[str] | None = field(default=None)


@wire(since=V2026_07_28)
class SubscriptionsListenParams(Params):
    """The changes to report for as long as the request is open."""

    notifications: SubscriptionFilter


@wire(since=V2026_07_28)
class SubscriptionsAcknowledgedParams(Params):
    """The first message of a subscription: the part of the filter that the server agreed to."""

    notifications: SubscriptionFilter


@wire(since=V2026_07_28)
class SubscriptionsListenResult(Result):
    """The last message of a subscription; its `_meta` names the subscription."""


# Tasks, experimental in 2025-11-25 (basic/utilities/tasks): defined for reading, never declared

TaskStatus: TypeAlias = Literal["working", "input_required", "completed", "failed", "cancelled"]
ENDED: Final = ("completed", "failed", "cancelled")
"""The states of a task that change no more."""


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskMetadata:
    """Asks for a request to become a task, which is kept for `ttl` milliseconds."""

    ttl: int | None = field(default=None)


@wire(since=V2025_11_25, until=V2026_07_28)
class RelatedTaskMetadata:
    """The value of `_meta["io.modelcontextprotocol/related-task"]`."""

    task_id: str


@wire(since=V2025_11_25, until=V2026_07_28)
class Task:
    """The state of a task: times in ISO 8601, `ttl` (None: for ever) and `poll_interval` in milliseconds."""

    task_id: str
    status: TaskStatus
    created_at: str
    last_updated_at: str
    ttl: int | None
    poll_interval: int | None = field(default=None)
    status_message: str | None = field(default=None)


@wire(since=V2025_11_25, until=V2026_07_28)
class CreateTaskResult(Result):
    """The answer to a request that became a task."""

    task: Task


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskIdParams(Params):
    """The id of a task: the params of `tasks/get`, `tasks/result` and `tasks/cancel`."""

    task_id: str


@wire(since=V2025_11_25, until=V2026_07_28)
class GetTaskResult(Result, Task):
    """The answer to `tasks/get` and `tasks/cancel`."""


@wire(since=V2025_11_25, until=V2026_07_28)
class GetTaskPayloadResult(Result):
    """The result of the request that became the task, of any shape, in `extra`."""

    extra: dict[str, Any] = field(factory=dict, kw_only=True)


@wire(since=V2025_11_25, until=V2026_07_28)
class ListTasksResult(Result):
    """One page of tasks."""

    tasks: list[Task]
    next_cursor: str | None = field(default=None)


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskStatusParams(Params, Task):
    """A notification of a task's new state."""
