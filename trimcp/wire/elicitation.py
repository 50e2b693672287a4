"""Elicitation: a server asks its client's user, with a form or by a URL (client/elicitation).

A request of its own until 2025-11-25; since 2026-07-28 one of the questions in `InputRequiredResult`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from trimcp.wire.common import Meta, Params
from trimcp.wire.fields import ABSENT, Absent, chooses, field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28
from trimcp.wire.tasks import TaskMetadata

__all__ = [
    "BooleanSchema",
    "Bounds",
    "Choice",
    "ElicitAnswer",
    "ElicitFormParams",
    "ElicitParams",
    "ElicitRequest",
    "ElicitResult",
    "ElicitURLParams",
    "ElicitationCompleteParams",
    "EnumOption",
    "FormSchema",
    "LegacyTitledEnumSchema",
    "NumberSchema",
    "PrimitiveSchema",
    "StringSchema",
    "TitledItems",
    "TitledMultiSelectEnumSchema",
    "TitledSingleSelectEnumSchema",
    "URLElicitationRequiredData",
    "UntitledItems",
    "UntitledMultiSelectEnumSchema",
    "UntitledSingleSelectEnumSchema",
]


class Choice(NamedTuple):
    """A value that a field chooses from, and the name a person sees: its title, or the value itself."""

    value: str
    title: str


class Bounds(NamedTuple):
    """The least and the most of a field, both allowed; None where there is no such bound.

    They count characters of a text and items of a selection; a number's are its own.
    """

    least: float | None = None
    most: float | None = None


# Every kind of field has these two, so that who shows a form, or asks with one, need not know which kind it is.


def _bounds(least: float | Absent, most: float | Absent) -> Bounds:
    return Bounds(None if isinstance(least, Absent) else least, None if isinstance(most, Absent) else most)


def _untitled(values: list[str]) -> list[Choice]:
    return [Choice(value, value) for value in values]


def _titled(options: list[EnumOption]) -> list[Choice]:
    return [Choice(option.const, option.title) for option in options]


@wire(since=V2025_06_18)
class StringSchema:
    """A line of text, perhaps of a known format."""

    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    min_length: int | Absent = field(default=ABSENT)
    max_length: int | Absent = field(default=ABSENT)
    format: Literal["email", "uri", "date", "date-time"] | Absent = field(default=ABSENT)
    default: str | Absent = field(default=ABSENT, since=V2025_11_25)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        """None: the field is free."""
        return []

    @property
    def bounds(self) -> Bounds:
        """How many characters it may have."""
        return _bounds(self.min_length, self.max_length)


@wire(since=V2025_06_18)
class NumberSchema:
    """A number, or a whole one."""

    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    minimum: float | Absent = field(default=ABSENT)
    maximum: float | Absent = field(default=ABSENT)
    default: float | Absent = field(default=ABSENT, since=V2025_11_25)
    type: Literal["number", "integer"] = field(default="number", required=True)

    @property
    def choices(self) -> list[Choice]:
        """None: the field is free."""
        return []

    @property
    def bounds(self) -> Bounds:
        """The number's own."""
        return _bounds(self.minimum, self.maximum)


@wire(since=V2025_06_18)
class BooleanSchema:
    """Yes or no."""

    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    default: bool | Absent = field(default=ABSENT)
    type: Literal["boolean"] = field(default="boolean", required=True)

    @property
    def choices(self) -> list[Choice]:
        """None: the field is free."""
        return []

    @property
    def bounds(self) -> Bounds:
        """None."""
        return Bounds()


@wire(since=V2025_06_18)
class UntitledSingleSelectEnumSchema:
    """One of some values."""

    enum: list[str]
    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    default: str | Absent = field(default=ABSENT, since=V2025_11_25)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen from."""
        return _untitled(self.enum)

    @property
    def bounds(self) -> Bounds:
        """None."""
        return Bounds()


@wire(since=V2025_06_18)
class LegacyTitledEnumSchema:
    """One of some values, with names beside them: the older spelling, and the only one of 2025-06-18."""

    enum: list[str]
    enum_names: list[str] | Absent = field(default=ABSENT)
    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    default: str | Absent = field(default=ABSENT, since=V2025_11_25)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen from; a value without a name beside it is its own."""
        names = self.enum_names or []
        return [Choice(value, names[at] if at < len(names) else value) for at, value in enumerate(self.enum)]

    @property
    def bounds(self) -> Bounds:
        """None."""
        return Bounds()


