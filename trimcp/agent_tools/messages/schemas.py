"""The JSON Schemas of the protocol's messages, from their declarations: what `GET /schemas` answers."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from trimcp.agent_tools.messages.errors import ERRORS_BY_CODE
from trimcp.agent_tools.messages.messages import MESSAGES, AgentMessage, ToolsRegistered, rules_of
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
        "name": {"type": "string", "minLength": 1, "description": "letters, digits, points, dashes and underscores"},
        "description": {"type": "string", "description": "for the model"},
        "parameters": {"type": "object", "description": "the JSON Schema of the arguments, which are an object"},
        "version": {"type": "string", "minLength": 1, "default": "1", "description": 'without it "1"'},
        "implementation": {
            "type": "string",
            "description": "the service's function for it; without it that of its name",
        },
        "callback": {"type": "string", "description": "the URL at which it is called; not with `implementation`"},
    },
    "required": ["name", "parameters"],
}

_REGISTERED: Final[dict[str, Any]] = {
    "type": "object",
    "description": "What became of a manifest.",
    "properties": {
        "name": {"type": "string", "description": "the tool's name, with the prefix of who registered it"},
        "version": {"type": "string", "description": "its version"},
        "hash": {"type": "string", "description": "the SHA-256 of the manifest"},
        "status": {"enum": ["registered", "pending"], "description": "`pending` until somebody approves it"},
    },
    "required": ["name", "version", "hash", "status"],
}

_REFERENCES: Final = {"error": "failure", "tool": "manifest"}
"""Members whose values have a schema of their own."""


def schema_of(cls: type[AgentMessage]) -> dict[str, Any]:
    """Return the JSON Schema of one message. Members that it does not name are allowed, and ignored."""
    properties: dict[str, Any] = {"type": {"const": cls.type}}
    required = ["type"]
    for name, rule in rules_of(cls):
        schema = dict(rule.schema)
        if name == "tools":
            of = "registered" if cls is ToolsRegistered else "manifest"
            schema["items"] = {"$ref": f"#/$defs/{of}"}
        elif name in _REFERENCES:
            schema = {"$ref": f"#/$defs/{_REFERENCES[name]}", "description": schema["description"]}
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
        "$defs": {**defs, "failure": _FAILURE, "manifest": _MANIFEST, "registered": _REGISTERED},
    }


@cache
def published() -> bytes:
    """Return the schemas as JSON text."""
    return encode(schemas())
