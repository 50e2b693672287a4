"""A server's questions to its client: to the model, to the user, or for the roots (client/sampling, ...).

They are requests until 2025-11-25. Since 2026-07-28 they are part of a result, `InputRequiredResult`
(basic/patterns/mrtr).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from trimcp.wire.common import RESULT_INPUT_REQUIRED, Meta, Params, RequestParams, Role
from trimcp.wire.content import SamplingContent, joined_text
from trimcp.wire.fields import ABSENT, Absent, chooses, field, wire
from trimcp.wire.lifecycle import TaskMetadata
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28
from trimcp.wire.tools import Tool, ToolChoice


@wire
class Root:
    """A directory or file that a server may work in; for now a `file://` URI."""

    uri: str
    name: str | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)


@wire
class ListRootsResult:
    """The client's roots."""

    roots: list[Root]
    meta: Meta | None = field(default=None, until=V2026_07_28)


@wire(since=V2026_07_28)
class ListRootsRequest:
    """The question as part of an `InputRequiredResult`."""

    params: RequestParams | None = field(default=None)
    method: Literal["roots/list"] = field(default="roots/list", required=True)


# Sampling


def _alone(content: SamplingContent | list[SamplingContent]) -> SamplingContent | Absent:
    if not isinstance(content, list):
        return content
    return content[0] if len(content) == 1 else ABSENT


@wire
class _Message:
    role: Role
    content: SamplingContent | list[SamplingContent] = field(narrow_until=V2025_11_25, narrow=_alone)

    @property
    def blocks(self) -> list[SamplingContent]:
        """The content, always as a list."""
        return self.content if isinstance(self.content, list) else [self.content]

    @property
    def text(self) -> str:
        """The text blocks of the content, joined with line ends; "" if there are none."""
        return joined_text(self.blocks)


@wire
class SamplingMessage(_Message):
    """One message of the conversation.

    Until 2025-06-18 it had exactly one content: for an older peer a list of one is unwrapped, any other is refused.
    """

    meta: Meta | None = field(default=None, since=V2025_11_25)


@wire
class ModelHint:
    """A model's name or part of it."""

    name: str | None = field(default=None)


@wire
class ModelPreferences:
    """Criteria for choosing a model; each priority is from 0 to 1."""

    hints: list[ModelHint] | None = field(default=None)
    cost_priority: float | None = field(default=None)
    speed_priority: float | None = field(default=None)
    intelligence_priority: float | None = field(default=None)


@wire
class CreateMessageParams:
    """The question to the model, and options."""

    messages: list[SamplingMessage]
    max_tokens: int
    model_preferences: ModelPreferences | None = field(default=None)
    system_prompt: str | None = field(default=None)
    include_context: Literal["none", "thisServer", "allServers"] | None = field(default=None)
    temperature: float | None = field(default=None)
    stop_sequences: list[str] | None = field(default=None)
    metadata: dict[str, Any] | None = field(default=None)
    tools: list[Tool] | None = field(default=None, since=V2025_11_25)
    tool_choice: ToolChoice | None = field(default=None, since=V2025_11_25)
    task: TaskMetadata | None = field(default=None, since=V2025_11_25, until=V2026_07_28)
    meta: Meta | None = field(default=None, until=V2026_07_28)


@wire
class CreateMessageResult(_Message):
    """The model's answer; its content as in `SamplingMessage`."""

    model: str
    stop_reason: str | None = field(default=None)
    meta: Meta | None = field(default=None)


@wire(since=V2026_07_28)
class CreateMessageRequest:
    """The question as part of an `InputRequiredResult`."""

    params: CreateMessageParams
    method: Literal["sampling/createMessage"] = field(default="sampling/createMessage", required=True)


# Elicitation


class Choice(NamedTuple):
    """One value to choose from, and its name for people: its title, or the value itself."""

    value: str
    title: str


class Bounds(NamedTuple):
    """The smallest and the largest value of a field, both allowed; None if there is no such bound.

    For text they count characters, for a selection items; for a number they are numbers.
    """

    least: float | None = None
    most: float | None = None


