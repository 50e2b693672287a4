"""Messages of the protocol as protobuf messages, and back. Servers and clients use it; it needs protobuf.

Both have the same members. A JSON value has two fields, `NAME` (Struct or Value) and `NAME_json` (its text): see the
.proto. In the classes here the first is bytes, which is the same on the wire: what a peer sent is converted
here, and only once it is known that it is wanted. They are in a pool of descriptors of their own.

protobuf's own classes for JSON values would make an object for each member before anybody can count them. Here members
are counted over all values of a message, and depth is checked, while the bytes become JSON values. Both directions are
generators: they stop now and then, so that a large message can be converted in turns (`in_turns`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from struct import Struct
from types import SimpleNamespace
from typing import Any, Final

import attrs
import orjson

from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.agent_tools.messages.messages import MESSAGES, read_value
from trimcp.agent_tools.messages.steps import Steps, at_once, in_turns
from trimcp.agent_tools.proto import described
from trimcp.errors import LocalError
from trimcp.framing.grpc import message_frame, next_field, read_varint, text_field, varint
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.jsonrpc import DEFAULT_LIMITS, Malformed, ParseLimits, encode
from trimcp.wire.scanner import members_in, structure_of

try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
    from google.protobuf.message import DecodeError
except ImportError as _error:
    raise LocalError("agent tools through gRPC need another package: pip install 'trimcp[grpc]'") from _error

MEMBER: Final = 64
"""Bytes of memory that a member takes, approximately, beside those on the wire."""

_TURN: Final = 512
_MESSAGE_COST: Final = 8  # members that cost about as much as a message within another,
_BYTES: Final = 128  # and the bytes of a text that cost as much as one
_EXACT: Final = float(2**53)  # up to here every integer is a double
_DOUBLE: Final = Struct("<d")
_NUMBER_AT: Final = _DOUBLE.unpack_from

# Tags: the number of a field, and how it is written.
_FIRST, _SECOND = 0x0A, 0x12  # of an entry: its name and its value; of a list or an object: each member
_NULL, _NUMBER, _STRING, _BOOL, _STRUCT, _LIST = 0x08, 0x11, 0x1A, 0x20, 0x2A, 0x32


@attrs.define(eq=False)
class MemberCount:
    """Counts the members of a message, in all of its values, and says when a conversion stops for others."""

    limits: ParseLimits = DEFAULT_LIMITS
    members: int = 0
    turn: int = _TURN  # at so many members it stops
    _before: int = 0  # members of the messages before this one

    def add(self, members: int) -> bool:
        """Count more members; return whether to stop."""
        self.members += members
        if self.members < self.turn:
            return False
        self.turn = self.members + _TURN
        return True

    def next(self) -> bool:
        """Count a message of several that are converted one after another; return whether to stop."""
        stops = self.add(_MESSAGE_COST)
        self._before = self.members
        return stops

    @property
    def left(self) -> int:
        """Members that the message may still have."""
        return self.limits.max_members + self._before - self.members

    def too_many(self) -> MalformedMessage:
        return MalformedMessage(f"more than {self.limits.max_members:,} members")


# Reading


def read_object(data: bytes, count: MemberCount) -> Steps[dict[str, Any]]:
    """Convert a Struct to the JSON object that it is, and count its members and those in it.

    Raises MalformedMessage beyond the limits on depth and members, and for a number that is NaN or infinite.
    """
    found: dict[str, Any] = {}
    yield from _read(data, found, count)
    return found


def read_any(data: bytes, count: MemberCount) -> Steps[Any]:
    """Convert a Value to the JSON value that it is. A whole number is an integer, as far as it is exact.

    Raises as `read_object`.
    """
    found: list[Any] = []
    yield from _read(b"\x0a" + varint(len(data)) + data, found, count)
    return found[0]


def _read_text(data: bytes, count: MemberCount) -> Steps[Any]:
    """Convert JSON text. Raises as `read_object`."""
    if (members := structure_of(data)) >= _TURN:
        members = members_in(data, count.left)
    if members > count.left:
        raise count.too_many()
    if count.add(members):
        yield
    return read_value(data, count.limits)


def _read(data: bytes, whole: Any, count: MemberCount) -> Steps[None]:
    """Fill an object or a list, and those in it."""
    into, end, at = whole, len(data), 0
    open_: list[tuple[Any, int]] = []  # those that are not complete, with their ends
    members, turn = count.members, count.turn
    most, deepest = members + count.left, count.limits.max_depth
    try:
        while True:
            while at == end:
                if not open_:
                    count.members, count.turn = members, turn
                    return
                into, end = open_.pop()
            members += 1
            if members > most:
                raise count.too_many()
            if members >= turn:
                turn = members + _TURN
                yield
            at, stop = _inside(data, at, end, _FIRST)
            name = ""
            if type(into) is dict:
                if at < stop and data[at] == _FIRST:  # an empty name need not be written
                    begins, at = _inside(data, at, stop, _FIRST)
                    name = str(data[begins:at], "utf-8")
                if at < stop:
                    at, ends = _inside(data, at, stop, _SECOND)
                    if ends < stop:
                        raise MalformedMessage("an entry of a google.protobuf.Struct is malformed")
            value, at, size = _value_of(data, at, stop)
            if size >= 0 and len(open_) + 2 > deepest:  # a container, whose members follow
                raise MalformedMessage(f"nested deeper than {deepest} levels")
            if type(into) is list:
                into.append(value)
            else:
                into[name] = value
            if size >= 0:
                open_.append((into, end))
                into, end = value, at + size
    except (IndexError, UnicodeDecodeError):
        raise MalformedMessage("a value of google.protobuf is malformed") from None


def _inside(data: bytes, at: int, end: int, tag: int) -> tuple[int, int]:
    """Return where the content of a field begins and where it ends, which is not behind `end`."""
    if data[at] != tag:
        raise MalformedMessage("a value of google.protobuf has an unknown field")
    size = data[at + 1]
    at += 2
    if size > 0x7F:
        size, at = read_varint(data, at - 1)
    if size < 0 or at + size > end:
        raise MalformedMessage("a value of google.protobuf is malformed: it is cut short")
    return at, at + size


def _value_of(data: bytes, at: int, stop: int) -> tuple[Any, int, int]:
    """Return the Value between two places, where what follows begins, and -1; for a container the size of its members.

    A Value of no kind is null.
    """
    if at == stop:
        return None, stop, -1
    kind = data[at]
    at += 1
    if kind == _NUMBER and stop - at == _DOUBLE.size:
        number: float = _NUMBER_AT(data, at)[0]
        if number != number or number in (float("inf"), float("-inf")):
            raise MalformedMessage("a number is NaN or infinite")
        return int(number) if number.is_integer() and abs(number) <= _EXACT else number, stop, -1
    size, at = read_varint(data, at)
    if kind in (_NULL, _BOOL):
        if at == stop and size >= 0:
            return None if kind == _NULL else size != 0, stop, -1
    elif size == stop - at:
        if kind == _STRING:
            return str(data[at:stop], "utf-8"), stop, -1
        if kind == _STRUCT:
            return {}, at, size
        if kind == _LIST:
            return [], at, size
    raise MalformedMessage("a google.protobuf.Value is malformed")


# Writing


def write_object(value: Mapping[str, Any], count: MemberCount) -> Steps[bytes]:
    """Convert a JSON object to a Struct; an integer that no double holds is rounded."""
    parts: list[bytes] = []
    for name, member in value.items():
        raw = name.encode()
        written = yield from write_any(member, count)
        entry = b"".join((b"\x0a", varint(len(raw)), raw, b"\x12", varint(len(written)), written))
        parts += (b"\x0a", varint(len(entry)), entry)
        if count.add(1):
            yield
    return b"".join(parts)


def write_any(value: Any, count: MemberCount) -> Steps[bytes]:
    """Convert a JSON value to a Value; an integer that no double holds is rounded."""
    kind = type(value)
    if kind is dict:
        written = yield from write_object(value, count)
        return b"".join((b"\x2a", varint(len(written)), written))
    if kind is list:
        parts: list[bytes] = []
        for member in value:
            written = yield from write_any(member, count)
            parts += (b"\x0a", varint(len(written)), written)
            if count.add(1):
                yield
        written = b"".join(parts)
        return b"".join((b"\x32", varint(len(written)), written))
    if kind is str:
        raw = value.encode()
        if len(raw) >= SOON and count.add(len(raw) // _BYTES):
            yield
        return b"".join((b"\x1a", varint(len(raw)), raw))
    if kind is bool:
        return b"\x20\x01" if value else b"\x20\x00"
    if kind is int or kind is float:
        return b"\x11" + _DOUBLE.pack(value)
    return b"\x08\x00"


SERVICE: Final = "/trimcp.v1.AgentTools/"
"""The beginning of the path of each method."""

ERROR_TRAILER: Final = "trimcp-error-bin"
"""The trailer with the JSON text of an error, in base64."""

SOON: Final = 4 * 1024
"""Bytes of a value from which on it is converted in turns."""

_MOST_FIELDS: Final = 20_000  # of one message that may hold lists of messages: as many tools at once
_TEXT: Final = "_json"  # the form of a field, and the end of its name
_REPEATED, _MESSAGE = "repeated", "message"
_MANIFEST: Final = "manifest"  # the member that is all of a manifest, with members that have no field
_OBJECT, _ANY = ".google.protobuf.Struct", ".google.protobuf.Value"
_loads: Final = orjson.loads


def _own_classes() -> tuple[Any, dict[str, str], dict[str, tuple[Any, Any]]]:
    """Return the messages' classes by name, the fields that are Struct or Value by their full names, and `METHODS`."""
    file = descriptor_pb2.FileDescriptorProto.FromString(described())
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


