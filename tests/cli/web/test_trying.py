"""The commands of `trimcp inspect --web`: calls, questions, what is said, in bounded memory."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import served
from trimcp.cli.web.trying import Feed, Trying

SECRET = "hunter2-hunter2"


@attrs.define
class Answers:
    name: str


def make_server(reasons: list[str]) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("tour")

    @server.tool
    async def hold(*, ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, total=2, message="half")
        try:
            await trio.sleep_forever()
        finally:
            reasons.append(ctx.cancel_reason.value if ctx.cancel_reason else "")
        return ""

    @server.tool
    async def greet(password: str, *, ctx: trimcp.Context) -> str:
        answer = await ctx.elicit("who?", Answers)
        return answer.action if answer.value is None else f"hello {answer.value.name}"

    @server.resource("note://one")
    def one() -> str:
        return "a note"

    @server.prompt
    def ask(about: str) -> str:
        return f"tell me of {about}"

    return server


@attrs.define(eq=False)
class Tab:
    """Asks as the page does, and keeps what came."""

    trying: Trying
    seen: dict[str, list[Any]] = attrs.field(factory=dict)

    async def run(self, name: str, /, **members: Any) -> list[Any]:
        lines = self.seen.setdefault(name, [])

        async def send(value: Any) -> None:
            lines.append(json.loads(json.dumps(value)))

        await getattr(self.trying, name)(members, send)
        return lines

    async def until(self, name: str, found: Any) -> Any:
        """Wait for a line of a command that is under way."""
        with trio.fail_after(PATIENCE):
            while not (wanted := [line for line in self.seen.get(name, ()) if found(line)]):
                await trio.testing.wait_all_tasks_blocked(0.01)
            return wanted[-1]


@asynccontextmanager
async def opened(reasons: list[str] | None = None) -> AsyncIterator[tuple[Tab, trio.Nursery]]:
    async with served(make_server([] if reasons is None else reasons), "http") as place:
        trying = Trying(place.url)
        parts = trying.parts()
        client = trimcp.Client("page", "1")
        client.elicitation(parts.answer)
        async with (
            client.connect(parts.watch(trimcp.http(place.url))) as session,
            trying.serving(session),
            trio.open_nursery() as nursery,
        ):
            yield Tab(trying), nursery
            nursery.cancel_scope.cancel()


async def test_the_offer_is_what_the_server_has() -> None:
    async with opened() as (tab, _):
        (line,) = await tab.run("offer")
    assert [tool["name"] for tool in line["done"]["tools"]] == ["hold", "greet"]
    assert line["done"]["target"].startswith("http://127.0.0.1:")


async def test_a_call_tells_its_progress_and_a_cancel_reaches_its_handler() -> None:
    reasons: list[str] = []
    async with opened(reasons) as (tab, nursery):
        nursery.start_soon(partial(tab.run, "call", id="1", tool="hold", arguments={}))
        step = await tab.until("call", lambda line: "progress" in line)
        assert (step["progress"], step["total"], step["message"]) == (1, 2, "half")
        with pytest.raises(trimcp.LocalError, match="under way already"):
            await tab.run("call", id="1", tool="hold", arguments={})
        nursery.start_soon(partial(tab.run, "events"))
        await tab.run("cancel", id="1", reason="enough of it")
        assert (await tab.until("call", lambda line: "error" in line))["error"] == "cancelled"
        while not reasons:
            await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(trimcp.LocalError, match="has ended"):
            await tab.run("cancel", id="1")


async def test_a_question_is_answered_and_its_call_goes_on() -> None:
    async with opened() as (tab, nursery):
        nursery.start_soon(partial(tab.run, "events"))
        nursery.start_soon(partial(tab.run, "call", id="1", tool="greet", arguments={"password": SECRET}))
        state = await tab.until("events", lambda line: line["questions"])
        (question,) = state["questions"]
        assert (question["message"], list(question["requestedSchema"]["properties"])) == ("who?", ["name"])
        with pytest.raises(ValueError, match="`action` is one of"):
            await tab.run("answer", id=question["id"], action="perhaps")
        await tab.run("answer", id=question["id"], action="accept", content={"name": "Ada"})
        done = (await tab.until("call", lambda line: "done" in line))["done"]
        assert done["content"][0]["text"] == "hello Ada"
        await tab.until("events", lambda line: not line["questions"] and line is tab.seen["events"][-1])
        with pytest.raises(trimcp.LocalError, match="not asked any more"):
            await tab.run("answer", id=question["id"], action="decline")


async def test_messages_have_a_size_and_a_time_and_no_secrets() -> None:
    async with opened() as (tab, nursery):
        nursery.start_soon(partial(tab.run, "events"))
        nursery.start_soon(partial(tab.run, "call", id="1", tool="greet", arguments={"password": SECRET}))
        await tab.until("events", lambda line: line["questions"])
        messages = [event for line in tab.seen["events"] for event in line["events"] if event["kind"] == "message"]
    (call,) = [each for each in messages if each["method"] == "tools/call"]
    assert call["ours"] is True
    assert call["size"] > len(SECRET)
    assert SECRET not in json.dumps(messages)
    hello = next(each for each in messages if not each["ours"] and each["method"] is None)
    assert hello["took"] >= 0
    assert hello["size"] > 0


async def test_what_else_is_there_is_read_and_filled_in() -> None:
    async with opened() as (tab, _):
        (line,) = await tab.run("read", uri="note://one")
        assert line["done"]["contents"][0]["text"] == "a note"
        (line,) = await tab.run("prompt", name="ask", arguments={"about": "tea"})
        assert line["done"]["messages"][0]["content"]["text"] == "tell me of tea"
        with pytest.raises(ValueError, match="arguments are an object"):
            await tab.run("prompt", name="ask", arguments=[])


async def test_an_error_of_the_server_is_told_with_its_code() -> None:
    async with opened() as (tab, _):
        (line,) = await tab.run("call", id="1", tool="none", arguments={})
    assert line["code"] == -32602


# The feed, in virtual time


async def test_a_slow_page_is_told_what_it_missed(autojump_clock: trio.testing.MockClock) -> None:
    feed = Feed(lambda: {"state": "now"})
    got: list[Any] = []
    turn = trio.Event()

    async def send(value: Any) -> None:
        await turn.wait()
        got.append(value)

    async with trio.open_nursery() as nursery:
        feed.add("log", text="first")
        nursery.start_soon(feed.follow, send)
        await trio.testing.wait_all_tasks_blocked()
        for number in range(10_000):
            feed.add("log", text=str(number))
        turn.set()
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    first, second = got
    assert ([event["text"] for event in first["events"]], first["missed"]) == (["first"], 0)
    assert len(second["events"]) == 500
    assert second["missed"] == 9_500
    assert second["events"][-1]["text"] == "9999"
    assert second["state"] == "now"


async def test_a_page_that_reads_on_gets_each_event_once(autojump_clock: trio.testing.MockClock) -> None:
    feed = Feed(dict)
    got: list[int] = []

    async def send(value: Any) -> None:
        got.extend(event["n"] for event in value["events"])
        assert value["missed"] == 0

    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.follow, send)
        for _ in range(100):
            feed.add("log", "")
            await trio.sleep(0.03)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert got == list(range(1, 101))


RUDE = """
import json, sys

