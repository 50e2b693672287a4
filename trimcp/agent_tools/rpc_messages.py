"""Messages of the protocol as protobuf messages, and back. Servers and clients use it; it needs protobuf.

Both have the same members. A JSON value has two fields, `NAME` (Struct or Value) and `NAME_json` (its text): see the
.proto. The generated classes are not known to type checkers here, because protobuf has no types of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final

import orjson

from trimcp.agent_tools.errors import MalformedMessage
from trimcp.agent_tools.messages import read_value
from trimcp.wire.jsonrpc import encode

PB: Final[Any] = import_module("trimcp.agent_tools.proto.agent_tools_pb2")
"""The generated module."""

SERVICE: Final = "/trimcp.v1.AgentTools/"
"""The beginning of the path of each method."""

ERROR_TRAILER: Final = "trimcp-error-bin"
"""The trailer with the JSON text of an error, in base64."""

_TEXT: Final = "_json"
_WHOLE: Final = "manifest_json"
_EXACT: Final = float(2**53)  # up to here every integer is a double
_MAX_DEPTH: Final = 100
_loads: Final = orjson.loads


# JSON values


def value_of(value: Any, depth: int = 0) -> Any:
    """Return the JSON value that a google.protobuf.Value is. A whole number is an integer, as far as it is exact.

    Raises:
        MalformedMessage: it is nested too deep, or no JSON value.
    """
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    if kind == "number_value":
        number = value.number_value
        if number != number or number in (float("inf"), float("-inf")):
            raise MalformedMessage("a number is NaN or infinite")
        return int(number) if number.is_integer() and abs(number) <= _EXACT else number
    if kind == "bool_value":
        return value.bool_value
    if kind == "struct_value":
        return object_of(value.struct_value, depth + 1)
    if kind == "list_value":
        if depth >= _MAX_DEPTH:
            raise MalformedMessage(f"nested deeper than {_MAX_DEPTH} levels")
        return [value_of(item, depth + 1) for item in value.list_value.values]
    return None


def object_of(struct: Any, depth: int = 0) -> dict[str, Any]:
    """Return the JSON object that a google.protobuf.Struct is. Raises as `value_of`."""
    if depth >= _MAX_DEPTH:
        raise MalformedMessage(f"nested deeper than {_MAX_DEPTH} levels")
    return {name: value_of(value, depth) for name, value in struct.fields.items()}


def fill_value(target: Any, value: Any) -> None:
    """Set a google.protobuf.Value to a JSON value; an integer that no double holds is rounded."""
    kind = type(value)
    if kind is str:
        target.string_value = value
    elif kind is bool:
        target.bool_value = value
    elif kind is int or kind is float:
        target.number_value = value
    elif kind is dict:
        target.struct_value.SetInParent()
        fill_object(target.struct_value, value)
    elif kind is list:
        target.list_value.SetInParent()
        for item in value:
            fill_value(target.list_value.values.add(), item)
    else:
        target.null_value = 0


def fill_object(struct: Any, value: Mapping[str, Any]) -> None:
    """Set a google.protobuf.Struct to a JSON object."""
    fields = struct.fields
    for name, member in value.items():
        fill_value(fields[name], member)


# Messages


def members_of(message: Any) -> dict[str, Any]:
    """Return the members of a protobuf message, as the protocol's JSON message has them. Raises MalformedMessage."""
    found: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name.endswith(_TEXT):
            texts[name[: -len(_TEXT)]] = read_value(value)
        elif field.message_type is None:
            found[name] = value
        elif field.message_type.full_name == "google.protobuf.Struct":
            found[name] = object_of(value)
        elif field.message_type.full_name == "google.protobuf.Value":
            found[name] = value_of(value)
        elif field.is_repeated:
            found[name] = [members_of(item) for item in value]
        else:
            found[name] = members_of(value)
    for name, default in _defaults(message.DESCRIPTOR):
        found.setdefault(name, [] if default is None else default)
    whole = texts.pop("manifest", None)
    if type(whole) is dict:
        return whole
    return {**found, **texts}


@cache
def _defaults(descriptor: Any) -> list[tuple[str, int | None]]:
    """Return the fields that are not sent when they are 0 or empty, although the member is there; None for a list."""
    return [
        (field.name, None if field.is_repeated else 0)
        for field in descriptor.fields
        if field.is_repeated or (not field.has_presence and field.type not in (field.TYPE_STRING, field.TYPE_BYTES))
    ]


def fill(message: Any, members: Mapping[str, Any], *, both: bool) -> Any:
    """Set a protobuf message to the members of a JSON message and return it; others are left out.

    Args:
        both: whether JSON values are also set as Struct or Value.
    """
    for field in message.DESCRIPTOR.fields:
        name = field.name
        if name == _WHOLE:
            message.manifest_json = encode(dict(members))
            continue
        value = members.get(name[: -len(_TEXT)] if name.endswith(_TEXT) else name)
        if value is None:
            continue
        if name.endswith(_TEXT):
            setattr(message, name, encode(value))
        elif field.message_type is None:
            setattr(message, name, value)
        elif field.message_type.full_name == "google.protobuf.Struct":
            if both:
                getattr(message, name).SetInParent()
                fill_object(getattr(message, name), value)
        elif field.message_type.full_name == "google.protobuf.Value":
            if both:
                fill_value(getattr(message, name), value)
        elif field.is_repeated:
            for item in value:
                fill(getattr(message, name).add(), item, both=both)
        else:
            getattr(message, name).SetInParent()
            fill(getattr(message, name), value, both=both)
    return message


def request_members(message: Any) -> dict[str, Any]:
    """Return the members of a `ToolRequest`; as `members_of`, quickly for the usual ones."""
    members: dict[str, Any] = {"tool_name": message.tool_name}
    if message.request_id:
        members["request_id"] = message.request_id
    if text := message.arguments_json:
        members["arguments"] = read_value(text)
    elif message.HasField("arguments"):
        members["arguments"] = object_of(message.arguments)
    for name in ("context_id", "version", "timeout", "statuses", "request_state"):
        if message.HasField(name):
            members[name] = getattr(message, name)
    if text := message.input_responses_json:
        members["input_responses"] = read_value(text)
    return members


def response_of(request_id: str, status: str, result: bytes | None, *, both: bool) -> Any:
    """Return the `ToolResponse` of a call whose result is this JSON text."""
    response = PB.ToolResponse(request_id=request_id, status=status, result_json=result or b"null")
    if both:
        fill_value(response.result, None if result is None else _loads(result))
    return response


def wants_both(message: Any) -> bool:
    """Whether the answer to a request has JSON values in both forms: not if it brought them as text only."""
    fields = message.ListFields()
    return not any(field.name.endswith(_TEXT) for field, _ in fields) or any(
        field.message_type is not None and field.message_type.full_name.startswith("google.protobuf.")
        for field, _ in fields
    )
