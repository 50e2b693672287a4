"""Promise 14: who leaves is one line at DEBUG; a crash is one ERROR, and its caller learns nothing of it."""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.client_side import EVERY_ROAD, asked_by_hand
from tests.guarantees.near import near
from tests.guarantees.report import figure
from tests.guarantees.worlds import LOCAL, Homes, World
from tests.hostile.server_for_attack import make_server
from tests.peers.clients import ROADS, DirectPeer, on, open_session
from tests.peers.http1 import HttpWire, http_request, post
from tests.peers.http2 import grpc_call
from tests.peers.messages import call, initialize, modern_request, request
from tests.peers.processes import ChildServer, child_server
from tests.peers.serving import ON_EACH, ServedHere
from tests.peers.websockets import close, message
from trimcp.errors import McpError
from trimcp.framing.grpc import json_rpc_header
from trimcp.transports.grpc.channel import EXCHANGE
from trimcp.transports.http.h2.frames import Code, rst_stream
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision

pytestmark = pytest.mark.slow
OnEach = pytest.mark.parametrize("host", ON_EACH)

_EVENTS = "Accept: text/event-stream"
_RESET = struct.pack("ii", 1, 0)


@attrs.define(eq=False)
class Log:
    """What was logged since it was asked last, by anybody."""

    caplog: pytest.LogCaptureFixture

    @property
    def ours(self) -> list[str]:
        """Lines of trimcp's, but those on calls that end with their caller: one for each."""
        return [
            record.getMessage()
            for record in self.caplog.records
            if record.name.startswith("trimcp") and " is cancelled: " not in record.getMessage()
        ]

    @property
    def loud(self) -> list[str]:
        """Lines above DEBUG, of whomever."""
        return [f"{each.name}: {each.getMessage()}" for each in self.caplog.records if each.levelno > logging.DEBUG]

    def forget(self) -> None:
        self.caplog.clear()

    async def settle(self, server: ServedHere) -> None:
        """Give it time to be said: somebody comes, is served, and goes without a line."""
        with trio.move_on_after(PATIENCE):
            while not self.ours:  # noqa: ASYNC110  # nobody tells when a line was written
                await trio.sleep(0.01)
        for _ in range(5):
            async with server.wire() as wire:
                assert (await wire.ask(http_request("GET", "/healthz"))).status == 200
            await trio.sleep(0.02)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.DEBUG)
    return Log(caplog)


# Leaving

_HANG = request(1, "tools/call", name="hang", arguments={})
_HANG_NOW = modern_request(1, "tools/call", name="hang", arguments={})
_STREAM = modern_request(
    1, "tools/call", name="stream", arguments={"count": 10**6, "size": 1000}, _meta={"progressToken": 1}
)


async def _vanish(wire: HttpWire, reset: bool) -> None:
    if reset:
        wire.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    await trio.aclose_forcefully(wire.stream)


async def _of_a_post(
    server: ServedHere, log: Log, text: bytes, reset: bool = False, session: str | None = None
) -> None:
    async with server.wire() as wire:
        await wire.send(post(text, session=session))
        await server.at_work()
        log.forget()
        await _vanish(wire, reset)
    await log.settle(server)


async def _with_a_call(server: ServedHere, log: Log) -> None:
    await _of_a_post(server, log, _HANG_NOW)


async def _with_a_reset(server: ServedHere, log: Log) -> None:
    await _of_a_post(server, log, _HANG_NOW, True)


async def _in_the_middle_of_a_stream(server: ServedHere, log: Log) -> None:
    async with server.wire() as wire:
        await wire.send(post(_STREAM))
        assert (await wire.head()).status == 200
        log.forget()
        await _vanish(wire, False)
    await log.settle(server)


async def _with_a_call_of_a_session(server: ServedHere, log: Log) -> None:
    await _of_a_post(server, log, _HANG, session=await open_session(server))


