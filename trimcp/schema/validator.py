"""Validation with JSON Schema: one validator per schema, on both sides.

It knows nothing of MCP: callers decide what a schema is for, and which error a problem becomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

# A server starts without the engine: it is loaded with the first schema that is compiled.
if TYPE_CHECKING:
    from trimcp.schema.engine import CompiledSchema, Schema

_WORDS: Final = frozenset({"type", "title", "description", "default", "enum", "const", "required", "format"})


class Validator:
    """A JSON Schema, compiled once; judging a small value takes about 0.3 µs.

    Formats (`date`, `uuid`, `uri`, ...) are asserted. Patterns run in a linear-time engine; if that cannot run one
    (look-around, back-references), a backtracking engine with a step limit is used, where a text that exceeds the limit
    does not match. Not for peers' schemas: see `peer_validator`.

    Values must be plain JSON values no deeper than `trimcp.wire.jsonrpc.parse` lets pass.

    Args:
        schema: a JSON Schema; without `$schema` it is 2020-12. It must not change afterwards.
        late: compile it with the first value, for a schema that is known to be valid.

    Raises:
        SchemaError: the schema is no valid schema, names a dialect we do not have, or refers to another document.
    """

    __slots__ = ("_compiled", "schema")

    def __init__(self, schema: Schema, *, late: bool = False) -> None:
        self.schema: Schema = schema
        self._compiled: CompiledSchema | None = None
        if not late:
            self._compile()

    def _compile(self) -> CompiledSchema:
        from trimcp.schema.engine import compile_schema

        compiled = self._compiled = compile_schema(self.schema)
        return compiled

    def is_valid(self, value: Any) -> bool:
        """Return whether a value satisfies the schema. Never raises for JSON values, NaN and lone surrogates too."""
        compiled = self._compiled or self._compile()
        try:
            return compiled.is_valid(value)
        except ValueError:  # a key that is no text, such as a lone surrogate
            return False

    def problems(self, value: Any) -> list[str]:
        """Return what is wrong with a value; nothing if it is valid.

        Each text names the place, as in `must be an integer, not a string @ $.days`. At most ten, each bounded in
        length and without values, so that a peer cannot make us repeat secrets or megabytes.
        """
        if self.is_valid(value):
            return []
        assert self._compiled is not None
        return self._compiled.problems(value)


def validator_for(schema: dict[str, Any]) -> Validator:
    """Return a validator for a schema that was derived from types or checked; a late one where it has no bounds.

    Raises SchemaError for bounds or patterns that are not valid.
    """
    return Validator(schema, late=_is_plain(schema))


def _is_plain(schema: Any) -> bool:
    """Return whether a schema holds only types and texts, so that the engine accepts it."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    for keyword, content in schema.items():
        if keyword in ("items", "additionalProperties"):
            plain = _is_plain(content)
        elif keyword == "properties":
            plain = all(map(_is_plain, content.values()))
        elif keyword == "anyOf":
            plain = all(map(_is_plain, content))
        else:
            plain = keyword in _WORDS
        if not plain:
            return False
    return True


def check_author_schema(schema: Schema) -> None:
    """Check a schema written by a server's author, at registration, so that a mistake is found before the first call.

    Raises:
        SchemaError: what is wrong and where: not valid in its dialect, a dialect other than 2020-12, 2019-09 or
            drafts 7, 6 and 4, a pattern no engine accepts, or a `$ref` that leads out of the schema.
    """
    import jsonschema  # slow to import, and only registration needs it

    from trimcp.schema.engine import SchemaError, dialect_of
    from trimcp.schema.problems import path_text, shorten

    kind = getattr(jsonschema, dialect_of(schema))
    try:
        # No format checker: it would judge patterns by Python's dialect of regular expressions.
        kind.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    except jsonschema.SchemaError as error:
        raise SchemaError(f"{shorten(error.message)} @ {path_text(error.absolute_path)}") from None
    Validator(schema)


def peer_validator(schema: Schema) -> Validator:
    """Return a validator for a schema that came from a peer, so it may be hostile.

    Besides never fetching, it bounds what a value can cost: references may not loop in place, and recursive schemas
    that could visit one value exponentially often get a limit on the depth of values. Patterns must suit the
    linear-time engine, so look-around and back-references are refused.

    Raises:
        SchemaError: the schema is not valid, too large, too entangled, or needs what we refuse.
    """
    from trimcp.schema.engine import compile_bounded

    validator = Validator(schema, late=True)
    validator._compiled = compile_bounded(schema)
    return validator
