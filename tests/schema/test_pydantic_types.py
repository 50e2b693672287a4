"""Pydantic's models and `Field`, and annotated-types, in what users write: arguments, results, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime
import re
import subprocess
import sys
from typing import Annotated, Any, Literal

import annotated_types
import attrs
import pydantic
import pydantic.dataclasses
import pytest

import trimcp
import trimcp.testing
from trimcp.schema.signature import describe


class Item(pydantic.BaseModel):
    """One thing in a basket."""

    name: Annotated[str, pydantic.Field(min_length=1)]
    how_many: int = pydantic.Field(default=1, alias="howMany", ge=1, le=5, description="pieces")
    tags: list[str] = pydantic.Field(default_factory=list)


class Basket(pydantic.BaseModel):
    items: list[Item]
    gift: Item | None = None
    on: datetime.date | None = None

    @pydantic.field_validator("items")
    @classmethod
    def not_too_heavy(cls, items: list[Item]) -> list[Item]:
        if sum(item.how_many for item in items) > 7:
            raise ValueError("too heavy")
        return items


DAY = datetime.date(2026, 2, 28)


class Node(pydantic.BaseModel):
    children: list[Node] = []


@pydantic.dataclasses.dataclass
class Point:
    x: Annotated[int, pydantic.Field(ge=0)]
    y: int = 0


@dataclasses.dataclass
class Route:
    """A dataclass of ours that holds Pydantic's."""

    via: list[Point]
    item: Item | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


def double(value: int) -> int:
    return value * 2


def even(value: int) -> int:
    if value % 2:
        raise ValueError("must be even")
    return value


async def called(function: Any, arguments: dict[str, Any]) -> trimcp.CallToolResult:
    """What a tool answers that is this function."""
    server = trimcp.Server("x")
    server.tool(name="it")(function)
    async with trimcp.testing.connected(server) as session:
        return await session.call_tool("it", arguments)


def schema_of(function: Any) -> dict[str, Any]:
    return describe(function).input_schema


def text_of(result: trimcp.CallToolResult) -> str:
    return "".join(block.text for block in result.content if isinstance(block, trimcp.TextContent))


FIELD = Annotated[int, pydantic.Field(ge=1, le=5, description="stars")]


@pytest.mark.parametrize(
    ("hint", "schema"),
    [
        (FIELD, {"type": "integer", "minimum": 1, "maximum": 5, "description": "stars"}),
        (
            Annotated[int, annotated_types.Interval(ge=1, lt=5)],
            {"type": "integer", "minimum": 1, "exclusiveMaximum": 5},
        ),
        (Annotated[list[int], annotated_types.Len(1, 5)], {"minItems": 1, "maxItems": 5}),
        (pydantic.PositiveInt, {"type": "integer", "exclusiveMinimum": 0}),
        (pydantic.conint(ge=1), {"type": "integer", "minimum": 1}),
        (pydantic.constr(pattern="^a"), {"type": "string", "pattern": "^a"}),
        (Annotated[str, pydantic.Field(title="T", examples=["a"])], {"title": "T", "examples": ["a"]}),
        (Annotated[int, pydantic.AfterValidator(even), trimcp.Arg(ge=1)], {"type": "integer", "minimum": 1}),
        (Annotated[FIELD | None, trimcp.Arg("s")], {"description": "s"}),
        (Annotated[str, pydantic.StringConstraints(strip_whitespace=True, max_length=3)], {"maxLength": 3}),
    ],
)
def test_what_stands_in_an_annotated_is_in_the_schema(hint: Any, schema: dict[str, Any]) -> None:
    def tool(value: hint) -> None: ...  # that is what is tested

    tool.__annotations__["value"] = hint
    assert schema.items() <= schema_of(tool)["properties"]["value"].items()


async def test_bounds_of_a_field_are_checked(autojump_clock: Any) -> None:
    async def rate(stars: FIELD) -> int:
        return stars

    assert (await called(rate, {"stars": 5})).is_error is False
    refused = await called(rate, {"stars": 9})
    assert refused.is_error is True
    assert "must be at most 5" in text_of(refused)


