"""What `trimcp replay` does: play one side of a journal and tell what differs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from trimcp.channel import MessageChannel
from trimcp.cli.exits import NO_CONNECTION, USAGE, Failure
from trimcp.cli.recording_proxy import named_target
from trimcp.cli.text import clean
from trimcp.errors import McpError
from trimcp.testing.play import play
from trimcp.testing.transcript import Transcript
from trimcp.transports.stdio.server import claim_stdio

__all__ = ["run_replay"]

_DIFFERS: Final = 1


def run_replay(file: Path, words: tuple[str, ...], *, ignore: Iterable[str], patience: float, client: bool) -> int:
    """Play one side of the journal, tell what differs, and return the exit code."""
    if client != bool(words):
        problem = "name the server to replay to" if client else "--side server takes no TARGET: the client starts it"
        raise Failure(problem, USAGE)
    try:
        transcript = Transcript.load(file)
    except (ValueError, OSError) as error:
        raise Failure(f"{file}: {error}", USAGE) from None
    connection: AbstractAsyncContextManager[MessageChannel] = named_target(words).connect() if client else claim_stdio()
    run = partial(play, client=client, ignore=list(ignore), patience=patience)
    try:
        problems = trio.run(_play, connection, transcript, run)
    except McpError as error:
        raise Failure(str(error), NO_CONNECTION) from None
    _report(problems, transcript, client)
    return _DIFFERS if problems else 0


async def _play(connection: AbstractAsyncContextManager[MessageChannel], transcript: Transcript, run: Any) -> list[str]:
    async with connection as channel:
        problems: list[str] = await run(transcript.messages, channel)
        return problems


def _report(problems: list[str], transcript: Transcript, client: bool) -> None:
    """Tell what differs. Playing the server, standard output belongs to the client."""
    out = sys.stdout if client else sys.stderr
    theirs = sum(from_client != client for from_client, _ in transcript.messages)
    who = "server" if client else "client"
    for problem in problems:
        print(clean(problem), file=out)
    if problems:
        print(f"{len(problems)} differences in what the {who} says", file=out)
    else:
        print(f"the {who} says the same: {theirs} messages", file=out)
