"""Tools: from functions to listings, from results to content, and what goes wrong between."""

from __future__ import annotations

import enum
import functools
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import attrs
import pytest
import trio
import trio.testing

from tests.peers.messages import text_of
from tests.peers.mirroring import mirrored
from trimcp.channel import Outgoing
from trimcp.client.client import Client
from trimcp.errors import CannotAsk, ErrorReply, LocalError, RemoteError, ToolError
from trimcp.schema.hints import Arg
from trimcp.server.handlers.media import Image
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.incoming.job import CancelReason
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.codes import HEADER_MISMATCH, INTERNAL_ERROR, INVALID_PARAMS
from trimcp.wire.common import Icon
from trimcp.wire.content import TextContent
from trimcp.wire.fields import ABSENT
from trimcp.wire.revisions import LATEST, V2024_11_05, V2025_06_18, V2025_11_25, Revision
from trimcp.wire.tools import CallToolResult, ToolAnnotations


async def call(
    function: Callable[..., Any], /, revision: Revision = LATEST, options: Any = None, **arguments: Any
) -> Any:
    """Call a function as a tool, over a connection."""
    server = Server("s")
    server.add_tool(function, **{"name": "it", **(options or {})})
    async with connected(server, Client("c", validate_output=False), revision=revision) as session:
        return await session.call_tool("it", arguments)


