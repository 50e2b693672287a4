"""Makes up annotations as people write them, modules that use them, and JSON values that a schema admits."""

from __future__ import annotations

import random
import sys
import types
from typing import Any, Final

HEAD: Final = """
import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import typing
import uuid
import zoneinfo
from typing import *
import attrs
import pydantic
import typing_extensions
from trimcp.schema.hints import Arg

T = TypeVar("T")
Bound = TypeVar("Bound", bound="R0")
Either = TypeVar("Either", int, str)
Color = enum.Enum("Color", {"RED": "red", "BLUE": "blue"})
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
Day = NewType("Day", datetime.date)
Tags = typing_extensions.TypeAliasType("Tags", list[str])
Tree = typing_extensions.TypeAliasType("Tree", "dict[str, Tree] | int")
Pair = typing_extensions.TypeAliasType("Pair", tuple[T, T], type_params=(T,))
Bare = collections.namedtuple("Bare", "left right")
@dataclasses.dataclass(frozen=True)
class Box(Generic[T]):
    content: T
    others: Sequence["Box[T]"] = ()
class Point(NamedTuple):
    x: int
    y: Optional[int] = None
@dataclasses.dataclass
class Narrow:
    name: str
@dataclasses.dataclass
class Wide:
    name: str
    size: int = 0
class NarrowModel(pydantic.BaseModel):
    name: str
class WideModel(pydantic.BaseModel):
    name: str
    size: int = 0
    near: Optional["WideModel"] = None
"""
RECORDS: Final = 6

LEAVES: Final = (
    *("int", "str", "bool", "float", "datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta"),
    *("complex", "fractions.Fraction", "typing.Hashable", "re.Pattern", "re.Pattern[str]"),
    *("decimal.Decimal", "uuid.UUID", "pathlib.Path", "Color", "Level", "Literal['a', 'b']", "Literal[1, 2]"),
    *("Any", "Day", "Tags", "Tree", "Bare", "Narrow", "Wide", "NarrowModel", "WideModel", "T", "Either", "Bound"),
    *(
        "Narrow | Wide",
        "Wide | Narrow",
        "NarrowModel | WideModel",
        "list[Narrow] | list[Wide]",
        "int | str",
        "float | None",
    ),
    *("list", "List", "Dict", "dict", "tuple", "Sequence", "typing.Mapping", "Box", "set", "Later"),
)
LISTS: Final = (
    *("list", "List", "Sequence", "Iterable", "Collection", "collections.deque", "collections.abc.Sequence"),
    "collections.abc.MutableSequence",
)
MAPPINGS: Final = ("dict", "Dict", "Mapping", "collections.OrderedDict", "collections.abc.MutableMapping")
KEYS: Final = (
    *("str", "int", "datetime.date", "uuid.UUID", "Color", "Level", "pathlib.Path", "Literal['a', 'b']"),
    *("bool", "float", "complex"),
)
HASHABLE: Final = ("int", "str", "datetime.date", "Color", "uuid.UUID", "tuple[int, str]", "Point", "frozenset[int]")


class Annotations:
    """Draws annotations, as source text; with `quoted` the names of records stand in quotes."""

    def __init__(self, lots: random.Random, *, quoted: bool) -> None:
        self._lots = lots
        self._quoted = quoted

    def any(self, depth: int = 3) -> str:
        """Return one of any kind, nested up to `depth` times."""
        lots = self._lots
        if depth == 0 or lots.random() < 0.2:
            return self.leaf()
        kind = lots.randrange(9)
        inner = self.any(depth - 1)
        match kind:
            case 0 | 1:
                return f"{lots.choice(LISTS)}[{inner}]"
            case 2:
                return f"{lots.choice(MAPPINGS)}[{lots.choice(KEYS)}, {inner}]"
            case 3:
                return lots.choice((f"tuple[{inner}, ...]", f"Tuple[{inner}, {self.leaf()}]", f"Pair[{inner}]"))
            case 4:
                return lots.choice((f"Optional[{inner}]", f"Union[{inner}, None]", f"Union[None, {inner}]"))
            case 5:
                return f"Annotated[{inner}, Arg('said')]"
            case 6:
                return f"Box[{inner}]"
            case 7:
                return f"{lots.choice(('set', 'frozenset', 'AbstractSet'))}[{lots.choice(HASHABLE)}]"
        return lots.choice((f"Union[int, list[{inner}]]", f"Union[bool, dict[str, {inner}]]"))

    def leaf(self) -> str:
        """Return one without a type in it."""
        if self._lots.random() < 0.6:
            return self._lots.choice(LEAVES)
        name = f"R{self._lots.randrange(RECORDS)}"
        return f'"{name}"' if self._quoted else name


