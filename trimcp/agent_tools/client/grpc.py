"""The agent-tools protocol through gRPC, for clients: calls, watches and a provider's stream on one HTTP/2 connection.

JSON values travel as text, so that every number survives. Needs protobuf, which is imported with this module.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
class GrpcWire(wire.ExchangeWire):
    """An `AgentWire` over one connection of HTTP/2."""

    _connection: Http2Client
    _metadata: tuple[tuple[str, str], ...]
    _max_message: int

    async def exchange(
        self, message: messages.AgentMessage, read: wire.ReadValue[wire.AnswerT], *, stream: bool = False
    ) -> wire.AnswerT | None:
        """See `ExchangeWire.exchange`."""
        name = "CallStream" if stream and isinstance(message, messages.ToolRequest) else message.method
        if not name:
            raise LocalError(f"{message.type} has no method of gRPC")
        path, (asked, answer), most = f"{SERVICE}{name}", protobuf.METHODS[name], self._max_message
        payload = at_once(protobuf.fill(asked(), messages.as_json(message), both=False)).SerializeToString()
        last: wire.AnswerT | None = None
        try:
            if not stream:
                reply = await self._connection.unary(path, payload, self._metadata, max_message=most)
                return await read(_value(answer, reply))
            decoder = GrpcDecoder(most)
            async with self._connection.call(path, self._metadata) as call:
                await call.send(message_frame(payload), end=True)
                # After the last comes the end, with the status.
                while (event := await call.next_message(decoder)) is not None and last is None:
                    last = await read(_value(answer, event, event=True))
        except CallFailed as failure:
            raise self.error(failure) from failure
        return last

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


def _value(cls: Any, payload: bytes, *, event: bool = False) -> dict[str, Any]:
    """Return the JSON message that a message of this class is, or the `event` in it."""
    try:
        message = protobuf.decode(cls, payload)
        if event:
            name = message.WhichOneof("event")
            if name is None:
                raise InvalidReply("the service sent an event of another kind")
            message = getattr(message, name)
        members = at_once(protobuf.members_of(message, protobuf.MemberCount()))
    except errors.MalformedMessage as error:
        raise InvalidReply(f"the service's answer cannot be read: {error.message}") from None
    return {"type": protobuf.TYPES[message.DESCRIPTOR.name], **members}


# A provider's stream


async def _from_service(offer: messages.ProvideTools, payloads: Sequence[bytes]) -> list[Any]:
    """Return the JSON messages that `ToProvider` messages are, or what is wrong with them."""
    found = await protobuf.tagged_in(PB.ToProvider, payloads)
    for each in found:
        if type(each) is dict and each["type"] in (messages.ToolsRegistered.type, messages.ErrorMessage.type):
            each["request_id"] = offer.request_id  # the answer to the one offer of a stream
    return found