DESCRIPTORS: Final = (described(), struct_pb2.DESCRIPTOR.serialized_pb)
"""The file with the service, and the one that it imports, as others see them."""

PB, _VALUES, METHODS = _own_classes()
"""The classes by name; and of each method of the service the classes of a request and an answer."""


def decode(cls: Any, payload: bytes) -> Any:
    """Return the message of this class that a payload is. Raises MalformedMessage.

    An empty message takes two bytes, and an object of a hundred: where they may be many, they are counted before.
    """
    if len(payload) >= SOON and (holding := _lists_in(cls.DESCRIPTOR)):
        _count_fields(payload, holding)
    try:
        return cls.FromString(payload)
    except DecodeError:
        raise MalformedMessage("no message of protobuf") from None


@cache
def _lists_in(descriptor: Any) -> dict[int, Any]:
    """Return the fields that are lists of messages, or hold such lists, by number: what `_count_fields` goes into."""
    return {
        field.number: inner
        for field in descriptor.fields
        if field.message_type is not None and ((inner := _lists_in(field.message_type)) or field.is_repeated)
    }


def _count_fields(payload: bytes, holding: Mapping[int, Any]) -> None:
    """Raise MalformedMessage if a message has more than `_MOST_FIELDS` fields, those counted that hold lists."""
    left, waiting = _MOST_FIELDS, [(0, len(payload), holding)]
    while waiting:
        at, end, holding = waiting.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise MalformedMessage(f"more than {_MOST_FIELDS:,} fields")
            number, begins, at = next_field(payload, at)
            if not 0 < at <= end:
                raise MalformedMessage("no message of protobuf")
            if inner := holding.get(number):
                waiting.append((begins, at, inner))


