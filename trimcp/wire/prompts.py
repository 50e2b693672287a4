"""Prompts: templates of messages a server offers to users (server/prompts)."""

from __future__ import annotations

from typing import Any

from trimcp.wire.common import Cacheable, Icon, Meta, NotificationParams, PageParams, Params, Result, Role
from trimcp.wire.content import ContentBlock, joined_text
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28

__all__ = [
    "GetPromptParams",
    "GetPromptResult",
    "ListPromptsParams",
    "ListPromptsResult",
    "Prompt",
    "PromptArgument",
    "PromptListChangedParams",
    "PromptMessage",
]


@wire
class PromptArgument:
    """One thing a prompt wants to know; its value is always text."""

    name: str
    title: str | Absent = field(default=ABSENT, since=V2025_06_18)
    description: str | Absent = field(default=ABSENT)
    required: bool | Absent = field(default=ABSENT)


@wire
class Prompt:
    """One prompt as listed."""

    name: str
    title: str | Absent = field(default=ABSENT, since=V2025_06_18)
    description: str | Absent = field(default=ABSENT)
    arguments: list[PromptArgument] | Absent = field(default=ABSENT)
    icons: list[Icon] | Absent = field(default=ABSENT, since=V2025_11_25)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)


@wire
class PromptMessage:
    """One message of a prompt, ready for a model."""

    role: Role
    content: ContentBlock

    @property
    def text(self) -> str:
        """The content, if it is text; else ""."""
        return joined_text([self.content])


ListPromptsParams = PageParams


@wire
class ListPromptsResult(Cacheable):
    """One page of a server's prompts."""

    prompts: list[Prompt]
    next_cursor: str | Absent = field(default=ABSENT)


@wire
class GetPromptParams(Params):
    """Which prompt, with what; answers to earlier questions stay raw JSON, as in `CallToolParams`."""

    name: str
    arguments: dict[str, str] | Absent = field(default=ABSENT)
    input_responses: dict[str, dict[str, Any]] | Absent = field(default=ABSENT, since=V2026_07_28)
    request_state: str | Absent = field(default=ABSENT, since=V2026_07_28)


@wire
class GetPromptResult(Result):
    """The messages of a prompt, filled in."""

    messages: list[PromptMessage]
    description: str | Absent = field(default=ABSENT)


PromptListChangedParams = NotificationParams
