"""What is said in one session, for whoever looks at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
import trimcp.testing
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import connected
from trimcp.errors import LocalError
from trimcp.session.incoming.job import session_key
from trimcp.session.session import Session
from trimcp.watch import wire
from trimcp.wire.revisions import LATEST


@attrs.define
class Name:
    name: str


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("index")

    @server.tool
    async def build(files: int, password: str = "", notes: list[str] | None = None, *, ctx: trimcp.Context) -> str:
        for done in range(files):
            await trio.sleep(1)
            await ctx.report_progress(done + 1, total=files)
        return "built"

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> str:
        answer = await ctx.elicit("Who?", Name)
        return answer.action

    @server.tool
    async def refuse() -> str:
        raise trimcp.ErrorReply(-32050, "no")

    return server


def said(told: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [("->" if one["ours"] else "<-", one["method"]) for one in told["events"]]


async def test_each_message_with_its_size_and_how_long_its_answer_took(autojump_clock: MockClock) -> None:
    server = make_server()
    async with trimcp.testing.connected(server) as session:
        with server.observe() as pictures:
            key = pictures.picture().sessions[0].key
            assert pictures.wire(key)["events"] == []
            async with session.calling("build", {"files": 2, "password": "tiger"}) as call:
                assert [step.progress async for step in call.progress] == [1, 2]
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool("refuse")
            told = pictures.wire(key)
    progress = "notifications/progress"
    assert said(told) == [
        *(("<-", "tools/call"), ("->", progress), ("->", progress), ("->", None)),
        *(("<-", "tools/call"), ("->", None)),
    ]
    request, _, _, answer, _, refused = told["events"]
    assert request["id"] == answer["id"]
    assert answer["took"] == pytest.approx(2)
    assert (answer["error"], refused["error"]) == (None, -32050)
    assert all(one["size"] > 30 for one in told["events"])
    assert {one["text"] for one in told["events"]} == {""}  # unless somebody wants it
    assert (told["missed"], told["count"], told["ended"]) == (0, 6, None)


async def test_what_is_in_them_is_shown_to_who_wants_it_and_masked(caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()
    async with trimcp.testing.connected(server) as session:
        with server.observe() as reads, server.observe() as looks:
            key = reads.picture().sessions[0].key
            reads.wire(key, text=True)
            looks.wire(key)
            await session.call_tool("build", {"files": 0, "password": "tiger"})
            read, looked = reads.wire(key, text=True), looks.wire(key)
    assert '"files":0' in read["events"][0]["text"]
    assert "built" in read["events"][1]["text"]
    assert "tiger" not in str(read)
    assert {one["text"] for one in looked["events"]} == {""}
    (line,) = [one.getMessage() for one in caplog.records if one.name == "trimcp.admin"]
    assert line.startswith("this program reads what is said in a session")


async def test_our_questions_are_timed_too(autojump_clock: MockClock) -> None:
    server, client = make_server(), trimcp.Client("asked")

    async def answer(params: object) -> trimcp.ElicitResult:
        await trio.sleep(3)
        return trimcp.ElicitResult(action="decline")

    client.elicitation(answer)
    async with trimcp.testing.connected(server, client, revision="2025-11-25") as session:
        with server.observe() as pictures:
            key = pictures.picture().sessions[0].key
            pictures.wire(key)
            await session.call_tool("ask")
            told = pictures.wire(key)
    assert said(told) == [("<-", "tools/call"), ("->", "elicitation/create"), ("<-", None), ("->", None)]
    assert [one["took"] for one in told["events"]] == pytest.approx([None, None, 3, 3])


@pytest.mark.parametrize("leave", ["closed", "another", "silent"])
async def test_nothing_is_left_once_nobody_looks(leave: str, autojump_clock: MockClock) -> None:
    server = make_server()
    async with trimcp.testing.connected(server) as session, trimcp.testing.connected(server) as other:
        with server.observe() as pictures:
            first, second = server.sessions()
            sink = first.sink
            key, another = (session_key(one) for one in (first, second))
            pictures.wire(key)
            assert type(first) is not Session
            if leave == "another":
                pictures.wire(another)
            elif leave == "silent":
                await trio.sleep(11)
                await session.ping()
                await other.ping()
            if leave != "closed":
                assert (type(first), first.sink) == (Session, sink)
                assert not first.watchers
        assert (type(first), first.sink, type(second)) == (Session, sink, Session)
        assert not wire._TAPS
        await session.ping()


async def test_a_viewer_that_comes_back_late_begins_anew(autojump_clock: MockClock) -> None:
    server = make_server()
    async with trimcp.testing.connected(server) as session:
        with server.observe() as pictures:
            key = pictures.picture().sessions[0].key
            pictures.wire(key)
            await session.ping()
            assert pictures.wire(key)["count"] == 2
            await trio.sleep(11)
            await session.ping()
            assert pictures.wire(key, after=2)["count"] == 0
            await session.ping()
            assert pictures.wire(key)["count"] == 2


async def test_it_is_bounded_in_number_and_in_text(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    async with trimcp.testing.connected(server) as session:
        with server.observe() as pictures:
            key = pictures.picture().sessions[0].key
            pictures.wire(key, text=True)
            for _ in range(260):
                await session.call_tool("build", {"files": 0})
            told = pictures.wire(key, after=3, text=True)
            assert (len(told["events"]), told["missed"], told["count"]) == (500, 17, 520)
            monkeypatch.setattr(wire, "_KEPT_TEXT", 50_000)
            for _ in range(20):
                await session.call_tool("build", {"files": 0, "notes": ["a note"] * 3_000})
            told = pictures.wire(key, text=True)
            assert sum(len(one["text"]) for one in told["events"]) <= 50_000
            assert max(len(one["text"]) for one in told["events"]) == 8 * 1024
            await session.call_tool("build", {"files": 0, "notes": ["a note"] * 50_000})
            assert pictures.wire(key, text=True)["events"][-2]["text"] == ""  # too large to be parsed for a viewer


async def test_a_session_that_ends_says_why_and_another_is_not_shown_in_its_place() -> None:
    server = make_server()
    with server.observe() as pictures:
        async with trimcp.testing.connected(server) as session:
            key = pictures.picture().sessions[0].key
            pictures.wire(key)
            await session.ping()
        await wait_all_tasks_blocked()
        told = pictures.wire(key)
        assert len(told["events"]) == 2
        assert told["ended"]
        with pytest.raises(LocalError, match="this session has ended"):
            pictures.wire("0")


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("transport", ["memory", "framed", "http", "http/2", "http+sse", "websocket", "grpc"])
async def test_over_every_transport_from_the_middle_of_a_call(transport: str, newest: bool) -> None:
    server: trimcp.Server[None] = trimcp.Server("index")
    go, begun = trio.Event(), trio.Event()

    @server.tool
    async def wait(*, ctx: trimcp.Context) -> str:
        begun.set()
        await go.wait()
        await ctx.report_progress(1)
        ctx.report_progress_nowait(2)
        return "waited"

    revision = LATEST if newest and transport != "http+sse" else None
    steps: list[float] = []

    async def call(session: trimcp.ClientSession, ended: Callable[[], None]) -> None:
        async with session.calling("wait") as call:
            steps.extend([step.progress async for step in call.progress])
            await call.result()
        ended()

    with trio.fail_after(PATIENCE):
        async with connected(server, transport, revision=revision) as session, trio.open_nursery() as nursery:
            with server.observe() as pictures:
                done = trio.Event()
                nursery.start_soon(call, session, done.set)
                await begun.wait()
                key = next(one.key for one in pictures.picture().sessions if one.requests)
                pictures.wire(key)
                go.set()
                await done.wait()
                told = pictures.wire(key)
    progress = ("->", "notifications/progress")
    assert said(told)[:3] == [progress, progress, ("->", None)]
    assert steps == [1, 2]
    assert told["events"][2]["took"] > 0
