"""Who we are on a connection: what both eras tell the peer about us, and how much is kept of what the peer tells us."""

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
from trimcp.wire.revisions import REVISIONS, Revision

# Bytes of memory for a byte of text: of small objects in each other, in lists of which each may have grown, and of an
# ordinary introduction.
_WORST: Final = 64
_USUAL: Final = 4


class Role(Enum):
    """Which side of a connection an engine is. The laws are the same; only what may be asked differs."""

    CLIENT = "client"
    SERVER = "server"


def _all_revisions(profile: Profile, attribute: Any, revisions: tuple[Any, ...]) -> None:
    for each in revisions:
        if not isinstance(each, Revision):
            raise TypeError(f"revisions are members of trimcp.REVISIONS, not {each!r}")


@attrs.define(eq=False, repr=False)
class Profile:
    """Our own introduction, shared by all connections of one server or client and read at every handshake.

    Attributes:
        info: our name and version.
        capabilities: what we can do; replaced, never changed in place, when it grows.
        instructions: a server's advice to the model on how to use it, or None.
        revisions: the revisions we are willing to speak, oldest first.
        discover_ttl_ms: for how many milliseconds a client may keep what `server/discover` said.
        max_peer_info: bytes of memory that may be kept of what a peer tells of itself (its name, its capabilities, a
            server's instructions) as long as the connection or session lasts.
        legacy, modern: those of `revisions` that belong to either era, since every request asks.
        named: `info` as JSON text, by revision; filled as needed.
        heard: the last capabilities and the last name that a peer's envelope brought, raw and loaded, by their names
            there. Clients say the same with each request, and over HTTP each of those may be a connection of its own.
    """

    info: Implementation
    capabilities: ClientCapabilities | ServerCapabilities
    instructions: str | None = None
    revisions: tuple[Revision, ...] = attrs.field(default=REVISIONS, validator=_all_revisions)
    discover_ttl_ms: int = 0
    max_peer_info: int = 64 * 1024
    legacy: tuple[Revision, ...] = attrs.field(init=False, repr=False)
    modern: tuple[Revision, ...] = attrs.field(init=False, repr=False)
    named: dict[Revision, tuple[Implementation, orjson.Fragment]] = attrs.field(init=False, factory=dict, repr=False)
    heard: dict[str, tuple[Any, Any]] = attrs.field(init=False, factory=dict, repr=False)

    def __attrs_post_init__(self) -> None:
        self.legacy = tuple(r for r in self.revisions if not r.modern)
        self.modern = tuple(r for r in self.revisions if r.modern)

    def weigh_client(self, what: str, *values: Any) -> int:
        """Return how many bytes of memory these values take that are going to be kept of a client.

        Args:
            what: the names of the members, for the client.
            values: those members, as they came.

        Raises:
            ErrorReply: it is more than `max_peer_info` (-32602).
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
        """Return how many bytes of memory these values take that are going to be kept of a server.

        Raises:
            InvalidReply: it is more than `max_peer_info`.
        """
        size = memory_of(self.max_peer_info, *values)
        if size > self.max_peer_info:
            raise InvalidReply(
                f"name, capabilities and instructions of the server take more than the {self.max_peer_info} bytes of "
                "memory that are kept of a server here (max_server_info)"
            )
        return size


def memory_of(most: int, *values: Any) -> int:
    """Return about how many bytes of memory JSON values take; stops counting where they are more than `most`.

    Memory is counted and not text: an empty array is three bytes of text and sixty here, and one letter of another
    alphabet makes a long text take twice or four times as much. Most values are judged by the length of their text.
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
