"""What a context keeps of calls that are over: its tool history as text, and answers for requests that come again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import orjson

from trimcp.agent_tools.messages.answers import CallAnswer
from trimcp.support.cleaning import mask, shapes
from trimcp.wire.jsonrpc import Unencodable, encode, parse_value

HistoryArguments: TypeAlias = Literal["none", "shapes", "masked", "whole"]

LONGEST_ENTRY: Final = 2 * 1024
"""Bytes of one entry; a larger one loses its arguments."""

_dumps: Final[Callable[[Any], bytes]] = orjson.dumps

_OBJECT: Final = 40  # bytes of memory that an entry takes beside its text


class ToolHistory:
    """The latest calls, the oldest first. Kept as text, which takes a third of the memory of objects."""

    __slots__ = ("entries", "held")

    def __init__(self, entries: Sequence[bytes] = ()) -> None:
        self.entries: list[bytes] = list(entries)  # one JSON object each
        self.held: int = sum(map(len, entries)) + _OBJECT * len(entries)  # bytes of memory

    def add(self, entry: bytes, most: int, most_bytes: int) -> None:
        """Add an entry and drop the oldest beyond the bounds."""
        entries = self.entries
        entries.append(entry)
        held, count = self.held + len(entry) + _OBJECT, len(entries)
        while count > most or (held > most_bytes and count > 1):
            held -= len(entries.pop(0)) + _OBJECT
            count -= 1
        self.held = held

    def read(self) -> list[Any]:
        """Return the entries as JSON values."""
        return [parse_value(entry) for entry in self.entries]


def history_entry(entry: Mapping[str, Any], arguments: HistoryArguments) -> bytes:
    """Return an entry as text, its member `arguments` written by policy as those of an audit are."""
    given = entry.get("arguments")
    shown: dict[str, Any] = dict(entry)
    if arguments == "shapes" and isinstance(given, Mapping):
        shown["arguments"] = shapes(given)
    elif arguments == "none" or not isinstance(given, Mapping):
        shown.pop("arguments", None)
    elif arguments == "masked":
        shown["arguments"] = mask(given)
    try:
        # Shapes are texts. Copied, because orjson returns its whole buffer, in which a short text takes 1 KiB.
        data = b"%b" % _dumps(shown) if arguments == "shapes" else encode(shown)
        if len(data) <= LONGEST_ENTRY:
            return data
    except (Unencodable, TypeError):
        pass
    shown.pop("arguments", None)
    return encode(shown)


class GivenAnswers:
    """The latest answers."""

    __slots__ = ("by_id", "held")

    def __init__(self) -> None:
        # what was asked, in a form that compares, the answer, and their size, by `request_id`, the oldest first
        self.by_id: dict[str, tuple[bytes, CallAnswer, int]] = {}
        self.held: int = 0  # bytes of memory

    def add(self, request_id: str, asked: bytes, answer: CallAnswer, most: int) -> None:
        """Keep an answer, and forget the oldest beyond `most` bytes; one that is larger is not kept."""
        by_id, size = self.by_id, len(asked) + answer.size
        if size > most:
            return
        held = self.held + size
        while held > most:  # half of them, so that it is done now and then, and not with each call
            for id in list(islice(by_id, (len(by_id) + 1) // 2)):
                held -= by_id.pop(id)[2]
        by_id[request_id] = asked, answer, size
        self.held = held
