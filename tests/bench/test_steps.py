"""Calls that are more than a request and its answer: on servers of this package, in both eras, and on some that err."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any

import attrs
import pytest
import trio

import trimcp
from tests.bench.test_http import ERAS, counts
from tests.peers.serving import served
from trimcp.agent_tools import AgentTools
from trimcp.bench import steps
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Report
from trimcp.bench.team import share
from trimcp.client.client import at_url
from trimcp.errors import ErrorReply, LocalError
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.peers.identity import Head, Refused
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.revisions import LATEST_LEGACY

PAGE = "desk://page"


@attrs.frozen
class Wishes:
    seat: str
    bags: int = 2


def desk(told: Callable[[int], bool] = lambda number: True) -> trimcp.Server[Any]:
    """A server with a tool for each step; `told` says which changes are told."""
    server = trimcp.Server("desk", version="1.0")
    turned = 0

    @server.resource(PAGE)
    async def page() -> str:
        """The page."""
        return ""

    @server.tool
    async def turn() -> str:
        """Turn the page."""
        nonlocal turned
        turned += 1
        if told(turned):
            server.resource_updated(PAGE)
        return "turned"

    @server.tool
    async def book(train: str, wishes: Annotated[Wishes, trimcp.Elicit("How do you want to travel?")]) -> str:
        """Book a seat."""
        return f"{train}: {wishes.seat}, {wishes.bags}"

    @server.tool
    async def name_it(*, ctx: trimcp.Context[Any]) -> str:
        """Ask the model."""
        asked = trimcp.wire.SamplingMessage(role="user", content=trimcp.Text("a name"))
        return (await ctx.sample(trimcp.CreateMessageParams(messages=[asked], max_tokens=5))).text

    @server.tool
    async def who(*, ctx: trimcp.Context[Any]) -> str:
        """Ask with a form that has a default."""
        form = {"type": "object", "properties": {"name": {"type": "string", "default": "Zoe"}}, "required": ["name"]}
        return str((await ctx.elicit("Who?", form)).content["name"])

    @server.tool
    async def echo(text: str) -> str:
        """Return the text."""
        return text

    @server.tool
    async def fail() -> str:
        """Fail."""
        raise trimcp.ToolError("no")

    @server.tool(task="required")
    async def report(year: int) -> str:
        """Write a report."""
        return f"report of {year}"

    return server


async def measured(server: Any, entry: Any, **options: Any) -> Report:
    async with served(server) as place:
        return await measure(HttpServer(place.url), Plan(entry, **options))


def book(**options: Any) -> MixEntry:
    return MixEntry.tool("book", {"train": "T{n}"}, step="question", **options)


def turn(name: str = "turn") -> MixEntry:
    return MixEntry.tool(name, {}, step="change", resource=PAGE)


# Questions


@pytest.mark.parametrize("revision", ERAS)
async def test_forms_are_filled_in_and_the_model_is_answered_for(revision: str) -> None:
    others = [
        MixEntry.tool(name, {}, step="question", expect=text)
        for name, text in {"name_it": "Momo", "who": "Zoe"}.items()
    ]
    mix = [book(expect="T{n}: window, 2"), *others]
    options: Any = {"count": 30, "sessions": 2, "revision": revision, "answer": {"seat": "window", "other": 1}}
    report = await measured(desk(), mix, sampled="Momo", **options)
    assert (report.calls, report.errors) == (30, {})
    asked = {label: times.count for label, times in report.requests.items() if label.endswith(": question")}
    assert set(asked) == {"book: question", "name_it: question", "who: question"}
    assert sum(asked.values()) == 30


async def test_a_call_that_asks_nothing_and_a_form_without_an_answer_are_errors() -> None:
    asks_nothing = MixEntry.tool("echo", {"text": "x"}, step="question")
    assert counts(await measured(desk(), asks_nothing, count=3)) == {"no question": 3}
    report = await measured(desk(), book(), count=3, answer={"bags": 1})
    assert counts(report) == {"no answer to a question": 3, "tool error": 3}
    assert report.errors["no answer to a question"].example == "the form needs seat: give it with --answer"


# Changes


@pytest.mark.parametrize("revision", ERAS)
async def test_every_session_is_told_of_every_change(revision: str) -> None:
    report = await measured(desk(), turn(), count=10, sessions=3, revision=revision)
    assert (report.calls, report.errors) == (10, {})
    assert (report.requests["turn: notice"].count, report.requests["turn: answer"].count) == (30, 10)
    assert report.requests["turn"].least >= max(report.requests["turn: answer"].least, 0.0)


async def test_notices_that_are_lost_are_counted_for_each_session(
    monkeypatch: pytest.MonkeyPatch, steady_clock: trio.abc.Clock
) -> None:
    monkeypatch.setattr(steps, "_TOLD", 0.2)
    report = await measured(desk(lambda number: number != 2), turn(), count=4, sessions=2)
    assert (report.calls, counts(report)) == (3, {"no notice": 2})
    assert report.errors["no notice"].example == f"2 of 2 sessions were not told that {PAGE} changed"
    assert report.requests["turn: notice"].count == 6


async def test_changes_that_had_no_turn_before_the_end_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_TOLD", 30.0)
    server = desk()

    @server.tool
    async def turn_slowly() -> str:
        """Turn the page."""
        await trio.sleep(0.2)
        server.resource_updated(PAGE)
        return "turned"

    report = await measured(server, turn("turn_slowly"), rate=30.0, seconds=0.3)
    assert report.errors.keys() == {"not begun"}
    assert report.errors["not begun"].example.startswith("the measurement ended before ")


async def test_a_subscription_that_is_refused_is_told() -> None:
    server = desk()

    @server.middleware
    async def refuse(ctx: trimcp.Context[Any], params: Any, call_next: Callable[..., Any]) -> Any:
        """Refuse subscriptions."""
        if ctx.method == "resources/subscribe":
            raise ErrorReply(-32000, "no subscriptions today")
        return await call_next(ctx, params)

    report = await measured(server, turn(), count=1, reopen=0, revision=LATEST_LEGACY.name)
    assert (report.calls, counts(report)) == (0, {"no connection": 1})
    assert "no subscriptions today" in report.errors["no connection"].example


async def test_nobody_waits_for_a_notice_of_what_did_not_change() -> None:
    report = await measured(desk(), turn("fail"), count=3)
    assert counts(report) == {"tool error": 3}


# Tasks


async def test_a_task_is_waited_for() -> None:
    entry = MixEntry.tool("report", {"year": 7}, step="task", expect="report of 7")
    report = await measured(desk(), entry, count=6, under_way=3)
    assert (report.calls, report.errors, report.requests["report: task"].count) == (6, {}, 6)


async def test_what_is_no_task_is_an_error() -> None:
    report = await measured(desk(), MixEntry.tool("echo", {"text": "x"}, step="task"), count=2)
    assert counts(report) == {"no task": 2}


# Agent tools


@pytest.mark.parametrize("transport", ["http", "ws", "grpc"])
async def test_agent_tools_are_called_over_each_transport(transport: str) -> None:
    server = desk()
    entry = MixEntry.tool("echo", {"text": "t {n}"}, step="agent", expect="t {n}")
    plan = Plan([entry, attrs.evolve(entry, weight=0.5)], count=20, sessions=2, under_way=2)
    tools = AgentTools(server, anonymous="loopback")
    async with served(server, "grpc" if transport == "grpc" else "http", agent_tools=tools) as place:
        target: Any = at_url(place.url.removesuffix("/mcp").replace("http", transport))
        report = await measure(target, plan)
        kind = {"http": "agents_http", "ws": "agents_websocket", "grpc": "agents_grpc"}[transport]
        assert (report.calls, report.errors, report.transport) == (20, {}, kind)
        assert report.revision == "agent tools"
        wrong = MixEntry.tool("fail", {}, step="agent")
        assert counts(await measure(target, Plan(wrong, count=2))) == {"error tool_error": 2}
        with pytest.raises(LocalError, match="has no tool 'none'; it has"):
            await measure(target, Plan(MixEntry.tool("none", {}, step="agent"), count=2))
    assert Report.from_json(report.to_json()).transport == kind


async def test_mcp_is_measured_through_grpc() -> None:
    async with served(desk(), "grpc") as place:
        target: Any = at_url(place.url)
        entry = MixEntry.tool("echo", {"text": "t {n}"}, expect="t {n}")
        report = await measure(target, Plan([entry, MixEntry("tools/list")], count=10, under_way=2))
        assert (report.calls, report.errors, report.transport) == (10, {}, "grpc")
        with pytest.raises(LocalError, match="--progress, --cut, --reply and --replica-by are for"):
            await measure(target, Plan(entry, count=1, progress=True))


# Tokens that end


@attrs.define(eq=False)
class Ending:
    """Tokens, of which the server takes each for four requests only."""

    number: int = 1
    used: int = 0
    person: Callable[[], Any] = nullcontext

    @asynccontextmanager
    async def connected(self, server: str, /) -> AsyncIterator[Any]:
        yield self

    async def headers(self, method: str, url: str, /) -> Mapping[str, str]:
        return {"authorization": f"Bearer token-{self.number}"}

    def helps(self, status: int, headers: Mapping[str, str], /) -> bool:
        return status == 401

    def accepted(self, sent: Mapping[str, str], /) -> None:
        pass

    async def refused(self, status: int, headers: Mapping[str, str], sent: Mapping[str, str], tries: int, /) -> None:
        self.number, self.used = self.number + 1, 0

    def judge(self, head: Head) -> Any:
        self.used += 1
        right = head.headers.get("authorization") == f"Bearer token-{self.number}" and self.used <= 4
        return trimcp.Principal("somebody") if right else Refused(401, (("WWW-Authenticate", "Bearer"),), "ended")


async def test_tokens_that_end_are_renewed_and_counted() -> None:
    ending = Ending()
    async with served(desk(), settings=HttpSettings(authenticate=ending.judge)) as place:
        entry = MixEntry.tool("echo", {"text": "x"}, expect="x")
        report = await measure(HttpServer(place.url, auth=ending), Plan(entry, count=20))
    assert (report.calls, report.errors) == (20, {})
    assert report.requests["token renewed"].count == 5
    assert "token-" not in str(report.to_json())


# What ends early


async def test_a_server_that_ends_is_told() -> None:
    server = desk()

    @server.tool
    async def leave() -> str:
        """End the server."""
        place.scope.cancel()
        await trio.sleep_forever()
        return ""

    async with served(server, "websocket") as place:
        target: Any = at_url(place.url)
        report = await measure(target, Plan(MixEntry.tool("leave", {}, step="question"), count=4, reopen=0))
    assert report.calls == 0
    assert report.errors
    assert set(counts(report)) <= {"connection lost", "error 1002"}


async def test_calls_are_given_up_after_their_time() -> None:
    server = desk()

    @server.tool
    async def wait() -> str:
        """Wait."""
        await trio.sleep_forever()
        return ""

    entry = MixEntry.tool("wait", {}, step="task")
    report = await measured(server, entry, count=4, under_way=2, timeout=0.05)
    assert (report.timed_out, report.errors) == (4, {})


# What does not go together


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"step": "sing"}, "step is one of call, question, change, task, agent"),
        ({"step": "change"}, "a change goes with a resource"),
        ({"resource": PAGE}, "a change goes with a resource"),
    ],
)
def test_a_step_that_cannot_be_carried_out_is_refused(fields: Any, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        MixEntry.tool("echo", {}, **fields)
    with pytest.raises(LocalError, match="a task begins with a call of a tool, not with tools/list"):
        MixEntry("tools/list", step="task")


@pytest.mark.parametrize(
    ("entry", "options", "why"),
    [
        (book(), {"under_way": 2}, "a question does not say which call it is of"),
        ([book(), MixEntry.tool("echo", {}, step="agent")], {}, "agent tools are another protocol"),
        (turn(), {"answer": {"a": 1}}, "--answer goes with --step question"),
        (turn(), {"progress": True}, "--progress, --cut, --reply and --replica-by go with --step call"),
        (turn(), {"reply": "json"}, "--progress, --cut, --reply and --replica-by go with --step call"),
    ],
)
def test_options_that_do_not_go_with_a_step_are_refused(entry: Any, options: Any, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        Plan(entry, **options)


async def test_what_a_server_lacks_for_a_step_is_said_before_anything_is_measured() -> None:
    plain = trimcp.Server("plain")
    plain.tool(name="turn")(lambda: "turned")
    with pytest.raises(LocalError, match="the server does not tell changes of resources"):
        await measured(plain, turn(), count=1)
    with pytest.raises(LocalError, match=f"there are no tasks with this server in {LATEST_LEGACY.name}"):
        task = MixEntry.tool("report", {"year": 7}, step="task")
        await measured(desk(), task, count=1, revision=LATEST_LEGACY.name)
    with pytest.raises(LocalError, match="agent tools have a URL"):
        await measure(trimcp.stdio(["true"]), Plan(MixEntry.tool("echo", {}, step="agent")))


def test_changes_take_turns_in_one_process() -> None:
    with pytest.raises(LocalError, match="changes take turns in one process"):
        share(Plan(turn(), sessions=4), 0, 2)


async def test_an_open_loop_of_questions_has_one_call_under_way_in_each_session(steady_clock: trio.abc.Clock) -> None:
    plan = Plan(book(), rate=10.0, sessions=3)
    assert plan.places == 1
    with trio.fail_after(60):
        report = await measured(desk(), book(), rate=100.0, seconds=0.2, answer={"seat": "aisle"})
    assert report.calls > 0
    assert report.errors == {}
