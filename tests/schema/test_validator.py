"""Tests of `trimcp.schema.validator`: what is decided, and what a hostile schema may cost."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trimcp
from tests.yardsticks import assert_costs
from trimcp.schema.engine import SchemaError, compile_bounded, compile_schema
from trimcp.schema.validator import Validator, check_author_schema, peer_validator, validator_for

FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/Node",
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
            "required": ["value"],
        }
    },
}
# Every level of the value can be reached in two ways.
TWO_WAYS: dict[str, Any] = {
    "$ref": "#/$defs/X",
    "$defs": {
        "X": {
            "anyOf": [
                {"properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"]},
                {"properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"]},
            ]
        }
    },
}


def nested(depth: int) -> Any:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize("make", [Validator, peer_validator])
def test_a_valid_value_has_no_problems(make: Any) -> None:
    validator = make(FORECAST)
    assert validator.is_valid({"city": "Oslo", "days": 3})
    assert validator.problems({"city": "Oslo", "days": 3}) == []


@pytest.mark.parametrize("make", [Validator, peer_validator])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"city": "Oslo", "days": "3"}, "must be an integer, not a string @ $.days"),
        ({"city": "Oslo", "days": True}, "must be an integer, not a boolean @ $.days"),
        ({"city": "Oslo", "days": 0}, "must be at least 1 @ $.days"),
        ({"city": "Oslo", "days": 15}, "must be at most 14 @ $.days"),
        ({"city": ""}, "must have at least 1 characters @ $.city"),
        ({"city": "Oslo", "unit": "K"}, "must be one of 'C', 'F' @ $.unit"),
        ({}, "lacks the required property 'city' @ $"),
        ({"city": "Oslo", "dayz": 1}, "has unknown properties: 'dayz' @ $"),
        ([], "must be an object, not an array @ $"),
        (None, "must be an object, not null @ $"),
    ],
)
def test_problems_name_what_is_wrong_and_where(make: Any, value: Any, problem: str) -> None:
    validator = make(FORECAST)
    assert not validator.is_valid(value)
    assert validator.problems(value) == [problem]


def test_recursive_schemas_are_explained_in_depth() -> None:
    problems = [
        make(TREE).problems({"value": 1, "children": [{"value": 2}, {}]}) for make in (Validator, peer_validator)
    ]
    assert problems == [["lacks the required property 'value' @ $.children[1]"]] * 2


def test_problems_are_bounded_and_never_echo_the_value() -> None:
    problems = Validator({"items": {"type": "integer"}}).problems(["secret" * 20] * 1_000)
    assert len(problems) == 10
    assert all(len(p) < 500 and "secret" not in p for p in problems)
    long_key = {"k" * 100_000: 1}
    assert all(len(p) < 500 for p in Validator({"additionalProperties": {"type": "null"}}).problems(long_key))
    assert all(len(p) < 500 for p in Validator({"additionalProperties": False}).problems(long_key))
    assert all(len(p) < 500 for p in Validator({"enum": ["e" * 100_000] * 50}).problems(1))


@pytest.mark.parametrize("make", [Validator, peer_validator])
@pytest.mark.parametrize("value", ["\ud800", {"\ud800": 1}, {"a": float("nan")}, [10**5000], -(2**70), [float("inf")]])
def test_no_value_makes_it_raise(make: Any, value: Any) -> None:
    for schema in (
        {"type": "boolean"},
        {"enum": [1]},
        {"type": "object", "additionalProperties": {"pattern": "x"}},
        TREE,
    ):
        validator = make(schema)
        assert validator.is_valid(value) is (validator.problems(value) == [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
)


@given(json_values)
def test_problems_and_is_valid_agree(value: Any) -> None:
    for validator in (Validator(FORECAST), peer_validator(TREE)):
        assert validator.is_valid(value) is (validator.problems(value) == [])


@pytest.mark.parametrize("reference", ["http://127.0.0.1:1/x", "file:///etc/hostname", "other.json#/a"])
def test_nothing_is_ever_fetched(reference: str) -> None:
    for check in (Validator, check_author_schema, peer_validator):
        with pytest.raises(SchemaError, match=r"never fetched|No base URI"):
            check({"$ref": reference})


@pytest.mark.parametrize(
    "dialect",
    [
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft-06/schema#",
        "http://json-schema.org/draft-04/schema#",
    ],
)
def test_dialects_we_have(dialect: str) -> None:
    schema = {
        "$schema": dialect,
        "properties": {"n": {"$ref": "#/definitions/N"}},
        "definitions": {"N": {"type": "integer"}},
    }
    check_author_schema(schema)
    assert Validator(schema).is_valid({"n": 1})
    assert not Validator(schema).is_valid({"n": "1"})
    if "draft-04" in dialect:
        with pytest.raises(SchemaError, match="draft-04"):
            peer_validator(schema)
    else:
        assert peer_validator(schema).problems({"n": "1"}) == ["must be an integer, not a string @ $.n"]


@pytest.mark.parametrize("dialect", ["https://example.com/mine", "http://json-schema.org/draft-03/schema#", 7])
def test_a_dialect_we_lack_is_named(dialect: Any) -> None:
    for check in (Validator, check_author_schema, peer_validator):
        with pytest.raises(SchemaError, match=r"dialect .* is not supported"):
            check({"$schema": dialect})


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "strin"}, r"@ \$.type"),
        ({"properties": {"a": {"minimum": "1"}}}, r"@ \$.properties.a.minimum"),
        ({"pattern": "("}, "pattern"),
        ({"$ref": "#/$defs/missing"}, "/\\$defs/missing"),
        ([], "must be an object or a boolean"),
    ],
)
def test_authors_learn_where_their_schema_is_wrong(schema: Any, text: str) -> None:
    with pytest.raises(SchemaError, match=text):
        check_author_schema(schema)


@pytest.mark.parametrize("schema", [True, {}, FORECAST, TREE, {"pattern": r"^\p{Lu}+$"}, {"pattern": "^(?=.*x)"}])
def test_good_author_schemas_pass(schema: Any) -> None:
    check_author_schema(schema)


def test_authors_may_bundle_resources() -> None:
    schema = {"$ref": "https://example.com/n", "$defs": {"n": {"$id": "https://example.com/n", "type": "null"}}}
    check_author_schema(schema)
    assert Validator(schema).problems(1) == ["does not match the schema @ $"]


def test_the_checking_library_is_loaded_only_to_say_what_is_wrong() -> None:
    code = (
        "import sys, trimcp.schema.validator as v\n"
        "v.check_author_schema({'type': 'object'}).is_valid(1)\n"
        "assert 'jsonschema' not in sys.modules\n"
        "try: v.check_author_schema({'type': 'strin'})\n"
        "except ValueError as error: assert 'is not valid under any of the given schemas' in str(error), error\n"
        "assert 'jsonschema' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- when it is compiled ---

PLAIN: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"pattern": {"type": "string"}}, "required": ["pattern"]},
    {"type": "object", "properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}}},
    {"type": "array", "items": {"type": "string", "format": "date", "description": "a day"}},
    {"type": "object", "additionalProperties": {"enum": ["a", "b"]}},
    {"type": "object", "additionalProperties": False},
]
BOUNDED: list[dict[str, Any]] = [
    {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 2}}},
    {"anyOf": [{"type": "string", "pattern": "a+"}]},
    {"items": {"maxItems": 2}},
    {"additionalProperties": {"minLength": 1}},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
]
VALUES: list[Any] = [{}, [], {"pattern": "x"}, {"n": 1}, {"n": "1"}, ["2026-01-01"], ["x", 3], {"a": "a"}, {"a": "c"}]


@pytest.mark.parametrize("schema", PLAIN)
def test_a_schema_of_types_and_words_is_built_late_and_judges_alike(schema: dict[str, Any]) -> None:
    at_once = Validator(schema)
    for value in VALUES:
        for late in (validator_for(schema), validator_for(schema)):
            assert late._compiled is None
            for _ in range(2):
                assert late.is_valid(value) is at_once.is_valid(value)
                assert late.problems(value) == at_once.problems(value)
        late = validator_for(schema)
        assert late.problems(value) == at_once.problems(value)


@pytest.mark.parametrize("schema", BOUNDED)
def test_a_schema_that_an_author_bounded_is_built_at_once(schema: dict[str, Any]) -> None:
    assert validator_for(schema)._compiled is not None


@pytest.mark.parametrize("bound", [{"pattern": "("}, {"multipleOf": 0}, {"minLength": -1}])
def test_a_bound_without_sense_is_found_at_once(bound: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        validator_for({"type": "object", "properties": {"x": {"type": "string", **bound}}})


def test_a_late_validator_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def compile_once(schema: dict[str, Any]) -> Any:
        made.append(compile_schema(schema))
        return made[-1]

    monkeypatch.setattr("trimcp.schema.engine.compile_schema", compile_once)
    late = validator_for({"type": "string"})
    assert made == []
    assert late.is_valid("x")
    assert late.problems(1)
    assert not late.is_valid(1)
    assert len(made) == 1


def test_the_engine_is_loaded_with_the_first_value() -> None:
    program = """if True:
        import sys, trimcp.schema.validator
        late = trimcp.schema.validator.validator_for({"type": "string"})
        assert "jsonschema_rs" not in sys.modules
        assert late.is_valid("x")
        assert "jsonschema_rs" in sys.modules
    """
    root = Path(trimcp.__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


# --- what a peer's schema may cost ---


@pytest.mark.parametrize("make", [Validator, peer_validator])
def test_patterns_are_linear(make: Any) -> None:
    validator = make({"pattern": "^(a+)+$"})
    assert not validator.is_valid("a" * 40 + "!")
    assert_costs(lambda: validator.is_valid("a" * 40 + "!"), at_most=40)


def test_look_around_is_for_authors_only() -> None:
    schema = {"type": "object", "properties": {"p": {"pattern": "^(?=.*[0-9]).{4,}$"}}}
    validator = Validator(schema)
    assert validator.is_valid({"p": "abc1"})
    assert validator.problems({"p": "abcd"}) == ["must match the pattern ^(?=.*[0-9]).{4,}$ @ $.p"]
    with pytest.raises(SchemaError, match=r"linear-time engine cannot run @ \$.properties.p.pattern"):
        peer_validator(schema)


@pytest.mark.parametrize("make", [Validator, peer_validator])
@pytest.mark.parametrize("depth", [8, 20, 100])
def test_routes_that_multiply_cost_little(make: Any, depth: int) -> None:
    validator = make(TWO_WAYS)
    value = nested(depth)
    assert len(validator.problems(value)) == 1
    assert_costs(lambda: validator.problems(value), at_most=500)


@pytest.mark.parametrize("make", [Validator, peer_validator])
@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"items": {"type": "integer"}}, ["x"] * 100_000, "must be an integer, not a string @ $[0]"),
        ({"items": {"type": "integer"}}, [*[1] * 50_000, "x"], "must be an integer, not a string @ $[50000]"),
        (
            {"anyOf": [{"items": {"type": "integer"}}, {"items": {"type": "null"}}]},
            ["x"] * 100_000,
            "matches no alternative @ $",
        ),
        (
            {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}},
            [*[1] * 50_000, "x"],
            "matches no alternative @ $[50000]",
        ),
        (TREE, {"value": 1, "children": [*[{"value": 1}] * 30_000, {}]}, "lacks the required property 'value'"),
    ],
)
def test_large_values_are_explained_by_their_first_problem(make: Any, schema: Any, value: Any, problem: str) -> None:
    validator = make(schema)
    (found,) = validator.problems(value)
    assert found.startswith(problem)
    assert_costs(lambda: validator.problems(value), at_most=1_000)


@pytest.mark.parametrize("value", [[None] * 190_000, {f"name{n}": n for n in range(180_000)}], ids=["nulls", "names"])
def test_to_explain_a_large_value_takes_milliseconds(value: Any) -> None:
    """Whoever sends it repeats it, and others wait: of 190,000 nulls it took 20 ms, of as many names 60."""
    arguments, validator = {"text": value}, Validator({"properties": {"text": {"type": "string"}}})
    assert validator.problems(arguments)
    assert_costs(lambda: validator.problems(arguments), at_most=14)


def test_long_texts_are_not_copied_for_every_alternative() -> None:
    validator = Validator({"anyOf": [{"required": [f"p{i}"]} for i in range(200)]})
    tracker = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert validator.problems({"text": "x" * 4_000_000}) == ["matches no alternative @ $"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - tracker < 60 * 1024


def test_alternatives_of_alternatives_cost_little() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(8):
        schema = {"anyOf": [schema, schema]}
    validator = Validator({"items": schema})
    value = [1] * 10_000
    assert validator.problems(value) == ["matches no alternative @ $[0]"]
    assert_costs(lambda: validator.problems(value), at_most=500)


def test_a_fan_of_references_is_cut_off() -> None:
    fan: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 12} for i in range(8)}
    fan["d8"] = {"type": "string"}
    validator = peer_validator({"$ref": "#/$defs/d0", "$defs": fan})
    assert validator.problems(3) == ["takes too much work to be checked against this schema @ $"]
    assert_costs(lambda: validator.problems(3), at_most=2_000)
    assert validator.is_valid("x")  # found at once


def test_a_refused_visit_never_counts_as_a_pass() -> None:
    fan: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 12} for i in range(8)}
    fan["d8"] = {"type": "string"}
    assert not peer_validator({"not": {"$ref": "#/$defs/d0"}, "$defs": fan}).is_valid(3)


def test_large_honest_values_pass_the_budget() -> None:
    tree = {"value": 0, "children": [{"value": i, "children": [{"value": 1}]} for i in range(60_000)]}
    assert peer_validator(TREE).is_valid(tree)


def test_counting_references_keeps_the_meaning_of_a_schema() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/Short", "minLength": 2, "allOf": [{"pattern": "^x"}]},
            "b": {"$ref": "#/properties/a/allOf/0"},
        },
        "$defs": {"Short": {"$anchor": "short", "maxLength": 3}},
        "unevaluatedProperties": False,
    }
    before = repr(schema)
    validator = peer_validator(schema)
    for value, expected in [
        ({"a": "xy"}, True),
        ({"a": "x"}, False),
        ({"a": "xyzz"}, False),
        ({"a": "yy"}, False),
        ({"b": "y"}, False),
        ({"b": "xxxx"}, True),
        ({"c": 1}, False),
    ]:
        assert validator.is_valid(value) is Validator(schema).is_valid(value) is expected
    assert repr(schema) == before
    assert validator.schema is schema


def test_old_references_hide_their_neighbours() -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/S", "minLength": 9}},
        "definitions": {"S": {"type": "string"}},
    }
    assert Validator(schema).is_valid({"a": "x"})
    assert peer_validator(schema).is_valid({"a": "x"})
    assert not peer_validator(schema).is_valid({"a": 1})


def test_recursion_keeps_working_through_anchors_and_own_name() -> None:
    schema = {
        "$id": "https://example.com/list",
        "$anchor": "top",
        "properties": {"next": {"$ref": "https://example.com/list#top"}, "n": {"type": "integer"}},
    }
    assert peer_validator(schema).problems({"next": {"next": {"n": "x"}}}) == [
        "must be an integer, not a string @ $.next.next.n"
    ]


def test_judging_a_small_object_is_fast() -> None:
    validator = Validator(FORECAST)
    value = {"city": "Oslo", "days": 3, "unit": "C"}

    def judge() -> None:
        for _ in range(1_000):
            validator.is_valid(value)

    assert_costs(judge, at_most=4)  # 1 µs each, at four times


# A pattern that is slow for a linear-time engine: it has thousands of states, and no text to skip to.
SLOW = "(a|b)*a(a|b){12}[cd]"
TEXT = "ab" * 2_000_000
TOO_MUCH = ["takes too much work to be checked against this schema @ $"]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"pattern": f"{SLOW}{n}"} for n in range(60)]}, TEXT),
        ({"patternProperties": {f"{SLOW}{n}": {} for n in range(60)}}, {TEXT: 1}),
        ({"items": {"allOf": [{"minimum": n} for n in range(2_000)]}}, [0] * 100_000),
        ({"not": {"allOf": [{"pattern": f"{SLOW}{n}"} for n in range(60)]}}, TEXT),
        (
            {"allOf": [{"$ref": "#/$defs/a"}] * 60, "$defs": {"a": {"properties": {"a": {"not": {"pattern": SLOW}}}}}},
            {"a": TEXT},
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/a"}] * 60,
                "$defs": {"a": {"items": {"allOf": [{"minimum": -n} for n in range(100)]}}},
            },
            [0] * 100_000,
        ),
    ],
    ids=["patterns", "names", "members", "turned around", "references", "references to lists"],
)
def test_a_large_value_for_a_large_schema_is_refused_instead_of_checked(schema: Any, value: Any) -> None:
    validator = peer_validator(schema)
    assert not validator.is_valid(value)
    assert validator.problems(value) == TOO_MUCH
    assert_costs(lambda: validator.is_valid(value), at_most=3_000)


def test_what_explains_has_the_bounds_of_what_decides() -> None:
    compiled = compile_bounded({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"pattern": SLOW}}})
    assert compiled.problems("ab") != TOO_MUCH
    assert not compiled.is_valid(TEXT * 20)
    assert compiled.problems(TEXT * 20) == TOO_MUCH


def test_large_values_suit_usual_schemas() -> None:
    text = {f"p{n}": {"type": "string", "pattern": "^[^<>]*$", "maxLength": 5_000_000} for n in range(10)}
    assert peer_validator({"type": "object", "properties": text}).is_valid({"p1": TEXT})
    rows = {"items": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(20)}}}
    assert peer_validator(rows).is_valid([{f"p{n}": n for n in range(20)}] * 10_000)
    linked: dict[str, Any] = {}
    for _ in range(100):
        linked = {"text": "x" * 1_000, "next": linked}
    schema = {"properties": {"next": {"$ref": "#"}, "text": {"pattern": "^x*$"}}}
    assert peer_validator(schema).is_valid(linked)


def test_the_memory_of_patterns_is_bounded() -> None:
    tracker = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for pattern, most in (("a", 512), ("a{2000}", 64), ("(a{100}){100}", 4), ("(a{280}){280}", 0)):
        for number in {most, most + 10} - {0}:
            schema = {"properties": {f"p{n}": {"pattern": f"{pattern}{n}"} for n in range(number)}}
            if number > most:
                with pytest.raises(SchemaError, match=r"patterns take too much memory|cannot run @"):
                    peer_validator(schema)
            else:
                validator = peer_validator(schema)
                assert 0 < validator.memory < 10_000_000
                assert validator.is_valid({"p0": "a" * 10_000 + "0"})
    with pytest.raises(SchemaError, match="its 600 patterns take too much memory"):
        peer_validator({"patternProperties": {f"a{n}": {} for n in range(600)}})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - tracker < 60 * 1024


def test_the_memory_of_a_peer_s_schema_is_estimated() -> None:
    small = peer_validator({"type": "string"}).memory
    assert 0 < small < 10_000
    assert Validator({"type": "string"}).memory == 0
    refs = {"properties": {f"p{n}": {"$ref": "#/$defs/a"} for n in range(1_000)}, "$defs": {"a": {}}}
    assert peer_validator(refs).memory > 8_000_000
    assert peer_validator({"enum": list(range(4_000))}).memory > 2_000_000


def test_formats_of_a_peer_only_describe() -> None:
    schema = {"properties": {"format": {"type": "string", "format": "date-time"}, "at": {"format": "time"}}}
    naive = {"format": "2026-02-28T12:00:00", "at": "09:30:00"}
    assert not Validator(schema).is_valid(naive)
    peer = peer_validator(schema)
    assert peer.is_valid(naive)
    assert peer.problems({"format": 7, "at": "09:30:00"}) == ["must be a string, not an integer @ $.format"]
