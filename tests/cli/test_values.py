from __future__ import annotations

from typing import Any

import pytest

from trimcp.cli.schemas import ValueProblem, parse_arguments


def schema(shape: Any) -> dict[str, Any]:
    return {"properties": {"x": shape}, "$defs": {"Size": {"enum": ["s", "l", 3, True]}}}


@pytest.mark.parametrize(
    ("shape", "words", "value"),
    [
        ({"type": "string"}, ["x=5"], "5"),
        ({"type": "string"}, ["x="], ""),
        ({"type": "string"}, ["x=a=b"], "a=b"),
        ({"type": "integer"}, ["x=5"], 5),
        ({"type": "number"}, ["x=-74.006"], -74.006),
        ({"type": "number"}, ["x=1e3"], 1000.0),
        ({"type": "boolean"}, ["x=true"], True),
        ({"type": ["integer", "null"]}, ["x=null"], None),
        ({"type": ["string", "null"]}, ["x=7"], "7"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["x=7"], 7),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["x=7a"], "7a"),
        ({"type": "object"}, ['x={"a": [1]}'], {"a": [1]}),
        ({"type": "array", "items": {"type": "string"}}, ['x=["a"]'], ["a"]),
        ({"type": "array", "items": {"type": "string"}}, ["x=a"], ["a"]),
        ({"type": "array", "items": {"type": "integer"}}, ["x=1", "x=2"], [1, 2]),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, ["x=1", "x=2"], ["1", "2"]),
        ({"$ref": "#/$defs/Size"}, ["x=l"], "l"),
        ({"$ref": "#/$defs/Size"}, ["x=3"], 3),
        ({"$ref": "#/$defs/Size"}, ["x=true"], True),
        ({"$ref": "#/$defs/Nowhere"}, ["x=word"], "word"),
        (True, ["x=3"], 3),
        (True, ["x=three"], "three"),
        ({}, ["x=1", "x=b"], [1, "b"]),
    ],
)
def test_values_become_what_the_schema_wants(shape: Any, words: list[str], value: Any) -> None:
    parsed = parse_arguments(words, schema(shape))["x"]
    assert (type(parsed), parsed) == (type(value), value)


@pytest.mark.parametrize(
    ("shape", "words", "told"),
    [
        ({"type": "integer"}, ["x=five"], "x must be a whole number, not 'five'"),
        ({"type": "integer"}, ["x=1.5"], "x must be a whole number, not '1.5'"),
        ({"type": "number"}, ["x=NaN"], "x must be a number, not 'NaN'"),
        ({"type": "boolean"}, ["x=1"], "x must be true or false, not '1'"),
        ({"type": ["integer", "boolean"]}, ["x=a"], "x must be a whole number or true or false, not 'a'"),
        ({"type": "integer"}, ["x=1", "x=2"], "x is given 2 times, but it is no list"),
        ({}, ["word"], "'word' is no argument; write NAME=VALUE or NAME:=JSON"),
        ({}, [":=1"], "':=1' is no argument"),
        ({}, ["x:=word"], "x:= is not valid JSON: 'word'"),
        ({}, ["x=1", "x:=1"], "'x' is given twice"),
        ({}, ["x:=1", "x:=1"], "'x' is given twice"),
        ({}, ["x:=1", "x=1"], "'x' is given twice"),
        ({}, ["xx=1"], "the tool has no argument 'xx'; did you mean x?"),
        ({}, ["xx:=1"], "the tool has no argument 'xx'; did you mean x?"),
        ({}, ["other=1"], "the tool has no argument 'other'; it takes x"),
        ({"type": "string"}, ["=word"], "'=word' is no argument"),
    ],
)
def test_what_fits_no_type_is_refused_with_what_would(shape: Any, words: list[str], told: str) -> None:
    with pytest.raises(ValueProblem) as caught:
        parse_arguments(words, schema(shape))
    assert told in str(caught.value)


def test_a_schema_that_refers_to_itself_ends() -> None:
    loop = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert parse_arguments(["x=a"], loop) == {"x": "a"}


def test_a_value_nested_without_end_is_text() -> None:
    assert parse_arguments(["x=" + "[" * 200_000], {})["x"].startswith("[[")


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"additionalProperties": {"type": "string"}},
        {"patternProperties": {"^y": {}}},
        {"allOf": [{"properties": {"y": {}}}]},
        {"$ref": "#/$defs/y"},
    ],
)
def test_where_a_schema_allows_others_they_are_sent(more: dict[str, Any]) -> None:
    assert parse_arguments(["x=1", "y=2"], {"properties": {"x": {}}, **more}) == {"x": 1, "y": 2}
    assert parse_arguments(["y=2"], {"type": "object"}) == {"y": 2}, "it lists none"
    for closed in ({}, {"additionalProperties": False}):
        with pytest.raises(ValueProblem, match="it takes none"):
            parse_arguments(["y=2"], {"properties": {}, **closed})


def test_json_is_taken_as_it_is_and_a_name_may_end_with_a_colon() -> None:
    text = {"properties": {"x": {"type": "string"}, "y:": {"type": "string"}}}
    assert parse_arguments(["x:=[1, {}]"], text) == {"x": [1, {}]}
    assert parse_arguments(["x=:=1", "y:=1"], text) == {"x": ":=1", "y:": "1"}
