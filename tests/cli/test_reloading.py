"""`trimcp run --reload`: the next version takes over beside the old one, which ends what it has begun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

import trimcp
from trimcp import PromptsChanged, ResourceUpdated, ToolsChanged
from trimcp.cli.serve.reloading import folder_of, own_words

TRIMCP = (sys.executable, "-m", "trimcp.cli")
SECONDS = 60
WRITTEN = 1_750_000_000
BEGINNING = """
import os
import trimcp, trio

server = trimcp.Server("reloaded", version="1")

@server.tool
async def version() -> str:
    return "VERSION"

@server.resource("notes://today")
async def today() -> str:
    return "VERSION"

@server.tool
async def wait(file: str, ctx: trimcp.Context) -> str:
    await ctx.report_progress(1)
    while not os.path.exists(file):
        await trio.sleep(0.01)
    return "waited in VERSION"

@server.tool
async def ask(ctx: trimcp.Context) -> str:
    found = await ctx.elicit("How many?", {"type": "object", "properties": {"n": {"type": "integer"}}})
    return f"{found.content['n']} in VERSION"

@server.tool
async def leave() -> str:
    os._exit(3)
"""


@attrs.define(eq=False)
class Program:
    """A server's file, and what is said while it is changed."""

    path: Path
    said: list[str] = attrs.field(factory=list)
    changes: int = 0
    asked: trio.Event = attrs.field(factory=trio.Event)
    answer: trio.Event = attrs.field(factory=trio.Event)

    heard: trio.Event = attrs.field(factory=trio.Event)

    def hear(self, line: str) -> None:
        self.said.append(line)
        self.heard.set()

    def write(self, version: str, more: str = "") -> None:
        self.path.write_text(BEGINNING.replace("VERSION", version) + more)
        os.utime(self.path, (WRITTEN, WRITTEN))  # in one second, by which compiled files know their source

    async def until(self, text: str) -> str:
        """Wait until something is said, after what was waited for before, and return its line."""
        with trio.fail_after(SECONDS):
            while not any(text in line for line in self.said):
                self.heard = trio.Event()
                await self.heard.wait()
        at = next(number for number, line in enumerate(self.said) if text in line)
        last = self.said[at]
        del self.said[: at + 1]
        return last

    def client(self) -> trimcp.Client:
        client = trimcp.Client("c")

        @client.notification("notifications/tools/list_changed")
        async def changed(params: Any) -> None:
            self.changes += 1

        @client.elicitation
        async def user(question: trimcp.ElicitParams) -> trimcp.ElicitResult:
            self.asked.set()
            await self.answer.wait()
            return trimcp.ElicitResult("accept", {"n": 7})

        return client


@pytest.fixture
def program(tmp_path: Path) -> Program:
    made = Program(tmp_path / "server.py")
    made.write("first")
    return made


@asynccontextmanager
async def over_stdio(program: Program, revision: str) -> AsyncIterator[trimcp.ClientSession]:
    target = trimcp.stdio(*TRIMCP, "run", "--reload", str(program.path), on_stderr=program.hear)
    async with program.client().connect(target, revision=revision) as session:
        yield session


async def call(session: trimcp.ClientSession, name: str, **arguments: str) -> str:
    return (await session.call_tool(name, arguments)).text


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25", "2026-07-28"])
async def test_the_next_version_takes_over_a_session_over_stdio(program: Program, revision: str) -> None:
    waited: list[str] = []
    begun = trio.Event()
    async with over_stdio(program, revision) as session, trio.open_nursery() as nursery:
        assert await call(session, "version") == "first"

        async def wait(file: str) -> None:
            async with session.calling("wait", {"file": file}) as waiting:
                await waiting.progress.receive()
                begun.set()
                waited.append((await waiting.result()).text)

        file = program.path.with_name("go")
        nursery.start_soon(wait, str(file))
        await begun.wait()
        program.write("second", "\n@server.tool\nasync def more() -> str:\n    return ''\n")
        await program.until("version 2 serves from now on")
        assert await call(session, "version") == "second"
        assert "more" in [tool.name for tool in await session.list_tools(fresh=True)]
        assert program.changes == (0 if revision == "2026-07-28" else 1)
        file.touch()  # the old one ends what it has begun
    assert waited == ["waited in first"]