def make_module(name: str, seed: int, count: int, *, future: bool) -> types.ModuleType:
    """Return a module with records R0, R1, ... that name each other, and `count` functions.

    `takes_N` has a parameter of the Nth annotation, `gives_N` a result, and `Holds_N` is a record with a field.
    """
    lots = random.Random(seed)
    annotations = Annotations(lots, quoted=not future)
    lines = ["from __future__ import annotations" if future else "", HEAD]
    lines += ["class Later(typing_extensions.TypedDict):", "    day: typing_extensions.ReadOnly[datetime.date]"]
    lines += ["    note: typing_extensions.NotRequired[str]"]
    for number in range(RECORDS):
        kind = lots.choice(("dataclass", "attrs", "typed", "tuple"))
        match kind:
            case "dataclass":
                lines += ["@dataclasses.dataclass", f"class R{number}:"]
            case "attrs":
                lines += ["@attrs.define", f"class R{number}:"]
            case "typed":
                lines += [f"class R{number}(TypedDict, total=False):"]
            case "tuple":
                lines += [f"class R{number}(NamedTuple):"]
        own = f"R{number}" if future else f'"R{number}"'
        default = "" if kind == "typed" else " = None"
        wraps = (f"Optional[{own}]", f"list[{own}] | None", f"dict[str, {own}] | None", f"Optional[tuple[{own}, ...]]")
        lines += [f"    own{number}: {lots.choice(wraps)}{default}"]
        lines += [f"    f{each}: Optional[{annotations.any(2)}]{default}" for each in range(lots.randrange(3))]
    for number in range(count):
        hint = annotations.any()
        lines += [f"HINT_{number} = {hint!r}"]
        lines += [f"def takes_{number}(value: {hint}) -> None: ...", f"def gives_{number}() -> {hint}: ..."]
        lines += ["@dataclasses.dataclass", f"class Holds_{number}:", f"    field: {hint}"]
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile("\n".join(lines), name, "exec", dont_inherit=True), vars(module))
    return module


TEXTS: Final = {
    "date": "2026-02-28",
    "date-time": "2026-02-28T12:00:00+00:00",
    "uuid": "12345678-1234-5678-1234-567812345678",
}


def instance(schema: Any, lots: random.Random, root: dict[str, Any], depth: int = 6) -> Any:
    """Return a JSON value that a schema of ours admits; below `depth` the smallest."""
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], lots, root, depth)
    if "anyOf" in schema:
        branches = schema["anyOf"]
        if depth <= 0:
            branches = [each for each in branches if each.get("type") not in (None, "object")] or branches
        return instance(lots.choice(branches), lots, root, depth - 1)
    if "enum" in schema:
        return lots.choice(schema["enum"])
    kind = schema.get("type", ["string", "integer", "boolean", "null"])
    kind = lots.choice(kind) if isinstance(kind, list) else kind
    match kind:
        case "object":
            return _object(schema, lots, root, depth)
        case "array":
            if "prefixItems" in schema:
                return [instance(each, lots, root, depth - 1) for each in schema["prefixItems"]]
            count = lots.randrange(3) if depth > 0 else 0
            found = [instance(schema.get("items", {}), lots, root, depth - 1) for _ in range(count)]
            unique = [each for index, each in enumerate(found) if each not in found[:index]]
            return unique if schema.get("uniqueItems") else found
        case "string":
            return _text(schema, lots)
        case "integer" | "number":
            return lots.choice((1, 2, 7)) if kind == "integer" or lots.random() < 0.5 else 1.5
        case "boolean":
            return lots.random() < 0.5
    return None


def _text(schema: dict[str, Any], lots: random.Random) -> str:
    if "enum" in schema:
        return str(lots.choice(schema["enum"]))
    pattern = schema.get("pattern", "")
    if pattern:
        return "09:30:00" if ":" in pattern else "12"
    return TEXTS.get(schema.get("format", ""), lots.choice(("a", "b/c", "é")))


def _object(schema: dict[str, Any], lots: random.Random, root: dict[str, Any], depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    names = [name for name in schema.get("properties", ()) if name in required or (depth > 0 and lots.random() < 0.5)]
    found = {name: instance(schema["properties"][name], lots, root, depth - 1) for name in names}
    if "properties" not in schema and depth > 0:
        for _ in range(lots.randrange(3)):
            name = _text(schema.get("propertyNames", {}), lots)
            found[name] = instance(schema.get("additionalProperties", {}), lots, root, depth - 1)
    return found
