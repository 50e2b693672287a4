"""The agent-tools protocol through gRPC, for clients: calls, watches and a provider's stream on one HTTP/2 connection.

JSON values travel as text, so that every number survives. Needs protobuf, which is imported with this module.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import attrs
import orjson
import trio

from trimcp.agent_tools.client import wire
from trimcp.agent_tools.messages import errors, messages
from trimcp.errors import ConnectionLost, InvalidReply, LocalError
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, message_frame
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.descriptors import PIECE
from trimcp.transports.grpc.calls import CallFailed, Http2Call
from trimcp.transports.grpc.client import GrpcServer
from trimcp.transports.grpc.http2 import Http2Client

try:
    from trimcp.agent_tools.messages.protobuf import (
        ERROR_TRAILER,
        METHODS,
        PB,
        SERVICE,
        MemberCount,
        at_once,
        decode,
        fill,
        framed_in,
        members_of,
    )
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
                    message = wire.event_in(_tagged(messages.ToolProgress, event.progress), (messages.ToolProgress,))
                    assert isinstance(message, messages.ToolProgress)
                    progressed(message)
        raise InvalidReply("the service ended the call without an answer")

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        """See `AgentWire.ask`."""
        if not message.method:
            raise LocalError(f"{message.type} has no method of gRPC")
        asked, answer = METHODS[message.method]
        try:
            reply = await self._unary(message.method, _payload(asked, message), answer)
        except CallFailed as failure:
            raise self.error(failure) from failure
        return wire.answer_in(_tagged(messages.MESSAGES[message.answer], reply), message)

    async def _unary(self, name: str, request: bytes, cls: Any) -> Any:
        path = SERVICE + name
        answer = await self._connection.unary(path, request, self._metadata, max_message=self._max_message)
        return _decoded(cls, answer)

    @asynccontextmanager
    async def watching(self, context_id: str) -> AsyncIterator[trio.abc.ReceiveChannel[messages.AgentMessage]]:
        """See `AgentWire.watching`. A slow reader makes the service wait, which then sends a state instead."""
        request = PB.ContextWatch(context_id=context_id).SerializeToString()
        try:
            async with self._connection.call(f"{SERVICE}WatchContext", self._metadata) as call:
                await call.send(message_frame(request), end=True)
                watch = GrpcWatch(self, call, GrpcDecoder(self._max_message))
                await watch.begin()
                yield watch
        except CallFailed as failure:
            raise self.error(failure) from failure

    @asynccontextmanager
    async def providing(self, offer: messages.ProvideTools) -> AsyncIterator[GrpcProviderStream]:
        """See `AgentWire.providing`. The tools are withdrawn when the block is left."""
        try:
            async with self._connection.call(f"{SERVICE}Provide", self._metadata) as call:
                stream = GrpcProviderStream(wire=self, call=call, decoder=GrpcDecoder(self._max_message))
                await stream.offer(offer)
                async with open_service_nursery() as nursery:
                    nursery.start_soon(stream.write)
                    yield stream
        except CallFailed as failure:
            raise self.error(failure) from failure

    async def wait_lost(self) -> None:
        """Wait until the connection is lost."""
        await self._connection.over.wait()

    def error(self, failure: CallFailed) -> Exception:
        """Return what a call's failure is in this protocol."""
        said = failure.trailers.get(ERROR_TRAILER)
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
    payload: bytes = at_once(fill(cls(), messages.as_json(message), both=False)).SerializeToString()
    return payload


def _decoded(cls: Any, payload: bytes) -> Any:
    try:
        return decode(cls, payload)
    except errors.MalformedMessage as error:
        raise InvalidReply(f"the service's answer cannot be read: {error.message}") from None


def _tagged(cls: type[messages.AgentMessage], message: Any) -> dict[str, Any]:
    """Return a protobuf message as the JSON message that it is."""
    try:
        return {"type": cls.type, **at_once(members_of(message, MemberCount()))}
    except errors.MalformedMessage as error:
        raise InvalidReply(f"the service's answer is malformed: {error.message}") from None