class Colour(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: str


class Typed(TypedDict):
    a: int


@dataclass
class Data:
    colour: Colour
    inner: Typed


@attrs.frozen
class Tree:
    name: str
    children: list[Tree] = attrs.field(factory=list)


RESULTS: list[tuple[Any, Any, Any]] = [
    (int, 5, {"result": 5}),
    (float, 1.5, {"result": 1.5}),
    (bool, False, {"result": False}),
    (list[int], [1, 2], {"result": [1, 2]}),
    (list[int], [], {"result": []}),
    (int | None, None, {"result": None}),
    (Literal["a", "b"], "a", {"result": "a"}),
    (Colour, Colour.RED, {"result": "red"}),
    (uuid.UUID, uuid.UUID(int=0), {"result": "00000000-0000-0000-0000-000000000000"}),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (Typed, {"a": 1}, {"a": 1}),
    (Data, Data(Colour.RED, {"a": 1}), {"colour": "red", "inner": {"a": 1}}),
    (Pair, Pair(1, "x"), {"left": 1, "right": "x"}),
    (Tree, Tree("a", [Tree("b")]), {"name": "a", "children": [{"name": "b", "children": []}]}),
]


@pytest.mark.parametrize(("hint", "value", "structured"), RESULTS, ids=[str(row[0]) for row in RESULTS])
@pytest.mark.parametrize("revision", [V2025_06_18, LATEST], ids=str)
async def test_results_are_structured_by_their_type(hint: Any, value: Any, structured: Any, revision: Revision) -> None:
    async def tool() -> Any:
        return value

    tool.__annotations__["return"] = hint
    server = Server("s")
    server.add_tool(tool)
    async with connected(server, revision=revision) as session:
        [listed] = await session.list_tools()
        assert listed.output_schema["type"] == "object"
        result = await session.call_tool("tool")  # the client checks it against that schema
    assert result.structured_content == structured
    assert len(result.content) == 1
    assert result.is_error is False


@pytest.mark.parametrize(
    ("hint", "value", "shown"),
    [
        (str, "text", "text"),
        (Any, {"a": 1}, '{\n  "a": 1\n}'),
        (None, None, ""),
        (Image, Image(b"x", "image/png"), None),
        (CallToolResult, CallToolResult([TextContent("own")], is_error=True), "own"),
    ],
    ids=str,
)
async def test_plain_content_has_no_output_schema(hint: Any, value: Any, shown: str | None) -> None:
    async def tool() -> Any:
        return value

    tool.__annotations__["return"] = hint
    server = Server("s")
    server.add_tool(tool)
    async with connected(server) as session:
        [listed] = await session.list_tools()
        assert listed.output_schema is None
        result = await session.call_tool("tool")
    assert result.structured_content is ABSENT
    if shown is not None:
        assert text_of(result) == shown


async def test_structure_can_be_left_out_or_promised_by_hand() -> None:
    def plain() -> int:
        return 5

    result = await call(plain, options={"structured": False})
    assert (text_of(result), result.structured_content) == ("5", ABSENT)

    def by_hand() -> Any:
        return {"n": 5}

    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    assert (await call(by_hand, options={"output_schema": schema})).structured_content == {"n": 5}


async def test_a_broken_promise_is_our_error_logged_once_and_told_to_nobody(caplog: Any) -> None:
    def broken() -> dict[str, int]:
        return {"secret": "value"}

    with pytest.raises(RemoteError) as refused:
        await call(broken)
    assert refused.value.code == INTERNAL_ERROR
    assert "secret" not in str(refused.value)
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "$.secret" in str(record.exc_info[1])


@dataclass
class Counted:
    """Numbers beside a truth."""

    count: int
    sure: bool
    on: date
    inner: Counted | None = None


COUNTED = {"count": 1, "sure": False, "on": "2026-03-01", "inner": None}


@pytest.mark.parametrize(
    ("hint", "value", "sent"),
    [
        (int, True, 1),
        (float, False, 0),
        (int | str, True, 1),
        (int | bool, True, True),
        (bool, True, True),
        (list[int | None] | None, [True, None, 2], [1, None, 2]),
        (tuple[bool, int], (True, True), [True, 1]),
        (set[int], {True}, [1]),
        (dict[str, list[int]], {"a": [False]}, {"a": [0]}),
        (date, datetime(2026, 2, 28, 12, 30), "2026-02-28"),
        (dict[str, date | int], {"a": datetime(2026, 2, 28), "b": True}, {"a": "2026-02-28", "b": 1}),
        # What fits one alternative stays as it is, also beside what has to be changed.
        (tuple[int, str | date], (True, "MEETING"), [1, "MEETING"]),
        (tuple[int, datetime | date], (True, datetime(2026, 2, 28, 12, tzinfo=UTC)), [1, "2026-02-28T12:00:00+00:00"]),
        (tuple[int, dict[str, bool] | dict[str, int]], (True, {"a": True}), [1, {"a": True}]),
        (tuple[int, Literal["aTb"] | date], (True, "aTb"), [1, "aTb"]),
        (tuple[int, Literal["aTb"] | date], (True, datetime(2026, 2, 28)), [1, "2026-02-28"]),
        (list[Counted] | list[str], [Counted(True, False, date(2026, 3, 1))], [COUNTED]),
        (
            Counted,
            Counted(True, True, datetime(2026, 2, 28), Counted(2, False, date(2026, 3, 1))),
            {
                "count": 1,
                "sure": True,
                "on": "2026-02-28",
                "inner": {"count": 2, "sure": False, "on": "2026-03-01", "inner": None},
            },
        ),
    ],
    ids=str,
)
async def test_what_is_of_the_type_in_python_alone_is_sent_as_the_type(hint: Any, value: Any, sent: Any) -> None:
    def found() -> Any:
        return value

    found.__annotations__["return"] = hint
    result = (await call(found)).structured_content
    assert repr(result) == repr(sent if isinstance(sent, dict) else {"result": sent})  # 1 equals True


@pytest.mark.parametrize("value", [float("nan"), object()], ids=["nan", "object"])
async def test_what_cannot_be_encoded_ends_only_its_call(value: Any, caplog: Any) -> None:
    server = Server("s")

    @server.tool
    async def bad() -> Any:
        return {"value": value}

    @server.tool
    async def good() -> str:
        return "good"

    async with connected(server) as session:
        with pytest.raises(RemoteError) as refused:
            await session.call_tool("bad")
        assert refused.value.code == INTERNAL_ERROR
        assert text_of(await session.call_tool("good")) == "good"
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


@every_revision
async def test_every_option_reaches_the_listing_as_far_as_the_revision_has_it(revision: Revision) -> None:
    server = Server("s")
    given = {"type": "object", "properties": {"b": {"const": 1}, "a": {}}, "x-own": [1]}

    @server.tool(
        name="named",
        title="Title",
        description="Described",
        annotations=ToolAnnotations(read_only_hint=True),
        icons=[Icon(src="https://example.org/i.png")],
        meta={"example/key": 1},
        input_schema=given,
    )
    def function(arguments: dict[str, Any]) -> str:
        """Not this."""
        return ",".join(arguments)

    async with connected(server, revision=revision) as session:
        [tool] = await session.list_tools()
        assert (tool.name, tool.description, tool.input_schema) == ("named", "Described", given)
        assert list(tool.input_schema["properties"]) == ["b", "a"], "kept as it was given"
        assert tool.title == ("Title" if revision >= V2025_06_18 else None)
        assert text_of(await session.call_tool("named", {"b": 1, "z": 2})) == "b,z"


def test_what_cannot_be_right_is_refused_when_it_is_added() -> None:
    server = Server("s")

    def tool(a: int) -> str:
        return str(a)

    server.add_tool(tool)
    with pytest.raises(LocalError, match="already"):
        server.add_tool(tool)
    for options in (
        {"input_schema": {"type": "no such type"}},
        {"input_schema": {"type": "object", "properties": 5}},
        {"output_schema": {"type": "object", "required": "x"}},
        {"run": "somewhere"},
    ):
        with pytest.raises((TypeError, ValueError)):
            server.add_tool(tool, name="other", **options)
    assert "other" not in server.tools
    with pytest.raises(TypeError, match="positional-only"):

        @server.tool
        def positional(a: int, /) -> int:
            return a

    with pytest.raises(KeyError):
        server.remove_tool("nothing")


async def test_any_callable_will_do() -> None:
    class Adder:
        def __init__(self, base: int) -> None:
            self.base = base

        async def add(self, a: int) -> int:
            return self.base + a

        def __call__(self, a: int) -> int:
            return self.base + a

    async def both(a: int, b: int) -> int:
        return a + b

    assert text_of(await call(Adder(5).add, a=1)) == "6"
    assert text_of(await call(Adder(5), a=1)) == "6"
    assert text_of(await call(functools.partial(both, b=3), a=1)) == "4"


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"count": 0}, "@ count"),
        ({"count": "1"}, "@ count"),
        ({}, "count"),
        ({"count": 1, "x": 1}, "x"),
        ({"count": None}, "@ count"),
    ],
)
async def test_wrong_arguments_never_reach_the_function(arguments: dict[str, Any], place: str) -> None:
    reached: list[int] = []

    async def tool(count: Annotated[int, Arg("How many", ge=1)]) -> str:
        reached.append(count)
        return "ok"

    result = await call(tool, **arguments)
    assert result.is_error is True
    assert place in text_of(result)
    assert reached == []


