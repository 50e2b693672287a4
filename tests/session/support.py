"""Hand-made ends of a session: an endpoint that runs what a test gives it, and two sessions linked in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import trio

from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import Notified
from trimcp.protocol.profile import Profile, Role
from trimcp.session.context import Context
from trimcp.session.drive import drive, driving
from trimcp.session.incoming.job import Job
from trimcp.session.limits import Limits
from trimcp.session.outgoing.pending import Pending
from trimcp.session.session import Session
from trimcp.transports.memory import memory_channels
from trimcp.wire.capabilities import ClientCapabilities, ElicitationCapability, ServerCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.content import TextContent
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.jsonrpc import encode_notification, encode_request, parse
from trimcp.wire.revisions import LATEST_LEGACY, V2026_07_28, Revision
from trimcp.wire.tools import CallToolParams, CallToolResult

Tool = Callable[[Context[Any]], Awaitable[Any]]
NO_ONE_WAITS = Limits(eof_grace=0.0)
ZERO = (0, 0, 0, 0, 0, 0, 0)

FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


def text(value: object) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=str(value))])


@attrs.define(eq=False)
class NotedEnd:
    """What both ends of a session do alike: they note what they are told."""

    notes: list[Notified] = attrs.field(factory=list, kw_only=True)
    ended: int = attrs.field(default=0, kw_only=True)

    async def failure(self, session: Session, job: Job, error: BaseException) -> Any:
        return None

    def source_location(self, job: Job) -> str | None:
        return None

    def notified(self, session: Session, event: Notified) -> None:
        self.notes.append(event)

    def closed(self, session: Session) -> None:
        self.ended += 1


@attrs.define(eq=False)
class Tools(NotedEnd):
    """Serves `tools/call` with functions of a context, by name; what they return is wrapped as text."""

    tools: Mapping[str, Tool] = attrs.field(factory=dict)
    served: Sequence[str] = ("tools/call", "tools/list", "resources/read", "prompts/get", "logging/setLevel")
    jobs: list[Job] = attrs.field(factory=list)

    async def handle(self, session: Session, job: Job) -> Any:
        self.jobs.append(job)
        ctx = Context[Any](session, job, None)
        result = await self.tools[getattr(job.request.params, "name", job.request.method.name)](ctx)
        return result if isinstance(result, CallToolResult) else text(result)


@attrs.define(eq=False)
class Answers(NotedEnd):
    """A client's endpoint: answers `elicitation/create`, and whatever else is served, with one function."""

    answer: Callable[[Job], Awaitable[Any]] | None = None
    served: Sequence[str] = ("elicitation/create", "roots/list", "sampling/createMessage")
    asked: list[Job] = attrs.field(factory=list)

    async def handle(self, session: Session, job: Job) -> Any:
        self.asked.append(job)
        if self.answer is not None:
            return await self.answer(job)
        return ElicitResult(action="accept", content={"name": job.request.params.message})


def server_engine(served: Sequence[str] = Tools().served) -> Connection:
    profile = Profile(Implementation("server", "1"), ServerCapabilities())
    return Connection(Role.SERVER, profile, served)


def client_engine(served: Sequence[str] = Answers().served, *, can_ask: bool = True) -> Connection:
    capabilities = ClientCapabilities(elicitation=ElicitationCapability()) if can_ask else ClientCapabilities()
    return Connection(Role.CLIENT, Profile(Implementation("client", "1"), capabilities), served)


def agree(server: Connection, client: Connection, revision: Revision) -> None:
    """Take both engines to where calls may be made, without a channel."""
    if revision.modern:
        client.modern.revision = revision
        return
    method = methods_of(revision)["initialize"]
    data = client.encode_request(client.new_id(), method, client.legacy.offer(revision))
    settled: Any = server.receive(parse(data))
    reply: Any = parse(settled.reply)
    client.legacy.accept(reply.result)
    server.receive(parse(encode_notification("notifications/initialized", None)))


@attrs.define(eq=False)
class Pair:
    """Two sessions that face each other."""

    client: Session
    server: Session
    tools: Tools
    answers: Answers
    nursery: trio.Nursery

    async def call(self, name: str = "run", **arguments: Any) -> str:
        result = await self.client.call("tools/call", CallToolParams(name, arguments))
        return "".join(block.text for block in result.content)

    async def begin(self, name: str = "run", *, wants_progress: bool = False, **arguments: Any) -> Pending:
        params = CallToolParams(name, arguments)
        return await self.client.start_call(
            "tools/call", params, on_progress=(lambda progress: None) if wants_progress else None
        )

    def at_rest(self) -> None:
        """Assert that nothing is under way on either side."""
        at_rest(self.client)
        at_rest(self.server)


