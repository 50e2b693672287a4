"""Two engines that face each other, fed by hand: what one side encodes is parsed and received by the other."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import attrs
import orjson

from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.connection import Connection
from trimcp.protocol.events import AnsweredByEngine, Event, Rejected, Replied, RequestReceived
from trimcp.protocol.profile import Profile, Role
from trimcp.wire.capabilities import ClientCapabilities, ElicitationCapability, ServerCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.jsonrpc import encode_notification, encode_request, parse
from trimcp.wire.revisions import REVISIONS, V2026_07_28, Revision
from trimcp.wire.tools import CallToolParams, CallToolResult

LEGACY = tuple(r for r in REVISIONS if not r.modern)
SERVED = ("tools/call", "tools/list", "prompts/get", "resources/read", "logging/setLevel", "subscriptions/listen")

VERSION = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
INFO = "io.modelcontextprotocol/clientInfo"
LEVEL = "io.modelcontextprotocol/logLevel"
SERVER_INFO = "io.modelcontextprotocol/serverInfo"


def envelope(**more: Any) -> dict[str, Any]:
    return {VERSION: V2026_07_28.name, CAPABILITIES: {}, **more}


def server(served: Container[str] = SERVED, revisions: tuple[Revision, ...] = REVISIONS, **info: Any) -> Connection:
    profile = Profile(
        Implementation("server", "1", **info), ServerCapabilities(), instructions="Be brief.", revisions=revisions
    )
    return Connection(Role.SERVER, profile, served)


def client(served: Container[str] = ("elicitation/create",), revisions: tuple[Revision, ...] = REVISIONS) -> Connection:
    capabilities = ClientCapabilities(elicitation=ElicitationCapability())
    return Connection(Role.CLIENT, Profile(Implementation("client", "1"), capabilities, revisions=revisions), served)


def agreed(revision: Revision, **options: Any) -> Connection:
    """Return a server's engine that has agreed on a legacy revision."""
    pair = ConnectionPair(server=server(**options))
    pair.initialize(revision)
    return pair.server


def ask(engine: Connection, id: Any, method: str, params: Any = None, principal: str | None = None) -> Event:
    return engine.receive(parse(encode_request(id, method, params)), principal)


def tell(engine: Connection, method: str, params: Any = None) -> Event:
    return engine.receive(parse(encode_notification(method, params)))


def reply_of(event: Event) -> Any:
    """Return the reply an event carries, as JSON."""
    assert isinstance(event, AnsweredByEngine | Rejected), event
    assert event.reply is not None
    return orjson.loads(event.reply)


def code_of(event: Event) -> int:
    """Return the code of the error an event answers with."""
    assert isinstance(event, Rejected), event
    code: int = reply_of(event)["error"]["code"]
    return code


def is_request(event: Event) -> bool:
    return isinstance(event, RequestReceived)


@attrs.define
class ConnectionPair:
    """A client's and a server's engine."""

    client: Connection = attrs.field(factory=client)
    server: Connection = attrs.field(factory=server)

    def initialize(self, revision: Revision) -> None:
        """Exchange the handshake."""
        method = methods_of(revision)["initialize"]
        id = self.client.new_id()
        data = self.client.encode_request(id, method, self.client.legacy.offer(revision))
        self.client.sent(id, method)
        settled: Any = self.server.receive(parse(data))
        replied: Any = self.client.receive(parse(settled.reply))
        self.client.legacy.accept(replied.result)
        assert tell(self.server, "notifications/initialized") is not None

    def open(self, revision: Revision) -> ConnectionPair:
        """Take both sides to where calls may be made."""
        if revision.modern:
            self.client.modern.revision = revision
        else:
            self.initialize(revision)
        return self

    def call(self, params: Any = None, name: str = "tools/call", **options: Any) -> Event:
        """Send a request of the client's and return what the server makes of it."""
        engine = self.client
        method = engine.method(name)
        engine.may_call(method)
        id = engine.new_id()
        data = engine.encode_request(id, method, CallToolParams("run", {}) if params is None else params, **options)
        engine.sent(id, method, wants_progress=options.get("wants_progress", False))
        return self.server.receive(parse(data))

    def answer(self, id: Any, result: Any = None) -> Event:
        """Let the server answer a request and return what the client makes of it."""
        request = self.server.inbound[id]
        data = self.server.encode_result(request, CallToolResult(content=[]) if result is None else result)
        assert self.server.answered(id)
        return self.client.receive(parse(data))

    def payload(self, event: Event, name: str = "tools/call") -> Any:
        assert isinstance(event, Replied)
        assert event.result is not None
        return self.client.load_result(self.client.method(name), event.result)
