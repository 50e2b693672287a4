"""Roads between the two sides, for the interaction tests: memory, a child process, and every transport over sockets."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import httpx2
import orjson
import trio
import trio.testing

import trimcp
from tests.interaction import everything_server, without_trio
from tests.interaction.everything_server import Journal
from tests.interaction.proxied import NOTIFICATIONS, Proxied
from tests.peers.messages import as_json
from tests.peers.relay import Relay, relayed
from tests.peers.serving import IN_MEMORY, ServedHere, served, target_of
from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.compose.proxy import proxy
from trimcp.run import in_process
from trimcp.session.drive import drive
from trimcp.session.limits import Limits
from trimcp.session.session import Session
from trimcp.store.redis.shared import RedisStore
from trimcp.store.shared import SharedStore
from trimcp.store.shared_sqlite import SqliteStore
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.memory import memory_channels
from trimcp.transports.stdio.child import StdioServer
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.revisions import OLDEST, Revision

LOCAL = (*IN_MEMORY, "stdio")
IN_SQLITE, IN_REDIS = "http with a store", "http with redis"
OVER_HTTP = ("http", "http/2", "http by httpx2", "http as events", "http on hypercorn", "http over unix", IN_SQLITE)
STREAMABLE = (*OVER_HTTP, IN_REDIS)
WEBSOCKET = ("websocket", "websocket alone", "websocket on hypercorn", "websocket by http/2")
SSE = ("http+sse", "http+sse by http/2")
WITH_REDIS: Final = bool(os.environ.get("TRIMCP_REDIS"))
"""Whether sessions are kept in Redis, too: `nox -s replicas` wants it so."""

TRANSPORTS = (*LOCAL, *OVER_HTTP, *((IN_REDIS,) if WITH_REDIS else ()), *SSE, *WEBSOCKET, "grpc")

EVERY_PAIR: Final = bool(os.environ.get("TRIMCP_MATRIX"))
"""Whether this is `nox -s matrix`, with every transport in every revision."""


def speaks(transport: str, revision: Revision) -> bool:
    """Whether this transport is one of that revision's."""
    if transport in STREAMABLE:
        return revision.sessions or revision.modern
    return transport not in SSE or revision is OLDEST


