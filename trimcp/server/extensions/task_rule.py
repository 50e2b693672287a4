"""How the calls of a tool become tasks (the extension "Tasks"), as its options say."""

from __future__ import annotations

import logging
from typing import Any, Final, Literal, TypeAlias

import attrs

from trimcp.store.tasks import Restart
from trimcp.support.bounds import check_number

log: logging.Logger = logging.getLogger("trimcp.server")

TaskMode: TypeAlias = Literal["allowed", "required", "never"]
"""Whether calls of a tool become tasks: those that take long, each, or none."""

_SOON: Final = 1.0  # seconds in which a call that may become a task is answered without one


@attrs.frozen
class TaskRule:
    """How the calls of one tool become tasks."""

    required: bool
    after: float  # seconds in which its answer is the answer to the call
    restart: Restart


def task_rule(name: str, mode: object, after: float | None, restart: Any) -> TaskRule | None:
    """Return the rule that a tool's options make, or None if it never becomes a task. Raises TypeError, ValueError."""
    if mode not in ("allowed", "required", "never"):
        raise TypeError(f"task is 'allowed', 'required' or 'never', not {mode!r:.60}")
    if restart not in ("fail", "resume", "again"):
        raise TypeError(f"restart is 'fail', 'resume' or 'again', not {restart!r:.60}")
    check_number("task_after", after, zero=True, optional=True)
    if mode != "allowed" and after is not None:
        raise TypeError("task_after is for task='allowed': the seconds in which a call is answered without a task")
    if mode == "never":
        return None
    if mode == "required":
        log.info("the tool %s runs as a task only: a client that does not declare tasks gets an error", name)
    return TaskRule(mode == "required", 0.0 if mode == "required" else _SOON if after is None else after, restart)
