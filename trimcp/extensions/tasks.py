"""Tasks as both sides know them: the states of one, as a server says them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast, get_args

import attrs

from trimcp.support.slotted import valued
from trimcp.wire.capabilities import TASKS, ClientCapabilities, ServerCapabilities
from trimcp.wire.common import META_PROGRESS, RESULT_TASK
from trimcp.wire.lifecycle import ENDED, TaskStatus

NEEDED: Final[Mapping[str, Any]] = {"extensions": {TASKS: {}}}
"""What a client has to declare, as the error that refuses it says."""
LONGEST_ID: Final = 1_024
"""Characters of the id of a task; a server of trimcp makes shorter ones."""


def declared(capabilities: ClientCapabilities | ServerCapabilities) -> bool:
    """Return whether a side has declared the extension."""
    return TASKS in (capabilities.extensions or {})


def status_text(progress: Mapping[str, Any]) -> str:
    """Return progress as one line for a person."""
    done, total, message = (progress.get(key) for key in ("progress", "total", "message"))
    count = "" if done is None else f"{done:g}" if total is None else f"{done:g} of {total:g}"
    return count if not message else message if not count or total is None else f"{message} ({count})"


@attrs.frozen
@valued
class TaskState:
    """A task as its server says it is. All texts are the server's: untrusted.

    Attributes:
        id: its id, which may be all that protects it: keep it like a password.
        status: "working", "input_required", "completed", "failed" or "cancelled"; the last three are final.
        message: what its server says of it now, or None.
        created_at, updated_at: as the server writes them (ISO 8601).
        ttl_ms: milliseconds since its beginning after which the server may forget it; None for no such time.
        poll_interval_ms: how often to ask at most, as the server wants it, or None.
        raw: all that the server said, as JSON: with `result`, `error` or `inputRequests`, by its status.
    """

    id: str
    status: TaskStatus
    message: str | None
    created_at: str
    updated_at: str
    ttl_ms: float | None
    poll_interval_ms: float | None
    raw: Mapping[str, Any]

    @property
    def ended(self) -> bool:
        """Whether it changes no more."""
        return self.status in ENDED

    @property
    def progress(self) -> Mapping[str, Any] | None:
        """Its progress as numbers, which servers of trimcp say, or None."""
        found = (self.raw.get("_meta") or {}).get(META_PROGRESS)
        number = isinstance(found, dict) and type(found.get("progress")) in (int, float)
        return found if number else None


def read_state(raw: Any) -> TaskState:
    """Return the state of a task in an answer or a notification. Raises ValueError, with what is wrong."""
    if not isinstance(raw, dict) or not isinstance(raw.get("taskId"), str) or len(raw["taskId"]) > LONGEST_ID:
        raise ValueError("it has no taskId")
    if raw.get("status") not in get_args(TaskStatus):
        raise ValueError(f"its status is unknown: {raw.get('status')!r:.60}")
    inside = {"completed": "result", "failed": "error", "input_required": "inputRequests"}.get(raw["status"])
    # A server says what it creates without them.
    if inside is not None and not isinstance(raw.get(inside), dict) and raw.get("resultType") != RESULT_TASK:
        raise ValueError(f"it is {raw['status']}, but has no {inside}")
    texts = [raw.get(key) for key in ("statusMessage", "createdAt", "lastUpdatedAt")]
    message, created, updated = (text if isinstance(text, str) else None for text in texts)
    times = [raw.get(key) for key in ("ttlMs", "pollIntervalMs")]
    ttl, poll = (time if isinstance(time, int | float) and time >= 0 else None for time in times)
    status = cast("TaskStatus", raw["status"])
    return TaskState(raw["taskId"], status, message, created or "", updated or "", ttl, poll, raw)
