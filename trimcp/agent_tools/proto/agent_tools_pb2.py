"""The messages as classes of protobuf, as code that protoc generates has them. For other programs; needs protobuf."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pool, message_factory, struct_pb2  # noqa: F401 - the file imports the last

from trimcp.agent_tools.proto import described

DESCRIPTOR: Any = descriptor_pool.Default().AddSerializedFile(described())

for _message in DESCRIPTOR.message_types_by_name.values():
    globals()[_message.name] = message_factory.GetMessageClass(_message)