@every_revision
async def test_wrong_arguments_are_told_to_whom_the_revision_says(revision: Revision) -> None:
    async def tool(count: int) -> str:
        return "ok"

    if revision >= V2025_11_25:
        result = await call(tool, revision, count="one")
        assert result.is_error is True
        assert "@ count" in text_of(result)
    else:
        with pytest.raises(RemoteError) as refused:
            await call(tool, revision, count="one")
        assert refused.value.code == INVALID_PARAMS
        assert "@ count" in refused.value.data["problems"][0]


async def test_whole_floats_are_integers_and_defaults_apply() -> None:
    async def tool(a: int, b: int = 7, c: str | None = None) -> str:
        return f"{a!r} {b!r} {c!r}"

    assert text_of(await call(tool, a=3.0)) == "3 7 None"


@every_revision
async def test_what_a_tool_raises(revision: Revision, caplog: Any) -> None:
    server = Server("s")
    raised: list[Exception] = []

    @server.tool
    async def fails() -> str:
        raise raised[-1]

    async with connected(server, revision=revision) as session:
        for error in (ToolError("speak"), ExceptionGroup("g", [ToolError("speak")]), CannotAsk("speak")):
            raised.append(error)
            result = await session.call_tool("fails")
            assert (result.is_error, text_of(result)) == (True, "speak")
        for error in (ErrorReply(9, "own", [1]), ExceptionGroup("g", [ErrorReply(9, "own", [1])])):
            raised.append(error)
            with pytest.raises(RemoteError) as refused:
                await session.call_tool("fails")
            assert (refused.value.code, refused.value.message, refused.value.data) == (9, "own", [1])
        assert caplog.records == []
        for error in (ValueError("secret"), ExceptionGroup("g", [ToolError("secret"), ValueError("secret")])):
            raised.append(error)
            with pytest.raises(RemoteError) as crashed:
                await session.call_tool("fails")
            assert crashed.value.code == INTERNAL_ERROR
            assert "secret" not in str(crashed.value)
        assert len(caplog.records) == 2


