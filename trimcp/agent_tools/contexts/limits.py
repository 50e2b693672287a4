"""How much contexts may hold and how long they live, and which members of a state are the service's alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from trimcp.agent_tools.contexts.history import HistoryArguments
from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.support.bounds import checked
from trimcp.support.values import valued

SERVER_MEMBERS: Final = ("permissions", "session_id", "tool_history")
"""Members of a context's state that no agent can write."""


@attrs.frozen(field_transformer=checked(zero=("history", "answers", "gone", "max_gone")))
@valued
class ContextLimits:
    """How much contexts may hold, and how long they live. Sizes are in bytes, times in seconds.

    Attributes:
        max_contexts: contexts of all owners together.
        max_per_owner: contexts of one principal and agent.
        max_state: JSON text of a state, and of one update. In memory a state also takes 100 bytes per member.
        max_depth: levels of objects and arrays in a state.
        max_members: members and elements on all levels of a state.
        idle: how long a context lives without use. A request that names it and a call under way are use; watchers and
            tasks that were started in it are not.
        lifetime: how long a context lives at most.
        history: calls kept in its `tool_history`; 0 for none.
        max_history: memory of its history; beyond it fewer calls are kept.
        history_arguments: how the history shows arguments: "shapes" names, kinds and sizes; "masked" the values, with
            secrets masked by name and long texts cut; "whole" all values; "none" nothing.
        answers: memory of the answers that are kept for requests sent again: those of the latest calls, about 20 small
            ones; 0 for none.
        max_watchers: channels that watch one context.
        max_unsaved: updates of one context that wait for a store.
        gone: how long an ended context's id is answered with "gone"; after that it is unknown.
        max_gone: ended ids remembered.
        cleanup: how long calls and tasks of an ended context may take to unwind, and each of its clean-ups.
    """

    max_contexts: int = 10_000
    max_per_owner: int = 1_000
    max_state: int = 256 * 1024
    max_depth: int = 32
    max_members: int = 10_000
    idle: float = 1_800.0
    lifetime: float = 86_400.0
    history: int = 100
    max_history: int = 4 * 1024
    history_arguments: HistoryArguments = attrs.field(
        default="shapes", validator=attrs.validators.in_(("none", "shapes", "masked", "whole"))
    )
    answers: int = 16 * 1024
    max_watchers: int = 100
    max_unsaved: int = 1_000
    gone: float = 300.0
    max_gone: int = 10_000
    cleanup: float = 5.0


def refuse_server_members(updates: Mapping[str, Any]) -> None:
    """Raise MalformedMessage if an agent's update writes a member of `SERVER_MEMBERS`."""
    for name in SERVER_MEMBERS:
        if name in updates:
            raise MalformedMessage(f"`{name}` is written by the service alone", {"member": name})
