"""Our clients connected over the network to servers that mean harm."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx2
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE, count
from tests.guarantees.report import figure
from tests.hostile import server_for_clients
from tests.hostile.peers import ENVIRONMENT, KIB, MIB, forget_peak, grown, memory_of
from trimcp.transports.http.client import HttpServer, Timeouts
from trimcp.transports.websocket_client import WebSocketServer
from trimcp.wire.revisions import V2025_11_25

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

LIMIT = 4 * MIB


@contextmanager
def harmful_server() -> Iterator[int]:
    """Start a server that means harm, and yield its port."""
    command = [sys.executable, server_for_clients.__file__]
    with subprocess.Popen(command, stdin=-1, stdout=-1, env=ENVIRONMENT, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where that server is."""
    with harmful_server() as port:
        yield port


async def seen(port: int) -> dict[str, int]:
    """What the server has seen of its clients since it was asked last."""
    async with httpx2.AsyncClient() as client:
        counts: dict[str, int] = (await client.get(f"http://127.0.0.1:{port}/seen")).json()
        return counts


@asynccontextmanager
async def session_with(port: int, way: str, **options: Any) -> AsyncIterator[trimcp.ClientSession]:
    """A session with the server, which does this to a call of its tool `harm` and serves any other."""
    options.setdefault("max_message", LIMIT)
    server = HttpServer(f"http://127.0.0.1:{port}/{way}", {"x-port": str(port)}, **options)
    with trio.fail_after(PATIENCE):
        async with trimcp.Client("c").connect(server, revision=V2025_11_25) as session:
            await session.call_tool("fine")
            yield session


@pytest.mark.parametrize(
    ("way", "error", "why"),
    [
        ("endless_body", trimcp.InvalidReply, "larger than 4,194,304 bytes"),
        ("huge_length", trimcp.InvalidReply, "larger than 4,194,304 bytes"),
        ("bomb", trimcp.InvalidReply, "larger than 4,194,304 bytes"),
        ("bomb_of_bombs", trimcp.ConnectionLost, "compressed its reply with 'gzip, gzip'"),
        ("bomb_of_events", trimcp.ConnectionLost, "ended before the answer"),
        ("endless_head", trimcp.ConnectionLost, "buffer too long"),
        ("elsewhere", trimcp.ConnectionLost, "points to 'http://127.0.0.2:[0-9]+', where nothing is sent"),
        ("around", trimcp.ConnectionLost, "308 Permanent Redirect"),
        ("page", trimcp.InvalidReply, "content type 'text/html'"),
        ("garbage", trimcp.InvalidReply, "not valid UTF-8"),
        ("other_id", trimcp.InvalidReply, "something else than asked"),
        ("nothing", trimcp.InvalidReply, "no result"),
        ("not_found", trimcp.ConnectionLost, "404"),
        ("later", trimcp.ConnectionLost, "503"),
        ("much_later", trimcp.ConnectionLost, "429"),
        ("cut", trimcp.ConnectionLost, "ended before the answer"),
    ],
)
async def test_a_call_that_is_harmed_fails_clearly_and_alone(
    port: int, way: str, error: type[Exception], why: str
) -> None:
    async with session_with(port, way) as session:
        base, began = forget_peak(), trio.current_time()
        with pytest.raises(error, match=why):
            await session.call_tool("harm")
        took, spent = trio.current_time() - began, grown(base)
        print(f"{way}: {took:.2f} s, {spent / MIB:.1f} MiB")
        assert took <= 10, "most of it is what the server takes to pack a bomb"
        assert spent <= 4 * LIMIT
        await session.call_tool("fine")
    assert "away" not in await seen(port), "nothing goes to another origin"


@pytest.mark.parametrize("way", ["endless_event", "endless_line", "endless_beginning", "drip", "again_and_again"])
async def test_a_call_that_never_ends_ends_with_its_time(port: int, way: str) -> None:
    before = (await seen(port)).get("GET", 0)
    async with session_with(port, way) as session:
        base, began = forget_peak(), trio.current_time()
        with pytest.raises(trio.TooSlowError):
            with trio.fail_after(1):
                await session.call_tool("harm")
        took, spent = trio.current_time() - began, grown(base)
        print(f"{way}: {took:.2f} s, {spent / MIB:.1f} MiB, {(await seen(port))['GET'] - before} GETs")
        assert took <= 1 + 4 * 0.5
        assert spent <= 4 * LIMIT
        await session.call_tool("fine")
    assert (await seen(port))["GET"] - before <= 250, "no more than a hundred a second"


async def test_an_answer_counts_though_its_stream_goes_on(port: int) -> None:
    async with session_with(port, "no_end") as session:
        began = trio.current_time()
        for _ in range(3):
            await session.call_tool("harm")
        assert trio.current_time() - began <= 3 * 4 * 0.5


async def test_a_session_that_is_forgotten_again_and_again_is_begun_anew_but_once(port: int) -> None:
    before = (await seen(port)).get("initialize", 0)
    async with session_with(port, "not_found") as session:
        for _ in range(20):
            with pytest.raises(trimcp.ConnectionLost):
                await session.call_tool("harm")
        await session.call_tool("fine")
    assert (await seen(port))["initialize"] - before <= 3


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


