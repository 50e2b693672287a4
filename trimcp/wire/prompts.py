"""Prompts, and suggestions for their arguments (server/prompts, server/utilities/completion)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from trimcp.wire.common import Cacheable, Icon, Meta, Params, Result, Role
from trimcp.wire.content import ContentBlock, joined_text
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28


@wire
class PromptArgument:
    """One argument of a prompt; its value is always text."""

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
    """One message of a prompt, for a model."""

    role: Role
    content: ContentBlock

    @property
    def text(self) -> str:
        """The content, if it is text; else ""."""
        return joined_text([self.content])


@wire
class ListPromptsResult(Cacheable):
    """One page of a server's prompts."""

    prompts: list[Prompt]
    next_cursor: str | Absent = field(default=ABSENT)


@wire
class GetPromptParams(Params):
    """Which prompt, and its arguments; answers to earlier questions are raw JSON, as in `CallToolParams`."""

    name: str
    arguments: dict[str, str] | Absent = field(default=ABSENT)
    input_responses: dict[str, dict[str, Any]] | Absent = field(default=ABSENT, since=V2026_07_28)
    request_state: str | Absent = field(default=ABSENT, since=V2026_07_28)


@wire
class GetPromptResult(Result):
    """The messages of a prompt with its arguments filled in."""

    messages: list[PromptMessage]
    description: str | Absent = field(default=ABSENT)


@wire
class PromptReference:
    """The prompt whose argument is being completed."""

    name: str
    title: str | Absent = field(default=ABSENT, since=V2025_06_18)
    type: Literal["ref/prompt"] = field(default="ref/prompt", required=True)


@wire
class ResourceTemplateReference:
    """The resource template whose variable is being completed (named `ResourceReference` until 2025-03-26)."""

    uri: str
    type: Literal["ref/resource"] = field(default="ref/resource", required=True)


Reference: TypeAlias = PromptReference | ResourceTemplateReference


@wire
class CompletionArgument:
    """The argument being completed, and the text typed so far."""

    name: str
    value: str


@wire(since=V2025_06_18)
class CompletionContext:
    """The values of the other arguments, as far as known."""

    arguments: dict[str, str] | Absent = field(default=ABSENT)


@wire
class CompleteParams(Params):
    """What to complete."""

    ref: Reference
    argument: CompletionArgument
    context: CompletionContext | Absent = field(default=ABSENT, since=V2025_06_18)


@wire
class Completion:
    """At most 100 suggestions, best first, and their total number, if known."""

    values: list[str]
    total: int | Absent = field(default=ABSENT)
    has_more: bool | Absent = field(default=ABSENT)


@wire
class CompleteResult(Result):
    """The suggestions."""

    completion: Completion
