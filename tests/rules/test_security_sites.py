"""Where security events are told: each kind by who does it, with who and where, and nothing of ordinary life."""

from __future__ import annotations

import json
import re
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import trimcp
from tests.peers.http1 import BOTH, http_request
from tests.peers.serving import NETWORK, Place, served
from trimcp import security
from trimcp.channel import Kind, Outgoing
from trimcp.session.limits import Quota
from trimcp.testing.connect import connected
from trimcp.transports.memory import memory_channels
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2024_11_05
from trimcp.wire.tools import CallToolParams

TOKENS = {"token-of-ada": "ada", "token-of-bob": "bob"}


@attrs.define
class Events:
    """What the logger "trimcp.security" was told."""

    caplog: Any

    def __call__(self) -> list[dict[str, Any]]:
        records = [vars(record) for record in self.caplog.records if record.name == "trimcp.security"]
        return [record for record in records if "left_out" not in record]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self()]


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Events:
    security.tell_left_out()
    return Events(caplog)


def make_server(**options: Any) -> trimcp.Server[Any]:
    server = trimcp.Server("s", **options)

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError("no")

    @server.tool(quota=Quota(running=1, waiting=0))
    async def wait() -> str:
        await trio.sleep_forever()
        return ""

    return server


async def say(place: Place, *lines: str, body: bytes = b"", host: str = "localhost", data: bytes = b"") -> bytes:
    """Send a request, by default a POST of the body, and return everything that comes back to the end."""
    ours = (f"Accept: {BOTH}", "Content-Type: application/json", "Connection: close")
    async with place.wire() as wire:
        await wire.send(data or http_request("POST", "/mcp", *ours, *lines, body=body, host=host))
        with trio.fail_after(60):
            return await wire.everything()


def request(method: str = "initialize", **params: Any) -> bytes:
    if method == "initialize":
        info = {"name": "c", "version": "1"}
        params = {"protocolVersion": LATEST_LEGACY.name, "capabilities": {}, "clientInfo": info}
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


async def test_a_page_of_another_origin(events: Events) -> None:
    async with served(make_server()) as place:
        assert b" 403 " in await say(place, "Origin: https://evil.example", body=request())
        assert b" 403 " in await say(place, body=request(), host="evil.example")
    assert events.kinds == ["origin_refused"] * 2
    assert "evil.example" in events()[0]["why"]
    assert events()[0]["peer"].startswith("127.0.0.1")


async def test_credentials_that_are_refused_and_none_that_are_missing(events: Events) -> None:
    async with served(make_server(), settings=trimcp.HttpSettings(authenticate=trimcp.bearer_tokens(TOKENS))) as place:
        assert b" 401 " in await say(place, body=request())
        assert events.kinds == []
        assert b" 401 " in await say(place, "Authorization: Bearer guessed", body=request())
    assert events.kinds == ["authentication_failed"]
    assert "guessed" not in repr(events())


async def test_somebody_elses_session(events: Events) -> None:
    async with served(make_server(), settings=trimcp.HttpSettings(authenticate=trimcp.bearer_tokens(TOKENS))) as place:
        answer = await say(place, "Authorization: Bearer token-of-ada", body=request())
        id = re.search(rb"(?i)mcp-session-id: (\S+)", answer)[1].decode()
        taken = (f"Mcp-Session-Id: {id}", "Authorization: Bearer token-of-bob")
        assert b" 404 " in await say(place, *taken, body=request("tools/list"))
    told_of(events, id)


async def test_somebody_elses_stream(events: Events) -> None:
    settings = trimcp.HttpSettings(authenticate=trimcp.bearer_tokens(TOKENS), sse_path="/sse")
    async with served(make_server(), "http+sse", settings=settings) as place, place.wire() as stream:
        endpoint = await stream.open_events("Authorization: Bearer token-of-ada")
        lines = ("Authorization: Bearer token-of-bob", "Content-Type: application/json", "Connection: close")
        assert b" 404 " in await say(place, data=http_request("POST", endpoint, *lines, body=b"{}"))
    told_of(events, endpoint.partition("session_id=")[2])