async def test_twenty_thousand_mutations_from_a_server_do_no_harm(port: int) -> None:
    async with session_with(port, "mutations") as session:
        await session.call_tool("harm")
        base = memory_of(os.getpid())
        await session.call_tool("harm")
        kept = memory_of(os.getpid()) - base
        figure(12, "kept after 20,000 mutations", round(kept / MIB, 3), 2, "MiB", "events of HTTP, client")
        assert kept <= 2 * MIB
        await session.call_tool("fine")


async def test_mutations_of_replies_fail_their_calls_alone(port: int) -> None:
    many = count(200)
    async with session_with(port, "mutated_reply", timeouts=Timeouts(silence=1.0)) as session:
        await _call_all(session, min(many, 1_000))
        base, before = memory_of(os.getpid()), _counts()
        answered = await _call_all(session, many)
        with trio.fail_after(10):
            # A connection that was given up closes when the other side does; one that an answer of ours has left idle
            # closes a few seconds later, with the next call.
            while _counts() > before:
                await trio.sleep(0.05)
                with suppress(trimcp.ConnectionLost):
                    await session.call_tool("fine")
        kept = memory_of(os.getpid()) - base
        print(f"{answered} of {many} replies were answers all the same")
        figure(12, f"kept after {many:,} mutations", round(kept / MIB, 3), 2, "MiB", "replies of HTTP, client")
        assert answered
        assert kept <= 2 * MIB


async def _call_all(session: trimcp.ClientSession, count: int) -> int:
    answered = 0
    for n in range(count):
        with trio.fail_after(10):
            try:
                await session.call_tool("harm")
                answered += 1
            except (trimcp.ConnectionLost, trimcp.InvalidReply, trimcp.RemoteError):
                pass
            while n % 50 == 0:
                try:
                    await session.call_tool("fine")
                    break
                except trimcp.ConnectionLost:
                    pass  # the server had closed this connection after its last reply; calls are not repeated
    return answered


def _counts() -> tuple[int, int]:
    """Tasks and descriptors of this process."""
    gc.collect()
    return trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))


async def test_mutations_over_websocket_do_no_harm(port: int) -> None:
    many = count(2_000)
    server = WebSocketServer(f"ws://127.0.0.1:{port}/ws_mutations?{many}", max_message=LIMIT)
    with trio.fail_after(PATIENCE):
        async with trimcp.Client("c").connect(server, revision=V2025_11_25) as session:
            await session.call_tool("harm")
            base, before = memory_of(os.getpid()), _counts()
            await session.call_tool("harm")
            kept = memory_of(os.getpid()) - base
            figure(
                12, f"kept after {many:,} mutations", round(kept / MIB, 3), 2, "MiB", "messages over WebSocket, client"
            )
            assert kept <= 2 * MIB
            assert _counts() == before
            await session.call_tool("fine")


async def test_mutations_of_frames_end_their_connection_alone(port: int) -> None:
    many = count(150)
    answered = await _connect_all(port, min(many, 1_000))
    base, before = memory_of(os.getpid()), _counts()
    answered = await _connect_all(port, many)
    kept = memory_of(os.getpid()) - base
    print(f"{answered} of {many} calls were answered all the same")
    figure(12, f"kept after {many:,} mutations", round(kept / MIB, 3), 2, "MiB", "frames over WebSocket, client")
    assert answered
    assert kept <= 2 * MIB
    assert _counts() == before


async def _connect_all(port: int, count: int) -> int:
    server = WebSocketServer(f"ws://127.0.0.1:{port}/ws_frames", max_message=LIMIT)
    answered = 0
    for _ in range(count):
        try:
            with trio.fail_after(10):
                async with trimcp.Client("c").connect(server, revision=V2025_11_25) as session:
                    await session.call_tool("harm")
                    answered += 1
        except (trimcp.ConnectionLost, trimcp.InvalidReply, trimcp.RemoteError):
            pass
    return answered


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
    base, began = forget_peak(), trio.current_time()
    with pytest.raises(trimcp.ConnectionLost, match=why):
        async with session_with(port, way, mode="sse", timeouts=Timeouts(endpoint=0.5)):
            pass
    assert trio.current_time() - began <= 4 * 0.5
    assert grown(base) <= 4 * LIMIT
    assert "away" not in await seen(port)


@pytest.mark.parametrize(
    ("way", "why"),
    [("ws_endless", "1009"), ("ws_fragments", None), ("ws_pings", None), ("ws_garbage", None)],
)
async def test_a_websocket_that_says_too_much_costs_bounded_memory(port: int, way: str, why: str | None) -> None:
    server = WebSocketServer(f"ws://127.0.0.1:{port}/{way}", max_message=LIMIT)
    base = forget_peak()
    error = trimcp.ConnectionLost if why else trio.TooSlowError
    with pytest.raises(error, match=why):
        with trio.fail_after(1):
            async with trimcp.Client("c").connect(server, revision=V2025_11_25):
                pass
    print(f"{way}: {grown(base) / MIB:.1f} MiB")
    assert grown(base) <= 4 * LIMIT
