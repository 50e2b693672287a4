"""The ways to a service, each spoken by hand: one message there, its answer back, and how each says that it failed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
import h2.events
import orjson
import trio

from tests.agent_tools.world import World, conforms
from tests.fuzz.effort import PATIENCE
from tests.peers.http1 import HttpWire, http_request
from tests.peers.http2 import H2Client
from tests.peers.serving import ServedHere, served
from tests.peers.websockets import CLOSE, FIN, RawWebSocket, handshake, message

__all__ = ["FACES", "AgentFace", "AgentLink", "AgentReply", "Between", "serving_world"]

Between = Callable[[], Awaitable[object]]


@attrs.frozen
class AgentReply:
    """What came back for a message.

    Attributes:
        message: as it came; it conforms to the schemas. Empty where a WebSocket was closed instead.
        status: the HTTP status, where the face has one for each message; or the code with which it was closed.
        headers: of the response, likewise.
        code: the name of the gRPC status, where the face has one.
    """

    message: dict[str, Any]
    status: int | None = None
    headers: dict[str, str] = attrs.field(factory=dict)
    code: str = ""

    @property
    def error(self) -> dict[str, Any]:
        """The member `error`."""
        error: dict[str, Any] = self.message["error"]
        return error


class AgentLink(ABC):
    """One connection of an agent."""

    @abstractmethod
    async def send(self, message: dict[str, Any] | bytes, between: Between | None = None) -> None:
        """Send a message; with `between`, begin to, await that, and send the rest."""

    @abstractmethod
    async def receive(self) -> AgentReply:
        """Read the next answer; over HTTP/1.1 that to the oldest message without one."""

    async def ask(self, message: dict[str, Any] | bytes, between: Between | None = None) -> AgentReply:
        """Send a message and read its answer."""
        await self.send(message, between)
        with trio.fail_after(PATIENCE):
            return await self.receive()


@attrs.frozen
class AgentFace(ABC):
    """One way to a service.

    Attributes:
        place: where it listens.
        many: whether one connection has many calls at once.
    """

    place: ServedHere
    many = False

    @abstractmethod
    def link(self, token: str | None) -> Any:
        """Return a context manager that connects with this token, and yields an `AgentLink`."""


def path_of(text: bytes) -> str:
    """Where a message is POSTed: calls have a path of their own."""
    return "/mcp" if b'"type":"' in text and b'"tool_request"' not in text else "/tools/call"


def head_of(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


# HTTP/1.1


@attrs.define
class Http1Link(AgentLink):
    """Speaks HTTP/1.1."""

    wire: HttpWire
    token: str | None

    async def send(self, message: dict[str, Any] | bytes, between: Between | None = None) -> None:
        text = message if isinstance(message, bytes) else orjson.dumps(message)
        headers = {"content-type": "application/json", **head_of(self.token)}
        lines = [f"{name}: {value}" for name, value in headers.items()]
        whole = http_request("POST", path_of(text), *lines, body=text)
        if between is None:
            await self.wire.send(whole)
            return
        await self.wire.send(whole[:-1])
        await between()
        await self.wire.send(whole[-1:])

    async def receive(self) -> AgentReply:
        answer = await self.wire.answer()
        return AgentReply(conforms(orjson.loads(answer.body)), answer.status, answer.headers)


@attrs.frozen
class OverHttp1(AgentFace):
    """HTTP/1.1."""

    @asynccontextmanager
    async def link(self, token: str | None) -> AsyncIterator[AgentLink]:
        async with self.place.wire() as wire:
            yield Http1Link(wire, token)


# HTTP/2


@attrs.define
class Http2Link(AgentLink):
    """Speaks HTTP/2, with prior knowledge."""

    client: H2Client
    token: str | None

    async def send(self, message: dict[str, Any] | bytes, between: Between | None = None) -> None:
        text = message if isinstance(message, bytes) else orjson.dumps(message)
        headers = {"content-type": "application/json", **head_of(self.token)}
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        number = await self.client.request(path_of(text).encode(), b"POST", None if text else b"", extra)
        if between is not None:
            await between()
        if text:
            await self.client.send_body(number, text)

    async def receive(self) -> AgentReply:
        head = await self.client.event(h2.events.ResponseReceived)
        assert head is not None, "the connection has ended"
        self.client.seen.insert(0, head)
        _, body = await self.client.response(head.stream_id)
        headers = {name.decode(): value.decode() for name, value in head.headers}
        return AgentReply(conforms(orjson.loads(body)), int(headers.pop(":status")), headers)


@attrs.frozen
class OverHttp2(AgentFace):
    """HTTP/2."""

    many = True

    @asynccontextmanager
    async def link(self, token: str | None) -> AsyncIterator[AgentLink]:
        async with self.place.wire() as wire:
            yield Http2Link(H2Client(wire.stream), token)


# WebSocket


@attrs.define
class WebSocketLink(AgentLink):
    """Speaks over a WebSocket; the handshake may be refused."""

    socket: RawWebSocket | None
    refused: AgentReply | None = None

    async def send(self, message: dict[str, Any] | bytes, between: Between | None = None) -> None:
        if self.socket is None:
            return
        if between is not None:
            await between()
        await self.socket.say(_text(message if isinstance(message, bytes) else orjson.dumps(message)))

    async def receive(self) -> AgentReply:
        if self.socket is None:
            assert self.refused is not None
            return self.refused
        first, payload = await self.socket.hear()
        if first == FIN | CLOSE:
            return AgentReply({}, int.from_bytes(payload[:2], "big"))
        assert first, "the connection has ended"
        return AgentReply(conforms(orjson.loads(payload)))


_text = message


@attrs.frozen
class OverWebSocket(AgentFace):
    """A WebSocket at /agent."""

    many = True

    @asynccontextmanager
    async def link(self, token: str | None) -> AsyncIterator[AgentLink]:
        lines = [f"{name}: {value}" for name, value in head_of(token).items()]
        async with self.place.wire() as wire:
            await wire.send(handshake(*lines, path="/agent"))
            head = await wire.head()
            if head.status == 101:
                yield WebSocketLink(RawWebSocket(wire.stream, bytes(wire.buffer)))
                return
            body = await wire.exactly(int(head.headers["content-length"]))
            yield WebSocketLink(None, AgentReply(conforms(orjson.loads(body)), head.status, head.headers))


Faces: TypeAlias = Mapping[str, tuple[str, type[AgentFace]]]

FACES: Faces = {
    "http": ("http", OverHttp1),
    "http on hypercorn": ("http on hypercorn", OverHttp1),
    "http/2": ("http", OverHttp2),
    "websocket": ("http", OverWebSocket),
    "websocket on hypercorn": ("http on hypercorn", OverWebSocket),
}
"""How each face is served, and spoken to."""


@asynccontextmanager
async def serving_world(
    name: str, world: World, *, faces: Faces | None = None, grace: float = math.inf, **options: Any
) -> AsyncIterator[AgentFace]:
    """Serve a world over one of these faces; the options are those of `tests.peers.serving.served`."""
    transport, face = (faces or FACES)[name]
    async with served(world.server, transport, agent_tools=world.agent_tools, grace=grace, **options) as place:
        yield face(place)
        world.release.set()
