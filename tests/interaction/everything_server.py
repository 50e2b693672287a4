"""A server that does a little of everything, for the interaction tests: served in memory, or as a child process.

What its handlers go through is written down in a journal: in memory for its own tools, and in a file that outlives
the process. As a program it takes its options as JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import orjson
import trio

from trimcp.errors import ErrorReply, ResourceNotFound, ToolError
from trimcp.run import run_stdio
from trimcp.schema.hints import Arg
from trimcp.server.handlers.media import Audio, Image
from trimcp.server.handlers.needs import Elicit
from trimcp.server.handlers.threads import ThreadContext
from trimcp.server.logbridge import LogBridge
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.session.limits import Limits
from trimcp.wire.content import EmbeddedResource, ResourceLink, TextContent, TextResourceContents
from trimcp.wire.input_requests import CreateMessageParams, ElicitResult, SamplingMessage
from trimcp.wire.prompts import PromptMessage
from trimcp.wire.tools import CallToolResult

INSTRUCTIONS = "Try every tool once."
PIXEL = bytes(range(16))
NAME_FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@attrs.define(eq=False)
class Journal:
    """What happened, in order; tasks can wait for a line."""

    path: Path | None = None
    lines: list[str] = attrs.field(factory=list)
    _written: trio.Event = attrs.field(factory=trio.Event)

    def write(self, line: str) -> None:
        self.lines.append(line)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")
        self._written.set()
        self._written = trio.Event()

    async def wait_for(self, line: str) -> None:
        while line not in self.lines:
            await self._written.wait()


@attrs.frozen
class Point:
    x: int
    y: int


def make_server(journal: Journal) -> Server[Journal]:
    """A new server with everything on it."""

    @asynccontextmanager
    async def lifespan(server: Server[Journal]) -> AsyncIterator[Journal]:
        journal.write("lifespan entered")
        try:
            with LogBridge(server, "everything"):
                yield journal
        finally:
            journal.write("lifespan left")

    server = Server(
        "everything",
        "1.2",
        title="Everything",
        instructions=INSTRUCTIONS,
        lifespan=lifespan,
        dynamic=True,
        page_size=7,
        limits=Limits(eof_grace=0.1, max_running=100),
    )
    _add_plain_tools(server, journal)
    _add_failing_tools(server)
    _add_lasting_tools(server, journal)
    _add_asking_tools(server, journal)
    _add_changing_tools(server)
    _add_resources_and_prompts(server, journal)
    return server


def _add_plain_tools(server: Server[Journal], journal: Journal) -> None:
    @server.tool
    async def echo(text: str) -> str:
        """Say it again.

        Args:
            text: what to say
        """
        return text

    @server.tool(title="Addition")
    async def add(a: int, b: Annotated[int, Arg(ge=0)] = 1) -> int:
        return a + b

    @server.tool
    async def move(point: Point, by: Sequence[int]) -> Point:
        return Point(point.x + by[0], point.y + by[1])

    schema = {"type": "object", "properties": {"word": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["word"]}

    @server.tool(input_schema=schema)
    async def spell(arguments: dict[str, Any]) -> str:
        return "-".join(arguments["word"])

    @server.tool
    async def content(kind: Literal["text", "image", "audio", "link", "embedded"]) -> Any:
        contents = {
            "text": TextContent("words"),
            "image": Image(PIXEL, "image/png"),
            "audio": Audio(PIXEL, "audio/wav"),
            "link": ResourceLink(name="readme", uri="notes://readme"),
            "embedded": EmbeddedResource(TextResourceContents(uri="notes://readme", text="hello")),
        }
        return [TextContent(f"here is {kind}"), contents[kind]]

    @server.tool
    def in_thread(text: str, ctx: ThreadContext) -> str:
        ctx.report_progress(1, 2, "half")
        ctx.info(f"working on {text}")
        return f"{text} in {'the main thread' if threading.current_thread() is threading.main_thread() else 'a thread'}"

    @server.tool
    async def who(ctx: Context[Journal]) -> dict[str, Any]:
        assert ctx.state is journal
        assert ctx.peer is not None
        trace = ctx.meta.get("traceparent")
        return {"peer": ctx.peer.name, "revision": ctx.revision.name, "method": ctx.method, "trace": trace}

    @server.tool
    async def statistics(ctx: Context[Journal]) -> dict[str, int]:
        from trio.testing import wait_all_tasks_blocked  # imports pytest, for a third of what a child takes to start

        session, _ = ctx.internals
        await wait_all_tasks_blocked()  # what was cancelled just before has unwound
        return {
            name: count for name, count in attrs.asdict(session.statistics()).items() if name not in ("lanes", "http")
        }

    @server.tool
    async def announce(what: str, ctx: Context[Any]) -> str:
        await ctx.notify("notifications/example/announced", {"what": what})
        return "announced"

    @server.notification("notifications/example/told")
    async def told(params: Any) -> None:
        journal.write(f"told {params['what']}")

    @server.tool(structured=False)
    async def journal_lines() -> list[str]:
        return journal.lines

    @server.tool
    async def wait_for(line: str) -> str:
        await journal.wait_for(line)
        return line


def _add_failing_tools(server: Server[Journal]) -> None:
    @server.tool
    async def fail(how: Literal["tool", "crash", "error"]) -> str:
        if how == "tool":
            raise ToolError("there is no such city")
        if how == "error":
            raise ErrorReply(4711, "the disk is full", {"free": 0})
        raise RuntimeError("the password is hunter2")

    @server.tool(structured=False)
    async def beyond() -> CallToolResult:
        return CallToolResult([], structured_content={"n": orjson.Fragment(b"18446744073709551616")})

    @server.tool(structured=False)
    async def partly_beyond() -> list[TextContent]:
        return [TextContent("near"), TextContent("far", meta={"n": orjson.Fragment(b"18446744073709551616")})]

    @server.tool
    async def promise() -> Annotated[dict[str, int], "not what it returns"]:
        return {"a": "not a number"}

    @server.tool
    def noisy() -> str:
        print("a stray print")
        sys.__stdout__.write("and another\n")
        os.write(1, b"and a third\n")
        subprocess.run([sys.executable, "-c", "print('a child prints')"], check=True, stdin=subprocess.DEVNULL)
        return "quiet"

    @server.tool
    async def die() -> str:
        os._exit(3)


def _add_lasting_tools(server: Server[Journal], journal: Journal) -> None:
    @server.tool
    async def hang(name: str, ctx: Context[Journal]) -> str:
        journal.write(f"{name} started")
        try:
            await trio.sleep_forever()
        finally:
            reason = ctx.cancel_reason
            journal.write(f"{name} stopped: {None if reason is None else reason.name}")
        return "never"

    @server.tool
    async def hold(name: str, until: str) -> str:
        journal.write(f"{name} started")
        await journal.wait_for(until)
        return f"{name} done"

    @server.tool
    async def note(line: str) -> str:
        journal.write(line)
        return line

    @server.tool(timeout=0.2)
    async def limited() -> str:
        await trio.sleep_forever()
        return "never"

    inside = 0
    most = 0

    @server.tool(max_concurrent=2)
    async def narrow() -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await trio.sleep(0.01)
        inside -= 1
        return most

    @server.tool
    async def count(to: int, wait: bool, ctx: Context[Journal]) -> int:
        for number in range(1, to + 1):
            if wait:
                await ctx.report_progress(number, total=to, message=f"step {number}")
            else:
                ctx.report_progress_nowait(number, total=to)
        return to

    @server.tool
    async def beside(ctx: Context[Journal]) -> str:
        done = trio.Event()

        async def work() -> None:
            await ctx.report_progress(1)
            done.set()

        ctx.request.start_soon(work)
        await done.wait()
        return "both"

    @server.tool
    async def log(level: Any, text: str, ctx: Context[Journal]) -> str:
        await ctx.log(level, {"text": text}, logger="everything")
        logging.getLogger("everything.inner").warning("bridged %s", text)
        return "logged"


def _add_asking_tools(server: Server[Journal], journal: Journal) -> None:
    @server.tool
    async def ask_name(ctx: Context[Journal]) -> str:
        journal.write("ask_name ran")
        answer = await ctx.elicit("Your name?", NAME_FORM)
        return f"{answer.action}: {answer.content['name'] if answer.action == 'accept' else '-'}"

    @server.tool
    async def greet(
        greeting: str,
        name: Annotated[str, Elicit("Whom?")],
        times: Annotated[int, Elicit("How often?")],
    ) -> str:
        journal.write("greet ran")
        return " ".join([greeting, name] * times)

    @server.tool
    async def visit(ctx: Context[Journal]) -> str:
        return (await ctx.elicit_url("Please pay", "https://example.org/pay", elicitation_id="e1")).action

    @server.tool
    async def think(question: str, ctx: Context[Journal]) -> str:
        params = CreateMessageParams([SamplingMessage("user", TextContent(question))], max_tokens=10)
        answer = await ctx.sample(params)
        return "".join(block.text for block in answer.blocks)

    @server.tool
    async def where(ctx: Context[Journal]) -> list[str]:
        return [root.uri for root in await ctx.list_roots()]

    @server.tool
    async def in_order(ctx: Context[Journal]) -> str:
        """Asks twice, and does something in between only once."""

        async def buy() -> str:
            journal.write("bought")
            return "ticket"

        journal.write("in_order ran")
        first = await ctx.list_roots(key="first")
        ticket = await ctx.once("buy", buy)
        second = await ctx.list_roots(key="second")
        return f"{ticket} {len(first)} {len(second)}"

    @server.tool
    async def ask_shielded(ctx: Context[Journal]) -> str:
        with trio.CancelScope(shield=True):
            return str(await ctx.list_roots())

    @server.tool
    async def decline_known(asked: Annotated[ElicitResult, Elicit("Sure?", NAME_FORM)]) -> str:
        return asked.action


def _add_changing_tools(server: Server[Journal]) -> None:
    @server.tool
    async def offer(name: str) -> str:
        async def offered() -> str:
            return name

        server.add_tool(offered, name=name)
        return name

    @server.tool
    async def withdraw(name: str) -> str:
        server.remove_tool(name)
        return name

    @server.tool
    async def touch(uri: str) -> str:
        server.resource_updated(uri)
        return uri

    @server.tool
    async def change_all() -> str:
        async def later() -> str:
            return "later"

        server.add_prompt(later)
        server.add_resource("notes://later", "later")
        return "changed"


def _add_resources_and_prompts(server: Server[Journal], journal: Journal) -> None:
    server.add_resource("notes://readme", "hello", mime_type="text/markdown", description="Read this first")
    server.add_resource("notes://pixel", PIXEL, mime_type="image/png")

    @server.resource("notes://both")
    async def both() -> list[str | bytes]:
        return ["text", PIXEL]

    @server.resource("numbers://{first}/{second}")
    async def numbers(first: int, second: int) -> dict[str, int]:
        if second == 0:
            raise ResourceNotFound("division")
        return {"sum": first + second}

    @server.resource("whose://{thing}")
    async def whose(thing: str, ctx: Context[Journal]) -> str:
        return f"{thing} of {(await ctx.list_roots())[0].name}"

    @server.prompt
    async def review(path: str, style: Literal["short", "long"] = "short") -> list[Any]:
        """Review a file.

        Args:
            path: which file
        """
        return [
            f"Review {path}, {style}",
            EmbeddedResource(TextResourceContents(uri=f"file:///{path}", text="x = 1")),
            PromptMessage("assistant", TextContent("I shall.")),
        ]

    @server.complete("review", "path")
    async def paths(value: str, context: dict[str, str]) -> list[str]:
        return [f"{value}{number}.{context.get('style', 'py')}" for number in range(150)]

    @server.complete("numbers://{first}/{second}", "second")
    async def seconds(value: str) -> list[str]:
        return [str(number) for number in range(30) if str(number).startswith(value)]

    @server.notification("notifications/roots/list_changed")
    async def roots_changed(params: Any) -> None:
        journal.write("roots changed")

    @server.middleware
    async def journalling(ctx: Context[Journal], params: Any, call_next: Any) -> Any:
        if ctx.method == "prompts/get":
            journal.write(f"{ctx.method} of {params.name}")
        return await call_next(ctx, params)


def serve(make_server: Callable[[Journal], Server[Any]]) -> None:
    """Serve over standard input and output, as the program's argument says."""
    gc.freeze()  # else the end of the process, which many tests wait for, looks through all that was imported
    options = json.loads(sys.argv[1])
    run_stdio(make_server(Journal(Path(options["journal"]))), grace=options["grace"])


if __name__ == "__main__":
    serve(make_server)
