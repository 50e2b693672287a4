"""Drives every peer in every way it claims with trimcp's own client, and prints what works: `python check_peers.py`.

A server that answers wrongly must not be measured. Each way is asked for all that the cells use: both kinds of
arguments, progress, the resource, the prompt, and the form of its replies.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx2
import trio
from environments import Peer, Way, find_peers

import trimcp

START_LIMIT = 60.0
LIMIT = 30.0


@attrs.frozen
class Finding:
    """What became of one way to reach a peer: "ok" or what was wrong, and of three progress reports, how many came."""

    peer: str
    way: Way
    said: str
    progress: int = 0

    @property
    def right(self) -> bool:
        """It did what it claims."""
        return self.said == "ok"


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


@asynccontextmanager
async def listening(peer: Peer, way: Way) -> AsyncIterator[str]:
    """Start a peer that serves over a network, yield its URL, and stop it."""
    environment = {**os.environ, **peer.environment}
    command = peer.command(way.mode, reply=way.reply)
    process = await trio.lowlevel.open_process(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = b""
        with trio.fail_after(START_LIMIT):
            while not line.endswith(b"\n"):
                data = await process.stdout.receive_some()
                if not data:
                    raise AssertionError("it ended before it said its URL")
                line += data
        yield line.decode().strip()
    finally:
        process.terminate()
        with trio.move_on_after(5, shield=True):
            await process.wait()
        process.kill()
        await process.stdout.aclose()


async def check(peer: Peer, way: Way) -> Finding:
    """Ask a peer in one way for everything."""
    replies = Replies()
    try:
        with trio.fail_after(LIMIT + START_LIMIT):
            if way.mode == "stdio":
                program, *words = peer.command("stdio")
                return await _ask(peer, way, trimcp.stdio(program, *words, env=peer.environment), replies)
            async with listening(peer, way) as url, httpx2.AsyncClient(timeout=None) as client:
                client.event_hooks = {"response": [replies.note]}
                if way.mode == "websocket":
                    return await _ask(peer, way, trimcp.websocket(url), replies)
                mode: Any = "sse" if way.mode == "sse" else "streamable"
                return await _ask(peer, way, trimcp.http(url, mode=mode, client=client), replies)
    except Exception as error:
        return Finding(peer.name, way, _first(error))


async def _ask(peer: Peer, way: Way, target: Any, replies: Replies) -> Finding:
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
        return Finding(peer.name, way, "ok", len(reported))


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


def table(findings: list[Finding]) -> str:
    """Return the matrix as Markdown: a row for each way, a column for each peer."""
    names = list(dict.fromkeys(finding.peer for finding in findings))
    cells = {(finding.peer, finding.way): finding for finding in findings}
    lines = ["| | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    ways = sorted({finding.way for finding in findings}, key=str)
    rows = [[str(way), *(_cell(cells.get((name, way))) for name in names)] for way in ways]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _cell(finding: Finding | None) -> str:
    if finding is None:
        return "-"
    return ("ok" if finding.progress else "ok, no progress") if finding.right else "WRONG"


async def check_all(peers: list[Peer], mode: str | None) -> list[Finding]:
    """Check one way after another, since many servers at once take each other's time."""
    return [await check(peer, way) for peer in peers for way in peer.ways if mode in (None, way.mode)]


def main() -> None:
    """Check the peers, print the matrix, and fail if one did not do what it claims."""
    parser = argparse.ArgumentParser(description="Let every peer answer in every way it claims.")
    parser.add_argument("--peer", action="append", help="only the peer of this name (repeatable)")
    parser.add_argument("--mode", choices=("stdio", "http", "sse", "websocket"), help="only over this transport")
    options = parser.parse_args()
    findings = trio.run(check_all, find_peers(options.peer), options.mode)
    print(table(findings))
    wrong = [finding for finding in findings if not finding.right]
    for finding in wrong:
        print(f"{finding.peer}, {finding.way}: {finding.said}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