def told_of(events: Events, id: str) -> None:
    [event] = events()
    assert event["event"] == "foreign_session"
    assert (event["owner"], event["principal"]) == ("ada", "bob")
    assert len(event["session"]) == 12
    assert id
    assert id not in repr(event)


async def test_a_state_that_is_not_ours(events: Events, autojump_clock: trio.testing.MockClock) -> None:
    async with connected(make_server()) as session:
        with pytest.raises(trimcp.RemoteError):
            params = CallToolParams(name="echo", arguments={"text": "a"}, request_state="forged")
            await session.session.call("tools/call", params)
    assert events.kinds == ["request_state_refused"]
    assert "forged" not in repr(events())


async def test_a_second_use_of_an_id(events: Events, autojump_clock: trio.testing.MockClock) -> None:
    async with speaking(make_server()) as wire:
        for _ in range(2):
            await wire(b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"wait"}}')
    assert events.kinds == ["duplicate_id"]
    assert events()[0]["id"] == 7


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"not JSON\n", "garbage"),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}\n', "garbage"),
        (b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * 5_000_000 + b'"}\n', "oversize"),
    ],
)
async def test_what_is_no_message(
    text: bytes, kind: str, events: Events, autojump_clock: trio.testing.MockClock
) -> None:
    async with speaking(make_server()) as wire:
        await wire(text.rstrip())
    assert events.kinds == [kind]


def speaking(server: trimcp.Server[Any]) -> Any:
    @asynccontextmanager
    async def opened() -> Any:
        theirs, ours = memory_channels(framed=True)
        async with server.running() as running, trio.open_nursery() as nursery, ours:
            nursery.start_soon(running.serve, theirs)

            async def wire(text: bytes) -> None:
                await ours.send([Outgoing(text, Kind.REQUEST)])
                await trio.testing.wait_all_tasks_blocked()

            await wire(request())
            await wire(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
            yield wire

    return opened()


async def test_what_is_no_http_and_what_is_too_large(events: Events) -> None:
    async with served(make_server(limits=trimcp.Limits(max_message=1_000))) as place:
        await say(place, data=b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 431 " in await say(place, data=b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n")
        assert b" 413 " in await say(place, body=b"x" * 2_000)
        assert b" 400 " in await say(place, f"MCP-Protocol-Version: {LATEST.name}", body=b"not JSON")
    assert events.kinds == ["garbage", "oversize", "oversize", "garbage"]


async def test_headers_that_say_something_else(events: Events) -> None:
    meta = {
        "io.modelcontextprotocol/protocolVersion": LATEST.name,
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "c", "version": "1"},
    }
    body = request("tools/call", name="fail", arguments={}, _meta=meta)
    async with served(make_server()) as place:
        lines = (f"MCP-Protocol-Version: {LATEST.name}", "Mcp-Method: tools/call", "Mcp-Name: echo")
        assert b"-32020" in await say(place, *lines, body=body)
    assert events.kinds == ["header_mismatch"]


async def test_more_than_a_quota_or_a_host_allows(events: Events, autojump_clock: trio.testing.MockClock) -> None:
    async with connected(make_server()) as session, trio.open_nursery() as nursery:
        nursery.start_soon(partial(session.call_tool, "wait"))
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(30):
            with pytest.raises(trimcp.Overloaded):
                await session.call_tool("wait")
        nursery.cancel_scope.cancel()
    assert events.kinds == ["flood_refused"] * security.PER_MINUTE


async def test_sessions_beyond_the_most_there_may_be(events: Events) -> None:
    async with served(make_server(), settings=trimcp.HttpSettings(max_sessions=1)) as place:
        assert b" 200 " in await say(place, body=request())
        answer = await say(place, body=request())
        assert b" 200 " in answer
        assert events.kinds == ["gave_way"]
        [id] = re.findall(rb"(?i)mcp-session-id: ([^\r]+)", answer)
        assert b" 200 " in await say(place, f"Mcp-Session-Id: {id.decode()}", body=request("tools/list"))
        assert b" 503 " in await say(place, body=request())
    assert events.kinds == ["gave_way", "flood_refused"]


