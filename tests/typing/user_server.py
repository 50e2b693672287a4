# pyright: strict
"""A server as a user writes it, for type checkers: nothing here runs. What is asserted is what their editor shows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, assert_type

import attrs
import trio

import trimcp
from trimcp.wire.capabilities import ClientCapabilities
from trimcp.wire.tools import CallToolParams


@attrs.frozen
class Database:
    """What the lifespan makes."""

    rows: dict[str, int]


@attrs.frozen
class Sum:
    """A structured result."""

    total: int


class Place(TypedDict):
    """What a form may ask for."""

    town: str


@asynccontextmanager
async def lifespan(server: trimcp.Server[Database]) -> AsyncGenerator[Database, None]:
    """Open what handlers share."""
    assert_type(server.info.name, str)
    yield Database({"lamp": 3})


server = trimcp.Server(
    "typed",
    version="1.0",
    instructions="Ask.",
    lifespan=lifespan,
    limits=trimcp.Limits(),
    revisions=[trimcp.LATEST, trimcp.LATEST_LEGACY],
)
assert_type(server, trimcp.Server[Database])


@server.tool
async def add(a: int, b: int = 1) -> Sum:
    """Add two numbers."""
    return Sum(a + b)


# A decorated function is still the function that was written.
async def adding() -> None:
    """Call a tool as a function."""
    assert_type(await add(1, b=2), Sum)


@server.tool(
    name="count",
    title="Count",
    timeout=5.0,
    max_concurrent=2,
    annotations=trimcp.ToolAnnotations(read_only_hint=True),
)
async def counting(to: int, *, ctx: trimcp.Context[Database]) -> str:
    """Count rows, with everything a context can do."""
    assert_type(ctx.state, Database)
    assert_type(ctx.state.rows, dict[str, int])
    assert_type(ctx.revision, trimcp.Revision)
    assert_type(ctx.cancel_reason, trimcp.CancelReason | None)
    assert_type(ctx.deadline, float)
    assert_type(ctx.peer, trimcp.wire.Implementation | None)
    assert_type(ctx.capabilities, ClientCapabilities)
    assert_type(ctx.principal, trimcp.Principal | None)
    assert_type(ctx.trace.get("traceparent"), str | None)
    await ctx.report_progress(1, total=to, message="one")
    ctx.report_progress_nowait(2)
    await ctx.log("warning", {"rows": len(ctx.state.rows)}, logger="typed")
    assert_type(ctx.log_nowait("info", "text"), bool)
    await ctx.info("text")
    assert_type(await ctx.list_roots(), list[trimcp.wire.Root])
    assert_type(await ctx.once("key", number), int)
    ctx.request.start_soon(trio.sleep, 1)
    ctx.session.start_soon(number)
    ctx.server.start_soon(trio.sleep, 1)
    return "done"


async def number() -> int:
    """Any async function."""
    return 7


@server.tool
async def ask(*, ctx: trimcp.Context[Database]) -> str:
    """Ask the user and the model, in place."""
    answer = await ctx.elicit("Your name?", {"type": "object", "properties": {"name": {"type": "string"}}})
    assert_type(answer, trimcp.ElicitResult)
    assert_type(answer.action, Literal["accept", "decline", "cancel"])
    typed = await ctx.elicit("The sum?", Sum)
    assert_type(typed, trimcp.Answer[Sum])
    if typed.value is not None:
        assert_type(typed.value.total, int)
    asked = await ctx.elicit("Where?", Place)
    assert_type(asked.value, Place | None)
    assert_type((await ctx.elicit("How many?", int)).value, int | None)
    assert_type(trimcp.form(Sum).load({"total": 1}), Sum)
    filled = await ctx.elicit("And the sum?", trimcp.form(Sum))
    if filled.action != "accept" or not filled.content:
        return "nobody"
    for key, value in filled.content.items():
        assert_type(key, str)
        assert_type(value, str | int | float | bool | list[str])
    messages = [trimcp.wire.SamplingMessage(role="user", content=trimcp.Text("six by nine?"))]
    thought = await ctx.sample(
        trimcp.CreateMessageParams(messages=messages, max_tokens=50, system_prompt="Be brief.", temperature=0.5)
    )
    assert_type(thought, trimcp.CreateMessageResult)
    assert_type(thought.model, str)
    await ctx.elicit_url("Sign in", "https://example.org/login")
    return "".join(block.text for block in thought.blocks if isinstance(block, trimcp.TextContent))


@server.tool
async def greet(
    name: Annotated[str, trimcp.Elicit("What is your name?")],
    colour: Annotated[Literal["red", "green"], trimcp.Elicit("Your colour?")],
    city: Annotated[str, trimcp.Arg("where to greet from")] = "Oslo",
) -> list[trimcp.TextContent | trimcp.wire.ImageContent]:
    """Use answers that were declared as parameters."""
    assert_type(name, str)
    assert_type(colour, Literal["red", "green"])
    return [trimcp.Text(f"{name} of {city} likes {colour}")]


@server.tool(run="thread")
def blocking(path: str, *, ctx: trimcp.ThreadContext[Database]) -> str:
    """Work in a thread."""
    assert_type(ctx.state, Database)
    assert_type(ctx.revision, trimcp.Revision)
    assert_type(ctx.elicit("Your name?", trimcp.form(Sum)), trimcp.ElicitResult)
    assert_type(ctx.elicit("The sum?", Sum), trimcp.Answer[Sum])
    ctx.report_progress(1, total=2)
    ctx.log("info", "reading")
    assert_type(ctx.list_roots(), list[trimcp.wire.Root])
    return Path(path).read_text()


@server.tool(structured=False)
async def refuse() -> trimcp.CallToolResult:
    """Raise what is for the model, or build the result by hand."""
    if trio.current_time() < 0:
        raise trimcp.ToolError("too early")
    return trimcp.CallToolResult(content=[trimcp.Text("no")], structured_content={"no": True}, is_error=True)


@server.tool(input_schema={"type": "object", "properties": {"n": {"type": "integer"}}})
async def by_hand(arguments: dict[str, Any]) -> str:
    """Take arguments as they come."""
    return str(arguments["n"])


@server.resource("notes://today", mime_type="text/plain", title="Today")
async def today() -> str:
    """A fixed resource."""
    return "rain"


@server.resource("notes://{name}", ttl_ms=1000)
def note(name: str, ctx: trimcp.ThreadContext) -> bytes | None:
    """A template, by a sync function."""
    return None if name == "none" else name.encode()


@server.prompt
async def review(path: str, *, style: Literal["kind", "harsh"] = "kind") -> str:
    """A prompt."""
    return f"Review {path}, be {style}."


@server.prompt(title="Talk")
async def talk(topic: str) -> list[trimcp.PromptMessage]:
    """A prompt of several messages."""
    return [trimcp.PromptMessage(role="user", content=trimcp.Text(topic))]


@server.complete(review, "path")
async def paths(value: str) -> Sequence[str]:
    """Suggest values."""
    return [path for path in ("a.py", "b.py") if path.startswith(value)]


@server.middleware
async def timed(
    ctx: trimcp.Context[Any], params: Any, call_next: Callable[[trimcp.Context[Any], Any], Awaitable[Any]]
) -> Any:
    """Look at every request."""
    if ctx.method == "tools/call":
        await ctx.debug("a tool is called")
    return await call_next(ctx, params)


@server.filter(methods=["tools/call"], names="add*")
async def short(
    ctx: trimcp.Context[Database], params: CallToolParams, result: trimcp.CallToolResult
) -> trimcp.CallToolResult:
    """Keep back what is too long."""
    if len(result.text) > 1000:
        raise trimcp.ToolError(f"{params.name} found too much")
    return result


server.filter(trimcp.guard.SecretsFilter("mask"))


@server.method("com.example/clock/now")
async def now(ctx: trimcp.Context[Database], params: dict[str, Any]) -> dict[str, Any]:
    """A method of an extension."""
    return {"time": ctx.state.rows, "asked": params}


@server.notification("notifications/roots/list_changed")
async def roots_changed(params: Any) -> None:
    """Hear of a notification."""


# What the decorators gave back.
async def still_functions(ctx: trimcp.Context[Database], thread: trimcp.ThreadContext[Database]) -> None:
    """Decorated functions keep their types."""
    assert_type(await counting(3, ctx=ctx), str)
    assert_type(blocking("x", ctx=thread), str)
    assert_type(await today(), str)
    assert_type(await review("x", style="harsh"), str)
    assert_type(await talk("x"), list[trimcp.PromptMessage])
    assert_type(await paths("x"), Sequence[str])
    assert_type(await refuse(), trimcp.CallToolResult)
    assert_type(await by_hand({}), str)
    result = trimcp.CallToolResult()
    assert_type(await short(ctx, CallToolParams(name="add"), result), trimcp.CallToolResult)
    assert_type(await now(ctx, {}), dict[str, Any])
    await timed(ctx, {"name": "add"}, call_next=passing)  # by keyword: the function that was written has the name


async def passing(ctx: trimcp.Context[Any], params: Any) -> Any:
    """What middleware calls next."""
    return trimcp.CallToolResult()


def change() -> None:
    """Change what is offered while it runs."""
    server.add_tool(number, name="seven", description="Seven.")
    server.remove_tool("seven")
    server.add_resource("file:///readme", Path("README.md"), mime_type="text/markdown")
    server.resource_updated("file:///readme")
    server.remove_resource("file:///readme")
    server.add_prompt(talk, name="talk2")
    server.remove_prompt("talk2")


def refused() -> None:
    """What must be refused: an ignored error that is none is one, to mypy's strict mode."""
    server.add_tool(number, tiemout=3)  # type: ignore[call-arg]
    server.add_tool(number, timeout="3")  # type: ignore[arg-type]
    server.add_resource("file:///x", 7)  # type: ignore[arg-type]


