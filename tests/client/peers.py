"""A server made by hand, straight on the session's actor, so that the client is tested against nothing else of ours."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import attrs
import trio

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.errors import ErrorReply
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Notified
from trimcp.protocol.profile import Profile, Role
from trimcp.session.context import Context
from trimcp.session.drive import driving
from trimcp.session.incoming.job import Job
from trimcp.session.limits import Limits
from trimcp.session.session import Session
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.memory import memory_channels
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.capabilities import (
    PromptsCapability,
    ResourcesCapability,
    ServerCapabilities,
    ToolsCapability,
)
from trimcp.wire.common import Implementation
from trimcp.wire.content import TextContent
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, Revision
from trimcp.wire.tools import CallToolResult

Handler = Callable[[Any, Context[Any]], Any]

CAPABILITIES = ServerCapabilities(
    tools=ToolsCapability(list_changed=True),
    prompts=PromptsCapability(list_changed=True),
    resources=ResourcesCapability(subscribe=True, list_changed=True),
    completions={},
    logging={},
)


FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


def text(value: str) -> CallToolResult:
    return CallToolResult([TextContent(text=value)])


@attrs.define(eq=False)
class HandMade:
    """Handlers by method, for tests to fill; `tools/call` finds its handler by the tool's name.

    A handler is `async def handler(params, ctx)` and returns the result's payload.
    """

    capabilities: ServerCapabilities = CAPABILITIES
    revisions: tuple[Revision, ...] = REVISIONS
    limits: Limits = attrs.field(factory=Limits)
    methods: dict[str, Handler] = attrs.field(factory=dict)
    tools: dict[str, Handler] = attrs.field(factory=dict)
    heard: list[str] = attrs.field(factory=list)
    asked: list[tuple[str, Any]] = attrs.field(factory=list)
    sessions: list[Session] = attrs.field(factory=list)

    @property
    def served(self) -> set[str]:
        return {*self.methods, "tools/call", "logging/setLevel"}

    @property
    def session(self) -> Session:
        return self.sessions[-1]

    def method(self, name: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.methods[name] = handler
            return handler

        return register

    def tool(self, handler: Handler) -> Handler:
        self.tools[handler.__name__] = handler
        return handler

    async def handle(self, session: Session, job: Job) -> Any:
        name = job.request.method.name
        self.asked.append((name, job.request.params))
        handler = self.methods.get(name)
        if handler is None:
            handler = self.tools.get(job.request.params.name)
        if handler is None:
            raise ErrorReply(-32602, f"unknown tool {job.request.params.name}")
        return await handler(job.request.params, Context(session, job, None))

    async def failure(self, session: Session, job: Job, error: BaseException) -> Any:
        return None

    def source_location(self, job: Job) -> str | None:
        return None

    def notified(self, session: Session, event: Notified) -> None:
        self.heard.append(event.method.name)

    def closed(self, session: Session) -> None:
        pass

    @asynccontextmanager
    async def serving(self, channel: MessageChannel) -> AsyncIterator[Session]:
        """Serve one connection for as long as the body runs."""
        profile = Profile(Implementation("hand-made", "1"), self.capabilities, "be kind", self.revisions)
        session = Session(Connection(Role.SERVER, profile, self.served), self, self.limits)
        self.sessions.append(session)
        async with driving(session, channel):
            yield session

    def connect(self) -> AbstractAsyncContextManager[MessageChannel]:
        """As a target: serve a new connection in the background and yield the client's end of it."""
        return self._connect()

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[MessageChannel]:
        ours, theirs = memory_channels()
        async with self.serving(ours):
            yield theirs


@asynccontextmanager
async def connected(
    server: HandMade, client: Client | None = None, revision: Revision | None = None
) -> AsyncIterator[ClientSession]:
    """Connect a client to the server in this task's nursery."""
    client = client or Client("tester", "1")
    async with client.connect(server, revision=revision) as session:
        session.peer = server.session
        yield session


@attrs.define(eq=False)
class Stopped:
    """Notes how handlers ended."""

    reasons: list[Any] = attrs.field(factory=list)


