"""The agent-tools protocol through gRPC, for clients: calls, watches and a provider's stream on one HTTP/2 connection.

JSON values travel as text, so that every number survives. Needs protobuf, which is imported with this module.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import attrs
import orjson

from trimcp.agent_tools.client import wire
from trimcp.agent_tools.client.channel import open_channel_wire
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.steps import at_once
from trimcp.errors import ConnectionLost, InvalidReply, LocalError
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, message_frame
from trimcp.transports.grpc.calls import WINDOW, CallFailed
from trimcp.transports.grpc.channel import GrpcChannel
from trimcp.transports.grpc.client import GrpcServer
from trimcp.transports.grpc.http2 import Http2Client

try:
    from trimcp.agent_tools.messages import protobuf
    from trimcp.agent_tools.messages.protobuf import PB, SERVICE
except ImportError as _error:
    raise LocalError("agent tools through gRPC need another package: pip install protobuf") from _error


@asynccontextmanager
async def open_grpc_wire(target: wire.AgentTarget) -> AsyncIterator[GrpcWire]:
    """Connect, and yield a wire to the service; leaving closes the connection. Raises ConnectionLost."""
    target.check_no_auth()
    url = urlsplit(target.url)._replace(query="", fragment="").geturl()
    server = GrpcServer(url, target.all_headers(), target.uds, target.ssl_context, timeout=target.timeout)
    async with server.open() as connection:
        yield GrpcWire(connection, tuple(server.headers.items()), target.max_message)


@attrs.define(eq=False, repr=False)
class GrpcWire:
    """An `AgentWire` over one connection of HTTP/2."""

    _connection: Http2Client
    _metadata: tuple[tuple[str, str], ...]
    _max_message: int

    async def call(self, request: messages.ToolRequest, progressed: wire.Progressed | None) -> messages.ToolResponse:
        """See `AgentWire.call`."""
        asked = _payload(PB.ToolRequest, request)
        try:
            if progressed is None:
                answer = await self._unary("Call", asked, PB.ToolResponse)
                return wire.response_in(_tagged(messages.ToolResponse, answer))
            return await self._stream_call(asked, progressed)
        except CallFailed as failure:
            raise self.error(failure) from failure

    async def _stream_call(self, asked: bytes, progressed: wire.Progressed) -> messages.ToolResponse:
        decoder = GrpcDecoder(self._max_message)
        async with self._connection.call(f"{SERVICE}CallStream", self._metadata) as call:
            await call.send(message_frame(asked), end=True)
            while (payload := await call.next_message(decoder)) is not None:
                event = _decoded(PB.CallEvent, payload)
                if event.HasField("response"):
                    response = wire.response_in(_tagged(messages.ToolResponse, event.response))
                    await call.next_message(decoder)  # its end, with the status
                    return response
                if event.HasField("progress"):
                    progressed(wire.event_in(_tagged(messages.ToolProgress, event.progress), messages.ToolProgress))
        raise InvalidReply("the service ended the call without an answer")

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        """See `AgentWire.ask`."""
        if not message.method:
            raise LocalError(f"{message.type} has no method of gRPC")
        asked, answer = protobuf.METHODS[message.method]
        try:
            reply = await self._unary(message.method, _payload(asked, message), answer)
        except CallFailed as failure:
            raise self.error(failure) from failure
        return wire.answer_in(_tagged(messages.MESSAGES[message.answer], reply), message)

    async def _unary(self, name: str, request: bytes, cls: Any) -> Any:
        path = SERVICE + name
        answer = await self._connection.unary(path, request, self._metadata, max_message=self._max_message)
        return _decoded(cls, answer)

    def watching(self, context_id: str) -> AbstractAsyncContextManager[wire.Events]:
        """See `AgentWire.watching`."""
        return wire.watched(partial(self._watch, context_id))

    async def _watch(self, context_id: str, keep: wire.Keep) -> None:
        """Read a context's events until the service ends them. Raises why it did not, or why they cannot be read."""
        request, decoder = PB.ContextWatch(context_id=context_id).SerializeToString(), GrpcDecoder(self._max_message)
        try:
            async with self._connection.call(f"{SERVICE}WatchContext", self._metadata) as call:
                await call.send(message_frame(request), end=True)
                while (payload := await call.next_message(decoder)) is not None:
                    event = _decoded(PB.ContextEvent, payload)
                    name = event.WhichOneof("event")
                    if name is None:
                        raise InvalidReply("the service sent an event of another kind")
                    cls = messages.MESSAGES[f"context_{name}"]
                    await keep(wire.event_in(_tagged(cls, getattr(event, name)), cls))
        except CallFailed as failure:
            raise self.error(failure) from failure

    async def provide(self, offer: messages.ProvideTools, begin: wire.Begin, registered: wire.Registered) -> None:
        """See `AgentWire.provide`. The tools are withdrawn when this ends."""
        read, write = partial(_from_service, offer), partial(protobuf.tagged_frame, PB.FromProvider, both=False)
        try:
            async with self._connection.call(f"{SERVICE}Provide", self._metadata) as call:
                await call.begun()
                channel = GrpcChannel(call, self._max_message, window=WINDOW, read=read, write=write)
                async with channel, open_channel_wire(channel) as opened:
                    await opened.provide(offer, begin, registered)
        except CallFailed as failure:
            raise self.error(failure) from failure

    async def wait_lost(self) -> None:
        """Wait until the connection is lost."""
        await self._connection.over.wait()

    def error(self, failure: CallFailed) -> Exception:
        """Return what a call's failure is in this protocol."""
        said = failure.trailers.get(protobuf.ERROR_TRAILER)
        if said is not None:
            try:
                return errors.error_from(orjson.loads(base64.b64decode(said + "=" * (-len(said) % 4))))
            except (binascii.Error, ValueError):
                return InvalidReply("the service's error cannot be read")
        if self._connection.lost is not None or not failure.begun:
            return (ConnectionLost if failure.begun else wire.NotSent)(self._connection.lost or failure.message)
        if not failure.trailers and failure.status is GrpcStatus.RESOURCE_EXHAUSTED:
            return wire.too_large(self._max_message)
        cls = errors.ERRORS_BY_GRPC_STATUS.get(failure.status.name)
        return InvalidReply(f"the service failed: {failure}") if cls is None else cls(failure.message)


