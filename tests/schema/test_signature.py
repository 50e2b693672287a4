"""Tests of `trimcp.schema.signature`: functions and their results."""

from __future__ import annotations

import datetime
import enum
import functools
import inspect
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import attrs
import pytest

from tests.yardsticks import assert_costs
from trimcp.schema.convert import ConversionError
from trimcp.schema.hints import Arg
from trimcp.schema.signature import ResultShape, describe, describe_result
from trimcp.schema.validator import Validator, check_author_schema


class Unit(enum.StrEnum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Untold:
    """Has no JSON form."""


@attrs.frozen
class Place:
    """Where on Earth.

    Attributes:
        latitude: degrees north
    """

    latitude: Annotated[float, Arg(ge=-90, le=90)]
    longitude: float


def forecast(city: Annotated[str, Arg("The city", min_length=1)], days: int = 3, unit: Unit = Unit.CELSIUS) -> str:
    """Fetch the forecast.

    Args:
        city: overruled by the annotation
        days: how many days
    """
    return f"{city} {days} {unit}"


def test_a_function_is_described() -> None:
    signature = describe(forecast)
    assert signature.name == "forecast"
    assert signature.description == "Fetch the forecast."
    assert signature.input_schema == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "description": "The city"},
            "days": {"type": "integer", "description": "how many days", "default": 3},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    assert list(signature.input_schema["properties"]) == ["city", "days", "unit"]
    assert list(signature.parameters) == ["city", "days", "unit"]
    assert signature.input_schema["properties"]["days"]["default"] == 3
    assert "city" in signature.input_schema["required"]
    assert signature.return_type is str
    assert signature.bind({"city": "Oslo", "unit": "F"}) == {"city": "Oslo", "unit": Unit.FAHRENHEIT}


def test_no_parameters() -> None:
    def nothing() -> None: ...

    assert describe(nothing).input_schema == {"type": "object", "properties": {}, "additionalProperties": False}
    assert describe(nothing).description == ""


def test_builtins_are_bound_without_work() -> None:
    def plain(a: str, b: int, c: float = 1.0, *, d: bool = True, e: list[str] | None = None, f: Any = 1) -> None: ...

    arguments = {"a": "x", "b": 2, "c": 3.5, "e": ["y"]}
    assert describe(plain).bind(arguments) is arguments


def test_a_whole_number_arrives_as_an_int_however_it_was_written() -> None:
    def count(n: int, m: int | None = None, k: int | float = 0) -> None: ...

    bound = describe(count).bind({"n": 3.0, "m": None, "k": 2.0})
    assert bound == {"n": 3, "m": None, "k": 2.0}
    assert type(bound["n"]) is int
    assert type(bound["k"]) is float


def test_a_number_arrives_as_a_float_however_it_was_written() -> None:
    def weigh(n: float, m: float | None = None, k: int | float = 0, each: tuple[float, ...] = ()) -> None: ...

    bound = describe(weigh).bind({"n": 3, "m": None, "k": 2, "each": [1, 2.5]})
    assert [type(bound[name]) for name in ("n", "m", "k")] == [float, type(None), int]
    assert [type(each) for each in bound["each"]] == [float, float]


def test_everything_nested_is_converted() -> None:
    def go(places: list[Place], when: datetime.date, key: uuid.UUID, data: bytes, units: set[Unit]) -> None: ...

    bound = describe(go).bind(
        {
            "places": [{"latitude": 1, "longitude": 2.5}],
            "when": "2026-02-28",
            "key": "12345678-1234-5678-1234-567812345678",
            "data": "aGk=",
            "units": ["C"],
        }
    )
    assert bound == {
        "places": [Place(1, 2.5)],
        "when": datetime.date(2026, 2, 28),
        "key": uuid.UUID("12345678-1234-5678-1234-567812345678"),
        "data": b"hi",
        "units": {Unit.CELSIUS},
    }


def test_conversion_errors_name_all_places_and_echo_nothing() -> None:
    def go(data: bytes, times: list[datetime.date]) -> None: ...

    signature = describe(go)
    with pytest.raises(ConversionError) as caught:
        signature.bind({"data": "secret!", "times": ["2026-01-01", "2026-02-30"]})
    assert caught.value.problems == ["must be valid base64 text @ $.data", "must be a valid date @ $.times[1]"]
    assert isinstance(caught.value, ValueError)


class Marker:
    pass