async def test_what_only_pydantic_reads_is_done_by_pydantic(autojump_clock: Any) -> None:
    async def half(
        value: Annotated[int, pydantic.AfterValidator(even)],
        word: Annotated[str, annotated_types.Predicate(str.islower)] = "a",
        values: list[Annotated[int, pydantic.AfterValidator(double)]] = [],  # noqa: B006 - it is not changed
    ) -> list[Any]:
        return [value, word, values]

    good = await called(half, {"value": 2, "values": [1, 2]})
    assert good.structured_content == {"result": [2, "a", [2, 4]]}
    odd = await called(half, {"value": 3, "word": "A"})
    assert "must be even @ value" in text_of(odd)
    assert "@ word" in text_of(odd)


async def test_a_model_as_argument_and_result(autojump_clock: Any) -> None:
    async def pack(basket: Basket, extra: Item | None = None) -> Basket:
        assert isinstance(basket, Basket)
        assert isinstance(basket.items[0], Item)
        return basket

    arguments = {"basket": {"items": [{"name": "tea", "howMany": 2}], "on": "2026-01-02"}}
    result = await called(pack, arguments)
    assert result.structured_content == {
        "items": [{"name": "tea", "howMany": 2, "tags": []}],
        "gift": None,
        "on": "2026-01-02",
    }
    heavy = {"basket": {"items": [{"name": "tea", "howMany": 4}] * 2}}
    assert "too heavy @ basket.items" in text_of(await called(pack, heavy))
    many = {"basket": {"items": [{"name": "tea", "howMany": 9}]}}
    assert "must be at most 5 @ basket.items[0].howMany" in text_of(await called(pack, many))


def test_the_schema_of_models_is_written_out_and_has_no_made_up_titles() -> None:
    def pack(basket: Basket, other: Item) -> None: ...

    item = {
        "type": "object",
        "description": "One thing in a basket.",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "howMany": {"type": "integer", "minimum": 1, "maximum": 5, "default": 1, "description": "pieces"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name"],
    }
    assert schema_of(pack) == {
        "type": "object",
        "properties": {
            "basket": {
                "type": "object",
                "properties": {
                    "items": {"type": "array", "items": item},
                    "gift": {"anyOf": [item, {"type": "null"}], "default": None},
                    "on": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}], "default": None},
                },
                "required": ["items"],
            },
            "other": item,
        },
        "required": ["basket", "other"],
        "additionalProperties": False,
    }


async def test_records_of_ours_may_hold_models_and_models_may_recur(autojump_clock: Any) -> None:
    async def travel(
        route: Route, node: Node, kind: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
    ) -> Route:
        assert isinstance(route.via[0], Point)
        assert isinstance(node.children[0], Node)
        assert isinstance(kind, Cat)
        return route

    arguments = {
        "route": {"via": [{"x": 1}], "item": {"name": "a"}},
        "node": {"children": [{}]},
        "kind": {"kind": "cat", "lives": 9},
    }
    result = await called(travel, arguments)
    assert result.structured_content == {
        "via": [{"x": 1, "y": 0}],
        "item": {"name": "a", "howMany": 1, "tags": []},
    }
    arguments["route"]["via"][0]["x"] = -1
    assert "must be at least 0 @ route.via[0].x" in text_of(await called(travel, arguments))


async def test_a_field_gives_a_parameter_its_default_and_its_name(autojump_clock: Any) -> None:
    async def order(
        count: int = pydantic.Field(2, alias="howMany", ge=1),
        notes: list[str] = pydantic.Field(default_factory=list),  # noqa: B008 - what is tested
        day: Annotated[datetime.date, pydantic.Field(description="which day")] = datetime.date(2026, 1, 2),
        size: Annotated[Literal["s", "l"], pydantic.Field(default="s")] = "l",
        must: str = pydantic.Field(description="needed"),
    ) -> list[Any]:
        notes.append("seen")
        return [count, notes, day, size, must]

    schema = schema_of(order)
    assert list(schema["properties"]) == ["howMany", "notes", "day", "size", "must"]
    assert schema["properties"]["howMany"] == {"type": "integer", "minimum": 1, "default": 2}
    assert schema["properties"]["day"]["description"] == "which day"
    assert schema["properties"]["day"]["default"] == "2026-01-02"
    assert schema["required"] == ["must"]
    for _ in range(2):  # a default is nobody else's
        result = await called(order, {"must": "x"})
        assert result.structured_content == {"result": [2, ["seen"], "2026-01-02", "l", "x"]}
    result = await called(order, {"must": "x", "howMany": 3})
    assert result.structured_content == {"result": [3, ["seen"], "2026-01-02", "l", "x"]}
    assert "must be at least 1 @ howMany" in text_of(await called(order, {"must": "x", "howMany": 0}))