def at_rest(session: Session) -> None:
    """Assert that nothing is under way."""
    stats = session.statistics()
    busy = (stats.running, stats.parked, stats.waiting, stats.waiting_bytes, stats.pending)
    assert (*busy, stats.outbox, stats.outbox_bytes) == ZERO, stats
    assert not session.jobs
    assert not session.engine.inbound
    assert not session.engine.outbound


@asynccontextmanager
async def linked(
    tools: Mapping[str, Tool],
    revision: Revision = LATEST_LEGACY,
    *,
    limits: Limits = NO_ONE_WAITS,
    client_limits: Limits | None = None,
    answers: Answers | None = None,
    can_ask: bool = True,
    framed: bool = False,
    **options: Any,
) -> AsyncIterator[Pair]:
    """Link a client and a server that serves these tools; at the end nothing may be under way or left behind."""
    tools_end, answers_end = Tools(tools), answers or Answers()
    left, right = memory_channels(framed=framed)
    server = Session(server_engine(), tools_end, limits, **options)
    client = Session(client_engine(can_ask=can_ask), answers_end, client_limits or limits)
    agree(server.engine, client.engine, revision)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, server, right)
        pair = Pair(client, server, tools_end, answers_end, nursery)
        async with driving(client, left):
            yield pair
    pair.at_rest()


@attrs.define(eq=False)
class Wire(MessageChannel):
    """The end of a channel in the hands of a test: it feeds messages in and sees what comes out.

    With `hold()` the session's writer is stuck, as with a peer that stops reading.
    """

    sent: list[Outgoing] = attrs.field(factory=list)
    _arriving: trio.MemorySendChannel[list[Incoming]] = attrs.field(init=False)
    _arrived: trio.MemoryReceiveChannel[list[Incoming]] = attrs.field(init=False)
    _open: trio.Event = attrs.field(init=False, factory=trio.Event)
    reads: int = 0
    broken: bool = False
    closed: bool = False
    receive_error: BaseException | None = None

    def __attrs_post_init__(self) -> None:
        self._arriving, self._arrived = trio.open_memory_channel[list[Incoming]](float("inf"))
        self._open.set()

    async def send(self, batch: Sequence[Outgoing]) -> None:
        await self._open.wait()
        if self.broken:
            raise trio.BrokenResourceError
        self.sent.extend(batch)

    async def receive(self) -> Sequence[Incoming]:
        batch = await self._arrived.receive()
        if self.receive_error is not None:
            raise self.receive_error
        self.reads += 1
        return batch

    async def aclose(self) -> None:
        self.closed = True
        await trio.lowlevel.checkpoint()

    def hold(self) -> None:
        """Stop reading what the session sends."""
        self._open = trio.Event()

    def release(self) -> None:
        """Read again."""
        self._open.set()

    def feed(self, *texts: bytes) -> None:
        """Let messages arrive together."""
        self._arriving.send_nowait([Incoming(parse(data), len(data)) for data in texts])

    def leave(self) -> None:
        """Close the peer's side."""
        self._arriving.close()

    def take(self) -> list[Any]:
        """Return what was sent since the last time, as JSON values."""
        messages = [orjson.loads(outgoing.data) for outgoing in self.sent]
        self.sent.clear()
        return messages


@asynccontextmanager
async def served(
    tools: Mapping[str, Tool],
    revision: Revision = LATEST_LEGACY,
    *,
    limits: Limits = NO_ONE_WAITS,
    **options: Any,
) -> AsyncIterator[tuple[Wire, Session]]:
    """Run a server's session over a `Wire`; the engine has agreed on the revision already."""
    wire = Wire()
    session = Session(server_engine(), Tools(tools), limits, **options)
    agree(session.engine, client_engine(), revision)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drive, session, wire)
        try:
            yield wire, session
        finally:
            wire.release()
            session.close()


def call(
    id: Any, name: str = "run", *, token: Any = None, revision: Revision = LATEST_LEGACY, **arguments: Any
) -> bytes:
    """Return a tools/call as a client would write it."""
    params: dict[str, Any] = {"name": name, "arguments": arguments}
    meta: dict[str, Any] = modern_meta() if revision is V2026_07_28 else {}
    if token is not None:
        meta["progressToken"] = token
    if meta:
        params["_meta"] = meta
    return encode_request(id, "tools/call", params)


def cancel(id: Any, reason: str | None = None) -> bytes:
    params = {"requestId": id} if reason is None else {"requestId": id, "reason": reason}
    return encode_notification("notifications/cancelled", params)


def modern_meta(**capabilities: Any) -> dict[str, Any]:
    return {
        "io.modelcontextprotocol/protocolVersion": V2026_07_28.name,
        "io.modelcontextprotocol/clientInfo": {"name": "client", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": capabilities,
    }


async def call_all(pair: Pair, name: str, count: int) -> list[str]:
    """Call a tool this often at once, and return what came."""
    answers: list[str] = []

    async def one() -> None:
        answers.append(await pair.call(name))

    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(one)
    return answers