def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

for line in sys.stdin:
    asked = json.loads(line)
    id, method = asked.get("id"), asked.get("method")
    if method == "initialize":
        info = {"name": "s", "version": "1"}
        say(id=id, result={"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "server/discover":
        say(id=id, error={"code": -32601, "message": "no"})
    elif method == "tools/call":
        long, schema = "y" * 200_000, {"type": "object", "properties": {}}
        for n in range(40):
            say(method="notifications/message", params={"level": "error", "logger": long, "data": long})
            say(method=long)
            say(id=f"{n}" + "y" * 300, method="x")
        for n in range(5):
            say(id=n, method="elicitation/create", params={"message": long, "requestedSchema": schema})
        say(id=id, result={"content": []})
    elif method and id is not None:
        say(id=id, result={"tools": []})
"""


async def test_whatever_a_server_says_at_length_a_page_gets_little_of_it(tmp_path: Path) -> None:
    """Of methods, ids, loggers and questions as of texts."""
    (tmp_path / "rude.py").write_text(RUDE)
    trying, largest = Trying("rude"), 0
    parts = trying.parts()
    client = trimcp.Client("page", "1")
    client.elicitation(parts.answer)
    client.logging(parts.log)

    async def send(value: Any) -> None:
        nonlocal largest
        largest = max(largest, len(json.dumps(value)))

    with trio.fail_after(PATIENCE):
        async with (
            client.connect(parts.watch(trimcp.stdio(sys.executable, tmp_path / "rude.py"))) as session,
            trying.serving(session),
            trio.open_nursery() as nursery,
        ):
            await Tab(trying).run("call", id="1", tool="x", arguments={})
            nursery.start_soon(trying.events, {}, send)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
    assert 100_000 < largest < 300 * 10 * 1024
    assert sum(len(json.dumps(event)) for event in trying.feed.kept) < 300 * 10 * 1024
    told = [event["text"] for event in trying.feed.kept if event.get("level") == "warning"]
    assert told
    assert all(text.startswith("a question of 200,") and text.endswith("was not shown") for text in told)
