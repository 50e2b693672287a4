"""Promise 13: no server can exhaust, hang or mislead a client, and what dies is told to who waits for it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.guarantees.near import WAYS, near, reached
from tests.guarantees.report import figure
from tests.hostile.network import HOSTS, http
from tests.hostile.peers import MIB, forget_peak, grown, memory_of
from tests.hostile.server_for_attack import make_server
from tests.hostile.test_client import GARBAGE, TOO_LARGE, hostile
from tests.hostile.test_http_client import LIMIT, harmful_server, seen, session_with
from tests.transports.test_process import alive, descendants, tree
from trimcp.transports.http.client import Timeouts
from trimcp.transports.http.settings import Settings
from trimcp.transports.process import Patience
from trimcp.transports.websocket_client import WebSocketServer
from trimcp.wire.content import TextContent
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2025_11_25
from trimcp.wire.tools import CallToolResult

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", HOSTS)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a server is that means harm."""
    with harmful_server() as port:
        yield port


# What a server says is bounded

_ENDLESS = ["endless_body", "endless_event", "endless_line", "endless_head", "huge_length"]
_COMPRESSED = ["bomb", "bomb_of_bombs", "bomb_of_events"]


@pytest.mark.parametrize("way", [*_ENDLESS, *_COMPRESSED])
async def test_bodies_events_and_compressed_streams_are_bounded(port: int, way: str) -> None:
    async with session_with(port, way) as session:
        base = forget_peak()
        with pytest.raises((trimcp.InvalidReply, trimcp.ConnectionLost, trio.TooSlowError)):
            with trio.fail_after(20 if way in _COMPRESSED else 1):
                await session.call_tool("harm")
        spent = grown(base) / MIB
        what = "a compressed stream of 256 MiB" if way in _COMPRESSED else "a body, event or head without end"
        figure(13, f"spent on {what}, limit 4 MiB", spent, 4 * LIMIT / MIB, "MiB", f"http: {way}")
        assert spent <= 4 * LIMIT / MIB
        await session.call_tool("fine")


@pytest.mark.parametrize("way", ["ws_endless", "ws_fragments", "ws_pings", "ws_garbage"])
async def test_a_websocket_is_bounded(port: int, way: str) -> None:
    server = WebSocketServer(f"ws://127.0.0.1:{port}/{way}", max_message=LIMIT)
    base = forget_peak()
    with pytest.raises((trimcp.ConnectionLost, trio.TooSlowError)):
        with trio.fail_after(1):
            async with trimcp.Client("c").connect(server, revision=V2025_11_25):
                pass
    spent = grown(base) / MIB
    figure(13, "spent on a message without end, limit 4 MiB", spent, 4 * LIMIT / MIB, "MiB", f"websocket: {way}")
    assert spent <= 4 * LIMIT / MIB


async def test_the_stream_of_http_sse_is_bounded(port: int) -> None:
    base = forget_peak()
    with pytest.raises(trimcp.ConnectionLost):
        async with session_with(port, "sse_endless", mode="sse", timeouts=Timeouts(endpoint=1)):
            pass
    spent = grown(base) / MIB
    figure(13, "spent on an event without end, limit 4 MiB", spent, 4 * LIMIT / MIB, "MiB", "http+sse")
    assert spent <= 4 * LIMIT / MIB


async def test_a_childs_line_is_bounded() -> None:
    async with trimcp.Client("c").connect(hostile(TOO_LARGE)) as session:
        base = forget_peak()
        with pytest.raises(trimcp.InvalidReply, match="larger than 67,108,864 bytes"):
            await session.call_tool("x")
        spent = grown(base) / MIB
        figure(13, "spent on a line of 70 MiB, limit 64 MiB", spent, 128, "MiB", "stdio")
        assert spent <= 128
        assert session.session.lost is None


# Its schemas

_WITH_SCHEMAS = [way for way in WAYS if way != "http+sse"]  # its revision has no schemas of results
_EVIL = {
    "nested": "^(a+)+$",
    "alternatives": "^(a|aa)+$",
    "words": "^([a-z]+)*$",
    "ten levels": "^((((((((((a+)+)+)+)+)+)+)+)+)+)+$",
    "dots": "(.*.*.*.*.*.*.*.*.*.*)=$",
}


def _lying(schema: dict[str, Any], value: Any) -> trimcp.Server[None]:
    """A server with a tool whose results do not keep to its schema."""
    server: trimcp.Server[None] = trimcp.Server("liar")

    @server.tool(output_schema=schema)
    async def lie() -> dict[str, Any]:
        return {}

    @server.middleware
    async def instead(ctx: Any, params: Any, call_next: Any) -> Any:
        if ctx.method == "tools/call":
            return CallToolResult([TextContent("")], structured_content=value)
        return await call_next(ctx, params)

    return server


