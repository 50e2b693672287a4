"""What we send about ourselves on a connection, in both eras, and bounds on what is kept of the peer's data."""

from __future__ import annotations

from enum import Enum
from sys import getsizeof
from typing import Any, Final

import attrs
import orjson

from trimcp.errors import ErrorReply, InvalidReply
from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.common import Implementation
from trimcp.wire.revisions import REVISIONS, Revision, revisions_of

# Bytes of memory per byte of text: for nested small objects, for lists of them that may have over-allocated, and for a
# typical client.
_WORST: Final = 64
_USUAL: Final = 4


class Role(Enum):
    """Which side of a connection an engine is. The rules are the same; only the allowed methods differ."""

    CLIENT = "client"
    SERVER = "server"


@attrs.define(eq=False, repr=False)
class Profile:
    """What we send about ourselves, shared by all connections of one server or client and read at every handshake."""

    info: Implementation  # our name and version
    # what we declare; replaced, never changed in place, when it grows
    capabilities: ClientCapabilities | ServerCapabilities
    instructions: str | None = None  # a server's advice to the model, or None
    # the revisions that we support, oldest first
    revisions: tuple[Revision, ...] = attrs.field(default=REVISIONS, converter=revisions_of)
    discover_ttl_ms: int = 0  # for how many milliseconds a client may cache the answer to `server/discover`
    # bytes of memory allowed for the data of a peer (its name, its capabilities, a server's instructions), which is
    # kept as long as the connection or session lasts
    max_peer_info: int = 64 * 1024
    # `legacy`, `modern`: the `revisions` of each era, computed once because every request needs them
    legacy: tuple[Revision, ...] = attrs.field(init=False, repr=False)
    modern: tuple[Revision, ...] = attrs.field(init=False, repr=False)
    # `info` as JSON text, by a revision's name; filled at first use
    named: dict[str, tuple[Implementation, orjson.Fragment]] = attrs.field(init=False, factory=dict, repr=False)
    # the last capabilities and the last name in a peer's envelope, raw and loaded, by member name. Clients send the
    # same with each request, and over HTTP each of those may be a connection of its own.
    heard: dict[str, tuple[Any, Any]] = attrs.field(init=False, factory=dict, repr=False)
    # what followed from the last envelope that had nothing else in it, an `Admission`; None before
    admitted: Any = attrs.field(init=False, default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        self.legacy = tuple(r for r in self.revisions if not r.modern)
        self.modern = tuple(r for r in self.revisions if r.modern)

    def weigh_client(self, what: str, *values: Any) -> int:
        """Return the bytes of memory that these values of a client will take.

        Raises ErrorReply: it is more than `max_peer_info` (-32602).
        """
        most = self.max_peer_info
        size = memory_of(most, *values)
        if size > most:
            from trimcp.security import security_event

            security_event("oversize", what=what, most=most)
            text = f"{what} take more than the {most} bytes of memory that are kept of a client here"
            raise ErrorReply(INVALID_PARAMS, text, {"reason": "size", "most": most})
        return size

    def weigh_server(self, *values: Any) -> int:
        """Return the bytes of memory that these values of a server will take.

        Raises InvalidReply: it is more than `max_peer_info`.
        """
        size = memory_of(self.max_peer_info, *values)
        if size > self.max_peer_info:
            raise InvalidReply(
                f"name, capabilities and instructions of the server take more than the {self.max_peer_info} bytes of "
                "memory that are kept of a server here (max_server_info)"
            )
        return size


def memory_of(most: int, *values: Any) -> int:
    """Return approximately how many bytes of memory JSON values take; stops counting beyond `most`.

    Memory differs from text: an empty array is three bytes of text and sixty of memory, and one non-Latin letter makes
    a long text two or four times as large. Most values are estimated from the length of their text.
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
