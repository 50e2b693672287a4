"""The JSON Schema engine, and the bounds on the work that a hostile schema or value can cause.

No schema is ever fetched, and patterns of peers never run in a backtracking engine. How long a value may take is known
before it is judged (`schema.work`). References allow two attacks more: paths that multiply with every level, and chains
long enough to exhaust the stack. So the length of chains is bounded; and where a value might take too much, each
followed reference is counted, since most of them may not be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias
from urllib.parse import unquote

import attrs
import jsonschema_rs

from trimcp.schema import work
from trimcp.schema.problems import NO_ALTERNATIVE, VISIT, path_text, shorten, size_of, texts
from trimcp.wire.subschemas import subschemas

Schema: TypeAlias = dict[str, Any] | bool
_PatternOptions: TypeAlias = jsonschema_rs.RegexOptions | jsonschema_rs.FancyRegexOptions

_MOST_PROBLEMS: Final = 10
# Small, because one step of the backtracking engine may scan the whole text: 1,000 steps cost 0.2 s on 100 KB.
_BACKTRACK_LIMIT: Final = 1_000
_FREE_VISITS: Final = 20_000
_FEW: Final = 100  # members of a value that is explained whatever its schema
_VISITS_PER_MEMBER: Final = 16  # where an author's schema explains
# Compiled, a pattern of twelve characters may take 10 MB. The least of these bounds that fits all patterns is used, and
# limits their number.
_PATTERN_BYTES: Final = (16 * 1024, 128 * 1024, 2 * 1024 * 1024)
_MOST_PATTERN_BYTES: Final = 8 * 1024 * 1024
_MATCHER_BYTES: Final = 64 * 1024  # what matching with one pattern keeps
# Measured, of the three forms that a schema is compiled to: one to judge, two to explain.
_MEMBER_BYTES: Final = 700
_REFERENCE_BYTES: Final = 8_000
# An error costs 20 µs, and every pair of a subschema and a value may be an error.
_MOST_EXPLAINED: Final = 5_000
# Members, arrays and objects counted twice, members with a name three times: an error holds a copy of what it is about,
# which may be the whole value.
_MOST_COPIED: Final = 250_000

_DIALECTS: Final = {
    "https://json-schema.org/draft/2020-12/schema": "Draft202012Validator",
    "https://json-schema.org/draft/2019-09/schema": "Draft201909Validator",
    "http://json-schema.org/draft-07/schema": "Draft7Validator",
    "http://json-schema.org/draft-06/schema": "Draft6Validator",
    "http://json-schema.org/draft-04/schema": "Draft4Validator",
}

# The engine recurses through a chain once per level of the value: on a stack of 8 MiB, 100 links at 128 levels fit,
# 200 do not.
_LONGEST_CHAIN: Final = 32
_MOST_UNEVALUATED: Final = 6

# Subschemas under these keywords apply to the same value as their parent schema.
_IN_PLACE: Final = frozenset(
    {"allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
)
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
# The only keywords that old dialects do not ignore beside a `$ref`.
_BESIDE_OLD_REF: Final = frozenset({"$schema", "$id", "id", "$defs", "definitions"})


class SchemaBounds(NamedTuple):
    """How large a schema may be."""

    depth: int  # of subschemas
    subschemas: int
    references: int
    members: int  # of everything in it
    characters: int  # of its patterns and references, which take long to read


PEERS: Final = SchemaBounds(64, 5_000, 2_000, 40_000, 128 * 1024)
_AUTHORS: Final = SchemaBounds(128, 50_000, 50_000, 1_000_000, 16 * 1024 * 1024)


class SchemaError(ValueError):
    """A JSON Schema cannot be used. The text has the reason and the place, in one line of bounded length."""


class _UnfitPattern(SchemaError):
    """The chosen pattern engine cannot run one of the patterns."""


@attrs.define(eq=False, slots=False)
class CompiledSchema:
    """A schema compiled for the engine."""

    _schema: Schema
    _patterns: _PatternOptions
    is_valid: Callable[[Any], bool]  # raises ValueError for text that is not Unicode
    _budget: _WorkLimit | None = None  # counts the references that `is_valid` follows; None if it does not count
    memory: int = 0  # about how many bytes its compiled forms take, at most; 0 if that is not known
    _explaining: _WorkLimit = attrs.field(init=False, factory=lambda: _WorkLimit())

    def problems(self, value: Any) -> list[str]:
        """Return at most ten texts that explain why `is_valid` refused this value; it must be the last one refused.

        The engine collects all errors, also of nested alternatives, before it returns the first. For a list of 200,000
        wrong values that takes 4 s and 300 MiB, for a recursive schema it is exponential. So all errors are collected
        only if schema and value are small. Otherwise only the first is looked for, in a copy that keeps no others.
        """
        if self._budget is not None and self._budget.exhausted:
            return ["takes too much work to be checked against this schema @ $"]
        if self._budget is not None and self._budget.counted:
            return ["does not match the schema @ $"]
        found: list[str] = []
        size, copied = size_of(value, _MOST_COPIED)
        if copied > _MOST_COPIED:
            return ["does not match the schema @ $"]
        try:
            if self._tamed is not None and size * self._tamed.errors <= _MOST_EXPLAINED:
                self._explaining.left = max(_MOST_EXPLAINED // self._tamed.errors, 50)
                for error in () if self._rich is None else self._rich.iter_errors(value):
                    found += texts(error, value)
                    if len(found) >= _MOST_PROBLEMS:
                        break
            elif self._terse is not None:
                self._explaining.left = _FREE_VISITS + _VISITS_PER_MEMBER * size
                self._terse.validate(value)
        except jsonschema_rs.ValidationError as error:
            found = texts(error, value)
        except ValueError:
            found.append("holds text that is not Unicode @ $")
        return list(dict.fromkeys(found))[:_MOST_PROBLEMS] or ["does not match the schema @ $"]

    @cached_property
    def _tamed(self) -> Tamed | None:
        with suppress(SchemaError):
            return tame(self._schema, _AUTHORS) if self._budget is None else self._budget.tamed
        return None

    @cached_property
    def _rich(self) -> jsonschema_rs.Validator | None:
        return None if self._tamed is None else self._explainer(self._tamed)

    @cached_property
    def _terse(self) -> jsonschema_rs.Validator | None:
        # What was judged without counting is explained so, too: it is known not to take long.
        with suppress(SchemaError):
            return self._explainer(tame(self._schema, _AUTHORS, terse=True, counting=self._budget is None))
        return None

    def _explainer(self, tamed: Tamed) -> jsonschema_rs.Validator | None:
        with suppress(SchemaError):
            return _build(tamed.schema, self._patterns, self._explaining, formats=self._budget is None)
        return None


def compile_schema(schema: Schema) -> CompiledSchema:
    """Compile an author's schema. If the linear-time engine cannot run a pattern, one with a step limit is used.

    Raises SchemaError if it is not valid, names an unsupported dialect, or refers to another document.
    """
    dialect_of(schema)
    patterns: _PatternOptions = jsonschema_rs.RegexOptions()
    try:
        engine = _build(schema, patterns)
    except _UnfitPattern:
        patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACK_LIMIT)
        engine = _build(schema, patterns)
    return CompiledSchema(schema, patterns, engine.is_valid)


def compile_bounded(schema: Schema) -> CompiledSchema:
    """Compile a peer's schema with bounds on the cost of a value. See `validator.peer_validator`."""
    tamed = tame(schema, PEERS)
    budget = _WorkLimit(schema, tamed)
    engine, patterns, taken = _build_small(schema, tamed)
    budget.counting = partial(_build, tamed.schema, patterns, budget, formats=False)
    memory = _MEMBER_BYTES * _measure(schema)[0] + _REFERENCE_BYTES * tamed.references + taken
    return CompiledSchema(schema, patterns, lambda value: budget.judge(engine, value), budget, memory)


