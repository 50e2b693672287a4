"""What a client answers to its server's questions, in place and inside results."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, Scripted, connected, discover_result, initialize_result, text
from trimcp.client.client import Client
from trimcp.errors import ErrorReply, InvalidReply, LocalError, RemoteError
from trimcp.wire.content import TextContent
from trimcp.wire.input_requests import (
    CreateMessageParams,
    CreateMessageResult,
    ElicitResult,
    ElicitURLParams,
    Root,
    SamplingMessage,
)
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2025_11_25

both_eras = pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}
PROMPT = CreateMessageParams([SamplingMessage("user", TextContent("6 * 7?"))], 10)


def curious() -> HandMade:
    server = HandMade()

    @server.tool
    async def ask(params: Any, ctx: Any) -> Any:
        result = await ctx.elicit("name?", FORM)
        return text(f"{result.action} {result.content or ''}")

    @server.tool
    async def visit(params: Any, ctx: Any) -> Any:
        return text((await ctx.elicit_url("pay", "https://example.org/pay", elicitation_id="7")).action)

    @server.tool
    async def look(params: Any, ctx: Any) -> Any:
        return text((await ctx.elicit_url("look", "https://example.org/look")).action)

    @server.tool
    async def sample(params: Any, ctx: Any) -> Any:
        result = await ctx.sample(PROMPT)
        return text(f"{result.model}: {result.content.text}")

    @server.tool
    async def where(params: Any, ctx: Any) -> Any:
        return text(" ".join(root.uri for root in await ctx.list_roots()))

    return server


def said(result: Any) -> str:
    return "".join(content.text for content in result.content)


@pytest.mark.parametrize("revision", REVISIONS[2:], ids=str)
@pytest.mark.parametrize("kind", ["sync", "async", "with session"])
async def test_elicitation(revision: Any, kind: str) -> None:
    client = Client("c")
    accepted = ElicitResult("accept", {"name": "Ada"})

    if kind == "sync":

        @client.elicitation
        def answer(params: Any) -> Any:
            return accepted

    elif kind == "async":

        @client.elicitation
        async def answer_later(params: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return accepted

    else:

        @client.elicitation
        async def answer_whom(params: Any, *, session: Any) -> Any:
            assert session.server_info.name == "hand-made"
            return accepted

    async with connected(curious(), client, revision) as session:
        assert said(await session.call_tool("ask")) == "accept {'name': 'Ada'}"
        assert session.clocks.asked == 0


@both_eras
async def test_elicitation_by_url(revision: Any) -> None:
    client = Client("c")

    @client.elicitation
    async def answer(params: Any) -> Any:
        assert isinstance(params, ElicitURLParams)
        seen.append((params.url.rpartition("/")[2], params.elicitation_id))
        return ElicitResult("decline")

    seen: list[tuple[str, Any]] = []
    async with connected(curious(), client, revision) as session:
        for tool in ("visit", "look", "look"):
            assert said(await session.call_tool(tool)) == "decline"
    pages, ids = zip(*seen, strict=True)
    assert pages == ("pay", "look", "look")
    if revision is V2025_11_25:
        assert ids[0] == "7"
        assert len(set(ids)) == 3  # that revision wants one, so each question without one has its own
    else:
        assert set(ids) == {None}


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_sampling_may_answer_with_a_string(revision: Any) -> None:
    client = Client("c")

    @client.sampling
    def sample(params: CreateMessageParams) -> str:
        assert params.max_tokens == 10
        return "42"

    async with connected(curious(), client, revision) as session:
        assert said(await session.call_tool("sample")) == "unknown: 42"


@both_eras
async def test_sampling_is_approved_before_and_after_and_both_may_change_it(revision: Any) -> None:
    client = Client("c")
    verdicts: dict[str, Any] = {"before": True, "after": True}
    seen: list[Any] = []

    @client.sampling
    async def sample(params: CreateMessageParams) -> CreateMessageResult:
        seen.append(params.max_tokens)
        return CreateMessageResult("assistant", TextContent("41"), "m")

    @client.approve_sampling
    async def before(params: Any) -> Any:
        return verdicts["before"]

    @client.approve_sampled
    def after(params: Any, result: Any) -> Any:
        assert result.content == TextContent("41")
        return verdicts["after"]

    async with connected(curious(), client, revision) as session:
        assert said(await session.call_tool("sample")) == "m: 41"
        verdicts["before"] = CreateMessageParams(PROMPT.messages, 5)
        verdicts["after"] = CreateMessageResult("assistant", TextContent("42"), "m")
        assert said(await session.call_tool("sample")) == "m: 42"
        assert seen == [10, 5]
        for stage in ("after", "before"):
            verdicts[stage] = False
            with pytest.raises((LocalError, RemoteError)):
                await session.call_tool("sample")
        assert seen == [10, 5, 5]


async def test_a_refusal_reaches_a_legacy_server_as_its_code() -> None:
    client = Client("c")
    codes: list[int] = []
    server = curious()

    @server.tool
    async def careful(params: Any, ctx: Any) -> Any:
        try:
            await ctx.sample(PROMPT)
        except RemoteError as error:
            codes.append(error.code)
        return text("")

    @client.sampling
    def sample(params: Any) -> str:
        raise AssertionError("must not be asked")

    client.approve_sampling(lambda params: False)
    async with connected(server, client, LATEST_LEGACY) as session:
        await session.call_tool("careful")
    assert codes == [-1]


async def test_tools_in_sampling_need_to_be_declared() -> None:
    client = Client("c")

    @client.sampling
    def sample(params: Any) -> str:
        raise AssertionError("must not be asked")

    message = {"role": "user", "content": {"type": "text", "text": "?"}}
    tool = {"name": "t", "inputSchema": {"type": "object"}}
    server = asks_unasked("sampling/createMessage", {"messages": [message], "maxTokens": 1, "tools": [tool]})
    async with client.connect(server, revision=LATEST) as session:
        with pytest.raises(LocalError, match="may use tools"):
            await session.call_tool("x")


@both_eras
async def test_roots(revision: Any) -> None:
    client = Client("c")

    @client.roots
    async def roots() -> Any:
        return ["file:///a", Root("file:///b", name="b")]

    async with connected(curious(), client, revision) as session:
        assert said(await session.call_tool("where")) == "file:///a file:///b"
        client.set_roots(["file:///c"])
        assert said(await session.call_tool("where")) == "file:///c"


def asks_unasked(method: str, params: dict[str, Any]) -> Scripted:
    """A modern server that asks what the client never declared."""

    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        question = {"q": {"method": method, "params": params}}
        return {"id": message["id"], "result": {"resultType": "input_required", "inputRequests": question}}

    return Scripted(script)


async def test_a_question_without_a_handler_is_a_local_error() -> None:
    server = asks_unasked("elicitation/create", {"message": "?", "requestedSchema": FORM})
    async with Client("c").connect(server, revision=LATEST) as session:
        with pytest.raises(LocalError, match="no handler for elicitation/create"):
            await session.call_tool("x")
        with pytest.raises(LocalError, match="no handler"):
            async with session.calling("x") as call:
                await call.result()
    assert server.methods == ["server/discover", "tools/call", "tools/call"]


async def test_a_mode_that_was_not_declared_is_refused() -> None:
    client = Client("c")

    @client.elicitation(url=False)
    def answer(params: Any) -> Any:
        raise AssertionError("must not be asked")

    server = asks_unasked("elicitation/create", {"mode": "url", "message": "?", "url": "https://example.org"})
    async with client.connect(server, revision=LATEST) as session:
        with pytest.raises(LocalError, match="did not declare elicitation in url mode"):
            await session.call_tool("x")


async def test_a_legacy_server_that_asks_what_was_not_declared_gets_an_error() -> None:
    def script(message: dict[str, Any]) -> Any:
        if message.get("method") == "initialize":
            return initialize_result(message["id"])
        if message.get("method") == "ping":
            return [{"id": "s1", "method": "roots/list"}, {"id": message["id"], "result": {}}]
        return None

    server = Scripted(script)
    async with Client("c").connect(server, revision=LATEST_LEGACY) as session:
        await session.ping()
        await trio.testing.wait_all_tasks_blocked()
    assert server.heard[-1]["id"] == "s1"
    assert server.heard[-1]["code"] == -32601


async def test_a_server_may_ask_only_so_often(autojump_clock: Any) -> None:
    client = Client("c", asks_per_minute=2)
    server = curious()
    outcomes: list[Any] = []

    @client.elicitation
    def answer(params: Any) -> Any:
        return ElicitResult("cancel")

    @server.tool
    async def pester(params: Any, ctx: Any) -> Any:
        try:
            await ctx.elicit("?", FORM)
            outcomes.append("answered")
        except RemoteError as error:
            outcomes.append(error.code)
        return text("")

    async with connected(server, client, LATEST_LEGACY) as session:
        for _ in range(3):
            await session.call_tool("pester")
        assert outcomes == ["answered", "answered", 1001]
        await trio.sleep(31)
        await session.call_tool("pester")
        assert outcomes[-1] == "answered"
        await trio.sleep(3600)  # what was not used is not saved up
        for _ in range(3):
            await session.call_tool("pester")
        assert outcomes[-3:] == ["answered", "answered", 1001]
    async with connected(server, client, LATEST) as session:
        await session.call_tool("ask")
        await session.call_tool("ask")
        with pytest.raises(LocalError, match="at most 2 questions a minute"):
            await session.call_tool("ask")


async def test_a_handlers_own_exception_reaches_the_caller_of_a_modern_call() -> None:
    client = Client("c")

    @client.elicitation
    def answer(params: Any) -> Any:
        raise KeyError("mine")

    async with connected(curious(), client, LATEST) as session:
        with pytest.raises(KeyError, match="mine"):
            await session.call_tool("ask")
        with pytest.raises(KeyError, match="mine"):
            async with session.calling("ask") as call:
                await call.result()


async def test_a_handlers_crash_tells_a_legacy_server_nothing(caplog: Any) -> None:
    client = Client("c")
    seen: list[str] = []
    server = curious()

    @client.elicitation
    def answer(params: Any) -> Any:
        raise KeyError("secret")

    @server.tool
    async def careful(params: Any, ctx: Any) -> Any:
        try:
            await ctx.elicit("?", FORM)
        except RemoteError as error:
            seen.append(str(error))
        return text("")

    async with connected(server, client, V2025_11_25) as session:
        await session.call_tool("careful")
    assert seen
    assert "secret" not in seen[0]
    assert "secret" in caplog.text


async def test_a_handler_may_answer_with_an_error_of_its_own() -> None:
    client = Client("c")
    codes: list[int] = []
    server = curious()

    @client.elicitation
    def answer(params: Any) -> Any:
        raise ErrorReply(77, "not now")

    @server.tool
    async def careful(params: Any, ctx: Any) -> Any:
        try:
            await ctx.elicit("?", FORM)
        except RemoteError as error:
            codes.append(error.code)
        return text("")

    async with connected(server, client, LATEST_LEGACY) as session:
        await session.call_tool("careful")
    assert codes == [77]
    async with connected(server, client, LATEST) as session:
        with pytest.raises(LocalError, match="not now"):
            await session.call_tool("ask")


async def test_an_empty_demand_for_input_is_an_invalid_reply() -> None:
    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        return {"id": message["id"], "result": {"resultType": "input_required"}}

    async with Client("c").connect(Scripted(script), revision=LATEST) as session:
        with pytest.raises(InvalidReply, match="does not say what"):
            await session.call_tool("x")


class _Odd(BaseException):
    pass


@both_eras
@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), _Odd()], ids=lambda error: type(error).__name__)
async def test_no_handler_ends_the_session(revision: Any, error: BaseException, caplog: Any) -> None:
    client = Client("c")

    @client.elicitation
    async def ask(params: Any) -> ElicitResult:
        raise error

    @client.logging
    def log(params: Any) -> None:
        raise error

    server = curious()

    @server.tool
    async def say(params: Any, ctx: Any) -> Any:
        await ctx.log("error", "something")
        return text("said")

    async with connected(server, client, revision) as session:
        await session.set_log_level("debug")
        with pytest.raises((RuntimeError, RemoteError)):
            await session.call_tool("ask")
        assert said(await session.call_tool("say")) == "said"
        await trio.testing.wait_all_tasks_blocked()
        assert said(await session.call_tool("say")) == "said"
        await trio.testing.wait_all_tasks_blocked()
    assert caplog.text.count("the logging handler crashed") == 2
    assert caplog.text.count("ask in ") == (0 if revision.modern else 1), "where it was written"
