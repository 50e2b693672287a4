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

_STEP: Final = 4 * 1024  # bytes by which the memory for answers is counted

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
    if arguments == "none" or not isinstance(given, Mapping):
        shown.pop("arguments", None)
    elif arguments == "shapes":
        shown["arguments"] = shapes(given)
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

    __slots__ = ("_held", "by_id", "counted")

    def __init__(self) -> None:
        # what was asked, in a form that compares, and the answer, by `request_id`, the oldest first
        self.by_id: dict[str, tuple[bytes, CallAnswer]] = {}
        self.counted: int = 0  # bytes of memory, in steps
        self._held: int = 0

    def add(self, request_id: str, asked: bytes, answer: CallAnswer, most: int) -> int:
        """Keep an answer, and forget the oldest beyond `most` bytes; one that is larger is not kept.

        Return by how many bytes the memory that is counted grows.
        """
        held, counted = self._held + len(asked) + answer.size, self.counted
        if held > counted:
            held = self._make_room(held - self._held, most)
            if not held:
                return 0
        self.by_id[request_id] = asked, answer
        self._held = held
        return self.counted - counted

    def _make_room(self, size: int, most: int) -> int:
        """Return how much is held with one of this size, after counting more, or forgetting half; 0 if too much.

        Both are done now and then, and not with each call.
        """
        by_id = self.by_id
        if size > most:
            return 0
        while self._held + size > most:
            for id in list(islice(by_id, (len(by_id) + 1) // 2)):
                asked, answer = by_id.pop(id)
                self._held -= len(asked) + answer.size
        held = self._held + size
        self.counted = max(self.counted, min(most, held + _STEP))
        return held
