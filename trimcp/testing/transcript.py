"""Transcripts: conversations that are replayed to a server and compared message by message, field by field.

A transcript written by hand is compared exactly and in order; a recording of `trimcp record` as `play` documents.
A transcript is text. `-->` begins a message of the client, `<--` one of the server, each as one line of JSON. Lines
that begin with `#` and blank lines are comments. A string `"..."` in an expected message matches any value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
import trio.testing

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.client.client import Target, named, opened
from trimcp.run import in_process
from trimcp.server.server import Server
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.journal import read_journal
from trimcp.testing.play import differences, of_agent_tools, play
from trimcp.transports.memory import memory_channels
from trimcp.transports.trace import as_json

_CLIENT, _SERVER = "-->", "<--"
_PATIENCE = 10.0  # seconds for each answer; virtual time skips them
_CUSHION = 0.01  # seconds without activity after which the server counts as idle


@attrs.frozen
class Transcript:
    """A conversation: `(True, message)` for the client's messages, `(False, message)` for the server's, in order.

    Attributes:
        messages: the messages, as JSON values.
        recorded: whether `trimcp record` made it; then values that change from run to run are not compared.
    """

    messages: Sequence[tuple[bool, Any]]
    recorded: bool = False

    @property
    def agent_tools(self) -> bool:
        """Whether these are messages of agent tools, not of MCP."""
        return self.recorded and of_agent_tools(self.messages)

    @classmethod
    def parse(cls, text: str) -> Transcript:
        """Read a transcript from text.

        Raises:
            ValueError: a line is invalid; the text names it.
        """
        messages = []
        for number, line in enumerate(text.splitlines(), 1):
            mark, _, body = line.strip().partition(" ")
            if not mark or mark.startswith("#"):
                continue
            if mark not in (_CLIENT, _SERVER):
                raise ValueError(f"line {number}: expected {_CLIENT}, {_SERVER} or a comment, not {mark[:20]!r}")
            try:
                messages.append((mark == _CLIENT, orjson.loads(body)))
            except orjson.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from None
        return cls(messages)

    @classmethod
    def load(cls, path: Path | str) -> Transcript:
        """Read a conversation from a file, either written by hand or recorded by `trimcp record`.

        Raises:
            ValueError: the file is neither; the text has the reason.
        """
        text = Path(path).read_text(encoding="utf-8")
        return cls(read_journal(text), recorded=True) if text.startswith("{") else cls.parse(text)

    @classmethod
    def read(cls, path: Path | str) -> Transcript:
        """Read a transcript from a file."""
        return cls.parse(Path(path).read_text(encoding="utf-8"))


async def replay(transcript: Transcript, target: Server[Any] | Target, *, ignore: Iterable[str] = ()) -> None:
    """Play the client's side and compare the server's messages with the transcript.

    Args:
        transcript: the conversation.
        target: a server in this process, or, for a recorded conversation, any target that a client can connect to.
        ignore: JSON Pointers to values that may differ in any message of a recorded conversation; "*" matches any one
            step: `"/result/structuredContent/time"`, `"/params/arguments/*"`.

    Raises:
        AssertionError: a message is missing, unexpected or has different fields; the text names each.
        TypeError: the target does not suit this conversation, or `ignore` is given for one that was not recorded.
    """
    if transcript.agent_tools:
        raise TypeError("a recording of agent tools is replayed by `trimcp replay FILE ws://HOST:PORT`")
    if transcript.recorded:
        async with opened(in_process(target, framed=True) if isinstance(target, Server) else named(target)) as channel:
            if not isinstance(channel, MessageChannel):
                raise TypeError(f"cannot replay to {type(channel).__name__}; pass a Server, or another target")
            problems = await play(transcript.messages, channel, ignore=ignore)
    elif isinstance(target, Server) and not ignore:
        problems = await _compare(transcript, target)
    else:
        raise TypeError("a transcript that was not recorded is replayed to a Server, and as a whole")
    if problems:
        raise AssertionError("the conversation differs from its transcript:\n" + "\n".join(problems))


async def _compare(transcript: Transcript, server: Server[Any]) -> list[str]:
    ours, theirs = memory_channels(framed=True)
    problems: list[str] = []
    send, inbox = trio.open_memory_channel[Any](math.inf)

    async def receive() -> None:
        with suppress(trio.EndOfChannel):
            while True:
                for incoming in await theirs.receive():
                    send.send_nowait(as_json(incoming.message))

    async with theirs, open_service_nursery() as nursery:
        nursery.start_soon(server.serve, ours)
        nursery.start_soon(receive)
        for number, (from_client, message) in enumerate(transcript.messages, 1):
            if from_client:
                await theirs.send([Outgoing(orjson.dumps(message), Kind.REQUEST)])
                continue
            with trio.move_on_after(_PATIENCE) as patience:
                answer = await inbox.receive()
                problems += [f"message {number}: {difference}" for difference in differences(message, answer)]
            if patience.cancelled_caught:
                problems.append(f"message {number}: the server sent nothing")
                break
        await trio.testing.wait_all_tasks_blocked(_CUSHION)
        with suppress(trio.WouldBlock):
            while True:
                problems.append(f"the server sent more: {inbox.receive_nowait()}")
    return problems