@attrs.define(eq=False, repr=False)
class GrpcWatch(trio.abc.ReceiveChannel[messages.AgentMessage]):
    """The events of one context. What is not received makes the service wait."""

    _wire: GrpcWire
    _call: Http2Call
    _decoder: GrpcDecoder
    _first: messages.AgentMessage | None = attrs.field(init=False, default=None)

    async def begin(self) -> None:
        """Wait for the first event, which shows that the context can be watched."""
        self._first = await self._next()

    async def receive(self) -> messages.AgentMessage:
        """Wait for the next event. Cancelling this loses nothing."""
        await trio.lowlevel.checkpoint()
        first, self._first = self._first, None
        if first is not None:
            return first
        try:
            return await self._next()
        except CallFailed as failure:
            raise self._wire.error(failure) from failure

    async def _next(self) -> messages.AgentMessage:
        payload = await self._call.next_message(self._decoder)
        if payload is None:
            raise ConnectionLost("the service ended the watch")
        event = _decoded(PB.ContextEvent, payload)
        name = event.WhichOneof("event")
        if name is None:
            raise InvalidReply("the service sent an event of another kind")
        cls = messages.MESSAGES[f"context_{name}"]
        return wire.event_in(_tagged(cls, getattr(event, name)), (cls,))

    async def aclose(self) -> None:
        """Receive no more, and end the watch at the service."""
        self._call.cancel()
        await trio.lowlevel.checkpoint()


@attrs.define(eq=False, repr=False)
class GrpcProviderStream(wire.ProviderStream):
    """A `ProviderStream` on a call. What is not received makes the service wait."""

    _wire: GrpcWire = attrs.field(kw_only=True, alias="wire")
    _call: Http2Call = attrs.field(kw_only=True, alias="call")
    _decoder: GrpcDecoder = attrs.field(kw_only=True, alias="decoder")

    async def offer(self, offer: messages.ProvideTools) -> None:
        """Offer the tools, and wait for what the service makes of it. Raises AgentToolsError if they are refused."""
        frame = framed_in(PB.FromProvider, offer.type, messages.as_json(offer), both=False)
        await self._call.send(at_once(frame))
        found: Any = await self._next()
        name = found and found.WhichOneof("message")
        if name == "refused":
            raise errors.error_from(at_once(members_of(found.refused, MemberCount())).get("error"))
        if name != "tools_registered":
            raise InvalidReply("the service does not say what it makes of the tools")
        answer = wire.answer_in(_tagged(messages.ToolsRegistered, found.tools_registered), offer)
        assert isinstance(answer, messages.ToolsRegistered)
        self.registered = answer

    async def _next(self) -> Any:
        """Return the next message of the service; None at the end."""
        payload = await self._call.next_message(self._decoder)
        return None if payload is None else _decoded(PB.ToProvider, payload)

    async def receive(self) -> tuple[messages.ToolRequest | messages.ToolCancel, int]:
        """See `ProviderStream.receive`."""
        while True:
            try:
                found = await self._next()
            except CallFailed as failure:
                raise self._wire.error(failure) from failure
            if found is None:
                raise trio.EndOfChannel("the service has ended the stream")
            for name, cls in (("tool_request", messages.ToolRequest), ("tool_cancel", messages.ToolCancel)):
                if found.HasField(name):
                    message = wire.event_in(
                        _tagged(cls, getattr(found, name)), (messages.ToolRequest, messages.ToolCancel)
                    )
                    assert isinstance(message, messages.ToolRequest | messages.ToolCancel)
                    return message, found.ByteSize()

    async def write(self) -> None:
        """Write what is posted until the stream has ended."""
        try:
            while True:
                gathered = bytearray()
                for each in await self.out.receive():
                    gathered += _from_provider(each.data)
                    if len(gathered) >= PIECE:
                        await self._call.send(bytes(gathered))
                        gathered.clear()
                await self._call.send(bytes(gathered))
        except (CallFailed, trio.EndOfChannel):
            self.out.abandon()  # the reader says why


def _from_provider(text: bytes) -> bytes:
    """Return the frame of the `FromProvider` that a JSON message is; nothing for one of another kind."""
    members = orjson.loads(text)
    if members["type"] not in (messages.ToolResponse.type, messages.ToolProgress.type):
        return b""
    return at_once(framed_in(PB.FromProvider, members["type"], members, both=False))