@pytest.mark.parametrize("way", _WITH_SCHEMAS)
async def test_no_pattern_in_a_schema_hangs_it(way: str) -> None:
    worst = 0.0
    for pattern in _EVIL.values():
        schema = {
            "type": "object",
            "properties": {"s": {"type": "string", "pattern": pattern}},
            "patternProperties": {pattern: {"type": "integer"}},
        }
        for count in (26, 5_000):
            lies = {"s": "a" * count + "!", "a" * count + "!": "x"}
            async with reached(_lying(schema, lies), way) as session:
                await session.list_tools()
                began = time.monotonic()
                with pytest.raises(trimcp.InvalidReply, match="broke its own output schema"):
                    await session.call_tool("lie")
                worst = max(worst, time.monotonic() - began)
    figure(13, "a reply against the worst of 5 patterns", worst, 1, "s", way)
    assert worst <= 4


@pytest.mark.parametrize("way", _WITH_SCHEMAS)
async def test_no_schema_makes_it_fetch_or_read_anything(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0
    file = tmp_path / "schema.json"
    file.write_text('{"not": {}}')  # which would refuse everything, were it read
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    with listener:
        for address in (f"http://127.0.0.1:{port}/schema.json", f"http://127.0.0.1:{port}/#/a", file.as_uri()):
            for schema in ({"$ref": address}, {"$dynamicRef": address}, {"$schema": address}, {"$id": address}):
                async with reached(_sending({"type": "object", **schema}), way) as session:
                    await session.list_tools()
                    await session.call_tool("lie")
        try:
            listener.accept()[0].close()
            asked += 1
        except BlockingIOError:
            pass
    assert figure(13, "schemas fetched", asked, 0, "", way) == 0
    assert "is unusable" in caplog.text


def _sending(schema: dict[str, Any]) -> trimcp.Server[None]:
    """A server that lists a tool with a schema that it would not have itself."""
    server = _lying({"type": "object"}, {"a": 1})
    [entry] = server.tools
    entry.tool = attrs.evolve(entry.tool, output_schema=schema)
    return server


# Its child


async def test_garbage_of_a_child_is_reported_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "trimcp"):
        async with trimcp.Client("c").connect(hostile(GARBAGE)) as session:
            await session.call_tool("x")
            reported = [each for each in caplog.messages if each.startswith("ignored: not a message")]
            figure(13, "lines of garbage that were not reported, of 2,001", 2_001 - len(reported), 0, "", "stdio")
            assert len(reported) == 2_001
            assert any("UTF-8" in each for each in reported)
            await session.call_tool("x")


_HANGING = f"""
import sys
sys.path.insert(0, {str(Path(trimcp.__file__).parent.parent)!r})
import subprocess, trimcp
from tests.hostile.server_for_attack import make_server
if "hold" in sys.argv:
    subprocess.Popen(["sleep", "30"])
trimcp.run_stdio(make_server())
"""


@pytest.mark.parametrize("how", ["killed", "killed, its pipes held by a descendant", "segmentation fault"])
async def test_a_childs_death_fails_pending_calls_within_a_second(how: str) -> None:
    target = trimcp.stdio(sys.executable, "-c", _HANGING, *(["hold"] if "held" in how else []))
    async with target.connect() as channel, trimcp.Client("c").connect(channel) as session:
        number = signal.SIGSEGV if "fault" in how else signal.SIGKILL
        took = await until_all_failed(session, lambda: os.kill(channel.process.pid, number))
    assert figure(13, "a child's death, until all calls failed", took, 1, "s", how) <= 4


async def until_all_failed(session: trimcp.ClientSession, end: Callable[[], None]) -> float:
    """End a connection under twenty calls, and return the seconds until the last of them has failed."""
    failed: list[float] = []

    async def call() -> None:
        with pytest.raises(trimcp.ConnectionLost):
            await session.call_tool("hang")
        failed.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(call)
        await session.call_tool("echo")
        began = trio.current_time()
        end()
    assert len(failed) == 20
    return max(failed) - began


_FAMILIES = [("deaf",), ("deaf", "setsid"), ("deaf", "group", "setsid"), ("deaf", "forgotten")]


async def test_stubborn_children_and_their_descendants_are_gone_within_five_seconds() -> None:
    took: dict[str, float] = {}
    left: list[int] = []

    async def raise_and_leave(what: tuple[str, ...]) -> None:
        async with tree(*what, patience=Patience()).connect() as channel:
            family = await descendants(channel)
            began = trio.current_time()
        took["+".join(what)] = trio.current_time() - began
        left.extend(pid for pid in [*family, channel.process.pid] if alive(pid))

    async with trio.open_nursery() as nursery:
        for what in _FAMILIES:
            nursery.start_soon(raise_and_leave, what)
    for name, seconds in took.items():
        figure(13, "a stubborn child and its descendants, until they are gone", seconds, 5, "s", name)
    assert not left
    assert max(took.values()) <= 4 * 5


# Connections that are cut


