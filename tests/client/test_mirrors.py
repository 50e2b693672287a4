"""What a client repeats in headers, on a channel that carries them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.client.peers import HandMade, text
from tests.peers.mirroring import HeaderChannel, header_channels
from trimcp.channel import Kind, Outgoing
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.client.tools import Mirrors, Rejections
from trimcp.errors import ErrorReply, LocalError, RemoteError
from trimcp.framing.headers import check_params, check_request, find_mirrors
from trimcp.wire.codes import HEADER_MISMATCH, INTERNAL_ERROR
from trimcp.wire.content import TextContent, TextResourceContents
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.jsonrpc import encode_notification
from trimcp.wire.methods import METHODS
from trimcp.wire.prompts import CompleteResult, Completion, GetPromptResult, ListPromptsResult
from trimcp.wire.resources import ListResourcesResult, ReadResourceResult
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, Revision
from trimcp.wire.tools import ListToolsResult, Tool


def schema(**headers: str) -> dict[str, Any]:
    """Of string properties, each mirrored under a name."""
    marked = {name: {"type": "string", "x-mcp-header": header} for name, header in headers.items()}
    return {"type": "object", "properties": {"plain": {"type": "string"}, **marked}}


@attrs.define(eq=False)
class Strict:
    """A server that compares every request's headers with its body, as the specification wants.

    `schemas` is what its tools are at the moment; each listing is counted.
    """

    schemas: dict[str, dict[str, Any]]
    server: HandMade = attrs.field(factory=HandMade)
    listings: int = 0
    ttl_ms: int = 60_000
    failing: bool = False

    def __attrs_post_init__(self) -> None:
        server = self.server

        @server.method("tools/list")
        async def tools(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            self.listings += 1
            if self.failing:
                raise ErrorReply(INTERNAL_ERROR, "out of order")
            names = list(self.schemas)
            at = 0 if params.cursor is None else int(params.cursor)
            more = str(at + 1) if at + 1 < len(names) else None
            listed = [Tool(name, self.schemas[name]) for name in names[at : at + 1]]
            return ListToolsResult(listed, more, ttl_ms=self.ttl_ms)

        @server.method("tools/call")
        async def call(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            arguments = params.arguments or {}
            wrong = check_params(find_mirrors(self.schemas[params.name]), arguments, ctx.headers)
            if wrong is not None:
                raise ErrorReply(HEADER_MISMATCH, wrong)
            if "ask" in params.name:
                await ctx.elicit("?", {"type": "object", "properties": {"name": {"type": "string"}}})
            if "slow" in params.name:
                await trio.sleep_forever()
            return text(params.name)

        @server.method("resources/list")
        async def resources(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            return ListResourcesResult([])

        @server.method("resources/read")
        async def read(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            return ReadResourceResult([TextResourceContents(uri=params.uri, text="")])

        @server.method("prompts/list")
        async def prompts(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            return ListPromptsResult([])

        @server.method("prompts/get")
        async def prompt(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            return GetPromptResult([])

        @server.method("completion/complete")
        async def complete(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            return CompleteResult(Completion([]))

        @server.method("subscriptions/listen")
        async def listen(params: Any, ctx: Any) -> Any:
            self._check(ctx, params)
            raise ErrorReply(9, "never mind")

    def _check(self, ctx: Any, params: Any) -> None:
        if not ctx.headers:
            return
        named = METHODS[ctx.method].mirrored
        body = {} if named is None else {named: getattr(params, named)}
        wrong = check_request(ctx.headers, ctx.method, body, named=named, version=ctx.revision.name)
        if wrong is not None:
            raise ErrorReply(HEADER_MISMATCH, wrong)

    @asynccontextmanager
    async def connected(
        self, client: Client | None = None, revision: Revision = LATEST, mirrors: bool = True
    ) -> AsyncIterator[tuple[ClientSession, HeaderChannel]]:
        client = client or Client("tester")
        ours, theirs = header_channels(mirrors=mirrors)
        async with self.server.serving(ours), client.connect(theirs, revision=revision) as session:
            yield session, theirs


STANDARD = {"mcp-protocol-version": LATEST.name}


async def everything(session: ClientSession) -> None:
    await session.list_tools()
    await session.call_tool("where", {"region": "north"})
    await session.list_resources()
    await session.read_resource("file:///ä b")
    await session.list_prompts()
    await session.get_prompt("hello")
    await session.complete_prompt("hello", "a", "b")


# Every request


async def test_every_request_says_in_headers_what_it_is() -> None:
    strict = Strict({"where": schema(region="Region")})
    async with strict.connected() as (session, channel):
        await everything(session)
        with pytest.raises(RemoteError, match="never mind"):
            async with session.listen(tools=True):
                pass
        with pytest.raises(RemoteError):
            await session.request("x-vendor/thing", {"name": "n"})
        await session.ping()
        for method, more in [
            ("server/discover", {}),
            ("tools/list", {}),
            ("tools/call", {"mcp-name": "where", "mcp-param-region": "north"}),
            ("resources/list", {}),
            ("resources/read", {"mcp-name": "=?base64?ZmlsZTovLy/DpCBi?="}),
            ("prompts/list", {}),
            ("prompts/get", {"mcp-name": "hello"}),
            ("completion/complete", {}),
            ("subscriptions/listen", {}),
            ("x-vendor/thing", {}),
        ]:
            for headers in channel.headers_of(method):
                assert headers == {**STANDARD, "mcp-method": method, **more}
            assert channel.headers_of(method)
        assert len(channel.headers_of("server/discover")) == 2


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_nothing_is_repeated_where_the_channel_or_the_revision_does_not(revision: Revision) -> None:
    mirrors = not revision.method_headers
    invalid = {"type": "object", "properties": {"a": {"type": "number", "x-mcp-header": "A"}}}
    strict = Strict({"where": schema(region="Region"), "odd": invalid})
    strict.server.methods.pop("tools/call")

    @strict.server.tool
    async def where(params: Any, ctx: Any) -> Any:
        return text("anywhere")

    async with strict.connected(revision=revision, mirrors=mirrors) as (session, channel):
        await everything(session)
        assert [tool.name for tool in await session.list_tools()] == ["where", "odd"]
        assert {outgoing.headers is None for outgoing in channel.sent} == {True}


# Arguments


async def test_arguments_are_repeated_as_the_newest_list_wants_it() -> None:
    strict = Strict({"where": schema(region="Region", city="City"), "other": schema()})
    async with strict.connected() as (session, channel):
        tools = await session.list_tools()
        assert [tool.name for tool in tools] == ["where", "other"]
        await session.call_tool("where", {"region": "Zürich", "city": None, "plain": "x"})
        await session.call_tool("other", {"region": "x"})
        # A list said to have changed is still the newest there is.
        changed = encode_notification("notifications/tools/list_changed", {})
        strict.server.session.sink.post(Outgoing(changed, Kind.NOTIFICATION))
        await session.ping()
        assert session.outputs.tool("where") is None
        await session.call_tool("where", {"city": ""})
        strict.schemas["where"] = schema(plain="Plain")
        await session.list_tools(fresh=True)
        await session.call_tool("where", {"plain": "y", "city": "x"})
        sent = [
            {name: value for name, value in headers.items() if name.startswith("mcp-param-")}
            for headers in channel.headers_of("tools/call")
        ]
        assert sent == [
            {"mcp-param-region": "=?base64?WsO8cmljaA==?="},
            {},
            {"mcp-param-city": ""},
            {"mcp-param-plain": "y"},
        ]
        assert strict.listings == 4


async def test_one_page_is_enough_to_know_what_is_wanted() -> None:
    strict = Strict({"where": schema(region="Region")})
    async with strict.connected() as (session, _):
        await session.list_page("tools/list")
        await session.call_tool("where", {"region": "x"})
        assert strict.listings == 1


async def test_an_integer_no_header_may_carry_sends_nothing() -> None:
    count = {"type": "object", "properties": {"count": {"type": "integer", "x-mcp-header": "Count"}}}
    strict = Strict({"where": count})
    async with strict.connected() as (session, channel):
        await session.list_tools()
        with pytest.raises(LocalError, match="53 bits"):
            await session.call_tool("where", {"count": 2**53})
        with pytest.raises(LocalError, match="53 bits"):
            async with session.calling("where", {"count": 2**53}):
                pass
        assert channel.headers_of("tools/call") == []
        await session.call_tool("where", {"count": 2**53 - 1})


async def test_the_hook_comes_first_and_may_list() -> None:
    client = Client("c")
    seen: list[Any] = []

    @client.approve_call
    def approve(tool: Tool | None, arguments: Any) -> bool:
        seen.append(tool and tool.name)
        return "region" in arguments

    strict = Strict({"where": schema(region="Region")})
    async with strict.connected(client) as (session, channel):
        with pytest.raises(LocalError, match="not approved"):
            await session.call_tool("where", {})
        await session.call_tool("where", {"region": "x"})
        assert seen == ["where", "where"]
        assert [headers.get("mcp-param-region") for headers in channel.headers_of("tools/call")] == ["x"]


# Refused headers


@pytest.mark.parametrize("streaming", [False, True])
async def test_refused_headers_are_made_anew_from_a_fresh_list(streaming: bool) -> None:
    strict = Strict({"where": schema(region="Region")})
    async with strict.connected() as (session, channel):
        for listings, schemas in enumerate([schema(region="Region"), schema(region="Area"), schema(plain="P")], 1):
            strict.schemas["where"] = schemas
            if streaming:
                async with session.calling("where", {"region": "x", "plain": "y"}) as call:
                    result = await call.result()
                    assert await call.result() is result
            else:
                result = await session.call_tool("where", {"region": "x", "plain": "y"})
            assert result.content == [TextContent("where")]
            assert strict.listings == listings
        names = [
            next((name for name in headers if "param" in name), None) for headers in channel.headers_of("tools/call")
        ]
        region, area, plain = (f"mcp-param-{name}" for name in ("region", "area", "p"))
        assert names == [None, region, region, area, area, plain]
        assert session.statistics().pending == 0


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("failing", [False, True])
async def test_a_second_refusal_is_final(streaming: bool, failing: bool) -> None:
    strict = Strict({"where": schema()}, failing=failing)

    @strict.server.method("tools/call")
    async def never(params: Any, ctx: Any) -> Any:
        raise ErrorReply(HEADER_MISMATCH, "never right")

    async with strict.connected() as (session, channel):
        with pytest.raises(RemoteError, match="never right"):
            if streaming:
                async with session.calling("where") as call:
                    await call.result()
            else:
                await session.call_tool("where")
        assert len(channel.headers_of("tools/call")) == 2
        assert strict.listings == 1


@pytest.mark.parametrize("mirrors", [False, True])
async def test_no_other_error_is_worth_a_second_call(mirrors: bool) -> None:
    strict = Strict({"where": schema()})
    code = 0

    @strict.server.method("tools/call")
    async def never(params: Any, ctx: Any) -> Any:
        raise ErrorReply(code, "no")

    async with strict.connected(mirrors=mirrors) as (session, channel):
        for code in (INTERNAL_ERROR, 7) if mirrors else (INTERNAL_ERROR, HEADER_MISMATCH):
            with pytest.raises(RemoteError) as refused:
                await session.call_tool("where")
            assert refused.value.code == code
        assert len(channel.headers_of("tools/call")) == 2
        assert strict.listings == 0


async def test_other_requests_are_not_made_again() -> None:
    strict = Strict({})

    @strict.server.method("resources/read")
    async def never(params: Any, ctx: Any) -> Any:
        raise ErrorReply(HEADER_MISMATCH, "never right")

    async with strict.connected() as (session, channel):
        with pytest.raises(RemoteError, match="never right"):
            await session.read_resource("x:1")
        assert len(channel.headers_of("resources/read")) == 1


@pytest.mark.parametrize("streaming", [False, True])
async def test_every_round_of_a_call_has_its_headers(streaming: bool) -> None:
    client = Client("c")

    @client.elicitation
    async def answer(params: Any) -> Any:
        return ElicitResult("accept", {"name": "me"})

    strict = Strict({"ask": schema(region="Region")})
    async with strict.connected(client) as (session, channel):
        if streaming:
            async with session.calling("ask", {"region": "x"}) as call:
                await call.result()
        else:
            await session.call_tool("ask", {"region": "x"})
        sent = [headers.get("mcp-param-region") for headers in channel.headers_of("tools/call")]
        assert sent == [None, "x", "x"]
        assert strict.listings == 1


async def test_leaving_a_call_while_the_list_is_fetched_ends_both(autojump_clock: Any) -> None:
    strict = Strict({"where": schema(region="Region")})
    gone = trio.Event()

    @strict.server.method("tools/list")
    async def hang(params: Any, ctx: Any) -> Any:
        try:
            await trio.sleep_forever()
        finally:
            gone.set()

    async with strict.connected() as (session, channel):
        async with session.calling("where", {"region": "x"}):
            await trio.testing.wait_all_tasks_blocked()
            assert channel.headers_of("tools/list")
        await gone.wait()
        with trio.move_on_after(1) as scope:
            await session.call_tool("where", {"region": "x"})
        assert scope.cancelled_caught
        assert session.statistics().pending == 0
        assert len(channel.headers_of("tools/call")) == 2


async def test_the_work_clock_covers_the_second_call(autojump_clock: Any) -> None:
    client = Client("c", request_timeout=5)
    strict = Strict({"slow": schema(region="Region")})
    async with strict.connected(client) as (session, _):
        before = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await session.call_tool("slow", {"region": "x"})
        assert trio.current_time() - before == 5
        assert strict.listings == 1


# Tools that break the rules


INVALID = {
    "empty": schema(a=""),
    "spaced": schema(a="My Region"),
    "twice": schema(a="Region", b="region"),
    "number": {"type": "object", "properties": {"a": {"type": "number", "x-mcp-header": "A"}}},
    "inside": {"type": "object", "properties": {"a": {"type": "array", "items": {"x-mcp-header": "A"}}}},
}


async def test_invalid_tools_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    strict = Strict({"valid": schema(a="A"), **INVALID, "plain": {"type": "object"}})
    async with strict.connected() as (session, _):
        assert [tool.name for tool in await session.list_tools()] == ["valid", "plain"]
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == len(INVALID)
        for name, warning in zip(INVALID, warnings, strict=True):
            assert "answered tools/list with something that cannot be read, and is left out" in warning
            assert f"('{name}') x-mcp-header" in warning
        # From the cache nothing is said twice.
        assert [tool.name for tool in await session.list_tools()] == ["valid", "plain"]
        page = await session.list_page("tools/list", "1")
        assert page.tools == []
        # Nor where the list is asked for again.
        await session.list_tools(fresh=True)
        assert len(caplog.records) == len(INVALID)


async def test_a_tool_that_became_invalid_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    strict = Strict({"where": schema(region="Region"), "gone": schema(region="Region")})
    async with strict.connected() as (session, channel):
        await session.list_tools()
        strict.schemas = {"where": schema(region="")}
        assert await session.list_tools(fresh=True) == []
        assert session.mirrors.headers("where", {"region": "x"}) == {}
        assert session.mirrors.headers("gone", {"region": "x"}) == {}
        assert "no name of an HTTP header" in caplog.text
        assert channel.headers_of("tools/call") == []


def test_the_newest_page_counts() -> None:
    mirrors = Mirrors()
    mirrors.take([Tool("a", schema(region="Region")), Tool("b", schema(region="Region"))])
    mirrors.take([Tool("a", schema(region="No Header")), Tool("c", schema())])
    assert mirrors.headers("a", {"region": "x"}) == {}
    assert mirrors.headers("b", {"region": "x"}) == {"mcp-param-region": "x"}


def test_a_hostile_list_costs_few_words_and_little_memory(caplog: pytest.LogCaptureFixture) -> None:
    mirrors = Mirrors()
    bad = [Tool("\x1b[2J" * 1000 + str(i), schema(a="")) for i in range(500)]
    assert mirrors.take(bad) == []
    Rejections().warn("s", "tools/list", mirrors.take(bad).rejected)
    assert len(caplog.records) == 11
    assert all(len(record.getMessage()) < 400 and record.getMessage().isprintable() for record in caplog.records)
    assert "490 more" in caplog.text
    for greedy in (schema(**{f"p{i}": f"H{i}" for i in range(101)}), schema(a="H" * 9000)):
        listed = mirrors.take([Tool("many", greedy)])
        assert listed == []
        assert "more headers than this client sends" in listed.rejected[0].reason
    some = [Tool(str(i), schema(a="A")) for i in range(5000)]
    assert mirrors.take(some) == some
    assert mirrors.headers("0", {"a": "x"}) == {}
    assert mirrors.headers("4999", {"a": "x"}) == {"mcp-param-a": "x"}
    mirrors.keep(some[4998:])
    assert mirrors.headers("4997", {"a": "x"}) == {}
    assert mirrors.headers("4998", {"a": "x"}) == {"mcp-param-a": "x"}


async def test_a_legacy_server_on_the_same_channel_hears_no_headers() -> None:
    strict = Strict({"where": schema(region="Region")}, HandMade(revisions=(LATEST_LEGACY,)))
    strict.server.methods.pop("tools/call")

    @strict.server.tool
    async def where(params: Any, ctx: Any) -> Any:
        return text("anywhere")

    ours, theirs = header_channels()
    async with strict.server.serving(ours), Client("c").connect(theirs) as session:
        assert session.revision == LATEST_LEGACY
        await session.list_tools()
        await session.call_tool("where", {"region": "x"})
        assert theirs.headers_of("server/discover") == [{**STANDARD, "mcp-method": "server/discover"}]
        assert theirs.headers_of("initialize") == theirs.headers_of("tools/call") == [None]