# Messages


@attrs.frozen(eq=False)
class _ProtoField:
    """A field of a class of messages."""

    name: str
    member: str  # that it has
    form: str  # how it has that: `_TEXT`, `_OBJECT`, `_ANY`, `_REPEATED` or `_MESSAGE`; else the value as it is
    optional: bool  # whether the class knows if it was sent
    always: bool  # whether it has its member if that is not known, although 0, or an empty list, is not sent


@cache
def _fields(descriptor: Any) -> list[_ProtoField]:
    """Return the fields of a class of messages; texts are the last, since they count where both forms are present."""
    found = []
    for field in sorted(descriptor.fields, key=lambda field: field.name.endswith(_TEXT)):
        form = _TEXT if field.name.endswith(_TEXT) else _VALUES.get(field.full_name, "")
        if field.message_type is not None:
            form = _REPEATED if field.is_repeated else _MESSAGE
        always = field.is_repeated or field.type not in (field.TYPE_STRING, field.TYPE_BYTES)
        found.append(_ProtoField(field.name, field.name.removesuffix(_TEXT), form, field.has_presence, always))
    return found


@cache
def _forms(descriptor: Any) -> dict[str, str]:
    """Return the forms of the fields of a class of messages, by their names."""
    return {field.name: field.form for field in _fields(descriptor)}


