# ruff: noqa: UP006, UP007, UP035, UP045 - the old spellings are tested, too
# No `from __future__ import annotations` here: in quotes and without is what is tested.
"""Tests of what people write as annotations: each is refused where it is defined, or right at every call."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import math
import os
import re
import sys
import types
import typing
import zoneinfo
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Dict, Generic, List, NamedTuple, Optional, Self, TypedDict, TypeVar, Union

import attrs
import pydantic
import pytest
import typing_extensions

from trimcp.schema.convert import to_json
from trimcp.schema.hints import Arg
from trimcp.schema.signature import describe, describe_result
from trimcp.schema.validator import Validator
from trimcp.wire.jsonrpc import encode

T = TypeVar("T")
Bound = TypeVar("Bound", bound="Leaf")
Either = TypeVar("Either", int, str)


@dataclasses.dataclass
class Leaf:
    name: str
    kids: list["Leaf"] = dataclasses.field(default_factory=list)


class Flags(enum.Flag, boundary=enum.STRICT):  # before Python 3.11.4 not the default
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Corners:
    x: int


class Corner(Corners, enum.Enum):
    NEAR = 1


@dataclasses.dataclass
class Ever(Generic[T]):
    inner: "Ever[list[T]] | None" = None


@dataclasses.dataclass(init=False)
class Renames:
    size: int

    def __init__(self, length: int) -> None:
        self.size = length


@attrs.define
class RenamesHere:
    size: int

    def __init__(self, length: int) -> None:
        self.__attrs_init__(length)  # type: ignore[attr-defined]


@dataclasses.dataclass
class Everywhere:
    named: dict[str, "Everywhere"] = dataclasses.field(default_factory=dict)
    described: Annotated[list["Everywhere"], Arg("those below")] = dataclasses.field(default_factory=list)
    maybe: Optional["Everywhere"] = None
    several: tuple["Everywhere", ...] = ()
    listed: list["Everywhere"] | None = None
    text: Union[str, list["Everywhere"]] = ""
    old: List["Everywhere"] = dataclasses.field(default_factory=list)
    own: Self | None = None


@attrs.frozen
class Frozen:
    kids: list["Frozen"] = attrs.field(factory=list)
    best: Optional["Frozen"] = None


@dataclasses.dataclass
class Left:
    right: Optional["Right"] = None


@dataclasses.dataclass
class Right:
    lefts: list["Left"]


class Branch(TypedDict, total=False):
    kids: List["Branch"]
    when: datetime.date


class Chain(NamedTuple):
    day: datetime.date
    rest: Optional["Chain"] = None


@dataclasses.dataclass
class Inherits(Left):
    more: int = 0


@dataclasses.dataclass
class Box(Generic[T]):
    content: T
    others: list["Box[T]"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Days(Box[datetime.date]):
    note: str = ""


class Page(TypedDict, Generic[T]):
    items: list[T]


class DayPage(Page[datetime.date]):
    number: int


class Later(typing_extensions.TypedDict):
    day: typing_extensions.ReadOnly[datetime.date]
    note: typing_extensions.NotRequired[str]


Bare = collections.namedtuple("Bare", "left right")


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


@dataclasses.dataclass
class HasInit:
    name: str
    scale: dataclasses.InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        self.size = scale * 2


DAY = datetime.date(2026, 2, 28)
Tree = typing_extensions.TypeAliasType("Tree", "dict[str, Tree] | datetime.date")
Two = typing_extensions.TypeAliasType("Two", tuple[T, T], type_params=(T,))


class Level(enum.IntEnum):
    LOW = 1


class Mixed(enum.Enum):
    TWO = "two"
    HALF = 0.5
    NONE = None


@dataclasses.dataclass(frozen=True)
class Held:
    day: datetime.date


def taking(hint: Any) -> Callable[..., None]:
    def function(value: Any) -> None: ...

    function.__annotations__["value"] = hint
    return function


def converted(hint: Any, json: Any) -> Any:
    """What a function whose parameter is annotated so gets for a JSON value that its schema admits."""

    signature = describe(taking(hint))
    assert Validator(signature.input_schema).problems({"value": json}) == []
    return signature.bind({"value": json})["value"]


@pytest.mark.parametrize(
    ("hint", "json", "value"),
    [
        # References of a class to itself, in all places.
        (Leaf, {"name": "a", "kids": [{"name": "b"}]}, Leaf("a", [Leaf("b")])),
        (list[Leaf], [{"name": "a", "kids": [{"name": "b"}]}], [Leaf("a", [Leaf("b")])]),
        (Everywhere, {"named": {"a": {}}}, Everywhere(named={"a": Everywhere()})),
        (Everywhere, {"described": [{}]}, Everywhere(described=[Everywhere()])),
        (Everywhere, {"maybe": {"maybe": None}}, Everywhere(maybe=Everywhere())),
        (Everywhere, {"several": [{}]}, Everywhere(several=(Everywhere(),))),
        (Everywhere, {"listed": [{}]}, Everywhere(listed=[Everywhere()])),
        (Everywhere, {"text": [{}]}, Everywhere(text=[Everywhere()])),
        (Everywhere, {"text": "a"}, Everywhere(text="a")),
        (Everywhere, {"old": [{}]}, Everywhere(old=[Everywhere()])),
        (Everywhere, {"own": {}}, Everywhere(own=Everywhere())),
        (Frozen, {"kids": [{}], "best": {}}, Frozen([Frozen()], Frozen())),
        (Left, {"right": {"lefts": [{}]}}, Left(Right([Left()]))),
        (Inherits, {"right": {"lefts": []}, "more": 2}, Inherits(Right([]), 2)),
        (Branch, {"kids": [{"when": "2026-02-28"}]}, {"kids": [{"when": DAY}]}),
        (Chain, {"day": "2026-02-28", "rest": {"day": "2026-02-28"}}, Chain(DAY, Chain(DAY))),
        # Generics.
        (Box[datetime.date], {"content": "2026-02-28", "others": [{"content": "2026-02-28"}]}, Box(DAY, [Box(DAY)])),
        (Box, {"content": "2026-02-28"}, Box("2026-02-28")),
        (Days, {"content": "2026-02-28", "note": "n"}, Days(DAY, note="n")),
        (DayPage, {"items": ["2026-02-28"], "number": 1}, {"items": [DAY], "number": 1}),
        (Page[datetime.date], {"items": ["2026-02-28"]}, {"items": [DAY]}),
        (Bound, {"name": "a"}, Leaf("a")),
        (list[Bound], [{"name": "a"}], [Leaf("a")]),
        (Either, "a", "a"),
        (list[Either], [1.0, "a"], [1, "a"]),
        (T, [1], [1]),
        (Tree, {"a": {"b": "2026-02-28"}}, {"a": {"b": DAY}}),
        (Two[datetime.date], ["2026-02-28", "2026-02-28"], (DAY, DAY)),
        (Optional[Two[int]], [1, 2], (1, 2)),
        # `Annotated` around a record, in all places.
        (Annotated[Branch, Arg("a")], {"when": "2026-02-28"}, {"when": DAY}),
        (list[Annotated[Branch, Arg("a")]], [{"when": "2026-02-28"}], [{"when": DAY}]),
        (dict[str, Annotated[Branch, "a"]], {"a": {"when": "2026-02-28"}}, {"a": {"when": DAY}}),
        (Optional[Annotated[Branch, Arg("a")]], {"when": "2026-02-28"}, {"when": DAY}),
        (tuple[Annotated[Branch, Arg("a")], int], [{"when": "2026-02-28"}, 1], ({"when": DAY}, 1)),
        (Annotated[Leaf, Arg("a")], {"name": "a"}, Leaf("a")),
        (Annotated[list[Leaf], Arg(min_length=1)], [{"name": "a"}], [Leaf("a")]),
        # Abstract and bare containers.
        (Iterable[int], [1.0], [1]),
        (Optional[Iterable[int]], [1.0], [1]),
        (Collection[Leaf], [{"name": "a"}], [Leaf("a")]),
        (Collection[Leaf] | None, [{"name": "a"}], [Leaf("a")]),
        (Optional[List], [1, "a"], [1, "a"]),
        (Optional[Dict], {"a": 1}, {"a": 1}),
        (Optional[typing.Sequence], [1], [1]),
        (Sequence | None, None, None),
        (typing.Tuple, [1, 2], (1, 2)),
        (Optional[tuple], [1, 2], (1, 2)),
        (set, [1, "a"], {1, "a"}),
        (Mapping[str, Leaf], {"a": {"name": "a"}}, {"a": Leaf("a")}),
        (collections.deque[int], [1.0], collections.deque([1])),
        (collections.OrderedDict[str, Leaf], {"a": {"name": "a"}}, collections.OrderedDict(a=Leaf("a"))),
        (collections.defaultdict[str, list[int]], {"a": [1.0]}, {"a": [1]}),
        (collections.Counter[str], {"a": 2.0}, collections.Counter(a=2)),
        (collections.Counter, {"a": 2.0}, collections.Counter(a=2)),
        (Bare, {"left": 1, "right": [2]}, Bare(1, [2])),
        (Bare | None, {"left": 1, "right": [2]}, Bare(1, [2])),
        # Keys.
        (dict[datetime.date, int], {"2026-02-28": 1.0}, {DAY: 1}),
        (dict[Level, int], {"1": 1}, {Level.LOW: 1}),
        (dict[int | str, int], {"1": 1, "a": 2}, {"1": 1, "a": 2}),
        (dict[int | Path, int], {"1": 1, "a": 2}, {1: 1, Path("a"): 2}),
        (dict[Path, int], {"a/b": 1}, {Path("a/b"): 1}),
        (dict[bool, int], {"true": 1, "false": 2}, {True: 1, False: 2}),
        (dict[float, str], {"1.5": "a", "2": "b"}, {1.5: "a", 2.0: "b"}),
        (dict[datetime.timedelta, int], {"90": 1}, {datetime.timedelta(seconds=90): 1}),
        (dict[str | None, int], {"a": 1}, {"a": 1}),
        (dict[int | None, int], {"1": 1, "null": 2}, {1: 1, None: 2}),
        (dict[Mixed, int], {"two": 1, "0.5": 2, "null": 3}, {Mixed.TWO: 1, Mixed.HALF: 2, Mixed.NONE: 3}),
        (dict[pydantic.AnyUrl, int], {"http://a.b/": 1}, {pydantic.AnyUrl("http://a.b/"): 1}),
        # Numbers become what is asked for, in all places.
        (list[float], [1, 2.5], [1.0, 2.5]),
        (Optional[tuple[float, float]], [1, 2], (1.0, 2.0)),
        (int | float | datetime.date, 3.0, 3.0),
        (float | datetime.date, 3, 3.0),
        # Other classes of the standard library.
        (complex, "1+2j", 1 + 2j),
        (list[complex], ["1j"], [1j]),
        (fractions.Fraction, "1/3", fractions.Fraction(1, 3)),
        (re.Pattern, "(?P<a>x)+", re.compile("(?P<a>x)+")),
        (re.Pattern[str] | None, "a", re.compile("a")),
        (zoneinfo.ZoneInfo, "UTC", zoneinfo.ZoneInfo("UTC")),
        (os.PathLike[str], "a/b", PurePosixPath("a/b")),
        (typing.Hashable, "a", "a"),
        # Flags, which are numbers, and an enumeration whose members are records.
        (Flags, 3, Flags.READ | Flags.WRITE),
        (dict[Flags, int], {"3": 1}, {Flags.READ | Flags.WRITE: 1}),
        (Corner, {"x": 1}, Corner.NEAR),
        (Annotated[list[int], pydantic.FailFast()], [1], [1]),
        (Annotated[float, Arg(le=math.inf)], 2, 2.0),
        (Annotated[float, Arg(le=math.inf)] | None, 2.5, 2.5),
        # Paths and addresses of each kind.
        (PurePosixPath, "a/b", PurePosixPath("a/b")),
        (list[ipaddress.IPv4Address], ["127.0.0.1"], [ipaddress.IPv4Address("127.0.0.1")]),
        (ipaddress.IPv6Network | None, "fe80::/64", ipaddress.IPv6Network("fe80::/64")),
        # The alternative that knows all members.
        (Narrow | Wide, {"name": "a", "size": 2}, Wide("a", 2)),
        (Wide | Narrow, {"name": "a"}, Wide("a")),
        (list[Narrow | Wide], [{"name": "a", "size": 2}, {"name": "a"}], [Wide("a", 2), Narrow("a")]),
        (Narrow | Wide, {"name": "a", "size": 2, "other": 3}, Wide("a", 2)),
        (list[Narrow] | list[Wide], [{"name": "a", "size": 2}], [Wide("a", 2)]),
        (dict[str, Narrow] | dict[str, Wide], {"k": {"name": "a", "size": 2}}, {"k": Wide("a", 2)}),
        (NarrowModel | WideModel, {"name": "a", "size": 2}, WideModel(name="a", size=2)),
        (list[NarrowModel | WideModel], [{"name": "a", "size": 2}], [WideModel(name="a", size=2)]),
        (list[NarrowModel] | list[WideModel], [{"name": "a", "size": 2}], [WideModel(name="a", size=2)]),
        (Narrow | WideModel, {"name": "a", "size": 2}, WideModel(name="a", size=2)),
        (Optional[Narrow | Wide], {"name": "a", "size": 2}, Wide("a", 2)),
        # Of typing_extensions.
        (Later, {"day": "2026-02-28"}, {"day": DAY}),
        (Optional[Later], {"day": "2026-02-28", "note": "n"}, {"day": DAY, "note": "n"}),
    ],
)
def test_an_annotation_is_right_at_every_call(hint: Any, json: Any, value: Any) -> None:
    found = converted(hint, json)
    assert found == value
    assert type(found) is type(value) or isinstance(found, dict)
    shape = describe_result(hint)
    if shape is not None:
        assert Validator(shape.schema).problems(shape.dump(value)) == []
    assert to_json(value) is not None or value is None


@pytest.mark.parametrize("hint", [typing.Iterator[float], typing.Generator[float, None, None], typing.Generator])
def test_what_is_read_once_is_a_list(hint: Any) -> None:
    found = converted(hint, [1, 2.5])
    assert isinstance(found, typing.get_origin(hint))
    shape = describe_result(hint)
    assert shape is not None
    assert shape.dump(found) == {"result": [1, 2.5]}


@dataclasses.dataclass
class Order:
    price: float
    count: int = 1
    total: float = dataclasses.field(init=False)
    kind: str = dataclasses.field(init=False, default="order")
    _seen: int = dataclasses.field(init=False, default=0)

    def count_up(self) -> "Order":
        self.total = self.price * self.count
        return self


@attrs.define
class Sum:
    parts: list[float]
    total: float = attrs.field(init=False)
    _seen: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.total = sum(self.parts)


def test_fields_that_nobody_gives_are_part_of_results() -> None:
    order, shape = converted(Order, {"price": 2, "total": 9}), describe_result(Order)
    assert not hasattr(order, "total")
    assert shape is not None
    for shown in (
        {"price": 2.0, "count": 1, "kind": "order"},
        {"price": 2.0, "count": 1, "total": 2.0, "kind": "order"},
    ):
        assert shape.dump(order) == shown
        assert Validator(shape.schema).problems(shown) == []
        order.count_up()
    whole = describe_result(Sum)
    assert whole is not None
    assert whole.dump(converted(Sum, {"parts": [1, 2]})) == {"parts": [1.0, 2.0], "total": 3.0}
    assert whole.schema["properties"].keys() == {"parts", "total"}


def test_a_flag_is_at_most_all_flags() -> None:
    (schema,) = describe(taking(Flags)).input_schema["properties"].values()
    assert schema == {"type": "integer", "minimum": 0, "maximum": 3}


@dataclasses.dataclass
class BeyondJson:
    big: int = 2**70
    several: tuple[int, ...] = (2**70,)
    number: float = math.inf
    other: Any = dataclasses.field(default=object(), metadata={"description": "other"})


class BeyondJsonModel(pydantic.BaseModel):
    big: int = 2**70
    number: float = math.inf


@pytest.mark.parametrize(
    "hint",
    [
        *(BeyondJson, BeyondJsonModel),
        Annotated[int, Arg(examples=[2**70])],
        Annotated[datetime.date, pydantic.Field(examples=[DAY])],
    ],
)
def test_a_default_or_example_that_no_message_can_carry_is_left_out(hint: Any) -> None:
    """It would hide all other tools of the list."""
    text = encode(describe(taking(hint)).input_schema)
    assert b"default" not in text
    assert b"examples" not in text
    shape = describe_result(hint)
    assert shape is not None
    encode(shape.schema)


class Scores(dict[str, int]):
    pass


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("hint", "value", "json"),
    [
        (dict[tuple[int, int], int], {(1, 2): 3}, {"[1,2]": 3}),
        (dict[Held, int], {Held(DAY): 3}, {'{"day":"2026-02-28"}': 3}),
        (dict[bool, int], {True: 1}, {"true": 1}),
        (Scores, Scores(a=1), {"a": 1}),
        (Name, Name("a"), {"result": "a"}),
        (dict[str, Name], {"a": Name("b")}, {"a": "b"}),
        (range, range(2), {"result": [0, 1]}),
        (ipaddress.IPv6Address, ipaddress.IPv6Address("fe80::1%eth0"), {"result": "fe80::1%eth0"}),
        (dict[ipaddress.IPv6Address, int], {ipaddress.IPv6Address("fe80::1%eth0"): 1}, {"fe80::1%eth0": 1}),
        (decimal.Decimal, decimal.Decimal("NaN"), {"result": "NaN"}),
        (Annotated[decimal.Decimal, Arg(ge=0)], decimal.Decimal("1E+3"), {"result": "1000"}),
    ],
)
def test_results_of_other_classes(hint: Any, value: Any, json: Any) -> None:
    shape = describe_result(hint)
    assert shape is not None
    assert shape.dump(value) == json
    assert Validator(shape.schema).problems(json) == []


def test_what_is_only_given_to_a_class_is_an_argument_and_no_result() -> None:
    assert converted(HasInit, {"name": "a", "scale": 3}).size == 6
    shape = describe_result(HasInit)
    assert shape is not None
    assert Validator(shape.schema).problems(shape.dump(HasInit("a"))) == []


def test_classes_in_a_function_name_themselves_and_each_other() -> None:
    @dataclasses.dataclass
    class One:
        others: list["Other"]
        own: Optional["One"] = None

    @dataclasses.dataclass
    class Other:
        day: datetime.date

    assert converted(One, {"others": [{"day": "2026-02-28"}]}) == One([Other(DAY)])
    assert converted(dict[str, "One"], {"a": {"others": [], "own": {"others": []}}}) == {"a": One([], One([]))}


class Unhashable:
    __hash__ = None


@dataclasses.dataclass
class Nowhere:
    field: "NotYetDefined"  # noqa: F821  # that is what is tested


@dataclasses.dataclass
class Wrong:
    field: "1 +"  # noqa: F722  # that is what is tested


class Opaque:
    pass


@dataclasses.dataclass
class HoldsOpaque:
    inside: list[Optional[Opaque]]


Loop = typing_extensions.TypeAliasType("Loop", "Loop | None")


def test_a_reference_means_what_its_own_module_says() -> None:
    """typing keeps one `List["Node"]` for all modules, with what it was last resolved to."""
    kinds = ("@dataclasses.dataclass\nclass Node:", "class Node(TypedDict):", "class Node(NamedTuple):")
    for future in ("from __future__ import annotations\n", ""):
        for number, kind in enumerate(kinds):
            name = f"own_node_{number}_{bool(future)}"
            module = sys.modules[name] = types.ModuleType(name)
            source = f"{future}import dataclasses\nfrom typing import *\n{kind}\n    kids: List['Node']\n"
            source += "def takes(value: Optional['Node']) -> None: ...\n"
            exec(compile(source, name, "exec", dont_inherit=True), vars(module))
            bound = describe(module.takes).bind({"value": {"kids": [{"kids": []}]}})["value"]
            kid = bound["kids"][0] if isinstance(bound, dict) else bound.kids[0]
            assert type(kid) is (dict if isinstance(bound, dict) else module.Node)


Looped = typing.Union[int, list["Looped"]]


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (Nowhere, "the annotations of Nowhere name 'NotYetDefined', which .* does not define; define it before"),
        (list["Unknown"], "'Unknown', which .* does not define"),  # noqa: F821  # that is what is tested
        (Wrong, "the annotations of Wrong name what cannot be evaluated: "),
        (set[dict[str, int]], r"the members of set\[dict\[str, int\]\] cannot be hashed; use a list"),
        (set[Leaf], "cannot be hashed; use a list"),
        (frozenset[list[int]], "cannot be hashed"),
        (Opaque, "Opaque has no JSON form; use builtins, a dataclass"),
        (HoldsOpaque, "HoldsOpaque.inside: Opaque has no JSON form"),
        (Callable[[], int], "has no JSON form"),
        (dict[tuple[int, int], int], "the keys of a JSON object are strings"),
        (dict[Held, int], "the keys of a JSON object are strings"),
        (dict[Leaf, int], r"the keys of dict\[.*Leaf, int\] cannot be hashed"),
        (Loop, "stands for itself"),
        (re.Pattern[bytes], "has no JSON form"),
        (
            Looped,
            "an alias that stands in itself is declared by `type`, or as a typing_extensions.TypeAliasType",
        ),
        (typing.Literal[2**70], "the Literal has values JSON cannot carry: .*64-bit"),
        (enum.Enum("Big", {"ONE": 2**70}), "the enumeration Big has values JSON cannot carry: .*64-bit"),
        (enum.Enum("Nothing", {}), "the enumeration Nothing has no values"),
        (Annotated[int, Arg(ge=2**70)], "its schema cannot be sent: .*64-bit"),
        (Annotated[int, Arg("\ud800")], "its schema cannot be sent: .*surrogates"),
        (Ever[int], "a class in it holds itself with other parameters each time, without an end"),
        (Renames, "the __init__ of Renames takes no 'size', which is its field"),
        (RenamesHere, "the __init__ of RenamesHere takes no 'size', which is its field"),
    ],
)
def test_an_annotation_is_refused_in_one_sentence(hint: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"function\(\): .*{said}") as caught:
        converted(hint, None)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


@attrs.frozen
class Positive:
    number: int = attrs.field(validator=attrs.validators.gt(0))


def test_the_text_of_a_validator_of_attrs_is_told_without_the_attribute() -> None:
    with pytest.raises(ValueError, match="'number' must be > 0: 0 @") as caught:
        converted(Positive, {"number": 0})
    assert "Attribute(" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "json"),
    [
        ({DAY: 1}, {"2026-02-28": 1}),
        ({Path("a/b"): 1}, {"a/b": 1}),
        ((each for each in (1, 2)), [1, 2]),
        (collections.deque([1]), [1]),
        ({1: 1}.values(), [1]),
    ],
)
def test_results(value: Any, json: Any) -> None:
    assert to_json(value) == json