@wire(since=V2025_11_25)
class EnumOption:
    """A value and the name a person sees."""

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
class TitledSingleSelectEnumSchema:
    """One of some values, each with its name. An older peer gets the older spelling."""

    one_of: list[EnumOption]
    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    default: str | Absent = field(default=ABSENT)
    type: Literal["string"] = field(default="string", required=True)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen from."""
        return _titled(self.one_of)

    @property
    def bounds(self) -> Bounds:
        """None."""
        return Bounds()


@wire(since=V2025_11_25)
class UntitledItems:
    """What a selection is made from."""

    enum: list[str]
    type: Literal["string"] = field(default="string", required=True)


@wire(since=V2025_11_25)
class TitledItems:
    """What a selection is made from, each value with its name."""

    any_of: list[EnumOption]


@wire(since=V2025_11_25)
class UntitledMultiSelectEnumSchema:
    """Several of some values."""

    items: UntitledItems
    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    min_items: int | Absent = field(default=ABSENT)
    max_items: int | Absent = field(default=ABSENT)
    default: list[str] | Absent = field(default=ABSENT)
    type: Literal["array"] = field(default="array", required=True)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen from."""
        return _untitled(self.items.enum)

    @property
    def bounds(self) -> Bounds:
        """How many may be chosen."""
        return _bounds(self.min_items, self.max_items)


@wire(since=V2025_11_25)
class TitledMultiSelectEnumSchema:
    """Several of some values, each with its name."""

    items: TitledItems
    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    min_items: int | Absent = field(default=ABSENT)
    max_items: int | Absent = field(default=ABSENT)
    default: list[str] | Absent = field(default=ABSENT)
    type: Literal["array"] = field(default="array", required=True)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen from."""
        return _titled(self.items.any_of)

    @property
    def bounds(self) -> Bounds:
        """How many may be chosen."""
        return _bounds(self.min_items, self.max_items)


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
"""What a form may ask for: flat values only. Each tells its `choices` and its `bounds`."""


@chooses(
    StringSchema,
    NumberSchema,
    BooleanSchema,
    UntitledSingleSelectEnumSchema,
    TitledSingleSelectEnumSchema,
    LegacyTitledEnumSchema,
    UntitledMultiSelectEnumSchema,
    TitledMultiSelectEnumSchema,
)
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
    """What a form asks: named flat values, some of them required."""

    properties: dict[str, PrimitiveSchema]
    required: list[str] | Absent = field(default=ABSENT)
    schema: str | Absent = field(default=ABSENT, since=V2025_11_25, name="$schema")
    type: Literal["object"] = field(default="object", required=True)


@wire(since=V2025_06_18)
class ElicitFormParams:
    """A question answered in the client. Its `mode` may be left unsaid."""

    message: str
    requested_schema: FormSchema
    mode: Literal["form"] | Absent = field(default=ABSENT, since=V2025_11_25)
    task: TaskMetadata | Absent = field(default=ABSENT, since=V2025_11_25, until=V2026_07_28)
    meta: Meta | Absent = field(default=ABSENT, until=V2026_07_28)


@wire(since=V2025_11_25)
class ElicitURLParams:
    """A question answered elsewhere; the client shows the address and never opens it unasked.

    `elicitation_id` is required in 2025-11-25 and gone since.
    """

    message: str
    url: str
    elicitation_id: str | Absent = field(default=ABSENT, required_from=V2025_11_25, until=V2026_07_28)
    task: TaskMetadata | Absent = field(default=ABSENT, until=V2026_07_28)
    meta: Meta | Absent = field(default=ABSENT, until=V2026_07_28)
    mode: Literal["url"] = field(default="url", required=True)


ElicitParams: TypeAlias = ElicitFormParams | ElicitURLParams
"""What a client's elicitation handler is asked: to fill in a form, or to send its user to a URL."""


@chooses(ElicitFormParams, ElicitURLParams)
def _mode(value: dict[str, Any]) -> Any:
    return {"form": ElicitFormParams, "url": ElicitURLParams}.get(value.get("mode", "form"))


ElicitAnswer: TypeAlias = str | int | float | bool | list[str]
"""One value of a filled-in form; a list is possible since 2025-11-25."""


@wire(since=V2025_06_18)
class ElicitResult:
    """What the user did, and what they filled in."""

    action: Literal["accept", "decline", "cancel"]
    content: dict[str, ElicitAnswer] | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, until=V2026_07_28)


@wire(since=V2026_07_28)
class ElicitRequest:
    """The question as it stands inside an `InputRequiredResult`."""

    params: ElicitParams
    method: Literal["elicitation/create"] = field(default="elicitation/create", required=True)


@wire(since=V2025_11_25, until=V2026_07_28)
class ElicitationCompleteParams(Params):
    """Which question answered elsewhere is settled."""

    elicitation_id: str


@wire(since=V2025_11_25, until=V2026_07_28)
class URLElicitationRequiredData:
    """`error.data` of -32042: what the user must do before the request can succeed."""

    elicitations: list[ElicitURLParams]
