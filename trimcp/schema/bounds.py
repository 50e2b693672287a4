"""Bounding what a hostile JSON Schema can cost, before `validator.peer_validator` builds it.

Without references a schema is a tree, and judging a value costs at most its size at each place. References allow two
attacks: paths that multiply with every level, and chains deep enough to exhaust the stack. So chains are bounded here,
and each reference counts itself whenever it is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

__all__ = ["NO_ALTERNATIVE", "VISIT", "SchemaError", "Tamed", "shorten", "tame"]

VISIT: Final = "x-trimcp-visit"
"""The keyword put before each reference, which `validator` counts."""

NO_ALTERNATIVE: Final = "x-trimcp-no-alternative"
"""The keyword that fails, in a terse copy, where no alternative fits; implemented in `validator`."""

# A chain is walked on the machine's stack once per level of the value: 100 links at 128 levels fit in 8 MiB, 200 do
# not.
_LONGEST_CHAIN: Final = 32
_MOST_UNEVALUATED: Final = 6

_SINGLE: Final = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LISTS: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS: Final = (
    "$defs",
    "definitions",
    "dependencies",
    "dependentSchemas",
    "patternProperties",
    "properties",
)
# Subschemas under these judge the same value as the schema that holds them.
_IN_PLACE: Final = frozenset(
    {"allOf", "anyOf", "dependencies", "dependentSchemas", "else", "if", "not", "oneOf", "then"}
)
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
# The keywords that count beside a `$ref` in old dialects.
_BESIDE_OLD_REF: Final = frozenset({"$schema", "$id", "id", "$defs", "definitions"})


class SchemaError(ValueError):
    """A JSON Schema cannot be used. The text says why and where, in one bounded line."""


class Tamed(NamedTuple):
    """A copy of a schema that is safe to build, and how many subschemas it has."""

    schema: dict[str, Any] | bool
    subschemas: int


def tame(schema: Any, *, old_references: bool, max_depth: int, max_subschemas: int, terse: bool = False) -> Tamed:
    """A copy of `schema` whose references count themselves, after checking that it is bounded.

    Args:
        schema: what a peer sent.
        old_references: the dialect is draft-07, where `$ref` hides the keywords beside it.
        max_depth: how deep subschemas may be nested.
        max_subschemas: how many there may be.
        terse: let `anyOf` and `oneOf` fail without gathering what is wrong with each alternative.

    Raises:
        SchemaError: it is too deep or too large, chains references too long or in a loop, embeds another resource
            (`$id`), or refers to another document.
    """
    if isinstance(schema, bool):
        return Tamed(schema, 1)
    # Keywords nest about two containers per subschema; `const` and `default` may nest as deep as they like otherwise.
    copy: dict[str, Any] = _copy(schema, 2 * max_depth + 2)
    walk = _Walk(copy, max_depth, max_subschemas)
    walk.run()
    _check_chains(walk)
    for node in walk.nodes:
        _count_references(node, old_references)
        if terse:
            _hide_alternatives(node)
    return Tamed(copy, len(walk.nodes))


def shorten(text: str, limit: int = 200) -> str:
    """`text`, cut with an ellipsis when it is longer than `limit` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def _copy(value: Any, room: int) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    if not room:
        raise SchemaError("the schema is nested too deeply")
    if isinstance(value, list):
        return [_copy(each, room - 1) for each in value]
    return {key: _copy(each, room - 1) for key, each in value.items()}