@attrs.define(eq=False)
class Links:
    """Connects clients to new servers of one kind, in one revision.

    Attributes:
        transport: one of TRANSPORTS.
        revision: what is spoken.
        path: the file of the servers' journal.
        logged: what servers wrote to their standard error, where they have one.
        mortal: whether a test is to kill it.
        at_once: whether a client over HTTP tries nothing again: a stream that has begun to be resumable is else asked
            for again, and a server that is gone looked for. How long that takes is not what such a test measures.
        without: "blocking" or "asyncio" for a client without Trio; see `without_trio`.
        module: what makes the server, and is the program of one that is a child.
        proxied: whether a proxy of ours is served in place of the server, which is behind it in the same process.
        other: what a proxy speaks with the server behind it, if that is another revision.
        redis: the URL of a Redis, where sessions are kept in one.
        behind: whether the server is reached through a proxy in this process, which clients are connected to.
    """

    transport: str
    revision: Revision
    path: Path
    caplog: Any
    grace: float = 5.0
    logged: list[str] = attrs.field(factory=list)
    module: Any = everything_server
    _process: trio.Process | None = None
    _ours: MessageChannel | None = None
    _peer: Session | None = None
    _nursery: trio.Nursery | None = None
    mortal: bool = False
    at_once: bool = False
    without: str = ""
    proxied: bool = False
    behind: bool = False
    other: Revision | None = None
    redis: str = ""
    _place: ServedHere | None = None
    _relay: Relay | None = None
    _ending: bool = False

    @property
    def local(self) -> bool:
        """Whether the server is in this process and no socket is between, so that time may be virtual."""
        return self.transport in IN_MEMORY

    @property
    def connected(self) -> bool:
        """Whether there is one connection, whose end is the end of the session."""
        return self.transport not in STREAMABLE

    @property
    def queues(self) -> bool:
        """Whether messages wait for a writer, so that later ones can take their place; over HTTP they leave at once."""
        return not self.proxied and self.transport not in (*STREAMABLE, *SSE)  # a proxy has its own in process

    @property
    def cancelled(self) -> str:
        """Why a handler is stopped whose caller gave up: on HTTP since 2026-07-28 the caller just leaves."""
        if self.proxied:
            return "PEER"  # the proxy tells the server
        return "DISCONNECTED" if self.transport in STREAMABLE and self.revision.disconnect_cancels else "PEER"

    @property
    def modern(self) -> bool:
        return self.revision.modern

    @property
    def through_proxy(self) -> bool:
        """Whether a proxy is between client and server."""
        return self.proxied or self.behind

    @property
    def drained(self) -> str:
        """Why a handler is stopped that is under way when what its client is connected to ends."""
        return "PEER" if self.proxied else "DRAIN"

    @property
    def served(self) -> Any:
        """What makes the server that clients are connected to."""
        return Proxied(self.module, (self.other or self.revision).name) if self.proxied else self.module

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
            target = await stack.enter_async_context(self._opened())
            connecting = client.connect(target, revision=self.revision)
            if self.without:
                connecting = without_trio.connected(self.without, target, client, self.revision)
            session = await stack.enter_async_context(connecting)
            yield session
            if session.session.lost is None and not self._ending:
                # A proxy asks a server of the modern era for changes, of which a client of another one is told unasked.
                listens = self.other is not None and self.other.modern and not self.modern
                await assert_at_rest(session, running=2 if listens else 1)

    def _opened(self) -> AbstractAsyncContextManager[Any]:
        """A new server, and what leads to it: a channel, or what to connect to."""
        if self.behind:
            return self._behind_a_proxy()
        if self.transport == "stdio":
            return self._child()
        return self._in_this_process() if self.local else self._served()

    @asynccontextmanager
    async def _behind_a_proxy(self) -> AsyncIterator[MessageChannel]:
        """A server over this transport, and a channel to a proxy before it."""
        async with AsyncExitStack() as stack:
            if self.transport == "stdio":
                target: Any = self._program()
            else:
                target = await stack.enter_async_context(self._served())
            limits = Limits(max_running=100)
            made = proxy(target, revision=self.revision, notifications=NOTIFICATIONS, limits=limits)
            yield await stack.enter_async_context(in_process(made).connect())

    def _program(self) -> StdioServer:
        options = json.dumps({"journal": str(self.path), "grace": self.grace})
        env = {"PYTHONPATH": str(Path(trimcp.__file__).parent.parent)}
        return trimcp.stdio(sys.executable, self.module.__file__, options, env=env, on_stderr=self.logged.append)

    @asynccontextmanager
    async def _child(self) -> AsyncIterator[MessageChannel]:
        more = self.served.options() if self.proxied else {}
        options = json.dumps({"journal": str(self.path), "grace": self.grace, **more})
        root = str(Path(trimcp.__file__).parent.parent)
        env = {"PYTHONPATH": root}
        target = trimcp.stdio(sys.executable, self.served.__file__, options, env=env, on_stderr=self.logged.append)
        if self.without:
            yield self._opening(target)  # in the thread of the portal
            return
        async with target.connect() as channel:
            self._process = channel.process
            yield channel
        assert channel.process.returncode is not None
        print(*self.logged, sep="\n")  # shown if the test fails

    @asynccontextmanager
    async def _opening(self, target: Any) -> AsyncIterator[MessageChannel]:
        async with target.connect() as channel:
            self._process = channel.process
            yield channel

    @asynccontextmanager
    async def _in_this_process(self) -> AsyncIterator[MessageChannel]:
        server = self.served.make_server(Journal(self.path))
        self._ours, theirs = memory_channels(framed=self.transport == "framed")
        async with open_service_nursery() as nursery, server.running() as running, theirs:
            self._peer = running.session()
            nursery.start_soon(drive, self._peer, self._ours)
            yield theirs
            await theirs.aclose()
            await self._peer.closed.wait()
            await trio.testing.wait_all_tasks_blocked()

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[Any]:
        """Serve over sockets, and yield what to connect to."""
        server = self.served.make_server(Journal(self.path))
        reply = "sse" if self.transport == "http as events" else "auto"
        settings = HttpSettings(reply=reply, retry=50, store=self._store())
        async with served(server, self.transport, settings=settings, grace=self.grace) as self._place:
            once = {"retries": 0} if self.at_once and self.transport.startswith("http") else {}
            if self.mortal:
                async with relayed(self._place) as self._relay:
                    yield target_of(self._relay.url, self.transport, **once)
            elif self.transport == "http by httpx2":
                limits = httpx2.Limits(max_connections=None)
                async with httpx2.AsyncClient(limits=limits, trust_env=False) as client:
                    yield self._place.target(client=client, **once)
            else:
                yield self._place.target(**once)

    def _store(self) -> SharedStore | None:
        if self.transport == IN_REDIS:
            return RedisStore(self.redis, prefix=str(self.path))
        return SqliteStore(self.path.with_name("sessions.db")) if self.transport == IN_SQLITE else None

    def shut_down(self) -> None:
        """Tell the server to end in an orderly way, as a signal does."""
        self._ending = True
        if self._place is not None:
            self._place.stop.set()
            return
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
        self._ending = True
        if self._relay is not None:
            self._relay.close()
            return
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
            target = await stack.enter_async_context(self._opened())
            channel = target if self.transport in LOCAL else await stack.enter_async_context(target.connect())
            yield Wire(channel, self.revision, only_text=self.transport in WEBSOCKET)


