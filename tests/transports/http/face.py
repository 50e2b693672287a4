"""A host that lives in memory, for tests of the face: heads and bodies in, responses out, and time is virtual."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import trio

from trimcp.budget import MemoryAccount
from trimcp.framing.sse import Event, EventDecoder
from trimcp.net import http_application
from trimcp.server.server import Server
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.interfaces import Handler, Head, HttpResponse, Upgrade
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision

BOTH = "application/json, text/event-stream"
LISTS = ("vary", "www-authenticate", "set-cookie")
"""Headers that may come more than once (RFC 9110 section 5.3; RFC 6265)."""


@attrs.define(eq=False)
class Answer:
    """The client's end of one request: what came of it so far. An `HttpReply` to the face."""

    handler: Handler | None = None
    status: int = 0
    headers: dict[str, str] = attrs.field(factory=dict)
    body: bytearray = attrs.field(factory=bytearray)
    finished: bool = False
    aborted: bool = False
    gone: bool = False
    stalled: bool = False
    writes: int = 0
    held: bytearray = attrs.field(factory=bytearray)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    # For the face

    def send(self, response: HttpResponse) -> None:
        self._head(response)
        self._take(response.body)
        self._finish()

    def start(self, response: HttpResponse) -> None:
        self._head(response)
        self._take(response.body)

    def write(self, data: bytes) -> None:
        assert self.status
        assert not self.finished
        self._take(data)

    def finish(self, data: bytes = b"") -> None:
        assert self.status
        assert not self.finished
        self._take(data)
        self._finish()

    def abort(self) -> None:
        self.aborted = self.gone = True

    @property
    def waiting(self) -> int:
        return len(self.held)

    async def room(self) -> None:
        while self.held and not self.gone:
            await self._changed.park()

    def _head(self, response: HttpResponse) -> None:
        assert not self.status, "two responses to one request"
        self.status = response.status
        self._changed.unpark_all()
        self.headers = {name.lower(): value for name, value in response.headers}
        twice = [name for name, _ in response.headers if name.lower() not in LISTS]
        assert len({name.lower() for name in twice}) == len(twice), f"a header with one value came twice: {twice}"

    def _take(self, data: bytes) -> None:
        if self.gone or not data:
            return
        self.writes += 1
        (self.held if self.stalled else self.body).extend(data)
        self._changed.unpark_all()

    def _finish(self) -> None:
        self.finished = True
        self._changed.unpark_all()

    # For the test

    def leave(self) -> None:
        """Close the connection."""
        if not self.finished and not self.gone:
            self.gone = True
            self._changed.unpark_all()
            if self.handler is not None:
                self.handler.disconnected()

    def read_on(self) -> None:
        """Take what waits, and stop stalling."""
        self.stalled = False
        self.body += self.held
        self.held.clear()
        self._changed.unpark_all()
        if self.handler is not None and not self.finished:
            self.handler.writable()

    async def begun(self) -> None:
        """Wait for the head of the response."""
        while not self.status:
            await self._changed.park()

    async def done(self) -> Answer:
        """Wait for the end of the response."""
        while not self.finished:
            await self._changed.park()
        return self

    async def events(self, count: int) -> list[Event]:
        """Wait for that many events, and return all there are."""
        while len(found := self.now()) < count and not self.finished:
            await self._changed.park()
        return found

    def now(self) -> list[Event]:
        """The events that are there."""
        return EventDecoder().feed(bytes(self.body))

    @property
    def json(self) -> Any:
        return orjson.loads(bytes(self.body))

    @property
    def message(self) -> Any:
        """The last message: all there is, or the end of a stream, which an answer becomes that takes its time."""
        return self.json if self.headers["content-type"] == "application/json" else self.messages[-1]

    @property
    def messages(self) -> list[Any]:
        """The messages of a stream, without events that carry none."""
        return [orjson.loads(event.data) for event in self.now() if event.data]