async def test_the_deadline_is_known_and_its_reason_can_be_read(autojump_clock: trio.testing.MockClock) -> None:
    seen: list[Any] = []

    async def slow(ctx: Context[Any]) -> str:
        seen.append(ctx.deadline - trio.current_time())
        try:
            await trio.sleep_forever()
        finally:
            seen.append(ctx.cancel_reason)
        return "never"

    result = await call(slow, options={"timeout": 30})
    assert text_of(result) == "it did not finish within 30 seconds"
    assert seen == [30, CancelReason.DEADLINE]


async def test_waiting_for_a_slot_counts_as_time_and_slots_come_back(autojump_clock: trio.testing.MockClock) -> None:
    server = Server("s")
    entered: list[int] = []

    @server.tool(timeout=3, max_concurrent=1)
    async def one(number: int) -> str:
        entered.append(number)
        await trio.sleep(2)
        return "done"

    results: dict[int, str] = {}
    async with connected(server) as session:

        async def ask(number: int) -> None:
            results[number] = text_of(await session.call_tool("one", {"number": number}))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(ask, number)
        assert sorted(results.values()) == ["done", *["one did not finish within 3 seconds"] * 2]
        assert len(entered) == 2
        await ask(9)
        assert results[9] == "done"


async def test_a_tool_that_calls_itself_is_not_in_its_own_way(autojump_clock: trio.testing.MockClock) -> None:
    """Cancelled while it waits for a slot, a call leaves the slot to others."""
    server = Server("s")

    @server.tool(max_concurrent=1)
    async def one() -> str:
        await trio.sleep(5)
        return "done"

    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "one")
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1):
            await session.call_tool("one")
        with trio.fail_after(20):
            assert text_of(await session.call_tool("one")) == "done"


async def test_a_removed_tool_finishes_what_it_began(autojump_clock: trio.testing.MockClock) -> None:
    server = Server("s")

    @server.tool
    async def going() -> str:
        server.remove_tool("going")
        await trio.sleep(1)
        return "done"

    async with connected(server) as session:
        assert text_of(await session.call_tool("going")) == "done"
        assert await session.list_tools() == []
        with pytest.raises(RemoteError, match="unknown tool"):
            await session.call_tool("going")


async def test_an_unknown_tools_name_is_echoed_in_part() -> None:
    async with connected(Server("s")) as session:
        with pytest.raises(RemoteError) as refused:
            await session.call_tool("x" * 100_000)
        assert len(refused.value.message) < 200


# Arguments repeated in headers


def regional() -> Server[Any]:
    server = Server("s")

    @server.tool
    async def where(region: str | None = None, count: Annotated[int, Arg(header="Count")] = 1) -> str:
        return f"{region} {count}"

    @server.tool(
        input_schema={
            "type": "object",
            "properties": {
                "region": {"type": "string", "x-mcp-header": "Region"},
                "inner": {"type": "object", "properties": {"flag": {"type": "boolean", "x-mcp-header": "Flag"}}},
            },
        }
    )
    async def by_hand(arguments: dict[str, Any]) -> str:
        return str(arguments)

    return server


def sending(**headers: str | None) -> Callable[[Outgoing], None]:
    """Change the Mcp-Param-* headers of each request: another value, or None for none."""

    def tamper(outgoing: Outgoing) -> None:
        if outgoing.headers is not None:
            merged = {**outgoing.headers, **{f"mcp-param-{name}": value for name, value in headers.items()}}
            outgoing.headers = {name: value for name, value in merged.items() if value is not None}

    return tamper


