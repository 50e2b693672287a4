"""Golden transcripts: a recorded conversation replayed against a server, compared message by message, field by field.

A transcript is text. `-->` begins a message of the client, `<--` one of the server, each as one line of JSON; lines
that begin with `#` and blank lines are for people. A string `"..."` in an expected message stands for any value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import orjson
import trio
import trio.testing

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.server.server import Server
from trimcp.session.scopes import open_service_nursery
from trimcp.transports.memory import memory_channels
from trimcp.transports.trace import as_json

__all__ = ["Transcript", "differences", "replay"]

_CLIENT, _SERVER = "-->", "<--"
_ANY = "..."
# Longer than any handler in a replayed conversation should take; in virtual time it costs nothing.
_PATIENCE = 10.0
# Seconds of quiet after which a server has nothing more to say.
_CUSHION = 0.01


@attrs.frozen
class Transcript:
    """A conversation: `(True, message)` for the client's messages, `(False, message)` for the server's, in order."""

    messages: Sequence[tuple[bool, Any]]

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
    def read(cls, path: Path | str) -> Transcript:
        """Read a transcript from a file."""
        return cls.parse(Path(path).read_text(encoding="utf-8"))


async def replay(transcript: Transcript, server: Server[Any]) -> None:
    """Play the client's part to a server and compare what it answers.

    Raises:
        AssertionError: an answer is missing, there is one too many, or fields differ; the text names each.
    """
    ours, theirs = memory_channels(framed=True)
    async with open_service_nursery() as nursery, theirs:
        nursery.start_soon(server.serve, ours)
        inbox: list[Any] = []
        problems: list[str] = []
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
    if problems:
        raise AssertionError("the conversation differs from its transcript:\n" + "\n".join(problems))


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


def differences(expected: Any, actual: Any, path: str = "$") -> Iterator[str]:
    """Yield a line for every place where two JSON values differ, with its path."""
    if expected == _ANY:
        return
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in expected.keys() | actual.keys():
            if key not in actual:
                yield f"{path}.{key} is missing"
            elif key not in expected:
                yield f"{path}.{key} should not be there: {_short(actual[key])}"
            else:
                yield from differences(expected[key], actual[key], f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{path} has {len(actual)} members, expected {len(expected)}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(left, right, f"{path}[{index}]")
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path} is {_short(actual)}, expected {_short(expected)}"


def _short(value: Any) -> str:
    text = orjson.dumps(value).decode()
    return text if len(text) <= 120 else text[:117] + "..."
