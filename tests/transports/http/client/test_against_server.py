"""Our client and our server over real sockets: what neither side can show alone."""

from __future__ import annotations

import gc
import ssl
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
import trimcp.testing
from tests.peers.tls import authority, certificate_file, client_context, server_context
from trimcp.net import Software, http_application
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.h1.listener import serve_http1
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.revisions import V2024_11_05, V2025_03_26, V2025_11_25, V2026_07_28, Revision

REVISIONS = pytest.mark.parametrize("revision", [V2024_11_05, V2025_03_26, V2025_11_25, V2026_07_28])
"""One of each kind: HTTP+SSE, the first sessions, the last, and none."""


class Journal:
    """What happened in handlers, to be waited for."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self._changed = trio.lowlevel.ParkingLot()

    def note(self, entry: str) -> None:
        self.entries.append(entry)
        self._changed.unpark_all()

    async def wait_for(self, entry: str) -> None:
        with trio.fail_after(60):
            while entry not in self.entries:
                await self._changed.park()


def make_server(journal: Journal) -> trimcp.Server:
    server = trimcp.Server("served", dynamic=True)
    release = threading.Event()

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def hang(ctx: trimcp.Context) -> str:
        journal.note("hangs")
        try:
            await trio.sleep_forever()
        finally:
            journal.note("stopped")

    @server.tool
    async def ask(ctx: trimcp.Context) -> str:
        return " ".join(root.uri for root in await ctx.list_roots())

    @server.tool
    async def large(size: int) -> str:
        return "x" * size

    @server.tool
    async def steps(ctx: trimcp.Context, count: int) -> str:
        for n in range(count):
            await ctx.report_progress(n + 1, count)
        return "done"

    @server.tool
    async def leave(ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, 2)
        ctx.close_stream()
        await trio.sleep(0.1)
        return "after the stream was closed"

    @server.tool
    def block() -> str:
        trio.from_thread.run_sync(journal.note, "blocks")
        release.wait(20)
        return "released"

    @server.tool
    async def let_go() -> str:
        release.set()
        return "ok"

    return server


@asynccontextmanager
async def served(
    journal: Journal | None = None,
    *,
    revision: Revision = V2026_07_28,
    settings: HttpSettings | None = None,
    **options: Any,
) -> AsyncIterator[tuple[HttpApplication, HttpServer]]:
    """Yield the face of a running server and the target that leads to it."""
    server = make_server(journal or Journal())
    async with http_application(server, settings) as face, open_service_nursery() as nursery:
        (url,) = await nursery.start(partial(serve_http1, face, host="127.0.0.1", port=0))
        yield face, HttpServer(f"{url}{'/sse' if revision is V2024_11_05 else '/mcp'}", **options)


@asynccontextmanager
async def connected(
    revision: Revision, journal: Journal | None = None, client: trimcp.Client | None = None, **options: Any
) -> AsyncIterator[tuple[HttpApplication, trimcp.ClientSession]]:
    async with (
        served(journal, revision=revision, **options) as (face, target),
        (client or trimcp.Client("c")).connect(target, revision=revision) as session,
    ):
        yield face, session


class Steps(trio.abc.Instrument):
    """The names of the tasks that had a turn."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.names.append(task.name)


async def echo(session: trimcp.ClientSession, text: str) -> None:
    result = await session.call_tool("echo", {"text": text})
    assert result.content[0].text == text


@pytest.mark.parametrize("revision", [V2025_11_25, V2026_07_28])
async def test_a_call_alone_takes_no_turn_of_the_writer(revision: Revision) -> None:
    steps = Steps()
    async with connected(revision) as (_, session):
        for _ in range(3):  # the first opens the connection; which call comes alone is known after the next
            await echo(session, "before")
            await wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(steps)
        await echo(session, "alone")
        trio.lowlevel.remove_instrument(steps)
    assert any("PooledConnection" in name for name in steps.names)
    assert [name for name in steps.names if "_ChannelDriver.write" in name] == []


@REVISIONS
async def test_many_calls_at_once_each_get_their_own_answer(revision: Revision) -> None:
    async with connected(revision) as (_, session), trio.open_nursery() as nursery:
        for n in range(300):
            nursery.start_soon(echo, session, str(n))


@REVISIONS
async def test_giving_up_stops_the_work(revision: Revision, steady_clock: trio.abc.Clock) -> None:
    journal = Journal()
    async with connected(revision, journal) as (_, session):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.call_tool, "hang", {})
            await journal.wait_for("hangs")
            before = trio.current_time()
            nursery.cancel_scope.cancel()
        await journal.wait_for("stopped")
        assert trio.current_time() - before < 1  # a tenth of that where nothing else runs
        await echo(session, "on")


@REVISIONS
async def test_leaving_stops_the_work_and_leaves_nothing_at_the_server(revision: Revision) -> None:
    journal = Journal()
    async with served(journal, revision=revision) as (face, target):
        with trio.CancelScope() as scope:
            async with trimcp.Client("c").connect(target, revision=revision) as session, trio.open_nursery() as nursery:
                nursery.start_soon(session.call_tool, "hang", {})
                await journal.wait_for("hangs")
                scope.cancel()
        await journal.wait_for("stopped")
        await wait_all_tasks_blocked(0.05)
        assert len(face.shared.sessions) == 0
        assert not face.sse2024.streams


@REVISIONS
async def test_more_calls_that_ask_than_may_be_under_way(revision: Revision, steady_clock: trio.abc.Clock) -> None:
    client = trimcp.Client("c", roots=["file:///a"])

    async def call() -> None:
        result = await session.call_tool("ask", {})
        assert result.content[0].text == "file:///a"

    with trio.fail_after(30):
        async with connected(revision, client=client, max_posts=4) as (_, session), trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(call)