@pytest.mark.parametrize(
    ("name", "arguments", "headers"),
    [
        ("where", {"count": 42}, {"count": "42"}),
        ("where", {"count": 42}, {"count": "42.0"}),
        ("where", {"region": "x"}, {}),
        ("where", None, {}),
        ("by_hand", {"region": "Hello", "inner": {"flag": True}}, {"region": "=?base64?SGVsbG8=?=", "flag": "true"}),
        ("by_hand", {"region": "é"}, {"region": "=?base64?w6k=?=", "other": "any"}),
        ("by_hand", {}, {}),
    ],
)
async def test_headers_that_repeat_the_arguments_pass(name: str, arguments: Any, headers: dict[str, str]) -> None:
    async with mirrored(regional(), tamper=sending(**headers)) as (session, _):
        assert (await session.call_tool(name, arguments)).is_error is False


@pytest.mark.parametrize(
    ("name", "arguments", "headers"),
    [
        ("where", {"count": 42}, {"count": None}),
        ("where", {"count": 42}, {"count": "43"}),
        ("where", {}, {"count": "1"}),  # the default is not in the body
        ("where", {"count": "many"}, {"count": "1"}),  # before the arguments themselves are judged
        ("by_hand", {"region": "Hello"}, {"region": "=?base64?SGVsbG8?="}),
        ("by_hand", {"region": "Hello"}, {"region": "hello"}),
        ("by_hand", {"region": None}, {"region": ""}),
        ("by_hand", {"inner": {"flag": False}}, {"flag": None}),
    ],
)
async def test_headers_at_odds_with_the_arguments_are_refused(name: str, arguments: Any, headers: Any) -> None:
    async with mirrored(regional(), tamper=sending(**headers)) as (session, _):
        with pytest.raises(RemoteError) as refused:
            await session.call_tool(name, arguments)
        assert refused.value.code == HEADER_MISMATCH
        assert refused.value.message.startswith("Header mismatch: ")


@every_revision
async def test_only_headers_that_repeat_requests_are_compared(revision: Revision) -> None:
    """Those of an upgrade to WebSocket say nothing of any request, and older revisions repeat nothing."""

    def tamper(outgoing: Outgoing) -> None:
        outgoing.headers = {"upgrade": "websocket", "mcp-param-region": "wrong"}

    async with mirrored(regional(), revision=revision, mirrors=False, tamper=tamper) as (session, _):
        assert (await session.call_tool("by_hand", {"region": "x"})).is_error is False
    if not revision.method_headers:
        everything = {"mcp-method": "tools/call", "mcp-param-region": "wrong"}
        async with mirrored(
            regional(),
            revision=revision,
            mirrors=False,
            tamper=lambda outgoing: setattr(outgoing, "headers", everything),
        ) as (session, _):
            assert (await session.call_tool("by_hand", {"region": "x"})).is_error is False


class Deep(TypedDict):
    region: Annotated[str, Arg(header="Region")]


@pytest.mark.parametrize(
    ("properties", "complaint"),
    [
        ({"a": {"type": "string", "x-mcp-header": "My Region"}}, "'a' is no name of an HTTP header"),
        ({"a": {"type": "number", "x-mcp-header": "Region"}}, "only a string, integer or boolean"),
        ({"a": {"type": "array", "items": {"type": "string", "x-mcp-header": "R"}}}, "not `properties` alone"),
        (
            {"a": {"type": "string", "x-mcp-header": "R"}, "b": {"type": "string", "x-mcp-header": "r"}},
            "'r' is there twice",
        ),
    ],
)
def test_an_invalid_header_is_an_authors_mistake(properties: Any, complaint: str) -> None:
    async def tool(arguments: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match=f"the tool tool: x-mcp-header .*{complaint}"):
        Server("s").add_tool(tool, input_schema={"type": "object", "properties": properties})


def test_a_header_inside_a_list_is_an_authors_mistake() -> None:
    async def tool(all: list[Deep]) -> None: ...

    with pytest.raises(TypeError, match="the tool tool: x-mcp-header stands where not `properties` alone lead"):
        Server("s").add_tool(tool)


# What a crash says


class Weird:
    """Nothing JSON could carry."""


async def _unencodable() -> CallToolResult:
    return CallToolResult([TextContent("x", meta={"n": Weird()})])


