"""Validation with JSON Schema, for servers and clients.

It does not depend on MCP: callers decide which error a problem becomes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

# The engine is imported when the first schema is compiled, which keeps a server's start fast.
if TYPE_CHECKING:
    from trimcp.schema.engine import CompiledSchema, Schema

_WORDS: Final = frozenset({"type", "title", "description", "default", "enum", "const", "required", "format"})


class Problems(ValueError):
    """Why a value cannot be converted, as (path, text) for each place, without the value."""

    def __init__(self, found: list[tuple[tuple[str | int, ...], str]]) -> None:
        super().__init__("; ".join(text for _, text in found))
        self.found = found


class Validator:
    """A JSON Schema, compiled once; validating a small value takes about 0.3 µs.

    Formats (`date`, `uuid`, `uri`, ...) are asserted. Patterns run in a linear-time engine. If it cannot run one
    (look-around, back-references), a backtracking engine with a step limit is used; a text that exceeds the limit does
    not match. Not for peers' schemas: see `peer_validator`.

    Values must be plain JSON values no deeper than `trimcp.wire.jsonrpc.parse` lets pass. The schema, which without
    `$schema` is 2020-12, must not be modified afterwards; one that is known to be valid can be compiled `late`, with
    the first value. Raises SchemaError: it is not valid, names an unsupported dialect, or refers to another document.
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

    @property
    def memory(self) -> int:
        """About how many bytes the compiled schema of a peer takes, at most; 0 for any other."""
        return 0 if self._compiled is None else self._compiled.memory

    def is_valid(self, value: Any) -> bool:
        """Return whether a value satisfies the schema. Never raises for JSON values, not for NaN or lone surrogates."""
        compiled = self._compiled or self._compile()
        try:
            return compiled.is_valid(value)
        except ValueError:  # a key that is not Unicode, such as a lone surrogate
            return False

    def problems(self, value: Any) -> list[str]:
        """Return the errors of a value as texts; empty if it is valid.

        Each text names the place, as in `must be an integer, not a string @ $.days`. At most ten, each of bounded
        length and without values, so that no secrets or megabytes of a peer are repeated.
        """
        if self.is_valid(value):
            return []
        assert self._compiled is not None
        return self._compiled.problems(value)


def validator_for(schema: dict[str, Any]) -> Validator:
    """Return a validator for a schema that was derived from types or checked; compiled late if it has no bounds.

    Raises SchemaError for bounds or patterns that are not valid.
    """
    return Validator(schema, late=_is_plain(schema))


def _is_plain(schema: Any) -> bool:
    """Return whether a schema has only types and texts, which the engine always accepts."""
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


_KINDS: Final = {bool: ("boolean", "integer", "number"), str: ("string",), list: ("array",), dict: ("object",)}


class Fitter:
    """Puts in a JSON value what its schema wants in place of two that are such in Python alone.

    A bool is an int there, and a datetime is a date.
    """

    def __init__(self, root: Schema) -> None:
        self._shared = {"$defs": root["$defs"]} if isinstance(root, dict) and "$defs" in root else {}
        self._validators: dict[int, Validator] = {}

    def fit(self, value: Any, schema: Any) -> Any:
        """Return the value, changed only where it fits no alternative as it is."""
        kinds = _KINDS.get(type(value), ())
        fitting = [each for each in self._alternatives(schema) if each.get("type") in kinds]
        if len(fitting) == 1:
            return self._changed(value, fitting[0])
        if any(self._fits(each, value) for each in fitting):
            return value
        changed = ((each, self._changed(value, each)) for each in fitting)
        return next((each for alternative, each in changed if self._fits(alternative, each)), value)

    def _alternatives(self, schema: Any) -> list[dict[str, Any]]:
        if not isinstance(schema, dict):
            return []
        if "$ref" in schema:
            named = str(schema["$ref"]).removeprefix("#/$defs/")
            return self._alternatives(self._shared.get("$defs", {}).get(named))
        return [one for each in schema["anyOf"] for one in self._alternatives(each)] if "anyOf" in schema else [schema]

    def _fits(self, schema: dict[str, Any], value: Any) -> bool:
        validator = self._validators.get(id(schema))
        if validator is None:
            validator = self._validators[id(schema)] = validator_for({**schema, **self._shared})
        return validator.is_valid(value)

    def _changed(self, value: Any, schema: dict[str, Any]) -> Any:
        if type(value) is bool:
            return value if schema["type"] == "boolean" else int(value)
        if type(value) is str:
            return value.partition("T")[0] if schema.get("format") == "date" else value
        if type(value) is list:
            first, rest = schema.get("prefixItems", ()), schema.get("items")
            of = [*first, *[rest] * (len(value) - len(first))]
            return [self.fit(each, inner) for each, inner in zip(value, of, strict=False)]
        named, others = schema.get("properties", {}), schema.get("additionalProperties")
        return {name: self.fit(each, named.get(name, others)) for name, each in value.items()}


def check_author_schema(schema: Schema) -> Validator:
    """Return a validator for a schema of a server's author, so that a mistake is found before the first call.

    Raises SchemaError: the schema is not valid in its dialect, its dialect is not 2020-12, 2019-09 or draft 7, 6 or 4,
    no engine accepts a pattern, or a `$ref` refers to another document. The text names the place.
    """
    from trimcp.schema.engine import SchemaError, dialect_of

    try:
        return Validator(schema)
    except SchemaError:
        kind = dialect_of(schema)
        import jsonschema  # slow to import, and says best what is wrong

        from trimcp.schema.problems import path_text, shorten

        try:
            # No format checker: it would check patterns by Python's syntax of regular expressions.
            getattr(jsonschema, kind).check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
        except jsonschema.SchemaError as error:
            raise SchemaError(f"{shorten(error.message)} @ {path_text(error.absolute_path)}") from None
        raise


def peer_validator(schema: Schema) -> Validator:
    """Return a validator for the schema of an untrusted peer.

    Its formats only describe: many peers promise a `date-time` and send one without a zone.
    It never fetches a schema, and the cost of a value is bounded: references may not loop in place, and only a bounded
    number of them is followed for one value. A value that is large for a large schema, so that checking it could take
    seconds, is not valid. Patterns must suit the linear-time engine, so look-around and back-references are refused,
    and their memory is bounded. Raises SchemaError: the schema is not valid, is too large, has too long chains of
    references, has patterns that take too much memory, or needs a refused feature.
    """
    from trimcp.schema.engine import compile_bounded

    validator = Validator(schema, late=True)
    validator._compiled = compile_bounded(schema)
    return validator
