"""Tests of `trimcp.schema.late`: who is built at once, and that being built late changes no verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trimcp
from trimcp.schema.bounds import SchemaError
from trimcp.schema.late import LateValidator, validator_for
from trimcp.schema.validator import Validator

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
            assert isinstance(late, LateValidator)
            for _ in range(2):
                assert late.is_valid(value) is at_once.is_valid(value)
                assert late.problems(value) == at_once.problems(value)
        late = validator_for(schema)
        assert late.problems(value) == at_once.problems(value)


@pytest.mark.parametrize("schema", BOUNDED)
def test_a_schema_that_an_author_bounded_is_built_at_once(schema: dict[str, Any]) -> None:
    assert isinstance(validator_for(schema), Validator)


@pytest.mark.parametrize("bound", [{"pattern": "("}, {"multipleOf": 0}, {"minLength": -1}])
def test_a_bound_without_sense_is_found_at_once(bound: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        validator_for({"type": "object", "properties": {"x": {"type": "string", **bound}}})


def test_one_validator_serves_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Validator] = []

    def make(schema: dict[str, Any]) -> Validator:
        made.append(Validator(schema))
        return made[-1]

    monkeypatch.setattr("trimcp.schema.validator.Validator", make)
    late = validator_for({"type": "string"})
    assert isinstance(late, LateValidator)
    assert made == []
    assert late.is_valid("x")
    assert late.problems(1)
    assert not late.is_valid(1)
    assert len(made) == 1


def test_the_engine_is_loaded_with_the_first_value() -> None:
    program = """if True:
        import sys, trimcp.schema.late
        late = trimcp.schema.late.validator_for({"type": "string"})
        assert "jsonschema_rs" not in sys.modules
        assert late.is_valid("x")
        assert "jsonschema_rs" in sys.modules
    """
    root = Path(trimcp.__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)