@wire(since=V2025_06_18)
class _FormField:
    """Base class of a form's fields, with what is needed to display any of them."""

    title: str | None = field(default=None, kw_only=True)
    description: str | None = field(default=None, kw_only=True)

    @property
    def choices(self) -> list[Choice]:
        """The values to choose from; empty for a free field."""
        return []

    @property
    def bounds(self) -> Bounds:
        """The bounds on the number of characters, on the number, or on the number of choices."""
        return Bounds()


@wire(since=V2025_06_18)
class StringSchema(_FormField):
    """A line of text, which may have a known format."""

    min_length: int | None = field(default=None)
    max_length: int | None = field(default=None)
    format: Literal["email", "uri", "date", "date-time"] | None = field(default=None)
    default: str | None = field(default=None, since=V2025_11_25)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.min_length, self.max_length)


@wire(since=V2025_06_18)
class NumberSchema(_FormField):
    """A number or an integer."""

    minimum: float | None = field(default=None)
    maximum: float | None = field(default=None)
    default: float | None = field(default=None, since=V2025_11_25)
    type: Literal["number", "integer"] = field(default="number", required=True)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.minimum, self.maximum)


@wire(since=V2025_06_18)
class BooleanSchema(_FormField):
    """Yes or no."""

    default: bool | None = field(default=None)
    type: Literal["boolean"] = field(default="boolean", required=True)


@wire(since=V2025_06_18)
class UntitledSingleSelectEnumSchema(_FormField):
    """One of several values."""

    enum: list[str]
    default: str | None = field(default=None, since=V2025_11_25)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        return [Choice(value, value) for value in self.enum]


@wire(since=V2025_06_18)
class LegacyTitledEnumSchema(_FormField):
    """One of several values, with names: the older notation, and the only one of 2025-06-18."""

    enum: list[str]
    enum_names: list[str] | None = field(default=None)
    default: str | None = field(default=None, since=V2025_11_25)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        names = self.enum_names or []
        return [Choice(value, names[at] if at < len(names) else value) for at, value in enumerate(self.enum)]


@wire(since=V2025_11_25)
class EnumOption:
    """A value and its name for people."""

    const: str
    title: str


def _as_legacy(field: Any) -> LegacyTitledEnumSchema:
    return LegacyTitledEnumSchema(
        enum=[option.const for option in field.one_of],
        enum_names=[option.title for option in field.one_of],
        title=field.title,
        description=field.description,
        default=field.default,
    )


@wire(since=V2025_11_25, instead=_as_legacy)
class TitledSingleSelectEnumSchema(_FormField):
    """One of several values, each with a name. For an older peer it is written in the older notation."""

    one_of: list[EnumOption]
    default: str | None = field(default=None)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        return [Choice(option.const, option.title) for option in self.one_of]


@wire(since=V2025_11_25)
class UntitledItems:
    """The values of a selection."""

    enum: list[str]
    type: Literal["string"] = field(default="string", required=True)


@wire(since=V2025_11_25)
class TitledItems:
    """The values of a selection, each with its name."""

    any_of: list[EnumOption]


@wire(since=V2025_11_25)
class _Selection(_FormField):
    """Base class of selections of several values."""

    min_items: int | None = field(default=None, kw_only=True)
    max_items: int | None = field(default=None, kw_only=True)
    default: list[str] | None = field(default=None, kw_only=True)
    type: Literal["array"] = field(default="array", required=True, kw_only=True)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.min_items, self.max_items)


@wire(since=V2025_11_25)
class UntitledMultiSelectEnumSchema(_Selection):
    """A selection of several values."""

    items: UntitledItems

    @property
    def choices(self) -> list[Choice]:
        return [Choice(value, value) for value in self.items.enum]


@wire(since=V2025_11_25)
class TitledMultiSelectEnumSchema(_Selection):
    """A selection of several values, each with a name."""

    items: TitledItems

    @property
    def choices(self) -> list[Choice]:
        return [Choice(option.const, option.title) for option in self.items.any_of]


PrimitiveSchema: TypeAlias = (
    StringSchema
    | NumberSchema
    | BooleanSchema
    | UntitledSingleSelectEnumSchema
    | TitledSingleSelectEnumSchema
    | LegacyTitledEnumSchema
    | UntitledMultiSelectEnumSchema
    | TitledMultiSelectEnumSchema
)
"""The fields that a form may have: flat values only. Each has `choices` and `bounds`."""