def test_injected_parameters_stay_out_of_the_schema() -> None:
    def ask(city: str, ctx: Untold, name: Annotated[str, Marker()] = "") -> None: ...

    seen: list[str] = []

    def injected(parameter: inspect.Parameter, hint: Any) -> bool:
        seen.append(parameter.name)
        return hint is Untold or any(isinstance(extra, Marker) for extra in getattr(hint, "__metadata__", ()))

    signature = describe(ask, injected=injected)
    assert list(signature.input_schema["properties"]) == ["city"]
    assert [parameter.name for parameter, _ in signature.injected] == ["ctx", "name"]
    assert signature.injected[0][1] is Untold
    assert seen == ["city", "ctx", "name"]


def test_keyword_arguments_are_open() -> None:
    def loose(a: int, **rest: Any) -> None: ...
    def typed(a: int, **rest: datetime.date) -> None: ...

    assert describe(loose).input_schema["additionalProperties"] is True
    signature = describe(typed)
    assert signature.input_schema["additionalProperties"] == {"type": "string", "format": "date"}
    assert signature.bind({"a": 1, "b": "2026-01-01"}) == {"a": 1, "b": datetime.date(2026, 1, 1)}


def positional(a: int, /) -> None: ...
def many(*names: str) -> None: ...
def untold(a: int, what: list[Untold]) -> None: ...
def bounded(a: Annotated[str, Arg(ge=1)]) -> None: ...
def lost(a: Missing) -> None: ...  # noqa: F821  # that is what is tested
def twice(a: Annotated[str, Arg(header="Region")], b: Annotated[int, Arg(header="region")]) -> None: ...
def fraction(a: Annotated[float, Arg(header="Region")]) -> None: ...
def spaced(a: Annotated[str, Arg(header="My Region")]) -> None: ...


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (positional, r"positional\(\): the parameter 'a' is positional-only"),
        (many, r"many\(\): the parameter 'names' takes any number .* list parameter"),
        (untold, r"untold\(\): the parameter 'what' cannot be filled from JSON: Untold has no JSON form; use"),
        (bounded, r"bounded\(\): the parameter 'a' .* ge= does not apply"),
        (lost, r"lost\(\): an annotation names 'Missing'"),
        (twice, r"twice\(\): the parameter 'b' names the header 'region'"),
        (fraction, r"fraction\(\): the parameter 'a' .* only a string, integer or boolean"),
        (spaced, r"spaced\(\): the parameter 'a' .* no name of an HTTP header"),
    ],
)
def test_what_cannot_be_described_is_refused_with_advice(function: Callable[..., Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        describe(function)


def test_a_schema_given_by_hand_excuses_types() -> None:
    signature = describe(untold, loose=True)
    arguments = {"a": 1, "what": [1]}
    assert signature.bind(arguments) is arguments
    assert list(signature.parameters) == ["a", "what"]
    with pytest.raises(TypeError, match="positional-only"):
        describe(positional, loose=True)


def test_headers_are_marked() -> None:
    def go(region: Annotated[str, Arg(header="Region")]) -> None: ...

    assert describe(go).input_schema["properties"]["region"] == {"type": "string", "x-mcp-header": "Region"}


def test_methods_partials_wrappers_and_callable_objects() -> None:
    class Weather:
        def now(self, city: str) -> int:
            """Look outside."""
            return 1

        def __call__(self, day: datetime.date) -> None:
            """Ask again."""

    method = describe(Weather().now)
    assert (method.name, method.description, method.return_type) == ("now", "Look outside.", int)
    assert list(method.parameters) == ["city"]
    partial = describe(functools.partial(forecast, "Oslo"))
    assert partial.name == "forecast"
    assert list(partial.parameters) == ["days", "unit"]

    @functools.wraps(forecast)
    def wrapper(*args: Any, **kwargs: Any) -> str:
        return forecast(*args, **kwargs)

    assert describe(wrapper).input_schema == describe(forecast).input_schema
    called = describe(Weather())
    assert (called.name, called.description) == ("Weather", "Ask again.")

    class Silent:
        def __call__(self) -> None: ...

    assert describe(Silent()).description == ""
    assert called.bind({"day": "2026-01-01"}) == {"day": datetime.date(2026, 1, 1)}


def test_local_names_are_found_in_the_closure() -> None:
    class Local(enum.Enum):
        A = "a"

    def closes(a: Local = Local.A) -> Local:
        return Local.A

    def does_not(a: Local) -> None: ...

    def itself() -> None:
        itself()

    assert describe(closes).bind({"a": "a"}) == {"a": Local.A}
    assert describe(does_not).bind({"a": "a"}) == {"a": Local.A}  # found in the function that defines both
    does_not.__annotations__["a"] = "Elsewhere"
    with pytest.raises(
        TypeError, match=r"does_not\(\): an annotation names 'Elsewhere', which .*test_signature does not"
    ):
        describe(does_not)
    assert describe(itself).name == "itself"


def test_every_schema_is_a_valid_schema() -> None:
    def go(places: list[Place], when: datetime.datetime | None = None, **rest: Place) -> dict[str, list[Place]]: ...

    for function in (go, forecast):
        check_author_schema(describe(function).input_schema)
    shape = describe_result(describe(go).return_type)
    assert shape is not None
    check_author_schema(shape.schema)


def test_binding_builtins_costs_little() -> None:
    def plain(a: str, b: float = 1.0, c: int = 3) -> None: ...

    signature = describe(plain)
    arguments = {"a": "x", "c": 3}

    def bind() -> None:
        for _ in range(1_000):
            signature.bind(arguments)

    assert_costs(bind, at_most=4)


# --- results ---


@attrs.frozen
class Node:
    value: int
    children: list[Node] = attrs.field(factory=list)


class Content:
    pass


class Shown:
    def __str__(self) -> str:
        return "as it is shown"


@pytest.mark.parametrize(
    "annotation",
    [
        *(inspect.Signature.empty, None, type(None), Any, object, str, bytes, str | None, str | bytes | None),
        *(Content, list[Content], list[str | Content], Content | None, dict[str, int] | Content, tuple[Content, ...]),
        Annotated[str, "a text"],
        Shown,
    ],
)
def test_plain_content_has_no_shape(annotation: Any) -> None:
    assert describe_result(annotation, is_content=lambda hint: hint is Content) is None


@pytest.mark.parametrize("annotation", [Untold, list[Untold], Shown | None, Callable[[], int]])
def test_what_has_no_json_form_is_refused_as_a_result(annotation: Any) -> None:
    with pytest.raises(TypeError, match="has no JSON form; use builtins"):
        describe_result(annotation)


def test_objects_are_results_as_they_are() -> None:
    shape = describe_result(Place)
    assert shape is not None
    assert not shape.wrapped
    assert shape.schema == {
        "type": "object",
        "description": "Where on Earth.",
        "properties": {
            "latitude": {"type": "number", "minimum": -90, "maximum": 90, "description": "degrees north"},
            "longitude": {"type": "number"},
        },
        "required": ["latitude", "longitude"],
    }
    assert shape.dump(Place(1, 2)) == {"latitude": 1, "longitude": 2}


@pytest.mark.parametrize(
    ("annotation", "value", "plain"),
    [
        (int, 3, 3),
        (bool, True, True),
        (list[str], ["a"], ["a"]),
        (list[Place], [Place(1, 2)], [{"latitude": 1, "longitude": 2}]),
        (int | None, None, None),
        (Unit, Unit.CELSIUS, "C"),
        (datetime.datetime, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), "2026-01-01T00:00:00+00:00"),
        (Place | Node, Place(1, 2), {"latitude": 1, "longitude": 2}),
    ],
)
def test_other_results_are_wrapped(annotation: Any, value: Any, plain: Any) -> None:
    shape = describe_result(annotation)
    assert shape is not None
    assert shape.wrapped
    assert shape.schema["type"] == "object"
    assert shape.schema["required"] == ["result"]
    assert shape.dump(value) == {"result": plain}
    assert Validator(shape.schema).problems(shape.dump(value)) == []


@pytest.mark.parametrize("annotation", [dict[str, int], dict, dict[str, Any], Node])
def test_root_schemas_say_object(annotation: Any) -> None:
    shape = describe_result(annotation)
    assert shape is not None
    assert not shape.wrapped
    assert shape.schema["type"] == "object"
    assert Validator(shape.schema).is_valid({"value": 1, "children": []} if annotation is Node else {"a": 1})


def test_a_recursive_result() -> None:
    shape = describe_result(Node)
    assert shape is not None
    dumped = shape.dump(Node(1, [Node(2)]))
    assert dumped == {"value": 1, "children": [{"value": 2, "children": []}]}
    assert Validator(shape.schema).problems(dumped) == []
    assert Validator(shape.schema).problems({"value": 1, "children": [{}]}) != []


def test_a_shape_by_hand_keeps_its_schema() -> None:
    schema = {"type": "object", "$comment": "mine"}
    shape = ResultShape(schema)
    assert shape.schema is schema
    assert shape.dump(Place(1, 2)) == {"latitude": 1, "longitude": 2}
