"""Golden transcripts: a recorded conversation replayed against a server, compared message by message, field by field.

One that was written by hand is compared to the letter and in its order; one that `trimcp record` made as `play` says.
A transcript is text. `-->` begins a message of the client, `<--` one of the server, each as one line of JSON; lines
that begin with `#` and blank lines are for people. A string `"..."` in an expected message stands for any value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
import trio.testing

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.client.client import Target
from trimcp.server.server import Server
from trimcp.session.scopes import open_service_nursery
from trimcp.testing.journal import read_journal
from trimcp.testing.play import differences, play_to
from trimcp.transports.memory import memory_channels
from trimcp.transports.trace import as_json

__all__ = ["Transcript", "replay"]

_CLIENT, _SERVER = "-->", "<--"
# Longer than any handler in a replayed conversation should take; in virtual time it costs nothing.
_PATIENCE = 10.0
# Seconds of quiet after which a server has nothing more to say.
_CUSHION = 0.01


@attrs.frozen
class Transcript:
    """A conversation: `(True, message)` for the client's messages, `(False, message)` for the server's, in order.

    Attributes:
        messages: the messages, as JSON values.
        recorded: whether it was made by `trimcp record`: then it is compared as far as it can be the same twice.
    """

    messages: Sequence[tuple[bool, Any]]
    recorded: bool = False

    @classmethod
    def parse(cls, text: str) -> Transcript:
        """Read a transcript from text.

        Raises:
            ValueError: a line is none of a transcript's; the text names it.
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
        """Read a conversation from a file, whether written by hand or made by `trimcp record`.

        Raises:
            ValueError: it is neither; the text says why.
        """
        text = Path(path).read_text(encoding="utf-8")
        return cls(read_journal(text), recorded=True) if text.startswith("{") else cls.parse(text)

    @classmethod
    def read(cls, path: Path | str) -> Transcript:
        """Read a transcript from a file."""
        return cls.parse(Path(path).read_text(encoding="utf-8"))


async def replay(transcript: Transcript, target: Server[Any] | Target, *, ignore: Iterable[str] = ()) -> None:
    """Play the client's part and compare what the server answers.

    Args:
        transcript: the conversation.
        target: a server in this process, or, for a conversation that was recorded, whatever a client can connect to.
        ignore: JSON Pointers to what may differ in any message of a recorded conversation, "*" for any one step:
            `"/result/structuredContent/time"`, `"/params/arguments/*"`.

    Raises:
        AssertionError: an answer is missing, there is one too many, or fields differ; the text names each.
        TypeError: the target is none for this conversation, or `ignore` is given for one that was not recorded.
    """
    if transcript.recorded:
        problems = await play_to(target, transcript.messages, ignore=ignore)
    elif isinstance(target, Server) and not ignore:
        problems = await _compare(transcript, target)
    else:
        raise TypeError("a transcript that was not recorded is replayed to a Server, and as a whole")
    if problems:
        raise AssertionError("the conversation differs from its transcript:\n" + "\n".join(problems))


async def _compare(transcript: Transcript, server: Server[Any]) -> list[str]:
    ours, theirs = memory_channels(framed=True)
    problems: list[str] = []
    async with open_service_nursery() as nursery, theirs:
        nursery.start_soon(server.serve, ours)
        inbox: list[Any] = []
        for number, (from_client, message) in enumerate(transcript.messages, 1):
            if from_client:
                data = orjson.dumps(message)
                await theirs.send([Outgoing(data, Kind.REQUEST)])
                continue
            answer = await _next(theirs, inbox)
            if answer is None:
                problems.append(f"message {number}: the server sent nothing")
                break
            problems += [f"message {number}: {difference}" for difference in differences(message, answer)]
        await _rest(theirs, inbox)
        problems += [f"the server sent more: {message}" for message in inbox]
    return problems


async def _next(channel: MessageChannel, inbox: list[Any]) -> Any:
    if not inbox:
        with trio.move_on_after(_PATIENCE):
            inbox.extend(as_json(incoming.message) for incoming in await channel.receive())
    return inbox.pop(0) if inbox else None


async def _rest(channel: MessageChannel, inbox: list[Any]) -> None:
    """Take what else the server has to say."""

    async def collect() -> None:
        with suppress(trio.EndOfChannel):
            while True:
                inbox.extend(as_json(incoming.message) for incoming in await channel.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(collect)
        await trio.testing.wait_all_tasks_blocked(_CUSHION)
        nursery.cancel_scope.cancel(reason="the server is done")
