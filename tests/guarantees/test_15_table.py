"""Promise 15, what strangers make a server keep of them: their handshakes, and a table that one address cannot fill."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, suppress

import orjson
import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.guarantees.report import figure
from tests.guarantees.worlds import Homes
from tests.peers.http1 import Answer, http_request
from tests.peers.http2 import FramePeer, request_fields
from tests.peers.messages import request
from tests.peers.processes import KIB, MIB
from tests.peers.servers import ServerProcess
from tests.peers.serving import ON_EACH, SOFTWARE
from tests.peers.websockets import message, upgrade
from tests.stopwatch import Stopwatch
from trimcp.budget import LITTLE
from trimcp.session.limits import Limits
from trimcp.wire.revisions import LATEST_LEGACY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the server is looked into by way of /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)
OnEach = pytest.mark.parametrize("host", ON_EACH)

_BOTH = "Accept: application/json, text/event-stream"


def _said(name: str) -> bytes:
    info = {"name": name, "version": "1"}
    revision = LATEST_LEGACY.name
    return request(1, "initialize", protocolVersion=revision, capabilities={}, clientInfo=info)


def _hello(name: str = "stranger") -> bytes:
    return http_request("POST", "/mcp", "Content-Type: application/json", _BOTH, body=_said(name))


def _ping(begun: Answer) -> bytes:
    lines = ("Content-Type: application/json", _BOTH, f"Mcp-Session-Id: {begun.headers['mcp-session-id']}")
    return http_request("POST", "/mcp", *lines, body=request(2, "ping"))


# Handshakes


@OnEach
async def test_large_handshakes_are_not_kept(homes: Homes, host: str) -> None:
    many, large = 30, _hello("x" * 4_000_000)
    async with homes.pool(host) as server:
        await server.warm()
        base = await server.kept()
        async with server.wire() as wire:
            errors = [(await wire.ask(large)).reply["error"] for _ in range(many)]
        assert {(error["code"], error["data"]["most"]) for error in errors} == {(-32602, Limits().max_client_info)}
        kept = (await server.kept() - base) / MIB
    assert figure(15, f"kept of {many} handshakes of 4 MB", kept, 8, "MiB", f"http {host}") <= 8


@OnEach
async def test_large_handshakes_are_not_kept_by_websockets_that_stay(homes: Homes, host: str) -> None:
    many, large = 30, message(_said("x" * 4_000_000))
    async with homes.pool(host) as server, AsyncExitStack() as stack:
        await server.warm()
        base = await server.kept()
        for _ in range(many):
            sock = await upgrade(await stack.enter_async_context(server.wire()))
            await sock.say(large)
            _, said = await sock.hear()
            assert orjson.loads(said)["error"]["code"] == -32602
        kept = (await server.kept() - base) / MIB
        await stack.aclose()
    assert figure(15, f"kept of {many} handshakes of 4 MB", kept, 8, "MiB", f"websocket {host}") <= 8


@OnEach
async def test_the_largest_handshakes_that_are_taken_cost_what_they_may(homes: Homes, host: str) -> None:
    many, most = 200, Limits().max_client_info
    async with homes.pool(host) as server:
        await server.warm()
        base = await server.kept()
        async with server.wire() as wire:  # no two the same, so that nothing could be shared
            begun = [await wire.ask(_hello(f"{n:06}" + "x" * (most - 2_000))) for n in range(many)]
        each = (await server.kept() - base) / many / KIB
        await _end(server, begun)
    bound = 20 + most / KIB
    what = "kept for an idle session whose client says all it may of itself"
    assert figure(15, what, each, bound, "KiB", host) <= bound


# The table


@OnEach
@pytest.mark.parametrize("used", [False, True], ids=["never used", "used once"])
async def test_one_address_does_not_fill_the_table(homes: Homes, host: str, used: bool) -> None:
    most, more = 300, 100
    async with homes.pool(host, max_sessions=most) as server:
        honest = await _begun(server, "127.0.0.2")
        begun = []
        async with server.wire(source="127.0.0.1") as wire:
            for _ in range(most + more):
                begun.append(await wire.ask(_hello()))
                if used and begun[-1].status == 200:
                    assert (await wire.ask(_ping(begun[-1]))).status == 200
        statuses = [answer.status for answer in begun]
        assert statuses == ([200] * (most - 1) + [503] * (more + 1) if used else [200] * (most + more))
        clock = Stopwatch((server.process.pid,))
        newcomer = await _begun(server, "127.0.0.3")
        took = clock.took()
        async with server.wire() as wire:
            for answer in (honest, newcomer):
                assert (await wire.ask(_ping(answer))).status == 200
        assert (await server.counts())["sessions"] == most
        await _end(server, [honest, newcomer, *begun])
    what = "a newcomer gets a session although one address has filled the table, within"
    figure(15, what, took, 1, "s", f"{host}, {'used' if used else 'never used'}")
    assert took <= 4


@OnBoth
@pytest.mark.parametrize("what", ["idle", "websockets"])
async def test_one_address_does_not_take_all_connections(homes: Homes, host: str, what: str) -> None:
    most = 40
    healthy = http_request("GET", "/healthz")
    async with homes.pool(host, limits={"max_connections": most}) as server:
        async with AsyncExitStack() as stack:
            honest = await stack.enter_async_context(server.wire(source="127.0.0.2"))
            assert (await honest.ask(healthy)).status == 200
            for _ in range(most - 1):
                wire = await stack.enter_async_context(server.wire(source="127.0.0.1"))
                if what == "websockets":
                    await upgrade(wire)
                else:
                    assert (await wire.ask(healthy)).status == 200
            clock = Stopwatch((server.process.pid,))
            newcomer = await stack.enter_async_context(server.wire(source="127.0.0.3"))
            assert (await newcomer.ask(healthy)).status == 200
            took = clock.took()
            assert (await honest.ask(healthy)).status == 200
        await _is_at_rest(server)
        # Whoever asks may come before the server has noticed that the others have left.
        assert server.errors in (b"", b"WARNING trimcp.http: 40 connections are open; more have to wait\n")
        server.log.seek(0)
        server.log.truncate()
    figure(
        15, "a newcomer is served although one address holds all connections, within", took, 1, "s", f"{host}, {what}"
    )
    assert took <= 4


async def _is_at_rest(server: ServerProcess) -> None:
    """Wait until the server has noticed that all connections have ended; so long it may be too full to be asked."""
    with trio.fail_after(PATIENCE):
        while True:
            with suppress(EOFError, trio.BrokenResourceError):
                if await server.counts() == server.base:
                    return
            await trio.sleep(0.05)


async def _begun(server: ServerProcess, source: str) -> Answer:
    """Begin a session from an address, and use it."""
    async with server.wire(source=source) as wire:
        answer = await wire.ask(_hello())
        assert answer.status == 200
        assert (await wire.ask(_ping(answer))).status == 200
        return answer


async def _end(server: ServerProcess, begun: list[Answer]) -> None:
    async with server.wire() as wire:
        for answer in begun:
            if id := answer.headers.get("mcp-session-id"):
                await wire.ask(http_request("DELETE", "/mcp", f"Mcp-Session-Id: {id}"))


# Connections of HTTP/2


async def test_idle_connections_of_http2_keep_little_of_what_was_said(homes: Homes) -> None:
    """Each has sent requests with headers of its own, many and small, which connections remember."""
    many, each, bound = 100, 24, 20 + LITTLE / KIB
    async with homes.pool("own") as server, AsyncExitStack() as stack:
        await server.warm()

        async def say_much(number: int) -> None:
            wire = await stack.enter_async_context(server.wire())
            peer = FramePeer(wire.stream)
            await peer.start()
            for n in range(each):
                fields = [(f"x-{number}-{n}-{k}", "1") for k in range(60)]
                head = peer.head(request_fields("/healthz", "GET", fields), plain=True)
                await peer.send(head + peer.head(fields, stream=peer.last, end=True, plain=True))
                assert (await peer.answer(peer.last)).status == 200

        for number in range(10):  # what is imported for the first ones is nobody's
            await say_much(number)
        base = await server.kept()
        for number in range(10, 10 + many):
            await say_much(number)
        spent = (await server.kept() - base) / many / KIB
    what = f"memory for each of {many} idle connections that said much"
    assert figure(15, what, spent, bound, "KiB", "http/2") <= bound
