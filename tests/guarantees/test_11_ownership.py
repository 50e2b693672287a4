"""Promise 11: sessions, their events, streams and sealed state belong to who made them; to others they do not exist."""

from __future__ import annotations

import random
from typing import Any

import pytest

import trimcp
from tests.guarantees.near import doors, near
from tests.guarantees.report import figure
from tests.hostile.server_for_attack import make_server
from tests.peers.clients import WebSocketPeer, on, open_session
from tests.peers.http1 import http_request, post
from tests.peers.messages import modern_request, request
from tests.peers.serving import ON_EACH, ServedHere
from tests.peers.websockets import upgrade
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.identity import Identity, Principal, Refused, bearer_tokens
from trimcp.transports.http.settings import HttpSettings

pytestmark = pytest.mark.slow
OnEach = pytest.mark.parametrize("host", ON_EACH)

ADA, EVE = "Authorization: Bearer ada-token", "Authorization: Bearer eve-token"
_TOKENS = {"ada-token": "ada", "eve-token": "eve"}
_EVENTS = "Accept: text/event-stream"


@OnEach
async def test_what_is_somebody_elses_is_not_there(host: str) -> None:
    settings = HttpSettings(authenticate=bearer_tokens(_TOKENS))
    async with near(host, settings=settings) as server, on(server, "sse", ADA) as lane:
        session = await open_session(server, ADA)
        mine = f"Mcp-Session-Id: {session}"
        call = request(1, "tools/call", name="stream", arguments={"count": 2}, _meta={"progressToken": 1})
        async with server.wire() as wire:
            told = (await wire.ask(post(call, ADA, session=session))).body
        events = [line[4:].decode() for line in told.split(b"\n") if line.startswith(b"id: ")]
        assert len(events) >= 3

        def attempts(*who: str) -> dict[str, bytes]:
            return {
                "call": post(request(2, "ping"), *who, session=session),
                "answer": post(b'{"jsonrpc":"2.0","id":1,"result":{}}', *who, session=session),
                "notify": post(b'{"jsonrpc":"2.0","method":"notifications/initialized"}', *who, session=session),
                "stream": http_request("GET", "/mcp", _EVENTS, mine, *who),
                **{
                    f"event {id}": http_request("GET", "/mcp", _EVENTS, mine, f"Last-Event-ID: {id}", *who)
                    for id in [*events, "1-0", "0-0", "x"]
                },
                "end": http_request("DELETE", "/mcp", mine, *who),
                "post to its stream": post(request(3, "ping"), *who, path=lane.path),
            }

        for who, status in (((EVE,), 404), ((), 401), ((f"{ADA}x",), 401)):
            tried = attempts(*who)
            found = dict(zip(tried, await server.statuses(list(tried.values())), strict=True))
            let_in = {name: got for name, got in found.items() if got != status}
            known = "another's token" if status == 404 else "no good token"
            figure(11, f"of {len(tried)} uses of a session with {known}, served", len(let_in), 0, "", host)
            assert not let_in

        # Nothing happened to any of it.
        ours = attempts(ADA)
        kept = await server.statuses([ours[name] for name in ("call", f"event {events[0]}", "post to its stream")])
        assert kept == [200, 200, 202]
        assert (await lane.hear())["id"] == 3
        assert await server.statuses([ours["end"]]) == [200]


@OnEach
async def test_a_session_of_ones_own_opens_nobody_elses_events(host: str) -> None:
    """Also where nobody is known: an id of an event is good for the session it was told to."""
    async with near(host) as server:
        one, two = await open_session(server), await open_session(server)
        call = request(1, "tools/call", name="stream", arguments={"count": 9, "size": 50}, _meta={"progressToken": 1})
        async with server.wire() as wire:
            told = (await wire.ask(post(call, session=one))).body
        events = [line[4:].decode() for line in told.split(b"\n") if line.startswith(b"id: ")]
        leaked = 0
        for id in events:
            async with server.wire() as wire:
                lines = (_EVENTS, f"Mcp-Session-Id: {two}", f"Last-Event-ID: {id}")
                answer = await wire.ask(http_request("GET", "/mcp", *lines))
                leaked += answer.status != 400 or b"ppp" in answer.body
        figure(11, "events of another session told for their ids", leaked, 0, "", f"{host}, {len(events)} ids")
        assert not leaked
        assert len(events) >= 10
        for id in (one, two):
            assert await server.statuses([http_request("DELETE", "/mcp", f"Mcp-Session-Id: {id}")]) == [200]


_HERE = "https://mcp.example/mcp"


def _for_this_server_alone(head: Head) -> Identity:
    """As an application checks its tokens, of which trimcp knows nothing: who it is for, then who it is of."""
    audience, _, owner = head.headers.get("authorization", "").removeprefix("Bearer ").partition("|")
    if audience != _HERE:
        challenge = f'Bearer error="invalid_token", resource_metadata="{_HERE}/.well-known"'
        return Refused(401, (("WWW-Authenticate", challenge),), "this token is for another audience")
    return Principal(owner)


