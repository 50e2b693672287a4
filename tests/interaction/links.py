"""Roads between the two sides, for the interaction tests: memory, framed memory, and a child process over stdio."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
import trio.testing

import trimcp
from tests.interaction import everything_server
from tests.interaction.everything_server import Journal, make_server
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.client.client import Client
from trimcp.client.facade import ClientSession
from trimcp.session.drive import drive
from trimcp.session.scopes import open_service_nursery
from trimcp.session.session import Session
from trimcp.transports.memory import memory_channels
from trimcp.transports.stream import SERVER_MAX_MESSAGE
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Message, Notification, Request, Response
from trimcp.wire.revisions import Revision

TRANSPORTS = ("memory", "framed", "stdio")
PROGRAM = Path(everything_server.__file__)


@attrs.define(eq=False)
class Links:
    """Connects clients to new servers of one kind, in one revision.

    Attributes:
        transport: one of TRANSPORTS.
        revision: what is spoken.
        path: the file of the servers' journal.
        logged: what servers wrote to their standard error, where they have one.
    """

    transport: str
    revision: Revision
    path: Path
    caplog: Any
    grace: float = 5.0
    logged: list[str] = attrs.field(factory=list)
    _process: trio.Process | None = None
    _ours: MessageChannel | None = None
    _peer: Session | None = None
    _nursery: trio.Nursery | None = None

    @property
    def modern(self) -> bool:
        return self.revision.modern

    def journal(self) -> list[str]:
        """What the servers' handlers went through, up to now."""
        return self.path.read_text().splitlines() if self.path.exists() else []

    def log(self) -> str:
        """What servers logged, up to now; from a child process, up to the end of its connection."""
        return "\n".join([*self.logged, self.caplog.text])

    def __call__(self, client: Client | None = None) -> Any:
        """Return a context manager that yields a session with a new server; in the end nothing may be left over."""
        return self._connected(client or Client("tester", "0.1"))

    @asynccontextmanager
    async def _connected(self, client: Client) -> AsyncIterator[ClientSession]:
        async with AsyncExitStack() as stack:
            self._nursery = await stack.enter_async_context(open_service_nursery())
            if self.transport == "stdio":
                session = await stack.enter_async_context(client.connect(self._child(), revision=self.revision))
            else:
                target = await stack.enter_async_context(self._in_this_process())
                session = await stack.enter_async_context(client.connect(target, revision=self.revision))
            yield session
            if session.session.lost is None:
                await assert_at_rest(session)

    @asynccontextmanager
    async def _child(self) -> AsyncIterator[MessageChannel]:
        options = json.dumps({"journal": str(self.path), "grace": self.grace})
        root = str(Path(trimcp.__file__).parent.parent)
        env = {"PYTHONPATH": root}
        target = trimcp.stdio(sys.executable, str(PROGRAM), options, env=env, on_stderr=self.logged.append)
        async with target.connect() as channel:
            self._process = channel.process
            yield channel
        assert channel.process.returncode is not None
        print(*self.logged, sep="\n")  # shown if the test fails

    @asynccontextmanager
    async def _in_this_process(self) -> AsyncIterator[MessageChannel]:
        server = make_server(Journal(self.path))
        self._ours, theirs = memory_channels(framed=self.transport == "framed", max_message=SERVER_MAX_MESSAGE)
        async with open_service_nursery() as nursery, server.running() as running, theirs:
            self._peer = server.session(running)
            nursery.start_soon(drive, self._peer, self._ours)
            yield theirs
            await theirs.aclose()
            await self._peer.closed.wait()
            await trio.testing.wait_all_tasks_blocked()

    def shut_down(self) -> None:
        """Tell the server to end in an orderly way, as a signal does."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)
            return
        assert self._nursery is not None
        self._nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        assert self._peer is not None
        await self._peer.drain(self.grace)
        self._peer.close()

    def kill(self) -> None:
        """Let the server be gone without another word."""
        if self._process is not None:
            self._process.kill()
            return
        assert self._nursery is not None
        assert self._ours is not None
        self._nursery.start_soon(self._ours.aclose)

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        """Yield the bare wire to a new server, on which nothing has been said."""
        async with AsyncExitStack() as stack:
            if self.transport == "stdio":
                channel = await stack.enter_async_context(self._child())
            else:
                channel = await stack.enter_async_context(self._in_this_process())
            yield Wire(channel, self.revision)


async def assert_at_rest(session: ClientSession) -> None:
    """Assert that nothing is under way on either side, but the question whether it is."""
    await trio.testing.wait_all_tasks_blocked()
    answer = await session.call_tool("statistics")
    theirs = orjson.loads(answer.content[0].text)
    assert theirs.pop("running") == 1
    ours = attrs.asdict(session.statistics())
    for counted in (theirs, ours):
        for history in ("merged", "dropped"):
            counted.pop(history)
    assert set(theirs.values()) == {0}, theirs
    assert set(ours.values()) == {0}, ours


@attrs.define(eq=False)
class Wire:
    """A client's end of a wire, for saying anything at all. Messages are JSON objects, requests get the envelope."""

    channel: MessageChannel
    revision: Revision
    capabilities: dict[str, Any] = attrs.field(factory=dict)
    _arrived: deque[Any] = attrs.field(factory=deque)

    async def say(self, *texts: bytes) -> None:
        """Send texts as they are, in one write."""
        await self.channel.send([Outgoing(text, Kind.REQUEST) for text in texts])

    def request(self, id: Any, method: str, params: dict[str, Any] | None = None) -> bytes:
        """A request as bytes, with the envelope its revision demands."""
        params = dict(params or {})
        if self.revision.modern:
            envelope = {
                META_PROTOCOL_VERSION: self.revision.name,
                META_CLIENT_INFO: {"name": "wire", "version": "1"},
                META_CLIENT_CAPABILITIES: self.capabilities,
            }
            params["_meta"] = {**envelope, **params.get("_meta", {})}
        return orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params})

    def call(self, id: Any, tool: str, **arguments: Any) -> bytes:
        """A tool call as bytes."""
        return self.request(id, "tools/call", {"name": tool, "arguments": arguments})

    def notification(self, method: str, **params: Any) -> bytes:
        """A notification as bytes."""
        return orjson.dumps({"jsonrpc": "2.0", "method": method, "params": params})

    async def hear(self) -> Any:
        """The next message from the server, as JSON; an array is a list."""
        while not self._arrived:
            self._arrived.extend(as_json(incoming.message) for incoming in await self.channel.receive())
        return self._arrived.popleft()

    async def ask(self, id: Any, method: str, params: dict[str, Any] | None = None) -> Any:
        """Send a request and return the next message."""
        await self.say(self.request(id, method, params))
        return await self.hear()

    async def meet(self) -> None:
        """Do what the revision wants before the first request."""
        if self.revision.modern:
            return
        info = {"name": "wire", "version": "1"}
        params = {"protocolVersion": self.revision.name, "capabilities": self.capabilities, "clientInfo": info}
        reply = await self.ask("hello", "initialize", params)
        assert reply["result"]["protocolVersion"] == self.revision.name
        await self.say(self.notification("notifications/initialized"))


def as_json(message: Message) -> Any:
    """A parsed message as the JSON it was."""
    if isinstance(message, Batch):
        return [as_json(member) for member in message.members]
    if isinstance(message, Request):
        return {"id": message.id, "method": message.method, "params": message.params}
    if isinstance(message, Notification):
        return {"method": message.method, "params": message.params}
    if isinstance(message, Response):
        return {"id": message.id, "result": message.result}
    if isinstance(message, ErrorResponse):
        return {"id": message.id, "error": {"code": message.code, "message": message.message, "data": message.data}}
    return {"malformed": message.message}


def text_of(result: Any) -> str:
    """The text of a result's content."""
    return "".join(block.text for block in result.content)
