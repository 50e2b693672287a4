"""Who may come in, and what belongs to whom: other people's pages, host names, sessions, streams, events and state."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.hostile.network import HOSTS, Pool, Served, http, initialize, on, post
from tests.hostile.peers import enveloped, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the server is looked into by way of /proc"),
]
OnBoth = pytest.mark.parametrize("host", HOSTS)

_EVENTS = "Accept: text/event-stream"
_KEY = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
_WEBSOCKET = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", _KEY)

_STRANGE_ORIGINS = [
    "http://evil.example",
    "null",
    "http://localhost.evil.example",
    "http://localhost:1.evil.example",
    "http://localhost@evil.example",
    "https://localhost",
    "http://127.0.0.1.nip.io",
    "file://",
    "chrome-extension://abcdef",
    "http://localhost, http://evil.example",
    "",
]
_STRANGE_HOSTS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "0.0.0.0",
    "[::ffff:10.0.0.1]",
    "localhost#evil.example",
    "2130706433",
]
_FAMILIAR_HOSTS = ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]", "127.1.2.3"]


def _doors(*lines: str) -> list[bytes]:
    """One request to each way in."""
    call = post(enveloped(1, "tools/call", name="echo", arguments={})[:-1], *lines)
    sse, websocket = http("GET", "/sse", _EVENTS, *lines), http("GET", "/ws", *_WEBSOCKET, *lines)
    return [call, sse, websocket]


async def _statuses(server: Served, requests: list[bytes]) -> list[int]:
    found = []
    for said in requests:
        async with server.wire() as wire:
            await wire.say(said)
            found.append((await wire.head()).status)
    return found


@OnBoth
async def test_pages_and_names_of_strangers_get_in_nowhere(servers: Pool, host: str) -> None:
    async with servers(host) as server:
        for origin in _STRANGE_ORIGINS:
            assert await _statuses(server, _doors(f"Origin: {origin}")) == [403] * 3, origin
        for name in _STRANGE_HOSTS:
            strange = [said.replace(b"Host: localhost", f"Host: {name}".encode()) for said in _doors()]
            assert set(await _statuses(server, strange)) <= {400, 403}, name
        for name in _FAMILIAR_HOSTS:
            known = [said.replace(b"Host: localhost", f"Host: {name}".encode()) for said in _doors()]
            assert await _statuses(server, known) == [200, 200, 101], name
        assert await _statuses(server, _doors("Origin: http://localhost")) == [200, 200, 101]


@OnBoth
async def test_a_page_that_is_named_gets_in_and_its_neighbours_do_not(servers: Pool, host: str) -> None:
    named = {"origins": {"allow_origins": ["https://app.example"], "allowed_hosts": ["mcp.example"]}}
    async with servers(host, **named) as server:
        public = [said.replace(b"localhost", b"mcp.example") for said in _doors("Origin: https://app.example")]
        assert await _statuses(server, public) == [200, 200, 101]
        for origin in (
            "http://app.example",
            "https://app.example:444",
            "https://app.example.evil",
            "https://xapp.example",
        ):
            near = [said.replace(b"localhost", b"mcp.example") for said in _doors(f"Origin: {origin}")]
            assert await _statuses(server, near) == [403] * 3, origin
        away = [said.replace(b"localhost", b"xmcp.example") for said in _doors()]
        assert await _statuses(server, away) == [403] * 3


_ADA, _EVE = "Authorization: Bearer ada-token", "Authorization: Bearer eve-token"
_OWNED: dict[str, Any] = {"tokens": {"ada-token": "ada", "eve-token": "eve"}}


@OnBoth
async def test_what_is_somebody_elses_is_not_there(servers: Pool, host: str) -> None:
    async with servers(host, **_OWNED) as server, on(server, "sse", _ADA) as lane:
        session = await initialize(server, _ADA)
        call = request(1, "tools/call", name="stream", arguments={"count": 2}, _meta={"progressToken": 1})[:-1]
        async with server.wire() as wire:
            answer = await wire.ask(post(call, _ADA, session=session))
            assert answer.reply["result"]["content"][0]["text"] == "streamed"
        event = answer.body.partition(b"\n")[0].decode().removeprefix("id: ")
        mine = f"Mcp-Session-Id: {session}"
        attempts = {
            "call": lambda who: post(request(2, "ping")[:-1], who, session=session),
            "end": lambda who: http("DELETE", "/mcp", mine, who),
            "listen": lambda who: http("GET", "/mcp", _EVENTS, mine, who),
            "events": lambda who: http("GET", "/mcp", _EVENTS, mine, f"Last-Event-ID: {event}", who),
            "post": lambda who: post(request(3, "ping")[:-1], who, path=lane.path),
        }
        for name, attempt in attempts.items():
            assert await _statuses(server, [attempt(_EVE)]) == [404], name
            assert await _statuses(server, [attempt("X: y"), attempt(f"{_ADA}x")]) == [401, 401], name
        # The owner's are as they were.
        assert await _statuses(server, [attempts["events"](_ADA), attempts["post"](_ADA)]) == [200, 202]
        other = await initialize(server, _EVE)
        async with server.wire() as wire:
            lines = (_EVENTS, f"Mcp-Session-Id: {other}", f"Last-Event-ID: {event}", _EVE)
            assert (await wire.ask(http("GET", "/mcp", *lines))).status == 400, "no stream of this session"
        for owner, id in ((_ADA, session), (_EVE, other)):
            assert await _statuses(server, [http("DELETE", "/mcp", f"Mcp-Session-Id: {id}", owner)]) == [200]
        assert (await lane.hear())["id"] == 3


@OnBoth
async def test_sealed_state_is_good_for_its_owner_and_its_request_alone(servers: Pool, host: str) -> None:
    meta = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}}}
    told = {"action": "accept", "content": {"name": "Ada"}}

    async def ask(server: Served, who: str, tool: str = "ask", **more: Any) -> Any:
        async with server.wire() as wire:
            call = enveloped(1, "tools/call", name=tool, arguments={}, _meta=meta, **more)
            return (await wire.ask(post(call[:-1], who))).reply

    async with servers(host, **_OWNED) as server:
        asked = (await ask(server, _ADA))["result"]
        assert asked["resultType"] == "input_required"
        state = asked["requestState"]
        [key] = asked["inputRequests"]
        answers = {"inputResponses": {key: told}}
        middle = len(state) // 2
        changed = state[:middle] + ("A" if state[middle] != "A" else "B") + state[middle + 1 :]
        refused = [
            await ask(server, _EVE, requestState=state, **answers),
            await ask(server, _ADA, requestState=changed, **answers),
            await ask(server, _ADA, requestState=state[:-4], **answers),
            await ask(server, _ADA, requestState="", **answers),
            await ask(server, _ADA, "echo", requestState=state, **answers),
        ]
        assert [answer.get("error", {}).get("code") for answer in refused] == [-32602] * 5, refused
        good = await ask(server, _ADA, requestState=state, **answers)
        assert "Ada" in good["result"]["content"][0]["text"]
