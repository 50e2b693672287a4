"""The face of gRPC for the tables of `faces`: gRPC's own client."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import grpc
import orjson
import trio
from google.protobuf import json_format

from tests.agent_tools.faces import AgentFace, AgentLink, AgentReply, Between, head_of
from tests.agent_tools.rpc_support import PB, stub
from tests.agent_tools.world import conforms
from tests.fuzz.effort import PATIENCE

__all__ = ["RPC_FACES"]

_METHODS = {
    "tool_request": ("Call", "ToolRequest", "ToolResponse", "tool_response"),
    "register_tool": ("RegisterTool", "RegisterToolRequest", "ToolsRegistered", "tools_registered"),
    "context_create": ("CreateContext", "ContextCreate", "ContextState", "context_state"),
    "context_read": ("ReadContext", "ContextRead", "ContextState", "context_state"),
    "context_update": ("UpdateContext", "ContextUpdate", "ContextUpdate", "context_update"),
    "context_destroy": ("DestroyContext", "ContextDestroy", "ContextDestroyed", "context_destroyed"),
}
_TRAILER = "trimcp-error-bin"


def members_of(message: dict[str, Any]) -> dict[str, Any]:
    """A message as its protocol buffer has it, in JSON."""
    members = {name: value for name, value in message.items() if name != "type"}
    if "tool" in members:
        members["tool"] = {"manifest_json": base64.b64encode(orjson.dumps(members["tool"])).decode()}
    return members


def answer_of(kind: str, answer: Any) -> AgentReply:
    """The answer to a message of this type."""
    found = json_format.MessageToDict(answer, preserving_proto_field_name=True)
    for name in ("result", "state", "updates"):
        found.pop(f"{name}_json", None)
    if "version" in found:
        found["version"] = int(found["version"])
    elif kind == "context_create":
        found["version"] = 0
    if kind == "context_create":
        found.setdefault("state", {})
    return AgentReply(conforms({"type": _METHODS[kind][3], **found}), code="OK")


def failed(code: str, text: str | None) -> AgentReply:
    """An error, of which a trailer has the JSON text; without one it is what HTTP or gRPC itself refuses."""
    if text is None:
        return AgentReply({}, code=code)
    error = orjson.loads(base64.b64decode(text + "=" * (-len(text) % 4)))
    return AgentReply(conforms({"type": "error", "error": error}), code=code)


@attrs.define
class RpcLink(AgentLink):
    """Sends each message in a call of its own, on one connection."""

    token: str | None
    nursery: trio.Nursery
    _answers: tuple[trio.MemorySendChannel[AgentReply], trio.MemoryReceiveChannel[AgentReply]] = attrs.field(
        factory=lambda: trio.open_memory_channel[AgentReply](10)
    )

    async def send(self, message: dict[str, Any] | bytes, between: Between | None = None) -> None:
        assert isinstance(message, dict)
        if between is not None:
            await between()
        self.nursery.start_soon(self._answer, message)

    async def receive(self) -> AgentReply:
        return await self._answers[1].receive()

    async def _answer(self, message: dict[str, Any]) -> None:
        await self._answers[0].send(await self.call(message))

    async def call(self, message: dict[str, Any]) -> AgentReply:
        """Send a message and return its answer."""
        raise NotImplementedError


@attrs.define
class GrpcLink(RpcLink):
    """gRPC's own client."""

    channel: grpc.Channel = attrs.field(kw_only=True)

    async def call(self, message: dict[str, Any]) -> AgentReply:
        method, asked, _, _ = _METHODS[message["type"]]
        request = json_format.ParseDict(members_of(message), getattr(PB, asked)(), ignore_unknown_fields=True)

        def run() -> AgentReply:
            try:
                answer = stub(self.channel, method)(
                    request, timeout=PATIENCE, metadata=tuple(head_of(self.token).items())
                )
            except grpc.RpcError as error:
                failure: Any = error
                trailers = dict(failure.trailing_metadata() or ())
                text = trailers.get(_TRAILER)
                encoded = None if text is None else base64.b64encode(text).decode()
                return failed(failure.code().name, encoded)
            return answer_of(message["type"], answer)

        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


@attrs.frozen
class OverGrpc(AgentFace):
    """gRPC."""

    many = True

    @asynccontextmanager
    async def link(self, token: str | None) -> AsyncIterator[AgentLink]:
        with grpc.insecure_channel(self.place.url.partition("://")[2]) as channel:
            async with trio.open_nursery() as nursery:
                yield GrpcLink(token, nursery, channel=channel)
                nursery.cancel_scope.cancel()


RPC_FACES: dict[str, tuple[str, type[AgentFace]]] = {"grpc": ("grpc", OverGrpc)}
"""As `faces.FACES`; for servers with `trimcp[grpc]`."""