@attrs.define(eq=False)
class Visitor:
    """A client of a face."""

    face: HttpApplication
    revision: Revision = LATEST
    headers: dict[str, str] = attrs.field(factory=dict)
    session: str | None = None
    peer: str = ""
    holding: MemoryAccount | None = None
    last: int = 0  # the id of the last request

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        answer: Answer | None = None,
    ) -> Answer:
        """Send a request and return its answer, which may have only begun."""
        sent = {"host": "localhost:8000", "accept": BOTH, **self.headers, **(headers or {})}
        sent = {name: value for name, value in sent.items() if value is not None}
        path, _, query = path.partition("?")
        found = await self.face.admit(Head(method, path, query, sent, self.peer, holding=self.holding))
        answer = Answer() if answer is None else answer
        if isinstance(found, HttpResponse):
            answer.send(found)
        elif isinstance(found, Upgrade):
            raise AssertionError("an upgrade")
        elif len(body) > found.max_body:
            answer.send(found.too_large(body[: found.max_body]))
        else:
            answer.handler = found
            found.start(body, answer)
        return answer

    async def post(
        self, message: Any, headers: Mapping[str, Any] | None = None, answer: Answer | None = None
    ) -> Answer:
        """POST a message (JSON, or bytes as they are) to the endpoint, with the headers its revision wants."""
        ours: dict[str, Any] = {"content-type": "application/json"}
        if self.revision.modern and isinstance(message, dict) and "method" in message:
            ours["mcp-protocol-version"] = self.revision.name
            ours["mcp-method"] = message["method"]
            params = message.get("params", {})
            if (name := params.get("name") or params.get("uri")) is not None:
                ours["mcp-name"] = name
        elif self.session is not None:
            ours["mcp-session-id"] = self.session
            if self.revision.version_header:
                ours["mcp-protocol-version"] = self.revision.name
        body = message if isinstance(message, bytes) else orjson.dumps(message)
        return await self.send("POST", "/mcp", body, {**ours, **(headers or {})}, answer)

    def request(self, method: str, params: Mapping[str, Any] | None = None, *, id: Any = None, **meta: Any) -> Any:
        """A request as JSON, with the envelope its revision wants."""
        if id is None:
            self.last += 1
            id = self.last
        params = dict(params or {})
        if self.revision.modern:
            params["_meta"] = {
                META_PROTOCOL_VERSION: self.revision.name,
                META_CLIENT_INFO: {"name": "visitor", "version": "1"},
                META_CLIENT_CAPABILITIES: {},
                **meta,
            }
        elif meta:
            params["_meta"] = meta
        return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}

    async def call(
        self, tool: str, headers: Mapping[str, Any] | None = None, *, token: Any = None, **args: Any
    ) -> Answer:
        """POST a tool call."""
        meta = {} if token is None else {"progressToken": token}
        return await self.post(self.request("tools/call", {"name": tool, "arguments": args}, **meta), headers)

    async def initialize(self, capabilities: Mapping[str, Any] | None = None) -> Answer:
        """Begin a legacy session."""
        params = {
            "protocolVersion": self.revision.name,
            "capabilities": dict(capabilities or {}),
            "clientInfo": {"name": "visitor", "version": "1"},
        }
        answer = await (await self.post(self.request("initialize", params))).done()
        assert answer.status == 200, bytes(answer.body)
        self.session = answer.headers.get("mcp-session-id")
        accepted = await (await self.post({"jsonrpc": "2.0", "method": "notifications/initialized"})).done()
        assert accepted.status == 202
        return answer

    async def listen(self, last: str | None = None) -> Answer:
        """GET the stream of the session, or the rest of one."""
        headers = {"mcp-session-id": self.session, "last-event-id": last, "accept": "text/event-stream"}
        return await self.send("GET", "/mcp", headers={name: value for name, value in headers.items() if value})


@asynccontextmanager
async def visiting(
    server: Server[Any], revision: Revision = LATEST, settings: HttpSettings | None = None
) -> AsyncIterator[Visitor]:
    """Serve over HTTP in memory, and yield a client. In the end nothing may be under way."""
    async with http_application(server, settings) as face:
        yield Visitor(face, revision)
        await trio.testing.wait_all_tasks_blocked()
        assert face.shared.exchanges == 0


LEGACY = LATEST_LEGACY
