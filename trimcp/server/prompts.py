"""Prompts and completion: templates of messages with named text arguments, and suggestions for these arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trimcp.errors import ErrorReply
from trimcp.schema.convert import ConversionError, key_text, without_root
from trimcp.schema.json_schema import takes_text
from trimcp.schema.validator import Validator, validator_for
from trimcp.server.handlers.calling import PreparedFunction, prepare
from trimcp.server.handlers.media import as_content
from trimcp.server.options import ListedOptions, listed_members, name_of
from trimcp.session.context import Context
from trimcp.session.limits import Quota
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.prompts import (
    CompleteParams,
    CompleteResult,
    Completion,
    GetPromptResult,
    Prompt,
    PromptArgument,
    PromptMessage,
)

if TYPE_CHECKING:
    from trimcp.guard.permission import Permission
    from trimcp.server.handlers.pools import Pools

# server/utilities/completion: at most 100 values in one answer.
_MOST_SUGGESTIONS = 100


class PromptOptions(ListedOptions, total=False):
    """The options of a prompt; see `ListedOptions`."""


@attrs.define(eq=False, repr=False)
class PromptEntry:
    listed: Prompt
    prepared: PreparedFunction
    validator: Validator
    choices: Mapping[str, Sequence[str]]
    quota: Quota | None = None
    permission: Permission | None = None

    async def get(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, str]) -> Any:
        """Return the prompt's messages. Raises ErrorReply (-32602) for missing, unknown and wrong arguments."""
        values = self.prepared.from_texts(arguments)
        if problems := self.validator.problems(values):
            raise self._refusal(problems)
        try:
            value = await self.prepared.run(pools, ctx, values)
        except ConversionError as error:
            raise self._refusal(error.problems) from None
        if isinstance(value, GetPromptResult | InputRequiredResult):
            return value
        return GetPromptResult(messages=_messages(value), description=self.listed.description)

    def _refusal(self, problems: list[str]) -> ErrorReply:
        problems = without_root(problems)
        text = f"invalid arguments for {self.listed.name}: {'; '.join(problems)}"
        return ErrorReply(INVALID_PARAMS, text[:500], {"problems": problems})


def _messages(value: Any) -> list[PromptMessage]:
    if isinstance(value, PromptMessage):
        return [value]
    if isinstance(value, list | tuple):
        return [message for item in value for message in _messages(item)]
    return [PromptMessage(role="user", content=block) for block in as_content(value)]


def prompt_entry(function: Callable[..., Any], options: PromptOptions) -> PromptEntry:
    """Build a prompt from a function whose parameters are its arguments, with checked options.

    Raises TypeError for a parameter that cannot be filled.
    """
    prepared = prepare(function)
    signature = prepared.signature
    schema = signature.input_schema
    properties: dict[str, Any] = schema["properties"]
    arguments = [
        PromptArgument(
            name=name,
            title=described.get("title"),
            description=_description(described, schema),
            required=name in schema.get("required", ()),
        )
        for name, described in properties.items()
    ]
    choices = {name: [*map(key_text, each["enum"])] for name, each in properties.items() if "enum" in each}
    members = listed_members(options, name_of(options, signature.name, "prompt"), signature.description)
    listed = Prompt(arguments=arguments or None, **members)
    return PromptEntry(listed, prepared, validator_for(schema), choices, options.get("quota"))


def _description(described: dict[str, Any], schema: dict[str, Any]) -> Any:
    """Return the description of an argument; that of a list or object says that it is JSON, since all come as text."""
    text = described.get("description")
    branches = described.get("anyOf", [described])
    if takes_text(described) or not any("$ref" in each or each.get("type") in ("array", "object") for each in branches):
        return text
    shape = {key: value for key, value in described.items() if key not in ("description", "title", "default")}
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    asked = f"As JSON that fits {key_text({**shape, **shared})}"
    return asked if text is None else f"{text}\n\n{asked}"


@attrs.define(eq=False, repr=False)
class Completer:
    """Suggests values for one argument of one prompt or template.

    Its function takes the text typed so far. It may also take `context`, the arguments already known, and the request's
    context.
    """

    prepared: PreparedFunction
    quota: Quota | None = None
    permission: Permission | None = None

    def __attrs_post_init__(self) -> None:
        signature = self.prepared.signature
        others = {*signature.input_schema.get("required", ())} - {*signature.parameters[:1], "context"}
        if not signature.parameters or others:
            raise TypeError(
                f"{signature.name}() completes an argument: it takes the text typed so far, and may take `context`"
            )

    async def complete(self, pools: Pools, ctx: Context[Any], params: CompleteParams) -> CompleteResult:
        names = list(self.prepared.signature.parameters)
        known = params.context.arguments if params.context else None
        keywords: dict[str, Any] = {names[0]: params.argument.value}
        if "context" in names[1:]:
            keywords["context"] = dict(known) if known else {}
        value = await self.prepared.run(pools, ctx, keywords)
        return suggestions(value)


def suggestions(value: Any) -> CompleteResult:
    """Return a completer's suggestions as a result, cut to the number that the specification allows."""
    if isinstance(value, CompleteResult):
        return value
    if isinstance(value, Completion):
        return CompleteResult(completion=value)
    values = [value] if isinstance(value, str) else [str(item) for item in value or ()]
    shown = values[:_MOST_SUGGESTIONS]
    return CompleteResult(completion=Completion(values=shown, total=len(values), has_more=len(values) > len(shown)))
