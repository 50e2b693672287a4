"""A client for programs without Trio: calls, progress, questions, cancellation, time and errors, both ways."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

import trimcp
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, RemoteError
from trimcp.wire.input_requests import ElicitResult

FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


class Place:
    """A server with tools, and what they went through."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.reached = threading.Event()
        self.left = threading.Event()
        self.server: trimcp.Server[None] = trimcp.Server("place", dynamic=True)
        self.server.tool(self.add)
        self.server.tool(self.count)
        self.server.tool(self.wait)
        self.server.tool(self.ask)
        self.server.tool(self.fail)
        self.server.tool(self.grow)

    async def add(self, a: int, b: int) -> int:
        return a + b

    async def count(self, ctx: trimcp.Context[None]) -> str:
        for number in range(3):
            await ctx.report_progress(number + 1, 3)
        return "counted"

    async def wait(self) -> str:
        self.reached.set()
        try:
            await trio.sleep_forever()
        finally:
            self.left.set()

    async def ask(self, ctx: trimcp.Context[None], seconds: float = 60.0) -> str:
        with trio.move_on_after(seconds):
            found = await ctx.elicit("Who?", FORM)
            return str((found.content or {}).get("name"))
        return "no answer"

    async def fail(self) -> str:
        raise ValueError("no")

    async def grow(self) -> str:
        self.server.add_tool(self.add, name="more")
        return "grown"


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread of ours is left by any of these."""
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "trimcp"] == []


# --- blocking ---


def test_a_session_that_waits(place: Place) -> None:
    with trimcp.blocking.connect(place.server) as session:
        assert session.call_tool("add", {"a": 40, "b": 2}).text == "42"
        assert {tool.name for tool in session.list_tools()} >= {"add", "count"}
        assert session.revision is trimcp.LATEST
        assert session.server_info is not None
        assert session.server_info.name == "place"
        assert session.statistics().pending == 0
        session.ping()
        session.roots_changed()
        with pytest.raises(RemoteError, match="internal error"):
            session.call_tool("fail")
        with pytest.raises(RemoteError, match="unknown tool"):
            session.call_tool("nothing")
    with pytest.raises(ConnectionLost, match="the session has ended"):
        session.call_tool("add", {"a": 1, "b": 1})


def test_progress_and_changes_are_iterated_over(place: Place) -> None:
    with trimcp.blocking.connect(place.server) as session:
        with session.calling("count") as call:
            assert [each.progress for each in call.progress] == [1, 2, 3]
            assert call.result().text == "counted"
            assert call.result().text == "counted"
        with session.listen(tools=True) as changes:
            assert changes.acknowledged.tools_list_changed
            session.call_tool("grow")
            assert changes.receive() == trimcp.ToolsChanged()
        with session.calling("wait"):
            place.reached.wait(5)
        assert place.left.wait(5)


def test_time_is_over_for_a_call_and_not_for_the_session(place: Place) -> None:
    with trimcp.blocking.connect(place.server) as session:
        with pytest.raises(TimeoutError), trimcp.blocking.timeout(0.05), trimcp.blocking.timeout(60):
            session.call_tool("wait")
        assert place.left.wait(5)
        with pytest.raises(TimeoutError), trimcp.blocking.timeout(0.05), session.calling("wait") as call:
            call.result()
        assert session.call_tool("add", {"a": 1, "b": 1}).text == "2"
    limited = trimcp.Client("c", request_timeout=0.05)
    with trimcp.blocking.connect(place.server, client=limited) as session:
        with pytest.raises(TimeoutError):
            session.call_tool("wait")
        with pytest.raises(TimeoutError), session.calling("wait") as call:
            call.result()
        assert session.call_tool("add", {"a": 1, "b": 1}).text == "2"


def test_a_handler_runs_in_a_thread_and_uses_the_session(place: Place) -> None:
    client = trimcp.Client("c")
    ran: list[str] = []

    @client.elicitation
    def answer(params: Any, session: trimcp.blocking.BlockingSession) -> ElicitResult:
        ran.append(session.call_tool("add", {"a": 1, "b": 1}).text)
        return ElicitResult("accept", {"name": "Ada"})

    for revision in (trimcp.LATEST, trimcp.LATEST_LEGACY):
        with trimcp.blocking.connect(place.server, client=client, revision=revision) as session:
            assert session.call_tool("ask").text == "Ada"
    assert ran == ["2", "2"]


def test_what_a_handler_raises_fails_the_call(place: Place) -> None:
    client = trimcp.Client("c")

    @client.elicitation
    def answer(params: Any) -> ElicitResult:
        raise ValueError("no idea")

    with trimcp.blocking.connect(place.server, client=client) as session:
        with pytest.raises(ValueError, match="no idea"):
            session.call_tool("ask")
        assert session.call_tool("add", {"a": 1, "b": 1}).text == "2"


def test_threads_share_a_session_and_a_thread(place: Place) -> None:
    found: list[str] = []
    with trimcp.blocking.connect(place.server) as session, trimcp.blocking.connect(place.server) as other:
        assert [thread.name for thread in threading.enumerate()].count("trimcp") == 1

        def work(number: int) -> None:
            found.append((session if number % 2 else other).call_tool("add", {"a": number, "b": 0}).text)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(int, found)) == [*range(20)]


def test_threads_connect_at_once(place: Place) -> None:
    found: list[str] = []

    def work() -> None:
        with trimcp.blocking.connect(place.server) as session:
            found.append(session.call_tool("add", {"a": 1, "b": 1}).text)

    for _ in range(5):
        threads = [threading.Thread(target=work) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert found == ["2"] * 50


def test_what_the_body_raises_comes_out_alone(place: Place) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        trimcp.blocking.connect(place.server) as session,
        session.calling("wait"),
    ):
        raise ZeroDivisionError


def test_what_cannot_be_connected_to_raises_and_leaves_nothing() -> None:
    with pytest.raises(TypeError, match="cannot connect to int"), trimcp.blocking.connect(7):  # type: ignore[arg-type]
        pass
    missing = trimcp.stdio("/nonexistent/program")
    with pytest.raises(LocalError, match="there is no such file"), trimcp.blocking.connect(missing):
        pass
    with pytest.raises(ConnectionLost), trimcp.blocking.connect(trimcp.stdio("true")):
        pass
    with pytest.raises(TimeoutError):
        never = trimcp.stdio("sleep", "60")
        with trimcp.blocking.connect(never, client=trimcp.Client("c", connect_timeout=0.2)):
            pass


def test_in_the_thread_of_trio_it_refuses_to_wait(place: Place) -> None:
    with trimcp.blocking.connect(place.server) as session:

        async def inside() -> None:
            session.ping()

        with pytest.raises(LocalError, match="cannot wait for another thread"):
            session.wait(inside)


def test_nobody_waits_for_a_thread_that_has_crashed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Exception] = []
    monkeypatch.setattr(threading, "excepthook", lambda crash: None)

    def call() -> None:
        try:
            session.call_tool("wait")
        except ConnectionLost as error:
            found.append(error)

    with pytest.raises(ConnectionLost), trimcp.blocking.connect(place.server) as session:
        caller = threading.Thread(target=call)
        caller.start()
        assert place.reached.wait(5)
        session.block.portal.soon(lambda: 1 / 0)
        caller.join(5)
        assert len(found) == 1
        [ours] = [thread for thread in threading.enumerate() if thread.name == "trimcp"] or [caller]
        ours.join(5)
        session.ping()


def test_what_was_opened_can_be_asked_until_the_session_ends(place: Place) -> None:
    found: list[str] = []
    with trimcp.blocking.connect(place.server) as session:
        with session.calling("count") as call:
            assert call.result().text == "counted"
        assert call.result().text == "counted"
        with session.calling("wait") as given_up:
            assert place.reached.wait(5)
        began = threading.Event()

        def ask() -> None:
            began.set()
            try:
                given_up.result()  # nothing will come
            except ConnectionLost as error:
                found.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        assert began.wait(5)
        session.ping()
    asking.join(5)
    assert found == ["the session has ended"]
    with pytest.raises(ConnectionLost, match="the session has ended"):
        call.result()


def test_roots_that_are_set_later_are_told(place: Place) -> None:
    @place.server.tool
    async def where(ctx: trimcp.Context[None]) -> list[str]:
        return [root.uri for root in await ctx.list_roots()]

    client = trimcp.Client("c", roots=["file:///a"])
    with trimcp.blocking.connect(place.server, client=client, revision=trimcp.LATEST_LEGACY) as session:
        assert "file:///a" in session.call_tool("where").text
        client.set_roots(["file:///b"])
        assert "file:///b" in session.call_tool("where").text
    assert client.sessions == set()


# --- asyncio ---


def run(body: Callable[[Any], Any], place: Place, client: trimcp.Client | None = None, **options: Any) -> None:
    async def main() -> None:
        async with trimcp.asyncio.connect(place.server, client=client, **options) as session:
            await body(session)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_session_of_asyncio(place: Place) -> None:
    async def body(session: trimcp.asyncio.AsyncioSession) -> None:
        answers = await asyncio.gather(*(session.call_tool("add", {"a": n, "b": 0}) for n in range(20)))
        assert [answer.text for answer in answers] == [str(n) for n in range(20)]
        async with session.calling("count") as call:
            assert [each.progress async for each in call.progress] == [1, 2, 3]
            assert (await call.result()).text == "counted"
        async with session.listen(tools=True) as changes:
            await session.call_tool("grow")
            async for change in changes:
                assert change == trimcp.ToolsChanged()
                break
        with pytest.raises(RemoteError, match="internal error"):
            await session.call_tool("fail")
        assert session.statistics().pending == 0

    run(body, place)


def test_cancelling_in_asyncio_cancels_at_the_server(place: Place) -> None:
    async def body(session: trimcp.asyncio.AsyncioSession) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await session.call_tool("wait")
        assert await asyncio.to_thread(place.left.wait, 5)
        place.left.clear()
        place.reached.clear()
        task = asyncio.create_task(session.call_tool("wait"))
        assert await asyncio.to_thread(place.reached.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(place.left.wait, 5)
        assert (await session.call_tool("add", {"a": 1, "b": 1})).text == "2"

    run(body, place)


def test_a_limit_of_the_client_is_a_timeout_in_asyncio(place: Place) -> None:
    async def body(session: trimcp.asyncio.AsyncioSession) -> None:
        with pytest.raises(TimeoutError):
            await session.call_tool("wait")
        with pytest.raises(TimeoutError):
            async with session.calling("wait") as call:
                await call.result()

    run(body, place, trimcp.Client("c", request_timeout=0.05))


def test_a_handler_runs_in_the_loop_and_is_cancelled_with_the_question(place: Place) -> None:
    client = trimcp.Client("c")
    threads: list[Any] = []
    cancelled = asyncio.Event()

    @client.elicitation
    async def answer(params: Any, session: trimcp.asyncio.AsyncioSession) -> ElicitResult:
        threads.append(threading.current_thread())
        if len(threads) > 1:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        return ElicitResult("accept", {"name": (await session.call_tool("add", {"a": 1, "b": 1})).text})

    async def body(session: trimcp.asyncio.AsyncioSession) -> None:
        assert (await session.call_tool("ask")).text == "2"
        assert threads == [threading.current_thread()]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.call_tool("ask")
        await cancelled.wait()

    run(body, place, client)


def test_of_a_thousand_cancelled_calls_nothing_is_left(place: Place) -> None:
    async def body(session: trimcp.asyncio.AsyncioSession) -> None:
        async def tasks() -> int:
            return trio.lowlevel.current_statistics().tasks_living

        before, ours = 0, asyncio.all_tasks()
        for turns in range(21, 0, -1):
            calls = [asyncio.create_task(session.call_tool("wait")) for _ in range(50)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in done)
            await session.ping()
            before = before or await session.wait(tasks)  # with the workers that the server keeps
        assert await session.wait(tasks) <= before
        assert session.statistics().pending == 0
        assert asyncio.all_tasks() == ours

    run(body, place)


def test_what_a_server_answers_wrongly_is_the_same_error(place: Place) -> None:
    @place.server.tool(output_schema={"type": "object", "required": ["n"]})
    async def odd() -> trimcp.CallToolResult:
        return trimcp.CallToolResult([], structured_content={})

    with trimcp.blocking.connect(place.server) as session:
        session.list_tools()
        with pytest.raises(InvalidReply, match="broke its own output schema"):
            session.call_tool("odd")
