"""The experimental tasks of 2025-11-25 (basic/utilities/tasks): modelled to be read, never offered."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from trimcp.wire.common import Params, Result
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_11_25, V2026_07_28

TaskStatus: TypeAlias = Literal["working", "input_required", "completed", "failed", "cancelled"]


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskMetadata:
    """Asks that a request become a task, kept for `ttl` milliseconds."""

    ttl: int | Absent = field(default=ABSENT)


@wire(since=V2025_11_25, until=V2026_07_28)
class RelatedTaskMetadata:
    """The value of `_meta["io.modelcontextprotocol/related-task"]`."""

    task_id: str


@wire(since=V2025_11_25, until=V2026_07_28)
class Task:
    """How a task stands: times in ISO 8601, `ttl` (None: for ever) and `poll_interval` in milliseconds."""

    task_id: str
    status: TaskStatus
    created_at: str
    last_updated_at: str
    ttl: int | None
    poll_interval: int | Absent = field(default=ABSENT)
    status_message: str | Absent = field(default=ABSENT)


@wire(since=V2025_11_25, until=V2026_07_28)
class CreateTaskResult(Result):
    """The answer to a request that became a task."""

    task: Task


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskIdParams(Params):
    """Which task is meant: the params of `tasks/get`, `tasks/result` and `tasks/cancel`."""

    task_id: str


@wire(since=V2025_11_25, until=V2026_07_28)
class GetTaskResult(Result, Task):
    """The answer to `tasks/get` and `tasks/cancel`."""


@wire(since=V2025_11_25, until=V2026_07_28)
class GetTaskPayloadResult(Result):
    """The result of the request that became the task, whatever its shape, in `extra`."""

    extra: dict[str, Any] = field(factory=dict, kw_only=True)


@wire(since=V2025_11_25, until=V2026_07_28)
class ListTasksResult(Result):
    """One page of tasks."""

    tasks: list[Task]
    next_cursor: str | Absent = field(default=ABSENT)


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskStatusParams(Params, Task):
    """A task's new state, unasked."""
