"""Transcripts: conversations that are replayed to a server and compared message by message, field by field.

A transcript written by hand is compared exactly and in order; a recording of `trimcp record` as `play` documents.
A transcript is text. `-->` begins a message of the client, `<--` one of the server, each as one line of JSON. Lines
that begin with `#` and blank lines are comments. A string `"..."` in an expected message matches any value.

A recording is a journal: one JSON object per line, of which the first identifies the format. Each other line has `at`
(seconds since the beginning), `from` ("client" or "server") and `message`, or `text` for data that is not JSON. A
`note` is a comment. Secrets are replaced by numbers: "***1" is the same secret everywhere, so that a secret from the
server can be sent back to it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import trio
import trio.testing

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.client.client import Target, named, opened
from trimcp.run import in_process
from trimcp.server.server import Server
from trimcp.support.cleaning import MASK, mask_text, names_a_secret
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.play import differences, of_agent_tools, play, read_json, write_json
from trimcp.transports.memory import memory_channels
from trimcp.transports.trace import as_json
from trimcp.wire.jsonrpc import DEFAULT_LIMITS
from trimcp.wire.scanner import deeper_than

_DEEPEST: Final = DEFAULT_LIMITS.max_depth + 1  # levels of a line: a message's, in what is noted of it
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
            messages.append((mark == _CLIENT, _value(body, number)))
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
                await theirs.send([Outgoing(write_json(message), Kind.REQUEST)])
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


FORMAT: Final = 1
"""The version of the format; it changes if existing members get another meaning."""

_MAX_BYTES: Final = 64 * 1024 * 1024
_SIDES: Final = {True: "client", False: "server"}


@attrs.define(eq=False)
class JournalWriter:
    """Writes a journal, each message at once."""

    path: Path = attrs.field(converter=Path)  # the file that is written
    target: str = ""  # the recorded server, as text for the reader
    masked: bool = attrs.field(default=True, kw_only=True)  # write numbers in place of secrets
    # the size in bytes after which recording ends, with a note
    max_bytes: int = attrs.field(default=_MAX_BYTES, kw_only=True)
    # called with a line of text when recording begins, and when it ends early
    tell: Callable[[str], object] = attrs.field(default=lambda line: None, kw_only=True)
    full: bool = attrs.field(init=False, default=False)  # whether recording has ended
    _file: BinaryIO = attrs.field(init=False)
    _began: float = attrs.field(init=False, factory=time.monotonic)
    _written: int = attrs.field(init=False, default=0)
    _secrets: dict[bytes, str] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._file, self.path = _create(self.path)
        target = mask_text(self.target) if self.masked else self.target
        head = {"trimcp_journal": FORMAT, "began": datetime.now(UTC).isoformat(), "target": target}
        self._write({**head, "masked": self.masked})
        self.tell(f"recording to {self.path}")

    def note(self, from_client: bool, data: bytes) -> None:
        """Write one message."""
        if self.full or not data.strip():
            return
        entry: dict[str, Any] = {"at": round(time.monotonic() - self._began, 4), "from": _SIDES[from_client]}
        try:
            message = read_json(data)
        except ValueError:
            text = data.decode(errors="replace")
            entry["text"] = mask_text(text) if self.masked else text
        else:
            entry["message"] = self._mask(message) if self.masked else message
        self._write(entry)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a failed write was already reported
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        line = write_json(entry) + b"\n"
        if self._written + len(line) > self.max_bytes:
            self.full = True
            note = f"the recording ends here: it has come to its limit of {self.max_bytes:,} bytes"
            line = write_json({"note": note}) + b"\n"
            self.tell(note)
        self._written += len(line)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # ends the recording, not the connection
            self.full = True
            self.tell(f"the recording ends here: {error}")

    def _mask(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: self._mask(member, name) for name, member in value.items()}
        if names_a_secret(key) and value is not None and not isinstance(value, bool):
            return self._secrets.setdefault(write_json(value), f"{MASK}{len(self._secrets) + 1}")
        if isinstance(value, list):
            return [self._mask(member) for member in value]
        return mask_text(value) if isinstance(value, str) else value


def _create(path: Path) -> tuple[BinaryIO, Path]:
    number = 1
    while True:
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            # Readable for this user only: results of tools are private.
            return open(name, "xb", opener=partial(os.open, mode=0o600)), name
        except FileExistsError:
            number += 1


def read_journal(text: str) -> list[tuple[bool, Any]]:
    """Return the messages of a journal, `(True, message)` for the client's. Data that was not JSON is left out.

    Raises ValueError: the text is not a journal, or has a later format.
    """
    lines = text.splitlines()
    head = _entry(lines[0] if lines else "", 1)
    if head.get("trimcp_journal") != FORMAT:
        raise ValueError(f"line 1: this is no journal of trimcp in format {FORMAT}")
    messages = []
    for number, line in enumerate(lines[1:], 2):
        if number == len(lines) and not text.endswith("\n"):
            break  # the writer was stopped in the middle of a line
        entry = _entry(line, number)
        if "message" in entry:
            if entry.get("from") not in _SIDES.values():
                raise ValueError(f'line {number}: "from" must be "client" or "server"')
            messages.append((entry["from"] == "client", entry["message"]))
    return messages


def _value(text: str, number: int) -> Any:
    try:
        value = read_json(text)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None
    if len(text) > 2 * _DEEPEST and deeper_than(_DEEPEST, text.encode()):
        raise ValueError(f"line {number}: nested deeper than {_DEEPEST} levels")
    return value


def _entry(line: str, number: int) -> dict[str, Any]:
    entry = _value(line, number)
    if not isinstance(entry, dict):
        raise ValueError(f"line {number}: it is no JSON object")
    return entry