async def _unconvertible() -> dict[str, object]:
    return {"when": Weird()}


async def _unexpected() -> int:
    return "x"


@pytest.mark.parametrize("function", [_unencodable, _unconvertible, _unexpected])
async def test_a_result_that_cannot_be_sent_is_logged_with_tool_function_and_what_it_is(
    function: Callable[..., Any], caplog: Any
) -> None:
    with pytest.raises(RemoteError, match="internal error"):
        await call(function)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    line = function.__code__.co_firstlineno
    assert f"'it' ({function.__name__} in {__file__}:{line})" in record.getMessage()
    assert ("outputSchema forbids: must be an integer" if function is _unexpected else "Weird") in caplog.text


async def test_a_time_limit_of_a_tools_own_is_told_from_the_servers(autojump_clock: Any, caplog: Any) -> None:
    async def own() -> None:
        with trio.fail_after(1):
            await trio.sleep_forever()

    async def in_nursery() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own)

    for function in (own, in_nursery):
        result = await call(function, options={"timeout": 5})
        assert result.is_error
        assert result.content == [TextContent("it gave up: a time limit in its own code has passed")]
    result = await call(trio.sleep_forever, options={"timeout": 5})
    assert result.content == [TextContent("it did not finish within 5 seconds")]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_tool_error_of_work_and_of_middleware_is_one_and_passes_the_filters(caplog: Any) -> None:
    server = Server("s")

    @server.filter
    async def shout(ctx: Context[Any], params: Any, result: CallToolResult) -> CallToolResult:
        await trio.lowlevel.checkpoint()
        (block,) = result.content
        assert isinstance(block, TextContent)
        return attrs.evolve(result, content=[TextContent(block.text.upper())])

    @server.middleware
    async def strict(ctx: Any, params: Any, call_next: Any) -> Any:
        if getattr(params, "name", None) == "refused":
            raise ToolError("by middleware")
        return await call_next(ctx, params)

    async def fail() -> None:
        raise ToolError("by work")

    @server.tool
    async def starts(ctx: Context[Any]) -> str:
        ctx.request.start_soon(fail)
        return "started"

    @server.tool
    async def refused() -> str:
        return "never"

    async with connected(server) as session:
        for name, text in (("starts", "BY WORK"), ("refused", "BY MIDDLEWARE")):
            result = await session.call_tool(name)
            assert (result.is_error, result.content) == (True, [TextContent(text)])
    assert not caplog.records


async def test_what_a_filter_raises_of_a_failure_keeps_it_back(caplog: Any) -> None:
    server = Server("s", handler_errors="tell")

    @server.filter
    def broken(ctx: Any, params: Any, result: Any) -> Any:
        raise SystemExit("secret of the filter")

    @server.tool
    async def crash() -> str:
        raise ValueError("secret of the tool")

    async with connected(server) as session:
        for _ in range(2):
            with pytest.raises(RemoteError) as caught:
                await session.call_tool("crash")
            assert (caught.value.code, caught.value.message) == (INTERNAL_ERROR, "internal error")
    assert caplog.text.count("ValueError: secret of the tool") >= 2
    assert caplog.text.count("SystemExit: secret of the filter") >= 2


async def test_a_crash_is_told_to_the_model_where_that_was_chosen(caplog: Any) -> None:
    server = Server("s", handler_errors="tell")

    @server.tool
    async def fetch(how: str) -> str:
        if how == "exit":
            raise SystemExit("bye")
        if how == "refuse":
            raise ErrorReply(7, "no")
        raise LookupError(f"GET https://x.example/?token=abc123 with Bearer xyz789: {how * 1000}")

    @server.prompt
    async def ask() -> str:
        raise LookupError("secret")

    async with connected(server) as session:
        result = await session.call_tool("fetch", {"how": "z"})
        (block,) = result.content
        assert result.is_error
        assert block.text.startswith("fetch failed: LookupError: GET https://x.example/?token=*** with Bearer *** zzz")
        assert len(block.text) < 400
        result = await session.call_tool("fetch", {"how": "exit"})
        assert result.content == [TextContent("fetch failed: SystemExit: bye")]
        with pytest.raises(RemoteError, match="no"):
            await session.call_tool("fetch", {"how": "refuse"})
        with pytest.raises(RemoteError, match="internal error"):
            await session.get_prompt("ask")
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 3, "one for each crash"


