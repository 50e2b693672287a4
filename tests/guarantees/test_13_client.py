"""Promise 13: no server can exhaust, hang or mislead a client, and what dies is told to who waits for it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.guarantees.harm import (
    GARBAGE,
    LARGE_LOGS,
    LARGE_PROGRESS,
    LIMIT,
    PROGRESS,
    TOO_LARGE,
    OnEngines,
    a_client,
    hostile,
    seen,
    session_with,
)
from tests.guarantees.near import near
from tests.guarantees.report import figure
from tests.hostile.server_for_attack import make_server
from tests.peers.http1 import http_request
from tests.peers.processes import KIB, MIB, forget_peak, grown, memory_of
from tests.peers.relay import Relay, relayed
from tests.peers.serving import IN_MEMORY, NETWORK, SOFTWARE, connected, served
from tests.stopwatch import Stopwatch
from tests.transports.stdio.test_ending import alive, descendants, tree
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.http.settings import HttpSettings
from trimcp.transports.stdio.child import ShutdownTimes
from trimcp.transports.websocket.client import WebSocketServer
from trimcp.wire.content import TextContent
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2025_11_25
from trimcp.wire.tools import CallToolResult

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)


# What a server says is bounded

_TOO_LARGE = (trimcp.InvalidReply, "larger than 4,194,304 bytes")
_TOO_MUCH = (trimcp.ConnectionLost, "buffer too long|more than 102,400 bytes")
_ENDED = (trimcp.ConnectionLost, "ended before the answer")
_HARMS: dict[str, tuple[type[Exception], str]] = {
    "endless_body": _TOO_LARGE,
    "huge_length": _TOO_LARGE,
    "bomb": _TOO_LARGE,
    "bomb_of_bombs": (trimcp.ConnectionLost, "compressed its reply with 'gzip, gzip'"),
    "bomb_of_events": _ENDED,
    "endless_head": _TOO_MUCH,
    "endless_status": _TOO_MUCH,
    "endless_trailers": _TOO_MUCH,
    "endless_extension": _TOO_MUCH,
    "many_headers": (trimcp.ConnectionLost, "buffer too long|more than 1,000 headers"),
    "elsewhere": (trimcp.ConnectionLost, "points to 'http://127.0.0.2:[0-9]+', where nothing is sent"),
    "around": (trimcp.ConnectionLost, "308 Permanent Redirect"),
    "page": (trimcp.InvalidReply, "content type 'text/html'"),
    "garbage": (trimcp.InvalidReply, "not valid UTF-8"),
    "other_id": (trimcp.InvalidReply, "something else than asked"),
    "nothing": (trimcp.InvalidReply, "no result"),
    "not_found": (trimcp.ConnectionLost, "404"),
    "later": (trimcp.Overloaded, "503"),
    "much_later": (trimcp.Overloaded, "429"),
    "cut": _ENDED,
}
_FOREVER = ("endless_event", "endless_line", "endless_beginning", "endless_extensions", "drip", "again_and_again")
_COMPRESSED = "a compressed stream of 256 MiB"
_ENDLESS = "a body, event or head without end"
_MEASURED = {
    **dict.fromkeys(("bomb", "bomb_of_bombs", "bomb_of_events"), _COMPRESSED),
    **dict.fromkeys(("endless_body", "endless_event", "endless_line", "endless_head", "huge_length"), _ENDLESS),
    **dict.fromkeys(("endless_status", "endless_trailers", "endless_extension", "endless_extensions"), _ENDLESS),
    **dict.fromkeys(("endless_tiny_chunks", "tiny_chunks", "many_headers"), "thousands of headers or chunks"),
}


def bounded(way: str, engine: str, spent: int) -> None:
    """Assert that a call cost no more than four times the limit."""
    what = _MEASURED.get(way, "anything else that is no answer")
    figure(13, f"spent on {what}, limit 4 MiB", spent / MIB, 4 * LIMIT / MIB, "MiB", f"http, {engine}: {way}")
    assert spent <= 4 * LIMIT


@OnEngines
@pytest.mark.parametrize("way", _HARMS)
async def test_a_call_that_is_harmed_fails_clearly_and_alone(port: int, engine: str, way: str) -> None:
    error, why = _HARMS[way]
    async with session_with(port, way, engine) as session:
        base = forget_peak()
        with pytest.raises(error, match=why):
            await session.call_tool("harm")
        bounded(way, engine, grown(base))
        await session.call_tool("fine")
    assert "away" not in await seen(port), "nothing goes to another origin"


async def test_chunks_of_one_byte_cost_little(port: int) -> None:
    """Only on our own engine: httpx2 takes a minute for a few megabytes of them, and keeps to the same bounds."""
    async with session_with(port, "tiny_chunks") as session:
        base = forget_peak()
        result = await session.call_tool("harm")
        assert result.content == [TextContent("x" * MIB)]
        bounded("tiny_chunks", "own", grown(base))
    async with session_with(port, "endless_tiny_chunks") as session:
        base = forget_peak()
        error, why = _TOO_LARGE
        with pytest.raises(error, match=why):
            await session.call_tool("harm")
        bounded("endless_tiny_chunks", "own", grown(base))
        await session.call_tool("fine")


@OnEngines
@pytest.mark.parametrize("way", _FOREVER)
async def test_a_call_that_never_ends_ends_with_its_time(port: int, engine: str, way: str) -> None:
    before = (await seen(port)).get("GET", 0)
    async with session_with(port, way, engine) as session:
        base = forget_peak()
        # Our own engine counts what stands before a reply.
        counted = engine == "own" and way == "endless_beginning"
        with pytest.raises(trimcp.ConnectionLost if counted else trio.TooSlowError):
            with trio.fail_after(1):
                await session.call_tool("harm")
        bounded(way, engine, grown(base))
        await session.call_tool("fine")
    assert (await seen(port))["GET"] - before <= 250, "no more than a hundred a second"


@OnEngines
async def test_an_answer_counts_though_its_stream_goes_on(port: int, engine: str) -> None:
    async with session_with(port, "no_end", engine) as session:
        clock = Stopwatch(())
        for _ in range(3):
            await session.call_tool("harm")
        assert clock.took() <= 3 * 4 * 0.5


async def test_cookies_without_number_are_not_kept(port: int) -> None:
    async with session_with(port, "cookies") as session:
        for _ in range(10):
            await session.call_tool("harm")
        base = forget_peak()
        for _ in range(40):
            await session.call_tool("harm")
        print(f"2,000 cookies of a kilobyte: {grown(base) / KIB:.0f} KiB")
        assert grown(base) <= 1 * MIB
    assert "too many cookies" not in await seen(port)


async def test_questions_without_number_cost_bounded_memory(port: int) -> None:
    """What they delay is this server's own: each is answered with a POST, in order."""
    async with session_with(port, "pings") as session:
        base = forget_peak()
        with trio.move_on_after(1):
            await session.call_tool("harm")
        print(f"pings for a second: {grown(base) / MIB:.1f} MiB")
        assert grown(base) <= 24 * MIB