async def test_strict_models_take_what_json_says_of_a_date(autojump_clock: Any) -> None:
    class Strict(pydantic.BaseModel, strict=True):
        on: datetime.date
        to: tuple[int, int]

    async def tool(it: Strict) -> Strict:
        return it

    tool.__annotations__ = {"it": Strict, "return": Strict}
    result = await called(tool, {"it": {"on": "2026-01-02", "to": [1, 2]}})
    assert result.structured_content == {"on": "2026-01-02", "to": [1, 2]}


@attrs.frozen
class Ours:
    n: int


class Marker:
    """Has a bound that we know, and more that we do not."""

    def __init__(self) -> None:
        self.ge, self.odd = 1, True

    def __repr__(self) -> str:
        return "Marker()"


@dataclasses.dataclass
class Plain:
    n: int = pydantic.Field(default=3, ge=1)


@attrs.frozen
class PlainOfOurs:
    n: int = pydantic.Field(default=3, ge=1)


@attrs.frozen
class Renamed:
    n: Annotated[int, pydantic.Field(alias="number")]


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (PlainOfOurs, r"PlainOfOurs\.n: an alias or a default"),
        (list[Renamed], r"Renamed\.n: an alias"),
        (Annotated[int, Marker()], r"tool\(\): the parameter 'value' .*Marker\(\) in its Annotated"),
        (list[Annotated[int, Marker()]], "Marker"),
        (Annotated[Ours, pydantic.AfterValidator(even)], "Pydantic says: .*Ours"),
        (Annotated[int, pydantic.Field(alias="a", validation_alias=pydantic.AliasPath("a", 0))], "no plain name"),
        (Annotated[int, pydantic.Field(default_factory=lambda data: data["x"])], "only a Pydantic model"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(hint: Any, text: str) -> None:
    async def tool(value: Any) -> None: ...

    tool.__annotations__["value"] = hint
    with pytest.raises(TypeError, match=text):
        trimcp.Server("x").tool(tool)


@pytest.mark.parametrize("extra", [Marker, object(), {"unit": "m"}])
async def test_what_is_another_librarys_business_is_ignored(extra: Any) -> None:
    server = trimcp.Server("x")

    async def double(value: int) -> int:
        return 2 * value

    double.__annotations__ = {"value": Annotated[int, extra], "return": Annotated[int, extra]}
    server.tool(double)
    async with trimcp.testing.connected(server) as session:
        assert (await session.call_tool("double", {"value": 3})).structured_content == {"result": 6}


@pytest.mark.parametrize("hint", [Annotated[int, Marker()], tuple[Ours, Annotated[int, pydantic.PlainSerializer(str)]]])
def test_so_it_is_in_results(hint: Any) -> None:
    async def tool() -> Any: ...

    tool.__annotations__["return"] = hint
    with pytest.raises(TypeError, match=r"Marker|Pydantic says: .*Ours"):
        trimcp.Server("x").tool(tool)


@pytest.mark.parametrize(
    ("hint", "value", "json"),
    [
        (list[Annotated[int, pydantic.PlainSerializer(str)]], [1], ["1"]),
        (pydantic.StrictInt, 1, 1),
        (Annotated[int, pydantic.AfterValidator(double)], 1, 1),
        (dict[str, Annotated[datetime.date, pydantic.Field(gt=DAY)]], {"a": DAY}, {"a": "2026-02-28"}),
        (tuple[pydantic.StrictInt, datetime.timedelta], (1, datetime.timedelta(seconds=90)), [1, "PT1M30S"]),
        (pydantic.JsonValue, {"a": [1]}, {"a": [1]}),
    ],
)
async def test_what_only_pydantic_reads_in_a_result_it_writes(
    hint: Any, value: Any, json: Any, autojump_clock: Any
) -> None:
    async def tool() -> Any:
        return value

    tool.__annotations__["return"] = hint
    structured = (await called(tool, {})).structured_content
    assert structured in (json, {"result": json})


class When(pydantic.BaseModel):
    at: datetime.datetime
    time: datetime.time = datetime.time(9)
    naive: pydantic.NaiveDatetime = datetime.datetime(2026, 1, 1)
    pattern: re.Pattern[str] = re.compile("a")


async def test_a_model_is_held_to_no_format_that_its_values_lack(autojump_clock: Any) -> None:
    async def back(when: When) -> When:
        return when.model_copy(update={"at": when.at.replace(tzinfo=None)})

    given = {"at": "2026-02-28T12:00:00Z", "time": "09:30", "naive": "2026-02-28T12:00:00", "pattern": "(?P<a>x)"}
    result = await called(back, {"when": given})
    assert result.structured_content == {**given, "at": "2026-02-28T12:00:00", "time": "09:30:00"}


class Wide(pydantic.BaseModel):
    every: datetime.timedelta
    url: pydantic.HttpUrl


async def test_results_are_wider_than_the_formats_of_json_schema(autojump_clock: Any) -> None:
    async def back(wide: Wide) -> Wide:
        return Wide(every=-wide.every, url=pydantic.HttpUrl("http://a.b/?q=|"))

    result = await called(back, {"wide": {"every": "PT1.5S", "url": "http://a.b/"}})
    assert result.structured_content == {"every": "-PT1.5S", "url": "http://a.b/?q=|"}


@dataclasses.dataclass
class Named:
    n: Annotated[int, pydantic.Field(alias="number")]


@pytest.mark.parametrize(
    ("hint", "json", "value"),
    [
        (Plain, {}, Plain(3)),
        (list[Plain], [{"n": 2}], [Plain(2)]),
        (Named, {"number": 3}, Named(3)),
        (Annotated[int, pydantic.Field(json_schema_extra={"x-unit": "m"}, ge=1)], 3, 3),
    ],
)
async def test_a_field_of_a_dataclass_is_for_pydantic(hint: Any, json: Any, value: Any, autojump_clock: Any) -> None:
    async def back(it: Any) -> Any:
        assert it == value
        return it

    back.__annotations__.update({"it": hint, "return": hint})
    result = await called(back, {"it": json})
    assert not result.is_error, text_of(result)
    if hint is Named:
        assert result.structured_content == {"n": 3}


def test_the_extra_of_a_schema_is_shown() -> None:
    async def tool(it: Annotated[int, pydantic.Field(json_schema_extra={"x-unit": "m"}, ge=1)] = 3) -> None: ...

    assert schema_of(tool)["properties"]["it"] == {"type": "integer", "minimum": 1, "x-unit": "m", "default": 3}


async def test_a_model_in_other_results(autojump_clock: Any) -> None:
    server = trimcp.Server("x")

    @server.resource("items://one")
    async def one() -> Item:
        return Item(name="tea", howMany=2)

    async with trimcp.testing.connected(server) as session:
        (contents,) = (await session.read_resource("items://one")).contents
    assert isinstance(contents, trimcp.wire.TextResourceContents)
    assert '"howMany": 2' in contents.text


async def test_a_model_that_cannot_be_serialized_is_a_crash(autojump_clock: Any) -> None:
    class Broken(pydantic.BaseModel):
        n: int

        @pydantic.field_serializer("n")
        def fail(self, value: int) -> int:
            raise ValueError("secret")

    async def tool() -> Any:
        return Broken(n=1)

    with pytest.raises(trimcp.RemoteError) as caught:
        await called(tool, {})
    assert "secret" not in str(caught.value)


def test_nobody_loads_pydantic_who_does_not_use_it() -> None:
    program = """
import sys, attrs, trimcp
@attrs.frozen
class A:
    n: int
server = trimcp.Server("x")
@server.tool
async def it(a: A) -> A: ...
print("pydantic" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"
