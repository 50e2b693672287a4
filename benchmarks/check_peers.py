"""Drives every peer in every way it claims with trimcp's own client, and prints what works: `python check_peers.py`.

A server that answers wrongly must not be measured. Each way is asked for all that the cells use: both kinds of
arguments, progress, the resource, the prompt, and the form of its replies.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import attrs
import httpx2
import trio
from environments import Peer, Way, find_peers
from processes import START_LIMIT, listening

import trimcp

LIMIT = 30.0
MANY, LARGE = 1_000, 5_000_000
MUCH = {"BENCH_TOOLS": str(MANY), "BENCH_MAX_MESSAGE": str(4 * LARGE)}


@attrs.frozen
class Finding:
    """What became of one way to reach a peer: "ok" or what was wrong, and whether it did what it need not do, too."""

    peer: str
    way: Way
    said: str
    full: bool = False

    @property
    def right(self) -> bool:
        """It did what it claims."""
        return self.said == "ok"


Ask: TypeAlias = "Callable[[Peer, Way, Any, Replies], Awaitable[Finding]]"


@attrs.define
class Replies:
    """Notes the content type of each HTTP response to a POST, and whether a session was opened."""

    kinds: set[str] = attrs.field(factory=set)
    session: bool = False

    async def note(self, response: httpx2.Response) -> None:
        """Take one response."""
        self.session |= "mcp-session-id" in response.headers
        if response.request.method == "POST" and response.status_code == 200:
            self.kinds.add(response.headers.get("content-type", "").partition(";")[0])


async def check(peer: Peer, way: Way, ask: Ask, more: dict[str, str]) -> Finding:
    """Start a peer with more variables, and ask it in one way."""
    replies = Replies()
    try:
        with trio.fail_after(LIMIT + START_LIMIT):
            if way.mode == "stdio":
                program, *words = peer.command("stdio")
                return await ask(peer, way, trimcp.stdio(program, *words, env=peer.environment | more), replies)
            command, environment = peer.command(way.mode, reply=way.reply), {**os.environ, **peer.environment, **more}
            async with listening(command, environment) as (url, _), httpx2.AsyncClient(timeout=None) as client:
                client.event_hooks = {"response": [replies.note]}
                if way.mode == "websocket":
                    return await ask(peer, way, trimcp.websocket(url), replies)
                mode: Any = "sse" if way.mode == "sse" else "streamable"
                return await ask(peer, way, trimcp.http(url, mode=mode, client=client), replies)
    except Exception as error:
        return Finding(peer.name, way, _first(error))


async def ask_all(peer: Peer, way: Way, target: Any, replies: Replies) -> Finding:
    """Ask for all that the cells use."""
    async with trimcp.Client("check", version="1.0").connect(target, revision=way.revision) as session:
        tools = {tool.name for tool in await session.list_tools()}
        assert {"echo", "add", "stream"} <= tools, f"tools are {tools}"
        await _texts(session, "echo", {"text": "a\nb é"}, "a\nb é")
        await _texts(session, "add", {"a": 2, "b": 3}, "5")
        wrong = await _refused(session)
        assert wrong, "an argument of the wrong type was taken"
        forms = {"json": {"application/json"}, "auto": {"application/json"}, "sse": {"text/event-stream"}}
        if way.reply is not None:
            # Handshakes and lists may take the other form; what is measured are calls.
            replies.kinds.clear()
            await _texts(session, "echo", {"text": "form"}, "form")
            assert replies.kinds == forms[way.reply], f"the reply is {replies.kinds}"
            legacy = not session.revision.modern
            assert replies.session == legacy, "there is a session" if replies.session else "there is no session"
        reported = await _stream(session)
        assert reported == [1, 2, 3] or (way.reply == "json" and not reported), f"progress is {reported}"
        resource = (await session.read_resource("bench://greeting")).contents[0]
        assert getattr(resource, "text", None) == "hello", f"the resource is {resource}"
        prompt = (await session.get_prompt("greet", {"name": "Ada"})).messages[0].content
        assert getattr(prompt, "text", None) == "Say hello to Ada.", f"the prompt is {prompt}"
        return Finding(peer.name, way, "ok", bool(reported))


async def ask_much(peer: Peer, way: Way, target: Any, replies: Replies) -> Finding:
    """Ask for a thousand tools, and for a long text, which may be refused only where that is known."""
    async with trimcp.Client("check", version="1.0").connect(target, revision=way.revision) as session:
        tools = await session.list_tools()
        assert len(tools) == 3 + MANY, f"there are {len(tools)} tools"
        text = "x" * LARGE
        if way.mode in peer.limited:
            try:
                await _texts(session, "echo", {"text": text}, text)
            except trimcp.McpError:
                return Finding(peer.name, way, "ok", False)
            raise AssertionError("it takes more than was thought")
        await _texts(session, "echo", {"text": text}, text)
        return Finding(peer.name, way, "ok", True)


async def _texts(session: trimcp.ClientSession, tool: str, arguments: dict[str, Any], wanted: str) -> None:
    result = await session.call_tool(tool, arguments)
    found = [getattr(block, "text", None) for block in result.content]
    assert found == [wanted], f"{tool} returned {found}"
    assert not result.is_error, f"{tool} failed"


async def _refused(session: trimcp.ClientSession) -> bool:
    """Tell whether a wrong argument is refused: a server that checks nothing has an easy life."""
    try:
        result = await session.call_tool("add", {"a": "two", "b": 3})
    except trimcp.RemoteError:
        return True
    return bool(result.is_error)


async def _stream(session: trimcp.ClientSession) -> list[float]:
    async with session.calling("stream", {"n": 3}) as call:
        result = await call.result()
        assert [getattr(block, "text", None) for block in result.content] == ["done"], f"stream returned {result}"
        reported = []
        async for report in call.progress:
            assert report.total == 3, f"progress of {report.total}"
            reported.append(report.progress)
        return reported


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".strip(": ")


def table(findings: list[Finding], less: str) -> str:
    """Return the matrix as Markdown: a row for each way, a column for each peer; `less` is what some do not do."""
    names = list(dict.fromkeys(finding.peer for finding in findings))
    cells = {(finding.peer, finding.way): finding for finding in findings}
    lines = ["| | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    ways = sorted({finding.way for finding in findings}, key=str)
    rows = [[str(way), *(_cell(cells.get((name, way)), less) for name in names)] for way in ways]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _cell(finding: Finding | None, less: str) -> str:
    if finding is None:
        return "-"
    return ("ok" if finding.full else less) if finding.right else "WRONG"


async def check_all(peers: list[Peer], mode: str | None, much: bool) -> list[Finding]:
    """Check one way after another, since many servers at once take each other's time."""
    ask, more = (ask_much, MUCH) if much else (ask_all, {})
    return [await check(peer, way, ask, more) for peer in peers for way in peer.ways if mode in (None, way.mode)]


def main() -> None:
    """Check the peers, print the matrix, and fail if one did not do what it claims."""
    parser = argparse.ArgumentParser(description="Let every peer answer in every way it claims.")
    parser.add_argument("--peer", action="append", help="only the peer of this name (repeatable)")
    parser.add_argument("--mode", choices=("stdio", "http", "sse", "websocket"), help="only over this transport")
    parser.add_argument("--much", action="store_true", help="only ask for a thousand tools and 5 MB of text")
    options = parser.parse_args()
    findings = trio.run(check_all, find_peers(options.peer), options.mode, options.much)
    print(table(findings, "ok, refused" if options.much else "ok, no progress"))
    wrong = [finding for finding in findings if not finding.right]
    for finding in wrong:
        print(f"{finding.peer}, {finding.way}: {finding.said}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