def _payload(cls: Any, message: messages.AgentMessage) -> bytes:
    """Return a message as one of this class of protobuf, with JSON values as text."""
    payload: bytes = at_once(protobuf.fill(cls(), messages.as_json(message), both=False)).SerializeToString()
    return payload


def _decoded(cls: Any, payload: bytes) -> Any:
    try:
        return protobuf.decode(cls, payload)
    except errors.MalformedMessage as error:
        raise InvalidReply(f"the service's answer cannot be read: {error.message}") from None


def _tagged(cls: type[messages.AgentMessage], message: Any) -> dict[str, Any]:
    """Return a protobuf message as the JSON message that it is."""
    try:
        return {"type": cls.type, **at_once(protobuf.members_of(message, protobuf.MemberCount()))}
    except errors.MalformedMessage as error:
        raise InvalidReply(f"the service's answer is malformed: {error.message}") from None


# A provider's stream


async def _from_service(offer: messages.ProvideTools, payloads: Sequence[bytes]) -> list[Any]:
    """Return the JSON messages that `ToProvider` messages are, or what is wrong with them."""
    found = await protobuf.tagged_in(PB.ToProvider, payloads)
    for each in found:
        if type(each) is dict and each["type"] in (messages.ToolsRegistered.type, messages.ErrorMessage.type):
            each["request_id"] = offer.request_id  # the answer to the one offer of a stream
    return found