@pytest.mark.parametrize(
    ("way", "why"), [("ws_endless", "1009"), ("ws_fragments", None), ("ws_pings", None), ("ws_garbage", None)]
)
async def test_a_websocket_is_bounded(port: int, way: str, why: str | None) -> None:
    server = WebSocketServer(f"ws://127.0.0.1:{port}/{way}")
    base = forget_peak()
    error = trimcp.ConnectionLost if why else trio.TooSlowError
    with pytest.raises(error, match=why):
        with trio.fail_after(1 if why is None else PATIENCE):
            async with a_client().connect(server, revision=V2025_11_25):
                pass
    spent = grown(base) / MIB
    figure(13, "spent on a message without end, limit 4 MiB", spent, 4 * LIMIT / MIB, "MiB", f"websocket: {way}")
    assert spent <= 4 * LIMIT / MIB


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("sse_elsewhere", "on another origin"),
        ("sse_endless", "named no endpoint in 0.5 s"),
        ("sse_comments", "named no endpoint in 0.5 s"),
        ("sse_silent", "named no endpoint in 0.5 s"),
    ],
)
async def test_an_endpoint_that_is_none_is_no_connection(port: int, way: str, why: str) -> None:
    base = forget_peak()
    with pytest.raises(trimcp.ConnectionLost, match=why):
        async with session_with(port, way, mode="sse", timeouts=Timeouts(endpoint=0.5)):
            pass
    spent = grown(base) / MIB
    what = "an event without end" if way == "sse_endless" else "an endpoint that is none"
    figure(13, f"spent on {what}, limit 4 MiB", spent, 4 * LIMIT / MIB, "MiB", f"http+sse: {way}")
    assert spent <= 4 * LIMIT / MIB
    assert "away" not in await seen(port)


async def test_a_childs_line_is_bounded() -> None:
    async with trimcp.Client("c").connect(hostile(TOO_LARGE)) as session:
        base = forget_peak()
        with pytest.raises(trimcp.InvalidReply, match="larger than 67,108,864 bytes"):
            await session.call_tool("x")
        spent = grown(base) / MIB
        figure(13, "spent on a line of 70 MiB, limit 64 MiB", spent, 128, "MiB", "stdio")
        assert spent <= 128
        assert session.session.lost is None


async def test_endless_progress_is_kept_up_to_a_number() -> None:
    async with trimcp.Client("c").connect(hostile(PROGRESS)) as session:
        base = forget_peak()
        async with session.calling("x") as call:
            await call.result()
            assert len([each async for each in call.progress]) == 1_024
        assert grown(base) <= 4 * MIB
        assert session.statistics().dropped == 200_000 - 1_024


