"""The protocol of Redis (RESP): commands to bytes, and bytes to replies. No I/O.

The parser is hiredis, which this bounds: it would make room for as many members as a reply announces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from trimcp.errors import LocalError
from trimcp.support.cleaning import one_line
from trimcp.wire.jsonrpc import parse_value

Part: TypeAlias = str | bytes | int
T = TypeVar("T")

# Values that are stored are JSON or lines of events, so no line of theirs looks like this.
_MANY: Final = re.compile(rb"\n[*%~>|][0-9]{7,}")
_HEAD: Final = 32  # bytes of one read that may belong to a number in the next
_MORE: Final = object()


class RedisRefusal(LocalError, OSError):
    """Redis answered a command with an error.

    Attributes:
        code: its first word, such as "OOM" or "NOPERM".
    """

    def __init__(self, text: str) -> None:
        super().__init__(f"Redis refused: {one_line(text)}")
        self.code: str = text.partition(" ")[0]


class NotOurs(OSError, ValueError):
    """A value was not written by this program, or by a newer one."""


def stored(text: bytes, kind: type[T]) -> T:
    """Return a value of this kind that was kept as JSON. Raises NotOurs: it was not."""
    value = parse_value(text)
    if not isinstance(value, kind):
        raise NotOurs("Redis has text that was not written so")
    return value


class GarbledReply(ValueError):
    """What came is no reply of Redis, or one beyond the bound."""


def load_hiredis() -> Any:
    """Return the module `hiredis`. Raises LocalError: it is not installed."""
    try:
        import hiredis
    except ModuleNotFoundError:
        raise LocalError("a store in Redis needs another package: pip install 'trimcp[redis]'") from None
    return hiredis


def packer() -> Callable[[tuple[Part, ...]], bytes]:
    """Return the function that makes a command's bytes of its parts."""
    pack: Callable[[tuple[Part, ...]], bytes] = load_hiredis().pack_command
    return pack


class RedisReplies:
    """Bytes of one connection to replies. A refusal is a reply, too: a `RedisRefusal`, which is not raised here."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._reader = load_hiredis().Reader(
            protocolError=GarbledReply, replyError=RedisRefusal, errors="replace", notEnoughData=_MORE
        )
        self._unfinished = 0  # bytes of a reply that is not whole yet
        self._tail = b"\n"

    def feed(self, data: bytes) -> list[Any]:
        """Return the replies that are whole now. Raises GarbledReply."""
        text = self._tail + data
        if _MANY.search(text):
            raise GarbledReply("a reply announces a million members")
        self._tail = text[-_HEAD:]
        reader, replies = self._reader, []
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _MORE:
                replies.append(reply)
        except (TypeError, OverflowError, MemoryError) as error:  # such as of a map whose key is a list
            raise GarbledReply("a reply has no form") from error
        self._unfinished = reader.len() if replies else self._unfinished + len(data)
        if self._unfinished > self._largest:
            raise GarbledReply(f"a reply has more than {self._largest:,} bytes")
        return replies
