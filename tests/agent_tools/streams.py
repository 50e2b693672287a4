"""Agents and providers on streams in one process: messages as JSON values, in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import orjson
import trio
from jsonschema import Draft202012Validator

import trimcp
from trimcp.agent_tools import AgentCaller, AgentRun, AgentTools
from trimcp.agent_tools.bindings.websocket import AgentStream
from trimcp.agent_tools.messages.messages import schemas
from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.server.running import Running
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.jsonrpc import parse_value, too_large

ADA = AgentCaller(trimcp.Principal("ada", scopes={"tools:register"}), "agent-a")
BOB = AgentCaller(trimcp.Principal("bob", scopes={"tools:register"}), "agent-b")

MANIFEST = {
    "name": "shout",
    "description": "Say it loud",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}

_VALIDATORS = {
    name: Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": schemas()["$defs"]}) for name in schemas()["$defs"]
}


@attrs.define(eq=False)
class JsonChannel(MessageChannel):
    """One end of a connection whose messages are JSON values; a send waits while the peer does not read."""

    _outgoing: trio.MemorySendChannel[tuple[bytes, ...]]
    _incoming: trio.MemoryReceiveChannel[tuple[bytes, ...]]
    principal: trimcp.Principal | None = None
    sent: int = 0
    gone: trio.Event = attrs.field(factory=trio.Event)
    largest: int = 4 * 1024 * 1024

    half_open = False

    async def send(self, batch: Sequence[Outgoing]) -> None:
        for message in batch:
            await self._outgoing.send((message.data,))
            self.sent += 1

    async def receive(self) -> Sequence[Incoming]:
        texts = list(await self._incoming.receive())
        return [
            Incoming(
                parse_value(text) if len(text) <= self.largest else too_large(text, self.largest),
                len(text),
                principal=self.principal,
            )
            for text in texts
        ]

    def taken(self) -> int:
        return self.sent

    async def wait_peer_closed(self) -> None:
        await self.gone.wait()

    async def aclose(self) -> None:
        self._outgoing.close()
        self._incoming.close()
        await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class Peer:
    """The other end: sends values and reads them, and holds every message it gets against its schema."""

    _outgoing: trio.MemorySendChannel[tuple[bytes, ...]]
    _incoming: trio.MemoryReceiveChannel[tuple[bytes, ...]]

    async def say(self, *messages: Any) -> None:
        """Send messages, all in one read of the server."""
        await self._outgoing.send(tuple(one if type(one) is bytes else orjson.dumps(one) for one in messages))

    async def hear(self) -> dict[str, Any]:
        """The next message."""
        (text,) = await self._incoming.receive()
        value = orjson.loads(text)
        assert type(value) is dict
        _VALIDATORS[value["type"]].validate(value)
        return value

    async def ask(self, **message: Any) -> dict[str, Any]:
        """Send a message, and return the next one that arrives."""
        await self.say(message)
        return await self.hear()

    async def hear_of(self, request_id: str) -> dict[str, Any]:
        """The next message, which has to belong to this request."""
        value = await self.hear()
        assert value.get("request_id") == request_id, value
        return value

    def nothing(self) -> bool:
        """Whether nothing has arrived."""
        try:
            self._incoming.receive_nowait()
        except trio.WouldBlock:
            return True
        return False

    def leave(self) -> None:
        """Close both directions."""
        self._outgoing.close()
        self._incoming.close()


@attrs.define(eq=False)
class World:
    """A server that runs, and its agent tools."""

    server: trimcp.Server[Any]
    tools: AgentTools
    running: Running
    nursery: trio.Nursery

    @property
    def run(self) -> AgentRun:
        return self.tools.run_of(self.running)

    async def connect(self, caller: AgentCaller = ADA, buffer: int = 1_000, **options: Any) -> Peer:
        """Return a peer that is connected."""
        return (await self.connected(caller, buffer, **options))[0]

    async def connected(
        self, caller: AgentCaller = ADA, buffer: int = 1_000, **options: Any
    ) -> tuple[Peer, JsonChannel, trio.Event]:
        """Return a peer, the server's end, and what is set once the server has let it go."""
        to_server, at_server = trio.open_memory_channel[tuple[bytes, ...]](buffer)
        to_peer, at_peer = trio.open_memory_channel[tuple[bytes, ...]](buffer)
        channel = JsonChannel(to_peer, at_server, caller.principal, **options)
        over = trio.Event()

        async def serve() -> None:
            try:
                await self.run.server.serve(channel, None, partial(AgentStream, self.run, caller))
            finally:
                over.set()

        self.nursery.start_soon(serve)
        await trio.lowlevel.checkpoint()
        return Peer(to_server, at_peer), channel, over

    async def provider(self, *manifests: Any, caller: AgentCaller = ADA) -> Peer:
        """Return a provider whose tools are registered."""
        peer = await self.connect(caller)
        answer = await peer.ask(type="provide_tools", tools=list(manifests or (MANIFEST,)), request_id="offer")
        assert answer["type"] == "tools_registered", answer
        return peer


@asynccontextmanager
async def world(server: trimcp.Server[Any] | None = None, **options: Any) -> AsyncIterator[World]:
    """Run a server with agent tools while the block runs; in the end nothing may be left of any connection."""
    server = server or trimcp.Server("s")
    tools = AgentTools(server, **options)
    async with server.running() as running:
        async with open_service_nursery() as nursery:
            yield World(server, tools, running, nursery)
        run = tools.run_of(running)
        assert not run.calls.taken
        assert not running.sessions


async def until(condition: Callable[[], object]) -> None:
    """Wait for a state, of which nothing tells, turn by turn of the event loop."""
    for _ in range(10_000):
        if condition():
            return
        await trio.lowlevel.checkpoint()
    raise AssertionError("it does not come about")
