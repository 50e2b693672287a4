"""The tool history of a context: its latest calls, as text, with arguments masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from trimcp.cleaning import mask, shapes
from trimcp.wire.jsonrpc import Unencodable, encode, parse_value

HistoryArguments: TypeAlias = Literal["none", "shapes", "masked", "whole"]

LONGEST_ENTRY: Final = 2 * 1024
"""Bytes of one entry; a larger one loses its arguments."""

_OBJECT: Final = 40  # bytes of memory that an entry takes beside its text


class ToolHistory:
    """The latest calls, the oldest first. Kept as text, which takes a third of the memory of objects.

    Attributes:
        entries: one JSON object each.
        held: bytes of memory.
    """

    __slots__ = ("entries", "held")

    def __init__(self, entries: Sequence[bytes] = ()) -> None:
        self.entries: list[bytes] = list(entries)
        self.held: int = sum(map(len, entries)) + _OBJECT * len(entries)

    def add(self, entry: bytes, most: int, most_bytes: int) -> None:
        """Add an entry and drop the oldest beyond the bounds."""
        entries = self.entries
        entries.append(entry)
        held = self.held + len(entry) + _OBJECT
        while len(entries) > most or (held > most_bytes and len(entries) > 1):
            held -= len(entries.pop(0)) + _OBJECT
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
        data = encode(shown)
        if len(data) <= LONGEST_ENTRY:
            return data
    except Unencodable:
        pass
    shown.pop("arguments", None)
    return encode(shown)