# A check of the tool's own


async def test_a_tool_checks_its_arguments_itself(autojump_clock: trio.testing.MockClock) -> None:
    server = Server("s")
    seen: list[Any] = []

    def in_order(arguments: Any) -> None:
        seen.append(arguments)
        if arguments["first"] > arguments["last"]:
            raise ValueError("first is after last")

    async def short(arguments: Any) -> None:
        await trio.lowlevel.checkpoint()
        if (arguments["last"] - arguments["first"]).days > 7:
            raise ToolError("at most a week")

    @server.tool(validate=in_order)
    async def days(first: date, last: date) -> int:
        return (last - first).days

    @server.tool(validate=short)
    def week(first: date, last: date) -> int:
        return (last - first).days

    async with connected(server) as session:
        assert (await session.call_tool("days", {"first": "2026-01-01", "last": "2026-01-03"})).data == {"result": 2}
        assert seen == [{"first": date(2026, 1, 1), "last": date(2026, 1, 3)}]
        result = await session.call_tool("days", {"first": "2026-01-05", "last": "2026-01-03"})
        assert (result.is_error, result.text) == (True, "invalid arguments for days: first is after last")
        result = await session.call_tool("week", {"first": "2026-01-01", "last": "2026-02-03"})
        assert (result.is_error, result.text) == (True, "invalid arguments for week: at most a week")
        assert len(seen) == 2, "arguments beyond the schema never get there"
        await session.call_tool("days", {"first": "2026-01-05"})
        assert len(seen) == 2
    async with connected(server, revision=V2024_11_05) as session:
        with pytest.raises(RemoteError, match="first is after last"):
            await session.call_tool("days", {"first": "2026-01-05", "last": "2026-01-03"})


async def test_a_check_gets_all_arguments_and_changes_none(autojump_clock: trio.testing.MockClock) -> None:
    server = Server("s")

    @server.tool(input_schema={"type": "object"}, validate=lambda arguments: arguments.clear())
    async def echo(arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    async with connected(server) as session:
        assert (await session.call_tool("echo", {"a": 1})).data == {"a": 1}


class EmptyRules(list[str]):
    """A check that is false as a value, as an empty list is."""

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        raise ToolError("nothing is allowed")


async def test_a_check_that_is_false_as_a_value_is_asked(autojump_clock: trio.testing.MockClock) -> None:
    server = Server("s")
    ran = []

    @server.tool(validate=EmptyRules())
    async def note(text: str) -> None:
        ran.append(text)

    async with connected(server) as session:
        result = await session.call_tool("note", {"text": "bad"})
    assert (result.is_error, ran) == (True, [])
    assert "nothing is allowed" in result.text


async def test_a_check_that_returns_something_or_crashes_lets_nothing_through(
    autojump_clock: trio.testing.MockClock, caplog: Any
) -> None:
    server = Server("s")
    ran = []

    @server.tool(validate=lambda arguments: arguments["text"] == "good")
    async def returns(text: str) -> None:
        ran.append(text)

    @server.tool(validate=lambda arguments: arguments["nothing"])
    async def crashes(text: str) -> None:
        ran.append(text)

    async with connected(server) as session:
        for name in ("returns", "crashes"):
            with pytest.raises(RemoteError, match="internal error"):
                await session.call_tool(name, {"text": "bad"})
    assert ran == []
    assert "validate returned False: it raises ToolError or ValueError, and returns nothing" in caplog.text


def test_a_check_is_a_function() -> None:
    with pytest.raises(TypeError, match="validate is a function of the arguments"):
        Server("s").add_tool(lambda text: text, validate=True)  # what nobody should pass


async def test_a_long_reason_of_a_check_is_cut(autojump_clock: trio.testing.MockClock) -> None:
    def check(arguments: Any) -> None:
        raise ToolError("x" * 1_000)

    result = await call(lambda text: text, options={"validate": check, "run": "inline"}, text="a")
    assert result.text == f"invalid arguments for it: {'x' * 200}..."