@chooses(*get_args(PrimitiveSchema))
def _primitive(value: dict[str, Any]) -> Any:
    match value.get("type"):
        case "number" | "integer":
            return NumberSchema
        case "boolean":
            return BooleanSchema
        case "array":
            items = value.get("items")
            titled = isinstance(items, dict) and "anyOf" in items
            return TitledMultiSelectEnumSchema if titled else UntitledMultiSelectEnumSchema
        case "string" if "oneOf" in value:
            return TitledSingleSelectEnumSchema
        case "string" if "enum" in value:
            return LegacyTitledEnumSchema if "enumNames" in value else UntitledSingleSelectEnumSchema
        case "string":
            return StringSchema
    return None


@wire(since=V2025_06_18)
class FormSchema:
    """The fields of a form: flat values by name, some of them required."""

    properties: dict[str, PrimitiveSchema]
    required: list[str] | None = field(default=None)
    schema: str | None = field(default=None, since=V2025_11_25, name="$schema")
    type: Literal["object"] = field(default="object", required=True)


@wire(since=V2025_06_18)
class ElicitFormParams:
    """A question that is answered in the client. Its `mode` may be omitted."""

    message: str
    requested_schema: FormSchema
    mode: Literal["form"] | None = field(default=None, since=V2025_11_25)
    task: TaskMetadata | None = field(default=None, since=V2025_11_25, until=V2026_07_28)
    meta: Meta | None = field(default=None, until=V2026_07_28)


@wire(since=V2025_11_25)
class ElicitURLParams:
    """A question that is answered at a URL; the client displays the URL and never opens it without consent.

    `elicitation_id` is required in 2025-11-25 and removed since.
    """

    message: str
    url: str
    elicitation_id: str | None = field(default=None, required_from=V2025_11_25, until=V2026_07_28)
    task: TaskMetadata | None = field(default=None, until=V2026_07_28)
    meta: Meta | None = field(default=None, until=V2026_07_28)
    mode: Literal["url"] = field(default="url", required=True)


ElicitParams: TypeAlias = ElicitFormParams | ElicitURLParams
"""The argument of a client's elicitation handler: a form to fill in, or a URL for its user."""


@chooses(*get_args(ElicitParams))
def _mode(value: dict[str, Any]) -> Any:
    return {"form": ElicitFormParams, "url": ElicitURLParams}.get(value.get("mode", "form"))


ElicitAnswer: TypeAlias = str | int | float | bool | list[str]
"""One value of a filled-in form; a list is possible since 2025-11-25."""


@wire(since=V2025_06_18)
class ElicitResult:
    """The user's action, and what they filled in."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, ElicitAnswer] | None = field(default=None)
    meta: Meta | None = field(default=None, until=V2026_07_28)


@wire(since=V2026_07_28)
class ElicitRequest:
    """The question as part of an `InputRequiredResult`."""

    params: ElicitParams
    method: Literal["elicitation/create"] = field(default="elicitation/create", required=True)


@wire(since=V2025_11_25, until=V2026_07_28)
class ElicitationCompleteParams(Params):
    """Which question at a URL has been answered."""

    elicitation_id: str


@wire(since=V2025_11_25, until=V2026_07_28)
class URLElicitationRequiredData:
    """`error.data` of -32042: what the user must do before the request can succeed."""

    elicitations: list[ElicitURLParams]


InputRequest: TypeAlias = ElicitRequest | CreateMessageRequest | ListRootsRequest
InputResponse: TypeAlias = ElicitResult | CreateMessageResult | ListRootsResult


@chooses(*get_args(InputResponse))
def _response(value: dict[str, Any]) -> Any:
    if "action" in value:
        return ElicitResult
    if "roots" in value:
        return ListRootsResult
    return CreateMessageResult if "role" in value else None


@wire(since=V2026_07_28)
class InputRequiredResult:
    """Questions, by names that the server chose, and a state that the client returns unread with the answers."""

    input_requests: dict[str, InputRequest] | None = field(default=None)
    request_state: str | None = field(default=None)
    meta: Meta | None = field(default=None)
    result_type: str = field(default=RESULT_INPUT_REQUIRED, required=True)
