"""What functions provide for handlers: entered in order, left in reverse, for a request, a session or a run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Annotated, Any

import pytest
import trio
import trio.testing

import trimcp
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.server.handlers.needs import Depends, Elicit
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.drive import direct_ends
from trimcp.testing.connect import connected
from trimcp.wire.revisions import V2025_11_25


class Log(list[str]):
    """What was entered and left."""

    @asynccontextmanager
    async def around(self, name: str) -> AsyncIterator[str]:
        self.append(f"+{name}")
        try:
            yield name
        finally:
            self.append(f"-{name}")

    def take(self) -> list[str]:
        taken = list(self)
        self.clear()
        return taken


@pytest.fixture
def log() -> Log:
    return Log()


def text(result: Any) -> str:
    return result.content[0].text  # type: ignore[no-any-return]


async def test_what_a_request_needs_is_entered_in_order_and_left_in_reverse(log: Log, autojump_clock: Any) -> None:
    server = Server("s")

    async def inner() -> AsyncIterator[str]:
        async with log.around("inner") as name:
            yield name

    @asynccontextmanager
    async def outer(inner: Annotated[str, Depends(inner)], ctx: Context[Any]) -> AsyncIterator[str]:
        async with log.around("outer"):
            yield f"outer({inner}, {ctx.method})"

    @contextmanager
    def last() -> Iterator[str]:
        log.append("+last")
        yield "last"
        log.append("-last")

    async def plain() -> int:
        return 7

    @server.tool
    async def tool(
        word: str,
        first: Annotated[str, Depends(outer)],
        second: Annotated[str, Depends(inner)],
        third: Annotated[str, Depends(last)],
        number: Annotated[int, Depends(plain)],
    ) -> str:
        log.append("tool")
        return f"{word} {first} {second} {third} {number}"

    async with connected(server) as session:
        assert list((await session.list_tools())[0].input_schema["properties"]) == ["word"]
        assert text(await session.call_tool("tool", {"word": "a"})) == "a outer(inner, tools/call) inner last 7"
    assert log == ["+inner", "+outer", "+last", "tool", "-last", "-outer", "-inner"]


async def test_what_was_entered_is_left_when_the_handler_fails_or_is_cancelled(log: Log, autojump_clock: Any) -> None:
    server = Server("s")

    @asynccontextmanager
    async def judge() -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            log.append(type(error).__name__)
            raise
        log.append("well")

    @server.tool
    async def tool(how: str, judge: Annotated[None, Depends(judge)]) -> str:
        if how == "fail":
            raise trimcp.ToolError("no")
        if how == "hang":
            await trio.sleep_forever()
        return how

    async with connected(server) as session:
        assert text(await session.call_tool("tool", {"how": "work"})) == "work"
        assert text(await session.call_tool("tool", {"how": "fail"})) == "no"
        with trio.move_on_after(1):
            await session.call_tool("tool", {"how": "hang"})
        await trio.testing.wait_all_tasks_blocked()
        assert log == ["well", "ToolError", "Cancelled"]


async def test_what_provides_may_refuse(log: Log, autojump_clock: Any) -> None:
    server = Server("s")

    async def broken(before: Annotated[str, Depends(lambda: "x")]) -> str:
        raise trimcp.ToolError("the database is away")

    async def first() -> AsyncIterator[None]:
        async with log.around("first"):
            yield

    @server.tool
    async def tool(first: Annotated[None, Depends(first)], second: Annotated[str, Depends(broken)]) -> str:
        return "never"

    async with connected(server) as session:
        result = await session.call_tool("tool")
        assert (result.is_error, text(result)) == (True, "the database is away")
    assert log == ["+first", "-first"]


async def test_threads_resources_prompts_and_completions_have_them_too(log: Log, autojump_clock: Any) -> None:
    server = Server("s")

    async def who() -> AsyncIterator[str]:
        async with log.around("who"):
            yield "me"

    @server.tool(run="inline")
    def tool(who: Annotated[str, Depends(who)]) -> str:
        return who

    @server.resource("about://{topic}")
    async def about(topic: str, who: Annotated[str, Depends(who)]) -> str:
        return f"{topic} by {who}"

    @server.prompt
    async def prompt(topic: str, who: Annotated[str, Depends(who)]) -> str:
        return f"{topic} for {who}"

    @server.complete(prompt, "topic")
    async def topics(typed: str, who: Annotated[str, Depends(who)]) -> list[str]:
        return [typed + who]

    async with connected(server) as session:
        assert text(await session.call_tool("tool")) == "me"
        contents: Any = (await session.read_resource("about://a")).contents
        assert contents[0].text == "a by me"
        prompted: Any = (await session.get_prompt("prompt", {"topic": "b"})).messages[0].content
        assert prompted.text == "b for me"
        assert list((await session.complete_prompt("prompt", "topic", "c")).values) == ["cme"]
    assert log == ["+who", "-who"] * 4


@asynccontextmanager
async def connection(running: Running) -> AsyncIterator[ClientSession]:
    ours, theirs = direct_ends()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.serve, ours)
        async with Client("c").connect(theirs, revision=V2025_11_25) as session:
            yield session


def sharing(log: Log) -> Server[Any]:
    server = Server("s")

    async def pool() -> AsyncIterator[str]:
        async with log.around("pool") as name:
            yield name

    async def cart(pool: Annotated[str, Depends(pool, scope="server")]) -> AsyncIterator[list[str]]:
        async with log.around("cart"):
            yield [pool]

    async def line(cart: Annotated[list[str], Depends(cart, scope="session")]) -> AsyncIterator[list[str]]:
        async with log.around("line"):
            yield cart

    @server.tool
    async def put(thing: str, line: Annotated[list[str], Depends(line)]) -> list[str]:
        await trio.sleep(1)
        line.append(thing)
        return line

    return server


async def test_a_session_and_a_run_enter_once_what_belongs_to_them(log: Log, autojump_clock: Any) -> None:
    server = sharing(log)
    async with server.running() as running:
        assert log.take() == ["+pool"]
        async with connection(running) as one:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.call_tool, "put", {"thing": "a"})
                nursery.start_soon(one.call_tool, "put", {"thing": "b"})
            assert sorted(log.take()) == ["+cart", "+line", "+line", "-line", "-line"]
            async with connection(running) as other:
                result = await other.call_tool("put", {"thing": "c"})
                assert result.structured_content == {"result": ["pool", "c"]}
            assert log.take() == ["+cart", "+line", "-line", "-cart"]
            assert sorted((await one.call_tool("put", {"thing": "d"})).structured_content["result"]) == [
                *"abd",
                "pool",
            ]
        assert log.take() == ["+line", "-line", "-cart"]
    assert log == ["-pool"]


@pytest.mark.parametrize(("revision", "kept"), [("2026-07-28", False), ("2025-11-25", True)])
async def test_over_http_a_session_is_what_the_revision_has(log: Log, revision: str, kept: bool) -> None:
    server = sharing(log)
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(partial(trimcp.serve_http, server, port=0))
        async with Client("c").connect(trimcp.http(url), revision=revision) as session:
            await session.call_tool("put", {"thing": "a"})
            last = (await session.call_tool("put", {"thing": "b"})).structured_content["result"]
        nursery.cancel_scope.cancel()
    assert last == (["pool", "a", "b"] if kept else ["pool", "b"])
    assert log.count("+cart") == log.count("-cart") == (1 if kept else 2)
    assert log[-1] == "-pool"


async def test_what_a_session_enters_is_left_though_its_task_is_cancelled(log: Log, autojump_clock: Any) -> None:
    server = Server("s")

    async def slow() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await trio.sleep(1)
            log.append("closed")
            await trio.sleep_forever()

    @server.tool
    async def tool(slow: Annotated[None, Depends(slow, scope="session")]) -> str:
        return "done"

    async with connected(server, revision=V2025_11_25) as session:
        await session.call_tool("tool")
    assert log == ["closed"]


async def test_a_session_tries_again_what_failed(autojump_clock: Any) -> None:
    server = Server("s")
    tried = []

    async def flaky() -> str:
        tried.append(1)
        if len(tried) == 1:
            raise trimcp.ToolError("not yet")
        return "now"

    @server.tool
    async def tool(flaky: Annotated[str, Depends(flaky, scope="session")]) -> str:
        return flaky

    async with connected(server, revision=V2025_11_25) as session:
        assert [text(await session.call_tool("tool")) for _ in range(3)] == ["not yet", "now", "now"]
    assert len(tried) == 2


async def test_a_test_overrides_what_is_provided(log: Log, autojump_clock: Any) -> None:
    server = Server("s")

    async def database() -> str:
        raise AssertionError("the real one")

    @server.tool
    async def tool(
        mine: Annotated[str, Depends(database)], ours: Annotated[str, Depends(database, scope="server")]
    ) -> str:
        return f"{mine} {ours}"

    async def fake() -> AsyncIterator[str]:
        async with log.around("fake") as name:
            yield name

    with server.override(database, fake):
        async with connected(server) as session:
            assert text(await session.call_tool("tool")) == "fake fake"
            with server.override(database, lambda: "other"):
                assert text(await session.call_tool("tool")) == "other fake"
    assert log == ["+fake", "+fake", "-fake", "-fake"]
    assert not server.needs.overrides
    with pytest.raises(TypeError, match="takes nothing"), server.override(database, lambda x: x):
        pass


def needs_context(ctx: Context[Any]) -> str:
    return ctx.method


def of_a_request() -> str:
    return ""


def needs_less(x: Annotated[str, Depends(of_a_request)]) -> str:
    return x


def needs_an_argument(x: str) -> str:
    return x


def asks(x: Annotated[str, Elicit("What?")]) -> str:
    return x


def in_a_circle(x: Annotated[str, Depends(lambda: circle())]) -> str:
    return x


def circle() -> str:
    return ""


in_a_circle.__annotations__["x"] = Annotated[str, Depends(in_a_circle)]


@pytest.mark.parametrize(
    ("marker", "why"),
    [
        (Depends(needs_context, scope="server"), "belongs to the server, and cannot take the Context"),
        (Depends(needs_less, scope="session"), "to a request"),
        (Depends(needs_an_argument), "nobody fills the parameter 'x'"),
        (Depends(asks), "only a handler declares questions"),
        (Depends(in_a_circle), "needs itself"),
        (Depends(of_a_request, scope="app"), "scope of Depends is"),  # type: ignore[arg-type]
        (Depends("db"), "takes a function"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_provided_is_refused_with_a_reason(marker: Depends, why: str) -> None:
    async def tool(x: Any) -> str:
        return "never"

    tool.__annotations__["x"] = Annotated[str, marker]
    with pytest.raises(TypeError, match=why):
        Server("s").tool(tool)


def in_process(x: Annotated[str, Depends(of_a_request)]) -> str:
    return x


def test_a_worker_process_gets_nothing_of_this_one() -> None:
    with pytest.raises(TypeError, match="cannot be handed to a worker process"):
        Server("s").tool(run="process")(in_process)


async def test_what_belongs_to_a_run_is_declared_before_it_starts(autojump_clock: Any) -> None:
    server = Server("s")
    async with server.running():
        with pytest.raises(trimcp.LocalError, match="when the server starts"):

            @server.tool
            async def tool(x: Annotated[str, Depends(of_a_request, scope="server")]) -> str:
                return x

        assert not len(server.tools)
