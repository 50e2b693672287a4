"""`trimcp record`, which forwards bytes unchanged, or messages if the server is at a URL; and `trimcp replay`."""

from __future__ import annotations

import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, MessageChannel
from trimcp.cli.exits import NO_CONNECTION, Failure, say
from trimcp.cli.screen import Screen
from trimcp.cli.targets import NO_HEADERS, find_target, lost_text
from trimcp.cli.text import theirs
from trimcp.errors import McpError
from trimcp.run import signals
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.play import outgoing_of, play
from trimcp.testing.transcript import JournalWriter, Transcript
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.stdio.child import ChildChannel, StdioServer
from trimcp.transports.stdio.server import Claim, claim, claim_stdio
from trimcp.transports.trace import as_json
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.jsonrpc import Lost, Malformed

_LAST_ANSWERS: Final = 30.0
"""Seconds for the server's last responses after its client has closed the connection."""

_DIFFERS: Final = 1


def run_proxy(
    file: Path,
    words: tuple[str, ...],
    headers: Mapping[str, str],
    *,
    masked: bool,
    max_bytes: int,
    agent_port: int | None = None,
) -> int:
    """Record until either side ends, and return the exit code. The headers are sent to a URL, and not written down.

    `masked` and `max_bytes` are those of `JournalWriter`; `agent_port` is where an agent connects, None for MCP.
    """
    target = _named_target(words, headers) if agent_port is None else _agent_target(words, headers)
    try:
        journal = JournalWriter(file, shlex.join(words), masked=masked, max_bytes=max_bytes, tell=_tell)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error}") from None
    try:
        return trio.run(_record, _relay_of(target, agent_port), journal)
    except McpError as error:
        raise Failure(lost_text(error, target), NO_CONNECTION) from None
    finally:
        journal.close()


def _named_target(words: tuple[str, ...], headers: Mapping[str, str]) -> Any:
    """Return the target of a single argument, or of a command's arguments."""
    if len(words) > 1 and headers:
        raise Failure(NO_HEADERS)
    target = find_target(words[0], headers=headers) if len(words) == 1 else StdioServer(words)
    if isinstance(target, StdioServer):
        # It replaces the server, so it has the environment meant for the server.
        target = attrs.evolve(target, inherit_env=True, on_stderr=say)
    return target


def _agent_target(words: tuple[str, ...], headers: Mapping[str, str]) -> Any:
    from trimcp.cli.recording_agents import agent_target

    return agent_target(words, dict(headers))


def _relay_of(target: Any, agent_port: int | None) -> Callable[[JournalWriter], Awaitable[int]]:
    if agent_port is not None:
        from trimcp.cli.recording_agents import relay_agent

        return partial(relay_agent, target, agent_port)
    return partial(_relay_bytes if isinstance(target, StdioServer) else _relay_messages, target)


def _tell(line: str) -> None:
    say(f"trimcp record: {line}")


async def _record(relay: Callable[[JournalWriter], Awaitable[int]], journal: JournalWriter) -> int:
    code = 0
    with signals() as stop, trio.CancelScope() as scope:
        async with open_service_nursery() as nursery:

            async def watch() -> None:
                await stop.wait()
                scope.cancel(reason="told to stop")

            nursery.start_soon(watch)
            code = await relay(journal)
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


def run_replay(
    file: Path,
    words: tuple[str, ...],
    headers: Mapping[str, str],
    *,
    ignore: Iterable[str],
    patience: float,
    client: bool,
) -> int:
    """Play one side of the journal, print the differences, and return the exit code."""
    if client != bool(words):
        problem = "name the server to replay to" if client else "--side server takes no TARGET: the client starts it"
        raise Failure(problem)
    try:
        transcript = Transcript.load(file)
    except (ValueError, OSError) as error:
        raise Failure(f"{file}: {error}") from None
    connection: AbstractAsyncContextManager[MessageChannel]
    target = None
    if not transcript.agent_tools:
        target = _named_target(words, headers) if client else None
        connection = claim_stdio() if target is None else target.connect()
    elif client:
        from trimcp.agent_tools.client.websocket import open_agent_channel

        target = _agent_target(words, headers)
        connection = open_agent_channel(target)
    else:
        raise Failure("--side server is for MCP: an agent starts no server")

    async def run() -> list[str]:
        async with connection as channel:
            return await play(transcript.messages, channel, client=client, ignore=list(ignore), patience=patience)

    try:
        problems = trio.run(run)
    except McpError as error:
        raise Failure(lost_text(error, target), NO_CONNECTION) from None
    screen = Screen()
    write = screen.show if client else screen.complain  # playing the server, standard output belongs to the client
    who = "server" if client else "client"
    for problem in problems:
        write(theirs(problem, None))
    if problems:
        write(f"{len(problems)} differences in what the {who} says")
    else:
        count = sum(from_client != client for from_client, _ in transcript.messages)
        write(f"the {who} says the same: {count} messages")
    return _DIFFERS if problems else 0
