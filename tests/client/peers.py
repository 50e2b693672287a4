"""A server made by hand, straight on the session's actor, so that the client is tested against nothing else of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import trio

from trimcp.channel import MessageChannel
from trimcp.client.client import Client
from trimcp.client.facade import ClientSession
from trimcp.errors import ErrorReply
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Notified
from trimcp.protocol.profile import Profile, Role
from trimcp.session.context import Context
from trimcp.session.drive import driving
from trimcp.session.job import Job
from trimcp.session.limits import Limits
from trimcp.session.session import Session
from trimcp.transports.memory import memory_channels
from trimcp.wire.capabilities import (
    PromptsCapability,
    ResourcesCapability,
    ServerCapabilities,
    ToolsCapability,
)
from trimcp.wire.common import Implementation
from trimcp.wire.content import TextContent
from trimcp.wire.revisions import REVISIONS, Revision
from trimcp.wire.tools import CallToolResult

Handler = Callable[[Any, Context[Any]], Any]

CAPABILITIES = ServerCapabilities(
    tools=ToolsCapability(list_changed=True),
    prompts=PromptsCapability(list_changed=True),
    resources=ResourcesCapability(subscribe=True, list_changed=True),
    completions={},
    logging={},
)


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
        name = job.request.verb.name
        self.asked.append((name, job.params))
        handler = self.methods.get(name)
        if handler is None:
            handler = self.tools.get(job.params.name)
        if handler is None:
            raise ErrorReply(-32602, f"unknown tool {job.params.name}")
        return await handler(job.params, Context(session, job, None))

    def notified(self, session: Session, event: Notified) -> None:
        self.heard.append(event.verb.name)

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


async def settled() -> None:
    """Wait until everything in the loop waits for something else."""
    await trio.testing.wait_all_tasks_blocked()
