"""The demonstration: a client and the code search example, a real child process, on this machine's own Python."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Final

import attrs
import click
import trio

from trimcp.cli.conversation import own_version, trace_to
from trimcp.cli.exits import DEMO_EXIT_CODES, NO_CONNECTION, REMOTE_ERROR, Failure
from trimcp.cli.options import Subcommand
from trimcp.cli.screen import Screen
from trimcp.cli.text import describe_content, describe_resource, number_text, theirs
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.errors import McpError
from trimcp.transports.stdio.child import StdioServer
from trimcp.wire.tools import CallToolResult

# A pattern that matches no line of the standard library, and takes a backtracking engine practically forever.
_SLOW: Final = r"(?:[a-z]+ ?)+;;$"
_KINDS_SHOWN: Final = 5
_STILL: Final = 0.5
_PATIENCE: Final = 5.0


@click.command(cls=Subcommand, epilog=DEMO_EXIT_CODES)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--trace", metavar="[=FILE]", help="Show every message, or add it to FILE; secrets are masked.")
def demo(directory: str | None, trace: str | None) -> None:
    """Watch a client and a server at work: index Python's standard library (or DIRECTORY) over a real pipe.

    The server is the example codesearch.py in a process of its own. A long search is cancelled half-way; in the end
    nothing is left of it.

    \b
    Examples:
      trimcp demo
      trimcp demo ~/project
      trimcp demo --trace=messages.txt
    """
    place = Path(directory or sysconfig.get_path("stdlib")).resolve()
    shown = _Demo(place, Screen(), trace)
    try:
        sys.exit(trio.run(shown.run))
    except McpError as error:
        raise Failure(theirs(error, None), REMOTE_ERROR if shown.screen.listening else NO_CONNECTION) from None
    finally:
        shown.screen.end_progress()


def _server_file() -> Path:
    """Return the example: beside us where trimcp is installed, in its own folder in a checkout."""
    here = Path(__file__).resolve()
    for folder in (here.with_name("example"), here.parents[2] / "examples"):
        if (folder / "codesearch.py").is_file():
            return folder / "codesearch.py"
    raise Failure("the example codesearch.py is not installed with trimcp; reinstall it", NO_CONNECTION)


@attrs.define(eq=False)
class _Demo:
    place: Path
    screen: Screen
    trace: str | None
    calls: int = 0
    steps: int = 0
    running_on: bool = False
    longest: str = ""

    async def run(self) -> int:
        """Do all of it and return the exit code: 0 if nothing is left behind."""
        started = time.monotonic()
        before = trio.lowlevel.current_statistics().tasks_living
        command = (sys.executable, str(_server_file()), str(self.place))
        server = StdioServer(command, on_stderr=self.screen.server_says, trace=trace_to(self.trace, self.screen))
        client = Client("trimcp demo", own_version())
        client.logging(self.screen.log)
        async with server.connect() as channel, client.connect(channel) as session:
            self.screen.listening = True
            assert session.server_info is not None
            info = session.server_info
            self._head(f"{info.name} {info.version} runs as process {channel.process.pid} on {self.place}")
            self._say(f"protocol {session.revision.name}, ready after {time.monotonic() - started:.2f} s")
            await self._index(session)
            await self._cancel_half_way(session)
            await self._search(session)
            await self._read(session)
        left = trio.lowlevel.current_statistics().tasks_living - before
        code = channel.process.returncode
        self._head("The end")
        self._say(
            f"{self.calls} calls, {self.steps:,} progress messages, {time.monotonic() - started:.1f} s, "
            f"tasks left: {left}, the server exited with {code}"
        )
        return 0 if left == 0 and code == 0 and not self.running_on else REMOTE_ERROR

    async def _index(self, session: ClientSession) -> None:
        self._head("Count the lines of every file, with progress file by file")
        started = time.monotonic()
        result = await self._call(session, "line_statistics", {})
        counted: Any = result.structured_content
        if not counted["longest_file"]:
            raise Failure(f"there is no text in {self.place}; name another directory")
        seconds = time.monotonic() - started
        self._say(f"{counted['files']:,} files with {counted['lines']:,} lines in {seconds:.1f} s; the longest is")
        self._say(f"{theirs(counted['longest_file'])}")
        self.longest = counted["longest_file"]
        for kind in counted["kinds"][:_KINDS_SHOWN]:
            self._say(f"{theirs(kind['kind']):>12} {kind['files']:6,} files {kind['lines']:9,} lines")

    async def _call(self, session: ClientSession, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        self.calls += 1
        async with session.calling(tool, arguments) as call:
            async for step in call.progress:
                self.steps += 1
                self.screen.progress(step)
            result = await call.result()
        self.screen.end_progress()
        if result.is_error is True:
            raise Failure("\n".join(describe_content(result.content)), REMOTE_ERROR)
        return result

    async def _cancel_half_way(self, session: ClientSession) -> None:
        self._head("Search with a regular expression that would hang many engines, and leave half-way")
        self.calls += 1
        async with session.calling("search", {"pattern": _SLOW, "regex": True}) as call:
            async for step in call.progress:
                self.steps += 1
                self.screen.progress(step)
                if step.total and step.progress >= step.total / 2:
                    break
        # Leaving the block cancelled the call; nothing else had to be done.
        self.screen.end_progress()
        self._say(f"left at file {number_text(step.progress)} of {number_text(step.total or 0)}")
        work = await self._work(session)
        with trio.move_on_after(_PATIENCE):
            while work["running"]:
                await trio.sleep(_STILL / 10)
                work = await self._work(session)
        await trio.sleep(_STILL)
        later = await self._work(session)
        self.running_on = bool(later["running"]) or later["files_read"] != work["files_read"]
        self._say(f"the server says: {work['cancelled']} cancelled {theirs(work['last_cancelled'] or '')}")
        self._say(
            f"searches running there now: {later['running']}; "
            f"files it read in the last {_STILL} s: {later['files_read'] - work['files_read']}"
        )

    async def _work(self, session: ClientSession) -> dict[str, Any]:
        self.calls += 1
        result = await session.read_resource("codesearch://work")
        work: dict[str, Any] = json.loads(describe_resource(result.contents[0]))
        return work

    async def _search(self, session: ClientSession) -> None:
        self._head("Search for the classes that are called a task group")
        result = await self._call(session, "search", {"pattern": r"class \w*TaskGroup", "regex": True, "glob": "*.py"})
        found: Any = result.structured_content
        for match in found["matches"][:_KINDS_SHOWN]:
            self._say(f"{theirs(match['path'])}:{match['line']}: {theirs(match['text'], 80)}")
        self._say(f"{len(found['matches'])} lines in {found['files_searched']:,} files")

    async def _read(self, session: ClientSession) -> None:
        self._head("Complete a path, read that file as a resource, and get a prompt about it")
        self.calls += 3
        completion = await session.complete_prompt("review", "path", "this")
        path = completion.values[0] if completion.values else self.longest
        self._say(f"completed 'this' to {', '.join(map(theirs, completion.values)) or 'nothing'}")
        result = await session.read_resource(f"code:///{path}")
        text = describe_resource(result.contents[0])
        self._say(f"code:///{theirs(path)} has {len(text):,} characters")
        prompt = await session.get_prompt("review", {"path": path, "focus": "style"})
        (opening, *_) = describe_content([prompt.messages[0].content])
        self._say(f"{len(prompt.messages)} messages: {re.split('(?<=[.]) ', opening)[0]}")

    def _head(self, text: str) -> None:
        self.screen.show(f"\n{text}", "bold")

    def _say(self, text: str) -> None:
        self.screen.show(f"  {text}")
