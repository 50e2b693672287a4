"""How long a peer's schema may take with a value: an upper bound, found without running it.

The engine cannot be interrupted. So first the value's shape is taken: its members by their path, those of a list
together. Then the schema is walked along this shape, and each keyword is counted for as many values as it applies to,
with the nanoseconds it may take for one. They were found by a search of keywords and values
(`tests/guarantees/test_13_schema_work.py`): what is dear are numbers, which the engine compares exactly, as fractions
of up to a thousand digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import attrs

MOST: Final = 40_000_000
"""Nanoseconds that a value may take."""

_EACH: Final = 20  # ns for a keyword, or a member of one, and a value
# ns for a character: a short pattern becomes an automaton that the engine keeps whole, others may not.
_SHORT_PATTERN: Final = 12
_PATTERN, _EASY_PATTERN, _FORMAT, _IDN_HOSTNAME = 40, 4, 25, 80
_NAMES: Final = 64  # members of objects that are told apart; of objects with more, the rest is one
_MOST_SHAPES: Final = 2_000
_MOST_STEPS: Final = 10_000
_DEEPEST: Final = 300
_LEAST_WHOLE, _MOST_WHOLE = -(2**53), 2**53
_LEAST_SHORT, _MOST_SHORT = 1e-6, 1e15

# ns, by the kind of the keyword's number, then of the value's: whole, with a fraction, and with very many digits.
_Row = tuple[tuple[int, int, int], ...]
_BOUND: Final[_Row] = ((30, 60, 20_000), (10_000, 12_000, 60_000), (15_000, 15_000, 90_000))
_NUMBERS: Final[dict[str, _Row]] = {
    "multipleOf": ((40, 600, 20_000), (8_000, 10_000, 80_000), (90_000, 100_000, 110_000)),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _BOUND),
    "const": ((150, 8_000, 50_000), (5_000, 6_000, 50_000), (40_000, 40_000, 140_000)),
    "uniqueItems": ((150, 10_000, 900_000),),
}
_IN_PLACE: Final = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else"})
_BY_NAME: Final = frozenset({"dependentSchemas", "dependencies"})
_OF_MEMBERS: Final = frozenset({"additionalProperties", "unevaluatedProperties"})
_OF_ITEMS: Final = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"})
_SILENT: Final = frozenset(
    {"$defs", "definitions", "title", "description", "default", "examples", "$schema", "$comment"}
)


class TooMuchWork(Exception):
    """A value may take more time than it is given."""


def kind_of(number: float) -> int:
    """Return 0 for a whole number, 1 for one with a fraction, and 2 for one with very many digits."""
    if type(number) is int:
        return 0 if _LEAST_WHOLE <= number <= _MOST_WHOLE else 2
    size = abs(number)
    return 1 if _LEAST_SHORT <= size < _MOST_SHORT or not size else 2


@attrs.define(eq=False)
class Shape:
    """All values at one path together."""

    count: int = 0  # how many
    # `characters`, `numbers`: of their texts; how many numbers of each kind
    characters: int = 0
    numbers: list[int] = attrs.field(factory=lambda: [0, 0, 0])
    # `members`, `names`: of their arrays and objects; characters of the members' names
    members: int = 0
    names: int = 0
    # their members by name; "" stands for the others, and `items` for those of arrays
    children: dict[str, Shape] = attrs.field(factory=dict)
    items: Shape | None = None
    _total: tuple[int, list[int]] | None = None

    def all(self) -> Iterator[Shape]:
        yield from self.children.values()
        if self.items is not None:
            yield self.items

    @property
    def total(self) -> tuple[int, list[int]]:
        """The members with all below them, characters among them; and the numbers of each kind."""
        if self._total is None:
            below = [each.total for each in self.all()]
            size = self.count + self.characters // 8 + self.names // 8 + sum(each for each, _ in below)
            self._total = size, [sum(three) for three in zip(self.numbers, *(each for _, each in below), strict=True)]
        return self._total


def shape_of(value: Any) -> Shape:
    """Return the shape of a JSON value. Does not recurse; each member is looked at once."""
    root, shapes = Shape(), 1
    waiting: list[tuple[Shape, list[Any]]] = [(root, [value])]
    while waiting:
        shape, values = waiting.pop()
        shape.count = len(values)
        characters = whole = parts = members = names = 0
        items: list[Any] = []
        named: dict[str, list[Any]] = {}
        for each in values:
            kind = type(each)
            if kind is str:
                characters += len(each)
            elif kind is int and _LEAST_WHOLE <= each <= _MOST_WHOLE:
                whole += 1
            elif kind is float and (_LEAST_SHORT <= each < _MOST_SHORT or -_MOST_SHORT < each <= -_LEAST_SHORT):
                parts += 1
            elif kind is int or kind is float:
                shape.numbers[kind_of(each)] += 1
            elif kind is list:
                members += len(each)
                items += each
            elif kind is dict:
                members += len(each)
                for name, member in each.items():
                    names += len(name)
                    found = named.get(name)
                    if found is None:
                        if len(named) >= _NAMES or shapes + len(named) > _MOST_SHAPES:
                            found = named.setdefault("", [])
                        else:
                            found = named[name] = []
                    found.append(member)
        shape.characters, shape.members, shape.names = characters, members, names
        shape.numbers[0] += whole
        shape.numbers[1] += parts
        for name, found in named.items():
            shape.children[name] = child = Shape()
            waiting.append((child, found))
        if items:
            shape.items = Shape()
            waiting.append((shape.items, items))
        shapes += len(named) + 1
    return root


@attrs.define(eq=False)
class SchemaWork:
    """Adds up what a schema may cost, for values of one shape."""

    targets: Callable[[dict[str, Any]], Iterable[Any]]  # returns the subschemas that a subschema refers to
    _known: dict[tuple[int, int], float] = attrs.field(init=False, factory=dict)
    _names: dict[int, Shape] = attrs.field(init=False, factory=dict)
    _steps: int = attrs.field(init=False, default=0)

    def of(self, schema: Any, shape: Shape, depth: int = 0) -> float:
        """Return nanoseconds. Raises TooMuchWork."""
        if type(schema) is not dict:
            return _EACH * shape.count
        key = id(schema), id(shape)
        found = self._known.get(key)
        if found is None:
            self._steps += 1 + len(schema)
            if depth > _DEEPEST or self._steps > _MOST_STEPS:
                raise TooMuchWork
            found = sum(self._of_keyword(schema, word, content, shape, depth + 1) for word, content in schema.items())
            found += sum(self.of(target, shape, depth + 1) for target in self.targets(schema))
            if "unevaluatedProperties" in schema or "unevaluatedItems" in schema:
                found *= 2  # what is in place is evaluated once more
            self._known[key] = found
        if found > MOST:
            raise TooMuchWork
        return found

    def _of_keyword(self, schema: dict[str, Any], word: str, content: Any, shape: Shape, depth: int) -> float:
        if word in _SILENT:
            return 0
        own: float = _EACH * shape.count
        if word in _IN_PLACE:
            return own + self._each(content, shape, depth)
        if word in _BY_NAME and type(content) is dict:
            lists = sum(len(each) for each in content.values() if type(each) is list)
            return own * (1 + len(content) + lists) + self._each(content.values(), shape, depth)
        if word == "properties" and type(content) is dict:
            rest = shape.children.get("")
            found = own * (1 + len(content)) if shape.children else own
            for name, child in shape.children.items():
                if name in content:
                    found += self.of(content[name], child, depth)
            if rest is not None:
                found += self._each(content.values(), rest, depth)
            return found
        if word == "patternProperties" and type(content) is dict:
            found = own + sum(map(_of_pattern, content)) * (shape.names + shape.members)
            return found + sum(self._each(content.values(), child, depth) for child in shape.children.values())
        if word in _OF_MEMBERS:
            found = own + 2 * _EACH * shape.members
            return found + sum(self.of(content, child, depth) for child in shape.children.values())
        if word == "propertyNames":
            return own + self.of(content, self._names_of(shape), depth)
        if word in _OF_ITEMS:
            return own if shape.items is None else own + self._each(content, shape.items, depth)
        if word in _NUMBERS:
            return own + self._of_numbers(word, content, shape)
        if word == "enum" and type(content) is list:
            return own * (1 + _size(content)) + self._of_numbers("const", content, shape)
        if word in ("pattern", "format"):
            dear = _IDN_HOSTNAME if content == "idn-hostname" else _FORMAT
            return own + (_of_pattern(content) if word == "pattern" else dear) * shape.characters
        return own * (1 + (_size(content) if type(content) in (list, dict) else 0)) + shape.characters

    def _each(self, content: Any, shape: Shape, depth: int) -> float:
        if type(content) in (dict, bool):
            return self.of(content, shape, depth)
        return sum(self.of(each, shape, depth) for each in content if type(each) in (dict, bool))

    def _names_of(self, shape: Shape) -> Shape:
        return self._names.setdefault(id(shape), Shape(shape.members, shape.names))

    def _of_numbers(self, word: str, content: Any, shape: Shape) -> float:
        """Return what comparing numbers takes. `const`, `enum` and `uniqueItems` compare whole values."""
        whole = word in ("const", "uniqueItems")
        members, numbers = shape.total if whole else (shape.count, shape.numbers)
        rows = _NUMBERS[word]
        if word == "uniqueItems":
            kinds = [0] if content is True else []
        else:
            kinds = [kind_of(each) for each in _values_in(content) if type(each) in (int, float)]
            if word == "const" and type(content) is list and not any(type(each) in (list, dict) for each in content):
                kinds = [max(kinds)] if kinds else []  # an enumeration of scalars is looked up
        found: float = sum(rows[kind][other] * numbers[other] for kind in kinds for other in (0, 1, 2))
        return found + (4 * _EACH * members if whole and (kinds or type(content) in (list, dict)) else 0)


def _of_pattern(pattern: Any) -> int:
    easy = type(pattern) is str and len(pattern) <= _SHORT_PATTERN and not {"{", "\\"} & {*pattern}
    return _EASY_PATTERN if easy else _PATTERN


def _values_in(content: Any) -> list[Any]:
    """Return a JSON value and all that is in it. Does not recurse."""
    found = [content]
    for each in found:  # grows during the loop
        if type(each) is list:
            found += each
        elif type(each) is dict:
            found += each.values()
    return found


def _size(content: Any) -> int:
    values = _values_in(content)
    return len(values) + sum(len(each) for each in values if type(each) is str) // 256


def worst_of(schema: Any) -> tuple[int, int]:
    """Return nanoseconds that no member of a value exceeds, and no character, for a schema without references."""
    members = characters = 0
    for each in _values_in(schema):
        members += 4 * _EACH
        if type(each) is dict:
            for word, content in each.items():
                if word in _NUMBERS or word == "enum":
                    rows = _NUMBERS.get(word, _NUMBERS["const"])
                    members += max(map(max, rows)) * max(1, _size(content) if type(content) in (list, dict) else 1)
                if word in ("pattern", "format", "patternProperties"):
                    characters += _IDN_HOSTNAME * max(1, len(content) if type(content) is dict else 1)
                if word.startswith("unevaluated"):
                    members, characters = 2 * members, 2 * characters
    return members, 1 + characters
