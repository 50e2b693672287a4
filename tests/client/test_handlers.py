"""Defaults of a form."""

from __future__ import annotations

from trimcp.client.handlers import fill_defaults
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import FormSchema
from trimcp.wire.revisions import LATEST


def test_defaults_stand_in_for_what_was_not_filled_in() -> None:
    raw = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "default": "Ada"},
            "age": {"type": "integer", "default": 0},
            "sure": {"type": "boolean", "default": False},
            "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "default": ["a"]},
            "open": {"type": "string"},
        },
        "required": ["open"],
    }
    schema = converter_for(LATEST).load(raw, FormSchema)
    given = {"name": "Bob"}
    assert fill_defaults(schema, given) == {"name": "Bob", "age": 0, "sure": False, "tags": ["a"]}
    assert given == {"name": "Bob"}
    assert fill_defaults(schema)["name"] == "Ada"