async def assert_at_rest(session: ClientSession, running: int = 1) -> None:
    """Assert that nothing is under way on either side, but the question whether it is."""
    await trio.testing.wait_all_tasks_blocked()
    answer = await session.call_tool("statistics")
    theirs = orjson.loads(answer.content[0].text)
    assert theirs.pop("running") == running
    ours = attrs.asdict(session.statistics())
    http = ours.pop("http")
    if http is not None:
        assert http["waiting"] == 0
        # A stream of the server's may be open; nothing else is.
        assert http["in_use"] <= 1
        assert http["client"] == "httpx2" or http["connections"] == http["idle"] + http["in_use"]
    del ours["lanes"]  # the same, by lane
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
    only_text: bool = False
    _arrived: deque[Any] = attrs.field(factory=deque)

    def carries(self, text: bytes) -> bool:
        """Whether this can be said here at all: a WebSocket ends where a text is not UTF-8 (RFC 6455, section 8.1)."""
        try:
            text.decode()
        except UnicodeDecodeError:
            return not self.only_text
        return True

    async def say(self, *texts: bytes) -> None:
        """Send texts as they are, in one write where the transport writes messages one after the other."""
        await self.channel.send([self._outgoing(text) for text in texts])

    def _outgoing(self, text: bytes) -> Outgoing:
        """A text as what it is, with the headers that say so, for transports that want to know."""
        if not self.channel.mirrors_headers:
            return Outgoing(text, Kind.REQUEST)
        message = orjson.loads(text)
        id, method = message.get("id"), message.get("method")
        kind = Kind.REPLY if method is None else Kind.NOTIFICATION if id is None else Kind.REQUEST
        headers = None
        if self.revision.method_headers and method is not None:
            headers = {"mcp-protocol-version": self.revision.name, "mcp-method": method}
            if (name := message["params"].get("name") or message["params"].get("uri")) is not None:
                headers["mcp-name"] = name
        return Outgoing(text, kind, id, None, headers)

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
