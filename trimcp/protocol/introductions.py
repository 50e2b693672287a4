"""Bounds how much is kept of what a peer says of itself: its name, its capabilities, a server's instructions.

It is kept as long as the connection or session, so it has bounds of its own (`Limits.max_client_info`,
`Limits.max_server_info`). They count memory, not text: an empty array is three bytes of text and sixty here, and one
letter of another alphabet makes a long text take twice or four times as much.
"""

from __future__ import annotations

from sys import getsizeof
from typing import Any, Final

import orjson

from trimcp.errors import ErrorReply, InvalidReply
from trimcp.wire.codes import INVALID_PARAMS

__all__ = ["memory_of", "weigh_client", "weigh_server"]

# Bytes of memory for a byte of text: of small objects in each other, in lists of which each may have grown, and of an
# ordinary introduction.
_WORST: Final = 64
_USUAL: Final = 4


def memory_of(most: int, *values: Any) -> int:
    """Return about how many bytes of memory JSON values take together; stops counting where they are more than `most`.

    Few look at more than the length of the text.
    """
    text = len(orjson.dumps(values))
    if text * _WORST <= most:
        return text * _USUAL
    total = 0
    rest: list[Any] = list(values)
    while rest:
        value = rest.pop()
        total += getsizeof(value)
        if total > most:
            break
        if type(value) is dict:
            rest += value
            rest += value.values()
        elif type(value) is list:
            rest += value
    return total


def weigh_client(most: int, what: str, *values: Any) -> int:
    """Return what is going to be kept of a client, in bytes of memory.

    Args:
        most: bytes that may be kept.
        what: the names of the members, for the client.
        values: those members, as they came.

    Raises:
        ErrorReply: it is more (-32602).
    """
    size = memory_of(most, *values)
    if size > most:
        from trimcp.security import security_event

        security_event("oversize", what=what, most=most)
        text = f"{what} take more than the {most} bytes of memory that are kept of a client here"
        raise ErrorReply(INVALID_PARAMS, text, {"reason": "size", "most": most})
    return size


def weigh_server(most: int, *values: Any) -> int:
    """Return what is going to be kept of a server, in bytes of memory.

    Raises:
        InvalidReply: it is more than `most`.
    """
    size = memory_of(most, *values)
    if size > most:
        raise InvalidReply(
            f"name, capabilities and instructions of the server take more than the {most} bytes of memory that are "
            "kept of a server here (max_server_info)"
        )
    return size