@cache
def _by_member(descriptor: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the names and forms of the fields that have a member, by its name."""
    fields = _fields(descriptor)
    return {
        each.member: [(field.name, field.form) for field in fields if field.member == each.member] for each in fields
    }


def members_of(message: Any, count: MemberCount) -> Steps[dict[str, Any]]:
    """Convert a protobuf message to the members that the protocol's JSON message has. Raises MalformedMessage.

    `count` bounds the members of all of its values together.
    """
    found: dict[str, Any] = {}
    for field in _fields(message.DESCRIPTOR):
        if field.optional and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if not (value or field.always or field.optional):
            continue
        if field.form == _REPEATED:
            items = found[field.member] = []
            for item in value:
                if count.add(_MESSAGE_COST):
                    yield
                items.append((yield from members_of(item, count)))
        else:
            found[field.member] = (yield from _READ[field.form](value, count)) if field.form else value
    whole = found.pop(_MANIFEST, None)
    return whole if type(whole) is dict else found


_READ: Final[Mapping[str, Callable[[Any, MemberCount], Steps[Any]]]] = {
    _TEXT: _read_text,
    _OBJECT: read_object,
    _ANY: read_any,
    _MESSAGE: members_of,
}


def fill(message: Any, members: Mapping[str, Any], *, both: bool, count: MemberCount | None = None) -> Steps[Any]:
    """Set a protobuf message to the members of a JSON message and return it; others are left out.

    With `both` JSON values are also set as Struct or Value.
    """
    count = count or MemberCount()
    fields = _by_member(message.DESCRIPTOR)
    for member, value in members.items():
        if value is None:
            continue
        for name, form in fields.get(member, ()):
            if not form:
                setattr(message, name, value)
            elif form == _TEXT:
                text = encode(value)
                if len(text) >= SOON and count.add(len(text) // _BYTES):
                    yield
                setattr(message, name, text)
            elif form == _REPEATED:
                for item in value:
                    if count.add(_MESSAGE_COST):
                        yield
                    yield from fill(getattr(message, name).add(), item, both=both, count=count)
            elif form == _MESSAGE:
                getattr(message, name).SetInParent()
                yield from fill(getattr(message, name), value, both=both, count=count)
            elif both:
                setattr(message, name, (yield from (write_object if form == _OBJECT else write_any)(value, count)))
    if _MANIFEST in fields:
        message.manifest_json = encode(dict(members))
    return message


def wants_both(message: Any) -> bool:
    """Whether the answer to a request has JSON values in both forms: not if it brought them as text only."""
    forms = _forms(message.DESCRIPTOR)
    sent = {forms[field.name] for field, _ in message.ListFields()}
    return _TEXT not in sent or not sent.isdisjoint((_OBJECT, _ANY))


def plain_members(message: Any) -> dict[str, Any]:
    """Return the members that a message has and that need no conversion: those that are no JSON values."""
    forms = _forms(message.DESCRIPTOR)
    return {field.name: value for field, value in message.ListFields() if not forms[field.name]}


# Messages with their types


TYPES: Final = {**{cls.__name__: type for type, cls in MESSAGES.items()}, "ProvideRefused": "error"}
"""The `type` of what each message of protobuf is, by its name."""


@cache
def _choices(cls: Any) -> dict[str, str]:
    """Return the fields of a message that is one of several, by the types of these."""
    return {TYPES[field.message_type.name]: field.name for field in cls.DESCRIPTOR.fields}


def framed_in(cls: Any, members: Mapping[str, Any], *, both: bool) -> Steps[bytes]:
    """Return the frame of a message of this class that holds a JSON message. See `fill`."""
    message = cls()
    field = getattr(message, _choices(cls)[members["type"]])
    field.SetInParent()
    yield from fill(field, members, both=both)
    return message_frame(message.SerializeToString())


async def tagged_in(cls: Any, payloads: Sequence[bytes]) -> list[Any]:
    """Return the messages in those of a provider's stream, each with its `type`, or what is wrong; many in turns."""
    steps = tagged_steps(cls, payloads)
    few = sum(map(len, payloads)) < 2 * _TURN  # a member takes two bytes at least
    return at_once(steps) if few else await in_turns(steps)


def tagged_steps(cls: Any, payloads: Sequence[bytes]) -> Steps[list[Any]]:
    """Convert as `tagged_in` says."""
    found: list[Any] = []
    count = MemberCount()
    for payload in payloads:
        try:
            message = decode(cls, payload)
            name = message.WhichOneof("message")
            if name is None:
                raise MalformedMessage("an empty message")
            inner = getattr(message, name)
            members = yield from members_of(inner, count)
            found.append({"type": TYPES[inner.DESCRIPTOR.name], **members})
        except MalformedMessage as error:
            found.append(Malformed(INVALID_REQUEST, error.message, None, "shape"))
        if count.next():
            yield
    return found


async def tagged_frame(cls: Any, text: bytes, *, both: bool) -> bytes:
    """Return the frame of a message of a provider's stream that holds a JSON message; nothing if it cannot hold it."""
    members = _loads(text)
    return await in_turns(framed_in(cls, members, both=both)) if members["type"] in _choices(cls) else b""


# Calls, which are many


def in_text(message: Any) -> bool:
    """Whether a `ToolRequest` brought its JSON values as text only; see `wants_both`."""
    return bool(message.arguments_json or message.input_responses_json) and not message.HasField("arguments")


_SUCCESS: Final = text_field(2, b"success")


def response_bytes(request_id: str, status: str, result: bytes, value: bytes | None) -> bytes:
    """Return the `ToolResponse` of a call as bytes: the result's JSON text is copied; as Value it may be left out."""
    id = request_id.encode()
    said = _SUCCESS if status == "success" else text_field(2, status.encode())
    also = () if value is None else (b"\x1a", varint(len(value)), value)
    return b"".join((b"\x0a", varint(len(id)), id, said, *also, b"\x22", varint(len(result)), result))