def busy() -> tuple[HandMade, Stopped]:
    server, stopped = HandMade(), Stopped()

    @server.tool
    async def count(params: Any, ctx: Any) -> Any:
        for n in range(params.arguments["to"]):
            await ctx.report_progress(n + 1, params.arguments["to"])
        return text("counted")

    @server.tool
    async def hang(params: Any, ctx: Any) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            stopped.reasons.append((ctx.cancel_reason.value, ctx.cancel_detail))

    @server.tool
    async def work(params: Any, ctx: Any) -> Any:
        """Report progress every 4 seconds."""
        for n in range(params.arguments["steps"]):
            await trio.sleep(4)
            await ctx.report_progress(n + 1)
        return text("worked")

    @server.tool
    async def ask(params: Any, ctx: Any) -> Any:
        await trio.sleep(3)
        await ctx.elicit("?", FORM)
        await trio.sleep(3)
        return text("asked")

    return server, stopped


Script = Callable[[dict[str, Any]], Any]


@attrs.define(eq=False)
class Mourned(WrappedChannel):
    """A channel that knows how its peer ended."""

    last_words: str

    def close_reason(self) -> str:
        return self.last_words


@attrs.define(eq=False)
class Scripted:
    """A server below the actor: `script` gets each message as JSON and returns what to write back.

    It may return a JSON object, a list of them, None, or the string "die".
    """

    script: Script
    channels: list[MessageChannel] = attrs.field(factory=list)
    heard: list[dict[str, Any]] = attrs.field(factory=list)
    key: str | None = None
    revision: str | None = None
    starts_in: float = 0.0
    last_words: str | None = None

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        ours, theirs = memory_channels()
        self.channels.append(ours)
        async with open_service_nursery() as nursery:
            nursery.start_soon(self._serve, ours)
            yield theirs if self.last_words is None else Mourned(theirs, self.last_words)

    @property
    def methods(self) -> list[str]:
        return [message["method"] for message in self.heard if "method" in message]

    async def say(self, *messages: dict[str, Any]) -> None:
        await self.channels[-1].send([Outgoing(json.dumps(m).encode(), Kind.REPLY) for m in messages])

    async def _serve(self, channel: MessageChannel) -> None:
        with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            if self.starts_in:
                await trio.sleep(self.starts_in)  # what is sent meanwhile waits, as in a pipe
            while True:
                for incoming in await channel.receive():
                    message = as_json(incoming.message)
                    self.heard.append(message)
                    answer = self.script(message)
                    if answer == "die":
                        await channel.aclose()
                        return
                    for each in answer if isinstance(answer, list) else [answer] if answer is not None else []:
                        await self.say({"jsonrpc": "2.0", **each})


def as_json(message: Any) -> dict[str, Any]:
    """The members of a parsed message that matter here."""
    names = ("id", "method", "params", "result", "code", "message")
    return {name: getattr(message, name) for name in names if hasattr(message, name)}


def initialize_result(id: Any, revision: str = LATEST_LEGACY.name, **capabilities: Any) -> dict[str, Any]:
    """A legacy server's answer to `initialize`."""
    info = {"name": "scripted", "version": "1"}
    return {"id": id, "result": {"protocolVersion": revision, "capabilities": capabilities, "serverInfo": info}}


def discover_result(id: Any, versions: list[str] | None = None, **capabilities: Any) -> dict[str, Any]:
    """A modern server's answer to `server/discover`."""
    result = {
        "resultType": "complete",
        "supportedVersions": [LATEST.name] if versions is None else versions,
        "capabilities": capabilities,
        "ttlMs": 0,
        "cacheScope": "private",
        "_meta": {"io.modelcontextprotocol/serverInfo": {"name": "scripted", "version": "1"}},
    }
    return {"id": id, "result": result}


def error(id: Any, code: int, message: str = "no", data: Any = None) -> dict[str, Any]:
    return {"id": id, "error": {"code": code, "message": message, **({} if data is None else {"data": data})}}
