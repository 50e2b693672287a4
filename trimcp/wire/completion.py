"""Completion: what an argument being typed could become (server/utilities/completion)."""

from __future__ import annotations

from typing import Literal, TypeAlias

from trimcp.wire.common import Params, Result
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_06_18

__all__ = [
    "CompleteParams",
    "CompleteResult",
    "Completion",
    "CompletionArgument",
    "CompletionContext",
    "PromptReference",
    "Reference",
    "ResourceTemplateReference",
]


@wire
class PromptReference:
    """The prompt whose argument is being typed."""

    name: str
    title: str | Absent = field(default=ABSENT, since=V2025_06_18)
    type: Literal["ref/prompt"] = field(default="ref/prompt", required=True)


@wire
class ResourceTemplateReference:
    """The resource template whose variable is being typed (named `ResourceReference` until 2025-03-26)."""

    uri: str
    type: Literal["ref/resource"] = field(default="ref/resource", required=True)


Reference: TypeAlias = PromptReference | ResourceTemplateReference


@wire
class CompletionArgument:
    """The argument being typed, and what stands there so far."""

    name: str
    value: str


@wire(since=V2025_06_18)
class CompletionContext:
    """What the other arguments are, as far as they are known."""

    arguments: dict[str, str] | Absent = field(default=ABSENT)


@wire
class CompleteParams(Params):
    """What is being typed, and where."""

    ref: Reference
    argument: CompletionArgument
    context: CompletionContext | Absent = field(default=ABSENT, since=V2025_06_18)


@wire
class Completion:
    """At most 100 suggestions, best first; how many there are in all, if known."""

    values: list[str]
    total: int | Absent = field(default=ABSENT)
    has_more: bool | Absent = field(default=ABSENT)


@wire
class CompleteResult(Result):
    """The suggestions."""

    completion: Completion