async def test_large_progress_is_kept_up_to_a_weight() -> None:
    async with trimcp.Client("c").connect(hostile(LARGE_PROGRESS)) as session:
        base = forget_peak()
        async with session.calling("x") as call:
            await call.result()
            assert [each.progress async for each in call.progress] == [98, 99]
        assert grown(base) <= 32 * MIB


async def test_large_logs_are_kept_up_to_a_weight_while_their_handler_is_slow() -> None:
    client = trimcp.Client("c")

    @client.logging
    async def handle(params: trimcp.wire.LoggingMessageParams) -> None:
        await trio.sleep_forever()

    async with client.connect(hostile(LARGE_LOGS)) as session:
        base = forget_peak()
        await session.call_tool("x")
        assert grown(base) <= 32 * MIB
        assert session.statistics().dropped >= 97


# Its schemas

_WITH_SCHEMAS = [way for way in (*IN_MEMORY, *NETWORK) if way != "http+sse"]  # its revision has no schemas of results
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
            async with connected(_lying(schema, lies), way) as session:
                await session.list_tools()
                clock = Stopwatch(())
                with pytest.raises(trimcp.InvalidReply, match="broke its own output schema"):
                    await session.call_tool("lie")
                worst = max(worst, clock.took())
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
                async with connected(_sending({"type": "object", **schema}), way) as session:
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
    entry.listed = attrs.evolve(entry.listed, output_schema=schema)
    return server


# Its child


async def test_garbage_of_a_child_is_reported_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "trimcp"):
        async with trimcp.Client("c").connect(hostile(GARBAGE)) as session:
            base = forget_peak()
            await session.call_tool("x")
            assert grown(base) <= 100 * MIB
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
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])
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
        failed.append(clock.took())

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(call)
        await session.call_tool("echo")
        clock = Stopwatch(())
        end()
    assert len(failed) == 20
    return max(failed)


_FAMILIES = [("deaf",), ("deaf", "setsid"), ("deaf", "group", "setsid"), ("deaf", "forgotten")]


async def test_stubborn_children_and_their_descendants_are_gone_within_five_seconds() -> None:
    took: dict[str, float] = {}
    left: list[int] = []

    async def raise_and_leave(what: tuple[str, ...]) -> None:
        async with tree(*what, shutdown=ShutdownTimes()).connect() as channel:
            family = await descendants(channel)
            clock = Stopwatch((channel.process.pid,))
        took["+".join(what)] = clock.took()
        left.extend(pid for pid in [*family, channel.process.pid] if alive(pid))

    async with trio.open_nursery() as nursery:
        for what in _FAMILIES:
            nursery.start_soon(raise_and_leave, what)
    for name, seconds in took.items():
        figure(13, "a stubborn child and its descendants, until they are gone", seconds, 5, "s", name)
    assert not left
    assert max(took.values()) <= 4 * 5


# Connections that are cut


@asynccontextmanager
async def cutting(host: str, way: str = "http", **options: Any) -> AsyncIterator[tuple[Relay, Any]]:
    """A relay that cuts connections in the middle of what the server sends, and what a client connects to there."""
    transport = f"{way} on hypercorn" if host == "hypercorn" else way
    async with (
        served(make_server(), transport, grace=0.1, **options) as server,
        relayed(server, mark=b"cut here") as relay,
    ):
        yield relay, server.target(relay.url)


@OnBoth
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
@pytest.mark.parametrize("reply", ["json", "sse"])
async def test_one_cut_reply_does_not_end_the_connection(host: str, revision: Any, reply: Any) -> None:
    lost = 0
    settings = HttpSettings(reply=reply, resumable=False)
    async with cutting(host, settings=settings) as (relay, target):
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
        assert relay.cuts == 5
    figure(13, "calls lost beside and after 5 cut replies", lost, 0, "", f"{host}, {revision.name}, {reply}")
    assert not lost


@OnBoth
@pytest.mark.parametrize("way", ["websocket", "http+sse"])
async def test_a_cut_connection_fails_pending_calls_at_once(host: str, way: str) -> None:
    async with (
        cutting(host, way) as (relay, target),
        trimcp.Client("c").connect(target, revision=LATEST_LEGACY) as session,
    ):
        took = await until_all_failed(session, relay.cut)
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

    async with near(host, make_server(), settings=HttpSettings(dialects=(listening,))) as server:
        client = trimcp.Client("c")
        async with client.connect(trimcp.http(server.url), revision=LATEST_LEGACY) as session:
            await session.call_tool("echo")
            for _ in range(3):
                before = hellos
                async with server.wire() as wire:
                    ended = await wire.ask(http_request("DELETE", "/mcp", f"Mcp-Session-Id: {known[-1]}"))
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
