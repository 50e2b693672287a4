"""The descriptor is what the .proto says, and its messages carry every JSON value."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format, struct_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.peers.processes import MIB, memory_of
from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.agent_tools.messages.messages import MESSAGES, ToolRequest
from trimcp.agent_tools.messages.protobuf import (
    METHODS,
    PB,
    MemberCount,
    decode,
    fill,
    members_of,
    read_any,
    read_object,
    wants_both,
    write_any,
    write_object,
)
from trimcp.agent_tools.messages.steps import at_once
from trimcp.agent_tools.proto import agent_tools_pb2
from trimcp.framing.grpc import text_field
from trimcp.wire.jsonrpc import ParseLimits

FOREIGN: Any = agent_tools_pb2  # as others use it

ROOT = Path(__file__).parents[2]
PROTO = "trimcp/agent_tools/proto/agent_tools.proto"

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def test_the_descriptor_is_current(tmp_path: Path) -> None:
    out = tmp_path / "set.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT), f"--descriptor_set_out={out}", PROTO]
    subprocess.run(command, check=True, cwd=ROOT)
    assert out.read_bytes() == (ROOT / PROTO).with_suffix(".binpb").read_bytes(), "run `nox -s proto`"


def test_another_file_of_the_same_messages_has_room_beside_ours() -> None:
    """A program may have code of its own for the .proto: importing ours registers nothing in the process's pool."""
    script = """
from google.protobuf import descriptor_pb2, descriptor_pool, struct_pb2
import trimcp.agent_tools.messages.protobuf as ours
own = descriptor_pb2.FileDescriptorProto.FromString(ours.DESCRIPTORS[0])
own.name = "somewhere/else.proto"
descriptor_pool.Default().AddSerializedFile(own.SerializeToString())
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_every_message_that_asks_has_an_answer_and_the_method_that_gives_it() -> None:
    asking = [cls for cls in MESSAGES.values() if cls.asks and cls.type != "context_unwatch"]
    assert all(cls.answer in MESSAGES for cls in asking)
    assert {cls.method for cls in asking} - {""} == set(METHODS) - {"CallStream", "Provide"}
    for cls in asking:
        if cls.method and cls.type != "context_watch":
            asked, answer = METHODS[cls.method]
            assert asked.DESCRIPTOR.name.removesuffix("Request") == cls.__name__.removesuffix("Request")
            assert answer.DESCRIPTOR.name == MESSAGES[cls.answer].__name__


def test_every_member_of_a_message_has_its_field() -> None:
    """Only what the stream or the call says by itself is left out."""
    here = {"ToolRequest": "tool_request", "ToolResponse": "tool_response", "ToolProgress": "tool_progress"}
    here |= {"ContextCreate": "context_create", "ContextState": "context_state", "ContextUpdate": "context_update"}
    here |= {"ContextDestroy": "context_destroy", "ContextDestroyed": "context_destroyed"}
    here |= {"ToolCancel": "tool_cancel", "ProvideTools": "provide_tools", "ListToolsRequest": "list_tools"}
    for name, kind in here.items():
        fields = {field.name.removesuffix("_json") for field in getattr(PB, name).DESCRIPTOR.fields}
        members = set(MESSAGES[kind].__annotations__)
        assert members - fields <= {"request_id", "context_id"}, name


@settings(max_examples=40)
@given(VALUES)
def test_values_survive_in_both_directions(value: Any) -> None:
    """What is written here is read by protobuf, and the other way round."""
    written = FOREIGN.ToolResponse()
    written.result.ParseFromString(at_once(write_any(value, MemberCount())))
    assert json_format.MessageToDict(written).get("result") == value
    foreign = FOREIGN.ToolResponse()
    json_format.ParseDict(value, foreign.result)
    read = at_once(read_any(foreign.result.SerializeToString(), MemberCount()))
    assert json.dumps(read, sort_keys=True) == json.dumps(_as_integers(value), sort_keys=True)  # 1 is not 1.0


def _as_integers(value: Any) -> Any:
    """The same with whole numbers as integers."""
    if isinstance(value, dict):
        return {name: _as_integers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_as_integers(member) for member in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=4))
def test_a_message_has_the_same_members_in_either_form(state: dict[str, Any]) -> None:
    for both in (True, False):
        filled = at_once(fill(PB.ContextState(), {"context_id": "c", "version": 2, "state": state}, both=both))
        assert at_once(members_of(filled, MemberCount())) == {"context_id": "c", "version": 2, "state": state}
        assert filled.HasField("state") is both
        assert FOREIGN.ContextState.FromString(filled.SerializeToString()).HasField("state") is both


def test_what_was_asked_as_text_is_answered_as_text() -> None:
    assert wants_both(PB.ContextCreate())
    assert not wants_both(PB.ContextCreate(state_json=b"{}"))
    assert wants_both(PB.ContextCreate(state_json=b"{}", state=b""))


def nested(levels: int) -> bytes:
    """A list in a list."""
    value: Any = None
    for _ in range(levels):
        value = [value]
    return at_once(write_object({"a": value}, MemberCount()))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (nested(128), "deeper"),
        (at_once(write_object({"a": [None] * 1_000}, MemberCount())), "more than 1,000 members"),
        (at_once(write_object({str(n): n for n in range(1_001)}, MemberCount())), "more than 1,000 members"),
        (b"\x0a\x0e\x0a\x01a\x12\x09\x11" + struct.pack("<d", math.inf), "infinite"),
        (b"\x0a\x07\x0a\x01a\x12\x03\x1a\x01\xff", "malformed"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "cut short"),
        (b"\x0a\x05", "cut short"),
        (b"\x0a", "malformed"),
        (b"\x12\x00", "unknown field"),
    ],
)
def test_hostile_values_are_malformed(data: bytes, why: str) -> None:
    with pytest.raises(MalformedMessage, match=why):
        at_once(read_object(data, MemberCount(ParseLimits(max_members=1_000))))


@settings(max_examples=200)
@given(VALUES, st.data())
def test_any_bytes_are_a_value_or_malformed(value: Any, data: st.DataObject) -> None:
    """Never anything else; and what protobuf's own parser refuses is refused."""
    good = bytearray(at_once(write_object({"a": value, "b": [value]}, MemberCount())))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = at_once(read_object(bytes(good), MemberCount()))
    except MalformedMessage:
        return
    foreign = struct_pb2.Struct.FromString(bytes(good))
    assert set(foreign.fields) == set(found)