@attrs.define(eq=False)
class Cutter:
    """Stands between a client and a server, and cuts a connection in the middle of what the server says."""

    to: int
    nursery: trio.Nursery
    mark: bytes = b"cut here"
    cuts: int = 0
    streams: set[trio.SocketStream] = attrs.field(factory=set)

    async def serve(self, ours: trio.SocketStream) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", self.to) as theirs, trio.open_nursery() as nursery:
            self.streams |= {ours, theirs}
            nursery.start_soon(self._pass, ours, theirs, False)
            nursery.start_soon(self._pass, theirs, ours, True)
        self.streams -= {ours, theirs}

    async def _pass(self, source: trio.SocketStream, sink: trio.SocketStream, cutting: bool) -> None:
        try:
            async for data in source:
                if cutting and (at := data.find(self.mark)) >= 0:
                    self.cuts += 1
                    await sink.send_all(data[:at])
                    break
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            source.socket.close()
            sink.socket.close()

    def cut_all(self) -> None:
        for stream in list(self.streams):
            stream.socket.close()


@asynccontextmanager
async def cutting(host: str, **options: Any) -> AsyncIterator[tuple[Cutter, int]]:
    """A server that can be reached through a cutter at a port."""
    async with near(host, make_server(), **options) as server, trio.open_nursery() as nursery:
        cutter = Cutter(int(server.url.rpartition(":")[2].partition("/")[0]), nursery)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, cutter.serve, listeners)
        yield cutter, listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


@OnBoth
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
@pytest.mark.parametrize("reply", ["json", "sse"])
async def test_one_cut_reply_does_not_end_the_connection(host: str, revision: Any, reply: Any) -> None:
    lost = 0
    settings = Settings(reply=reply, resumable=False)
    async with cutting(host, settings=settings) as (cutter, port):
        target = trimcp.http(f"http://127.0.0.1:{port}/mcp")
        client = trimcp.Client("c")
        async with client.connect(target, revision=revision) as session, trio.open_nursery() as nursery:
            beside = trio.Event()

            async def wait() -> None:
                await session.call_tool("wait", {"gate": "g"})
                beside.set()

            nursery.start_soon(wait)
            for n in range(5):
                with pytest.raises(trimcp.ConnectionLost):
                    await session.call_tool("echo", {"text": "cut here"})
                try:
                    await session.call_tool("echo", {"text": f"after cut {n}"})
                except trimcp.McpError:
                    lost += 1
            await session.call_tool("open", {"gate": "g"})
            await beside.wait()
        assert cutter.cuts == 5
    figure(13, "calls lost beside and after 5 cut replies", lost, 0, "", f"{host}, {revision.name}, {reply}")
    assert not lost


@OnBoth
@pytest.mark.parametrize("way", ["websocket", "http+sse"])
async def test_a_cut_connection_fails_pending_calls_at_once(host: str, way: str) -> None:
    async with cutting(host) as (cutter, port):
        target: Any = trimcp.websocket(f"ws://127.0.0.1:{port}/ws")
        if way == "http+sse":
            target = trimcp.http(f"http://127.0.0.1:{port}/sse", mode="sse")
        async with trimcp.Client("c").connect(target, revision=LATEST_LEGACY) as session:
            took = await until_all_failed(session, cutter.cut_all)
    assert figure(13, "a cut connection, until all calls failed", took, 1, "s", f"{host}, {way}") <= 4


# Sessions that are forgotten


@OnBoth
async def test_after_a_404_for_its_session_it_initializes_once_more(host: str) -> None:
    hellos = 0
    known: list[str] = []

    def listening(head: Any, body: bytes) -> None:
        nonlocal hellos
        hellos += b'"initialize"' in body
        known.append(head.headers.get("mcp-session-id", ""))

    async with near(host, make_server(), settings=Settings(dialects=(listening,))) as server:
        client = trimcp.Client("c")
        async with client.connect(trimcp.http(server.url), revision=LATEST_LEGACY) as session:
            await session.call_tool("echo")
            for _ in range(3):
                before = hellos
                async with server.wire() as wire:
                    ended = await wire.ask(http("DELETE", "/mcp", f"Mcp-Session-Id: {known[-1]}"))
                    assert ended.status == 200
                async with trio.open_nursery() as nursery:
                    for n in range(10):
                        nursery.start_soon(session.call_tool, "echo", {"text": str(n)})
                again = figure(13, "hellos after a 404 to ten calls at once", hellos - before, 1, "", host)
                assert again == 1


async def test_a_server_that_never_knows_its_sessions_is_not_asked_for_ever(port: int) -> None:
    before = (await seen(port)).get("initialize", 0)
    async with session_with(port, "not_found") as session:
        for _ in range(20):
            with pytest.raises(trimcp.ConnectionLost):
                await session.call_tool("harm")
        await session.call_tool("fine")
    hellos = (await seen(port))["initialize"] - before
    assert figure(13, "hellos to a server that answers 20 calls with 404", hellos, 3, "", "http") <= 3


def test_memory_is_read() -> None:
    assert memory_of(os.getpid()) > MIB