async def _from_the_stream_of_a_session(server: ServedHere, log: Log) -> None:
    session = await open_session(server)
    async with server.wire() as wire:
        await wire.send(http_request("GET", "/mcp", _EVENTS, f"Mcp-Session-Id: {session}"))
        assert (await wire.head()).status == 200
        log.forget()
    await log.settle(server)


async def _from_http_sse(server: ServedHere, log: Log) -> None:
    async with on(server, "sse") as lane:
        await lane.exchanged(lane.call(1, "hang"))
        log.forget()
        await trio.aclose_forcefully(lane.stream.stream)
        await log.settle(server)


async def _from_a_websocket(server: ServedHere, log: Log, *, reset: bool = False, said: bytes = b"") -> None:
    async with on(server, "websocket", receive_buffer=65_536) as lane:
        await lane.raw.say(message(lane.call(1, "hang")))
        await lane.ask(2, "echo")
        log.forget()
        if said:
            await lane.raw.say(said)
            await lane.raw.close_code()
        else:
            lane.raw.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET if reset else bytes(8))
        await trio.aclose_forcefully(lane.raw.stream)
        await log.settle(server)


async def _from_a_websocket_with_a_reset(server: ServedHere, log: Log) -> None:
    await _from_a_websocket(server, log, reset=True)


async def _from_a_websocket_politely(server: ServedHere, log: Log) -> None:
    await _from_a_websocket(server, log, said=close(1000))


_LEAVINGS: dict[str, Callable[[ServedHere, Log], Awaitable[None]]] = {
    "http 2026, a call under way": _with_a_call,
    "http 2026, reset": _with_a_reset,
    "http 2026, in a stream": _in_the_middle_of_a_stream,
    "http 2025, a call under way": _with_a_call_of_a_session,
    "http 2025, its stream": _from_the_stream_of_a_session,
    "http+sse": _from_http_sse,
    "websocket, cut": _from_a_websocket,
    "websocket, reset": _from_a_websocket_with_a_reset,
    "websocket, closed": _from_a_websocket_politely,
}


def one_line(said: list[str], loud: list[str], on: str) -> None:
    """What is logged of who leaves: one line at DEBUG, none above it."""
    figure(14, "lines at DEBUG of who leaves", len(said), 1, "", on)
    figure(14, "lines above DEBUG of who leaves", len(loud), 0, "", on)
    assert len(said) == 1, said
    assert loud == []


@OnEach
@pytest.mark.parametrize("kind", _LEAVINGS)
async def test_who_leaves_is_one_line_at_debug(host: str, kind: str, log: Log) -> None:
    async with near(host) as server:
        await _LEAVINGS[kind](server, log)
        said, loud = log.ours, log.loud
    one_line(said, loud, f"{host}, {kind}")


@pytest.mark.parametrize("reset", [False, True], ids=["cut", "reset"])
async def test_who_leaves_a_call_of_grpc_is_one_line_at_debug(reset: bool, log: Log) -> None:
    said = [initialize("2025-11-25"), _HANG]
    opened = grpc_call(EXCHANGE, *(json_rpc_header(len(text)) + text for text in said))
    async with near("own") as server, server.wire() as wire:
        await wire.send(opened)
        await server.at_work()
        log.forget()
        if reset:
            await wire.send(rst_stream(1, Code.CANCEL))
        else:
            await _vanish(wire, False)
        await log.settle(server)
        said_of_it, loud = log.ours, log.loud
    one_line(said_of_it, loud, f"own, grpc, {'reset' if reset else 'cut'}")


@OnEach
async def test_who_wanted_nothing_more_is_none(host: str, log: Log) -> None:
    async with near(host) as server:
        log.forget()
        async with server.wire() as wire:
            assert (await wire.ask(http_request("GET", "/healthz"))).status == 200
        await log.settle(server) if log.ours else await trio.sleep(0.1)
        assert (log.ours, log.loud) == ([], [])


