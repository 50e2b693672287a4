"""Prompts, and suggestions for their arguments (server/prompts, server/utilities/completion)."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from trimcp.wire.common import Cacheable, Icon, Meta, Params, Result, Role
from trimcp.wire.content import ContentBlock, joined_text
from trimcp.wire.fields import field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28


@wire
class PromptArgument:
    """One argument of a prompt; its value is always text."""

    name: str
    title: str | None = field(default=None, since=V2025_06_18)
    description: str | None = field(default=None)
    required: bool | None = field(default=None)


@wire
class Prompt:
    """One prompt as listed."""

    name: str
    title: str | None = field(default=None, since=V2025_06_18)
    description: str | None = field(default=None)
    arguments: list[PromptArgument] | None = field(default=None)
    icons: list[Icon] | None = field(default=None, since=V2025_11_25)
    meta: Meta | None = field(default=None, since=V2025_06_18)


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
    next_cursor: str | None = field(default=None)


@wire
class GetPromptParams(Params):
    """Which prompt, and its arguments; answers to earlier questions are raw JSON, as in `CallToolParams`."""

    name: str
    arguments: dict[str, str] | None = field(default=None)
    input_responses: dict[str, dict[str, Any]] | None = field(default=None, since=V2026_07_28)
    request_state: str | None = field(default=None, since=V2026_07_28)


@wire
class GetPromptResult(Result):
    """The messages of a prompt with its arguments filled in."""

    messages: list[PromptMessage]
    description: str | None = field(default=None)


@wire
class PromptReference:
    """The prompt whose argument is being completed."""

    name: str
    title: str | None = field(default=None, since=V2025_06_18)
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

    arguments: dict[str, str] | None = field(default=None)


@wire
class CompleteParams(Params):
    """What to complete."""

    ref: Reference
    argument: CompletionArgument
    context: CompletionContext | None = field(default=None, since=V2025_06_18)


@wire
class Completion:
    """At most 100 suggestions, best first, and their total number, if known."""

    values: list[str]
    total: int | None = field(default=None)
    has_more: bool | None = field(default=None)


@wire
class CompleteResult(Result):
    """The suggestions."""

    completion: Completion