def test_members_that_are_no_json_are_malformed() -> None:
    with pytest.raises(MalformedMessage):
        at_once(members_of(PB.ContextCreate(state_json=b"{"), MemberCount()))
    assert ToolRequest.type == "tool_request"


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("ToolList", b"\x0a\x00" * 2**20),
        ("ToolsRegistered", b"\x0a\x00" * 2**20),
        ("ProvideTools", b"\x12\x00" * 2**20),
        ("FromProvider", text_field(1, b"\x12\x00" * 2**20)),
        ("FromProvider", text_field(1, b"\x12\x00" * 100) * 10_000),
        ("ToProvider", text_field(1, b"\x0a\x00" * 2**20)),
    ],
)
def test_messages_in_a_message_are_counted_before_they_are_objects(name: str, payload: bytes) -> None:
    """Two bytes of each become more than a hundred."""
    before = memory_of(os.getpid())
    with pytest.raises(MalformedMessage, match="more than 20,000 fields"):
        decode(getattr(PB, name), payload)
    assert memory_of(os.getpid()) - before < 4 * MIB


@pytest.mark.parametrize("payload", [b"\x12\xff\xff\x03", b"\x00\x00", b"\x13\x14", b"\x11\x01", b"\x08\xff"])
def test_a_long_message_that_is_none_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage, match="no message of protobuf"):
        decode(PB.ToolList, b"\x12\x00" * 4_000 + payload)


def test_a_long_list_of_tools_is_read_whole() -> None:
    tools = PB.ToolList(tools=[PB.Manifest(name=f"t{n}", parameters_json=b"{}") for n in range(5_000)])
    assert len(decode(PB.ToolList, tools.SerializeToString()).tools) == 5_000