@pytest.mark.parametrize("world", LOCAL, ids=str)
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_who_leaves_in_this_process_is_one_line(homes: Homes, world: World, busy: bool, log: Log) -> None:
    async with homes(world) as home:
        assert home.running is not None
        async with home.peer() as peer:
            if busy:
                await peer.say(peer.call(1, "hang"))
            await peer.ask(2, "echo")
            log.forget()
            if isinstance(peer, DirectPeer):
                peer.closed.set()  # as a session that leaves does first, so that it is not told of itself
        with trio.fail_after(PATIENCE):
            while home.running.sessions:  # noqa: ASYNC110  # nobody tells when a session has ended
                await trio.sleep(0.001)
        said, loud = log.ours, log.loud
    figure(14, "lines at DEBUG of who leaves", len(said), 1, "", f"{world}, {'busy' if busy else 'idle'}")
    assert len(said) == 1, said
    assert loud == []


_LOUD = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, format="%(levelname)s|%(name)s|%(message)s")
from tests.hostile.server_for_attack import main
main({})
"""


async def _logged_by_a_child(talk: Callable[[ChildServer], Awaitable[None]], tmp_path: Path) -> list[list[str]]:
    """Talk to a server as a child, and return what it logged at DEBUG and above, line by line."""
    program = tmp_path / "loud.py"
    program.write_text(_LOUD)
    async with child_server(program=program) as child:
        await child.meet()
        await talk(child)
        if child.process.returncode is None:
            assert await child.end() == 0
    return [line.split("|") for line in child.errors.decode().splitlines()]


@pytest.mark.parametrize("how", ["with nothing under way", "with a call under way", "without reading"])
async def test_who_leaves_a_childs_pipes_is_one_line(how: str, tmp_path: Path) -> None:
    async def talk(child: ChildServer) -> None:
        if how == "with a call under way":
            await child.say(call(1, "hang"), call(2, "echo"))
            await child.answer(2)
        elif how == "without reading":
            assert child.process.stdout is not None
            assert child.process.stdin is not None
            await child.say(call(1, "hang"), call(2, "echo"))
            await child.answer(2)
            await child.process.stdout.aclose()
            await child.process.stdin.aclose()
            assert await child.process.wait() == 0

    lines = await _logged_by_a_child(talk, tmp_path)
    ours = [line for line in lines if line[1].startswith("trimcp") and " is cancelled: " not in line[2]]
    loud = [line for line in lines if line[0] != "DEBUG"]
    figure(14, "lines at DEBUG of who leaves", len(ours), 1, "", f"stdio, {how}")
    figure(14, "lines above DEBUG of who leaves", len(loud), 0, "", f"stdio, {how}")
    assert len(ours) == 1, lines
    assert loud == []


# Crashing

_SECRETS = ("secret", "Traceback", "RuntimeError", "server_for_attack", ".py")


def _crashing() -> trimcp.Server[None]:
    server = make_server()

    @server.tool
    def crash_in_thread() -> str:
        raise RuntimeError("secret of the handler")

    @server.resource("crash://{name}")
    async def crash_of(name: str) -> str:
        raise RuntimeError("secret of the handler")

    @server.prompt
    async def crash_too() -> str:
        raise RuntimeError("secret of the handler")

    return server


_CRASHES: dict[str, tuple[str, dict[str, Any]]] = {
    "a tool": ("tools/call", {"name": "crash", "arguments": {}}),
    "a tool in a thread": ("tools/call", {"name": "crash_in_thread", "arguments": {}}),
    "a resource": ("resources/read", {"uri": "crash://x"}),
    "a prompt": ("prompts/get", {"name": "crash_too"}),
}


def _one_error(records: list[logging.LogRecord]) -> int:
    """Assert that there is one ERROR with a traceback and nothing else that is loud; return how many there are."""
    loud = [each for each in records if each.levelno > logging.DEBUG]
    assert [each.levelname for each in loud] == ["ERROR"], loud
    assert "secret of the handler" in logging.Formatter().format(loud[0])
    assert "Traceback" in logging.Formatter().format(loud[0])
    return len(loud)


@OnEach
@pytest.mark.parametrize("road", ROADS)
async def test_a_crash_is_one_error_and_its_caller_learns_nothing(host: str, road: str, log: Log) -> None:
    async with near(host, _crashing()) as server, on(server, road) as lane:
        for name, (method, params) in _CRASHES.items():
            log.forget()
            text = (modern_request if lane.modern else request)(1, method, **params)
            _, answer = await lane.put(text)
            assert answer["error"] == {"code": -32603, "message": "internal error"}
            assert not any(secret in str(answer) for secret in _SECRETS)
            many = _one_error(log.caplog.records)
            figure(14, "lines above DEBUG of a crash", many, 1, "", f"{host}, {road}, {name}")


@pytest.mark.parametrize("framed", [False, True], ids=["direct", "framed"])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_a_crash_in_this_process_is_one_error(framed: bool, revision: Revision, log: Log) -> None:
    target = trimcp.in_process(_crashing(), framed=framed)
    async with trimcp.Client("c").connect(target, revision=revision) as session:
        for name in ("crash", "crash_in_thread"):
            log.forget()
            with pytest.raises(McpError) as failure:
                await session.call_tool(name)
            assert not any(secret in str(failure.value) for secret in _SECRETS)
            many = _one_error(log.caplog.records)
            figure(14, "lines above DEBUG of a crash", many, 1, "", f"memory {revision.name}, {framed=}, {name}")


@pytest.mark.parametrize("modern", [False, True], ids=["2025", "2026"])
async def test_a_crash_in_a_child_is_one_error(modern: bool, tmp_path: Path) -> None:
    async def talk(child: ChildServer) -> None:
        await child.say((modern_request if modern else request)(1, "tools/call", name="crash", arguments={}))
        answer = await child.answer(1)
        assert answer["error"] == {"code": -32603, "message": "internal error"}

    lines = await _logged_by_a_child(talk, tmp_path)
    loud = [line for line in lines if line[0] not in ("DEBUG",) and len(line) == 3]
    figure(14, "lines above DEBUG of a crash", len(loud), 1, "", f"stdio {'2026' if modern else '2025'}")
    assert [line[0] for line in loud] == ["ERROR"]
    text = "\n".join("|".join(line) for line in lines)
    assert text.count("Traceback") == 1
    assert text.count("RuntimeError: secret of the handler") == 1
    assert sys.platform == "linux" or text


# The client's side: servers leave, and its handlers crash


@pytest.mark.parametrize("road", [road for road in EVERY_ROAD if road not in ("http events", "http json")])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_server_that_leaves_is_one_line_at_debug(road: str, busy: bool, tmp_path: Path, log: Log) -> None:
    async with asked_by_hand(road, trimcp.Client("c"), tmp_path) as (session, server), trio.open_nursery() as nursery:
        if busy:

            async def call() -> None:
                with pytest.raises(trimcp.ConnectionLost):
                    await session.call_tool("x")

            nursery.start_soon(call)
            await server.called()
        log.forget()
        await server.leave()
        with trio.fail_after(PATIENCE):
            while session.session.lost is None:  # noqa: ASYNC110  # sockets are between
                await trio.sleep(0.01)
        await trio.sleep(0.05)
        said, loud = log.ours, log.loud
    one_line(said, loud, f"{road}, {'busy' if busy else 'idle'}, a client")


@pytest.mark.parametrize("road", EVERY_ROAD)
async def test_a_crash_in_a_client_is_one_error_and_its_server_learns_nothing(
    road: str, tmp_path: Path, log: Log
) -> None:
    client = trimcp.Client("c")

    @client.sampling
    async def sample(params: trimcp.CreateMessageParams) -> str:
        raise RuntimeError("secret of the handler")

    async with asked_by_hand(road, client, tmp_path) as (_, server):
        log.forget()
        await server.say(request(1, "sampling/createMessage", messages=[], maxTokens=9))
        answer = await server.hear()
        assert (answer["error"]["code"], answer["error"]["message"]) == (-32603, "internal error")
        assert not any(secret in str(answer) for secret in _SECRETS)
        many = _one_error(log.caplog.records)
    figure(14, "lines above DEBUG of a crash", many, 1, "", f"{road}, a client")