class _Walk:
    """All subschemas of one document, and which of them judge the same value as which others."""

    def __init__(self, root: dict[str, Any], max_depth: int, max_subschemas: int) -> None:
        self.root = root
        self.max_depth = max_depth
        self.max_subschemas = max_subschemas
        self.nodes: list[dict[str, Any]] = []
        self.in_place: dict[int, list[dict[str, Any]]] = {}
        self._anchors: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        self._visit_tree(self.root)
        # A reference may point into an unknown keyword, whose content is then a schema too.
        for node in self.nodes:  # grows while we walk
            for target in self._targets(node):
                if id(target) not in self.in_place:
                    self._visit_tree(target)
                self.in_place[id(node)].append(target)

    def _visit_tree(self, top: dict[str, Any]) -> None:
        level = [top]
        for _ in range(self.max_depth):
            for node in level:
                self._note(node)
            level = [child for node in level for _, child in _children(node) if id(child) not in self.in_place]
            if not level:
                return
        raise SchemaError(f"subschemas are nested more than {self.max_depth} deep")

    def _note(self, node: dict[str, Any]) -> None:
        self.nodes.append(node)
        if len(self.nodes) > self.max_subschemas:
            raise SchemaError(f"there are more than {self.max_subschemas} subschemas")
        self.in_place[id(node)] = [child for keyword, child in _children(node) if keyword in _IN_PLACE]
        for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = node.get(keyword)
            if not isinstance(name, str) or (node is self.root and keyword.endswith("id")):
                continue
            if keyword.endswith("id") and not name.startswith("#"):
                raise SchemaError(f"the embedded resource {shorten(repr(name))} is not supported")
            self._anchors[name.removeprefix("#")] = node

    def _targets(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
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
        """The value a fragment names (RFC 6901 or an anchor), or None, which the engine then reports."""
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


def _children(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(keyword, subschema) for each subschema that is an object."""
    for keyword in _SINGLE:
        if isinstance(child := node.get(keyword), dict):
            yield keyword, child
    for keyword in _LISTS:
        if isinstance(children := node.get(keyword), list):
            yield from ((keyword, child) for child in children if isinstance(child, dict))
    for keyword in _MAPS:
        if isinstance(named := node.get(keyword), dict):
            yield from ((keyword, child) for child in named.values() if isinstance(child, dict))


def _check_chains(walk: _Walk) -> None:
    """Refuse schemas whose in-place chains loop, are long, or hold many `unevaluated...` (each doubles the work)."""
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
    """(links, links with an `unevaluated...` keyword) on the longest chains that begin at `node`."""
    links = 1 + max((each[0] for each in below), default=0)
    if links > _LONGEST_CHAIN:
        raise SchemaError(f"more than {_LONGEST_CHAIN} subschemas and references apply to the same value in a chain")
    unevaluated = ("unevaluatedProperties" in node or "unevaluatedItems" in node) + max(
        (each[1] for each in below), default=0
    )
    if unevaluated > _MOST_UNEVALUATED:
        raise SchemaError(f"more than {_MOST_UNEVALUATED} 'unevaluated' keywords apply to the same value in a chain")
    return links, unevaluated


def _count_references(node: dict[str, Any], old_references: bool) -> None:
    """Put VISIT before each reference, moving both into `allOf`.

    The engine decides `if` first, both when it judges and when it collects errors. JSON pointers stay valid: only the
    reference moves, and `allOf` only grows at its end.
    """
    found = [keyword for keyword in _REFERENCES if isinstance(node.get(keyword), str)]
    if not found:
        return
    gates = [{"if": {VISIT: True}, "then": {keyword: node.pop(keyword)}, "else": {VISIT: True}} for keyword in found]
    if old_references:
        for keyword in [k for k in node if k not in _BESIDE_OLD_REF]:
            del node[keyword]
    _add_to_all_of(node, gates)


def _hide_alternatives(node: dict[str, Any]) -> None:
    """Judge alternatives inside `if`, where the engine keeps no errors."""
    found = [keyword for keyword in ("anyOf", "oneOf") if isinstance(node.get(keyword), list)]
    if found:
        _add_to_all_of(node, [{"if": {k: node.pop(k)}, "else": {NO_ALTERNATIVE: True}} for k in found])


def _add_to_all_of(node: dict[str, Any], more: list[dict[str, Any]]) -> None:
    before = node.get("allOf")
    node["allOf"] = [*(before if isinstance(before, list) else []), *more]