def _build_small(schema: Schema, tamed: Tamed) -> tuple[jsonschema_rs.Validator, _PatternOptions, int]:
    """Build a peer's schema; also return the options that bound the memory of its patterns, and that bound."""
    if not tamed.patterns:
        options = jsonschema_rs.RegexOptions()
        return _build(schema, options, formats=False), options, 0
    for size in _PATTERN_BYTES:
        if size * tamed.patterns > _MOST_PATTERN_BYTES:
            raise SchemaError(f"its {tamed.patterns} patterns take too much memory")
        options = jsonschema_rs.RegexOptions(size_limit=size, dfa_size_limit=_MATCHER_BYTES)
        try:
            return _build(schema, options, formats=False), options, size * tamed.patterns
        except _UnfitPattern:
            if size == _PATTERN_BYTES[-1]:
                raise
    raise AssertionError("the last size raises")


def dialect_of(schema: Schema) -> str:
    """Return the class name of the schema's dialect in `jsonschema`. Raises SchemaError for an unsupported one."""
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


def _build(
    schema: Schema, patterns: _PatternOptions, budget: _WorkLimit | None = None, *, formats: bool = True
) -> jsonschema_rs.Validator:
    """Return an engine. Without `formats` they only describe, JSON Schema's default (2020-12 Validation, 7.2.1)."""
    try:
        return jsonschema_rs.validator_for(
            schema,
            validate_formats=formats,
            retriever=_refuse_to_fetch,
            pattern_options=patterns,
            mask="value",
            keywords=None if budget is None else {VISIT: budget.keyword},
        )
    except jsonschema_rs.ValidationError as error:
        place = path_text(error.instance_path)
        if error.kind.name == "format":
            raise _UnfitPattern(f"has a pattern that the linear-time engine cannot run @ {place}") from None
        first_line = error.message.partition("\n")[0]
        raise SchemaError(f"{shorten(first_line)} @ {place}") from None
    except ValueError as error:
        raise SchemaError(shorten(str(error))) from None


