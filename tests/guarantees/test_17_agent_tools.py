"""Promise 17: agent tools keep the promises above: input with something wrong does no harm, strangers get nothing."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import orjson
import pytest
import trio

from tests.fuzz.effort import PATIENCE, count
from tests.guarantees.mutating import CALM, HASTY, MOMENT, say_all, survives
from tests.guarantees.report import figure
from tests.hostile.mutations import of_agent_frames, of_agent_requests, of_grpc
from tests.peers.http1 import http_request
from tests.peers.processes import MIB
from tests.peers.servers import ServerPool, ServerProcess
from tests.peers.serving import ON_EACH, SOFTWARE
from tests.peers.websockets import message, upgrade

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)
OnEach = pytest.mark.parametrize("host", ON_EACH)

ADA, EVE = "Authorization: Bearer ada-token", "Authorization: Bearer eve-token"
_TOKENS = {"ada-token": "ada", "eve-token": "eve"}
_JSON, _EVENTS = "Content-Type: application/json", "Accept: text/event-stream"

_READERS = 4  # at once that read nothing

# What mutations make by chance, contexts and tools, ends or fills its bound soon, so that it is no leak.
_FEW: dict[str, Any] = {
    "agent_tools": {
        "registration": {"max_tools": 5, "timeout": 0.5},
        "contexts": {"max_contexts": 50, "idle": 0.5, "gone": 0.2, "max_gone": 50},
    }
}


@OnBoth
async def test_mutations_of_requests_of_agents_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(5_000 if host == "own" else 500)
    async with servers(host, **HASTY, **_FEW) as server:
        await server.warm()
        make = of_agent_requests(random.Random(20_000))
        say = partial(say_all, server, make)
        await survives(server, "agent tools, http", min(many // 5, 1_000), many, say, promise=17)


@OnEach
async def test_mutations_of_websockets_of_agents_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(1_500 if host == "own" else 300)
    async with servers(host, **CALM, **_FEW) as server:
        await server.warm()
        make = of_agent_frames(random.Random(20_000))
        say = partial(say_all, server, make, websocket="/agent", patience=MOMENT)
        await survives(server, "agent tools, websocket", min(many // 2, 1_000), many, say, promise=17)


async def test_mutations_of_grpc_of_agents_do_no_harm(servers: ServerPool) -> None:
    many = count(500)
    async with servers("grpc", **CALM, **_FEW) as server:
        await server.warm()
        say = partial(say_all, server, of_grpc(random.Random(20_000)))
        answered = await survives(server, "agent tools, gRPC", min(many, 1_000), many, say, promise=17)
        assert answered == many, "the beginning is right, and is answered at once"


# What strangers may hold


@OnEach
async def test_an_oversize_message_is_refused_and_costs_little(servers: ServerPool, host: str) -> None:
    async with servers(host, **_FEW) as server:
        await server.warm()
        base = server.forget_peak()
        value = b'{"tool_name":"echo","request_id":"1","arguments":{"text":"%b"}}' % (b"x" * (8 * MIB))
        for path in ("/tools/call", "/mcp", "/contexts", "/tools/register"):
            async with server.wire() as wire:
                answer = await wire.ask(http_request("POST", path, _JSON, body=value))
                assert answer.status == 413, (path, answer)
        async with server.wire() as wire:
            socket = await upgrade(wire, path="/agent")
            await socket.say(message(value), message(b'{"type":"list_tools","request_id":"after"}'))
            if host != "hypercorn":
                assert orjson.loads((await socket.hear())[1])["error"]["code"] == "too_large"
                assert orjson.loads((await socket.hear())[1])["request_id"] == "after"
            else:
                assert await socket.close_code() == 1009
        spent = server.peak - base
    figure(17, "memory for messages of 8 MiB", spent / MIB, 8, "MiB", host)
    assert spent <= 8 * MIB


@OnEach
@pytest.mark.parametrize("road", ["events", "websocket"])
async def test_unread_progress_costs_two_mebibytes(servers: ServerPool, host: str, road: str) -> None:
    asked = (
        b'{"type":"tool_request","tool_name":"stream","request_id":"1","progress":true,'
        b'"arguments":{"count":1000000,"size":1000}}'
    )
    async with servers(host, **_FEW) as server:
        await server.warm()
        async with server.wire() as wire:  # else it would count what is imported for the first of them
            socket = await upgrade(wire, path="/agent")
            await socket.say(message(asked.replace(b"1000000", b"5000")))
            while b"tool_response" not in (await socket.hear())[1]:
                pass
        base = server.forget_peak()
        async with AsyncExitStack() as stack:
            for _ in range(_READERS):
                wire = await stack.enter_async_context(server.wire())
                if road == "events":
                    await wire.send(http_request("POST", "/tools/call", _JSON, _EVENTS, body=asked))
                else:
                    await (await upgrade(wire, path="/agent")).say(message(asked))
            await _echoes(server, 50)
            await trio.sleep(0.3)
            spent = (server.peak - base) / _READERS
    figure(17, "memory for the unread progress of each call", spent / MIB, 2, "MiB", f"{road}, {host}")
    assert spent <= 2 * MIB


async def _echoes(server: ServerProcess, many: int) -> None:
    """Somebody else is served meanwhile."""
    async with server.wire() as wire:
        for n in range(many):
            body = b'{"tool_name":"echo","request_id":"%d","arguments":{"text":"x"}}' % n
            assert (await wire.ask(http_request("POST", "/tools/call", _JSON, body=body))).reply["result"] == "x"


async def test_a_watcher_that_reads_nothing_costs_two_mebibytes_and_then_sees_the_last_state(
    servers: ServerPool,
) -> None:
    contexts = {"idle": 0.5}
    async with servers("own", agent_tools={"contexts": contexts}) as server:
        await server.warm()
        async with server.wire() as watcher, server.wire() as writer:
            assert (
                await writer.ask(http_request("POST", "/contexts", _JSON, body=b'{"context_id":"w"}'))
            ).status == 201
            await watcher.send(http_request("GET", "/contexts/w/events", _EVENTS))
            assert (await watcher.head()).status == 200
            base = server.forget_peak()
            for n in range(2_000):
                body = b'{"n":%d,"text":"%b"}' % (n, b"x" * 10_000)
                assert (await writer.ask(http_request("PATCH", "/contexts/w", _JSON, body=body))).status == 200
            spent = server.peak - base
            seen = 0
            with trio.fail_after(PATIENCE):
                while seen < 1_999:
                    told = await watcher.message()
                    now = told.get("state", told.get("updates")).get("n", -1)
                    assert now >= seen or now == -1
                    seen = max(seen, now)
            assert (await writer.ask(http_request("DELETE", "/contexts/w"))).status == 200
    figure(17, "memory for a watcher that reads nothing", spent / MIB, 2, "MiB", "own")
    assert spent <= 2 * MIB


@OnEach
async def test_a_flood_of_contexts_ends_at_its_bound_and_others_get_theirs(servers: ServerPool, host: str) -> None:
    most, own, idle = 400, 200, 2.0
    options = {"agent_tools": {"contexts": {"max_contexts": most, "max_per_owner": own, "idle": idle}}}
    async with servers(host, tokens=_TOKENS, **options) as server:
        base = server.forget_peak()
        made: Counter[int] = Counter()

        async def flood(wires: int) -> None:
            async with server.wire() as wire:
                for n in range(200):
                    body = b'{"context_id":"c%d-%d","state":{"k":"v"}}' % (wires, n)
                    made[(await wire.ask(http_request("POST", "/contexts", _JSON, EVE, body=body))).status] += 1

        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for wires in range(10):
                nursery.start_soon(flood, wires)
        spent = server.peak - base
        assert set(made) == {201, 429}
        lives = 1 + math.ceil((trio.current_time() - began) / idle)
        assert made[201] <= lives * own  # those that ended meanwhile made room
        async with server.wire() as wire:
            assert (await wire.ask(http_request("POST", "/contexts", _JSON, ADA, body=b"{}"))).status == 201
            answer = await wire.ask(http_request("GET", "/contexts/c0-0", ADA))
            assert (answer.status, answer.reply["error"]["code"]) == (404, "unknown_context")
    figure(17, "memory for 2,000 contexts of one stranger", spent / MIB, 8, "MiB", host)
    assert spent <= 8 * MIB


# Strangers


@OnEach
async def test_a_context_of_somebody_else_is_not_there(servers: ServerPool, host: str) -> None:
    options = {"agent_tools": {"contexts": {"idle": 0.5, "gone": 0.2}}}
    async with servers(host, tokens=_TOKENS, **options) as server, server.wire() as wire:
        answer = await wire.ask(http_request("POST", "/contexts", _JSON, ADA, body=b'{"state":{"secret":1}}'))
        mine = answer.reply["context_id"]
        call = b'{"tool_name":"echo","request_id":"1","context_id":"%b"}' % mine.encode()
        tries = {
            "read": http_request("GET", f"/contexts/{mine}", EVE),
            "update": http_request("PATCH", f"/contexts/{mine}", _JSON, EVE, body=b'{"secret":2}'),
            "watch": http_request("GET", f"/contexts/{mine}/events", _EVENTS, EVE),
            "call": http_request("POST", "/tools/call", _JSON, EVE, body=call),
            "destroy": http_request("DELETE", f"/contexts/{mine}", EVE),
            "make": http_request("POST", "/contexts", _JSON, EVE, body=b'{"context_id":"%b"}' % mine.encode()),
        }
        found = {name: (await wire.ask(text)).status for name, text in tries.items()}
        let_in = [name for name, status in found.items() if status not in (400, 404)]
        figure(17, f"of {len(tries)} uses of another's context, served", len(let_in), 0, "", host)
        assert not let_in, found
        state = (await wire.ask(http_request("GET", f"/contexts/{mine}", ADA))).reply["state"]
        assert state["secret"] == 1
        assert (await wire.ask(http_request("DELETE", f"/contexts/{mine}", ADA))).status == 200


ABUSE: dict[str, tuple[bytes, int]] = {
    "shadowing a tool of the server": (b'{"name":"echo"}', 422),
    "a name that is no name": (b'{"name":"a b\\u0000"}', 422),
    "an implementation that there is none of": (b'{"name":"unheard"}', 422),
    "a schema of another machine": (b'{"name":"weather","parameters":{"$ref":"http://127.0.0.1/x.json"}}', 422),
    "a schema in a file": (b'{"name":"weather","parameters":{"$ref":"file:///etc/passwd"}}', 422),
    "a callback where none are allowed": (b'{"name":"far","callback":"https://127.0.0.1/x"}', 422),
    "a giant schema": (
        b'{"name":"weather","parameters":{"type":"object","description":"%b"}}' % (b"x" * 100_000),
        422,
    ),
    "a deep schema": (
        b'{"name":"weather","parameters":%b{}%b}' % (b'{"type":"object","properties":{"a":' * 60, b"}}" * 60),
        422,
    ),
    "a pattern that takes for ever": (
        b'{"name":"weather","parameters":{"type":"object","properties":{"city":{"pattern":"(a+)+$"}}}}',
        200,
    ),
    "no schema at all": (b'{"name":"weather","parameters":[1]}', 422),
}


@OnEach
async def test_registration_abuse_registers_nothing(servers: ServerPool, host: str) -> None:
    async with servers(host, **_FEW) as server, server.wire() as wire:
        served = 0
        for what, (manifest, expected) in ABUSE.items():
            answer = await wire.ask(http_request("POST", "/tools/register", _JSON, body=manifest))
            assert answer.status in (expected, 409), (what, answer)
            served += answer.status == 200 and expected != 200
        # The pattern is evaluated without backtracking, or not at all.
        slow = b'{"tool_name":"weather","request_id":"1","arguments":{"city":"%b!"}}' % (b"a" * 5_000)
        with trio.fail_after(PATIENCE):
            assert (await wire.ask(http_request("POST", "/tools/call", _JSON, body=slow))).status in (200, 422)
        await wire.ask(http_request("DELETE", "/tools/weather"))
        echo = b'{"tool_name":"echo","request_id":"1","arguments":{"text":"x"}}'
        assert (await wire.ask(http_request("POST", "/tools/call", _JSON, body=echo))).reply["result"] == "x"
    figure(17, f"of {len(ABUSE) - 1} abusive manifests, registered", served, 0, "", host)
    assert not served