@OnEach
async def test_a_token_for_another_audience_is_none(host: str) -> None:
    others = ["https://other.example/mcp", f"{_HERE}/x", _HERE[:-1], f"{_HERE}.evil", _HERE.upper(), "*", ""]
    async with near(host, settings=HttpSettings(authenticate=_for_this_server_alone)) as server:
        session = await open_session(server, f"Authorization: Bearer {_HERE}|ada")
        let_in = []
        for audience in others:
            token = f"Authorization: Bearer {audience}|ada"
            mine = f"Mcp-Session-Id: {session}"
            more = [http_request("DELETE", "/mcp", mine, token), http_request("GET", "/mcp", _EVENTS, mine, token)]
            found = await server.statuses([*doors(token), *more])
            let_in += [] if found == [401] * 5 else [(audience, found)]
        figure(11, f"of {len(others)} tokens for other audiences, let in", len(let_in), 0, "", host)
        assert not let_in
        async with server.wire() as wire:
            refused = await wire.ask(doors("Authorization: Bearer x|ada")[0])
            assert (refused.status, "invalid_token" in refused.headers["www-authenticate"]) == (401, True)
        assert await server.statuses(doors(f"Authorization: Bearer {_HERE}|ada")) == [200, 200, 101]


# Sealed state

_CAN = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}}}


async def _ask(server: ServedHere, who: str, tool: str = "ask", arguments: Any = None, **more: Any) -> Any:
    async with server.wire() as wire:
        call = modern_request(1, "tools/call", name=tool, arguments=arguments or {}, _meta=_CAN, **more)
        return (await wire.ask(post(call, who))).reply


def _asking() -> trimcp.Server[None]:
    server = make_server()

    @server.tool
    async def ask_too(what: str = "", *, ctx: trimcp.Context) -> str:
        return str(await ctx.elicit("name?", trimcp.form(str, name="name")))

    return server


@OnEach
async def test_sealed_state_is_good_for_its_owner_its_request_and_its_time(host: str) -> None:
    ours, others = _asking(), _asking()
    settings = HttpSettings(authenticate=bearer_tokens(_TOKENS))
    async with near(host, ours, settings=settings) as server, near(host, others, settings=settings) as elsewhere:
        asked = (await _ask(server, ADA, "ask_too"))["result"]
        assert asked["resultType"] == "input_required"
        state = asked["requestState"]
        [key] = asked["inputRequests"]
        given = {"inputResponses": {key: {"action": "accept", "content": {"name": "Ada"}}}}
        rng = random.Random(11)
        altered = []
        for _ in range(100):
            at = rng.randrange(len(state))
            altered.append(state[:at] + rng.choice("AbC9_-".replace(state[at], "")) + state[at + 1 :])
        # The last letters hold bits that mean nothing.
        bad = [text for text in altered if text.rstrip("=")[:-1] != state.rstrip("=")[:-1]]
        bad += [state[:-8], state[8:], state + state, state[::-1], "", "x", "A" * 500, "=" * 10, "\x00"]
        foreign = (await _ask(elsewhere, ADA, "ask_too"))["result"]["requestState"]
        ours.sealer.lifetime = -1.0  # what is sealed from now on was good until a second ago
        expired = (await _ask(server, ADA, "ask_too"))["result"]["requestState"]
        refused = {
            **{
                f"altered {n}": await _ask(server, ADA, "ask_too", requestState=text, **given)
                for n, text in enumerate(bad)
            },
            "of another server": await _ask(server, ADA, "ask_too", requestState=foreign, **given),
            "expired": await _ask(server, ADA, "ask_too", requestState=expired, **given),
            "of another principal": await _ask(server, EVE, "ask_too", requestState=state, **given),
            "of another tool": await _ask(server, ADA, "ask", requestState=state, **given),
            "of a tool that does not ask": await _ask(server, ADA, "echo", requestState=state, **given),
            "of other arguments": await _ask(server, ADA, "ask_too", {"what": "x"}, requestState=state, **given),
        }
        taken = [name for name, answer in refused.items() if answer.get("error", {}).get("code") != -32602]
        figure(11, f"of {len(refused)} states that are not good, taken", len(taken), 0, "", host)
        assert not taken
        good = await _ask(server, ADA, "ask_too", requestState=state, **given)
        assert "Ada" in good["result"]["content"][0]["text"]


@OnEach
async def test_sealed_state_is_its_owners_over_a_websocket_too(host: str) -> None:
    """What was sealed for one transport is good for another, and for nobody else."""
    settings = HttpSettings(authenticate=bearer_tokens(_TOKENS))
    async with near(host, _asking(), settings=settings) as server:
        asked = (await _ask(server, ADA, "ask_too"))["result"]
        [key] = asked["inputRequests"]
        given = {key: {"action": "accept", "content": {"name": "Ada"}}}
        more = {"requestState": asked["requestState"], "inputResponses": given}
        retry = modern_request(1, "tools/call", name="ask_too", arguments={}, _meta=_CAN, **more)
        answers = []
        for who in (EVE, ADA):
            async with server.wire() as wire:
                peer = WebSocketPeer(True, await upgrade(wire, who))
                await peer.say(retry)
                answers.append(await peer.hear())
                await peer.say_goodbye()
    taken = "result" in answers[0]
    figure(11, "of 1 state of somebody else, taken over WebSocket", taken, 0, "", host)
    assert answers[0]["error"]["code"] == -32602
    assert "Ada" in answers[1]["result"]["content"][0]["text"]
