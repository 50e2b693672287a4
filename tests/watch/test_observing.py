"""Pictures of a server that runs, and what an operator does about what they show."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
import trimcp.testing
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import connected
from trimcp.errors import LocalError
from trimcp.fleet import UpstreamState
from trimcp.session.facts import Beside
from trimcp.transports.http.asgi.request import read_head
from trimcp.transports.http.interfaces import Head
from trimcp.watch.picture import MOST_BESIDE
from trimcp.wire.codes import CANCELLED_BY_OPERATOR
from trimcp.wire.revisions import LATEST


def make_server() -> tuple[trimcp.Server[None], list[object]]:
    server: trimcp.Server[None] = trimcp.Server("index", version="3")
    seen: list[object] = []

    @server.tool
    async def build(files: int, *, ctx: trimcp.Context) -> str:
        try:
            for done in range(files):
                await trio.sleep(1)
                await ctx.report_progress(done + 1, total=files, message=f"file {done}")
        finally:
            seen.append(ctx.cancel_reason)
        return "built"

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError("no")

    return server, seen


@contextmanager
def observed(server: trimcp.Server[None]) -> Iterator[trimcp.watch.Observation]:
    with server.observe(interval=0.5) as pictures:
        yield pictures


async def test_a_picture_has_what_runs_with_progress_and_the_line_where_it_waits(autojump_clock: MockClock) -> None:
    server, _ = make_server()
    async with trimcp.testing.connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "build", {"files": 4})
        await trio.sleep(2.5)
        with observed(server) as pictures:
            picture = pictures.picture()
        (shown,) = picture.sessions
        (request,) = shown.requests
        nursery.cancel_scope.cancel()
    assert (picture.server, picture.version) == ("index", "3")
    assert picture.statistics.running == shown.running == 1
    assert (request.method, request.target, request.state) == ("tools/call", "build", "running")
    assert (request.progress, request.total, request.message) == (2, 4, "file 1")
    assert request.seconds == pytest.approx(2.5)
    assert request.per_second == pytest.approx(2 / 2.5)
    assert request.left is None
    assert "await trio.sleep(1)" in request.waits[-1]
    assert shown.revision == session.revision.name
    assert shown.peer is not None
    assert shown.seconds == pytest.approx(2.5)


async def test_pictures_are_taken_when_they_are_asked_for(autojump_clock: MockClock) -> None:
    server, _ = make_server()
    async with trimcp.testing.connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "build", {"files": 9})
        await wait_all_tasks_blocked()
        with observed(server) as pictures:
            begun = trio.current_time()
            await anext(pictures)
            assert trio.current_time() == begun
            await anext(pictures)
            assert trio.current_time() == begun + 0.5
            await trio.sleep(5)  # a slow watcher gets the latest, and at once
            later = trio.current_time()
            picture = await anext(pictures)
            assert trio.current_time() == later
            assert picture.sessions[0].requests[0].progress == 5
        nursery.cancel_scope.cancel()


async def test_what_ends_is_kept_only_while_somebody_looks(autojump_clock: MockClock) -> None:
    server, _ = make_server()
    async with trimcp.testing.connected(server) as session:
        await session.call_tool("build", {"files": 1})
        with observed(server) as pictures:
            await session.call_tool("build", {"files": 2})
            await session.call_tool("fail")
            with pytest.raises(trimcp.RemoteError):
                await session.read_resource("nothing://here")
            ended = pictures.picture().ended
            (run,) = server.runs
            (peer,) = run.sessions
            assert peer.on_finished
        assert not peer.on_finished
        assert not server.on_finished
    assert [(one.target, one.outcome) for one in ended] == [
        ("build", "ok"),
        ("fail", "failed"),
        ("nothing://here", "error"),
    ]
    assert ended[0].seconds == pytest.approx(2)


async def test_an_operator_cancels_and_both_sides_are_told_why(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    server, seen = make_server()
    refused: list[trimcp.RemoteError] = []

    async def call() -> None:
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("build", {"files": 9})
        refused.append(caught.value)

    async with trimcp.testing.connected(server) as session:
        with observed(server) as pictures:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                await trio.sleep(0.5)
                key = pictures.picture().sessions[0].requests[0].key
                pictures.cancel(key, "the disk\nis full")
            with pytest.raises(LocalError, match="this request has ended"):
                pictures.cancel(key, "again")
            (ended,) = pictures.picture().ended
    assert seen == [trimcp.CancelReason.OPERATOR]
    assert refused[0].code == CANCELLED_BY_OPERATOR
    assert "the disk\nis full" in refused[0].message
    assert (ended.outcome, ended.reason) == ("cancelled", "cancelled by the operator: the disk\nis full")
    (line,) = [one.getMessage() for one in caplog.records if one.name == "trimcp.admin"]
    assert line == r"this program cancels tools/call 'build': 'the disk\nis full'"


async def test_an_operator_closes_a_session(autojump_clock: MockClock) -> None:
    server, seen = make_server()
    async with trimcp.testing.connected(server) as session:
        with observed(server) as pictures:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_expect_loss, session)
                await trio.sleep(0.5)
                pictures.close(pictures.picture().sessions[0].key, "too old")
            with pytest.raises(LocalError, match="this session has ended"):
                pictures.close("0", "again")
    assert seen == [trimcp.CancelReason.OPERATOR]


async def _expect_loss(session: trimcp.ClientSession) -> None:
    with pytest.raises(trimcp.McpError):
        await session.call_tool("build", {"files": 9})


async def test_an_operator_drains(autojump_clock: MockClock) -> None:
    server, seen = make_server()
    async with trimcp.testing.connected(server) as session:
        with observed(server) as pictures:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.call_tool, "build", {"files": 2})
                await trio.sleep(0.5)
                await pictures.drain(grace=5)
            await wait_all_tasks_blocked()
            assert pictures.picture().sessions == ()
    assert seen == [None]


async def test_a_deadline_and_a_request_that_waits_are_shown(autojump_clock: MockClock) -> None:
    server = trimcp.Server("small", limits=trimcp.Limits(max_running=1))

    @server.tool(timeout=30)
    async def hold() -> str:
        await trio.sleep(math.inf)
        return ""

    async with trimcp.testing.connected(server) as session, trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(session.call_tool, "hold")
        await trio.sleep(10)
        with observed(server) as pictures:
            first, second = pictures.picture().sessions[0].requests
        nursery.cancel_scope.cancel()
    assert first.left == pytest.approx(20)
    assert (first.state, second.state) == ("running", "waiting")
    assert second.waits == ()


async def test_upstreams_of_a_fleet_are_shown_one_by_one() -> None:
    server, client = make_server()[0], trimcp.Client("gateway")
    async with trimcp.fleet.Group(client) as group, trimcp.testing.connected(server):
        server.beside.append(group.beside)
        await group.open("here", make_server()[0])
        await group.supervise("nowhere", trimcp.http("http://127.0.0.1:1/mcp"))
        await group.upstream("nowhere").wait_state(UpstreamState.WAITING)
        with observed(server) as pictures:
            here, nowhere = pictures.picture().beside
    assert (here.kind, here.name, here.state) == ("upstream", "here", "up")
    assert (nowhere.kind, nowhere.name) == ("upstream", "nowhere")
    assert nowhere.state.startswith("waiting, 0 lost: ")
    assert nowhere.seconds is not None


async def test_no_more_of_what_is_beside_is_shown_than_one_looks_at() -> None:
    server = make_server()[0]
    server.beside.append(lambda: (Beside("context", str(number), "idle") for number in count()))
    with observed(server) as pictures:
        assert len(pictures.picture().beside) == MOST_BESIDE


CAME = {
    "memory": "in memory",
    "framed": "in memory",
    "http": "HTTP/1.1",
    "http/2": "HTTP/2",
    "http on hypercorn": "HTTP/1.1",
    "http+sse": "HTTP+SSE",
    "websocket": "WebSocket",
    "websocket on hypercorn": "WebSocket",
    "grpc": "gRPC",
}


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("transport", CAME)
async def test_a_picture_says_how_a_client_has_come(transport: str, newest: bool) -> None:
    server = make_server()[0]
    revision = LATEST if newest and transport != "http+sse" else None
    async with connected(server, transport, revision=revision) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "build", {"files": 99})
        with trio.fail_after(PATIENCE):
            while not server.statistics().running:  # noqa: ASYNC110  # a network is between
                await trio.sleep(0.001)
        with observed(server) as pictures:
            shown = next(one for one in pictures.picture().sessions if one.requests)
        nursery.cancel_scope.cancel()
    assert shown.transport == CAME[transport]
    assert (shown.seconds is None) == (revision is LATEST and CAME[transport].startswith("HTTP"))
    address = shown.address or ""
    assert address == "" if CAME[transport] == "in memory" else address.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("version", "shown"), [("1.0", "HTTP/1.0"), ("2", "HTTP/2"), ("3", "HTTP/3"), (None, "HTTP"), ("9\x1b[0m", "HTTP")]
)
def test_behind_another_server_it_is_what_that_says(version: str | None, shown: str) -> None:
    said = {} if version is None else {"http_version": version}
    scope = {"type": "http", "path": "/", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), **said}
    head = read_head(scope)
    assert isinstance(head, Head)
    assert head.link == (shown, "127.0.0.1:1")


async def test_a_picture_says_that_a_client_is_at_the_other_end_of_a_pipe() -> None:
    program = """
import trimcp

server = trimcp.Server("piped")


@server.tool
async def look() -> list[str | None]:
    with server.observe() as pictures:
        (shown,) = pictures.picture().sessions
    return [shown.transport, shown.address]


trimcp.run_stdio(server)
"""
    async with trimcp.Client("tester").connect(trimcp.stdio(sys.executable, "-c", program)) as session:
        result = await session.call_tool("look")
    assert result.structured_content == {"result": ["stdio", None]}


async def test_a_request_that_waits_for_a_quota_says_for_which(autojump_clock: MockClock) -> None:
    server: trimcp.Server[None] = trimcp.Server("index")

    @server.tool(quota=trimcp.Quota(running=1))
    async def charge() -> str:
        await trio.sleep(10)
        return ""

    async with trimcp.testing.connected(server) as session, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(session.call_tool, "charge")
        await wait_all_tasks_blocked()
        with observed(server) as pictures:
            (shown,) = pictures.picture().sessions
        nursery.cancel_scope.cancel()
    waits = [request.waits[-1] for request in shown.requests]
    assert waits[0].endswith("await trio.sleep(10)")
    assert waits[1:] == ["waits for a turn of 'charge': 1 running, 2 waiting"] * 2