# A client's side


async def test_a_schema_beyond_the_bounds(events: Events, autojump_clock: trio.testing.MockClock) -> None:
    server = make_server()

    @server.tool(structured=False)
    async def listed() -> trimcp.CallToolResult:
        return trimcp.CallToolResult(content=[], structured_content={"a": "b"})

    schema = {"type": "object", "properties": {"a": {"pattern": "(?=a)b"}}}  # no linear engine has that
    entry = server.tools.get("listed")
    assert entry is not None
    entry.listed = attrs.evolve(entry.listed, output_schema=schema)
    async with connected(server, revision=LATEST) as session:
        await session.list_tools()
        await session.call_tool("listed")
    assert events.kinds == ["schema_refused"]
    assert events()[0]["tool"] == "listed"


@pytest.mark.parametrize("mode", ["streamable", "sse"])
async def test_a_server_that_sends_elsewhere(mode: Any, events: Events) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        if mode == "sse":
            event = b"event: endpoint\ndata: http://evil.example/messages\n\n"
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            await stream.send_all(head + event)
        else:
            head = b"HTTP/1.1 307 -\r\nlocation: http://evil.example/\r\ncontent-length: 0\r\nConnection: close\r\n\r\n"
            await stream.send_all(head)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, answer, 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises((trimcp.McpError, ExceptionGroup)):
            async with trimcp.Client("c").connect(trimcp.http(f"http://127.0.0.1:{port}/mcp", mode=mode)):
                pass
        nursery.cancel_scope.cancel()
    assert set(events.kinds) == {"redirect_refused"}
    assert "evil.example" in events()[0]["to"]


async def test_a_child_that_prints(events: Events, tmp_path: Any) -> None:
    program = tmp_path / "prints.py"
    program.write_text(
        "import sys, os\nos.write(1, b'listening on stdout\\n')\nimport trimcp\n"
        "server = trimcp.Server('s')\n@server.tool\nasync def echo(text: str) -> str:\n    return text\n"
        "trimcp.run_stdio(server)\n"
    )
    child = trimcp.stdio(sys.executable, str(program))
    async with trimcp.Client("c").connect(child) as session:
        await session.call_tool("echo", {"text": "a"})
    assert events.kinds == ["server_garbage"]


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_a_server_that_asks_on_and_on(
    revision: Any, events: Events, autojump_clock: trio.testing.MockClock
) -> None:
    server = make_server()

    @server.tool
    async def nag(ctx: trimcp.Context) -> str:
        for n in range(5):
            await ctx.elicit(f"{n}?", {"type": "object", "properties": {"a": {"type": "string"}}})
        return "done"

    client = trimcp.Client("c", asks_per_minute=2)

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="decline")

    async with connected(server, client, revision=revision) as session:
        with pytest.raises(trimcp.McpError):
            await session.call_tool("nag")
    assert events.kinds == ["too_many_questions"]


# Ordinary life


@pytest.mark.parametrize("road", NETWORK)
async def test_ordinary_life_is_no_event(road: str, events: Events) -> None:
    revision = V2024_11_05 if road == "http+sse" else LATEST_LEGACY if "websocket" in road else LATEST
    async with served(make_server(), road, settings=trimcp.HttpSettings(sse_path="/sse")) as place:
        async with trimcp.Client("c").connect(place.target(), revision=revision) as session:
            assert (await session.call_tool("echo", {"text": "a"})).content[0].text == "a"
            assert (await session.call_tool("fail")).is_error is True
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool("nothing")
            with pytest.raises(trimcp.RemoteError):
                await session.read_resource("nothing://here")
            with trio.move_on_after(0.1):
                await session.call_tool("wait")
        with trio.move_on_after(0.1):  # who leaves in the middle
            async with trimcp.Client("c").connect(place.target(), revision=revision) as session:
                await session.call_tool("wait")
    assert events() == []


async def test_a_session_that_is_gone_is_no_event(events: Events) -> None:
    async with served(make_server()) as place:
        assert b" 404 " in await say(place, "Mcp-Session-Id: long gone", body=request("tools/list"))
    assert events() == []
