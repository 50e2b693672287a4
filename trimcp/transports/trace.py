"""A channel that writes each message of another channel as a readable line, with secrets masked."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import orjson

from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.support.cleaning import mask, shorten
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Lost, Malformed, Message, Notification, Request, Response

Write: TypeAlias = Callable[[str], object]
"""Takes one line of the trace, newline included, and returns at once: `sys.stderr.write`, a file's `write`."""

_LONGEST: Final = 300

_log = logging.getLogger("trimcp.trace")


def traced(channel: MessageChannel, write: Write, *, clock: Callable[[], float] = time.time) -> MessageChannel:
    """Return a channel that does what `channel` does and writes a line about every message.

    If `write` raises, the trace ends with one warning and the connection goes on.

    Args:
        channel: the channel to trace.
        write: called with each line.
        clock: returns seconds since the epoch.
    """
    return _Traced(channel, Tracer(write, clock))


def format_message(direction: str, message: Message | bytes, at: float) -> str:
    """Return the line of the trace for one message: "-->" if it was sent, "<--" if received; `at` since the epoch."""
    clock = datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-3]
    value: Any
    if isinstance(message, bytes):
        try:
            value = orjson.loads(message)
        except orjson.JSONDecodeError:
            return f"{clock} {direction} (not JSON) {shorten(repr(message[:_LONGEST]))}\n"
    elif isinstance(message, Malformed):
        return f"{clock} {direction} (malformed: {message.reason}, id {message.id!r}) {message.message}\n"
    else:
        value = as_json(message)
    return f"{clock} {direction} {orjson.dumps(mask(value), default=repr).decode()}\n"


def as_json(message: Any) -> Any:
    """Return a parsed message as a JSON value; those of other protocols than MCP are one."""
    if not isinstance(message, Message):
        return message
    if isinstance(message, Batch):
        return [as_json(member) for member in message.members]
    members: dict[str, Any] = {"jsonrpc": "2.0"}
    if isinstance(message, Malformed):
        return {"malformed": message.reason, "id": message.id}
    if isinstance(message, Lost):
        return {"lost": message.message, "id": message.id}
    if not isinstance(message, Notification):
        members["id"] = message.id
    if isinstance(message, Request | Notification):
        members["method"] = message.method
        if message.params is not None:
            members["params"] = message.params
    elif isinstance(message, Response):
        members["result"] = message.result
    elif isinstance(message, ErrorResponse):
        members["error"] = {"code": message.code, "message": message.message}
        if message.data is not None:
            members["error"]["data"] = message.data
    return members


def trace_from_environment() -> Write | None:
    """Return the trace's writer if the environment asks for one: TRIMCP_TRACE=1, or the path of a file."""
    target = os.environ.get("TRIMCP_TRACE", "")
    return None if target in ("", "0") else trace_writer(target)


def trace_writer(target: str) -> Write:
    """Return a writer for a value of `TRIMCP_TRACE`: "1" or "stderr" is standard error, else a file to append to."""
    if target in ("1", "stderr"):
        return sys.stderr.write
    path = Path(target)

    def append(line: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    return append


@attrs.define(eq=False, repr=False)
class Tracer:
    """Writes a line about each message. The first failed write ends the trace, not the connection."""

    _write: Write | None
    _clock: Callable[[], float] = time.time

    def note(self, direction: str, *messages: Message | bytes) -> None:
        """Write a line for each message: "-->" for sent ones, "<--" for received ones. Never raises."""
        if self._write is None:
            return
        now = self._clock()
        try:
            for message in messages:
                self._write(format_message(direction, message, now))
        except Exception as exc:  # `write` is the user's function and may raise anything
            self._write = None
            _log.warning("the trace ends here, writing it failed: %s", exc)


@attrs.define(eq=False, repr=False)
class _Traced(WrappedChannel):
    _tracer: Tracer

    async def send(self, batch: Sequence[Outgoing]) -> None:
        # Trace before sending: the response must not appear above its request, and a message that is cut short must
        # appear.
        self._tracer.note("-->", *(message.data for message in batch))
        await super().send(batch)

    async def receive(self) -> Sequence[Incoming]:
        batch = await super().receive()
        self._tracer.note("<--", *(message.message for message in batch))
        return batch
