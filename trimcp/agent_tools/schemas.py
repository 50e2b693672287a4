"""The JSON Schemas of the protocol's messages, from their declarations: what `GET /schemas` answers."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from trimcp.agent_tools.errors import ERRORS_BY_CODE
from trimcp.agent_tools.messages import MESSAGES, AgentMessage, rules_of
from trimcp.wire.jsonrpc import encode

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_FAILURE: Final[dict[str, Any]] = {
    "type": "object",
    "description": "Why there is no result.",
    "properties": {
        "code": {"description": "one of the table of errors; others may be added", "examples": list(ERRORS_BY_CODE)},
        "message": {"type": "string", "description": "one line for a person"},
        "data": {"description": "any value for a program"},
        "retry_after": {"type": "number", "description": "seconds after which to try again"},
    },
    "required": ["code", "message"],
}

_MANIFEST: Final[dict[str, Any]] = {
    "type": "object",
    "description": "A tool.",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "a JSON Schema of an object"},
        "version": {"type": "string", "minLength": 1, "default": "1"},
    },
    "required": ["name"],
}


def schema_of(cls: type[AgentMessage]) -> dict[str, Any]:
    """Return the JSON Schema of one message. Members that it does not name are allowed, and ignored."""
    properties: dict[str, Any] = {"type": {"const": cls.type}}
    required = ["type"]
    for name, rule in rules_of(cls):
        schema = dict(rule.schema)
        if name == "error":
            schema = {"$ref": "#/$defs/failure"}
        elif name == "tool":
            schema = {"$ref": "#/$defs/manifest"}
        properties[name] = schema
        if rule.required:
            required.append(name)
    about = (cls.__doc__ or "").partition("\n")[0]
    return {"type": "object", "description": about, "properties": properties, "required": required}


def schemas() -> dict[str, Any]:
    """Return one JSON Schema (2020-12) for any message of the protocol, with that of each in `$defs`."""
    defs: dict[str, Any] = {name: schema_of(cls) for name, cls in MESSAGES.items()}
    any_of = [{"$ref": f"#/$defs/{name}"} for name in MESSAGES]
    return {
        "$schema": DIALECT,
        "title": "Agent tools",
        "oneOf": any_of,
        "$defs": {**defs, "failure": _FAILURE, "manifest": _MANIFEST},
    }


@cache
def published() -> bytes:
    """Return the schemas as JSON text."""
    return encode(schemas())
