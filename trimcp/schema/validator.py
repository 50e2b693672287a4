"""Validation with JSON Schema: one prebuilt validator per schema, on both sides.

Nothing is ever fetched, and patterns of peers never run in a backtracking engine. It knows nothing of MCP: callers
decide what a schema is for, and which error a problem becomes.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

import jsonschema_rs

from trimcp.schema.bounds import NO_ALTERNATIVE, VISIT, SchemaError, Tamed, shorten, tame
from trimcp.schema.problems import path_text, texts

__all__ = ["Validator", "check_author_schema", "peer_validator"]

Schema = dict[str, Any] | bool
_PatternOptions = jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions

_MOST_PROBLEMS: Final = 10
# A step of the backtracking engine may scan the whole text, so few steps: 1,000 of them cost 0.2 s on 100 KB.
_BACKTRACK_LIMIT: Final = 1_000
_FREE_VISITS: Final = 50_000
_VISITS_PER_MEMBER: Final = 16
# Errors cost 20 µs each, and every pair of a subschema and a value may be one.
_MOST_EXPLAINED: Final = 5_000

_DIALECTS: Final = {
    "https://json-schema.org/draft/2020-12/schema": "Draft202012Validator",
    "https://json-schema.org/draft/2019-09/schema": "Draft201909Validator",
    "http://json-schema.org/draft-07/schema": "Draft7Validator",
    "http://json-schema.org/draft-06/schema": "Draft6Validator",
    "http://json-schema.org/draft-04/schema": "Draft4Validator",
}


class Validator:
    """A JSON Schema, compiled once; judging a small value takes about 0.3 µs.

    Formats (`date`, `uuid`, `uri`, ...) are asserted. Patterns run in a linear-time engine; if that cannot run one
    (look-around, back-references), a backtracking engine with a step limit is used, where a text that exceeds the limit
    does not match. Not for peers' schemas: see `peer_validator`.

    Values must be plain JSON values no deeper than `trimcp.wire.jsonrpc.parse` lets pass.

    Args:
        schema: a JSON Schema; without `$schema` it is 2020-12. It must not change afterwards.

    Raises:
        SchemaError: the schema is no valid schema, names a dialect we do not have, or refers to another document.
    """

    __slots__ = ("_budget", "_explainer", "_judge", "_patterns", "schema")

    def __init__(self, schema: Schema) -> None:
        _dialect(schema)
        self.schema: Schema = schema
        self._budget: _Budget | None = None
        self._explainer: _Explainer | None = None
        self._patterns: _PatternOptions = jsonschema_rs.RegexOptions()
        try:
            self._judge = _build(schema, self._patterns)
        except jsonschema_rs.ValidationError as error:
            if error.kind.name != "format":
                raise SchemaError(_schema_problem(error)) from None
            self._patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)
            self._judge = _build_or_refuse(schema, self._patterns)

    def is_valid(self, value: Any) -> bool:
        """Whether `value` satisfies the schema. Never raises for JSON values, lone surrogates and NaN included."""
        try:
            if self._budget is None:
                return self._judge.is_valid(value)
            return self._budget.judge(self._judge, value)
        except ValueError:  # a key that is no text, such as a lone surrogate
            return False

    def problems(self, value: Any) -> list[str]:
        """What is wrong with `value`, or an empty list.

        Each text names the place, as in `must be an integer, not a string @ $.days`. At most ten, each bounded in
        length and without values, so that a peer cannot make us repeat secrets or megabytes.
        """
        if self.is_valid(value):
            return []
        if self._budget is not None and self._budget.exhausted:
            return ["takes too much work to be checked against this schema @ $"]
        if self._explainer is None:
            self._explainer = _Explainer(self.schema, self._patterns)
        return self._explainer.problems(value) or ["does not match the schema @ $"]


class _Budget:
    """How many references may be followed to judge one value. Further ones fail at once."""

    __slots__ = ("keyword", "left")

    def __init__(self) -> None:
        self.left = 0
        self.keyword = _visit_keyword(self)

    @property
    def exhausted(self) -> bool:
        return self.left < 0

    def judge(self, engine: jsonschema_rs.Validator, value: Any) -> bool:
        self.left = _FREE_VISITS
        if engine.is_valid(value):
            return not self.exhausted  # a refused visit inside `not` passes
        if not self.exhausted:
            return False
        self.left = _FREE_VISITS + _VISITS_PER_MEMBER * _size(value)
        return engine.is_valid(value) and not self.exhausted


class _Never:
    """NO_ALTERNATIVE: fails, to mark the place."""

    def __init__(self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]) -> None: ...

    def validate(self, instance: Any) -> None:
        raise ValueError("matches no alternative")


def _visit_keyword(budget: _Budget) -> type[jsonschema_rs.KeywordValidator]:
    class Visit:
        def __init__(self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]) -> None: ...

        def validate(self, instance: Any) -> None:
            budget.left -= 1
            if budget.left < 0:
                raise ValueError("too much work")

    return Visit


class _Explainer:
    """Finds what is wrong with a value that was refused.

    The engine gathers all errors, those of alternatives of alternatives included, before it gives us the first: for a
    list of 200,000 wrong values that is 4 s and 300 MiB, for a recursive schema it is exponential. So it does that
    only where schema and value are small; otherwise it looks for the first error, in a copy that keeps no others.
    """

    __slots__ = ("_budget", "_patterns", "_rich", "_schema", "_subschemas", "_terse")

    def __init__(self, schema: Schema, patterns: _PatternOptions) -> None:
        self._schema = schema
        self._patterns = patterns
        self._budget = _Budget()
        self._terse: jsonschema_rs.Validator | None = None
        self._rich, self._subschemas = self._build(terse=False)

    def problems(self, value: Any) -> list[str]:
        """At most ten texts; none for a schema too entangled to be explained."""
        if self._rich is None:
            return []
        size = _size(value)
        found: list[str] = []
        try:
            if size * self._subschemas <= _MOST_EXPLAINED:
                self._budget.left = max(_MOST_EXPLAINED // self._subschemas, 50)
                for error in self._rich.iter_errors(value):
                    found += texts(error, value)
                    if len(found) >= _MOST_PROBLEMS:
                        break
            else:
                found = self._first_problem(value, size)
        except ValueError:
            found.append("holds text that is not Unicode @ $")
        return list(dict.fromkeys(found))[:_MOST_PROBLEMS]

    def _first_problem(self, value: Any, size: int) -> list[str]:
        if self._terse is None:
            self._terse, _ = self._build(terse=True)
        self._budget.left = _FREE_VISITS + _VISITS_PER_MEMBER * size
        try:
            if self._terse is not None:
                self._terse.validate(value)
        except jsonschema_rs.ValidationError as error:
            return texts(error, value)
        return []

    def _build(self, *, terse: bool) -> tuple[jsonschema_rs.Validator | None, int]:
        try:
            tamed = _tame(self._schema, max_depth=128, max_subschemas=50_000, terse=terse)
            return _build(tamed.schema, self._patterns, self._budget), tamed.subschemas
        except (SchemaError, jsonschema_rs.ValidationError):
            return None, 0


def check_author_schema(schema: Schema) -> None:
    """Check a schema written by a server's author, at registration, so that a mistake is found before the first call.

    Raises:
        SchemaError: what is wrong and where: not valid in its dialect, a dialect other than 2020-12, 2019-09 or
            drafts 7, 6 and 4, a pattern no engine accepts, or a `$ref` that leads out of the schema.
    """
    import jsonschema  # slow to import, and only registration needs it

    kind = getattr(jsonschema, _dialect(schema))
    try:
        # No format checker: it would judge patterns by Python's dialect of regular expressions.
        kind.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    except jsonschema.SchemaError as error:
        raise SchemaError(f"{shorten(error.message)} @ {path_text(error.absolute_path)}") from None
    Validator(schema)


def peer_validator(schema: Schema, *, max_depth: int = 64, max_subschemas: int = 5_000) -> Validator:
    """A validator for a schema that came from a peer, so it may be hostile.

    Besides never fetching, it bounds what a value can cost: references may not loop in place, and recursive schemas
    that could visit one value exponentially often get a limit on the depth of values. Patterns must suit the
    linear-time engine, so look-around and back-references are refused.

    Args:
        schema: what the peer sent.
        max_depth: how deep the schema itself may be nested.
        max_subschemas: how many subschemas it may have.

    Raises:
        SchemaError: the schema is not valid, too large, too entangled, or needs what we refuse.
    """
    budget = _Budget()
    validator = Validator.__new__(Validator)
    validator.schema = schema
    validator._budget = budget
    validator._explainer = None
    validator._patterns = patterns = jsonschema_rs.RegexOptions()
    tamed = _tame(schema, max_depth=max_depth, max_subschemas=max_subschemas)
    validator._judge = _build_or_refuse(tamed.schema, patterns, budget)
    return validator


def _tame(schema: Schema, *, max_depth: int, max_subschemas: int, terse: bool = False) -> Tamed:
    dialect = _dialect(schema)
    if dialect == "Draft4Validator":
        raise SchemaError("draft-04 has no `if`, which bounding references needs; use 2020-12")
    if dialect == "Draft6Validator" and isinstance(schema, dict):  # draft-07 is draft-06 and `if`
        schema = {**schema, "$schema": "http://json-schema.org/draft-07/schema#"}
    return tame(
        schema,
        old_references=dialect in ("Draft6Validator", "Draft7Validator"),
        max_depth=max_depth,
        max_subschemas=max_subschemas,
        terse=terse,
    )


def _dialect(schema: Schema) -> str:
    """The class name of the schema's dialect in `jsonschema`; raises SchemaError for one we do not have."""
    if isinstance(schema, bool):
        return "Draft202012Validator"
    if not isinstance(schema, dict):
        raise SchemaError(f"a schema must be an object or a boolean, not {type(schema).__name__}")
    named = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    dialect = _DIALECTS.get(named.rstrip("#")) if isinstance(named, str) else None
    if dialect is None:
        raise SchemaError(
            f"the dialect {shorten(repr(named))} is not supported; use https://json-schema.org/draft/2020-12/schema"
            " (2019-09 and drafts 7, 6 and 4 work too)"
        )
    return dialect


