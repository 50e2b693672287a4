"""Validators that are built with their first value, so that a server starts without loading the schema engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from trimcp.schema.validator import Validator

__all__ = ["Judge", "LateValidator", "validator_for"]

_WORDS: Final = frozenset({"type", "title", "description", "default", "enum", "const", "required", "format"})
_ONE: Final = frozenset({"items", "additionalProperties"})


class Judge(Protocol):
    """What a `Validator` and a `LateValidator` can both do."""

    def is_valid(self, value: Any, /) -> bool:
        """As `Validator.is_valid`."""
        ...

    def problems(self, value: Any, /) -> list[str]:
        """As `Validator.problems`."""
        ...


def validator_for(schema: dict[str, Any]) -> Judge:
    """Return a validator for a schema that was derived from types, or checked already; a late one for plain schemas.

    Raises:
        SchemaError: an author's bounds or patterns are not valid.
    """
    if _is_plain(schema):
        return LateValidator(schema)
    from trimcp.schema.validator import Validator

    return Validator(schema)


def _is_plain(schema: Any) -> bool:
    """Whether it holds only types and texts, so that the engine accepts it."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    for keyword, said in schema.items():
        if keyword in _ONE:
            plain = _is_plain(said)
        elif keyword == "properties":
            plain = all(map(_is_plain, said.values()))
        elif keyword == "anyOf":
            plain = all(map(_is_plain, said))
        else:
            plain = keyword in _WORDS
        if not plain:
            return False
    return True


class LateValidator:
    """A `Validator` that is built with the first value it judges.

    Attributes:
        schema: the JSON Schema. It must not change.
    """

    __slots__ = ("_validator", "schema")

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema: dict[str, Any] = schema
        self._validator: Validator | None = None

    def is_valid(self, value: Any, /) -> bool:
        """As `Validator.is_valid`."""
        return (self._validator or self._build()).is_valid(value)

    def problems(self, value: Any, /) -> list[str]:
        """As `Validator.problems`."""
        return (self._validator or self._build()).problems(value)

    def _build(self) -> Validator:
        from trimcp.schema.validator import Validator

        made = self._validator = Validator(self.schema)
        return made
