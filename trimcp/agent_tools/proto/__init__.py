"""The protocol of agent tools, and MCP's tunnel, in protobuf: `agent_tools.proto`, and what protoc makes of it."""

from __future__ import annotations

from pathlib import Path


def described() -> bytes:
    """Return the descriptor of the file, as protobuf has it. `nox -s proto` writes it; to read it needs protobuf."""
    from google.protobuf import descriptor_pb2

    whole = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("agent_tools.binpb").read_bytes())
    text: bytes = whole.file[0].SerializeToString()
    return text
