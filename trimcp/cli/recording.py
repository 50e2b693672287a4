"""`trimcp record`, which forwards bytes unchanged, or messages if the server is at a URL; and `trimcp replay`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, MessageChannel
from trimcp.cleaning import clean
from trimcp.cli.exits import NO_CONNECTION, Failure
from trimcp.cli.targets import find_target, token_hint
from trimcp.errors import McpError
from trimcp.nurseries import open_service_nursery
from trimcp.run import signals
from trimcp.testing.journal import JournalWriter
from trimcp.testing.play import outgoing_of, play
from trimcp.testing.transcript import Transcript
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.stdio.child import ChildChannel, StdioServer
from trimcp.transports.stdio.server import Claim, claim, claim_stdio
from trimcp.transports.trace import as_json
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.jsonrpc import Lost, Malformed

_LAST_ANSWERS: Final = 30.0
"""Seconds for the server's last responses after its client has closed the connection."""

_DIFFERS: Final = 1


def run_proxy(file: Path, words: tuple[str, ...], *, masked: bool, max_bytes: int) -> int:
    """Record until either side ends, and return the exit code."""
    target = _named_target(words)
    try:
        journal = JournalWriter(file, shlex.join(words), masked=masked, max_bytes=max_bytes, tell=_tell)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error}") from None
    try:
        return trio.run(_record, target, journal)
    except McpError as error:
        raise Failure(f"{error}{token_hint(error, options=False)}", NO_CONNECTION) from None
    finally:
        journal.close()


def _named_target(words: tuple[str, ...]) -> Any:
    """Return the target of a single argument, or of a command's arguments."""
    target = find_target(words[0]) if len(words) == 1 else StdioServer(words)
    if isinstance(target, StdioServer):
        # It replaces the server, so it has the environment meant for the server.
        target = attrs.evolve(target, inherit_env=True, on_stderr=_server_says)
    return target


def _server_says(line: str) -> None:
    print(clean(line), file=sys.stderr, flush=True)


def _tell(line: str) -> None:
    print(f"trimcp record: {line}", file=sys.stderr, flush=True)


async def _record(target: Any, journal: JournalWriter) -> int:
    code = 0
    with signals() as stop, trio.CancelScope() as scope:
        async with open_service_nursery() as nursery:

            async def watch() -> None:
                await stop.wait()
                scope.cancel(reason="told to stop")

            nursery.start_soon(watch)
            relay = _relay_bytes if isinstance(target, StdioServer) else _relay_messages
            code = await relay(target, journal)
    return code


# Bytes


async def _relay_bytes(target: StdioServer, journal: JournalWriter) -> int:
    ours = claim()
    try:
        async with target.connect() as channel:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_to_server, ours, channel, journal)
                await _pass(channel.streams[0], ours.sender, partial(journal.note, False))
                with trio.move_on_after(1):  # it has closed its output, and usually exits soon
                    await channel.process.wait()
                nursery.cancel_scope.cancel(reason="the server has ended")
            ended = channel.process.returncode
    finally:
        ours.release()
    if ended is None:
        return 0
    return ended if ended >= 0 else 128 - ended


async def _to_server(ours: Claim, channel: ChildChannel, journal: JournalWriter) -> None:
    """Forward the client's bytes; when it closes, close the server's input and wait for the last responses."""
    sender = channel.streams[1]
    await _pass(ours.receiver, sender, partial(journal.note, True))
    await sender.aclose()
    await trio.sleep(_LAST_ANSWERS)
    await channel.aclose()


async def _pass(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, note: Callable[[bytes], object]) -> None:
    """Forward bytes as they arrive, and note each whole line before its end is forwarded."""
    line = bytearray()
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while chunk := await source.receive_some(READ_SIZE):
            first, *others = chunk.split(b"\n")  # of what came only: a long line comes in many pieces
            line += first
            for other in others:
                note(bytes(line))
                line = bytearray(other)
            if len(line) > CLIENT_MAX_MESSAGE:
                line = bytearray()  # too long for a message
            await sink.send_all(chunk)
    note(bytes(line))


# Messages


async def _relay_messages(target: Any, journal: JournalWriter) -> int:
    """Forward messages until either side has closed; without a client no more responses are expected."""
    ended = trio.Event()

    async def one_way(source: MessageChannel, sink: MessageChannel, from_client: bool) -> None:
        await _relay(source, sink, from_client, journal)
        ended.set()

    async with (
        target.connect() as server,
        claim_stdio() as client,
        open_service_nursery() as nursery,
    ):
        client.set_max_message(CLIENT_MAX_MESSAGE)
        nursery.start_soon(one_way, server, client, False)
        nursery.start_soon(one_way, client, server, True)
        await ended.wait()
    return 0


async def _relay(source: MessageChannel, sink: MessageChannel, from_client: bool, journal: JournalWriter) -> None:
    with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            for incoming in await source.receive():
                message = incoming.message
                if isinstance(message, Malformed):
                    journal.note(from_client, message.message.encode())
                    continue
                said = as_json(message)
                if isinstance(message, Lost):
                    error = {"code": INTERNAL_ERROR, "message": message.message}
                    said = {"jsonrpc": "2.0", "id": message.id, "error": error}
                    if message.id is None:
                        continue
                journal.note(from_client, orjson.dumps(said))
                await sink.send([outgoing_of(said)])


# Replaying


def run_replay(file: Path, words: tuple[str, ...], *, ignore: Iterable[str], patience: float, client: bool) -> int:
    """Play one side of the journal, print the differences, and return the exit code."""
    if client != bool(words):
        problem = "name the server to replay to" if client else "--side server takes no TARGET: the client starts it"
        raise Failure(problem)
    try:
        transcript = Transcript.load(file)
    except (ValueError, OSError) as error:
        raise Failure(f"{file}: {error}") from None
    connection: AbstractAsyncContextManager[MessageChannel] = (
        _named_target(words).connect() if client else claim_stdio()
    )

    async def run() -> list[str]:
        async with connection as channel:
            return await play(transcript.messages, channel, client=client, ignore=list(ignore), patience=patience)

    try:
        problems = trio.run(run)
    except McpError as error:
        raise Failure(f"{error}{token_hint(error, options=False)}", NO_CONNECTION) from None
    out = sys.stdout if client else sys.stderr  # playing the server, standard output belongs to the client
    who = "server" if client else "client"
    for problem in problems:
        print(clean(problem), file=out)
    if problems:
        print(f"{len(problems)} differences in what the {who} says", file=out)
    else:
        theirs = sum(from_client != client for from_client, _ in transcript.messages)
        print(f"the {who} says the same: {theirs} messages", file=out)
    return _DIFFERS if problems else 0