def _refuse_to_fetch(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is outside this schema, and schemas are never fetched")


def _build(schema: Schema, patterns: _PatternOptions, budget: _Budget | None = None) -> jsonschema_rs.Validator:
    """The engine's validator. Anything but a ValidationError of the engine becomes a SchemaError."""
    try:
        return jsonschema_rs.validator_for(
            schema,
            validate_formats=True,
            retriever=_refuse_to_fetch,
            pattern_options=patterns,
            mask="value",
            keywords=None if budget is None else {VISIT: budget.keyword, NO_ALTERNATIVE: _Never},
        )
    except jsonschema_rs.ValidationError:
        raise
    except ValueError as error:
        raise SchemaError(shorten(str(error))) from None


def _build_or_refuse(
    schema: Schema, patterns: _PatternOptions, budget: _Budget | None = None
) -> jsonschema_rs.Validator:
    try:
        return _build(schema, patterns, budget)
    except jsonschema_rs.ValidationError as error:
        raise SchemaError(_schema_problem(error)) from None


def _schema_problem(error: jsonschema_rs.ValidationError) -> str:
    """One line on why the engine refused a schema."""
    if error.kind.name == "format":
        return f"has a pattern that the linear-time engine cannot run @ {path_text(error.instance_path)}"
    first_line = error.message.partition("\n")[0]
    return f"{shorten(first_line)} @ {path_text(error.instance_path)}"


def _size(value: Any) -> int:
    """How large a value is: its members, where long texts count as many. No recursion of our own."""
    total = 0
    level = [value]
    while level:
        total += len(level) + sum(len(each) >> 6 for each in level if isinstance(each, str))
        containers = (each for each in level if isinstance(each, (dict, list)))
        level = [child for each in containers for child in (each.values() if isinstance(each, dict) else each)]
    return total