@pytest.mark.slow
async def test_a_subscription_is_taken_over_and_told_that_all_may_have_changed(program: Program) -> None:
    file = program.path.with_name("go")
    async with over_stdio(program, "2026-07-28") as session, session.calling("wait", {"file": str(file)}) as waiting:
        await waiting.progress.receive()
        async with session.listen(tools=True, prompts=True, resources=["notes://today"]) as changes:
            for version in ("second", "third"):
                program.write(version)
                with trio.fail_after(SECONDS):
                    told = [await changes.receive() for _ in range(3)]
                assert told == [ToolsChanged(), PromptsChanged(), ResourceUpdated("notes://today")]
                assert (await session.read_resource("notes://today")).text == version
            assert changes.end is None
        file.touch()
        assert (await waiting.result()).text == "waited in first"


@pytest.mark.slow
async def test_a_version_that_does_not_start_leaves_the_old_one_at_work(program: Program) -> None:
    async with over_stdio(program, "2025-11-25") as session:
        program.path.write_text("a syntax error(")
        await program.until("SyntaxError")
        await program.until("the new version did not start; the old one goes on")
        assert await call(session, "version") == "first"
        program.write("third")
        await program.until("serves from now on")
        assert await call(session, "version") == "third"


@pytest.mark.slow
async def test_a_question_of_the_old_version_is_answered_to_it(program: Program) -> None:
    answered: list[str] = []
    async with over_stdio(program, "2025-11-25") as session, trio.open_nursery() as nursery:

        async def ask() -> None:
            answered.append(await call(session, "ask"))

        nursery.start_soon(ask)
        await program.asked.wait()
        program.write("second")
        await program.until("version 2 serves from now on")
        program.answer.set()
        nursery.start_soon(ask)  # versions number their questions alike
    assert sorted(answered) == ["7 in first", "7 in second"]


@pytest.mark.slow
async def test_a_call_whose_version_ends_gets_one_error_and_a_change_starts_the_next(program: Program) -> None:
    async with over_stdio(program, "2025-11-25") as session:
        with pytest.raises(trimcp.RemoteError, match="may or may not have been carried out"):
            await call(session, "leave")
        await program.until("starts again when a file changes")
        with pytest.raises(trimcp.RemoteError, match="starts again when one of its files changes"):
            await call(session, "version")
        program.write("second")
        await program.until("serves from now on")
        assert await call(session, "version") == "second"


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_the_next_version_takes_over_the_port(program: Program, revision: str) -> None:
    words = [*TRIMCP, "run", str(program.path), "--http", "--port", "0", "--reload"]
    process = await trio.lowlevel.open_process(words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    output = process.stderr

    async def listen() -> None:
        rest = ""
        async for chunk in output:
            *lines, rest = (rest + chunk.decode()).split("\n")
            for line in lines:
                program.hear(line)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        try:
            found = re.search(r"http://\S+", await program.until("listening on http://"))
            assert found is not None
            async with program.client().connect(trimcp.http(found[0]), revision=revision) as session:
                assert await call(session, "version") == "first"
                file = program.path.with_name("go")
                async with session.calling("wait", {"file": str(file)}) as waiting:
                    await waiting.progress.receive()
                    program.write("second")
                    await program.until("version 2 serves from now on")
                    file.touch()
                    assert (await waiting.result()).text == "waited in first"
                with trio.fail_after(SECONDS):
                    answered = "first"
                    while answered == "first":  # as long as the old one answers on its kept connections
                        try:
                            answered = await call(session, "version")
                        except (trimcp.NotStarted, trimcp.ConnectionLost):  # the session is just being handed over
                            await trio.sleep(0.05)
                    assert answered == "second"
                program.path.write_text("a syntax error(")
                await program.until("the old one goes on")
                assert await call(session, "version") == "second"
        finally:
            process.send_signal(signal.SIGINT)
            with trio.move_on_after(SECONDS, shield=True):
                await process.wait()
            process.kill()
    assert process.returncode == 0


def test_what_is_watched_and_what_a_version_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "server.py").touch()
    assert folder_of("src/server.py:app") == tmp_path / "src"
    assert folder_of("package.module:app") == tmp_path == folder_of("missing.py")
    words = ["--reload", "src/server.py", "--grace", "3", "--", "--reload"]
    assert own_words(words) == ["src/server.py", "--grace", "3", "--", "--reload"]


def test_it_is_for_one_process(tmp_path: Path) -> None:
    words = [*TRIMCP, "run", "x.py", "--http", "--reload", "--workers", "2"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert done.returncode == 2
    assert "leave out --workers" in done.stderr
