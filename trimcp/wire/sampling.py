"""Sampling: a server asks its client's model (client/sampling).

A request of its own until 2025-11-25; since 2026-07-28 one of the questions in `InputRequiredResult`.
"""

from __future__ import annotations

from typing import Any, Literal

from trimcp.wire.common import Meta, Role
from trimcp.wire.content import SamplingContent, joined_text
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_11_25, V2026_07_28
from trimcp.wire.tasks import TaskMetadata
from trimcp.wire.tools import Tool, ToolChoice

__all__ = [
    "CreateMessageParams",
    "CreateMessageRequest",
    "CreateMessageResult",
    "ModelHint",
    "ModelPreferences",
    "SamplingMessage",
]


def _blocks(content: SamplingContent | list[SamplingContent]) -> list[SamplingContent]:
    return content if isinstance(content, list) else [content]


def _alone(content: SamplingContent | list[SamplingContent]) -> SamplingContent | Absent:
    if not isinstance(content, list):
        return content
    return content[0] if len(content) == 1 else ABSENT


@wire
class SamplingMessage:
    """One message of the conversation.

    Until 2025-06-18 it had exactly one content: a list of one is unwrapped for an older peer, any other refused.
    """

    role: Role
    content: SamplingContent | list[SamplingContent] = field(narrow_until=V2025_11_25, narrow=_alone)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_11_25)

    @property
    def blocks(self) -> list[SamplingContent]:
        """The content, always as a list."""
        return _blocks(self.content)

    @property
    def text(self) -> str:
        """The text blocks of the content, joined with line ends; "" if there are none."""
        return joined_text(self.blocks)


@wire
class ModelHint:
    """A model's name or part of it."""

    name: str | Absent = field(default=ABSENT)


@wire
class ModelPreferences:
    """What matters in choosing a model; each priority from 0 to 1."""

    hints: list[ModelHint] | Absent = field(default=ABSENT)
    cost_priority: float | Absent = field(default=ABSENT)
    speed_priority: float | Absent = field(default=ABSENT)
    intelligence_priority: float | Absent = field(default=ABSENT)


@wire
class CreateMessageParams:
    """What the model is asked."""

    messages: list[SamplingMessage]
    max_tokens: int
    model_preferences: ModelPreferences | Absent = field(default=ABSENT)
    system_prompt: str | Absent = field(default=ABSENT)
    include_context: Literal["none", "thisServer", "allServers"] | Absent = field(default=ABSENT)
    temperature: float | Absent = field(default=ABSENT)
    stop_sequences: list[str] | Absent = field(default=ABSENT)
    metadata: dict[str, Any] | Absent = field(default=ABSENT)
    tools: list[Tool] | Absent = field(default=ABSENT, since=V2025_11_25)
    tool_choice: ToolChoice | Absent = field(default=ABSENT, since=V2025_11_25)
    task: TaskMetadata | Absent = field(default=ABSENT, since=V2025_11_25, until=V2026_07_28)
    meta: Meta | Absent = field(default=ABSENT, until=V2026_07_28)


@wire
class CreateMessageResult:
    """What the model said; its content as in `SamplingMessage`."""

    role: Role
    content: SamplingContent | list[SamplingContent] = field(narrow_until=V2025_11_25, narrow=_alone)
    model: str
    stop_reason: str | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT)

    @property
    def blocks(self) -> list[SamplingContent]:
        """The content, always as a list."""
        return _blocks(self.content)

    @property
    def text(self) -> str:
        """The text blocks of the content, joined with line ends; "" if there are none."""
        return joined_text(self.blocks)


@wire(since=V2026_07_28)
class CreateMessageRequest:
    """The question as it stands inside an `InputRequiredResult`."""

    params: CreateMessageParams
    method: Literal["sampling/createMessage"] = field(default="sampling/createMessage", required=True)
