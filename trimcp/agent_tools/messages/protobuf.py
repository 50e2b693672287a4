"""Messages of the protocol as protobuf messages, and back. Servers and clients use it; it needs protobuf.

Both have the same members. A JSON value has two fields, `NAME` (Struct or Value) and `NAME_json` (its text): see the
.proto. In the classes here the first is bytes, which is the same on the wire: what a peer sent is converted by
`struct_values`, and only once it is known that it is wanted. They are in a pool of descriptors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

import orjson

from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.agent_tools.messages.messages import read_value
from trimcp.agent_tools.messages.struct_values import (
    Steps,
    read_any,
    read_counted,
    read_object,
    write_any,
    write_object,
)
from trimcp.errors import LocalError
from trimcp.framing.grpc import text_field, varint
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, ParseLimits, encode

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError
except ImportError as _error:
    raise LocalError("agent tools through gRPC need another package: pip install 'trimcp[grpc]'") from _error

SERVICE: Final = "/trimcp.v1.AgentTools/"
"""The beginning of the path of each method."""

ERROR_TRAILER: Final = "trimcp-error-bin"
"""The trailer with the JSON text of an error, in base64."""

_SOON: Final = 4 * 1024
_TEXT: Final = "_json"
_WHOLE: Final = "manifest_json"
_OBJECT, _ANY = ".google.protobuf.Struct", ".google.protobuf.Value"
_loads: Final = orjson.loads


def _own_classes() -> tuple[Any, dict[str, str], dict[str, tuple[Any, Any]]]:
    """Return the messages' classes by name, the fields that are Struct or Value by their full names, and `METHODS`."""
    file = descriptor_pb2.FileDescriptorProto.FromString(generated().DESCRIPTOR.serialized_pb)
    values: dict[str, str] = {}
    for message in file.message_type:
        for field in message.field:
            if field.type_name in (_OBJECT, _ANY):
                values[f"{file.package}.{message.name}.{field.name}"] = field.type_name
                field.type = field.TYPE_BYTES
                field.ClearField("type_name")
                field.proto3_optional = True  # so that an empty one differs from none, as it does for a message
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    methods = {each.name: (each.input_type, each.output_type) for each in file.service[0].method}
    del file.dependency[:], file.service[:]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    classes = {
        message.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{message.name}"))
        for message in file.message_type
    }
    named = {f".{file.package}.{name}": cls for name, cls in classes.items()}
    return SimpleNamespace(**classes), values, {name: (named[a], named[b]) for name, (a, b) in methods.items()}


def generated() -> Any:
    """Return the generated module, whose descriptors say what others see."""
    return import_module("trimcp.agent_tools.proto.agent_tools_pb2")


PB, _VALUES, METHODS = _own_classes()
"""The classes by name; and of each method of the service the classes of a request and an answer."""


def decode(cls: Any, payload: bytes) -> Any:
    """Return the message of this class that a payload is. Raises MalformedMessage."""
    try:
        return cls.FromString(payload)
    except DecodeError:
        raise MalformedMessage("no message of protobuf") from None


# Messages


def members_of(message: Any, limits: ParseLimits = DEFAULT_LIMITS) -> Steps[dict[str, Any]]:
    """Convert a protobuf message to the members that the protocol's JSON message has. Raises MalformedMessage."""
    found: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    for field, value in message.ListFields():
        name, kind = field.name, _VALUES.get(field.full_name)
        if name.endswith(_TEXT):
            texts[name[: -len(_TEXT)]] = read_value(value, limits)
        elif kind is not None:
            found[name] = yield from (read_object if kind == _OBJECT else read_any)(value, limits)
        elif field.message_type is None:
            found[name] = value
        elif field.is_repeated:
            found[name] = []
            for item in value:
                found[name].append((yield from members_of(item, limits)))
        else:
            found[name] = yield from members_of(value, limits)
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


def fill(message: Any, members: Mapping[str, Any], *, both: bool) -> Steps[Any]:
    """Set a protobuf message to the members of a JSON message and return it; others are left out.

    Args:
        both: whether JSON values are also set as Struct or Value.
    """
    for field in message.DESCRIPTOR.fields:
        name, kind = field.name, _VALUES.get(field.full_name)
        if name == _WHOLE:
            message.manifest_json = encode(dict(members))
            continue
        value = members.get(name[: -len(_TEXT)] if name.endswith(_TEXT) else name)
        if value is None:
            continue
        if name.endswith(_TEXT):
            setattr(message, name, encode(value))
        elif kind is not None:
            if both:
                written = yield from (write_object if kind == _OBJECT else write_any)(value)
                setattr(message, name, written)
        elif field.message_type is None:
            setattr(message, name, value)
        elif field.is_repeated:
            for item in value:
                yield from fill(getattr(message, name).add(), item, both=both)
        else:
            getattr(message, name).SetInParent()
            yield from fill(getattr(message, name), value, both=both)
    return message


def wants_both(message: Any) -> bool:
    """Whether the answer to a request has JSON values in both forms: not if it brought them as text only."""
    fields = [field for field, _ in message.ListFields()]
    return not any(field.name.endswith(_TEXT) for field in fields) or any(
        field.full_name in _VALUES for field in fields
    )


# Calls, which are many


def members_before(message: Any) -> dict[str, Any]:
    """Return the members of a `ToolRequest` without its JSON values."""
    members: dict[str, Any] = {"tool_name": message.tool_name}
    if message.request_id:
        members["request_id"] = message.request_id
    for name in ("context_id", "version", "timeout", "statuses", "request_state"):
        if message.HasField(name):
            members[name] = getattr(message, name)
    return members


def arguments_of(message: Any, limits: ParseLimits = DEFAULT_LIMITS) -> Steps[tuple[Any, int]]:
    """Convert the arguments of a `ToolRequest`; None without any. Raises MalformedMessage.

    Returns also how many members of a Struct they have: JSON text is weighed by its bytes.
    """
    if text := message.arguments_json:
        return read_value(text, limits), 0
    if message.HasField("arguments"):
        return (yield from read_counted(message.arguments, limits))
    return None, 0


def is_large(message: Any) -> bool:
    """Whether the arguments of a `ToolRequest` are so large that they are converted in turns."""
    return len(message.arguments) >= _SOON and not message.arguments_json


def in_text(message: Any) -> bool:
    """Whether a `ToolRequest` brought its JSON values as text only; see `wants_both`."""
    return bool(message.arguments_json or message.input_responses_json) and not message.HasField("arguments")


_SUCCESS: Final = text_field(2, b"success")


def response_bytes(request_id: str, status: str, result: bytes, value: bytes | None) -> bytes:
    """Return the `ToolResponse` of a call as bytes.

    Args:
        request_id, status: of the call.
        result: its JSON text, which is copied.
        value: the same as Value; None leaves it out.
    """
    id = request_id.encode()
    said = _SUCCESS if status == "success" else text_field(2, status.encode())
    also = () if value is None else (b"\x1a", varint(len(value)), value)
    return b"".join((b"\x0a", varint(len(id)), id, said, *also, b"\x22", varint(len(result)), result))
