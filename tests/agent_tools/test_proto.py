"""The generated code is what the .proto says, and its messages carry every JSON value."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from trimcp.agent_tools.errors import MalformedMessage
from trimcp.agent_tools.messages import MESSAGES, ToolRequest
from trimcp.agent_tools.rpc_messages import PB, fill, fill_value, members_of, value_of, wants_both

ROOT = Path(__file__).parents[2]
PROTO = "trimcp/agent_tools/proto/agent_tools.proto"

NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    out = tmp_path / "set.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT), f"--descriptor_set_out={out}", PROTO]
    subprocess.run(command, check=True, cwd=ROOT)
    compiled: Any = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]
    generated = descriptor_pb2.FileDescriptorProto.FromString(PB.DESCRIPTOR.serialized_pb)
    for message in compiled.message_type:
        for field in message.field:
            field.ClearField("json_name")  # follows from the name, and is left out of generated code
    assert compiled == generated, "run `nox -s proto`"


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
def test_values_survive(value: Any) -> None:
    message = PB.ToolResponse()
    fill_value(message.result, value)
    assert value_of(PB.ToolResponse.FromString(message.SerializeToString()).result) == value


@settings(max_examples=40)
@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=4))
def test_a_message_has_the_same_members_in_either_form(state: dict[str, Any]) -> None:
    for both in (True, False):
        filled = fill(PB.ContextState(), {"context_id": "c", "version": 2, "state": state}, both=both)
        assert members_of(filled) == {"context_id": "c", "version": 2, "state": state}
        assert filled.HasField("state") is both


def test_what_was_asked_as_text_is_answered_as_text() -> None:
    assert wants_both(PB.ContextCreate())
    assert not wants_both(PB.ContextCreate(state_json=b"{}"))
    asked = PB.ContextCreate(state_json=b"{}")
    asked.state.SetInParent()
    assert wants_both(asked)


def test_hostile_values_are_malformed() -> None:
    deep = PB.ToolResponse()
    value = deep.result
    for _ in range(90):
        value = value.list_value.values.add().list_value.values.add()
    with pytest.raises(MalformedMessage, match="deeper"):
        value_of(deep.result)
    infinite = PB.ToolResponse()
    infinite.result.number_value = float("inf")
    with pytest.raises(MalformedMessage, match="infinite"):
        value_of(infinite.result)
    with pytest.raises(MalformedMessage):
        members_of(PB.ContextCreate(state_json=b"{"))
    assert ToolRequest.type == "tool_request"