def _refuse_to_fetch(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is outside this schema, and schemas are never fetched")


def _keyword(check: Callable[[Any], None]) -> type[jsonschema_rs.KeywordValidator]:
    """Return a keyword for the engine that fails if `check` raises ValueError."""

    class Keyword:
        def __init__(self, parent_schema: dict[str, Any], value: Any, schema_path: list[str | int]) -> None: ...

        def validate(self, instance: Any) -> None:
            check(instance)

    return Keyword


@attrs.define(eq=False)
class _WorkLimit:
    """How much work one value may take. More fails at once.

    Where a value might take too much and the schema has references, an engine is asked that counts the references it
    follows: each is weighed, and most may not be followed.
    """

    _schema: Schema | None = None  # a peer's, or None where references are only counted
    tamed: Tamed | None = None  # the same, made safe
    keyword: type[jsonschema_rs.KeywordValidator] = attrs.field(init=False)
    counting: Callable[[], jsonschema_rs.Validator] | None = attrs.field(init=False, default=None)
    counted: bool = attrs.field(init=False, default=False)  # whether the last value was judged by counting
    left: int = attrs.field(init=False, default=0)
    _engine: jsonschema_rs.Validator | None = attrs.field(init=False, default=None)
    _worst: tuple[int, int] = attrs.field(init=False, default=(0, 0))
    _work: float = attrs.field(init=False, default=0.0)  # that is left

    def __attrs_post_init__(self) -> None:
        self.keyword = _keyword(self._visit)
        if self.tamed is not None and not self.tamed.references:
            self._worst = work.worst_of(self._schema)

    def _visit(self, instance: Any) -> None:
        self.left -= 1
        if self.left >= 0:
            self._work -= self._product(instance)
            if self._work < 0:
                self.left = -1
        if self.left < 0:
            raise ValueError("too much work")

    @property
    def exhausted(self) -> bool:
        return self.left < 0

    def _product(self, value: Any) -> int:
        """Return nanoseconds for what a subschema without references may cost with a value."""
        if self._schema is None:
            return 0
        if self._worst == (0, 0):
            self._worst = work.worst_of(self._schema)
        members, characters = _measure(value)
        return self._worst[0] * members + self._worst[1] * characters

    def judge(self, engine: jsonschema_rs.Validator, value: Any) -> bool:
        self.left, self.counted = _FREE_VISITS, False
        if self.tamed is not None and self.tamed.references:
            if not self._fits(value):
                return self._count(value)
        elif self._product(value) > work.MOST and not self._fits(value):
            self.left = -1
            return False
        return engine.is_valid(value)

    def _fits(self, value: Any) -> bool:
        try:
            assert self.tamed is not None
            work.SchemaWork(self.tamed.targets).of(self._schema, work.shape_of(value))
        except (work.TooMuchWork, RecursionError):
            return False
        return True

    def _count(self, value: Any) -> bool:
        assert self.counting is not None
        self._work, counted = work.MOST, size_of(value, _FEW)[0] > _FEW
        self.counted = counted
        if self._engine is None:
            self._engine = self.counting()
        # A failed count inside `not` would pass.
        return self._engine.is_valid(value) and not self.exhausted


def _measure(value: Any) -> tuple[int, int]:
    """Return the members of a value, itself among them, and the characters of its texts and names."""
    characters, values = 0, [value]
    for each in values:  # grows during the loop
        kind = type(each)
        if kind is str:
            characters += len(each)
        elif kind is dict:
            characters += sum(map(len, each))
            values += each.values()
        elif kind is list:
            values += each
    return len(values), characters


# --- counting of references ---


class Tamed(NamedTuple):
    """A schema that is safe to build and counts followed references, and the numbers of what is in it."""

    schema: Schema
    errors: int = 1  # that one value may have: one of each subschema, and one for each name that is required
    references: int = 0
    patterns: int = 0
    # returns what a subschema of the original refers to
    targets: Callable[[dict[str, Any]], Iterator[Any]] = lambda node: iter(())


def tame(schema: Schema, bounds: SchemaBounds, *, terse: bool = False, counting: bool = True) -> Tamed:
    """Return a copy of a schema that is safe to build and, with `counting`, counts followed references.

    With `terse`, `anyOf` and `oneOf` fail without collecting the errors of each alternative. Raises SchemaError: it is
    too deep or too large, has a chain of references that is too long or a loop, embeds another resource (`$id`), or
    refers to another document.
    """
    dialect = dialect_of(schema)
    if isinstance(schema, bool):
        return Tamed(schema)
    if _measure(schema)[0] > bounds.members:
        raise SchemaError(f"the schema has more than {bounds.members} members")
    original = schema
    if dialect == "Draft4Validator":
        raise SchemaError("draft-04 has no `if`, which bounding references needs; use 2020-12")
    if dialect == "Draft6Validator":  # draft-07 is draft-06 and `if`
        schema = {**schema, "$schema": "http://json-schema.org/draft-07/schema#"}
    old_references = dialect in ("Draft6Validator", "Draft7Validator")  # here `$ref` disables the keywords beside it
    # A subschema takes about two levels of containers; the bound is for values such as `const` and `default`.
    copy: dict[str, Any] = _copy(schema, 2 * bounds.depth + 2)
    walk = _Walk(copy, bounds)
    _check_chains(walk)
    references = patterns = names = 0
    for node in walk.nodes:
        names += _names_in(node)
        patterns += len(_patterns_in(node))
        references += _count_references(node, old_references) if counting else 0
        if terse:
            _hide_alternatives(node)
    targets = _Walk(original, bounds).targets if references else Tamed._field_defaults["targets"]
    return Tamed(copy, len(walk.nodes) + names, references, patterns, targets)


def _names_in(node: dict[str, Any]) -> int:
    """Return how many names a subschema itself requires of a value."""
    lists = [node.get("required")]
    for keyword in ("dependentRequired", "dependencies"):
        lists += named.values() if isinstance(named := node.get(keyword), dict) else ()
    return sum(len(names) for names in lists if isinstance(names, list))


def _patterns_in(node: dict[str, Any]) -> list[str]:
    pattern, named = node.get("pattern"), node.get("patternProperties")
    return [*([pattern] if isinstance(pattern, str) else ()), *(named if isinstance(named, dict) else ())]


def _copy(value: Any, room: int) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    if not room:
        raise SchemaError("the schema is nested too deeply")
    if isinstance(value, list):
        return [_copy(each, room - 1) for each in value]
    return {key: _copy(each, room - 1) for key, each in value.items()}


class _Walk:
    """All subschemas of one document, and for each the subschemas that apply to the same value."""

    def __init__(self, root: dict[str, Any], bounds: SchemaBounds) -> None:
        self.root = root
        self.bounds = bounds
        self.nodes: list[dict[str, Any]] = []
        self.in_place: dict[int, list[dict[str, Any]]] = {}
        self._anchors: dict[str, dict[str, Any]] = {}
        self._references = self._characters = 0
        self._visit_tree(root)
        # A reference may point into an unknown keyword, whose content is then a schema too.
        for node in self.nodes:  # grows during the loop
            for target in self.targets(node):
                if id(target) not in self.in_place:
                    self._visit_tree(target)
                self.in_place[id(node)].append(target)

    def _visit_tree(self, top: dict[str, Any]) -> None:
        level = [top]
        for _ in range(self.bounds.depth):
            for node in level:
                self._note(node)
            level = [child for node in level for *_, child in subschemas(node) if id(child) not in self.in_place]
            if not level:
                return
        raise SchemaError(f"subschemas are nested more than {self.bounds.depth} deep")

    def _note(self, node: dict[str, Any]) -> None:
        self.nodes.append(node)
        if len(self.nodes) > self.bounds.subschemas:
            raise SchemaError(f"there are more than {self.bounds.subschemas} subschemas")
        references = [node[keyword] for keyword in _REFERENCES if isinstance(node.get(keyword), str)]
        self._references += len(references)
        if self._references > self.bounds.references:
            raise SchemaError(f"there are more than {self.bounds.references} references")
        self._characters += sum(map(len, (*references, *_patterns_in(node))))
        if self._characters > self.bounds.characters:
            raise SchemaError(f"its patterns and references have more than {self.bounds.characters} characters")
        self.in_place[id(node)] = [child for keyword, _, child in subschemas(node) if keyword in _IN_PLACE]
        for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = node.get(keyword)
            if not isinstance(name, str) or (node is self.root and keyword.endswith("id")):
                continue
            if keyword.endswith("id") and not name.startswith("#"):
                raise SchemaError(f"the embedded resource {shorten(repr(name))} is not supported")
            self._anchors[name.removeprefix("#")] = node

    def targets(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        own_name = self.root.get("$id", self.root.get("id"))
        for keyword in _REFERENCES:
            reference = node.get(keyword)
            if not isinstance(reference, str):
                continue
            if isinstance(own_name, str) and own_name:
                reference = reference.removeprefix(own_name.rstrip("#"))
            if reference and not reference.startswith("#"):
                raise SchemaError(f"{shorten(repr(reference))} is outside this schema, and schemas are never fetched")
            target = self._resolve(reference.removeprefix("#"))
            if isinstance(target, dict):
                yield target

    def _resolve(self, fragment: str) -> Any:
        """Return the value at a fragment (RFC 6901 or an anchor), or None; the engine then reports the error."""
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(unquote(fragment))
        value: Any = self.root
        for step in unquote(fragment).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and key.isdecimal() and len(key) < 7 and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value


def _check_chains(walk: _Walk) -> None:
    """Refuse in-place chains that loop, are long, or have many `unevaluated...` keywords (each doubles the work)."""
    lengths: dict[int, tuple[int, int]] = {}
    busy: set[int] = set()
    for start in walk.nodes:
        stack: list[tuple[dict[str, Any], bool]] = [(start, False)]
        while stack:
            node, done = stack.pop()
            key = id(node)
            if done:
                busy.discard(key)
                lengths[key] = _chain_length(node, [lengths[id(child)] for child in walk.in_place[key]])
            elif key in busy:
                raise SchemaError("a reference leads back to itself without going deeper into the value")
            elif key not in lengths:
                busy.add(key)
                stack.append((node, True))
                children = walk.in_place[key]
                stack += [(child, False) for child in children if id(child) not in lengths]


def _chain_length(node: dict[str, Any], below: list[tuple[int, int]]) -> tuple[int, int]:
    """Return (links, links with an `unevaluated...` keyword) on the longest chains that begin at `node`."""
    links = 1 + max((each[0] for each in below), default=0)
    if links > _LONGEST_CHAIN:
        raise SchemaError(f"more than {_LONGEST_CHAIN} subschemas and references apply to the same value in a chain")
    unevaluated = ("unevaluatedProperties" in node or "unevaluatedItems" in node) + max(
        (each[1] for each in below), default=0
    )
    if unevaluated > _MOST_UNEVALUATED:
        raise SchemaError(f"more than {_MOST_UNEVALUATED} 'unevaluated' keywords apply to the same value in a chain")
    return links, unevaluated


def _count_references(node: dict[str, Any], old_references: bool) -> int:
    """Move each reference into `allOf`, behind the keyword VISIT, and return how many there were.

    The engine evaluates `if` first, both to validate and to collect errors. JSON pointers stay valid: only the
    reference moves, and `allOf` only grows at its end.
    """
    found = [keyword for keyword in _REFERENCES if isinstance(node.get(keyword), str)]
    if not found:
        return 0
    gates = [{"if": {VISIT: True}, "then": {keyword: node.pop(keyword)}, "else": {VISIT: True}} for keyword in found]
    if old_references:
        for keyword in [k for k in node if k not in _BESIDE_OLD_REF]:
            del node[keyword]
    _add_to_all_of(node, gates)
    return len(found)


def _hide_alternatives(node: dict[str, Any]) -> None:
    """Move alternatives into an `if`, where the engine keeps no errors."""
    found = [keyword for keyword in ("anyOf", "oneOf") if isinstance(node.get(keyword), list)]
    if found:
        _add_to_all_of(node, [{"if": {k: node.pop(k)}, "else": NO_ALTERNATIVE} for k in found])


def _add_to_all_of(node: dict[str, Any], more: list[dict[str, Any]]) -> None:
    before = node.get("allOf")
    node["allOf"] = [*(before if isinstance(before, list) else []), *more]