async def test_two_hundred_blocked_calls_do_not_hold_up_another(steady_clock: trio.abc.Clock) -> None:
    journal = Journal()
    async with connected(V2026_07_28, journal) as (_, session), trio.open_nursery() as nursery:
        for _ in range(200):
            nursery.start_soon(session.call_tool, "block", {})
        await journal.wait_for("blocks")
        with trio.fail_after(10):
            await echo(session, "through")
        await session.call_tool("let_go", {})


@REVISIONS
async def test_progress_arrives_in_order_and_whole(revision: Revision) -> None:
    async with connected(revision) as (_, session), session.calling("steps", {"count": 500}) as call:
        seen = [params.progress async for params in call.progress]
        assert (await call.result()).content[0].text == "done"
    assert seen == list(range(1, 501))


async def test_a_stream_that_the_server_closes_is_taken_up_where_it_ended() -> None:
    async with connected(V2025_11_25, settings=HttpSettings(retry=20)) as (_, session):
        async with session.calling("leave", {}) as call:
            assert [params.progress async for params in call.progress] == [1]
            result = await call.result()
        assert result.content[0].text == "after the stream was closed"


async def test_a_session_that_the_server_dropped_is_begun_again() -> None:
    async with connected(V2025_11_25) as (face, session):
        for _ in range(2):
            (dropped,) = face.shared.sessions
            dropped.end("dropped by the test")
            await echo(session, "again")
        assert len(face.shared.sessions) == 1


async def peak_of_a_large_result(session: trimcp.ClientSession, size: int) -> int:
    await session.call_tool("large", {"size": 10})
    gc.collect()
    tracemalloc.start()
    try:
        result = await session.call_tool("large", {"size": size})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(result.content[0].text) == size
    return peak


@REVISIONS
async def test_a_large_result_costs_no_more_than_over_a_pipe(revision: Revision) -> None:
    size = 8_000_000
    async with trimcp.testing.connected(make_server(Journal()), revision=revision, framed=True) as session:
        piped = await peak_of_a_large_result(session, size)
    async with connected(revision) as (_, session):
        assert await peak_of_a_large_result(session, size) < piped + size


@REVISIONS
async def test_connections_are_used_again(revision: Revision) -> None:
    """A connection for each call would cost a round trip and, in the end, the system its ports."""
    opened = 0
    open_tcp_stream = trio.open_tcp_stream

    async def counted(*args: Any, **options: Any) -> trio.SocketStream:
        nonlocal opened
        opened += 1
        return await open_tcp_stream(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trio, "open_tcp_stream", counted)
        async with connected(revision) as (_, session):
            for n in range(30):
                await echo(session, str(n))
    assert opened <= 3


# TLS and HTTP/2


@pytest.fixture
def certfile(tmp_path: Path) -> str:
    return str(certificate_file(tmp_path, "localhost", "127.0.0.1"))


async def test_a_certificate_is_checked(certfile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_service_nursery() as nursery:
        serve = partial(trimcp.serve_http, make_server(Journal()), port=0, certfile=certfile)
        (url,) = await nursery.start(serve)
        assert url.startswith("https://")
        with pytest.raises(trimcp.ConnectionLost, match=r"cannot connect to https://127.*certificate"):
            async with trimcp.Client("c").connect(HttpServer(url, retries=0)):
                pass
        authority().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        async with trimcp.Client("c").connect(HttpServer(url)) as session:
            await echo(session, "seen by nobody else")


async def test_a_client_of_ones_own_may_speak_http2_and_is_told_what_that_costs(
    certfile: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_service_nursery() as nursery:
        serve = partial(trimcp.serve_http, make_server(Journal()), port=0, certfile=certfile)
        (url,) = await nursery.start(serve)
        async with (
            httpx2.AsyncClient(verify=client_context(), http2=True, limits=httpx2.Limits(max_connections=1)) as http,
            trimcp.Client("c").connect(HttpServer(url, client=http)) as session,
            trio.open_nursery() as calls,
        ):
            for n in range(20):
                calls.start_soon(echo, session, str(n))
        nursery.cancel_scope.cancel()
    (warning,) = [record for record in caplog.records if record.name == "trimcp.http"]
    assert "HTTP/2" in warning.getMessage()


@pytest.mark.parametrize("software", ["own", "hypercorn"])
async def test_a_context_of_ones_own_is_served(
    software: Software, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority().cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    context = server_context("localhost", "127.0.0.1")
    async with open_service_nursery() as nursery:
        serve = partial(trimcp.serve_http, make_server(Journal()), port=0, ssl_context=context, software=software)
        (url,) = await nursery.start(serve)
        assert url.startswith("https://")
        async with trimcp.Client("c").connect(HttpServer(url)) as session:
            await echo(session, "seen by nobody else")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("software", ["own", "hypercorn"])
async def test_tls_that_is_half_said_is_refused(
    software: Software, certfile: str, steady_clock: trio.abc.Clock
) -> None:
    """It was served, in clear text or with one of two certificates."""
    serve = partial(trimcp.serve_http, make_server(Journal()), port=0, software=software)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with trio.fail_after(5):
        with pytest.raises(trimcp.LocalError, match="keyfile goes with certfile"):
            await serve(keyfile=certfile)
        with pytest.raises(trimcp.LocalError, match="either certfile or ssl_context"):
            await serve(certfile=certfile, ssl_context=context)
        with pytest.raises(trimcp.LocalError, match=r"cannot use the certificate 'nowhere\.pem': No such file"):
            await serve(certfile="nowhere.pem")
        with pytest.raises(trimcp.LocalError, match=r"with the key 'nowhere\.pem': No such file"):
            await serve(certfile=certfile, keyfile="nowhere.pem")