# A server without a lifespan.
plain = trimcp.Server(
    "plain",
    audit=trimcp.guard.Audit(file="audit.jsonl", arguments="masked"),
    confirm="destructive",
    limits=trimcp.Limits(tool=trimcp.Quota(running=2, waiting=5)),
)


@plain.tool
async def bare(*, ctx: trimcp.Context) -> str:
    """A context with no state in its type."""
    assert_type(ctx.method, str)
    return "x"


@plain.tool(isolation="bwrap", read=[Path("/srv/data")])
def sandboxed(code: str) -> str:
    """Run where nothing can be reached."""
    return code


def add_commands() -> None:
    """Offer programs, too."""
    plain.add_command(
        "grep", ["grep", "--", "{pattern}"], isolation="bwrap", success=(0, 1), cwd=Path("/srv"), timeout=5
    )
    plain.add_command("wc", ["wc"], stdin="{text}", title="Count", cwd=Path("/srv"), env={"LC_ALL": "C"})
    assert_type(trimcp.Command(["ls"]).schema(), dict[str, Any])
    plain.add_command("ls", ["ls"], tiemout=3)  # type: ignore[call-arg]
    plain.add_command("ls", ["ls"], isolation="docker")  # type: ignore[arg-type]
    plain.add_tool(look, isolation="command")  # type: ignore[arg-type]


def look() -> None:
    """See what is under way."""
    statistics = plain.statistics()
    assert_type(statistics, trimcp.watch.ServerStatistics)
    assert_type(statistics.running, int)
    with trimcp.watchdog(plain, server, seconds=10):
        pass


def main() -> None:
    """Serve, in the ways there are."""
    trio.run(trimcp.serve_stdio, server)
    trio.run(trimcp.serve_stdio, plain)
    trimcp.run_stdio(server, grace=1.0)
